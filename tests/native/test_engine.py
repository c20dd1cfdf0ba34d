"""The engine against plain autograd: pipelines, data parallel, tiles that do not line up; state, evaluation, folds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
from torch import Tensor

from elaswave_fx import _native
from elaswave_fx.errors import ExecError
from elaswave_fx.plan.lower.engine_spec import UPDATE, EngineBucket, EngineValue
from elaswave_fx.plan.work.box import Box
from elaswave_fx.plan.work.spans import Span
from elaswave_fx.plan.work.topology import Rank
from tests.native import tiny
from tests.native.ranks import Ranks
from tests.native.tiny import (
    ALONE,
    BATCH,
    BUCKETS,
    BUFFERS,
    LR,
    SEED,
    TEST_TIMEOUT_S,
    TILINGS,
    WIDTH,
    Model,
    Reference,
    Taken,
    Tile,
    batch,
    eager_loss,
    even_boxes,
    everybody,
    initial,
    install,
    joined,
    keys,
    make_engine,
    make_spec,
    make_unit,
    master_of,
    ops,
    owned,
    program,
    reference,
    running_statistics,
    schedule,
    statistics_after,
    take_step,
    tile_inputs,
    train,
)

NO_CLIP = _native.StepOptions(TEST_TIMEOUT_S)


@pytest.fixture(scope="module", params=[0, 1], ids=["samples first", "samples second"])
def any_model(request: pytest.FixtureRequest) -> Model:
    return Model.of(request.param)


Results = list[tuple[list[Taken], dict[str, Tensor]]]


def assert_trained(results: Results, expected: Reference) -> None:
    for taken, _ in results:
        assert [r.loss for r in taken] == pytest.approx(expected.losses, rel=1e-5)
        assert [r.grad_norm for r in taken] == pytest.approx(expected.norms, rel=1e-5)
        assert all(r.finite and r.updated and r.count == BATCH * WIDTH for r in taken)
        assert [r.version for r in taken] == list(range(1, len(taken) + 1))
    found = joined([masters for _, masters in results])
    for name, tensor in expected.params.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", TILINGS)
def test_any_tiling_trains_like_autograd(any_model: Model, name: str, started: Callable[..., Ranks]) -> None:
    tiling = TILINGS[name]

    def body(rank: int, endpoint: Any, _: Connection) -> Any:
        engine = make_engine(any_model, tiling, rank, endpoint)
        return train(engine, tiling[rank], 4), owned(engine, tiling, rank)

    assert_trained(started(len(tiling), body).results(), reference(4))


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("name", TILINGS)
def test_backward_in_halves_gives_the_same_bits(
    any_model: Model, name: str, exact: bool, started: Callable[..., Ranks]
) -> None:
    tiling = TILINGS[name]

    def body(rank: int, endpoint: Any, _: Connection) -> Any:
        found = []
        for split in (False, True):
            engine = make_engine(any_model, tiling, rank, endpoint, exact=exact, split=split)
            taken = train(engine, tiling[rank], 3)
            halves = taken[0].runs.get("BACKWARD_INPUTS", 0), taken[0].runs.get("BACKWARD_WEIGHTS", 0)
            assert set(halves) == {taken[0].runs["FORWARD"] if split else 0}
            assert ("BACKWARD" in taken[0].runs) != split
            found.append(([(r.loss, r.grad_norm) for r in taken], owned(engine, tiling, rank)))
            engine.sync(TEST_TIMEOUT_S)  # the next engine uses the same links
        return found

    for (sums, masters), (other_sums, other_masters) in started(len(tiling), body).results():
        assert sums == other_sums
        assert all(torch.equal(masters[name], other_masters[name]) for name in masters)


def test_the_same_run_gives_the_same_bits_over_any_link(model: Model, started: Callable[..., Ranks]) -> None:
    tiling = TILINGS["columns of other cuts"]

    def body(rank: int, endpoint: Any, _: Connection) -> Any:
        engine = make_engine(model, tiling, rank, endpoint)
        taken = train(engine, tiling[rank], 3)
        return [(r.loss, r.grad_norm) for r in taken], owned(engine, tiling, rank)

    one = started(len(tiling), body, allow_shm=True).results()
    two = started(len(tiling), body, allow_shm=False).results()
    for (sums, masters), (other_sums, other_masters) in zip(one, two, strict=True):
        assert sums == other_sums
        assert all(torch.equal(masters[name], other_masters[name]) for name in masters)


def test_without_an_endpoint_and_without_clipping(model: Model) -> None:
    engine = make_engine(model, ALONE, 0)
    taken = train(engine, ALONE[0], 4, clip=None)
    assert_trained([(taken, owned(engine, ALONE, 0))], reference(4, clip=None))
    assert taken[0].scale == 1.0 / (BATCH * WIDTH)
    assert set(taken[0].runs) == {"FORWARD", "BACKWARD", "REDUCE", "VOTE", "UPDATE", "GATHER", "SNAPSHOT"}
    assert taken[0].runs["FORWARD"] == 3
    assert taken[0].memory_bytes > 2**20
    for number, name in enumerate(BUCKETS):
        assert torch.equal(engine.read(name), master_of(engine, number))


def test_callers_tensors_stay_as_they_are(model: Model) -> None:
    engine = make_engine(model, ALONE, 0)
    inputs = {name: tensor.requires_grad_() for name, tensor in batch(0).items()}
    master = master_of(engine, 0)
    before = master.clone()
    engine.step(0, inputs, [[LR]], NO_CLIP)
    assert torch.equal(master, before)
    assert not torch.equal(master_of(engine, 0), before)
    assert torch.equal(inputs["x"], batch(0)["x"])


def test_a_working_copy_in_bfloat16(model: Model) -> None:
    engine = make_engine(model, ALONE, 0, work_dtype=torch.bfloat16)
    taken = []
    for step in range(3):
        inputs = {name: tensor.bfloat16() for name, tensor in batch(step).items()}
        taken.append(Taken.of(engine.step(step, inputs, [[LR]], _native.StepOptions(TEST_TIMEOUT_S, 0.5))))
    expected, untrained = reference(3), initial()
    assert [r.loss for r in taken] == pytest.approx(expected.losses, rel=5e-3)
    for number, (name, tensor) in enumerate(expected.params.items()):
        master = master_of(engine, number)
        assert master.dtype == torch.float32
        assert torch.equal(engine.read(name), master.bfloat16())
        # Against the way that training has gone: parameters that were left alone would be off by all of it.
        assert (master - tensor).norm() < 0.01 * (tensor - untrained[name]).norm(), name


def test_evaluation_changes_nothing(model: Model, started: Callable[..., Ranks]) -> None:
    tiling = TILINGS["columns of other cuts"]

    def body(rank: int, endpoint: Any, _: Connection) -> Any:
        engine = make_engine(model, tiling, rank, endpoint)
        first = engine.evaluate(0, tile_inputs(tiling[rank], 0), TEST_TIMEOUT_S)
        taken = train(engine, tiling[rank], 2)
        second = engine.evaluate(1, tile_inputs(tiling[rank], 1), TEST_TIMEOUT_S)
        return taken, owned(engine, tiling, rank), (first.loss, first.count), (second.loss, second.count)

    results = started(len(tiling), body).results()
    expected = reference(2)
    assert_trained([(taken, masters) for taken, masters, *_ in results], expected)
    for _, _, first, second in results:
        assert first[0] == pytest.approx(float(eager_loss(initial(), batch(0), None)), rel=1e-5)
        assert second[0] == pytest.approx(float(eager_loss(expected.params, batch(1), None)), rel=1e-4)
        assert first[1] == BATCH * WIDTH


@pytest.mark.parametrize("poison", [float("inf"), float("nan")])
def test_a_gradient_that_is_not_finite_updates_nobody(
    model: Model, poison: float, started: Callable[..., Ranks]
) -> None:
    tiling = TILINGS["data parallel"]

    def body(rank: int, endpoint: Any, _: Connection) -> Any:
        engine = make_engine(model, tiling, rank, endpoint)
        before = owned(engine, tiling, rank)
        inputs = tile_inputs(tiling[rank], 0)
        if rank == 1:
            inputs["y"] = inputs["y"].clone()
            inputs["y"][0, 0] = poison
        result = Taken.of(engine.step(0, inputs, [[LR]], _native.StepOptions(TEST_TIMEOUT_S, 1.0)))
        same = all(torch.equal(tensor, before[name]) for name, tensor in owned(engine, tiling, rank).items())
        return result, same, take_step(engine, tiling[rank], 0, clip=1.0)

    for result, same, after in started(2, body).results():
        assert (result.finite, result.updated, result.version) == (False, False, 1)
        assert same
        assert (after.updated, after.version) == (True, 2)
        assert after.loss == pytest.approx(reference(1).losses[0], rel=1e-5)


def test_state_can_be_read_and_loaded(model: Model, started: Callable[..., Ranks]) -> None:
    """Two steps, what they leave loaded into a fresh engine, one more step: the same bits as three steps."""
    tiling = TILINGS["data parallel"]

    def body(rank: int, endpoint: Any, _: Connection) -> Any:
        tile = tiling[rank]
        engine = make_engine(model, tiling, rank, endpoint)
        train(engine, tile, 2)
        fresh = make_engine(model, tiling, rank, endpoint)
        stale = install(fresh, make_spec(model, tiling, rank), restart_at=2)
        assert (fresh.holdings().version, fresh.holdings().boxes, stale) == (2, [], [0, 1, 2])
        for number, box in enumerate(even_boxes(tiling)):
            state = engine.read(number)
            if box.owner == rank and state is not None:
                fresh.load(number, state.master, state.state)
        fresh.refresh(everybody(tiling), TEST_TIMEOUT_S)
        engine.sync(TEST_TIMEOUT_S)
        equal = all(torch.equal(fresh.read(name), engine.read(name)) for name in BUCKETS)
        for each in (engine, fresh):
            take_step(each, tile, 2)
            each.sync(TEST_TIMEOUT_S)
        return equal and all(torch.equal(fresh.read(name), engine.read(name)) for name in BUCKETS)

    assert started(2, body).results() == [True, True]


def test_a_unit_that_runs_elsewhere_by_another_plan_leaves_nothing_in_sums(
    model: Model, started: Callable[..., Ranks], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bucket with a matrix of each of two units, both on each rank, then one on each: as if it had always been so."""
    bindings = tiny.unit_bindings()
    own, bias0 = ("param", 0, tiny.MATRIX, (WIDTH, WIDTH)), ("param", 1, 0, (WIDTH,))
    x = ("input", "x")
    bindings[0] |= {"inputs": (x, own, bias0, ("keys",)), "eval_inputs": (x, own, bias0), "grads": (own, bias0)}
    monkeypatch.setattr(tiny, "unit_bindings", lambda: bindings)
    monkeypatch.setitem(tiny.BUCKETS, "tied", (2 * tiny.MATRIX, (0, 2)))
    both, apart = TILINGS["data parallel"], TILINGS["pipeline"]
    boxes = [
        tiny.Box(name, 0, numel, rank) for (name, (numel, _)), rank in zip(tiny.BUCKETS.items(), (0, 0, 1), strict=True)
    ]

    def body(rank: int, endpoint: Any, _: Connection) -> Any:
        engine = make_engine(model, both, rank, endpoint, boxes=boxes)
        take_step(engine, both[rank], 0)
        engine.sync(TEST_TIMEOUT_S)
        fresh = make_engine(model, apart, rank, endpoint, boxes=boxes)
        install(fresh, make_spec(model, apart, rank, boxes=boxes), restart_at=1)
        for number, box in enumerate(boxes):
            state = engine.read(number)
            if box.owner == rank and state is not None:
                fresh.load(number, state.master, state.state)
        fresh.refresh(everybody(apart), TEST_TIMEOUT_S)
        assert install(engine, make_spec(model, apart, rank, boxes=boxes)) == []
        for each in (engine, fresh):
            take_step(each, apart[rank], 1)
            each.sync(TEST_TIMEOUT_S)
        return owned(engine, apart, rank, boxes), owned(fresh, apart, rank, boxes)

    for masters, expected in started(2, body).results():
        assert masters.keys() == expected.keys() and masters
        assert all(torch.equal(masters[name], expected[name]) for name in expected)


