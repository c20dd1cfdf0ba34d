"""Children of the launcher: forked, logged to a file, dead when the launcher is dead unless they `outlive_parent`.

    child = fork_child("rank-0", body, log, keep=channel)   # `body` runs in the child
    child.pid, child.pidfd (readable once it has ended), child.reap()

Forking after `import torch` costs milliseconds and shares memory, where a new interpreter costs seconds. It is sound
as long as no thread pool was used before: the launcher computes nothing.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from elaswave_fx.errors import ConfigError
from elaswave_fx.files import open_log
from elaswave_fx.launch.channel import Channel, ChannelClosed
from elaswave_fx.launch.stop import STOPPING
from elaswave_fx.watchdog import Watchdog

_PR_SET_PDEATHSIG = 1
_OF_THE_DEAD = 19
"""The niceness of a process that is being ended."""
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass
class Child:
    """A process that we started. `status` is that of `os.waitpid`, None while it runs."""

    name: str
    pid: int
    pidfd: int
    channel: Channel
    log: Path
    watchdog: Watchdog
    status: int | None = None

    def reap(self) -> int:
        """Wait for its end (it has come when `pidfd` is readable), keep and return its status."""
        if self.status is None:
            _, self.status = os.waitpid(self.pid, 0)
            os.close(self.pidfd)
        return self.status

    def yield_cores(self) -> None:
        """Let the living go first while the kernel takes this process apart, the longer the more memory it has."""
        if self.status is not None:
            return
        for thread in Path(f"/proc/{self.pid}/task").iterdir():
            with contextlib.suppress(ProcessLookupError):
                os.setpriority(os.PRIO_PROCESS, int(thread.name), _OF_THE_DEAD)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal, unless it has been reaped: its id may be another process's by then."""
        if self.status is None:
            signal.pidfd_send_signal(self.pidfd, number)


def fork_child(
    name: str, body: Callable[[Channel], None], log: Path, siblings: Iterable[Child], *, needs_log: bool = True
) -> Child:
    """Start `body(channel)` in a child. An exception of `body` is sent as `error` and ends the child with code 1.

    Args:
        needs_log: a child that cannot open its log ends; else what it would write there is lost.
        siblings: children started before; the new one closes its copies of our ends of their channels, so that a
            channel's end is seen as soon as its one owner is gone.
    """
    ours, theirs = Channel.pair()
    watchdog = Watchdog()
    sys.stdout.flush()
    sys.stderr.flush()
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        watchdog.guard()
        _run_child(parent, body, theirs, [ours, *(sibling.channel for sibling in siblings)], log, needs_log)
    theirs.close()
    return Child(name, pid, os.pidfd_open(pid), ours, log, watchdog)


@contextmanager
def frozen_memory() -> Iterator[None]:
    """Collect garbage once around several forks and leave what stays alone, so that its pages stay shared."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def end_children(children: Iterable[Child]) -> None:
    """Kill those that still run, wait for them, close their channels."""
    for child in children:
        child.signal(signal.SIGKILL)
        child.reap()
        child.channel.close()


def _run_child(
    parent: int,
    body: Callable[[Channel], None],
    channel: Channel,
    foreign: list[Channel],
    log: Path,
    needs_log: bool,
) -> NoReturn:
    """Everything of a child, from the fork to its end; never returns into the launcher's code."""
    code = 1
    try:
        _die_with(parent)
        # Terminals, init systems and schedulers signal all processes at once; the launcher decides what it means.
        for number in STOPPING:
            signal.signal(number, signal.SIG_IGN)
        signal.set_wakeup_fd(-1)
        for other in foreign:
            other.close()
        _close_standard_files()
        _one_thread()
        code = _call(body, channel, log, needs_log)
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


def _call(body: Callable[[Channel], None], channel: Channel, log: Path, needs_log: bool) -> int:
    """The child's entry point: whatever goes wrong in it is the launcher's to show. Returns the exit code."""
    try:
        with contextlib.nullcontext() if needs_log else contextlib.suppress(ConfigError):
            _write_to(log)
        body(channel)
        return 0
    except ChannelClosed:
        print("the launcher is gone", file=sys.stderr, flush=True)
        return 1
    except BaseException as error:  # noqa: BLE001
        traceback.print_exc()
        try:
            channel.send("error", **error_fields(error))
        except ChannelClosed:
            print("the launcher is gone", file=sys.stderr, flush=True)
        return 1


def error_fields(error: BaseException) -> dict[str, object]:
    """Return what a message says of an exception: its classes' names (nearest first), and its words."""
    return {
        "classes": [kind.__name__ for kind in type(error).__mro__],
        "message": str(error) or type(error).__name__,
        "lost_rank": getattr(error, "rank", None),
    }


def _die_with(parent: int) -> None:
    """Have the kernel kill this process when the launcher dies, however it dies."""
    if _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:  # It died before we asked.
        os._exit(1)


def outlive_parent() -> None:
    """Take back what every child starts with: from now on it has to end by itself when the launcher is gone."""
    if _libc.prctl(_PR_SET_PDEATHSIG, 0, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")


def _close_standard_files() -> None:
    """Input is empty and output goes nowhere, until there is a log; the console is the launcher's."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(nothing, number)
    if nothing > 2:
        os.close(nothing)
    sys.stdin = os.fdopen(0, closefd=False)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)


def _write_to(log: Path) -> None:
    """Standard output and error go to the log, also of native code and after a crash. Raises `ConfigError`."""
    try:
        file = open_log(log)
    except OSError as error:
        raise ConfigError(f"{log}: cannot be written ({error.strerror})") from error
    for number in (1, 2):
        os.dup2(file, number)
    os.close(file)
    faulthandler.enable(2)


def _one_thread() -> None:
    """Ranks share the cores, and the number of threads changes bits."""
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(1)
