"""Columns of images, and of tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from elaswave_fx.errors import DataError
from tests.data.test_tables import opened, table_file

datasets = pytest.importorskip("datasets")
pa = pytest.importorskip("pyarrow")


@pytest.mark.parametrize("kind", ["saved", "parquet"])
def test_images_are_colors_or_grays(kind: str, tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    colors = np.random.default_rng(0).integers(0, 4, (8, 8, 3), np.uint8) * 80
    drawn = image.fromarray(colors)
    modes = {"P": "RGB", "CMYK": "RGB", "RGB": "RGB", "L": "L", "1": "1"}
    table = datasets.Dataset.from_dict(
        {"image": [drawn.convert(mode) for mode in modes]}, features=datasets.Features({"image": datasets.Image()})
    )
    path = tmp_path / ("a.parquet" if kind == "parquet" else "saved")
    table.to_parquet(str(path)) if kind == "parquet" else table.save_to_disk(str(path))
    dataset = opened(path, "data.fields=[image]", "global_batch=1", cache=tmp_path / "cache")
    for row, (mode, read) in enumerate(modes.items()):
        expected = np.asarray(drawn.convert(mode).convert(read))
        found = dataset.sample(row)["image"].numpy()
        assert found.shape == expected.shape and np.abs(found.astype(int) - expected).max() <= (
            3 if mode == "CMYK" else 0
        )


def test_that_a_palette_is_read_as_colors_is_said(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    classes = image.fromarray(np.arange(16, dtype=np.uint8).reshape(4, 4))
    masks = {"mask": [classes.convert("P")] * 2, "plain": [classes] * 2}
    features = datasets.Features({"mask": datasets.Image(), "plain": datasets.Image()})
    datasets.Dataset.from_dict(masks, features=features).save_to_disk(str(tmp_path / "saved"))
    found = opened(tmp_path / "saved", "data.fields=[mask,plain]", "global_batch=1")
    said = "data: images with a palette are read as colors, in mask: save ids of classes as grays"
    assert said in found.notes and found.sample(0)["plain"].flatten().tolist() == list(range(16))


@pytest.mark.parametrize("odd", [[1.0, None, 3.0, 4.0], None])
def test_a_null_in_a_tensor_is_no_0(odd: Any, tmp_path: Path) -> None:
    kind = pa.fixed_shape_tensor(pa.float32(), [2, 2])
    rows = [[1.0, 2.0, 3.0, 4.0], odd, [1.0, 2.0, 3.0, 4.0]]
    tensors = pa.ExtensionArray.from_storage(kind, pa.array(rows, kind.storage_type))
    with pytest.raises(DataError, match="column x: row 1 has a null"):
        opened(table_file(tmp_path / "a.arrow", x=tensors), "data.fields=[x]", "global_batch=1")


def test_an_image_that_cannot_be_decoded_is_named(tmp_path: Path) -> None:
    pytest.importorskip("PIL.Image")
    rows = [{"bytes": b"no image at all", "path": None}] * 3
    table = datasets.Dataset.from_dict({"image": rows}).cast_column("image", datasets.Image())
    table.save_to_disk(str(tmp_path / "saved"))
    with pytest.raises(DataError, match=r"data.fields: row 0 cannot be decoded \(UnidentifiedImageError"):
        opened(tmp_path / "saved", "data.fields=[image]", "global_batch=1").sample(0)


def test_a_row_without_an_image_is_named(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image").new("RGB", (4, 4))
    features = datasets.Features({"image": datasets.Image()})
    table = datasets.Dataset.from_dict({"image": [image, image, None, image]}, features=features)
    table.save_to_disk(str(tmp_path / "saved"))
    with pytest.raises(DataError, match="data.fields: column image: row 2 has a null"):
        opened(tmp_path / "saved", "data.fields=[image]", "global_batch=1")


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
@pytest.mark.parametrize("turned", [False, True])
def test_tensors_in_columns_have_their_shape(turned: bool, kind: str, tmp_path: Path) -> None:
    values = np.arange(12, dtype="f4").reshape(2, 2, 3)
    stored = np.ascontiguousarray(values.transpose(0, 2, 1)).transpose(0, 2, 1) if turned else values
    path = table_file(tmp_path / f"a.{kind}", x=pa.FixedShapeTensorArray.from_numpy_ndarray(stored))
    dataset = opened(path, "data.fields=[x]", "global_batch=1")
    for row in range(2):
        assert np.array_equal(dataset.sample(row)["x"].numpy(), values[row])
