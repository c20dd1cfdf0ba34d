"""A small model declared to the engine by hand, tilings of it with their step lists, and autograd as the reference.

The model has three units, a value with two consumers and a tied matrix:

    0: h = dropout(relu(x A^T + b0))      1: g = relu(h B^T + b1)      2: loss = sum(((g + h) A^T - y)^2), count = numel
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from elaswave_fx import _native
from elaswave_fx.checkpoint.initial_state import buffer_view
from elaswave_fx.passes.unit_program import lower_graph
from elaswave_fx.plan.lower.engine_spec import (
    UPDATE,
    EngineBucket,
    EngineBufferUpdate,
    EngineKeys,
    EngineSchedule,
    EngineSpec,
    EngineUnit,
    EngineValue,
)
from elaswave_fx.plan.work import box as plan_box
from elaswave_fx.plan.work.spans import Span
from elaswave_fx.plan.work.topology import Rank
from elaswave_fx.program.artifact import BucketBuffer

ops = torch.ops.elaswave
WIDTH, BATCH, SEED = 6, 8, 42
TEST_TIMEOUT_S = 60.0
"""Far more than anything takes."""
LR, MOMENTUM = 0.05, 0.9
P = 0.25


def dropout(x: Tensor, keys: Tensor) -> Tensor:
    return ops.keyed_dropout(x, keys, P, 0, 0, 1)


# --- Units: forward gives outputs and what is saved, backward gives gradients; in halves it gives those of values and
# what is held, then those of parameters. `axis` 1: the border value h is h^T.


def forward0(axis: int) -> Callable[..., Any]:
    def forward(x: Tensor, a: Tensor, b: Tensor, keys: Tensor) -> Any:
        r = torch.relu(torch.addmm(b, x, a.t()))
        h = dropout(r, keys)
        return h.t() if axis == 1 else h, x, r, keys

    return forward


def backward0(axis: int) -> Callable[..., Any]:
    def backward(x: Tensor, r: Tensor, keys: Tensor, dh: Tensor) -> Any:
        d = dropout(dh.t() if axis == 1 else dh, keys) * (r > 0)
        return d.t() @ x, d.sum(0)

    return backward


def inputs0(x: Tensor, r: Tensor, keys: Tensor, dh: Tensor) -> Any:
    return None, None, x, r, keys, dh


def forward1(axis: int) -> Callable[..., Any]:
    def forward(h: Tensor, b_matrix: Tensor, b: Tensor) -> Any:
        h = h.t() if axis == 1 else h
        r = torch.relu(torch.addmm(b, h, b_matrix.t()))
        return r, r, h, b_matrix

    return forward


def backward1(axis: int) -> Callable[..., Any]:
    def backward(r: Tensor, h: Tensor, b_matrix: Tensor, dg: Tensor) -> Any:
        d = dg * (r > 0)
        dh = d @ b_matrix
        return dh.t() if axis == 1 else dh, d.t() @ h, d.sum(0)

    return backward


def inputs1(axis: int) -> Callable[..., Any]:
    def inputs(r: Tensor, h: Tensor, b_matrix: Tensor, dg: Tensor) -> Any:
        d = dg * (r > 0)
        dh = d @ b_matrix
        return dh.t() if axis == 1 else dh, None, None, d, h

    return inputs


def weights1(d: Tensor, h: Tensor) -> Any:
    return None, d.t() @ h, d.sum(0)


def forward2(axis: int) -> Callable[..., Any]:
    def forward(g: Tensor, h: Tensor, a: Tensor, y: Tensor) -> Any:
        s = g + (h.t() if axis == 1 else h)
        e = s @ a.t() - y
        return (e * e).sum(), torch.ones_like(e).sum(), s, e, a

    return forward


def backward2(axis: int) -> Callable[..., Any]:
    def backward(s: Tensor, e: Tensor, a: Tensor, tangent: Tensor) -> Any:
        d = e * 2.0 * tangent
        ds = d @ a
        return ds, ds.t() if axis == 1 else ds, d.t() @ s

    return backward


def inputs2(axis: int) -> Callable[..., Any]:
    def inputs(s: Tensor, e: Tensor, a: Tensor, tangent: Tensor) -> Any:
        d = e * 2.0 * tangent
        ds = d @ a
        return ds, ds.t() if axis == 1 else ds, None, d, s

    return inputs


def weights2(d: Tensor, s: Tensor) -> Any:
    return None, None, d.t() @ s


HELD = {0: 4, 1: 2, 2: 2}
"""Unit -> what is held between its halves."""


def evaluated(forward: Callable[..., Any], outputs: int) -> Callable[..., Any]:
    return lambda *args: forward(*args)[:outputs]


def program(function: Callable[..., Any], *examples: Tensor) -> dict[str, Any]:
    distinct = [example.clone() for example in examples]  # one object given twice would be captured as one input
    return lower_graph("", make_fx(function, tracing_mode="fake")(*distinct))


def update(master: Tensor, grad: Tensor, momentum: Tensor, scale: Tensor, lr: Tensor) -> tuple[Tensor, Tensor]:
    momentum = momentum * MOMENTUM + grad * scale
    return master - lr * momentum, momentum


@dataclass(frozen=True)
class Model:
    """Programs by name, traced once; `axis` is where samples lie in h."""

    axis: int = 0
    programs: dict[str, Any] = field(default_factory=dict)

    @staticmethod
    def of(axis: int) -> Model:
        x, w, b = torch.randn(3, WIDTH), torch.randn(WIDTH, WIDTH), torch.randn(WIDTH)
        h = x.t() if axis == 1 else x
        keys, one = ops.sample_keys(0, 0, 3, 0), torch.ones(())
        s = torch.ones(2)
        made = {
            "0.forward": program(forward0(axis), x, w, b, keys),
            "0.backward": program(backward0(axis), x, x, keys, h),
            "1.forward": program(forward1(axis), h, w, b),
            "1.backward": program(backward1(axis), x, x, w, x),
            "2.forward": program(forward2(axis), x, h, w, x),
            "2.backward": program(backward2(axis), x, x, w, one),
            "0.backward_inputs": program(inputs0, x, x, keys, h),
            "0.backward_weights": program(backward0(axis), x, x, keys, h),
            "1.backward_inputs": program(inputs1(axis), x, x, w, x),
            "1.backward_weights": program(weights1, x, x),
            "2.backward_inputs": program(inputs2(axis), x, x, w, one),
            "2.backward_weights": program(weights2, x, x),
            "0.eval": program(lambda x, a, b: (torch.relu(torch.addmm(b, x, a.t())),), x, w, b),
            "1.eval": program(evaluated(forward1(0), 1), x, w, b),
            "2.eval": program(evaluated(forward2(0), 2), x, x, w, x),
            UPDATE: program(update, s, s, s, one, one),
        }
        if axis == 1:
            made["0.eval"] = program(lambda x, a, b: (torch.relu(torch.addmm(b, x, a.t())).t(),), x, w, b)
            made["1.eval"] = program(evaluated(forward1(1), 1), h, w, b)
            made["2.eval"] = program(evaluated(forward2(1), 2), x, h, w, x)
        return Model(axis, made)


MATRIX = WIDTH * WIDTH
BUCKETS = {"tied": (MATRIX, (0, 2)), "bias0": (WIDTH, (0,)), "unit1": (MATRIX + WIDTH, (1,))}
BUFFERS = "buffers"
"""The bucket after these, where unit 0 has buffers that training changes; unit 1 reads them and yields nothing."""
USERS = {**{name: users for name, (_, users) in BUCKETS.items()}, BUFFERS: (0, 1)}
H, G = 0, 1
VALUES = {H: (0, 1, 2), G: (1, 2)}
"""Value -> its users in unit order, the producer first."""


def initial() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(7)
    return {name: 0.4 * torch.randn(numel, generator=generator) for name, (numel, _) in BUCKETS.items()}


def batch(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    return {name: torch.randn(BATCH, WIDTH, generator=generator) for name in ("x", "y")}


# --- Tilings and their step programs, derived here apart from elaswave_fx.plan.


@dataclass(frozen=True)
class Tile:
    units: tuple[int, int]
    micro_batches: tuple[tuple[int, int], ...]

    def holds(self, unit: int) -> bool:
        return self.units[0] <= unit < self.units[1]

    @property
    def spans(self) -> int:
        """How many of its micro-batches do not adjoin the one before."""
        return 1 + sum(a[1] != b[0] for a, b in pairwise(self.micro_batches))


Tiling = dict[int, Tile]
"""Rank -> tile."""

ALONE: Tiling = {0: Tile((0, 3), ((0, 8),))}
TILINGS: dict[str, Tiling] = {
    "alone": ALONE,
    "uneven micro-batches": {0: Tile((0, 3), ((0, 3), (3, 4), (4, 8)))},
    "pipeline": {0: Tile((0, 1), ((0, 4), (4, 8))), 1: Tile((1, 3), ((0, 4), (4, 8)))},
    "deep pipeline": {r: Tile((r, r + 1), ((0, 2), (2, 4), (4, 8))) for r in range(3)},
    "data parallel": {0: Tile((0, 3), ((0, 3), (3, 5))), 1: Tile((0, 3), ((5, 8),))},
    "every second sample": {r: Tile((0, 3), tuple((i, i + 1) for i in range(r, 8, 2))) for r in range(2)},
    "rows of other widths": {
        0: Tile((0, 1), ((0, 4), (4, 8))),
        1: Tile((1, 3), ((0, 3),)),
        2: Tile((1, 3), ((3, 5), (5, 8))),
    },
    "columns of other cuts": {
        0: Tile((0, 1), ((0, 2), (2, 5))),
        1: Tile((1, 3), ((0, 2), (2, 5))),
        2: Tile((0, 2), ((5, 6), (6, 8))),
        3: Tile((2, 3), ((5, 6), (6, 8))),
    },
}


def neighbours(tiling: Tiling, rank: int, value: int, forward: bool) -> list[tuple[int, int, int, int, int]]:
    """Pieces that come from the previous user's ranks (forward) or the next one's: (mb, peer, peer's mb, lo, hi)."""
    tile = tiling[rank]
    users = [u for u in VALUES[value] if tile.holds(u)]
    if not users:
        return []
    others = [u for u in VALUES[value] if (u < users[0] if forward else u > users[-1])]
    if not others:
        return []
    user = max(others) if forward else min(others)
    return [
        (mb, peer, peer_mb, max(lo, other_lo), min(hi, other_hi))
        for mb, (lo, hi) in enumerate(tile.micro_batches)
        for peer, other in tiling.items() if other.holds(user)
        for peer_mb, (other_lo, other_hi) in enumerate(other.micro_batches)
        if max(lo, other_lo) < min(hi, other_hi)
    ]  # fmt: skip


def transfers(tiling: Tiling, rank: int, op: str, grad: int, mb: int) -> list[tuple[Any, ...]]:
    """RECV or SEND instructions of a micro-batch."""
    found = []
    upstream = (op == "RECV") == (grad == 0)
    for value in VALUES:
        for own_mb, peer, peer_mb, lo, hi in neighbours(tiling, rank, value, upstream):
            if own_mb != mb:
                continue
            first = tiling[rank].micro_batches[mb][0]
            target, source = (mb, peer_mb) if op == "RECV" else (peer_mb, mb)
            tag = (2 if grad else 1) << 56 | value << 32 | target << 16 | source
            found.append((op, value, mb, peer, tag, lo - first, hi - first, grad))
    return found


Step = tuple[str | int, ...]


def train_list(tiling: Tiling, rank: int, split: bool = False, buffers: Box | None = None) -> list[Step]:
    """All forward passes, then all backward ones; `split`: then all their second halves. `buffers`: their box."""
    tile = tiling[rank]
    backward = "BACKWARD_INPUTS" if split else "BACKWARD"
    units = list(range(*tile.units))
    steps: list[Step] = []
    for mb in range(len(tile.micro_batches)):
        steps += transfers(tiling, rank, "RECV", 0, mb)
        steps += [("FORWARD", unit, mb) for unit in units]
        steps += transfers(tiling, rank, "SEND", 0, mb)
    for mb in range(len(tile.micro_batches)):
        steps += transfers(tiling, rank, "RECV", 1, mb)
        steps += [(backward, unit, mb) for unit in reversed(units)]
        steps += transfers(tiling, rank, "SEND", 1, mb)
    if split:
        steps += [("BACKWARD_WEIGHTS", u, mb) for mb in range(len(tile.micro_batches)) for u in reversed(units)]
    held = [i for i, (_, users) in enumerate(BUCKETS.values()) if any(tile.holds(u) for u in users)]
    if buffers is not None and (rank in readers(tiling, BUFFERS) or buffers.owner == rank):
        held.append(len(BUCKETS))
    steps += [("REDUCE", bucket) for bucket in held]
    steps.append(("VOTE",))
    for bucket in held:
        steps += [("UPDATE", bucket), ("GATHER", bucket)]
    return [*steps, ("SNAPSHOT",)]


def eval_list(tiling: Tiling, rank: int) -> list[Step]:
    steps: list[Step] = []
    for mb in range(len(tiling[rank].micro_batches)):
        steps += transfers(tiling, rank, "RECV", 0, mb)
        steps += [("FORWARD", unit, mb) for unit in range(*tiling[rank].units)]
        steps += transfers(tiling, rank, "SEND", 0, mb)
    return steps


def schedule(tiling: Tiling, rank: int, steps: Sequence[Step], evaluate: Sequence[Step] = ()) -> EngineSchedule:
    """Lists of a rank's steps with its micro-batches."""
    tile = tiling[rank]
    return EngineSchedule(tuple(steps), tuple(evaluate), tuple(Span(*m) for m in tile.micro_batches))


def keys(tiling: Tiling, rank: int) -> EngineKeys:
    """Of the samples, wherever they are."""
    return EngineKeys(SEED, BATCH, tuple(lo for lo, _ in tiling[rank].micro_batches))


def unit_bindings() -> dict[int, dict[str, Any]]:
    """Where inputs, outputs and gradients of every unit go."""
    tied = ("param", 0, 0, (WIDTH, WIDTH))
    bias0 = ("param", 1, 0, (WIDTH,))
    matrix, bias1 = ("param", 2, 0, (WIDTH, WIDTH)), ("param", 2, MATRIX, (WIDTH,))
    x, y = ("input", "x"), ("input", "y")
    return {
        0: {
            "inputs": (x, tied, bias0, ("keys",)), "eval_inputs": (x, tied, bias0), "outputs": (("value", H),),
            "grads": (tied, bias0),
        },
        1: {
            "inputs": (("value", H), matrix, bias1), "outputs": (("value", G),),
            "grads": (("value", H), matrix, bias1),
        },
        2: {
            "inputs": (("value", G), ("value", H), tied, y), "outputs": (("loss",), ("count",)),
            "grads": (("value", G), ("value", H), tied),
        },
    }  # fmt: skip


def make_unit(unit: int, **changes: Any) -> EngineUnit:
    """A unit of the model; in evaluation it reads and makes the same unless it is told otherwise."""
    bound = unit_bindings().get(unit, {}) | changes
    return EngineUnit(
        **{"index": unit, "forward": f"{unit}.forward", "backward": f"{unit}.backward", "evaluate": f"{unit}.eval",
           "eval_inputs": bound["inputs"], "eval_outputs": bound["outputs"], "num_saved": 3, **bound}
    )  # fmt: skip


def halves(unit: int) -> dict[str, Any]:
    """The programs of a unit's backward pass in halves, as changes for `make_unit`."""
    names = {half: f"{unit}.{half}" for half in ("backward_inputs", "backward_weights")}
    return {**names, "num_held": HELD[unit]}


@dataclass(frozen=True)
class Box:
    bucket: str
    lo: int
    hi: int
    owner: int
    holders: tuple[int, ...] = ()


def even_boxes(tiling: Tiling) -> list[Box]:
    """Every bucket cut evenly over the ranks of its first user; no replicas."""
    found = []
    for name, (numel, users) in BUCKETS.items():
        owners = [r for r, tile in tiling.items() if tile.holds(users[0])]
        cuts = [numel * i // len(owners) for i in range(len(owners) + 1)]
        found += [Box(name, cuts[i], cuts[i + 1], owner) for i, owner in enumerate(owners)]
    return found


def everybody(tiling: Tiling) -> list[list[int]]:
    """The ranks that compute with each bucket: all of them want its working copy."""
    return [readers(tiling, name) for name in BUCKETS]


def readers(tiling: Tiling, bucket: str) -> list[int]:
    return [r for r, tile in tiling.items() if any(tile.holds(u) for u in USERS[bucket])]


@dataclass(frozen=True)
class Changing:
    """Buffers of unit 0 that training changes: its `forward` program with their values after its output, and by name
    what each buffer is at first, the shape of the fp32 value that a granule yields for it, if any, and the program of
    its update."""

    forward: dict[str, Any]
    buffers: dict[str, Tensor]
    values: dict[str, tuple[int, ...]]
    folds: dict[str, dict[str, Any]]

    @property
    def places(self) -> tuple[BucketBuffer, ...]:
        """One after the other, each at a multiple of 8 bytes."""
        found, offset = [], 0
        for name, tensor in self.buffers.items():
            dtype = str(tensor.dtype).removeprefix("torch.")
            found.append(BucketBuffer(name, offset, tuple(tensor.shape), dtype))
            offset += 2 * -(-tensor.nbytes // 8)
        return tuple(found)

    @property
    def words(self) -> Tensor:
        """All of them as their box has them."""
        flat = torch.zeros(2 * sum(-(-tensor.nbytes // 8) for tensor in self.buffers.values()))
        for place in self.places:
            buffer_view(flat, place).copy_(self.buffers[place.name])
        return flat

    def of(self, flat: Tensor) -> dict[str, Tensor]:
        """By name, from such a box."""
        return {place.name: buffer_view(flat, place).clone() for place in self.places}

    def binding(self, place: BucketBuffer) -> tuple[Any, ...]:
        return ("mutable", len(BUCKETS), place.offset, place.shape, place.dtype)

    def updates(self) -> tuple[EngineBufferUpdate, ...]:
        values = {name: (("float32", shape),) for name, shape in self.values.items()}
        return tuple(EngineBufferUpdate(f"fold.{p.name}", self.binding(p), values.get(p.name, ())) for p in self.places)

    @property
    def outputs(self) -> tuple[tuple[Any, ...], ...]:
        return tuple(("fold", i, 0) for i, name in enumerate(self.buffers) if name in self.values)

    def bucket(self, tiling: Tiling) -> EngineBucket:
        group = tuple((Rank(r), first(t), t.micro_batches[-1][1]) for r, t in tiling.items() if t.holds(0))
        return EngineBucket(BUFFERS, len(self.words), "float32", None, 0, group)

    def box(self, owner: int, *holders: int) -> Box:
        return Box(BUFFERS, 0, len(self.words), owner, holders)


def make_spec(
    model: Model,
    tiling: Tiling,
    rank: int,
    work_dtype: torch.dtype = torch.float32,
    granule: int = 1,
    changing: Changing | None = None,
    boxes: Sequence[Box] | None = None,
    modelled: Callable[[int], Any] = lambda unit: None,
    record_dtype: str = "float32",
    exact: bool = False,
    copy_mode: str = "log",
    split: bool = False,
) -> EngineSpec:
    """All that the engine of a rank is told. The box of buffers comes last."""
    boxes = tuple(boxes) if boxes is not None else tuple(even_boxes(tiling))
    if changing is not None and boxes[-1].bucket != BUFFERS:
        boxes += (changing.box(readers(tiling, BUFFERS)[0]),)
    dtype = str(work_dtype).removeprefix("torch.")
    shape = (WIDTH, 1) if model.axis == 1 else (1, WIDTH)
    yields: dict[str, Any] = {}
    if changing is not None:
        yields = {"outputs": (("value", H), *changing.outputs), "eval_outputs": (("value", H),)}
    return EngineSpec(
        rank=Rank(rank), keys=keys(tiling, rank), global_batch=BATCH, granule=granule, exact=exact,
        record_dtype=record_dtype, copy_mode=copy_mode, world=tuple(Rank(r) for r in tiling),
        vote_spans=tuple(tile.spans for tile in tiling.values()),
        values=(EngineValue("h", model.axis, dtype, shape, True), EngineValue("g", 0, dtype, (1, WIDTH), True)),
        buckets=(
            *(EngineBucket(name, numel, dtype, UPDATE, 0) for name, (numel, _) in BUCKETS.items()),
            *(() if changing is None else (changing.bucket(tiling),)),
        ),
        boxes=planned(boxes, tiling),
        updates=() if changing is None else changing.updates(),
        units=tuple(
            make_unit(unit, modelled=modelled(unit), **halves(unit), **(yields if unit == 0 else {}))
            for unit in range(*tiling[rank].units)
        ),
        schedule=schedule(
            tiling, rank, train_list(tiling, rank, split, None if changing is None else boxes[-1]),
            eval_list(tiling, rank),
        ),
    )  # fmt: skip


def planned(boxes: Sequence[Box], tiling: Tiling) -> tuple[plan_box.Box, ...]:
    """Boxes as a plan has them, read by all ranks with a unit that uses their bucket."""
    return tuple(
        plan_box.Box(
            list(USERS).index(b.bucket), Span(b.lo, b.hi), Rank(b.owner), tuple(Rank(h) for h in b.holders),
            readers=tuple(Rank(r) for r in readers(tiling, b.bucket)),
        )
        for b in boxes
    )  # fmt: skip


def running_statistics(dtype: torch.dtype = torch.float32) -> Changing:
    """Of granules of two samples: mean' = 0.9 mean + 0.1 mean of the granule, kept in `dtype`; number' = 2 number + its
    sum; granules' = granules + 1."""

    def forward(x: Tensor, a: Tensor, b: Tensor, keys: Tensor) -> Any:
        r = torch.relu(torch.addmm(b, x, a.t()))
        return dropout(r, keys), x.mean(0), x.sum(), x, r, keys

    x, w, b = torch.randn(2, WIDTH), torch.randn(WIDTH, WIDTH), torch.randn(WIDTH)
    one, count = torch.ones(()), torch.zeros((), dtype=torch.int64)
    folds = {
        "mean": program(lambda mean, granule: (mean * 0.9 + granule * 0.1,), b, b),
        "number": program(lambda number, total: (number * 2 + total,), one, one),
        "granules": program(lambda granules: (granules + 1,), count),
    }
    buffers = {"mean": torch.zeros(WIDTH, dtype=dtype), "number": one, "granules": count}
    forward0 = program(forward, x, w, b, ops.sample_keys(0, 0, 2, 0))
    return Changing(forward0, buffers, {"mean": (WIDTH,), "number": ()}, folds)


def statistics_after(steps: int) -> dict[str, Tensor]:
    """What they are in fp32 after so many steps on one rank."""
    mean, number, granules = torch.zeros(WIDTH), torch.ones(()), torch.zeros((), dtype=torch.int64)
    for step in range(steps):
        for granule in batch(step)["x"].split(2):
            mean, number, granules = mean * 0.9 + granule.mean(0) * 0.1, number * 2 + granule.sum(), granules + 1
    return {"mean": mean, "number": number, "granules": granules}


def make_engine(
    model: Model, tiling: Tiling, rank: int, endpoint: _native.Endpoint | None = None,
    changing: Changing | None = None, **options: Any,
) -> _native.Engine:  # fmt: skip
    """An engine with its first state, ready for its first step; `options` are those of `make_spec`."""
    return loaded(make_spec(model, tiling, rank, changing=changing, **options), model, endpoint, changing)


def loaded(
    spec: EngineSpec, model: Model, endpoint: _native.Endpoint | None = None, changing: Changing | None = None
) -> _native.Engine:
    """An engine of that spec with its first state."""
    programs, begin = model.programs, initial()
    if changing is not None:
        folds = {f"fold.{name}": fold for name, fold in changing.folds.items()}
        programs, begin = {**programs, "0.forward": changing.forward, **folds}, {**begin, BUFFERS: changing.words}
    engine = _native.Engine(spec, endpoint, programs, {})
    for number, box in enumerate(spec.boxes):
        if spec.rank in (box.owner, *box.holders):
            name = spec.buckets[box.bucket].name
            states = [] if name == BUFFERS else [torch.zeros(len(box.span))]
            engine.load(number, begin[name][box.span.lo : box.span.hi], states)
    for number, bucket in enumerate(spec.buckets):
        if any(spec.rank in box.readers for box in spec.boxes if box.bucket == number):
            engine.load(bucket.name, begin[bucket.name])
    return engine


def install(engine: _native.Engine, spec: EngineSpec, restart_at: int | None = None) -> list[int]:
    """Take a spec over without further preparation."""
    return engine.install(_native.NextSpec(spec), restart_at)


def first(tile: Tile) -> int:
    return tile.micro_batches[0][0]


def tile_inputs(tile: Tile, step: int) -> dict[str, Tensor]:
    return {name: torch.cat([tensor[lo:hi] for lo, hi in tile.micro_batches]) for name, tensor in batch(step).items()}


@dataclass(frozen=True)
class Taken:
    """What a test keeps of a `StepResult`, for instance to send it to another process."""

    loss: float
    count: float
    grad_norm: float
    scale: float
    finite: bool
    updated: bool
    version: int
    stop: bool
    memory_bytes: int
    votes: dict[Rank, bytes]
    runs: dict[str, int]
    """How often each kind of instruction ran."""
    emulated: tuple[int, float, float]
    """Kernels; seconds modelled, overslept."""
    pipeline_s: float

    @staticmethod
    def of(result: _native.StepResult) -> Taken:
        times = result.emulated
        return Taken(
            result.loss, result.count, result.grad_norm, result.scale, result.finite, result.updated, result.version,
            result.stop, result.memory_bytes, result.votes,
            {name: timing.count for name, timing in result.timings.items()},
            (times.kernels, times.modelled_s, times.overslept_s),
            result.pipeline_seconds,
        )  # fmt: skip


def take_step(
    engine: _native.Engine, tile: Tile, step: int, clip: float | None = 0.5, deadline_s: float = TEST_TIMEOUT_S,
    **options: Any,
) -> Taken:  # fmt: skip
    """One step on the tile's part of its batch."""
    given = _native.StepOptions(deadline_s, clip, **options)
    return Taken.of(engine.step(step, tile_inputs(tile, step), [[LR]], given))


def train(engine: _native.Engine, tile: Tile, steps: int, clip: float | None = 0.5) -> list[Taken]:
    return [take_step(engine, tile, step, clip) for step in range(steps)]


def master_of(engine: _native.Engine, box: int) -> Tensor:
    """The master of a box that is here."""
    state = engine.read(box)
    assert state is not None
    return state.master


def owned(engine: _native.Engine, tiling: Tiling, rank: int, boxes: Sequence[Box] | None = None) -> dict[str, Tensor]:
    """What a rank owns: "bucket lo" -> master."""
    return {
        f"{box.bucket} {box.lo}": master_of(engine, number)
        for number, box in enumerate(boxes if boxes is not None else even_boxes(tiling))
        if box.owner == rank
    }


def joined(parts: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Whole buckets from what all ranks own."""
    pieces = {key: tensor for part in parts for key, tensor in part.items()}
    return {
        name: torch.cat([pieces[key] for key in sorted((k for k in pieces if k.split()[0] == name), key=by_start)])
        for name in BUCKETS
    }


def by_start(key: str) -> int:
    return int(key.split()[1])


# --- The reference: autograd on the whole batch.


def eager_loss(flat: dict[str, Tensor], inputs: dict[str, Tensor], keys: Tensor | None) -> Tensor:
    a, matrix = flat["tied"].view(WIDTH, WIDTH), flat["unit1"][:MATRIX].view(WIDTH, WIDTH)
    h = torch.relu(inputs["x"] @ a.t() + flat["bias0"])
    h = h if keys is None else dropout(h, keys)
    g = torch.relu(h @ matrix.t() + flat["unit1"][MATRIX:])
    return (((g + h) @ a.t() - inputs["y"]) ** 2).sum()


@dataclass
class Reference:
    losses: list[float]
    norms: list[float]
    params: dict[str, Tensor]


def reference(steps: int, clip: float | None = 0.5) -> Reference:
    flat = {name: tensor.requires_grad_() for name, tensor in initial().items()}
    optimizer = torch.optim.SGD(flat.values(), lr=LR, momentum=MOMENTUM)
    losses, norms = [], []
    for step in range(steps):
        optimizer.zero_grad()
        loss = eager_loss(flat, batch(step), ops.sample_keys(SEED, step * BATCH, BATCH, 0))
        (loss / (BATCH * WIDTH)).backward()
        norm = torch.nn.utils.clip_grad_norm_(list(flat.values()), clip if clip is not None else math.inf)
        optimizer.step()
        losses.append(float(loss.detach()))
        norms.append(float(norm))
    return Reference(losses, norms, {name: tensor.detach() for name, tensor in flat.items()})