def test_a_spec_is_read_while_steps_are_taken_and_taken_over_once(model: Model, started: Callable[..., Ranks]) -> None:
    """A pipeline's two ranks become two lanes by specs that they have read before the step; they have read others,
    too, which they do not take."""
    pipeline, pair = TILINGS["pipeline"], TILINGS["data parallel"]
    boxes = even_boxes(pipeline)

    def body(rank: int, endpoint: Any, _: Connection) -> Any:
        engine = make_engine(model, pipeline, rank, endpoint, boxes=boxes)
        taken = train(engine, pipeline[rank], 1)
        next_one = _native.NextSpec(make_spec(model, pair, rank, boxes=boxes), ahead=range(len(BUCKETS)))
        engine.prepare(next_one)
        engine.prepare(_native.NextSpec(make_spec(model, pipeline, rank, boxes=boxes)))
        taken.append(take_step(engine, pipeline[rank], 1))
        engine.sync(TEST_TIMEOUT_S)
        engine.install(next_one)
        with pytest.raises(ExecError, match="this spec has been taken over before"):
            engine.install(next_one)
        engine.refresh(everybody(pair), TEST_TIMEOUT_S)
        taken.append(take_step(engine, pair[rank], 2))
        return [each.loss for each in taken]

    for losses in started(2, body).results():
        assert losses == pytest.approx(reference(3).losses, rel=1e-5)


