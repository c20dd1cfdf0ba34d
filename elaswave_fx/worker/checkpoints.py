"""Checkpoints for the worker and the builder: their contents, writing them, resuming from one.

builder   contents = contents_of(…); check_start(start, contents, config)    refuses before workers start
joiner    check_reach(config, context)                                       refuses before it is a member
worker    restore(…) once, then Checkpoints.after_step(…) after every step and finish(…) at the end
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from elaswave_fx import _native
from elaswave_fx.checkpoint.folder import MANIFEST, bears, mark, sweep
from elaswave_fx.checkpoint.initial_state import InitialState, tensor_digest
from elaswave_fx.checkpoint.layout import (
    MASTER,
    UNCHANGED,
    Piece,
    Slice,
    frozen_parameters,
    logical_tensors,
    owned_pieces,
    wanted_pieces,
)
from elaswave_fx.checkpoint.manifest import (
    Contents,
    Manifest,
    check_model,
    other_buffers,
    plain_config,
    read_manifest,
)
from elaswave_fx.checkpoint.start import Start, checkpoint_folder
from elaswave_fx.config.keys import Config
from elaswave_fx.data import Dataset, Source
from elaswave_fx.data.order import Indices
from elaswave_fx.errors import ConfigError
from elaswave_fx.launch.job import WorkerContext
from elaswave_fx.observe.rank_events import CheckpointWritten
from elaswave_fx.optim.optimizer import Optimizer
from elaswave_fx.plan.plan import Plan
from elaswave_fx.program.artifact import Artifact

_PROBED_SAMPLES = 16


def contents_of(
    artifact: Artifact, key: str, initial: InitialState, optimizer: Optimizer, source: Source,
    fingerprint: Mapping[str, str], state_dict: Mapping[str, str],
) -> Contents:  # fmt: skip
    """The contents of this run's checkpoints. `state_dict`: key of the model's own -> our name."""

    def digests(names: Iterable[str]) -> dict[str, str]:
        return {name: hashlib.sha256(tensor_digest(initial.tensor(name))).hexdigest() for name in names}

    frozen = digests(frozen_parameters(artifact))
    tensors = logical_tensors(artifact, _state_tensors(optimizer))
    changed = {name.partition("/")[2]: name for name in tensors if not name.startswith("optimizer/")}
    read = {binding[1] for unit in artifact.units for binding in unit.inputs if binding[0] == "buffer"}
    unchanged = [name for name in state_dict.values() if name not in changed]
    return Contents(
        program=key,
        tensors=tensors,
        frozen=frozen,
        samples=source.train.num_samples,
        data_digest=data_digest(source),
        fingerprint=fingerprint,
        state_dict={key: changed.get(name, f"{UNCHANGED}{name}") for key, name in state_dict.items()},
        unchanged={f"{UNCHANGED}{name}": initial.described(name) for name in unchanged},
        buffers=digests(name for name in unchanged if name in read),
    )


def check_start(start: Start, contents: Contents, config: Config) -> tuple[str, ...]:
    """Refuse a checkpoint of another model, optimizer or data. Return lines for the user. Raises ConfigError."""
    if start.path is None:
        return ()
    manifest = read_manifest(start.path)
    check_model(manifest, contents, config, start.path)
    others = other_buffers(manifest, contents)
    more = f" and {len(others) - 1} more" if len(others) > 1 else ""
    lines = (
        (f"buffer {others[0]}{more}: the model's constructor makes other values than in that run",) if others else ()
    )
    if manifest.contents.program == contents.program:
        return lines
    return (
        *lines,
        f"the program is {contents.program}, that of the checkpoint was {manifest.contents.program}: code or values "
        "of the model, its options or a version have changed since",
    )


def restore(
    path: Path, artifact: Artifact, plan: Plan, rank: int, optimizer: Optimizer, engine: _native.Engine
) -> None:
    """Load a rank's boxes from a checkpoint. Working copies must be refreshed afterwards."""
    from elaswave_fx.checkpoint.storage import read_pieces

    found: dict[Slice, torch.Tensor] = {}

    def target(piece: Piece) -> torch.Tensor:
        if piece.slice not in found:
            found[piece.slice] = torch.zeros(len(plan.boxes[piece.box].span))  # gaps between buffers are never read
        return piece.of(found[piece.slice])

    read_pieces(path, read_manifest(path), wanted_pieces(artifact, plan, rank, _state_tensors(optimizer)), target)
    for box, state in found:
        if state == MASTER:
            states = (found.get((box, number)) for number in range(_state_tensors(optimizer)))
            engine.load(box, found[box, MASTER], [state for state in states if state is not None])


