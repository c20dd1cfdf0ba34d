"""Where torch's own code looks at values to check them, or to take a shortcut: no program does so.

note_of_unchecked(model, batch)   ->  ("model: values are checked by torch.distributions at the start, …",)
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from types import FrameType
from typing import Any
from unittest import mock

import torch
from torch import nn

from elaswave_fx.program.held_state import try_forward

_TORCH = os.path.dirname(torch.__file__) + os.sep
ANSWERS: Mapping[tuple[str, str], bool] = {
    ("nn/modules/transformer.py", "_detect_is_causal_mask"): False,  # is it the causal mask?
    ("nn/functional.py", "gaussian_nll_loss"): False,  # is a variance negative?
    ("distributions/distribution.py", "__init__"): True,  # are all parameters within their constraints?
    ("distributions/distribution.py", "_validate_sample"): True,  # is the sample within the support?
    ("distributions/constraints.py", "check"): True,  # are all matrices square, symmetric?
    ("distributions/wishart.py", "__init__"): False,  # is a degree of freedom too small?
}
"""(file of torch, function) -> result of `bool(tensor)` there."""


def note_of_unchecked(model: nn.Module, batch: Mapping[str, torch.Tensor]) -> tuple[str, ...]:
    """A line on checks of values that are made here alone: a program has none."""
    found: set[str] = set()
    ask, assert_async = torch.Tensor.__bool__, torch._assert_async  # type: ignore[reportPrivateImportUsage]

    def record(tensor: torch.Tensor) -> bool:
        place = place_in_torch(sys._getframe(1))
        if place in ANSWERS and place[1] != "_detect_is_causal_mask":
            found.add("nn.functional." + place[1] if place[0].startswith("nn") else "torch.distributions")
        return ask(tensor)

    def record_assertion(*args: Any, **kwargs: Any) -> Any:
        found.add("torch._assert_async")
        return assert_async(*args, **kwargs)

    with mock.patch.object(torch, "_assert_async", record_assertion):
        try_forward(model, batch, mock.patch.object(torch.Tensor, "__bool__", record))
    names = ", ".join(sorted(found))
    return (f"model: values are checked by {names} at the start, and not while it trains",) if found else ()


def place_in_torch(frame: FrameType) -> tuple[str, str]:
    """File of torch, function."""
    code = frame.f_code
    return code.co_filename.removeprefix(_TORCH).replace(os.sep, "/"), code.co_name
