"""normalize: bring a captured graph into the one form that later passes accept.

Calls that compute nothing are removed, parameters that are only read rounded are kept rounded, sparse gradients become
dense, uninitialized memory zeros, running statistics arithmetic:

    before: _assert_tensor_metadata(x); y = to.dtype(x, float32)  # x is float32 already
            linear(x, _to_copy(weight, bfloat16))  # the only reader of weight
            out, _, _, mean', var' = _native_batch_norm_legit_functional(x, w, b, mean, var, True, 0.1, eps)
    after:  linear(x, weight)  # which is bfloat16
            out, _, _ = _native_batch_norm_legit.no_stats(x, w, b, True, 0.1, eps)
            mean' = mean * 0.9 + batch_mean * 0.1; ...  # arithmetic that can be folded granule by granule
"""

from __future__ import annotations

import operator
import sys
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import fx

from elaswave_fx.errors import CaptureError
from elaswave_fx.passes.estimate_cost import VIEWS
from elaswave_fx.program.ir import (
    Program,
    Role,
    argument,
    calls,
    emit,
    is_aten,
    module_of,
    placeholders,
    set_statistics,
    source_of,
    value_of,
)

aten = torch.ops.aten

_CHECKS = (
    "aten._assert_tensor_metadata",
    "aten._assert_scalar",
    "aten._assert_async",
    "aten._linalg_check_errors",
    "aten.sym_constrain_range",
    "aten.sym_constrain_range_for_size",
)
# A view is valid for the strides that its argument had at capture. Differentiated operators may return others, as
# attention with a learned mask does; reshape copies where it must.
_VIEWS = ("aten.view.default", "aten._unsafe_view")
_SQUEEZES = ("aten.squeeze.default", "aten.squeeze.dim", "aten.squeeze.dims")
# For all of UNSET: what is read of uninitialized memory would be another value on every rank and in every run.
_ZEROED = {
    aten.empty.memory_format: aten.zeros.default,
    aten.empty_permuted.default: aten.zeros.default,
    aten.empty_strided.default: aten.zeros.default,
    aten.empty_like.default: aten.zeros_like.default,
    aten.new_empty.default: aten.new_zeros.default,
    aten.new_empty_strided.default: aten.new_zeros.default,
}
_LOW_PRECISION = (torch.bfloat16, torch.float16)
_COPIES = ("aten.to", "aten._to_copy", "aten.clone")
_NO_OPS = ("aten.alias", "aten.lift_fresh_copy", "aten.lift_fresh")


@dataclass(frozen=True)
class Normalize:
    """Drop calls without effect, keep parameters rounded where all readers round them, spell out running statistics."""

    name: ClassVar[str] = "normalize"

    def apply(self, program: Program) -> Program:
        program = program.clone()
        module = program.graph
        sparse = list(dict.fromkeys(module_of(node) for node in calls(module.graph) if _asks_for_sparse(node)))
        for node in list(calls(module.graph)):
            if _asks_for_sparse(node):
                _make_dense(node)
            if is_aten(node, *_CHECKS):
                module.graph.erase_node(node)
            elif is_aten(node, *_NO_OPS, *_COPIES) and not isinstance(node.args[0], fx.Node):
                _make_tensor(module.graph, node)
            elif is_aten(node, *_NO_OPS) or _is_no_op_copy(node) or _is_whole_slice(node):
                node.replace_all_uses_with(_tensor_argument(node))
                module.graph.erase_node(node)
            elif is_aten(node, *_VIEWS):
                node.target = aten.reshape.default
            elif is_aten(node, *_SQUEEZES):
                _keep_samples(node)
            elif node.target in _ZEROED:
                _fill(node)
            elif is_aten(node, "aten.copy"):
                _spell_out_copy(module.graph, node)
            elif is_aten(node, "aten._native_batch_norm_legit_functional"):
                _spell_out_batch_norm(module.graph, node)
        refuse_effects(module.graph)
        for node in placeholders(module.graph):
            _keep_rounded(module.graph, node)
        module.graph.eliminate_dead_code()
        module.recompile()
        said = f"gradients of {', '.join(sparse)} are dense: sparse=True changes no number"
        notes = (*program.notes, said) if sparse else program.notes
        params, buffers = _as_read(program, Role.PARAM), _as_read(program, Role.BUFFER)
        program = replace(program, params=params, buffers=buffers, notes=notes)
        return replace(program, example=replace(program.example, state=program.as_read(program.example.state)))


def _fill(node: fx.Node) -> None:
    """Make uninitialized memory zeros, in the usual order of dimensions but where they are like another tensor."""
    has_layout = is_aten(node, "aten.empty_permuted", "aten.empty_strided", "aten.new_empty_strided")
    node.target = _ZEROED[node.target]  # type: ignore[index]
    if has_layout:
        node.args = node.args[:-1]
    if node.target is not aten.zeros_like.default:
        node.kwargs = {name: value for name, value in node.kwargs.items() if name != "memory_format"}


