"""The next plan of a job whose ranks, or whose copies, have changed. Pure, and on the way from a loss to the next step.

In: the plan before, who goes on, who has a copy of which box now. Out: the plan of the next epoch; its boxes are those
of the first plan, handed to ranks that have a copy. PlanError if nothing fits the memory that is left.

    replan(plan, (0, 2, 3), {0: (0,), 1: (2, 3), ...}, count=1)
    reason: lost rank 1; the hurt lane is cut anew, 1 deep; predicted step ... ; beaten: stages keep their units ...
"""

from __future__ import annotations

import bisect
import heapq
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from elaswave_fx.errors import PlanError
from elaswave_fx.plan.box import BoxId, Span, numbered
from elaswave_fx.plan.copies import CopySources, reassign_boxes, with_readers
from elaswave_fx.plan.cost import ROUNDING
from elaswave_fx.plan.derive import make_plan
from elaswave_fx.plan.exchange import ExchangeEstimate
from elaswave_fx.plan.frequency import clock_words
from elaswave_fx.plan.lane_candidates import Candidate, new_lanes
from elaswave_fx.plan.plan import Plan, Predicted
from elaswave_fx.plan.planner import fits_memory, most_memory
from elaswave_fx.plan.policies import NO_ANSWER, candidates
from elaswave_fx.plan.shape_lanes import LaneShaper
from elaswave_fx.plan.sketches import Outline, Part, Run, SideBySide, Sketches
from elaswave_fx.plan.tiling import Lane, tiles_of
from elaswave_fx.plan.topology import Epoch, Host, Member, Rank, Topology, local_topology
from elaswave_fx.words import listed, number_ranges, rank_words, size_text

SIZES_TRIED = 2
"""Of micro-batches, for each candidate: those of before, and what its depth asks for."""

SLACK = 0.98
"""Of the shortest step that an idea could have: uneven micro-batches can be a little faster than that."""

WORTHWHILE = 1.01
"""A draft must promise so many times the steps of a plan that there is, or no plan is made of it: what drafts do not
know is about as much, and every plan takes milliseconds, in which everybody waits."""

BEATEN = 3
"""Candidates that the reason of a plan names besides the one that was taken."""

Copies = Mapping[BoxId, tuple[Rank, ...]]
"""Box -> the ranks that have a copy of it now."""


def replan(plan: Plan, members: tuple[Rank, ...], copies: Copies, count: int) -> Plan:
    """The plan of the epoch after `plan` for `members`, with `count` copies of each box besides the owner's.

    With the same ranks lanes stay as they are. Fewer copies are kept where memory has no room for `count`. PlanError
    names a box without a copy, or the smallest number of ranks that would do.
    """
    topology = _next_topology(plan, members)
    have = _copies_now(plan, topology.ranks, copies)
    search = _Search(plan, topology, have)
    most = min(count, len(topology.members) - 1)
    for wanted in range(most, -1, -1):
        found = search.best(wanted)
        if found is not None:
            room = () if wanted == most else (f"memory has room for {wanted} of {most} copies",)
            parts = (
                _changed(plan, found.plan),
                *found.because,
                *((found.plan.reason,) if found.plan.reason else ()),
                *clock_words(found.plan),
                *_box_words(plan, found.plan, have),
                *room,
            )
            return replace(found.plan, reason="; ".join(parts))
    raise PlanError(_too_few(plan, topology))


def terminal_plan(plan: Plan, members: tuple[Rank, ...], copies: Copies, why: str) -> Plan:
    """The last plan of a job that cannot go on: nobody computes, every box has an owner that can save it."""
    topology = _next_topology(plan, members)
    have = _copies_now(plan, topology.ranks, copies)
    boxes = tuple(
        replace(box, owner=box.owner if box.owner in ranks else ranks[0], holders=(), catching_up=(), readers=())
        for box, ranks in zip(plan.boxes, have, strict=True)
    )
    return replace(
        plan,
        topology=topology,
        lanes=(),
        boxes=boxes,
        schedule=dict.fromkeys(topology.ranks, ()),
        predicted=Predicted(0.0, 0.0, {}),
        reason=why,
        terminal_reason=why,
        clocks={},
    )


