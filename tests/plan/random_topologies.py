"""Random clusters and the plans of jobs on them, through chains of losses and joins.

for plan in history(rng, random_workload(rng, ranks), ranks=random_ranks(rng)): check_plan(plan)
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace

from elaswave_fx.errors import PlanError
from elaswave_fx.plan.make.planner import Widths, plan_lanes
from elaswave_fx.plan.next.replan import replan
from elaswave_fx.plan.plan import Plan
from elaswave_fx.plan.work.box import BoxId, numbered
from elaswave_fx.plan.work.cost import Workload
from elaswave_fx.plan.work.topology import Host, HostLink, Link, Member, Rank, Topology
from tests.plan.samples import asking, chain, two_towers

MOST_CHANGES = 4
"""Of the topology, in a history."""


def random_ranks(rng: random.Random) -> int:
    """1 to 64, as many below 8 as above."""
    return int(2 ** rng.uniform(0, 6.02))


def random_workload(rng: random.Random, ranks: int) -> Workload:
    """Values that skip units or have no samples, tied buckets, granules of any size; enough for so many ranks."""
    granule = rng.choice((1, 1, 2))
    granules = rng.randint(ranks, max(4, 3 * ranks))
    if rng.random() < 0.15:
        found = asking(two_towers(granules * granule), granule=granule)
    else:
        units = rng.randint(1, 12)
        costs = [rng.choice((1e-3, 1e-3, 2e-3, 5e-3)) for _ in range(units)]
        found = chain(units, granules * granule, granule, costs, batch_coupled=rng.random() < 0.2)
    units_in_halves = tuple(replace(unit, weights_share=0.5, held_bytes=30) for unit in found.units)
    # Orders of halves are searched for, which takes seconds for many ranks with links and speeds of their own.
    schedule = rng.choice(("1f1b", "1f1b", "split", "auto") if ranks <= 8 else ("1f1b",))
    micro_batch = rng.choice((None, None, granule, 3 * granule))
    exact = rng.random() < 0.3
    found = asking(found, schedule=schedule, micro_batch=micro_batch, exact=exact)
    return replace(found, units=units_in_halves)


def random_topology(rng: random.Random, ranks: int) -> Topology:
    """Hosts of one to four ranks, of any speed, over links of any kind; rank numbers with gaps."""
    numbers, host, members = sorted(rng.sample(range(2 * ranks), ranks)), 0, []
    speeds = rng.choice(((1.0,), (1.0, 1.0, 0.8), (1.0, 0.5, 0.25, 2.0)))
    for rank in numbers:
        host += rng.random() < 0.5
        members.append(Member(Rank(rank), Host(host), rng.choice(speeds)))
    pairs = {tuple(sorted(rng.sample(range(host + 1), 2))) for _ in range(rng.randint(0, 3))} if host else set()
    links = tuple(HostLink((Host(a), Host(b)), random_link(rng)) for a, b in sorted(pairs))
    between = Link() if rng.random() < 0.4 else random_link(rng)
    return Topology(tuple(members), between_hosts=between, links=links, life_s=rng.choice((1.0, 3600.0)))


def random_link(rng: random.Random) -> Link:
    return Link(rng.choice((0.0, 1e-5, 1e-3)), rng.choice((1e5, 1e8, 3e9)))


def random_widths(rng: random.Random, ranks: int, units: int, granules: int) -> Widths | None:
    """Lanes of so many ranks; None if they need more granules or units than there are."""
    lanes, most = [], rng.choice((1, 1, 2, 4))
    while ranks:
        lane: list[int] = []
        for _ in range(rng.randint(1, units)):
            if ranks:
                lane.append(rng.randint(1, min(most, ranks)))
                ranks -= lane[-1]
        lanes.append(lane)
    return lanes if sum(map(max, lanes)) <= granules else None


def first_plan(rng: random.Random, workload: Workload, topology: Topology, replicas: int) -> Plan | None:
    """With a bound on memory in every third case, which it may not fit; None then."""
    widths = random_widths(rng, len(topology.members), len(workload.units), workload.granules)
    if widths is None:
        return None
    found = plan_lanes(workload, topology, widths, replicas)
    if rng.random() < 0.67:
        return found
    most = max(cost.memory_bytes for cost in found.predicted.ranks.values())
    limit = int(most * rng.uniform(0.9, 2.0))
    bounded = replace(topology, members=tuple(replace(m, memory_bytes=limit) for m in topology.members))
    try:
        return plan_lanes(workload, bounded, widths, replicas)
    except PlanError:
        return None


def history(rng: random.Random, workload: Workload, ranks: int) -> Iterator[Plan]:
    """A first plan, and those after losses, and joins of ranks that were lost, until nothing fits any more."""
    replicas = rng.randint(0, 2)
    plan = first_plan(rng, workload, random_topology(rng, ranks), replicas)
    if plan is None:
        return
    yield plan
    gone: list[Rank] = []
    for _ in range(rng.randint(0, MOST_CHANGES)):
        alive = list(plan.topology.ranks)
        if gone and rng.random() < 0.25:
            members = [*alive, gone.pop(rng.randrange(len(gone)))]
        else:
            lost = rng.sample(alive, min(rng.choice((1, 1, 1, 2, 5)), len(alive) - 1))
            gone += lost
            members = [rank for rank in alive if rank not in lost]
        try:
            plan = replan(plan, tuple(sorted(members)), replicas_left(rng, plan, members), replicas)
        except PlanError as error:
            assert "cannot hold the job" in str(error) or "cannot share" in str(error), error
            return
        yield plan


def replicas_left(rng: random.Random, plan: Plan, members: Sequence[Rank]) -> dict[BoxId, tuple[Rank, ...]]:
    """What the plan says that is left, if that is a replica of every box and all are in sync; or everything."""
    old = [rank for rank in members if rank in plan.topology.ranks]
    left = {number: tuple(r for r in box.replica_ranks if r in old) for number, box in numbered(plan.boxes)}
    return left if all(left.values()) and rng.random() < 0.7 else dict.fromkeys(left, tuple(old))
