"""What is asked of clocks, checked against the job and the machine.

check_power(config)   ->  ConfigError("power.cap_w=100: 4 ranks draw at least 480 W; nearest valid: 480")
"""

from __future__ import annotations

import itertools
import os
from typing import TYPE_CHECKING

from elaswave_fx.config.validation import show
from elaswave_fx.errors import ConfigError

if TYPE_CHECKING:
    from elaswave_fx.config.keys import Config


def check_power(config: Config) -> None:
    """Refuse operating points that are none, a cap that none of them keeps, and actuators that are another device's.

    Raises `ConfigError`.
    """
    power = config.power
    if not power.points:
        if power.cap_w is not None:
            raise ConfigError(f"power.cap_w={power.cap_w:g}: needs power.points, which say what a rank draws")
        return
    _check_points(config)
    ranks = config.parallel.ranks
    least_w = ranks * min(point.watts for point in power.points)
    if power.cap_w is not None and power.cap_w < least_w:
        raise ConfigError(
            f"power.cap_w={power.cap_w:g}: {ranks} ranks draw at least {least_w:g} W; nearest valid: {least_w:g}"
        )
    if power.actuator == "emulated" and config.device != "emulated":
        raise ConfigError(
            f"power.actuator=emulated: device={config.device} computes at the clock that it has; nearest valid: "
            "power.actuator=cpufreq"
        )
    if power.actuator == "cpufreq":
        _check_processors(config)
    if power.hook is not None and power.actuator != "ascend":
        raise ConfigError(f"power.hook={power.hook}: is for power.actuator=ascend; nearest valid: power.hook=null")
    if power.hook is not None and "." not in power.hook.strip("."):
        raise ConfigError(f"power.hook={power.hook}: must be an import path such as package.set_clock")


def _check_points(config: Config) -> None:
    points = config.power.points
    for number, (low, high) in enumerate(itertools.pairwise(points), start=1):
        for name in ("mhz", "speed"):
            if getattr(high, name) <= getattr(low, name):
                raise ConfigError(
                    f"power.points[{number}].{name}={getattr(high, name):g}: must be above {getattr(low, name):g}, "
                    "which the point before has; clocks and speeds rise"
                )
    if [point.speed for point in points].count(1.0) != 1:
        speeds = show([point.speed for point in points])
        raise ConfigError(
            f"power.points: one has speed 1, that at which units take what they take; speeds are {speeds}"
        )


def _check_processors(config: Config) -> None:
    """Each rank has processors of its own, of those that the job may use."""
    given, ranks = config.power.processors, config.parallel.ranks
    if len(given) != ranks:
        raise ConfigError(
            f"power.processors={show(given)}: has {len(given)} lists for {ranks} ranks; with power.actuator=cpufreq "
            "each rank has one"
        )
    ours = os.sched_getaffinity(0)
    owners: dict[int, int] = {}
    for rank, processors in enumerate(given):
        key = f"power.processors[{rank}]={show(processors)}"
        if not processors:
            raise ConfigError(f"{key}: must name at least one processor")
        for number in processors:
            if number not in ours:
                raise ConfigError(f"{key}: this job may use processors {show(sorted(ours))}")
            if number in owners:
                raise ConfigError(f"{key}: rank {owners[number]} has processor {number}; a clock is one rank's")
            owners[number] = rank
