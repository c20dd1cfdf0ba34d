"""The commit machine in real engines: an update that fails costs its box alone, and every safety rule is asked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
from torch import Tensor

from elaswave_fx import _native
from elaswave_fx.errors import CommError, ExecError
from tests.native.ranks import Ranks
from tests.native.test_engine_replicas import kept, kill, left_after_voting, stale, with_holders
from tests.native.tiny import (
    ALONE,
    TILINGS,
    Box,
    Model,
    make_engine,
    program,
    take_step,
    train,
    update,
)
from tools.sim.bugs import BUGS

PAIR = TILINGS["data parallel"]
BOXES = with_holders(PAIR)
FAILING = (2, 3)
"""The boxes of three elements, both of bucket bias0; rank 1 holds the first and owns the second."""


def failing_update(model: Model) -> Model:
    """The model with an update that reads the tenth element of a box: it fails on a smaller one, and gives others the
    same bits."""

    def failing(master: Tensor, grad: Tensor, momentum: Tensor, scale: Tensor, lr: Tensor) -> tuple[Tensor, Tensor]:
        master, momentum = update(master, grad, momentum, scale, lr)
        return master, momentum + 0.0 * master[9]

    s, one = torch.ones(12), torch.ones(())
    return replace(model, programs={**model.programs, "update": program(failing, s, s, s, one, one)})


def digests(engine: _native.Engine) -> dict[int, int]:
    return {number: digest for number, (digest, _) in kept(engine).items()}


def test_an_update_that_fails_costs_its_box_alone(model: Model, started: Callable[..., Ranks]) -> None:
    """On rank 1, in the midst of a step: it says so, has all other boxes of the new version, and no half of the failing
    ones; rank 0 holds or owns them and has them updated."""
    assert [BOXES[number].bucket for number in FAILING] == ["bias0", "bias0"]

    def whole(rank: int, endpoint: Any, _: Connection) -> Any:
        engine = make_engine(model, PAIR, rank, endpoint, boxes=BOXES)
        train(engine, PAIR[rank], 1)
        return digests(engine)

    def body(rank: int, endpoint: Any, _: Connection) -> Any:
        engine = make_engine(failing_update(model) if rank == 1 else model, PAIR, rank, endpoint, boxes=BOXES)
        try:
            train(engine, PAIR[rank], 1)
            error = ""
        except (ExecError, CommError) as caught:
            error = f"{type(caught).__name__}: {caught}"
        held = engine.holdings()
        assert bool(engine.rules_consulted["failed_update_drops_state"]) == (rank == 1)
        return error, held.version, held.pending, digests(engine), held.syncing, stale(engine)

    expected = started(2, whole).results()
    first, second = started(2, body).results()
    assert first[1:5] == (1, False, expected[0], [])
    assert first[0] == "" or first[0].startswith("Aborted")
    assert second[0].startswith(
        "ExecError: box 3 (bucket bias0 [3, 6)): its update failed on rank 1, which drops its state"
    )
    left = {number: digest for number, digest in expected[1].items() if number not in FAILING}
    assert second[1:5] == (1, False, left, list(FAILING))
    assert "bias0" in second[5]


def test_a_step_is_finished_without_the_box_whose_update_fails(model: Model, started: Callable[..., Ranks]) -> None:
    """With the votes of all, after rank 2 died: rank 0, the owner, raises what failed and reports the box no more; rank
    1, its holder, has the new version."""
    tiling = TILINGS["deep pipeline"]
    boxes = [Box("tied", 0, 36, 0, (1,)), Box("bias0", 0, 6, 0, (1,)), Box("unit1", 0, 42, 1, (0,))]

    def whole(rank: int, endpoint: Any, _: Connection) -> Any:
        engine = make_engine(model, tiling, rank, endpoint, boxes=boxes)
        votes = train(engine, tiling[rank], 1)[0].votes
        return votes, digests(engine)

    def left(rank: int, endpoint: Any, _: Connection) -> Any:
        engine = make_engine(failing_update(model) if rank == 0 else model, tiling, rank, endpoint, boxes=boxes)
        with pytest.raises(CommError):
            take_step(engine, tiling[rank], 0, fault=kill() if rank == 2 else None)
        if not engine.holdings().pending:
            return None
        error = ""
        try:
            engine.finish(votes)
        except ExecError as caught:
            error = str(caught)
        held = engine.holdings()
        assert held.last_committed is not None and held.last_committed.step == 0
        return error, held.version, held.pending, digests(engine), held.syncing, stale(engine)

    expected = started(3, whole).results()
    votes = expected[0][0]
    first, second = left_after_voting(started, left)
    place = "box 1 (bucket bias0 [0, 6)): its update failed on rank 0, which drops its state: program update"
    assert first[0].startswith(place)
    rest = {number: digest for number, digest in expected[0][1].items() if number != 1}
    assert first[1:5] == (1, False, rest, [1])
    assert first[5] == ["bias0"]
    assert second[:5] == ("", 1, False, expected[1][1], [])


def test_a_step_asks_every_rule(model: Model, started: Callable[..., Ranks]) -> None:
    """Each rule that the simulator can take away is one that a real step asks, that of frames on the links. The rule of
    updates is asked when one fails, as above, that of synced replicas when a state comes, that of old parameters when
    an epoch begins.
    """
    planted = {rule for rules in BUGS.values() for rule in rules.without}

    def body(rank: int, endpoint: Any, _: Connection) -> Any:
        engine = make_engine(model, PAIR, rank, endpoint, boxes=BOXES)

        def consulted() -> dict[str, int]:
            return {**engine.rules_consulted, "older_frames_are_dropped": endpoint.older_frames_rule_consulted}

        before = consulted()
        train(engine, PAIR[rank], 1)
        return before, consulted()

    for before, after in started(2, body).results():
        asked = {name for name in after if after[name] > before[name]}
        assert asked == planted - {"failed_update_drops_state", "replica_in_sync", "old_parameters_are_stale"}
        assert planted == set(after)


def test_what_the_machine_refuses(model: Model) -> None:
    engine = make_engine(model, ALONE, 0)
    with pytest.raises(ExecError, match="finish while its step is between steps; it comes when it is pending"):
        engine.finish({})
    with pytest.raises(ExecError, match="box 1: rank 0 does not hold it"):
        engine.replicate([(1, 1, 0)])
