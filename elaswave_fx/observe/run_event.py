"""The base of all events of a run: each is a line of `events.jsonl`, whose `kind` is the tag here.

    fields_of(Stopped(members=[0, 1]))   ->  {"event": "stopped", "members": [0, 1]}

Events of ranks are in `rank_events.py`, those of the launcher and the coordinator in `job_events.py`.
"""

from __future__ import annotations

from typing import Any

import msgspec


class RunEvent(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True,
               tag_field="event"):  # fmt: skip
    """Base of all events; fields with default values are not written."""


def tag_of(kind: type[RunEvent]) -> str:
    """Return the `kind` of an event in `events.jsonl`."""
    return str(kind.__struct_config__.tag)


def fields_of(event: RunEvent) -> dict[str, Any]:
    """Return an event as message fields: its kind as `event`, and its own fields."""
    return msgspec.to_builtins(event)
