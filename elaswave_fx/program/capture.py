"""Capture: an nn.Module and an example batch in, a functional ATen program out.

The model returns (loss sum, count). It is exported with a symbolic batch size if possible, else at the granule's size,
then functionalized, and compared with the eager model on fresh inputs of several batch sizes.

    GPT(...), {"input_ids": int64 [3, 64], "labels": int64 [3, 64]}
        -> Program(graph of 93 calls, params {"embed.weight": float32 [256, 128], ...}, ...)
"""

from __future__ import annotations

import contextlib
import inspect
import io
import linecache
import logging
import os
import re
import traceback
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import replace
from types import CodeType
from typing import Any

import torch
from torch import fx, nn
from torch._export.verifier import SpecViolationError
from torch.export import Dim, ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind
from torch.jit._script import RecursiveScriptModule
from torch.nn.modules.batchnorm import _BatchNorm

from elaswave_fx.errors import CaptureError
from elaswave_fx.program import torch_kernels  # noqa: F401  registers what torch lacks
from elaswave_fx.program.autocast import traced_under_autocast
from elaswave_fx.program.batch_run import count_samples
from elaswave_fx.program.batch_size import batch_symbol
from elaswave_fx.program.below_autograd import DerivativeInForward, export_below_autograd, refuse_derivatives
from elaswave_fx.program.check_against_eager import ModelFails, check_against_eager
from elaswave_fx.program.decompositions import decompositions
from elaswave_fx.program.dense import refuse_not_dense, refuse_not_dense_values
from elaswave_fx.program.eager_answers import eager_answers
from elaswave_fx.program.export_refusal import OTHERWISE, reason_and_way_out
from elaswave_fx.program.exportable import Exportable, any_names, own_name, restore_module_names
from elaswave_fx.program.fixed_size import chosen_by_size, first_other_size, python_sizes
from elaswave_fx.program.gradient_hooks import refuse_hooks_after_accumulation
from elaswave_fx.program.held_state import python_state_kept
from elaswave_fx.program.inline import inline_autocast, inline_grad_modes, refuse_control_flow
from elaswave_fx.program.ir import (
    Example,
    ParamSpec,
    Program,
    Result,
    ResultKind,
    Role,
    Source,
    TensorSpec,
    copy_graph,
    set_source,
    source_of,
)
from elaswave_fx.program.loss_shapes import losses_by_their_kernels
from elaswave_fx.program.many_calls import ManyCalls
from elaswave_fx.program.python_state import refuse_python_state
from elaswave_fx.program.recurrent_layers import layers_apart
from elaswave_fx.program.same_branches import refuse_other_branches
from elaswave_fx.program.shared_storage import refuse_other_name

Batch = Mapping[str, torch.Tensor]

# Errors of a model's own code and of the tracer below it when something cannot be traced: bugs of the model (types,
# lookups, attributes, arithmetic, failed assertions), refusals of the tracer (RuntimeError and its many subclasses; a
# SyntaxError where it writes code with an argument called `from`).
TRACE_ERRORS = (
    RuntimeError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError, AssertionError, ImportError,
    SpecViolationError, SyntaxError,
)  # fmt: skip


_TRACERS = ("torch.fx.experimental.symbolic_shapes", "torch._subclasses.fake_tensor")
"""Loggers of tracebacks during tracing."""
_DROPS_SAMPLE = re.compile(r"\bsqueeze\(\)|torch\.squeeze\([\w.]+\)")
"""In code: no dimension is named."""
_OF_SHAPES = re.compile("sizes?|shapes?|dimensions?", re.IGNORECASE)
_HERE = os.path.dirname(__file__) + os.sep
_TORCH = os.path.dirname(torch.__file__) + os.sep


def capture(model: nn.Module, batches: tuple[Batch, Batch], granule: int, calls: ManyCalls | None = None) -> Program:
    """Capture `model` in training mode. Its parameters become contiguous; their values and buffers stay as they are.

    Args:
        model: `forward(**batch) -> (loss sum, count)`.
        batches: two different batches of at least two granules each, of different sizes: [samples, ...] per input.
            The first one is what the export sees; both are used to check it. A model that runs on single granules
            alone has one in each.
        granule: samples of a fixed group; the batch size of the second try when no symbolic size exports.
        calls: the first call of the model, with the first batch; None if it has not been called.

    Raises:
        CaptureError: names the operator or module that cannot be exported, the batch size for which the graph and
            the eager model disagree, or what Python holds that forward changes and depends on.
    """
    model.train()
    _check_parameters(model)
    refuse_hooks_after_accumulation(model)
    with python_state_kept(model):
        calls = calls or ManyCalls(model, batches[0])
    refuse_python_state(model, batches[0])
    with python_state_kept(model):
        program = _capture(model, batches, granule)
        calls.refuse_changes()
    refuse_other_branches(model, batches[0], lambda: _replacements(model), program.dynamic_batch)
    return program


