"""The base of all events of a run: a line of `events.jsonl` each, whose `kind` is the tag here.

    fields_of(Stopped(members=[0, 1]))   ->  {"event": "stopped", "members": [0, 1]}

Ranks' own are in `rank_events.py`, those of the launcher and the coordinator in `job_events.py`.
"""

from __future__ import annotations

from typing import Any

import msgspec


class RunEvent(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True,
               tag_field="event"):  # fmt: skip
    """Base of them all; fields that have their defaults are not written."""


def tag_of(kind: type[RunEvent]) -> str:
    """Its `kind` in `events.jsonl`."""
    return str(kind.__struct_config__.tag)


def fields_of(event: RunEvent) -> dict[str, Any]:
    """Return the event as it travels to the launcher: its kind as `event`, and its fields."""
    return msgspec.to_builtins(event)
