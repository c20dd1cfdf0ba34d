"""Optimizers as pure elementwise functions over flat fp32 slices.

An optimizer is a triple: `init(param) -> state`, `update(param, grad, state, hyper) -> (param, state)` and
`hyper_values(step, lr, group) -> values`, in the manner of optax. All tensors of an update have the same 1-D shape, a
rank's slice of a bucket; `hyper` are 0-dim fp32 tensors, whose values the host computes in float64 for each step and
each group. Nothing depends on where in a bucket an element lies, so any rank may own any slice:

    update(param, …)[lo:hi]  ==  update(param[lo:hi], …)          bit for bit, and checked (`check_elementwise`)

That leaves the operators whose vector body and tail round alike: add, sub, mul, div, sqrt, lerp, addcmul, addcdiv
(no pow, no fused kernels). `trace_update` turns an optimizer into the fx graph that is lowered for the executor.
"""

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from elaswave_fx.config.keys import OptimizerConfig
from elaswave_fx.config.targets import import_target, instantiate, parameters_of
from elaswave_fx.config.validation import nearest
from elaswave_fx.data.global_draws import seeded
from elaswave_fx.errors import ConfigError
from elaswave_fx.optim.pure import check_arguments_kept, check_hyper_values, check_traced, refuse_several_elements

Group = Literal["decay", "no_decay"]
GROUPS: tuple[Group, Group] = ("decay", "no_decay")
State = tuple[Tensor, ...]

_PROBE_ELEMENTS = 1037  # It is odd, so that slices of it start and end inside the vectors of every instruction set.
_LATE_STEP = 1000
_PROBE_STEPS = 3


class Optimizer(Protocol):
    """Interface of optimizers, also of a user's `_target_`. Every method is pure."""

    def init(self, param: Tensor) -> State:
        """The state before the first step: 0..n fp32 tensors of `param`'s shape."""
        ...

    def update(self, param: Tensor, grad: Tensor, state: State, hyper: tuple[Tensor, ...]) -> tuple[Tensor, State]:
        """The parameter and the state after a step, as new tensors; the arguments do not change."""
        ...

    def hyper_values(self, step: int, lr: float, group: Group) -> list[float]:
        """The values of `hyper` at `step` (counts from 0) for learning rate `lr`; their number is constant."""
        ...


@dataclass(frozen=True)
class AdamW:
    """Adam with decoupled weight decay (Loshchilov and Hutter 2019), as `torch.optim.AdamW`. State: both moments."""

    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.01

    def init(self, param: Tensor) -> State:
        return torch.zeros_like(param), torch.zeros_like(param)

    def update(self, param: Tensor, grad: Tensor, state: State, hyper: tuple[Tensor, ...]) -> tuple[Tensor, State]:
        first, second = state
        keep, step_size, root_correction = hyper
        beta1, beta2 = self.betas
        first = torch.lerp(first, grad, 1.0 - beta1)
        second = torch.addcmul(second * beta2, grad, grad, value=1.0 - beta2)
        denominator = second.sqrt() / root_correction + self.eps
        return param * keep - first / denominator * step_size, (first, second)

    def hyper_values(self, step: int, lr: float, group: Group) -> list[float]:
        beta1, beta2 = self.betas
        count = step + 1
        decay = self.weight_decay if group == "decay" else 0.0
        return [1.0 - lr * decay, lr / (1.0 - beta1**count), (1.0 - beta2**count) ** 0.5]


