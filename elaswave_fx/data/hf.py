"""Local data of the Hugging Face `datasets` library.

In: a folder of `save_to_disk`, or json, jsonl, csv, parquet and txt files. Out: the documents of a text column, a
stream of a column of token ids, or samples of columns of numbers (`data.fields`). Nothing is fetched from a network.
"""

import json
import os
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from elaswave_fx.config.schema import hint, show
from elaswave_fx.config.types import DataConfig
from elaswave_fx.data.cached import digest
from elaswave_fx.data.columns import (
    is_rounded,
    kind_of_values,
    refuse_foreign_ids,
    refuse_no_numbers,
    refuse_numbers_as_text,
    refuse_ragged,
    refuse_too_large,
    texts_of,
    tokens_of,
    type_in_words,
)
from elaswave_fx.data.corpus import fixed_part, matching_files
from elaswave_fx.data.dataset import Dataset, Sample, as_tensor, notes_of_rounding
from elaswave_fx.data.file_kinds import refuse_no_text
from elaswave_fx.data.text_tables import column_names, text_table
from elaswave_fx.errors import DataError
from elaswave_fx.files import others_may_change

_FORMATS = {
    ".json": "json", ".jsonl": "json", ".csv": "csv", ".parquet": "parquet", ".arrow": "arrow", ".txt": "text",
}  # fmt: skip

_OF_SAVED = ("state.json", "dataset_info.json", "dataset_dict.json")
"""Files of save_to_disk beside the tables."""

_SPLITS = {
    "train": ("train", "training"), "validation": ("validation", "valid", "val", "dev"),
    "test": ("test", "testing", "eval", "evaluation"),
}  # fmt: skip
"""The words by which the library, too, knows the split of a file."""

_IDS = ("input_ids", "decoder_input_ids", "labels")
"""Columns of token ids, where a vocabulary says so."""

_END_OF_STREAM = b"\xff\xff\xff\xff\0\0\0\0"
"""Of the Arrow IPC format."""

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
                column = _arrow(table, name)
                refuse_no_numbers(column, f"data.fields: column {name}")
                refuse_too_large(column, f"data.fields: column {name}")
                if vocab_size is not None and name in _IDS:
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
        """Those of the one column of labels with names."""
        counts = [len(names) for names in self.class_names.values()]
        return counts[0] if len(counts) == 1 else None

    @property
    def class_names(self) -> Mapping[str, tuple[str, ...]]:
        features = {name: self._table.features[name] for name in self._fields}
        return {name: tuple(each.names) for name, each in features.items() if type(each).__name__ == "ClassLabel"}

    @property
    def notes(self) -> tuple[str, ...]:
        return notes_of_rounding([name for name in self._fields if is_rounded(_arrow(self._table, name))])

    def __len__(self) -> int:
        return len(self._table)

    def sample(self, index: int, key: int | None = None) -> Sample:
        try:
            row = self._table[index]
        except Exception as error:  # What decodes images and sounds may fail in any way.
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            raise DataError(f"data.fields: row {index} cannot be decoded ({reason}); leave it out") from error
        return {name: as_tensor(row[name], f"data.fields: column {name} of row {index}") for name in self._fields}


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
    _refuse_missing(config, loaded.column_names)
    return loaded


def _saved(library: Any, folder: Path) -> Any:
    """What save_to_disk wrote. Raises `DataError` if it is not whole."""
    try:
        for path in folder.glob("**/*.arrow"):
            if not path.name.startswith("cache-"):
                _of_arrow(path)
        return library.load_from_disk(str(folder))
    except Exception as error:  # The library fails in many ways.
        reason = "it is empty, or files are missing" if isinstance(error, IndexError) else " ".join(str(error).split())
        raise DataError(f"data.paths={folder}: is no whole folder of save_to_disk ({reason})") from error


def _wanted(config: DataConfig) -> tuple[str, ...]:
    return config.fields or ((config.column,) if config.column else ())


def _refuse_missing(config: DataConfig, names: list[str]) -> None:
    for name in _wanted(config):
        if name not in names:
            key = "data.fields" if config.fields else "data.column"
            raise DataError(f"{key}={name}: no such column; {hint(name, names, 'value')}")


