"""The planner: chooses a tiling of the work plane and gives the reason.

In: a workload, a topology, and the requested shape. Out: a Plan whose `reason` names the choice and its alternatives.

    plan_uniform(workload, topology, dp=2, pp=2)            the shape of `parallel.dp` and `parallel.pp`
    plan_lanes(workload, topology, ((1, 1, 1), (1, 1)))     lanes by the widths of their stages
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from elaswave_fx.errors import ConfigError, PlanError
from elaswave_fx.plan.lanes.lane_shapes import LaneShape, LaneShapes
from elaswave_fx.plan.lanes.partition import slowest_stage
from elaswave_fx.plan.lanes.shape_lanes import LaneShaper, unit_seconds
from elaswave_fx.plan.make.derive import make_plan
from elaswave_fx.plan.plan import Plan
from elaswave_fx.plan.predict.memory import MemoryTable
from elaswave_fx.plan.work.cost import Workload
from elaswave_fx.plan.work.spans import consecutive, even_split
from elaswave_fx.plan.work.tiling import Lane
from elaswave_fx.plan.work.topology import Member, Rank, Topology, local_topology
from elaswave_fx.words import listed, size_text

Widths = Sequence[Sequence[int]]
"""Ranks of each stage, by lane."""


def plan_uniform(workload: Workload, topology: Topology, dp: int, pp: int, replicas: int = 1) -> Plan:
    """dp lanes of pp stages of one rank each, rank = lane * pp + stage; each box has `replicas` replicas besides the
    owner's.

    Raise ConfigError with the key that the program or the memory does not allow, and the nearest valid value.
    """
    if len(topology.members) != dp * pp:
        raise PlanError(f"planner: dp {dp} x pp {pp} needs {dp * pp} ranks; the topology has {len(topology.members)}")
    if pp > len(workload.units):
        raise ConfigError(
            f"parallel.pp={pp}: leaves a rank without units, the program has {len(workload.units)}; "
            f"nearest valid: parallel.pp={len(workload.units)}"
        )
    try:
        return plan_lanes(workload, topology, uniform(dp, pp), replicas)
    except PlanError as error:
        nearest = _nearest_depth_that_fits(workload, topology, dp, pp, replicas)
        advice = (
            f"nearest valid: parallel.pp={nearest}"
            if nearest
            else f"no parallel.pp up to {len(workload.units)} fits at parallel.dp={dp}"
        )
        raise ConfigError(f"parallel.pp={pp}: {error}; {advice}") from error


def uniform(dp: int, pp: int) -> Widths:
    """The widths of dp lanes of pp stages."""
    return ((1,) * pp,) * dp


def are_uniform(lanes: Sequence[Lane], dp: int, pp: int) -> bool:
    """Whether these are dp lanes of pp stages of one rank, with any cut."""
    return tuple(tuple(len(stage.ranks) for stage in lane.stages) for lane in lanes) == uniform(dp, pp)


def plan_lanes(workload: Workload, topology: Topology, widths: Widths, replicas: int = 1) -> Plan:
    """Lanes with cuts and shares of their own; ranks in order, lane by lane, stage by stage.

    Raise PlanError if a lane has more ranks than its samples can be dealt to, or if the tiles do not fit the memory of
    their ranks at any micro-batch.
    """
    across = sum(max(lane) for lane in widths)
    if across > workload.granules:
        raise PlanError(
            f"planner: {across} ranks side by side leave ranks without samples; there are {workload.granules} granules"
        )
    shaper, shapes = LaneShaper(workload, topology), lane_shapes(topology.members, widths)
    table = shaper.table(shapes, replicas)
    tried: list[Plan] = []
    for size in shaper.sizes(shapes):
        lanes = shaper.shape(shapes, size, table)
        if lanes is None:
            continue
        reason = _reason(workload, shapes, lanes, unit_seconds(workload, size))
        plan = make_plan(topology, workload, lanes, reason, replicas, times=shaper.times)
        if fits_memory(plan):
            return plan
        tried.append(plan)
    depth = max(len(lane) for lane in widths)
    raise PlanError(_does_not_fit(workload, topology, table, depth, replicas, tried))


def lane_shapes(members: Sequence[Member], widths: Widths) -> LaneShapes:
    """Lanes of these widths, filled in order."""
    left = iter(members)
    return tuple(LaneShape(tuple(tuple(next(left) for _ in range(width)) for width in lane)) for lane in widths)


def shape_name(widths: Widths) -> str:
    """The number of lanes and their stages, in words."""
    if any(width > 1 for lane in widths for width in lane):
        parts = ["a lane" if len(widths) == 1 else f"{len(widths)} lanes"]
        return f"{parts[0]} of stages " + " | ".join("+".join(map(str, lane)) for lane in widths) + " ranks wide"
    depths = [len(lane) for lane in widths]
    if len(set(depths)) == 1:
        return f"{len(depths)} x {depths[0]} lanes"
    return f"lanes of depths {listed(depths)}"


def most_memory(plan: Plan) -> int:
    """Bytes of the rank that needs the most."""
    return max(cost.memory_bytes for cost in plan.predicted.ranks.values())


def fits_memory(plan: Plan) -> bool:
    return has_memory(plan.topology, {rank: cost.memory_bytes for rank, cost in plan.predicted.ranks.items()})


def has_memory(topology: Topology, needed: Mapping[Rank, int]) -> bool:
    """Whether every rank has the bytes that it needs; a rank that is not named needs none."""
    return all(m.memory_bytes is None or needed.get(m.rank, 0) <= m.memory_bytes for m in topology.members)


def _does_not_fit(
    workload: Workload, topology: Topology, table: MemoryTable, depth: int, replicas: int, tried: Sequence[Plan]
) -> str:
    """Memory of the leanest plan tried, or of the smallest micro-batch of an even partition, against the ranks'
    memory."""
    spans = consecutive(even_split(len(workload.units), depth))
    need = max(table.total(units, workload.options.granule, depth - stage) for stage, units in enumerate(spans))
    if tried:
        need = min(most_memory(plan) for plan in tried)
    have = min(m.memory_bytes for m in topology.members if m.memory_bytes is not None)
    return (
        f"does not fit in memory: a stage needs about {size_text(need)} at micro-batches of one granule "
        f"({workload.options.granule} samples) with copies.count={replicas}, a rank has {size_text(have)}"
    )


def _nearest_depth_that_fits(workload: Workload, topology: Topology, dp: int, pp: int, replicas: int) -> int | None:
    """The pp nearest to the requested one at which a plan fits ranks as small as the smallest; None if there is
    none."""
    memory = min(m.memory_bytes for m in topology.members if m.memory_bytes is not None)
    for depth in sorted(range(1, len(workload.units) + 1), key=lambda d: (abs(d - pp), d)):
        ranks = local_topology(dp * depth, topology.ranks_per_host, memory)
        try:
            plan_lanes(workload, ranks, uniform(dp, depth), replicas)
        except PlanError:
            continue
        return depth
    return None


def _reason(workload: Workload, shapes: LaneShapes, lanes: Sequence[Lane], costs: Sequence[float]) -> str:
    """The choice, its alternatives and the grounds."""
    depth = max(len(lane.stages) for lane in lanes)
    parts = [shape_name([[len(stage.ranks) for stage in lane.stages] for lane in lanes])]
    if depth > 1:
        slowest = [slowest_stage(costs, s.strengths, lane.borders) for s, lane in zip(shapes, lanes, strict=True)]
        worst = max(range(len(lanes)), key=lambda i: slowest[i])
        where = " | ".join(listed(cut[1:-1]) or "none" for cut in dict.fromkeys(lane.borders for lane in lanes))
        parts.append(f"units cut at {where}")
        parts.append(_against_even(costs, shapes[worst].strengths, lanes[worst].borders))
    parts.append(_micro_batch_reason(workload, lanes, depth))
    if workload.batch_coupled:
        parts.append("batch-coupled operators keep each micro-batch at one granule")
    elif workload.options.exact:
        parts.append("exact sums keep each micro-batch at one granule")
    return "; ".join(parts)


def _against_even(costs: Sequence[float], speeds: Sequence[float], bounds: Sequence[int]) -> str:
    """The slowest stage of the chosen cuts against that of equal numbers of units."""
    chosen = slowest_stage(costs, speeds, bounds)
    even = (0, *(s.hi for s in consecutive(even_split(len(costs), len(speeds)))))
    other = slowest_stage(costs, speeds, even)
    text = f"slowest stage {chosen * 1e3:.3g} ms per micro-batch"
    if even == tuple(bounds):
        return f"{text}, which equal numbers of units already reach"
    if other > chosen * 1.001:
        return f"{text}, {other / chosen:.2f}x faster than equal numbers of units (cut at {listed(even[1:-1])})"
    if other < chosen * 0.999:
        return f"{text}, {chosen / other:.2f}x slower than equal numbers of units, which do not fit in memory"
    return f"{text}, as fast as equal numbers of units (cut at {listed(even[1:-1])}) with no more bytes sent"


def _micro_batch_reason(workload: Workload, lanes: Sequence[Lane], depth: int) -> str:
    """Number and size of a rank's micro-batches, and the bubble of 1F1B against each tile as one micro-batch."""
    counts = sorted({count for lane in lanes for stage in lane.stages for count in stage.deal})
    largest = max(len(m) for lane in lanes for m in lane.micro_batches)
    text = f"{_range(counts)} micro-batch{'es' if counts[-1] > 1 else ''} of at most {largest} samples"
    if workload.options.micro_batch is not None:
        text += f" (parallel.micro_batch={workload.options.micro_batch})"
    if depth == 1:
        return text + (", the whole tile at once" if counts[-1] == 1 else ", the fewest allowed")
    if workload.options.schedule != "1f1b":
        return text
    bubble = (depth - 1) / (counts[0] + depth - 1)
    return text + f": about {bubble:.0%} idle in the pipeline against {(depth - 1) / depth:.0%} with one"


def _range(counts: Sequence[int]) -> str:
    return f"{counts[0]}" if counts[0] == counts[-1] else f"{counts[0]} to {counts[-1]}"
