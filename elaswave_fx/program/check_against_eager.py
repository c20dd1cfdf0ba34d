"""Comparison of a captured program with its eager model, on the same batch with the same random numbers.

loss of the eager model 2011.88, of the graph 1674.97  ->  CaptureError
gradient of layers.0.weight 0.31, of the graph 0       ->  CaptureError: what goes backward is derived from the graph
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx, nn

from elaswave_fx.errors import CaptureError
from elaswave_fx.program.gradient_hooks import refuse_changing_hooks
from elaswave_fx.program.ir import (
    Program,
    ResultKind,
    Role,
    is_aten,
    is_getitem,
    named_operator,
    placeholders,
    source_of,
)
from elaswave_fx.program.own_backward import WAY_OUT, own_functions, recorded_calls, refuse_other_backward
from elaswave_fx.program.state_kept import SEED, state_kept
from elaswave_fx.program.trial_values import perturbed

_RELATIVE_TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-10}
_TOLERANCE_OF_OTHERS = 1e-2
_COUNT_TOLERANCE = 1e-5
_GRADIENT_TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-6}
_GRADIENT_TOLERANCE_OF_OTHERS = 0.1
_SCALES = (2.0**-16, 2.0**16)
"""Factors of the loss, with which gradients scale unless some code depends on their magnitude."""
_Gradients = dict[str, torch.Tensor | None]


class ModelFails(CaptureError):
    """The model itself raises an error on a batch."""


def check_against_eager(model: nn.Module, program: Program, batch: Mapping[str, torch.Tensor]) -> None:
    """Compare loss sum and count of the graph, before any pass, with those of the model. The model's state is kept.

    Raises CaptureError with both numbers when they differ by more than rounding, ModelFails when the model fails on
    the batch.
    """
    samples = len(next(iter(batch.values())))
    with state_kept(model) as before:
        expected = _run_eager(model, batch, samples)
    torch.manual_seed(SEED)
    with torch.no_grad():
        outputs = _SameDraws(program.graph).run(*_inputs(program, before, batch))
    got = {result.kind: float(value) for result, value in zip(program.results, outputs, strict=True)
           if result.kind in (ResultKind.LOSS, ResultKind.COUNT)}  # fmt: skip
    loss_tolerance = max(_RELATIVE_TOLERANCE.get(dtype, _TOLERANCE_OF_OTHERS) for dtype in program.float_dtypes())
    tolerances = {ResultKind.LOSS: loss_tolerance, ResultKind.COUNT: _COUNT_TOLERANCE}
    for kind, value in zip((ResultKind.LOSS, ResultKind.COUNT), expected, strict=True):
        if not math.isfinite(value):
            raise CaptureError(
                f"model: with {samples} samples and its first weights the {kind.value} of {type(model).__name__} is "
                f"{value}; a model starts with a finite one, and a part of a batch may lack what a mean divides by: "
                "sum the loss and give the count, or set parallel.granule=the samples that belong together"
            )
        if not abs(value - got[kind]) <= tolerances[kind] * max(1.0, abs(value)):
            raise CaptureError(
                f"model: with {samples} samples the {kind.value} of {type(model).__name__} is {value:.6g} and that of "
                f"its captured graph {got[kind]:.6g}; something in it is not seen by the capture, such as a random "
                "number drawn outside of torch, or inside one of its layers, or a branch on the batch size; a way out "
                "is to write that part with tensor operators"
            )


def _run_eager(model: nn.Module, batch: Mapping[str, torch.Tensor], samples: int) -> list[float]:
    torch.manual_seed(SEED)
    try:
        with torch.enable_grad():  # forward itself may take gradients
            output = model(**{name: tensor.clone() for name, tensor in batch.items()})
            return [float(value.detach()) for value in output]
    except (RuntimeError, ValueError, IndexError) as error:
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ModelFails(
            f"model: {type(model).__name__} fails on {samples} samples of the data: {first}; it has to run on every "
            "whole number of granules (parallel.granule)"
        ) from error


def _inputs(
    program: Program, state: Mapping[str, torch.Tensor], batch: Mapping[str, torch.Tensor]
) -> list[torch.Tensor]:
    values = []
    for source in map(source_of, placeholders(program.graph.graph)):
        if source.role == Role.INPUT:
            values.append(batch[source.name])
        else:
            values.append(program.tensors[source.name] if source.role == Role.CONSTANT else state[source.name])
    return values


def check_gradients(model: nn.Module, program: Program, batch: Mapping[str, torch.Tensor]) -> None:
    """Compare the gradient of the loss sum through the graph of a normalized program with that of the model, with its
    first weights and with others near them: a gate or head of zeros hides what is behind it.

    The backward pass is derived from the graph, which holds forward calls only. An autograd.Function whose backward is
    not the derivative of its forward would train wrongly, as would a hook that changes gradients.

    Raises CaptureError naming the operator without a derivative, or the parameter and the likely reason.
    """
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    with state_kept(model) as before, refuse_changing_hooks(model):
        loss = _loss_of(model, batch)
        expected = _backward(model, program, loss, trained)
    functions = own_functions(loss)
    _refuse_other_gradients(model, program, batch, before, expected, functions)
    if functions:
        with state_kept(model), recorded_calls(functions) as calls:
            model(**{name: tensor.clone() for name, tensor in batch.items()})
        refuse_other_backward([*calls.values()])
    tolerance, least = _tolerance(program, expected)
    for scale in _SCALES:
        with state_kept(model):
            scaled = _backward(model, program, _loss_of(model, batch) * scale, trained)
        for name in reversed(trained):
            ours, theirs = (torch.zeros(()) if g is None else g.double() for g in (scaled[name], expected[name]))
            if not float((ours / scale - theirs).norm()) <= tolerance * max(float(theirs.norm()), least):
                raise CaptureError(
                    f"model: {scale:g} times the loss of {type(model).__name__} has not {scale:g} times the gradient "
                    f"of {name}: {_gradient_reason(model, functions, program)}"
                )
    with state_kept(model):
        with torch.no_grad():
            for name, parameter in trained.items():
                parameter.copy_(perturbed(parameter, name))
        state = {**before, **{name: parameter.detach() for name, parameter in trained.items()}}
        try:
            expected = _backward(model, program, _loss_of(model, batch), trained)
        except Exception:  # noqa: BLE001 - not every model takes other weights
            return
        if all(g is None or bool(g.isfinite().all()) for g in expected.values()):
            where = ", with weights about 10 % off its first ones,"
            _refuse_other_gradients(model, program, batch, state, expected, functions, where)


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
    tensors = {name: tensor.requires_grad_(name in expected) for name, tensor in program.as_read(state).items()}
    torch.manual_seed(SEED)
    outputs = _SameDraws(program.graph).run(*_inputs(program, tensors, batch))
    losses = [v for v, result in zip(outputs, program.results, strict=True) if result.kind == ResultKind.LOSS]
    got = _backward(model, program, losses[0], {name: tensors[name] for name in trained})
    tolerance, least = _tolerance(program, expected)
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
                f"model: the gradient of {name} in {type(model).__name__} is not finite with its first weights: some "
                "operator has no derivative where it is called, and torch.where passes on 0 x inf = nan; a way out is "
                "to replace its input there, as in torch.where(x > 0, x, 1).sqrt()"
            )
        if not float((ours - theirs).norm()) <= tolerance * max(float(theirs.norm()), least):
            raise CaptureError(
                f"model: the gradient of {name} in {type(model).__name__}{where} has norm "
                f"{float(theirs.norm()):.6g}, derived from its captured graph {float(ours.norm()):.6g}: "
                f"{_gradient_reason(model, functions, program)}"
            )


def _tolerance(program: Program, expected: _Gradients) -> tuple[float, float]:
    """Return the relative tolerance of gradients, and the smallest norm that it is relative to."""
    least = 1e-3 * max((float(g.norm()) for g in expected.values() if g is not None), default=0.0)
    return max(_GRADIENT_TOLERANCE.get(each, _GRADIENT_TOLERANCE_OF_OTHERS) for each in program.float_dtypes()), least


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


def _gradient_reason(model: nn.Module, functions: list[type[torch.autograd.Function]], program: Program) -> str:
    if any("_backward" in str(node.target) for node in program.graph.graph.nodes):
        return (
            "forward takes derivatives, and beside those torch.no_grad() is not seen, nor are some operators "
            "differentiated once more; a way out is detach() for no_grad(), torch.func.jacrev for jacfwd and jvp"
        )
    if functions:
        names = " or ".join(dict.fromkeys(function.__name__ for function in functions))
        return f"the backward of {names} is not the derivative of its forward; {WAY_OUT}"
    scripted = [name for name, module in model.named_modules() if isinstance(module, torch.jit.ScriptModule)]
    if scripted:
        name = scripted[0] or "the model"
        return f"{name} is scripted, and an export sees modules alone; a way out is the module without torch.jit.script"
    return f"something changes gradients on their way; {WAY_OUT}"


class _SameDraws(fx.Interpreter):
    """Draws dropout masks as the eager operator does; the functional operator uses other numbers of the generator."""

    def run_node(self, n: fx.Node) -> Any:
        mask_is_used = any(user.args[1] == 1 and user.users for user in n.users if is_getitem(user))
        if is_aten(n, "aten.native_dropout") and not mask_is_used:
            args, _ = self.fetch_args_kwargs_from_env(n)
            return torch.dropout(*args), None
        return super().run_node(n)
