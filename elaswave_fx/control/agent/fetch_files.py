"""A joiner fetches the files that the job shares from the coordinator, and checks them by their hashes.

In: the job's address, the offers of `Welcome`, a folder. Out: the files in that folder under their offered names, or a
`ConfigError`. If the coordinator dies, its successor continues the file.

    fetch_files(address, welcome.offers, Path("/tmp/elaswave-join-x"))  ->  4018 (bytes)
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

from elaswave_fx.control.agent.ask_to_join import Line, asking
from elaswave_fx.control.protocol.messages import Fetch, FilePart, Offer
from elaswave_fx.control.wire import ControlAddress
from elaswave_fx.errors import ConfigError

PART_S = 30.0
"""Timeout for a piece of a file, long enough for a coordinator that takes over or plans."""


def fetch_files(address: ControlAddress, offers: Sequence[Offer], folder: Path, timeout_s: float = PART_S) -> int:
    """Fetch all files; return their bytes. `timeout_s`: for each piece. Raises `ConfigError` if a file does not arrive,
    arrives with other bytes, or does not fit on the disk."""
    with asking(address) as line:
        for offer in offers:
            _fetch(line, offer, _place(folder, offer.name), timeout_s)
    return sum(offer.size for offer in offers)


def _place(folder: Path, name: str) -> Path:
    """The path of a file, always inside the folder."""
    path = PurePosixPath(name)
    if path.is_absolute() or not path.parts or ".." in path.parts:
        raise ConfigError(f"{name!r}: is no name of a file that a job shares")
    return folder / path


def _fetch(line: Line, offer: Offer, path: Path, timeout_s: float) -> None:
    total, have = hashlib.sha256(), 0
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as file:
            while have < offer.size:
                part = _part(line, Fetch(offer.name, have), offer.size - have, timeout_s)
                file.write(part)
                total.update(part)
                have += len(part)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written ({error.strerror}); TMPDIR names another place") from error
    if total.hexdigest() != offer.digest:
        raise ConfigError(
            f"tcp://{line.where}: {offer.name} did not arrive as it was built: its SHA-256 is {total.hexdigest()}, "
            f"the job's {offer.digest}"
        )


def _part(line: Line, fetch: Fetch, most: int, timeout_s: float) -> bytes:
    answer = line.ask(fetch, timeout_s)
    asked = isinstance(answer, FilePart) and (answer.name, answer.offset) == (fetch.name, fetch.offset)
    if not isinstance(answer, FilePart) or not asked or not 0 < len(answer.data) <= most:
        raise ConfigError(f"tcp://{line.where}: who asks for {fetch.name} at {fetch.offset} is told something else")
    return answer.data
