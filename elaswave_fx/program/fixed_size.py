"""Where a model makes a Python number of the number of samples: its program is then exported for that number alone.

    with python_sizes() as places:
        torch.export.export(…)
    places      ->  ["forward, line 12 of net.py (return loss, torch.tensor(float(len(y))))"]

`x.shape[0]` is a symbol while a model is exported; int(), float(), len() and what asks for a Python number fix it.
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

import torch
from torch.fx.experimental.sym_node import SymNode

import elaswave_fx

_NOT_USERS = tuple(os.path.dirname(str(package.__file__)) + os.sep for package in (torch, elaswave_fx))


@contextlib.contextmanager
def python_sizes() -> Iterator[list[str]]:
    """The places of the user's code that have asked so far, for a refusal to name."""
    places: list[str] = []
    guard = SymNode.guard_int

    def asked(node: SymNode, *args: Any) -> int:
        if node.expr.free_symbols:
            places.append(_place(sys._getframe(1)))
        return guard(node, *args)

    with mock.patch.object(SymNode, "guard_int", asked):
        yield places


def _place(frame: FrameType | None) -> str:
    """The innermost place outside of torch and this package."""
    while frame is not None and frame.f_code.co_filename.startswith(_NOT_USERS):
        frame = frame.f_back
    if frame is None:
        return ""
    file, line = frame.f_code.co_filename, frame.f_lineno
    text = linecache.getline(file, line).strip()
    return f"{frame.f_code.co_name}, line {line} of {Path(file).name}" + (f" ({text})" if text else "")
