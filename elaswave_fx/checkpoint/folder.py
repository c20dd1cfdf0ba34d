"""The folder of checkpoints: which are complete, which is the newest, how one appears and disappears.

step-10/ step-20/ step-30.e0.partial/   ->  complete(folder) = {10: step-10, 20: step-20}

What is named `step-N` is whole: it was renamed into place after everything in it was on disk, and it is renamed away
before anything of it is removed. Whatever ends in `.partial` is worthless as soon as its writer is gone. Those who
write a checkpoint together are the ranks of an epoch: what an earlier one has given up does not get in their way.
"""

from __future__ import annotations

import filecmp
import re
import shutil
import uuid
from pathlib import Path

from elaswave_fx.files import replace_file, sync

MANIFEST, _MARK = "checkpoint.json", ".job"
_COMPLETE = re.compile(r"step-(\d+)")
_PARTIAL = re.compile(r"step-\d+(\.old|\.e\d+)?\.partial")


def complete(folder: Path) -> dict[int, Path]:
    """Step -> folder of every complete checkpoint, ascending; nothing if there is no such folder."""
    if not folder.is_dir():
        return {}
    found = {int(match[1]): path for path in folder.iterdir() if (match := _COMPLETE.fullmatch(path.name))}
    return {step: found[step] for step in sorted(found) if (found[step] / MANIFEST).is_file()}


def mark(folder: Path) -> str:
    """Leave a mark of the job that is to write here, so that a rank elsewhere can see whether a folder of that name is
    this one; returns it. Raises `OSError`."""
    text = uuid.uuid4().hex
    replace_file(folder / _MARK, text.encode())
    return text


def bears(folder: Path, text: str) -> bool:
    """Whether the folder is here and bears that mark."""
    try:
        return (folder / _MARK).read_text() == text
    except (OSError, UnicodeDecodeError):
        return False


def partial_path(folder: Path, step: int, epoch: int) -> Path:
    """Return the folder in which the ranks of an epoch let the checkpoint after `step` steps grow."""
    return folder / f"step-{step}.e{epoch}.partial"


def publish(folder: Path, step: int, epoch: int) -> Path:
    """Rename a checkpoint that is whole into place; another one of the same step goes away. Raises OSError."""
    target, partial = folder / f"step-{step}", partial_path(folder, step, epoch)
    if _is_same(target, partial):  # Written once more, after a change of ranks: there is always one of them in place.
        shutil.rmtree(partial)
        return target
    sync(partial)
    if target.exists():
        discard(target)
    partial.rename(target)
    sync(folder)
    return target


def _is_same(one: Path, other: Path) -> bool:
    """Whether two checkpoints have the same manifests, in which the digests of all their files are."""
    manifests = one / MANIFEST, other / MANIFEST
    return all(path.is_file() for path in manifests) and filecmp.cmp(*manifests, shallow=False)


def keep_newest(folder: Path, count: int) -> None:
    """Remove all complete checkpoints but the `count` newest."""
    for path in list(complete(folder).values())[:-count]:
        discard(path)


def discard(path: Path) -> None:
    """Remove a checkpoint: first its name, then the rest, so that a kill in between leaves no broken one."""
    doomed = path.with_name(f"{path.name}.old.partial")
    _remove(doomed)
    path.rename(doomed)
    _remove(doomed)


def sweep(folder: Path) -> None:
    """Remove what writers left that did not live to the end, or gave it up. Of those who still write to what they have
    given up, something may stay for the next time."""
    if folder.is_dir():
        for path in folder.iterdir():
            if _PARTIAL.fullmatch(path.name):
                _remove(path)


def set_aside(path: Path) -> None:
    """Take a damaged checkpoint out of the way; it is kept as `step-N.damaged`."""
    aside = path.with_name(f"{path.name}.damaged")
    _remove(aside)
    path.rename(aside)


def _remove(path: Path) -> None:
    """A folder, as far as that works; of a link that somebody has made the name alone, and not what it leads to."""
    if path.is_symlink():
        path.unlink(missing_ok=True)
    shutil.rmtree(path, ignore_errors=True)
