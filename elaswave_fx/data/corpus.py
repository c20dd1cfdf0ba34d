"""Plain text as documents: the Python standard library of this machine, or the user's files.

In: paths. Out: the documents' bytes in an order that depends on names only, never on the file system.
"""

import fnmatch
import glob
import os
import re
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from elaswave_fx.config.validation import nearest, show
from elaswave_fx.data.file_kinds import refuse_no_text
from elaswave_fx.errors import DataError

# Installed packages are not part of the standard library. Its tests are half of its text, and unlike the rest.
_SKIPPED_FOLDERS = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"})

_TABLES = (".csv", ".tsv", ".json", ".jsonl", ".ndjson")


def stdlib_documents(limit_mb: float | None) -> list[bytes]:
    """The Python sources of the standard library, sorted by path. Raises `DataError` if there are none."""
    root = Path(sysconfig.get_path("stdlib"))
    files = list(_sources(root))
    if not files:
        raise DataError(f"data=stdlib: no Python sources in {root}; nearest valid: data=files")
    return read_documents(sorted(files, key=lambda path: path.relative_to(root).as_posix()), limit_mb)


def _sources(root: Path) -> Iterator[Path]:
    """The sources below `root`. Installed packages, which may have ten thousands of files, are not visited."""
    for folder, inside, names in os.walk(root):
        inside[:] = [name for name in inside if name not in _SKIPPED_FOLDERS]
        yield from (Path(folder, name) for name in names if name.endswith(".py"))


def file_documents(patterns: Sequence[str], limit_mb: float | None) -> list[bytes]:
    """The files that the patterns name. Raises `DataError` if a pattern matches nothing, a file is not text, or all are
    empty."""
    files = matching_files(patterns)
    documents = read_documents(map(refuse_no_text, files), limit_mb)
    for path, document in zip(files, documents, strict=False):  # a limit may leave some of them out
        if b"\0" in document:
            raise DataError(f"data.paths={path}: is no text, it has a byte of 0 (the mark at the end of a document)")
    if not any(documents):
        raise DataError(f"data.paths={show(patterns)}: all files are empty")
    return documents


def first_table(patterns: Sequence[str]) -> Path | None:
    """The first file whose name says that it has rows with named columns."""
    return next((path for path in matching_files(patterns) if path.suffix.lower() in _TABLES), None)


def read_documents(files: Iterable[Path], limit_mb: float | None) -> list[bytes]:
    """The files' bytes, one document each, up to `limit_mb` megabytes (10^6 bytes)."""
    left = float("inf") if limit_mb is None else int(limit_mb * 1e6)
    documents: list[bytes] = []
    for path in files:
        if left <= 0:
            break
        try:
            document = path.read_bytes()
        except OSError as error:
            raise DataError(f"data: {path} cannot be read ({error.strerror})") from error
        documents.append(document if len(document) <= left else document[: _end_of_character(document, int(left))])
        left -= len(document)
    return documents


def _end_of_character(text: bytes, end: int) -> int:
    """The last character boundary up to `end`; characters have at most 4 bytes in UTF-8."""
    places = range(end, max(end - 4, -1), -1)
    return next((place for place in places if text[place] & 0xC0 != 0x80), end)


def matching_files(patterns: Sequence[str]) -> list[Path]:
    """Files, folders (all files below them) and patterns with *, ** and ?; sorted within each, numbers in names by
    value, hidden files skipped. A file counts once, however many links lead to it."""
    files: dict[str, Path] = {}
    places = [os.path.realpath(Path(pattern).expanduser()) for pattern in patterns]
    for pattern in patterns:
        if places.count(os.path.realpath(Path(pattern).expanduser())) > 1:
            raise DataError(
                f"data.paths={pattern}: is named twice, and files are read once; copy what is to count more"
            )
        try:
            found = sorted(_matches(Path(pattern).expanduser()), key=_in_order)
        except OSError as error:
            raise DataError(f"data.paths={pattern[:60]}: cannot be read ({error.strerror})") from error
        if not found:
            raise DataError(f"data.paths={pattern}: no such file, folder or pattern{_near(Path(pattern).expanduser())}")
        for path in found:
            files.setdefault(os.path.realpath(path), path)
    return list(files.values())


def _matches(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    if path.is_dir():
        return list(_below(path, frozenset()))
    if "**" not in path.parts:
        return [Path(found) for found in glob.glob(str(path)) if Path(found).is_file()]
    # The library would loop on circular links, and silently skip unreadable folders.
    root = fixed_part(path)
    form = re.compile(_regex(path.relative_to(root).parts))
    return [found for found in _below(root, frozenset()) if form.fullmatch(found.relative_to(root).as_posix())]


def _in_order(path: Path) -> list[tuple[int, str]]:
    """Natural sort key: day-2 precedes day-10."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"([0-9]+)", path.as_posix())]


def fixed_part(path: Path) -> Path:
    """The folder of a pattern before its first wildcard; a folder or a file itself."""
    marked = next((place for place, part in enumerate(path.parts) if set(part) & set("*?[")), len(path.parts))
    return Path(*path.parts[:marked])


def _regex(parts: Sequence[str]) -> str:
    """Regular expression of a pattern's paths: ** stands for any number of folders."""
    words = ["(?:.*/)?" if part == "**" else _segment(part) + "/" for part in parts[:-1]]
    return "".join(words) + (".*" if parts[-1] == "**" else _segment(parts[-1]))


def _segment(part: str) -> str:
    return fnmatch.translate(part).removeprefix("(?s:").removesuffix(r")\Z").replace(".*", "[^/]*")


def _below(folder: Path, above: frozenset[str]) -> Iterator[Path]:
    """The files below a folder, also behind links, without hidden files and editor backups. Raises `DataError` for a
    broken link."""
    here = os.path.realpath(folder)
    if here in above:
        return  # a link to one of its parents
    try:
        inside = list(folder.iterdir())
    except OSError as error:
        raise DataError(f"data.paths={folder}: cannot be read ({error.strerror})") from error
    for found in inside:
        left_by_an_editor = found.name.endswith(("~", ".swp")) or (found.name[0] == found.name[-1] == "#")
        if found.name.startswith(".") or left_by_an_editor:
            continue
        if found.is_dir():
            yield from _below(found, above | {here})
        elif found.is_file():
            yield found
        elif found.is_symlink():
            raise DataError(f"data.paths={found}: is a link to {os.readlink(found)}, which is not there")


def _near(path: Path) -> str:
    if not path.parent.is_dir():
        return f"; {path.parent} is no folder"
    best = nearest(path.name, (sibling.name for sibling in path.parent.iterdir()))
    return f"; nearest valid: {path.parent / best}" if best else f"; {path.parent} holds nothing like it"
