"""The ways between processes: what is lost, what is late, which links are down, and who has noticed.

In: breaks and silences with their ends. Out: when a message arrives, if it does. A link between two ranks that breaks
loses what is under way, and both ends notice; it is opened again when one of them mends it and the way is free. A way
that is silent breaks nothing by itself: what was sent waits, until the silence ends or the link is given up.
"""

from __future__ import annotations

from random import Random

from elaswave_fx.plan.work.topology import Rank

GIVEN_UP_S = 2.0
"""A link whose other end acknowledges nothing for so long is down, as `native/comm/tcp_channel.cc` has it."""


def pair(one: Rank, other: Rank) -> tuple[Rank, Rank]:
    """The link between two addresses."""
    return (one, other) if one < other else (other, one)


class Network:
    """Ways and links; times are given by the caller. Ranks are numbered from 0, everything else is below.

    `bulk_s`: what a bulk message takes longer than others.
    """

    def __init__(self, random: Random, bulk_s: float) -> None:
        self._random = random
        self._bulk_s = bulk_s
        self._slow = random.choice((0.02, 0.02, 0.1, 0.3))
        self._arrived: dict[tuple[Rank, Rank, bool], float] = {}
        self._cut_until: dict[tuple[Rank, Rank], float] = {}
        self._silent_until: dict[tuple[Rank, Rank], float] = {}
        self._generation: dict[tuple[Rank, Rank], int] = {}
        self._down: set[tuple[Rank, Rank]] = set()
        self._noticed: dict[Rank, set[Rank]] = {}

    # --- Messages ---

    def arrival(self, source: Rank, target: Rank, bulk: bool, now: float) -> float | None:
        """When a message that is sent now arrives; None if it does not. Bulk goes its own way, the rest in order."""
        link = pair(source, target)
        if link in self._down or self._cut_until.get(link, 0.0) > now:
            return None
        random = self._random.random
        delay = 0.0001 + 0.0008 * random() + (0.02 * random() if random() < self._slow else 0.0)
        delay += self._bulk_s if bulk else 0.0
        lane = (source, target, bulk)
        at_s = max(now + delay, self._arrived.get(lane, 0.0) + 1e-6)
        self._arrived[lane] = at_s
        return at_s

    def generation(self, source: Rank, target: Rank) -> int:
        """It grows when the link breaks: what was sent before is lost."""
        return self._generation.get(pair(source, target), 0)

    def silent_until(self, source: Rank, target: Rank) -> float:
        """When what `source` sends comes through again."""
        return self._silent_until.get((source, target), 0.0)

    # --- Faults ---

    def cut(self, one: Rank, other: Rank, until: float) -> None:
        """No way between two addresses, for so long."""
        link = pair(one, other)
        self._generation[link] = self._generation.get(link, 0) + 1
        self._cut_until[link] = max(until, self._cut_until.get(link, 0.0))

    def silence(self, source: Rank, target: Rank, until: float) -> None:
        """Let nothing from `source` through to `target`, for so long."""
        self._silent_until[source, target] = max(until, self._silent_until.get((source, target), 0.0))

    def is_free(self, one: Rank, other: Rank, now: float) -> bool:
        """Whether a link could be opened."""
        silent = max(self.silent_until(one, other), self.silent_until(other, one))
        return max(self._cut_until.get(pair(one, other), 0.0), silent) <= now

    # --- Links between ranks ---

    def is_down(self, one: Rank, other: Rank) -> bool:
        """Whether the link is down, whoever knows."""
        return pair(one, other) in self._down

    def take_down(self, one: Rank, other: Rank) -> None:
        """The link breaks."""
        link = pair(one, other)
        self._down.add(link)
        self._generation[link] = self._generation.get(link, 0) + 1

    def notice(self, rank: Rank, peer: Rank) -> None:
        """A rank looks at a link."""
        if pair(rank, peer) in self._down:
            self._noticed.setdefault(rank, set()).add(peer)

    def lost(self, rank: Rank) -> frozenset[Rank]:
        """Peers to which the links are down, as the rank knows."""
        return frozenset(self._noticed.get(rank, ()))

    def open(self, one: Rank, other: Rank) -> None:
        """The link is open again, at both ends."""
        self._down.discard(pair(one, other))
        self._noticed.setdefault(one, set()).discard(other)
        self._noticed.setdefault(other, set()).discard(one)
