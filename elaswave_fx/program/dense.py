"""Dense tensors, which programs and state are made of, told from sparse, quantized and nested ones and the like.

refuse_not_dense("body.adjacency", torch.eye(3).to_sparse())  ->  CaptureError: … is a sparse_coo tensor …
tensor_text(torch.ones(1))                                    ->  "torch.float32 (1,) ad95131b…"
"""

from __future__ import annotations

import hashlib
import io

import torch
from torch import fx

from elaswave_fx.errors import CaptureError
from elaswave_fx.program.ir import calls, module_of, tensors_in, value_of

SPARSE_PRODUCT = "torch.zeros(rows, width).index_add(0, row, value[:, None] * h[column])"


def refuse_not_dense(name: str, tensor: torch.Tensor) -> None:
    """Raise CaptureError for a parameter, buffer or constant that is not dense, has no values, or a dtype that files
    lack."""
    if tensor.is_meta:
        raise CaptureError(f"model: {name} is on the meta device, without values; a way out is to give it some")
    kind = _other_kind(tensor)
    if kind is not None:
        raise CaptureError(
            f"model: {name} is a {kind} tensor, and the state of a model is dense; a way out is to keep it dense, or "
            "its dense parts (indices and values, values and scales), and to compute with those: a sparse matrix times "
            f"h is {SPARSE_PRODUCT}"
        )
    if tensor.is_complex() and tensor.dtype != torch.complex64:
        raise CaptureError(
            f"model: {name} is in {tensor.dtype}, which files of tensors lack; a way out is complex64, or "
            "torch.view_as_real() of it"
        )


def refuse_not_dense_values(graph: fx.Graph) -> None:
    """Raise CaptureError for a call whose result is not dense."""
    for node in calls(graph):
        kind = next(filter(None, map(_other_kind, tensors_in(value_of(node)))), None)
        if kind is not None:
            way_out = f"; a way out for a sparse matrix times h is {SPARSE_PRODUCT}" if "sparse" in kind else ""
            raise CaptureError(
                f"model: {node.target} in {module_of(node)} makes a {kind} tensor, and forward is captured with dense "
                f"ones{way_out}"
            )


def tensor_text(tensor: torch.Tensor) -> str:
    """Dtype, shape and a digest of the values of a tensor of whatever kind; texts are equal only for equal tensors."""
    shape = "nested" if tensor.is_nested else tuple(tensor.shape)
    return f"{tensor.dtype} {shape} {hashlib.sha256(_bytes(tensor.detach())).hexdigest()}"


def _bytes(tensor: torch.Tensor) -> bytes:
    if tensor.is_mkldnn:
        tensor = tensor.to_dense()
    if tensor.is_meta or _other_kind(tensor) is not None:
        saved = io.BytesIO()
        torch.save(tensor, saved)
        return saved.getvalue()
    values = tensor.cpu().resolve_conj().resolve_neg().contiguous()
    return values.reshape(-1).view(torch.uint8).numpy().tobytes()


def _other_kind(tensor: torch.Tensor) -> str | None:
    if tensor.is_nested:
        return "nested"
    if tensor.layout != torch.strided:
        return str(tensor.layout).removeprefix("torch.").removeprefix("_")
    return "quantized" if tensor.is_quantized else None
