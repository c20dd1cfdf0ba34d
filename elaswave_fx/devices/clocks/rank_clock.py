"""A rank's clock during a run, and the file that outlives the rank.

    RUN/clocks/rank-2.json   {"actuator": "cpufreq", "numbers": {"processors": [2]}, "before": {"limits_khz": …}}

The file is on disk before the first change of the clock and is removed after its restoration. The launcher restores the
clock whenever a worker ends. If the launcher was killed too, the next run in that directory, or of this user on this
machine, does. The file contains numbers only; the path or call that sets a clock comes from the restoring process's
configuration (`Targets`).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import msgspec

from elaswave_fx.devices.clocks import make_actuator
from elaswave_fx.devices.clocks.actuator import Actuator, Answer, Setting, Targets
from elaswave_fx.files import read_plain, replace_file

FOLDER = "clocks"

_Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 31)]
_Name = Annotated[str, msgspec.Meta(pattern="^[0-9]{1,9}$")]


class _Before(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A setting of any kind of device."""

    limits_khz: dict[_Name, tuple[_Count, _Count]] | None = None
    locked: bool = False
    mhz: float | None = None


class _LeftBehind(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The content of a rank's file."""

    actuator: str
    numbers: dict[str, _Count | list[_Count]]
    before: _Before


class RankClock:
    """A worker's own clock."""

    def __init__(self, actuator: Actuator, run_dir: Path, rank: int) -> None:
        self._actuator, self._path = actuator, _path(run_dir, rank)
        self._before: Setting | None = None
        self._mhz: float | None = None

    def follow(self, mhz: float | None) -> Answer | None:
        """Set the clock, or restore it if `mhz` is None; return None if nothing changed. A device that refused is asked
        again only for another clock."""
        if mhz == self._mhz:
            return None
        self._mhz = mhz
        if mhz is None:
            return self.restore()
        if self._before is None:
            found = self._actuator.read()
            if isinstance(found, Answer):
                return found
            try:
                self._write_down(found)
            except OSError as error:
                return Answer("unsupported", None, f"{self._path}: cannot be written ({error.strerror})")
            self._before = found
        answer = self._actuator.set(mhz)
        if answer.outcome != "applied":
            self.restore()
        return answer

    def restore(self) -> Answer | None:
        """Restore the clock; None if it was never changed."""
        if self._before is None:
            return None
        answer = self._actuator.restore(self._before)
        if answer.outcome == "applied" or self._actuator.read() == self._before:
            self._before = None
            self._path.unlink(missing_ok=True)
        return answer

    def _write_down(self, before: Setting) -> None:
        self._path.parent.mkdir(exist_ok=True)
        record = {"actuator": self._actuator.name, "numbers": dict(self._actuator.numbers), "before": dict(before)}
        replace_file(self._path, json.dumps(record).encode(), durable=True)


def restore_left_behind(run_dir: Path, targets: Targets, rank: int | None = None) -> list[str]:
    """Restore the clock of a rank that does not run any more, or of all such ranks; return the results as text."""
    folder = run_dir / FOLDER
    if folder.is_symlink():
        return [f"{folder}: is a link, and no run has made it; clocks that it leads to are not put back"]
    paths = [_path(run_dir, rank)] if rank is not None else sorted(folder.glob("rank-*.json"))
    words = [_restore(path, targets) for path in paths if path.exists() or path.is_symlink()]
    if rank is None and folder.is_dir() and not any(folder.iterdir()):
        folder.rmdir()
    return words


def _restore(path: Path, targets: Targets) -> str:
    try:
        left = msgspec.json.decode(read_plain(path), type=_LeftBehind)
        actuator = make_actuator(left.actuator, left.numbers, targets)
        answer = actuator.restore(msgspec.to_builtins(left.before))
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"{path}: does not say how a clock stood before ({type(error).__name__}: {error})"
    if answer.outcome != "applied":
        return f"{path.stem}: its clock cannot be put back: {answer.outcome}, {answer.why}; {path} says how it stood"
    path.unlink(missing_ok=True)
    return f"{path.stem}: its clock stands as before"


def _path(run_dir: Path, rank: int) -> Path:
    return run_dir / FOLDER / f"rank-{rank}.json"
