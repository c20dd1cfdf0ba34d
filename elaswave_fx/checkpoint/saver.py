"""Writes checkpoints in a thread while training continues.

    saver = Saver(Target(folder, every=50, keep=2, manifest), shares, engine, links)
    saver.after_step(50)   # takes a snapshot of this rank's boxes, starts writing, reports finished checkpoints
    saver.finish(73)       # writes the last one and waits for it

Each rank writes its own file and reports it over its link to the first rank. That rank writes index and manifest,
publishes the checkpoint and removes old ones. Unchanged tensors are in a separate file, which it writes once and
hard-links into later checkpoints. At most one checkpoint is written at a time. All ranks wait for it together before
the next one, so that no step deadline runs meanwhile. A change of ranks abandons an unfinished checkpoint without a
wait; only the next checkpoint waits for its threads.
"""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from elaswave_fx import _native
from elaswave_fx.checkpoint import folder as folders
from elaswave_fx.checkpoint.disk_work import DISK_S
from elaswave_fx.checkpoint.layout import MASTER, UNCHANGED, Piece, Slice, unchanged_pieces
from elaswave_fx.checkpoint.manifest import Manifest, write_manifest
from elaswave_fx.checkpoint.storage import INDEX, ShardFiles
from elaswave_fx.errors import CheckpointError, CommError
from elaswave_fx.files import file_digest

_LOOK_S = 0.1  # how soon a rank that waits for its own disk notices that its epoch is over
_TAG = 11 << 56  # Tags of messages to the first rank; other kinds belong to steps.
Snapshot = Mapping[Slice, torch.Tensor]
"""A rank's flat tensors as they were between two steps."""


@dataclass(frozen=True)
class Target:
    """Folder and interval (in steps; 0: only the last one) of checkpoints; `manifest` lacks step and files."""

    folder: Path
    every: int
    keep: int
    manifest: Manifest


@dataclass(frozen=True)
class Links:
    """This rank and the ranks of the plan; `group` contains all of them. Their messages belong to `epoch`;
    `leave_if_over` raises CommError when it is over."""

    rank: int
    ranks: tuple[int, ...]
    epoch: int
    endpoint: _native.Endpoint
    group: _native.Group
    leave_if_over: Callable[[], None]

    @property
    def is_first(self) -> bool:
        return self.rank == self.ranks[0]


@dataclass(frozen=True)
class Saved:
    """A complete checkpoint. `copy_ms` delayed the steps, `write_ms` did not."""

    step: int
    path: Path
    bytes: int
    copy_ms: float
    write_ms: float


