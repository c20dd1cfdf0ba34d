"""Parameters that share memory, with each other or within themselves. Training would treat them as separate.

head.weight = embed.weight                  one parameter under two names: fine
head.weight = nn.Parameter(embed.weight)    two parameters, one storage: an update of one would have to reach both
nn.Parameter(torch.ones(1).expand(8))       eight elements, one storage
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
from torch import nn

from elaswave_fx.errors import CaptureError


def refuse_shared_storage(model: nn.Module) -> None:
    """Raise CaptureError for a trained parameter that shares memory with another tensor of the model, or within itself.
    One parameter under two names is allowed."""
    trained = {id(parameter) for parameter in model.parameters() if parameter.requires_grad}
    named = [*model.named_parameters(), *model.named_buffers()]
    for name, tensor in named:
        if id(tensor) in trained and _overlaps_itself(tensor):
            raise CaptureError(
                f"model: elements of the parameter {name} {list(tensor.shape)} are one in memory, as expand() makes "
                "them; a way out is to keep the parameter small and to expand it in forward"
            )
    for (name, tensor), (other_name, other) in _of_one_storage(named):
        if not {id(tensor), id(other)} & trained or not _overlap(tensor, other):
            continue
        kinds = ["parameter" if isinstance(each, nn.Parameter) else "buffer" for each in (tensor, other)]
        way_out = "to share the parameter itself" if kinds == ["parameter"] * 2 else "to compute the buffer in forward"
        if tensor.shape == other.shape and kinds == ["parameter"] * 2:
            way_out += f", as {other_name} = {name} does in the constructor"
        elif kinds == ["parameter"] * 2:
            way_out += f", and to take {other_name} from {name} in forward"
        raise CaptureError(
            f"model: {kinds[0]} {name} and {kinds[1]} {other_name} are two tensors with one memory, as .data or "
            f"nn.Parameter(tensor) make them; they would be trained as two that differ; a way out is {way_out}"
        )


def refuse_other_name(model: nn.Module, constant: torch.Tensor) -> None:
    """Raise CaptureError for a constant of forward that aliases a parameter or buffer: it would stay constant, and has
    no gradient."""
    if constant.layout != torch.strided or not constant.numel():
        return
    place = constant.untyped_storage().data_ptr()
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        first = tensor.untyped_storage().data_ptr() if tensor.layout == torch.strided else 0
        if first and first <= place < first + tensor.untyped_storage().nbytes():
            raise CaptureError(
                f"model: forward reads {name} by a way that a capture takes for a constant, such as a closure, a list, "
                f"or {name}.detach() kept as an attribute; a way out is to read it in forward as an attribute of its "
                f"module"
            )


def _of_one_storage(
    named: list[tuple[str, torch.Tensor]],
) -> Iterator[tuple[tuple[str, torch.Tensor], tuple[str, torch.Tensor]]]:
    """Pairs of different tensors in one storage."""
    by_storage: dict[int, dict[int, tuple[str, torch.Tensor]]] = {}
    for name, tensor in named:
        if tensor.layout == torch.strided and tensor.numel() and tensor.untyped_storage().data_ptr():
            by_storage.setdefault(tensor.untyped_storage().data_ptr(), {}).setdefault(id(tensor), (name, tensor))
    for tensors in by_storage.values():
        yield from itertools.combinations(tensors.values(), 2)


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """First and last + 1 byte of a tensor in its storage."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    first = int(tensor.storage_offset()) * tensor.itemsize
    return first, first + int(last + 1) * tensor.itemsize


def _overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors of one storage share an element; parts of a chunk() interleave."""
    (lo, hi), (other_lo, other_hi) = _extent(one), _extent(other)
    if hi <= other_lo or other_hi <= lo:
        return False
    if one.itemsize != other.itemsize:
        return True
    mark = torch.zeros(max(hi, other_hi) // one.itemsize, dtype=torch.bool)
    mark.as_strided(one.shape, one.stride(), one.storage_offset()).fill_(True)
    return bool(mark.as_strided(other.shape, other.stride(), other.storage_offset()).any())


def _overlaps_itself(tensor: torch.Tensor) -> bool:
    return any(size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
