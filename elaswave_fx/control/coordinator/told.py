"""What a rank that joined may tell the launcher: messages by kind, each with its fields, and nothing else.

    fault_of_told(Told(4, "eval", {"step": 50, "loss": 0.3, "count": 128}), steps_most=4146)   ->  None
    fault_of_told(Told(4, "eval", {"step": "50"}), steps_most=4146)   ->  "eval: Object missing required field `count`"

The launcher writes what it is told to the files of the run, and trusts it. The coordinator passes on only what has all
fields, of their types and within bounds; whoever says something else loses its connection.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec

from elaswave_fx.control.protocol.messages import Told

_Count = Annotated[int, msgspec.Meta(ge=0, le=(1 << 62))]
_Step = Annotated[int, msgspec.Meta(ge=-1, le=(1 << 31))]
_Words = Annotated[str, msgspec.Meta(max_length=1 << 14)]
_Name = Annotated[str, msgspec.Meta(max_length=4096)]
_Tile = tuple[_Count, _Count, _Count, _Count]


class _Strict(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Fields are those that are named, and no others."""


class _StepReport(_Strict, frozen=True):
    """The fields of `observe.metrics.StepReport`."""

    step: _Step
    loss: float
    tokens: _Count
    step_ms: float
    lr: float
    grad_norm: float
    memory_peak_mb: float
    epoch: _Step
    consumed: Annotated[list[_Tile], msgspec.Meta(max_length=1024)]
    world_size: _Count
    alive_at_s: float | None
    energy_j: float | None
    unchanged: _Words | None = None


class _Eval(_Strict, frozen=True):
    step: _Step
    loss: float
    count: _Count


class _Summary(_Strict, frozen=True):
    """What a rank adds to `summary.json`."""

    model: _Name | None = None
    params_digest: Annotated[str, msgspec.Meta(max_length=128)] | None = None
    state_digest: Annotated[str, msgspec.Meta(max_length=128)] | None = None
    buckets: dict[_Name, _Name] = {}
    memory_per_parameter: dict[_Name, dict[_Name, float]] = {}
    predicted: dict[_Name, int | float] = {}


class _Share(_Strict, frozen=True):
    summary: _Summary


class _Event(_Strict, frozen=True):
    """An event of a rank, by its kind. `at_s`: of the coordinator's clock, None: now."""

    epoch: _Step
    at_s: float | None


class _OfStep(_Event, frozen=True):
    step: _Step


class _Resumed(_OfStep, frozen=True):
    redone: _Count | None = None


class _Bytes(_Event, frozen=True):
    bytes: _Count


class _Edited(_Event, frozen=True):
    ms: float


class _Transferred(_Event, frozen=True):
    ms: float
    bytes: _Count
    bytes_behind: _Count = 0


class _Cause(_Event, frozen=True):
    cause: _Words


class _Left(_OfStep, frozen=True):
    cause: _Words
    asked: Literal[True]


class _Skipped(_OfStep, frozen=True):
    grad_norm: float


class _GaveUp(_OfStep, frozen=True):
    reason: _Words


class _Checkpoint(_OfStep, frozen=True):
    failed: _Words | None = None
    path: _Name | None = None
    megabytes: float | None = None
    copy_ms: float | None = None
    write_ms: float | None = None


class _Clock(_Event, frozen=True):
    outcome: Literal["applied", "unsupported", "denied", "restored"]
    wanted_mhz: float | None = None
    mhz: float | None = None
    why: _Words = ""


class _Model(_Event, frozen=True):
    path: _Name
    run_dir: _Name
    host: _Name


class _Predicted(_Event, frozen=True):
    ranks: _Count
    steps: _Count
    predicted_pipeline_ms: float
    pipeline_ms: float
    predicted_exchange_ms: float
    exchange_ms: float
    predicted_update_ms: float
    update_ms: float
    predicted_step_ms: float
    step_ms: float
    pipeline_over_predicted: float
    step_over_predicted: float
    overslept_share: float = 0.0


_KINDS: Mapping[str, type] = {"step": _StepReport, "eval": _Eval, "share": _Share}
_EVENTS: Mapping[str, type] = {
    "joined": _OfStep,
    "resumed": _Resumed,
    "edited": _Edited,
    "transferred": _Transferred,
    "caught_up": _Bytes,
    "copy_differs": _Cause,
    "left": _Left,
    "skipped_update": _Skipped,
    "gave_up": _GaveUp,
    "checkpoint": _Checkpoint,
    "clock": _Clock,
    "model": _Model,
    "predicted": _Predicted,
}


def fault_of_told(told: Told, steps_most: int) -> str | None:
    """What is wrong with it, in words; None if the launcher may have it. `steps_most`: no step is later."""
    fields: dict[str, Any] = dict(told.fields)
    event = fields.pop("event", None) if told.kind == "event" else None
    if told.kind == "event":
        kind = _EVENTS.get(event) if isinstance(event, str) else None
    else:
        kind = _KINDS.get(told.kind)
    name = told.kind if event is None else f"{told.kind} {str(event)[:40]}"
    if kind is None:
        return f"{name[:60]}: ranks tell no such thing"
    try:
        found = msgspec.convert(fields, kind)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        return f"{name}: {error}"
    step = getattr(found, "step", -1)
    return f"{name}: step {step} is beyond all that can be committed" if step > steps_most else None
