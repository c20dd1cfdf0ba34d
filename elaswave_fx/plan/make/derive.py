"""Everything that follows from lanes: boxes, orders of micro-batches, predicted cost.

In: topology, workload, lanes. Out: the Plan, for nominal clocks. The only choice made here is the order of work
(`lane_times.py`).

    make_plan(topology, workload, lanes, reason)
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from elaswave_fx.plan.order.hops import ValueRoutes
from elaswave_fx.plan.order.schedule import Action, levels
from elaswave_fx.plan.plan import Plan, Predicted, RankCost
from elaswave_fx.plan.predict.lane_times import LaneRun, LaneTimes
from elaswave_fx.plan.predict.memory import UnitSums
from elaswave_fx.plan.replicas.holders import choose_holders, deal_boxes, kept_elements
from elaswave_fx.plan.work.box import Box
from elaswave_fx.plan.work.cost import GRADIENT_BYTES, Workload
from elaswave_fx.plan.work.spans import Span, consecutive
from elaswave_fx.plan.work.tiling import Lane, tiles_of
from elaswave_fx.plan.work.topology import Rank, Topology

Pair = tuple[Rank, Rank]
"""(sender, receiver)."""


def make_plan(
    topology: Topology,
    workload: Workload,
    lanes: Sequence[Lane],
    reason: str,
    replicas: int = 1,
    boxes: tuple[Box, ...] | None = None,
    times: LaneTimes | None = None,
) -> Plan:
    """The plan of these lanes; raises PlanError if an order of micro-batches cannot run to the end.

    Boxes are dealt, with `replicas` replica holders each, unless `boxes` are given. `times`: of the same workload and
    topology.
    """
    times = times or LaneTimes(workload, topology)
    tiles = tiles_of(lanes, topology.ranks)
    if boxes is None:
        ranks = [tile.rank for tile in tiles]
        boxes = choose_holders(topology, deal_boxes(workload, tiles), ranks, replicas)
    kept = kept_elements(boxes)
    schedule: dict[Rank, tuple[Action, ...]] = dict.fromkeys(topology.ranks, ())
    runs = [times.of(lane, kept) for lane in lanes]
    for lane, run in zip(lanes, runs, strict=True):
        schedule.update(zip(lane.ranks, run.orders, strict=True))
    places = _costs_by_rank(topology, times, lanes, runs)
    phases = _exchange_bytes(workload, boxes)
    reduced, replicated, gathered = (_of_senders(phase) for phase in phases)
    costs = {
        rank: RankCost(
            busy_s=cost.busy_s,
            in_flight=cost.in_flight,
            waiting=cost.waiting,
            memory_bytes=cost.memory_bytes + workload.state_bytes_per_element * kept[rank],
            sent_bytes=cost.sent_bytes,
            received_bytes=cost.received_bytes,
            reduced_bytes=reduced[rank],
            copied_bytes=replicated[rank],
            gathered_bytes=gathered[rank],
        )
        for rank, cost in sorted(places.items())
    }
    predicted = Predicted(
        pipeline_s=max(run.seconds for run in runs),
        exchange_s=_exchange_s(topology, phases),
        ranks=costs,
        update_s=workload.update_s * max(kept.values(), default=0),
    )
    in_order = {rank: schedule[rank] for rank in sorted(schedule)}
    because = "; ".join(part for part in (reason, _order_words(workload, runs)) if part)
    return Plan(topology, workload, tuple(lanes), boxes, in_order, predicted, because)


def needed_bytes(
    topology: Topology, workload: Workload, lanes: Sequence[Lane], boxes: Sequence[Box], times: LaneTimes
) -> dict[Rank, int]:
    """Bytes by rank that `make_plan` would predict for these lanes and boxes."""
    kept = kept_elements(boxes)
    places = _costs_by_rank(topology, times, lanes, [times.of(lane, kept) for lane in lanes])
    return {rank: cost.memory_bytes + workload.state_bytes_per_element * kept[rank] for rank, cost in places.items()}


def _costs_by_rank(
    topology: Topology, times: LaneTimes, lanes: Sequence[Lane], runs: Sequence[LaneRun]
) -> dict[Rank, PlaceCost]:
    places: dict[Rank, PlaceCost] = dict.fromkeys(topology.ranks, IDLE)
    known: dict[int, list[PlaceCost]] = {}
    for lane, run in zip(lanes, runs, strict=True):
        if id(run) not in known:  # lanes of a kind share their run
            known[id(run)] = place_costs(times, lane, run)
        places.update(zip(lane.ranks, known[id(run)], strict=True))
    return places


def _order_words(workload: Workload, runs: Sequence[LaneRun]) -> str:
    """The chosen order of work and the alternative; empty where there was no choice."""
    if workload.options.schedule == "1f1b":
        return ""
    slowest = max(runs, key=lambda run: run.seconds)
    if not any(run.is_split for run in runs):
        return f"1f1b: {slowest.refused}"
    asked = " (parallel.schedule=split)" if workload.options.schedule == "split" else ""
    whole_s = max(run.whole_s for run in runs)
    return f"split backward{asked}: {slowest.seconds * 1e3:.3g} ms against {whole_s * 1e3:.3g} ms with 1f1b"


class PlaceCost(NamedTuple):
    """Cost of a step for a rank in one place of a lane; `memory_bytes` excludes the rank's state."""

    busy_s: float
    in_flight: int
    waiting: int
    memory_bytes: int
    sent_bytes: int
    received_bytes: int


