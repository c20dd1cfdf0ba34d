"""Simulated later time: Python's clocks are advanced, and the system's entropy and torch's seed differ.

    with later(functions) as draws:
        model(**batch)      # time.time(), datetime.now() and os.urandom() answer something else, by whatever name
    draws   ->  [16]        # sizes of the draws from the system's entropy, in bytes

`functions`: functions that may run; clocks that they imported by name, as by `from time import monotonic`, are replaced
too. Other threads keep their own time, as a rank's heartbeats use these clocks.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import random
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from types import FunctionType
from typing import Any

import torch

_LATER_S = 1_000_000_123
_CLOCKS = ("time", "monotonic", "perf_counter", "process_time")
_thread = threading.local()

FILLERS = (b"\x00", b"\x55")
"""Entropy of repeated draws: what depends on it differs from a call with true entropy for one of them."""


def _is_later() -> bool:
    return getattr(_thread, "is_later", False)


class _LaterDatetime(datetime.datetime):
    @classmethod
    def now(cls, tz: datetime.tzinfo | None = None) -> datetime.datetime:
        return super().now(tz) + datetime.timedelta(seconds=_LATER_S * _is_later())

    @classmethod
    def utcnow(cls) -> datetime.datetime:
        return cls.now(datetime.UTC).replace(tzinfo=None)

    @classmethod
    def today(cls) -> datetime.datetime:
        return cls.now()


class _LaterDate(datetime.date):
    @classmethod
    def today(cls) -> datetime.date:
        return super().today() + datetime.timedelta(seconds=_LATER_S * _is_later())


@contextlib.contextmanager
def later(functions: Iterable[FunctionType], filler: bytes = FILLERS[0]) -> Iterator[list[int]]:
    """Replace clocks and entropy, in their modules and where functions name them; yield the sizes of draws."""
    draws: list[int] = []
    replaced = {id(old): new for old, new in _replacements(filler, draws)}
    with contextlib.ExitStack() as stack:
        for space in ({id(f.__globals__): f.__globals__ for f in functions} | _homes()).values():
            for name in [name for name, value in space.items() if id(value) in replaced]:
                stack.callback(space.__setitem__, name, space[name])
                space[name] = replaced[id(space[name])]
        _thread.is_later = True
        stack.callback(setattr, _thread, "is_later", False)
        yield draws


def _homes() -> dict[int, dict[str, Any]]:
    return {id(vars(module)): vars(module) for module in (time, datetime, os, random, torch, torch.random)}


def _replacements(filler: bytes, draws: list[int]) -> Iterator[tuple[Any, Any]]:
    for name in _CLOCKS:
        yield getattr(time, name), _moved(getattr(time, name), _LATER_S)
        yield getattr(time, f"{name}_ns"), _moved(getattr(time, f"{name}_ns"), _LATER_S * 1_000_000_000)
    yield datetime.datetime, _LaterDatetime
    yield datetime.date, _LaterDate
    yield os.urandom, _entropy(os.urandom, filler, draws)
    yield torch.initial_seed, _moved(torch.initial_seed, 1)


def _entropy(urandom: Callable[[int], bytes], filler: bytes, draws: list[int]) -> Callable[[int], bytes]:
    """The largest bytes, which a rare branch sees too, and `filler` for a draw of the same size right after: a draw
    below a number that is no power of two is repeated until it is small enough."""
    is_repeated = False

    def give(size: int) -> bytes:
        nonlocal is_repeated
        if not _is_later():
            return urandom(size)
        is_repeated = not is_repeated and draws[-1:] == [size]
        draws.append(size)
        return (filler if is_repeated else b"\xff") * size

    return give


def _moved(clock: Callable[[], Any], by: int) -> Callable[[], Any]:
    return lambda: clock() + by * _is_later()
