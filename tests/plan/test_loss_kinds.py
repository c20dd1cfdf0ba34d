"""Ranks of one kind: what is best after the loss of one of them is best after the loss of any."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Hashable
from dataclasses import replace

import pytest

from elaswave_fx.plan.check.check_plan import check_plan
from elaswave_fx.plan.make.planner import most_memory, plan_uniform
from elaswave_fx.plan.next.loss_kinds import loss_kind
from elaswave_fx.plan.next.replan import Replicas, replan, replan_like
from elaswave_fx.plan.plan import Plan
from elaswave_fx.plan.work.box import numbered
from elaswave_fx.plan.work.topology import Host, HostLink, Link, Rank, local_topology
from tests.plan.samples import chain


def after(plan: Plan, lost: Rank) -> tuple[tuple[Rank, ...], Replicas]:
    """Who goes on without the rank, and what they have."""
    members = tuple(rank for rank in plan.ranks if rank != lost)
    return members, {n: tuple(r for r in box.replica_ranks if r != lost) for n, box in numbered(plan.boxes)}


def kinds(plan: Plan) -> dict[Hashable, list[Rank]]:
    found: defaultdict[Hashable, list[Rank]] = defaultdict(list)
    for rank in plan.ranks:
        found[loss_kind(plan, rank)].append(rank)
    return dict(found)


def test_equal_lanes_have_a_kind_for_each_of_their_stages() -> None:
    plan = plan_uniform(chain(8, 16), local_topology(16), 4, 4)
    assert list(kinds(plan).values()) == [[stage, 4 + stage, 8 + stage, 12 + stage] for stage in range(4)]
    slow = replace(plan.topology, members=(replace(plan.topology.members[0], speed=0.5), *plan.topology.members[1:]))
    assert [Rank(0)] in kinds(replace(plan, topology=slow)).values()
    linked = replace(plan.topology, links=(HostLink((Host(0), Host(1)), Link(1e-3, 1e6)),))
    assert len(kinds(replace(plan, topology=linked))) == 16


def plain_job(rng: random.Random) -> tuple[Plan, int]:
    """Alike lanes, with a bound on memory in every second case."""
    dp, pp, replicas = rng.randint(2, 4), rng.randint(1, 4), rng.randint(1, 2)
    units = [rng.choice((1e-3, 1e-3, 2e-3)) for _ in range(rng.randint(pp, 12))]
    workload = chain(len(units), rng.randint(1, 3) * dp * pp, 1, units)
    plan = plan_uniform(workload, local_topology(dp * pp), dp, pp, replicas)
    if rng.random() < 0.5:
        return plan, replicas
    tight = local_topology(dp * pp, memory_bytes=int(1.5 * most_memory(plan)))
    return plan_uniform(workload, tight, dp, pp, replicas), replicas


def test_what_is_taken_for_one_is_taken_for_all_of_its_kind() -> None:
    tried = other_lanes = 0
    for seed in range(40):
        plan, replicas = plain_job(random.Random(seed))
        for first, *others in kinds(plan).values():
            _, choice = replan_like(plan, *after(plan, first), replicas, None)
            for lost in others[-2:]:
                without = replan(plan, *after(plan, lost), replicas)
                found, _ = replan_like(plan, *after(plan, lost), replicas, choice)
                check_plan(found)
                assert found.predicted.step_s <= 1.01 * without.predicted.step_s, (seed, lost)
                tried += 1
                other_lanes += found.lanes != without.lanes
    assert tried > 100
    assert other_lanes <= tried // 50


def test_what_does_not_fit_after_all_is_searched_for() -> None:
    plan = plan_uniform(chain(8, 16), local_topology(8), 2, 4)
    _, choice = replan_like(plan, *after(plan, Rank(1)), 1, None)
    assert choice is not None
    impossible = choice._replace(ideas=frozenset({("nothing of that name", 1)}))
    found, taken = replan_like(plan, *after(plan, Rank(5)), 1, impossible)
    assert found == replan(plan, *after(plan, Rank(5)), 1) and taken not in (None, impossible)


def test_words_name_what_was_beaten() -> None:
    plan = plan_uniform(chain(8, 16), local_topology(8), 2, 4)
    first, choice = replan_like(plan, *after(plan, Rank(1)), 1, None)
    other, _ = replan_like(plan, *after(plan, Rank(5)), 1, choice)
    assert choice is not None and choice.beaten in first.reason and choice.beaten in other.reason
    assert other.reason.startswith("lost rank 5; ")
    assert other.predicted.step_s == pytest.approx(first.predicted.step_s, rel=0.01)
