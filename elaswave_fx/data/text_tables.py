"""Tables that are written as text, CSV and JSON: chosen columns, whose types follow from all of their values.

{"text": "a", "meta": 1}
{"text": "2024-05-01", "meta": {"by": "x"}}     names ["text"]  ->  one column of strings, as they are written

Rows are read in parts. Those lie in Arrow files under the cache folder, from which ranks and later runs map them.
"""

import csv
import json
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

from elaswave_fx.data.file_kinds import TEXT, kind_of
from elaswave_fx.errors import ConfigError, DataError

_ROWS = 10_000
"""So many are Python objects at a time."""

_LARGEST_FIELD = 1 << 30
"""Characters of a value in a CSV file."""

_MISSING = frozenset(("", "na", "n/a", "#n/a", "nan", "-nan", "null", "none", "<na>"))
"""What stands for no value where numbers are wanted, in small letters."""

_OTHER_MARKS = ";\t|"
"""What separates values in files that are called CSV, too."""

_TOO_LARGE = "whole numbers of 2**63 and more"

Row = Mapping[str, Any]


def column_names(files: Sequence[Path], wanted: Sequence[str]) -> list[str]:
    """The names that headers have, and objects of JSON files: the first ones, if they have what is wanted, else all.
    Raises `DataError` for a file that is none."""
    for rows in (_ROWS, None):
        names = list(dict.fromkeys(name for path in files for names in _names(path, rows) for name in names))
        if set(wanted) <= set(names):
            break
    return names


def text_table(files: Sequence[Path], names: Sequence[str], numbers: bool, folder: Path | None) -> Any:
    """The `pyarrow.Table` of those columns; what is missing in a row is null.

    `numbers`: values of CSV files are numbers, and not texts. `folder`: for its parts; None keeps them in memory.
    Raises `DataError` for a file that cannot be read, and for a column whose values are of several types.
    """
    import pyarrow as pa

    parts = _stored(folder, lambda: _parts(files, names, numbers)) if folder else list(_parts(files, names, numbers))
    try:
        return pa.concat_tables(parts, promote_options="permissive")
    except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
        raise DataError(_difference(parts, names) or _not_one_type(names, error)) from error


def _parts(files: Sequence[Path], names: Sequence[str], numbers: bool) -> Iterator[Any]:
    import pyarrow as pa

    first = 0
    for path in files:
        rows, make = (_csv_rows(path, names), _of_csv) if _is_csv(path) else (_json_with(path, names), _of_json)
        while chunk := list(islice(rows, _ROWS)):
            values = {name: [row.get(name) for row in chunk] for name in names}
            yield pa.table({name: make(each, name, numbers, first) for name, each in values.items()})
            first += len(chunk)
    if not first:
        yield pa.table({name: pa.nulls(0) for name in names})


def _of_csv(values: Sequence[str | None], name: str, numbers: bool, first: int) -> Any:
    """Texts, of which an empty one is missing; or the first kind of number that all of them are, if they are one."""
    import pyarrow as pa
    import pyarrow.compute

    if not numbers:
        return pa.array([text or None for text in values], pa.string())
    texts = [
        None if text is None or text.strip().lower() in _MISSING else text.strip().removeprefix("+") for text in values
    ]
    array = pa.array(texts, pa.string())
    if array.null_count == len(array):
        return pa.nulls(len(array))
    for kind in (pa.int64(), pa.float64(), pa.bool_()):
        try:
            return pyarrow.compute.cast(array, kind)
        except pa.ArrowInvalid:
            if kind == pa.int64() and all(text is None or text.removeprefix("-").isdigit() for text in texts):
                raise DataError(f"data.paths: column {name} holds {_TOO_LARGE}") from None
    return array


def _of_json(values: Sequence[Any], name: str, numbers: bool, first: int) -> Any:
    import pyarrow as pa

    try:
        array = pa.array(values)
        if pa.types.is_floating(array.type) and bool in map(type, values):
            raise pa.ArrowTypeError("truth among numbers")
        return array
    except UnicodeEncodeError as error:
        row = first + next(number for number, value in enumerate(values) if error.object in str(value))
        raise DataError(
            f"data.paths: column {name} has half of a surrogate pair in row {row} "
            f"({error.object[error.start]!r}), which is no text"
        ) from error
    except OverflowError as error:
        raise DataError(f"data.paths: column {name} holds {_TOO_LARGE}") from error
    except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
        first_kind = next((type(value) for value in values if value is not None), None)
        others = (number for number, value in enumerate(values) if type(value) not in (first_kind, type(None)))
        number = next(others, 0)
        raise DataError(_several_types(name, f"{values[number]!r:.40}", first + number)) from error


def _several_types(name: str, seen: str, row: int) -> str:
    return f"data.paths: column {name} holds values of several types, such as {seen} in row {row}"


def _difference(parts: Sequence[Any], names: Sequence[str]) -> str | None:
    """The first part whose column is of another type than those before it, in words."""
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
                    return _several_types(name, f"{kind} after {seen}", row)
            row += len(part)
    return None


def _not_one_type(names: Sequence[str], error: Exception) -> str:
    return f"data.paths: columns {', '.join(names)}: values of one type cannot be made ({' '.join(str(error).split())})"


def _is_csv(path: Path) -> bool:
    return path.suffix == ".csv"


