"""New tiles for the ranks that are left: along samples where every stage has a rank, along units else.

In: the plan before and the topology now. Out: candidates, as tilings with the words that describe them, for `replan.py`
to make plans of and to compare. A candidate's `estimate_s` costs nothing to get, its tiling a cut, its plan a schedule.

    2 x 2 lost rank 1   ->  stage 0 as before, all samples of stage 1 on rank 3, micro-batches twice as large or as many
    1 x 3 lost rank 1   ->  1 x 2 columns, rows, ... each cut anew; ranks stay near the units that they had
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from elaswave_fx.plan.box import Span
from elaswave_fx.plan.cost import Workload
from elaswave_fx.plan.layout_candidates import cut_columns, cut_rows, micro_batch_sizes, sample_shares, speeds
from elaswave_fx.plan.memory import MemoryTable
from elaswave_fx.plan.plan import Plan
from elaswave_fx.plan.tiling import Tile, Tiling, consecutive, even_split, split_micro_batches
from elaswave_fx.plan.topology import Member, Topology

AS_MANY = "as many micro-batches as before"
AS_LARGE = "micro-batches as large as before"
SMALLER = "smaller micro-batches, which memory asks for"


@dataclass(frozen=True)
class Shape:
    """Ranks in places: of `parts[i]`, the ranks of one pipeline (columns) or of one stage (rows)."""

    name: str
    is_columns: bool
    parts: tuple[tuple[Member, ...], ...]
    estimate_s: float

    def tilings(self, workload: Workload, copies: int) -> Iterator[Tiling]:
        """With the largest micro-batches first, then with those that need less memory; none if no cut fits."""
        widths = [len(part) for part in self.parts]
        ranks = sum(widths)
        depth, lanes = (max(widths), len(widths)) if self.is_columns else (len(widths), max(widths))
        table = MemoryTable(workload, len(widths) if self.is_columns else min(widths), copies, ranks)
        cut = cut_columns if self.is_columns else cut_rows
        for size in micro_batch_sizes(workload, -(-workload.granules // lanes), depth, workload.micro_batch):
            found = cut(workload, self.parts, size, table)
            if found is not None:
                yield found.tiles


def keep_units(plan: Plan, topology: Topology) -> Iterator[tuple[str, Tiling]]:
    """Stages as they are, their samples shared anew by speed; nothing if a stage has no rank left or a rank no stage.

    First with as many micro-batches per rank as before, then with micro-batches as large as before, then smaller ones,
    each with words for it. Only tilings in rows can do that, which all uniform ones are.
    """
    stages = _rows_of(plan)
    if stages is None or not set(topology.ranks) <= set(plan.ranks):
        return
    left = [[topology.member(t.rank) for t in stage if t.rank in topology.ranks] for stage in stages]
    if not all(left):
        return
    sizes = [max(len(m) for t in stage for m in t.micro_batches) for stage in stages]
    counts = [max(len(t.micro_batches) for t in stage) for stage in stages]
    granule, seen = plan.workload.granule, set()
    shares = [sample_shares(plan.workload, members) for members in left]
    as_many = [-(-max(share) // granule // count) * granule for share, count in zip(shares, counts, strict=True)]
    options = [(AS_MANY, as_many), (AS_LARGE, sizes)]
    while True:
        for name, wanted in options:
            tiles: list[Tile] = []
            for stage, members, share, size in zip(stages, left, shares, wanted, strict=True):
                tiles += _row(plan.workload, stage[0].units, members, share, size)
            tiling = tuple(sorted(tiles, key=lambda tile: tile.rank))
            if tiling not in seen:
                seen.add(tiling)
                yield name, tiling
        if max(sizes) <= granule:
            return
        sizes = [max(granule, size // 2 // granule * granule) for size in sizes]
        options = [(SMALLER, sizes)]


def new_shapes(workload: Workload, order: Sequence[Member]) -> list[Shape]:
    """Rows and columns of all depths, as even as can be, for ranks in the order of the units that they had."""
    count, units, granules = len(order), len(workload.units), workload.granules
    found = []
    for parts in range(1, count + 1):
        sizes = even_split(count, parts)
        if parts <= granules and sizes[0] <= units:
            name = f"{parts} x {sizes[0]} columns" if len(set(sizes)) == 1 else f"columns of depths {_numbers(sizes)}"
            found.append(_shape(workload, name, True, _columns_in_order(order, sizes), sizes[0], parts))
        if len(set(sizes)) > 1 and parts <= units and sizes[0] <= granules:
            stages = tuple(tuple(order[s.lo : s.hi]) for s in consecutive(sizes))
            found.append(_shape(workload, f"rows of widths {_numbers(sizes)}", False, stages, parts, sizes[0]))
    return found


def order_by_units(plan: Plan, topology: Topology) -> list[Member]:
    """The ranks in the order of what they computed: first unit, then first sample; ranks without a tile last."""
    tiles = {tile.rank: tile for tile in plan.tiles}
    last = Tile(topology.ranks[0], Span(len(plan.workload.units), len(plan.workload.units)), Span(0, 0), ())

    def place(member: Member) -> tuple[int, int, int]:
        tile = tiles.get(member.rank, last)
        return tile.units.lo, tile.samples.lo, member.rank

    return sorted(topology.members, key=place)


def _rows_of(plan: Plan) -> list[list[Tile]] | None:
    """The tiles by stage, each in order of samples; None if stages do not line up across all samples."""
    stages: dict[Span, list[Tile]] = {}
    for tile in sorted(plan.tiles, key=lambda t: (t.units, t.samples)):
        stages.setdefault(tile.units, []).append(tile)
    position = 0
    for units in stages:
        if units.lo != position:
            return None
        position = units.hi
    return list(stages.values())


def _row(
    workload: Workload, units: Span, members: Sequence[Member], shares: Sequence[int], size: int
) -> Iterator[Tile]:
    """The tiles of one stage with micro-batches of at most `size`, within the user's bound."""
    if workload.single_granules:
        size = workload.granule
    if workload.micro_batch is not None:
        size = min(size, max(workload.granule, workload.micro_batch))
    for member, samples in zip(members, consecutive(shares), strict=True):
        yield Tile(member.rank, units, samples, split_micro_batches(samples, size, workload.granule))


