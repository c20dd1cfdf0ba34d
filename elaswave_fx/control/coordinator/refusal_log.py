"""Rate-limited log lines about refused peers, most of them without the job's token.

log = RefusalLog()
log.line("10.0.0.7:4711: …", now_s)   ->  "refused: 10.0.0.7:4711: …", or None: too soon after the last one
"""

from __future__ import annotations

import math

EVERY_S = 5.0
"""Minimum seconds between two lines."""


class RefusalLog:
    """A log of refusals; those without a line are counted in the next one."""

    def __init__(self) -> None:
        self._next_s, self._left_out = -math.inf, 0

    def line(self, why: str, now_s: float) -> str | None:
        """Return the line about a refusal, or None if the last one was too recent."""
        if now_s < self._next_s:
            self._left_out += 1
            return None
        more = f" ({self._left_out} others since the last such line)" if self._left_out else ""
        self._next_s, self._left_out = now_s + EVERY_S, 0
        return f"refused: {why}{more}"