def _names(path: Path, rows: int | None) -> Iterator[Iterable[str]]:
    if _is_csv(path):
        with _opened(path) as file:
            yield _header(path, csv.reader(file, strict=True))
    else:
        yield from islice(_json_rows(path), rows)


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """The file as text. What goes wrong while it is read becomes a `DataError`."""
    kind = kind_of(path)
    if kind not in (None, TEXT):
        named = f"; {kind.cure}" if "data=hf" not in kind.cure else f", and is named {path.suffix}; rename it"
        raise DataError(f"data.paths={path}: is {kind.name}{named}")
    try:
        with path.open(encoding="utf-8-sig", newline="" if _is_csv(path) else None) as file:
            yield file
    except UnicodeDecodeError as error:
        byte = error.object[error.start]
        raise DataError(
            f"data.paths={path}: is not UTF-8 (byte {byte:#04x}); convert it, as iconv -t UTF-8 does"
        ) from error
    except csv.Error as error:
        raise DataError(f"data.paths={path}: is no CSV ({error}); quotes in texts are written twice") from error
    except (ValueError, RecursionError) as error:
        reason = " ".join(str(error).split())
        raise DataError(
            f"data.paths={path}: is neither JSON Lines nor a list of JSON objects ({reason}); write an object a line"
        ) from error
    except OSError as error:
        raise DataError(f"data.paths={path}: cannot be read ({error.strerror or error})") from error


def _header(path: Path, rows: Iterator[list[str]]) -> list[str]:
    names = next((row for row in rows if row), [])
    if len(names) == 1 and (found := [mark for mark in _OTHER_MARKS if mark in names[0]]):
        raise DataError(
            f"data.paths={path}: its header {names[0][:40]!r} has no comma, and {found[0]!r}: save it with commas"
        )
    return names


def _csv_rows(path: Path, wanted: Sequence[str]) -> Iterator[Row]:
    """The rows by name. Raises `DataError` for a row that has not as many values as the header has names."""
    limit = csv.field_size_limit(_LARGEST_FIELD)
    try:
        with _opened(path) as file:
            rows = csv.reader(file, strict=True)
            names = _header(path, rows)
            for name in wanted:
                if names.count(name) != 1:
                    times = "no column" if name not in names else f"{names.count(name)} columns"
                    raise DataError(f"data.paths={path}: has {times} {name}; it has {', '.join(names)}")
            for row in rows:
                if row and len(row) != len(names):
                    why = "a text with commas that is not in quotes, a comma at the end, or a name of the row"
                    if len(row) < len(names):
                        why = "a text with line breaks that is not in quotes, or a row that was cut"
                    raise DataError(
                        f"data.paths={path}: line {rows.line_num} has {len(row)} values, and the header {len(names)} "
                        f"names ({', '.join(names)}): {why}; give every column a name, and put such texts in quotes"
                    )
                if row:
                    yield dict(zip(names, row, strict=True))
    finally:
        csv.field_size_limit(limit)


def _json_with(path: Path, names: Sequence[str]) -> Iterator[Row]:
    """The objects of a file. Raises `DataError` where none of them has one of these keys."""
    missing, seen = set(names), {}
    for row in _json_rows(path):
        if missing:
            missing -= row.keys()
            seen |= dict.fromkeys(row)
        yield row
    if missing and seen:
        raise DataError(f"data.paths={path}: has no column {', '.join(sorted(missing))}; it has {', '.join(seen)}")


def _json_rows(path: Path) -> Iterator[Row]:
    """The objects of a file: one a line, or a list of them; a text alone is that of a column `text`."""
    with _opened(path) as file:
        start = file.read(1)
        while start.isspace():
            start = file.read(1)
        file.seek(0)
        values = json.load(file, parse_constant=_constant) if start == "[" else _json_lines(file)
        for number, value in enumerate(values):
            if isinstance(value, str):
                value = {"text": value}
            if not isinstance(value, dict):
                raise ValueError(f"row {number} is a {type(value).__name__}")
            yield value


def _constant(name: str) -> float | None:
    """NaN is no value, as in other tables."""
    return None if name == "NaN" else float(name)


def _json_lines(file: Iterable[str]) -> Iterator[Any]:
    for number, line in enumerate(file, 1):
        if line.strip():
            try:
                yield json.loads(line, parse_constant=_constant)
            except json.JSONDecodeError as error:
                raise ValueError(f"line {number}: {error.msg}") from error


def _stored(folder: Path, parts: Any) -> list[Any]:
    """The parts from their files, which are written first if they are not there; whole, or not at all."""
    try:
        return _mapped(folder)
    except (OSError, ValueError):  # pyarrow's errors are of these two kinds
        pass
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as aside:
            _write(Path(aside) / "parts", parts())
            if not folder.exists():  # another process may have been as fast
                os.replace(Path(aside) / "parts", folder)
        return _mapped(folder)
    except OSError as error:
        raise ConfigError(
            f"cache.dir={folder.parent.parent}: cannot be written ({error.strerror or error}); nearest valid: "
            "cache.enabled=false"
        ) from error


def _mapped(folder: Path) -> list[Any]:
    import pyarrow as pa

    files = sorted(folder.glob("*.arrow"), key=lambda path: int(path.stem))
    if not files:
        raise FileNotFoundError(folder)
    return [pa.ipc.open_file(pa.memory_map(str(path))).read_all() for path in files]


def _write(folder: Path, parts: Iterator[Any]) -> None:
    """One file for parts in a row that have the same types."""
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
