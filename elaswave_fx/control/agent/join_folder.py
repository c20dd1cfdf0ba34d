"""The temporary folder of a joiner's fetched files; it does not outlive its process for long.

with join_folder() as folder: …      /tmp/elaswave-join-…, which only this user may enter; gone after the block
remove_left_behind()                 removes folders of this user's killed processes
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_PREFIX, _ALIVE = "elaswave-join-", "alive"

YOUNG_S = 60.0
"""Age below which a folder may be new and not locked yet."""


@contextmanager
def join_folder() -> Iterator[Path]:
    """A new folder of this process. Raises `OSError` if the disk is full."""
    remove_left_behind()
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX))
    alive = os.open(folder / _ALIVE, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(alive, fcntl.LOCK_EX)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)  # mapped files stay readable
        os.close(alive)


def remove_left_behind() -> None:
    """Remove folders of this user's processes that were killed while joining. A live process holds a lock."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            found = folder.lstat()
            if found.st_uid == os.geteuid() and not folder.is_symlink() and _is_dead(folder, found.st_mtime):
                shutil.rmtree(folder, ignore_errors=True)


def _is_dead(folder: Path, made_s: float) -> bool:
    try:
        alive = os.open(folder / _ALIVE, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return time.time() - made_s > YOUNG_S
    try:
        fcntl.flock(alive, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(alive)
    return time.time() - made_s > YOUNG_S
