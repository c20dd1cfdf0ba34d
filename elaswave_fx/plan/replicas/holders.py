"""Boxes and their replicas: cut from the program alone, then dealt to ranks, and later reassigned among them.

In: a workload, its tiles, the alive ranks. Out: boxes with readers, owner and holders. Pure and deterministic.

    bucket of 65,536 elements, boxes of at least 8,192    ->  8 boxes, whatever the layout
    first read on ranks 0 and 2                           ->  [0, 32768) in 4 boxes owned by 0, the other 4 by 2
    choose_holders, hosts (0, 1) and (2, 3), one replica  ->  those of 0 held by 2 (another host, a reader), and by 0
    fatal_losses                                          ->  (0, 2), (1, 3): the pairs with the only replicas of a box
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from elaswave_fx.plan.replicas.owners import Ownership
from elaswave_fx.plan.work.box import Box
from elaswave_fx.plan.work.cost import Workload
from elaswave_fx.plan.work.spans import Span, consecutive, even_split
from elaswave_fx.plan.work.tiling import Tile
from elaswave_fx.plan.work.topology import Host, Rank, Topology
from elaswave_fx.words import number_ranges, rank_words

BOXES = 512
"""Approximate number of boxes of a large program: two for each of 256 ranks, eight times the 32 that start a large job
here. Every re-plan visits all boxes, so there are no more."""

LEAST_ELEMENTS = 8192
"""Approximate size of the smallest box, 32 KiB in fp32. Every box costs a step its messages and a call of the
optimizer, so a small program must not have hundreds. Smaller buckets stay whole."""

ALIGNMENT = 32
"""Alignment of boxes in elements, a cache line also in bf16, so that kernels run on whole vectors."""


def least_elements(total: int) -> int:
    """The smallest box, in elements, of a program that trains `total` elements."""
    return max(LEAST_ELEMENTS, -(-total // BOXES))


def cut_bucket(numel: int, least: int) -> tuple[Span, ...]:
    """The boxes of a bucket: equal up to a cache line, of `least` elements or more, if it has as many. Their number is
    a power of two or three times one, so that 2, 3, 4, 6 or 8 ranks share them evenly."""
    most = max(1, min(numel // least, numel // ALIGNMENT))
    power = 1 << (most.bit_length() - 1)
    count = 3 * power // 2 if 3 * power // 2 <= most and power > 1 else power
    borders = [ALIGNMENT * span.hi for span in consecutive(even_split(numel // ALIGNMENT, count))]
    return tuple(Span(lo, hi) for lo, hi in itertools.pairwise((0, *borders[:-1], numel)))


def deal_boxes(workload: Workload, tiles: Sequence[Tile]) -> tuple[Box, ...]:
    """All boxes of a program, dealt to the ranks of these tiles."""
    runs = _unit_ranks(workload, tiles)
    readers = _bucket_readers(workload, runs)
    return tuple(
        Box(box.bucket, box.span, box.owner, readers=readers[box.bucket]) for box in deal_owners(workload, runs)
    )


def deal_owners(workload: Workload, runs: Sequence[Sequence[Rank]]) -> list[Box]:
    """All boxes of a program without readers, those of a bucket in consecutive runs to the ranks of its first user.
    `runs`: by unit, the ranks that run it, ascending.

    Runs of boxes are as equal as possible. The longer ones go to the rank that owns least of the earlier buckets of the
    same ranks, then least of all. With more ranks than boxes, only as many ranks as boxes are considered.
    """
    boxes: list[Box] = []
    owned: Counter[Rank] = Counter()
    # Units of the same ranks are consecutive.
    stages = list(itertools.accumulate(unit > 0 and ranks != runs[unit - 1] for unit, ranks in enumerate(runs)))
    of_stage: defaultdict[int, Counter[Rank]] = defaultdict(Counter)
    for index, bucket in enumerate(workload.buckets):
        spans = (Span(0, bucket.numel),) if bucket.whole else cut_bucket(bucket.numel, workload.least_elements)
        ranks = runs[bucket.users[0]]
        here = of_stage[stages[bucket.users[0]]]
        each, rest = divmod(len(spans), len(ranks))
        longer = list(itertools.islice((rank for rank in ranks if not owned[rank]), rest))
        if len(longer) < rest:
            longer = heapq.nsmallest(rest, ranks, key=lambda rank: (here[rank], owned[rank], rank))
        more = set(longer)
        dealt = ((rank, each + (rank in more)) for rank in ranks) if each else ((rank, 1) for rank in sorted(longer))
        owners = [rank for rank, count in dealt for _ in range(count)]
        for owner, span in zip(owners, spans, strict=True):
            boxes.append(Box(index, span, owner))
            owned[owner] += len(span)
            here[owner] += len(span)
    return boxes


def with_readers(boxes: Sequence[Box], workload: Workload, tiles: Sequence[Tile]) -> tuple[Box, ...]:
    """The same boxes, read by the ranks whose tiles contain any user of their bucket."""
    readers = _bucket_readers(workload, _unit_ranks(workload, tiles))
    return tuple(
        Box(box.bucket, box.span, box.owner, box.holders, box.catching_up, readers[box.bucket]) for box in boxes
    )


def bucket_sharers(workload: Workload, tiles: Sequence[Tile]) -> list[tuple[Rank, ...]]:
    """Ranks that run the first user of each bucket and share its boxes."""
    runs = _unit_ranks(workload, tiles)
    return [runs[bucket.users[0]] for bucket in workload.buckets]


def _unit_ranks(workload: Workload, tiles: Sequence[Tile]) -> list[tuple[Rank, ...]]:
    """Ranks whose tiles contain each unit, ascending; units of the same ranks share the tuple."""
    found: list[list[Rank]] = [[] for _ in workload.units]
    for tile in sorted(tiles, key=lambda tile: tile.rank):
        for unit in tile.units:
            found[unit].append(tile.rank)
    shared: dict[tuple[Rank, ...], tuple[Rank, ...]] = {}
    return [shared.setdefault(ranks, ranks) for ranks in map(tuple, found)]


def _bucket_readers(workload: Workload, runs: Sequence[tuple[Rank, ...]]) -> list[tuple[Rank, ...]]:
    """Ranks that run any user of each bucket."""
    return [
        runs[bucket.users[0]]
        if len(bucket.users) == 1
        else tuple(sorted({rank for user in bucket.users for rank in runs[user]}))
        for bucket in workload.buckets
    ]


def choose_holders(topology: Topology, boxes: Sequence[Box], ranks: Sequence[Rank], replicas: int) -> tuple[Box, ...]:
    """The boxes with `replicas` replica holders each out of `ranks`, as far as there are ranks besides the owner.

    All boxes of an owner have the same holders: few sets of ranks then have all replicas of something, and few
    simultaneous failures are fatal (copysets: Cidon et al., USENIX ATC 2013). Preferred are, in order: other machines
    than the owner's, other hosts, machines and hosts without a replica, readers of the owner's boxes (they can be
    promoted without a transfer), the rank that holds least. Two ranks that hold each other's boxes are one fatal pair
    instead of two.
    """
    partners = _Partners(topology, boxes, ranks)
    for _ in range(min(replicas, len(ranks) - 1)):
        partners.add_round()
    return tuple(replace(box, holders=tuple(partners.of[box.owner])) for box in boxes)


def failure_domains(topology: Topology) -> Mapping[Rank, Host | str]:
    """Rank -> its failure domain: its machine, or its emulated host where all ranks are on one machine."""
    several = len(topology.machines) > 1
    return {m.rank: m.machine if several else m.host for m in topology.members}


class _Partners:
    """Owner -> the ranks that hold its boxes, one more with every round."""

    def __init__(self, topology: Topology, boxes: Sequence[Box], ranks: Sequence[Rank]) -> None:
        self._host = {rank: topology.member(rank).host for rank in ranks}
        self._domain = failure_domains(topology)
        self._ranks = ranks
        self._owned: Counter[Rank] = Counter()
        self._held: Counter[Rank] = Counter()
        self._readers: dict[Rank, frozenset[Rank]] = {}  # of every box of the owner
        for box, readers in zip(boxes, _reader_sets(boxes), strict=True):
            self._owned[box.owner] += len(box.span)
            known = self._readers.get(box.owner, readers)
            self._readers[box.owner] = known if known is readers else known & readers
        self.of: dict[Rank, list[Rank]] = {owner: [] for owner in sorted(self._owned)}
        self._rounds = 0
        self._waiting: Counter[Host] = Counter()  # by host, the ranks without a replica holder in this round

    def add_round(self) -> None:
        """One more holder for every owner: pairs first, then the ranks that hold least."""
        self._waiting = Counter(self._host[rank] for rank in self._ranks if self._waits(rank))
        for owner, holders in self.of.items():
            if len(holders) > self._rounds:
                continue
            holder = self._best(owner)
            self._give(owner, holder)
            waits = holder in self.of and self._waits(holder) and owner not in self.of[holder]
            if waits and self._place(holder, owner) <= self._place(holder, self._best(holder)):
                self._give(holder, owner)
        while (move := self._best_move()) is not None:
            owner, target = move
            self._held[self.of[owner].pop()] -= self._owned[owner]
            self._give(owner, target)
        self._rounds += 1

    def _waits(self, rank: Rank) -> bool:
        return len(self.of.get(rank, ())) == self._rounds

    def _best(self, owner: Rank) -> Rank:
        """The best next holder: equal hosts are ordered by waiting ranks, most first, so that the ranks left over are
        not all on one host. A reader in a best possible place ends the search."""
        taken = {owner, *self.of[owner]}
        domain, own_domain = self._domain, self._domain[owner]
        domains = {domain[rank] for rank in self.of[owner]}
        own, hosts = self._host[owner], {self._host[rank] for rank in self.of[owner]}
        here = Counter(self._host[rank] for rank in taken if self._waits(rank))
        host, readers, held = self._host, self._readers[owner], self._held

        def key(rank: Rank) -> tuple[object, ...]:
            at, lost_with = host[rank], domain[rank]
            near = lost_with == own_domain, at == own, lost_with in domains, at in hosts
            return near, rank not in readers, held[rank], here[at] - self._waiting[at], rank

        best = min((rank for rank in readers if rank not in taken), key=key, default=None)
        if best is not None and not any(self._place(owner, best)):
            return best
        return min((rank for rank in self._ranks if rank not in taken), key=key)

    def _give(self, owner: Rank, holder: Rank) -> None:
        self._waiting[self._host[owner]] -= self._waits(owner)
        self.of[owner].append(holder)
        self._held[holder] += self._owned[owner]

    def _place(self, owner: Rank, rank: Rank, beside: int | None = None) -> tuple[bool, ...]:
        """Rank of `rank` as a place for a replica beside the first `beside` ones; less is better."""
        host, domain, others = self._host, self._domain, self.of[owner][:beside]
        return (
            domain[rank] == domain[owner], host[rank] == host[owner],
            domain[rank] in {domain[r] for r in others}, host[rank] in {host[r] for r in others},
            rank not in self._readers[owner],
        )  # fmt: skip

    def _best_move(self) -> tuple[Rank, Rank] | None:
        """A move of one owner's newest replicas to an equal place that holds less, if it lowers the larger load: pairs
        of an odd number of ranks leave one that holds nothing."""
        held, owned = self._held, self._owned
        room = {owner: held[holders[-1]] - owned[owner] for owner, holders in self.of.items()}  # load of a target
        most = max(room.values(), default=0)
        for target in sorted((rank for rank in self._ranks if held[rank] < most), key=lambda r: (held[r], r)):
            for owner, (*others, holder) in self.of.items():
                if held[target] >= room[owner] or target in (owner, holder, *others):
                    continue
                beside = len(others)
                if self._place(owner, target, beside) <= self._place(owner, holder, beside):
                    return owner, target
        return None


def _reader_sets(boxes: Sequence[Box]) -> list[frozenset[Rank]]:
    """Readers by box; boxes of the same readers share the set."""
    known: dict[tuple[Rank, ...], frozenset[Rank]] = {}
    for box in boxes:
        if box.readers not in known:
            known[box.readers] = frozenset(box.readers)
    return [known[box.readers] for box in boxes]


def fatal_losses(boxes: Sequence[Box]) -> tuple[tuple[Rank, ...], ...]:
    """The smallest sets of ranks, ascending, whose simultaneous failure takes all replicas of a box."""
    sets = {frozenset(box.local_materializers) for box in boxes}
    return tuple(sorted(tuple(sorted(s)) for s in sets if not any(other < s for other in sets)))


def fatal_domains(topology: Topology, replicas: Iterable[Iterable[Rank]]) -> tuple[Host | str, ...]:
    """The failure domains that hold all `replicas`, in order of their first ranks."""
    domain = failure_domains(topology)
    found = ({domain[rank] for rank in ranks} for ranks in replicas)
    fatal = {domains.pop() for domains in found if len(domains) == 1}
    return tuple(each for each in dict.fromkeys(domain.values()) if each in fatal)


def domain_words(topology: Topology, domains: Iterable[Host | str]) -> str:
    """Failure domains in words: `host 0-1`, or `machine-e912ca2eb5f5 (ranks 2, 3)`; empty if there are none."""
    hosts = sorted(each for each in domains if isinstance(each, int))
    if hosts:
        return f"host {number_ranges(hosts)}"
    ranks = {name: [m.rank for m in topology.members if m.machine == name] for name in domains}
    return "; ".join(f"{name} ({rank_words(lost)})" for name, lost in ranks.items())


def kept_elements(boxes: Sequence[Box]) -> Counter[Rank]:
    """Rank -> elements that it owns or holds."""
    kept: Counter[Rank] = Counter()
    for box in boxes:
        size = box.span.hi - box.span.lo
        kept[box.owner] += size
        for rank in box.holders:
            kept[rank] += size
    return kept


@dataclass(frozen=True)
class ReplicaSources:
    """Inputs of a reassignment: alive ranks, present replica holders, and the number of replicas to have.

    `have[i]`: ranks with a replica of box i, ascending, at least one. `places`: tie-break order of ranks, as rank
    numbers carry no meaning. `wanted_by`: box -> ranks that need a replica in addition. `is_interim`: the lanes will
    change soon, so owners stay where possible. `sharers`: see `bucket_sharers`; empty: all readers of a box share it.
    """

    topology: Topology
    have: Sequence[tuple[Rank, ...]]
    replicas: int
    places: Mapping[Rank, int]
    wanted_by: Mapping[int, tuple[Rank, ...]] = field(default_factory=dict[int, tuple[Rank, ...]])
    is_interim: bool = False
    sharers: Sequence[tuple[Rank, ...]] = ()

    def sharing(self, box: Box) -> tuple[Rank, ...]:
        """Ranks that own this box's bucket in even shares."""
        return self.sharers[box.bucket] if self.sharers else box.readers


