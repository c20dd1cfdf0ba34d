"""The model file of a run, held against what the summary says of it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from elaswave_fx import _native
from elaswave_fx.audit.compare import bucket_name
from elaswave_fx.audit.finding import Finding, holds, unchecked, wrong
from elaswave_fx.audit.program import Program
from elaswave_fx.audit.record import Record
from elaswave_fx.checkpoint.initial_state import buffer_words, params_digest, tensor_digest
from elaswave_fx.program.artifact import Artifact


def check_model(record: Record, program: Program | str) -> Finding:
    """The parameters and buffers in the file are those that the run ended with."""
    summary = record.summary
    if summary is None or summary.model is None or summary.params_digest is None:
        return unchecked("model", "the run has written none")
    path = _place_of(record, summary.model)
    if isinstance(program, str):
        return unchecked("model", program)
    if not path.is_file():
        return wrong("model", f"{path}: is missing")
    try:
        tensors = load_file(path)
        digests = {info.name: tensor_digest(tensors[info.name]) for info in program.artifact.params}
        buffers = _digests_of_buffers(program.artifact, tensors)
    except (OSError, SafetensorError) as error:
        return wrong("model", f"{path}: cannot be read ({error})")
    except KeyError as error:
        return wrong("model", f"{path}: has no tensor {error.args[0]}")
    if params_digest(program.artifact, digests) != summary.params_digest:
        return wrong("model", f"{path}: its parameters are not those that the run ended with (params_digest)")
    for number, digest in buffers.items():
        if summary.buckets is not None and summary.buckets.get(str(number)) != digest:
            return wrong(
                "model", f"{path}: {bucket_name(number, program.artifact)} is another one than the run ended with"
            )
    count = sum(len(bucket.buffers) for bucket in program.artifact.buckets)
    also = f" and {count} buffers" if count else ""
    return holds("model", f"{len(digests)} parameters{also} are those that the run ended with")


def _digests_of_buffers(artifact: Artifact, tensors: Mapping[str, torch.Tensor]) -> dict[int, str]:
    """Bucket -> the digest of the state that these buffers are, as the summary has it."""
    found = {}
    for number, bucket in enumerate(artifact.buckets):
        if any(tuple(tensors[buffer.name].shape) != buffer.shape for buffer in bucket.buffers):
            found[number] = "of another shape"
        elif bucket.buffers:
            low, high = _native.digest_of_words(number, buffer_words(bucket, tensors.__getitem__))
            found[number] = f"{low | high << 64:032x}"
    return found


def _place_of(record: Record, told: str) -> Path:
    """Where the file is now, if the directory was moved."""
    here = record.folder / Path(told).name
    return here if here.is_file() else Path(told)
