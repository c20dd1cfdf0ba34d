"""python_state: what forward takes from Python and changes is found, wherever it is held and however late it counts."""

from __future__ import annotations

import array
import collections
import contextvars
import ctypes
import datetime
import functools
import importlib
import io
import itertools
import multiprocessing
import operator
import os
import queue
import random
import secrets
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import date
from decimal import Decimal
from pathlib import Path
from time import time_ns
from types import SimpleNamespace
from typing import Any, ClassVar, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from elaswave_fx.errors import CaptureError
from elaswave_fx.program.capture import capture
from elaswave_fx.program.forward_code import forward_code
from elaswave_fx.program.held_state import python_state_kept
from elaswave_fx.program.later import later
from elaswave_fx.program.model_fingerprint import fingerprint
from elaswave_fx.program.python_state import refuse_python_state
from tests.passes.models import WIDTH, Classifier, vectors

CALLS = 0


class Held(Classifier):
    """Holds something; `scale` says by what features are multiplied."""

    held: Any = None

    def __init__(self, held: Any = None) -> None:
        super().__init__(layers=1)
        if held is not None:
            self.held = held

    def scale(self) -> Any:
        return 1.0

    def features(self, x: Tensor) -> Tensor:
        return super().features(x) * self.scale()


class Annealed(Held):
    def scale(self) -> Any:
        self.held += 1
        return 1 + min(1.0, self.held / 4)


class LateThreshold(Held):
    def scale(self) -> Any:
        self.held += 1
        return 1.0 if self.held < 600_000 else 0.5


class EveryHundredth(Held):
    def scale(self) -> Any:
        self.held += 1
        return 0.5 if self.held % 100 == 37 else 1.0


