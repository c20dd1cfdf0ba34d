"""The clock of an Ascend device: read through DCMI, and set only by a vendor's hook that the user names.

No public call sets the clock of an AI core. Source for reading it: DCMI API reference, `dcmi_get_device_frequency`. Not
run on hardware.
"""

from __future__ import annotations

import ctypes
import importlib
from collections.abc import Callable
from typing import ClassVar

from elaswave_fx.devices.clocks.actuator import Answer, Numbers, Setting

_AI_CORE_NOW = 7
"""DCMI_FREQ_AICORE_CURRENT."""

_NO_HOOK = "no public call sets the clock of an Ascend device; power.hook names one of the vendor's"


class AscendActuator:
    """See `Actuator`. `hook`: import path of `set_clock(card, chip, mhz)`; mhz None resets. `library`: that of DCMI."""

    name: ClassVar[str] = "ascend"

    def __init__(self, card: int, chip: int = 0, hook: str | None = None, library: str = "libdcmi.so") -> None:
        self._card, self._chip, self._hook, self._library = card, chip, hook, library

    @property
    def numbers(self) -> Numbers:
        return {"card": self._card, "chip": self._chip}

    def read(self) -> Setting | Answer:
        return {} if self._hook is not None else Answer("unsupported", self._mhz(), _NO_HOOK)

    def set(self, mhz: float) -> Answer:
        return self._call(mhz)

    def restore(self, setting: Setting) -> Answer:
        return self._call(None)

    def _call(self, mhz: float | None) -> Answer:
        if self._hook is None:
            return Answer("unsupported", self._mhz(), _NO_HOOK)
        module, _, name = self._hook.rpartition(".")
        try:
            set_clock: Callable[[int, int, float | None], object] = getattr(importlib.import_module(module), name)
            set_clock(self._card, self._chip, mhz)
        except (ImportError, AttributeError, ValueError) as error:
            return Answer("unsupported", None, f"power.hook={self._hook}: {error}")
        except PermissionError as error:
            return Answer("denied", self._mhz(), f"power.hook={self._hook}: {error}")
        except OSError as error:
            return Answer("unsupported", self._mhz(), f"power.hook={self._hook}: {error}")
        return Answer("applied", self._mhz())

    def _mhz(self) -> float | None:
        """The clock of the AI cores, None if DCMI is missing or returns an error."""
        try:
            dcmi = ctypes.CDLL(self._library)
        except OSError:
            return None
        found = ctypes.c_uint(0)
        if dcmi.dcmi_init() != 0:
            return None
        failed = dcmi.dcmi_get_device_frequency(self._card, self._chip, _AI_CORE_NOW, ctypes.byref(found))
        return None if failed else float(found.value)
