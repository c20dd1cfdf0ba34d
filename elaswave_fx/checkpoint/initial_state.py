"""A rank's share of the initial state, read from a file of logical tensors.

bucket "unit3.group0" of 198144 elements, owner span [0, 99072) -> master fp32 [99072], moments, work copy [198144]
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from elaswave_fx.errors import ConfigError
from elaswave_fx.plan.work.spans import Span
from elaswave_fx.program.artifact import Artifact, BucketBuffer, BucketSpec

_DIGEST_CHUNK_BYTES = 16 << 20


def save_state(tensors: Mapping[str, torch.Tensor], path: Path) -> None:
    """Write the file that `InitialState` reads. Raises ConfigError if that fails, for example on a full disk."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file(dict(tensors), path)
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"hydra.run.dir: the initial state cannot be written ({error})") from error


class InitialState:
    """The memory-mapped tensors that the builder wrote: fp32 parameters and buffers by logical name."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: Any = safe_open(str(path), framework="pt")

    def let_go(self) -> None:
        """Release the pages that were read, which count as memory while mapped, by mapping the file anew."""
        self._file = safe_open(str(self._path), framework="pt")

    def tensor(self, name: str) -> torch.Tensor:
        return self._file.get_tensor(name)

    def described(self, name: str) -> tuple[tuple[int, ...], str]:
        """(shape, dtype) of a tensor."""
        tensor = self.tensor(name)
        return tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")

    def bucket(self, bucket: BucketSpec) -> torch.Tensor:
        """All parameters of a bucket, flat, fp32 [numel]; or the bytes of its buffers as fp32 words."""
        if bucket.buffers:
            return buffer_words(bucket, self.tensor)
        flat = torch.empty(bucket.numel, dtype=torch.float32)
        for param in bucket.params:
            size = math.prod(param.shape)
            flat[param.offset : param.offset + size] = self.tensor(param.name).reshape(-1)
        return flat

    def slice(self, bucket: BucketSpec, span: Span) -> torch.Tensor:
        """The elements `span` of a bucket, fp32; no others are read."""
        if bucket.buffers:
            return buffer_words(bucket, self.tensor)[span.lo : span.hi]
        flat = torch.empty(len(span), dtype=torch.float32)
        for param in bucket.params:
            whole = Span(param.offset, param.offset + math.prod(param.shape))
            common = whole.intersect(span)
            if common is not None:
                here, there = common.relative_to(span), common.relative_to(whole)
                flat[here.lo : here.hi] = self.tensor(param.name).reshape(-1)[there.lo : there.hi]
        return flat


def buffer_view(words: torch.Tensor, buffer: BucketBuffer) -> torch.Tensor:
    """A mutable buffer as a view of `words`, its whole bucket declared as fp32."""
    dtype = getattr(torch, buffer.dtype)
    first, numel = buffer.offset * words.itemsize // dtype.itemsize, math.prod(buffer.shape)
    return words.view(dtype)[first : first + numel].view(buffer.shape)


def buffer_words(bucket: BucketSpec, tensor_of: Callable[[str], torch.Tensor]) -> torch.Tensor:
    """A bucket of buffers as fp32 words; the gaps between buffers are zero."""
    words = torch.zeros(bucket.numel, dtype=torch.float32)
    for buffer in bucket.buffers:
        buffer_view(words, buffer).copy_(tensor_of(buffer.name))
    return words


def split_bucket(bucket: BucketSpec, flat: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, view) of every parameter or buffer in a flat bucket."""
    for buffer in bucket.buffers:
        yield buffer.name, buffer_view(flat, buffer)
    for param in bucket.params:
        yield param.name, flat[param.offset : param.offset + math.prod(param.shape)].view(param.shape)


def tensor_digest(tensor: torch.Tensor) -> bytes:
    """The SHA-256 of each 16 MiB chunk of a tensor's bytes, joined."""
    data = tensor.contiguous().view(-1).view(torch.uint8).numpy().data
    chunks = range(0, max(len(data), 1), _DIGEST_CHUNK_BYTES)
    return b"".join(hashlib.sha256(data[at : at + _DIGEST_CHUNK_BYTES]).digest() for at in chunks)


def params_digest(artifact: Artifact, digests: Mapping[str, bytes]) -> str:
    """SHA-256 over the chunk digests of all logical parameters in canonical (name) order."""
    total = hashlib.sha256()
    for info in sorted(artifact.params, key=lambda info: info.name):
        total.update(digests[info.name])
    return total.hexdigest()


def gather_parameters(
    artifact: Artifact,
    initial: InitialState,
    collect: Callable[[int], torch.Tensor | None],
) -> dict[str, torch.Tensor]:
    """Every logical parameter (fp32) and buffer by name.

    `collect(bucket)` returns the whole flat fp32 bucket on the collecting rank, None elsewhere. Tensors that
    training does not change come from the initial state.
    """
    found: dict[str, torch.Tensor] = {}
    for index, bucket in enumerate(artifact.buckets):
        flat = collect(index)
        if flat is not None:
            found |= dict(split_bucket(bucket, flat))
    for info in (*artifact.params, *artifact.buffers):
        if info.name not in found:
            found[info.name] = initial.tensor(info.name)
    return found
