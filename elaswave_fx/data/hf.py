"""Local data of the Hugging Face `datasets` library.

In: a folder of `save_to_disk`, or json, jsonl, csv, parquet and txt files. Out: the documents of a text column, a
stream of a column of token ids, or samples of columns of numbers (`data.fields`). Nothing is fetched from a network.
"""

import csv
import re
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from elaswave_fx.config.schema import hint, show
from elaswave_fx.config.types import DataConfig
from elaswave_fx.data.cached import digest
from elaswave_fx.data.columns import refuse_no_numbers, refuse_ragged, texts_of, tokens_of, type_in_words
from elaswave_fx.data.corpus import matching_files
from elaswave_fx.data.dataset import Dataset, Sample, as_tensor, rounded_notes
from elaswave_fx.data.json_columns import json_columns, names_in
from elaswave_fx.errors import DataError
from elaswave_fx.files import others_may_change

_FORMATS = {
    ".json": "json", ".jsonl": "json", ".csv": "csv", ".parquet": "parquet", ".arrow": "arrow", ".txt": "text",
}  # fmt: skip

_CHUNK, _LARGEST_FIELD = 1 << 20, 1 << 30
"""Characters that are read at once; those of a value in a CSV file."""

_SPLITS = {
    "train": ("train", "training"), "validation": ("validation", "valid", "val", "dev"),
    "test": ("test", "testing", "eval", "evaluation"),
}  # fmt: skip
"""The words by which the library, too, knows the split of a file."""

_DECODED = ("Image", "Audio", "Video")
"""Features whose values the library makes of bytes or paths."""


class ColumnsDataset(Dataset):
    """Rows of chosen columns, each a number or an array of one shape."""

    def __init__(self, table: Any, fields: tuple[str, ...], vocab_size: int | None = None) -> None:
        """`vocab_size`: of ids among the columns, which do not tell it themselves."""
        self._vocab_size = vocab_size
        self._table = table.select_columns(list(fields)).with_format(None)
        self._fields = fields
        for name in fields:
            if type(table.features[name]).__name__ not in _DECODED:
                refuse_no_numbers(_arrow(table, name), f"data.fields: column {name}")

    def refuse_ragged(self) -> None:
        """Raise `DataError` if rows differ in shape."""
        for name in self._fields:
            refuse_ragged(_arrow(self._table, name), f"data.fields: column {name}")

    @property
    def vocab_size(self) -> int | None:
        return self._vocab_size

    @property
    def notes(self) -> tuple[str, ...]:
        row = self._table[0]
        return rounded_notes({name: row[name] for name in self._fields if np.asarray(row[name]).dtype.kind == "f"})

    def __len__(self) -> int:
        return len(self._table)

    def sample(self, index: int, key: int | None = None) -> Sample:
        row = self._table[index]
        return {name: as_tensor(row[name], f"data.fields: column {name} of row {index}") for name in self._fields}


def read_table(config: DataConfig, cache: Path | None) -> Any:
    """The `datasets.Dataset` that the paths and the split name. Raises `DataError`."""
    library = _library()
    is_saved = len(config.paths) == 1 and _is_saved(Path(config.paths[0]).expanduser())
    if is_saved:
        loaded = library.load_from_disk(str(Path(config.paths[0]).expanduser()))
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
    _refuse_missing(config, loaded.column_names)
    return loaded


def _wanted(config: DataConfig) -> tuple[str, ...]:
    return config.fields or ((config.column,) if config.column else ())


def _refuse_missing(config: DataConfig, names: list[str]) -> None:
    for name in _wanted(config):
        if name not in names:
            key = "data.fields" if config.fields else "data.column"
            raise DataError(f"{key}={name}: no such column; {hint(name, names, 'value')}")


def choose_column(config: DataConfig, table: Any) -> str:
    """The column that the user named, else "text", else the only one. Raises `DataError`."""
    names: list[str] = table.column_names
    if config.column is not None:
        return config.column
    if "text" in names:
        return "text"
    if len(names) == 1:
        return names[0]
    raise DataError(f"data.column: is missing, the data has several columns: {', '.join(names)}")


def read_column(table: Any, name: str) -> tuple[list[bytes] | None, np.ndarray | None]:
    """(documents, None) of a column of texts, (None, tokens) of a column of token ids. Raises `DataError`."""
    column = _arrow(table, name)
    documents = texts_of(column, f"data.column={name}")
    if documents is not None:
        return documents, None
    tokens = tokens_of(column, f"data.column={name}")
    if tokens is not None:
        return None, tokens
    raise DataError(
        f"data.column={name}: holds {type_in_words(column.type)}, neither text nor lists of token ids; "
        f"columns of numbers go to data.fields=[{name}]"
    )


def _arrow(table: Any, name: str) -> Any:
    """A column as Arrow has it, whatever form the table gives its rows."""
    return table.select_columns([name]).with_format("arrow")[:].column(name)


