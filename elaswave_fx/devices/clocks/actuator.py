"""What a rank asks of a clock; each kind of clock is one implementation beside this file.

A setting is what a clock was at before anybody touched it: plain data that is written to a file and read by another
process, which then puts it back.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol

Setting = Mapping[str, Any]

Numbers = Mapping[str, int | list[int]]
"""Which device it is, as its vendor counts."""


@dataclass(frozen=True)
class Targets:
    """The path and the call that clocks are set by. They come from the configuration of whoever sets clocks, never from
    a file of a run directory, which somebody else may have written."""

    sysfs: str = "/sys/devices/system/cpu"
    hook: str | None = None


@dataclass(frozen=True)
class Answer:
    """What became of a wish. `mhz`: the clock as it was read back, None where it cannot be; `why`, if not applied."""

    outcome: Literal["applied", "unsupported", "denied"]
    mhz: float | None = None
    why: str = ""


class Actuator(Protocol):
    """One rank's clock. Nothing here raises for what a device cannot do, or a user may not: that is an answer."""

    name: ClassVar[str]

    @property
    def numbers(self) -> Numbers:
        """Which device it is: with `Targets` they make the same actuator in another process."""
        ...

    def read(self) -> Setting | Answer:
        """The setting as it is, or why it cannot be known; then nothing may be set."""
        ...

    def set(self, mhz: float) -> Answer:
        """Set the clock, and read it back."""
        ...

    def restore(self, setting: Setting) -> Answer:
        """Put back what `read` returned; doing it twice is doing it once."""
        ...