def reassign_boxes(boxes: Sequence[Box], by: ReplicaSources) -> tuple[Box, ...]:
    """The same boxes with owners that have a replica, and holders that have or will get one (`catching_up`).

    An owner stays if it is alive and reads the box, or if no reader has a replica. Where owned shares of a stage are
    uneven, other ranks take over boxes of which they have a replica, and get replicas of boxes that they will own.
    During a sync all existing replicas stay; otherwise surplus ones are dropped. Leaving ranks get nothing, own only
    boxes that no other rank has, and keep their replicas, which do not count.
    """
    return _Reassignment(boxes, by).result()


class _Reassignment:
    """Greedy assignment in order of boxes: the rank that keeps least so far gets the next, among few ranks per
    owner."""

    def __init__(self, boxes: Sequence[Box], by: ReplicaSources) -> None:
        self._boxes = boxes
        self._size = [box.span.hi - box.span.lo for box in boxes]
        self._by = by
        self._place = by.places
        self._host = {m.rank: m.host for m in by.topology.members}
        self._domain = failure_domains(by.topology)
        self._ranks = by.topology.staying.ranks
        self._leaving = frozenset(by.topology.leaving)
        self._wanted = min(by.replicas, len(self._ranks) - 1)
        self._readers = [readers - self._leaving if self._leaving else readers for readers in _reader_sets(boxes)]
        self._owned: Counter[Rank] = Counter()
        self._held: Counter[Rank] = Counter()
        self._partners: defaultdict[Rank, set[Rank]] = defaultdict(set)  # owner -> holders of any of its boxes
        self._awaited: dict[int, tuple[Rank, ...]] = {}  # box -> the rank that needs a new replica

    def result(self) -> tuple[Box, ...]:
        owners = self._owners()
        stay = [self._staying(number, owner) for number, owner in enumerate(owners)]
        for number, holders in enumerate(stay):
            for rank in holders:
                self._hold(number, owners[number], rank)
        for number, ranks in self._awaited.items():
            for rank in ranks:
                self._hold(number, owners[number], rank)
        return tuple(self._box(number, owner, stay[number]) for number, owner in enumerate(owners))

    def _owners(self) -> list[Rank]:
        """Owners, those that stay first, so that the others are balanced against them."""
        owners: list[Rank | None] = []
        for box, size, have, readers in zip(self._boxes, self._size, self._by.have, self._readers, strict=True):
            stays = box.owner in have and (box.owner in readers or readers.isdisjoint(have))
            if box.owner in self._leaving and not self._leaving.issuperset(have):
                stays = False
            owners.append(box.owner if stays else None)
            if stays:
                self._owned[box.owner] += size
        found = [self._new_owner(number) if owner is None else owner for number, owner in enumerate(owners)]
        for number, ranks in self._by.wanted_by.items():
            self._awaited[number] = tuple(r for r in ranks if r not in self._by.have[number] and r != found[number])
        if self._by.is_interim:
            return found
        sharing = [self._those_that_stay(self._by.sharing(box)) for box in self._boxes]
        shared = Ownership(self._boxes, self._by.have, found, self._place, sharing)
        for number, rank in shared.later.items():
            if rank != shared.owners[number]:
                self._awaited[number] = tuple(sorted({*self._awaited.get(number, ()), rank}))
        return shared.owners

    def _new_owner(self, number: int) -> Rank:
        have, readers = self._by.have[number], self._readers[number]
        have = self._those_that_stay(have) or have
        inside = [rank for rank in have if rank in readers]
        owner = min(inside or have, key=lambda rank: (self._owned[rank], self._place[rank]))
        self._owned[owner] += self._size[number]
        return owner

    def _staying(self, number: int, owner: Rank) -> list[Rank]:
        """The holders that keep their replica, best first: as many as requested, or all while a better place is still
        without one; plus leaving ranks, until they leave."""
        have = [rank for rank in self._by.have[number] if rank != owner]
        kept = [rank for rank in have if rank in self._leaving]
        have = [rank for rank in have if rank not in self._leaving] if kept else have
        wanted = self._wanted + (owner in self._leaving)
        if len(have) <= wanted or self._awaited.get(number) or self._place_missing(number, owner, have):
            return have + kept
        before, readers = self._boxes[number].holders, self._readers[number]

        def key(rank: Rank) -> tuple[object, ...]:
            held = self._held[rank], self._place[rank]
            is_wanted = rank in needed  # a replica in such a place stays anyway: no other has to
            return self._near(rank, owner), not is_wanted, rank not in readers, rank not in before, held

        needed = self._by.wanted_by.get(number, ())
        best = sorted(have, key=key)
        return best[:wanted] + [rank for rank in best[wanted:] if rank in needed] + kept

    def _place_missing(self, number: int, owner: Rank, have: Sequence[Rank]) -> bool:
        """Whether a replica is missing where one is preferred: at a reader of the box, or farther from the owner
        (another machine or host) than all holders."""
        readers = self._readers[number]
        if not self._wanted:
            return False
        if readers and owner not in readers and readers.isdisjoint(have):
            return True
        farthest = min((self._near(rank, owner) for rank in have), default=(True, True))
        return any(farthest) and any(self._near(rank, owner) < farthest for rank in self._ranks)

    def _near(self, rank: Rank, owner: Rank) -> tuple[bool, bool]:
        """Whether a rank is in the owner's machine, and in its host; less is farther."""
        return self._domain[rank] == self._domain[owner], self._host[rank] == self._host[owner]

    def _those_that_stay(self, ranks: tuple[Rank, ...]) -> tuple[Rank, ...]:
        return tuple(rank for rank in ranks if rank not in self._leaving) if self._leaving else ranks

    def _hold(self, number: int, owner: Rank, rank: Rank) -> None:
        self._held[rank] += self._size[number]
        self._partners[owner].add(rank)

    def _box(self, number: int, owner: Rank, stay: Sequence[Rank]) -> Box:
        new = list(self._awaited.get(number, ()))
        wanted, kept = self._wanted + (owner in self._leaving), self._those_that_stay(tuple(stay))
        while len(kept) + len(new) < wanted or self._place_missing(number, owner, [*kept, *new]):
            rank = self._new_holder(number, owner, (*stay, *new))
            new.append(rank)
            self._hold(number, owner, rank)
        box, place = self._boxes[number], self._place.__getitem__
        holders, syncing = sorted((*stay, *new), key=place), sorted(new, key=place)
        return Box(box.bucket, box.span, owner, tuple(holders), tuple(syncing), box.readers)

    def _new_holder(self, number: int, owner: Rank, taken: Sequence[Rank]) -> Rank:
        """A reader of the box if owner and holders are none; else another machine or host, a reader, the rank that
        keeps least.

        Among equal ranks, an owner's boxes go to two per replica: with one it would keep much more than others, with
        many, many simultaneous failures of two ranks would be fatal.
        """
        host, domain = self._host, self._domain
        readers, before = self._readers[number], self._boxes[number].holders
        partners = self._partners[owner]
        enough = len(partners) >= 2 * self._wanted
        orphan = owner not in readers and readers.isdisjoint(taken)
        hosts, domains = {host[rank] for rank in taken}, {domain[rank] for rank in taken}

        def place(rank: Rank) -> tuple[bool, ...]:
            reads, near = rank in readers, self._near(rank, owner)
            return orphan and not reads, *near, domain[rank] in domains, host[rank] in hosts, not reads

        def key(rank: Rank) -> tuple[object, ...]:
            kept = self._held[rank] + self._owned[rank]
            return place(rank), rank not in before, enough and rank not in partners, kept, self._place[rank]

        best = min((rank for rank in readers if rank != owner and rank not in taken), key=key, default=None)
        if best is not None and not any(place(best)):  # no other rank can be better
            return best
        return min((rank for rank in self._ranks if rank != owner and rank not in taken), key=key)
