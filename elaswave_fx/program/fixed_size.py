"""Detection of Python code that depends on the number of samples: its program would be valid for one number only.

    with python_sizes() as places:
        torch.export.export(…)
    places      ->  ["forward, line 12 of net.py (return loss, torch.tensor(float(len(y)))) makes a number of …"]
    first_other_size(program)                   ->  7, where forward has `if x.shape[0] > 6:`

`x.shape[0]` is a symbol during an export; int(), float(), len() and other uses of a Python number fix it, and `if`
decides for the samples of the export.
"""

from __future__ import annotations

import contextlib
import linecache
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

import sympy
import torch
from torch.fx.experimental.sym_node import SymNode

import elaswave_fx
from elaswave_fx.program.batch_size import batch_size
from elaswave_fx.program.ir import Program, argument, calls, is_aten, module_of

_TRANSFORMS = ("/_functorch/eager_transforms.py", "/_functorch/vmap.py", "/torch/_vmap_internals.py")
_CAPTURE = os.path.join(os.path.dirname(__file__), "capture.py")
"""What calls the model, and nothing of it."""
_NOT_USERS = (*(os.path.dirname(str(package.__file__)) + os.sep for package in (torch, elaswave_fx)), "<string>")
"""Beginnings of file names of torch, this package, and functions that torch makes from text."""


SIZES_TRIED = (*range(1, 66), 100, 127, 128, 129, 255, 256, 257, 1000, 1024, 4095, 4096)
"""Batch sizes in granules at which a program's behaviour is checked."""


@contextlib.contextmanager
def python_sizes() -> Iterator[list[str]]:
    """Places in the user's code that asked for a number, and what they do, for a refusal to name."""
    places: list[str] = []
    guard_int, guard_bool = SymNode.guard_int, SymNode.guard_bool

    def as_int(node: SymNode, *args: Any) -> int:
        if node.expr.free_symbols and (place := _place(sys._getframe(1))):
            places.append(f"{place} {_what_makes_a_number(sys._getframe(1))}")
        return guard_int(node, *args)

    def as_bool(node: SymNode, *args: Any) -> bool:
        if node.expr.free_symbols and (place := _asked_by(sys._getframe(1))):
            places.append(f"{place} decides by the number of samples")
        return guard_bool(node, *args)

    with (
        mock.patch.object(SymNode, "guard_int", as_int),
        mock.patch.object(SymNode, "guard_bool", as_bool),
    ):
        yield places


def first_other_size(program: Program) -> int | None:
    """The smallest tried batch size for which a captured program is invalid, for example as the model takes another
    branch. A batch of one sample is compared with eager code instead."""
    size = batch_size(program)
    if size is None:
        return None
    symbol, env = size.node.expr, size.node.shape_env
    conditions = [guard.expr for guard in env.guards if guard.expr.free_symbols == {symbol}]
    for samples in (granules * program.granule for granules in SIZES_TRIED):
        broken = any(condition.subs(symbol, samples) == sympy.false for condition in conditions)
        if samples > 1 and (broken or samples not in env.var_to_range[symbol]):
            return samples
    return None


def chosen_by_size(program: Program) -> str:
    """An operator of torch that chooses its algorithm by the number of samples, in words; empty if there is none."""
    for node in calls(program.graph.graph):
        if is_aten(node, "aten.cdist", "aten._cdist_forward") and not argument(node, "compute_mode"):
            return (
                f"torch.cdist in {module_of(node)} decides by the number of samples; with "
                "compute_mode='donot_use_mm_for_euclid_dist' it does not"
            )
    return ""


def _what_makes_a_number(frame: FrameType | None) -> str:
    """What the place does that asks for a number, with a cure."""
    while frame is not None and not frame.f_code.co_filename.endswith(_TRANSFORMS):
        frame = frame.f_back
    if frame is None:
        return (
            "makes a Python number of the number of samples; x.shape[0] in place of len(x), or torch.full((), "
            "x.shape[0]) as a tensor, is one of every batch"
        )
    return (
        "calls an operator under torch.func that reads the number of samples as a plain number, as torch.cat does "
        "under vmap; torch.stack does not"
    )


def _asked_by(frame: FrameType | None) -> str:
    """The place outside of torch that asks directly, as by `if`; empty where a function of torch asks."""
    while frame is not None and frame.f_code.co_name in ("guard_bool", "bool_", "__bool__"):
        frame = frame.f_back
    return "" if frame is None or frame.f_code.co_filename.startswith(_NOT_USERS) else _place(frame)


def _place(frame: FrameType | None) -> str:
    """The innermost place outside of torch and this package, within the model."""
    while frame is not None and frame.f_code.co_filename.startswith(_NOT_USERS):
        frame = None if frame.f_code.co_filename == _CAPTURE else frame.f_back
    if frame is None:
        return ""
    file, line = frame.f_code.co_filename, frame.f_lineno
    text = linecache.getline(file, line).strip()
    return f"{frame.f_code.co_name}, line {line} of {Path(file).name}" + (f" ({text})" if text else "")
