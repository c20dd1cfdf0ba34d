"""Local data of the Hugging Face `datasets` library.

In: a folder of `save_to_disk`, or json, jsonl, csv, parquet and txt files. Out: the documents of a text column, a
stream of a column of token ids, or samples of columns of numbers (`data.fields`). Nothing is fetched from a network.
"""

import contextlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from elaswave_fx.config.keys import DataConfig
from elaswave_fx.config.validation import hint, show
from elaswave_fx.data.binary_tables import has_rows, schema_of
from elaswave_fx.data.cached import digest
from elaswave_fx.data.columns import (
    holds_whole_numbers,
    is_rounded,
    refuse_foreign_ids,
    refuse_left_out,
    refuse_no_class,
    refuse_no_numbers,
    refuse_null,
    refuse_numbers_as_text,
    refuse_ragged,
    refuse_too_large,
    texts_of,
    tokens_of,
    type_in_words,
)
from elaswave_fx.data.corpus import matching_files
from elaswave_fx.data.dataset import (
    ID_FIELDS,
    IGNORED,
    Dataset,
    Sample,
    as_tensor,
    notes_of_palettes,
    notes_of_rounding,
)
from elaswave_fx.data.split_files import files_of_split
from elaswave_fx.data.tables import VERSION, column_names, read_files
from elaswave_fx.errors import DataError
from elaswave_fx.files import others_may_change

_FORMATS = {
    ".json": "json", ".jsonl": "json", ".csv": "csv", ".parquet": "parquet", ".arrow": "arrow", ".txt": "text",
}  # fmt: skip

_OF_SAVED = ("state.json", "dataset_info.json", "dataset_dict.json")
"""Files of save_to_disk other than tables."""

_LEAVE_OUT = {"attention_mask": 0, "loss_mask": 0, "labels": IGNORED, "label": IGNORED}
"""Columns beside token ids, with the value that marks padding or unpredicted ids."""

_DECODED = ("Image", "Audio", "Video")
"""Features whose values the library decodes from bytes or paths."""


class ColumnsDataset(Dataset):
    """Rows of chosen columns, each a number or an array of one shape."""

    def __init__(self, table: Any, fields: tuple[str, ...], vocab_size: int | None = None) -> None:
        """`vocab_size`: of ids among the columns, which do not carry it."""
        self._vocab_size = vocab_size
        self._table = table.select_columns(list(fields)).with_format(None)
        self._fields = fields
        self._whole: set[str] = set()
        for name in fields:
            if type(table.features[name]).__name__ in _DECODED:
                refuse_null(_arrow(table, name), f"data.fields: column {name}")
            else:
                column = _arrow(table, name)
                refuse_no_numbers(column, f"data.fields: column {name}")
                refuse_too_large(column, f"data.fields: column {name}")
                self._whole |= {name} if holds_whole_numbers(column) else set()
                if name in self.class_names:
                    refuse_no_class(column, self.class_names[name], f"data.fields: column {name}")
                if vocab_size is not None and name in ID_FIELDS:
                    refuse_foreign_ids(column, vocab_size, f"data.fields: column {name}", name == "labels")

    def refuse_ragged(self) -> None:
        """Raise `DataError` if rows differ in shape."""
        for name in self._fields:
            refuse_ragged(_arrow(self._table, name), f"data.fields: column {name}")

    @property
    def vocab_size(self) -> int | None:
        return self._vocab_size

    @property
    def classes(self) -> int | None:
        """Classes of the only column of labels with names."""
        counts = [len(names) for names in self.class_names.values()]
        return counts[0] if len(counts) == 1 else None

    @property
    def class_names(self) -> Mapping[str, tuple[str, ...]]:
        features = {name: self._table.features[name] for name in self._fields}
        return {name: tuple(each.names) for name, each in features.items() if type(each).__name__ == "ClassLabel"}

    @property
    def notes(self) -> tuple[str, ...]:
        rounded = notes_of_rounding([name for name in self._fields if is_rounded(_arrow(self._table, name))])
        return (*rounded, *notes_of_palettes(self._row(0)))

    def __len__(self) -> int:
        return len(self._table)

    def sample(self, index: int, key: int | None = None) -> Sample:
        row = self._row(index)
        # The element type of an empty list is unknown.
        values = {name: np.asarray(row[name], np.int64) if name in self._whole else row[name] for name in self._fields}
        return {name: as_tensor(value, f"data.fields: column {name} of row {index}") for name, value in values.items()}

    def _row(self, index: int) -> Mapping[str, Any]:
        try:
            return self._table[index]
        except Exception as error:  # decoders of images and sounds may fail in any way
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            raise DataError(f"data.fields: row {index} cannot be decoded ({reason}); leave it out") from error


