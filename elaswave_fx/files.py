"""Files that readers see whole: what the run directory, the store and the caches have in common.

replace_file(run_dir / "summary.json", b"{}\\n", durable=True)
json_lines(run_dir / "ledger.jsonl")  ->  [{"step": 0, …}, {"step": 1, …}]
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
from pathlib import Path
from typing import Any


def replace_file(path: Path, data: bytes, *, durable: bool = False) -> None:
    """Write a file beside `path` and rename it, so that readers see the old bytes or the new ones.

    `durable`: the new ones also survive a loss of power once this returns. Raises `OSError`; the old file stays then.
    """
    beside = path.with_name(f".{path.name}.{os.getpid()}.new")
    with beside.open("wb") as file:
        file.write(data)
        if durable:
            file.flush()
            os.fsync(file.fileno())
    beside.replace(path)
    if durable:
        sync(path.parent)


def write_at(descriptor: int, data: bytes, offset: int) -> None:
    """Write all of it. A disk that is nearly full takes a part at first; the rest then raises the `OSError`."""
    view = memoryview(data)
    while view:
        written = os.pwrite(descriptor, view, offset)
        view, offset = view[written:], offset + written


def sync(path: Path) -> None:
    """Make sure that a file's bytes, or the names in a folder, are on disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def others_may_change(folder: Path) -> bool:
    """Whether another user may change what a folder of a cache holds: it, or the one above, is theirs or open to all.

    A folder that does not exist is ours to make. Root and a user's group are trusted."""
    for place, may_be_shared in ((folder, False), (folder.parent, True)):
        try:
            found = place.stat()
        except (FileNotFoundError, NotADirectoryError):
            continue
        is_sticky = may_be_shared and found.st_mode & stat.S_ISVTX  # as /tmp: everybody's, but not what lies in it
        if found.st_uid not in (0, os.geteuid()) or (found.st_mode & stat.S_IWOTH and not is_sticky):
            return True
    return False


def file_digest(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal. Raises `OSError`."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def json_lines(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a file, none if there is no such file; without the half of one that a kill may have left."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n")[:-1]]