def wants_move(plan: Plan, copies: Copies, count: int) -> bool:
    """Whether `replan` with the same members would change an owner or drop a holder that is not needed any more."""
    have = _copies_now(plan, plan.ranks, copies)
    boxes = reassign_boxes(plan.boxes, CopySources(plan.topology, have, count))
    return any(
        new.owner != old.owner or not set(old.holders) <= {*new.holders, new.owner}
        for old, new in zip(plan.boxes, boxes, strict=True)
    )


@dataclass(frozen=True)
class _Idea:
    """A candidate with micro-batches of a size. `least_s`: about the shortest step that it could have; `place`: among
    all ideas. Once the idea has been looked at, `runs` of alike sketches and where their units are cut."""

    candidate: Candidate
    micro_batch: int
    least_s: float
    place: int
    runs: Sequence[Run] = ()
    borders: Sequence[tuple[int, ...]] = ()

    def __lt__(self, other: _Idea) -> bool:
        return (self.least_s, -self.place) < (other.least_s, -other.place)


@dataclass(frozen=True)
class _Draft:
    """An idea in parts, with their predicted step, as far as it is known before boxes are handed out; and with what
    they cost before the first one: bytes of parameters that all ranks together fetch, and the time that the last one
    waits for its own. `is_bound`: the step is at least that long, which is worse than another draft, so that not all
    lanes were timed. `plan`: once there is one; the step is its own then."""

    idea: _Idea
    parts: Sequence[Part]
    step_s: float
    moved_bytes: int
    stall_s: float
    least_s: float
    is_bound: bool = False
    plan: Plan | None = None

    @property
    def name(self) -> str:
        """Of the candidate."""
        return self.idea.candidate.name

    def steps(self, life_s: float) -> float:
        """Committed by the end of the topology's expected life; to four digits, as what differs by less is alike."""
        return float(f"{max(life_s - self.stall_s, 0.0) / self.step_s:.4g}")


@dataclass(frozen=True)
class _Found:
    plan: Plan
    because: tuple[str, ...]