def read_table(config: DataConfig, cache: Path | None) -> Any:
    """The `datasets.Dataset` that the paths and the split name. Raises `DataError`."""
    library = _library()
    if config.fields and config.column is not None:
        raise DataError(
            f"data.column={config.column}: is not read beside data.fields=[{','.join(config.fields)}]; give one of both"
        )
    is_saved = _is_saved_alone(config)
    if is_saved:
        loaded = _saved(library, Path(config.paths[0]).expanduser())
    else:
        loaded = _load_files(library, config, cache)
    if isinstance(loaded, dict):
        if config.split not in loaded:
            raise DataError(f"data.split={config.split}: no such split; {hint(config.split, loaded, 'value')}")
        loaded = loaded[config.split]
    elif is_saved and config.split != "train":
        raise DataError(f"data.split={config.split}: {show(config.paths)} has no splits")
    if len(loaded) == 0:
        raise DataError(f"data.paths={show(config.paths)}: the split {config.split} is empty")
    _columns(config, loaded.column_names)
    return loaded


def files_read(config: DataConfig) -> set[str]:
    """The real paths of the split's files; for save_to_disk, the folder with the split."""
    if _is_saved_alone(config):
        return {f"{os.path.realpath(Path(config.paths[0]).expanduser())}#{config.split}"}
    return {os.path.realpath(path) for path in _files(config)[1]}


def split_line(config: DataConfig) -> str | None:
    """A note on files left out because their names belong to other splits."""
    if _is_saved_alone(config):
        return None
    files, chosen = _files(config)
    if len(chosen) == len(files):
        return None
    return f"data: {len(chosen)} of {len(files)} files are of data.split={config.split}, as their names tell"


def _files(config: DataConfig) -> tuple[list[Path], list[Path]]:
    """The files that the paths name, and those of them in the split. Raises `DataError`."""
    files = matching_files(config.paths)
    return files, files_of_split(config.split, config.paths, files)


def _columns(config: DataConfig, names: Sequence[str]) -> list[str]:
    """The columns to read, out of `names`. Raises `DataError`."""
    wanted = config.fields or ((config.column,) if config.column is not None else ())
    for name in wanted:
        if name not in names:
            key = "data.fields" if config.fields else "data.column"
            raise DataError(f"{key}={name}: no such column; {hint(name, names, 'value')}")
    return list(wanted or (choose_column(config, names),))


def choose_column(config: DataConfig, names: Sequence[str]) -> str:
    """The column that the user named, else "text", else the only one. Raises `DataError`."""
    if config.column is not None:
        return config.column
    if "text" in names:
        return "text"
    if len(names) == 1:
        return names[0]
    raise DataError(f"data.column: is missing, the data has several columns: {', '.join(names)}")


def _saved(library: Any, folder: Path) -> Any:
    """A dataset written by save_to_disk. Raises `DataError` if it is incomplete."""
    try:
        for path in folder.glob("**/*.arrow"):
            if not path.name.startswith("cache-"):
                schema_of(path)
        return library.load_from_disk(str(folder))
    except Exception as error:  # the library fails in many ways
        reason = "it is empty, or files are missing" if isinstance(error, IndexError) else " ".join(str(error).split())
        raise DataError(f"data.paths={folder}: is no whole folder of save_to_disk ({reason})") from error