def choose_column(config: DataConfig, names: Sequence[str]) -> str:
    """The column that the user named, else "text", else the only one. Raises `DataError`."""
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
    # The library knows a file by path and time of change, which copies and archives keep; its inode does not.
    marks = [(found.st_size, found.st_ino, found.st_ctime_ns) for found in (path.stat() for path in files)]
    kept = cache and cache / "datasets" / digest(str(marks))
    if format in ("csv", "json"):
        return _text_table(library, config, files, kept)
    options = {}
    if format == "parquet":
        options["columns"], files = _columns(config, files, _of_parquet)
        options["features"] = _widest(library, options["columns"], files)
    elif format == "arrow":
        _, files = _columns(config, files, _of_arrow)
    elif not any(refuse_no_text(path).stat().st_size for path in files):
        raise DataError(f"data.paths={show(config.paths)}: has no rows")
    with _folder(kept) as folder:
        load: Callable[..., Any] = library.load_dataset
        try:
            return load(
                format, data_files=[str(path.resolve()) for path in files], split="train", cache_dir=str(folder),
                keep_in_memory=cache is None,  # the files that back the table are about to go
                **options,
            )  # fmt: skip
        except (library.exceptions.DatasetGenerationError, ValueError, TypeError, OSError) as error:
            reason = " ".join(str(error.__cause__ or error).split())
            raise DataError(f"data.paths={show(config.paths)}: cannot be read ({reason})") from error


def _text_table(library: Any, config: DataConfig, files: Sequence[Path], kept: Path | None) -> Any:
    """Of CSV and JSON files, only the columns that are read: others may be of any type, or of several."""
    names = column_names(files, _wanted(config) or ("text",))
    if not names:
        raise DataError(f"data.paths={show(config.paths)}: has no rows")
    _refuse_missing(config, names)
    wanted = config.fields or (choose_column(config, names),)
    numbers = bool(config.fields)
    folder = kept and kept / digest("columns", str(numbers), *map(str, files), *wanted)
    table = text_table(files, wanted, numbers, folder)
    if not numbers and files[0].suffix == ".csv":
        refuse_numbers_as_text(table.column(wanted[0]), f"data.column={wanted[0]}")
    return library.Dataset(library.table.InMemoryTable(table))


def _columns(
    config: DataConfig, files: Sequence[Path], schema_of: Callable[[Path], Any]
) -> tuple[list[str], list[Path]]:
    """The columns of binary tables that are read, and the files that have values of them. Raises `DataError` for a
    column that is missing, or whose values are of another kind in a later file, which the library would make of the
    first one's."""
    import pyarrow as pa

    schemas = {}
    for path in files:
        try:
            schema, rows = schema_of(path)
            if rows:
                schemas[path] = schema
        except (pa.ArrowException, OSError) as error:
            raise DataError(f"data.paths={path}: cannot be read ({' '.join(str(error).split())})") from error
    if not schemas:
        raise DataError(f"data.paths={show(config.paths)}: the split {config.split} is empty")
    names = next(iter(schemas.values())).names
    _refuse_missing(config, names)
    wanted = config.fields or (choose_column(config, names),)
    for name in wanted:
        kinds = {}
        for path, schema in schemas.items():
            if name not in schema.names:
                raise DataError(f"data.paths={path}: has no column {name}; it has {', '.join(schema.names)}")
            kinds[path] = schema.field(name).type
        valued = [path for path, kind in kinds.items() if config.fields or not pa.types.is_null(kind)]
        for path in valued:
            if kind_of_values(kinds[path]) != kind_of_values(kinds[valued[0]]):
                raise DataError(
                    f"data.paths: column {name} holds {kinds[valued[0]]} in {valued[0].name} and {kinds[path]} in "
                    f"{path.name}; give all files one type"
                )
            if _class_names(schemas[path], name) != _class_names(schemas[valued[0]], name):
                raise DataError(
                    f"data.paths: column {name} has other classes in {path.name} than in {valued[0].name}, or in "
                    "another order"
                )
        schemas = {path: schemas[path] for path in valued or schemas}
    return list(wanted), list(schemas)


def _widest(library: Any, columns: Sequence[str], files: Sequence[Path]) -> Any:
    """The types that hold the values of all files, where these differ in width; None: the first file's do."""
    import pyarrow as pa

    schemas = [_of_parquet(path)[0] for path in files]
    wide = {}
    for name in columns:
        kinds = list(dict.fromkeys(schema.field(name).type for schema in schemas))
        if len(kinds) > 1:
            merged = pa.unify_schemas([pa.schema([(name, kind)]) for kind in kinds], promote_options="permissive")
            wide |= library.Features.from_arrow_schema(merged)
    if not wide:
        return None
    first = schemas[0]
    return library.Features({**library.Features.from_arrow_schema(
        pa.schema([first.field(name) for name in columns], first.metadata)), **wide})  # fmt: skip


