"""Copies that an engine makes for others: whose turn comes, what of them is under way in bulk, which are close.

As in `native/exec/state/replica_sync.cc`:

    given = GivenCopies(around)
    given.send_state(holder, StateOf(…))        in bulk
    given.keep_record(holder, LateRecordOf(…))  the same, after the step's own messages:
    given.send_records(version)                 before the vote for that version
    given.vote_waits()                          whether that vote does
"""

from __future__ import annotations

from elaswave_fx.control.protocol.types import BoxId
from elaswave_fx.plan.predict.transition_memory import EXPECTED_RECORDS, LATE_RECORDS
from elaswave_fx.plan.work.topology import Rank
from tools.sim.frames import LateRecordOf, StateOf
from tools.sim.surroundings import Surroundings

CopyFor = tuple[BoxId, Rank]
"""Of a box, for a holder."""


class GivenCopies:
    """Since the roles were assigned. `due`: copies whose state waits for its turn; `close`: those that have all but
    caught up, until nothing of them is under way in bulk any more."""

    def __init__(self, around: Surroundings) -> None:
        self._around = around
        self.due: list[CopyFor] = []
        self.close: list[CopyFor] = []
        self._unsent: dict[CopyFor, LateRecordOf] = {}
        self._sent: dict[CopyFor, list[tuple[float, int | None]]] = {}  # when it arrives, and which version
        self._awaited: dict[CopyFor, int] = {}  # votes have waited for records up to that version

    def clear(self) -> None:
        """The step is left, or the roles change."""
        self.due.clear()
        self.close.clear()
        self._unsent.clear()
        self._sent.clear()
        self._awaited.clear()

    def make_due(self, copy: CopyFor) -> None:
        """Its state is to be sent, maybe once more: what there is of an earlier one is of no use."""
        self.due.append(copy)
        self._unsent.pop(copy, None)
        if copy in self.close:
            self.close.remove(copy)

    def take_due(self) -> list[CopyFor]:
        """The copies whose turn it is."""
        due, self.due = self.due, []
        return due

    def take_close(self) -> list[CopyFor]:
        """Copies of which records may go with the step: none can overtake what went in bulk."""
        taken = [copy for copy in self.close if copy not in self._unsent and not self._under_way(copy)]
        self.close = [copy for copy in self.close if copy not in taken]
        return taken

    def send_state(self, holder: Rank, frame: StateOf) -> None:
        """As it is now."""
        self._awaited[frame.box, holder] = frame.version - LATE_RECORDS
        self._send(holder, frame, None)

    def keep_record(self, holder: Rank, frame: LateRecordOf) -> None:
        """Of the step that is under way."""
        self._unsent[frame.box, holder] = frame

    def send_records(self, version: int) -> None:
        """What has been kept. The vote for `version` waits for more than the one before, but not for much more."""
        for copy, frame in self._unsent.items():
            self._send(copy[1], frame, frame.version + 1)
        self._unsent.clear()
        states = any(None in self._under_way(copy) for copy in self._sent)
        for copy, before in self._awaited.items():
            latest = version - (0 if copy in self.close else LATE_RECORDS if states else 1)
            self._awaited[copy] = max(before, min(latest, before + EXPECTED_RECORDS))

    def vote_waits(self) -> bool:
        """Whether records are under way that the vote waits for."""
        return any(
            each is not None and each <= self._awaited[copy] for copy in self._sent for each in self._under_way(copy)
        )

    def _send(self, holder: Rank, frame: StateOf | LateRecordOf, version: int | None) -> None:
        """In bulk; `version`: what a record leads to."""
        arrives_s = self._around.send(holder, frame, bulk=True)
        if arrives_s is not None:
            self._sent.setdefault((frame.box, holder), []).append((arrives_s, version))

    def _under_way(self, copy: CopyFor) -> list[int | None]:
        left = self._sent[copy] = [each for each in self._sent.get(copy, ()) if each[0] > self._around.now]
        return [version for _, version in left]
