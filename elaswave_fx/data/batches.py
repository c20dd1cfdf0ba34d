"""Batches for a rank: the samples of its tile, loaded ahead of the step that wants them.

with Prefetcher(step_loader(dataset, order, global_batch=16, lo=0, hi=8), first_step=0, last_step=100) as ahead:
    ahead.take(0)   ->  {"input_ids": int64 (8, seq_len), …}, positions 0..7; step 1 is being loaded meanwhile
"""

import queue
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Generic, TypeVar

from elaswave_fx.data.dataset import Batch, Dataset
from elaswave_fx.data.order import Order

Loader = Callable[[int], Batch]
Loaded = TypeVar("Loaded")

_POLL_S = 0.1


def load_batch(dataset: Dataset, order: Order, first: int, count: int) -> Batch:
    """The samples at global positions [first, first + count), stacked along dimension 0."""
    return dataset.batch(order.indices(first, count))


def step_loader(dataset: Dataset, order: Order, global_batch: int, lo: int, hi: int) -> Loader:
    """A function from a step to the samples [lo, hi) of that step (step coordinates, 0..global_batch)."""
    return lambda step: load_batch(dataset, order, step * global_batch + lo, hi - lo)


class Prefetcher(Generic[Loaded]):
    """Loads the batches (or what else `load` makes) of steps [first_step, last_step) in a thread.

    At most `depth` ahead of the last one taken. One thread owns it. Steps are usually taken in order; any other step
    starts the loading anew from there. What loading raises comes out of `take`. Make it after forking, never before:
    threads do not survive a fork.
    """

    def __init__(self, load: Callable[[int], Loaded], first_step: int, last_step: int, depth: int = 2) -> None:
        assert depth >= 1
        self._load = load
        self._last_step = last_step
        self._depth = depth
        self._start(first_step)

    def take(self, step: int) -> Loaded:
        """The batch of `step`, waiting for it if need be."""
        assert step < self._last_step, f"step {step} is not before {self._last_step}"
        if step != self._next or self._failed:
            self.close()
            self._start(step)
        batch = self._ready.get()
        if isinstance(batch, BaseException):
            self._failed = True
            raise batch
        self._next += 1
        return batch

    def close(self) -> None:
        """End the thread; taking another step starts a new one."""
        self._stop.set()
        self._thread.join()
        self._next = -1

    def __enter__(self) -> "Prefetcher[Loaded]":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _start(self, step: int) -> None:
        self._next = step
        self._failed = False
        self._stop = threading.Event()
        self._ready: queue.Queue[Loaded | BaseException] = queue.Queue(self._depth)
        arguments = (step, self._stop, self._ready)
        self._thread = threading.Thread(target=self._run, args=arguments, name="prefetch", daemon=True)
        self._thread.start()

    def _run(self, step: int, stop: threading.Event, ready: "queue.Queue[Loaded | BaseException]") -> None:
        for ahead in range(step, self._last_step):
            try:
                item: Loaded | BaseException = self._load(ahead)
            except BaseException as error:  # noqa: BLE001 - not handled here: it is raised again by `take`
                item = error
            if not _put(ready, item, stop) or isinstance(item, BaseException):
                return


def _put(ready: "queue.Queue[Loaded | BaseException]", item: Loaded | BaseException, stop: threading.Event) -> bool:
    """False if told to stop before there was room."""
    while not stop.is_set():
        try:
            ready.put(item, timeout=_POLL_S)
        except queue.Full:
            continue
        return True
    return False
