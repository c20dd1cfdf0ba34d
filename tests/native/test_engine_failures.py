"""What an engine refuses, and what it is left with after a peer died, a deadline passed, or a unit failed."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
from torch import Tensor

from elaswave_fx import _native
from elaswave_fx.errors import CommError, DeadlineExceeded, ExecError, PeerLost
from elaswave_fx.plan.lower.engine_spec import UPDATE, EngineSpec, EngineValue
from elaswave_fx.plan.work.spans import Span
from elaswave_fx.plan.work.topology import Rank
from tests.native.ranks import Ranks
from tests.native.tiny import (
    ALONE,
    BATCH,
    BUCKETS,
    LR,
    TEST_TIMEOUT_S,
    TILINGS,
    WIDTH,
    Box,
    Model,
    batch,
    even_boxes,
    install,
    loaded,
    make_engine,
    make_spec,
    make_unit,
    owned,
    planned,
    reference,
    running_statistics,
    schedule,
    take_step,
    tile_inputs,
    train,
    train_list,
)

Change = Callable[[list[tuple[Any, ...]]], list[tuple[Any, ...]]]


def snapshot(engine: _native.Engine, boxes: Sequence[Box]) -> dict[str, Tensor]:
    """All that a rank keeps, boxes that it holds included."""
    held = {}
    for number, box in enumerate(boxes):
        state = engine.read(number)
        if state is not None:
            tensors = [state.master, *state.state]
            held |= {f"{box.bucket} {box.lo} {i}": tensor.clone() for i, tensor in enumerate(tensors)}
    works = {name: engine.read(name) for name in BUCKETS}
    return held | {f"{name}.work": work.clone() for name, work in works.items() if work is not None}


def stale(engine: _native.Engine) -> list[str]:
    """Buckets whose working copy is not whole."""
    return [list(BUCKETS)[bucket] for bucket in engine.holdings().stale_buckets]


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
            take_step(engine, tiling[rank], 2)
        held = engine.holdings()
        assert held.last_committed is not None
        return (
            caught.value.rank,
            same(before, snapshot(engine, even_boxes(tiling))),
            held.version,
            held.last_committed.step,
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
                take_step(engine, tiling[rank], 1, deadline_s=0.3)
            assert time.monotonic() - begin < TEST_TIMEOUT_S / 2
            assert engine.holdings().version == 1
        pipe.send("given up")
        pipe.recv()
        endpoint.advance(1)
        pipe.send("advanced")
        pipe.recv()
        taken += [take_step(engine, tiling[rank], step) for step in (1, 2)]
        return [r.loss for r in taken], stale(engine)

    ranks = started(2, body)
    for _ in range(2):
        for pipe in ranks.pipes:
            pipe.recv()
        for pipe in ranks.pipes:
            pipe.send("go")
    for losses, left in ranks.results():
        assert losses == pytest.approx(reference(3).losses, rel=1e-5)
        assert left == []


def test_a_peer_that_dies_after_the_commit(model: Model, started: Callable[..., Ranks]) -> None:
    """Rank 1 commits a step but never sends its part of the working copies, then dies: rank 0 has the step's state, and
    lists what it could not gather."""
    tiling = TILINGS["data parallel"]

    def body(rank: int, endpoint: Any, pipe: Connection) -> Any:
        engine = make_engine(model, tiling, rank, endpoint)
        spec = make_spec(model, tiling, rank)
        if rank == 1:
            silent = [step for step in train_list(tiling, 1) if step[0] != "GATHER"]
            install(engine, replace(spec, schedule=schedule(tiling, 1, silent)))
        result = take_step(engine, tiling[rank], 0)
        masters = {name: tensor.clone() for name, tensor in owned(engine, tiling, rank).items()}
        if rank == 1:
            pipe.send(result.version)
            pipe.recv()
            os.kill(os.getpid(), signal.SIGKILL)
        pipe.send(result.version)
        with pytest.raises(PeerLost):
            engine.sync(TEST_TIMEOUT_S)
        endpoint.advance(1)
        kept = same(masters, owned(engine, tiling, rank))
        with pytest.raises(PeerLost):
            engine.evaluate(0, tile_inputs(tiling[rank], 0), TEST_TIMEOUT_S)
        install(engine, replace(spec, world=(Rank(0),), vote_spans=(1,)))
        endpoint.advance(2)
        with pytest.raises(ExecError, match="its working copy is stale"):
            engine.evaluate(0, tile_inputs(tiling[rank], 0), TEST_TIMEOUT_S)
        return kept, stale(engine), engine.holdings().version

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
        engine.step(1, wrong, [[LR]], _native.StepOptions(TEST_TIMEOUT_S, 0.5))
    assert same(before, snapshot(engine, even_boxes(ALONE)))
    assert take_step(engine, ALONE[0], 1).loss == pytest.approx(reference(2).losses[1], rel=1e-5)


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
        engine.step(0, inputs, hyper, _native.StepOptions(TEST_TIMEOUT_S))


def test_a_deadline_that_has_passed(model: Model) -> None:
    engine = make_engine(model, ALONE, 0)
    with pytest.raises(DeadlineExceeded, match=r"rank 0: the deadline of 0\.0+ s passed before FORWARD"):
        take_step(engine, ALONE[0], 0, deadline_s=0.0)
    assert engine.holdings().version == 0


def without(op: str, index: int | None = None) -> Change:
    return lambda steps: [s for s in steps if s[0] != op or (index is not None and s[1] != index)]


def after(op: str, extra: tuple[Any, ...]) -> Change:
    return lambda steps: [part for s in steps for part in ([s, extra] if s[0] == op else [s])]


def ahead_of(op: str, extra: tuple[Any, ...]) -> Change:
    return lambda steps: [part for s in steps for part in ([extra, s] if s[0] == op else [s])]


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
        (ahead_of("VOTE", ("REDUCE", 0)), "reduces bucket 0 twice"),
        (ahead_of("VOTE", ("REDUCE", 3)), "there is no bucket 3"),
        (ahead_of("VOTE", ("BACKWARD", 0, 0)), "(BACKWARD): runs a second time"),
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
    steps = change(train_list(ALONE, 0))
    with pytest.raises(ExecError, match=re.escape(message)):
        loaded(replace(make_spec(model, ALONE, 0), schedule=schedule(ALONE, 0, steps)), model)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without("BACKWARD_WEIGHTS", 1), "(VOTE): unit 1 has yet to run BACKWARD_WEIGHTS of micro-batch 0"),
        (without("BACKWARD_INPUTS", 0), "(BACKWARD_WEIGHTS): has no BACKWARD_INPUTS before it"),
        (ahead_of("VOTE", ("BACKWARD_WEIGHTS", 1, 0)), "(BACKWARD_WEIGHTS): has no BACKWARD_INPUTS before it"),
        (ahead_of("VOTE", ("BACKWARD_INPUTS", 1, 0)), "(BACKWARD_INPUTS): runs a second time"),
        (moved(("REDUCE", 2), ("BACKWARD_WEIGHTS", 1, 0)), "adds to bucket 2, which was reduced before"),
        (moved(("BACKWARD_INPUTS", 0, 0), ("BACKWARD_INPUTS", 1, 0)),
         "(BACKWARD_INPUTS): adds to the gradient of value h of micro-batch 0, which was read before"),
    ],
)  # fmt: skip
def test_step_lists_of_halves_that_cannot_run(model: Model, change: Change, message: str) -> None:
    steps = change(train_list(ALONE, 0, split=True))
    with pytest.raises(ExecError, match=re.escape(message)):
        loaded(replace(make_spec(model, ALONE, 0), schedule=schedule(ALONE, 0, steps)), model)


def test_halves_need_their_programs(model: Model) -> None:
    spec = make_spec(model, ALONE, 0, split=True)
    whole = tuple(replace(unit, backward_inputs=None, backward_weights=None) for unit in spec.units)
    with pytest.raises(ExecError, match="BACKWARD_INPUTS.: unit 2 has no such program"):
        loaded(replace(spec, units=whole), model)


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
    steps = [part for step in train_list(tiling, 1) for part in change(step)]
    with pytest.raises(ExecError, match=re.escape(message)):
        loaded(replace(make_spec(model, tiling, 1), schedule=schedule(tiling, 1, steps)), model)


def test_evaluation_lists_have_no_backward(model: Model) -> None:
    lists = schedule(ALONE, 0, train_list(ALONE, 0), [("VOTE",)])
    with pytest.raises(ExecError, match="eval list, instruction 0 .VOTE.: evaluation only receives, sends and runs"):
        loaded(replace(make_spec(model, ALONE, 0), schedule=lists), model)


def test_transfers_need_an_endpoint(model: Model) -> None:
    tiling = TILINGS["pipeline"]
    engine = make_engine(model, tiling, 1)
    with pytest.raises(ExecError, match="a transfer with rank 0, but the engine was made without an endpoint"):
        take_step(engine, tiling[1], 0)


# --- Specs that are refused


def refused(spec: EngineSpec, model: Model, message: str) -> None:
    """Both as the first spec and as the next one."""
    with pytest.raises(ExecError, match=re.escape(message)):
        _native.Engine(spec, None, model.programs, {})
    engine = make_engine(model, ALONE, 0, granule=spec.granule)
    before = snapshot(engine, even_boxes(ALONE))
    with pytest.raises(ExecError, match=re.escape(message)):
        install(engine, spec)
    assert same(before, snapshot(engine, even_boxes(ALONE)))
    assert take_step(engine, ALONE[0], 0).loss == pytest.approx(reference(1).losses[0], rel=1e-5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"optimizer": "nope"}, "bucket tied: there is no program nope"),
        ({"dtype": "float33"}, 'unknown dtype "float33"'),
        ({"numel": "many"}, "spec.buckets[0].numel: is not an integer"),
        ({"numel": 37}, "bucket tied: boxes cover 36 of 37 elements"),
    ],
)
def test_buckets_that_do_not_fit(model: Model, changes: dict[str, Any], message: str) -> None:
    spec = make_spec(model, ALONE, 0)
    refused(replace(spec, buckets=(replace(spec.buckets[0], **changes), *spec.buckets[1:])), model, message)


@pytest.mark.parametrize(
    ("boxes", "message"),
    [
        ([Box("tied", 4, 20, 0)], "bucket tied: boxes must cut [0, 36) in order; [4, 20) comes after 0"),
        ([Box("tied", 0, 20, 0, (0,))], "box 0: its owner, rank 0, cannot hold it too"),
        ([Box("tied", 0, 20, 0)], "bucket tied: boxes cover 20 of 36 elements"),
        ([Box("tied", 0, 40, 0)], "boxes must cut [0, 36) in order; [0, 40) comes after 0"),
    ],
)
def test_boxes_that_do_not_fit(model: Model, boxes: list[Box], message: str) -> None:
    refused(replace(make_spec(model, ALONE, 0), boxes=planned(boxes, ALONE)), model, message)


def test_boxes_of_no_bucket(model: Model) -> None:
    spec = make_spec(model, ALONE, 0)
    refused(replace(spec, boxes=(replace(spec.boxes[0], bucket=9),)), model, "box 0: there is no bucket 9")


def test_readers_that_do_not_ascend(model: Model) -> None:
    spec = make_spec(model, ALONE, 0)
    boxes = (replace(spec.boxes[0], readers=(Rank(1), Rank(0))), *spec.boxes[1:])
    refused(replace(spec, boxes=boxes), model, "box 0: its readers must ascend, sums are formed in their order")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"inputs": (("value", 0), ("param", 5, 0, (WIDTH,)))}, "unit 1, input 1: index 5 of 3"),
        ({"inputs": (("value", 9), ("keys",), ("keys",))}, "unit 1, input 0: index 9 of 2"),
        ({"inputs": (("value", -1), ("keys",), ("keys",))}, "unit 1, input 0: index -1 of 2"),
        ({"inputs": (("value", 0), ("none",), ("keys",))}, "unit 1, input 1: an input comes from somewhere"),
        ({"inputs": (("value", 0), ("loss",), ("keys",))}, 'unit 1, input 1: no kind of input: "loss"'),
        ({"inputs": (("value", 0),)}, "program 1.forward has 3 inputs and 4 outputs, declared are 1 and 4"),
        ({"inputs": (("value",), ("keys",), ("keys",))}, "spec.units[1].inputs[0]: has 1 items; item 1 is wanted"),
        ({"num_saved": 2}, "program 1.forward has 3 inputs and 4 outputs, declared are 3 and 3"),
        ({"num_saved": -1}, "spec.units[1].num_saved: -1 is negative"),
        ({"grads": ()}, "program 1.backward has 4 inputs and 3 outputs, declared are 4 and 0"),
        ({"outputs": (("fold", 0, 0),)}, "unit 1, output 0: index 0 of 0"),
        ({"outputs": (("gift",),)}, 'unit 1, output 0: no kind of output: "gift"'),
        ({"grads": (("keys",),)}, 'unit 1, gradient 0: no kind of gradient: "keys"'),
        ({"inputs": (("value", 0), ("constant", "nope"), ("keys",))},
         "unit 1, input 1: there is no buffer or constant nope"),
        ({"forward": "nope"}, "unit 1: there is no program nope"),
        ({"index": 0}, "unit 0 is given twice"),
        ({"inputs": (("value", 0), ("param", 2, 0, (WIDTH, WIDTH)), ("param", 2, 37, (WIDTH,)))},
         "bucket unit1: a parameter at [37, 43) lies outside its 42 elements"),
        ({"grads": (("value", 0), ("param", 2, 0, (WIDTH, WIDTH)), ("param", 2, 35, (WIDTH,)))},
         "bucket unit1: parameters at 35 and 0 overlap"),
    ],
)  # fmt: skip
def test_units_that_do_not_fit(model: Model, changes: dict[str, Any], message: str) -> None:
    spec = make_spec(model, ALONE, 0)
    unit = make_unit(1, **changes)
    refused(replace(spec, units=(spec.units[0], unit, spec.units[2])), model, message)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"world": (Rank(1), Rank(2))}, "world: rank 0 is not in it"),
        ({"vote_spans": ()}, "world: 0 vote_spans of 1 ranks"),
        ({"global_batch": 0}, "engine: global batch and granule must be at least 1"),
        ({"record_dtype": "float64"}, "spec.record_dtype: records are float32 or bfloat16, not float64"),
        ({"copy_mode": "maybe"}, 'spec.copy_mode: replicas are synced by "log" or "state"'),
        ({"values": (EngineValue("h", 2, "float32", (1, WIDTH), True),)}, "value h: sample axis 2 of 2 dimensions"),
        ({"rank": "zero"}, "spec.rank: is not an integer"),
    ],
)
def test_specs_that_do_not_fit(model: Model, changes: dict[str, Any], message: str) -> None:
    refused(replace(make_spec(model, ALONE, 0), **changes), model, message)


def test_another_plan_moves_what_is_computed_and_does_not_change_it(model: Model) -> None:
    engine = make_engine(model, ALONE, 0)
    spec = make_spec(model, ALONE, 0)
    halves = planned([Box("tied", 0, 18, 0), Box("tied", 18, 36, 0), *even_boxes(ALONE)[1:]], ALONE)
    for changed, what in (
        (replace(spec, keys=replace(spec.keys, seed=1)), "the seed"),
        (replace(spec, copy_mode="state"), "the copy mode"),
        (replace(spec, boxes=halves), "the number of boxes"),
        (replace(spec, buckets=(replace(spec.buckets[0], hyper_group=1), *spec.buckets[1:])), "bucket tied"),
    ):
        with pytest.raises(ExecError, match=f"install: {what} is another one"):
            install(engine, changed)


def test_values_have_the_declared_shape(model: Model) -> None:
    spec = make_spec(model, ALONE, 0)
    double = replace(spec, values=(spec.values[0], replace(spec.values[1], dtype="float64")))
    engine = loaded(double, model)
    with pytest.raises(ExecError, match=r"value g: was produced as Float \[8, 6\], declared as Double \[8, 6\]"):
        take_step(engine, ALONE[0], 0)


def with_bucket(**changes: Any) -> Callable[[EngineSpec], EngineSpec]:
    return lambda spec: replace(spec, buckets=(*spec.buckets[:-1], replace(spec.buckets[-1], **changes)))


def with_update(**changes: Any) -> Callable[[EngineSpec], EngineSpec]:
    return lambda spec: replace(spec, updates=(*spec.updates[:-1], replace(spec.updates[-1], **changes)))


def cut(spec: EngineSpec) -> EngineSpec:
    """The buffers in two boxes."""
    *boxes, whole = spec.boxes
    parts = (replace(whole, span=Span(0, 4)), replace(whole, span=Span(4, whole.span.hi)))
    return replace(spec, boxes=(*boxes, *parts))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (with_bucket(group=((Rank(0), 0, 4), (Rank(1), 4, 7))), "in whole granules of 2; rank 1 has [4, 7)"),
        (with_bucket(dtype="bfloat16"), "bucket buffers: the bytes of buffers are declared as float32"),
        (with_bucket(optimizer=UPDATE), "buffer update 0: bucket buffers is of parameters, which an optimizer updates"),
        (lambda spec: replace(spec, updates=()), "bucket buffers: has neither an optimizer nor an update"),
        (cut, "bucket buffers: is cut into 2 boxes; buffers are one box"),
        (with_update(buffer=("param", 0, 0, (1,))), "buffer update 2: bucket tied is of parameters, which an"),
        (with_update(buffer=("mutable", 3, 7, (), "int64")), "of 8 bytes begins at word 7 of 10"),
        (with_update(buffer=("mutable", 3, 8, (2,), "int64")), "a parameter at [8, 12) lies outside its 10 elements"),
        (with_update(values=(("float32", (1,)),)),
         "buffer update 2: program fold.granules has 1 inputs and 1 outputs, declared are 2 and 1"),
    ],
)  # fmt: skip
def test_buffers_that_do_not_fit(model: Model, change: Callable[[EngineSpec], EngineSpec], message: str) -> None:
    changing = running_statistics()
    spec = make_spec(model, ALONE, 0, granule=2, changing=changing)
    with pytest.raises(ExecError, match=re.escape(message)):
        loaded(change(spec), model, None, changing)


def test_state_that_does_not_fit(model: Model) -> None:
    spec = make_spec(model, TILINGS["pipeline"], 1)
    engine = _native.Engine(spec, None, model.programs, {})
    assert engine.read(1) is None
    assert engine.read("bias0") is None
    with pytest.raises(ExecError, match="box 1: rank 1 neither owns nor holds it"):
        engine.load(1, torch.zeros(WIDTH), [torch.zeros(WIDTH)])
    with pytest.raises(ExecError, match="master and state must be contiguous float32 tensors of 42 elements"):
        engine.load(2, torch.zeros(3), [torch.zeros(3)])
    with pytest.raises(ExecError, match="box 2: its optimizer has 1 state tensors, not 0"):
        engine.load(2, torch.zeros(42), [])
    with pytest.raises(ExecError, match="bucket unit1: work must be a contiguous tensor of 42 elements"):
        engine.load("unit1", torch.zeros(3))
    with pytest.raises(ExecError, match="bucket bias0: rank 1 has no working copy of it"):
        engine.load("bias0", torch.zeros(WIDTH))
    with pytest.raises(ExecError, match="there is no bucket, buffer or constant nope"):
        engine.load("nope", torch.zeros(3))
    with pytest.raises(ExecError, match="there is no box 9"):
        engine.read(9)
    with pytest.raises(ExecError, match="box 2: rank 1 owns it, has no state of it, and none is on its way"):
        take_step(engine, TILINGS["pipeline"][1], 0)


def test_an_engine_may_outlive_its_links(model: Model) -> None:
    endpoints = [_native.Endpoint(rank, "token") for rank in (0, 1)]
    for one, other in ((1, 0), (0, 1)):
        endpoints[one].connect({other: ("127.0.0.1", endpoints[other].port, "")}, TEST_TIMEOUT_S)
    tiling = TILINGS["pipeline"]
    engine = make_engine(model, tiling, 0, endpoints[0])
    with pytest.raises(DeadlineExceeded):
        take_step(engine, tiling[0], 0, deadline_s=0.2)
    for endpoint in endpoints:
        endpoint.close()
    with pytest.raises(CommError):
        take_step(engine, tiling[0], 0)
    assert engine.holdings().version == 0
    del engine, endpoints
