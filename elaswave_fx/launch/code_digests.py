"""Digests of the code that decides what a rank computes: a joiner's must equal the job's.

    own_code()                     ->  "3f0c…", of this package and its native module
    target_code(("mine.Net",))     ->  {"mine.py": "9f3a…", "helper.py": "77ab…", "numpy": "2.2.0"}

User code is found by its import paths and then by the imports in its files, also within functions, without importing
anything. Installed packages count by version. Python, torch and this package are compared separately.
"""

from __future__ import annotations

import ast
import hashlib
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib import metadata
from importlib.machinery import EXTENSION_SUFFIXES, PathFinder
from pathlib import Path
from typing import Any, NamedTuple

import elaswave_fx
from elaswave_fx.files import file_digest

_INSTALLED = ("site-packages", "dist-packages")
_COMPARED = {"torch", "elaswave_fx", *sys.stdlib_module_names}
_DOTTED = re.compile(r"[^\W\d]\w*(?:\.\w+)+")
_SHOWN = 16
_SUFFIXES = (*EXTENSION_SUFFIXES, ".py")


class _Module(NamedTuple):
    """A module's `file`, None for a folder without one; `folders`: where a package's modules are."""

    file: Path | None
    folders: list[Path]


def own_code() -> str:
    """Digest of all sources of this package and of its native modules."""
    total = hashlib.sha256()
    top = Path(elaswave_fx.__file__).parent
    for path in sorted(top.rglob("*.py")):
        total.update(f"{path.relative_to(top)} ".encode() + path.read_bytes())
    folders = [Path(folder) for folder in elaswave_fx.__path__]  # several in an editable installation
    for name in ("_native", "_liveness"):
        found = next((found for folder in folders if (found := _inside(folder, name)) is not None), None)
        if found is not None and found.file is not None:
            total.update(f"{name} {file_digest(found.file)}".encode())
    return total.hexdigest()[:_SHOWN]


def target_code(targets: Iterable[str]) -> dict[str, str]:
    """File -> digest, or installed package -> version. A target that does not exist has no entry."""
    found: dict[str, str] = {}
    for target in targets:
        parts = target.split(".")
        for name in (".".join(parts[:count]) for count in range(1, len(parts) + 1)):
            _add(name, found)
    return dict(sorted(found.items()))


def targets_of(config: Mapping[str, Any]) -> tuple[str, ...]:
    """The import paths anywhere in a configuration."""
    return tuple(sorted(set(_targets(config))))


def _targets(node: object) -> Iterator[str]:
    if isinstance(node, Mapping):
        for key in ("_target_", "target", *(["name"] if node.get("kind") == "target" else [])):
            if isinstance(node.get(key), str):
                yield node[key]
        if isinstance(node.get("pipeline"), str):  # a text of passes
            yield from _DOTTED.findall(node["pipeline"])
        for value in node.values():
            yield from _targets(value)
    elif isinstance(node, Sequence) and not isinstance(node, (str, bytes)):
        for value in node:
            yield from _targets(value)


def _add(name: str, found: dict[str, str]) -> None:
    """Add a module, the packages above it and their imports; nothing if there is no such module."""
    top = name.partition(".")[0]
    if top in _COMPARED:
        return
    module = _located(name)
    if module is None:
        return
    origin = module.file
    if origin is not None and any(part in _INSTALLED for part in origin.parts):
        found[top] = _version(top)
        return
    if origin is None or not origin.is_file():
        return  # a package without __init__
    is_package = bool(module.folders)
    place = name.replace(".", "/") + ("/__init__" if is_package else "") + _suffix(origin)
    if place in found:
        return
    found[place] = file_digest(origin)[:_SHOWN]
    if origin.suffix == ".py":
        for other in _imported(origin, name if is_package else name.rpartition(".")[0]):
            _add(other, found)


def _suffix(path: Path) -> str:
    """The suffix of a source, or `.so` for every compiled module, whatever Python it was compiled for."""
    return next((".so" for each in EXTENSION_SUFFIXES if path.name.endswith(each)), path.suffix)


def _imported(path: Path, package: str) -> Iterator[str]:
    """Dotted names that a file imports, packages first. Some are no modules, which is harmless."""
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            stem = ".".join([*above, *([node.module] if node.module else [])])
            names = [stem, *(f"{stem}.{alias.name}" for alias in node.names)]
        else:
            continue
        for name in names:
            parts = name.split(".")
            yield from (".".join(parts[: count + 1]) for count in range(len(parts)) if parts[0])


def _located(name: str) -> _Module | None:
    """Find a module without importing any package above it."""
    top, *rest = name.split(".")
    try:
        spec = PathFinder.find_spec(top)
    except (ImportError, ValueError, OSError):
        return None
    if spec is None:
        return None
    folders = [Path(folder) for folder in spec.submodule_search_locations or ()]
    found = _Module(None if spec.origin is None else Path(spec.origin), folders)
    for part in rest:
        inside = (each for folder in found.folders if (each := _inside(folder, part)) is not None)
        found = next(inside, None)
        if found is None:
            return None
    return found


def _inside(folder: Path, name: str) -> _Module | None:
    """The module `name` in a package's folder, found in the order of Python's own search."""
    package = folder / name
    files = [package / f"__init__{suffix}" for suffix in _SUFFIXES]
    for file in (*files, *(folder / f"{name}{suffix}" for suffix in _SUFFIXES)):
        if file.is_file():
            return _Module(file, [package] if file.parent == package else [])
    return _Module(None, [package]) if package.is_dir() else None


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "of unknown version"
