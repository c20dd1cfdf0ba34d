"""Which elements of which logical tensors a rank writes or reads: a pure function of artifact and plan.

bucket "unit3.group0" = [weight 0..6, bias 6..8), rank 1 owns [4, 8)
    ->  rank 1: model/weight [4, 6) at 0 of its slice, model/bias [0, 2) at 2
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from elaswave_fx.plan.box import BoxId, Span, numbered
from elaswave_fx.plan.plan import Plan
from elaswave_fx.program.artifact import Artifact, BucketSpec, TensorInfo

MASTER = -1
"""`Piece.state` of the master copy; other numbers count the optimizer's state tensors."""

Slice = tuple[str, BoxId | None, int]
"""(bucket, box, MASTER or number of the state tensor) of what a rank keeps in one tensor; (buffer, None, MASTER) of a
mutable buffer, which every rank of its unit keeps whole."""


@dataclass(frozen=True)
class Piece:
    """Elements `span` of a flat logical tensor of `numel` elements.

    `source` names the bucket or the mutable buffer that holds them. They begin at `start` of the buffer, or of the
    master copy or `state`-th state tensor of the `box`.
    """

    tensor: str
    dtype: str
    numel: int
    span: Span
    source: str
    start: int
    state: int = MASTER
    box: BoxId | None = None

    @property
    def slice(self) -> Slice:
        """Which of the tensors that a rank keeps it is a part of."""
        return self.source, self.box, self.state

    @property
    def is_buffer(self) -> bool:
        """Whether `source` is a mutable buffer and no bucket."""
        return self.box is None


def logical_tensors(artifact: Artifact, state_tensors: int) -> dict[str, tuple[tuple[int, ...], str]]:
    """Return name -> (shape, dtype) of everything in a checkpoint. `state_tensors`: how many the optimizer keeps per
    parameter."""
    found: dict[str, tuple[tuple[int, ...], str]] = {}
    for bucket in artifact.buckets:
        for param in bucket.params:
            for state in range(MASTER, state_tensors):
                found[tensor_name(param.name, state)] = (param.shape, "float32")
    for info in mutable_buffers(artifact):
        found[f"buffer/{info.name}"] = (info.shape, info.dtype)
    return found


def tensor_name(param: str, state: int) -> str:
    """The logical tensor of a parameter's master copy or `state`-th optimizer state."""
    return f"model/{param}" if state == MASTER else f"optimizer/{state}/{param}"


def mutable_buffers(artifact: Artifact) -> tuple[TensorInfo, ...]:
    """The buffers that training changes."""
    folded = {fold.buffer for fold in artifact.folds}
    return tuple(info for info in artifact.buffers if info.name in folded)


def frozen_parameters(artifact: Artifact) -> tuple[str, ...]:
    """Parameters that training leaves alone: they are in no bucket, and in no checkpoint."""
    trained = {param.name for bucket in artifact.buckets for param in bucket.params}
    return tuple(info.name for info in artifact.params if info.name not in trained)


def owned_pieces(artifact: Artifact, plan: Plan, rank: int, state_tensors: int) -> tuple[Piece, ...]:
    """Return what `rank` writes: the boxes that it owns; the first rank also the mutable buffers, which every rank
    keeps.

    Over all ranks of the plan every element is in exactly one piece.
    """
    pieces = list(_of_boxes(artifact, plan, [rank == box.owner for box in plan.boxes], state_tensors))
    if rank == plan.ranks[0]:
        pieces += [_whole(info) for info in mutable_buffers(artifact)]
    return tuple(pieces)


def wanted_pieces(artifact: Artifact, plan: Plan, rank: int, state_tensors: int) -> tuple[Piece, ...]:
    """Return what `rank` reads: every box that it owns or holds, and every mutable buffer."""
    pieces = _of_boxes(artifact, plan, [rank in box.replica_ranks for box in plan.boxes], state_tensors)
    return (*pieces, *(_whole(info) for info in mutable_buffers(artifact)))


def _of_boxes(artifact: Artifact, plan: Plan, chosen: Sequence[bool], state_tensors: int) -> Iterator[Piece]:
    for box_id, box in numbered(plan.boxes):
        if chosen[box_id]:
            for state in range(MASTER, state_tensors):
                yield from _of_box(artifact.buckets[box.bucket], box.span, box_id, state)


def _of_box(bucket: BucketSpec, span: Span, box: BoxId, state: int) -> Iterator[Piece]:
    for param in bucket.params:
        numel = math.prod(param.shape)
        whole = Span(param.offset, param.offset + numel)
        common = whole.intersect(span)
        if common is not None:
            name, elements = tensor_name(param.name, state), common.relative_to(whole)
            yield Piece(name, "float32", numel, elements, bucket.name, common.lo - span.lo, state, box)


def _whole(info: TensorInfo) -> Piece:
    numel = math.prod(info.shape)
    return Piece(f"buffer/{info.name}", info.dtype, numel, Span(0, numel), info.name, 0)