def _columns_in_order(order: Sequence[Member], depths: Sequence[int]) -> tuple[tuple[Member, ...], ...]:
    """Pipelines of these depths whose early stages are early in `order`."""
    places = sorted(((stage + 0.5) / depth, column) for column, depth in enumerate(depths) for stage in range(depth))
    pipelines: list[list[Member]] = [[] for _ in depths]
    for member, (_, column) in zip(order, places, strict=True):
        pipelines[column].append(member)
    return tuple(tuple(pipeline) for pipeline in pipelines)


def _shape(
    workload: Workload, name: str, is_columns: bool, parts: tuple[tuple[Member, ...], ...], depth: int, lanes: int
) -> Shape:
    """With the time of perfectly even stages: work over speed, and the bubble of its depth.

    Where backward passes may be split, a pipeline has to wait for no more than its forward passes.
    """
    share = -(-workload.granules // lanes)
    size = next(micro_batch_sizes(workload, share, depth, workload.micro_batch), workload.granule)
    count = -(-share * workload.granule // size)
    whole = sum(u.forward_s + u.backward_s for u in workload.units)
    samples = whole * workload.global_batch
    calls = sum(2 * u.fixed_s for u in workload.units) * count * lanes
    strength = sum(s for part in parts for s in speeds(part))
    waits = 1.0 if workload.schedule == "1f1b" or not whole else sum(u.forward_s for u in workload.units) / whole
    return Shape(name, is_columns, parts, (samples + calls) / strength * (1 + waits * (depth - 1) / count))


def _numbers(values: Sequence[int]) -> str:
    return ", ".join(str(v) for v in values)