def _make_tensor(graph: fx.Graph, node: fx.Node) -> None:
    """Spell out a copy of a plain number, as torch.func.grad makes them of factors."""
    value = value_of(node)
    with graph.inserting_before(node):
        full = emit(graph, aten.full.default, [], node.args[0], dtype=value.dtype, device=value.device, like=node)
    node.replace_all_uses_with(full)
    graph.erase_node(node)


def _asks_for_sparse(node: fx.Node) -> bool:
    """Whether an embedding, or a bag of them, has sparse gradients, which cannot be summed over ranks box by box."""
    names = ("aten.embedding", "aten.embedding_bag", "aten._embedding_bag", "aten._embedding_bag_forward_only")
    return is_aten(node, *names) and bool(argument(node, "sparse", False))


def _make_dense(node: fx.Node) -> None:
    names = [argument.name for argument in node.target._schema.arguments]  # type: ignore[union-attr]
    place = names.index("sparse")
    if place < len(node.args):
        node.update_arg(place, False)
    else:
        node.update_kwarg("sparse", False)


def _keep_rounded(graph: fx.Graph, node: fx.Node) -> None:
    """Keep a parameter rounded if every reader rounds it, or a view of it, alike: it is gathered, kept and
    differentiated so."""
    if source_of(node).role != Role.PARAM:
        return
    views, readers = _views_and_readers(node)
    dtypes = {value_of(reader).dtype if is_aten(reader, "aten._to_copy", "aten.to") else None for reader in readers}
    dtype = dtypes.pop() if len(dtypes) == 1 else None
    if dtype is None or not dtype.is_floating_point or dtype.itemsize >= value_of(node).dtype.itemsize:
        return
    for each in (node, *views):
        each.meta["val"] = value_of(each).to(dtype)
    for reader in readers:
        reader.replace_all_uses_with(_tensor_argument(reader))
        graph.erase_node(reader)


def _views_and_readers(node: fx.Node) -> tuple[list[fx.Node], list[fx.Node]]:
    """All views of a value, nested ones included, and the readers of the value and its views."""
    views: list[fx.Node] = []
    readers: list[fx.Node] = []
    waiting = [node]
    while waiting:
        for user in waiting.pop().users:
            if is_aten(user, *VIEWS) and isinstance(value_of(user), torch.Tensor) and user.args[0] in (node, *views):
                views.append(user)
                waiting.append(user)
            else:
                readers.append(user)
    return views, readers


def _as_read(program: Program, role: Role) -> dict[str, Any]:
    """Specs with the dtypes that the graph reads: rounded parameters; running statistics in single precision, whatever
    their dtype at capture."""
    specs: dict[str, Any] = dict(program.params if role == Role.PARAM else program.buffers)
    for node in placeholders(program.graph.graph):
        if source_of(node).role == role:
            specs[source_of(node).name] = replace(specs[source_of(node).name], dtype=value_of(node).dtype)
    return specs


def _tensor_argument(node: fx.Node) -> fx.Node:
    source = node.args[0]
    assert isinstance(source, fx.Node)
    return source


def _is_no_op_copy(node: fx.Node) -> bool:
    """Whether a copy changes nothing: a functional graph cannot observe it."""
    if not is_aten(node, *_COPIES) or node.kwargs.get("memory_format") is not None:
        return False
    source, result = value_of(_tensor_argument(node)), value_of(node)
    same = source.dtype == result.dtype and source.device == result.device
    return same and (is_aten(node, "aten.to") or source.stride() == result.stride())


def _is_whole_slice(node: fx.Node) -> bool:
    if not is_aten(node, "aten.slice.Tensor") or argument(node, "step", 1) != 1:
        return False
    return argument(node, "start", 0) in (0, None) and argument(node, "end", None) in (sys.maxsize, None)


def _keep_samples(node: fx.Node) -> None:
    """Keep the sample dimension in squeeze, which drops dimensions of one element at capture: a rank may have one
    sample."""
    shape = value_of(_tensor_argument(node)).shape
    asked: Any = argument(node, "dim")
    places = range(len(shape)) if asked is None else [asked] if isinstance(asked, int) else asked
    dims = [place for place in places if isinstance(shape[place], int) and shape[place] == 1]
    if dims:
        node.target, node.args, node.kwargs = aten.squeeze.dims, (node.args[0], dims), {}
    else:
        node.replace_all_uses_with(_tensor_argument(node))
        node.graph.erase_node(node)


def _spell_out_copy(graph: fx.Graph, node: fx.Node) -> None:
    """Replace copy(old, new) by `new` in the shape and dtype of `old`, which has a derivative."""
    old, new = node.args[:2]
    assert isinstance(old, fx.Node) and isinstance(new, fx.Node)
    with graph.inserting_before(node):
        if value_of(new).dtype != value_of(old).dtype:
            new = emit(graph, aten._to_copy.default, new, dtype=value_of(old).dtype, like=node)
        if tuple(value_of(new).shape) != tuple(value_of(old).shape):
            new = emit(graph, aten.expand_as.default, new, old, like=node)
    node.replace_all_uses_with(new)
    graph.erase_node(node)


