"""Which elements a rank writes: each exactly once over all ranks, whoever owns which boxes."""

from __future__ import annotations

from collections import defaultdict

import pytest

from elaswave_fx.checkpoint.layout import logical_tensors, owned_pieces
from elaswave_fx.plan.box import numbered
from elaswave_fx.plan.plan import Plan
from elaswave_fx.plan.planner import Parallel, plan_uniform
from elaswave_fx.plan.replan import replan
from elaswave_fx.plan.topology import local_topology
from elaswave_fx.program.artifact import Artifact, BucketParam, BucketSpec, FoldSpec, TensorInfo
from tests.plan.samples import chain

WORKLOAD = chain(4, 16)


def artifact() -> Artifact:
    """Two parameters in every bucket, and a running mean in unit 2."""
    buckets = tuple(
        BucketSpec(b.name, 0, b.numel, (BucketParam(f"{b.name}.w", 0, (b.numel - 2,)),
                                        BucketParam(f"{b.name}.b", b.numel - 2, (2, 1))), b.users)
        for b in WORKLOAD.buckets
    )  # fmt: skip
    params = tuple(TensorInfo(p.name, p.shape, "float32") for bucket in buckets for p in bucket.params)
    return Artifact(
        granule=1, batch_coupled=(), work_dtype="float32", inputs=(), params=params,
        buffers=(TensorInfo("mean", (3,), "float32"),), programs={}, units=(), values=(), buckets=buckets,
        folds=(FoldSpec("mean", 2, ()),), invariant_inputs=(), invariant_names=(), draws=(), evaluation_exact=True,
        text="",
    )  # fmt: skip


def after_losses(dp: int, pp: int, *lost: int) -> Plan:
    plan = plan_uniform(WORKLOAD, local_topology(dp * pp, 1), Parallel(dp, pp))
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
            assert piece.is_buffer == piece.tensor.startswith("buffer/")
            assert piece.box is None or plan.boxes[piece.box].owner == rank
    for name, (shape, _) in logical_tensors(artifact(), 2).items():
        numel = 1
        for size in shape:
            numel *= size
        assert sorted(written[name]) == list(range(numel)), name


def test_a_piece_begins_where_its_box_has_it() -> None:
    plan, model = after_losses(2, 2, 1), artifact()
    places = {p.name: (index, p.offset) for index, bucket in enumerate(model.buckets) for p in bucket.params}
    for rank in plan.ranks:
        for piece in owned_pieces(model, plan, rank, 0):
            if piece.box is None:
                continue
            bucket, offset = places[piece.tensor.removeprefix("model/")]
            box = plan.boxes[piece.box]
            assert box.bucket == bucket and piece.source == WORKLOAD.buckets[bucket].name
            assert box.span.lo + piece.start == offset + piece.span.lo
            assert piece.start + len(piece.span) <= len(box.span)
