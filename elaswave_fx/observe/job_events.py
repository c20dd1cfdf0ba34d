"""Lines of `events.jsonl` that the launcher and the coordinator write, by their `kind`; ranks' own: `rank_events`.

    {"t_ms": 8.1, "kind": "stopped", "epoch": 0, "members": [0, 1, 3]}   ->  KINDS["stopped"]

The types say what a line has beside `t_ms`, `kind` and `epoch`. The coordinator makes its lines in
`control/coordinator/event_log.py`; `tests/docs/test_reference.py` holds these types against what is written.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypedDict


class Planned(TypedDict, total=False):
    """The plan of an epoch; of the first one only `units`, `samples`, `world_size`."""

    reason: str
    """What was chosen, and what it beat."""
    plan_ms: float
    lines: list[str]
    """What changes, in words."""
    layout: str
    """If the same ranks take another one."""
    units: int
    samples: int
    world_size: int


class Started(TypedDict):
    """All processes are up."""

    pids: dict[str, int]
    """By rank."""


class Detected(TypedDict, total=False):
    """The coordinator ends the epoch for a failure; with no epoch after it, the run failed."""

    rank: int | None
    ranks: list[int]
    """All that failed; empty if a step failed and no rank is accused."""
    cause: str
    silent_ms: float | None
    """Since the last heartbeat or report; null if there was none."""
    exited: bool
    """The launcher has reported the end of the process."""


class Left(TypedDict):
    """The process of a worker ended, or it was evicted."""

    rank: int
    cause: str


class MustStay(TypedDict):
    """A draining rank cannot leave."""

    rank: int
    reason: str


class Stopped(TypedDict):
    """All members of the next epoch have left the step and reported."""

    members: list[int]


class Agreed(TypedDict, total=False):
    """The new epoch is in the store."""

    members: list[int]
    lost: list[int]
    """The ranks that failed."""
    left: list[int]
    """The ranks that were drained."""
    back: list[int]
    """Evicted ranks that rejoin with their state."""
    step: int
    """The one to resume at."""
    steps_redone: int | None
    how: str | None
    """How the step in flight ended: `rolled forward`, `done again`, `rolled back`; null if a new coordinator found the
    epoch in the store."""
    why: str
    rolled_back_to: int
    """If replicas were lost."""


class Slowed(TypedDict):
    """Ranks have other speeds than planned."""

    speeds: dict[str, float]
    tried: list[int]
    """Those on probation: they had no work because they were slow, and get a little."""


class Recovery(TypedDict, total=False):
    """An entry of the summary's `recoveries`, when it is complete or the run ends; null: not observed."""

    rank: int | None
    ranks: list[int]
    cause: str
    step: int | None
    members: int
    """How many ranks the new epoch has."""
    steps_redone: int | None
    rolled_back_to: int
    bytes_moved: int | None
    detect_ms: float | None
    """From the fault, or the last sign of life, to the end of the epoch."""
    abort_ms: float | None
    """Until all ranks left the step."""
    agree_ms: float | None
    plan_ms: float | None
    edit_ms: float | None
    transfer_ms: float | None
    mttr_ms: float | None
    """From the fault to the next commit, less a usual step; null if no commit followed."""


class Stopping(TypedDict, total=False):
    """All ranks stop after a certain step: on request (`steps`), or for a planned reconfiguration (`cause`)."""

    steps: int
    cause: str


class CalledOff(TypedDict):
    """A planned reconfiguration was cancelled: the model is being exported."""

    cause: str


class Waiting(TypedDict):
    """A box is only at evicted ranks: the members wait."""

    cause: str


class Coordinator(TypedDict):
    """The coordinator failed; another one takes over."""

    cause: str


class Over(TypedDict):
    """No epoch follows."""

    reason: str


class Finished(TypedDict):
    """The run has ended."""

    outcome: str
    """`completed`, `interrupted` or `failed`."""
    steps: int


KINDS: Mapping[str, Any] = {
    "planned": Planned, "started": Started, "detected": Detected, "left": Left, "must_stay": MustStay,
    "stopped": Stopped, "agreed": Agreed, "slowed": Slowed, "recovery": Recovery, "stopping": Stopping,
    "called_off": CalledOff, "waiting": Waiting, "coordinator": Coordinator, "over": Over, "finished": Finished,
}  # fmt: skip
