"""The fingerprint of a model: equal for two models from which the same program would be captured.

It covers everything but parameter values that a forward pass reads from the model: the source of every module's class,
shapes and ties, plain attributes, configuration objects, tensors that are neither parameter nor buffer. It is the same
in every process: it depends on no addresses, order of sets, or seed of hashes. Closure variables, globals and files are
covered by computation.py.

    fingerprint(GPT(layers=4, dropout=0.1)) != fingerprint(GPT(layers=4, dropout=0.2))
"""

from __future__ import annotations

import functools
import hashlib
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

import torch
from torch import nn

from elaswave_fx.files import file_digest
from elaswave_fx.program.dense import tensor_text

_DEPTH = 6
_HIDDEN = ("_parameters", "_buffers", "_modules", "_torchdynamo_wrapper_id")
"""Attributes of modules that other lines tell of, and the address that torch.compile keeps."""
ADDRESS = re.compile(r" at 0x[0-9a-f]+")


def fingerprint(model: nn.Module) -> str:
    """Hexadecimal SHA-256 of the contents named above."""
    digest = hashlib.sha256()
    for line in _lines(model):
        digest.update(line.encode())
        digest.update(b"\n")
    return digest.hexdigest()


def class_sources(kind: type) -> str:
    """Hexadecimal SHA-256 of the files that define a class and its bases, and of modules in the same folder that they
    name.

    Files of other packages count only if they define a base: the caller's key has the versions of packages.
    """
    top = sys.modules[kind.__module__.split(".")[0]]
    file = getattr(top, "__file__", None)
    homes = [Path(file).parent] if file is not None else [Path(folder) for folder in getattr(top, "__path__", ())]
    found: dict[str, Path] = {}
    waiting = [base.__module__ for base in kind.__mro__]
    while waiting:
        name = waiting.pop()
        source = getattr(sys.modules.get(name), "__file__", None)
        if name in found or source is None or name.split(".")[0] in ("torch", "elaswave_fx"):
            continue
        found[name] = Path(source)
        if not set(homes).isdisjoint(found[name].parents) and "site-packages" not in found[name].parts:
            waiting += [str(_module_name(value)) for value in vars(sys.modules[name]).values()]
    digest = hashlib.sha256()
    for name, path in sorted(found.items()):
        digest.update(f"{name} {file_digest(path)}\n".encode())
    return digest.hexdigest()


def _module_name(value: object) -> object:
    """The module itself, or the module that defines a value."""
    return value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None)


def _lines(model: nn.Module) -> Iterator[str]:
    first: dict[int, str] = {}
    tensors = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    for name, tensor in tensors:
        owner = first.setdefault(id(tensor), name)
        yield f"{name} {owner} {tuple(tensor.shape)} {tensor.dtype} {tensor.requires_grad}"
    for name, module in model.named_modules():
        yield f"module {name} {_class_name(type(module))}"
        yield from (f"{name}.{key} = {plain_text(value)}" for key, value in _items(module, _HIDDEN))
    for path in _source_files(model):
        yield f"source {path.name} {file_digest(path)}"


def _class_name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _source_files(model: nn.Module) -> list[Path]:
    """The files that define the classes of all modules and their bases; torch is known by its version."""
    kinds = {base for module in model.modules() for base in type(module).__mro__}
    files = set()
    for kind in kinds:
        top = kind.__module__.split(".")[0]
        source = getattr(sys.modules.get(kind.__module__), "__file__", None)
        if top not in ("torch", "builtins") and source is not None:
            files.add(Path(source))
    return sorted(files)


def _items(owner: object, hidden: tuple[str, ...] = ()) -> list[tuple[str, Any]]:
    return sorted((key, value) for key, value in getattr(owner, "__dict__", {}).items() if key not in hidden)


def plain_text(value: Any, depth: int = 0) -> str:
    """A text of a value without addresses; for unknown kinds, the class and its attributes."""
    if value is None or isinstance(value, (bool, int, float, complex, str, bytes, torch.dtype, torch.device, Path)):
        return repr(value)
    if isinstance(value, torch.Tensor):
        return tensor_text(value)
    if isinstance(value, nn.Module):
        return _class_name(type(value))  # modules have separate lines
    if isinstance(value, ModuleType):
        return f"module {value.__name__}"  # the code in it that forward runs is covered apart
    if isinstance(value, functools.partial):
        return plain_text((value.func, value.args, value.keywords), depth + 1)
    if callable(value) and hasattr(value, "__qualname__"):
        return f"{getattr(value, '__module__', None)}.{value.__qualname__} {_source(value)}"
    if depth > _DEPTH:
        return _class_name(type(value))
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(plain_text(item, depth + 1) for item in value) + "]"
    if isinstance(value, (set, frozenset)):
        return "{" + ", ".join(sorted(plain_text(item, depth + 1) for item in value)) + "}"
    if isinstance(value, Mapping):
        entries = (f"{plain_text(key, depth + 1)}: {plain_text(item, depth + 1)}" for key, item in value.items())
        return "{" + ", ".join(sorted(entries)) + "}"
    if not hasattr(value, "__dict__"):
        return f"{_class_name(type(value))} {ADDRESS.sub('', repr(value))}"
    items = ", ".join(f"{key}={plain_text(item, depth + 1)}" for key, item in _items(value))
    return f"{_class_name(type(value))}({items})"


def _source(function: Any) -> str:
    """Digest of a function's code: the name of a lambda does not identify it."""
    code = getattr(function, "__code__", None)
    if not isinstance(code, CodeType):
        return ""
    constants = [value for value in code.co_consts if isinstance(value, (bool, int, float, str, bytes))]
    return f"{code.co_code.hex()} {code.co_names} {constants}"
