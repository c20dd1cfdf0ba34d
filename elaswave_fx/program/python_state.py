"""Refusal of models whose forward changes Python state and depends on it: a capture freezes that state.

Attributes, globals and generators that a call changes are set to other values: those of later calls, distant numbers,
inverted comparisons, the lowest and highest draws. If forward then computes something else, one captured program would
train something else.

    self.calls += 1; loss + min(1.0, self.calls / 4) * penalty      ->  CaptureError: names calls, its class and line
    if random.random() < 0.05: skip the layer                       ->  CaptureError: names Python's generator
    self.calls += 1; if self.calls % 100 == 0: print(loss)          ->  nothing: what is computed is the same
"""

from __future__ import annotations

import contextlib
import dis
import functools
import linecache
import random
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import numpy as np
import torch
from torch import nn

from elaswave_fx.errors import CaptureError
from elaswave_fx.program.computation import Computation, allowance, record
from elaswave_fx.program.containers import ABSENT, Cache, Environment, Slot, is_iterator
from elaswave_fx.program.generators import DRAWS, can_be_steered, is_generator, steer
from elaswave_fx.program.held_state import HeldState
from elaswave_fx.program.later import FILLERS, later
from elaswave_fx.program.later_values import counts, grown, grows, with_numbers
from elaswave_fx.program.probe import Flips, probe
from elaswave_fx.program.state_kept import state_kept

_STEPS = (*(2**power for power in range(21)), 1000, 1_000_003)
"""Distances by which a number is moved: the first power of two not below `length` moves a counter into the next phase
of `calls // length % phases`."""
_GROWTH = 1000
"""Entries added to growing containers."""
_MOST_NAMED = 64
_CALLS = 3
"""Consecutive calls that are compared; a number named in code counts as a milestone only beyond it."""
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
_WRONG_ANSWERS = 4
"""Bound of failing answers that are taken back."""

Batch = Mapping[str, torch.Tensor]
_Values = Mapping[Slot, list[Any]]
"""Slots, with their values after consecutive calls."""
_Test = Callable[[_Values], bool]


def refuse_python_state(model: nn.Module, batch: Batch) -> None:
    """Raise CaptureError if a forward pass changes Python state and depends on it. All state is restored.

    What the first call makes, such as a manager that counts, is changed in a second trial.
    """
    held = HeldState(model)
    try:
        trial = _Trial(model, batch, held)
        trial.run()
        made = trial.made()
        if made is not None:
            try:
                _Trial(model, batch, made).run()
            finally:
                made.restore()
    finally:
        held.restore()


