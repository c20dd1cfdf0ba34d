"""shards: owned shares of a stage's boxes as runs of neighbours, as they are dealt, against boxes dealt in turn.

Jobs of random layouts, each planned twice, lose ranks, get more of them, and are given other lanes; the same changes
for both. Everything is the planner's: what would travel for a change and all planned stops that follow from it, and
the messages of a step afterwards. Nothing is run.

    owners of the 8 boxes of a bucket that ranks 0 and 1 read     0 0 0 0 1 1 1 1  against  0 1 0 1 0 1 0 1
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise

from elaswave_fx.plan.make.derive import make_plan
from elaswave_fx.plan.make.planner import plan_uniform
from elaswave_fx.plan.next.replan import Replicas, replan
from elaswave_fx.plan.next.replan_request import ReplanRequest, ReshapeRequest
from elaswave_fx.plan.next.target_layout import successor
from elaswave_fx.plan.plan import Plan
from elaswave_fx.plan.predict.transition import Transition
from elaswave_fx.plan.replicas.holders import choose_holders
from elaswave_fx.plan.work.box import Box, numbered
from elaswave_fx.plan.work.topology import Rank, local_topology
from tools.bench.planner import SAMPLES_A_STAGE, chain
from tools.bench.results import Entry, Options, Outcome, paired

JOBS, SEED = 40, 16
"""How many jobs there are, and from what layouts and changes are drawn."""

CHANGES = 4
"""Of a job, one after another; each once nothing follows from the one before."""

LAYOUTS = ((2, 2), (3, 2), (2, 3), (4, 1), (4, 2), (2, 4), (3, 3), (6, 1), (4, 3))
UNITS, ELEMENTS, BOXES_A_BUCKET = 12, 600_000, 12
MOST_RANKS, FEWEST_RANKS = 12, 3


@dataclass(frozen=True)
class Moved:
    """What a change moves: bytes that travel, those of the rank that sends most in each of its plans, added up; and
    messages of a step once nothing follows."""

    total: int
    longest: int
    messages: int


def run(progress: Callable[[str], None], options: Options) -> Outcome:
    """Medians over changes of all jobs."""
    found: dict[str, list[Moved]] = {"runs": [], "in turn": []}
    for job in range(2 if options.tiny else options.repeats or JOBS):
        progress(f"job {job + 1}")
        seed = SEED + job
        dp, pp = random.Random(seed).choice(LAYOUTS)
        work = chain(UNITS, ELEMENTS, BOXES_A_BUCKET, SAMPLES_A_STAGE * dp * pp)
        plan = plan_uniform(work, local_topology(dp * pp), dp, pp)
        found["runs"] += changes(plan, random.Random(seed))
        found["in turn"] += changes(in_turn(plan), random.Random(seed))
    return Outcome(list(_entries(found["runs"], found["in turn"])), _NOTES)


_NOTES = (
    "",
    "ours: neighbouring boxes of a bucket have one owner, as they are dealt; peer: they are dealt in turn",
    "means are of all changes; medians and ratios of those for which something travels on both sides",
)


def in_turn(plan: Plan) -> Plan:
    """The same with each rank's boxes of a bucket spread over it: as many as before, one after another."""
    boxes: list[Box] = []
    for _, group in groupby(plan.boxes, key=lambda box: box.bucket):
        dealt = list(group)
        left = Counter(box.owner for box in dealt)
        owners: list[Rank] = []
        while left:
            owners += left
            left -= Counter(dict.fromkeys(left, 1))
        boxes += [replace(box, owner=owner, holders=()) for box, owner in zip(dealt, owners, strict=True)]
    held = choose_holders(plan.topology, boxes, plan.ranks, 1)
    return make_plan(plan.topology, plan.workload, plan.lanes, plan.reason, boxes=held)


def changes(plan: Plan, rng: random.Random) -> Iterator[Moved]:
    """What each of some changes moves; the same ones for any plan of the same layout."""
    for _ in range(CHANGES):
        kind, first, second = rng.choice(("loss", "loss", "join", "lanes")), rng.random(), rng.random()
        plans = [plan, *changed(plan, kind, first, second)]
        while (following := successor(plans[-1], _replicas(plans[-1]), 1)) is not None:
            plans.append(following)
        moves = [Transition.of(before, after) for before, after in pairwise(plans)]
        senders = [_sent(after, move) for after, move in zip(plans[1:], moves, strict=True)]
        longest = sum(max(sent.values(), default=0) for sent in senders)
        yield Moved(sum(move.bytes_moved for move in moves), longest, messages(plans[-1].boxes))
        plan = plans[-1]


def changed(plan: Plan, kind: str, first: float, second: float) -> Iterator[Plan]:
    """The plan after a loss, a join or a reshape, as two numbers in [0, 1) say; none where that cannot be."""
    ranks = plan.ranks
    if kind == "loss" and len(ranks) > FEWEST_RANKS:
        lost = ranks[int(first * len(ranks))]
        left = tuple(rank for rank in ranks if rank != lost)
        yield replan(plan, left, {n: tuple(r for r in have if r != lost) for n, have in _replicas(plan).items()}, 1)
    elif kind == "join" and len(ranks) < MOST_RANKS:
        yield replan(plan, (*ranks, Rank(max(ranks) + 1)), _replicas(plan), 1)
    elif kind == "lanes":
        pp = 1 + int(first * min(4, len(ranks)))
        dp = 1 + int(second * (len(ranks) // pp))
        following = successor(plan, _replicas(plan), 1, ReplanRequest(reshape=ReshapeRequest(dp, pp)))
        if following is not None:
            yield following


def messages(boxes: Sequence[Box]) -> int:
    """Messages of a step, between all ranks: neighbours with the same roles share parts, records and parameters."""
    found = 0
    for (_, owner, holders, readers), _ in groupby(boxes, lambda b: (b.bucket, b.owner, b.holders, b.readers)):
        parts = sum(rank != owner for rank in readers)
        gathers = sum(rank not in (owner, *holders) for rank in readers)
        found += parts + len(holders) + gathers
    return found


def _replicas(plan: Plan) -> Replicas:
    return {number: box.replica_ranks for number, box in numbered(plan.boxes)}


def _sent(plan: Plan, move: Transition) -> Counter[Rank]:
    """Bytes of states and of parameters, by rank."""
    sent: Counter[Rank] = Counter()
    for task in move.transfers:
        sent[task.source] += task.size_bytes
    for box in plan.boxes:
        takers = sum(rank != box.owner for rank in move.parameters.get(box.bucket, ()))
        sent[box.owner] += plan.workload.buckets[box.bucket].element_bytes * len(box.span) * takers
    return sent


def _entries(ours: Sequence[Moved], peer: Sequence[Moved]) -> Iterator[Entry]:
    def both(name: str, of: Callable[[Moved], int], unit: str, over: float) -> Entry:
        pairs = [(of(a) / over, of(b) / over) for a, b in zip(ours, peer, strict=True) if of(a) and of(b)]
        entry = paired(name, [a for a, _ in pairs], [b for _, b in pairs], unit)
        mean = [sum(map(of, side)) / over / len(side) for side in (ours, peer)]
        return replace(entry, parts={"mean": mean[0], "mean of the peer": mean[1]})

    yield both("bytes of a change", lambda moved: moved.total, "MiB", 2**20)
    yield both("bytes of the longest sender", lambda moved: moved.longest, "MiB", 2**20)
    yield both("messages of a step", lambda moved: moved.messages, "messages", 1)
