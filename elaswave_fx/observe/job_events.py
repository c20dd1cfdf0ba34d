"""Lines of `events.jsonl` that the launcher and the coordinator write, by `kind`; those of ranks: `rank_events`.

    {"t_ms": 8.1, "kind": "stopped", "epoch": 0, "members": [0, 1, 3]}   is   Stopped(members=[0, 1, 3])

The types list the fields of a line beside `t_ms`, `kind` and `epoch`; UNSET ones are not written. The coordinator makes
its events in `control/coordinator/event_log.py`.
"""

from __future__ import annotations

from typing import Literal

from msgspec import UNSET, UnsetType

from elaswave_fx.observe.run_event import RunEvent


class JobEvent(RunEvent, frozen=True, kw_only=True):
    """Base of the launcher's and the coordinator's events."""


class Planned(JobEvent, frozen=True, kw_only=True, tag="planned"):
    """The plan of an epoch; of the first one only `units`, `samples`, `world_size`."""

    reason: str | UnsetType = UNSET
    """The choice, and the alternatives that it beat."""
    plan_ms: float | UnsetType = UNSET
    lines: list[str] | UnsetType = UNSET
    """The changes, as text."""
    layout: str | UnsetType = UNSET
    """The new layout, if the same ranks take another one."""
    units: int | UnsetType = UNSET
    samples: int | UnsetType = UNSET
    world_size: int | UnsetType = UNSET


class Started(JobEvent, frozen=True, kw_only=True, tag="started"):
    """All processes are up."""

    pids: dict[str, int]
    """Process ids by rank."""


class Detected(JobEvent, frozen=True, kw_only=True, tag="detected"):
    """The coordinator ends the epoch for a failure; with no epoch after it, the run failed."""

    rank: int | None
    ranks: list[int] | UnsetType = UNSET
    """All failed ranks; empty if a step failed and no rank is the suspect."""
    cause: str
    silent_ms: float | UnsetType | None = UNSET
    """Time since the last heartbeat or report; null if there was none."""
    exited: bool | UnsetType = UNSET
    """The launcher has reported the end of the process."""


class Left(JobEvent, frozen=True, kw_only=True, tag="left"):
    """The process of a worker ended, or it was evicted."""

    rank: int
    cause: str


class MustStay(JobEvent, frozen=True, kw_only=True, tag="must_stay"):
    """A draining rank cannot leave."""

    rank: int
    reason: str


class Stopped(JobEvent, frozen=True, kw_only=True, tag="stopped"):
    """All members of the next epoch have left the step and reported."""

    members: list[int]


class Agreed(JobEvent, frozen=True, kw_only=True, tag="agreed"):
    """The new epoch is in the store."""

    members: list[int]
    lost: list[int]
    """The ranks that failed."""
    left: list[int] | UnsetType = UNSET
    """The ranks that were drained."""
    back: list[int] | UnsetType = UNSET
    """Evicted ranks that rejoin with their state."""
    step: int
    """The step to resume at."""
    steps_redone: int | None
    how: str | None
    """How the step in flight ended: `rolled forward`, `done again`, `rolled back`; null from a new coordinator."""
    why: str
    rolled_back_to: int | UnsetType = UNSET
    """The step of a rollback, if replicas were lost."""


class Slowed(JobEvent, frozen=True, kw_only=True, tag="slowed"):
    """Ranks have other speeds than planned."""

    speeds: dict[str, float]
    tried: list[int]
    """Ranks on probation: they had no work because they were slow, and get a little."""


class Recovery(JobEvent, frozen=True, kw_only=True, tag="recovery"):
    """An entry of the summary's `recoveries`, when it is complete or the run ends; null: not observed."""

    rank: int | UnsetType | None = UNSET
    ranks: list[int] | UnsetType = UNSET
    cause: str | UnsetType = UNSET
    step: int | UnsetType | None = UNSET
    members: int | UnsetType = UNSET
    """Number of ranks of the new epoch."""
    steps_redone: int | UnsetType | None = UNSET
    rolled_back_to: int | UnsetType = UNSET
    bytes_moved: int | UnsetType | None = UNSET
    detect_ms: float | UnsetType | None = UNSET
    """Time from the fault, or the last sign of life, to the end of the epoch."""
    abort_ms: float | UnsetType | None = UNSET
    """Time until all ranks left the step."""
    agree_ms: float | UnsetType | None = UNSET
    plan_ms: float | UnsetType | None = UNSET
    edit_ms: float | UnsetType | None = UNSET
    transfer_ms: float | UnsetType | None = UNSET
    mttr_ms: float | UnsetType | None = UNSET
    """Time from the fault to the next commit, less a usual step; null if no commit followed."""


class Stopping(JobEvent, frozen=True, kw_only=True, tag="stopping"):
    """All ranks stop after a certain step: on request (`steps`), or for a planned reconfiguration (`cause`)."""

    steps: int | UnsetType = UNSET
    cause: str | UnsetType = UNSET


class CalledOff(JobEvent, frozen=True, kw_only=True, tag="called_off"):
    """A planned reconfiguration was cancelled: the model is being exported."""

    cause: str


class Waiting(JobEvent, frozen=True, kw_only=True, tag="waiting"):
    """A box is only at evicted ranks: the members wait."""

    cause: str


class Coordinator(JobEvent, frozen=True, kw_only=True, tag="coordinator"):
    """The coordinator failed; another one takes over."""

    cause: str


class Over(JobEvent, frozen=True, kw_only=True, tag="over"):
    """No epoch follows."""

    reason: str


class Finished(JobEvent, frozen=True, kw_only=True, tag="finished"):
    """The run has ended."""

    outcome: str
    """`completed`, `interrupted` or `failed`."""
    steps: int


class ClockRestored(JobEvent, frozen=True, kw_only=True, tag="clock"):
    """The launcher has restored the clock of a killed rank."""

    rank: int | None
    outcome: Literal["restored"]
    why: str
