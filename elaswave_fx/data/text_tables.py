"""Tables in text formats: CSV, JSON, lines. Chosen columns, in parts whose types follow from all their values.

{"text": "a", "meta": 1}
{"text": "2024-05-01", "meta": {"by": "x"}}     names ["text"]  ->  one column of strings, as they are written
"""

import csv
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

from elaswave_fx.data.columns import refuse_missing
from elaswave_fx.data.file_kinds import TEXT, kind_of, refuse_no_text
from elaswave_fx.errors import DataError

ROWS = 10_000
"""Rows that are Python objects at a time."""

_LARGEST_FIELD = 1 << 30
"""Upper bound of a CSV value in characters."""

_MISSING = frozenset(("", "na", "n/a", "#n/a", "nan", "-nan", "null", "none", "<na>"))
"""Marks of missing values where numbers are expected, in lower case."""

_OTHER_MARKS = ";\t|"
"""Other separators of files called CSV."""

_WHOLE = re.compile(r"-?[0-9]+")

_TOO_LARGE = "whole numbers of 2**63 and more"

Row = Mapping[str, Any]


def names_in_text(path: Path, rows: int | None) -> list[str]:
    """Names of a header, or of the first objects of a JSON file; `rows` None: all objects. Raises `DataError` for a
    file without names."""
    if path.suffix == ".csv":
        with _opened(path) as file:
            return _header(path, csv.reader(file, strict=True))
    if path.suffix == ".txt":
        return ["text"]
    return list(dict.fromkeys(name for row in islice(_json_rows(path), rows) for name in row))


def parts_of_text(path: Path, names: Sequence[str], numbers: bool, first: int) -> Iterator[Any]:
    """The rows of a file as `pyarrow.Table`s of those columns; missing values are null.

    `numbers`: values of CSV files are numbers, not texts. `first`: number of the first row, for messages. Raises
    `DataError` for a file that cannot be read.
    """
    import pyarrow as pa

    kinds: dict[str, tuple[Iterator[Row], Callable[..., Any]]] = {
        ".csv": (_csv_rows(path, names), _of_csv),
        ".txt": (_lines(path), _of_json),
    }
    rows, make = kinds.get(path.suffix) or (_json_with(path, names), _of_json)
    while chunk := list(islice(rows, ROWS)):
        values = {name: [row.get(name) for row in chunk] for name in names}
        yield pa.table({name: make(each, name, numbers, first) for name, each in values.items()})
        first += len(chunk)


def several_types(name: str, seen: str, row: int) -> str:
    return f"data.paths: column {name} holds values of several types, such as {seen} in row {row}"


def _of_csv(values: Sequence[str | None], name: str, numbers: bool, first: int) -> Any:
    """Texts, with empty ones missing; or the first kind of number that fits all of them, if `numbers`."""
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
    if any(text is not None and ("x" in text.lower() or text.startswith("+")) for text in texts):
        return array  # hexadecimal digits are cast, and wrap around
    for kind in (pa.int64(), pa.float64(), pa.bool_()):
        try:
            return pyarrow.compute.cast(array, kind)
        except pa.ArrowInvalid:
            if kind == pa.int64() and all(text is None or _WHOLE.fullmatch(text) for text in texts):
                raise DataError(f"data.paths: column {name} holds {_TOO_LARGE}") from None
    return array


def _of_json(values: Sequence[Any], name: str, numbers: bool, first: int) -> Any:
    import pyarrow as pa

    try:
        array = pa.array(values)
        kind = array.type
        while pa.types.is_list(kind):
            kind = kind.value_type
        if pa.types.is_floating(kind) and _holds_truth(values):
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
        number = _first_other(values)
        raise DataError(several_types(name, f"{values[number]!r:.40}", first + number)) from error


def _holds_truth(values: Sequence[Any]) -> bool:
    kinds = set(map(type, values))
    return bool in kinds or (list in kinds and any(_holds_truth(each) for each in values if type(each) is list))


def _first_other(values: Sequence[Any]) -> int:
    """The first value that has another type than the first one, or a list that does; 0 if none."""
    first_kind = next((type(value) for value in values if value is not None), None)
    others = (number for number, value in enumerate(values) if type(value) not in (first_kind, type(None)))
    mixed = (number for number, value in enumerate(values) if type(value) is list and _holds_truth(value))
    return next(others, next(mixed, 0))


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """The file as text; errors while reading become a `DataError`."""
    kind = kind_of(path)
    if kind not in (None, TEXT):
        named = f"; {kind.cure}" if "data=hf" not in kind.cure else f", and is named {path.suffix}; rename it"
        raise DataError(f"data.paths={path}: is {kind.name}{named}")
    try:
        with path.open(encoding="utf-8-sig", newline="" if path.suffix == ".csv" else None) as file:
            yield file
    except UnicodeDecodeError as error:
        byte = error.object[error.start]
        raise DataError(
            f"data.paths={path}: is not UTF-8 (byte {byte:#04x}); convert it, as iconv -t UTF-8 does"
        ) from error
    except csv.Error as error:
        with path.open(encoding="utf-8-sig") as file:
            _refuse_other_marks(path, file.readline().strip())
        raise DataError(f"data.paths={path}: is no CSV ({error}); quotes in texts are written twice") from error
    except (ValueError, RecursionError) as error:
        reason = " ".join(str(error).split())
        raise DataError(
            f"data.paths={path}: is neither JSON Lines nor a list of JSON objects ({reason}); write an object a line"
        ) from error
    except OSError as error:
        raise DataError(f"data.paths={path}: cannot be read ({error.strerror or error})") from error


def _header(path: Path, rows: Iterator[list[str]]) -> list[str]:
    names = [name.strip() for name in next((row for row in rows if row), [])]
    if len(names) == 1:
        _refuse_other_marks(path, names[0])
    return names


def _refuse_other_marks(path: Path, header: str) -> None:
    if "," not in header and (found := [mark for mark in _OTHER_MARKS if mark in header]):
        raise DataError(
            f"data.paths={path}: its header {header[:40]!r} has no comma, and {found[0]!r}: save it with commas"
        )


def _csv_rows(path: Path, wanted: Sequence[str]) -> Iterator[Row]:
    """The rows by name. Raises `DataError` for a row whose values do not match the header in number."""
    limit = csv.field_size_limit(_LARGEST_FIELD)
    try:
        with _opened(path) as file:
            rows = csv.reader(file, strict=True)
            names = _header(path, rows)
            if names:  # else it is empty
                refuse_missing(path, wanted, names)
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


def _lines(path: Path) -> Iterator[Row]:
    with _opened(refuse_no_text(path)) as file:
        yield from ({"text": line.removesuffix("\n")} for line in file)


def _json_with(path: Path, names: Sequence[str]) -> Iterator[Row]:
    """The objects of a file. Raises `DataError` if none has any of these keys."""
    missing, seen = set(names), {}
    for row in _json_rows(path):
        if missing:
            missing -= row.keys()
            seen |= dict.fromkeys(row)
        yield row
    if seen:
        refuse_missing(path, sorted(missing), list(seen))


def _json_rows(path: Path) -> Iterator[Row]:
    """The objects of a file: one per line, or a list; a bare text belongs to a column `text`."""
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
    """The value of a JSON constant; NaN is missing, as in other tables."""
    return None if name == "NaN" else float(name)


def _json_lines(file: Iterable[str]) -> Iterator[Any]:
    for number, line in enumerate(file, 1):
        if line.strip():
            try:
                yield json.loads(line, parse_constant=_constant)
            except json.JSONDecodeError as error:
                raise ValueError(f"line {number}: {error.msg}") from error
