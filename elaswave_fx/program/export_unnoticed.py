"""User code takes the branch of an eager call during an export, or the export is refused.

if torch.compiler.is_compiling(): …       ->  False where user code asks; True for installed packages, whose guarded
                                              code is the same computation without questions about values
try: if x.max() > 9: …  except: pass      ->  the error of the export that this code catches, raised afterwards
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any
from unittest import mock

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from elaswave_fx.program.forward_code import is_installed

_TORCH = os.path.dirname(torch.__file__) + os.sep
_REFUSALS = (GuardOnDataDependentSymNode, DataDependentOutputException, DynamicOutputShapeException)


@contextlib.contextmanager
def export_unnoticed() -> Iterator[None]:
    """Raises the first error of the export that user code has caught: a question about values, or Tensor.numpy()."""
    made: list[BaseException] = []
    with contextlib.ExitStack() as patches:
        for function, answer in ((torch.compiler.is_compiling, _compiling), (torch.compiler.is_exporting, _exporting)):
            patches.callback(setattr, function, "__code__", function.__code__)
            function.__code__ = answer.__code__  # under whatever name it was imported
        for refusal in _REFUSALS:
            patches.enter_context(mock.patch.object(refusal, "__init__", _recording(refusal.__init__, made)))
        patches.enter_context(mock.patch.object(torch.Tensor, "numpy", _keeping(torch.Tensor.numpy, made)))
        yield
    for error in made:
        caught_by = error.__traceback__
        if caught_by is not None and _is_users(caught_by.tb_frame):
            raise error


def asked_by_user() -> bool:
    """Whether the function that calls this one was called by user code."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code.co_name == "is_compiling":  # torch has it under several names
        frame = frame.f_back
    return frame is not None and _is_users(frame)


def _is_users(frame: FrameType) -> bool:
    file = frame.f_code.co_filename
    return not (file.startswith((_TORCH, "<frozen")) or is_installed(file))


def _compiling() -> bool:  # with the globals of torch.compiler
    from elaswave_fx.program.export_unnoticed import asked_by_user

    return _is_compiling_flag and not asked_by_user()  # type: ignore[name-defined]  # noqa: F821


def _exporting() -> bool:
    from elaswave_fx.program.export_unnoticed import asked_by_user

    return _is_exporting_flag and not asked_by_user()  # type: ignore[name-defined]  # noqa: F821


def _recording(init: Callable[..., None], made: list[BaseException]) -> Callable[..., None]:
    def record(error: BaseException, *args: Any, **named: Any) -> None:
        init(error, *args, **named)
        made.append(error)

    return record


def _keeping(method: Callable[..., Any], made: list[BaseException]) -> Callable[..., Any]:
    def call(tensor: torch.Tensor, *args: Any, **named: Any) -> Any:
        try:
            return method(tensor, *args, **named)
        except Exception as error:
            made.append(error)
            raise

    return call
