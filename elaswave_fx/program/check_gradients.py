"""Comparison of the gradients of a captured program with those of its eager model.

    gradient of layers.0.weight 0.31, of the graph 0   ->  CaptureError: what goes backward is derived from the graph

Compared are those with the first state, and with other weights and later counters in buffers: a gate of zeros hides
what is behind it.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping
from unittest import mock

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from elaswave_fx.errors import CaptureError
from elaswave_fx.program.check_against_eager import SameDraws, inputs_of
from elaswave_fx.program.eager_answers import through_checkpoints
from elaswave_fx.program.gradient_hooks import refuse_changing_hooks
from elaswave_fx.program.held_state import try_forward
from elaswave_fx.program.ir import Program, ResultKind, named_operator
from elaswave_fx.program.later_buffers import later_states
from elaswave_fx.program.own_backward import WAY_OUT, own_functions, recorded_calls, refuse_other_backward
from elaswave_fx.program.state_kept import SEED, equal_with_nan, state_kept, state_of
from elaswave_fx.program.trial_values import FAR, TIMES_NOISE, perturbed, rounded_otherwise

_EXACT = 1e-3
_TOLERANCE = {torch.float32: _EXACT, torch.float64: 1e-6}
_TOLERANCE_OF_OTHERS = 0.1
_SCALES = (2.0**-16, 2.0**16)
"""Factors of the loss, with which gradients scale unless some code depends on their magnitude."""
_SCALES_OF_HALF = (2.0**-4, 2.0**4)
"""Those that gradients in float16 bear."""
WHERE_INFINITE = (
    "some operator has no derivative where it is called, and torch.where passes on 0 x inf = nan; a way out is to "
    "replace its input there, as in torch.where(x > 0, x, 1).sqrt()"
)
_Gradients = dict[str, torch.Tensor | None]


def check_gradients(
    model: nn.Module, program: Program, batch: Mapping[str, torch.Tensor], other_batch: Mapping[str, torch.Tensor]
) -> tuple[str, ...]:
    """Compare the gradient of the loss sum through the graph of a normalized program with that of the model, on `batch`
    with its first weights and on `other_batch` with others near them: a gate or head of zeros hides what is behind it.

    The backward pass is derived from the graph, which holds forward calls only. An autograd.Function whose backward is
    not the derivative of its forward would train wrongly, as would a hook that changes gradients.

    Returns lines for the user. Raises CaptureError naming the operator without a derivative, or the parameter and the
    likely reason.
    """
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    with state_kept(model) as before, refuse_changing_hooks(model):
        loss = _loss_of(model, batch)
        with _writes_behind_forward(model, program) as notes:
            expected = _backward(model, program, loss, trained)
    with state_kept(model), through_checkpoints():
        functions = own_functions(_loss_of(model, batch))
    _refuse_other_gradients(model, program, batch, before, expected, functions)
    if functions:
        with state_kept(model), through_checkpoints(), recorded_calls(functions) as calls:
            model(**{name: tensor.clone() for name, tensor in batch.items()})
        with state_kept(model):  # of the layers that a Function runs
            refuse_other_backward([*calls.values()])
    tolerance, least = _tolerance(program, expected)
    for scale in _scales(program, loss, expected):
        with state_kept(model):
            scaled = _backward(model, program, _loss_of(model, batch) * scale, trained)
        for name in reversed(trained):
            ours, theirs = (torch.zeros(()) if g is None else g.double() for g in (scaled[name], expected[name]))
            if not float((ours / scale - theirs).norm()) <= tolerance * max(float(theirs.norm()), least):
                raise CaptureError(
                    f"model: {scale:g} times the loss of {type(model).__name__} has not {scale:g} times the gradient "
                    f"of {name}: {_scale_reason(model, functions, program)}"
                )
    near = {**before, **{name: perturbed(parameter.detach(), name) for name, parameter in trained.items()}}
    other = {**near, **{name: _not_zero(near[name]) for name, parameter in trained.items() if _is_small(parameter)}}
    far = {**other, **{name: FAR * other[name] for name in trained}}
    _has_gradients(model, program, other_batch, far, functions)
    later = [_has_gradients(model, program, other_batch, state, functions) for state in later_states(program, other)]
    if not any(later) and not _has_gradients(model, program, other_batch, other, functions):
        _has_gradients(model, program, other_batch, near, functions)
    return tuple(notes)


def _scales(program: Program, loss: torch.Tensor, gradients: _Gradients) -> tuple[float, ...]:
    """Factors of the loss to try; none where it and its gradients are 0 but for rounding, which does not scale: a
    partial likelihood of one sample."""
    largest = max((float(gradient.norm()) for gradient in gradients.values() if gradient is not None), default=0.0)
    if float(loss.detach()) == 0.0 and largest < 1e-6:
        return ()
    return _SCALES_OF_HALF if torch.float16 in program.float_dtypes() else _SCALES


def _is_small(parameter: torch.Tensor) -> bool:
    """Whether what is behind a parameter hardly weighs: zeros of a gate, or 1e-6 of a LayerScale."""
    return bool(parameter.numel()) and float(parameter.detach().abs().max()) < 1e-2


def _not_zero(small: torch.Tensor) -> torch.Tensor:
    """Weights of usual size in place of small ones."""
    inputs = small[0].numel() if small.dim() > 1 else 4
    return small / small.norm() * math.sqrt(small.numel() / inputs)


def _has_gradients(
    model: nn.Module,
    program: Program,
    batch: Mapping[str, torch.Tensor],
    state: Mapping[str, torch.Tensor],
    functions: list[type[torch.autograd.Function]],
) -> bool:
    """Refuse other gradients of the model at a state that is not its first; return whether it has any there."""
    tensors = dict(state_of(model))
    trained = {name: tensor for name, tensor in tensors.items() if tensor.requires_grad}
    with state_kept(model):
        with torch.no_grad():
            for name, tensor in tensors.items():
                tensor.copy_(state[name])
        try:
            expected = _backward(model, program, _loss_of(model, batch), trained)
        except Exception:  # noqa: BLE001 - not every model takes other weights, or later steps
            return False
        if not all(g is None or bool(g.isfinite().all()) for g in expected.values()):
            return False
    _refuse_other_gradients(model, program, batch, state, expected, functions, ", away from its first weights,")
    return True


def _refuse_other_gradients(
    model: nn.Module,
    program: Program,
    batch: Mapping[str, torch.Tensor],
    state: Mapping[str, torch.Tensor],
    expected: _Gradients,
    functions: list[type[torch.autograd.Function]],
    where: str = "",
) -> None:
    """Raise CaptureError if gradients derived from the graph, at `state`, are others than `expected`."""
    trained = list(expected)
    got = _of_graph(model, program, batch, state, trained)
    tolerance, least = _tolerance(program, expected)
    otherwise: _Gradients = {}
    for name in reversed(trained):  # Nearest to the loss first: the culprit is in front of it.
        if expected[name] is None and got[name] is not None:
            raise CaptureError(
                f"model: {name} in {type(model).__name__} gets no gradient, as where an autograd.Function marks its "
                "result as not differentiable: torch's optimizers leave it alone, here it would decay; a way out is "
                "detach() in front of that, or requires_grad=False for the parameter"
            )
        ours, theirs = (torch.zeros(()) if g is None else g.double() for g in (got[name], expected[name]))
        if not bool(theirs.isfinite().all()):
            raise CaptureError(
                f"model: the gradient of {name} in {type(model).__name__} is not finite with its first weights: "
                f"{WHERE_INFINITE}"
            )
        off, norm = float((ours - theirs).norm()), max(float(theirs.norm()), least)
        if off <= min(_EXACT, tolerance) * norm:
            continue
        if off <= tolerance * norm:  # in lower precision: no more than another rounding changes
            otherwise = otherwise or _of_graph(model, program, batch, rounded_otherwise(program, state), trained)
            changed = otherwise[name]
            if changed is not None and off <= TIMES_NOISE * float((changed.double() - ours).norm()):
                continue
        raise CaptureError(
            f"model: the gradient of {name} in {type(model).__name__}{where} has norm {float(theirs.norm()):.6g}, "
            f"derived from its captured graph {float(ours.norm()):.6g}: {_gradient_reason(model, functions, program)}"
        )


def _of_graph(
    model: nn.Module,
    program: Program,
    batch: Mapping[str, torch.Tensor],
    state: Mapping[str, torch.Tensor],
    trained: list[str],
) -> _Gradients:
    tensors = {name: tensor.requires_grad_(name in trained) for name, tensor in program.as_read(state).items()}
    torch.manual_seed(SEED)
    outputs = SameDraws(program.graph).run(*inputs_of(program, tensors, batch))
    losses = [v for v, result in zip(outputs, program.results, strict=True) if result.kind == ResultKind.LOSS]
    if not losses[0].requires_grad:
        return dict.fromkeys(trained)
    return _backward(model, program, losses[0], {name: tensors[name] for name in trained})


def _tolerance(program: Program, expected: _Gradients) -> tuple[float, float]:
    """Return the relative tolerance of gradients, and the smallest norm that it is relative to."""
    least = 1e-3 * max((float(g.norm()) for g in expected.values() if g is not None), default=0.0)
    return max(_TOLERANCE.get(each, _TOLERANCE_OF_OTHERS) for each in program.float_dtypes()), least


def _loss_of(model: nn.Module, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    torch.manual_seed(SEED)
    return model(**{name: tensor.clone() for name, tensor in batch.items()})[0]


def _backward(
    model: nn.Module, program: Program, loss: torch.Tensor, tensors: Mapping[str, torch.Tensor]
) -> _Gradients:
    """Gradients of leaves by loss.backward(), as in a training loop: reentrant checkpoints support nothing else."""
    if not loss.requires_grad:
        raise CaptureError(f"model: the loss of {type(model).__name__} depends on none of its trained parameters")
    try:
        for tensor in tensors.values():
            tensor.grad = None
        loss.backward()
        found = {name: tensor.grad for name, tensor in tensors.items()}
        return {name: grad.to_dense() if grad is not None and grad.is_sparse else grad for name, grad in found.items()}
    except (RuntimeError, NotImplementedError) as error:
        first = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise CaptureError(
            f"model: {type(model).__name__} cannot be differentiated{named_operator(str(error), program.graph.graph)}: "
            f"{first.strip()}; a way out is to give the operator a derivative, as torch.library.register_autograd does"
        ) from error
    finally:
        for tensor in tensors.values():
            tensor.grad = None


@contextlib.contextmanager
def _writes_behind_forward(model: nn.Module, program: Program) -> Iterator[list[str]]:
    """Raise CaptureError on exit for a parameter or buffer that the backward pass writes: a program has none of its
    code. Yields lines for the user, on statistics that a checkpoint updates once more, complete on exit."""
    updated = program.updated_buffers()
    before = {name: (tensor, tensor.detach().clone()) for name, tensor in state_of(model)}
    notes: list[str] = []
    yield notes
    after = dict(state_of(model))
    for name, (tensor, value) in before.items():
        if after.get(name) is tensor and equal_with_nan(tensor, value):
            continue
        if name not in updated:
            raise CaptureError(
                f"model: the backward pass of {type(model).__name__} writes {name}, by a hook or an autograd.Function; "
                "it would stay as it is, for the captured graph has forward's calls alone; a way out is to compute it "
                "in forward"
            )
        if not isinstance(model.get_submodule(name.rpartition(".")[0]), _BatchNorm):
            raise CaptureError(
                f"model: a checkpoint of {type(model).__name__} runs what updates {name} once more in the backward "
                "pass; a way out is to leave the checkpoint out, and recompute=full"
            )
        if not notes:
            notes.append(f"model: {name} is updated once a step, where a checkpoint in PyTorch updates it twice")


def _scale_reason(model: nn.Module, functions: list[type[torch.autograd.Function]], program: Program) -> str:
    if functions:
        return _gradient_reason(model, functions, program)
    return (
        "what goes backward depends on its size, as gradients do that are clipped on their way, and those of a sum are "
        "not those of a mean; a way out is clip_norm"
    )


def _switches(model: nn.Module, batch: Mapping[str, torch.Tensor]) -> bool:
    """Whether forward switches parameters off, by `requires_grad_`."""
    off: list[torch.Tensor] = []

    def switch(tensor: torch.Tensor, requires_grad: bool = True) -> torch.Tensor:
        off.extend([tensor] * (isinstance(tensor, nn.Parameter) and not requires_grad))
        tensor.requires_grad = requires_grad
        return tensor

    try_forward(model, batch, mock.patch.object(torch.Tensor, "requires_grad_", switch))
    return bool(off)


def _gradient_reason(model: nn.Module, functions: list[type[torch.autograd.Function]], program: Program) -> str:
    if any("_backward" in str(node.target) for node in program.graph.graph.nodes):
        return (
            "forward takes derivatives, and some operators are not differentiated once more; a way out is "
            "torch.func.jacrev for jacfwd and jvp"
        )
    if _switches(model, program.example.batch):
        return (
            "forward switches requires_grad, and a captured program has no such step; a way out is detach(), or "
            "torch.func.functional_call with detached parameters"
        )
    if functions:
        names = " or ".join(dict.fromkeys(function.__name__ for function in functions))
        return f"the backward of {names} is not the derivative of its forward; {WAY_OUT}"
    scripted = [name for name, module in model.named_modules() if isinstance(module, torch.jit.ScriptModule)]
    if scripted:
        name = scripted[0] or "the model"
        return f"{name} is scripted, and an export sees modules alone; a way out is the module without torch.jit.script"
    return f"something changes gradients on their way, as does a write in place behind detach(); {WAY_OUT}"
