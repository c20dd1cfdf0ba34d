"""Files of a folder as splits: which are read, and what is said of it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from elaswave_fx.config.compose import load_config
from elaswave_fx.data.source import open_source
from elaswave_fx.errors import DataError
from tests.data.test_tables import lines, lines_of, opened, text_file

datasets = pytest.importorskip("datasets")
pa = pytest.importorskip("pyarrow")


def test_files_of_a_folder_are_of_splits(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    for name, rows in (("train-00000-of-00001", 7), ("validation-00000-of-00001", 3), ("test-00000-of-00001", 2)):
        datasets.Dataset.from_dict({"x": [1.0] * rows}).to_parquet(str(folder / f"{name}.parquet"))
    words = ("data.fields=[x]", "global_batch=1")
    for split, rows in (("train", 7), ("validation", 3), ("test", 2)):
        assert len(opened(folder, *words, f"data.split={split}")) == rows
        assert len(opened([folder / "*.parquet"], *words, f"data.split={split}")) == rows
    with pytest.raises(DataError, match="data.split=tset: no such split; nearest valid value: test"):
        opened(folder, *words, "data.split=tset")
    named = [folder / "train-00000-of-00001.parquet", folder / "test-00000-of-00001.parquet"]
    assert len(opened(named, *words)) == 9, "files that are named are taken"
    with pytest.raises(DataError, match="data.split=test: files whose names tell no split; name the files"):
        opened(named, *words, "data.split=test")
    assert "data: 1 of 3 files are of data.split=train, as their names tell" in lines_of(folder, *words)
    assert len(opened([folder / "test*"], *words, "data.split=test")) == 2
    datasets.Dataset.from_dict({"x": [1.0]}).save_to_disk(str(tmp_path / "saved"))
    with pytest.raises(DataError, match="data.split=test: .*saved.* has no splits"):
        opened(tmp_path / "saved", *words, "data.split=test")


def test_splits_are_told_by_the_ends_and_capitals_of_words(tmp_path: Path) -> None:
    for name in ("trainset", "XTest", "val_data", "DevSet"):
        text_file(tmp_path / f"{name}.jsonl", x=[len(name)])
    words = ("data.fields=[x]", "global_batch=1")
    found = {split: len(opened(tmp_path, *words, f"data.split={split}")) for split in ("train", "validation", "test")}
    assert found == {"train": 1, "validation": 2, "test": 1}


@pytest.mark.parametrize("kind", ["memmap", "files"])
def test_that_files_of_several_splits_are_read_is_said(kind: str, tmp_path: Path) -> None:
    for name in ("fineweb_train_0", "fineweb_val_0"):
        (tmp_path / f"{name}.bin").write_bytes((np.arange(4000) % 97).astype("<u2").tobytes() if kind == "memmap" else
                                               b"some words of text " * 99)  # fmt: skip
    words = [f"data={kind}", "seq_len=8", "global_batch=2"]
    said = "data: reads files of several splits (train, validation), as their names tell"
    lines = open_source(load_config([*words, f"data.paths=[{tmp_path}]"])).lines
    assert any(line.startswith(said) for line in lines)
    lines = open_source(load_config([*words, f"data.paths=[{tmp_path}/fineweb_train_0.bin]"])).lines
    assert not any("several splits" in line for line in lines)


@pytest.mark.parametrize(("name", "is_said"), [("a.jsonl", True), ("a.CSV", True), ("a.txt", False)])
def test_that_a_table_is_read_as_text_is_said(name: str, is_said: bool, tmp_path: Path) -> None:
    (tmp_path / name).write_text('{"text": "some words"}\n' * 99)
    words = ["data=files", "seq_len=8", "global_batch=2", f"data.paths=[{tmp_path}/{name}]"]
    assert (
        any("as it is written, names and quotes included" in line for line in open_source(load_config(words)).lines)
        is is_said
    )


@pytest.mark.parametrize(
    ("names", "read"),
    [
        (("part-0", "part-1", "test"), {"train": (0, 1), "test": (2,), "validation": "no such split"}),
        (("data", "dev"), {"train": (0,), "validation": (1,)}),
        (("train/en/a", "train/de/a", "test/en/a"), {"train": (1, 0), "test": (2,)}),
        (
            ("train", "test", "unsupervised"),
            {"train": "unsupervised.jsonl has no split", "test": "has no split in its"},
        ),
        (("a/b", "a/c"), {"train": (0, 1), "test": "files whose names tell no split"}),
        (("test",), {"train": "no such split", "test": (0,)}),
        (("test/train-0", "train/test-0"), {"train": (0,), "test": (1,)}),
    ],
)
def test_files_without_a_split_are_of_no_other(names: Sequence[str], read: dict[str, Any], tmp_path: Path) -> None:
    for number, name in enumerate(names):
        path = tmp_path / "data" / f"{name}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        lines(path, {"x": number})
    for split, expected in read.items():
        words = ("data.fields=[x]", "global_batch=1", f"data.split={split}")
        if isinstance(expected, str):
            with pytest.raises(DataError, match=f"data.split={split}: .*{expected}"):
                opened(tmp_path / "data", *words)
            continue
        dataset = opened(tmp_path / "data", *words)
        assert tuple(int(dataset.sample(row)["x"]) for row in range(len(dataset))) == expected


def test_a_folder_that_is_named_like_a_split_is_one(tmp_path: Path) -> None:
    (tmp_path / "test").mkdir()
    lines(tmp_path / "test" / "a.jsonl", {"x": 1}, {"x": 2})
    for split in ("test", "train"):
        assert len(opened(tmp_path / "test", "data.fields=[x]", "global_batch=1", f"data.split={split}")) == 2
    with pytest.raises(DataError, match="files whose names tell no split"):
        opened(tmp_path / "test", "data.fields=[x]", "data.split=validation")
