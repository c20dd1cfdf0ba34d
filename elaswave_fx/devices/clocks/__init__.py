"""Clocks of devices: how a rank's clock is read, set and restored, and the file from which any process can restore it.

    actuator = make_actuator("cpufreq", {"processors": [3]}, Targets(sysfs="/sys/devices/system/cpu"))
    clock = RankClock(actuator, run_dir, rank)
    clock.follow(1500.0)                     ->  Answer("applied", 1500.0); the file has the setting from before
    clock.restore()                          ->  as before; the file is gone
    restore_left_behind(run_dir, targets)    the same for ranks that were killed

`cpufreq`, `nvml` and `ascend` were tested against a folder and stand-ins of the vendors' libraries, not on hardware.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from elaswave_fx.devices.clocks.actuator import Actuator, Answer, Numbers, Targets
from elaswave_fx.devices.clocks.ascend import AscendActuator
from elaswave_fx.devices.clocks.cpufreq import CpufreqActuator
from elaswave_fx.devices.clocks.emulated import EmulatedActuator
from elaswave_fx.devices.clocks.nvml import NvmlActuator

__all__ = ["Actuator", "Answer", "Numbers", "Targets", "make_actuator"]

_ACTUATORS: Mapping[str, Callable[..., Actuator]] = {
    EmulatedActuator.name: lambda targets: EmulatedActuator(),
    CpufreqActuator.name: lambda targets, processors: CpufreqActuator(processors, targets.sysfs),
    NvmlActuator.name: lambda targets, index: NvmlActuator(index),
    AscendActuator.name: lambda targets, card, chip=0: AscendActuator(card, chip, targets.hook),
}


def make_actuator(name: str, numbers: Numbers, targets: Targets) -> Actuator:
    """The actuator `name` of the device that its `numbers` identify. Raises KeyError or TypeError if there is none."""
    return _ACTUATORS[name](targets, **numbers)
