"""Order-independent sums in votes: integers, so the order of additions does not matter.

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
    """A multiple of 2^-298. `infinite`: number of added values that are not finite."""

    BYTES: ClassVar[int] = _DIGIT_BYTES + 8

    units: int = 0
    infinite: int = 0

    @staticmethod
    def of(value: float) -> ExactTotal:
        """Convert a value: digits below 2^-298 are cut off; a value of 2^340 or more counts as infinite."""
        if not abs(value) < _LIMIT:
            return ExactTotal(0, 1)
        return ExactTotal(int(Fraction(value) / _UNIT))

    def __add__(self, other: ExactTotal) -> ExactTotal:
        return ExactTotal(self.units + other.units, self.infinite + other.infinite)

    @property
    def value(self) -> float:
        """The sum, rounded once, ties to even; NaN if an added value is not finite."""
        return math.nan if self.infinite else float(self.units * _UNIT)

    def pack(self) -> bytes:
        """The digits, least significant first, then the number of non-finite values."""
        return self.units.to_bytes(_DIGIT_BYTES, "little", signed=True) + self.infinite.to_bytes(8, "little")

    @staticmethod
    def unpack(data: bytes) -> ExactTotal:
        """Decode `BYTES` bytes of `pack`."""
        units = int.from_bytes(data[:_DIGIT_BYTES], "little", signed=True)
        return ExactTotal(units, int.from_bytes(data[_DIGIT_BYTES:], "little"))


ZERO = ExactTotal()
