"""Tables in files with typed columns: Parquet and Arrow. Chosen columns, in parts.

a.parquet {"x": int32, "y": dictionary of string}    names ["y"]  ->  one column of strings, a row group at a time
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from elaswave_fx.data.columns import plain, refuse_missing
from elaswave_fx.data.file_kinds import kind_of
from elaswave_fx.errors import DataError

_END_OF_STREAM = b"\xff\xff\xff\xff\0\0\0\0"
"""End-of-stream mark of the Arrow IPC format."""

_ROWS = 1_000
"""Rows of a Parquet file in memory at a time; they may contain images."""


def schema_of(path: Path) -> Any:
    """The `pyarrow.Schema`. Raises `DataError` for a file that cannot be read, or was cut off."""
    with _opened(path) as file:
        return file.schema_arrow if path.suffix == ".parquet" else file.schema


def has_rows(path: Path) -> bool:
    """Whether the file has rows. Raises `DataError` as `schema_of` does."""
    with _opened(path) as file:
        if path.suffix == ".parquet":
            return file.metadata.num_rows > 0
        return any(len(batch) for batch in _batches(file))


def parts_of_binary(path: Path, names: Sequence[str]) -> Iterator[Any]:
    """The rows of a file as `pyarrow.Table`s of those columns, without extension types, dictionaries and views. Raises
    `DataError` for a file that cannot be read, was cut off, or lacks a column."""
    import pyarrow as pa

    refuse_missing(path, names, schema_of(path).names)
    with _opened(path) as file:
        batches = file.iter_batches(_ROWS, columns=list(names)) if path.suffix == ".parquet" else _batches(file)
        for batch in batches:
            part = pa.Table.from_batches([batch]).select(list(names))
            yield pa.table({name: plain(part.column(name)) for name in names})


def class_names(schema: Any) -> Mapping[str, list[str]]:
    """Names of labels by column, in the format that the `datasets` library stores beside a schema."""
    try:
        features = json.loads((schema.metadata or {}).get(b"huggingface", b"{}")).get("info", {}).get("features", {})
        return {
            name: list(feature["names"])
            for name, feature in features.items()
            if isinstance(feature, dict) and feature.get("_type") == "ClassLabel"
        }
    except (ValueError, TypeError, AttributeError, KeyError):
        return {}  # other writers use the same key


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    import pyarrow as pa
    from pyarrow import parquet

    try:
        if path.suffix == ".parquet":
            with parquet.ParquetFile(path) as file:
                yield file
        else:
            yield _arrow_reader(path)
    except (pa.ArrowException, OSError, ValueError) as error:
        raise DataError(f"data.paths={path}: cannot be read ({' '.join(str(error).split())})") from error


def _arrow_reader(path: Path) -> Any:
    """A reader of a memory-mapped file or stream."""
    import pyarrow as pa

    file = pa.memory_map(str(path))
    try:
        return pa.ipc.open_file(file)
    except pa.ArrowInvalid:
        kind = kind_of(path)
        if kind is not None and "data=hf reads it" not in kind.cure:
            raise DataError(f"data.paths={path}: is {kind.name}; {kind.cure}") from None
        file.seek(max(0, file.size() - len(_END_OF_STREAM)))
        if file.read() != _END_OF_STREAM:
            raise DataError(f"data.paths={path}: is cut off, the mark at its end is missing") from None
        file.seek(0)
        return pa.ipc.open_stream(file)


def _batches(reader: Any) -> Iterator[Any]:
    if hasattr(reader, "num_record_batches"):
        return (reader.get_batch(number) for number in range(reader.num_record_batches))
    return iter(reader)
