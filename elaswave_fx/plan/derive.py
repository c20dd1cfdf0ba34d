"""What follows from lanes: boxes, orders of micro-batches, predicted cost.

In: topology, workload, lanes. Out: the Plan. Nothing is chosen here but the order of work (`lane_times.py`).

    make_plan(topology, workload, lanes, reason)
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

from elaswave_fx.plan.box import Box
from elaswave_fx.plan.copies import choose_holders, deal_boxes, kept_elements
from elaswave_fx.plan.cost import GRADIENT_BYTES, Workload, value_samples
from elaswave_fx.plan.frequency import with_clocks
from elaswave_fx.plan.hops import Hop, find_hops
from elaswave_fx.plan.lane_times import LaneRun, LaneTimes
from elaswave_fx.plan.memory import tile_memory
from elaswave_fx.plan.plan import Plan, Predicted, RankCost
from elaswave_fx.plan.schedule import Action, levels, most_in_flight
from elaswave_fx.plan.tiling import Lane, Tile, tiles_of
from elaswave_fx.plan.topology import Rank, Topology

Pair = tuple[Rank, Rank]
"""(who sends, to whom)."""


def make_plan(
    topology: Topology,
    workload: Workload,
    lanes: Sequence[Lane],
    reason: str,
    copies: int = 1,
    boxes: tuple[Box, ...] | None = None,
    times: LaneTimes | None = None,
) -> Plan:
    """The plan of these lanes; PlanError if an order of micro-batches cannot run to the end.

    Boxes are dealt and get `copies` holders each, unless `boxes` are given: those are taken as they are. `times` of
    the same workload and topology, if there are any.
    """
    times = times or LaneTimes(workload, topology)
    tiles = tiles_of(lanes, topology.ranks)
    if boxes is None:
        ranks = [tile.rank for tile in tiles]
        boxes = choose_holders(topology, deal_boxes(workload, tiles), ranks, copies)
    kept = kept_elements(boxes)
    schedule: dict[Rank, tuple[Action, ...]] = dict.fromkeys(topology.ranks, ())
    busy = dict.fromkeys(topology.ranks, 0.0)
    runs = [times.of(lane, kept) for lane in lanes]
    for lane, run in zip(lanes, runs, strict=True):
        schedule.update(zip(lane.ranks, run.orders, strict=True))
        busy.update(zip(lane.ranks, run.busy_s, strict=True))
    phases = _exchange_bytes(workload, boxes)
    reduced, copied, gathered = (_of_senders(phase) for phase in phases)
    sent, received = _hop_bytes(workload, find_hops(workload, lanes))
    costs = {}
    for tile in tiles:
        rank, order = tile.rank, schedule[tile.rank]
        costs[rank] = RankCost(
            busy_s=busy[rank],
            in_flight=most_in_flight(order),
            waiting=max((waiting for _, waiting in levels(order)), default=0),
            memory_bytes=_memory_bytes(workload, tile, order, kept),
            sent_bytes=sent[rank],
            received_bytes=received[rank],
            reduced_bytes=reduced[rank],
            copied_bytes=copied[rank],
            gathered_bytes=gathered[rank],
        )
    predicted = Predicted(max(run.seconds for run in runs), _exchange_s(topology, phases), costs)
    in_order = {rank: schedule[rank] for rank in sorted(schedule)}
    because = "; ".join(part for part in (reason, _order_words(workload, runs)) if part)
    plan = Plan(topology, workload, tuple(lanes), boxes, in_order, predicted, because)
    return plan if topology.power is None else with_clocks(plan)


def _order_words(workload: Workload, runs: Sequence[LaneRun]) -> str:
    """Which order of work was taken, and what it beat; nothing where there was no choice."""
    if workload.schedule == "1f1b":
        return ""
    slowest = max(runs, key=lambda run: run.seconds)
    if not any(run.is_split for run in runs):
        return f"1f1b: {slowest.refused}"
    asked = " (parallel.schedule=split)" if workload.schedule == "split" else ""
    whole_s = max(run.whole_s for run in runs)
    return f"split backward{asked}: {slowest.seconds * 1e3:.3g} ms against {whole_s * 1e3:.3g} ms with 1f1b"


def _memory_bytes(workload: Workload, tile: Tile, order: Sequence[Action], kept: Mapping[Rank, int]) -> int:
    """Of a rank whose activations are kept as its order says."""
    largest = max((len(m) for m in tile.micro_batches), default=0)
    costs = workload.units[tile.units.lo : tile.units.hi]
    saved, held = sum(u.saved_bytes for u in costs), sum(u.held_bytes for u in costs)
    in_flight, waiting = max(levels(order), key=lambda level: level[0] * saved + level[1] * held, default=(0, 0))
    return tile_memory(workload, tile.units, largest, in_flight, kept.get(tile.rank, 0), waiting).total


def _hop_bytes(workload: Workload, hops: Sequence[Hop]) -> tuple[Counter[Rank], Counter[Rank]]:
    """Bytes of values and gradients that each rank sends and receives in a step."""
    sent: Counter[Rank] = Counter()
    received: Counter[Rank] = Counter()
    for hop in hops:
        value = workload.values[hop.value]
        size = value.bytes_per_sample * value_samples(value, len(hop.samples))
        back = size if value.has_grad else 0
        sent[hop.source] += size
        received[hop.target] += size
        sent[hop.target] += back
        received[hop.source] += back
    return sent, received


def _exchange_bytes(workload: Workload, boxes: Sequence[Box]) -> tuple[Counter[Pair], Counter[Pair], Counter[Pair]]:
    """Bytes from rank to rank in a step: gradients to owners, records to holders, updated parameters to readers.

    Readers that hold the box make its parameters from their copy; with copies.mode=state, which is there to compare
    with, they do not, and copies are the whole state.
    """
    reduced: Counter[Pair] = Counter()
    copied: Counter[Pair] = Counter()
    gathered: Counter[Pair] = Counter()
    for box in boxes:
        own, owner = len(box.span), box.owner
        for rank in set(box.readers) - {owner}:
            reduced[rank, owner] += workload.sum_bytes * own
        for rank in box.holders:
            copied[owner, rank] += GRADIENT_BYTES * own
        for rank in set(box.readers) - box.local_materializers:
            gathered[owner, rank] += workload.work_bytes_per_element * own
    return reduced, copied, gathered


def _of_senders(sent: Mapping[Pair, int]) -> Counter[Rank]:
    totals: Counter[Rank] = Counter()
    for (source, _), size in sent.items():
        totals[source] += size
    return totals


def _exchange_s(topology: Topology, phases: Sequence[Mapping[Pair, int]]) -> float:
    """Seconds of the rank that takes longest to send, one message after another, and waits for each phase's last."""
    spent: dict[Rank, float] = defaultdict(float)
    for phase in phases:
        latest: dict[Rank, float] = {}
        for (source, target), size in phase.items():
            link = topology.link(source, target)
            spent[source] += size / link.bytes_per_s
            latest[source] = max(latest.get(source, 0.0), link.latency_s)
        for source, latency_s in latest.items():
            spent[source] += latency_s
    return max(spent.values(), default=0.0)
