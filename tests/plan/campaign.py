"""What planning promises, tried on many random cases (`make proofs`); the tests try some of the same.

    python -m tests.plan.campaign --only shares --cases 5000 --seed 7      a line of JSON per kind of case

minimax: cuts against every cut; shares: cuts and granules by lane against every cut and every way to share them;
choice: what is done after losses against every candidate with every cut and every share; halves: the same where
backward passes are, or may be, in halves; topologies: all plans of random clusters of 1 to 64 ranks
pass the checker; steps: real steps by the plans of small ones have the bits of one rank. Exit code 1 if a bound does
not hold.
"""

from __future__ import annotations

import argparse
import atexit
import itertools
import json
import math
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from elaswave_fx.errors import PlanError
from elaswave_fx.plan.check.check_plan import check_plan, plan_violations
from elaswave_fx.plan.lanes.lane_shapes import LaneShape
from elaswave_fx.plan.lanes.partition import slowest_stage
from elaswave_fx.plan.lanes.shape_lanes import LaneShaper, unit_seconds
from elaswave_fx.plan.make.planner import plan_lanes
from elaswave_fx.plan.next.lane_candidates import lane_candidates, new_lanes
from elaswave_fx.plan.next.lane_search import SIZES_TRIED
from elaswave_fx.plan.next.replan import replan
from elaswave_fx.plan.plan import Plan
from elaswave_fx.plan.work.cost import ROUNDING, UnitCost, Value, Workload
from elaswave_fx.plan.work.options import PlanOptions
from elaswave_fx.plan.work.spans import Span
from elaswave_fx.plan.work.topology import Topology, local_topology
from tests.plan import random_topologies
from tests.plan.brute_force import BruteForce, all_borders, lane_seconds
from tests.plan.random_topologies import history, random_ranks
from tests.plan.real_steps import TinyJob
from tests.plan.samples import asking


@dataclass(frozen=True)
class Case:
    """How much longer than the optimum, 1 at best; and what it is of, to make it again."""

    ratio: float
    words: str