@dataclass(frozen=True)
class SGD:
    """Stochastic gradient descent as `torch.optim.SGD`, without dampening. State: the momentum, if there is any."""

    momentum: float = 0.0
    weight_decay: float = 0.0
    nesterov: bool = False

    def __post_init__(self) -> None:
        if self.nesterov and self.momentum == 0.0:
            raise ConfigError("optimizer.nesterov=true: needs optimizer.momentum > 0")

    def init(self, param: Tensor) -> State:
        return (torch.zeros_like(param),) if self.momentum else ()

    def update(self, param: Tensor, grad: Tensor, state: State, hyper: tuple[Tensor, ...]) -> tuple[Tensor, State]:
        decay, lr = hyper
        grad = grad + param * decay
        if not self.momentum:
            return param - grad * lr, ()
        velocity = state[0] * self.momentum + grad
        direction = grad + velocity * self.momentum if self.nesterov else velocity
        return param - direction * lr, (velocity,)

    def hyper_values(self, step: int, lr: float, group: Group) -> list[float]:
        return [self.weight_decay if group == "decay" else 0.0, lr]


def step_hypers(optimizer: Optimizer, step: int, lr: float) -> list[list[float]]:
    """The values of `hyper` at `step`, group by group as the engine takes them."""
    return [optimizer.hyper_values(step, lr, group) for group in GROUPS]


def make_optimizer(config: OptimizerConfig) -> Optimizer:
    """The optimizer that `config` names; a user's is checked. Raise `ConfigError` if it fails the check."""
    if config.name in ("adamw", "sgd"):
        if config.weight_decay is None:
            raise ConfigError("optimizer.weight_decay=null: must be a number of at least 0; nearest valid: 0.0")
        if config.name == "adamw":
            return AdamW(betas=config.betas, eps=config.eps, weight_decay=config.weight_decay)
        return SGD(momentum=config.momentum, weight_decay=config.weight_decay)
    if config.name != "target":
        best = nearest(config.name, ("adamw", "sgd"))
        raise ConfigError(f"optimizer={config.name}: is unknown; nearest valid: {best or 'adamw, sgd'}")
    # `lr` and `weight_decay` are keys of every optimizer; a user's gets them if its constructor has the parameters.
    decay = {} if config.weight_decay is None else {"weight_decay": config.weight_decay}
    parameters = parameters_of(import_target("optimizer", config.spec))
    takes_all = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values())
    if decay and "weight_decay" not in parameters and not takes_all:
        raise ConfigError(
            f"optimizer.weight_decay={config.weight_decay:g}: {config.target} has no such argument; nearest valid: null"
        )
    with seeded(0):  # every rank makes one
        optimizer = instantiate("optimizer", {**decay, **config.spec}, offered={"lr": config.lr})
    missing = [name for name in ("init", "update", "hyper_values") if not callable(getattr(optimizer, name, None))]
    if missing:
        raise ConfigError(
            f"optimizer._target_={config.target}: has no {' and no '.join(missing)}; see optim/optimizer.py"
        )
    check_elementwise(optimizer, str(config.target))
    return optimizer


def group_of(ndim: int, no_decay: str = "vectors") -> Group:
    """The group of a parameter with `ndim` dimensions; `no_decay` as in `OptimizerConfig`."""
    return "no_decay" if no_decay == "vectors" and ndim < 2 else "decay"


def hyper_row(optimizer: Optimizer, step: int, lr: float, group: Group) -> list[float]:
    """The values of the hyper inputs of the traced program; the first is `grad_scale`, which the engine sets."""
    return [1.0, *(float(value) for value in optimizer.hyper_values(step, lr, group))]


def trace_update(optimizer: Optimizer) -> torch.fx.GraphModule:
    """The update as an ATen graph over slices of any length.

    Inputs, positional: master fp32 [n], grad fp32 [n], the state's tensors fp32 [n], then the hyper values as 0-dim
    fp32 tensors in the order of `hyper_row`. Outputs: master' and the new state. The gradient is multiplied by
    `grad_scale` first.
    """
    from torch.fx.experimental.proxy_tensor import make_fx

    master = torch.zeros(_PROBE_ELEMENTS)
    state = tuple(each.clone() for each in optimizer.init(master))  # one tensor several times would be one input
    hyper = [torch.tensor(value, dtype=torch.float32) for value in hyper_row(optimizer, 0, 1e-3, "decay")]

    def step(*inputs: Tensor) -> tuple[Tensor, ...]:
        param, grad, rest = inputs[0], inputs[1], inputs[2:]
        grad_scale, values = rest[len(state)], rest[len(state) + 1 :]
        param, after = optimizer.update(param, grad * grad_scale, tuple(rest[: len(state)]), tuple(values))
        return param, *after

    return make_fx(step, tracing_mode="symbolic")(master, torch.zeros_like(master), *state, *hyper)


