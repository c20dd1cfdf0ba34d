"""What the engine of each rank is told, from an artifact and a plan."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate

from elaswave_fx.plan.lower.engine_spec import (
    UPDATE,
    EngineBucket,
    EngineBufferUpdate,
    EngineJob,
    EngineKeys,
    engine_spec,
)
from elaswave_fx.plan.lower.step import step_program
from elaswave_fx.plan.make.planner import plan_uniform
from elaswave_fx.plan.work.topology import Rank, local_topology
from elaswave_fx.program.artifact import Artifact, BucketBuffer, BucketSpec, FoldSpec, UnitSpec, ValueSpec
from tests.plan.samples import chain

WORKLOAD = chain(units=4)
PLAN = plan_uniform(WORKLOAD, local_topology(4), 2, 2)


def unit(index: int) -> UnitSpec:
    """Unit 0 reads the batch, all read a constant; unit 1 yields a mutable buffer's values and hands on a frozen
    gradient."""
    inputs = ((("input", "x"),) if index == 0 else (("value", index - 1),), ("constant", "mask"))
    outputs = (("fold", 0, 0),) if index == 1 else (("value", index),)
    return UnitSpec(
        index, "first" if index == 0 else "block", (*inputs[0], inputs[1], ("param", index, 0, (100 + index,))),
        outputs, (), (("value", index - 1), ("frozen", "table"), ("param", index, 0, (100 + index,))), 2, 1.0, 8,
    )  # fmt: skip


ARTIFACT = Artifact(
    granule=1, batch_coupled=(), inputs=("x",), params=(), buffers=(),
    programs=dict.fromkeys(("first.forward", "first.evaluate", "block.forward", "block.backward", "block.evaluate")),
    units=tuple(unit(index) for index in range(4)),
    values=(
        ValueSpec("h", 0, (1,), (1, 8), "float32", 0, True, 32),
        ValueSpec("w", 0, (1,), (8,), "bool", -1, False, 8),
    ),
    buckets=(
        *(BucketSpec(b.name, 0, b.numel, (), b.users, dtype="bfloat16") for b in WORKLOAD.buckets),
        BucketSpec("unit1.buffers", 0, 8, (), (1,), (BucketBuffer("mean", 0, (8,), "float32"),)),
    ),
    folds=(FoldSpec("mean", 1, (("float32", (8,)),)),), invariant_inputs=(), invariant_names=(), draws=(),
    evaluation_exact=True, text="",
)  # fmt: skip
JOB = EngineJob(ARTIFACT, seed=3, reshard_rng=True, record_dtype="bfloat16", copy_mode="log")


def test_tiles_are_told_apart_and_all_else_is_the_same() -> None:
    specs = [engine_spec(JOB, PLAN, rank) for rank in PLAN.ranks]
    assert [[unit.index for unit in spec.units] for spec in specs] == [[*PLAN.tile(rank).units] for rank in PLAN.ranks]
    assert [spec.schedule.train for spec in specs] == [step_program(PLAN, rank).instructions for rank in PLAN.ranks]
    assert [spec.schedule.micro_batches for spec in specs] == [PLAN.tile(rank).micro_batches for rank in PLAN.ranks]
    nothing = {"rank": Rank(0), "units": (), "keys": specs[0].keys, "schedule": specs[0].schedule}
    assert {replace(spec, **nothing) for spec in specs} == {replace(specs[0], **nothing)}
    assert specs[0].boxes == PLAN.boxes and specs[0].world == PLAN.ranks


def test_keys_follow_the_samples_or_are_a_stream_of_the_rank() -> None:
    specs = [engine_spec(JOB, PLAN, rank) for rank in PLAN.ranks]
    for spec in specs:
        starts = tuple(m.lo for m in spec.schedule.micro_batches)
        assert spec.keys == EngineKeys(seed=3, per_step=WORKLOAD.options.global_batch, starts=starts)
    jobs = [replace(JOB, reshard_rng=False, seed=seed) for seed in (3, 4)]
    own = [(PLAN.tile(rank), engine_spec(job, PLAN, rank).keys) for job in jobs for rank in PLAN.ranks]
    for tile, keys in own:
        lengths = [len(m) for m in tile.micro_batches]
        assert (keys.per_step, keys.starts) == (sum(lengths), tuple(accumulate(lengths[:-1], initial=0)))
    assert len({keys.seed for _, keys in own}) == len(own), "no two ranks share a stream, in whichever run"
    assert all(0 <= keys.seed < 2**63 for _, keys in own)


def test_what_is_absent_is_none() -> None:
    spec = engine_spec(JOB, PLAN, PLAN.ranks[0])
    first, block = spec.units[:2]
    assert (first.forward, first.backward, first.evaluate) == ("first.forward", None, "first.evaluate")
    assert block.backward == "block.backward"
    assert [value.sample_axis for value in spec.values] == [0, None]
    assert block.grads == (("value", 0), ("none",), ("param", 1, 0, (101,)))  # a frozen parameter wants none
    assert [bucket.optimizer for bucket in spec.buckets] == [UPDATE] * len(WORKLOAD.buckets) + [None]


def test_buffers_are_a_bucket_to_which_the_ranks_of_their_unit_contribute() -> None:
    for rank in PLAN.ranks:
        spec = engine_spec(JOB, PLAN, rank)
        assert spec.tables == {"mask"}, "they are no tables"
        place = ("mutable", len(WORKLOAD.buckets), 0, (8,), "float32")
        assert spec.updates == (EngineBufferUpdate("fold.mean", place, (("float32", (8,)),)),)
        runs = [(r, span.lo, span.hi) for r in PLAN.ranks if 1 in PLAN.tile(r).units for span in PLAN.tile(r).spans]
        assert spec.buckets[-1] == EngineBucket("unit1.buffers", 8, "float32", None, 0, tuple(runs))
        assert len(runs) == 2 and sum(hi - lo for _, lo, hi in runs) == WORKLOAD.options.global_batch
        assert not any(bucket.group for bucket in spec.buckets[:-1])


def test_modelled_units_are_those_of_the_tile() -> None:
    kernels = {0: (1e-3, 2e-3, 0.0, 0.5), 9: (1.0, 1.0, 1.0, 0.5)}
    spec = engine_spec(JOB, PLAN, PLAN.ranks[0], kernels)
    assert [unit.modelled for unit in spec.units] == [kernels[0], *([None] * (len(spec.units) - 1))]
