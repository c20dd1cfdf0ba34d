"""Capture: an nn.Module and an example batch in, a functional ATen program out.

The model returns (loss sum, count). It is exported with a symbolic batch size where that works and at the granule's
size where it does not, functionalized, and compared with the eager model on fresh inputs at two batch sizes.

    GPT(...), {"input_ids": int64 [3, 64], "labels": int64 [3, 64]}
        -> Program(graph of 93 calls, params {"embed.weight": float32 [256, 128], ...}, ...)
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx, nn
from torch.export import Dim, ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind

from elaswave_fx.errors import CaptureError
from elaswave_fx.program.inline import inline_wrappers
from elaswave_fx.program.ir import (
    ParamSpec,
    Program,
    Result,
    ResultKind,
    Role,
    Source,
    TensorSpec,
    copy_graph,
    output_node,
    set_source,
)

Batch = Mapping[str, torch.Tensor]

_RELATIVE_TOLERANCE = 1e-5


def capture(model: nn.Module, batches: tuple[Batch, Batch], granule: int) -> Program:
    """Capture `model` in training mode.

    Args:
        model: `forward(**batch) -> (loss sum, count)`.
        batches: two different batches, of different sizes where the model allows it: [samples, ...] per input.
            The first one is what the export sees; both are used to check it. A size of 2*granule or more is wise.
        granule: samples of a fixed group; the batch size of the second try when no symbolic size exports.

    Raises:
        CaptureError: names the operator or module that cannot be exported, or the input on which the graph and the
            eager model disagree.
    """
    model.train()
    for parameter in model.parameters():
        if parameter.device.type != "cpu":
            raise CaptureError(f"capture: the model must be built on the cpu, found {parameter.device}")
    exported, dynamic = _export(model, batches[0], granule)
    check_against_eager(model, exported, batches if dynamic else (_first(batches[0], granule),))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        functional = exported.run_decompositions({})
    return _to_program(model, functional, granule, dynamic)


def _first(batch: Batch, samples: int) -> dict[str, torch.Tensor]:
    return {name: tensor[:samples].clone() for name, tensor in batch.items()}


def _export(model: nn.Module, batch: Batch, granule: int) -> tuple[ExportedProgram, bool]:
    distinct = {name: tensor.clone() for name, tensor in batch.items()}
    shapes: dict[str, Any] = {name: {0: Dim.DYNAMIC} for name in batch}
    try:
        return _export_once(model, distinct, shapes), True
    except Exception as dynamic_error:  # torch.export raises many unrelated types; each is retold below
        fixed = _first(batch, granule)
        try:
            return _export_once(model, fixed, None), False
        except Exception as error:
            raise CaptureError(_export_message(model, error)) from dynamic_error


def _export_once(model: nn.Module, batch: Batch, shapes: Any) -> ExportedProgram:
    names = list(batch)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exported = torch.export.export(model, (), dict(batch), dynamic_shapes=shapes, strict=False)
    if shapes is not None and _specialized(exported, names):
        raise CaptureError("the batch size was specialized to a constant")
    return exported


def _specialized(exported: ExportedProgram, names: list[str]) -> bool:
    inputs = {spec.arg.name for spec in exported.graph_signature.input_specs if spec.kind == InputKind.USER_INPUT}
    nodes = [n for n in exported.graph_module.graph.nodes if n.op == "placeholder" and n.name in inputs]
    return any(isinstance(n.meta["val"].shape[0], int) for n in nodes if isinstance(n.meta["val"], torch.Tensor))


def _export_message(model: nn.Module, error: Exception) -> str:
    first = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    frames = []
    trace = error.__traceback__
    while trace is not None:
        owner = trace.tb_frame.f_locals.get("self")
        if isinstance(owner, nn.Module) and trace.tb_frame.f_code.co_name == "forward":
            frames.append(f"{type(owner).__name__}.forward, line {trace.tb_lineno}")
        trace = trace.tb_next
    where = f" in {frames[-1]}" if frames else ""
    return (
        f"model: {type(model).__name__} cannot be exported{where}: {first}; "
        "a way out is to write that part with tensor operators and without data-dependent control flow"
    )


def check_against_eager(model: nn.Module, exported: ExportedProgram, batches: tuple[Batch, ...]) -> None:
    """Run the exported program and the eager model on the same fresh inputs with the same random numbers.

    Raises CaptureError with both numbers when they differ by more than rounding.
    """
    state = {name: tensor.detach().clone() for name, tensor in model.state_dict(keep_vars=True).items()}
    module = exported.module()
    for batch in batches:
        outputs = []
        for candidate in (model, module):
            torch.manual_seed(0)
            with torch.no_grad():
                outputs.append(candidate(**{name: tensor.clone() for name, tensor in batch.items()}))
            with torch.no_grad():
                model.load_state_dict(state)
        _compare_outputs(outputs[0], outputs[1], len(next(iter(batch.values()))))


def _compare_outputs(eager: Any, captured: Any, samples: int) -> None:
    for name, expected, got in zip(("loss sum", "count"), eager, captured, strict=False):
        difference = abs(float(expected) - float(got))
        if not difference <= _RELATIVE_TOLERANCE * max(1.0, abs(float(expected))):
            raise CaptureError(
                f"capture: with {samples} samples the eager {name} is {float(expected):.6g} and the exported one "
                f"{float(got):.6g}; the exported graph does not compute this model"
            )


def _to_program(model: nn.Module, exported: ExportedProgram, granule: int, dynamic: bool) -> Program:
    owner, params = _parameters(model)
    buffers: dict[str, TensorSpec] = {}
    tensors: dict[str, torch.Tensor] = {}
    inline_wrappers(exported.graph_module)
    graph = copy_graph(exported.graph_module)
    by_name = {node.name: node for node in graph.graph.nodes if node.op == "placeholder"}
    for spec in exported.graph_signature.input_specs:
        node = by_name[spec.arg.name]
        if spec.kind == InputKind.PARAMETER:
            set_source(node, Source(Role.PARAM, owner[str(spec.target)]))
        elif spec.kind == InputKind.BUFFER:
            tensor = dict(model.named_buffers())[str(spec.target)]
            buffers[str(spec.target)] = TensorSpec(tuple(tensor.shape), tensor.dtype)
            set_source(node, Source(Role.BUFFER, str(spec.target)))
        elif spec.kind == InputKind.CONSTANT_TENSOR:
            tensors[str(spec.target)] = exported.constants[str(spec.target)].detach()
            set_source(node, Source(Role.CONSTANT, str(spec.target)))
        elif spec.kind == InputKind.USER_INPUT:
            set_source(node, Source(Role.INPUT, spec.arg.name))
        else:
            raise CaptureError(f"capture: input {spec.arg.name} is of the kind {spec.kind.name}; not supported")
    results = _results(exported)
    _merge_duplicate_sources(graph)
    return Program(graph, results, params, buffers, tensors, granule, dynamic)


def _parameters(model: nn.Module) -> tuple[dict[str, str], dict[str, ParamSpec]]:
    """Logical parameters: a tied tensor is one, under its first name."""
    first: dict[int, str] = {}
    aliases: dict[str, list[str]] = {}
    owner: dict[str, str] = {}
    specs: dict[str, ParamSpec] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        logical = first.setdefault(id(parameter), name)
        owner[name] = logical
        aliases.setdefault(logical, [])
        if name != logical:
            aliases[logical].append(name)
        specs[logical] = ParamSpec(tuple(parameter.shape), parameter.dtype, parameter.requires_grad)
    return owner, {
        name: ParamSpec(spec.shape, spec.dtype, spec.trainable, tuple(aliases[name])) for name, spec in specs.items()
    }


def _results(exported: ExportedProgram) -> tuple[Result, ...]:
    results: list[Result] = []
    users = [ResultKind.LOSS, ResultKind.COUNT]
    for spec in exported.graph_signature.output_specs:
        if spec.kind == OutputKind.BUFFER_MUTATION:
            results.append(Result(ResultKind.BUFFER, str(spec.target)))
        elif spec.kind == OutputKind.USER_OUTPUT and users:
            results.append(Result(users.pop(0)))
        elif spec.kind == OutputKind.USER_OUTPUT:
            raise CaptureError("model: returns more than two values; a model returns (loss sum, count)")
        else:
            raise CaptureError(f"model: the forward pass mutates '{spec.target}'; only buffers may be updated")
    if users:
        raise CaptureError("model: returns a single value; a model returns (loss sum, count)")
    return tuple(results)


def _merge_duplicate_sources(module: fx.GraphModule) -> None:
    """One placeholder per logical tensor, none for what is not read."""
    seen: dict[Source, fx.Node] = {}
    for node in list(module.graph.nodes):
        if node.op != "placeholder":
            continue
        source = node.meta["elaswave_source"]
        if source in seen:
            node.replace_all_uses_with(seen[source])
        else:
            seen[source] = node
        if not node.users or source in seen and seen[source] is not node:
            module.graph.erase_node(node)
            if seen.get(source) is node:
                del seen[source]
    output_node(module.graph)
    module.recompile()
