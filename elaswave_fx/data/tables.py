"""One table of the chosen columns of many files, each column of the one type that fits all of its values.

a.parquet {"x": int32}  b.parquet {"x": int64}    ->  x: int64        a.csv "x" 1 2  b.csv "x" 0.5    ->  x: double

Rows are read in parts, kept in Arrow files under the cache folder, from which ranks and later runs map them.
"""

import contextlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from elaswave_fx.data.binary_tables import class_names, parts_of_binary, schema_of
from elaswave_fx.data.text_tables import ROWS, names_in_text, parts_of_text, several_types
from elaswave_fx.errors import ConfigError, DataError

VERSION = "1"
"""Changes whenever the same files give another table."""

_COUNT = "count"
"""The file that contains the number of parts."""

BINARY = (".parquet", ".arrow")


def column_names(files: Sequence[Path], wanted: Sequence[str]) -> list[str]:
    """The names of the files' columns; for JSON those of the first objects, if these suffice, else of all. Raises
    `DataError` for a file that cannot be read."""
    if files[0].suffix in BINARY:
        return list(schema_of(files[0]).names)
    for rows in (ROWS, None):
        names = list(dict.fromkeys(name for path in files for name in names_in_text(path, rows)))
        if set(wanted) <= set(names):
            break
    return names


def read_files(files: Sequence[Path], columns: Sequence[str], numbers: bool, folder: Path | None) -> Any:
    """The `pyarrow.Table` of those columns; missing values are null.

    `numbers`: values of CSV files are numbers, not texts. `folder`: for its parts; None keeps them in memory. Raises
    `DataError` for a file that cannot be read, and for a column whose values are of several types.
    """
    import pyarrow as pa

    metadata = _one_metadata(files, columns) if files[0].suffix in BINARY else None
    if files[0].suffix == ".arrow":
        folder = None  # these files are mapped directly
    parts = (
        _stored(folder, lambda: _parts(files, columns, numbers)) if folder else list(_parts(files, columns, numbers))
    )
    try:
        return pa.concat_tables(parts, promote_options="permissive").replace_schema_metadata(metadata)
    except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
        raise DataError(_difference(parts, columns) or _not_one_type(columns, error)) from error


def _one_metadata(files: Sequence[Path], columns: Sequence[str]) -> Any:
    """Metadata of the first file's schema. Raises `DataError` if another file names its labels differently."""
    first, metadata = files[0], schema_of(files[0]).metadata
    known = {path: class_names(schema_of(path)) for path in files}
    for name in columns:
        for path, classes in known.items():
            if classes.get(name) != known[first].get(name):
                raise DataError(
                    f"data.paths: column {name} has other classes in {path.name} than in {first.name}, or in another "
                    "order"
                )
    return metadata


def _parts(files: Sequence[Path], columns: Sequence[str], numbers: bool) -> Iterator[Any]:
    import pyarrow as pa

    first = 0
    for path in files:
        binary = path.suffix in BINARY
        for part in parts_of_binary(path, columns) if binary else parts_of_text(path, columns, numbers, first):
            if len(part):
                yield part
            first += len(part)
    if not first:
        yield pa.table({name: pa.nulls(0) for name in columns})


def _difference(parts: Sequence[Any], names: Sequence[str]) -> str | None:
    """The first part whose column has another type than those before it, in words."""
    import pyarrow as pa

    for name in names:
        row, seen = 0, None
        for part in parts:
            kind = part.schema.field(name).type
            if seen is None and not pa.types.is_null(kind):
                seen = kind
            if seen is not None:
                try:
                    merged = pa.unify_schemas(
                        [pa.schema([(name, seen)]), pa.schema([(name, kind)])], promote_options="permissive"
                    )
                    seen = merged.field(name).type
                except (pa.ArrowInvalid, pa.ArrowTypeError):
                    return several_types(name, f"{kind} after {seen}", row)
            row += len(part)
    return None


def _not_one_type(names: Sequence[str], error: Exception) -> str:
    return f"data.paths: columns {', '.join(names)}: values of one type cannot be made ({' '.join(str(error).split())})"


def _stored(folder: Path, parts: Callable[[], Iterator[Any]]) -> list[Any]:
    """The parts from their files, which are first written, atomically, if missing."""
    try:
        return _mapped(folder)
    except (OSError, ValueError):  # pyarrow raises errors of these two kinds
        pass
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as aside:
            _write(Path(aside) / "parts", parts())
            with contextlib.suppress(OSError, ValueError):
                return _mapped(folder)  # another process was as fast
            shutil.rmtree(folder, ignore_errors=True)  # the existing parts are damaged
            os.replace(Path(aside) / "parts", folder)
        return _mapped(folder)
    except OSError as error:
        raise ConfigError(
            f"cache.dir={folder.parent.parent}: cannot be written ({error.strerror or error}); nearest valid: "
            "cache.enabled=false"
        ) from error


def _mapped(folder: Path) -> list[Any]:
    import pyarrow as pa

    count = int((folder / _COUNT).read_text())
    return [pa.ipc.open_file(pa.memory_map(str(folder / f"{part}.arrow"))).read_all() for part in range(count)]


def _write(folder: Path, parts: Iterator[Any]) -> None:
    """One file per run of parts that have the same types."""
    import pyarrow as pa

    folder.mkdir()
    writer, schema, count = None, None, 0
    try:
        for part in parts:
            if part.schema != schema:
                if writer is not None:
                    writer.close()
                schema = part.schema
                writer = pa.ipc.new_file(str(folder / f"{count}.arrow"), schema)
                count += 1
            assert writer is not None
            writer.write_table(part)
    finally:
        if writer is not None:
            writer.close()
    (folder / _COUNT).write_text(str(count))