def trace_users_update(optimizer: Optimizer, name: str) -> torch.fx.GraphModule:
    """`trace_update` of a user's optimizer, refused if its update cannot be traced once for all steps."""
    place = f"optimizer._target_={name}"
    try:
        graph = trace_update(optimizer)
    except Exception as error:  # the user's code may fail in any way when traced; it did not before
        reason = " ".join(str(error).split()).split(". ")[0]
        raise ConfigError(
            f"{place}: update cannot be traced: {type(error).__name__}: {reason}; hyper are tensors, to compute with "
            "as they are: without if and float(), and without torch.optim"
        ) from error
    check_traced(optimizer, graph, GROUPS, place, _PROBE_ELEMENTS)
    return graph


def check_elementwise(optimizer: Optimizer, name: str) -> None:
    """Refuse an optimizer whose update of a slice is not, bit for bit, the slice of its update.

    Tested on random values over a few steps, on slices at several offsets. Raises `ConfigError` naming `name`.
    """
    generator = torch.Generator().manual_seed(0)
    param = torch.randn(_PROBE_ELEMENTS, generator=generator)
    state = _checked_state(optimizer, name, param)
    place = f"optimizer._target_={name}"
    rows = _checked_hyper(optimizer, name, place)
    grad = torch.randn(_PROBE_ELEMENTS, generator=generator)
    with _refused(name):
        check_arguments_kept(optimizer, place, param, grad, rows[0])
    graph = None
    with suppress(Exception):  # an error of the user's code, which `trace_users_update` reports
        graph = trace_update(optimizer)
    if graph is not None:
        refuse_several_elements(graph, place)
    cuts = ((0, 1), (1, 4), (3, 520), (517, _PROBE_ELEMENTS))
    for hyper in rows:
        grad = torch.randn(_PROBE_ELEMENTS, generator=generator)
        after = _checked_update(optimizer, name, (param, grad, state, hyper))
        for lo, hi in cuts:
            part = (param[lo:hi].clone(), grad[lo:hi].clone(), tuple(each[lo:hi].clone() for each in state), hyper)
            _compare(name, _checked_update(optimizer, name, part), [each[lo:hi] for each in after])
        param, state = after[0], tuple(after[1:])
    _refuse_shapes(optimizer, place, (param, grad, *state), rows[0])


def _refuse_shapes(optimizer: Optimizer, place: str, tensors: tuple[Tensor, ...], hyper: tuple[Tensor, ...]) -> None:
    """Refuse an optimizer that treats matrices, or the weights of a convolution, differently."""
    param, grad, *state = (each[:1024] for each in tensors)
    try:
        expected = _all_of(optimizer, param, grad, tuple(state), hyper)
    except (TypeError, ValueError, RuntimeError):
        return  # an error that `_checked_update` reports
    for shape in ((32, 32), (8, 8, 4, 4)):
        found: list[Tensor] = []
        with suppress(TypeError, ValueError, RuntimeError):
            rows = tuple(each.view(shape) for each in state)
            found = _all_of(optimizer, param.view(shape), grad.view(shape), rows, hyper)
        if not found or any(
            each.numel() != flat.numel() or not torch.allclose(each.flatten(), flat, rtol=1e-5, atol=1e-7)
            for each, flat in zip(found, expected, strict=True)
        ):
            raise ConfigError(
                f"{place}: init or update does something else with a parameter of shape {list(shape)} than with its "
                "elements in a row, and gets these alone; tell matrices from vectors by the group of hyper_values, "
                "which is decay or no_decay"
            )


