"""Copies that an engine makes for others: whose turn comes, what of them is under way in bulk, which are close.

given = GivenCopies(around)
given.send(holder, StateOf(…), None)   in bulk; of a record, the version that it leads to in place of None
given.vote_waits(version)              whether the vote for that version does, as in `native/exec/state_copies.cc`
"""

from __future__ import annotations

from elaswave_fx.control.protocol.types import BoxId
from elaswave_fx.plan.topology import Rank
from elaswave_fx.plan.transition_memory import LATE_RECORDS
from elaswave_fx.sim.frames import LateRecordOf, StateOf
from elaswave_fx.sim.surroundings import Surroundings

CopyFor = tuple[BoxId, Rank]
"""Of a box, for a holder."""


class GivenCopies:
    """Since the roles were assigned. `due`: copies whose state waits for its turn; `close`: those that have all but
    caught up, until nothing of them is under way in bulk any more."""

    def __init__(self, around: Surroundings) -> None:
        self._around = around
        self.due: list[CopyFor] = []
        self.close: list[CopyFor] = []
        self._sent: dict[CopyFor, list[tuple[float, int | None]]] = {}  # when it arrives, and which version

    def clear(self) -> None:
        """The step is left, or the roles change."""
        self.due.clear()
        self.close.clear()
        self._sent.clear()

    def take_due(self) -> list[CopyFor]:
        """The copies whose turn it is."""
        due, self.due = self.due, []
        return due

    def take_close(self) -> list[CopyFor]:
        """Copies of which records may go with the step: none can overtake what went in bulk."""
        taken = [copy for copy in self.close if not self._under_way(copy)]
        self.close = [copy for copy in self.close if copy not in taken]
        return taken

    def send(self, holder: Rank, frame: StateOf | LateRecordOf, version: int | None) -> None:
        """In bulk; `version`: what a record leads to."""
        arrives_s = self._around.send(holder, frame, bulk=True)
        if arrives_s is not None:
            self._sent.setdefault((frame.box, holder), []).append((arrives_s, version))

    def vote_waits(self, version: int) -> bool:
        """Whether records are under way that the vote for `version` waits for."""
        under_way = {copy: self._under_way(copy) for copy in self._sent}
        states = any(None in versions for versions in under_way.values())
        for copy, versions in under_way.items():
            latest = version - (0 if copy in self.close else LATE_RECORDS if states else 1)
            if any(each is not None and each <= latest for each in versions):
                return True
        return False

    def _under_way(self, copy: CopyFor) -> list[int | None]:
        left = self._sent[copy] = [each for each in self._sent.get(copy, ()) if each[0] > self._around.now]
        return [version for _, version in left]
