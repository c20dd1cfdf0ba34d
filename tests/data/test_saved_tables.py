"""Folders of `save_to_disk`, Feather files, and tables in the cache."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from elaswave_fx.errors import DataError
from tests.data.test_tables import ids_of, opened, parquet, table_file, text_file

datasets = pytest.importorskip("datasets")
pa = pytest.importorskip("pyarrow")


def test_an_older_feather_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.arrow").write_bytes(b"FEA1" + bytes(99) + b"FEA1")
    with pytest.raises(DataError, match="is a Feather table; save it as Parquet, which data=hf reads"):
        opened(tmp_path / "a.arrow", "data.fields=[x]", "global_batch=1")


@pytest.mark.parametrize(
    "fault", ["cut", "between batches", "missing", "state.json", "dataset_info.json", "damaged", "empty"]
)
def test_folders_of_save_to_disk_that_are_not_whole(fault: str, tmp_path: Path) -> None:
    folder = tmp_path / "saved"
    table = datasets.Dataset.from_dict({"x": list(range(0 if fault == "empty" else 5000))})
    table.save_to_disk(str(folder))
    shard = next(folder.glob("*.arrow"), folder)
    if fault == "cut":
        shard.write_bytes(shard.read_bytes()[:-100])
    elif fault == "between batches":
        shard.write_bytes(shard.read_bytes()[:-8])
    elif fault == "missing":
        shard.unlink()
    elif fault == "damaged":
        (folder / "state.json").write_text("{")
    elif fault != "empty":
        (folder / fault).unlink()
    with pytest.raises(
        DataError, match="no whole folder of save_to_disk|is a part of what save_to_disk writes|cut off|empty"
    ):
        opened(folder, "data.fields=[x]")


def test_parts_of_a_folder_of_save_to_disk_are_not_read_alone(tmp_path: Path) -> None:
    for name in ("a", "b"):
        datasets.Dataset.from_dict({"x": [1, 2]}).save_to_disk(str(tmp_path / name))
    for paths in (f"{tmp_path}/a/*.arrow", f"{tmp_path}/a,{tmp_path}/b"):
        with pytest.raises(DataError, match="is a part of what save_to_disk writes; give its folder alone, whole"):
            opened([Path(paths)], "data.fields=[x]")


@pytest.mark.parametrize("place", [0, 3, 7])
def test_rows_are_found_in_any_part_of_a_table(place: int, tmp_path: Path) -> None:
    values: list[Any] = [[[1, 2], [3, 4]] for _ in range(8)]
    paths = []
    for number in range(4):
        paths.append(table_file(tmp_path / f"{number}.arrow", x=pa.array(values[2 * number : 2 * number + 2])))
    assert len(opened(paths, "data.fields=[x]", "global_batch=1")) == 8
    for odd, words in (([[1, 2], [3]], "has [12] values in row"), ([[1, None], [3, 4]], f"row {place} has a null")):
        changed = [*values[:place], odd, *values[place + 1 :]]
        table_file(paths[place // 2], x=pa.array(changed[place // 2 * 2 : place // 2 * 2 + 2]))
        with pytest.raises(DataError, match=f"column x: {words}"):
            opened(paths, "data.fields=[x]", "global_batch=1")


@pytest.mark.parametrize("damage", ["cut", "zeros", "gone", "second gone"])
def test_a_damaged_table_in_the_cache_is_made_again(damage: str, tmp_path: Path) -> None:
    path = text_file(tmp_path / "a.jsonl", x=[1] * 10_000 + [0.5])
    words = ("data.fields=[x]", "global_batch=1")
    for _ in range(2):
        assert len(opened(path, *words, cache=tmp_path / "cache")) == 10_001
        first, second = sorted((tmp_path / "cache").rglob("*.arrow"))
        if damage == "cut":
            first.write_bytes(first.read_bytes()[:100])
        elif damage == "zeros":
            first.write_bytes(bytes(first.stat().st_size))
        else:
            (first if damage == "gone" else second).unlink()
    assert opened(path, *words, cache=tmp_path / "cache").sample(10_000)["x"].item() == 0.5


def test_other_rows_under_the_same_time_of_change_are_read(tmp_path: Path) -> None:
    for ids in ([1, 2, 3, 4, 5], [5, 4, 3, 2, 1]):
        path = parquet(tmp_path, pa.array([ids], pa.list_(pa.int32())))
        os.utime(path, (1_000_000_000, 1_000_000_000))  # as copies, archives and images have it
        assert ids_of(opened(path, "data.column=x", cache=tmp_path / "cache")) == ids
