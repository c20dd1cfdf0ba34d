"""Events that a rank reports, beside its steps: each is a line of `events.jsonl`, whose `kind` is the tag here.

    context.report_event(Edited(ms=3.1), epoch=2)  ->  {"t_ms": 8.4, "kind": "edited", "epoch": 2, "rank": 0, "ms": 3.1}

Fields have bounds: a rank that joined may be of any user, and what it reports goes into the files of the run. The
docstrings here are the table in docs/reference/events.md.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from elaswave_fx.observe.run_event import RunEvent

Count = Annotated[int, msgspec.Meta(ge=0, le=(1 << 62))]
Step = Annotated[int, msgspec.Meta(ge=-1, le=(1 << 31))]
Words = Annotated[str, msgspec.Meta(max_length=1 << 14)]
Name = Annotated[str, msgspec.Meta(max_length=4096)]


class RankEvent(RunEvent, frozen=True, kw_only=True):
    """Base of those that ranks report."""

    rank: int | msgspec.UnsetType = msgspec.UNSET
    """The rank that reports it; set by whoever receives the report."""


class Joined(RankEvent, frozen=True, tag="joined"):
    """A rank that no launcher started is a member from `step` on."""

    step: Step


class Drained(RankEvent, frozen=True, tag="left"):
    """With `asked`, the rank was drained."""

    step: Step
    """Its last one."""
    cause: Words
    asked: Literal[True]


class FaultStrikes(RankEvent, frozen=True, tag="fault"):
    """A fault of `faults` is about to strike, or takes effect from here on; reported by the victim."""

    step: Step
    fault: Name
    phase: Name
    seconds: float | None = None
    """For which a rank is suspended or cut off."""
    speed: float | None = None
    """Of a rank that is slowed down."""


class Edited(RankEvent, frozen=True, tag="edited"):
    """The first member has installed the plan of the epoch."""

    ms: float


class Transferred(RankEvent, frozen=True, tag="transferred"):
    """The first member has its parameters."""

    ms: float
    bytes: Count
    """Of all ranks."""
    bytes_behind: Count
    """Of replicas that sync during the next steps."""


class Resumed(RankEvent, frozen=True, tag="resumed"):
    """The first commit of the epoch, or of a run that resumed from a checkpoint."""

    step: Step


class CaughtUp(RankEvent, frozen=True, tag="caught_up"):
    """The replicas of a rank are in sync."""

    bytes: Count
    """The most memory that this took, bounded by `switch.memory`."""


class CopyDiffered(RankEvent, frozen=True, tag="copy_differs"):
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
    """Steps done."""
    failed: Words | None = None
    """Why, if it did."""
    path: Name | None = None
    megabytes: float | None = None
    copy_ms: float | None = None
    write_ms: float | None = None


class ClockSet(RankEvent, frozen=True, tag="clock"):
    """A clock was to be set; the launcher restores those of killed ranks."""

    outcome: Literal["applied", "unsupported", "denied", "restored"]
    wanted_mhz: float | None
    """Null: as before the run."""
    mhz: float | None
    """As read back."""
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
    """First kernel to last one, of the slowest rank."""
    predicted_exchange_ms: float
    """Messages of reduce, copy and gather alone."""
    exchange_ms: float
    """The rest of the step."""
    predicted_update_ms: float
    """Of the rank that keeps most state, as measured at the build."""
    update_ms: float
    """The optimizer, of owned boxes and of replicas."""
    predicted_step_ms: float
    step_ms: float
    """Of the slowest rank, from commit to commit."""
    pipeline_over_predicted: float
    step_over_predicted: float
    overslept_share: float | None = None
    """Emulated runs only: by how much sleeps were too long, over modelled time."""


OF_ANY_RANK: tuple[type[RankEvent], ...] = (
    Joined, Drained, Edited, Transferred, Resumed, CaughtUp, CopyDiffered, UpdateSkipped, GaveUp, CheckpointWritten,
    ClockSet, ModelElsewhere, Predicted,
)  # fmt: skip
"""What a rank that no launcher started may say, too."""
