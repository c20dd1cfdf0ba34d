"""A parent finds out which call of its child does not return, also when no thread of the child runs."""

from __future__ import annotations

import ctypes
import os
import signal
import time

from elaswave_fx import watchdog
from elaswave_fx.watchdog import Waited, Watchdog
from tests.waiting import await_true


def test_a_child_that_holds_the_interpreters_lock_is_found_out() -> None:
    dog = Watchdog()
    child = os.fork()
    if child == 0:
        dog.guard()
        watchdog.expect(60, "this one returns")
        watchdog.fulfilled()
        watchdog.expect(0.2, "sample 7 has not been read")
        ctypes.PyDLL(None).sleep(1000)
        os._exit(0)
    try:
        await_true(lambda: dog.overdue(time.monotonic()) is not None, "it is overdue")
        assert dog.overdue(time.monotonic()) == "sample 7 has not been read"
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_every_call_has_its_whole_time_and_one_that_has_returned_is_not_missed() -> None:
    dog = Watchdog()
    for number in range(3):
        dog.write(1.0, f"call {number}")
        assert [dog.overdue(number + at) for at in (0.0, 0.4, 0.8)] == [None] * 3
    assert dog.overdue(3.1) == "call 2"
    dog.write(0.0, "")
    assert dog.overdue(4.0) is None and dog.overdue(9.0) is None


def test_a_child_that_makes_many_short_calls_is_never_overdue() -> None:
    """What it writes meanwhile is never read half, even if it is stopped there: both share one core."""
    dog = Watchdog()
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    child = os.fork()
    if child == 0:
        dog.guard()
        while True:
            watchdog.expect(60, "sample 7 has not been read")
            watchdog.fulfilled()
    try:
        found = [dog.overdue(time.monotonic()) for _ in range(1_000_000)]
    finally:
        os.sched_setaffinity(0, cores)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert set(found) == {None}


def test_a_long_text_is_cut() -> None:
    dog = Watchdog()
    dog.write(0.0, "é" * 2000)
    assert (dog.overdue(1.0) or "").startswith("é" * 400)


def test_time_in_which_nobody_looked_does_not_count() -> None:
    waited = Waited()
    seen = [waited.look("a", at) for at in (10.0, 10.5, 11.0, 3611.0, 3611.5)]
    assert seen == [0.0, 0.5, 1.0, 3.0, 3.5]
    assert waited.look("b", 3612.0) == 0.0