def _all_of(optimizer: Optimizer, param: Tensor, grad: Tensor, state: State, hyper: tuple[Tensor, ...]) -> list[Tensor]:
    updated, after = optimizer.update(param, grad, state, hyper)
    return [updated, *after, *optimizer.init(param)]


def _checked_hyper(optimizer: Optimizer, name: str, place: str) -> list[tuple[Tensor, ...]]:
    steps = (*range(_PROBE_STEPS), _LATE_STEP)
    try:
        check_hyper_values(optimizer, GROUPS, place)  # first: they may cache their first result
        rows = [hyper_row(optimizer, step, 1e-3, group)[1:] for step in steps for group in GROUPS]
    except (TypeError, ValueError) as error:
        raise ConfigError(f"optimizer._target_={name}: hyper_values fails: {error}") from error
    counts = {len(row) for row in rows}
    if len(counts) > 1:
        raise ConfigError(f"optimizer._target_={name}: hyper_values gives {sorted(counts)} values, not always as many")
    return [tuple(torch.tensor(value, dtype=torch.float32) for value in row) for row in rows]


def _checked_state(optimizer: Optimizer, name: str, param: Tensor) -> State:
    state = optimizer.init(param)
    if not isinstance(state, tuple) or not all(isinstance(each, Tensor) for each in state):
        raise ConfigError(f"optimizer._target_={name}: init gives a {type(state).__name__}, not a tuple of tensors")
    for each in state:
        if each.shape != param.shape or each.dtype != torch.float32:
            raise ConfigError(
                f"optimizer._target_={name}: is not elementwise, its state has shape {list(each.shape)} and "
                f"{each.dtype} for a parameter of {param.numel()} fp32 elements"
            )
    _compare(name, list(optimizer.init(param[5:9].clone())), [each[5:9] for each in state])
    return state


def _checked_update(optimizer: Optimizer, name: str, arguments: tuple[Any, ...]) -> list[Tensor]:
    param, state = arguments[0], arguments[2]
    before = torch.get_rng_state()
    with _refused(name):
        updated, after = optimizer.update(*arguments)
    if not torch.equal(before, torch.get_rng_state()):
        torch.set_rng_state(before)
        raise ConfigError(
            f"optimizer._target_={name}: update draws random numbers, and the ranks that hold a parameter would draw "
            "others; a way out is noise in the model's forward, whose draws are keyed by seed, step and sample"
        )
    outputs = [updated, *after]
    if len(after) != len(state) or any(each.shape != param.shape for each in outputs):
        raise ConfigError(
            f"optimizer._target_={name}: is not elementwise, update of {param.numel()} elements and {len(state)} state "
            f"tensors gives shapes {[list(each.shape) for each in outputs]}"
        )
    return outputs


@contextmanager
def _refused(name: str) -> Iterator[None]:
    """Turn errors of the user's update into refusals."""
    try:
        yield
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(f"optimizer._target_={name}: update fails: {' '.join(str(error).split())}") from error


def _compare(name: str, part: Sequence[Tensor], whole: Sequence[Tensor]) -> None:
    if all(torch.equal(ours, theirs) for ours, theirs in zip(part, whole, strict=True)):
        return
    if all(torch.allclose(ours, theirs, rtol=1e-5, atol=1e-7) for ours, theirs in zip(part, whole, strict=True)):
        raise ConfigError(
            f"optimizer._target_={name}: rounds an element differently by its position; use add, sub, mul, div, sqrt, "
            "lerp, addcmul, addcdiv instead of pow, exp, sigmoid and the like"
        )
    raise ConfigError(
        f"optimizer._target_={name}: is not elementwise: updating a slice differs from slicing the update"
    )
