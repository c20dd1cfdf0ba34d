"""Events that a rank reports besides its steps: each is a line of `events.jsonl`, whose `kind` is the tag here.

    context.report_event(Edited(ms=3.1), epoch=2)  ->  {"t_ms": 8.4, "kind": "edited", "epoch": 2, "rank": 0, "ms": 3.1}

Fields have bounds: a joiner may belong to any user, and its reports go into the files of the run. The docstrings here
are the table in docs/reference/events.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec

from elaswave_fx.observe.run_event import RunEvent

Count = Annotated[int, msgspec.Meta(ge=0, le=(1 << 62))]
Step = Annotated[int, msgspec.Meta(ge=-1, le=(1 << 31))]
MOST_WORDS = 1 << 14
Words = Annotated[str, msgspec.Meta(max_length=MOST_WORDS)]
Name = Annotated[str, msgspec.Meta(max_length=4096)]


class RankEvent(RunEvent, frozen=True, kw_only=True):
    """Base of the events that ranks report."""

    rank: int | msgspec.UnsetType = msgspec.UNSET
    """The rank that reports it; set by whoever receives the report."""


class Joined(RankEvent, frozen=True, tag="joined"):
    """A rank that no launcher started is a member from `step` on."""

    step: Step


class Drained(RankEvent, frozen=True, tag="left"):
    """The rank was drained, if `asked`."""

    step: Step
    """The rank's last step."""
    cause: Words
    asked: Literal[True]


class FaultStrikes(RankEvent, frozen=True, tag="fault"):
    """A fault of `faults` is about to strike, or takes effect from here on; reported by the victim."""

    step: Step
    fault: Name
    phase: Name
    seconds: float | None = None
    """Duration for which a rank is suspended or cut off."""
    speed: float | None = None
    """Speed of a slowed rank."""


class Edited(RankEvent, frozen=True, tag="edited"):
    """The first member has installed the plan of the epoch."""

    ms: float


class Transferred(RankEvent, frozen=True, tag="transferred"):
    """The first member has its parameters."""

    ms: float
    bytes: Count
    """Bytes that all ranks received."""
    bytes_behind: Count
    """Bytes of replicas that sync during the next steps."""


class Resumed(RankEvent, frozen=True, tag="resumed"):
    """The first commit of the epoch, or of a run that resumed from a checkpoint."""

    step: Step


class ReplicasInSync(RankEvent, frozen=True, tag="caught_up"):
    """The replicas of a rank are in sync."""

    bytes: Count
    """The most memory that this took, bounded by `switch.memory`."""


class ReplicaDiffered(RankEvent, frozen=True, tag="copy_differs"):
    """A replica differed from its owner's box: dropped, and made again in a new epoch."""

    cause: Words


class UpdateSkipped(RankEvent, frozen=True, tag="skipped_update"):
    """The gradient of a step was not finite, or nothing counted in it: no parameter and no state changed."""

    step: Step
    grad_norm: float


class GaveUp(RankEvent, frozen=True, tag="gave_up"):
    """The run ends early: too many skipped updates in a row, or two ranks read different samples."""

    step: Step
    reason: Words


class CheckpointWritten(RankEvent, frozen=True, tag="checkpoint"):
    """A checkpoint is complete, or failed."""

    step: Step
    """Completed steps."""
    failed: Words | None = None
    """The reason of a failure."""
    path: Name | None = None
    megabytes: float | None = None
    copy_ms: float | None = None
    write_ms: float | None = None


class ClockSet(RankEvent, frozen=True, tag="clock"):
    """A clock was set, or could not be set; the launcher restores those of killed ranks."""

    outcome: Literal["applied", "unsupported", "denied", "restored"]
    wanted_mhz: float | None
    """The requested clock; null: as before the run."""
    mhz: float | None
    """The clock as read back."""
    why: Words


class ModelElsewhere(RankEvent, frozen=True, tag="model"):
    """The model could not be written to the run directory and is elsewhere."""

    path: Name
    run_dir: Name
    host: Name


class Predicted(RankEvent, frozen=True, tag="predicted"):
    """Medians of the last epoch's steps, beside what its plan predicts."""

    ranks: Count
    steps: Count
    predicted_pipeline_ms: float
    """The schedule, simulated."""
    pipeline_ms: float
    """Time from first to last kernel, of the slowest rank."""
    predicted_exchange_ms: float
    """Time of the messages of reduce, copy and gather alone."""
    exchange_ms: float
    """The rest of the step."""
    predicted_update_ms: float
    """Time on the rank with most state, as measured at the build."""
    update_ms: float
    """Time of the optimizer, on owned boxes and on replicas."""
    predicted_step_ms: float
    step_ms: float
    """Time between commits, of the slowest rank."""
    pipeline_over_predicted: float
    step_over_predicted: float
    overslept_share: float | None = None
    """Emulated runs only: excess of sleeps over modelled time."""


OF_ANY_RANK: tuple[type[RankEvent], ...] = (
    Joined, Drained, Edited, Transferred, Resumed, ReplicasInSync, ReplicaDiffered, UpdateSkipped, GaveUp,
    CheckpointWritten, ClockSet, ModelElsewhere, Predicted,
)  # fmt: skip
"""Events that joiners may report, too."""


def clipped(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Cut texts, such as messages of libraries, to the length that a report may have."""
    return {name: value[:MOST_WORDS] if isinstance(value, str) else value for name, value in fields.items()}
