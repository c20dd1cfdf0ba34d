"""What an engine needs of its process, and how its work is waited for and fails."""

from __future__ import annotations

from collections.abc import Generator
from typing import Protocol

from elaswave_fx.plan.work.topology import Rank
from tools.sim.frames import Frame

Wait = Generator[None, None, None]
"""The main thread waits: it is gone on with after every event of its process."""


class UpdateFailed(Exception):
    """An update program failed: the process ends."""


class Surroundings(Protocol):
    """What an engine needs of its process. `send` returns when the frame arrives, or None if it does not."""

    @property
    def now(self) -> float: ...
    def send(self, peer: Rank, frame: Frame, bulk: bool = False) -> float | None: ...
    def sleep(self, seconds: float) -> Wait: ...
    def update_fails(self) -> bool: ...
