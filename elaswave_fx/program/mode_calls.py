"""Calls that a forward pass makes in one mode alone, whose effect the values of a few samples need not show.

    calls = ModeCalls.of(model, batch)
    calls.differ(operators, draws=0)    ->  True for `if not self.training: x = x.clamp(-5, 5)`, within which all lies

Only piecewise functions can hide: smooth ones that are equal near the trial's numbers are equal. What training
calls alone may be right, such as the mask of a dropout by hand, which evaluation replaces by its mean. So it counts
only if the derived evaluation has more such operators than evaluation has.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from elaswave_fx.program.ir import call_draws, tensors_in
from elaswave_fx.program.state_kept import SEED, state_kept

_PIECEWISE = {
    "abs", "argmax", "argmin", "ceil", "celu", "clamp", "elu", "embedding", "eq", "floor", "floor_divide", "fmod",
    "gather", "ge", "gt", "hardshrink", "hardsigmoid", "hardswish", "huber_loss", "index", "isclose", "isfinite",
    "isinf", "isnan", "kthvalue", "le", "leaky_relu", "lt", "max", "median", "min", "mode", "ne", "prelu", "relu",
    "remainder", "round", "searchsorted", "bucketize", "selu", "sign", "smooth_l1_loss", "softshrink", "sort",
    "threshold", "topk", "trunc", "where",
}  # fmt: skip
"""Operators, by `operator_name`, that compute otherwise for other numbers."""

_OTHER_NAMES = {
    "clip": "clamp", "clamp_min": "clamp", "clamp_max": "clamp", "hardtanh": "clamp", "relu6": "clamp",
    "nan_to_num": "where", "masked_fill": "where", "masked_scatter": "where", "index_put": "where", "setitem": "where",
    "masked_select": "index", "getitem": "index", "index_select": "index", "take": "index",
    "take_along_dim": "gather", "greater": "gt", "less": "lt", "greater_equal": "ge", "less_equal": "le",
    "not_equal": "ne", "amax": "max", "maximum": "max", "fmax": "max", "amin": "min", "minimum": "min", "fmin": "min",
    "absolute": "abs", "argsort": "sort", "mod": "remainder", "floordiv": "floor_divide", "sgn": "sign",
}  # fmt: skip

Batch = Mapping[str, torch.Tensor]


def operator_name(name: str) -> str:
    """One name for operators alike: "gt" for `Tensor.__gt__`, `aten.gt.Scalar` and `torch.greater`."""
    bare = name.removeprefix("aten.").removeprefix("aten::").partition(".")[0].strip("_")
    return _OTHER_NAMES.get(bare, bare)


@dataclass(frozen=True)
class ModeCalls:
    """Calls of piecewise functions that loss or count depend on, in both modes; operators and draws of evaluation."""

    evaluation: Counter[str]
    training: Counter[str]
    operators: Counter[str]
    draws: int

    @staticmethod
    def of(model: nn.Module, batch: Batch) -> ModeCalls:
        """Run both modes, with gradients, as torch's own layers decide by them. The model's mode is restored."""
        was_training = model.training
        try:
            model.eval()
            try:
                evaluation, operators = _evaluated(model, batch, torch.enable_grad())
            except RuntimeError:  # such as numpy() of what has a gradient
                evaluation, operators = _evaluated(model, batch, torch.no_grad())
            model.train()
            with torch.enable_grad():
                return ModeCalls(evaluation, _calls(model, batch), operators.counts, operators.draws)
        finally:
            model.train(was_training)

    def differ(self, operators: Mapping[str, int], draws: int) -> bool:
        """Whether evaluation is another than the derived one with these operators, by `operator_name`, and draws."""
        if self.evaluation - self.training or draws > self.draws:
            return True
        return any(operators.get(name, 0) > self.operators[name] for name in self.training - self.evaluation)


def _evaluated(
    model: nn.Module, batch: Batch, gradients: AbstractContextManager[object]
) -> tuple[Counter[str], _Operators]:
    with gradients, _Operators() as operators:
        return _calls(model, batch), operators


def _calls(model: nn.Module, batch: Batch) -> Counter[str]:
    with state_kept(model), torch.random.fork_rng(devices=()), _Functions() as functions:
        torch.manual_seed(SEED)
        results = model(**batch)
    return functions.behind(results)


class _Functions(TorchFunctionMode):
    """Records calls, and which call made or last changed a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self._calls: list[tuple[str, tuple[int, ...]]] = []  # (name, numbers of the calls that made its operands)
        self._maker: dict[int, int] = {}  # by id of a tensor
        self._kept: list[torch.Tensor] = []  # so that no id is used twice

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        if name == "__getitem__" and not tensors_in(args[1:]):
            name = "slice"
        changed = [args[0]] if args and name.endswith("_") and isinstance(args[0], torch.Tensor) else []
        changed += [each._base for each in changed if each._base is not None]
        self._calls.append((operator_name(name), self._makers((args, tuple((kwargs or {}).values())))))
        for each in (*tensors_in(result), *changed):
            self._maker[id(each)] = len(self._calls) - 1
            self._kept.append(each)
        return result

    def _makers(self, values: Any) -> tuple[int, ...]:
        """The calls that made these tensors; all calls for one that an autograd.Function has made, which is no call."""
        found: set[int] = set()
        for each in tensors_in(values):
            if id(each) in self._maker:
                found.add(self._maker[id(each)])
            elif each.grad_fn is not None:
                found.update(range(len(self._calls)))
        return tuple(found)

    def behind(self, results: Any) -> Counter[str]:
        """Calls of piecewise functions that these results depend on, by name."""
        waiting = list(self._makers(results))
        seen: set[int] = set()
        while waiting:
            number = waiting.pop()
            if number not in seen:
                seen.add(number)
                waiting += self._calls[number][1]
        return Counter(name for name, _ in (self._calls[number] for number in seen) if name in _PIECEWISE)


class _Operators(TorchDispatchMode):
    """Counts operators by `operator_name`, and those that draw."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.draws = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        self.counts[operator_name(str(func))] += 1
        self.draws += call_draws(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))
