"""Purity checks of a user's schedule and optimizer, which must be functions of their arguments alone.

Any rank may run any step, and replay it; an update is traced once. Code that counts its calls, draws random numbers or
reads a clock would train something else on every layout:

    factor(step): self.scheduler.step(); …                       ->  ConfigError: another factor when it is asked again
    hyper_values: self.t = step; update: … / (1 - 0.9**self.t)   ->  ConfigError: its trace computes something else
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from elaswave_fx.data.global_draws import global_draws
from elaswave_fx.errors import ConfigError
from elaswave_fx.program.held_state import HeldState
from elaswave_fx.program.later import later

_STEPS = (0, 1, 2, 1000)
_ASKED = 1024
"""Number of first steps, and of steps spread over a run, for which a schedule is asked: it may remember at some alone,
as a milestone."""
_KEEP = (
    "_to_copy", "alias", "clone", "contiguous", "copy", "detach", "empty_like", "expand", "full_like",
    "lift_fresh_copy", "new_empty", "new_full", "new_ones", "new_zeros", "ones_like", "reshape", "sym_size", "view",
    "zeros_like",
)  # fmt: skip
"""Operators beside the pointwise ones that keep elements independent."""
_RATES = (1e-3, 5e-4)
_AGAIN = "any rank may do any step, and do it again"


def check_schedule(factor: Callable[[int], float], function: Any, place: str, total_steps: int) -> None:
    """Refuse a schedule whose factor for a step differs between calls."""
    spread = range(0, total_steps, max(1, total_steps // _ASKED))
    steps = sorted({*range(min(total_steps, _ASKED)), *spread, total_steps - 1} & set(range(total_steps)))
    cure = "compute the factor from the step alone, as schedulers of torch do in closed form"
    _refuse_unsteady(factor, steps, function, f"{place}: the factor", cure)


def check_hyper_values(optimizer: Any, groups: Sequence[str], place: str) -> None:
    """Refuse `hyper_values` that differ between calls."""

    asked = {
        f"{step}, lr {rate}, {group}": (step, rate, group)
        for rate in _RATES
        for step in (*range(_ASKED), *_STEPS)
        for group in groups
    }
    cure = "compute them from step, lr and group alone"
    _refuse_unsteady(
        lambda key: list(optimizer.hyper_values(*asked[key])), [*asked], optimizer, f"{place}: hyper_values", cure
    )


def _refuse_unsteady(ask: Callable[[Any], Any], keys: Sequence[Any], target: Any, what: str, cure: str) -> None:
    """Ask for all keys, again for all keys at a later time, and in reverse order; refuse differences."""
    held = HeldState(_Holder(target))
    try:
        first = {key: ask(key) for key in keys}
        drawn = global_draws(lambda: [ask(key) for key in keys])
        with later(held.functions):
            again = {key: ask(key) for key in keys}
        held.restore()
        backwards = {key: ask(key) for key in reversed(keys)}
    finally:
        held.restore()
    if drawn:
        raise ConfigError(f"{what} is drawn from {drawn[0]}, but {_AGAIN}; {cure}")
    for step, value in first.items():
        if again[step] != value:
            raise ConfigError(
                f"{what} of step {step} is {value}, and {again[step]} when it is asked for again, but {_AGAIN}; {cure}"
            )
        if backwards[step] != value:
            raise ConfigError(
                f"{what} of step {step} is {value}, and {backwards[step]} when later ones were asked for before, but "
                f"{_AGAIN}; {cure}"
            )


def check_arguments_kept(optimizer: Any, place: str, param: Tensor, grad: Tensor, hyper: tuple[Tensor, ...]) -> None:
    """Refuse an update that changes its arguments or attributes of the optimizer."""
    given = {"param": param.clone(), "grad": grad.clone()}
    state = tuple(each.clone() for each in optimizer.init(param))
    given |= {f"state[{place}]": each for place, each in enumerate(state)}
    given |= {f"hyper[{place}]": each.clone() for place, each in enumerate(hyper)}
    before = {name: each.clone() for name, each in given.items()}
    held = HeldState(_Holder(optimizer))
    try:
        optimizer.update(
            given["param"], given["grad"], state, tuple(given[f"hyper[{place}]"] for place in range(len(hyper)))
        )
        changes = held.changes()
    finally:
        held.restore()
    for name, each in given.items():
        if not torch.equal(each, before[name]):
            raise ConfigError(
                f"{place}: update changes {name} in place; return new tensors, as param * 0.9 instead of "
                "param.mul_(0.9)"
            )
    if changes:
        raise ConfigError(
            f"{place}: update changes {changes[0].path or changes[0].title}, but it is traced once; keep what changes "
            "in the state, or compute it in hyper_values from the step"
        )


def refuse_several_elements(graph: fx.GraphModule, place: str) -> None:
    """Refuse an update that combines elements of a slice, which may be only part of a parameter: a norm over them clips
    differently on every layout. `graph`: its trace over slices of any length."""
    for node in graph.graph.nodes:
        makes_tensor = isinstance(node.meta.get("val"), torch.Tensor)
        if node.op != "call_function" or not makes_tensor or not any(map(_has_length, node.all_input_nodes)):
            continue
        tags = getattr(node.target, "tags", ())
        by_itself = torch.Tag.pointwise in tags or str(node.target).split(".")[1] in _KEEP
        if not by_itself and torch.Tag.nondeterministic_seeded not in tags:
            raise ConfigError(
                f"{place}: update is not elementwise: {node.target} looks at several elements, and updates get slices "
                "of parameters, cut anew for every layout; clip_norm bounds the norm of all gradients"
            )


def _has_length(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and any(isinstance(size, torch.SymInt) for size in value.shape)


def check_traced(optimizer: Any, graph: Callable[..., Any], groups: Sequence[str], place: str, elements: int) -> None:
    """Refuse an update that differs from its trace at other steps."""
    generator = torch.Generator().manual_seed(1)
    for step in (*range(_ASKED), *_STEPS) if _notes(optimizer, groups) else _STEPS:
        for rate, group in zip(_RATES, groups, strict=True):
            param, grad = (torch.randn(elements, generator=generator) for _ in range(2))
            state = tuple(torch.rand(elements, generator=generator) for _ in optimizer.init(param))
            values = optimizer.hyper_values(step, rate, group)
            hyper = tuple(torch.tensor(value, dtype=torch.float32) for value in values)
            ours = graph(param, grad, *state, torch.tensor(1.0), *hyper)
            updated, after = optimizer.update(param, grad, state, hyper)
            for mine, theirs in zip(ours, (updated, *after), strict=True):
                if not torch.allclose(mine, theirs, rtol=1e-5, atol=1e-7, equal_nan=True):
                    raise ConfigError(
                        f"{place}: update is traced once, and computes something else at step {step} with lr {rate} in "
                        f"group {group}: it may take from hyper alone what changes from step to step, not from "
                        "attributes, if or float(); give it as a further number of hyper_values"
                    )


def _notes(optimizer: Any, groups: Sequence[str]) -> bool:
    """Whether `hyper_values` leaves something in the optimizer, which `update` may read at some steps alone."""
    held = HeldState(_Holder(optimizer))
    try:
        for step in range(_ASKED // 8):
            optimizer.hyper_values(step, _RATES[0], groups[0])
            if held.changes():
                return True
        return False
    finally:
        held.restore()


class _Holder(nn.Module):
    """A module that contains only the inspected object, under the name of its class."""

    def __init__(self, target: Any) -> None:
        super().__init__()
        setattr(self, getattr(target, "__name__", type(target).__name__), target)
