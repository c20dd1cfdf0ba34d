"""The job that the simulator runs: a small step, planned by the real planner.

In: how many ranks and units. Out: plans, as the coordinator gets them. Boxes are digests; a step has BATCH samples.

    first_plan(4, units=2).assignment  ->  ranks 0, 1 on unit 0 and 2, 3 on unit 1, each box held on another host
"""

from __future__ import annotations

from functools import cache

from elaswave_fx.control.coordinator.plan_cache import Held, Planned, Planner
from elaswave_fx.plan.cost import Bucket, UnitCost, Value, Workload
from elaswave_fx.plan.planner import plan_lanes
from elaswave_fx.plan.topology import Rank, local_topology

BATCH = 12
"""Samples of a step."""

COPIES = 1
"""Copies of each box besides its owner's."""

RANKS_PER_HOST = 2
MOST_PLANS = 50_000
"""Plans that a process remembers."""


def host_of(rank: Rank) -> int:
    """Neighbours share a host; joiners too."""
    return rank // RANKS_PER_HOST


def workload(units: int) -> Workload:
    """Units in a chain, each with a bucket of its own."""
    return Workload(
        tuple(UnitCost(1e-3, 2e-3, param_bytes=192) for _ in range(units)),
        tuple(Value(f"h{unit}", unit, (unit + 1,), 64) for unit in range(units - 1)),
        tuple(Bucket(f"b{unit}", 48, (unit,)) for unit in range(units)),
        BATCH,
    )


@cache
def first_plan(world: int, units: int) -> Planned:
    """The job at its start: as many stages as units, the ranks shared out among them."""
    widths = [world // units + (stage < world % units) for stage in range(units)]
    plan = plan_lanes(workload(units), local_topology(world, RANKS_PER_HOST), [widths], copies=COPIES)
    return Planner(COPIES).read(plan.to_json())


class MemoPlanner:
    """The real planner, which is pure: what it was asked before it need not think about again."""

    def __init__(self) -> None:
        self._planner = Planner(COPIES)
        self._plans: dict[object, Planned] = {}
        self._moves: dict[object, bool] = {}

    def read(self, text: str) -> Planned:
        """As `Planning.read`."""
        return self._planner.read(text)

    def replan(self, before: Planned, members: tuple[Rank, ...], held: Held) -> Planned:
        """As `Planning.replan`."""
        key = (before.assignment.plan_hash, members, tuple(sorted(held.items())))
        if key not in self._plans:
            if len(self._plans) >= MOST_PLANS:
                self._plans.clear()
            self._plans[key] = self._planner.replan(before, members, held)
        return self._plans[key]

    def wants_move(self, before: Planned, held: Held) -> bool:
        """As `Planning.wants_move`."""
        key = (before.assignment.plan_hash, tuple(sorted(held.items())))
        if key not in self._moves:
            if len(self._moves) >= MOST_PLANS:
                self._moves.clear()
            self._moves[key] = self._planner.wants_move(before, held)
        return self._moves[key]


PLANNER = MemoPlanner()
