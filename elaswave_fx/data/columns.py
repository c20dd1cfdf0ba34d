"""Columns of Arrow tables: contents are determined by the types of whole columns, never by a first row.

texts_of(column, …) string, large_string, …     ->  documents; rows of null are left out
tokens_of(column)   lists of integers           ->  one stream; rows of null are left out, as empty ones are
refuse_no_numbers   numbers and lists of them   ->  nothing, or a `DataError` that names the first row of null
"""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from elaswave_fx.data.dataset import BEYOND_FLOAT32, IGNORED, ROUNDED_FROM
from elaswave_fx.errors import DataError

_EXAMINED, _MOST = 256, 0.95
"""Texts examined, spread over a column, and the share of them that decides."""

_NUMBER = rb"-?\d+\.?\d*(?:[eE][-+]?\d+)?"
_IN_LISTS = (
    rb"(?>" + _NUMBER + rb"|None|nan|NaN|-?inf|[Tt]rue|[Ff]alse|null|np\.\w+|tensor|array|dtype=[\w.]+|\.\.\."
    rb"|'-?\d+'|\"-?\d+\"|[\s,;()\[\]])*+"
)  # fmt: skip
_LIST = re.compile(rb"(?:tensor|array)?\s*[\[(]" + _IN_LISTS + rb"(?<=[\])])")
"""Numbers as written by str() of lists, arrays and tensors."""

_NUMBERS = re.compile(_NUMBER + rb"(?:[\s,;|]+" + _NUMBER + rb")*+")

_JSON = "arrow.json"
"""The extension type of `datasets` for columns of several types: every value as its JSON text."""


def refuse_missing(path: Path, wanted: Sequence[str], there: Sequence[str]) -> None:
    """Raise `DataError` unless a file has exactly one column of each of these names."""
    for name in wanted:
        if there.count(name) != 1:
            times = f"{there.count(name)} columns" if name in there else "no column"
            raise DataError(f"data.paths={path}: has {times} {name}; it has {', '.join(there)}")


def texts_of(column: Any, place: str) -> list[bytes] | None:
    """The texts of a chunked array, in UTF-8; None for other contents. Raises `DataError` for lists of numbers written
    as text, as pandas writes them to CSV."""
    import pyarrow as pa

    column = plain(column)
    if not (pa.types.is_string(column.type) or pa.types.is_large_string(column.type)):
        return None
    texts = column.cast(pa.large_string()).cast(pa.large_binary()).drop_null().to_pylist()
    if any(b"\0" in text for text in texts):
        raise DataError(f"{place}: has a text with a character of 0, which marks the end of a document; remove it")
    _refuse_all(texts, _LIST, "lists of numbers as text", place, "save them as lists, which Parquet and JSON keep")
    return texts


def refuse_numbers_as_text(column: Any, place: str) -> None:
    """Raise `DataError` for texts that are all numbers, from a file format without types."""
    texts = [text.encode() for text in column.drop_null().to_pylist()]
    cure = "columns of numbers go to data.fields, and lists of them to Parquet or JSON Lines"
    _refuse_all(texts, _NUMBERS, "numbers as text", place, cure)