def random_workload(rng: random.Random, granules: int, memory: bool = False) -> tuple[Workload, int | None]:
    """A chain of at most 8 units whose values take no time to send, and what memory a rank has: parameters of some of
    them, and activations where `memory` is bounded."""
    units = rng.randint(1, 8)
    call = rng.choice((0.0, 0.2))
    costs = [rng.choice((1, 1, 2, 3, 5, 7)) * 1e-3 for _ in range(units)]
    bytes_ = [(rng.choice((50, 100, 150)), rng.choice((0, 5, 10))) for _ in range(units)]
    limit = int(sum(size for size, _ in bytes_) * rng.uniform(0.3, 1.2)) if memory else None
    granule = rng.choice((1, 1, 2))
    return Workload(
        tuple(
            UnitCost(c, 2 * c, c * call, p, s, s // 2, rng.choice((0.3, 0.5)))
            for c, (p, s) in zip(costs, bytes_, strict=True)
        ),
        tuple(Value(f"h{i}", i, (i + 1,), 0) for i in range(units - 1)),
        (),
        PlanOptions(granules * granule, granule),
    ), limit


def random_topology(rng: random.Random, ranks: int, memory_bytes: int | None = None) -> Topology:
    """A rank a host, alike or of three speeds."""
    uneven = rng.random() < 0.5
    speeds = [rng.choice((1.0, 1.0, 0.8, 0.5)) if uneven else 1.0 for _ in range(ranks)]
    return local_topology(ranks, 1, memory_bytes, speeds=speeds)


def fits_of(workload: Workload, size: int, limit: int | None) -> Callable[[int, int, Span], bool]:
    """(stages, stage, units) -> whether there is room for parameters, and for what as many micro-batches have saved as
    there are stages from there on."""

    def fits(stages: int, stage: int, units: Span) -> bool:
        costs = [workload.units[u] for u in units]
        saved = sum(c.saved_bytes for c in costs) * size * (stages - stage)
        return limit is None or sum(c.param_bytes for c in costs) + saved <= limit

    return fits


def minimax_cases(rng: random.Random) -> list[Case]:
    """One lane of random depth and widths, at every size of micro-batches: its slowest stage."""
    workload, limit = random_workload(rng, rng.randint(4, 12), memory=rng.random() < 0.6)
    widths = [rng.choice((1, 1, 2)) for _ in range(rng.randint(1, min(4, len(workload.units))))]
    topology = random_topology(rng, sum(widths), limit)
    members = iter(topology.members)
    shapes = (LaneShape(tuple(tuple(next(members) for _ in range(width)) for width in widths)),)
    found = []
    shaper = LaneShaper(workload, topology)
    for size in shaper.sizes(shapes):
        fits, costs = fits_of(workload, size, limit), unit_seconds(workload, size)
        strengths = shapes[0].strengths
        allowed = [
            cut
            for cut in all_borders(len(workload.units), len(widths))
            if all(fits(len(widths), stage, Span(*each)) for stage, each in enumerate(itertools.pairwise(cut)))
        ]
        if shapes[0].width > workload.granules:
            continue
        borders = shaper.borders(shapes[0], size, shaper.table(shapes, 0))
        words = f"{costs} at {strengths}, size {size}, {limit} bytes"
        assert (borders is None) == (not allowed), words
        if borders is not None:
            best = min(slowest_stage(costs, strengths, cut) for cut in allowed)
            assert borders in allowed, words
            found.append(Case(slowest_stage(costs, strengths, borders) / best, words))
    return found


def share_cases(rng: random.Random) -> list[Case]:
    """Lanes of every shape: how they are cut, and how the granules are shared."""
    workload, _ = random_workload(rng, rng.randint(2, 12))
    topology = random_topology(rng, rng.randint(1, 6))
    shaper, brute_force, found = LaneShaper(workload, topology), BruteForce(workload), []
    for candidate in new_lanes(len(workload.units), workload.granules, topology.members):
        for size in shaper.sizes(candidate.shapes):
            lanes = shaper.shape(candidate.shapes, size, shaper.table(candidate.shapes, 0))
            if lanes is None:
                continue
            seconds = [shaper.times.of(lane, {}).seconds for lane in lanes]
            own = [lane_seconds(workload, lane, topology) for lane in lanes]
            assert all(abs(a - b) <= ROUNDING * a for a, b in zip(seconds, own, strict=True)), (seconds, own)
            best = brute_force.shortest(candidate.shapes, size)
            assert best is not None
            found.append(Case(max(seconds) / best.seconds, f"{workload.units} {lanes} against {best}"))
    return found


def choice_cases(rng: random.Random) -> list[Case]:
    """Whole backward passes."""
    return after_losses(rng, "1f1b")


def halves_cases(rng: random.Random) -> list[Case]:
    """Backward passes in halves, or in halves where that is shorter."""
    return after_losses(rng, rng.choice(("split", "auto")))


def after_losses(rng: random.Random, schedule: str) -> list[Case]:
    """Lanes side by side, with stages of one rank or two, lose one rank or two, so that six are left or fewer: the step
    of what is done, against that of every candidate in the sizes of micro-batches that are tried."""
    ranks = rng.randint(2, 7)
    workload, limit = random_workload(rng, rng.randint(ranks, 16), memory=rng.random() < 0.5)
    workload = asking(workload, schedule=schedule)
    widths: list[list[int]] = []
    while (left := ranks - sum(map(sum, widths))) > 0:
        widths.append([])
        for _ in range(rng.randint(1, min(left, len(workload.units)))):
            widths[-1].append(min(left - sum(widths[-1]), rng.choice((1, 1, 1, 2))))
            if sum(widths[-1]) == left:
                break
    before = planned_or_none(workload, random_topology(rng, ranks, limit), widths)
    lost = rng.sample(range(ranks), min(ranks - 1, rng.choice((1, 1, 2))))
    if before is None or ranks - len(lost) > 6:
        return []
    best = best_after(before, lost)
    try:
        after = replan(before, tuple(r for r in before.ranks if r not in lost), {}, 0)
    except PlanError as error:
        assert best is None, f"{error}, and {best} would do"
        return []
    check_plan(after)
    words = f"{workload} {before.topology.members} {before.lanes}, lost {lost}: {after.reason} against {best}"
    assert best is not None, words
    # What is shorter than the optimum has no room, or is not what brute force takes it for.
    assert after.predicted.pipeline_s >= best[0] * (1 - ROUNDING), words
    return [Case(after.predicted.pipeline_s / best[0], words)]


def planned_or_none(workload: Workload, topology: Topology, widths: Sequence[Sequence[int]]) -> Plan | None:
    try:
        return plan_lanes(workload, topology, widths, replicas=0)
    except PlanError:
        return None


def best_after(plan: Plan, lost: Sequence[int]) -> tuple[float, str] | None:
    """Seconds and name of the best candidate, None if nothing fits; in all sizes if nothing fits in those tried first,
    as the planner does it."""
    workload = plan.workload
    topology = replace(plan.topology, members=tuple(m for m in plan.topology.members if m.rank not in lost))
    shaper = LaneShaper(workload, topology)
    brute_force = BruteForce(workload, shaper.times)
    largest = max(len(m) for lane in plan.lanes for m in lane.micro_batches)
    for tried in (SIZES_TRIED, None):
        found = []
        for candidate in lane_candidates(plan, topology):
            sizes = dict.fromkeys((largest, *shaper.sizes(candidate.shapes)))
            for size in itertools.islice(sizes, tried):
                best = brute_force.shortest(candidate.shapes, size)
                if best is not None:
                    found.append((best.seconds, candidate.name))
        if found:
            return min(found)
    return None


def topology_cases(rng: random.Random) -> list[Case]:
    """Every plan through losses and joins."""
    ranks = random_ranks(rng)
    found = []
    for plan in history(rng, random_topologies.random_workload(rng, ranks), ranks):
        words = next(plan_violations(plan), "") or violation_of_lists(plan)
        found.append(Case(math.inf if words else 1.0, f"{words}: {plan.reason}"))
    return found


def violation_of_lists(plan: Plan) -> str:
    try:
        check_plan(plan)
    except PlanError as error:
        return str(error)
    return ""


@cache
def tiny_job() -> TinyJob:
    """Built once for all cases."""
    folder = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, folder)
    return TinyJob(Path(folder))


