"""Which elements of which logical tensors a rank writes or reads: a pure function of artifact and plan.

bucket "unit3.group0" = [weight 0..6, bias 6..8), rank 1 owns [4, 8)
    ->  rank 1: model/weight [4, 6) at 0 of its slice, model/bias [0, 2) at 2
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from elaswave_fx.plan.box import BoxId, Span, numbered
from elaswave_fx.plan.plan import Plan
from elaswave_fx.program.artifact import Artifact, BucketBuffer, BucketSpec

MASTER = -1
"""`Piece.state` of the master copy; other numbers count the optimizer's state tensors."""

Slice = tuple[BoxId, int]
"""(box, MASTER or number of the state tensor) of what a rank keeps in one tensor."""


@dataclass(frozen=True)
class Piece:
    """Elements `span` of a flat logical tensor of `numel` elements.

    They begin at the element `start` of the master copy or `state`-th state tensor of the `box`, if that is looked at
    as one of `dtype`.
    """

    tensor: str
    dtype: str
    numel: int
    span: Span
    box: BoxId
    start: int
    state: int = MASTER

    @property
    def slice(self) -> Slice:
        """Which of the tensors that a rank keeps it is a part of."""
        return self.box, self.state

    def of(self, kept: torch.Tensor) -> torch.Tensor:
        """The elements as a view of that tensor, which is flat and declared as fp32."""
        return kept.view(getattr(torch, self.dtype)).narrow(0, self.start, len(self.span))


def logical_tensors(artifact: Artifact, state_tensors: int) -> dict[str, tuple[tuple[int, ...], str]]:
    """Return name -> (shape, dtype) of everything in a checkpoint. `state_tensors`: how many the optimizer keeps per
    parameter."""
    found: dict[str, tuple[tuple[int, ...], str]] = {}
    for bucket in artifact.buckets:
        for param in bucket.params:
            for state in range(MASTER, state_tensors):
                found[tensor_name(param.name, state)] = (param.shape, "float32")
        for buffer in bucket.buffers:
            found[f"buffer/{buffer.name}"] = (buffer.shape, buffer.dtype)
    return found


def tensor_name(param: str, state: int) -> str:
    """The logical tensor of a parameter's master copy or `state`-th optimizer state."""
    return f"model/{param}" if state == MASTER else f"optimizer/{state}/{param}"


def frozen_parameters(artifact: Artifact) -> tuple[str, ...]:
    """Parameters that training leaves alone: they are in no bucket, and in no checkpoint."""
    trained = {param.name for bucket in artifact.buckets for param in bucket.params}
    return tuple(info.name for info in artifact.params if info.name not in trained)


def owned_pieces(artifact: Artifact, plan: Plan, rank: int, state_tensors: int) -> tuple[Piece, ...]:
    """Return what `rank` writes: the boxes that it owns.

    Over all ranks of the plan every element is in exactly one piece.
    """
    return tuple(_of_boxes(artifact, plan, [rank == box.owner for box in plan.boxes], state_tensors))


def wanted_pieces(artifact: Artifact, plan: Plan, rank: int, state_tensors: int) -> tuple[Piece, ...]:
    """Return what `rank` reads: every box that it owns or holds."""
    return tuple(_of_boxes(artifact, plan, [rank in box.replica_ranks for box in plan.boxes], state_tensors))


def _of_boxes(artifact: Artifact, plan: Plan, chosen: Sequence[bool], state_tensors: int) -> Iterator[Piece]:
    for box_id, box in numbered(plan.boxes):
        bucket = artifact.buckets[box.bucket]
        if chosen[box_id]:
            yield from (_of_buffer(buffer, box_id) for buffer in bucket.buffers)
            for state in range(MASTER, state_tensors):
                yield from _of_box(bucket, box.span, box_id, state)


def _of_box(bucket: BucketSpec, span: Span, box: BoxId, state: int) -> Iterator[Piece]:
    for param in bucket.params:
        numel = math.prod(param.shape)
        whole = Span(param.offset, param.offset + numel)
        common = whole.intersect(span)
        if common is not None:
            name, elements = tensor_name(param.name, state), common.relative_to(whole)
            yield Piece(name, "float32", numel, elements, box, common.lo - span.lo, state)


def _of_buffer(buffer: BucketBuffer, box: BoxId) -> Piece:
    """A whole buffer: its box is never cut."""
    numel = math.prod(buffer.shape)
    start = buffer.offset * torch.float32.itemsize // getattr(torch, buffer.dtype).itemsize
    return Piece(f"buffer/{buffer.name}", buffer.dtype, numel, Span(0, numel), box, start)
