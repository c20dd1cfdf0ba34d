"""Requests that the training loop yields to its performer; docstrings name the result that is sent back, if any.

`worker/loop.py` and `worker/recovery.py` carry them out on engine, disk and links; `tools/sim/rank_process.py` on
digests and a simulated network.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from elaswave_fx.control.protocol.rank_state import Go, Holdings
from elaswave_fx.control.protocol.replica_sync import ReplicaSync
from elaswave_fx.control.protocol.types import Activation, BoxId, Certificate, Stamp, Version, Vote
from elaswave_fx.plan.work.topology import Epoch, Rank

# --- Steps ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Begin:
    """Load the state that the run begins with."""


@dataclass(frozen=True, slots=True)
class Barrier:
    """Wait for all ranks of the epoch."""


@dataclass(frozen=True, slots=True)
class MustLeave:
    """Result: True if the coordinator has ended the epoch for this rank, so that it starts nothing else in it."""


@dataclass(frozen=True, slots=True)
class FlushSends:
    """Send what the last step still has to send: the epoch ends as planned, and its receivers wait."""


@dataclass(frozen=True, slots=True)
class MayStep:
    """Result: False if the store has not answered within the lease. May block for a while."""


@dataclass(frozen=True, slots=True)
class BetweenSteps:
    """Run what is due after `done` steps on all ranks, such as an evaluation. Result: whether another step follows."""

    done: Version


@dataclass(frozen=True, slots=True)
class TakeStep:
    """Run a step until it is committed. Result: its `Certificate`."""

    step: Version


@dataclass(frozen=True, slots=True)
class ReportCommit:
    """Report a committed step to the agent and the launcher."""

    certificate: Certificate


@dataclass(frozen=True, slots=True)
class ReadSyncState:
    """Result: (boxes whose replica here is not in sync, those of them that will not be after the next step)."""


@dataclass(frozen=True, slots=True)
class ReportSyncState:
    """Report to the agent which replicas are not in sync."""

    sync: ReplicaSync


@dataclass(frozen=True, slots=True)
class Finish:
    """Export the model with the other ranks: all steps are done."""


# --- Failure ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ReportMismatch:
    """Report that a replica differs from its owner's box."""

    why: str
    suspect: Rank | None


@dataclass(frozen=True, slots=True)
class AbortStep:
    """Stop the step and all transfers. Result: `Inventory`."""

    suspect: Rank | None


@dataclass(frozen=True, slots=True)
class Inventory:
    """A rank's memory after `AbortStep`.

    `certificate`: of the step, if it was committed before it failed. `digests`: by box, owned or replica. `recorded`:
    boxes with the record of a step in flight. `votes`: received for that step, None if there is no such step.
    """

    certificate: Certificate | None
    digests: Mapping[BoxId, int]
    recorded: tuple[BoxId, ...]
    votes: tuple[Vote, ...] | None


@dataclass(frozen=True, slots=True)
class Report:
    """Report to the coordinator and wait. Result: a `Decision`."""

    holdings: Holdings
    suspect: Rank | None


# --- Next epoch -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class OpenLinks:
    """Open missing links to members of the next epoch; those to `anew` are opened again."""

    go: Go
    anew: frozenset[Rank]


@dataclass(frozen=True, slots=True)
class VerifyReplicas:
    """Compare boxes in memory with the digests of their last update. Result: the set of those that differ."""

    boxes: tuple[BoxId, ...]


@dataclass(frozen=True, slots=True)
class FinishStep:
    """Finish the aborted step with the votes of all ranks."""

    certificate: Certificate


@dataclass(frozen=True, slots=True)
class DropStep:
    """Drop the aborted step, if there is one."""


@dataclass(frozen=True, slots=True)
class AdvanceLinks:
    """Put all links into the epoch, and close those to ranks that are `gone`."""

    epoch: Epoch
    gone: frozenset[Rank]


@dataclass(frozen=True, slots=True)
class InstallPlan:
    """Change the engine to the plan of the epoch. Result: buckets whose parameters are not complete here.

    `restart`: all state is dropped; what is loaded then counts as that of the epoch's resume. A terminal plan ends the
    job here.
    """

    go: Go
    restart: bool


@dataclass(frozen=True, slots=True)
class Restore:
    """Load the state of the checkpoint of that version, or the initial one."""

    to: Stamp


@dataclass(frozen=True, slots=True)
class GatherParameters:
    """Receive the parameters of `stale` buckets from their owners, and send what other ranks lack."""

    stale: frozenset[int]


@dataclass(frozen=True, slots=True)
class SyncReplicas:
    """Start state transfers (box, owner, new holder), which overlap with the next steps. Result: boxes that are not in
    sync here."""

    transfers: tuple[tuple[BoxId, Rank, Rank], ...]


@dataclass(frozen=True, slots=True)
class EpochBegun:
    """Note that this rank is a member of the epoch. `went_back`: its state was restored or dropped."""

    activation: Activation
    went_back: bool
