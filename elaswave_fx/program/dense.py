"""Tensors that are not dense: sparse, quantized, nested ones and the like, which programs and state do not have.

refuse_other_kind("body.adjacency", torch.eye(3).to_sparse())  ->  CaptureError: … is a sparse_coo tensor …
tensor_bytes(torch.ones(1))                                    ->  b"\\x00\\x00\\x80?"
"""

from __future__ import annotations

import io

import torch

from elaswave_fx.errors import CaptureError


def refuse_other_kind(name: str, tensor: torch.Tensor) -> None:
    """Raise CaptureError for a parameter, buffer or constant that is not dense, or has no values."""
    if tensor.is_meta:
        raise CaptureError(f"model: {name} is on the meta device, without values; a way out is to give it some")
    kind = _other_kind(tensor)
    if kind is not None:
        raise CaptureError(
            f"model: {name} is a {kind} tensor, and the state of a model is dense; a way out is to keep it dense, or "
            "its dense parts (indices and values, values and scales), and to put it together in forward"
        )


def tensor_bytes(tensor: torch.Tensor) -> bytes:
    """The values of a tensor, of whatever kind, as bytes: equal for equal ones."""
    tensor = tensor.detach()
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