class _Trial:
    """Runs forward from changed states and compares each computation with that of the first call."""

    def __init__(self, model: nn.Module, batch: Batch, held: HeldState) -> None:
        self.model = model
        self.batch = batch
        self.held = held
        self.most: int | None = None
        self.gradients = any(_names(function, "register_hook") for function in held.functions)

    def run(self) -> None:
        try:
            base = self._record()
        except Exception:  # noqa: BLE001 - the user's code, or an operator that cannot be recorded
            self._refuse_changes()
            return
        self.most = allowance(base)
        changed = self.held.changes()
        for slot in changed:
            if is_iterator(slot.after) or not can_be_steered(slot.container.owner):
                raise CaptureError(self._refusal(slot))
        self._refuse_other_sources(base)
        self._refuse_gradients(base)
        if not changed and not self.held.changes():
            return
        values, differs = self._calls(base)
        if differs:
            last: _Test = functools.partial(self._differs, base, lambda slot, found: slot.put(found[-1]))
            raise CaptureError(self._refusal(_culprit(values, last)))
        for test, wanted in self._tests(base):
            chosen = {slot: found for slot, found in values.items() if wanted(slot, found)}
            if chosen and test(chosen):
                raise CaptureError(self._refusal(_culprit(chosen, test)))

    def made(self) -> HeldState | None:
        """The state that the first call leaves, if that has made objects which hold state."""
        self.held.restore()
        try:
            self._record()
        except Exception:  # noqa: BLE001 - as in `run`
            return None
        after = HeldState(self.model)
        return None if after.containers.keys() <= self.held.containers.keys() else after

    def _tests(self, base: Computation) -> Iterator[tuple[_Test, Callable[[Slot, list[Any]], bool]]]:
        """Ways to change slots, each with the predicate of the slots it applies to."""
        differs = functools.partial(functools.partial, self._differs, base)
        for number in _named_numbers(self.held):
            yield differs(lambda slot, found, to=number: slot.put(with_numbers(found, lambda _: to - 1))), _counts
        for step in _STEPS:
            yield differs(lambda slot, found, by=step: slot.put(with_numbers(found, lambda n: n + by))), _counts
        yield functools.partial(self._differs_by_answers, base), _counts
        yield differs(lambda slot, found: slot.container.grow(slot.key, found[-1], _GROWTH)), _gets_entries
        yield differs(lambda slot, found: slot.put(grown(found, _GROWTH))), _gets_longer
        for draws in DRAWS:
            yield differs(lambda slot, _, to=draws: steer(slot.container.owner, to)), _draws

    def _record(self) -> Computation:
        """Record a call as in the first step of an epoch, and restore parameters and buffers."""
        with state_kept(self.model):
            self.model.train()
            return record(self.model, self.batch, self.most, self.gradients)

    def _refuse_changes(self) -> None:
        """Refuse state that a second call changes, where calls cannot be compared. The capture refuses calls that also
        fail without a recorder, and gives the reason."""
        self.held.restore()
        inputs = {name: tensor.clone() for name, tensor in self.batch.items()}
        changes: list[Slot] = []
        with state_kept(self.model), torch.no_grad(), contextlib.suppress(Exception):
            self.model(**inputs)
            after_one = HeldState(self.model)
            self.model(**inputs)
            changes = after_one.changes()
        if changes:
            raise CaptureError(self._refusal(changes[0]))

    def _refuse_other_sources(self, base: Computation) -> None:
        """Refuse a computation that differs from the same state: it uses a clock or the system's entropy."""
        for filler in FILLERS:
            self.held.restore()
            again = None
            # The user's code may fail in any way; it did not before.
            with later(self.held.functions, filler) as draws, contextlib.suppress(Exception):
                again = self._record()
            if again != base:
                place = base.first_difference(again) if again is not None else ""
                raise CaptureError(
                    f"model: {type(self.model).__name__} computes something else when it is called again in the same "
                    f"state{place}: it reads a clock or a seed, draws numbers outside of torch's generator, or counts "
                    "its calls where nothing sees it, and its program is captured once; a way out is a draw by torch, "
                    "such as torch.rand, or a buffer"
                )
            if not draws:
                return

    def _refuse_gradients(self, base: Computation) -> None:
        """Refuse a forward pass that depends on the gradients of the previous step."""
        readers = [function for function in self.held.functions if _names(function, "grad")]
        if not readers:
            return
        self.held.restore()
        with _gradients_given(self.model):
            same = self._same(base)
        if not same:
            raise CaptureError(
                "model: forward reads gradients of parameters, which it has none of when it runs: "
                f"{readers[0].__qualname__} names grad; a way out is a buffer that keeps what is needed of them"
            )

    def _calls(self, base: Computation) -> tuple[dict[Slot, list[Any]], bool]:
        """Slots that three consecutive calls change, with the value after each; and whether a call computes something
        else than the first."""
        self.held.restore()
        slots: dict[tuple[int, Any], Slot] = {}
        found: dict[tuple[int, Any], list[Any]] = {}
        differs = False
        for number in range(_CALLS):
            differs |= not self._same(base)
            for slot in self.held.changes():
                key = (id(slot.container), slot.key)
                slots.setdefault(key, slot)
                found.setdefault(key, [slot.before] * number).append(slot.after)
        for values in found.values():
            values += [values[-1]] * (_CALLS - len(values))
        return {slot: found[key] for key, slot in slots.items()}, differs

    def _same(self, base: Computation) -> bool:
        try:
            return self._record() == base
        except Exception:  # noqa: BLE001 - the user's code, which did not fail before
            return False

    def _differs(self, base: Computation, alter: Callable[[Slot, list[Any]], None], values: _Values) -> bool:
        """Whether one of two calls from the altered state computes something else: some changes take effect a call
        later."""
        self.held.restore()
        for slot, found in values.items():
            with contextlib.suppress(ValueError, OverflowError):  # the value exceeds the slot's range
                alter(slot, found)
        return not (self._same(base) and self._same(base))

    def _differs_by_answers(self, base: Computation, values: _Values) -> bool:
        """Whether inverted comparisons with these numbers change the computation. Answers that make forward fail are
        ignored."""
        flips = Flips()
        for _ in range(_WRONG_ANSWERS):
            self.held.restore()
            for slot, found in values.items():
                slot.put(with_numbers(found, lambda number: probe(number, flips)))
            try:
                return self._record() != base or self._record() != base
            except Exception:  # noqa: BLE001 - as in _same
                flips.take_back()
        return False

    def _refusal(self, slot: Slot) -> str:
        frozen = "what it computes depends on that, and its program is captured once"
        if is_generator(slot.container.owner):
            what = f"draws from {slot.title}"
            cure = "a draw by torch, such as torch.rand"
        else:
            what = f"changes {slot.title}"
            cure = (
                "a buffer (register_buffer) that tensor operators update, with parallel.granule=the samples of a step"
            )
        return f"model: forward {what}{_place(slot, self.held.functions)}: {frozen}; a way out is {cure}"


