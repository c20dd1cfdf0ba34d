"""Search of the best lanes for the present ranks: candidates become ideas, then drafts, and a few of these plans.

In: the previous plan, the present topology, the replica holders of each box. Out: `Found`, the best candidate as a
plan.

    LaneSearch(plan, topology, have).best_lanes(replicas=1)
    ideas, most promising first -> looked at: cut -> drafts: shaped and timed -> plans: boxes handed out
"""

from __future__ import annotations

import bisect
import heapq
import itertools
import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

from elaswave_fx.plan.lanes.lane_shapes import Cut, LaneShapes, Part, ShapeBounds, SideBySide
from elaswave_fx.plan.lanes.shape_lanes import LaneShaper
from elaswave_fx.plan.make.cuts_and_clocks import cut_for_clocks
from elaswave_fx.plan.make.derive import make_plan, needed_bytes
from elaswave_fx.plan.make.planner import fits_memory, has_memory
from elaswave_fx.plan.next.lane_candidates import Candidate, places
from elaswave_fx.plan.next.objective import AtOnce, Objective
from elaswave_fx.plan.next.policies import candidates
from elaswave_fx.plan.plan import Plan, TargetLayout
from elaswave_fx.plan.predict.exchange import ExchangeEstimate
from elaswave_fx.plan.predict.frequency import with_clocks
from elaswave_fx.plan.predict.transition_memory import (
    first_wave,
    room_for_replicas,
    wave_words,
    without_replicas,
    without_room,
)
from elaswave_fx.plan.replicas.holders import ReplicaSources, bucket_sharers, reassign_boxes, with_readers
from elaswave_fx.plan.replicas.target_replicas import replicas_for, replicas_read_anew
from elaswave_fx.plan.work.box import Box
from elaswave_fx.plan.work.spans import Span
from elaswave_fx.plan.work.tiling import Lane, tiles_of
from elaswave_fx.plan.work.topology import Rank, Topology
from elaswave_fx.words import size_text

SIZES_TRIED = 2
"""Micro-batch sizes per candidate: the previous one, and the one its depth asks for."""

SLACK = 0.98
"""Factor on an idea's lower bound: uneven micro-batches can be slightly faster than the bound."""

WORTHWHILE = 1.01
"""Minimal gain in predicted steps for a draft to become a plan. Drafts are about that inexact, and every plan takes
milliseconds in which all ranks wait."""

BEATEN = 3
"""Beaten candidates that the reason of a plan names."""


FEW_RANKS = 6
"""With more ranks there are so many candidates that trying every cut would take seconds, in which all ranks wait."""


class Choice(NamedTuple):
    """Result of a search: `ideas` that became plans, by candidate name and largest micro-batch; `step_s` of the chosen
    plan; `beaten`: the others, in words; `on_the_way`: the result for intermediate lanes."""

    ideas: frozenset[tuple[str, int]]
    step_s: float
    beaten: str
    on_the_way: Choice | None = None


@dataclass(frozen=True)
class _Idea:
    """A candidate with a micro-batch size. `least_s`: approximate lower bound of its step, infinite once a known draft
    beats it; `floor_s`: strict lower bound; `place`: among all ideas; `cut`: of its units, once looked at."""

    candidate: Candidate
    bounds: ShapeBounds
    micro_batch: int
    least_s: float
    floor_s: float
    place: int
    cut: Cut | None = None

    def __lt__(self, other: _Idea) -> bool:
        return (self.least_s, self.floor_s, -self.place) < (other.least_s, other.floor_s, -other.place)


@dataclass(frozen=True)
class _Draft:
    """An idea in parts, with their step as predicted before boxes are handed out, and its initial cost: parameter bytes
    that all ranks fetch, and the longest wait for them. `is_bound`: `step_s` is a lower bound that another draft beats,
    so not all lanes were timed. `plan`: set once made; then `step_s` is the plan's."""

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
        return self.idea.candidate.name

    def steps(self, objective: Objective) -> float:
        """Committed steps by the objective, rounded to four digits: smaller differences are noise."""
        return float(f"{objective.steps(self.step_s, self.stall_s):.4g}")


