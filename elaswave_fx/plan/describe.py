"""A plan as a table for people: stages, units, samples, cost, memory, bytes.

In: a plan. Out: stable text, the same for the same plan.

    print(describe(plan))
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from elaswave_fx.plan.make.planner import shape_name
from elaswave_fx.plan.plan import Plan
from elaswave_fx.plan.predict.frequency import clock_words
from elaswave_fx.plan.replicas.holders import bucket_sharers, domain_words, fatal_domains, fatal_losses
from elaswave_fx.plan.replicas.owners import UNEVEN, deviation, owned_elements
from elaswave_fx.plan.replicas.target_replicas import target_words
from elaswave_fx.plan.work.spans import Span
from elaswave_fx.plan.work.topology import Link, Rank, Topology
from elaswave_fx.words import NAMED, number_ranges, rank_words, size_text

HEADINGS = (
    "rank",
    "host",
    "units",
    "samples",
    "micro-batches",
    "in flight",
    "busy",
    "idle",
    "memory",
    "sent",
    "reduce",
    "copy",
    "gather",
)


def describe(plan: Plan) -> str:
    """The plan's reason, a row per rank, its schedule and the predicted step; ends with a newline."""
    work, predicted = plan.workload, plan.predicted
    update = f", update {_seconds(predicted.update_s)}" if work.update_s else ""
    of_batch = f" of {work.options.global_batch}" if work.skipped else ""
    lines = [
        f"plan of epoch {plan.epoch}: {len(work.units)} units x {work.samples}{of_batch} samples "
        f"(granule {work.options.granule}) on {len(plan.tiles)} ranks",
        f"because: {plan.reason}",
        "",
        *_table([HEADINGS, *(_row(plan, rank) for rank in plan.ranks)]),
        "",
        *_schedule_lines(plan),
        "",
        f"predicted step {_seconds(predicted.step_s)}: pipeline {_seconds(predicted.pipeline_s)}, "
        f"reduce, copy and gather {_seconds(predicted.exchange_s)} if nothing overlaps{update}",
        f"{len(plan.hops)} hops of {len(work.values)} values, "
        f"{len(work.buckets)} buckets of {sum(b.numel for b in work.buckets)} elements",
        _box_line(plan),
        *_share_lines(plan),
        fatal_words(plan),
        *target_words(plan),
        *_topology_lines(plan.topology),
        *clock_words(plan),
    ]
    return "\n".join(lines) + "\n"


def _topology_lines(topology: Topology) -> list[str]:
    """Measured speeds and links; assumed ones are left out."""
    lines = []
    if len({member.speed for member in topology.members}) > 1:
        speeds = ", ".join(f"{member.speed:g}" for member in topology.members)
        lines.append(f"speeds of ranks {number_ranges(list(topology.ranks))}: {speeds}")
    named = [(f"hosts {each.hosts[0]} and {each.hosts[1]}", each.link) for each in topology.links]
    others = ("any other two hosts" if named else "hosts", topology.between_hosts)
    within = ("ranks" if topology.is_uniform else "ranks of a host", topology.within_host)
    for name, link in [within, *([] if topology.is_uniform else [others]), *named]:
        if link != Link():
            lines.append(f"links between {name}: {link_words(link)}")
    return lines


def link_words(link: Link) -> str:
    return f"{_seconds(link.latency_s)}, {size_text(int(link.bytes_per_s))}/s"


def fatal_words(plan: Plan, cost: str = "") -> str:
    """The number of ranks that can fail together, the failures that lose a box's last replica, and the `cost`."""
    ranks = plan.ranks
    sets = [lost for lost in fatal_losses(plan.boxes) if len(lost) < len(ranks)]
    if not sets:
        return "state survives as long as one rank does"
    fewest = min(map(len, sets))
    few = [lost for lost in sets if len(lost) == fewest]
    named = " or ".join([*map(rank_words, few[:NAMED]), *(["others"] if len(few) > NAMED else [])])
    then = f"; then {cost}" if cost else ""
    if fewest == 1:
        return f"losing {named} loses state{then}"
    survived = "any single rank can fail" if fewest == 2 else f"any {fewest - 1} ranks can fail together"
    whole = domain_words(plan.topology, fatal_domains(plan.topology, sets))
    of_domains = f", and so does losing all of {whole}" if whole else ""
    share = f"{len(few)} of {math.comb(len(ranks), fewest)} combinations"
    return f"{survived}; losing {named} together loses state ({share}){of_domains}{then}"