def _load_files(library: Any, config: DataConfig, cache: Path | None) -> Any:
    files = _of_split(config, matching_files(config.paths))
    formats = {_format(path) for path in files}
    if len(formats) > 1:
        raise DataError(f"data.paths={show(config.paths)}: mixes files of {' and '.join(sorted(formats))}")
    if cache is not None and others_may_change(cache / "datasets"):
        cache = None
    format = formats.pop()
    # The library knows a file by path and time of change, which copies and archives keep; its inode does not.
    marks = [(found.st_size, found.st_ino, found.st_ctime_ns) for found in (path.stat() for path in files)]
    with _folder(cache and cache / "datasets" / digest(str(marks))) as folder:
        load: Callable[..., Any] = library.load_dataset
        try:
            return load(
                format, data_files=[str(path.resolve()) for path in files], split="train", cache_dir=str(folder),
                keep_in_memory=cache is None,  # the files that back the table are about to go
                **_only_wanted(library, config, format, files),
            )  # fmt: skip
        except (library.exceptions.DatasetGenerationError, ValueError, TypeError, OSError) as error:
            if format == "json":
                names = names_in(files)
                if names:
                    _refuse_missing(config, names)
                table = json_columns(files, _wanted(config) or ("text",))
                if table is not None and table.num_columns:
                    return library.Dataset(library.table.InMemoryTable(table))
            reason = " ".join(str(error.__cause__ or error).split())
            raise DataError(f"data.paths={show(config.paths)}: cannot be read ({reason})") from error


def _only_wanted(library: Any, config: DataConfig, format: str, files: list[Path]) -> dict[str, Any]:
    """Options of the library by which columns that nobody reads are not looked at: they may be of any type, or of
    several. Raises `DataError` for a column that is missing."""
    wanted = _wanted(config)
    options: dict[str, Any] = {}
    if format == "csv":
        import pandas

        _refuse_unnamed(files)
        names = list(pandas.read_csv(files[0], nrows=0).columns)
        _refuse_missing(config, names)
        if wanted:
            options["usecols"] = list(wanted)
        if not config.fields:
            # A text may read NA, null, 007 or 1e5; only what is empty is missing.
            features, string = library.Features, library.Value("string")
            options |= {"keep_default_na": False, "na_values": [""]}
            options["features"] = features(dict.fromkeys(wanted or names, string))
    if format == "json":
        _refuse_other_encodings(files)
    if format == "parquet" and wanted:
        from pyarrow import parquet

        _refuse_missing(config, parquet.read_schema(files[0]).names)
        options["columns"] = list(wanted)
    return options


def _refuse_other_encodings(files: list[Path]) -> None:
    """Raise `DataError` for a JSON file that is not UTF-8: the library would read other letters without a word."""
    for path in files:
        try:
            with path.open(encoding="utf-8") as file:
                while file.read(_CHUNK):
                    pass
        except UnicodeDecodeError as error:
            byte = error.object[error.start]
            raise DataError(
                f"data.paths={path}: is not UTF-8 (byte {byte:#04x}); convert it, as iconv -t UTF-8 does"
            ) from error


def _of_split(config: DataConfig, files: list[Path]) -> list[Path]:
    """The files of `data.split`, where those of folders and patterns are named by several splits, as on the Hugging
    Face Hub. Raises `DataError` if there are none, or no splits."""
    given = {Path(each).expanduser() for each in config.paths}
    names = {path: None if path in given else _split_of(path) for path in files}
    splits = sorted({name for name in names.values() if name is not None})
    if not splits and config.split != "train":
        raise DataError(f"data.split={config.split}: files whose names tell no split; name the files in data.paths")
    if len(splits) < 2 and config.split in ("train", *splits):
        return files
    if config.split not in splits:
        raise DataError(f"data.split={config.split}: no such split; {hint(config.split, splits, 'value')}")
    return [path for path, name in names.items() if name in (config.split, None)]


def _split_of(path: Path) -> str | None:
    """The split that the name of a file, or of its folder, has as a word."""
    for name in (path.stem, path.parent.name):
        words = re.split(r"[^a-z]+", name.lower())
        for split, known in _SPLITS.items():
            if not set(known).isdisjoint(words):
                return split
    return None


def _refuse_unnamed(files: list[Path]) -> None:
    """Raise `DataError` for a CSV file with a row that has more values than the header has names: where not all columns
    are read, the library takes such rows apart in its own way."""
    limit = csv.field_size_limit(_LARGEST_FIELD)
    try:
        for path in files:
            with path.open(encoding="utf-8", errors="replace", newline="") as file:
                rows = csv.reader(file)
                names = next((row for row in rows if row), [])
                wide = next((row for row in rows if len(row) > len(names)), None)
                if wide is not None:
                    raise DataError(
                        f"data.paths={path}: line {rows.line_num} has {len(wide)} values, and the header "
                        f"{len(names)} names ({', '.join(names)}): a text with commas that is not in quotes, a comma "
                        "at the end, or a name of the row; give every column a name, and put such texts in quotes"
                    )
    finally:
        csv.field_size_limit(limit)


def _format(path: Path) -> str:
    if path.suffix not in _FORMATS:
        raise DataError(f"data.paths={path}: is none of {', '.join(_FORMATS)}, nor a folder of save_to_disk")
    return _FORMATS[path.suffix]


def _is_saved(folder: Path) -> bool:
    return any((folder / name).is_file() for name in ("state.json", "dataset_dict.json"))


@contextmanager
def _folder(cache: Path | None) -> Iterator[Path]:
    if cache is not None:
        yield cache
    else:
        with tempfile.TemporaryDirectory() as folder:
            yield Path(folder)


def _library() -> Any:
    try:
        import datasets
    except ImportError as error:
        raise DataError("data=hf: needs the datasets package; install it with: pip install elaswave_fx[hf]") from error
    datasets.disable_progress_bars()
    return datasets
