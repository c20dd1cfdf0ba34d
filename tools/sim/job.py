"""The job that the simulator runs: a small step, planned by the real planner.

In: how many ranks and units. Out: plans, as the coordinator gets them. Boxes are digests; a step has BATCH samples.

    first_plan(4, units=2).assignment  ->  ranks 0, 1 on unit 0 and 2, 3 on unit 1, each box held on another host
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import replace
from functools import cache

from elaswave_fx.control.coordinator.plan_cache import Held, Joiners, Planned, Planner
from elaswave_fx.control.protocol.member_info import MemberInfo
from elaswave_fx.control.protocol.probation import SlowRanks
from elaswave_fx.control.protocol.speed_meter import Expected
from elaswave_fx.plan.make.planner import plan_lanes
from elaswave_fx.plan.next.replan_request import ReplanRequest, ReshapeRequest
from elaswave_fx.plan.work.cost import Bucket, UnitCost, Value, Workload
from elaswave_fx.plan.work.options import PlanOptions
from elaswave_fx.plan.work.topology import Link, Rank, emulated_host, local_topology

BATCH = 12
"""Samples of a step."""

REPLICAS = 1
"""Replicas of each box besides its owner's."""

RANKS_PER_HOST = 2
SLOW = Link(0.0, 300.0)
"""Of jobs of several units: parameters take so long that ranks get replicas for a target before its lanes are taken."""

MOST_PLANS = 50_000
"""Plans that a process remembers."""


def host_of(rank: Rank) -> int:
    """Neighbours share a host; joiners too."""
    return rank // RANKS_PER_HOST


def info_of(rank: Rank) -> MemberInfo:
    """A rank's info; all hosts are those of one machine."""
    return MemberInfo(rank, "", emulated_host(rank, RANKS_PER_HOST), "", 0)


def workload(units: int) -> Workload:
    """Units in a chain, each with a bucket of its own."""
    return Workload(
        tuple(UnitCost(0.1, 0.2, param_bytes=192) for _ in range(units)),
        tuple(Value(f"h{unit}", unit, (unit + 1,), 64) for unit in range(units - 1)),
        tuple(Bucket(f"b{unit}", 48, (unit,)) for unit in range(units)),
        PlanOptions(BATCH),
    )


@cache
def first_plan(world: int, units: int) -> Planned:
    """The job at its start: as many stages as units, the ranks shared out among them."""
    widths = [world // units + (stage < world % units) for stage in range(units)]
    topology = local_topology(world, RANKS_PER_HOST)
    if units > 1:
        topology = replace(topology, within_host=SLOW, between_hosts=SLOW)
    plan = plan_lanes(workload(units), topology, [widths], replicas=REPLICAS)
    return Planner(REPLICAS).read(plan.to_json())


class MemoPlanner:
    """The real planner, which is pure: what it was asked before it need not think about again."""

    def __init__(self) -> None:
        self._planner = Planner(REPLICAS)
        self._plans: dict[object, Planned] = {}
        self._next: dict[object, Planned | None] = {}

    def read(self, text: str) -> Planned:
        """Same as `Planning.read`."""
        return self._planner.read(text)

    def loss_kind(self, before: Planned, rank: Rank) -> Hashable:
        """Same as `Planning.loss_kind`."""
        return self._planner.loss_kind(before, rank)

    def replan(
        self, before: Planned, members: tuple[Rank, ...], held: Held, like: Planned | None = None,
        joiners: Joiners | None = None,
    ) -> Planned:  # fmt: skip
        """Same as `Planning.replan`; it searches, whatever it is told."""
        key = (before.assignment.plan_hash, members, tuple(sorted(held.items())))
        if key not in self._plans:
            if len(self._plans) >= MOST_PLANS:
                self._plans.clear()
            self._plans[key] = self._planner.replan(before, members, held, None, joiners)
        return self._plans[key]

    def expected(self, planned: Planned) -> Mapping[Rank, Expected]:
        """Same as `Planning.expected`."""
        return self._planner.expected(planned)

    def slow_ranks(self, planned: Planned) -> SlowRanks:
        """Same as `Planning.slow_ranks`."""
        return self._planner.slow_ranks(planned)

    def why_not(self, before: Planned, reshape: ReshapeRequest, was_tried: bool) -> str | None:
        """Same as `Planning.why_not`."""
        return self._planner.why_not(before, reshape, was_tried)

    def successor(self, before: Planned, held: Held, request: ReplanRequest) -> Planned | None:
        """Same as `Planning.successor`."""
        speeds = tuple(sorted(request.speeds.items())), tuple(sorted(request.probation.items()))
        about = (before.assignment.plan_hash, tuple(sorted(held.items())))
        key = (*about, request.leaving, request.overdue, request.reshape, speeds)
        if key not in self._next:
            if len(self._next) >= MOST_PLANS:
                self._next.clear()
            self._next[key] = self._planner.successor(before, held, request)
        return self._next[key]


PLANNER = MemoPlanner()
