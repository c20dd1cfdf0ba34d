"""Children of the launcher: forked, logged to a file, killed with the launcher unless they `outlive_parent`.

    child = fork_child("rank-0", body, log, keep=channel)   # `body` runs in the child
    child.pid, child.pidfd (readable once it has ended), child.reap()

Forking after `import torch` costs milliseconds and shares memory, where a new interpreter costs seconds. It is safe
because the launcher computes nothing and so has used no thread pool.
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
from collections.abc import Callable, Iterable
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
"""The niceness of an ending process."""
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass
class Child:
    """A process that we started. `status` as from `os.waitpid`, None while it runs."""

    name: str
    pid: int
    pidfd: int
    channel: Channel
    log: Path
    watchdog: Watchdog
    status: int | None = None

    def reap(self) -> int:
        """Wait for its end (`pidfd` is readable then), keep and return its status."""
        if self.status is None:
            _, self.status = os.waitpid(self.pid, 0)
            os.close(self.pidfd)
        return self.status

    def yield_cores(self) -> None:
        """Let live processes run first while the kernel frees this one, which takes longer the more memory it has."""
        if self.status is not None:
            return
        for thread in Path(f"/proc/{self.pid}/task").iterdir():
            with contextlib.suppress(ProcessLookupError):
                os.setpriority(os.PRIO_PROCESS, int(thread.name), _OF_THE_DEAD)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal unless the process was reaped: its id may then be reused."""
        if self.status is None:
            signal.pidfd_send_signal(self.pidfd, number)


def fork_child(
    name: str, body: Callable[[Channel], None], log: Path, siblings: Iterable[Child], *, needs_log: bool = True
) -> Child:
    """Start `body(channel)` in a child. An exception of `body` is sent as `error` and ends the child with code 1.

    Args:
        needs_log: a child that cannot open its log ends; else its output is lost.
        siblings: earlier children; the new one closes its copies of our ends of their channels, so that closing
                our end is visible immediately.
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


def freeze_memory() -> None:
    """Collect garbage and freeze the rest before a fork: its pages stay shared, and no collection scans it again."""
    gc.collect()
    gc.freeze()


def end_children(children: Iterable[Child]) -> None:
    """Kill children that still run, wait for them, close their channels."""
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
    """The whole life of a child, from the fork to its exit; never returns into the launcher's code."""
    code = 1
    try:
        _die_with(parent)
        # Terminals, init systems and schedulers signal all processes together; the launcher decides how to react.
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
    """Run `body` in the child and return the exit code; the launcher shows any error."""
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
    """Return an exception as message fields: names of its classes (nearest first), and its message."""
    rank = getattr(error, "rank", None)
    return {
        "classes": [kind.__name__ for kind in type(error).__mro__],
        "message": str(error) or type(error).__name__,
        "lost_rank": rank if isinstance(rank, int) else None,
    }


def _die_with(parent: int) -> None:
    """Have the kernel kill this process when the launcher dies."""
    if _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:  # The launcher died before this call.
        os._exit(1)


def outlive_parent() -> None:
    """Undo `_die_with`: from now on this process must end by itself once the launcher has died."""
    if _libc.prctl(_PR_SET_PDEATHSIG, 0, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")


def _close_standard_files() -> None:
    """Make input empty and drop output until there is a log; the console is the launcher's."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(nothing, number)
    if nothing > 2:
        os.close(nothing)
    sys.stdin = os.fdopen(0, closefd=False)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)


def _write_to(log: Path) -> None:
    """Redirect standard output and error to the log, also for native code and crashes. Raises `ConfigError`."""
    try:
        file = open_log(log)
    except OSError as error:
        raise ConfigError(f"{log}: cannot be written ({error.strerror})") from error
    for number in (1, 2):
        os.dup2(file, number)
    os.close(file)
    faulthandler.enable(2)


def _one_thread() -> None:
    """Use one thread: ranks share the cores, and the number of threads changes bits."""
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(1)
