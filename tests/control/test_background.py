"""Work for a disk is done in order by a thread, whatever the disk says."""

from __future__ import annotations

import threading

from elaswave_fx.control.coordinator.threads import BackgroundThread
from tests.waiting import await_true


def test_what_a_disk_refuses_does_not_end_the_thread() -> None:
    done: list[int] = []

    def refused() -> None:
        with open("/dev/full", "w") as full:
            print("no room", file=full, flush=True)

    background = BackgroundThread()
    for number in range(3):
        background.submit(lambda number=number: done.append(number))
        background.submit(refused)
    background.close(within_s=20.0)
    assert done == [0, 1, 2]


def test_nobody_waits_for_a_disk_that_hangs() -> None:
    release = threading.Event()
    done: list[str] = []
    background = BackgroundThread()
    background.submit(release.wait)
    background.submit(lambda: done.append("after it"))
    background.close(within_s=0.01)
    assert done == []
    release.set()
    await_true(lambda: done == ["after it"], "what came after it is done")
