"""Schedules: end points, agreement with torch's, and functions of the user's."""

import math
import random
import time

import pytest
import torch

from elaswave_fx.config.keys import ScheduleConfig
from elaswave_fx.errors import ConfigError
from elaswave_fx.optim.learning_rate import make_schedule


def halve_every(step, period=1):
    return 0.5 ** (step // period)


class Triangle:
    def __init__(self, total_steps):
        self.total_steps = total_steps

    def __call__(self, step):
        return 1.0 - step / self.total_steps


def of_step_and_loss(step, loss):
    return 1.0 / loss


def not_a_number(step):
    return math.nan


def schedule(name, steps=100, **options):
    return make_schedule(ScheduleConfig(name=name, **options), steps)


def users(name, steps=100, **options):
    return schedule("target", steps, target=f"{__name__}.{name}", options=options)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("constant", {0: 0.1, 4: 0.5, 9: 1.0, 10: 1.0, 54: 1.0, 99: 1.0}),
        ("linear", {0: 0.1, 4: 0.5, 9: 1.0, 10: 1.0, 99: 0.1}),
        ("cosine", {0: 0.1, 4: 0.5, 9: 1.0, 10: 1.0, 99: 0.1}),
    ],
)
def test_warm_up_and_end(name, expected):
    factor = schedule(name, warmup_steps=10, min_lr_ratio=0.1)
    assert {step: factor(step) for step in expected} == pytest.approx(expected)
    assert factor(1000) == factor(99)


@pytest.mark.parametrize("name", ["linear", "cosine"])
def test_equals_torch_after_the_warm_up(name):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    theirs = {
        "linear": lambda: torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.2, total_iters=49),
        "cosine": lambda: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=49, eta_min=0.2),
    }[name]()
    ours = schedule(name, steps=50, min_lr_ratio=0.2)
    for step in range(50):
        assert ours(step) == pytest.approx(theirs.get_last_lr()[0], rel=1e-6)
        optimizer.step()
        theirs.step()


@pytest.mark.parametrize("steps", [1, 2, 10])
def test_short_runs_stay_in_range(steps):
    for name in ("constant", "linear", "cosine"):
        factor = schedule(name, steps=steps, warmup_steps=10)
        assert all(0.0 <= factor(step) <= 1.0 for step in range(steps))
        assert factor(0) == pytest.approx(0.1)


def test_a_users_schedule_is_a_function_or_a_class():
    assert [users("halve_every", period=2)(step) for step in (0, 1, 2, 5)] == [1.0, 1.0, 0.5, 0.25]
    assert users("Triangle", steps=4)(1) == 0.75
    assert users("Triangle", steps=4, total_steps=8)(2) == 0.75


def test_refusals():
    with pytest.raises(ConfigError, match="schedule=cosin: is unknown; nearest valid: cosine"):
        schedule("cosin")
    with pytest.raises(ConfigError, match="not_a_number: gives nan at step 0, not a Python number of at least 0"):
        users("not_a_number")
    with pytest.raises(ConfigError, match=r"schedule._target_=.*absent: cannot be built"):
        users("absent")
    with pytest.raises(ConfigError, match="is no function of the step"):
        users("of_step_and_loss")
    with pytest.raises(ConfigError, match="gives a OrderedDict, not a function"):
        schedule("target", target="collections.OrderedDict")


class CountsCalls:
    def __init__(self):
        self.calls = 0

    def __call__(self, step):
        self.calls += 1
        return 1.0 / self.calls


class WrapsTorch:
    """Moves a scheduler of torch on whenever it is asked."""

    def __init__(self):
        self.optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, 0.5)

    def __call__(self, step):
        factor = self.scheduler.get_last_lr()[0]
        self.optimizer.step()
        self.scheduler.step()
        return factor


class Milestones:
    """Falls when it is asked for one of two steps, whenever that is."""

    def __init__(self):
        self.factor = 1.0

    def __call__(self, step):
        if step in (7, 61):
            self.factor *= 0.1
        return self.factor


class Remembers:
    """Keeps what it has computed, and gives the same again."""

    def __init__(self):
        self.known = {}

    def __call__(self, step):
        return self.known.setdefault(step, 0.5**step)


def by_clock(step):
    return 1.0 / time.time()


def by_draw(step):
    return random.random()


def by_seeded_draw(step):
    return random.Random(step).random()


def ends(step):
    return [1.0, 0.5, 0.25][step]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("CountsCalls", "the factor of step 0 is .* when it is asked for again, but any rank may do any step"),
        ("WrapsTorch", "the factor of step 0 is 1.0, and .* when it is asked for again"),
        ("Milestones", "the factor of step 0 is 1.0, and .* when it is asked for again"),
        ("by_clock", "the factor of step 0 is .* when it is asked for again"),
        ("by_draw", "the factor is drawn from Python's generator"),
        ("ends", "fails at step 3: IndexError: list index out of range"),
    ],
)
def test_a_users_schedule_follows_from_the_step_alone(name, message):
    with pytest.raises(ConfigError, match=f"schedule._target_=.*{name}: {message}"):
        users(name)


@pytest.mark.parametrize("name", ["Remembers", "by_seeded_draw"])
def test_a_users_schedule_may_remember_and_seed_itself(name):
    assert users(name)(3) == users(name)(3)
