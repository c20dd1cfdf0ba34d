"""Replicas that an engine makes for others: whose turn comes, what of them is under way in bulk, which are nearly
in sync.

As in `native/exec/state/replica_sync.cc`:

    given = GivenReplicas(around)
    given.send_state(holder, StateOf(…))           in bulk
    given.keep_record(holder, CatchUpRecordOf(…))  the same, after the step's own messages:
    given.send_records(version)                    before the vote for that version
    given.vote_waits()                             whether that vote does
"""

from __future__ import annotations

from elaswave_fx.control.protocol.types import BoxId
from elaswave_fx.plan.predict.transition_memory import EXPECTED_RECORDS, LAG_STEPS
from elaswave_fx.plan.work.topology import Rank
from tools.sim.frames import CatchUpRecordOf, StateOf
from tools.sim.surroundings import Surroundings

ReplicaAt = tuple[BoxId, Rank]
"""Of a box, for a holder."""


class GivenReplicas:
    """Since the roles were assigned. `due`: replicas whose state waits for its turn; `nearly_in_sync`: those reported
    to be so, until nothing of them is under way in bulk any more."""

    def __init__(self, around: Surroundings) -> None:
        self._around = around
        self.due: list[ReplicaAt] = []
        self.nearly_in_sync: list[ReplicaAt] = []
        self._unsent: dict[ReplicaAt, CatchUpRecordOf] = {}
        self._sent: dict[ReplicaAt, list[tuple[float, int | None]]] = {}  # when it arrives, and which version
        self._awaited: dict[ReplicaAt, int] = {}  # votes have waited for records up to that version

    def clear(self) -> None:
        """The step is left, or the roles change."""
        self.due.clear()
        self.nearly_in_sync.clear()
        self._unsent.clear()
        self._sent.clear()
        self._awaited.clear()

    def make_due(self, replica: ReplicaAt) -> None:
        """Its state is to be sent, maybe once more: what there is of an earlier one is of no use."""
        self.due.append(replica)
        self._unsent.pop(replica, None)
        if replica in self.nearly_in_sync:
            self.nearly_in_sync.remove(replica)

    def take_due(self) -> list[ReplicaAt]:
        """The replicas whose turn it is."""
        due, self.due = self.due, []
        return due

    def take_nearly_in_sync(self) -> list[ReplicaAt]:
        """Replicas of which records may go with the step: none can overtake what went in bulk."""
        taken = [
            replica for replica in self.nearly_in_sync if replica not in self._unsent and not self._under_way(replica)
        ]
        self.nearly_in_sync = [replica for replica in self.nearly_in_sync if replica not in taken]
        return taken

    def send_state(self, holder: Rank, frame: StateOf) -> None:
        """Send the state as it is now."""
        self._awaited[frame.box, holder] = frame.version - LAG_STEPS
        self._send(holder, frame, None)

    def keep_record(self, holder: Rank, frame: CatchUpRecordOf) -> None:
        """Keep the record of the step that is under way."""
        self._unsent[frame.box, holder] = frame

    def send_records(self, version: int) -> None:
        """What has been kept. The vote for `version` waits for more than the one before, but not for much more."""
        for replica, frame in self._unsent.items():
            self._send(replica[1], frame, frame.version + 1)
        self._unsent.clear()
        states = any(None in self._under_way(replica) for replica in self._sent)
        for replica, before in self._awaited.items():
            latest = version - (0 if replica in self.nearly_in_sync else LAG_STEPS if states else 1)
            self._awaited[replica] = max(before, min(latest, before + EXPECTED_RECORDS))

    def vote_waits(self) -> bool:
        """Whether records are under way that the vote waits for."""
        return any(
            each is not None and each <= self._awaited[replica]
            for replica in self._sent
            for each in self._under_way(replica)
        )

    def _send(self, holder: Rank, frame: StateOf | CatchUpRecordOf, version: int | None) -> None:
        """Send in bulk; `version`: what a record leads to."""
        arrives_s = self._around.send(holder, frame, bulk=True)
        if arrives_s is not None:
            self._sent.setdefault((frame.box, holder), []).append((arrives_s, version))

    def _under_way(self, replica: ReplicaAt) -> list[int | None]:
        left = self._sent[replica] = [each for each in self._sent.get(replica, ()) if each[0] > self._around.now]
        return [version for _, version in left]
