"""Values that consecutive calls leave in one place, and extrapolations to a far later call.

    found = [(1, "warm"), (2, "warm"), (3, "warm")]
    counts(found)                               ->  True: a number in them goes on changing
    with_numbers(found, lambda n: n + 1000)     ->  (1003, "warm")
    grown([[0], [0, 1], [0, 1, 2]], 1000)       ->  [0, 1, 2, 2, …]

Numbers are searched in tuples, lists, dictionaries and objects with attributes, which every call may make anew.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from numbers import Number
from types import FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import nn

from elaswave_fx.program.forward_code import is_library
from elaswave_fx.program.model_fingerprint import plain_text

_DEPTH = 4
_MOST_PARTS = 64
"""Values with more parts stay unchanged: tables are not counters."""
_SEQUENCES = (list, tuple, str, bytes)
_WHOLE = (torch.Tensor, nn.Module, type, FunctionType, MethodType, ModuleType)
Path = tuple[Any, ...]
"""Keys of tuples, lists and dictionaries, and names of attributes."""


def counts(found: list[Any]) -> bool:
    """Whether a number in these values keeps changing, flags excluded."""
    return bool(_changing(found))


def with_numbers(found: list[Any], change: Callable[[Any], Any]) -> Any:
    """The last value, with changed numbers where the values differ."""
    return with_changed(found[-1], _changing(found), change)


def grows(found: list[Any]) -> bool:
    """Whether these are sequences of growing length."""
    alike = isinstance(found[-1], _SEQUENCES) and len({type(each) for each in found}) == 1
    return alike and len(found[-1]) > len(found[-2])


def grown(found: list[Any], by: int) -> Any:
    """The last sequence, with its last element repeated `by` more times."""
    return found[-1] + found[-1][-1:] * by


def _changing(found: list[Any]) -> frozenset[Path]:
    each = [numbers_in(value) for value in found]
    return frozenset(path for path in each[-1] if len({plain_text(numbers.get(path)) for numbers in each}) > 1)


def numbers_in(value: Any, path: Path = ()) -> dict[Path, Any]:
    """Every number inside, small tensors and arrays included, by its path. Flags are left out."""
    if isinstance(value, Number):
        return {} if isinstance(value, bool) else {path: value}
    if isinstance(value, torch.Tensor):
        is_small = value.numel() <= _MOST_PARTS and value.dtype != torch.bool and value.layout == torch.strided
        return {path: value.detach().clone()} if is_small else {}
    if isinstance(value, np.ndarray):
        return {path: value.copy()} if value.size <= _MOST_PARTS and value.dtype.kind in "iuf" else {}
    found: dict[Path, Any] = {}
    for key, part in _parts(value, len(path)).items():
        found |= numbers_in(part, (*path, key))
    return found


def _parts(value: Any, depth: int) -> Mapping[Any, Any]:
    parts: Mapping[Any, Any] = {}
    if depth == _DEPTH or isinstance(value, _WHOLE):
        return parts
    if isinstance(value, (list, tuple)):
        parts = dict(enumerate(value))
    elif isinstance(value, dict):
        parts = value
    elif hasattr(value, "__dict__") and not is_library(type(value).__module__, ("types",)):
        parts = vars(value)
    return parts if len(parts) <= _MOST_PARTS else {}


def with_changed(value: Any, paths: frozenset[Path], change: Callable[[Any], Any], path: Path = ()) -> Any:
    """The value with the numbers at `paths` changed; containers are copied."""
    if path in paths:
        return change(value)
    if not any(each[: len(path)] == path for each in paths):
        return value
    parts = {key: with_changed(part, paths, change, (*path, key)) for key, part in _parts(value, len(path)).items()}
    if isinstance(value, tuple):
        return type(value)._make(parts.values()) if hasattr(value, "_make") else tuple(parts.values())  # type: ignore
    if isinstance(value, list):
        return list(parts.values())
    made = copy.copy(value)
    (made if isinstance(value, dict) else vars(made)).update(parts)
    return made
