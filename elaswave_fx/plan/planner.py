"""The planner: chooses a tiling of the work plane and says why.

In: a workload, a topology, and the wanted shape. Out: a Plan whose `reason` says what was chosen and what it beat.

    plan_uniform(workload, topology, Parallel(dp=2, pp=2))    what `parallel.dp` and `parallel.pp` ask for
    plan_columns(workload, topology, depths=(4, 3))           pipelines of their own depths
    plan_rows(workload, topology, widths=(3, 2))              stages of their own widths
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from elaswave_fx.errors import ConfigError, PlanError
from elaswave_fx.plan.cost import Workload
from elaswave_fx.plan.derive import make_plan
from elaswave_fx.plan.layout_candidates import Shaped, cut_columns, cut_rows, micro_batch_sizes, speeds, unit_seconds
from elaswave_fx.plan.memory import MemoryTable
from elaswave_fx.plan.partition import slowest_stage
from elaswave_fx.plan.plan import Plan
from elaswave_fx.plan.tiling import Tiling, consecutive, even_split
from elaswave_fx.plan.topology import Member, Topology, local_topology
from elaswave_fx.words import size_text


@dataclass(frozen=True)
class Parallel:
    """The wanted shape; `micro_batch` is an upper bound in samples, None leaves it to the planner.

    `copies`: how many ranks besides the owner keep each box. `schedule`: see `Workload`.
    """

    dp: int
    pp: int
    micro_batch: int | None = None
    copies: int = 1
    schedule: str = "1f1b"


def plan_uniform(workload: Workload, topology: Topology, parallel: Parallel) -> Plan:
    """dp pipelines of pp stages each, rank = column * pp + stage.

    ConfigError names the key that cannot work and the nearest valid value.
    """
    _refuse(workload, parallel)
    if len(topology.members) != parallel.dp * parallel.pp:
        raise PlanError(
            f"planner: dp {parallel.dp} x pp {parallel.pp} needs {parallel.dp * parallel.pp} ranks; "
            f"the topology has {len(topology.members)}"
        )
    # Later plans of the job keep to the same bound and kind of schedule.
    workload = replace(workload, micro_batch=parallel.micro_batch, schedule=parallel.schedule)
    try:
        return plan_columns(workload, topology, (parallel.pp,) * parallel.dp, parallel.micro_batch, parallel.copies)
    except PlanError as error:
        nearest = _nearest_depth_that_fits(workload, topology, parallel)
        advice = (
            f"nearest valid value: parallel.pp={nearest}"
            if nearest
            else f"no parallel.pp up to {len(workload.units)} fits at parallel.dp={parallel.dp}"
        )
        raise ConfigError(f"parallel.pp={parallel.pp}: {error}; {advice}") from error


def plan_columns(
    workload: Workload, topology: Topology, depths: Sequence[int], micro_batch: int | None = None, copies: int = 1
) -> Plan:
    """Pipelines side by side, each with its own cuts and its own share of samples; ranks in order, column by column.

    PlanError if the tiles do not fit the memory of their ranks at any micro-batch.
    """
    bounds = consecutive(depths)
    pipelines = [topology.members[b.lo : b.hi] for b in bounds]
    widest = max(depths)
    tried: list[Plan] = []
    table = MemoryTable(workload, len(depths), copies, sum(depths))
    for size in micro_batch_sizes(workload, -(-workload.granules // len(depths)), widest, micro_batch):
        found = cut_columns(workload, pipelines, size, table)
        if found is None:
            continue
        reason = _columns_reason(workload, pipelines, found, unit_seconds(workload, size), micro_batch)
        plan = make_plan(topology, workload, found.tiles, reason, copies)
        if fits_memory(plan):
            return plan
        tried.append(plan)
    raise PlanError(_does_not_fit(workload, topology, table, widest, copies, tried))


def plan_rows(
    workload: Workload, topology: Topology, widths: Sequence[int], micro_batch: int | None = None, copies: int = 1
) -> Plan:
    """All samples cut at the same units; stage s has `widths[s]` ranks, in rank order, and need not line up.

    PlanError if a stage is wider than there are granules, or if the tiles do not fit.
    """
    if max(widths) > workload.granules:
        raise PlanError(
            f"planner: a stage of {max(widths)} ranks leaves ranks without samples; "
            f"there are {workload.granules} granules"
        )
    stages = [topology.members[b.lo : b.hi] for b in consecutive(widths)]
    strength = [sum(speeds(stage)) for stage in stages]
    table = MemoryTable(workload, min(widths), copies, sum(widths))
    tried: list[Plan] = []
    for size in micro_batch_sizes(workload, -(-workload.granules // max(widths)), len(widths), micro_batch):
        found = cut_rows(workload, stages, size, table)
        if found is None:
            continue
        (bounds,) = found.cuts
        reason = (
            f"rows of widths {_numbers(widths)}: units cut at {_numbers(bounds[1:-1])}; "
            f"{_against_even(unit_seconds(workload, size), strength, bounds)}; "
            f"{_micro_batch_reason(workload, found.tiles, len(widths), micro_batch)}"
        )
        plan = make_plan(topology, workload, found.tiles, reason, copies)
        if fits_memory(plan):
            return plan
        tried.append(plan)
    raise PlanError(_does_not_fit(workload, topology, table, len(widths), copies, tried))


def _refuse(workload: Workload, parallel: Parallel) -> None:
    """ConfigError if the shape leaves a rank without work or a micro-batch smaller than a granule."""
    granule, batch = workload.granule, workload.global_batch
    if batch % granule:
        nearest = min((d for d in range(1, batch + 1) if batch % d == 0), key=lambda d: (abs(d - granule), d))
        raise ConfigError(
            f"parallel.granule={granule} does not divide global_batch={batch}; "
            f"nearest valid value: parallel.granule={nearest}"
        )
    for key, wanted, most, what in (
        (
            "dp",
            parallel.dp,
            workload.granules,
            f"samples: global_batch={batch} has {workload.granules} granules of {granule}",
        ),
        ("pp", parallel.pp, len(workload.units), f"units: the program has {len(workload.units)}"),
    ):
        if wanted < 1:
            raise ConfigError(f"parallel.{key}={wanted} is below 1; nearest valid value: parallel.{key}=1")
        if wanted > most:
            raise ConfigError(
                f"parallel.{key}={wanted} leaves a rank without {what}; nearest valid value: parallel.{key}={most}"
            )
    if parallel.micro_batch is not None and parallel.micro_batch < granule:
        raise ConfigError(
            f"parallel.micro_batch={parallel.micro_batch} is below parallel.granule={granule}, which is "
            f"never split; nearest valid value: parallel.micro_batch={granule}"
        )


def most_memory(plan: Plan) -> int:
    """Bytes of the rank that needs most."""
    return max(cost.memory_bytes for cost in plan.predicted.ranks.values())


def fits_memory(plan: Plan) -> bool:
    """Whether every rank has the memory that the plan predicts."""
    return all(
        m.memory_bytes is None or plan.predicted.ranks[m.rank].memory_bytes <= m.memory_bytes
        for m in plan.topology.members
        if m.rank in plan.predicted.ranks
    )


def _does_not_fit(
    workload: Workload, topology: Topology, table: MemoryTable, depth: int, copies: int, tried: Sequence[Plan]
) -> str:
    """What the leanest plan tried needs, or the smallest micro-batch of an even partition, against what there is."""
    spans = consecutive(even_split(len(workload.units), depth))
    need = max(table.total(units, workload.granule, depth - stage) for stage, units in enumerate(spans))
    if tried:
        need = min(most_memory(plan) for plan in tried)
    have = min(m.memory_bytes for m in topology.members if m.memory_bytes is not None)
    return (
        f"does not fit in memory: a stage needs about {size_text(need)} at micro-batches of one granule "
        f"({workload.granule} samples) with copies.count={copies}, a rank has {size_text(have)}"
    )


def _nearest_depth_that_fits(workload: Workload, topology: Topology, parallel: Parallel) -> int | None:
    """The pp nearest to the wanted one at which a plan fits ranks as small as the smallest, None if there is none."""
    memory = min(m.memory_bytes for m in topology.members if m.memory_bytes is not None)
    for depth in sorted(range(1, len(workload.units) + 1), key=lambda d: (abs(d - parallel.pp), d)):
        ranks = local_topology(parallel.dp * depth, topology.ranks_per_host, memory)
        try:
            plan_columns(workload, ranks, (depth,) * parallel.dp, parallel.micro_batch, parallel.copies)
        except PlanError:
            continue
        return depth
    return None


def _columns_reason(
    workload: Workload,
    pipelines: Sequence[Sequence[Member]],
    found: Shaped,
    costs: Sequence[float],
    micro_batch: int | None,
) -> str:
    """What was chosen, what it beat and why."""
    depths, cuts = [len(p) for p in pipelines], found.cuts
    if len(set(depths)) == 1:
        shape = f"{len(depths)} x {depths[0]} columns"
    else:
        shape = f"columns of depths {_numbers(depths)}"
    parts = [shape]
    if max(depths) > 1:
        worst = max(range(len(cuts)), key=lambda c: slowest_stage(costs, speeds(pipelines[c]), cuts[c]))
        where = " | ".join(_numbers(c[1:-1]) or "none" for c in dict.fromkeys(cuts))
        parts.append(f"units cut at {where}")
        parts.append(_against_even(costs, speeds(pipelines[worst]), cuts[worst]))
    parts.append(_micro_batch_reason(workload, found.tiles, max(depths), micro_batch))
    if workload.batch_coupled:
        parts.append("batch-coupled operators keep each micro-batch at one granule")
    elif workload.exact:
        parts.append("exact sums keep each micro-batch at one granule")
    return "; ".join(parts)


def _against_even(costs: Sequence[float], speeds: Sequence[float], bounds: Sequence[int]) -> str:
    """The slowest stage of the chosen cuts against equal numbers of units."""
    chosen = slowest_stage(costs, speeds, bounds)
    even = (0, *(s.hi for s in consecutive(even_split(len(costs), len(speeds)))))
    other = slowest_stage(costs, speeds, even)
    text = f"slowest stage {chosen * 1e3:.3g} ms per micro-batch"
    if even == tuple(bounds):
        return f"{text}, which equal numbers of units already reach"
    if other > chosen * 1.001:
        return f"{text}, {other / chosen:.2f}x faster than equal numbers of units (cut at {_numbers(even[1:-1])})"
    if other < chosen * 0.999:
        return f"{text}, {chosen / other:.2f}x slower than equal numbers of units, which do not fit in memory"
    return f"{text}, as fast as equal numbers of units (cut at {_numbers(even[1:-1])}) with no more bytes sent"


def _micro_batch_reason(workload: Workload, tiling: Tiling, depth: int, micro_batch: int | None) -> str:
    """Number and size of the micro-batches, and the bubble of 1F1B against running each tile at once."""
    counts = sorted({len(t.micro_batches) for t in tiling})
    largest = max(len(m) for t in tiling for m in t.micro_batches)
    text = f"{_range(counts)} micro-batch{'es' if counts[-1] > 1 else ''} of at most {largest} samples"
    if micro_batch is not None:
        text += f" (parallel.micro_batch={micro_batch})"
    if depth == 1:
        return text + (", the whole tile at once" if counts[-1] == 1 else ", the fewest allowed")
    if workload.schedule != "1f1b":
        return text
    bubble = (depth - 1) / (counts[0] + depth - 1)
    return text + f": about {bubble:.0%} idle in the pipeline against {(depth - 1) / depth:.0%} with one"


def _range(counts: Sequence[int]) -> str:
    return f"{counts[0]}" if counts[0] == counts[-1] else f"{counts[0]} to {counts[-1]}"


def _numbers(values: Sequence[int]) -> str:
    return ", ".join(str(v) for v in values)
