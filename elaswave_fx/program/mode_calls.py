"""Calls that a forward pass makes in one mode alone: values of a few samples at first weights need not tell them.

    calls = ModeCalls.of(model, batch)
    calls.differ(operators, draws=0)    ->  True for `if not self.training: x = x.clamp(-5, 5)`, within which all lies

What training calls alone may be right: a mask that evaluation replaces by its mean, updates of buffers. So it counts
only if the derived evaluation has more such operators than evaluation has.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from elaswave_fx.program.state_kept import SEED, state_kept

_WITHOUT_EFFECT = {"detach", "clone", "contiguous", "requires_grad_"}
_DRAW_WORDS = ("rand", "normal", "uniform", "bernoulli", "exponential", "multinomial", "dropout", "geometric", "cauchy")

_SWITCHES = {"clamp", "where", "masked_fill", "minimum", "maximum", "nan_to_num", "relu", "threshold", "index_put"}
"""Operators that may change no value of a trial, and values to come."""

_OTHER_NAMES = {
    "clip": "clamp", "clamp_min": "clamp", "clamp_max": "clamp", "hardtanh": "clamp", "truediv": "div",
    "true_divide": "div", "rtruediv": "div", "rsub": "sub", "radd": "add", "rmul": "mul", "iadd": "add",
    "isub": "sub", "imul": "mul", "itruediv": "div", "rpow": "pow", "square": "pow", "greater": "gt", "less": "lt",
    "greater_equal": "ge", "less_equal": "le", "not_equal": "ne", "fmin": "minimum", "fmax": "maximum",
    "setitem": "index_put", "multiply": "mul", "subtract": "sub", "divide": "div", "absolute": "abs",
}  # fmt: skip

Batch = Mapping[str, torch.Tensor]


def operator_name(name: str) -> str:
    """One name for operators that do the same: `Tensor.__rsub__`, `aten.sub.Tensor` and `sub_` are "sub"."""
    bare = name.removeprefix("aten.").removeprefix("aten::").partition(".")[0].strip("_")
    return _OTHER_NAMES.get(bare, bare)


@dataclass(frozen=True)
class ModeCalls:
    """Functions that evaluation and training call, by name, and the operators and draws of evaluation."""

    evaluation: Counter[str]
    training: Counter[str]
    operators: Counter[str]
    draws: int

    @staticmethod
    def of(model: nn.Module, batch: Batch) -> ModeCalls:
        """Run both modes, with gradients, as torch's own layers decide by them. The model's mode is restored."""
        was_training = model.training
        try:
            model.train(False)
            with _Operators() as operators:
                evaluation = _calls(model, batch)
            model.train(True)
            return ModeCalls(evaluation, _calls(model, batch), operators.counts, operators.draws)
        finally:
            model.train(was_training)

    def differ(self, operators: Mapping[str, int], draws: int) -> bool:
        """Whether evaluation is another than the derived one with these operators, by `operator_name`, and draws."""
        if self.evaluation - self.training or draws > self.draws:
            return True
        alone = set(self.training - self.evaluation)
        masks = any(word in name for word in _DRAW_WORDS for name in alone)
        names = {operator_name(name) for name in alone}
        return any(operators.get(name, 0) > self.operators[name] for name in (names & _SWITCHES if masks else names))


def _calls(model: nn.Module, batch: Batch) -> Counter[str]:
    with state_kept(model), torch.random.fork_rng(devices=()), torch.enable_grad(), _Functions() as functions:
        torch.manual_seed(SEED)
        model(**batch)
    return functions.counts


class _Functions(TorchFunctionMode):
    """Counts calls that make or change tensors, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        if name == "__setitem__" or (name not in _WITHOUT_EFFECT and any(_tensors((result,)))):
            self.counts[name] += 1
        return result


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
        self.draws += torch.Tag.nondeterministic_seeded in func.tags
        return func(*args, **(kwargs or {}))


def _tensors(values: Iterable[Any]) -> Iterator[bool]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield True
        elif isinstance(value, (tuple, list)):
            yield from _tensors(value)
