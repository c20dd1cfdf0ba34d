"""A digest of the samples that a process reads; a joiner's must equal that of its job.

    made = digest_data(config, dataset)             ->  SampleDigest("9f3a…", covered=50000, pieces=50000)
    digest_data(config, dataset, like=made)         ->  the same, where the same samples are read

Data in arrays is covered completely, in pieces of a mebibyte and up to `MOST_PIECES` of them, with a few training
samples; the digest of unchanged token files is cached. Samples of user code are covered one by one, for at most
`BUDGET_S`. The job decides the number of pieces, and a joiner covers as many: their order is spread over all pieces.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from elaswave_fx.config.keys import Config
from elaswave_fx.data.cached import cached_json, digest
from elaswave_fx.data.corpus import matching_files
from elaswave_fx.data.dataset import Arrays, Dataset
from elaswave_fx.errors import DataError

BUDGET_S = 0.5
"""Seconds that a start may spend on samples of user code."""

MOST_PIECES = 1 << 14
"""Upper bound of pieces; a fast disk reads as many in ten seconds, once. They are all of 16 GiB, or a spread over
more."""

PROBES = 16
"""Minimum number of samples covered."""

_GOLDEN = (math.sqrt(5) - 1) / 2


@dataclass(frozen=True)
class SampleDigest:
    """`covered`: number of the dataset's `pieces` that were read; pieces are samples, or parts of arrays."""

    digest: str
    covered: int
    pieces: int

    def text(self) -> str:
        """One word, for the member info."""
        return f"{self.digest}-{self.covered}-{self.pieces}"

    @staticmethod
    def read(text: str) -> SampleDigest:
        """The digest of a `text`."""
        found, covered, pieces = text.split("-")
        return SampleDigest(found, int(covered), int(pieces))


def digest_data(
    config: Config, dataset: Dataset, like: SampleDigest | None = None, clock: Callable[[], float] = time.monotonic
) -> SampleDigest:
    """The digest of the data that `config` names, opened. `like`: cover as much as this digest, however long it
    takes."""
    arrays, count = dataset.arrays(), len(dataset)
    if arrays is None:
        until_s = clock() + BUDGET_S
        most = count if like is None else min(like.covered, count)
        return _digest(dataset.sample, count, most, lambda: like is not None or clock() < until_s)
    whole = SampleDigest.read(_kept(config, lambda: _of_arrays(arrays).text()))
    probes = _digest(dataset.sample, count, min(PROBES, count))
    return SampleDigest(digest(whole.digest, probes.digest), whole.covered, whole.pieces)


def _of_arrays(arrays: Arrays) -> SampleDigest:
    count, read = arrays
    return _digest(read, count, min(count, MOST_PIECES))


def _kept(config: Config, make: Callable[[], str]) -> str:
    """The digest of token files, from the cache if they are unchanged."""
    files = _token_files(config) if config.data.kind == "memmap" else ()
    if not files:
        return make()
    known = [f"{path.resolve()} {found.st_size} {found.st_mtime_ns}" for path in files for found in [path.stat()]]
    cache = config.cache.path
    key = digest(config.data.dtype, *known)
    return json.loads(cached_json(cache and cache / "samples", "samples", key, lambda: json.dumps(make())))


def _token_files(config: Config) -> tuple[Path, ...]:
    """Files of tokens and their indices; none if a file is named by a prefix."""
    try:
        files = matching_files(config.data.paths)
    except DataError:
        return ()
    return (*files, *(index for path in files if (index := path.with_suffix(".idx")).is_file()))


def _digest(
    read: Callable[[int], Mapping[str, object]], count: int, most: int, goes_on: Callable[[], bool] = lambda: True
) -> SampleDigest:
    """The digest of up to `most` of `count` pieces; at least `PROBES` of them, unless one fails."""
    total, covered, failed = hashlib.sha256(str(count).encode()), 0, False
    for index in _spread(count, most):
        if (covered >= PROBES or failed) and not goes_on():
            break
        failed |= not _added(total, read, index)
        covered += 1
    return SampleDigest(total.hexdigest(), covered, count)


def _added(total: hashlib._Hash, read: Callable[[int], Mapping[str, object]], index: int) -> bool:
    """Add a piece. Return whether it could be read. Unreadable pieces count as equal; training on them reports the
    error."""
    try:
        found = sorted(read(index).items())
    except DataError:
        total.update(f"{index} fails".encode())
        return False
    for name, value in found:
        array = np.ascontiguousarray(value)
        total.update(f"{index} {name} {array.dtype.str} {array.shape}".encode())
        total.update(array.tobytes())
    return True


def _spread(count: int, most: int) -> Iterator[int]:
    """`most` different numbers below `count`; any first ones are spread over the range, by the golden ratio."""
    step = max(1, round(count * _GOLDEN))
    while math.gcd(step, count) != 1:
        step += 1
    return (number * step % count for number in range(most))
