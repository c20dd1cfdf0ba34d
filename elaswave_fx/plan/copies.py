"""Boxes and who keeps their copies: cut once at the first plan, then only handed from rank to rank.

In: a workload, its groups, the alive ranks. Out: boxes with owner and holders. Pure and deterministic.

    bucket of 10 elements, first read on ranks 0 and 2  ->  [0, 5) owned by 0, [5, 10) owned by 2
    choose_holders, hosts (0, 1) and (2, 3), one copy   ->  [0, 5) held by 2 (other host, same bucket), [5, 10) by 0
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from elaswave_fx.plan.cost import Bucket, Workload
from elaswave_fx.plan.plan import PlannedBox
from elaswave_fx.plan.tiling import Tile, consecutive, even_split
from elaswave_fx.plan.topology import Host, Rank, Topology

Groups = Mapping[str, tuple[Rank, ...]]
"""Bucket name -> the ranks whose tiles read it."""


def bucket_group(bucket: Bucket, tiles: Sequence[Tile]) -> tuple[Rank, ...]:
    """The ranks whose tiles contain any user of the bucket, ascending."""
    return tuple(sorted(t.rank for t in tiles if any(user in t.units for user in bucket.users)))


def cut_boxes(workload: Workload, tiles: Sequence[Tile]) -> tuple[PlannedBox, ...]:
    """Every bucket split evenly over the ranks of its first user, who own a piece each; empty pieces left out."""
    boxes = []
    for index, bucket in enumerate(workload.buckets):
        owners = sorted(t.rank for t in tiles if bucket.users[0] in t.units)
        spans = consecutive(even_split(bucket.numel, len(owners)))
        boxes += [PlannedBox(index, span, rank) for rank, span in zip(owners, spans, strict=True) if span]
    return tuple(boxes)


def choose_holders(
    topology: Topology,
    workload: Workload,
    groups: Groups,
    boxes: Sequence[PlannedBox],
    ranks: Sequence[Rank],
    copies: int,
) -> tuple[PlannedBox, ...]:
    """The boxes with `copies` holders each out of `ranks`, as far as there are ranks besides the owner.

    Preferred are other hosts than the owner's, then hosts that have no copy yet, then ranks that read the bucket (they
    can be promoted without a transfer), then whoever holds least, then whoever holds least of that owner.
    """
    host = {rank: topology.member(rank).host for rank in ranks}
    held: Counter[Rank] = Counter()
    pairs: Counter[tuple[Rank, Rank]] = Counter()
    chosen = []
    for box in boxes:
        group = groups[workload.buckets[box.bucket].name]
        holders: list[Rank] = []
        hosts: set[Host] = {host[box.owner]}
        while len(holders) < min(copies, len(ranks) - 1):
            holder = min(
                (rank for rank in ranks if rank != box.owner and rank not in holders),
                key=lambda r: (
                    host[r] == host[box.owner],
                    host[r] in hosts,
                    r not in group,
                    held[r],
                    pairs[box.owner, r],
                    r,
                ),
            )
            holders.append(holder)
            hosts.add(host[holder])
            held[holder] += len(box.span)
            pairs[box.owner, holder] += len(box.span)
        chosen.append(replace(box, holders=tuple(holders)))
    return tuple(chosen)


def kept_elements(boxes: Sequence[PlannedBox]) -> Counter[Rank]:
    """Rank -> elements that it owns or holds."""
    kept: Counter[Rank] = Counter()
    for box in boxes:
        for rank in (box.owner, *box.holders):
            kept[rank] += len(box.span)
    return kept
