"""The code that a forward pass runs: program dependences besides the classes and values of the model.

    code = forward_code(model, batch)
    code.words()     ->  "net.py, helper.py, transformers 5.1.0"
    code.lines()     ->  what goes into a key: equal while the same code would run

Files count by their bytes, those of installed packages also by version; code without a file, as in a notebook, by its
instructions and constants. Plain values and tensors among the globals of a user's function count too. Versions stand
for torch and Python.
"""

from __future__ import annotations

import contextlib
import hashlib
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from types import CodeType, FrameType, ModuleType
from typing import Any

import torch
from torch import nn

from elaswave_fx.files import file_digest
from elaswave_fx.program.dense import tensor_text
from elaswave_fx.program.state_kept import state_kept
from elaswave_fx.scheduling import collection_paused

_INSTALLED = ("site-packages", "dist-packages")
_MOST_NAMES = 4


@dataclass(frozen=True)
class ForwardCode:
    """`files`: by digest; `packages`: name -> version; `values`: of code without a file, and of global names."""

    files: Mapping[Path, str]
    packages: Mapping[str, str]
    values: tuple[str, ...]

    def lines(self) -> tuple[str, ...]:
        """Lines that are equal for the same code, wherever its files lie."""
        files = sorted(f"file {path.name} {digest}" for path, digest in self.files.items())
        return (*files, *(f"package {name} {version}" for name, version in self.packages.items()), *self.values)

    def words(self) -> str:
        """The code in words for the user."""
        own = sorted(path.name for path in self.files if not is_installed(path))
        shown = [*own[:_MOST_NAMES], *([f"{len(own) - _MOST_NAMES} more files"] if len(own) > _MOST_NAMES else [])]
        return ", ".join([*shown, *(f"{name} {version}" for name, version in self.packages.items())]) or "torch alone"


def forward_code(model: nn.Module, batch: Mapping[str, torch.Tensor]) -> ForwardCode:
    """Run the model once on a batch and collect the code that runs. A failing forward pass is collected up to the
    failure, which the capture reports."""
    found: dict[tuple[int, str, CodeType], dict[str, Any]] = {}  # two files may have equal code

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            found.setdefault((id(frame.f_globals), frame.f_code.co_filename, frame.f_code), frame.f_globals)

    before = sys.getprofile()
    with torch.random.fork_rng(), state_kept(model), collection_paused(), contextlib.suppress(Exception):
        inputs = {name: tensor.clone() for name, tensor in batch.items()}
        sys.setprofile(note)
        try:
            model(**inputs)
        finally:
            sys.setprofile(before)
    return _described([(code, names) for (_, _, code), names in found.items()])


def _described(found: Iterable[tuple[CodeType, Mapping[str, Any]]]) -> ForwardCode:
    files: set[Path] = set()
    values: set[str] = set()
    for code, names in found:
        path = Path(code.co_filename)
        if is_part_of_torch_or_python(path, names):
            continue
        if path.is_file():
            files.add(path)
        else:
            values.add(f"code {code.co_qualname} {_instructions(code)}")
        if not is_installed(path):
            values.update(_globals_of(code, names))
            files.update(_modules_of(code, names))
    packages = {name: _version(name) for name in sorted({_package(path) for path in files if is_installed(path)})}
    digests = {path: file_digest(path) for path in sorted(files)}
    return ForwardCode(digests, packages, tuple(sorted(values)))


def is_part_of_torch_or_python(path: Path, names: Mapping[str, Any]) -> bool:
    """Whether a file is part of torch or Python, which versions identify."""
    top = str(names.get("__name__", "")).split(".")[0]
    library = Path(sysconfig.get_paths()["stdlib"])
    return top == "torch" or str(path).startswith("<frozen") or (library in path.parents and not is_installed(path))


def is_installed(path: Path | str) -> bool:
    """Whether a file belongs to an installed package."""
    return any(part in _INSTALLED for part in Path(path).parts)


def is_library(module: str | None, besides: tuple[str, ...] = ()) -> bool:
    """Whether a module belongs to torch, NumPy or Python, and its top package is not in `besides`."""
    top = str(module).split(".")[0]
    return module is None or (top not in besides and (top in ("torch", "numpy") or top in sys.stdlib_module_names))


def _package(path: Path) -> str:
    """The top folder or file of an installed package."""
    place = max(path.parts.index(part) for part in _INSTALLED if part in path.parts)
    return Path(path.parts[place + 1]).stem


def _version(name: str) -> str:
    found = getattr(sys.modules.get(name), "__version__", None)
    if isinstance(found, str):
        return found
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "of unknown version"


def _instructions(code: CodeType) -> str:
    """A digest of code and its inner functions."""
    digest = hashlib.sha256(code.co_code + repr(code.co_names).encode())
    for constant in code.co_consts:
        digest.update((_instructions(constant) if isinstance(constant, CodeType) else repr(constant)).encode())
    return digest.hexdigest()


def _globals_of(code: CodeType, names: Mapping[str, Any]) -> Iterator[str]:
    """The global constants that code names."""
    for name in code.co_names:
        value = names.get(name)
        if isinstance(value, torch.Tensor):
            yield f"value {name} {tensor_text(value)}"
        elif _is_plain(value) or (isinstance(value, tuple) and all(map(_is_plain, value))):
            yield f"value {name} {value!r}"


def _is_plain(value: object) -> bool:
    return isinstance(value, (bool, int, float, complex, str, bytes, torch.dtype))


def _modules_of(code: CodeType, names: Mapping[str, Any]) -> Iterator[Path]:
    """The files of the user's modules that code names: it may read constants of theirs."""
    for name in code.co_names:
        value = names.get(name)
        source = getattr(value, "__file__", None) if isinstance(value, ModuleType) else None
        if (
            source is not None
            and not is_installed(Path(source))
            and not is_part_of_torch_or_python(Path(source), vars(value))
        ):
            yield Path(source)
