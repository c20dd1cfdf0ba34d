"""Samples that depend on a number that reading changes, such as a curriculum by the count of reads.

self.reads += 1; x = x * (1 + self.reads // 1000)   ->  DataError that names `reads`
STATS["reads"] += 1                                 ->  the same of a global that the code names, or of the class
"""

from __future__ import annotations

import functools
import itertools
import pickle
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from types import FunctionType, ModuleType, NoneType
from typing import Any

import numpy as np
import torch

from elaswave_fx.data.global_draws import again
from elaswave_fx.errors import DataError
from elaswave_fx.program.containers import Cache, Home
from elaswave_fx.program.forward_code import is_installed, is_library
from elaswave_fx.program.generators import generator_state, is_generator
from elaswave_fx.program.held_state import names_of
from elaswave_fx.program.later_values import numbers_in, with_changed
from elaswave_fx.program.model_fingerprint import plain_text

_FURTHER = (*(2**power for power in range(1, 21)), 1_000, 1_000_000)
"""Numbers of later reads; as for modules, a power of two reaches the next phase."""

_MOST_OWNERS, _MOST_SEEN, _MOST_ATTRIBUTES = 64, 10_000, 1_000
_NO_OWNERS = (type, ModuleType, torch.Tensor, np.ndarray, str, bytes, int, float, NoneType)


def refuse_counters(
    read: Callable[[int], dict[str, torch.Tensor]], count: int, owner: object, place: str, cure: str
) -> None:
    """Raise DataError where samples depend on a number that reading them changes: of `owner`, its classes, or what
    their code names. `read` returns one of `count` samples.

    A number that is restored when the same samples are read again is a cache of the last read, not a counter.
    """
    other = 1 % count
    for index in (0, other, 0):
        first = read(index)
    before = [(space, name, space[name], numbers_in(space[name])) for space, name in _names(owner)]
    moved: list[set[Any]] = [set() for _ in before]
    for indices in ((0,), (other, 0)):
        for index in indices:
            read(index)
        for (space, name, _, numbers), paths in zip(before, moved, strict=True):
            now = numbers_in(space.get(name))
            paths |= {path for path in now if plain_text(numbers.get(path)) != plain_text(now[path])}
    for (space, name, value, _), paths in zip(before, moved, strict=True):
        changed = frozenset(paths)
        for later_value in _later_values(count) if changed else ():
            space[name] = with_changed(value, changed, later_value)
            try:
                later = [read(0), read(0)]  # the first read may start what the second one sees
            except DataError:  # the value is invalid for this number
                continue
            finally:
                space[name] = value
            if not all(same_sample(first, each) for each in later):
                raise DataError(f"{place}: its samples depend on {name}, which reading them changes, {again(cure)}")


def _later_values(count: int) -> Iterator[Callable[[Any], Any]]:
    """Later values of a number: some reads on, and at the end of an epoch of `count` samples."""
    yield from (lambda number, by=more: _sum(number, by) for more in _FURTHER)
    for reads in (count - 1, count, 2 * count - 1):
        yield lambda number, to=reads: _sum(number, to - number) if isinstance(number, int) else number


