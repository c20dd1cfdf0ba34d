"""Which files are of a split, as their names tell: those of folders and patterns, as on the Hugging Face Hub.

data/train-0.parquet  data/train-1.parquet  data/test.parquet    split "test"  ->  data/test.parquet
"""

import re
from collections.abc import Sequence
from pathlib import Path

from elaswave_fx.config.schema import hint
from elaswave_fx.data.corpus import fixed_part, matching_files
from elaswave_fx.errors import DataError

_SPLITS = {
    "train": ("train", "training"), "validation": ("validation", "valid", "val", "dev"),
    "test": ("test", "testing", "eval", "evaluation"),
}  # fmt: skip
"""The words by which the library, too, knows the split of a file."""

_ENDS = ("set", "data", "split")
_CAMEL = re.compile(r"(?<=[A-Za-z])(?=[A-Z][a-z])")
"""Also testset and XTest."""


def files_of_split(split: str, patterns: Sequence[str], files: Sequence[Path]) -> list[Path]:
    """Those of `files`, which the patterns gave, that are of `data.split`. Beside files of other splits, those whose
    names tell none are to train; a file that was named itself is of any. Raises `DataError` if there are none."""
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
    """The splits that files of folders and patterns have in their names, if they are several."""
    named = [Path(each).expanduser() for each in patterns]
    roots = [fixed_part(each) for each in named]
    found = {_split_of(path, roots) for path in matching_files(patterns) if path not in named} - {None}
    return sorted(str(each) for each in found) if len(found) > 1 else []


def _split_of(path: Path, roots: Sequence[Path]) -> str | None:
    """The split that the name of a file has as a word, or the nearest of its folders below those that were given."""
    root = next((root for root in roots if path.is_relative_to(root)), path.parent)
    folders = path.relative_to(root).parts[:-1]
    return next((found for name in (path.stem, *reversed(folders)) if (found := _split_in(name))), None)


def _split_in(name: str) -> str | None:
    words = [word for word in re.split(r"[^a-z]+", _CAMEL.sub("-", name).lower()) if word]
    words += [word.removesuffix(end) for word in words for end in _ENDS if word.endswith(end)]
    return next((split for split, known in _SPLITS.items() if not set(known).isdisjoint(words)), None)