def _capture(model: nn.Module, batches: tuple[Batch, Batch], granule: int) -> Program:
    # A named size is proven to be free; a size found to be free may stay so where the proof fails.
    of_one_size = granule > 1 and count_samples(batches[0]) == granule
    with python_sizes() as places:
        for size in () if of_one_size else (Dim("batch", min=1), Dim.DYNAMIC):
            try:
                return _capture_once(model, batches, granule, size)
            except _NotThisWay:
                continue
    program = _capture_once(model, batches, granule, None)
    return replace(program, fixed_by=next(filter(None, places), chosen_by_size(program)))


class _NotThisWay(CaptureError):
    """The model does not export with this kind of batch size, or its export computes something else."""


def _capture_once(model: nn.Module, batches: tuple[Batch, Batch], granule: int, size: Any) -> Program:
    small = tuple(_first(batch, granule) for batch in batches)
    try:
        exported = _export(model, small[0] if size is None else batches[0], size)
    except TRACE_ERRORS as error:
        raise _NotThisWay(_export_message(model, error, granule if size is None else None)) from error
    program = _to_program(model, exported, Example(_state(model), *batches), granule, dynamic=size is not None)
    if size is not None and batch_symbol(program) is None:  # torch.pdist makes a number of it without a word
        raise _NotThisWay(f"model: {type(model).__name__} exports at one batch size only")
    other = first_other_size(program)
    if other is not None:
        raise _NotThisWay(f"model: {type(model).__name__} computes otherwise with {other} samples at once")
    for batch in small if size is None else (*batches, small[0]):
        try:
            check_against_eager(model, program, batch)
        except CaptureError as error:
            # A single granule may be too few; errors on several granules would occur in any other way too.
            if isinstance(error, ModelFails) and len(next(iter(batch.values()))) > granule:
                raise
            raise _NotThisWay(str(error)) from error
    return program


def _first(batch: Batch, samples: int) -> dict[str, torch.Tensor]:
    return {name: tensor[:samples].clone() for name, tensor in batch.items()}


