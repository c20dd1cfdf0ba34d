"""The next plan of a job whose ranks, or whose copies, have changed. Pure, and on the way from a loss to the next step.

In: the plan before, who goes on, who has a copy of which box now. Out: the plan of the next epoch; its boxes are those
of the first plan, handed to ranks that have a copy. PlanError if nothing fits the memory that is left.

    replan(plan, (0, 2, 3), {0: (0,), 1: (2, 3), ...}, count=1)
    reason: lost rank 1; stages keep their units, as many micro-batches as before; predicted step ...
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from elaswave_fx.errors import PlanError
from elaswave_fx.plan.box import BoxId, Span, numbered
from elaswave_fx.plan.copies import CopySources, reassign_boxes, with_readers
from elaswave_fx.plan.derive import WORTHWHILE, make_plan
from elaswave_fx.plan.frequency import clock_words
from elaswave_fx.plan.plan import Plan, Predicted
from elaswave_fx.plan.planner import fits_memory, most_memory
from elaswave_fx.plan.resplit_samples import SMALLER, Shape, keep_units, new_shapes, order_by_units
from elaswave_fx.plan.tiling import Tile, Tiling
from elaswave_fx.plan.topology import Epoch, Host, Member, Rank, Topology, local_topology
from elaswave_fx.words import listed, number_ranges, rank_words, size_text

Copies = Mapping[BoxId, tuple[Rank, ...]]
"""Box -> the ranks that have a copy of it now."""


def replan(plan: Plan, members: tuple[Rank, ...], copies: Copies, count: int) -> Plan:
    """The plan of the epoch after `plan` for `members`, with `count` copies of each box besides the owner's.

    With the same ranks tiles stay as they are. Fewer copies are kept where memory has no room for `count`. PlanError
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
    nothing = Span(0, 0)
    return replace(
        plan,
        topology=topology,
        tiles=tuple(Tile(rank, nothing, nothing, ()) for rank in topology.ranks),
        boxes=boxes,
        hops=(),
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
class _Found:
    plan: Plan
    because: tuple[str, ...]


class _Search:
    """Candidates in the order of preference: the same tiles, the same units, the fastest new shape."""

    def __init__(self, plan: Plan, topology: Topology, have: Sequence[tuple[Rank, ...]]) -> None:
        self._plan = plan
        self._topology = topology
        self._have = have

    def best(self, copies: int) -> _Found | None:
        """None if nothing fits with that many copies."""
        if self._topology.ranks == self._plan.ranks:
            plan = self._fitting(self._plan.tiles, copies)
            if plan is not None:
                return _Found(plan, ("tiles as before",))
        return self._same_units(copies) or self._new_units(copies)

    def _same_units(self, copies: int) -> _Found | None:
        best: tuple[Plan, str] | None = None
        beaten = ""
        for name, tiling in keep_units(self._plan, self._topology):
            if best is not None and name == SMALLER:
                break
            plan = self._fitting(tiling, copies)
            if plan is None:
                continue
            if best is None or plan.predicted.step_s < WORTHWHILE * best[0].predicted.step_s:
                beaten = _against(best)
                best = plan, name
            else:
                beaten = _against((plan, name))
        if best is None:
            return None
        step = f"predicted step {_ms(best[0].predicted.step_s)}{beaten}"
        return _Found(best[0], (f"stages keep their units, {best[1]}", step))

    def _new_units(self, copies: int) -> _Found | None:
        """Shapes by their estimates, until no estimate is below the best prediction."""
        workload = self._plan.workload
        shapes = new_shapes(workload, order_by_units(self._plan, self._topology))
        best: tuple[Plan, str] | None = None
        second: tuple[Plan, str] | None = None
        for shape in sorted(shapes, key=lambda s: s.estimate_s):
            if best is not None and shape.estimate_s >= best[0].predicted.step_s:
                break
            plan = self._of_shape(shape, copies)
            if plan is None:
                continue
            if best is None or plan.predicted.step_s < best[0].predicted.step_s:
                best, second = (plan, shape.name), best
            elif second is None or plan.predicted.step_s < second[0].predicted.step_s:
                second = plan, shape.name
        if best is None:
            return None
        step = f"predicted step {_ms(best[0].predicted.step_s)}{_against(second)}"
        return _Found(best[0], (f"units cut anew: {best[1]}", step))

    def _of_shape(self, shape: Shape, copies: int) -> Plan | None:
        for tiling in shape.tilings(self._plan.workload, copies):
            plan = self._fitting(tiling, copies)
            if plan is not None:
                return plan
        return None

    def _fitting(self, tiles: Tiling, copies: int) -> Plan | None:
        """The plan of these tiles, None if it does not fit."""
        workload = self._plan.workload
        boxes = with_readers(self._plan.boxes, workload, tiles)
        boxes = reassign_boxes(boxes, CopySources(self._topology, self._have, copies))
        plan = make_plan(self._topology, workload, tiles, "", boxes=boxes)
        return plan if fits_memory(plan) else None


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
    for shape in new_shapes(plan.workload, topology.members):
        for tiles in shape.tilings(plan.workload, 0):
            yield make_plan(topology, plan.workload, tiles, "", copies=0)


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


def _against(other: tuple[Plan, str] | None) -> str:
    return f" against {_ms(other[0].predicted.step_s)} with {other[1]}" if other else ""


def _box_name(plan: Plan, number: BoxId) -> str:
    box = plan.boxes[number]
    return f"box {number} (elements {box.span} of bucket {plan.workload.buckets[box.bucket].name})"


def _have(ranks: Sequence[Rank]) -> str:
    return "have" if len(ranks) > 1 else "has"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"
