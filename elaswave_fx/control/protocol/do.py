"""What the training loop says that a rank is to do; each with what is sent back.

The worker does it on engine, disk and links, the simulator on digests and a network.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from elaswave_fx.control.protocol.coming_copies import ComingCopies
from elaswave_fx.control.protocol.rank_state import Go, Holdings
from elaswave_fx.control.protocol.types import Activation, BoxId, Certificate, Stamp, Version, Vote
from elaswave_fx.plan.work.topology import Epoch, Rank


@dataclass(frozen=True, slots=True)
class Begin:
    """Take the state that the run begins with."""


@dataclass(frozen=True, slots=True)
class AwaitOthers:
    """Until all ranks of the epoch are here."""


@dataclass(frozen=True, slots=True)
class IsCalledOff:
    """Sent back: whether the rank is to leave its epoch, and to begin nothing else in it."""


@dataclass(frozen=True, slots=True)
class FinishSending:
    """What the last step still sends is wanted, where the epoch ends as it was planned to."""


@dataclass(frozen=True, slots=True)
class MayStep:
    """Sent back: whether the store has answered lately; a while may pass."""


@dataclass(frozen=True, slots=True)
class BetweenSteps:
    """What is due after so many steps, the same on all ranks. Sent back: whether there is another step."""

    done: Version


@dataclass(frozen=True, slots=True)
class TakeStep:
    """Sent back: the votes that have committed it."""

    step: Version


@dataclass(frozen=True, slots=True)
class ReportCommit:
    """Tell the agent and the user of a step that was committed here."""

    certificate: Certificate


@dataclass(frozen=True, slots=True)
class LookAtCopies:
    """Sent back: boxes that are behind, and those of them that are far behind."""


@dataclass(frozen=True, slots=True)
class ReportCopies:
    """Tell the agent what is still to come of copies."""

    coming: ComingCopies


@dataclass(frozen=True, slots=True)
class Finish:
    """There are no more steps: hand back what is here."""


@dataclass(frozen=True, slots=True)
class ReportDamage:
    """Tell everybody that a copy differs from its owner's."""

    why: str
    suspect: Rank | None


@dataclass(frozen=True, slots=True)
class LeaveStep:
    """Stop what is under way. Sent back: an `Inventory`."""

    suspect: Rank | None


@dataclass(frozen=True, slots=True)
class Inventory:
    """What is here after that. `certificate`: of the step, if it was committed before it failed. `digests`: of boxes;
    `recorded`: those of them that have the record of a step in flight. `votes`: those of that step that have come, None
    if there is no such step."""

    certificate: Certificate | None
    digests: Mapping[BoxId, int]
    recorded: tuple[BoxId, ...]
    votes: tuple[Vote, ...] | None


@dataclass(frozen=True, slots=True)
class Report:
    """Say what is here, and wait for what comes next. Sent back: a `Decision`."""

    holdings: Holdings
    suspect: Rank | None


@dataclass(frozen=True, slots=True)
class OpenLinks:
    """To members of the next epoch, and once more to those of `anew`."""

    go: Go
    anew: frozenset[Rank]


@dataclass(frozen=True, slots=True)
class CheckCopies:
    """Read these boxes once more, before an update hides that they have changed. Sent back: those that have."""

    boxes: tuple[BoxId, ...]


@dataclass(frozen=True, slots=True)
class FinishStep:
    """Finish the step that was left, by the votes that the others had."""

    certificate: Certificate


@dataclass(frozen=True, slots=True)
class DropStep:
    """Give up the step that was left, if there is one."""


@dataclass(frozen=True, slots=True)
class AdvanceLinks:
    """To the epoch, without those who have gone."""

    epoch: Epoch
    gone: frozenset[Rank]


@dataclass(frozen=True, slots=True)
class Install:
    """Take over the plan; `restart`: what is here goes, and what is loaded then counts as that of the epoch's resume.
    Sent back: buckets whose working copy is not whole. The job ends here if the plan says so."""

    go: Go
    restart: bool


@dataclass(frozen=True, slots=True)
class GoBack:
    """Take the state of a checkpoint, or that of the beginning."""

    to: Stamp


@dataclass(frozen=True, slots=True)
class GatherParameters:
    """Working copies of these buckets here, and of what others lack there."""

    stale: frozenset[int]


@dataclass(frozen=True, slots=True)
class SendCopies:
    """States to new holders, which travel behind the coming steps: (box, owner, holder). Sent back: boxes that are
    behind here."""

    copies: tuple[tuple[BoxId, Rank, Rank], ...]


@dataclass(frozen=True, slots=True)
class Enter:
    """The epoch has begun here."""

    activation: Activation
    went_back: bool
