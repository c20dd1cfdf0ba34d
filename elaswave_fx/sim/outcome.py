"""How a schedule ended, and what it has been through.

In: a world that has run. Out: `Outcome`, which `__main__` sums up.
"""

from __future__ import annotations

from dataclasses import dataclass

from elaswave_fx.sim.faults import Fault

MARKS = (
    "rolled forward",
    "is done again",
    "rolled back",
    "wait for ranks",
    "members have changed",
    "without a way",
    "join after",
    "owners move",
    "differ from their owners",
    "superseded",
    "stand still",
    "silent or gone",
    "links of",
)
"""What the machines say; counted, so that a campaign shows what it has been through."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a schedule ended."""

    seed: int
    violation: str | None
    committed: int
    epochs: int
    events: int
    simulated_s: float
    orphans: int
    rollbacks: int
    excused: bool
    faults: tuple[Fault, ...]
    said: dict[str, int]


class Excused(Exception):
    """A wrong copy was the last one before anything could compare it: outside what the protocol promises."""
