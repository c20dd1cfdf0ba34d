"""A real run to be disturbed: launcher, coordinator and workers as processes; killed, stopped and watched from outside.

    with Job(job_config((2, 2), "steps=16"), folder) as job:
        job.await_step(5)
        job.signal_rank(3, signal.SIGKILL)
        run = job.wait()
    assert_survived(run, undisturbed, lost={3})

The launcher is forked from the test's process, so that torch is imported once, and heads a session of its own: whatever
is left in that session when the launcher has ended is an orphan, and is ended with it.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

import psutil

from elaswave_fx.config.compose import Job as TrainJob
from elaswave_fx.config.keys import Config
from elaswave_fx.errors import ConfigError
from elaswave_fx.train import train
from tests.runs import Run, small_config
from tests.waiting import WAIT_S, await_true

SLOW_STEP_S = 0.05
"""A step of a small run takes less, as a mean over thousands, on a busy machine too."""


@dataclass(frozen=True)
class Finished(Run):
    """A run that has ended. `orphans`: processes that it left behind; `pids`: of the ranks, as they were started."""

    orphans: tuple[int, ...] = ()

    @cached_property
    def events(self) -> list[dict[str, Any]]:
        return lines_of(self.folder / "events.jsonl")

    @cached_property
    def ledger(self) -> list[dict[str, Any]]:
        return lines_of(self.folder / "ledger.jsonl")

    @property
    def console(self) -> str:
        return (self.folder / "console.log").read_text(errors="replace")

    def of_kind(self, kind: str) -> list[dict[str, Any]]:
        """The events of one kind, in the order in which they were written."""
        return [event for event in self.events if event["kind"] == kind]


class Job:
    """A run under way, in a session of its own. As a context: nothing of it survives the block."""

    def __init__(self, config: Config, folder: Path, begin: Callable[[], None] = lambda: None) -> None:
        """`begin`: what the launcher's process does first."""
        self.config, self.folder = config, folder
        folder.mkdir(parents=True, exist_ok=True)
        self._status: int | None = None
        self.launcher = _fork_launcher(config, folder, begin)

    def __enter__(self) -> Job:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for pid in {*session_members(self.launcher), *([] if self.ended else [self.launcher])}:
            signal_process(pid, signal.SIGCONT)
            signal_process(pid, signal.SIGKILL)
        self._reap(block=True)
        await_true(lambda: not session_members(self.launcher), "all processes of the run are gone")

    # --- What it does

    @property
    def ended(self) -> bool:
        """Whether the launcher has."""
        return self._reap(block=False)

    @property
    def steps(self) -> int:
        """Committed, and written down."""
        path = self.folder / "metrics.jsonl"
        return path.read_bytes().count(b"\n") if path.exists() else 0

    def events(self, kind: str) -> list[dict[str, Any]]:
        """Those of one kind so far."""
        return [event for event in lines_of(self.folder / "events.jsonl") if event["kind"] == kind]

    @cached_property
    def pids(self) -> dict[int, int]:
        """Rank -> process; waits until the ranks were started."""
        self.await_event("started")
        assert self.events("started"), f"ended before it started, see {self.folder / 'console.log'}"
        return {int(rank): pid for rank, pid in self.events("started")[0]["pids"].items()}

    def coordinator(self) -> int | None:
        """The coordinator's process, if there is one now: the launcher's child that is no rank."""
        try:
            children = psutil.Process(self.launcher).children()
        except psutil.NoSuchProcess:
            return None
        ranks = set(self.pids.values())
        return next((child.pid for child in children if child.pid not in ranks), None)

    # --- Waiting

    def await_step(self, steps: int) -> None:
        """Until so many steps were written down; at once if the run has ended."""
        await_true(lambda: self.steps >= steps or self.ended, f"{steps} steps are committed in {self.folder}")

    def await_event(self, kind: str, count: int = 1) -> None:
        """Until an event of the kind was written `count` times; at once if the run has ended."""
        await_true(lambda: len(self.events(kind)) >= count or self.ended, f"event {kind} in {self.folder}")

    def await_end(self, timeout_s: float = WAIT_S) -> None:
        """Until the launcher has ended."""
        await_true(lambda: self.ended, f"the run in {self.folder} ends", timeout_s)

    def await_empty(self) -> None:
        """Until no process of the run is left, the launcher's orphans included."""
        await_true(lambda: self.ended and not session_members(self.launcher), f"no process left of {self.folder}")

    def wait(self, timeout_s: float = WAIT_S) -> Finished:
        """Until the launcher has ended; what it left behind."""
        self.await_end(timeout_s)
        assert self._status is not None
        code = os.waitstatus_to_exitcode(self._status)
        return Finished(code, self.folder, tuple(session_members(self.launcher)))

    # --- Disturbing

    def signal_rank(self, rank: int, number: signal.Signals) -> bool:
        """Whether its process was still there to get the signal."""
        return signal_process(self.pids[rank], number)

    def signal_coordinator(self, number: signal.Signals) -> bool:
        """Whether there was a coordinator to get it."""
        pid = self.coordinator()
        return pid is not None and signal_process(pid, number)

    def signal_launcher(self, number: signal.Signals) -> bool:
        return not self.ended and signal_process(self.launcher, number)

    def _reap(self, block: bool) -> bool:
        if self._status is None:
            pid, status = os.waitpid(self.launcher, 0 if block else os.WNOHANG)
            if pid:
                self._status = status
        return self._status is not None


def job_config(layout: tuple[int, int], *overrides: str, recipe: str = "gpt_stdlib") -> Config:
    """A small recipe on dp x pp ranks; exact unless told otherwise, so that whatever happens may cost no bit."""
    dp, pp = layout
    return small_config(recipe, "exact=true", f"parallel.dp={dp}", f"parallel.pp={pp}", *overrides)


def finish(config: Config, folder: Path) -> Finished:
    """A run that nobody disturbs from outside, to its end."""
    with Job(config, folder) as job:
        return job.wait(max(WAIT_S, SLOW_STEP_S * config.steps))


def lines_of(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a file that may still be written."""
    if not path.exists():
        return []
    text = path.read_text()
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def signal_process(pid: int, number: signal.Signals) -> bool:
    """Whether it was there."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True


def session_members(leader: int) -> list[int]:
    """Living processes of a session other than its leader."""
    found = []
    for entry in os.listdir("/proc"):
        if not entry.isdigit() or int(entry) == leader:
            continue
        try:
            words = Path("/proc", entry, "stat").read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(words[3]) == leader and words[0] not in "ZX":
            found.append(int(entry))
    return found


def is_stopped(pid: int) -> bool:
    """Whether a SIGSTOP holds it."""
    return psutil.Process(pid).status() == psutil.STATUS_STOPPED


def _fork_launcher(config: Config, folder: Path, begin: Callable[[], None]) -> int:
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        _run_launcher(config, folder, begin)
    return pid


def _run_launcher(config: Config, folder: Path, begin: Callable[[], None]) -> NoReturn:
    """The child's whole life; never returns into the test."""
    code = 3
    try:
        os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        console = os.open(folder / "console.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        for target in (1, 2):
            os.dup2(console, target)
        sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
        sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
        begin()
        code = train(TrainJob(config, folder, {}, ()))
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        code = 2
    except BaseException:  # noqa: BLE001 - the entry point of a process
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
