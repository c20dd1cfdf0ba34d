"""The interface of a rank's clock; each module beside this file implements one kind.

A setting is the state of a clock before the first change: plain data in a file, from which another process restores it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol

Setting = Mapping[str, Any]

Numbers = Mapping[str, int | list[int]]
"""The vendor's numbers of the device."""


@dataclass(frozen=True)
class Targets:
    """The path and the call that set clocks. They come from the configuration of the setting process, never from a run
    directory, which another user may have written."""

    sysfs: str = "/sys/devices/system/cpu"
    hook: str | None = None


@dataclass(frozen=True)
class Answer:
    """The result of a request. `mhz`: the clock as read back, None if unreadable; `why` it was not applied."""

    outcome: Literal["applied", "unsupported", "denied"]
    mhz: float | None = None
    why: str = ""


class Actuator(Protocol):
    """One rank's clock. What a device cannot or a user may not do is an Answer, no error."""

    name: ClassVar[str]

    @property
    def numbers(self) -> Numbers:
        """The device's numbers; with `Targets` they make the same actuator in another process."""
        ...

    def read(self) -> Setting | Answer:
        """The current setting, or why it cannot be read; then nothing may be set."""
        ...

    def set(self, mhz: float) -> Answer:
        """Set the clock, and read it back."""
        ...

    def restore(self, setting: Setting) -> Answer:
        """Restore what `read` returned; idempotent."""
        ...
