"""The clock of an NVIDIA device by NVML, through the optional package nvidia-ml-py.

Source: NVML API reference, `nvmlDeviceSetGpuLockedClocks`, `nvmlDeviceResetGpuLockedClocks` (both need root; since
Volta). A lock cannot be read, so restoring means unlocking: another user's earlier lock is lost. Not run on hardware.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, ClassVar

from elaswave_fx.devices.clocks.actuator import Answer, Numbers, Setting


class NvmlActuator:
    """See `Actuator`. `index`: NVML's device index; `library`: the module, for users with another one."""

    name: ClassVar[str] = "nvml"

    def __init__(self, index: int, library: str = "pynvml") -> None:
        self._index, self._library = index, library

    @property
    def numbers(self) -> Numbers:
        return {"index": self._index}

    def read(self) -> Setting | Answer:
        found = self._call(lambda nvml, device: None)
        return {"locked": False} if found.outcome == "applied" else found

    def set(self, mhz: float) -> Answer:
        return self._call(lambda nvml, device: nvml.nvmlDeviceSetGpuLockedClocks(device, round(mhz), round(mhz)))

    def restore(self, setting: Setting) -> Answer:
        return self._call(lambda nvml, device: nvml.nvmlDeviceResetGpuLockedClocks(device))

    def _call(self, call: Callable[[Any, Any], object]) -> Answer:
        """Run `call` with the library and the device, then read the clock."""
        try:
            nvml = importlib.import_module(self._library)
        except ImportError:
            return Answer("unsupported", None, f"{self._library} is not installed; pip install nvidia-ml-py brings it")
        try:
            nvml.nvmlInit()
            try:
                device = nvml.nvmlDeviceGetHandleByIndex(self._index)
                call(nvml, device)
                return Answer("applied", float(nvml.nvmlDeviceGetClockInfo(device, nvml.NVML_CLOCK_SM)))
            finally:
                nvml.nvmlShutdown()
        except nvml.NVMLError as error:
            denied = error.value == nvml.NVML_ERROR_NO_PERMISSION
            return Answer("denied" if denied else "unsupported", None, f"device {self._index}: {error}")