class Phases(Held):
    """The counter chooses by arithmetic alone."""

    length = 100

    def scale(self) -> Any:
        self.held += 1
        return (1.0, 0.5, 1.0)[self.held // self.length % 3]


class LongPhases(Phases):
    length = 2500


class Epochs(Held):
    """The counter is advanced at the start of an epoch."""

    def train(self, mode: bool = True) -> Epochs:
        self.held = (self.held or 0) + int(mode)
        return super().train(mode)

    def scale(self) -> Any:
        return min(1.0, self.held / 100)


class EpochsUnread(Epochs):
    def scale(self) -> Any:
        return 1.0


class Milestones(Held):
    """The counter is looked up in a table."""

    milestones: ClassVar = {200: 0.5, 300: 0.25}

    def scale(self) -> Any:
        self.held += 1
        return self.milestones.get(self.held, 1.0)


class InSet(Held):
    def scale(self) -> Any:
        found = self.held in {200, 300}
        self.held += 1
        return 0.5 if found else 1.0


class Window(Held):
    def scale(self) -> Any:
        self.held = (self.held + 1) % 500
        return 0.5 if 200 < self.held < 300 else 1.0


class MadeAnew(Held):
    """What holds the counter is another object after each call. `make`: of a number; `number`: of what was made."""

    def __init__(self, make: Callable[[int], Any], number: Callable[[Any], int] = operator.itemgetter(0)) -> None:
        super().__init__()
        self.make, self.number, self.pair = make, number, make(0)

    def scale(self) -> Any:
        self.pair = self.make(self.number(self.pair) + 1)
        return 1.0 if self.number(self.pair) < 200 else 0.5


class Advanced(Held):
    """A counter in something that is changed in place, by `advance`; `number` reads it."""

    def __init__(self, held: Any, advance: Callable[[Any], Any], number: Callable[[Any], int]) -> None:
        super().__init__(held)
        self.advance, self.number = advance, number

    def scale(self) -> Any:
        self.advance(self.held)
        return 1.0 if self.number(self.held) < 200 else 0.5


class OnParameter(Held):
    def __init__(self) -> None:
        super().__init__()
        self.head.weight.calls = 0

    def scale(self) -> Any:
        self.head.weight.calls += 1
        return 1.0 if self.head.weight.calls < 200 else 0.5


class Rebound(Held):
    def scale(self) -> Any:
        self.held = self.held + 1
        held = self.held if isinstance(self.held, (Tensor, np.ndarray)) else float(self.held)
        return torch.where(torch.as_tensor(held) > 200, 2.0, 1.0)


def thread_local() -> threading.local:
    made = threading.local()
    made.calls = 0
    return made


def one_more(held: Any) -> None:
    held[0] += 1


def one_more_here(held: Any) -> None:
    held.calls += 1


class Spot(NamedTuple):
    name: str
    calls: int


@dataclass(frozen=True)
class Progress:
    calls: int


class Longer(Held):
    def scale(self) -> Any:
        self.held = self.held + self.held[:1]
        return 1.0 if len(self.held) < 200 else 0.5


class Fraction(Held):
    """Float that loses its class on the way."""

    def scale(self) -> Any:
        self.held += 1
        return 0.5 if float(self.held) / 1e4 > 0.5 else 1.0


class LatePhase(Held):
    """The counter moves a phase, the phase counts in the next call."""

    phase = 0

    def scale(self) -> Any:
        scale = 1.0 + self.phase
        self.held += 1
        if self.held == 5000:
            self.phase = 1
        return scale


class EverySecond(Held):
    """The number moves in every second call only."""

    turn = False

    def scale(self) -> Any:
        self.turn = not self.turn
        self.held += self.turn
        return 1.0 if self.held < 60 else 0.5


class InDictionary(Held):
    def scale(self) -> Any:
        self.held["calls"] += 1
        return 1.0 if self.held["calls"] < 60 else 0.5


class InObject(Held):
    def scale(self) -> Any:
        self.held.schedule.step += 1
        return 1.0 if self.held.schedule.step < 60 else 0.5


class GrowingList(Held):
    def scale(self) -> Any:
        self.held.append(0.5)
        return 1.0 if len(self.held) < 60 else 0.5


class GrowingSet(Held):
    def scale(self) -> Any:
        self.held.add(len(self.held))
        return 1.0 if len(self.held) < 60 else 0.5


class FirstCall(Held):
    def scale(self) -> Any:
        first, self.held = self.held, False
        return 2.0 if first else 1.0


class Alternating(Held):
    def scale(self) -> Any:
        self.held = not self.held
        return 2.0 if self.held else 1.0


class Named(Held):
    def scale(self) -> Any:
        self.held = {"cold": "warm", "warm": "hot", "hot": "hot"}[self.held]
        return 2.0 if self.held == "hot" else 1.0


class OfTheClass(Held):
    held = 0

    def scale(self) -> Any:
        type(self).held += 1
        return 1.0 if type(self).held < 60 else 0.5


class Global(Held):
    def scale(self) -> Any:
        global CALLS
        CALLS += 1
        return 1.0 if CALLS < 60 else 0.5


def counter() -> Callable[[], int]:
    calls = 0

    def count() -> int:
        nonlocal calls
        calls += 1
        return calls

    return count


class AroundAFunction(Held):
    def scale(self) -> Any:
        return 1.0 if self.held() < 60 else 0.5


class Counting(Held):
    def scale(self) -> Any:
        return 1.0 if next(self.held) < 60 else 0.5


def numbers() -> Iterator[float]:
    yield from (1.0 / n for n in range(1, 10**6))


class InTensor(Held):
    """A tensor that is no buffer."""

    def scale(self) -> Any:
        self.held += 1
        return self.held.clamp(max=4.0)


class Seldom(Held):
    def scale(self) -> Any:
        return 0.5 if random.random() < 0.001 else 1.0


class SeldomByNumPy(Held):
    def scale(self) -> Any:
        return 0.5 if np.random.uniform() > 0.999 else 1.0


class MaskByNumPy(Held):
    def scale(self) -> Any:
        return torch.from_numpy((np.random.rand(WIDTH) > 0.2).astype(np.float32))


class OwnGenerator(Held):
    def scale(self) -> Any:
        return 0.5 if self.held.random() < 0.001 else 1.0


class Entropy(Held):
    def scale(self) -> Any:
        return float(np.random.default_rng().random())


class Clock(Held):
    def scale(self) -> Any:
        return 1.0 if time.time() < 1.9e9 else 0.5


class ClockAlone(Held):
    """A time that reaches the operators of torch's layers alone."""

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return super().forward(torch.from_numpy(x.numpy() * np.float32(time.time() % 7)), y)


class ImportedClock(Held):
    def scale(self) -> Any:
        return 1.0 if time_ns() < 1.9e18 else 0.5


class Calendar(Held):
    def scale(self) -> Any:
        return 1.0 if datetime.datetime.now().year < 2040 else 0.5


class ImportedDate(Held):
    def scale(self) -> Any:
        return 1.0 if date.today().year < 2040 else 0.5


class SystemsBytes(Held):
    def scale(self) -> Any:
        return 1.0 if os.urandom(1)[0] < 255 else 0.5


class SystemsDraw(Held):
    def scale(self) -> Any:
        return 1.0 if random.SystemRandom().random() < 0.999 else 0.5


class SystemsChoice(Held):
    def scale(self) -> Any:
        return 0.5 + secrets.randbelow(100) / 100


class Warming(torch.autograd.Function):
    """Gradients that grow with the number of backward passes."""

    calls = 0

    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(_: Any, grad: Tensor) -> Tensor:
        Warming.calls += 1
        return grad * (0.5 if Warming.calls < 60 else 1.0)


class SeldomPassed(Warming):
    @staticmethod
    def backward(_: Any, grad: Tensor) -> Tensor:
        return grad * (0.0 if random.random() < 0.001 else 1.0)


class CountedAlone(Warming):
    @staticmethod
    def backward(_: Any, grad: Tensor) -> Tensor:
        Warming.calls += 1
        return grad


class Backward(Held):
    def features(self, x: Tensor) -> Tensor:
        return self.held.apply(super().features(x))


class ByGradient(Held):
    """Weighs the loss by the gradient of the step before."""

    def scale(self) -> float:
        gradient = self.head.weight.grad
        return 1.0 if gradient is None else 1 / (1 + float(gradient.norm()))


class ClearsGradients(Held):
    def scale(self) -> float:
        self.head.weight.grad = None
        return 1.0


class Manager:
    """A singleton that is made when it is first asked for."""

    made: ClassVar[Any] = None
    settings: ClassVar[dict[str, int]] = {"calls": 0}

    def __init__(self) -> None:
        self.calls = 0
        self.losses: list[float] = []

    @classmethod
    def get(cls) -> Manager:
        cls.made = cls.made or cls()
        return cls.made


class KeepsInstances(type):
    instances: ClassVar[dict[type, Any]] = {}

    def __call__(cls, *args: Any) -> Any:
        if cls not in cls.instances:
            cls.instances[cls] = super().__call__(*args)
        return cls.instances[cls]


class Kept(metaclass=KeepsInstances):
    calls = 0


class ByManager(Held):
    """After many calls alike."""

    def scale(self) -> Any:
        Manager.get().calls += 1
        return 1.0 if Manager.get().calls < 45 else 0.5


class BySettings(Held):
    def scale(self) -> Any:
        ITSELF.Manager.settings["calls"] += 1
        return 1.0 if ITSELF.Manager.settings["calls"] < 45 else 0.5


class ByMetaclass(Held):
    def scale(self) -> Any:
        Kept().calls += 1
        return 1.0 if Kept().calls < 45 else 0.5


class LazyDictionary(Held):
    def scale(self) -> Any:
        if self.held is None:
            self.held = {"calls": 0}
        self.held["calls"] += 1
        return 1.0 if self.held["calls"] < 45 else 0.5


class LazyList(Held):
    """In an object that the first call makes."""

    def scale(self) -> Any:
        self.held = self.held or Manager()
        self.held.losses.append(0.0)
        return 1.0 if len(self.held.losses) < 45 else 0.5


class HookedLate(Held):
    """Changes gradients by a hook, after 30 calls."""

    def hook(self, grad: Tensor) -> Tensor | None:
        return 0.1 * grad

    def features(self, x: Tensor) -> Tensor:
        h = super().features(x)
        self.held += 1
        if self.held >= 30:
            h.register_hook(self.hook)
        return h


class LookedAtLate(HookedLate):
    def hook(self, grad: Tensor) -> None:
        del grad


class Unfreezing(Held):
    """Trains its first layer after 30 calls."""

    def scale(self) -> Any:
        self.held += 1
        if self.held == 30:
            self.get_submodule("layers.0").requires_grad_(True)
        return 1.0


def unfreezing() -> nn.Module:
    model = Unfreezing(0)
    model.get_submodule("layers.0").requires_grad_(False)
    return model


def late(count: Callable[[], int]) -> Callable[[], nn.Module]:
    """A model that multiplies by something else after 60 calls, counted where nothing looks: a capture makes fewer."""

    class Late(Held):
        def scale(self) -> Any:
            return 1.0 if count() < 60 else 0.5

    return Late


def in_file() -> Callable[[], int]:
    file = io.BytesIO()
    return lambda: file.write(b"x") + file.tell()


def in_environment() -> int:
    os.environ["CALLS_OF_LATE"] = str(int(os.environ.get("CALLS_OF_LATE", "0")) + 1)
    return int(os.environ["CALLS_OF_LATE"])


IN_CONTEXT = contextvars.ContextVar("calls", default=0)


def in_context() -> int:
    IN_CONTEXT.set(IN_CONTEXT.get() + 1)
    return IN_CONTEXT.get()


class Tracker:
    """Counts its calls; as a class attribute with `__get__`, its reads."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self) -> int:
        self.calls += 1
        return self.calls


class Read(Tracker):
    def __get__(self, owner: object, kind: type) -> int:
        return self()


@functools.cache
def tracker() -> Tracker:
    return Tracker()


@functools.lru_cache(maxsize=4)
def table(name: str) -> dict[str, int]:
    return {name: 0}


def in_table() -> int:
    table("calls")["calls"] += 1
    return table("calls")["calls"]


NEXT = itertools.count(1).__next__


def in_globals() -> int:
    globals()["CALLS_OF_LATE"] = globals().get("CALLS_OF_LATE", 0) + 1
    return globals()["CALLS_OF_LATE"]


class OfAttribute(Held):
    """By an object of the class."""

    count = Tracker()

    def scale(self) -> Any:
        return 1.0 if self.count() < 600_000 else 0.5


class OfNamespace(Held):
    class state:
        calls = 0

    def scale(self) -> Any:
        self.state.calls += 1
        return 1.0 if self.state.calls < 600_000 else 0.5


class Counts(dict[str, int]):
    calls = 0


class InSubclass(Held):
    def scale(self) -> Any:
        self.held.calls += 1
        return 1.0 if self.held.calls < 600_000 else 0.5


class Slotted:
    """An iterator of one's own."""

    __slots__ = ("calls",)

    def __init__(self) -> None:
        self.calls = 0

    def __iter__(self) -> Slotted:
        return self

    def __next__(self) -> int:
        self.calls += 1
        return self.calls


def inner() -> Iterator[int]:
    yield from numbers()


class BySeed(Held):
    def scale(self) -> Any:
        return 1 + torch.initial_seed() % 3


class OfDescriptor(Held):
    count = Read()

    def scale(self) -> Any:
        return 1.0 if self.count < 600_000 else 0.5


def much_later(count: Callable[[], int]) -> Callable[[], nn.Module]:
    """A model that multiplies by something else after more calls than any trial makes."""

    class MuchLater(Held):
        def scale(self) -> Any:
            return 1.0 if count() < 600_000 else 0.5

    return MuchLater


def scheduled() -> torch.optim.lr_scheduler.StepLR:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    return torch.optim.lr_scheduler.StepLR(optimizer, 10_000, 0.1)


class OwnCount(Held):
    def scale(self) -> Any:
        return 1.0 + self.held()


class Scheduled(Held):
    """By torch's schedule of a learning rate."""

    def scale(self) -> Any:
        self.held.optimizer.step()
        self.held.step()
        return self.held.get_last_lr()[0]


def one_more_of_c(held: Any) -> None:
    held.value += 1


class LazyLog(Held):
    """Which nothing is computed from."""

    def scale(self) -> Any:
        self.held = self.held or Manager()
        self.held.losses.append(0.0)
        self.held.calls += 1
        return 1.0


ITSELF = sys.modules[__name__]

REFUSED: list[tuple[Callable[[], nn.Module], str]] = [
    (lambda: ByGradient(0), r"reads gradients of parameters, which it has none of when it runs: ByGradient.scale"),
    (
        lambda: Annealed(0),
        r"held of the model \(Annealed\) in Annealed.scale, line \d+ of test_python_state.py \(self.h",
    ),
    (lambda: HookedLate(0), r"changes held of the model \(HookedLate\)"),
    (unfreezing, r"changes held of the model \(Unfreezing\)"),
    (ByManager, r"changes made.calls of class Manager in Manager.get"),
    (BySettings, r"changes settings\['calls'\] of class Manager in BySettings.scale"),
    (ByMetaclass, r"changes instances\[.*Kept.*\].calls of class KeepsInstances"),
    (LazyDictionary, r"changes held\['calls'\] of the model \(LazyDictionary\)"),
    (lambda: Scheduled(scheduled()), r"changes held.last_epoch of the model \(Scheduled\)"),
    (lambda: Advanced(multiprocessing.Value("i", 0), one_more_of_c, lambda held: held.value), "changes held._obj of"),
    (lambda: Advanced(ctypes.c_int(0), one_more_of_c, lambda held: held.value), "changes held of"),
    (LazyList, r"changes held.losses of the model \(LazyList\)"),
    (lambda: LateThreshold(0), r"changes held of the model \(LateThreshold\)"),
    (lambda: EveryHundredth(0), r"changes held of the model"),
    (lambda: Phases(0), r"changes held of the model"),
    (lambda: LongPhases(0), r"changes held of the model"),
    (lambda: Milestones(0), r"changes held of the model"),
    (lambda: InSet(0), r"changes held of the model"),
    (lambda: Window(0), r"changes held of the model"),
    (lambda: Advanced(np.zeros(1, int), one_more, lambda held: int(held[0])), r"changes held of the model"),
    (
        lambda: MadeAnew(lambda n: (n, "warm" if n < 200 else "hot")),
        r"changes pair of the model \(MadeAnew\) in MadeAnew",
    ),
    (lambda: MadeAnew(lambda n: (("steps", [n]), 0.5), lambda held: held[0][1][0]), r"changes pair of the model"),
    (lambda: MadeAnew(lambda n: Spot("warm", n), lambda held: held.calls), r"changes pair of the model"),
    (lambda: MadeAnew(Progress, lambda held: held.calls), r"changes pair of the model"),
    (lambda: MadeAnew(lambda n: {"calls": n}, lambda held: held["calls"]), r"changes pair of the model"),
    (lambda: MadeAnew(lambda n: SimpleNamespace(calls=n), lambda held: held.calls), r"changes pair of the model"),
    (lambda: Longer([1]), r"changes held of the model"),
    (OnParameter, r"changes head.weight.calls of the model"),
    (lambda: Rebound(Decimal(0)), r"changes held of the model"),
    (lambda: Rebound(torch.zeros(())), r"changes held of the model"),
    (lambda: Rebound(np.zeros(1)), r"changes held of the model"),
    (lambda: Advanced(np.array([0], object), one_more, lambda held: held[0]), r"changes held\[0\] of the model"),
    (lambda: Advanced(array.array("i", [0]), one_more, lambda held: held[0]), r"changes held\[0\] of the model"),
    (lambda: Advanced(bytearray(), lambda held: held.append(0), len), r"changes held of the model"),
    (lambda: Advanced(queue.Queue(), lambda held: held.put(0), queue.Queue.qsize), r"changes held.* of the model"),
    (lambda: Advanced(thread_local(), one_more_here, lambda held: held.calls), r"changes held.calls of the model"),
    (lambda: Longer("x"), r"changes held of the model"),
    (lambda: Fraction(0.0), r"changes held of the model"),
    (lambda: LatePhase(0), r"changes held of the model"),
    (lambda: EverySecond(np.int64(0)), r"changes held of the model"),
    (lambda: InDictionary({"calls": 0}), r"changes held\['calls'\] of the model"),
    (lambda: InObject(SimpleNamespace(schedule=SimpleNamespace(step=0))), r"changes held.schedule.step of the model"),
    (lambda: GrowingList([]), r"changes held of the model"),
    (lambda: GrowingList(collections.deque(maxlen=100)), r"changes held of the model"),
    (lambda: GrowingSet(set()), r"changes held.* of the model"),
    (lambda: FirstCall(True), r"changes held of the model"),
    (lambda: Alternating(False), r"changes held of the model"),
    (lambda: Named("cold"), r"changes held of the model"),
    (lambda: Epochs(0), r"changes held of the model \(Epochs\) in Epochs.train, line \d+"),
    (OfTheClass, r"changes held of class OfTheClass in OfTheClass.scale"),
    (Global, r"changes CALLS of module tests.program.test_python_state in Global.scale, line"),
    (lambda: AroundAFunction(counter()), r"changes calls of function counter.<locals>.count in counter"),
    (lambda: Counting(itertools.count()), r"changes held of the model"),
    (lambda: Counting(itertools.chain([0.0, 0.5], itertools.repeat(1.0))), r"changes held of the model"),
    (lambda: Counting(numbers()), r"changes held of the model"),
    (lambda: InTensor(torch.zeros(())), r"changes held of the model"),
    (lambda: Backward(Warming), r"changes calls of class Warming in Warming.backward"),
    (lambda: Backward(SeldomPassed), r"draws from Python's generator \(module random\) in SeldomPassed.backward"),
    (much_later(in_environment), r"changes CALLS_OF_LATE of the environment \(os.environ\)"),
    (much_later(in_context), r"changes IN_CONTEXT of module tests.program.test_python_state in in_context"),
    (much_later(lambda: tracker()()), r"changes tracker.calls of module tests.program.test_python_state"),
    (much_later(in_table), r"changes table\['calls'\] of module"),
    (much_later(lambda: NEXT()), r"changes NEXT of module tests.program.test_python_state"),
    (much_later(in_globals), r"changes CALLS_OF_LATE of module tests.program.test_python_state in in_globals"),
    (lambda: OwnCount(itertools.count(1).__next__), r"changes held of the model \(OwnCount\)"),
    (lambda: OwnCount(numbers().__next__), r"changes held of the model \(OwnCount\)"),
    (OfAttribute, r"changes count.calls of class OfAttribute"),
    (OfNamespace, r"changes calls of class state"),
    (lambda: InSubclass(Counts()), r"changes held.calls of the model \(InSubclass\)"),
    (lambda: OwnCount(Slotted().__next__), r"changes held.calls of the model \(OwnCount\)"),
    (lambda: Counting(inner()), r"changes held of the model"),
    (lambda: Counting(itertools.chain(numbers(), [1.0])), r"changes held of the model"),
    (BySeed, r"computes something else when it is called again in the same state.*a seed"),
    (OfDescriptor, r"changes count.calls of class OfDescriptor"),
    (Seldom, r"draws from Python's generator \(module random\) in Seldom.scale, line \d+ .*a draw by torch"),
    (SeldomByNumPy, r"draws from NumPy's generator \(numpy.random\) in SeldomByNumPy.scale, line"),
    (MaskByNumPy, r"draws from NumPy's generator"),
    (lambda: OwnGenerator(random.Random(3)), r"draws from held of the model \(OwnGenerator\)"),
    (lambda: OwnGenerator(np.random.default_rng(3)), r"draws from held of the model \(OwnGenerator\)"),
    (Entropy, r"computes something else when it is called again in the same state in Entropy"),
    (Clock, r"computes something else when it is called again .*a clock"),
    (ClockAlone, r"computes something else when it is called again in the same state in Layer.forward, line"),
    (ImportedClock, r"computes something else when it is called again .*a clock"),
    (Calendar, r"computes something else when it is called again .*a clock"),
    (ImportedDate, r"computes something else when it is called again .*a clock"),
    (SystemsBytes, r"computes something else when it is called again .*outside of torch"),
    (SystemsChoice, r"computes something else when it is called again .*outside of torch"),
    (SystemsDraw, r"computes something else when it is called again .*outside of torch"),
]


@pytest.mark.parametrize(("make", "message"), REFUSED, ids=[f"{i} {m[1][:24]}" for i, m in enumerate(REFUSED)])
def test_what_is_not_frozen_is_refused(make: Callable[[], nn.Module], message: str) -> None:
    model = make()
    with pytest.raises(CaptureError, match=message) as refused:
        refuse_python_state(model, vectors(2, 1))
    assert "\n" not in str(refused.value)
    assert CALLS == 0, "what trial calls changed is put back"


def test_calls_that_are_counted_where_nothing_looks_are_found() -> None:
    with pytest.raises(CaptureError, match=r"Late computes something else in later calls with the same samples"):
        capture(late(in_file())(), (vectors(4, 1), vectors(3, 2)), granule=1)


@pytest.mark.parametrize("activation", [torch.Tensor.tanh, torch.zeros(1).sign().__add__], ids=["method", "bound"])
def test_methods_in_c_are_held_without_state(activation: Callable[[Tensor], Tensor]) -> None:
    class Activated(Held):
        def features(self, x: Tensor) -> Tensor:
            return self.held(super().features(x))

    model = Activated(activation)
    assert fingerprint(model) == fingerprint(Activated(activation))
    assert capture(model, (vectors(4, 1), vectors(3, 2)), granule=1).dynamic_batch


def test_a_count_in_a_module_that_forward_imports_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "counted_elsewhere.py").write_text("mean = None\n")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.import_module("counted_elsewhere")

    class Importing(Held):
        def scale(self) -> Any:
            import counted_elsewhere  # type: ignore[import-not-found]

            counted_elsewhere.mean = (counted_elsewhere.mean or 0) + 1
            return 1.0 if counted_elsewhere.mean < 600_000 else 0.5

    with pytest.raises(CaptureError, match="changes mean of module counted_elsewhere in .*Importing.scale"):
        refuse_python_state(Importing(), vectors(4, 1))
    del sys.modules["counted_elsewhere"]


