"""The rectangles of logical tensors that a rank writes or reads, and their keys: a pure function of artifact and plan.

bucket "unit3.group0" = [weight 2x3 0..6, bias 6..8), rank 1 owns [2, 8)
    ->  rank 1: model/weight [0:1, 2:3] at 0 of its slice, [1:2, 0:3] at 1; model/bias [0:2] at 4
key_paths(["model/weight"], {"weight": "weight"})  ->  {"model/weight": (("model", "weight"),)}
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from elaswave_fx.plan.plan import Plan
from elaswave_fx.plan.work.box import BoxId, numbered
from elaswave_fx.plan.work.spans import Span
from elaswave_fx.program.artifact import Artifact, BucketBuffer, BucketSpec

MASTER = -1
"""`Piece.state` of the master copy; other numbers count the optimizer's state tensors."""

Slice = tuple[BoxId, int]
"""(box, MASTER or number of the state tensor): the key of one tensor that a rank keeps."""


KeyPath = tuple[str | int, ...]
"""The path of a tensor in a nested state dict: ("model", "head.weight"), ("optimizer", "head.weight", 0)."""

UNCHANGED = "unchanged/"
"""Prefix of the names of tensors that training does not change."""

STATE_DICT = "model"
"""The key of the model's own state dict."""

_BESIDE = {"model": "parameters", "buffer": "buffers"}
"""Kind of logical tensor -> key of those that are in no state dict of the model."""


@dataclass(frozen=True)
class Piece:
    """The elements `span`, in row-major order, of a logical tensor of this shape; they form a rectangle of it.

    They begin at element `start` of the master copy, or of the `state`-th state tensor, of the `box`, viewed as
    `dtype`.
    """

    tensor: str
    dtype: str
    shape: tuple[int, ...]
    span: Span
    box: BoxId
    start: int
    state: int = MASTER

    @property
    def offsets(self) -> tuple[int, ...]:
        return tuple(first for first, _ in _rectangle(self.shape, self.span))

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(count for _, count in _rectangle(self.shape, self.span))

    def flat(self) -> Piece:
        """The same elements of the flattened tensor."""
        return replace(self, shape=(math.prod(self.shape),))

    @property
    def slice(self) -> Slice:
        """The tensor of the rank that contains the piece."""
        return self.box, self.state

    def of(self, kept: torch.Tensor) -> torch.Tensor:
        """The rectangle as a view of `kept`, the flat tensor that is declared as fp32."""
        return kept.view(getattr(torch, self.dtype)).narrow(0, self.start, len(self.span)).view(self.sizes)


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


def key_paths(tensors: Iterable[str], state_dict: Mapping[str, str]) -> dict[str, tuple[KeyPath, ...]]:
    """Logical tensor -> its paths in a checkpoint; several names of the model may mean one tensor.

    Args:
        state_dict: key of the model's own state dict -> logical tensor. Tensors in no state dict, such as
            non-persistent buffers, get a path beside it.
    """
    keys: dict[str, list[str]] = {}
    for key, tensor in state_dict.items():
        keys.setdefault(tensor, []).append(key)
    found: dict[str, tuple[KeyPath, ...]] = {}
    for tensor in tensors:
        kind, _, name = tensor.partition("/")
        if kind == "optimizer":
            state, _, name = name.partition("/")
            (first, *_) = keys.get(tensor_name(name, MASTER), [name])
            found[tensor] = (("optimizer", first, int(state)),)
        elif tensor in keys:
            found[tensor] = tuple((STATE_DICT, key) for key in keys[tensor])
        else:
            found[tensor] = ((_BESIDE[kind], name),)
    return found


def unchanged_pieces(unchanged: Mapping[str, tuple[tuple[int, ...], str]]) -> tuple[Piece, ...]:
    """Pieces of whole tensors, name -> (shape, dtype), that training does not change: they are in no box."""
    return tuple(
        Piece(name, dtype, shape, Span(0, math.prod(shape)), BoxId(-1), 0) for name, (shape, dtype) in unchanged.items()
    )


def frozen_parameters(artifact: Artifact) -> tuple[str, ...]:
    """Parameters that training does not change: they are in no bucket and in no checkpoint."""
    trained = {param.name for bucket in artifact.buckets for param in bucket.params}
    return tuple(info.name for info in artifact.params if info.name not in trained)


def owned_pieces(artifact: Artifact, plan: Plan, rank: int, state_tensors: int) -> tuple[Piece, ...]:
    """Return what `rank` writes: the boxes that it owns.

    Over all ranks of the plan every element is in exactly one piece.
    """
    return tuple(_of_boxes(artifact, plan, [rank == box.owner for box in plan.boxes], state_tensors))


def wanted_pieces(artifact: Artifact, plan: Plan, rank: int, state_tensors: int) -> tuple[Piece, ...]:
    """Return what `rank` reads: every box of which it has a replica."""
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
        whole = Span(param.offset, param.offset + math.prod(param.shape))
        common = whole.intersect(span)
        if common is not None:
            name, first = tensor_name(param.name, state), whole.lo - span.lo
            for part in rectangles(param.shape, common.relative_to(whole)):
                yield Piece(name, "float32", param.shape, part, box, first + part.lo, state)


def _of_buffer(buffer: BucketBuffer, box: BoxId) -> Piece:
    """A whole buffer: its box is never cut."""
    start = buffer.offset * torch.float32.itemsize // getattr(torch, buffer.dtype).itemsize
    return Piece(f"buffer/{buffer.name}", buffer.dtype, buffer.shape, Span(0, math.prod(buffer.shape)), box, start)


def rectangles(shape: tuple[int, ...], span: Span) -> Iterator[Span]:
    """Split row-major elements into few rectangles: whole rows, and parts of the first and last row, split likewise."""
    row = math.prod(shape[1:])
    if len(shape) < 2 or not row:
        yield span
        return
    first, last = -(-span.lo // row) * row, span.hi // row * row
    if first > last:  # Within one row.
        yield from _within(shape, span)
        return
    if span.lo < first:
        yield from _within(shape, Span(span.lo, first))
    if first < last:
        yield Span(first, last)
    if last < span.hi:
        yield from _within(shape, Span(last, span.hi))


def _within(shape: tuple[int, ...], span: Span) -> Iterator[Span]:
    """Yield the rectangles of a part of one row."""
    start = span.lo // math.prod(shape[1:]) * math.prod(shape[1:])
    for part in rectangles(shape[1:], Span(span.lo - start, span.hi - start)):
        yield Span(part.lo + start, part.hi + start)


def _rectangle(shape: tuple[int, ...], span: Span) -> tuple[tuple[int, int], ...]:
    """(first index, size) in every dimension of a rectangle."""
    found, lo, numel = [], span.lo, len(span)
    for dimension, size in enumerate(shape):
        row = math.prod(shape[dimension + 1 :])
        count = min(max(1, numel // row), size) if row else size
        found.append((lo // row if row else 0, count))
        lo, numel = lo % row if row else 0, numel if count == 1 else row
    return tuple(found)