def _spell_out_batch_norm(graph: fx.Graph, node: fx.Node) -> None:
    """Replace training statistics by plain arithmetic over the batch, whose values the fold needs.

    Source of the formulas: torch.nn.BatchNorm2d (the running variance takes the unbiased batch variance).
    """
    x, weight, bias, mean, var, training, momentum, eps = node.args
    assert isinstance(x, fx.Node) and isinstance(mean, fx.Node) and isinstance(var, fx.Node)
    if not training:
        op = aten._native_batch_norm_legit_no_training.default
        with graph.inserting_before(node):
            call = emit(graph, op, x, weight, bias, mean, var, momentum, eps, like=node)
            out = emit(graph, operator.getitem, call, 0, like=node)
        _replace_results(graph, node, {0: out, 3: mean, 4: var})
        return
    buffers = (_buffer_of(mean, node), _buffer_of(var, node))
    dims = [dim for dim in range(value_of(x).dim()) if dim != 1]
    keep, take = 1.0 - float(momentum), float(momentum)  # type: ignore[arg-type]
    with graph.inserting_before(node):
        call = emit(graph, aten._native_batch_norm_legit.no_stats, x, weight, bias, True, momentum, eps, like=node)
        set_statistics(call, buffers)
        out = emit(graph, operator.getitem, call, 0, like=node)
        steady = emit(graph, aten.detach.default, x, like=node)
        if value_of(x).dtype in _LOW_PRECISION:  # small increments of an average would be lost in it
            steady = emit(graph, aten._to_copy.default, steady, dtype=torch.float32, like=node)
        for statistic in (mean, var):
            if value_of(statistic).dtype in _LOW_PRECISION:
                statistic.meta["val"] = value_of(statistic).to(torch.float32)
        batch_mean = emit(graph, aten.mean.dim, steady, dims, like=node)
        batch_var = emit(graph, aten.var.correction, steady, dims, correction=1, like=node)
        new_mean = _blend(graph, mean, keep, batch_mean, take, node)
        new_var = _blend(graph, var, keep, batch_var, take, node)
    _replace_results(graph, node, {0: out, 3: new_mean, 4: new_var})
    for statistic in (new_mean, new_var):
        _drop_casts(statistic)


def _buffer_of(statistic: fx.Node, norm: fx.Node) -> str:
    """The buffer of a running statistic; a repeated call of a module continues from its last call's value."""
    first = _attached(statistic)
    while is_aten(first, "aten.add"):  # as _blend writes it
        kept = first.args[0]
        if not isinstance(kept, fx.Node) or not is_aten(kept, "aten.mul") or not isinstance(kept.args[0], fx.Node):
            break
        first = _attached(kept.args[0])
    if first.op != "placeholder" or source_of(first).role != Role.BUFFER:
        raise CaptureError(
            f"model: {norm.target} in {module_of(norm)} keeps running statistics in something else than two buffers, "
            "or forward changes them before; a way out is to leave them to the module"
        )
    return source_of(first).name


def _attached(node: fx.Node) -> fx.Node:
    """A value without the `detach` of a block under torch.no_grad()."""
    while is_aten(node, "aten.detach") and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node


def _drop_casts(statistic: fx.Node) -> None:
    """Remove casts that would round a statistic to the dtype of the captured buffer."""
    for user in list(statistic.users):
        if is_aten(user, "aten._to_copy", "aten.to"):
            user.replace_all_uses_with(statistic)


def _blend(graph: fx.Graph, old: fx.Node, keep: float, new: fx.Node, take: float, like: fx.Node) -> fx.Node:
    kept = emit(graph, aten.mul.Scalar, old, keep, like=like)
    taken = emit(graph, aten.mul.Scalar, new, take, like=like)
    return emit(graph, aten.add.Tensor, kept, taken, like=like)


def _replace_results(graph: fx.Graph, node: fx.Node, by: dict[int, Any]) -> None:
    for user in list(node.users):
        number = int(user.args[1])  # type: ignore[arg-type]
        if number not in by:
            raise CaptureError(
                f"model: result {number} of {node.target} in {module_of(node)} is used, which has no form here; a way "
                "out is to keep that module out of what derivatives are taken of"
            )
        user.replace_all_uses_with(by[number])
        graph.erase_node(user)
    graph.erase_node(node)


def refuse_effects(graph: fx.Graph) -> None:
    """Raise CaptureError for operators that change their inputs."""
    for node in calls(graph):
        target = node.target
        if isinstance(target, torch._ops.OpOverload) and target._schema.is_mutable:
            raise CaptureError(
                f"model: {target} in {module_of(node)} changes its input in place; it cannot be cut; a way out is an "
                "operator that returns its result"
            )
