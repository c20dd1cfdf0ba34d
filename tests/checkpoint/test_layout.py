"""Which elements a rank writes: each exactly once over all ranks, whoever owns which boxes."""

from __future__ import annotations

import math
import random
from collections import defaultdict
from dataclasses import replace

import pytest
import torch

from elaswave_fx.checkpoint.initial_state import split_bucket
from elaswave_fx.checkpoint.layout import Piece, key_paths, logical_tensors, owned_pieces, rectangles
from elaswave_fx.plan.make.planner import plan_uniform
from elaswave_fx.plan.next.replan import replan
from elaswave_fx.plan.plan import Plan
from elaswave_fx.plan.work.box import BoxId, numbered
from elaswave_fx.plan.work.cost import Bucket
from elaswave_fx.plan.work.spans import Span
from elaswave_fx.plan.work.topology import local_topology
from elaswave_fx.program.artifact import Artifact, BucketBuffer, BucketParam, BucketSpec, FoldSpec, TensorInfo
from tests.plan.samples import chain

PARAMETERS = chain(4, 16)
WORKLOAD = replace(PARAMETERS, buckets=(*PARAMETERS.buckets, Bucket("unit2.buffers", 6, (2,), whole=True)))


def artifact() -> Artifact:
    """Two parameters in every bucket of them; a running mean and a count in unit 2."""
    buckets = tuple(
        BucketSpec(b.name, 0, b.numel, (BucketParam(f"{b.name}.w", 0, (b.numel - 2,)),
                                        BucketParam(f"{b.name}.b", b.numel - 2, (2, 1))), b.users)
        for b in WORKLOAD.buckets[:-1]
    )  # fmt: skip
    changed = (BucketBuffer("mean", 0, (3,), "float32"), BucketBuffer("count", 4, (), "int64"))
    buckets += (BucketSpec("unit2.buffers", 0, 6, (), (2,), changed),)
    params = tuple(TensorInfo(p.name, p.shape, "float32") for bucket in buckets for p in bucket.params)
    return Artifact(
        granule=1, batch_coupled=(), inputs=(), params=params,
        buffers=tuple(TensorInfo(b.name, b.shape, b.dtype) for b in changed), programs={}, units=(), values=(),
        buckets=buckets, folds=(FoldSpec("mean", 2, ()), FoldSpec("count", 2, ())), invariant_inputs=(),
        invariant_names=(), draws=(), evaluation_exact=True, text="",
    )  # fmt: skip


def after_losses(dp: int, pp: int, *lost: int) -> Plan:
    plan = plan_uniform(WORKLOAD, local_topology(dp * pp, 1), dp, pp)
    for rank in lost:
        have = {box_id: box.replica_ranks for box_id, box in numbered(plan.boxes)}
        plan = replan(plan, tuple(r for r in plan.ranks if r != rank), have, 1)
    return plan


@pytest.mark.parametrize(
    "plan", [after_losses(2, 2), after_losses(2, 2, 1), after_losses(1, 3, 1), after_losses(4, 1, 0, 2)]
)
def test_every_element_is_written_once(plan: Plan) -> None:
    written: dict[str, list[int]] = defaultdict(list)
    for rank in plan.ranks:
        for piece in owned_pieces(artifact(), plan, rank, 2):
            written[piece.tensor] += piece.span
            assert plan.boxes[piece.box].owner == rank
    for name, (shape, _) in logical_tensors(artifact(), 2).items():
        numel = 1
        for size in shape:
            numel *= size
        assert sorted(written[name]) == list(range(numel)), name


def test_a_run_of_elements_is_cut_into_few_rectangles() -> None:
    """Of tensors of up to four dimensions: all of its elements in order, each part where narrow() has it."""
    draws = random.Random(0)
    for _ in range(2000):
        shape = tuple(draws.randint(1, 5) for _ in range(draws.randint(0, 4)))
        numel = math.prod(shape)
        first = draws.randrange(numel)
        span = Span(first, draws.randint(first + 1, numel))
        parts = list(rectangles(shape, span))
        assert [element for part in parts for element in part] == list(span)
        assert len(parts) <= max(1, 2 * len(shape) - 1)
        for part in parts:
            piece, found = Piece("model/w", "float32", shape, part, BoxId(0), 0), torch.arange(numel).view(shape)
            for dimension, (offset, size) in enumerate(zip(piece.offsets, piece.sizes, strict=True)):
                found = found.narrow(dimension, offset, size)
            assert found.flatten().tolist() == list(part)


def test_names_of_a_tensor_are_those_of_the_models_state_dict() -> None:
    found = key_paths(
        ["model/embed", "optimizer/1/embed", "buffer/mean", "buffer/cache", "unchanged/mask"],
        {"wte.weight": "model/embed", "head.weight": "model/embed", "bn.mean": "buffer/mean", "mask": "unchanged/mask"},
    )
    assert found == {
        "model/embed": (("model", "wte.weight"), ("model", "head.weight")),
        "optimizer/1/embed": (("optimizer", "wte.weight", 1),),
        "buffer/mean": (("model", "bn.mean"),),
        "buffer/cache": (("buffers", "cache"),),
        "unchanged/mask": (("model", "mask"),),
    }


def test_a_piece_begins_where_its_box_has_it() -> None:
    plan, model = after_losses(2, 2, 1), artifact()
    places = {p.name: (index, p.offset) for index, bucket in enumerate(model.buckets) for p in bucket.params}
    for rank in plan.ranks:
        for piece in owned_pieces(model, plan, rank, 0):
            if piece.tensor.startswith("buffer/"):
                continue
            bucket, offset = places[piece.tensor.removeprefix("model/")]
            box = plan.boxes[piece.box]
            assert box.bucket == bucket
            assert box.span.lo + piece.start == offset + piece.span.lo
            assert piece.start + len(piece.span) <= len(box.span)


def test_buffers_lie_in_the_words_of_their_box() -> None:
    plan, model = after_losses(2, 2), artifact()
    (place,) = [number for number, box in numbered(plan.boxes) if box.bucket == len(model.buckets) - 1]
    pieces = owned_pieces(model, plan, plan.boxes[place].owner, 2)
    mean, count = (piece for piece in pieces if piece.box == place)
    words = torch.zeros(6)
    mean.of(words).copy_(torch.tensor([1.0, 2.0, 3.0]))
    count.of(words).copy_(torch.tensor(2**40 + 7))
    assert (mean.tensor, count.tensor) == ("buffer/mean", "buffer/count")
    assert words[:3].tolist() == [1.0, 2.0, 3.0] and words.view(torch.int64)[2] == 2**40 + 7
    found = dict(split_bucket(model.buckets[-1], words))
    assert found["mean"].tolist() == [1.0, 2.0, 3.0] and found["count"].item() == 2**40 + 7
