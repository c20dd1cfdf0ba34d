"""Balanced ownership: equal shares for all readers of the same boxes, by moving few boxes.

In: boxes with their readers, owners and replica holders. Out: owners that can take over now, and later owners, which
first need a replica. Boxes are shared among the ranks of their bucket's first user, as when they were dealt.

    4 boxes read by ranks 0 and 1, all owned by 0, held by 1   ->  1 owns two of them
    the same, held by no other rank                            ->  1 should own two of them, and gets replicas
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from elaswave_fx.plan.work.box import Box
from elaswave_fx.plan.work.topology import Rank

UNEVEN = 0.25
"""Tolerance of owned shares: they stay while each is within this fraction of an even one, or while they differ by less
than two boxes. A move needs replicas, and a planned reconfiguration."""

FULL = 1.1
"""Even shares up to which one rank takes boxes of an owner with too many: those boxes then lie with few ranks, and few
simultaneous failures of two ranks are fatal."""

Readers = tuple[Rank, ...]


def owned_elements(boxes: Iterable[Box], sharing: Callable[[Box], Readers]) -> Mapping[Readers, Counter[Rank]]:
    """Elements that each rank owns of the boxes it shares, by sharing ranks."""
    found: dict[Readers, Counter[Rank]] = {}
    for box in boxes:
        ranks = sharing(box)
        owned = found.setdefault(ranks, Counter(dict.fromkeys(ranks, 0)))
        owned[box.owner] += len(box.span)
    return found


def deviation(readers: Readers, owned: Counter[Rank]) -> float:
    """The largest relative difference of a reader's share from an even one."""
    even = sum(owned.values()) / max(1, len(readers))
    return max((abs(owned[rank] / even - 1) for rank in readers if even), default=0.0)


def largest_deviation(boxes: Iterable[Box], sharing: Callable[[Box], Readers]) -> float:
    """The largest `deviation` of all boxes."""
    found = owned_elements(boxes, sharing).items()
    return max((deviation(readers, owned) for readers, owned in found), default=0.0)


class Ownership:
    """`owners`, by box, change at once where a replica exists; `later` are boxes that get another owner once it has
    one."""

    def __init__(
        self,
        boxes: Sequence[Box],
        have: Sequence[Sequence[Rank]],
        owners: Sequence[Rank],
        places: Mapping[Rank, int],
        sharing: Sequence[Readers],
    ) -> None:
        """`places`: tie-break order of ranks; `sharing`: by box, the ranks that share it."""
        self._boxes, self._have, self._places = boxes, have, places
        self.owners = list(owners)
        self.later: dict[int, Rank] = {}
        self._all: Counter[Rank] = Counter()
        stages: defaultdict[Readers, list[int]] = defaultdict(list)
        for number, (box, owner, ranks) in enumerate(zip(boxes, owners, sharing, strict=True)):
            self._all[owner] += len(box.span)
            if owner in ranks:  # else no reader has a replica: one gets it before anything else
                stages[ranks].append(number)
        for readers, numbers in stages.items():
            if len(readers) > 1:
                self._share(readers, numbers)

    def _share(self, readers: Readers, numbers: Sequence[int]) -> None:
        """Balance the boxes of one stage: first with existing replicas, then with new ones."""
        owners = {number: self.owners[number] for number in numbers}
        stage = _Stage(self._boxes, self._have, readers, owners, self._all, self._places)
        for now in (True, False):
            while stage.is_uneven and (move := stage.next_move(now)) is not None:
                number, source, target = move
                stage.give(number, source, target)
                if now:
                    self.owners[number] = target
                else:
                    self.later[number] = target


class _Stage:
    """The boxes that `readers` share, with their owners after the moves so far; `all_owned`: by rank, of all stages."""

    def __init__(
        self, boxes: Sequence[Box], have: Sequence[Sequence[Rank]], readers: Readers, owners: Mapping[int, Rank],
        all_owned: Counter[Rank], place: Mapping[Rank, int],
    ) -> None:  # fmt: skip
        self._boxes, self._have, self._readers, self._all = boxes, have, readers, all_owned
        self._place, self._reads = place, frozenset(readers)
        self._size = {number: boxes[number].span.hi - boxes[number].span.lo for number in owners}
        self._of: defaultdict[Rank, dict[int, None]] = defaultdict(dict)  # by owner, its boxes, in order
        self._owned: Counter[Rank] = Counter(dict.fromkeys(readers, 0))
        for number, owner in owners.items():
            self._of[owner][number] = None
            self._owned[owner] += self._size[number]
        self._even = sum(self._owned.values()) / len(readers)
        self._largest = max(self._size.values())
        self._took: set[tuple[Rank, Rank]] = set()  # (source, target)

    @property
    def is_uneven(self) -> bool:
        """Whether any share is far from even, and boxes are small enough to change that."""
        shares = [self._owned[rank] for rank in self._readers]
        is_far = any(abs(share - self._even) > UNEVEN * self._even for share in shares)
        return is_far and max(shares) - min(shares) >= 2 * self._largest

    def give(self, number: int, source: Rank, target: Rank) -> None:
        """Move the box from `source` to `target`."""
        size = self._size[number]
        self._took.add((source, target))
        del self._of[source][number]
        self._of[target][number] = None
        for rank, change in ((source, -size), (target, size)):
            self._owned[rank] += change
            self._all[rank] += change

    def next_move(self, now: bool) -> tuple[int, Rank, Rank] | None:
        """A box, its owner, which owns most, and a better owner; None if no move makes shares more even. `now`: only to
        replica holders."""
        for source in sorted(self._readers, key=lambda rank: (-self._owned[rank], -self._all[rank], self._place[rank])):
            boxes = self._of[source]
            moves = (self._moves_there if now else self._moves_later)(source, boxes)
            best = min(
                (
                    (self._worth(number, source, target), number, self._place[target], target)
                    for number, target in moves
                    if self._owned[target] + self._size[number] < self._owned[source]
                ),
                default=None,
            )
            if best is not None:
                _, number, _, target = best
                return number, source, target
        return None

    def _moves_there(self, source: Rank, boxes: Iterable[int]) -> Iterator[tuple[int, Rank]]:
        """Moves of these boxes to readers that have a replica."""
        for number in boxes:
            for rank in self._have[number]:
                if rank in self._reads and rank != source:
                    yield number, rank

    def _moves_later(self, source: Rank, boxes: Iterable[int]) -> Iterator[tuple[int, Rank]]:
        """Moves of these boxes to ranks with a small share that already take boxes of the source; else to the rank that
        owns least."""
        takers = [rank for rank in self._readers if (source, rank) in self._took]
        least = min(self._readers, key=lambda rank: (self._owned[rank], self._all[rank], self._place[rank]))
        for number in boxes:
            full = FULL * self._even - self._size[number]
            found = [rank for rank in takers if self._owned[rank] <= full]
            for rank in found or (least,):
                yield number, rank

    def _worth(self, number: int, source: Rank, target: Rank) -> tuple[bool, int, int, bool]:
        """Sort key, least is best: takes boxes of the source already, owns least, holds the box."""
        box = self._boxes[number]
        return (source, target) not in self._took, self._owned[target], self._all[target], target not in box.holders