class Saver:
    """One rank's side of the checkpoints of a run; used by the training thread alone.

    Args:
        pieces: of every rank, in the order of `links.ranks`.
        unchanged: returns a tensor that training does not change, by name.
        report: takes the fields of a `checkpoint` event; called on the first rank.
        saved: the step of the checkpoint that the folder already contains; it is not written again.
        left: threads of earlier savers that may still write an abandoned checkpoint.
    """

    def __init__(
        self, target: Target, pieces: Sequence[tuple[Piece, ...]], engine: _native.Engine, links: Links,
        unchanged: Callable[[str], torch.Tensor], report: Callable[..., None], saved: int = 0,
        left: Sequence[threading.Thread] = (),
    ) -> None:  # fmt: skip
        self._target, self._engine, self._links = target, engine, links
        self._pieces = (*pieces, unchanged_pieces(target.manifest.contents.unchanged))
        self._unchanged = _Unchanged(len(pieces), unchanged)
        self._report = report
        self._own = pieces[links.ranks.index(links.rank)]
        self._saved = saved
        self._left = tuple(left)
        self._writing: _Writing | None = None

    def after_step(self, done: int) -> None:
        """Begin a checkpoint if one is due after `done` steps. Raises CommError if the previous one lost a peer."""
        if self._writing is not None and not self._writing.thread.is_alive():
            self._collect()
        if self._target.every and done % self._target.every == 0:
            self._save(done)

    def finish(self, done: int) -> str | None:
        """Write the last checkpoint and wait until it is complete. On failure the first rank returns the reason."""
        if done > self._saved:
            self._save(done)
        failed = self._collect() if self._writing is not None else None
        self._await_left()
        self._links.group.barrier(DISK_S)
        if self._links.is_first:
            folders.sweep(self._target.folder)
            folders.keep_newest(self._target.folder, self._target.keep)
        return failed

    def abandon(self) -> tuple[threading.Thread, ...]:
        """Abandon the unfinished checkpoint because the ranks change. Return the threads that may still write, for the
        next saver; their results are ignored."""
        writing, self._writing = self._writing, None
        if writing is None:
            return self._left
        if writing.thread.is_alive():
            self._left += (writing.thread,)
            self._report_failed(writing.step, "it was being written when the ranks changed")
        elif writing.saved is not None:
            self._report_saved(writing.saved)
        elif isinstance(writing.error, CommError | CheckpointError):
            self._report_failed(writing.step, str(writing.error))
        elif writing.error is not None:
            raise writing.error
        return self._left

    def _save(self, done: int) -> None:
        if self._writing is not None:
            self._collect()
        self._await_left()
        self._links.group.barrier(DISK_S)  # The previous checkpoint is written on all ranks.
        started = time.perf_counter()
        snapshot = self._copy()
        self._saved = done
        copy_ms = 1e3 * (time.perf_counter() - started)
        self._writing = _Writing(lambda: self._write(done, snapshot, copy_ms), done)

    def _collect(self) -> str | None:
        """Wait for the thread and report its result. Return why the checkpoint failed; a failure costs the run nothing
        unless it is the last checkpoint."""
        assert self._writing is not None
        writing = self._writing
        self._await(writing.thread)
        self._writing = None
        if isinstance(writing.error, CheckpointError):
            self._report_failed(writing.step, str(writing.error))
            return str(writing.error)
        if writing.error is not None:
            raise writing.error
        if writing.saved is not None:
            self._report_saved(writing.saved)
        return None

    def _await_left(self) -> None:
        """Wait for abandoned checkpoints: one checkpoint at a time uses memory and disk."""
        for thread in self._left:
            self._await(thread)
        self._left = ()

    def _await(self, thread: threading.Thread) -> None:
        """Wait for a thread, or raise once the epoch is over: other ranks may need this one."""
        while thread.is_alive():
            self._links.leave_if_over()
            thread.join(_LOOK_S)

    def _report_failed(self, step: int, why: str) -> None:
        if self._links.is_first:
            self._report(step=step, failed=why)

    def _report_saved(self, saved: Saved) -> None:
        self._report(
            step=saved.step,
            path=str(saved.path),
            megabytes=round(saved.bytes / 2**20, 3),
            copy_ms=round(saved.copy_ms, 3),
            write_ms=round(saved.write_ms, 3),
        )

    def _copy(self) -> Snapshot:
        """The tensors that this rank owns. Nothing is copied: updates do not modify a referenced tensor."""
        held: dict[Slice, torch.Tensor] = {}
        for piece in self._own:
            if piece.slice not in held:
                box = self._engine.read(piece.box)
                assert box is not None, f"this rank owns box {piece.box}"
                held[piece.slice] = box.master if piece.state == MASTER else box.state[piece.state]
        return held

    def _write(self, done: int, snapshot: Snapshot, copy_ms: float) -> Saved | None:
        """Write the pieces, in the thread. Return the complete checkpoint on the first rank, None on the others."""
        started = time.perf_counter()
        links = self._links
        partial = folders.partial_path(self._target.folder, done, links.epoch)
        files, others = None, []
        try:
            files = ShardFiles(partial, self._pieces, self._target.manifest.contents.key_paths())
            answer = _write_own(files, partial, snapshot, links.ranks.index(links.rank))
            if links.is_first and self._pieces[-1]:
                others = [self._unchanged.write(files, partial)]
        except (OSError, RuntimeError) as error:  # torch turns some OSErrors into RuntimeErrors.
            answer = {"error": f"rank {links.rank}: {' '.join(str(_root_of(error)).split())}"}
        if not links.is_first:
            _tell(links, answer)
            return None
        answers = [answer, *(_hear(links, rank) for rank in links.ranks[1:]), *others]
        failed = [each["error"] for each in answers if "error" in each]
        if failed or files is None:
            shutil.rmtree(partial, ignore_errors=True)  # All ranks have answered, so no rank still writes there.
            raise CheckpointError(f"checkpoint step-{done}: {failed[0]}")
        try:
            files.write_index([each["written"] for each in answers])
            path, size = self._publish(done, partial, answers)
            self._unchanged.published = path
        except OSError as error:
            raise CheckpointError(f"checkpoint step-{done}: {error}") from error
        return Saved(done, path, size, copy_ms, 1e3 * (time.perf_counter() - started))

    def _publish(self, done: int, partial: Path, answers: Sequence[Mapping[str, Any]]) -> tuple[Path, int]:
        files = {name: (size, sha) for each in answers for name, (size, sha) in each["files"].items()}
        files |= _digests(partial, [INDEX])
        write_manifest(partial, replace(self._target.manifest, step=done, files=files))
        path = folders.publish(self._target.folder, done, self._links.epoch)
        # A rollback uses the previous checkpoint until the coordinator knows this one.
        folders.keep_newest(self._target.folder, max(2, self._target.keep))
        return path, sum(size for size, _ in files.values())


