"""Files of a split, found by names in folders and patterns, as on the Hugging Face Hub.

data/train-0.parquet  data/train-1.parquet  data/test.parquet    split "test"  ->  data/test.parquet
"""

import re
from collections.abc import Sequence
from pathlib import Path

from elaswave_fx.config.validation import hint
from elaswave_fx.data.corpus import fixed_part, matching_files
from elaswave_fx.errors import DataError

_SPLITS = {
    "train": ("train", "training"), "validation": ("validation", "valid", "val", "dev"),
    "test": ("test", "testing", "eval", "evaluation"),
}  # fmt: skip
"""Words for splits in file names, as in the library."""

_ENDS = ("set", "data", "split")
_CAMEL = re.compile(r"(?<=[A-Za-z])(?=[A-Z][a-z])")
"""Word borders in camel case: also testset and XTest."""


def files_of_split(split: str, patterns: Sequence[str], files: Sequence[Path]) -> list[Path]:
    """Files of `data.split` among `files`, which the patterns gave. Beside files of other splits, files without a split
    in their names are for training; explicitly named files belong to any split. Raises `DataError` if there are
    none."""
    named = [Path(each).expanduser() for each in patterns]
    roots = [fixed_part(each) for each in named]
    told = {path: None if path in named else _split_of(path, roots) for path in files}
    unnamed = [path for path in files if told[path] is None and path not in named]
    splits = sorted({name for name in told.values() if name is not None})
    if not splits:
        own = {_split_in(root.name) for root in roots if root.is_dir()}
        if split not in ("train", *own):
            raise DataError(f"data.split={split}: files whose names tell no split; name the files in data.paths")
        return list(files)
    if unnamed and "train" in splits:
        raise DataError(
            f"data.split={split}: {unnamed[0]} has no split in its name, and others have ({', '.join(splits)}); "
            "name the files in data.paths"
        )
    if split not in (*splits, *(["train"] if unnamed else [])):
        raise DataError(f"data.split={split}: no such split; {hint(split, splits, 'value')}")
    return [path for path in files if path in named or (told[path] or "train") == split]


def splits_in(patterns: Sequence[str]) -> list[str]:
    """The splits in names of files of folders and patterns, if there are several."""
    named = [Path(each).expanduser() for each in patterns]
    roots = [fixed_part(each) for each in named]
    found = {_split_of(path, roots) for path in matching_files(patterns) if path not in named} - {None}
    return sorted(str(each) for each in found) if len(found) > 1 else []


def _split_of(path: Path, roots: Sequence[Path]) -> str | None:
    """The split in the name of a file as a word, or in its nearest folder below the given ones."""
    root = next((root for root in roots if path.is_relative_to(root)), path.parent)
    folders = path.relative_to(root).parts[:-1]
    return next((found for name in (path.stem, *reversed(folders)) if (found := _split_in(name))), None)


def _split_in(name: str) -> str | None:
    words = [word for word in re.split(r"[^a-z]+", _CAMEL.sub("-", name).lower()) if word]
    words += [word.removesuffix(end) for word in words for end in _ENDS if word.endswith(end)]
    return next((split for split, known in _SPLITS.items() if not set(known).isdisjoint(words)), None)
