"""The files of a run. Other programs may read them during the run: they see only whole lines and whole files.

directory = RunDirectory.create(Path("runs/today")) directory.step(line)          # a line of metrics.jsonl, visible to
readers when the call returns directory.summary(summary)    # summary.json: written beside, then renamed
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import math
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from elaswave_fx.errors import ConfigError
from elaswave_fx.files import json_lines, open_log, open_new, replace_file
from elaswave_fx.observe.metrics import StepLine, Summary
from elaswave_fx.ownership import refuse_links
from elaswave_fx.words import size_text

MODEL = "model.safetensors"
_RESERVATION, _INITIAL, _LOCK = ".model.reserved", ".init", ".lock"
_LOOK_S = 0.1

_OF_EARLIER_RUNS = (
    "metrics.jsonl",
    "events.jsonl",
    "eval.jsonl",
    "summary.json",
    "ledger.jsonl",
    "plan-*.json",
    "run.json",
    "logs/console.log",
    "logs/rank-*.log",
    "logs/coordinator*.log",
    MODEL,
)


_NO_LINKS = ("logs", "clocks", "earlier", _INITIAL, _LOCK)
"""Entries that a run writes or empties, and that may not be links; `control` and a folder of checkpoints may."""

_OF_THE_END = ("summary.json", "plan-*.json", "run.json")
"""Files of an earlier part of the run, which move to `earlier/` when it is resumed."""


class RunDirectory:
    """A run directory. Only the launcher writes it, except for the processes' logs and the coordinator's files: the
    ledger, `control/`, plans of later epochs."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._files: dict[str, _LineFile] = {}

    @staticmethod
    def prepare(path: Path) -> None:
        """Create the directory and keep an earlier run's files. Raises `ConfigError`, also for links in it."""
        with _refused(path):
            refuse_links(path, f"hydra.run.dir={path}", _NO_LINKS)
            (path / "logs").mkdir(parents=True, exist_ok=True)

    @staticmethod
    @contextlib.contextmanager
    def claimed(path: Path) -> Iterator[None]:
        """Claim the directory until the end, or until the last child that is forked meanwhile has ended.

        Raises `ConfigError` if it is claimed or cannot be written.
        """
        with _refused(path):
            descriptor = os.open(path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise ConfigError(f"hydra.run.dir={path}: another run goes on in it; wait for its end") from error
            # Later forks inherit the lock above; this one is the launcher's alone.
            fcntl.lockf(descriptor, fcntl.LOCK_EX)
            try:
                yield
            finally:
                RunDirectory.release(path)
                RunDirectory.drop_initial(path)
        finally:
            os.close(descriptor)

    @staticmethod
    def await_orphans(path: Path, say: Callable[[str], object], timeout_s: float) -> None:
        """Wait, at most `timeout_s`, for ranks of an earlier run there whose launcher has died: they finish their step
        and save, and this run may resume from that. Ranks whose launcher lives are not waited for."""
        until_s = time.monotonic() + timeout_s
        said = False
        while RunDirectory._has_orphans(path) and time.monotonic() < until_s:
            if not said:
                say(f"{path}: waits for the ranks of the run before, whose launcher is gone, to save and end")
            said = True
            time.sleep(_LOOK_S)

    @staticmethod
    def _has_orphans(path: Path) -> bool:
        try:
            descriptor = os.open(path / _LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            return False  # `claimed` raises the reason
        try:
            return _is_held(descriptor, fcntl.flock) and not _is_held(descriptor, fcntl.lockf)
        finally:
            os.close(descriptor)

    @staticmethod
    def reserve(path: Path, size: int) -> None:
        """Reserve `size` bytes for the model until it is written, or `release`. Raises `ConfigError` without room."""
        try:
            with open_new(path / _RESERVATION) as file:
                os.posix_fallocate(file.fileno(), 0, max(size, 1))
        except OSError as error:
            RunDirectory.release(path)
            raise ConfigError(
                f"hydra.run.dir={path}: has no room for the model of {size_text(size)} ({error.strerror})"
            ) from error

    @staticmethod
    def release(path: Path) -> None:
        """Release the reservation, if any."""
        with contextlib.suppress(OSError):
            (path / _RESERVATION).unlink()

    @staticmethod
    def initial(path: Path) -> Path:
        """The folder of the builder's initial tensors, for joiners and for a rollback to the beginning."""
        return path / _INITIAL

    @staticmethod
    def drop_initial(path: Path) -> None:
        """Remove the initial tensors at the end of the job."""
        shutil.rmtree(RunDirectory.initial(path), ignore_errors=True)

    @staticmethod
    def holds_run(path: Path) -> bool:
        """Whether the directory contains an earlier run."""
        return (path / "metrics.jsonl").exists()

    @staticmethod
    def create(path: Path, goes_on_at: int | None = None) -> RunDirectory:
        """Create the directory and remove an earlier run's files.

        If the earlier run is resumed at step `goes_on_at`, only lines of later steps, which are replayed, and the model
        are removed. Its summary and plans go to `earlier/`. Raises `ConfigError`.
        """
        RunDirectory.prepare(path)
        directory = RunDirectory(path)
        with _refused(path):
            if goes_on_at is not None:
                directory._set_aside()
                (path / MODEL).unlink(missing_ok=True)
                directory._keep("metrics.jsonl", lambda line: line["step"] < goes_on_at)
                directory._keep("eval.jsonl", lambda line: line["step"] <= goes_on_at)
                directory._keep("events.jsonl", lambda line: True)
            else:
                shutil.rmtree(path / "earlier", ignore_errors=True)
                for old in (old for pattern in _OF_EARLIER_RUNS for old in path.glob(pattern)):
                    old.unlink()
            for name in ("metrics.jsonl", "events.jsonl"):
                os.close(open_log(path / name))
        return directory

    @staticmethod
    def rejoin(path: Path) -> RunDirectory:
        """Continue the files of a run whose launcher has died, after their last whole lines. Raises `OSError`."""
        directory = RunDirectory(path)
        for name in ("metrics.jsonl", "eval.jsonl", "events.jsonl"):
            directory._keep(name, lambda line: True)
        return directory

    def _set_aside(self) -> None:
        """Move the files of the run's earlier part to `earlier/1`, `earlier/2` and so on."""
        found = [old for pattern in _OF_THE_END for old in self.path.glob(pattern)]
        if found:
            number = 1 + sum(1 for _ in self.path.glob("earlier/*"))
            folder = self.path / "earlier" / str(number)
            folder.mkdir(parents=True)
            for old in found:
                old.rename(folder / old.name)

    def lines(self, name: str) -> list[dict[str, Any]]:
        """Return the whole lines of a file, none if it does not exist."""
        return json_lines(self.path / name)

    def _keep(self, name: str, wanted: Callable[[dict[str, Any]], bool]) -> None:
        lines = [json.dumps(line) + "\n" for line in self.lines(name) if wanted(line)]
        if lines or (self.path / name).exists():
            self._replace(name, "".join(lines))

    def log(self, name: str) -> Path:
        """Return the path of logs/NAME.log; names are `rank-R`, `builder`, `coordinator`, `console`."""
        return self.path / "logs" / f"{name}.log"

    def plan(self, epoch: int, text: str) -> None:
        self._replace(f"plan-{epoch}.json", text if text.endswith("\n") else text + "\n")

    def run(self, fields: Mapping[str, Any]) -> None:
        """Write run.json: what this run, or this part of it, consists of."""
        self._replace("run.json", json.dumps(fields, indent=1) + "\n")

    def step(self, line: StepLine) -> None:
        self._append("metrics.jsonl", dataclasses.asdict(line))

    def event(self, t_ms: float, kind: str, epoch: int, **fields: Any) -> None:
        """Add the line of an event `t_ms` after the launcher's start."""
        self._append("events.jsonl", {"t_ms": round(t_ms, 3), "kind": kind, "epoch": epoch, **fields})

    def evaluation(self, step: int, loss: float, count: int) -> None:
        """Add the line of the mean loss over `count` held-out targets after `step` committed steps."""
        self._append("eval.jsonl", {"step": step, "loss": loss, "count": count})

    def summary(self, summary: Summary) -> None:
        """Write summary.json, the last file of a run."""
        self._replace("summary.json", json.dumps(finite(summary.as_json()), indent=2) + "\n")

    def rewind(self, step: int) -> None:
        """Drop the lines of steps from `step` on."""
        self.close()
        self._keep("metrics.jsonl", lambda line: line["step"] < step)
        self._keep("eval.jsonl", lambda line: line["step"] <= step)

    @property
    def trouble(self) -> str | None:
        """Why lines are still to be written, as text; None if all are."""
        return next((file.trouble for file in self._files.values() if file.trouble is not None), None)

    def close(self) -> None:
        """Close the files. Lines that still do not fit on the disk are lost."""
        for file in self._files.values():
            file.close()
        self._files.clear()

    def _open(self, name: str) -> _LineFile:
        if name not in self._files:
            self._files[name] = _LineFile(self.path / name)
        return self._files[name]

    def _append(self, name: str, fields: Mapping[str, Any]) -> None:
        self._open(name).add(json.dumps(finite(fields)) + "\n")

    def _replace(self, name: str, text: str) -> None:
        replace_file(self.path / name, text.encode(), durable=True)


def _is_held(descriptor: int, lock: Callable[[int, int], object]) -> bool:
    """Whether another process holds a lock of this kind."""
    try:
        lock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    lock(descriptor, fcntl.LOCK_UN)
    return False


@contextlib.contextmanager
def _refused(path: Path) -> Iterator[None]:
    """Turn errors of the first writes to a run directory into `ConfigError`: the user can fix them."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"hydra.run.dir={path}: cannot be written ({error.strerror})") from error


class _LineFile:
    """A file to append lines to. Unwritable ones (a full disk, a link of that name) are retried with the next line."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.trouble: str | None = None
        self._waiting = bytearray()
        self._descriptor: int | None = None
        self._write()

    def add(self, line: str) -> None:
        self._waiting += line.encode()
        self._write()

    def close(self) -> None:
        self._write()
        if self._descriptor is not None:
            os.close(self._descriptor)

    def _write(self) -> None:
        try:
            if self._descriptor is None:
                self._descriptor = open_log(self.path)
            while self._waiting:
                del self._waiting[: os.write(self._descriptor, self._waiting)]
            self.trouble = None
        except OSError as error:
            self.trouble = f"{self.path}: cannot be written ({error.strerror}); its lines are kept until it can"


def finite(value: Any) -> Any:
    """Return the value with None for infinities and NaN, which JSON does not have."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    return value
