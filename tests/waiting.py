"""Waiting for what another process does, for a bounded time."""

from __future__ import annotations

import time
from collections.abc import Callable

WAIT_S = 90.0
"""How long anything may take on a busy machine; nothing waits for so long when it works."""

POLL_S = 0.005


def await_true(happened: Callable[[], bool], what: str, timeout_s: float = WAIT_S) -> None:
    """Polls, for a bounded time.

    Raises:
        AssertionError: It did not happen.
    """
    end = time.monotonic() + timeout_s
    while not happened():
        assert time.monotonic() < end, f"did not happen within {timeout_s:.0f} s: {what}"
        time.sleep(POLL_S)