def _refuse_all(texts: list[bytes], form: re.Pattern[bytes], what: str, place: str, cure: str) -> None:
    spread = [text.strip() for text in texts[:: max(1, len(texts) // _EXAMINED)] if text.strip()]
    seen = [text for text in spread if form.fullmatch(text)]
    if seen and len(seen) >= _MOST * len(spread):
        first = " ".join(seen[0].decode().split())[:24]
        raise DataError(f"{place}: holds {what}, such as {first}…; {cure}")


def tokens_of(column: Any, place: str) -> np.ndarray | None:
    """The token ids of a chunked array of lists, concatenated; None for other contents. Raises `DataError` for a null
    among the ids, with its row."""
    import pyarrow as pa

    column = plain(column)
    if not _is_list(column.type) or not pa.types.is_integer(column.type.value_type):
        return None
    ids = _compute().list_flatten(column)
    if ids.null_count:
        raise DataError(f"{place}: row {_row_of_null(column, of_rows=False)} has a null among its token ids")
    chunks = ids.chunks if isinstance(ids, pa.ChunkedArray) else [ids]
    parts = [chunk.to_numpy(zero_copy_only=False) for chunk in chunks]
    return np.concatenate(parts) if parts else np.empty(0, np.int64)


def refuse_no_numbers(column: Any, place: str) -> None:
    """Raise `DataError` for values that are neither numbers nor nested lists of them, or for a null, with its row."""
    import pyarrow as pa

    column = plain(column)
    kind = column.type
    while _is_list(kind):
        kind = kind.value_type
    if pa.types.is_null(kind) and column.null_count == len(column):
        raise DataError(f"{place}: has no values, all {len(column)} rows are null")
    if pa.types.is_null(kind):
        kind = pa.int64()  # all lists are empty
    if not (pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)):
        raise DataError(
            f"{place}: holds {type_in_words(column.type)}; a sample is made of numbers and lists of numbers"
        )
    refuse_null(column, place)


def refuse_left_out(beside: Any, value: int, place: str, name: str) -> None:
    """Raise `DataError` if a column beside token ids contains `value`, which marks ids to leave out, while all ids are
    joined to one stream."""
    import pyarrow as pa

    values = _values(beside)
    if pa.types.is_boolean(values.type):
        values = values.cast(pa.int8())
    is_number = pa.types.is_integer(values.type) or pa.types.is_floating(values.type)
    if is_number and _compute().any(_compute().equal(values, value)).as_py():  # other labels do not belong to tokens
        raise DataError(
            f"{place}: some of its tokens are padding, or not to be predicted, as {value} in {name} tells, and all "
            "would be one stream; save the ids without such, or read samples as they are, as "
            "data.fields=[input_ids,attention_mask,labels] does"
        )


def is_rounded(column: Any) -> bool:
    """Whether float32 visibly rounds a column of numbers."""
    import pyarrow as pa

    values = _values(column)
    return pa.types.is_float64(values.type) and _largest(values) >= ROUNDED_FROM


def refuse_null(column: Any, place: str) -> None:
    """Raise `DataError` with the number of the first null row."""
    row = _row_of_null(column)
    if row is not None:
        raise DataError(f"{place}: row {row} has a null (or NaN in JSON); leave the row out, or give it a value")


def refuse_too_large(column: Any, place: str) -> None:
    """Raise `DataError` for a number that fits neither int64 nor float32, the types of samples."""
    import pyarrow as pa

    values = _values(column)
    if pa.types.is_uint64(values.type) and _largest(values) >= 2**63:
        raise DataError(f"{place}: holds {_largest(values)}; whole numbers of 2**63 and more are not supported")
    if pa.types.is_float64(values.type) and float(np.finfo(np.float32).max) < _largest(values) < float("inf"):
        raise DataError(f"{place}: holds {_largest(values):g}, {BEYOND_FLOAT32}")


def holds_whole_numbers(column: Any) -> bool:
    """Whether a column holds lists of whole numbers."""
    import pyarrow as pa

    return _is_list(plain(column).type) and pa.types.is_integer(_values(column).type)


def refuse_no_class(column: Any, names: Sequence[str], place: str) -> None:
    """Raise `DataError` for a label outside the classes, except -100."""
    values = _values(column)
    odd = next((value for value in _compute().unique(values).to_pylist() if not 0 <= value < len(names)), IGNORED)
    if odd != IGNORED:
        raise DataError(
            f"{place}: holds the label {odd}, and its {len(names)} classes are 0 to {len(names) - 1}; leave such rows "
            f"out, or give them {IGNORED}, which is not counted"
        )


def refuse_foreign_ids(column: Any, vocab_size: int, place: str, may_be_ignored: bool) -> None:
    """Raise `DataError` for a token id outside the vocabulary. `may_be_ignored`: -100 is allowed."""
    ends = _compute().min_max(_values(column)).as_py()
    least, most = ends["min"] or 0, ends["max"] or 0
    if most >= vocab_size:
        raise DataError(f"data.vocab_size={vocab_size}: {place} holds token {most}; nearest valid: {most + 1}")
    if least < 0 and not (may_be_ignored and least == IGNORED):
        raise DataError(f"{place}: holds the negative token id {least}")


def _values(column: Any) -> Any:
    column = plain(column)
    while _is_list(column.type):
        column = _compute().list_flatten(column)
    return column


def _largest(values: Any) -> float | int:
    ends = _compute().min_max(values).as_py()
    return max((abs(end) for end in ends.values() if end is not None), default=0)


def refuse_ragged(column: Any, place: str) -> None:
    """Raise `DataError` if lists differ in length, with the first row whose length differs from row 0."""
    wanted: list[int] = []
    for first, part in _chunks(column):
        rows, depth = np.arange(first, first + len(part)), 0
        while _is_list(part.type) and len(part):
            lengths = _compute().list_value_length(part).to_numpy(zero_copy_only=False)
            if depth == len(wanted):
                wanted.append(int(lengths[0]))
            (others,) = np.nonzero(lengths != wanted[depth])
            if len(others):
                raise DataError(
                    f"{place}: has {lengths[others[0]]} values in row {rows[others[0]]} and {wanted[depth]} in row 0; "
                    "all samples must have one shape: pad them (with labels of -100 and an attention_mask), or have "
                    "data.transform do so"
                )
            rows, depth = rows[_compute().list_parent_indices(part).to_numpy()], depth + 1
            part = part.flatten()


def _chunks(column: Any) -> Iterator[tuple[int, Any]]:
    """(first row, array) of each part: together they may have more values than an array can count."""
    first = 0
    for chunk in plain(column).chunks:
        yield first, chunk
        first += len(chunk)


def _compute() -> Any:
    import pyarrow.compute

    return pyarrow.compute  # most of pyarrow.compute is generated on import, which no type checker sees


def type_in_words(kind: Any) -> str:
    return "values of several types" if _JSON in str(kind) else str(kind)


def plain(column: Any) -> Any:
    """The column without storage details: extension types, dictionaries, views."""
    import pyarrow as pa

    kind = column.type
    if isinstance(kind, pa.FixedShapeTensorType) and any(
        chunk.null_count or chunk.storage.flatten().null_count for chunk in column.chunks
    ):  # an extension array may hide the nulls of its storage
        return pa.chunked_array([chunk.storage for chunk in column.chunks], kind.storage_type)
    if isinstance(kind, pa.FixedShapeTensorType):
        nested = kind.value_type
        for _ in kind.shape:
            nested = pa.list_(nested)
        return pa.chunked_array(
            [pa.array(chunk.to_numpy_ndarray().tolist(), nested) for chunk in column.chunks], nested
        )
    if isinstance(kind, pa.BaseExtensionType) and kind.extension_name != _JSON:
        return plain(pa.chunked_array([chunk.storage for chunk in column.chunks], kind.storage_type))
    if pa.types.is_dictionary(kind):
        return plain(column.cast(kind.value_type))
    if pa.types.is_string_view(kind):
        return column.cast(pa.string())
    if pa.types.is_list_view(kind) or pa.types.is_large_list_view(kind):
        # A cast of pyarrow 26 loses the last list.
        lists = pa.large_list(kind.value_type)
        return pa.chunked_array([pa.array(chunk.to_pylist(), lists) for chunk in column.chunks], lists)
    return column


def _is_list(kind: Any) -> bool:
    import pyarrow as pa

    return pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)


def _row_of_null(column: Any, of_rows: bool = True) -> int | None:
    """The first row with a null in its lists, or (`of_rows`) a null row; None if there is none."""
    for first, part in _chunks(column):
        rows, found, counts = np.arange(first, first + len(part)), [], of_rows
        while True:
            if part.null_count and counts:
                found.append(int(rows[part.is_null().to_numpy(zero_copy_only=False)][0]))
            if not _is_list(part.type):
                break
            rows = rows[_compute().list_parent_indices(part).to_numpy()]
            part, counts = part.flatten(), True
        if found:
            return min(found)
    return None
