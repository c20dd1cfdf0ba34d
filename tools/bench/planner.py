"""planner: processor time of plans with every rank's part derived, at first and after one loss.

One workload: 50 units that cost the same, one value from each to the next, a bucket each, four boxes a bucket; eight
samples a stage. There is no peer: what was wanted stands in its place. The independent checker is not timed, nor JSON,
nor the making of the workload and the topology.

    plan_uniform, then tile, hops and both programs of every rank     "every part"
    replan without one rank, then the same                            "after a loss"
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable

from elaswave_fx.plan.lower.step import eval_program, step_program
from elaswave_fx.plan.make.planner import most_memory, plan_uniform
from elaswave_fx.plan.next.replan import replan
from elaswave_fx.plan.plan import Plan
from elaswave_fx.plan.work.box import BoxId, numbered
from elaswave_fx.plan.work.cost import Bucket, UnitCost, Value, Workload
from elaswave_fx.plan.work.options import PlanOptions
from elaswave_fx.plan.work.topology import Rank, local_topology
from tools.bench.results import Entry, Options, Outcome, p95

REPEATS = 9
UNITS, BOXES_A_BUCKET, ELEMENTS = 50, 4, 300_000
SAMPLES_A_STAGE = 8
"""So many samples has a lane for each of its stages."""

DERIVED = {(4, 4): 20.0, (16, 16): 300.0}
"""Lanes and stages -> the target in milliseconds, at first and after a loss."""

ROOM = 1.6
"""Memory of a rank where it is bounded, in what the rank that needs most has: too little for all units on each."""

LOST = Rank(5)


def run(progress: Callable[[str], None], options: Options) -> Outcome:
    """Medians of processor time in this process."""
    repeats = options.repeats or REPEATS
    entries: list[Entry] = []
    for (lanes, stages), wanted in list(DERIVED.items())[: 1 if options.tiny else None]:
        progress(f"{lanes * stages} ranks, every part")
        entries += _derived(lanes, stages, wanted, repeats)
    return Outcome(entries, _NOTES)


_NOTES = (
    "",
    f"processor time; {UNITS} units of equal cost, {UNITS * BOXES_A_BUCKET} boxes, {SAMPLES_A_STAGE} samples a stage; "
    "the peer is what was wanted",
    f"bounded: a rank has {ROOM} times the memory that the fullest one needs; else all units fit on every rank",
    "not timed: the independent checker, JSON, making the workload and the topology, and the first of all runs, after "
    "which the orders of pipelines as deep are known",
)


def chain(units: int, elements: int, boxes_a_bucket: int, samples: int) -> Workload:
    """A step of equal units, each of which feeds the next one and has a bucket of parameters."""
    return Workload(
        units=(UnitCost(1e-3, 2e-3, 1e-5, 4 * elements, 50),) * units,
        values=tuple(Value(f"h{i}", i, (i + 1,), 100) for i in range(units - 1)),
        buckets=tuple(Bucket(f"u{i}", elements, (i,)) for i in range(units)),
        options=PlanOptions(samples),
        least_elements=elements // boxes_a_bucket,
    )


def every_part(plan: Plan) -> Plan:
    """The plan, once all that follows from it has been derived."""
    assert plan.tiles and len(plan.boxes) == UNITS * BOXES_A_BUCKET
    for rank in plan.ranks:
        step_program(plan, rank)
        eval_program(plan, rank)
    assert plan.hops or len(plan.lanes[0].stages) == 1
    return plan


def after_a_loss(plan: Plan) -> Plan:
    """The next plan, with every part."""
    left = tuple(rank for rank in plan.ranks if rank != LOST)
    copies: dict[BoxId, tuple[Rank, ...]] = {
        number: tuple(rank for rank in box.replica_ranks if rank != LOST) for number, box in numbered(plan.boxes)
    }
    return every_part(replan(plan, left, copies, 1))


def _derived(lanes: int, stages: int, wanted: float, repeats: int) -> list[Entry]:
    """Plans at first, and after a loss with and without a bound on memory."""
    work, ranks = chain(UNITS, ELEMENTS, BOXES_A_BUCKET, SAMPLES_A_STAGE * lanes * stages), lanes * stages
    free = local_topology(ranks)
    plan = plan_uniform(work, free, lanes, stages)
    tight = local_topology(ranks, memory_bytes=int(ROOM * most_memory(plan)))
    bounded = plan_uniform(work, tight, lanes, stages)
    sides = {
        f"{ranks} ranks, every part": lambda: every_part(plan_uniform(work, free, lanes, stages)),
        f"{ranks} ranks, every part, bounded": lambda: every_part(plan_uniform(work, tight, lanes, stages)),
        f"{ranks} ranks, after a loss": lambda: after_a_loss(plan),
        f"{ranks} ranks, after a loss, bounded": lambda: after_a_loss(bounded),
    }
    return [_entry(name, action, wanted, repeats) for name, action in sides.items()]


def _entry(name: str, action: Callable[[], object], wanted: float, repeats: int) -> Entry:
    """Its median against what was wanted; the first time is not counted."""
    action()
    gc.collect()
    taken: list[float] = []
    for _ in range(repeats):
        start = time.process_time()
        action()
        taken.append(1e3 * (time.process_time() - start))
    ours = statistics.median(taken)
    return Entry(name, wanted / ours, ours, wanted, "ms", repeats, p95(taken), target=1.0)