@dataclass(frozen=True)
class Found:
    """A plan and `because`, its reasons. `stall_s`: seconds in which all ranks wait before its first step; `choice`:
    the result of the search, if there was one."""

    plan: Plan
    because: tuple[str, ...]
    stall_s: float = 0.0
    choice: Choice | None = None


class LaneSearch:
    """Search of the candidate that commits most steps during the topology's expected life, at nominal clocks; ties go
    to the fewest bytes moved. `plan`: the previous plan, with the present workload."""

    def __init__(
        self,
        plan: Plan,
        topology: Topology,
        have: Sequence[tuple[Rank, ...]],
        objective: Objective | None = None,
        shaper: LaneShaper | None = None,
        among: Sequence[Candidate] | None = None,
    ) -> None:
        """`have`: replica holders by box. `objective`: default `AtOnce`. `among`: candidates other than those of the
        job's policy."""
        self._plan = plan
        self._topology = topology = replace(topology, power=None)  # clocks are chosen for what is found
        self._have = have
        self._places = places(plan, topology)
        self._among = among
        self._objective = objective or AtOnce(topology.life_s)
        is_hurried = len(topology.members) > FEW_RANKS
        self._shaper = shaper or LaneShaper(plan.workload, topology, is_hurried)
        self._exchange = ExchangeEstimate(plan.workload, topology)
        self._had = {rank: stage.units for lane in plan.lanes for stage in lane.stages for rank in stage.ranks}

    @property
    def ranks(self) -> tuple[Rank, ...]:
        return self._topology.ranks

    @property
    def leaving(self) -> tuple[Rank, ...]:
        """Leaving ranks, which get no work."""
        return self._topology.leaving

    def toward(self, objective: Objective) -> LaneSearch:
        """The same search with another objective."""
        return LaneSearch(self._plan, self._topology, self._have, objective, self._shaper, self._among)

    def without(self, names: Collection[str]) -> LaneSearch:
        """The same search without the candidates of these names, with which `Found.because` begins."""
        if not names:
            return self
        among = candidates(self._plan, self._topology) if self._among is None else self._among
        rest = tuple(candidate for candidate in among if candidate.name not in names)
        return LaneSearch(self._plan, self._topology, self._have, self._objective, self._shaper, rest)

    def as_it_is(self, replicas: int, keeps: bool = False) -> Found | None:
        """The previous lanes; None if they do not fit. `keeps`: surplus replicas stay if they have room."""
        plan = self.fitting(self._plan.lanes, replicas, keeps=keeps)
        return None if plan is None else Found(plan, ("lanes as before",))

    def best_lanes(self, replicas: int) -> Found | None:
        """The best of all candidates, for unchanged ranks too."""
        for sizes in (SIZES_TRIED, None):
            found = self._best_of(self._ideas(replicas, sizes), replicas)
            if found is not None:
                return found
        return None

    def with_clocks(self, found: Found, replicas: int) -> Found:
        """The result with clocks, where there is a choice of clocks; also with nearby cuts, where units may move."""
        options, power = self._plan.workload.options, self._plan.topology.power
        if power is None:
            return found
        plan = with_clocks(replace(found.plan, topology=replace(self._topology, power=power)))
        if found.choice is None or options.policy != "elaswave" or not {"dataflow", "graph"} <= set(options.axes):
            return replace(found, plan=plan)
        make = partial(self.fitting, replicas=replicas, target=found.plan.target)
        return replace(found, plan=cut_for_clocks(plan, make, self._stall_s))

    def _stall_s(self, lanes: Sequence[Lane]) -> float:
        """Seconds until the last rank has the parameters of its new units."""
        units = ((rank, stage.units) for lane in lanes for stage in lane.stages for rank in stage.ranks)
        return self._exchange.stall_s(self._had, units)

    def alike(self, replicas: int, like: Choice) -> Found | None:
        """The result found for another rank of the same kind; None if it does not fit here or takes longer."""
        found = self._best_of(self._ideas(replicas, None, like), replicas)
        if found is None or found.plan.predicted.step_s >= WORTHWHILE * like.step_s:
            return None
        name, verdict, *_ = found.because
        return replace(found, because=(name, verdict, *filter(None, (like.beaten,))), choice=like)

    def _best_of(self, ideas: list[_Idea], replicas: int) -> Found | None:
        """The best draft that stays about the best as a plan whose boxes fit every rank. Ideas are examined, then
        shaped and timed, most promising first, while they promise more than the best so far."""
        heapq.heapify(ideas)
        drafts: list[_Draft] = []  # best first
        planned: set[tuple[str, int]] = set()
        while ideas or drafts:
            best = drafts[0] if drafts else None
            if ideas and (best is None or self._promises(ideas[0], best)):
                idea = heapq.heappop(ideas)
                better_known = (
                    self._look(idea, replicas) if idea.cut is None else self._look_closer(idea, idea.cut, best)
                )
                if better_known is not idea:
                    if better_known is not None:
                        heapq.heappush(ideas, better_known)
                    continue
                draft = self._draft(idea, replicas, best)
                if draft is not None:
                    bisect.insort(drafts, draft, key=self._worth)
                continue
            if best is None:
                return None
            taken = next((draft for draft in drafts if draft.plan is not None), None)
            if taken is not None and taken.plan is not None and not self._is_worthwhile(best, taken):
                drafts.remove(taken)
                beaten = self._beaten(taken, drafts, ideas)
                choice = Choice(frozenset(planned), taken.plan.predicted.step_s, beaten)
                words = (taken.name, self._verdict(taken.plan, taken), *filter(None, (beaten,)))
                return Found(taken.plan, words, taken.stall_s, choice)
            del drafts[0]
            if best.is_bound:  # drafts that seemed better do not fit
                draft = self._draft(best.idea, replicas, drafts[0] if drafts else None)
                if draft is not None:
                    bisect.insort(drafts, draft, key=self._worth)
                continue
            planned.add((best.name, best.idea.micro_batch))
            plan = self.fitting(self._lanes(best), replicas)
            if plan is not None:
                known = replace(best, plan=plan, step_s=plan.predicted.step_s, is_bound=False)
                bisect.insort(drafts, known, key=self._worth)
        return None

    def _is_worthwhile(self, draft: _Draft, known: _Draft) -> bool:
        return draft.steps(self._objective) >= WORTHWHILE * known.steps(self._objective)

    def _worth(self, draft: _Draft) -> tuple[float, int, float, float, int]:
        """Sort key, least is best: steps, then bytes moved, then the shortest step, then the best bound."""
        step_s = round(draft.step_s, 9)
        return -draft.steps(self._objective), draft.moved_bytes, step_s, draft.least_s, -draft.idea.place

    def _promises(self, idea: _Idea, best: _Draft) -> bool:
        return idea.floor_s < self._objective.longest_s(best.steps(self._objective))

    def _ideas(self, replicas: int, most: int | None, like: Choice | None = None) -> list[_Idea]:
        """Every candidate in at most `most` micro-batch sizes; all sizes for None, where memory is short. `like`: only
        the ideas of that result."""
        before = _largest(self._plan.lanes)
        found: list[_Idea] = []
        among = candidates(self._plan, self._topology) if self._among is None else self._among
        for candidate in among:
            if like is not None and all(candidate.name != name for name, _ in like.ideas):
                continue
            bounds = ShapeBounds.of(candidate.shapes)
            sizes = [before, *self._shaper.sizes(bounds)]
            for size in itertools.islice(dict.fromkeys(size for size in sizes if size), most):
                if like is not None and (candidate.name, size) not in like.ideas:
                    continue
                least_s = self._shaper.bound_s(bounds, size)
                found.append(_Idea(candidate, bounds, size, least_s, self._floor_s(least_s), len(found)))
        return found

    def _floor_s(self, least_s: float) -> float:
        """Strict lower bound for lanes with the approximate bound `least_s`; 0 where all cuts are tried, as each idea
        then has a check of its own."""
        return 0.0 if self._shaper.cuts.tries_all else SLACK * least_s

    def _look(self, idea: _Idea, replicas: int) -> _Idea | None:
        """The idea with its cuts and a better bound; None if units do not fit or samples do not suffice."""
        candidate, size, shaper = idea.candidate, idea.micro_batch, self._shaper
        cannot_fit = not shaper.cuts.tries_all and shaper.cannot_fit(idea.bounds, size)
        if cannot_fit and _is_cut_anew(candidate):
            return None
        runs = shaper.runs(candidate.shapes, candidate.shares)
        cut = shaper.cut(runs, size, shaper.table(idea.bounds, replicas))
        if cut is None:
            return None
        least_s = max(idea.least_s, 0.0 if candidate.shares else shaper.least_cut_s(cut))
        return replace(idea, cut=cut, least_s=least_s, floor_s=self._floor_s(least_s))

    def _look_closer(self, idea: _Idea, cut: Cut, best: _Draft | None) -> _Idea:
        """The idea, or a copy with an infinite bound if it cannot beat the best draft so far."""
        steps = 0.0 if best is None else best.steps(self._objective)
        limit_s = self._objective.longest_s(steps) if steps else math.inf
        if math.isinf(limit_s):
            return idea
        if idea.candidate.shares or self._shaper.may_end_by(cut, limit_s):
            return idea
        return replace(idea, least_s=math.inf, floor_s=limit_s)

    def _draft(self, idea: _Idea, replicas: int, best: _Draft | None) -> _Draft | None:
        """The idea as a draft; None if samples do not suffice. Lanes are timed, longest with whole backward passes
        first, while the draft may match the best so far."""
        size, shaper = idea.micro_batch, self._shaper
        shapes, shares = idea.candidate.shapes, idea.candidate.shares
        assert idea.cut is not None, "an idea is looked at first"
        parts = shaper.parts(idea.cut, shaper.table(idea.bounds, replicas), shares)
        if parts is None:
            return None
        stages = [
            (Span(lo, hi), part.count * len(members))
            for part in parts
            for (lo, hi), members in zip(itertools.pairwise(part.borders), part.run.shape.stages, strict=True)
        ]
        ranks = sum(count for _, count in stages)
        kept = sum(b.numel for b in self._plan.workload.buckets) * (1 + replicas) // ranks
        besides_s = self._exchange.seconds(stages, replicas) + self._plan.workload.update_s * kept
        moved = self._exchange.moved(self._had, _units_of(shapes, parts))
        stall_s = self._exchange.stall_s(self._had, _units_of(shapes, parts))
        least_s = shaper.least_s(shapes, size)
        draft = _Draft(idea, parts, besides_s, sum(moved.values()), stall_s, least_s)
        kinds = [(shaper.kind(part, size), part.run.shape.members) for part in parts]
        kinds.sort(key=lambda each: -shaper.times.whole_of(each[0]).seconds)
        known_s = besides_s + max(shaper.times.least_about(kind) for kind, _ in kinds)
        if self._is_worse(replace(draft, step_s=known_s), best):
            return replace(draft, step_s=known_s, is_bound=True)
        for kind, members in kinds:
            if self._is_worse(draft, best):
                return replace(draft, is_bound=True)
            taken_s = besides_s + shaper.times.about(kind, members, kept).seconds
            draft = replace(draft, step_s=max(draft.step_s, taken_s))
        return draft

    def _is_worse(self, draft: _Draft, best: _Draft | None) -> bool:
        """Whether the draft is worse than the best so far, however few bytes it moves."""
        if best is None or draft.step_s <= best.step_s:
            return False
        return draft.steps(self._objective) < best.steps(self._objective)

    def _lanes(self, draft: _Draft) -> tuple[Lane, ...]:
        return self._shaper.lanes(draft.idea.candidate.shapes, draft.parts, draft.idea.micro_batch)

    def _verdict(self, plan: Plan, taken: _Draft) -> str:
        """The predicted step and its initial cost."""
        moved = f", after {size_text(taken.moved_bytes)} have moved" if taken.moved_bytes else ""
        return f"predicted step {_ms(plan.predicted.step_s)}{moved}"

    def _beaten(self, taken: _Draft, drafts: Sequence[_Draft], ideas: Sequence[_Idea]) -> str:
        """Beaten drafts of other names, best first, then ideas that were not timed."""
        beaten: dict[str, str] = {}
        for other in drafts:
            if other.name != taken.name:
                seems_shorter = other.step_s < taken.step_s and _ms(other.step_s) != _ms(taken.step_s)
                about = "at least " if other.is_bound else "about " if seems_shorter else ""
                words = f"{other.name} ({about}{_ms(other.step_s)}, moves {size_text(other.moved_bytes)})"
                beaten.setdefault(other.name, words)
        named = list(beaten.values())[:BEATEN]
        others = [idea for idea in ideas if idea.candidate.name not in (taken.name, *beaten)]
        rest = [idea.floor_s if math.isinf(idea.least_s) else idea.least_s for idea in others]
        if rest:
            named.append(f"{len(rest)} more, of at least {_ms(min(rest))}")
        return f"beaten: {', '.join(named)}" if named else ""

    def fitting(
        self, lanes: Sequence[Lane], replicas: int, target: TargetLayout | None = None, keeps: bool = False
    ) -> Plan | None:
        """The plan of these lanes at nominal clocks; None if it does not fit. It has `target` if ranks get missing
        replicas for it, as many as have room. `keeps`: see `as_it_is`."""
        workload, tiles = self._plan.workload, tiles_of(lanes)
        boxes, sharers = with_readers(self._plan.boxes, workload, tiles), bucket_sharers(workload, tiles)
        by = ReplicaSources(self._topology, self._have, replicas, self._places, sharers=sharers)
        if target is None:
            kept = dict(enumerate(self._have)) if keeps else replicas_read_anew(self._plan.boxes, boxes, self._have)
            plan = self._with_boxes(lanes, boxes, replace(by, wanted_by=kept))
            return self._with_boxes(lanes, boxes, by) if plan is None and kept else plan
        plan = self._with_boxes(lanes, boxes, by)
        kept = {} if plan is None else replicas_for(target, plan, self._have)
        if not kept:
            return plan
        more = self._with_boxes(lanes, boxes, replace(by, wanted_by=kept, is_interim=True))
        is_nearer = more is not None and any(box.catching_up for box in more.boxes)
        return replace(more, target=target) if more is not None and is_nearer else plan

    def _with_boxes(self, lanes: Sequence[Lane], boxes: Sequence[Box], by: ReplicaSources) -> Plan | None:
        """The plan with `boxes` (readers set by these lanes) handed out, and as many new replicas as have room."""
        dealt = reassign_boxes(boxes, by)
        topology, workload = self._topology, self._plan.workload
        needed = needed_bytes(topology, workload, lanes, dealt, self._shaper.times)
        # Replicas for a target layout need not all fit together: each wave drops others.
        if not by.is_interim and not has_memory(topology, needed):
            return None
        room = room_for_replicas(topology, without_replicas(needed, dealt, workload))
        wave = first_wave(dealt, workload, room)
        reason = "" if wave == dealt else wave_words(dealt, wave, without_room(dealt, workload, room))
        plan = make_plan(topology, workload, lanes, reason, boxes=wave, times=self._shaper.times)
        return plan if fits_memory(plan) else None


def _is_cut_anew(candidate: Candidate) -> bool:
    shapes = candidate.shapes
    return isinstance(shapes, SideBySide) or all(shape.borders is None for shape in shapes)


def _units_of(shapes: LaneShapes, parts: Sequence[Part]) -> Iterator[tuple[Rank, Span]]:
    """Units by rank."""
    cuts = (part.borders for part in parts for _ in range(part.count))
    for shape, borders in zip(shapes, cuts, strict=True):
        for (lo, hi), members in zip(itertools.pairwise(borders), shape.stages, strict=True):
            units = Span(lo, hi)
            for member in members:
                yield member.rank, units


def _largest(lanes: Sequence[Lane]) -> int:
    return max((len(m) for lane in lanes for m in lane.micro_batches), default=0)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"