class _Search:
    """The same lanes if nobody has gone or come; else the candidate by which most steps are committed while this
    topology is expected to last, and of equal ones the one that moves least."""

    def __init__(self, plan: Plan, topology: Topology, have: Sequence[tuple[Rank, ...]]) -> None:
        self._plan = plan
        self._topology = topology
        self._have = have
        self._shaper = LaneShaper(plan.workload, topology)
        self._exchange = ExchangeEstimate(plan.workload, topology)
        self._had = {rank: stage.units for lane in plan.lanes for stage in lane.stages for rank in stage.ranks}

    def best(self, copies: int) -> _Found | None:
        """None if nothing fits with that many copies."""
        if self._topology.ranks == self._plan.ranks and self._plan.lanes:
            plan = self._fitting(self._plan.lanes, copies)
            if plan is not None:
                return _Found(plan, ("lanes as before",))
        for sizes in (SIZES_TRIED, None):
            found = self._best_of(self._ideas(copies, sizes), copies)
            if found is not None:
                return found
        return None

    def _best_of(self, ideas: list[_Idea], copies: int) -> _Found | None:
        """The best draft that is still about the best as a plan, in which every rank has the room that its boxes leave.
        Ideas are looked at, and then shaped and timed, as long as they promise more than what has been found: those
        first that promise most."""
        heapq.heapify(ideas)
        drafts: list[_Draft] = []  # the best one first
        while ideas or drafts:
            best = drafts[0] if drafts else None
            if ideas and (best is None or self._promises(ideas[0], best)):
                idea = heapq.heappop(ideas)
                better_known = self._look(idea, copies) if not idea.runs else self._look_closer(idea, best)
                if better_known is not idea:
                    if better_known is not None:
                        heapq.heappush(ideas, better_known)
                    continue
                draft = self._draft(idea, copies, best)
                if draft is not None:
                    bisect.insort(drafts, draft, key=self._worth)
                continue
            if best is None:
                return None
            taken = next((draft for draft in drafts if draft.plan is not None), None)
            if taken is not None and taken.plan is not None and not self._is_worthwhile(best, taken):
                drafts.remove(taken)
                return _Found(taken.plan, (taken.name, self._verdict(taken.plan, taken, drafts, ideas)))
            del drafts[0]
            plan = self._fitting(self._lanes(best), copies)
            if plan is not None:
                known = replace(best, plan=plan, step_s=plan.predicted.step_s, is_bound=False)
                bisect.insort(drafts, known, key=self._worth)
        return None

    def _is_worthwhile(self, draft: _Draft, known: _Draft) -> bool:
        life_s = self._topology.life_s
        return draft.steps(life_s) >= WORTHWHILE * known.steps(life_s)

    def _worth(self, draft: _Draft) -> tuple[float, int, float, int]:
        """The least is best; of equal ones what promised most."""
        return -draft.steps(self._topology.life_s), draft.moved_bytes, draft.least_s, -draft.idea.place

    def _promises(self, idea: _Idea, best: _Draft) -> bool:
        return best.steps(self._topology.life_s) * SLACK * idea.least_s < self._topology.life_s

    def _ideas(self, copies: int, most: int | None) -> list[_Idea]:
        """Every candidate in at most so many sizes of micro-batches; all of them for None, where memory is short."""
        before = _largest(self._plan.lanes)
        found: list[_Idea] = []
        for candidate in candidates(self._plan, self._topology):
            outline = Outline.of(candidate.sketches)
            sizes = [before, *self._shaper.sizes(candidate.sketches, self._plan.workload.micro_batch)]
            for size in itertools.islice(dict.fromkeys(size for size in sizes if size), most):
                found.append(_Idea(candidate, size, self._shaper.bound_s(outline, size), len(found)))
        return found

    def _look(self, idea: _Idea, copies: int) -> _Idea | None:
        """The same with its cuts, and with a better bound; None if units do not fit, or samples do not suffice."""
        candidate, size, shaper = idea.candidate, idea.micro_batch, self._shaper
        if shaper.cannot_fit(Outline.of(candidate.sketches), size) and _is_cut_anew(candidate):
            return None
        runs = shaper.runs(candidate.sketches, candidate.shares)
        borders = shaper.cut(runs, size, shaper.table(candidate.sketches, copies))
        if borders is None:
            return None
        cut_s = idea.least_s if candidate.shares else shaper.least_cut_s(runs, borders, size)
        return replace(idea, runs=runs, borders=borders, least_s=max(idea.least_s, cut_s))

    def _look_closer(self, idea: _Idea, best: _Draft | None) -> _Idea:
        """The same, or one that promises too little, if it cannot be better than the best draft so far."""
        steps = 0.0 if best is None else best.steps(self._topology.life_s)
        if not steps:
            return idea
        limit_s = self._topology.life_s / steps
        if idea.candidate.shares or self._shaper.may_end_by(idea.runs, idea.borders, idea.micro_batch, limit_s):
            return idea
        return replace(idea, least_s=limit_s / SLACK * (1 + ROUNDING))

    def _draft(self, idea: _Idea, copies: int, best: _Draft | None) -> _Draft | None:
        """None if samples do not suffice. Lanes are timed, those first that take longest with whole backward passes, as
        long as the draft may be as good as the best one so far."""
        size, shaper = idea.micro_batch, self._shaper
        sketches, shares = idea.candidate.sketches, idea.candidate.shares
        parts = shaper.parts(idea.runs, idea.borders, size, shaper.table(sketches, copies), shares)
        if parts is None:
            return None
        stages = [
            (Span(lo, hi), part.count * len(members))
            for part in parts
            for (lo, hi), members in zip(itertools.pairwise(part.borders), part.run.sketch.stages, strict=True)
        ]
        ranks = sum(count for _, count in stages)
        kept = sum(b.numel for b in self._plan.workload.buckets) * (1 + copies) // ranks
        besides_s = self._exchange.seconds(stages, copies) + self._plan.workload.update_s * kept
        moved = self._exchange.moved(self._had, _units_of(sketches, parts))
        stall_s = self._exchange.seconds_of(moved)
        least_s = shaper.least_s(sketches, size)
        draft = _Draft(idea, parts, besides_s, sum(moved.values()), stall_s, least_s)
        kinds = [(shaper.kind(part, size), part.run.sketch.members) for part in parts]
        kinds.sort(key=lambda each: -shaper.times.whole_of(each[0]).seconds)
        life_s = self._topology.life_s
        for kind, members in kinds:
            if best is not None and draft.step_s > best.step_s and draft.steps(life_s) < best.steps(life_s):
                return replace(draft, is_bound=True)
            taken_s = besides_s + shaper.times.about(kind, members, kept).seconds
            draft = replace(draft, step_s=max(draft.step_s, taken_s))
        return draft

    def _lanes(self, draft: _Draft) -> tuple[Lane, ...]:
        return self._shaper.lanes(draft.idea.candidate.sketches, draft.parts, draft.idea.micro_batch)

    def _verdict(self, plan: Plan, taken: _Draft, drafts: Sequence[_Draft], ideas: Sequence[_Idea]) -> str:
        """The predicted step, and what it beat: drafts of other names, the best first, then what was not even timed."""
        text = f"predicted step {_ms(plan.predicted.step_s)}"
        if taken.moved_bytes:
            text += f", after {size_text(taken.moved_bytes)} have moved"
        beaten: dict[str, str] = {}
        for other in drafts:
            if other.name != taken.name:
                seems_shorter = other.step_s < taken.step_s and _ms(other.step_s) != _ms(taken.step_s)
                about = "at least " if other.is_bound else "about " if seems_shorter else ""
                words = f"{other.name} ({about}{_ms(other.step_s)}, moves {size_text(other.moved_bytes)})"
                beaten.setdefault(other.name, words)
        named = list(beaten.values())[:BEATEN]
        rest = [idea.least_s for idea in ideas if idea.candidate.name not in (taken.name, *beaten)]
        if rest:
            named.append(f"{len(rest)} more, of at least {_ms(min(rest))}")
        return f"{text}; beaten: {', '.join(named)}" if named else text

    def _fitting(self, lanes: Sequence[Lane], copies: int) -> Plan | None:
        """The plan of these lanes, None if it does not fit."""
        workload = self._plan.workload
        boxes = with_readers(self._plan.boxes, workload, tiles_of(lanes))
        boxes = reassign_boxes(boxes, CopySources(self._topology, self._have, copies))
        plan = make_plan(self._topology, workload, lanes, "", boxes=boxes, times=self._shaper.times)
        return plan if fits_memory(plan) else None


