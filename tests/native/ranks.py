"""Ranks as forked processes for tests of the engine."""

from __future__ import annotations

import io
import os
import signal
import sys
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.connection import Pipe as connection_pipe
from typing import Any

import torch

from elaswave_fx import _native

TEST_TIMEOUT_S = 60.0
"""Far more than anything takes."""


class Ranks:
    """One forked process per rank, all linked; `results()` gives what `body(rank, endpoint, pipe)` returned."""

    def __init__(self, size: int, body: Callable[[int, Any, Connection], Any], allow_shm: bool = True) -> None:
        self.pids: list[int] = []
        self.pipes: list[Connection] = []
        for rank in range(size):
            here, there = connection_pipe()
            pid = os.fork()
            if pid == 0:
                self._child(rank, there, body, allow_shm)
            there.close()
            self.pids.append(pid)
            self.pipes.append(here)
        ports = [pipe.recv() for pipe in self.pipes]
        for pipe in self.pipes:
            pipe.send(ports)

    def _child(self, rank: int, pipe: Connection, body: Callable[[int, Any, Connection], Any], allow_shm: bool) -> None:
        code = 1
        try:
            torch.set_num_threads(1)
            endpoint = _native.Endpoint(rank, "token", host_id="host", allow_shm=allow_shm)
            pipe.send(endpoint.port)
            endpoint.connect({r: ("127.0.0.1", port, "host") for r, port in enumerate(pipe.recv())}, TEST_TIMEOUT_S)
            buffer = io.BytesIO()
            torch.save(body(rank, endpoint, pipe), buffer)
            pipe.send_bytes(buffer.getvalue())
            pipe.recv()  # nobody leaves while others still wait for its messages
            code = 0
        except BaseException:  # noqa: BLE001 - the child's last frame: print, then leave without the parent's clean-up
            traceback.print_exc(file=sys.stderr)
        os._exit(code)

    def results(self, ranks: list[int] | None = None) -> list[Any]:
        chosen = [self.pipes[r] for r in (ranks if ranks is not None else range(len(self.pipes)))]
        found = [torch.load(io.BytesIO(pipe.recv_bytes()), weights_only=False) for pipe in chosen]
        for pipe in chosen:
            pipe.send("go")
        return found

    def end(self) -> None:
        for pid in self.pids:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
