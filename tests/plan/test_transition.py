"""The difference of two plans: what ranks gain and give up, what travels, in numbers and in words."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from elaswave_fx.plan.make.derive import make_plan
from elaswave_fx.plan.make.planner import plan_uniform
from elaswave_fx.plan.next.replan import replan
from elaswave_fx.plan.plan import Plan
from elaswave_fx.plan.predict.transition import Handover, ReplicaTransfer, Transition
from elaswave_fx.plan.replicas.holders import with_readers
from elaswave_fx.plan.work.spans import Span
from elaswave_fx.plan.work.tiling import split_micro_batches, tiles_of
from elaswave_fx.plan.work.topology import Epoch, local_topology
from tests.plan.samples import chain, lane


def uniform(dp: int, pp: int) -> Plan:
    return plan_uniform(chain(8, 24), local_topology(dp * pp, 1), dp, pp)


def lose(plan: Plan, *lost: int) -> Plan:
    have = {number: (box.owner, *box.holders) for number, box in enumerate(plan.boxes)}
    return replan(plan, tuple(r for r in plan.ranks if r not in lost), have, 1)


def test_the_words_of_a_loss(golden: Callable[[str, str], None]) -> None:
    texts = []
    for dp, pp, lost in ((2, 2, 1), (1, 3, 1), (4, 1, 0)):
        before = uniform(dp, pp)
        after = lose(before, lost)
        texts.append("\n".join([f"{dp} x {pp}: {after.reason}", *Transition.of(before, after).lines()]) + "\n")
    golden("transitions.txt", "\n".join(texts))


def test_a_plan_and_itself_differ_in_nothing() -> None:
    plan = uniform(2, 2)
    same = Transition.of(plan, replace(plan, topology=replace(plan.topology, epoch=Epoch(1))))
    assert same.lines() == ("epoch 0 -> 1: the same ranks",)
    assert same.bytes_moved == 0 and not same.opened and not same.tiles
    assert same.links == ((0, 1), (0, 2), (1, 2), (1, 3), (2, 3))


def test_a_moved_cut_moves_units_and_parameters_only() -> None:
    workload = chain(4, 8)

    def cut_at(unit: int, like: Plan | None = None) -> Plan:
        lanes = (lane([((0,), (0, unit)), ((1,), (unit, 4))], split_micro_batches(Span(0, 8), 2, 1)),)
        boxes = with_readers(like.boxes, workload, tiles_of(lanes)) if like else None
        return make_plan(local_topology(2), workload, lanes, "cut", replicas=0, boxes=boxes)

    before = cut_at(2)
    change = Transition.of(before, cut_at(3, before))
    assert change.gained == {0: (2,)} and change.dropped == {1: (2,)}
    assert change.parameters == {2: (0,)} and change.transfers == () and change.handovers == ()
    assert change.bytes_moved == change.parameter_bytes == 4 * workload.buckets[2].numel
    assert change.lines() == (
        "epoch 0 -> 0: the same ranks",
        "rank 0 computes units 0-2 x samples 0-7 (before: units 0-1 x samples 0-7)",
        "rank 1 computes unit 3 x samples 0-7 (before: units 2-3 x samples 0-7)",
        "parameters of 1 bucket are new to rank 0, 408 B",
    )


@settings(deadline=None, max_examples=30)
@given(st.sampled_from([(2, 2), (3, 2), (4, 1), (1, 4)]), st.integers(0, 3))
def test_what_travels_is_what_the_plans_say(shape: tuple[int, int], lost: int) -> None:
    before = uniform(*shape)
    after = lose(before, lost)
    change = Transition.of(before, after)
    assert change.lost == (lost,) and change.joined == () and change.epochs == (0, 1)
    assert {h.box for h in change.handovers} >= {n for n, b in enumerate(before.boxes) if b.owner == lost}
    owners = [(before.boxes[h.box].owner, after.boxes[h.box].owner) for h in change.handovers]
    assert change.handovers == tuple(Handover(h.box, *o) for h, o in zip(change.handovers, owners, strict=True))
    assert all(old != new for old, new in owners)
    syncing = {(n, r) for n, b in enumerate(after.boxes) for r in b.catching_up}
    assert {(t.box, t.target) for t in change.transfers} == syncing
    assert all(t == ReplicaTransfer(t.box, after.boxes[t.box].owner, t.target, 12 * len(after.boxes[t.box].span))
               for t in change.transfers)  # fmt: skip
    assert set(change.opened) <= set(change.links) and all(a < b and lost not in (a, b) for a, b in change.links)
    for rank, units in change.gained.items():
        assert set(units) == set(after.tile(rank).units) - set(before.tile(rank).units)