def test_memory_for_a_bucket_that_is_not_there(model: Model) -> None:
    with pytest.raises(ExecError, match=r"spec\.buckets: has 3 items; item 3 is wanted"):
        _native.NextSpec(make_spec(model, ALONE, 0), ahead=[3])


# --- Buffer updates: running mean of what unit 0 sees, one granule per micro-batch.


@pytest.mark.parametrize("owner", [0, 1, 2, 3])
@pytest.mark.parametrize("exact", [False, True])
def test_buffers_are_updated_in_granule_order(
    model: Model, owner: int, exact: bool, started: Callable[..., Ranks]
) -> None:
    """By whoever owns their box, also by a rank that only reads them or has no part in them, and by its holder."""
    tiling = {
        0: Tile((0, 3), ((0, 2),)),
        1: Tile((0, 1), ((2, 4), (4, 6), (6, 8))),
        2: Tile((1, 2), ((2, 4), (4, 6), (6, 8))),
        3: Tile((2, 3), ((2, 4), (4, 6), (6, 8))),
    }
    changing = running_statistics()
    holder = (owner + 1) % 4
    boxes = [*even_boxes(tiling), changing.box(owner, holder)]

    def body(rank: int, endpoint: Any, _: Connection) -> Any:
        engine = make_engine(
            model, tiling, rank, endpoint, granule=2, changing=changing, boxes=boxes, exact=exact,
            record_dtype="bfloat16",
        )  # fmt: skip
        norms = [take_step(engine, tiling[rank], step, clip=None).grad_norm for step in range(2)]
        engine.sync(TEST_TIMEOUT_S)
        state = engine.read(len(boxes) - 1)
        return engine.read(BUFFERS), state and (state.master, state.state), norms

    results = started(4, body).results()
    expected = statistics_after(2)
    for rank, (work, state, norms) in enumerate(results):
        assert (work is not None) == (rank != 3) and (state is not None) == (rank in (owner, holder))
        for flat in [work] * (rank != 3) + ([state[0]] if state is not None else []):
            assert all(torch.equal(tensor, expected[name]) for name, tensor in changing.of(flat).items())
        assert state is None or state[1] == []
        assert norms == pytest.approx(reference(2, clip=None).norms, rel=1e-2), "buffers are no part of the norm"