def shape_words(plan: Plan) -> str:
    """Lanes and micro-batches of a plan: "2 x 2 lanes of 10 units, micro-batches of at most 2 samples"."""
    lanes = shape_name([[len(stage.ranks) for stage in lane.stages] for lane in plan.lanes])
    most = max((len(batch) for tile in plan.tiles for batch in tile.micro_batches), default=0)
    units, samples = len(plan.workload.units), f"{most} sample{'s' if most != 1 else ''}"
    return f"{lanes} of {units} units, micro-batches of at most {samples}"


def _box_line(plan: Plan) -> str:
    """Replicas per box, and how many replica holders are still syncing."""
    counts = sorted({len(b.holders) for b in plan.boxes})
    holders = " to ".join(str(n) for n in dict.fromkeys((counts[0], counts[-1]))) if counts else "0"
    syncing = sum(len(b.catching_up) for b in plan.boxes)
    text = f"{len(plan.boxes)} boxes, holders besides the owner: {holders}"
    return text + (f"; replicas still to sync: {syncing}" if syncing else "")


def _share_lines(plan: Plan) -> list[str]:
    """Uneven ownership among ranks that share the same boxes."""
    sharers = bucket_sharers(plan.workload, plan.tiles)
    owned = owned_elements(plan.boxes, lambda box: sharers[box.bucket])
    uneven = {ranks for ranks, elements in owned.items() if deviation(ranks, elements) > UNEVEN}
    count = sum(sharers[box.bucket] in uneven for box in plan.boxes)
    if not count:
        return []
    why = "until replicas are in sync" if any(box.catching_up for box in plan.boxes) else "for they are few"
    return [f"uneven owned shares among the ranks that share them: {count} of {len(plan.boxes)} boxes, {why}"]


def _row(plan: Plan, rank: Rank) -> tuple[str, ...]:
    tile = plan.tile(rank)
    cost = plan.predicted.ranks[tile.rank]
    span = plan.predicted.pipeline_s
    sizes = sorted({len(m) for m in tile.micro_batches}, reverse=True)
    return (
        str(rank),
        str(plan.topology.member(tile.rank).host),
        ", ".join(map(_numbers, tile.units.spans)) or "-",
        ", ".join(map(_numbers, tile.spans)) or "-",
        f"{len(tile.micro_batches)} of {'/'.join(str(s) for s in sizes)}" if sizes else "-",
        str(cost.in_flight),
        _seconds(cost.busy_s),
        f"{(1 - cost.busy_s / span) if span else 0:.0%}",
        size_text(cost.memory_bytes),
        size_text(cost.sent_bytes),
        size_text(cost.reduced_bytes),
        size_text(cost.copied_bytes),
        size_text(cost.gathered_bytes),
    )


def _numbers(span: Span) -> str:
    return f"{span.lo}-{span.hi - 1}"


def _schedule_lines(plan: Plan) -> list[str]:
    """One line per distinct order; ranks with the same order share it."""
    sharing: dict[str, list[int]] = {}
    for rank in plan.ranks:
        text = " ".join(f"{kind}{mb}" for kind, mb in plan.schedule[rank]) or "computes nothing"
        sharing.setdefault(text, []).append(rank)
    return [f"schedule of rank {', '.join(str(r) for r in ranks)}: {text}" for text, ranks in sharing.items()]


def _table(cells: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in cells) for column in range(len(cells[0]))]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in cells]
    return [lines[0], "  ".join("-" * width for width in widths), *lines[1:]]


def _seconds(seconds: float) -> str:
    for scale, unit in ((1.0, "s"), (1e3, "ms"), (1e6, "us")):
        if seconds * scale >= 1:
            return f"{seconds * scale:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"
