"""Plans do not depend on the numbers of ranks and hosts: with other numbers they are the same but for these."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

import pytest

from elaswave_fx.errors import PlanError
from elaswave_fx.plan.make.planner import plan_lanes
from elaswave_fx.plan.next.replan import replan
from elaswave_fx.plan.plan import Plan
from elaswave_fx.plan.work.box import BoxId
from elaswave_fx.plan.work.topology import Host, HostLink, Link, Rank, Topology
from tests.plan.random_topologies import first_plan, random_topology, random_widths, random_workload, replicas_left

Numbers = Mapping[Rank, Rank]
Hosts = Mapping[Host, Host]
Renumber = Callable[[random.Random, Sequence[int]], list[int]]


def ascending(rng: random.Random, numbers: Sequence[int]) -> list[int]:
    """Others in the same order."""
    return sorted(rng.sample(range(3 * len(numbers) + 3), len(numbers)))


def shuffled(rng: random.Random, numbers: Sequence[int]) -> list[int]:
    """The same in any order."""
    return rng.sample(list(numbers), len(numbers))


def numbers_of(rng: random.Random, topology: Topology, renumber: Renumber) -> tuple[Numbers, Hosts]:
    hosts = sorted({m.host for m in topology.members})
    ranks = dict(zip(topology.ranks, map(Rank, renumber(rng, topology.ranks)), strict=True))
    return ranks, dict(zip(hosts, map(Host, renumber(rng, hosts)), strict=True))


def renumbered_topology(topology: Topology, ranks: Numbers, hosts: Hosts) -> Topology:
    members = [replace(m, rank=ranks[m.rank], host=hosts[m.host]) for m in topology.members]
    links = [
        HostLink((hosts[each.hosts[0]], hosts[each.hosts[1]]), each.link)
        for each in topology.links
        if all(host in hosts for host in each.hosts)
    ]
    return replace(topology, members=tuple(sorted(members, key=lambda m: m.rank)), links=tuple(links))


def renumbered(plan: Plan, ranks: Numbers, hosts: Hosts) -> Plan:
    def of(old: Sequence[Rank]) -> tuple[Rank, ...]:
        return tuple(ranks[rank] for rank in old)

    def in_order(values: Mapping[Rank, object]) -> dict:
        return dict(sorted((ranks[rank], value) for rank, value in values.items()))

    return replace(
        plan,
        topology=renumbered_topology(plan.topology, ranks, hosts),
        lanes=tuple(
            replace(lane, stages=tuple(replace(s, ranks=of(s.ranks)) for s in lane.stages)) for lane in plan.lanes
        ),
        boxes=tuple(
            replace(
                b, owner=ranks[b.owner], holders=of(b.holders), catching_up=of(b.catching_up),
                readers=tuple(sorted(of(b.readers))),
            )
            for b in plan.boxes
        ),
        schedule=in_order(plan.schedule),
        predicted=replace(plan.predicted, ranks=in_order(plan.predicted.ranks)),
    )  # fmt: skip


def without_words(plan: Plan) -> Plan:
    """Reasons name ranks; seconds of the exchange are added up in the order of sets of ranks, so they are rounded."""
    exchange_s = float(f"{plan.predicted.exchange_s:.12g}")
    return replace(plan, reason="", predicted=replace(plan.predicted, exchange_s=exchange_s))


def job(rng: random.Random) -> tuple[Plan, int] | None:
    """A first plan of up to 16 ranks, and how many replicas it has."""
    ranks, replicas = rng.randint(2, 16), rng.randint(0, 2)
    plan = first_plan(rng, random_workload(rng, ranks), random_topology(rng, ranks), replicas)
    return None if plan is None else (plan, replicas)


def losses(
    rng: random.Random, plan: Plan, replicas: int, ranks: Numbers, hosts: Hosts
) -> list[tuple[Plan, Plan, bool]]:
    """After each of three losses: the plan, and that of the job with the other numbers from the same plan before; and
    whether each rank could be told from the others by what it had, for one at most had nothing."""
    found = []
    for _ in range(3):
        alive = plan.topology.ranks
        if len(alive) < 2:
            break
        members = tuple(sorted(rng.sample(alive, len(alive) - 1)))
        have = replicas_left(rng, plan, members)
        others: dict[BoxId, tuple[Rank, ...]] = {n: tuple(ranks[r] for r in old) for n, old in have.items()}
        before = renumbered(plan, ranks, hosts)
        have_something = {r for lane in plan.lanes for r in lane.ranks} | {
            r for b in plan.boxes for r in b.replica_ranks
        }
        is_known = len(set(members) - have_something) < 2
        try:
            plan = replan(plan, members, have, replicas)
        except PlanError as error:
            with pytest.raises(PlanError, match=str(error).split(":")[0]):
                replan(before, tuple(sorted(ranks[r] for r in members)), others, replicas)
            break
        other = replan(before, tuple(sorted(ranks[r] for r in members)), others, replicas)
        found.append((plan, other, is_known))
    return found


def renumbered_losses(order: Renumber) -> Iterator[tuple[Callable[[Plan], Plan], Plan, Plan, bool]]:
    """Of random jobs: what gives a plan other numbers, the plan after each loss, and that of the job with those; and
    whether ranks are told apart by more than their numbers."""
    for seed in range(40):
        rng = random.Random(seed)
        made = job(rng)
        if made is None:
            continue
        plan, replicas = made
        ranks, hosts = numbers_of(rng, plan.topology, order)
        for after, other, is_known in losses(rng, plan, replicas, ranks, hosts):
            yield partial(renumbered, ranks=ranks, hosts=hosts), after, other, is_known


def test_numbers_in_the_same_order_change_nothing_else() -> None:
    tried = 0
    for renumber, after, other, _ in renumbered_losses(ascending):
        assert without_words(other) == without_words(renumber(after))
        tried += 1
    assert tried > 40


def test_a_first_plan_has_the_ranks_in_their_order_whatever_their_numbers() -> None:
    tried = 0
    for seed in range(60):
        rng = random.Random(seed)
        count = rng.randint(2, 16)
        workload, topology = random_workload(rng, count), random_topology(rng, count)
        widths = random_widths(rng, count, len(workload.units), workload.granules)
        if widths is None:
            continue
        ranks, hosts = numbers_of(rng, topology, ascending)
        plan = plan_lanes(workload, topology, widths)
        other = plan_lanes(workload, renumbered_topology(topology, ranks, hosts), widths)
        assert without_words(other) == without_words(renumbered(plan, ranks, hosts)), seed
        tried += 1
    assert tried > 30


def test_who_is_where_does_not_matter_among_equals() -> None:
    """Ranks in any order take over each other's places, with what they have and can: the next plan is the same in these
    places, lanes, boxes and all."""
    tried = 0
    for renumber, after, other, is_known in renumbered_losses(shuffled):
        if is_known:
            assert without_words(other) == without_words(renumber(after))
            tried += 1
    assert tried > 40


def test_equal_members_on_any_hosts_get_equal_lanes() -> None:
    """Where links are alike, hosts say who is lost together, and not who computes what."""
    for seed in range(40):
        rng = random.Random(seed)
        count = rng.randint(2, 16)
        workload, topology = random_workload(rng, count), random_topology(rng, count)
        widths = random_widths(rng, count, len(workload.units), workload.granules)
        if widths is None:
            continue
        topology = replace(topology, links=(), between_hosts=Link())
        hosts = shuffled(rng, [m.host for m in topology.members])
        moved = tuple(replace(m, host=Host(host)) for m, host in zip(topology.members, hosts, strict=True))
        plans = [plan_lanes(workload, each, widths) for each in (topology, replace(topology, members=moved))]
        assert plans[0].lanes == plans[1].lanes and plans[0].schedule == plans[1].schedule, seed