def test_a_buffer_is_rounded_once_a_step(model: Model) -> None:
    """Its update computes in fp32; between the granules of a step the buffer is that, too."""
    changing = running_statistics(torch.bfloat16)
    tiling = {0: Tile((0, 3), ((0, 2), (2, 4), (4, 6), (6, 8)))}
    engine = make_engine(model, tiling, 0, granule=2, changing=changing)
    take_step(engine, tiling[0], 0, clip=None)
    mean = changing.of(engine.read(BUFFERS))["mean"]
    assert mean.dtype == torch.bfloat16
    assert torch.equal(mean, statistics_after(1)["mean"].to(torch.bfloat16))


def test_micro_batches_are_granules_where_buffers_are_updated(model: Model) -> None:
    engine = make_engine(model, {0: Tile((0, 3), ((0, 4), (4, 8)))}, 0, granule=2, changing=running_statistics())
    with pytest.raises(ExecError, match="granule at sample 2 was not produced; micro-batches must be single granules"):
        engine.step(0, batch(0), [[LR]], NO_CLIP)


# --- Keys and values without a sample axis.


LOW = 0xFFFFFFFF


def test_keys_belong_to_samples_and_steps() -> None:
    """A unit that returns its keys as the loss sees those of the global positions, whatever the micro-batches."""

    def forward(x: Tensor, keys: Tensor, step_keys: Tensor) -> Any:
        return keys.sum() + x.long().sum(), (step_keys & LOW).sum()  # a count is not negative

    data = program(forward, torch.zeros(3), ops.sample_keys(0, 0, 3, 0), ops.sample_keys(0, 0, 1, 0))
    bound = {"inputs": (("input", "x"), ("keys",), ("step_keys",)), "outputs": (("loss",), ("count",)), "grads": ()}
    unit = make_unit(4, forward="forward", backward=None, evaluate=None, num_saved=0, **bound)
    for micro_batches in ([(0, 8)], [(0, 3), (3, 8)]):
        tiling = {0: Tile((4, 5), tuple(micro_batches))}
        steps = [*(("FORWARD", 4, mb) for mb in range(len(micro_batches))), ("VOTE",)]
        spec = replace(
            make_spec(Model(), ALONE, 0), values=(), buckets=(), boxes=(), units=(unit,),
            keys=keys(tiling, 0), schedule=schedule(tiling, 0, steps),
        )  # fmt: skip
        engine = _native.Engine(spec, None, {"forward": data}, {})
        result = engine.step(5, {"x": torch.zeros(BATCH)}, [], NO_CLIP)
        parts = [ops.sample_keys(SEED, 5 * BATCH + lo, hi - lo, 4).sum() for lo, hi in micro_batches]
        once = (ops.sample_keys(SEED, 5, 1, 4 | 0x80000000) & LOW).sum()
        assert result.loss == sum(float(part) for part in parts)
        assert result.count == len(micro_batches) * float(once)


