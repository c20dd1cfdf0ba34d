"""What an engine refuses, and what it is left with after a peer died, a deadline passed, or a unit failed."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
from torch import Tensor

from elaswave_fx import _native
from elaswave_fx.errors import CommError, DeadlineExceeded, ExecError, PeerLost
from tests.native.ranks import Ranks
from tests.native.tiny import (
    ALONE,
    BATCH,
    BUCKETS,
    LR,
    SEED,
    TEST_TIMEOUT_S,
    TILINGS,
    WIDTH,
    Box,
    Model,
    Tile,
    batch,
    bindings,
    even_boxes,
    make_engine,
    owned,
    reference,
    tile_inputs,
    train,
    train_list,
)

Change = Callable[[list[tuple[Any, ...]]], list[tuple[Any, ...]]]


def snapshot(engine: Any, boxes: Sequence[Box]) -> dict[str, Tensor]:
    """All that a rank keeps, boxes that it holds included."""
    held = {}
    for number, box in enumerate(boxes):
        base = engine.base(number)
        if base is not None:
            held |= {f"{box.bucket} {box.lo} {i}": tensor.clone() for i, tensor in enumerate([base[0], *base[1]])}
    for name in BUCKETS:
        if engine.bucket_work(name) is not None:
            held[f"{name}.work"] = engine.bucket_work(name).clone()
    return held


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(tensor, other[name]) for name, tensor in one.items())


@pytest.mark.parametrize("name", ["pipeline", "data parallel"])
def test_a_peer_that_dies_leaves_the_last_committed_state(
    model: Model, name: str, started: Callable[..., Ranks]
) -> None:
    """Rank 1 dies after two steps; rank 0 notices within the third, keeps its state, and goes on alone from it."""
    tiling = TILINGS[name]

    def body(rank: int, endpoint: Any, pipe: Connection) -> Any:
        engine = make_engine(model, tiling, rank, endpoint)
        train(engine, tiling[rank], 2)
        engine.sync(TEST_TIMEOUT_S)
        if rank == 1:
            pipe.recv()  # both have synced
            os.kill(os.getpid(), signal.SIGKILL)
        before = snapshot(engine, even_boxes(tiling))
        pipe.send("synced")
        with pytest.raises(PeerLost) as caught:
            engine.step(2, tile_inputs(tiling[rank], 2), [[LR]], 0.5, TEST_TIMEOUT_S)
        return (
            caught.value.rank,
            same(before, snapshot(engine, even_boxes(tiling))),
            engine.version,
            engine.last_committed["step"],
        )

    ranks = started(2, body)
    assert ranks.pipes[0].recv() == "synced"
    ranks.pipes[1].send("die")
    assert ranks.results([0]) == [(1, True, 2, 1)]


def test_a_step_that_was_given_up_can_be_run_again(model: Model, started: Callable[..., Ranks]) -> None:
    """Rank 1 misses a deadline of rank 0; both move to a new generation and do the step again: nothing was lost."""
    tiling = TILINGS["pipeline"]

    def body(rank: int, endpoint: Any, pipe: Connection) -> Any:
        engine = make_engine(model, tiling, rank, endpoint)
        taken = train(engine, tiling[rank], 1)
        if rank == 0:
            begin = time.monotonic()
            with pytest.raises(DeadlineExceeded):
                engine.step(1, tile_inputs(tiling[rank], 1), [[LR]], 0.5, 0.3)
            assert time.monotonic() - begin < TEST_TIMEOUT_S / 2
            assert engine.version == 1
        pipe.send("given up")
        pipe.recv()
        endpoint.advance(1)
        pipe.send("advanced")
        pipe.recv()
        taken += [engine.step(step, tile_inputs(tiling[rank], step), [[LR]], 0.5, TEST_TIMEOUT_S) for step in (1, 2)]
        return [r["loss"] for r in taken], engine.stale_buckets

    ranks = started(2, body)
    for _ in range(2):
        for pipe in ranks.pipes:
            pipe.recv()
        for pipe in ranks.pipes:
            pipe.send("go")
    for losses, stale in ranks.results():
        assert losses == pytest.approx(reference(3).losses, rel=1e-5)
        assert stale == []


def test_a_peer_that_dies_after_the_commit(model: Model, started: Callable[..., Ranks]) -> None:
    """Rank 1 commits a step but never sends its part of the working copies, then dies: rank 0 has the step's state, and
    lists what it could not gather."""
    tiling = TILINGS["data parallel"]

    def body(rank: int, endpoint: Any, pipe: Connection) -> Any:
        engine = make_engine(model, tiling, rank, endpoint)
        if rank == 1:
            silent = [step for step in train_list(tiling, 1) if step[0] != "GATHER"]
            engine.set_schedule(silent, [], list(tiling[1].micro_batches), 5)
        result = engine.step(0, tile_inputs(tiling[rank], 0), [[LR]], 0.5, TEST_TIMEOUT_S)
        masters = {name: tensor.clone() for name, tensor in owned(engine, tiling, rank).items()}
        if rank == 1:
            pipe.send(result["version"])
            pipe.recv()
            os.kill(os.getpid(), signal.SIGKILL)
        pipe.send(result["version"])
        with pytest.raises(PeerLost):
            engine.sync(TEST_TIMEOUT_S)
        endpoint.advance(1)
        kept = same(masters, owned(engine, tiling, rank))
        with pytest.raises(PeerLost):
            engine.evaluate(0, tile_inputs(tiling[rank], 0), TEST_TIMEOUT_S)
        engine.set_world([0])
        endpoint.advance(2)
        with pytest.raises(ExecError, match="its working copy is stale"):
            engine.evaluate(0, tile_inputs(tiling[rank], 0), TEST_TIMEOUT_S)
        return kept, engine.stale_buckets, engine.version

    ranks = started(2, body)
    assert [pipe.recv() for pipe in ranks.pipes] == [1, 1]
    ranks.pipes[1].send("die")
    assert ranks.results([0]) == [(True, list(BUCKETS), 1)]


def test_a_failing_unit_leaves_the_engine_as_it_was(model: Model) -> None:
    engine = make_engine(model, ALONE, 0)
    train(engine, ALONE[0], 1)
    before = snapshot(engine, even_boxes(ALONE))
    wrong = batch(1) | {"y": torch.randn(BATCH, WIDTH + 1)}
    with pytest.raises(ExecError, match=r"program 2\.forward, instruction \d+ \(aten::sub\.Tensor\): The size of"):
        engine.step(1, wrong, [[LR]], 0.5, TEST_TIMEOUT_S)
    assert same(before, snapshot(engine, even_boxes(ALONE)))
    result = engine.step(1, batch(1), [[LR]], 0.5, TEST_TIMEOUT_S)
    assert result["loss"] == pytest.approx(reference(2).losses[1], rel=1e-5)


@pytest.mark.parametrize(
    ("inputs", "hyper", "message"),
    [
        ({"x": torch.zeros(BATCH, WIDTH)}, [[LR]], "input y: a unit of this rank reads it, but it was not given"),
        (batch(0) | {"x": torch.zeros(3, WIDTH)}, [[LR]], "input x: holds 3 samples, the tile has 8"),
        (batch(0), [[]], "bucket tied: hyper group 0 gives 1 values (grad_scale included), program update reads 2"),
        (batch(0), [], "bucket tied: hyper group 0 gives 0 values"),
    ],
)
def test_steps_with_wrong_arguments(model: Model, inputs: Any, hyper: Any, message: str) -> None:
    engine = make_engine(model, ALONE, 0)
    with pytest.raises(ExecError, match=re.escape(message)):
        engine.step(0, inputs, hyper, None, TEST_TIMEOUT_S)


def test_a_deadline_that_has_passed(model: Model) -> None:
    engine = make_engine(model, ALONE, 0)
    with pytest.raises(DeadlineExceeded, match=r"rank 0: the deadline of 0\.0+ s passed before FORWARD"):
        engine.step(0, batch(0), [[LR]], None, 0.0)
    assert engine.version == 0


def without(op: str, index: int | None = None) -> Change:
    return lambda steps: [s for s in steps if s[0] != op or (index is not None and s[1] != index)]


def after(op: str, extra: tuple[Any, ...]) -> Change:
    return lambda steps: [part for s in steps for part in ([s, extra] if s[0] == op else [s])]


def replaced(old: tuple[Any, ...], new: tuple[Any, ...]) -> Change:
    return lambda steps: [new if s == old else s for s in steps]


def moved(step: tuple[Any, ...], before: tuple[Any, ...]) -> Change:
    return lambda steps: [part for s in steps if s != step for part in ([step, s] if s == before else [s])]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without("VOTE"), "comes before VOTE, which decides whether there is an update"),
        (without("FORWARD", 0), "(FORWARD): reads value h of micro-batch 0, which is neither produced nor received"),
        (without("REDUCE", 1), "(UPDATE): updates bucket 1, which was not reduced"),
        (after("VOTE", ("VOTE",)), "(VOTE): a step has one VOTE"),
        (after("VOTE", ("REDUCE", 0)), "(REDUCE): comes after VOTE"),
        (after("VOTE", ("FOLD",)), "(FOLD): comes after VOTE"),
        (after("FOLD", ("REDUCE", 0)), "reduces bucket 0 twice"),
        (after("FOLD", ("REDUCE", 3)), "there is no bucket 3"),
        (after("FOLD", ("BACKWARD", 0, 0)), "(BACKWARD): runs a second time"),
        (replaced(("FORWARD", 0, 0), ("FORWARD", 0, 1)), "instruction 0 (FORWARD): there is no micro-batch 1"),
        (replaced(("FORWARD", 0, 0), ("FORWARD", 3, 0)), "unit 3 was not declared on this rank"),
        (lambda steps: [("BACKWARD", 2, 0), *steps], "instruction 0 (BACKWARD): has no FORWARD before it"),
        (lambda steps: [("REDUCE", 0), *steps], "adds to bucket 0, which was reduced before"),
        (moved(("BACKWARD", 0, 0), ("BACKWARD", 1, 0)),
         "(BACKWARD): adds to the gradient of value h of micro-batch 0, which was read before"),
        (lambda steps: [("RECV", 0, 0, 1, 0, 0, 9, 0), *steps], "samples [0, 9) of a micro-batch of 8"),
        (lambda steps: [("RECV", 2, 0, 1, 0, 0, 9, 0), *steps], "there is no value 2"),
        (lambda steps: [*steps, ("RECV", 0, 0, 1, 0, 0, 8, 0)], "is received after this rank's own part of it"),
        (lambda steps: [("NEXT",), *steps], "unknown instruction NEXT"),
        (lambda steps: [("VOTE", 1), *steps], "VOTE takes 0 operands, not 1"),
    ],
)  # fmt: skip
def test_step_lists_that_cannot_run(model: Model, change: Change, message: str) -> None:
    engine = make_engine(model, ALONE, 0)
    steps = change(train_list(ALONE, 0))
    with pytest.raises(ExecError, match=re.escape(message)):
        engine.set_schedule(steps, [], [(0, 8)], 0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: [(*s[:5], s[5] + 1, *s[6:]) if s[:3] == ("RECV", 0, 1) and s[7] == 0 else s],
         "received pieces of value h of micro-batch 1 cover 3 of 4 samples"),
        (lambda s: [s, (*s[:4], 9, *s[5:])] if s[:3] == ("RECV", 0, 1) else [s],
         "received pieces of value h of micro-batch 1 cover 8 of 4 samples"),
        (lambda s: [] if s[:3] == ("RECV", 0, 0) else [s], "reads value h of micro-batch 0, which is neither produced"),
        (lambda s: [s, ("RECV", 1, 0, 0, 9, 0, 4, 1)] if s[0] == "SNAPSHOT" else [s],
         "the gradient of value g of micro-batch 0 is received after this rank's own part of it"),
    ],
)  # fmt: skip
def test_receives_that_do_not_cover(model: Model, change: Callable[..., Any], message: str) -> None:
    tiling = TILINGS["pipeline"]
    engine = make_engine(model, tiling, 1)
    steps = [part for step in train_list(tiling, 1) for part in change(step)]
    with pytest.raises(ExecError, match=re.escape(message)):
        engine.set_schedule(steps, [], list(tiling[1].micro_batches), 0)


def test_evaluation_lists_have_no_backward(model: Model) -> None:
    engine = make_engine(model, ALONE, 0)
    with pytest.raises(ExecError, match="eval list, instruction 0 .VOTE.: evaluation only receives, sends and runs"):
        engine.set_schedule(train_list(ALONE, 0), [("VOTE",)], [(0, 8)], 0)


def test_declarations_come_before_the_schedule(model: Model) -> None:
    engine = make_engine(model, ALONE, 0)
    engine.add_value("later", 0, torch.float32, [1], False)
    with pytest.raises(ExecError, match="set_schedule comes after the declarations and before steps"):
        engine.step(0, batch(0), [[LR]], None, TEST_TIMEOUT_S)


def test_transfers_need_an_endpoint(model: Model) -> None:
    tiling = TILINGS["pipeline"]
    engine = make_engine(model, tiling, 1)
    with pytest.raises(ExecError, match="a transfer with rank 0, but the engine was made without an endpoint"):
        engine.step(0, tile_inputs(tiling[1], 0), [[LR]], None, TEST_TIMEOUT_S)


def bucket(**changes: Any) -> dict[str, Any]:
    return {
        "name": "w", "numel": 4, "group": [0], "dtype": "float32", "optimizer_program": 0, "hyper_group": 0,
        "work": torch.zeros(4),
    } | changes  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"work": torch.zeros(3)}, "bucket w: work must be a contiguous tensor of 4 elements"),
        ({"work": None}, "bucket w: work must be a contiguous tensor of 4 elements"),
        ({"work": torch.zeros(4).bfloat16()}, "bucket w: the working copy is of another dtype than the bucket"),
        ({"group": [1]}, "bucket w: rank 0 is not in its group and has no use for a working copy"),
        ({"group": [1, 0]}, "bucket w: the group's ranks must ascend"),
        ({"optimizer_program": 7}, "bucket w: there is no program 7"),
    ],
)
def test_buckets_that_do_not_fit(changes: dict[str, Any], message: str) -> None:
    engine = _native.Engine(0, None, SEED, BATCH)
    update = {
        "name": "u", "num_inputs": 3, "num_slots": 4, "outputs": [3],
        "instructions": [{"op": "aten::mul", "overload": "Tensor", "args": [["slot", 1], ["slot", 2]], "outs": [3]}],
    }  # fmt: skip
    assert engine.add_program("update", update) == 0
    assert engine.add_bucket(**bucket()) == 0
    with pytest.raises(ExecError, match=re.escape(message)):
        engine.add_bucket(**bucket(**changes))


def test_boxes_that_do_not_fit(model: Model) -> None:
    engine = _native.Engine(0, None, SEED, BATCH)
    update = engine.add_program("update", model.programs["update"])
    for name, (numel, _) in BUCKETS.items():
        engine.add_bucket(
            name=name, numel=numel, group=[0], dtype="float32", optimizer_program=update, hyper_group=0,
            work=torch.zeros(numel),
        )  # fmt: skip
    box = {"bucket": 0, "lo": 0, "hi": 20, "owner": 0, "holders": []}
    with pytest.raises(ExecError, match=re.escape("boxes must cut [0, 36) in order; [4, 20) comes after 0")):
        engine.add_box(**box | {"lo": 4})
    with pytest.raises(ExecError, match="box 0: there is no bucket 9"):
        engine.add_box(**box | {"bucket": 9})
    with pytest.raises(ExecError, match="its owner, rank 0, cannot hold it too"):
        engine.add_box(**box | {"holders": [0]})
    assert engine.add_box(**box) == 0
    with pytest.raises(ExecError, match="bucket tied: boxes cover 20 of 36 elements"):
        engine.set_schedule(train_list(ALONE, 0), [], [(0, 8)], 0)
    for name, (numel, _) in BUCKETS.items():
        engine.add_box(**box | {"bucket": list(BUCKETS).index(name), "lo": 20 if name == "tied" else 0, "hi": numel})
    with pytest.raises(ExecError, match=re.escape("box 0 (bucket tied [0, 20)): its owner has no base of it")):
        engine.set_schedule(train_list(ALONE, 0), [], [(0, 8)], 0)
    with pytest.raises(ExecError, match="master and state must be contiguous float32 tensors of 20 elements"):
        engine.set_base(0, torch.zeros(3), [torch.zeros(3)])
    with pytest.raises(ExecError, match="box 0: its optimizer has 1 state tensors, not 0"):
        engine.set_base(0, torch.zeros(20), [])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"inputs": [("value", 0), ("param", "nope", 0, [WIDTH])]}, "no bucket nope; there are: tied, bias0, unit1"),
        ({"inputs": [("value", 0), ("param", 5, 0, [WIDTH])]}, "unit 1, input 1: index 5 of 3"),
        ({"inputs": [("value", 9), ("keys",), ("keys",)]}, "unit 1, input 0: index 9 of 2"),
        ({"inputs": [("value", 0), ("none",), ("keys",)]}, "unit 1, input 1: an input comes from somewhere"),
        ({"inputs": [("value", 0)]}, "program 1.forward has 3 inputs and 4 outputs, declared are 1 and 4"),
        ({"num_saved": 2}, "program 1.forward has 3 inputs and 4 outputs, declared are 3 and 3"),
        ({"grads": []}, "program 1.backward has 4 inputs and 3 outputs, declared are 4 and 0"),
        ({"outputs": [("fold", 0, 0)]}, "unit 1, output 0: index 0 of 0"),
        ({"outputs": [("gift",)]}, 'unknown kind of binding "gift"'),
        ({"inputs": [("value", 0), ("constant", "nope"), ("keys",)]}, "no buffer or constant nope"),
        ({"forward": 77}, "unit 1: there is no program 77"),
    ],
)
def test_units_that_do_not_fit(model: Model, changes: dict[str, Any], message: str) -> None:
    engine = make_engine(model, ALONE, 0)
    ids = {name: engine.add_program(name, data) for name, data in model.programs.items()}
    unit = {
        "unit": 1, "forward": ids["1.forward"], "backward": ids["1.backward"], "evaluate": ids["1.eval"],
        **bindings()[1],
    }  # fmt: skip
    engine.add_unit(**unit)
    with pytest.raises(ExecError, match=re.escape(message)):
        engine.add_unit(**unit | changes)


def test_parameters_lie_inside_their_bucket(model: Model) -> None:
    engine = make_engine(model, ALONE, 0)
    outside = bindings()[1]
    outside["inputs"][2] = ("param", "unit1", WIDTH * WIDTH + 1, [WIDTH])
    ids = {name: engine.add_program(name, data) for name, data in model.programs.items()}
    engine.add_unit(
        unit=1, forward=ids["1.forward"], backward=ids["1.backward"], evaluate=ids["1.eval"], **outside
    )  # fmt: skip
    with pytest.raises(ExecError, match=r"bucket unit1: a parameter at \[37, 43\) lies outside its 42 elements"):
        engine.set_schedule(train_list(ALONE, 0), [], [(0, 8)], 0)


def test_values_have_the_declared_shape(model: Model) -> None:
    engine = make_engine(model, ALONE, 0)
    engine.add_value("g", 0, "float64", [1, WIDTH], True)
    engine.set_schedule(train_list(ALONE, 0), [], [(0, 8)], 0)
    with pytest.raises(ExecError, match=r"value g: was produced as Float \[8, 6\], declared as Double \[8, 6\]"):
        engine.step(0, batch(0), [[LR]], None, TEST_TIMEOUT_S)


def test_a_world_contains_its_rank() -> None:
    with pytest.raises(ExecError, match="world: rank 0 is not in it"):
        _native.Engine(0, None, SEED, BATCH).set_world([1, 2])


def test_folds_cover_whole_granules(model: Model) -> None:
    engine = make_engine(model, {0: Tile((0, 3), ((0, 8),))}, 0, granule=2)
    update = engine.add_program("update", model.programs["update"])
    buffers = [engine.add_buffer(name, torch.zeros(1)) for name in ("one", "two")]
    values = [("float32", [1])] * 3
    with pytest.raises(ExecError, match=r"in whole granules of 2; rank 1 has \[4, 7\)"):
        engine.add_fold(program=update, buffers=buffers, values=values, group=[(0, 0, 4), (1, 4, 7)])
    with pytest.raises(ExecError, match=r"fold 0: there is no buffer 7"):
        engine.add_fold(program=update, buffers=[0, 7], values=values, group=[(0, 0, 8)])
    with pytest.raises(ExecError, match=r"fold 0: program update has 5 inputs and 2 outputs, declared are 4 and 2"):
        engine.add_fold(program=update, buffers=buffers, values=values[:2], group=[(0, 0, 8)])


def test_boxes_of_others_cannot_be_loaded(model: Model) -> None:
    engine = make_engine(model, TILINGS["pipeline"], 1)
    assert engine.base(1) is None
    assert engine.bucket_work("bias0") is None
    with pytest.raises(ExecError, match=re.escape("box 1 (bucket bias0 [0, 6)): rank 1 neither owns nor holds it")):
        engine.set_base(1, torch.zeros(WIDTH), [torch.zeros(WIDTH)])


def test_an_engine_may_outlive_its_links(model: Model) -> None:
    endpoints = [_native.Endpoint(rank, "token") for rank in (0, 1)]
    for one, other in ((1, 0), (0, 1)):
        endpoints[one].connect({other: ("127.0.0.1", endpoints[other].port, "")}, TEST_TIMEOUT_S)
    tiling = TILINGS["pipeline"]
    engine = make_engine(model, tiling, 0, endpoints[0])
    with pytest.raises(DeadlineExceeded):
        engine.step(0, tile_inputs(tiling[0], 0), [[LR]], None, 0.2)
    for endpoint in endpoints:
        endpoint.close()
    with pytest.raises(CommError):
        engine.step(0, tile_inputs(tiling[0], 0), [[LR]], None, TEST_TIMEOUT_S)
    assert engine.version == 0
    del engine, endpoints
