"""Commands of ours for tests, each in a process forked from a server that has imported torch.

    done = run("elaswave_fx.train", "steps=3", cwd=tmp_path)             # CompletedProcess
    joiner = Command("elaswave_fx.worker", str(run_dir));  joiner.stdout.readline();  joiner.kill()

It has its own memory, console, folder and environment, but for variables that torch reads when imported. Tests of those
and of start-up run Python themselves.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import signal
import sys
import time
import warnings
from multiprocessing.connection import Connection
from pathlib import Path
from subprocess import CompletedProcess, TimeoutExpired
from threading import Thread
from typing import TextIO

ROOT = Path(__file__).resolve().parents[1]
TIMEOUT_S = 300.0

_SERVER = multiprocessing.get_context("forkserver")
_SERVER.set_forkserver_preload(["tests.environment", "tests.preloaded"])


class Command:
    """`python -m MODULE WORDS…`, started, with methods of subprocess.Popen; it ends with this process.

    `env`: variables beside this process's. `log`: a file for all that it prints, in place of pipes.
    """

    def __init__(
        self, module: str, *words: str, cwd: Path = ROOT, env: dict[str, str] | None = None, log: Path | None = None
    ) -> None:
        self.args = (module, *words)
        environment = {**os.environ, "PYTHONPATH": str(ROOT), **(env or {})}
        (said, out), (erred, err) = _SERVER.Pipe(duplex=False), _SERVER.Pipe(duplex=False)
        if log is not None:
            log.touch()
        with out, err:
            where = (out, err) if log is None else str(log)
            self._process = _SERVER.Process(
                target=_run, args=(module, words, str(cwd), environment, where), daemon=True
            )
            self._process.start()
        self.stdout, self.stderr = _text(said), _text(erred)
        pid = self._process.pid
        assert pid is not None
        self.pid = pid

    @property
    def returncode(self) -> int | None:
        """The exit code, or minus the signal's number."""
        return self._process.exitcode

    def poll(self) -> int | None:
        """The exit code, if it has ended."""
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """Raise TimeoutExpired if it has not ended by then."""
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise TimeoutExpired(self.args, timeout or 0.0)
        return self._process.exitcode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """What it and its children still print, to their end; nothing the second time. Raise TimeoutExpired if that
        takes longer."""
        if self.stdout.closed:
            return "", ""
        said: dict[TextIO, str] = {}
        streams = (self.stdout, self.stderr)
        readers = [Thread(target=lambda each=each: said.update({each: each.read()}), daemon=True) for each in streams]
        end = time.monotonic() + timeout if timeout is not None else None
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join(max(0.0, end - time.monotonic()) if end is not None else None)
        if len(said) < len(streams):
            self.kill()
            raise TimeoutExpired(self.args, timeout or 0.0)
        self.wait(timeout)
        for stream in streams:
            stream.close()
        return said[self.stdout], said[self.stderr]

    def send_signal(self, number: int) -> None:
        """Send it, unless the process has ended."""
        if self._process.exitcode is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)


def run(
    module: str, *words: str, cwd: Path = ROOT, env: dict[str, str] | None = None, timeout: float = TIMEOUT_S
) -> CompletedProcess[str]:
    """Run it to its end; raise TimeoutExpired if it does not end in time."""
    command = Command(module, *words, cwd=cwd, env=env)
    out, err = command.communicate(timeout)
    return CompletedProcess(command.args, command.wait(), out, err)


def _text(pipe: Connection) -> TextIO:
    with pipe:
        return os.fdopen(os.dup(pipe.fileno()), encoding="utf-8")


def _run(
    module: str,
    words: tuple[str, ...],
    cwd: str,
    environment: dict[str, str],
    where: tuple[Connection, Connection] | str,
) -> None:
    """In the forked process: become what Python would be with that command line."""
    if isinstance(where, str):
        file = os.open(where, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        os.dup2(file, 1)
        os.dup2(file, 2)
        os.close(file)
    else:
        for number, pipe in enumerate(where, 1):
            with pipe:
                os.dup2(pipe.fileno(), number)
    sys.stdout = os.fdopen(1, "w", encoding="utf-8", closefd=False)
    sys.stderr = os.fdopen(2, "w", encoding="utf-8", buffering=1, closefd=False)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    installed = [entry for entry in sys.path if Path(entry).is_relative_to(sys.prefix) or "python3" in entry]
    sys.path[:] = [cwd, *filter(None, environment.get("PYTHONPATH", "").split(os.pathsep)), *installed]
    sys.argv = [module, *words]
    warnings.filterwarnings("ignore", "'.*' found in sys.modules", RuntimeWarning)
    runpy.run_module(module, run_name="__main__", alter_sys=True)