def test_a_value_without_samples_collects_a_gradient_from_every_reader(started: Callable[..., Ranks]) -> None:
    """Unit 0 makes t = 2 w on rank 0; unit 1 reads it on rank 1 in two micro-batches: dw = 2 (sum of all x)."""
    x = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(1))
    ones, s = torch.ones(WIDTH), torch.ones(())
    programs = {
        "0.forward": program(lambda w: (w * 2.0,), ones),
        "0.backward": program(lambda dt: (dt * 2.0,), ones),
        "1.forward": program(lambda t, x: ((t * x).sum(), torch.ones_like(x).sum(), x), ones, x),
        "1.backward": program(lambda x, d: (x.sum(0) * d,), x, s),
        UPDATE: program(lambda m, g, scale: (m * 0.0 + g,), ones, ones, s),
    }

    def tag(grad: int, mb: int) -> int:
        return (1 + grad) << 56 | mb << 16

    lists = {
        0: [
            ("FORWARD", 0, 0), *(("SEND", 0, 0, 1, tag(0, mb), 0, 1, 0) for mb in (0, 1)),
            *(("RECV", 0, 0, 1, tag(1, mb), 0, 1, 1) for mb in (0, 1)),
            ("BACKWARD", 0, 0), ("REDUCE", 0), ("VOTE",), ("UPDATE", 0),
        ],
        1: [
            *(("RECV", 0, mb, 0, tag(0, mb), 0, 1, 0) for mb in (0, 1)),
            *(step for mb in (0, 1) for step in (
                ("FORWARD", 1, mb), ("BACKWARD", 1, mb), ("SEND", 0, mb, 0, tag(1, mb), 0, 1, 1))),
            ("VOTE",),
        ],
    }  # fmt: skip

    w = ("param", 0, 0, (WIDTH,))
    units = {
        0: make_unit(
            0, inputs=(w,), eval_inputs=(w,), outputs=(("value", 0),), grads=(w,), num_saved=0, evaluate=None
        ),
        1: make_unit(
            1, inputs=(("value", 0), ("input", "x")), outputs=(("loss",), ("count",)), grads=(("value", 0),),
            num_saved=1, evaluate=None,
        ),
    }  # fmt: skip
    tiling = {0: Tile((0, 1), ((0, 8),)), 1: Tile((1, 2), ((0, 5), (5, 8)))}

    def body(rank: int, endpoint: Any, _: Connection) -> Any:
        spec = replace(
            make_spec(Model(), tiling, rank),
            values=(EngineValue("t", None, "float32", (WIDTH,), True),),
            buckets=(EngineBucket("w", WIDTH, "float32", UPDATE, 0),),
            boxes=(Box(0, Span(0, WIDTH), Rank(0), readers=(Rank(0),)),),
            units=(units[rank],),
            keys=keys(tiling, rank),
            schedule=schedule(tiling, rank, lists[rank]),
        )
        engine = _native.Engine(spec, endpoint, programs, {})
        if rank == 0:
            engine.load("w", ones)
            engine.load(0, ones, [])
        engine.step(0, {"x": x} if rank else {}, [[]], NO_CLIP)
        return master_of(engine, 0) if rank == 0 else None

    gradient = started(2, body).results()[0]
    torch.testing.assert_close(gradient, 2.0 * x.sum(0))
