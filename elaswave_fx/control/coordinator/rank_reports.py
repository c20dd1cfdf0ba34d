"""The kinds and fields of reports that joiners send to the launcher.

    fault_of_report(RankReport(4, "eval", {"step": 50, "loss": 0.3, "count": 128}), steps_most=4146)   ->  None
    fault_of_report(RankReport(4, "eval", {"step": "50"}), …)  ->  "eval: Object missing required field `count`"

The launcher trusts reports and writes them to the files of the run. So the coordinator passes on only reports with all
fields, of their types and within bounds; a rank that sends another one loses its connection.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec

from elaswave_fx.control.protocol.messages import RankReport
from elaswave_fx.observe.rank_events import OF_ANY_RANK, Count, Name, Step, Words
from elaswave_fx.observe.run_event import tag_of

_Tile = tuple[Count, Count, Count, Count]


class _Strict(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A struct that refuses unknown fields."""


class _StepReport(_Strict, frozen=True):
    """The fields of `observe.metrics.StepReport`."""

    step: Step
    loss: float
    tokens: Count
    step_ms: float
    lr: float
    grad_norm: float
    memory_peak_mb: float
    epoch: Step
    consumed: Annotated[list[_Tile], msgspec.Meta(max_length=1024)]
    world_size: Count
    alive_at_s: float | None
    energy_j: float | None
    unchanged: Words | None = None


class _Eval(_Strict, frozen=True):
    step: Step
    loss: float
    count: Count


class SummaryShare(_Strict, frozen=True):
    """A rank's part of `summary.json`."""

    model: Name | None = None
    """Path of the model."""
    params_digest: Annotated[str, msgspec.Meta(max_length=128)] | None = None
    state_digest: Annotated[str, msgspec.Meta(max_length=128)] | None = None
    """Digest of the final state."""
    buckets: dict[Name, Name] = {}
    """Digests of the final state by bucket."""
    memory_per_parameter: dict[Name, dict[Name, float]] = {}
    """Bytes over all ranks of the last plan."""
    predicted: dict[Name, int | float] = {}
    """Measured and predicted step times of the last epoch."""


class _Share(_Strict, frozen=True):
    summary: SummaryShare


class _When(_Strict, frozen=True):
    """The time of an event. `at_s`: by the coordinator's clock, None: now."""

    epoch: Step
    at_s: float | None


_KINDS: Mapping[str, type] = {"step": _StepReport, "eval": _Eval, "share": _Share}
_EVENTS: Mapping[str, type] = {tag_of(kind): kind for kind in OF_ANY_RANK}


def fault_of_report(report: RankReport, steps_most: int) -> str | None:
    """The fault in a report, as text; None if the launcher may have it. `steps_most`: the highest possible step."""
    fields: dict[str, Any] = dict(report.fields)
    event = fields.get("event") if report.kind == "event" else None
    if report.kind == "event":
        kind = _EVENTS.get(event) if isinstance(event, str) else None
    else:
        kind = _KINDS.get(report.kind)
    if kind is not None and "rank" in fields:
        return f"{report.kind}: a report names its own rank"
    name = report.kind if event is None else f"{report.kind} {str(event)[:40]}"
    if kind is None:
        return f"{name[:60]}: ranks report no such thing"
    try:
        if report.kind == "event":
            msgspec.convert({key: fields.pop(key) for key in ("epoch", "at_s") if key in fields}, _When)
        found = msgspec.convert(fields, kind)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        return f"{name}: {error}"
    step = getattr(found, "step", -1)
    return f"{name}: step {step} is beyond all that can be committed" if step > steps_most else None