IDLE = PlaceCost(0.0, 0, 0, 0, 0, 0)
"""Cost of a rank in no lane."""


def place_costs(times: LaneTimes, lane: Lane, run: LaneRun) -> list[PlaceCost]:
    """Cost of each place of the lane."""
    sent, received = _hop_bytes(times.routes, lane)
    costs: list[PlaceCost] = []
    for stage in lane.stages:
        for dealt in consecutive(stage.deal):
            place = len(costs)
            largest = max(len(piece) for piece in lane.micro_batches[dealt.lo : dealt.hi])
            order = run.orders[place]
            counts = list(levels(order))
            memory = _memory_bytes(times.sums, stage.units, largest, counts)
            most, waiting = max(count for count, _ in counts), max(count for _, count in counts)
            costs.append(PlaceCost(run.busy_s[place], most, waiting, memory, sent[place], received[place]))
    return costs


def _memory_bytes(sums: UnitSums, units: Span, largest: int, counts: Sequence[tuple[int, int]]) -> int:
    """Bytes of a rank without state; its order bounds the saved activations."""
    saved, held = sums.saved(units), sums.held(units)
    fixed, per_sample = sums.arriving(units)
    return (
        sums.params(units)
        + sums.workload.sum_bytes * sums.touched(units)
        + largest * max(in_flight * saved + waiting * held for in_flight, waiting in counts)
        + fixed
        + per_sample * largest
    )


def _hop_bytes(routes: ValueRoutes, lane: Lane) -> tuple[Counter[int], Counter[int]]:
    """Bytes of values and gradients sent and received by each place of a lane in a step."""
    sent: Counter[int] = Counter()
    received: Counter[int] = Counter()
    shares: list[list[tuple[int, int, int]]] = []  # by stage: (place, micro-batches, samples)
    first = 0
    for stage in lane.stages:
        dealt = [lane.micro_batches[span.lo : span.hi] for span in consecutive(stage.deal)]
        shares.append([(first + i, len(pieces), sum(map(len, pieces))) for i, pieces in enumerate(dealt)])
        first += len(dealt)
    for stage, ways in enumerate(routes.ways(lane.borders)):
        for index, source, _ in ways:
            value = routes.workload.values[index]
            for place, pieces, samples in shares[stage]:
                size = value.bytes_per_sample * (pieces if value.sample_axis is None else samples)
                back = size if value.has_grad else 0
                sent[place] += size if source == stage else back
                received[place] += back if source == stage else size
    return sent, received


def _exchange_bytes(workload: Workload, boxes: Sequence[Box]) -> tuple[Counter[Pair], Counter[Pair], Counter[Pair]]:
    """Bytes from rank to rank in a step: gradients to owners, records to replica holders, updated parameters to
    readers.

    Readers that hold the box make its parameters from their replica. With lab.copy_mode=state, a mode for comparison,
    they do not, and replicas are sent as whole state.
    """
    reduced: Counter[Pair] = Counter()
    replicated: Counter[Pair] = Counter()
    gathered: Counter[Pair] = Counter()
    elements: Counter[tuple[Rank, tuple[Rank, ...], tuple[Rank, ...], tuple[Rank, ...], int]] = Counter()
    sizes = [bucket.element_bytes for bucket in workload.buckets]
    for box in boxes:
        elements[box.owner, box.readers, box.holders, box.catching_up, sizes[box.bucket]] += box.span.hi - box.span.lo
    for (owner, readers, holders, syncing, size), own in elements.items():
        making = {owner, *holders}.difference(syncing)
        for rank in readers:
            if rank != owner:
                reduced[rank, owner] += workload.sum_bytes * own
            if rank not in making:
                gathered[owner, rank] += size * own
        for rank in holders:
            replicated[owner, rank] += GRADIENT_BYTES * own
    return reduced, replicated, gathered


def _of_senders(sent: Mapping[Pair, int]) -> Counter[Rank]:
    totals: Counter[Rank] = Counter()
    for (source, _), size in sent.items():
        totals[source] += size
    return totals


def _exchange_s(topology: Topology, phases: Sequence[Mapping[Pair, int]]) -> float:
    """Seconds of the rank that sends longest, one message after another, including the latency of each phase."""
    spent: dict[Rank, float] = defaultdict(float)
    alike = topology.between_hosts if topology.is_uniform else None
    for phase in phases:
        latest: dict[Rank, float] = {}
        for (source, target), size in phase.items():
            link = alike or topology.link(source, target)
            spent[source] += size / link.bytes_per_s
            latest[source] = max(latest.get(source, 0.0), link.latency_s)
        for source, latency_s in latest.items():
            spent[source] += latency_s
    return max(spent.values(), default=0.0)
