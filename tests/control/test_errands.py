"""Work for a disk is done in order by a thread, whatever the disk says."""

from __future__ import annotations

import threading

from elaswave_fx.control.coordinator.errands import Errands
from tests.waiting import await_true


def test_what_a_disk_refuses_does_not_end_the_thread() -> None:
    done: list[int] = []

    def refused() -> None:
        with open("/dev/full", "w") as full:
            print("no room", file=full, flush=True)

    errands = Errands()
    for number in range(3):
        errands.do(lambda number=number: done.append(number))
        errands.do(refused)
    errands.close(within_s=20.0)
    assert done == [0, 1, 2]


def test_nobody_waits_for_a_disk_that_hangs() -> None:
    release = threading.Event()
    done: list[str] = []
    errands = Errands()
    errands.do(release.wait)
    errands.do(lambda: done.append("after it"))
    errands.close(within_s=0.01)
    assert done == []
    release.set()
    await_true(lambda: done == ["after it"], "what came after it is done")
