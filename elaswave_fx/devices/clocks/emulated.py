"""The clock of an emulated device: its kernels take the plan's time for that clock (`devices/emulated.py`)."""

from __future__ import annotations

from typing import ClassVar

from elaswave_fx.devices.clocks.actuator import Answer, Numbers, Setting


class EmulatedActuator:
    """See `Actuator`."""

    name: ClassVar[str] = "emulated"

    def __init__(self) -> None:
        self._mhz: float | None = None

    @property
    def numbers(self) -> Numbers:
        return {}

    def read(self) -> Setting | Answer:
        return {"mhz": self._mhz}

    def set(self, mhz: float) -> Answer:
        self._mhz = mhz
        return Answer("applied", self._mhz)

    def restore(self, setting: Setting) -> Answer:
        self._mhz = setting.get("mhz")
        return Answer("applied", self._mhz)