def read_column(table: Any, name: str) -> tuple[list[bytes] | None, np.ndarray | None]:
    """(documents, None) of a column of texts, (None, tokens) of a column of token ids. Raises `DataError`."""
    column = _arrow(table, name)
    documents = texts_of(column, f"data.column={name}")
    if documents is not None:
        return documents, None
    tokens = tokens_of(column, f"data.column={name}")
    if tokens is not None:
        for beside, value in _LEAVE_OUT.items():
            if beside in table.column_names and beside != name:
                refuse_left_out(_arrow(table, beside), value, f"data.column={name}", beside)
    if tokens is not None:
        return None, tokens
    is_binary = "binary" in str(column.type)
    cure = "make texts of it, as bytes.decode does" if is_binary else f"columns of numbers go to data.fields=[{name}]"
    raise DataError(
        f"data.column={name}: holds {type_in_words(column.type)}, neither text nor lists of token ids; {cure}"
    )


def _arrow(table: Any, name: str) -> Any:
    """A column in its Arrow form, whatever format the table returns rows in."""
    return table.select_columns([name]).with_format("arrow")[:].column(name)


def _load_files(library: Any, config: DataConfig, cache: Path | None) -> Any:
    _, files = _files(config)
    for path in files:
        if path.name in _OF_SAVED or (path.suffix == ".arrow" and _is_saved(path.parent)):
            raise DataError(
                f"data.paths={path}: is a part of what save_to_disk writes; give its folder alone, whole (with its "
                "state.json)"
            )
    formats = {_format(path) for path in files}
    if len(formats) > 1:
        raise DataError(f"data.paths={show(config.paths)}: mixes files of {' and '.join(sorted(formats))}")
    if cache is not None and others_may_change(cache / "datasets"):
        cache = None
    format = formats.pop()
    # Copies and archives preserve the modification time, but not the inode.
    marks = [(found.st_size, found.st_ino, found.st_ctime_ns) for found in (path.stat() for path in files)]
    kept = cache and cache / "datasets" / digest(str(marks))
    if format in ("parquet", "arrow"):  # an empty part says nothing about the others
        files = [path for path in files if has_rows(path)] or files[:1]
    names = column_names(files, config.fields or (config.column or "text",))
    if not names:
        raise DataError(f"data.paths={show(config.paths)}: has no rows")
    columns = _columns(config, names)
    numbers = bool(config.fields)
    if not numbers and columns != ["text"]:
        columns += [name for name in _LEAVE_OUT if name in names and name not in columns]  # `read_column` checks them
    folder = kept and kept / digest(VERSION, str(numbers), *map(str, files), *columns)
    table = read_files(files, columns, numbers, folder)
    if format == "csv" and not numbers:
        refuse_numbers_as_text(table.column(columns[0]), f"data.column={columns[0]}")
    with contextlib.suppress(Exception):  # the schema's metadata may come from another writer
        return library.Dataset(library.table.InMemoryTable(table))
    try:
        return library.Dataset(library.table.InMemoryTable(table.replace_schema_metadata(None)))
    except ValueError as error:
        raise DataError(f"data.paths: columns {', '.join(columns)}: {' '.join(str(error).split())}") from error


def _format(path: Path) -> str:
    if path.suffix not in _FORMATS:
        raise DataError(f"data.paths={path}: is none of {', '.join(_FORMATS)}, nor a folder of save_to_disk")
    return _FORMATS[path.suffix]


def _is_saved_alone(config: DataConfig) -> bool:
    return len(config.paths) == 1 and _is_saved(Path(config.paths[0]).expanduser())


def _is_saved(folder: Path) -> bool:
    return any(os.path.isfile(folder / name) for name in ("state.json", "dataset_dict.json"))


def _library() -> Any:
    try:
        import datasets
    except ImportError as error:
        raise DataError("data=hf: needs the datasets package; install it with: pip install elaswave_fx[hf]") from error
    datasets.disable_progress_bars()
    return datasets
