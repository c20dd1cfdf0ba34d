"""Sums that know no order, as votes carry them: integers, so that it does not matter who added what.

    ExactTotal.of(0.1) + ExactTotal.of(0.2)  ->  their exact sum;  .value is it, rounded once

The layout is that of `ExactTotal` in `native/exec/exact/exact_sum.h`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import ClassVar

_UNIT = Fraction(1, 2**298)
_LIMIT = 2.0**340
_DIGIT_BYTES = 80


@dataclass(frozen=True, slots=True)
class ExactTotal:
    """A multiple of 2^-298. `infinite`: so many of the values that were added are not finite."""

    BYTES: ClassVar[int] = _DIGIT_BYTES + 8

    units: int = 0
    infinite: int = 0

    @staticmethod
    def of(value: float) -> ExactTotal:
        """What lies below 2^-298 is cut off; a value of 2^340 or more counts as infinite."""
        if not abs(value) < _LIMIT:
            return ExactTotal(0, 1)
        return ExactTotal(int(Fraction(value) / _UNIT))

    def __add__(self, other: ExactTotal) -> ExactTotal:
        return ExactTotal(self.units + other.units, self.infinite + other.infinite)

    @property
    def value(self) -> float:
        """The sum, rounded once, ties to even; NaN if anything that was added is not finite."""
        return math.nan if self.infinite else float(self.units * _UNIT)

    def pack(self) -> bytes:
        """The digits from the least one on, then how many values were not finite."""
        return self.units.to_bytes(_DIGIT_BYTES, "little", signed=True) + self.infinite.to_bytes(8, "little")

    @staticmethod
    def unpack(data: bytes) -> ExactTotal:
        """What `pack` gives, of `BYTES`."""
        units = int.from_bytes(data[:_DIGIT_BYTES], "little", signed=True)
        return ExactTotal(units, int.from_bytes(data[_DIGIT_BYTES:], "little"))


ZERO = ExactTotal()
