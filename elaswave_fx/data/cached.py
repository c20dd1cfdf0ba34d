"""Expensive results, kept as files under the cache folder.

In: a name, a key that determines the content, a function that makes it. Out: the content, made once per machine. Files
appear whole (written to a temporary file, then renamed), so ranks can start together; an unreadable file is made again.
Without a cache folder, or with one that another user may change, the function is called each time.
"""

import hashlib
import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np

from elaswave_fx.errors import ConfigError
from elaswave_fx.files import others_may_change


def digest(*parts: bytes | str | int) -> str:
    """A 128-bit name of a content, in hex; parts are delimited."""
    state = hashlib.blake2b(digest_size=16)
    for part in parts:
        data = part if isinstance(part, bytes) else str(part).encode()
        state.update(len(data).to_bytes(8, "little"))
        state.update(data)
    return state.hexdigest()


def cached_array(folder: Path | None, name: str, key: str, make: Callable[[], np.ndarray]) -> np.ndarray:
    """The array, memory-mapped read-only if it comes from the cache."""
    if folder is None or others_may_change(folder):
        return make()
    path = folder / f"{name}-{key}.npy"
    try:
        return np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError):
        array = make()
    _write_whole(path, lambda temporary: _save(temporary, array))
    return array


def cached_json(folder: Path | None, name: str, key: str, make: Callable[[], str]) -> str:
    """The JSON text, from the cache if it is there and complete."""
    if folder is None or others_may_change(folder):
        return make()
    path = folder / f"{name}-{key}.json"
    try:
        text = path.read_text(encoding="utf-8")
        json.loads(text)
        return text
    except (OSError, ValueError, RecursionError):
        text = make()
    _write_whole(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))
    return text


def _save(path: Path, array: np.ndarray) -> None:
    with path.open("wb") as file:
        np.save(file, array, allow_pickle=False)


def _write_whole(path: Path, write: Callable[[Path], object]) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as aside:
            temporary = Path(aside) / path.name
            write(temporary)
            os.replace(temporary, path)
    except OSError as error:
        raise ConfigError(
            f"cache.dir={path.parent.parent}: cannot be written ({error.strerror}); nearest valid: cache.enabled=false"
        ) from error
