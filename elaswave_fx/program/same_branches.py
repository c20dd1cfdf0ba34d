"""User code takes the same branches in an export as in a call; else the model is refused, or a note names the line.

    if type(x) is torch.Tensor: …             ->  refused: "model: forward goes another way in an export than in a call"
    try: if x.max() > 9: …  except: pass      ->  refused: it catches the error of the export
    if torch.compiler.is_compiling(): …       ->  a note: the model trains as if compiled

Compared are the instructions of user code, in functions that both enter: a call, and a run on tensors without values,
such as the export has. Equal results would prove less, since the example may hide a branch.
"""

from __future__ import annotations

import contextlib
import linecache
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any
from unittest import mock

import torch
from torch import nn

from elaswave_fx.errors import CaptureError
from elaswave_fx.program.forward_code import is_installed, is_part_of_torch_or_python
from elaswave_fx.program.held_state import python_state_kept
from elaswave_fx.program.state_kept import SEED, state_kept
from elaswave_fx.scheduling import collection_paused

Batch = Mapping[str, torch.Tensor]
Instructions = set[tuple[CodeType, int]]

_OURS = os.path.dirname(os.path.dirname(__file__)) + os.sep
_TRIALS = 3
"""User code may look at the time: a difference is one if it is there in each trial."""


def refuse_other_branches(
    model: nn.Module, batch: Batch, replaced: Callable[[], AbstractContextManager[None]], sized: bool = False
) -> None:
    """Raise CaptureError for user code that takes another branch without values. `replaced`: the export's replacements
    in torch. `sized`: the number of samples is a symbol there, which is tried if the code asks for types."""

    def without_values() -> Instructions | None:
        with replaced(), _compiling():
            found = _instructions(model, lambda: _call_without_values(model, batch))
            if sized and found and _ask_for_types(found):
                found = _instructions(model, lambda: _call_without_values(model, batch, sized)) or found
            return found

    place = _difference(lambda: _called(model, batch, _compiling()), without_values)
    if place is not None:
        raise CaptureError(
            f"model: forward goes another way in an export than in a call: {place}; a way out is code that asks for "
            "no types of tensors or sizes, and catches no errors of questions about their values"
        )


def note_of_compiled_branch(model: nn.Module, batch: Batch) -> tuple[str, ...]:
    """A line on user code that asks whether it is compiled, and then takes another branch."""
    place = _difference(lambda: _called(model, batch), lambda: _called(model, batch, _compiling()))
    return (
        (f"model: forward asks whether it is compiled, and is trained as if it were: {place}",)
        if place is not None
        else ()
    )


def _difference(one: Callable[[], Instructions | None], other: Callable[[], Instructions | None]) -> str | None:
    """The first line where two runs differ, if there is any."""
    found: Instructions | None = None
    for _ in range(_TRIALS):
        here = one()
        there = other() if here else None  # without code of the user's there is nothing to compare
        if not here or there is None:
            return None
        both = {code for code, _ in here} & {code for code, _ in there}
        differ = {(code, at) for code, at in here ^ there if code in both}
        found = differ if found is None else found & differ
        if not found:
            return None
    code, line = min(((code, _line(code, at)) for code, at in found or ()), key=lambda at: (at[0].co_filename, at[1]))
    text = linecache.getline(code.co_filename, line).strip()
    return f"{code.co_qualname}, line {line} of {os.path.basename(code.co_filename)} ({text})"


def _called(model: nn.Module, batch: Batch, within: AbstractContextManager[None] | None = None) -> Instructions | None:
    with within or contextlib.nullcontext():
        return _instructions(model, lambda: model(**{name: tensor.clone() for name, tensor in batch.items()}))


def _ask_for_types(found: Instructions) -> bool:
    names = {name for code in {code for code, _ in found} for name in code.co_names}
    return not names.isdisjoint(("isinstance", "issubclass", "type", "hasattr", "__class__"))


def _call_without_values(model: nn.Module, batch: Batch, sized: bool = False) -> None:
    """Run forward on tensors that have a shape alone. `sized`: the number of samples is a symbol, which takes ten times
    as long."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

    mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)

    def without_values(tensor: torch.Tensor) -> torch.Tensor:
        if not sized:
            return mode.from_tensor(tensor, static_shapes=True)
        dims = [DimDynamic.DYNAMIC, *[DimDynamic.STATIC] * (tensor.dim() - 1)]
        return mode.from_tensor(tensor, symbolic_context=StatelessSymbolicContext(dims))

    inputs = {name: without_values(each) for name, each in batch.items()}
    with _replaced_state(model, lambda tensor: mode.from_tensor(tensor, static_shapes=True)), mode:
        model(**inputs)


@contextlib.contextmanager
def _replaced_state(model: nn.Module, replacement: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[None]:
    """Replace parameters and buffers under all their names. (functional_call leaves some in place where a module has
    two names.)"""
    modules = [module for module in model.modules() if not isinstance(module, torch.jit.ScriptModule)]
    owners: list[dict[str, Any]] = [own for module in modules for own in (module._parameters, module._buffers)]
    held = [(own, dict(own)) for own in owners]
    try:
        for own, tensors in held:
            own.update({name: replacement(tensor) for name, tensor in tensors.items() if tensor is not None})
        yield
    finally:
        for own, tensors in held:
            own.clear()
            own.update(tensors)


@contextlib.contextmanager
def _compiling() -> Iterator[None]:
    """What torch.compiler.is_compiling() and is_exporting() say during an export."""
    with (
        mock.patch.object(torch.compiler, "_is_compiling_flag", True),
        mock.patch.object(torch.compiler, "_is_exporting_flag", True),
    ):
        yield


def _instructions(model: nn.Module, run: Callable[[], object]) -> Instructions | None:
    """The instructions of user code in a run of the model, from the state of now; None if it fails."""
    found: Instructions = set()
    users: dict[CodeType, bool] = {}

    def enter(frame: FrameType, _event: str, _arg: object) -> Any:
        code = frame.f_code
        if code not in users:
            users[code] = _is_users(code.co_filename, frame.f_globals)
        if not users[code]:
            return None
        frame.f_trace_lines, frame.f_trace_opcodes = False, True
        return step

    def step(frame: FrameType, event: str, _arg: object) -> Any:
        if event == "opcode":
            found.add((frame.f_code, frame.f_lasti))
        return step

    before = sys.gettrace()
    try:
        with python_state_kept(model), state_kept(model), torch.random.fork_rng(devices=()), collection_paused():
            torch.manual_seed(SEED)
            sys.settrace(enter)
            try:
                run()
            finally:
                sys.settrace(before)
    except Exception:  # noqa: BLE001 - the trial alone has failed
        return None
    return found


def _is_users(file: str, names: Mapping[str, Any]) -> bool:
    return not (file.startswith((_OURS, "<")) or is_installed(file) or is_part_of_torch_or_python(Path(file), names))


def _line(code: CodeType, offset: int) -> int:
    """The line of an instruction; of one that stands in none, of the end of a handler, the last."""
    lines = [(first <= offset < end, line) for first, end, line in code.co_lines() if line is not None]
    return next((line for here, line in lines if here), max(line for _, line in lines))
