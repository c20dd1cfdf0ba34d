"""Clocks of a device, and their effect on time and power.

Power((OperatingPoint(1200, 0.8, 180), OperatingPoint(1500, 1.0, 300)), clocked=0.5).slowdown(points[0])  ->  1.125
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from elaswave_fx.errors import PlanError


@dataclass(frozen=True)
class OperatingPoint:
    """A clock: `speed` is relative to the clock of the unit costs, `watts` are drawn while computing."""

    mhz: float
    speed: float
    watts: float


@dataclass(frozen=True)
class Power:
    """The operating points of every rank's device, by rising clock, and the power cap of all ranks together.

    The nominal point has speed 1. `idle_w` are drawn while a rank waits. `clocked` is the part of a unit's time that
    follows the clock; the rest, such as memory traffic, is constant. Zeus (You et al., NSDI 2023) and Perseus (Chung et
    al., arXiv 2312.06902) measure how time and power follow the clock.
    """

    points: tuple[OperatingPoint, ...]
    cap_w: float | None = None
    idle_w: float = 0.0
    clocked: float = 1.0

    def __post_init__(self) -> None:
        for low, high in itertools.pairwise(self.points):
            if not (low.mhz < high.mhz and low.speed < high.speed):
                raise PlanError(f"power: {low} comes before {high}; clocks and speeds rise")
        if not all(point.speed > 0 and point.watts > 0 for point in self.points):
            raise PlanError("power: a speed and the watts of a point are above 0")
        if [point.speed for point in self.points].count(1.0) != 1:
            raise PlanError("power: one point has speed 1, that at which unit costs are given")
        if not (0 <= self.clocked <= 1 and self.idle_w >= 0):
            raise PlanError(f"power: clocked {self.clocked} is a part of 1, and idle_w {self.idle_w} at least 0")

    @property
    def nominal(self) -> OperatingPoint:
        """The point of the unit costs."""
        return next(point for point in self.points if point.speed == 1.0)

    @property
    def least_w(self) -> float:
        """Watts of the most frugal point."""
        return min(point.watts for point in self.points)

    def slowdown(self, point: OperatingPoint) -> float:
        """Factor of every unit's time at a point."""
        return self.clocked / point.speed + (1.0 - self.clocked)

    def energy_j(self, busy_s: float, step_s: float, point: OperatingPoint) -> float:
        """Joules of a rank that computes at that point for `busy_s` of a step and waits for the rest."""
        return busy_s * point.watts + max(0.0, step_s - busy_s) * self.idle_w
