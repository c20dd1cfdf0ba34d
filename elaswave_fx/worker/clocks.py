"""The clock of one worker: set by the plan of each epoch, and restored at the end.

clock = rank_clock(config, run_dir, rank)     None without operating points set_clock(clock, plan, rank, context)
event `clock`, if the clock changed clock.restore()                               before the process ends
"""

from __future__ import annotations

import os
from pathlib import Path

from elaswave_fx.config.keys import Config
from elaswave_fx.devices.clocks import Targets, make_actuator
from elaswave_fx.devices.clocks.rank_clock import RankClock
from elaswave_fx.launch.job import WorkerContext
from elaswave_fx.observe.rank_events import ClockSet
from elaswave_fx.plan.plan import Plan
from elaswave_fx.plan.work.topology import Rank


def rank_clock(config: Config, run_dir: Path, rank: int) -> RankClock | None:
    """The clock of a rank's device, None if no clocks are set. With cpufreq this process is bound to the rank's
    processors."""
    power = config.power
    if not power.points:
        return None
    local = rank % config.parallel.ranks_per_host
    numbers: dict[str, int | list[int]] = {}
    if power.actuator == "cpufreq":
        os.sched_setaffinity(0, power.processors[rank])
        numbers = {"processors": list(power.processors[rank])}
    elif power.actuator == "nvml":
        numbers = {"index": local}
    elif power.actuator == "ascend":
        numbers = {"card": local}
    return RankClock(make_actuator(power.actuator, numbers, Targets(power.sysfs, power.hook)), run_dir, rank)


def set_clock(clock: RankClock, plan: Plan, rank: Rank, context: WorkerContext) -> None:
    """Set the clock of the plan. What a device cannot or a user may not do is only reported."""
    point = plan.clocks.get(rank)
    wanted = point.mhz if point is not None else None
    answer = clock.follow(wanted)
    if answer is not None:
        event = ClockSet(wanted_mhz=wanted, outcome=answer.outcome, mhz=answer.mhz, why=answer.why)
        context.report_event(event, plan.epoch)
