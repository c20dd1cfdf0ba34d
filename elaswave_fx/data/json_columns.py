"""Chosen columns of JSON files, where a table of all columns cannot be made because others have values of many types.

{"text": "a", "meta": 1}
{"text": "b", "meta": {"by": "x"}}     names ("text",)   ->  a table of one column
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from elaswave_fx.errors import DataError

_ROWS = 10_000
"""So many are Python objects at a time."""


def json_columns(files: Iterable[Path], names: Sequence[str]) -> Any:
    """The `pyarrow.Table` of those columns that some row has; None if a file is no list or lines of JSON objects.

    Raises `DataError` for a column whose own values are of several types."""
    import pyarrow as pa

    rows = (row for path in files for row in _rows(path))
    parts: list[Any] = []
    try:
        while chunk := list(islice(rows, _ROWS)):
            first = sum(len(part) for part in parts)
            there = [name for name in names if any(name in row for row in chunk)]
            parts.append(pa.table({name: _column(chunk, name, first) for name in there}))
    except (ValueError, OSError, RecursionError):
        return None
    try:
        return pa.concat_tables(parts, promote_options="permissive") if parts else None
    except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
        raise DataError(f"data.paths: columns {', '.join(names)} hold values of several types ({error})") from error


def names_in(files: Iterable[Path]) -> list[str]:
    """The keys of the first rows of each file; none of what is no JSON."""
    try:
        return list(dict.fromkeys(name for path in files for row in islice(_rows(path), _ROWS) for name in row))
    except (ValueError, OSError, RecursionError):
        return []


def _column(rows: Sequence[Mapping[str, Any]], name: str, first: int) -> Any:
    import pyarrow as pa

    values = [row.get(name) for row in rows]
    try:
        return pa.array(values)
    except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
        first_kind = next((type(value) for value in values if value is not None), None)
        others = (number for number, value in enumerate(values) if type(value) not in (first_kind, type(None)))
        number = next(others, 0)
        raise DataError(
            f"data.paths: column {name} holds values of several types, such as {values[number]!r:.40} in row "
            f"{first + number}"
        ) from error


def _rows(path: Path) -> Iterator[Mapping[str, Any]]:
    """The objects of a file: one a line, or a list of them. Raises ValueError for anything else."""
    with path.open(encoding="utf-8-sig") as file:
        start = file.read(1)
        file.seek(0)
        for value in json.load(file) if start == "[" else (json.loads(line) for line in file if line.strip()):
            if not isinstance(value, dict):
                raise ValueError(f"{path}: holds a {type(value).__name__} where an object is wanted")
            yield value
