"""The learning rate of a step: warm-up, then a schedule, as a factor of `optimizer.lr`.

Pure functions of the step, which counts from 0. With 10 warm-up steps of 100, cosine, down to a tenth:

    step         0    4    9     10    55     99
    factor     0.1  0.5  1.0    1.0  0.55   0.10
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from elaswave_fx.config.keys import ScheduleConfig
from elaswave_fx.config.targets import import_target, instantiate
from elaswave_fx.config.validation import nearest
from elaswave_fx.data.global_draws import seeded
from elaswave_fx.errors import ConfigError
from elaswave_fx.optim.pure import check_schedule

Schedule = Callable[[int], float]


def constant(progress: float) -> float:
    """1 throughout; `progress` runs from 0 (end of warm-up) to 1 (last step)."""
    return 1.0


def linear(progress: float) -> float:
    """The factor falls from 1 to 0 in a straight line."""
    return 1.0 - progress


def cosine(progress: float) -> float:
    """The factor falls from 1 to 0 along half a cosine (Loshchilov and Hutter 2017, without restarts)."""
    return 0.5 * (1.0 + math.cos(math.pi * progress))


SHAPES: Mapping[str, Callable[[float], float]] = {"constant": constant, "linear": linear, "cosine": cosine}


@dataclass(frozen=True)
class WarmUpThen:
    """Step -> factor: a straight line to 1 over `warmup_steps`, then `shape` from 1 down to `min_ratio` at the last."""

    shape: Callable[[float], float]
    warmup_steps: int
    total_steps: int
    min_ratio: float

    def __call__(self, step: int) -> float:
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        after = max(1, self.total_steps - 1 - self.warmup_steps)
        progress = min(1.0, (step - self.warmup_steps) / after)
        return self.min_ratio + (1.0 - self.min_ratio) * self.shape(progress)


@dataclass(frozen=True)
class UserSchedule:
    """Step -> factor by a function of the user's; raises `ConfigError` where it gives no factor."""

    function: Callable[[int], object]
    target: str

    def __call__(self, step: int) -> float:
        try:
            factor = self.function(step)
        except (ValueError, ArithmeticError, LookupError, AttributeError, RuntimeError) as error:
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            raise ConfigError(f"schedule._target_={self.target}: fails at step {step}: {reason}") from error
        if isinstance(factor, bool) or not isinstance(factor, (int, float)) or not math.isfinite(factor) or factor < 0:
            raise ConfigError(
                f"schedule._target_={self.target}: gives {factor!r} at step {step}, not a Python number of at least 0"
            )
        return float(factor)


def make_schedule(config: ScheduleConfig, total_steps: int) -> Schedule:
    """The factor of `optimizer.lr` as a function of the step; raises `ConfigError`."""
    if config.name == "target":
        return _user_schedule(config, total_steps)
    if config.name not in SHAPES:
        best = nearest(config.name, SHAPES)
        raise ConfigError(f"schedule={config.name}: is unknown; nearest valid: {best or ', '.join(SHAPES)}")
    return WarmUpThen(SHAPES[config.name], config.warmup_steps, total_steps, config.min_lr_ratio)


def _user_schedule(config: ScheduleConfig, total_steps: int) -> UserSchedule:
    import_target("schedule", config.spec)
    with seeded(0):  # every rank makes one
        function = instantiate("schedule", config.spec, offered={"total_steps": total_steps})
    if not callable(function):
        raise ConfigError(
            f"schedule._target_={config.target}: gives a {type(function).__name__}, not a function of the step"
        )
    schedule = UserSchedule(function, str(config.target))
    try:
        schedule(0)
    except TypeError as error:
        raise ConfigError(f"schedule._target_={config.target}: is no function of the step: {error}") from error
    check_schedule(schedule, function, f"schedule._target_={config.target}", total_steps)
    return schedule
