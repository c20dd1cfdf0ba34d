"""Clocks of devices: how a rank's clock is read, set, and put back, and the file by which anybody can put it back.

    actuator = make_actuator("cpufreq", {"root": "/sys/devices/system/cpu", "processors": [3]})
    clock = RankClock(actuator, run_dir, rank)
    clock.follow(1500.0)            ->  Answer("applied", 1500.0); the file has the setting from before
    clock.restore()                 ->  as before; the file is gone
    restore_left_behind(run_dir)    the same for ranks that were killed

None of the devices was at hand: what `cpufreq`, `nvml` and `ascend` do was tested against a folder and stand-ins of the
vendors' libraries, and not run on hardware.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from elaswave_fx.devices.clocks.actuator import Actuator, Answer
from elaswave_fx.devices.clocks.ascend import AscendActuator
from elaswave_fx.devices.clocks.cpufreq import CpufreqActuator
from elaswave_fx.devices.clocks.emulated import EmulatedActuator
from elaswave_fx.devices.clocks.nvml import NvmlActuator

__all__ = ["Actuator", "Answer", "make_actuator"]

_ACTUATORS: Mapping[str, Callable[..., Actuator]] = {
    each.name: each for each in (EmulatedActuator, CpufreqActuator, NvmlActuator, AscendActuator)
}


def make_actuator(name: str, options: Mapping[str, Any]) -> Actuator:
    """The actuator of that name, with what its `options` property says; KeyError or TypeError for what is none."""
    return _ACTUATORS[name](**options)
