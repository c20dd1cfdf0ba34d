"""Text for ranks, numbers and sizes in reasons, events and errors.

rank_words((0, 2, 3))           ->  "ranks 0, 2, 3"
number_ranges((0, 1, 2, 3, 7))  ->  "0-3, 7"
size_text(80_000)               ->  "78.1 KiB"
"""

from __future__ import annotations

from collections.abc import Sequence

NAMED = 6
"""Maximum number of ranges that `number_ranges` lists."""


def listed(numbers: Sequence[int] | Sequence[str]) -> str:
    """0, 2, 3"""
    return ", ".join(str(number) for number in numbers)


def rank_words(ranks: Sequence[int]) -> str:
    """rank 2, or ranks 0, 2, 3"""
    return f"rank{'s' if len(ranks) > 1 else ''} {listed(ranks)}"


def number_ranges(numbers: Sequence[int]) -> str:
    """0-3, 7: the first `NAMED` ranges of ascending numbers."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    named = [f"{lo}-{hi}" if hi > lo else str(lo) for lo, hi in runs[:NAMED]]
    return ", ".join(named) + (", ..." if len(runs) > NAMED else "")


def size_text(size: int) -> str:
    """A number of bytes as text: 78.1 KiB."""
    if size < 1024:
        return f"{size} B"
    for exponent, unit in ((4, "TiB"), (3, "GiB"), (2, "MiB")):
        if size >= 1024**exponent:
            return f"{size / 1024**exponent:.1f} {unit}"
    return f"{size / 1024:.1f} KiB"
