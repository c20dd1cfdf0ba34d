"""Batches for a rank: the samples of its tile, prefetched.

with Prefetcher(lambda step: load_batch(dataset, order, step * 16, 8), first_step=0, last_step=100) as ahead:
    ahead.take(0)   ->  {"input_ids": int64 (8, seq_len), …}, positions 0..7; step 1 is being loaded meanwhile
"""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Generic, TypeVar

import numpy as np

from elaswave_fx.data.dataset import Batch, Dataset
from elaswave_fx.data.order import Order

Loaded = TypeVar("Loaded")


def load_batch(dataset: Dataset, order: Order, first: int, count: int) -> Batch:
    """The samples at global positions [first, first + count), stacked along dimension 0."""
    return load_ranges(dataset, order, [range(first, first + count)])


def load_ranges(dataset: Dataset, order: Order, positions: Sequence[range]) -> Batch:
    """The samples at these global positions, range by range, stacked along dimension 0."""
    indices = [order.indices(part.start, len(part)) for part in positions]
    keys = [order.keys(part.start, len(part)) for part in positions]
    return dataset.batch(np.concatenate(indices), np.concatenate(keys))


class Prefetcher(Generic[Loaded]):
    """Loads the batches (or other results of `load`) of steps [first_step, last_step) in a thread.

    It is at most `depth` steps ahead of the last step taken. One thread owns it. Steps are usually taken in order, or
    the last step again; any other step restarts the loading there. `take` raises the errors of loading. Create it after
    forking, never before: threads do not survive a fork.
    """

    def __init__(self, load: Callable[[int], Loaded], first_step: int, last_step: int, depth: int = 2) -> None:
        assert depth >= 1
        self._load = load
        self._last_step = last_step
        self._depth = depth
        self._changed = threading.Condition()
        self._last: tuple[int, Loaded] | None = None  # a failed step is replayed
        self._start(first_step)

    def await_ready(self, step: int, timeout_s: float) -> bool:
        """Wait up to `timeout_s` for `step`. Return whether `take` would return it, or raise its error, without
        waiting."""
        assert step < self._last_step, f"step {step} is not before {self._last_step}"
        if self._last is not None and self._last[0] == step:
            return True
        if step != self._next or self._failed:
            self.close()
            self._start(step)
        with self._changed:
            return self._changed.wait_for(lambda: bool(self._ready), timeout_s)

    def take(self, step: int) -> Loaded:
        """The batch of `step`, once it is loaded."""
        self.await_ready(step, threading.TIMEOUT_MAX)
        if self._last is not None and self._last[0] == step:
            return self._last[1]
        with self._changed:
            batch = self._ready.popleft()
            self._changed.notify_all()
        if isinstance(batch, _Failure):
            self._failed = True
            raise batch.error
        self._next += 1
        self._last = (step, batch)
        return batch

    def close(self) -> None:
        """End the thread after its current load; taking another step starts a new thread."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        self._thread.join()
        self._next = -1
        self._last = None

    def __enter__(self) -> "Prefetcher[Loaded]":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _start(self, step: int) -> None:
        self._next = step
        self._failed = self._stopped = False
        self._ready: deque[Loaded | _Failure] = deque()
        self._thread = threading.Thread(target=self._run, args=(step,), name="prefetch", daemon=True)
        self._thread.start()

    def _run(self, step: int) -> None:
        for ahead in range(step, self._last_step):
            try:
                item: Loaded | _Failure = self._load(ahead)
            except BaseException as error:  # noqa: BLE001 - not handled here: it is raised again by `take`
                item = _Failure(error)
            with self._changed:
                self._changed.wait_for(lambda: self._stopped or len(self._ready) < self._depth)
                if self._stopped:
                    return
                self._ready.append(item)
                self._changed.notify_all()
            if isinstance(item, _Failure):
                return


@dataclass(frozen=True)
class _Failure:
    """An error of loading."""

    error: BaseException