def _root_of(error: BaseException) -> BaseException:
    """The OSError in the chain of an error that torch raised, or else the error itself."""
    found: BaseException | None = error
    while found is not None and not isinstance(found, OSError):
        found = found.__cause__ or found.__context__
    return found or error


class _Writing:
    """A thread and its result."""

    def __init__(self, work: Callable[[], Saved | None], step: int) -> None:
        self.step = step
        self.saved: Saved | None = None
        self.error: BaseException | None = None
        self._work = work
        self.thread = threading.Thread(target=self._run, name="checkpoint", daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            self.saved = self._work()
        except BaseException as error:  # noqa: BLE001 - not handled here: the training thread raises it
            self.error = error


class _Unchanged:
    """The part of checkpoints that training does not change: written once, then hard-linked. Raises OSError.

    `published`: the newest checkpoint of this saver. In those of other savers, with another number of ranks, the file
    of this name contains a rank's boxes.
    """

    def __init__(self, place: int, tensor_of: Callable[[str], torch.Tensor]) -> None:
        self._place, self._tensor_of = place, tensor_of
        self._answer: dict[str, Any] | None = None
        self.published: Path | None = None

    def write(self, files: ShardFiles, partial: Path) -> dict[str, Any]:
        """Write or link the file into an unfinished checkpoint; return the same fields as `_write_own`."""
        if self._answer is None or not self._linked(self._answer["files"], partial):
            written = files.write(self._place, lambda piece: self._tensor_of(piece.tensor.removeprefix(UNCHANGED)))
            self._answer = {"written": written, "files": _digests(partial, _names(partial, self._place))}
        return self._answer

    def _linked(self, names: Iterable[str], partial: Path) -> bool:
        if self.published is None:
            return False
        try:
            for name in names:
                os.link(self.published / name, partial / name)
            return True
        except OSError:  # The file system has no links, or the checkpoint was removed.
            for name in names:
                (partial / name).unlink(missing_ok=True)
            return False


def _write_own(files: ShardFiles, partial: Path, snapshot: Snapshot, place: int) -> dict[str, Any]:
    written = files.write(place, lambda piece: piece.of(snapshot[piece.slice]))
    return {"written": written, "files": _digests(partial, _names(partial, place))}


def _names(partial: Path, place: int) -> list[str]:
    return [path.name for path in partial.glob(f"__{place}_*")]


def _digests(partial: Path, names: Sequence[str]) -> dict[str, tuple[int, str]]:
    return {name: ((partial / name).stat().st_size, file_digest(partial / name)) for name in names}


def _tell(links: Links, answer: Mapping[str, Any]) -> None:
    body = torch.frombuffer(bytearray(json.dumps(answer).encode()), dtype=torch.uint8)
    size = torch.tensor([body.numel()])
    links.endpoint.wait([links.endpoint.send(links.ranks[0], _TAG, each, links.epoch) for each in (size, body)], DISK_S)


def _hear(links: Links, rank: int) -> dict[str, Any]:
    size = torch.zeros(1, dtype=torch.int64)
    links.endpoint.wait([links.endpoint.recv(rank, _TAG, size, links.epoch)], DISK_S)
    body = torch.empty(int(size), dtype=torch.uint8)
    links.endpoint.wait([links.endpoint.recv(rank, _TAG, body, links.epoch)], DISK_S)
    return json.loads(body.numpy().tobytes())
