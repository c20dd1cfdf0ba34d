"""What a check of a run found."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Verdict(Enum):
    """`HOLDS`: as it should be. `WRONG`: it is not. `UNCHECKED`: nobody could tell, and the words say why."""

    HOLDS = "holds"
    WRONG = "WRONG"
    UNCHECKED = "not checked"


@dataclass(frozen=True)
class Finding:
    """The outcome of the check called `check`; `words` say what was looked at, or what is wrong and where."""

    check: str
    verdict: Verdict
    words: str

    def __str__(self) -> str:
        return f"{self.check:<12} {self.verdict.value:<12} {self.words}"


def holds(check: str, words: str) -> Finding:
    return Finding(check, Verdict.HOLDS, words)


def wrong(check: str, words: str) -> Finding:
    return Finding(check, Verdict.WRONG, words)


def unchecked(check: str, words: str) -> Finding:
    return Finding(check, Verdict.UNCHECKED, words)
