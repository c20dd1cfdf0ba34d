"""The folder of checkpoints: list, publish and remove them.

step-10/ step-20/ step-30.e0.partial/   ->  complete(folder) = {10: step-10, 20: step-20}

Every `step-N` is complete: it is renamed into place after all of it is on disk, and renamed away before any of it is
removed. A `.partial` folder is worthless once its writer has ended. Its name has the epoch, so files that an earlier
epoch abandoned do not interfere.
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
    """Step -> folder of every complete checkpoint, ascending; empty if there is no such folder."""
    if not folder.is_dir():
        return {}
    found = {int(match[1]): path for path in folder.iterdir() if (match := _COMPLETE.fullmatch(path.name))}
    return {step: found[step] for step in sorted(found) if (found[step] / MANIFEST).is_file()}


def mark(folder: Path) -> str:
    """Mark the folder as this job's; return the mark, by which ranks elsewhere recognize it. Raises `OSError`."""
    text = uuid.uuid4().hex
    replace_file(folder / _MARK, text.encode())
    return text


def bears(folder: Path, text: str) -> bool:
    """Whether the folder exists and has that mark."""
    try:
        return (folder / _MARK).read_text() == text
    except (OSError, UnicodeDecodeError):
        return False


def partial_path(folder: Path, step: int, epoch: int) -> Path:
    return folder / f"step-{step}.e{epoch}.partial"


def publish(folder: Path, step: int, epoch: int) -> Path:
    """Rename a complete checkpoint into place and replace another one of the same step. Raises OSError."""
    target, partial = folder / f"step-{step}", partial_path(folder, step, epoch)
    if _is_same(target, partial):  # The checkpoint was written again after a change of ranks; keep the one in place.
        shutil.rmtree(partial)
        return target
    sync(partial)
    if target.exists():
        discard(target)
    partial.rename(target)
    sync(folder)
    return target


def _is_same(one: Path, other: Path) -> bool:
    """Whether two checkpoints have equal manifests, which contain the digests of all their files."""
    manifests = one / MANIFEST, other / MANIFEST
    return all(path.is_file() for path in manifests) and filecmp.cmp(*manifests, shallow=False)


def keep_newest(folder: Path, count: int) -> None:
    for path in list(complete(folder).values())[:-count]:
        discard(path)


def discard(path: Path) -> None:
    """Remove a checkpoint. It is renamed first, so that a kill in between leaves no broken one."""
    doomed = path.with_name(f"{path.name}.old.partial")
    _remove(doomed)
    path.rename(doomed)
    _remove(doomed)


def sweep(folder: Path) -> None:
    """Remove unfinished checkpoints. Files of one whose writer still runs may remain until the next sweep."""
    if folder.is_dir():
        for path in folder.iterdir():
            if _PARTIAL.fullmatch(path.name):
                _remove(path)


def set_aside(path: Path) -> None:
    """Rename a damaged checkpoint to `step-N.damaged`."""
    aside = path.with_name(f"{path.name}.damaged")
    _remove(aside)
    path.rename(aside)


def _remove(path: Path) -> None:
    """Remove a folder as far as possible; of a link, only the link."""
    if path.is_symlink():
        path.unlink(missing_ok=True)
    shutil.rmtree(path, ignore_errors=True)
