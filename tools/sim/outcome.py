"""How a schedule ended, and what it has been through.

In: a world that has run. Out: `Outcome`, which `__main__` sums up.
"""

from __future__ import annotations

from dataclasses import dataclass

from tools.sim.faults import Fault


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a schedule ended. `said`: how often the machines told of what, so that a campaign shows what it has been
    through."""

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
    """A wrong replica was the last one before anything could compare it: outside what the protocol promises."""