class Checkpoints:
    """The training loop's interface to checkpoints; no-op for a run without them."""

    def __init__(
        self, config: Config, context: WorkerContext, artifact: Artifact, initial: InitialState, plan: Plan,
        optimizer: Optimizer, engine: _native.Engine, endpoint: _native.Endpoint, group: _native.Group,
        leave_if_over: Callable[[], None], before: Checkpoints | None,
    ) -> None:  # fmt: skip
        """`leave_if_over` raises CommError once the epoch of `plan` is over. `before`: abandoned, of the last epoch."""
        self._saver, self._left = None, () if before is None else before._left
        folder = checkpoint_folder(config, context.run_dir)
        if folder is None:
            return
        from elaswave_fx.checkpoint.saver import Links, Saver, Target  # most runs need not import DCP

        ranks = tuple(int(rank) for rank in plan.ranks)
        links = Links(context.rank, ranks, int(plan.epoch), endpoint, group, leave_if_over)
        if links.is_first:
            sweep(folder)  # before any rank's first step, hence before any write of this epoch
        contents = msgspec.convert(context.build.data.contents, Contents)
        manifest = Manifest(0, str(context.run_dir), plain_config(config), contents, {})
        pieces = tuple(owned_pieces(artifact, plan, rank, _state_tensors(optimizer)) for rank in ranks)
        target = Target(folder, config.checkpoint.every, config.checkpoint.keep, manifest)
        resumed = context.build.data.resume_from
        saved = context.build.data.first_step if resumed and Path(resumed).parent == folder else 0

        def report(**fields: Any) -> None:
            context.report_event(CheckpointWritten(**fields), plan.epoch)

        self._saver = Saver(target, pieces, engine, links, initial.tensor, report, saved, self._left)

    def after_step(self, done: int) -> None:
        """Begin a checkpoint if one is due after `done` committed steps."""
        if self._saver is not None:
            self._saver.after_step(done)

    def abandon(self) -> None:
        """Abandon the unfinished checkpoint because the ranks change; does not wait for a disk."""
        if self._saver is not None:
            self._left = self._saver.abandon()

    def finish(self, done: int) -> str | None:
        """Wait for the last checkpoint; on the first rank, return why it failed, if it did."""
        return self._saver.finish(done) if self._saver is not None else None


def start_fields(start: Start, contents: Contents, config: Config) -> Mapping[str, Any]:
    """Return checkpoint data for workers, as JSON. Raises ConfigError if `checkpoint.dir` cannot be written."""
    return {
        "mark": _marked(Path(config.checkpoint.dir)) if config.checkpoint.dir is not None else None,
        "first_step": start.step,
        "resume_from": str(start.path) if start.path is not None else None,
        "contents": dataclasses.asdict(contents),
    }


def _marked(folder: Path) -> str:
    try:
        return mark(folder)
    except OSError as error:
        raise ConfigError(f"checkpoint.dir={folder}: cannot be written ({error.strerror})") from error


def check_reach(config: Config, context: WorkerContext) -> None:
    """Refuse to join without access to the job's checkpoints, whose parts each rank writes and, in a rollback, reads.
    Raises ConfigError."""
    data = context.build.data
    folder = checkpoint_folder(config, context.run_dir)
    if folder is not None:
        of_run = config.checkpoint.dir is None
        is_here = context.has_run_dir if of_run else data.mark is not None and bears(folder, data.mark)
        if not is_here or not os.access(folder if folder.is_dir() else folder.parent, os.W_OK | os.X_OK):
            raise ConfigError(f"{folder}: the job's checkpoints go there, and this process cannot write to that folder")
    resumed = data.resume_from
    if resumed is not None and Path(resumed).parent != folder and not (Path(resumed) / MANIFEST).is_file():
        raise ConfigError(f"{resumed}: the job has begun with this checkpoint, which is not to be found from here")


def _state_tensors(optimizer: Optimizer) -> int:
    return len(optimizer.init(torch.zeros(1)))


def check_opened_alike(source: Source, context: WorkerContext) -> None:
    """Refuse data that differs between processes, such as data shuffled without a seed. Raises ConfigError."""
    built = context.build.data.samples
    if built is not None and opened_digest(source) != built:
        raise ConfigError(
            f"data: rank {context.rank} has other samples than the process that built the model, both from the same "
            "class and options: it is made by random numbers without a seed, by a generator that goes on with every "
            "read, or its files have changed; a way out is a seed of its own, as in numpy.random.default_rng(0), or "
            "__getitem__(self, index, key), drawing from np.random.default_rng(key)"
        )


def opened_digest(source: Source) -> str:
    """Digest of a few training samples and a few of `eval.data`."""
    if not source.has_eval_data or not source.eval_batches:
        return data_digest(source)
    held_out = source.held_out.indices(0, min(_PROBED_SAMPLES, source.held_out.num_samples))
    return data_digest(source) + _digest_of(source.evaluation, held_out)


def data_digest(source: Source) -> str:
    """Digest of a few training samples, evenly spread: cheap to compare, and seldom equal by chance."""
    places = np.unique(np.linspace(0, source.train.num_samples - 1, _PROBED_SAMPLES).astype(np.int64))
    return _digest_of(source.dataset, source.train.samples(places))


def _digest_of(dataset: Dataset, indices: Indices) -> str:
    total = hashlib.sha256()
    for name, tensor in sorted(dataset.batch(indices).items()):
        total.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        total.update(tensor_digest(tensor))
    return total.hexdigest()