def test_state_is_restored_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MODE_OF_FILES", "0755")
    monkeypatch.setenv("CALLS_OF_LATE", "12")
    tracker().calls = 3
    number = in_context()

    class Noting(Held):
        def scale(self) -> Any:
            in_environment(), in_context(), tracker()(), defined()
            os.environ["MODE_OF_FILES"] = "0644"
            return 1.0

    refuse_python_state(Noting(), vectors(4, 1))
    assert (os.environ["MODE_OF_FILES"], os.environ["CALLS_OF_LATE"], tracker().calls) == ("0755", "12", 3)
    assert in_context() == number + 1
    assert DEFINED.tell() == 1


DEFINED = io.BytesIO()


@functools.cache
def defined() -> Any:
    """What may be defined once, such as an operator."""
    if DEFINED.tell():
        raise RuntimeError("defined twice")
    DEFINED.write(b"x")
    return torch.ops.aten.relu.default


class Logged(Held):
    """Counts, prints and keeps for inspection alone."""

    def scale(self) -> Any:
        self.held["calls"] += 1
        self.held["times"].append(time.perf_counter())
        if self.held["calls"] % 10 == 0 or random.random() < 0.01:
            print(self.held)
        return 1.0

    def features(self, x: Tensor) -> Tensor:
        features = super().features(x)
        self.last_output = features.detach()
        self.total = getattr(self, "total", 0.0) + self.last_output.mean()
        return features


