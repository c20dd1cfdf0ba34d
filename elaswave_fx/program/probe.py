"""Numbers with inverted comparisons: they show the behaviour of a program once a counter passes its threshold.

calls = probe(1, Flips())
calls < 60              ->  False at the first time in this place, True from then on
(calls / 4) % 2         ->  a probe again
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable
from numbers import Integral, Real
from types import CodeType
from typing import Any

from elaswave_fx.program.forward_code import is_library

_ARITHMETIC = (
    "add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "lshift", "rshift", "and_", "or_", "xor",
)  # fmt: skip
_UNARY = ("neg", "pos", "abs")
_COMPARISONS = ("lt", "le", "gt", "ge", "eq", "ne")


class Flips:
    """Places that were answered wrongly. Only the first answer in a place is wrong, so that loops end. Code of torch
    and Python always gets the true answer, as it checks its arguments."""

    def __init__(self) -> None:
        self._seen: dict[tuple[CodeType, int], None] = {}
        self._true: set[tuple[CodeType, int]] = set()

    def answer(self, truth: bool) -> bool:
        frame = sys._getframe(2)
        place = (frame.f_code, frame.f_lasti)
        if place in self._seen or place in self._true or is_library(frame.f_globals.get("__name__")):
            return truth
        self._seen[place] = None
        return not truth

    def take_back(self) -> None:
        """Reset, and answer truthfully in the place that was answered wrongly last."""
        self._true.update(list(self._seen)[-1:])
        self._seen.clear()


class _ProbeInt(int):
    flips: Flips


class _ProbeFloat(float):
    flips: Flips


def probe(value: Any, flips: Flips) -> Any:
    """A number equal to `value` in all but comparisons, for numbers of Python and NumPy."""
    if not isinstance(value, Real):
        return value
    made = _ProbeInt(value) if isinstance(value, Integral) else _ProbeFloat(value)
    made.flips = flips
    return made


def plain(value: Any) -> Any:
    """The number without its probe."""
    if isinstance(value, _ProbeInt):
        return int.__int__(value)
    return float.__float__(value) if isinstance(value, _ProbeFloat) else value


def _again(value: Any, flips: Flips) -> Any:
    return probe(value, flips) if type(value) in (int, float) else value


def _arithmetic(compute: Callable[[Any, Any], Any], reflected: bool) -> Callable[[Any, Any], Any]:
    def method(self: Any, other: Any) -> Any:
        a, b = plain(self), plain(other)
        return _again(compute(b, a) if reflected else compute(a, b), self.flips)

    return method


def _unary(compute: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda self: _again(compute(plain(self)), self.flips)


def _comparison(compute: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    def method(self: Any, other: Any) -> Any:
        truth = compute(plain(self), plain(other))
        return self.flips.answer(truth) if isinstance(truth, bool) else truth

    return method


def _bool(self: Any) -> bool:
    return self.flips.answer(bool(plain(self)))


def _equip(kind: type, base: type) -> None:
    for name in _ARITHMETIC:
        compute, bare = getattr(operator, name), name.rstrip("_")
        if hasattr(base, f"__{bare}__"):
            setattr(kind, f"__{bare}__", _arithmetic(compute, reflected=False))
            setattr(kind, f"__r{bare}__", _arithmetic(compute, reflected=True))
    for name in _UNARY:
        setattr(kind, f"__{name}__", _unary(getattr(operator, name)))
    for name in _COMPARISONS:
        setattr(kind, f"__{name}__", _comparison(getattr(operator, name)))
    setattr(kind, "__bool__", _bool)  # noqa: B010
    setattr(kind, "__hash__", lambda self: hash(plain(self)))  # noqa: B010


_equip(_ProbeInt, int)
_equip(_ProbeFloat, float)
