"""The same random numbers for eager code and for the keyed draws of its program, so that both can be compared exactly.

with EqualDraws():
    torch.rand(2, 3)                        # 0.37, 0.99, 0.61, ...: a function of the element's place alone
    keyed_uniform(keys, [2, 3], ...)        # the same
    torch.poisson(rates)                    # UnknownDraw
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from elaswave_fx.program.ir import call_draws, tensors_in
from elaswave_fx.program.keyed_draws import NORMAL, UNIFORM


class UnknownDraw(Exception):
    """An operator draws from a distribution that has no equal here."""


class EqualDraws(TorchDispatchMode):
    """Replaces draws. Distributions are made of uniform and normal numbers as `passes.rewrite_rng` makes them."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name.replace("::", ".").removesuffix("_")
        if name in (UNIFORM, NORMAL):
            return (_uniform if name == UNIFORM else _normal)(args[1]).to(kwargs.get("dtype", torch.float32))
        if not call_draws(func, args, kwargs):
            return func(*args, **kwargs)
        if name not in _DRAWS:
            raise UnknownDraw(name)
        given = {**dict(zip((each.name for each in func._schema.arguments), args, strict=False)), **kwargs}
        tensors = tensors_in(list(given.values()))
        sizes = given["size"] if "size" in given else torch.broadcast_shapes(*(each.shape for each in tensors))
        dtype = given.get("dtype") or (tensors[0].dtype if tensors else torch.get_default_dtype())
        drawn = _DRAWS[name](sizes, given).to(dtype)
        return given["self"].copy_(drawn) if func._schema.name.endswith("_") else drawn


def _uniform(sizes: Any) -> torch.Tensor:
    """Numbers in [0, 1), spread evenly."""
    count = int(torch.Size(sizes).numel())
    return ((torch.arange(count, dtype=torch.float64) * 0.6180339887 + 0.37) % 1.0).float().view(sizes)


def _normal(sizes: Any) -> torch.Tensor:
    return torch.special.ndtri(_uniform(sizes).double().clamp(1e-6, 1 - 1e-6)).float()


def _bernoulli(sizes: Any, given: Mapping[str, Any]) -> torch.Tensor:
    return _uniform(sizes) < given.get("p", given["self"] if given["self"].is_floating_point() else 0.5)


def _integers(sizes: Any, given: Mapping[str, Any]) -> torch.Tensor:
    low, high = given.get("low", given.get("from", 0)), given.get("high", given.get("to"))
    if high is None:
        raise UnknownDraw("aten.random")
    return (_uniform(sizes) * (high - low)).floor() + low


_DRAWS: Mapping[str, Callable[[Any, Mapping[str, Any]], torch.Tensor]] = {
    "aten.rand": lambda sizes, given: _uniform(sizes),
    "aten.rand_like": lambda sizes, given: _uniform(sizes),
    "aten.randn": lambda sizes, given: _normal(sizes),
    "aten.randn_like": lambda sizes, given: _normal(sizes),
    "aten.uniform": lambda sizes, given: (
        _uniform(sizes) * (given.get("to", 1.0) - given.get("from", 0.0)) + given.get("from", 0.0)
    ),
    "aten.normal": lambda sizes, given: _normal(sizes) * given.get("std", 1.0) + given.get("mean", 0.0),
    "aten.bernoulli": _bernoulli,
    "aten.randint": _integers,
    "aten.randint_like": _integers,
    "aten.random": _integers,
    "aten.exponential": lambda sizes, given: -torch.log1p(-_uniform(sizes)) / given.get("lambd", 1.0),
}