class LoggedAnew(Held):
    def scale(self) -> Any:
        self.held = (self.held[0] + 1, [*self.held[1], time.perf_counter()], {"at": self.held[0]})
        return 1.0


class LazyMask(Held):
    """A table that is made in the first call, by the size that it needs, and kept."""

    def scale(self) -> Any:
        if self.held is None or self.held.shape[0] < WIDTH:
            self.held = torch.ones(WIDTH, WIDTH).tril().sum(dim=0)
        return self.held


class Cached(Held):
    def scale(self) -> Any:
        if WIDTH not in self.held:
            self.held[WIDTH] = torch.linspace(0, 1, WIDTH)
        return self.held[WIDTH]


class Hooked(Held):
    """As libraries do to get at what their modules give: a hook comes with the first call, and stays."""

    def features(self, x: Tensor) -> Tensor:
        if not self.layers[0]._forward_hooks:
            self.layers[0].register_forward_hook(_halved)
        return super().features(x)


def _halved(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
    return output / 2


class ByTorch(Held):
    def scale(self) -> Any:
        return torch.where(torch.rand(()) < 0.05, 0.5, 1.0)


class Checkpointed(Held):
    def features(self, x: Tensor) -> Tensor:
        return torch.utils.checkpoint.checkpoint(super().features, x, use_reentrant=False)


class InBuffer(Held):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def scale(self) -> Any:
        self.calls += 1
        return 1.0


TAKEN: list[Callable[[], nn.Module]] = [
    Held,
    lambda: Logged({"calls": 0, "times": []}),
    lambda: LoggedAnew((0, [], {})),
    LazyMask,
    LazyLog,
    Hooked,
    lambda: LookedAtLate(0),
    lambda: Cached({}),
    lambda: ClearsGradients(0),
    lambda: EpochsUnread(0),
    ByTorch,
    lambda: Backward(CountedAlone),
    Checkpointed,
    InBuffer,
    lambda: Held(nn.utils.parametrizations.weight_norm(nn.Linear(2, 2))),
]


@pytest.mark.parametrize("make", TAKEN, ids=range(len(TAKEN)))
def test_what_does_not_count_is_not_refused(make: Callable[[], nn.Module]) -> None:
    model = make()
    before = {name: str(value) for name, value in vars(model).items() if name not in ("_buffers", "_modules")}
    drawn, by_numpy = random.getstate(), np.random.get_state()[2]
    refuse_python_state(model, vectors(2, 1))
    after = {name: str(value) for name, value in vars(model).items() if name not in ("_buffers", "_modules")}
    assert after == before
    assert random.getstate() == drawn and np.random.get_state()[2] == by_numpy


def test_capture_and_the_look_at_code_leave_attributes_as_they_were() -> None:
    model = Logged({"calls": 0, "times": []})
    with python_state_kept(model):
        forward_code(model, vectors(2, 1))
    assert model.held == {"calls": 0, "times": []} and not hasattr(model, "last_output")
    capture(model, (vectors(2, 1), vectors(3, 2)), granule=1)
    assert model.held == {"calls": 0, "times": []} and not hasattr(model, "last_output")


def test_an_iterator_that_is_put_back_gives_the_same_objects() -> None:
    class Ring(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.items = [object(), object(), object()]
            self.ring = itertools.cycle(self.items)
            self.chained = itertools.chain(iter(self.items[:1]), map(id, self.items))

    model = Ring()
    first = next(model.ring)
    with python_state_kept(model):
        assert next(model.ring) is model.items[1] and next(model.chained) is model.items[0]
    assert first is model.items[0] and next(model.ring) is model.items[1] and next(model.chained) is model.items[0]
    assert next(model.chained) == id(model.items[0])


def test_a_threshold_in_the_middle_of_capture_is_refused() -> None:
    with pytest.raises(CaptureError, match="changes held of the model"):
        capture(LateThreshold(599_999), (vectors(2, 1), vectors(3, 2)), granule=1)


def test_other_threads_have_their_own_moment() -> None:
    """A rank's heartbeats go by the clock that the check of a schedule moves."""
    found: dict[str, float] = {}

    def look() -> None:
        found.update(monotonic=time.monotonic(), year=datetime.datetime.now().year, byte=os.urandom(64).count(255))

    before_s = time.monotonic()
    with later([]):
        assert time.monotonic() > before_s + 1e8 and datetime.datetime.now().year > 2050
        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
    assert found["monotonic"] < before_s + 1e8 and found["year"] < 2050 and found["byte"] < 64
    assert time.monotonic() < before_s + 1e8
