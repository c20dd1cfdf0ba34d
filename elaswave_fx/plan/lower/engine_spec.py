"""`EngineSpec`, the one value from which a rank's engine is built.

In: the artifact, a plan, a rank. Out: `EngineSpec`, which `native/exec/spec/spec.cc` reads field by field, by name, and
checks: the names of these classes and fields are the encoding. Programs and tensors are passed separately, by name.

    spec = engine_spec(job, plan, rank)          job: the same for every plan
    engine = _native.Engine(spec, endpoint, artifact.programs, tensors)
    engine.install(_native.NextSpec(engine_spec(job, next_plan, rank)))
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

from elaswave_fx.plan.lower.step import Instruction, eval_program, step_program
from elaswave_fx.plan.plan import Plan
from elaswave_fx.plan.work.box import Box
from elaswave_fx.plan.work.spans import Span, consecutive
from elaswave_fx.plan.work.topology import Rank
from elaswave_fx.program.artifact import Artifact, Binding, BucketSpec

UPDATE = "update"
"""The optimizer's name among the programs."""

Kernel = tuple[float, float, float, float]
"""Modelled seconds of a unit: per sample forward and backward, and per call; the share of weights in backward."""


@dataclass(frozen=True)
class EngineValue:
    """A border value. `shape` is that of one sample; `sample_axis` is None for values of a whole micro-batch."""

    name: str
    sample_axis: int | None
    dtype: str
    shape: tuple[int, ...]
    has_grad: bool


@dataclass(frozen=True)
class EngineBucket:
    """Flat trained parameters; the boxes of a bucket say which ranks have a working copy of it.

    Or mutable buffers, which have updates in place of an `optimizer`. `group` of mutable buffers: (rank, first sample,
    last + 1) of each span of each rank that runs the updating unit; only the first granule, if they change once per
    step.
    """

    name: str
    numel: int
    dtype: str
    optimizer: str | None
    hyper_group: int
    group: tuple[tuple[Rank, int, int], ...] = ()


@dataclass(frozen=True)
class EngineBufferUpdate:
    """An update of the `buffer` that a "mutable" binding names, once per granule. `values`: (dtype, shape) of what a
    unit yields for a granule."""

    program: str
    buffer: Binding
    values: tuple[tuple[str, tuple[int, ...]], ...]


@dataclass(frozen=True)
class EngineUnit:
    """A unit: programs by name, and bindings of inputs, outputs and gradients; see `artifact.Binding`.

    `backward_inputs`, `backward_weights`: the halves of the backward program, if it is split; the first returns
    `num_held` extra values for the second. `modelled`: the engine waits instead of computing the unit.
    """

    index: int
    forward: str | None
    backward: str | None
    evaluate: str | None
    inputs: tuple[Binding, ...]
    eval_inputs: tuple[Binding, ...]
    outputs: tuple[Binding, ...]
    eval_outputs: tuple[Binding, ...]
    grads: tuple[Binding, ...]
    num_saved: int
    backward_inputs: str | None = None
    backward_weights: str | None = None
    num_held: int = 0
    modelled: Kernel | None = None


@dataclass(frozen=True)
class EngineKeys:
    """Keys of random draws. The first sample of micro-batch m of step s has the key at position s * `per_step` +
    `starts`[m] of the stream of `seed`; the following samples have the next keys."""

    seed: int
    per_step: int
    starts: tuple[int, ...]


@dataclass(frozen=True)
class EngineSchedule:
    """The instructions of a step and of an evaluation. `micro_batches` in step coordinates."""

    train: tuple[Instruction, ...]
    evaluate: tuple[Instruction, ...]
    micro_batches: tuple[Span, ...]


@dataclass(frozen=True)
class EngineSpec:
    """Everything an engine needs but its tensors and programs.

    `world`: all ranks of the vote. `vote_spans`: how many rectangles of the work plane each of them computes, which
    its vote lists. `boxes`: those of the plan, the same on every rank. `units`: those of this rank's tile.
    `record_dtype`: "float32" or "bfloat16"; `copy_mode`: "log" or "state". `exact`: gradient sums are lossless and
    independent of order.
    """

    rank: Rank
    keys: EngineKeys
    global_batch: int
    granule: int
    exact: bool
    record_dtype: str
    copy_mode: str
    world: tuple[Rank, ...]
    vote_spans: tuple[int, ...]
    values: tuple[EngineValue, ...]
    buckets: tuple[EngineBucket, ...]
    boxes: tuple[Box, ...]
    updates: tuple[EngineBufferUpdate, ...]
    units: tuple[EngineUnit, ...]
    schedule: EngineSchedule

    @property
    def tables(self) -> frozenset[str]:
        """Names of the constants, frozen parameters and unchanging buffers that this rank's engine needs."""
        return frozenset(
            binding[1]
            for unit in self.units
            for binding in (*unit.inputs, *unit.eval_inputs)
            if binding[0] in ("constant", "frozen", "buffer")
        )


