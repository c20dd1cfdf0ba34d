"""Local data of the Hugging Face `datasets` library.

In: a folder of `save_to_disk`, or json, jsonl, csv, parquet and txt files. Out: the documents of a text column, a
stream of a column of token ids, or samples of columns of numbers (`data.fields`). Nothing is fetched from a network.
"""

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from elaswave_fx.config.schema import hint, show
from elaswave_fx.config.types import DataConfig
from elaswave_fx.data.corpus import matching_files
from elaswave_fx.data.dataset import Dataset, Sample, as_tensor
from elaswave_fx.errors import DataError
from elaswave_fx.files import others_may_change

_FORMATS = {".json": "json", ".jsonl": "json", ".csv": "csv", ".parquet": "parquet", ".txt": "text"}


class ColumnsDataset(Dataset):
    """Rows of chosen columns, each a number or an array of one shape."""

    def __init__(self, table: Any, fields: tuple[str, ...]) -> None:
        self._table = table.select_columns(list(fields))
        self._fields = fields

    def __len__(self) -> int:
        return len(self._table)

    def sample(self, index: int, key: int | None = None) -> Sample:
        row = self._table[index]
        return {name: as_tensor(row[name], f"data.fields: column {name} of row {index}") for name in self._fields}


def read_table(config: DataConfig, cache: Path | None) -> Any:
    """The `datasets.Dataset` that the paths and the split name. Raises `DataError`."""
    library = _library()
    if len(config.paths) == 1 and _is_saved(Path(config.paths[0]).expanduser()):
        loaded = library.load_from_disk(str(Path(config.paths[0]).expanduser()))
    else:
        loaded = _load_files(library, config, cache)
    if isinstance(loaded, dict):
        if config.split not in loaded:
            raise DataError(f"data.split={config.split}: no such split; {hint(config.split, loaded, 'value')}")
        loaded = loaded[config.split]
    if len(loaded) == 0:
        raise DataError(f"data.paths={show(config.paths)}: the split {config.split} is empty")
    wanted = config.fields or ((config.column,) if config.column else ())
    for name in wanted:
        if name not in loaded.column_names:
            key = "data.fields" if config.fields else "data.column"
            raise DataError(f"{key}={name}: no such column; {hint(name, loaded.column_names, 'value')}")
    return loaded


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
    values = list(table[name])
    first = values[0]
    if isinstance(first, str):
        return [(value or "").encode() for value in values], None
    if isinstance(first, (list, np.ndarray)) and np.issubdtype(np.asarray(first).dtype, np.integer):
        return None, np.concatenate([np.asarray(value, np.int64) for value in values])
    raise DataError(
        f"data.column={name}: holds {type(first).__name__}, neither text nor lists of token ids; columns of numbers "
        f"go to data.fields=[{name}]"
    )


def _load_files(library: Any, config: DataConfig, cache: Path | None) -> Any:
    files = matching_files(config.paths)
    formats = {_format(path) for path in files}
    if len(formats) > 1:
        raise DataError(f"data.paths={show(config.paths)}: mixes files of {' and '.join(sorted(formats))}")
    if cache is not None and others_may_change(cache / "datasets"):
        cache = None
    with _folder(cache) as folder:
        load: Callable[..., Any] = library.load_dataset
        try:
            table = load(
                formats.pop(), data_files=[str(path.resolve()) for path in files], split="train", cache_dir=str(folder)
            )
        except (library.exceptions.DatasetGenerationError, ValueError) as error:
            reason = " ".join(str(error.__cause__ or error).split())
            raise DataError(f"data.paths={show(config.paths)}: cannot be read ({reason})") from error
        # Without a cache the files that back the table are about to go.
        return table if cache else library.Dataset.from_dict({name: table[name][:] for name in table.column_names})


def _format(path: Path) -> str:
    if path.suffix not in _FORMATS:
        raise DataError(f"data.paths={path}: is none of {', '.join(_FORMATS)}, nor a folder of save_to_disk")
    return _FORMATS[path.suffix]


def _is_saved(folder: Path) -> bool:
    return any((folder / name).is_file() for name in ("state.json", "dataset_dict.json"))


@contextmanager
def _folder(cache: Path | None) -> Iterator[Path]:
    if cache is not None:
        yield cache / "datasets"
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