def same_sample(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    """Whether the second sample has all fields of the first one, and equal ones."""
    return b.keys() >= a.keys() and all(same_bits(tensor, b[field]) for field, tensor in a.items())


def _sum(number: Any, by: int) -> Any:
    """The sum, wrapped around in types of few bits."""
    if isinstance(number, (np.ndarray, np.generic)):
        return np.add(number, np.asarray(by).astype(number.dtype))
    try:
        return number + by
    except (OverflowError, NotImplementedError):  # torch cannot add some types
        return number


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors are bitwise equal, nan included."""
    return a.dtype == b.dtype and a.shape == b.shape and a.numpy().tobytes() == b.numpy().tobytes()


class _ClassSpace:
    """The attributes of a class, as a namespace."""

    def __init__(self, kind: type) -> None:
        self._kind = kind

    def get(self, name: str) -> Any:
        return vars(self._kind).get(name)

    def __getitem__(self, name: str) -> Any:
        return vars(self._kind)[name]

    def __setitem__(self, name: str, value: Any) -> None:
        setattr(self._kind, name, value)


_Space = dict[str, Any] | _ClassSpace


class OwnStates:
    """Attributes that are numbers or generators, of an object and of objects that it contains: a wrapped dataset,
    transforms in a list. Reading samples may change them, and be changed by them."""

    def __init__(self, owner: object) -> None:
        self._owners: list[object] = []
        self._shared: list[tuple[_Space, str]] = []
        waiting: list[Any] = [owner]
        known = set[int]()
        while waiting and len(self._owners) < _MOST_OWNERS and len(known) < _MOST_SEEN:
            each = waiting.pop()
            if id(each) in known or issubclass(type(each), _NO_OWNERS):
                continue
            known.add(id(each))
            if type(each) in (list, tuple):  # a class of the user's may read files when it is sliced
                waiting += each[:_MOST_OWNERS]
            elif type(each) is FunctionType:
                self._owners.append(each)
            elif len(own := _attributes(each)) <= _MOST_ATTRIBUTES:
                self._owners.append(each)
                waiting += own.values()
        shared = (pair for each in self._owners for pair in _shared(each if type(each) is FunctionType else type(each)))
        self._shared = [*itertools.islice(shared, _MOST_ATTRIBUTES)]

    def now(self) -> list[object]:
        """Return their values and states, to be compared with those of another time."""
        own = ((space, name) for space in map(_attributes, self._owners) for name in [*space])
        states = (_state(space.get(name)) for space, name in (*own, *self._shared))
        return [state for state in states if state is not None]


def _state(value: object) -> object:
    """The value of a number, the state of a generator; None of anything else."""
    with suppress(Exception):  # a generator of the user's own class
        if isinstance(value, torch.Generator):
            return value.get_state().numpy().tobytes()
        if is_generator(value):
            return pickle.dumps(generator_state(value))
        return value if isinstance(value, (int, float, np.number)) else None
    return None


def _attributes(owner: object) -> dict[str, Any]:
    """The namespace of an object, without running its code; an empty one if it has none."""
    try:
        own = object.__getattribute__(owner, "__dict__")
    except (AttributeError, TypeError):
        return {}
    return own if type(own) is dict else {}


def _names(owner: object) -> Iterator[tuple[_Space, str]]:
    """Attributes of `owner`, and what it shares with others."""
    if type(owner) is not FunctionType:
        own = _attributes(owner)
        yield from ((own, name) for name in [*own])
    yield from _shared(owner if isinstance(owner, FunctionType) else type(owner))


def _shared(code: type | FunctionType) -> Iterator[tuple[_Space, str]]:
    """Attributes of a user's class and its bases, and globals that its methods, or a function, name; the same of
    functions and classes among them; and what cached functions keep."""
    waiting: list[Any] = [code]
    known = set[int]()
    while waiting and len(known) < _MOST_OWNERS:
        each = waiting.pop()
        if id(each) in known or not _is_users(each):
            continue
        known.add(id(each))
        if isinstance(each, functools._lru_cache_wrapper):
            waiting.append(each.__wrapped__)
            for result in Cache(each, "", Home("", each)).items().values():
                space = result if type(result) is dict else _attributes(result)
                yield from ((space, name) for name in [*space] if len(space) <= _MOST_ATTRIBUTES)
        elif isinstance(each, FunctionType):
            space, names = each.__globals__, {*names_of(each.__code__)} & each.__globals__.keys()
            yield from ((space, name) for name in names)
            waiting += [space[name] for name in names]
        else:
            own = {name: value for name, value in vars(each).items() if not name.startswith("__")}
            yield from ((_ClassSpace(each), name) for name in own)
            methods = [value for value in vars(each).values() if isinstance(value, (staticmethod, classmethod))]
            waiting += [*vars(each).values(), *(method.__func__ for method in methods), *each.__bases__]


def _is_users(code: Any) -> bool:
    """Whether this is a class or a function, cached or not, of no installed package."""
    if not isinstance(code, (type, FunctionType, functools._lru_cache_wrapper)) or is_library(code.__module__):
        return False
    source = getattr(sys.modules.get(code.__module__), "__file__", None)
    return source is None or not is_installed(source)