def _is_cut_anew(candidate: Candidate) -> bool:
    """Whether all of its lanes are."""
    sketches = candidate.sketches
    return isinstance(sketches, SideBySide) or all(sketch.borders is None for sketch in sketches)


def _units_of(sketches: Sketches, parts: Sequence[Part]) -> Iterator[tuple[Rank, Span]]:
    """Rank by rank."""
    cuts = (part.borders for part in parts for _ in range(part.count))
    for sketch, borders in zip(sketches, cuts, strict=True):
        for (lo, hi), members in zip(itertools.pairwise(borders), sketch.stages, strict=True):
            units = Span(lo, hi)
            for member in members:
                yield member.rank, units


def _largest(lanes: Sequence[Lane]) -> int:
    """Samples of the largest micro-batch."""
    return max((len(m) for lane in lanes for m in lane.micro_batches), default=0)


def _next_topology(plan: Plan, members: Sequence[Rank]) -> Topology:
    """The members as they were known; one that was not is taken for an average one on the host of its number."""
    before, known = plan.topology, {m.rank: m for m in plan.topology.members}
    memory = min((m.memory_bytes for m in before.members if m.memory_bytes is not None), default=None)
    alive = tuple(
        known.get(rank) or Member(rank, Host(rank // before.ranks_per_host), memory_bytes=memory)
        for rank in sorted(members)
    )
    return replace(before, members=alive, epoch=Epoch(before.epoch + 1))


def _copies_now(plan: Plan, ranks: Sequence[Rank], copies: Copies) -> list[tuple[Rank, ...]]:
    alive = set(ranks)
    have = [tuple(sorted(alive.intersection(copies.get(number, ())))) for number, _ in numbered(plan.boxes)]
    for number, _ in numbered(plan.boxes):
        if not have[number]:
            raise PlanError(
                f"replan: {_box_name(plan, number)} has no copy among ranks {listed(ranks)}; "
                "an owner has a copy of what it owns"
            )
    return have


def _too_few(plan: Plan, topology: Topology) -> str:
    """Why nothing fits, and what would."""
    count, workload = len(topology.members), plan.workload
    is_bound = workload.policy != "elaswave" or not {"dataflow", "graph"} <= set(workload.axes)
    if is_bound and not any(True for _ in candidates(plan, topology)):
        axes = f", planner.axes={listed(workload.axes)}" if workload.policy == "elaswave" else ""
        why = NO_ANSWER[workload.policy]
        return f"replan: policy={workload.policy}{axes} has no answer to this loss: {why}"
    unbounded = replace(topology, members=tuple(replace(m, memory_bytes=None) for m in topology.members))
    needs = [most_memory(p) for p in _without_copies(plan, unbounded)]
    if not needs:
        return (
            f"replan: {count} ranks cannot share {len(workload.units)} units x {workload.granules} granules; "
            f"at most {len(workload.units) * workload.granules} ranks have something to do"
        )
    memory = min(m.memory_bytes for m in topology.members if m.memory_bytes is not None)
    return (
        f"replan: {count} rank{'s' if count > 1 else ''} cannot hold the job: a rank needs {size_text(min(needs))} and "
        f"has {size_text(memory)}; the smallest number of ranks that would do is {_smallest(plan, count + 1, memory)}"
    )


def _smallest(plan: Plan, first: int, memory: int) -> int:
    """The fewest ranks, from `first` on, on which the job fits; at most as many as it had."""
    for count in range(first, len(plan.ranks)):
        topology = local_topology(count, plan.topology.ranks_per_host, memory)
        if any(fits_memory(candidate) for candidate in _without_copies(plan, topology)):
            return count
    return max(first, len(plan.ranks))


def _without_copies(plan: Plan, topology: Topology) -> Iterator[Plan]:
    """All shapes with all sizes of micro-batches, as a new job would start with them."""
    workload, shaper = plan.workload, LaneShaper(plan.workload, topology)
    for candidate in new_lanes(len(workload.units), workload.granules, topology.members):
        table = shaper.table(candidate.sketches, 0)
        for size in shaper.sizes(candidate.sketches, workload.micro_batch):
            lanes = shaper.shape(candidate.sketches, size, table)
            if lanes is not None:
                yield make_plan(topology, workload, lanes, "", copies=0, times=shaper.times)


def _changed(before: Plan, after: Plan) -> str:
    """Who is gone and who has come."""
    lost = [r for r in before.ranks if r not in after.ranks]
    joined = [r for r in after.ranks if r not in before.ranks]
    words = [f"{what} {rank_words(ranks)}" for what, ranks in (("lost", lost), ("joined by", joined)) if ranks]
    return ", ".join(words) or "the same ranks"


def _box_words(before: Plan, after: Plan, have: Sequence[tuple[Rank, ...]]) -> Iterator[str]:
    """What became of the boxes."""
    moved = sum(old.owner != new.owner for old, new in zip(before.boxes, after.boxes, strict=True))
    if moved:
        yield f"{moved} of {len(after.boxes)} boxes get another owner"
    behind = sorted({rank for box in after.boxes for rank in box.catching_up})
    single = [number for number, ranks in enumerate(have) if len(ranks) == 1]
    if single:
        until = (
            f"until {rank_words(behind)} {_have(behind)} caught up" if behind else "and no rank is there for another"
        )
        yield f"{len(single)} of {len(have)} boxes ({number_ranges(single)}) have a single copy {until}"
    elif behind:
        yield f"{rank_words(behind)} {_have(behind)} to catch up"


def _box_name(plan: Plan, number: BoxId) -> str:
    box = plan.boxes[number]
    return f"box {number} (elements {box.span} of bucket {plan.workload.buckets[box.bucket].name})"


def _have(ranks: Sequence[Rank]) -> str:
    return "have" if len(ranks) > 1 else "has"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"
