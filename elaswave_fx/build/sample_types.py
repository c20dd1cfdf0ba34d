"""Refusal of models that look at the types of samples: whole numbers become int64, others float32.

x of int16:     x.float() / torch.iinfo(x.dtype).max     ->  CaptureError: computes something else
                x.float() / 32768                        ->  the same with int64
x of float16:   torch.where(x == -999.9, 0, x.float())   ->  CaptureError: -999.9 is -1000 in float16 alone
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from elaswave_fx.data.dataset import Dataset
from elaswave_fx.errors import CaptureError
from elaswave_fx.program.batch_run import count_samples
from elaswave_fx.program.held_state import python_state_kept
from elaswave_fx.program.ir import call_draws
from elaswave_fx.program.many_calls import are_unlike, results

_ROUNDING = {torch.float16: 1e-2, torch.bfloat16: 5e-2, torch.float64: 1e-3}
"""Bounds of what computing in such a type, or in float32 instead, changes in a result."""
_EQUALITIES, _ORDERS = ("aten.eq", "aten.ne"), ("aten.ge", "aten.gt", "aten.le", "aten.lt")

Batch = Mapping[str, torch.Tensor]


def refuse_other_types(dataset: Dataset, model: nn.Module, batch: Batch) -> None:
    """Raise CaptureError if forward computes something else with the types that the user's code gives: with whole
    numbers at all, with others beyond rounding, or if it compares otherwise with them."""
    if dataset.users is None:
        return
    given = {name: tensor.dtype for name, tensor in dataset.given(0).items()}
    whole = {name: tensor.to(given[name]) for name, tensor in batch.items() if _is_narrower(given.get(name), tensor)}
    reason = f"model: {type(model).__name__} computes something else with the types of the dataset"
    if _differ(model, batch, whole, _Call.gives_other):
        raise CaptureError(
            f"{reason}: forward gets {_fields(batch, whole)}; a way out is to convert where samples are made, such as "
            "x.float() / 32768 for int16"
        )
    types = {each for each in given.values() if each in _ROUNDING}
    if not types:
        return
    rows = [index % len(dataset) for index in range(count_samples(batch))]
    batch = {name: torch.stack([dataset.sample(row)[name] for row in rows]) for name in batch}
    others = {name: torch.stack([dataset.given(row)[name] for row in rows]) for name in batch if given[name] in types}
    rounding = max(_ROUNDING[each] for each in types)
    if _differ(model, batch, others, lambda call, other: call.computes_otherwise(other, rounding)):
        raise CaptureError(
            f"{reason}: forward gets {_fields(batch, others)}, and looks at the type, or compares with numbers that it "
            "rounds; a way out is x.float() where samples are made, before they get a value that forward looks for"
        )


@dataclass(frozen=True)
class _Call:
    """What a call of a model returns, and the results of its comparisons."""

    returned: list[torch.Tensor]
    compared: list[tuple[bool, torch.Tensor]]
    draws: bool

    @staticmethod
    def of(model: nn.Module, inputs: Batch) -> _Call:
        with python_state_kept(model), _Comparisons() as comparisons:
            returned = results(model, inputs)
        found = [each for each in comparisons.found if each[0] in _EQUALITIES or not comparisons.draws]
        return _Call(returned, [(is_of_type, result) for _, is_of_type, result in found], comparisons.draws)

    def gives_other(self, other: _Call) -> bool:
        return are_unlike(self.returned, other.returned)

    def computes_otherwise(self, other: _Call, rounding: float) -> bool:
        """Whether comparisons differ, or results do that depend on no draw; a call that failed tells nothing."""
        if not self.returned or not other.returned:
            return False
        if not self.draws and are_unlike(self.returned, other.returned, rounding):
            return True
        if len(self.compared) != len(other.compared):
            return True
        pairs = zip(self.compared, other.compared, strict=True)
        return any(is_of_type and not torch.equal(mine, its) for (is_of_type, mine), (_, its) in pairs)


class _Comparisons(TorchDispatchMode):
    """Records comparisons by name, whether they are of a type other than float32, and their results; and whether
    anything draws, as draws depend on types."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, bool, torch.Tensor]] = []
        self.draws = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not isinstance(func, torch._ops.OpOverload):
            return result
        self.draws |= call_draws(func, args, kwargs or {})
        name = str(func).rpartition(".")[0]
        if name in (*_EQUALITIES, *_ORDERS):
            is_of_type = any(isinstance(each, torch.Tensor) and each.dtype in _ROUNDING for each in args)
            self.found.append((name, is_of_type, result.clone()))
        return result


def _differ(model: nn.Module, batch: Batch, own: Batch, is_other: Any) -> bool:
    """Whether a call with the dataset's own types is another than one with the batch, and two of those are alike: a
    model that counts has a reason of its own."""
    if not own:
        return False
    as_given, widened, again = (_Call.of(model, inputs) for inputs in ({**batch, **own}, batch, batch))
    return is_other(as_given, widened) and not is_other(widened, again)


def _fields(batch: Batch, own: Batch) -> str:
    return ", ".join(f"{name} as {_name(batch[name])}, not {_name(tensor)}" for name, tensor in own.items())


def _is_narrower(given: torch.dtype | None, tensor: torch.Tensor) -> bool:
    """Whether `given` is another type of whole numbers, which holds these values."""
    if given in (None, tensor.dtype) or given.is_floating_point or tensor.is_floating_point():
        return False
    return torch.equal(tensor.to(given).to(tensor.dtype), tensor)


def _name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
