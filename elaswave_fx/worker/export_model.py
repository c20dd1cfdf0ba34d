"""The end of a run: the first rank collects every logical tensor from its owners and writes the model.

owners of boxes -> flat buckets at the first rank -> model.safetensors, params_digest
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from elaswave_fx import _native
from elaswave_fx.checkpoint.initial_state import (
    InitialState,
    gather_parameters,
    params_digest,
    tensor_digest,
)
from elaswave_fx.control.store.ledger import digests_of_buckets, sum_of_digests
from elaswave_fx.plan.plan import Plan
from elaswave_fx.plan.predict.memory import per_parameter
from elaswave_fx.plan.work.box import numbered
from elaswave_fx.program.artifact import Artifact
from elaswave_fx.worker.model_file import write_model

# Kinds of tags for exporting state and its digests; other kinds belong to steps.
_TAG, _DIGEST_TAG = 7 << 56, 14 << 56


def export_model(
    artifact: Artifact, initial: InitialState, plan: Plan, rank: int, engine: _native.Engine,
    endpoint: _native.Endpoint, run_dir: Path, has_run_dir: bool, copy_mode: str, timeout_s: float,
) -> Mapping[str, Any]:  # fmt: skip
    """Export the model; all ranks of the plan call this after their last step. Return this rank's part of the summary.

    Raises CommError if a peer is lost before its part has arrived, and may then be called again; JobOver if the model
    can be written nowhere.
    """
    first = plan.ranks[0]
    engine.sync(timeout_s)
    flat = {
        index: _collect(plan, index, bucket.numel, rank, first, engine, endpoint, timeout_s)
        for index, bucket in enumerate(artifact.buckets)
    }
    state = _digests(plan, rank, engine, endpoint, timeout_s)
    if rank != first:
        return {}
    tensors = gather_parameters(artifact, initial, flat.get)
    path = write_model(run_dir, tensors, has_run_dir)
    digests = {info.name: tensor_digest(tensors[info.name]) for info in artifact.params}
    return {
        "model": str(path),
        "params_digest": params_digest(artifact, digests),
        "state_digest": f"{sum_of_digests(state.values()):032x}",
        "buckets": {str(bucket): f"{digest:032x}" for bucket, digest in state.items()},
        "memory_per_parameter": {"host": per_parameter(plan, copy_mode), "device": {}},
    }


def _digests(
    plan: Plan, rank: int, engine: _native.Engine, endpoint: _native.Endpoint, timeout_s: float
) -> dict[int, int]:
    """Return bucket -> digest of its state at the first rank, as in a ledger line of the next step."""
    first = plan.ranks[0]
    words = torch.zeros(len(plan.boxes), 2, dtype=torch.int64)
    pending = []
    for number, box in numbered(plan.boxes):
        if box.owner == rank:
            state = engine.read(number)
            assert state is not None, f"rank {rank} owns box {number}"
            words[number] = torch.tensor(state.digest, dtype=torch.uint64).view(torch.int64)
            if rank != first:
                pending.append(endpoint.send(first, _DIGEST_TAG + number, words[number]))
        elif rank == first:
            pending.append(endpoint.recv(box.owner, _DIGEST_TAG + number, words[number]))
    endpoint.wait(pending, timeout_s)
    pairs = words.view(torch.uint64).tolist()
    return digests_of_buckets(
        (box.bucket, pairs[number][0] | pairs[number][1] << 64) for number, box in numbered(plan.boxes)
    )


def _collect(
    plan: Plan,
    bucket: int,
    numel: int,
    rank: int,
    first: int,
    engine: _native.Engine,
    endpoint: _native.Endpoint,
    timeout_s: float,
) -> torch.Tensor | None:  # fmt: skip
    """Return a bucket's master copy, flat, at rank `first`."""
    flat = torch.empty(numel) if rank == first else None
    pending = []
    for number, box in numbered(plan.boxes):
        if box.bucket != bucket:
            continue
        if box.owner == rank:
            state = engine.read(number)
            assert state is not None, f"rank {rank} owns box {number}"
            master = state.master
            if flat is not None:
                flat[box.span.lo : box.span.hi] = master
            else:
                pending.append(endpoint.send(first, _TAG + number, master))
        elif flat is not None:
            pending.append(endpoint.recv(box.owner, _TAG + number, flat[box.span.lo : box.span.hi]))
    endpoint.wait(pending, timeout_s)
    return flat
