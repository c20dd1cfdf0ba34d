"""The launcher's view of the end of its processes."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys

import pytest

from elaswave_fx._liveness import LivenessTable

WAIT_S = 60.0


def holder(table: LivenessTable, slot: int) -> int:
    """A process that holds the slot, and has said so."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            table.hold(slot)
            os.write(write, b"!")
            signal.pause()
        finally:
            os._exit(1)
    os.close(write)
    assert os.read(read, 1) == b"!"
    os.close(read)
    return pid


def test_the_end_of_a_process_is_told_before_anybody_has_waited_for_it() -> None:
    table = LivenessTable(3)
    pids = [holder(table, slot) for slot in range(3)]
    try:
        for slot in range(3):
            table.watch(slot)
        assert table.ended() == []
        os.kill(pids[1], signal.SIGKILL)
        assert select.select([table], [], [], WAIT_S)[0] == [table]
        assert table.ended() == [1] and table.ended() == []
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def test_a_slot_belongs_to_one_process() -> None:
    table = LivenessTable(1)
    pid = holder(table, 0)
    try:
        with pytest.raises(RuntimeError, match="the mutex of a slot"):
            table.hold(0)
        with pytest.raises(IndexError, match="slot 1 of 1"):
            table.watch(1)
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def test_a_launcher_needs_no_torch_for_it() -> None:
    code = "import sys, elaswave_fx.launch.supervisor; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