def step_cases(rng: random.Random) -> list[Case]:
    """The last plan of up to 8 ranks through losses and joins."""
    job = tiny_job()
    workload = asking(job.workload, schedule=rng.choice(("1f1b", "1f1b", "split")))
    plans = list(history(rng, workload, rng.randint(2, 8)))
    return [Case(1.0 if job.run(plan) == job.alone else math.inf, str(plan.lanes)) for plan in plans[-1:]]


@dataclass(frozen=True)
class Kind:
    """Cases of one kind, `bound` on every ratio."""

    make: Callable[[random.Random], list[Case]]
    cases: int
    bound: float


KINDS = {
    "minimax": Kind(minimax_cases, 20_000, 1 + ROUNDING),
    "shares": Kind(share_cases, 20_000, 1 + ROUNDING),
    "choice": Kind(choice_cases, 5_000, 1 + ROUNDING),
    "halves": Kind(halves_cases, 300, 1 + ROUNDING),
    "topologies": Kind(topology_cases, 2_000, 1.0),
    "steps": Kind(step_cases, 200, 1.0),
}


@dataclass(frozen=True)
class Found:
    """What became of the cases of a kind."""

    cases: int
    over: int
    worst: Case

    def holds(self, kind: Kind) -> bool:
        """Whether all are within the bound."""
        return self.worst.ratio <= kind.bound


def try_kind(kind: Kind, cases: int, seed: int) -> Found:
    """At least so many cases; those of a seed are always the same."""
    count = over = number = 0
    worst = Case(0.0, "none")
    while count < cases:
        for case in kind.make(random.Random(f"{seed} {number}")):
            count += 1
            over += case.ratio > kind.bound
            worst = max(worst, case, key=lambda each: each.ratio)
        number += 1
    return Found(count, over, worst)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=KINDS, help="one kind of cases")
    parser.add_argument("--cases", type=int, help="of each kind")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    holds = True
    for name in [options.only] if options.only else KINDS:
        kind, begun = KINDS[name], time.monotonic()
        found = try_kind(kind, options.cases or kind.cases, options.seed)
        line = {"kind": name, "cases": found.cases, "longer": found.over, "worst": found.worst.ratio}
        print(json.dumps({**line, "seconds": round(time.monotonic() - begun, 1)}), flush=True)
        if not found.holds(kind):
            print(f"  {found.worst.words}", flush=True)
            holds = False
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