def _state(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers by their first names; the tensors are the model's own."""
    named = (*model.named_parameters(), *model.named_buffers())
    return {name: tensor.detach() for name, tensor in named}


def _check_parameters(model: nn.Module) -> None:
    """Refuse parameters of several dtypes or off the CPU. Make those contiguous whose strides a copy would lose."""
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    if not trained:
        raise CaptureError(f"model: {type(model).__name__} has no parameter to train")
    first = next(iter(trained))
    for name, parameter in model.named_parameters():
        if name in trained and not parameter.numel():
            raise CaptureError(
                f"model: the parameter {name} {list(parameter.shape)} has no elements, so that there is nothing to "
                "train; a way out is to leave it out"
            )
        if parameter.device.type != "cpu":
            raise CaptureError(f"model: must be built on the cpu, but {name} is on {parameter.device}")
        if name in trained and parameter.dtype != trained[first].dtype:
            raise CaptureError(
                f"model: {name} is {parameter.dtype} and {first} is {trained[first].dtype}; trained parameters have "
                "one dtype"
            )
        if not parameter.is_contiguous():
            parameter.data = parameter.data.contiguous()


def _export(model: nn.Module, batch: Batch, size: Any) -> ExportedProgram:
    """A functional graph; `size` is the symbolic batch size, or None for that of `batch`."""
    # A tensor object given as two inputs would be captured as one input: make every input a tensor of its own.
    distinct = tuple(tensor.clone(memory_format=torch.contiguous_format) for tensor in batch.values())
    shapes: Any = {"inputs": tuple({0: size} for _ in batch)} if size is not None else None
    # What forward keeps is traced: a table that it makes when it first runs.
    with python_state_kept(model), _replacements(model), any_names():
        wrapped = Exportable(model, tuple(batch))
        try:
            with refuse_derivatives():
                exported = torch.export.export(wrapped, distinct, dynamic_shapes=shapes, strict=False)
        except DerivativeInForward:
            exported = export_below_autograd(wrapped, distinct, shapes)
        inline_grad_modes(exported.graph_module)
        return exported.run_decompositions(decompositions())


@contextlib.contextmanager
def _replacements(model: nn.Module) -> Iterator[None]:
    """What an export needs to be replaced in torch."""
    with _quiet(), eager_answers(), layers_apart(), losses_by_their_kernels(), traced_under_autocast(model):
        yield


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Suppress the tracer's warnings and its dump of the graph on failure; the user gets one line instead."""
    loggers = [logging.getLogger(name) for name in _TRACERS]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def _export_message(model: nn.Module, error: Exception, samples: int | None) -> str:
    """`samples`: of a batch of a fixed size."""
    reason, way_out = reason_and_way_out(error)
    scripted = [name for name, module in model.named_modules() if isinstance(module, RecursiveScriptModule)]
    if scripted:
        reason, way_out = (
            f"{scripted[0]} is scripted, and an export sees modules alone",
            "the module before torch.jit.script",
        )
    if any(isinstance(module, _BatchNorm) and module.momentum is None for module, _, _ in _running(error)):
        reason = "a batch norm with momentum=None makes a Python number of how many batches it has seen"
        way_out = "a number as its momentum, such as 0.1"
    drops = (_DROPS_SAMPLE.search(_text_of(code)) for _, code, _ in _running(error))
    if samples == 1 and way_out == OTHERWISE and _OF_SHAPES.search(reason) and any(drops):
        reason = f"for a single sample, {reason}"
        way_out = "squeeze(dim), where squeeze() drops the dimension of the samples too"
    return f"model: {type(model).__name__} cannot be exported{failing_line(error)}: {reason}; a way out is {way_out}"


def _text_of(code: CodeType) -> str:
    try:
        return inspect.getsource(code)
    except OSError:
        return ""  # made without a file


def failing_line(error: Exception) -> str:
    """ " in MODULE.METHOD, line N (its text)": the innermost line of a running module, of torch's own modules only if
    there is no other; empty if none was running."""
    frames = []
    for module, code, line in _running(error):
        own = not code.co_filename.startswith(_TORCH)
        if own or code.co_name == "forward":
            text = linecache.getline(code.co_filename, line).strip().rstrip(":")
            frames.append((own, f" in {type(module).__name__}.{code.co_name}, line {line} ({text})"))
    return max(enumerate(frames), key=lambda item: (item[1][0], item[0]))[1][1] if frames else ""


def _running(error: Exception) -> Iterator[tuple[nn.Module, CodeType, int]]:
    """The modules whose methods were running, outermost first, each with the method and its line."""
    for frame, line in traceback.walk_tb(error.__traceback__):
        code = frame.f_code
        owner = frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
        if isinstance(owner, nn.Module) and not code.co_filename.startswith(_HERE):
            yield owner, code, line


def _to_program(model: nn.Module, exported: ExportedProgram, example: Example, granule: int, dynamic: bool) -> Program:
    owner, params = _parameters(model)
    buffer_owner = _first_names(model.named_buffers(remove_duplicate=False))
    changed = _changed_parameters(exported, owner, params)
    stored: dict[str, torch.Tensor] = dict(model.named_buffers())
    buffers: dict[str, TensorSpec] = {}
    tensors: dict[str, torch.Tensor] = {}
    inline_autocast(exported.graph_module)
    refuse_control_flow(exported.graph_module.graph)
    graph = copy_graph(exported.graph_module)
    restore_module_names(graph.graph)
    refuse_not_dense_values(graph.graph)
    fields = iter(example.batch)
    by_name = {node.name: node for node in graph.graph.nodes if node.op == "placeholder"}
    for spec in exported.graph_signature.input_specs:
        node, target = by_name[spec.arg.name], own_name(str(spec.target))
        if spec.kind == InputKind.PARAMETER and owner[target] in changed:
            name = owner[target]
            known = params.pop(name, None) or buffers[name]
            buffers[name] = TensorSpec(known.shape, known.dtype)
            set_source(node, Source(Role.BUFFER, name))
        elif spec.kind == InputKind.PARAMETER:
            set_source(node, Source(Role.PARAM, owner[target]))
        elif spec.kind == InputKind.BUFFER:
            name = buffer_owner[target]
            buffers[name] = TensorSpec(tuple(stored[name].shape), stored[name].dtype)
            set_source(node, Source(Role.BUFFER, name))
        elif spec.kind == InputKind.CONSTANT_TENSOR:
            constant = exported.constants[str(spec.target)]
            assert isinstance(constant, torch.Tensor)
            refuse_not_dense(f"the tensor {spec.target} of forward", constant)
            refuse_other_name(model, constant)
            tensors[target] = constant.detach().clone(memory_format=torch.contiguous_format)
            set_source(node, Source(Role.CONSTANT, target))
        elif spec.kind == InputKind.USER_INPUT:
            set_source(node, Source(Role.INPUT, next(fields)))
        elif isinstance(exported.constants.get(str(spec.target)), torch.Generator):
            raise CaptureError(
                "model: forward draws from a torch.Generator of its own, whose draws have no key of step and sample; "
                "a way out is torch's default generator, or, for draws that stay, a tensor made in the constructor"
            )
        else:
            raise CaptureError(f"model: reads {spec.arg.name}, of the kind {spec.kind.name}; that cannot be captured")
    results = _results(exported, {**buffer_owner, **owner}, example.batch)
    _merge_duplicate_sources(graph)
    return Program(graph, results, params, buffers, tensors, granule, dynamic, example)


def _changed_parameters(
    exported: ExportedProgram, owner: Mapping[str, str], params: Mapping[str, ParamSpec]
) -> set[str]:
    """Parameters that forward changes, such as moving averages of others: they become buffers if they are not
    trained."""
    outputs = exported.graph_signature.output_specs
    changed = {owner[own_name(str(o.target))] for o in outputs if o.kind == OutputKind.PARAMETER_MUTATION}
    for name in sorted(changed):
        if params[name].trainable:
            raise CaptureError(
                f"model: forward changes the trained parameter {name} in place, and only the optimizer may; a way out "
                "is to compute with a changed copy of it, such as weight.clamp(max=2)"
            )
    return changed


def _first_names(named: Any) -> dict[str, str]:
    """Every name of a tensor -> its first name."""
    first: dict[int, str] = {}
    return {name: first.setdefault(id(tensor), name) for name, tensor in named}


def _parameters(model: nn.Module) -> tuple[dict[str, str], dict[str, ParamSpec]]:
    """Logical parameters: a tied tensor is one, under its first name."""
    owner = _first_names(model.named_parameters(remove_duplicate=False))
    specs: dict[str, ParamSpec] = {}
    for name, parameter in model.named_parameters():
        aliases = tuple(other for other, first in owner.items() if first == name and other != name)
        specs[name] = ParamSpec(tuple(parameter.shape), parameter.dtype, parameter.requires_grad, aliases)
    return owner, specs


def _results(exported: ExportedProgram, owner: Mapping[str, str], batch: Batch) -> tuple[Result, ...]:
    results: list[Result] = []
    users = [ResultKind.LOSS, ResultKind.COUNT]
    fields = dict(zip(exported.graph_signature.user_inputs, batch, strict=True))
    for spec in exported.graph_signature.output_specs:
        target = own_name(str(spec.target))
        if spec.kind in (OutputKind.BUFFER_MUTATION, OutputKind.PARAMETER_MUTATION):
            results.append(Result(ResultKind.BUFFER, owner[target]))
        elif spec.kind == OutputKind.USER_OUTPUT and users:
            results.append(Result(users.pop(0)))
        elif spec.kind == OutputKind.USER_OUTPUT:
            raise CaptureError("model: returns more than two values; a model returns (loss sum, count)")
        elif spec.kind == OutputKind.USER_INPUT_MUTATION:
            raise CaptureError(
                f"model: forward changes its input '{fields[target]}' in place; only buffers may be updated; a way out "
                "is to change a clone of it"
            )
        else:
            raise CaptureError(f"model: returns {spec.arg.name}, of the kind {spec.kind.name}; that cannot be captured")
    if users:
        raise CaptureError("model: returns a single value; a model returns (loss sum, count)")
    return tuple(results)


def _merge_duplicate_sources(module: fx.GraphModule) -> None:
    """Leave one placeholder per logical tensor, and none for unread tensors."""
    seen: dict[Source, fx.Node] = {}
    for node in [node for node in module.graph.nodes if node.op == "placeholder"]:
        first = seen.setdefault(source_of(node), node)
        if first is not node:
            node.replace_all_uses_with(first)
            module.graph.erase_node(node)
    for node in seen.values():
        if not node.users:
            module.graph.erase_node(node)
    module.recompile()