@dataclass(frozen=True)
class EngineJob:
    """Spec fields that no plan changes. `reshard_rng`: random draws follow the samples when these change ranks."""

    artifact: Artifact
    seed: int
    reshard_rng: bool
    record_dtype: str
    copy_mode: str


def engine_spec(job: EngineJob, plan: Plan, rank: Rank, kernels: Mapping[int, Kernel] | None = None) -> EngineSpec:
    """The spec of `rank` in `plan`. `kernels`: modelled seconds of units that are waited for instead of computed."""
    artifact = job.artifact
    train, evaluate = step_program(plan, rank), eval_program(plan, rank)
    return EngineSpec(
        rank=rank,
        keys=key_stream(job.seed, job.reshard_rng, plan, rank),
        global_batch=plan.workload.options.global_batch,
        granule=artifact.granule,
        exact=plan.workload.options.exact,
        record_dtype=job.record_dtype,
        copy_mode=job.copy_mode,
        world=plan.ranks,
        vote_spans=tuple(len(plan.tile(member).work) for member in plan.ranks),
        values=tuple(
            EngineValue(v.name, v.axis if v.axis >= 0 else None, v.dtype, v.shape, v.has_grad) for v in artifact.values
        ),
        buckets=_buckets(artifact, plan),
        boxes=plan.boxes,
        updates=_updates(artifact),
        units=tuple(_unit(artifact, index, (kernels or {}).get(index)) for index in plan.tile(rank).units),
        schedule=EngineSchedule(train.instructions, evaluate.instructions, train.micro_batches),
    )


def key_stream(seed: int, reshard: bool, plan: Plan, rank: Rank) -> EngineKeys:
    """Keys by the sample's position in the run. Without `reshard`, as in a trainer that seeds each rank and draws call
    by call: a rank with another number of samples is at another position of its stream."""
    tile = plan.tile(rank)
    if reshard:
        return EngineKeys(seed, plan.workload.options.global_batch, tuple(m.lo for m in tile.micro_batches))
    own = consecutive([len(m) for m in tile.micro_batches])
    return EngineKeys(_seed_of_rank(seed, rank), tile.sample_count, tuple(m.lo for m in own))


def _seed_of_rank(seed: int, rank: Rank) -> int:
    """A 63-bit hash; a sum would give rank 1 of a run the stream of rank 0 of the run with the next seed."""
    digest = hashlib.blake2b(f"{seed} {rank}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def _buckets(artifact: Artifact, plan: Plan) -> tuple[EngineBucket, ...]:
    folds = {fold.buffer: fold for fold in artifact.folds}

    def made(bucket: BucketSpec) -> EngineBucket:
        if not bucket.buffers:
            return EngineBucket(bucket.name, bucket.numel, bucket.dtype, UPDATE, bucket.group)
        fold = folds[bucket.buffers[0].name]
        spans = [(tile.rank, span.lo, span.hi) for tile in plan.tiles if fold.unit in tile.units for span in tile.spans]
        if fold.per_step:  # All granules yield the same value: the first stands for the step.
            first = sorted(spans, key=lambda span: span[1])[:1]  # none where the plan has no tile for this rank
            spans = [(rank, lo, lo + artifact.granule) for rank, lo, _ in first]
        return EngineBucket(bucket.name, bucket.numel, "float32", None, 0, tuple(spans))

    return tuple(made(bucket) for bucket in artifact.buckets)


def _updates(artifact: Artifact) -> tuple[EngineBufferUpdate, ...]:
    """Buffer updates in the order of the folds, as unit outputs name them by position."""
    places = {
        buffer.name: ("mutable", index, buffer.offset, buffer.shape, buffer.dtype)
        for index, bucket in enumerate(artifact.buckets)
        for buffer in bucket.buffers
    }
    return tuple(EngineBufferUpdate(f"fold.{fold.buffer}", places[fold.buffer], fold.values) for fold in artifact.folds)


def _unit(artifact: Artifact, index: int, modelled: Kernel | None) -> EngineUnit:
    unit = artifact.units[index]

    def known(name: str) -> str | None:
        return f"{unit.kind}.{name}" if f"{unit.kind}.{name}" in artifact.programs else None

    return EngineUnit(
        index=index,
        forward=f"{unit.kind}.forward",
        backward=known("backward"),
        evaluate=f"{unit.kind}.evaluate",
        inputs=unit.inputs,
        eval_inputs=unit.inputs,
        outputs=unit.outputs,
        eval_outputs=unit.eval_outputs,
        grads=tuple(binding if binding[0] in ("param", "value") else ("none",) for binding in unit.grads),
        num_saved=unit.num_saved,
        backward_inputs=known("backward_inputs"),
        backward_weights=known("backward_weights"),
        num_held=unit.num_held,
        modelled=modelled,
    )
