"""The plain PyTorch loop that a run is compared with: one process, eager autograd, torch.optim.

It shares with the library only the model's class and the meaning of the numbers: loss sum over count, gradients of the
sum, parameters in two groups, `clip_grad_norm_`, keyed draws. Draws come from `tests/philox_numpy.py`; which unit and
op a draw belongs to is for the captured program to say (`random_ops`, in order of execution).

    adamw = OptimizerConfig(name="adamw", lr=1e-3, weight_decay=0.01)
    run = reference_run(lambda: build_model(…), batches, optimizer=adamw, global_batch=8)
    run.losses, run.grad_norms, run.parameters["head.weight"]
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from elaswave_fx.config.keys import OptimizerConfig
from tests import philox_numpy

# Draws that no captured model of the tests has; one that appears must not go by unkeyed.
_UNKEYED = {
    *("alpha_dropout", "feature_dropout", "feature_alpha_dropout", "dropout1d", "dropout2d", "dropout3d"),
    *("bernoulli", "bernoulli_", "rand_like", "randn", "randn_like", "randint", "randint_like", "randperm"),
    *("multinomial", "normal", "normal_", "uniform_", "exponential_", "poisson", "rrelu", "gumbel_softmax"),
}


@dataclass(frozen=True)
class RandomOp:
    """A draw of the program: unit and local index make its key, `axis` holds its samples (-1: it belongs to none)."""

    unit: int
    op: int
    axis: int = 0


@dataclass(frozen=True)
class ReferenceRun:
    """`losses`: mean per counted item of each step; `grad_norms`: before clipping; the rest after the last step."""

    losses: list[float]
    grad_norms: list[float]
    parameters: dict[str, Tensor]
    buffers: dict[str, Tensor]


class KeyedDraws(TorchFunctionMode):
    """Gives every draw of a forward pass the values of its key. `first` is the global position of the first sample."""

    def __init__(self, random_ops: Sequence[RandomOp], *, seed: int, step: int, first: int, samples: int) -> None:
        super().__init__()
        self._ops = iter(random_ops)
        self._seed = seed
        self._step = step
        self._first = first
        self._samples = samples

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in (F.dropout, torch.dropout):
            return self._dropout(*args, **kwargs)
        if func is F.scaled_dot_product_attention:
            return self._attention(*args, **kwargs)
        if func is torch.rand:
            return self._rand(*args, **kwargs)
        name = getattr(func, "__name__", "")
        assert name not in _UNKEYED, f"the model draws by {name}, which the reference does not key"
        return func(*args, **kwargs)

    def finish(self) -> None:
        left = list(self._ops)
        assert not left, f"the model drew less often than the program says: {left} are left"

    def _next(self, shape: Sequence[int]) -> tuple[philox_numpy.Keys, RandomOp, int]:
        op = next(self._ops, None)
        assert op is not None, f"the model draws {list(shape)}, the program has no draw left"
        if op.axis < 0:
            return philox_numpy.step_keys(self._seed, self._step, op.unit), op, 1
        keys = philox_numpy.sample_keys(self._seed, self._first, self._samples, op.unit)
        return keys, op, shape[op.axis] // self._samples

    def _dropout(self, x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        if not training or p == 0.0:
            return x
        keys, op, period = self._next(x.shape)
        factor = philox_numpy.dropout_factor(keys, x.shape, p, op.op, op.axis, period)
        dropped = x * torch.from_numpy(factor).to(x.dtype)
        return x.copy_(dropped) if inplace else dropped

    def _attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        if dropout_p == 0.0:
            return F.scaled_dot_product_attention(
                query, key, value, attn_mask, 0.0, is_causal, scale=scale, enable_gqa=enable_gqa
            )
        if enable_gqa:
            key, value = (each.repeat_interleave(query.shape[1] // each.shape[1], dim=1) for each in (key, value))
        scores = query @ key.transpose(-2, -1) * (query.shape[-1] ** -0.5 if scale is None else scale)
        if is_causal:
            attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
        if attn_mask is not None and attn_mask.dtype is torch.bool:
            scores = scores.masked_fill(~attn_mask, float("-inf"))
        elif attn_mask is not None:
            scores = scores + attn_mask
        return self._dropout(scores.softmax(dim=-1), dropout_p) @ value

    def _rand(self, *size: Any, dtype: torch.dtype | None = None, **_: Any) -> Tensor:
        shape = tuple(size[0]) if len(size) == 1 and not isinstance(size[0], int) else size
        keys, op, period = self._next(shape)
        values = torch.from_numpy(philox_numpy.uniform(keys, shape, op.op, op.axis, period))
        return values.to(dtype or torch.float32)


def reference_run(
    model_factory: Callable[[], nn.Module],
    batches: Iterable[Mapping[str, Tensor]],
    *,
    optimizer: OptimizerConfig,
    global_batch: int,
    factor: Callable[[int], float] = lambda step: 1.0,
    clip_norm: float | None = None,
    seed: int = 0,
    spans: Sequence[tuple[int, int]] | None = None,
    random_ops: Sequence[RandomOp] = (),
) -> ReferenceRun:
    """Train a fresh model on `batches`, one per step, and say what came out.

    A batch maps the arguments of the model's forward to tensors of `global_batch` samples, or of the first of them
    where a step leaves the others out. `factor` is the schedule (step -> factor of the learning rate). `spans` cuts the
    samples of a step into the pieces that run at once, in order: the granules of a batch-coupled model; by default the
    whole batch is one.
    """
    model = model_factory().train()
    parameters = [each for each in model.parameters() if each.requires_grad]
    optim = _torch_optimizer(optimizer, parameters)
    losses, grad_norms = [], []
    for step, batch in enumerate(batches):
        optim.zero_grad(set_to_none=True)
        total, count = 0.0, 0.0
        samples = len(next(iter(batch.values())))
        for lo, hi in [span for span in spans if span[1] <= samples] if spans else [(0, samples)]:
            draws = KeyedDraws(random_ops, seed=seed, step=step, first=step * global_batch + lo, samples=hi - lo)
            with draws:
                loss, items = model(**{name: tensor[lo:hi] for name, tensor in batch.items()})
            draws.finish()
            loss.backward()
            total, count = total + float(loss.detach()), count + float(items)
        _divide_gradients(parameters, count)
        norm = nn.utils.clip_grad_norm_(parameters, float("inf") if clip_norm is None else clip_norm)
        for group in optim.param_groups:
            group["lr"] = optimizer.lr * factor(step)
        optim.step()
        losses.append(total / count)
        grad_norms.append(float(norm))
    return ReferenceRun(
        losses,
        grad_norms,
        {name: each.detach().clone() for name, each in model.named_parameters()},
        {name: each.detach().clone() for name, each in model.named_buffers()},
    )


def relative_difference(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> float:
    """Norm of the difference over norm of `theirs`, over all tensors together, in float64."""
    assert ours.keys() == theirs.keys(), f"different names: {sorted(ours.keys() ^ theirs.keys())}"
    difference = sum(_squared_norm(ours[name].double() - theirs[name].double()) for name in theirs)
    return (difference / sum(_squared_norm(each) for each in theirs.values())) ** 0.5


def _squared_norm(tensor: Tensor) -> float:
    return float(tensor.detach().double().square().sum())


def _divide_gradients(parameters: Sequence[nn.Parameter], count: float) -> None:
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad.div_(count)


def _torch_optimizer(config: OptimizerConfig, parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    plain = [each for each in parameters if config.no_decay == "vectors" and each.ndim < 2]
    decayed = [each for each in parameters if config.no_decay != "vectors" or each.ndim >= 2]
    groups = [{"params": decayed, "weight_decay": config.weight_decay}, {"params": plain, "weight_decay": 0.0}]
    if config.name == "adamw":
        return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps)
    assert config.name == "sgd", f"torch has no counterpart of {config.name}"
    return torch.optim.SGD(groups, lr=config.lr, momentum=config.momentum)