def _culprit(values: _Values, test: _Test) -> Slot:
    """The first slot that makes the difference by itself; the first slot if none does."""
    alone = (slot for slot, found in values.items() if test({slot: found}))
    return next(alone, next(iter(values)))


def _named_numbers(held: HeldState) -> list[int]:
    """Numbers that code names, in order, as possible milestones: a counter may be looked up in a table of them."""
    waiting: list[Any] = [function.__code__ for function in held.functions]
    waiting += [
        each
        for container in held.containers.values()
        if not isinstance(container, (Cache, Environment))
        for each in (*container.saved, *container.saved.values())
    ]
    found: set[int] = set()
    while waiting:
        each = waiting.pop()
        if isinstance(each, CodeType):
            waiting += each.co_consts
        elif isinstance(each, (tuple, frozenset)):
            waiting += each
        elif isinstance(each, int) and not isinstance(each, bool) and each > _CALLS:
            found.add(int(each))
    return sorted(found)[:_MOST_NAMED]


def _counts(slot: Slot, found: list[Any]) -> bool:
    return not is_generator(slot.container.owner) and counts(found)


def _gets_entries(slot: Slot, found: list[Any]) -> bool:
    """Whether the slot's container gets entries. Libraries hook their modules once, in the first call."""
    if slot.path.startswith(_HOOKS):
        return False
    return slot.before is ABSENT or (slot.key is None and len(found[-1]) > len(found[-2]))


def _gets_longer(slot: Slot, found: list[Any]) -> bool:
    """Whether the slot is given a longer value in each call."""
    return slot.key is not None and not is_generator(slot.container.owner) and grows(found)


def _draws(slot: Slot, _: list[Any]) -> bool:
    return is_generator(slot.container.owner)


# --- places -----------------------------------------------------------------------------------------------------------


def _place(slot: Slot, functions: list[FunctionType]) -> str:
    """ " in Net.forward, line 12 of net.py (self.calls += 1)": where code changes a slot, or names it; else empty."""
    owner = slot.container.home.owner
    if isinstance(owner, nn.Module):
        own = {kind.__module__ for kind in type(owner).__mro__}
        functions = sorted(functions, key=lambda function: function.__module__ not in own)
    drawn = slot.container.owner if is_generator(slot.container.owner) and not slot.path else None
    name = re.split(r"[.\[]", slot.path)[0]
    best: tuple[int, str] = (3, "")
    for function in functions:
        if function.__name__ == "__init__":
            continue
        for code, instruction in _instructions(function.__code__):
            if drawn is not None:
                rank = 0 if _names_generator(instruction, function.__globals__, drawn) else 3
            elif instruction.argval != name:
                continue
            else:
                rank = 0 if instruction.opname.startswith("STORE") else 1
            line = instruction.positions.lineno if instruction.positions is not None else None
            if rank < best[0] and line is not None:
                best = (rank, _words_of(function, code, line))
    return best[1]


def _names(function: FunctionType, name: str) -> bool:
    return any(instruction.argval == name for _, instruction in _instructions(function.__code__))


@contextlib.contextmanager
def _gradients_given(model: nn.Module) -> Iterator[None]:
    """Give parameters gradients, as after a step."""
    before = [(parameter, parameter.grad) for parameter in model.parameters()]
    for parameter, _ in before:
        parameter.grad = torch.ones_like(parameter)
    try:
        yield
    finally:
        for parameter, gradient in before:
            parameter.grad = gradient


def _instructions(code: CodeType) -> Iterator[tuple[CodeType, dis.Instruction]]:
    for instruction in dis.get_instructions(code):
        yield code, instruction
        if isinstance(instruction.argval, CodeType):
            yield from _instructions(instruction.argval)


def _names_generator(instruction: dis.Instruction, names: Mapping[str, Any], generator: Any) -> bool:
    """Whether an instruction names the module of a global generator, or one of its functions."""
    if not instruction.opname.startswith("LOAD") or not isinstance(instruction.argval, str):
        return False
    value = names.get(instruction.argval)
    if isinstance(generator, random.Random):
        return value is random or getattr(value, "__self__", None) is generator
    if value is np:
        return True
    return value is np.random or getattr(value, "__self__", None) is generator


def _words_of(function: FunctionType, code: CodeType, line: int) -> str:
    text = linecache.getline(code.co_filename, line).strip()
    return f" in {function.__qualname__}, line {line} of {Path(code.co_filename).name}" + (f" ({text})" if text else "")
