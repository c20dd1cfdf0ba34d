"""The digest of all samples: one that differs is found, and a start does not wait for long."""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from elaswave_fx.config.compose import load_config
from elaswave_fx.data.dataset import ArrayDataset, Dataset, MapDataset, Sample, as_tensor
from elaswave_fx.data.sample_digest import BUDGET_S, PROBES, SampleDigest, digest_data
from elaswave_fx.data.source import open_data
from elaswave_fx.data.synthetic import SyntheticTokens
from elaswave_fx.data.tokens import ArrayTokens, TokenDataset
from elaswave_fx.data.transform import Transform, TransformedDataset
from elaswave_fx.data.user_code import UserCode
from elaswave_fx.errors import DataError

SAMPLES = 3000
ANY = load_config(["cache.enabled=false"])


def arrays(change: int | None) -> Dataset:
    images = np.arange(SAMPLES * 400, dtype=np.float32).reshape(SAMPLES, 400)
    if change is not None:
        images[change, 7] += 1
    return ArrayDataset({"image": images, "label": np.zeros(SAMPLES, np.int64)})


def tokens(change: int | None) -> Dataset:
    stream = np.arange(SAMPLES * 1000, dtype=np.int64) % 50_000
    if change is not None:
        stream[change * 1000 + 3] ^= 1
    return TokenDataset(ArrayTokens(stream.astype(np.uint16)), 1000, 50_000, "data")


def transformed(change: int | None) -> Dataset:
    code = UserCode(60.0, DataError)
    return TransformedDataset(tokens(change), Transform(dict, "dict", draws=False, evaluates=True), code)


def users(change: int | None) -> Dataset:
    rows = [(float(index), index % 7) for index in range(SAMPLES)]
    if change is not None:
        rows[change] = (rows[change][0], rows[change][1] + 1)
    return MapDataset(rows, ("x", "y"), "mine.Rows", UserCode(60.0, DataError))


@pytest.mark.parametrize("made", [arrays, tokens, transformed, users], ids=lambda each: each.__name__)
def test_a_single_sample_that_differs_is_found(made: Any) -> None:
    job = digest_data(ANY, made(None), clock=lambda: 0.0)
    assert job.covered == job.pieces and digest_data(ANY, made(None), job) == job
    for change in (0, 1234, SAMPLES - 2):
        assert digest_data(ANY, made(change), job).digest != job.digest
    assert SampleDigest.read(job.text()) == job


class Slow(Dataset):
    """Takes a while over each sample; some cannot be read."""

    def __init__(self, clock: Iterator[int], changed: frozenset[int] = frozenset()) -> None:
        self.read, self._clock, self._changed = list[int](), clock, changed

    def __len__(self) -> int:
        return 5000

    def sample(self, index: int, key: int | None = None) -> Sample:
        next(self._clock)
        self.read.append(index)
        if index % 10 == 3:
            raise DataError(f"sample {index}: is damaged")
        return {"x": as_tensor([index, int(index in self._changed)], "x")}


def test_a_start_looks_at_samples_of_the_users_for_a_while_and_a_joiner_at_as_many() -> None:
    clock, joiners = count(), count()
    slow = Slow(clock)
    job = digest_data(ANY, slow, clock=lambda: BUDGET_S * 0.01 * next(clock))
    assert PROBES <= job.covered < 200 and job.pieces == 5000
    spread = np.histogram(slow.read, bins=8, range=(0, 5000))[0]
    assert spread.min() >= job.covered // 8 - 2, "they lie all over the data"
    other = Slow(joiners)
    assert digest_data(ANY, other, job, clock=lambda: 1e9 * next(joiners)) == job and other.read == slow.read
    seen = next(index for index in slow.read if index % 10 != 3)
    assert digest_data(ANY, Slow(count(), frozenset({seen})), job).digest != job.digest


def test_a_sample_that_hangs_is_waited_for_once() -> None:
    clock = count(0, 100)
    slow = Slow(clock)
    job = digest_data(ANY, slow, clock=lambda: next(clock))
    assert [index % 10 == 3 for index in slow.read] == [*[False] * (job.covered - 1), True]


def test_synthetic_data_follows_from_its_numbers() -> None:
    one, other = (digest_data(ANY, SyntheticTokens(1 << 40, 16, size)) for size in (64, 65))
    assert one.covered == 1 and one.digest != other.digest


def test_token_files_are_read_once_while_they_stay_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "tokens.bin"
    np.arange(5000, dtype="<u2").tofile(file)
    config = load_config(["data=memmap", f"data.paths=[{file}]", "seq_len=16", f"cache.dir={tmp_path / 'cache'}"])

    def made() -> SampleDigest:
        return digest_data(config, open_data(config))

    first = made()
    with monkeypatch.context() as patch:
        patch.setattr("elaswave_fx.data.sample_digest._of_arrays", lambda *_: pytest.fail("it is read again"))
        assert made() == first
    found = file.stat()
    changed = np.arange(5000, dtype="<u2")
    changed[4711] = 7
    changed.tofile(file)
    os.utime(file, ns=(found.st_atime_ns, found.st_mtime_ns + 1))
    assert made().digest != first.digest and made().covered == made().pieces
