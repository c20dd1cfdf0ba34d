"""Units that are waited for instead of computed: what the engine makes up for them, and what stays real."""

from __future__ import annotations

import math
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
from torch import Tensor

from elaswave_fx import _native
from elaswave_fx.control.store.ledger import Payload
from elaswave_fx.errors import ExecError
from tests.native.ranks import Ranks
from tests.native.tiny import (
    ALONE,
    BATCH,
    BUFFERS,
    TEST_TIMEOUT_S,
    TILINGS,
    Model,
    Tile,
    Tiling,
    initial,
    joined,
    make_engine,
    owned,
    running_statistics,
    take_step,
    tile_inputs,
    train,
)

COSTS = {0: (1e-4, 2e-4, 1e-3), 1: (2e-4, 4e-4, 0.0), 2: (0.0, 1e-4, 5e-4)}
"""Unit -> seconds per sample forward and backward, and per call."""
SHARE = 0.4
"""Of weights in backward."""


def emulated_engine(
    model: Model, tiling: Tiling, rank: int, endpoint: Any = None, scale: float = 1.0, split: bool = False
) -> _native.Engine:
    """The engine of the tiny model whose units have modelled durations."""
    return make_engine(model, tiling, rank, endpoint, modelled=modelled(scale), split=split)


def modelled(scale: float) -> Callable[[int], tuple[float, ...]]:
    """Durations by unit."""
    return lambda unit: (*(scale * seconds for seconds in COSTS[unit]), SHARE)


def modelled_s(tiling: Tiling, rank: int) -> float:
    """What the kernels of a rank's step add up to."""
    return math.fsum(
        2 * fixed + (forward + backward) * (hi - lo)
        for lo, hi in tiling[rank].micro_batches
        for forward, backward, fixed in (COSTS[unit] for unit in range(*tiling[rank].units))
    )


def kernels(tiling: Tiling, rank: int) -> int:
    return 2 * len(tiling[rank].micro_batches) * len(range(*tiling[rank].units))


def assert_untouched(found: dict[str, Tensor]) -> None:
    """No gradient came from anywhere: the update leaves the parameters as they were."""
    for name, tensor in initial().items():
        assert torch.equal(found[name], tensor)


def test_a_vote_says_how_long_units_took(model: Model) -> None:
    """Modelled durations are known exactly, and are longer on a slow rank; what is computed is measured."""
    tiling, inputs = ALONE, tile_inputs(ALONE[0], 0)
    for slowdown in (1.0, 3.0):
        options = _native.StepOptions(TEST_TIMEOUT_S, slowdown=slowdown)
        votes = emulated_engine(model, tiling, 0).step(0, inputs, [[0.1]], options).votes
        assert Payload.unpack(votes[0]).busy_s == pytest.approx(slowdown * modelled_s(tiling, 0))
    engine, shares = make_engine(model, tiling, 0, None), []
    for step in range(20):
        result = engine.step(step, inputs, [[0.1]], _native.StepOptions(TEST_TIMEOUT_S))
        units = [result.timings[name] for name in ("FORWARD", "BACKWARD")]
        took_s = math.fsum(each.seconds - each.wait_seconds for each in units)
        shares.append(Payload.unpack(result.votes[0]).busy_s / took_s)
    assert max(shares) == pytest.approx(1.0, rel=0.2)  # Less where others have the processor for a while.


@pytest.mark.parametrize("name", ["pipeline", "data parallel", "rows of other widths", "columns of other cuts"])
def test_any_tiling_takes_its_modelled_time(model: Model, name: str, started: Callable[..., Ranks]) -> None:
    tiling = TILINGS[name]

    def body(rank: int, endpoint: Any, _: Connection) -> Any:
        engine = emulated_engine(model, tiling, rank, endpoint)
        return train(engine, tiling[rank], 3), owned(engine, tiling, rank)

    results = started(len(tiling), body).results()
    for rank, (taken, _) in enumerate(results):
        for result in taken:
            assert (result.loss, result.count, result.grad_norm) == (BATCH, BATCH, 0.0)
            assert result.updated
            count, modelled, _ = result.emulated
            assert count == kernels(tiling, rank)
            assert modelled == pytest.approx(modelled_s(tiling, rank), rel=1e-9)
            assert result.pipeline_s > modelled - 1e-7  # kernels do not overlap
    assert_untouched(joined([masters for _, masters in results]))


def test_halves_take_the_time_of_the_whole(model: Model) -> None:
    whole, halves = (train(emulated_engine(model, ALONE, 0, split=split), ALONE[0], 1)[0] for split in (False, True))
    assert (whole.emulated[0], halves.emulated[0]) == (6, 9)
    assert halves.emulated[1] == pytest.approx(whole.emulated[1], rel=1e-9)


def test_modelled_time_grows_with_the_costs(model: Model) -> None:
    taken = [train(emulated_engine(model, ALONE, 0, scale=scale), ALONE[0], 1)[0] for scale in (1.0, 3.0)]
    short, long = (result.emulated for result in taken)
    assert long[1] == pytest.approx(3 * short[1])
    assert long[0] == short[0]


def test_what_is_computed_is_not_emulated(model: Model) -> None:
    result = train(make_engine(model, ALONE, 0), ALONE[0], 1)[0]
    assert result.emulated == (0, 0.0, 0.0)
    assert result.pipeline_s > 0


def test_evaluation_waits_too(model: Model, started: Callable[..., Ranks]) -> None:
    tiling = TILINGS["pipeline"]

    def body(rank: int, endpoint: Any, _: Connection) -> Any:
        engine = emulated_engine(model, tiling, rank, endpoint)
        result = engine.evaluate(0, tile_inputs(tiling[rank], 0), TEST_TIMEOUT_S)
        return result.loss, result.count

    assert started(2, body).results() == [(BATCH, BATCH)] * 2


def test_buffer_updates_get_zeros_of_every_granule(model: Model) -> None:
    tiling: Tiling = {0: Tile((0, 3), ((0, 4), (4, 8)))}
    changing = running_statistics()
    engine = make_engine(model, tiling, 0, granule=4, changing=changing, modelled=modelled(1.0))
    take_step(engine, tiling[0], 0, clip=None)
    found = changing.of(engine.read(BUFFERS))
    assert (found["mean"].max(), found["number"], found["granules"]) == (0.0, 4.0, 2)


@pytest.mark.parametrize("seconds", [-1e-3, math.inf, math.nan])
def test_durations_that_are_none(model: Model, seconds: float) -> None:
    with pytest.raises(ExecError, match=r"unit 0: a modelled duration of .* durations are finite and not negative"):
        make_engine(model, ALONE, 0, modelled=lambda unit: (1e-3, seconds, 0.0, SHARE))


@pytest.mark.parametrize("share", [-0.1, 1.1, math.nan])
def test_shares_that_are_none(model: Model, share: float) -> None:
    with pytest.raises(ExecError, match=r"unit 0: a share of .*; shares are from 0 to 1"):
        make_engine(model, ALONE, 0, modelled=lambda unit: (1e-3, 1e-3, 0.0, share))