def _class_names(schema: Any, name: str) -> list[str] | None:
    """Those of a column of labels, as the library writes them beside the schema."""
    features = json.loads((schema.metadata or {}).get(b"huggingface", b"{}")).get("info", {}).get("features", {})
    return features.get(name, {}).get("names") if isinstance(features.get(name), dict) else None


def _of_parquet(path: Path) -> tuple[Any, int]:
    """The schema, and how many rows there are."""
    from pyarrow import parquet

    with parquet.ParquetFile(path) as file:
        return file.schema_arrow, file.metadata.num_rows


def _of_arrow(path: Path) -> tuple[Any, int]:
    import pyarrow as pa

    with pa.memory_map(str(path)) as file:
        try:
            reader = pa.ipc.open_file(file)
            parts = (reader.get_batch(number) for number in range(reader.num_record_batches))
        except pa.ArrowInvalid:
            file.seek(file.size() - len(_END_OF_STREAM))
            if file.read() != _END_OF_STREAM:
                raise DataError(f"data.paths={path}: is cut off, the mark at its end is missing") from None
            file.seek(0)
            parts = reader = pa.ipc.open_stream(file)
        return reader.schema, int(any(len(part) for part in parts))


def split_line(config: DataConfig) -> str | None:
    """That files were left out for the split that their names tell, in words."""
    if _is_saved_alone(config):
        return None
    files = matching_files(config.paths)
    chosen = _of_split(config, files)
    if len(chosen) == len(files):
        return None
    return f"data: {len(chosen)} of {len(files)} files are of data.split={config.split}, as their names tell"


def _of_split(config: DataConfig, files: list[Path]) -> list[Path]:
    """The files of `data.split`, where those of folders and patterns are named by splits, as on the Hugging Face Hub;
    beside files of other splits, those without a name of one are to train. Raises `DataError` if there are none."""
    named = [Path(each).expanduser() for each in config.paths]
    roots = [fixed_part(each) for each in named]
    told = {path: None if path in named else _split_of(path, roots) for path in files}
    unnamed = [path for path in files if told[path] is None and path not in named]
    splits = sorted({name for name in told.values() if name is not None})
    if not splits:
        own = {split for root in roots if root.is_dir() and (split := _split_in(root.name))}
        if config.split not in ("train", *own):
            raise DataError(f"data.split={config.split}: files whose names tell no split; name the files in data.paths")
        return files
    if unnamed and "train" in splits:
        raise DataError(
            f"data.split={config.split}: {unnamed[0]} has no split in its name, and others have ({', '.join(splits)}); "
            "name the files in data.paths"
        )
    if config.split not in (*splits, *(["train"] if unnamed else [])):
        raise DataError(f"data.split={config.split}: no such split; {hint(config.split, splits, 'value')}")
    return [path for path in files if path in named or (told[path] or "train") == config.split]


def _split_of(path: Path, roots: Sequence[Path]) -> str | None:
    """The split that the name of a file has as a word, or the nearest of its folders below those that were given."""
    root = next((root for root in roots if path.is_relative_to(root)), path.parent)
    folders = path.relative_to(root).parts[:-1]
    return next((split for name in (path.stem, *reversed(folders)) if (split := _split_in(name))), None)


def _split_in(name: str) -> str | None:
    words = re.split(r"[^a-z]+", name.lower())
    return next((split for split, known in _SPLITS.items() if not set(known).isdisjoint(words)), None)


def _format(path: Path) -> str:
    if path.suffix not in _FORMATS:
        raise DataError(f"data.paths={path}: is none of {', '.join(_FORMATS)}, nor a folder of save_to_disk")
    return _FORMATS[path.suffix]


def _is_saved_alone(config: DataConfig) -> bool:
    return len(config.paths) == 1 and _is_saved(Path(config.paths[0]).expanduser())


def _is_saved(folder: Path) -> bool:
    return any(os.path.isfile(folder / name) for name in ("state.json", "dataset_dict.json"))


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
