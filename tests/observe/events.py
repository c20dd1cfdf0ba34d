"""Events by the kind and the fields that their lines have."""

from __future__ import annotations

from typing import Any

from elaswave_fx.observe import job_events, rank_events
from elaswave_fx.observe.run_event import RunEvent, event_of, tag_of

_JOB_KINDS = {tag_of(each) for each in job_events.JobEvent.__subclasses__()} - {"clock"}


def event(kind: str, **fields: Any) -> RunEvent:
    """A process that ends has a `left` of the launcher; one that was asked to leave has its own, as clocks do."""
    by_launcher = kind in _JOB_KINDS and "asked" not in fields
    base = job_events.JobEvent if by_launcher else rank_events.RankEvent
    return event_of(base, {"event": kind, **fields})
