"""Runs: neighbours with equal roles share a message. And boxes of one bucket that different ranks compute with."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch

from elaswave_fx import _native
from elaswave_fx.errors import ExecError
from elaswave_fx.plan.lower.engine_spec import UPDATE, EngineBucket, EngineSpec
from elaswave_fx.plan.work import box as plan_box
from elaswave_fx.plan.work.spans import Span
from elaswave_fx.plan.work.topology import Rank
from tests.native.ranks import Ranks
from tests.native.test_engine_replicas import kept, with_holders
from tests.native.tiny import (
    BUCKETS,
    LR,
    MATRIX,
    TEST_TIMEOUT_S,
    TILINGS,
    WIDTH,
    Box,
    Model,
    initial,
    install,
    make_engine,
    make_spec,
    make_unit,
    reference,
    take_step,
    tile_inputs,
    train,
    unit_bindings,
)

PAIR = TILINGS["data parallel"]
PIPELINE = TILINGS["pipeline"]


def in_three(boxes: Sequence[Box]) -> list[Box]:
    """Every box cut into three with the same roles."""
    cuts = [[box.lo + (box.hi - box.lo) * i // 3 for i in range(4)] for box in boxes]
    return [
        replace(box, lo=lo, hi=hi)
        for box, borders in zip(boxes, cuts, strict=True)
        for lo, hi in itertools.pairwise(borders)
    ]


@pytest.mark.parametrize("record_dtype", ["float32", "bfloat16"])
def test_neighbours_share_their_messages(model: Model, record_dtype: str, started: Callable[..., Ranks]) -> None:
    """Three times as many boxes: the same parameters to the bit, more words in headers, and nothing else."""
    coarse = with_holders(PAIR)

    def body(rank: int, endpoint: Any, _: Connection) -> Any:
        found = []
        for boxes in (coarse, in_three(coarse)):
            engine = make_engine(model, PAIR, rank, endpoint, boxes=boxes, record_dtype=record_dtype)
            before = endpoint.bytes_sent
            losses = [taken.loss for taken in train(engine, PAIR[rank], 3, clip=None)]
            engine.sync(TEST_TIMEOUT_S)
            sent = endpoint.bytes_sent - before
            found.append((losses, [engine.read(name) for name in BUCKETS], sent, len(kept(engine))))
        return found

    for (losses, works, sent, boxes), (same_losses, same_works, same_sent, more) in started(2, body).results():
        assert losses == same_losses and more == 3 * boxes
        assert all(torch.equal(one, other) for one, other in zip(works, same_works, strict=True))
        headers = 48 * (more - boxes) // 2  # what this rank owns; it holds as many
        assert same_sent - sent == 3 * headers


@pytest.mark.parametrize("record_dtype", ["float32", "bfloat16"])
def test_a_holder_of_a_box_syncs_with_its_neighbours(
    model: Model, record_dtype: str, started: Callable[..., Ranks]
) -> None:
    """Boxes with equal roles are summed at once. The record of one that the holder has had before comes with the step,
    those of the others follow it."""
    boxes = in_three(with_holders(PAIR))
    had = range(1, len(boxes), 3)  # in the middle of each run
    before = [box if number in had else replace(box, holders=()) for number, box in enumerate(boxes)]

    def body(rank: int, endpoint: Any, _: Connection) -> Any:
        engine = make_engine(model, PAIR, rank, endpoint, boxes=before, record_dtype=record_dtype)
        taken = train(engine, PAIR[rank], 1, clip=None)
        engine.sync(TEST_TIMEOUT_S)
        install(engine, make_spec(model, PAIR, rank, boxes=boxes, record_dtype=record_dtype))
        engine.replicate([(n, box.owner, 1 - box.owner) for n, box in enumerate(boxes) if n not in had])
        taken += [take_step(engine, PAIR[rank], step) for step in range(1, 12)]
        engine.sync(TEST_TIMEOUT_S)
        return engine.holdings().syncing, {n: digest for n, (digest, _) in kept(engine).items()}

    first, second = started(2, body).results()
    assert first == second and first[0] == [] and len(first[1]) == len(boxes)


# --- Boxes with readers of their own


def joint_spec(model: Model, rank: int, holders: bool) -> EngineSpec:
    """A pipeline in which `bias0`, of rank 0's unit, and `unit1`, of rank 1's, are one bucket, "joint": each rank
    computes with a part of it."""
    tied, joint = list(BUCKETS).index("tied"), 1
    sizes = {"tied": MATRIX, "joint": WIDTH + MATRIX + WIDTH}

    def moved(bindings: Sequence[Any]) -> tuple[Any, ...]:
        offsets = {tied: 0, 1: 0, 2: WIDTH}
        return tuple((b[0], min(b[1], joint), offsets[b[1]] + b[2], b[3]) if b[0] == "param" else b for b in bindings)

    def box(bucket: int, lo: int, hi: int, owner: int, readers: Sequence[int]) -> plan_box.Box:
        holder = (Rank(1 - owner),) if holders else ()
        return plan_box.Box(bucket, Span(lo, hi), Rank(owner), holder, readers=tuple(Rank(r) for r in readers))

    spec = make_spec(model, PIPELINE, rank)
    units = range(*PIPELINE[rank].units)
    steps = [step for step in spec.schedule.train if step[0] not in ("REDUCE", "UPDATE", "GATHER")]
    vote = steps.index(("VOTE",))
    steps[-1:-1] = [(op, bucket) for op in ("UPDATE", "GATHER") for bucket in (tied, joint)]
    steps[vote:vote] = [("REDUCE", tied), ("REDUCE", joint)]
    return replace(
        spec,
        buckets=tuple(EngineBucket(name, numel, "float32", UPDATE, 0) for name, numel in sizes.items()),
        boxes=(
            box(tied, 0, MATRIX, 0, (0, 1)),
            box(joint, 0, WIDTH, 1, (0,)),
            box(joint, WIDTH, WIDTH + MATRIX, 0, (1,)),
            box(joint, WIDTH + MATRIX, sizes["joint"], 0, (1,)),
        ),
        units=tuple(
            make_unit(
                unit, **{key: moved(bindings) for key, bindings in unit_bindings()[unit].items() if key != "outputs"},
                outputs=unit_bindings()[unit]["outputs"],
            )
            for unit in units
        ),
        schedule=replace(spec.schedule, train=tuple(steps)),
    )  # fmt: skip


@pytest.mark.parametrize("holders", [False, True])
def test_a_rank_reads_some_boxes_of_a_bucket(model: Model, holders: bool, started: Callable[..., Ranks]) -> None:
    flat = initial()
    joint = torch.cat([flat["bias0"], flat["unit1"]])

    def body(rank: int, endpoint: Any, _: Connection) -> Any:
        spec = joint_spec(model, rank, holders)
        engine = _native.Engine(spec, endpoint, model.programs, {})
        for number, box in enumerate(spec.boxes):
            if rank in box.replica_ranks:
                master = (flat["tied"] if box.bucket == 0 else joint)[box.span.lo : box.span.hi]
                engine.load(number, master, [torch.zeros(len(box.span))])
        engine.load("tied", flat["tied"])
        engine.load("joint", joint)
        losses = []
        for step in range(4):
            options = _native.StepOptions(TEST_TIMEOUT_S, 0.5)
            losses.append(engine.step(step, tile_inputs(PIPELINE[rank], step), [[LR]], options).loss)
        engine.sync(TEST_TIMEOUT_S)
        return losses, engine.read("joint")

    (losses, first), (_, second) = started(2, body).results()
    wanted = reference(4)
    assert losses == pytest.approx(wanted.losses, rel=1e-5)
    torch.testing.assert_close(first[:WIDTH], wanted.params["bias0"])
    torch.testing.assert_close(second[WIDTH:], wanted.params["unit1"])


def test_units_compute_with_what_their_rank_reads(model: Model) -> None:
    spec = joint_spec(model, 0, holders=False)
    boxes = (*spec.boxes[:1], replace(spec.boxes[1], readers=(Rank(1),)), *spec.boxes[2:])
    with pytest.raises(ExecError, match=r"bucket joint: rank 0 has a unit that computes with \[0, 6\), of which"):
        _native.Engine(replace(spec, boxes=boxes), None, model.programs, {})
