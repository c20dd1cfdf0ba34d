"""The base of all events of a run: a line of `events.jsonl` each, whose `kind` is the tag here.

    fields_of(Stopped(members=[0, 1]))                        ->  {"event": "stopped", "members": [0, 1]}
    event_of(JobEvent, {"event": "stopped", "members": [0]})  ->  Stopped(members=[0])

Ranks' own are in `rank_events.py`, those of the launcher and the coordinator in `job_events.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec


class RunEvent(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True,
               tag_field="event"):  # fmt: skip
    """Base of them all; fields that have their defaults are not written."""


Event = TypeVar("Event", bound=RunEvent)


def tag_of(kind: type[RunEvent]) -> str:
    """Its `kind` in `events.jsonl`."""
    return str(kind.__struct_config__.tag)


def fields_of(event: RunEvent) -> dict[str, Any]:
    """Return the event as it travels to the launcher: its kind as `event`, the rank if it has one, and its fields."""
    fields = msgspec.to_builtins(event)
    first = {name: fields.pop(name) for name in ("event", "rank") if name in fields}
    return {**first, **fields}


def event_of(base: type[Event], fields: Mapping[str, Any]) -> Event:
    """Return the event of a subclass of `base` that has these fields, as `fields_of` gives them. Raises
    `msgspec.ValidationError`, and `KeyError` for a kind that no subclass has."""
    kinds = {tag_of(kind): kind for kind in base.__subclasses__()}
    return msgspec.convert(fields, kinds[fields["event"]])


def received(base: type[Event], fields: Mapping[str, Any]) -> tuple[Event, int, float | None]:
    """Return the event of a message, its epoch, and the monotonic time at which it happened (None: now). Raises as
    `event_of`."""
    event = {name: value for name, value in fields.items() if name not in ("epoch", "at_s")}
    return event_of(base, event), fields["epoch"], fields["at_s"]
