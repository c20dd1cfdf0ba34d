"""Batches that are loaded ahead."""

import threading

import pytest
import torch

from elaswave_fx.config.compose import load_config
from elaswave_fx.data import Batch, Prefetcher, load_batch, load_ranges, open_source
from elaswave_fx.errors import DataError


def numbered(step: int) -> Batch:
    return {"step": torch.tensor([step])}


def test_steps_in_order_and_again() -> None:
    with Prefetcher(numbered, first_step=3, last_step=9) as ahead:
        taken = [int(ahead.take(step)["step"]) for step in (3, 4, 5, 4, 5, 8, 3)]
    assert taken == [3, 4, 5, 4, 5, 8, 3]
    assert not ahead._thread.is_alive()


def test_the_last_step_is_taken_again_without_loading_it_again() -> None:
    with Prefetcher(numbered, first_step=3, last_step=9) as ahead:
        once = ahead.take(3)
        assert ahead.take(3) is once
        assert int(ahead.take(4)["step"]) == 4


def test_no_more_than_depth_ahead() -> None:
    loaded: list[int] = []
    enough = threading.Event()

    def load(step: int) -> Batch:
        loaded.append(step)
        if len(loaded) == 3:
            enough.set()
        return numbered(step)

    with Prefetcher(load, first_step=0, last_step=100, depth=2):
        assert enough.wait(30)
    assert loaded == [0, 1, 2]  # two are ready, the third waits for room


def test_loading_errors_come_out_of_take() -> None:
    broken = {5}

    def load(step: int) -> Batch:
        if step in broken:
            raise DataError("sample 7 cannot be read")
        return numbered(step)

    with Prefetcher(load, first_step=4, last_step=9) as ahead:
        assert int(ahead.take(4)["step"]) == 4
        with pytest.raises(DataError, match="sample 7 cannot be read"):
            ahead.take(5)
        with pytest.raises(DataError, match="sample 7 cannot be read"):
            ahead.take(5)
        broken.clear()
        assert int(ahead.take(5)["step"]) == 5


def test_one_may_wait_for_a_step_in_turns() -> None:
    may_load = threading.Event()

    def load(step: int) -> Batch:
        may_load.wait(30)
        return numbered(step)

    with Prefetcher(load, first_step=3, last_step=9) as ahead:
        assert not ahead.await_ready(3, 0.01) and not ahead.await_ready(3, 0.01)
        may_load.set()
        assert ahead.await_ready(3, 30)
        assert int(ahead.take(3)["step"]) == 3
        assert ahead.await_ready(3, 0.0), "the last one is kept"
        assert ahead.await_ready(7, 30) and int(ahead.take(7)["step"]) == 7


def test_closing_ends_a_thread_that_waits_for_room() -> None:
    ahead = Prefetcher(numbered, first_step=0, last_step=1000, depth=1)
    ahead.close()
    assert not ahead._thread.is_alive()


def test_ranges_are_loaded_one_after_the_other() -> None:
    source = open_source(load_config(["data=synthetic", "data.samples=50", "seq_len=8", "global_batch=10"]))
    whole = load_batch(source.dataset, source.train, 20, 10)
    parts = load_ranges(source.dataset, source.train, [range(24, 27), range(29, 30)])
    assert torch.equal(parts["labels"], whole["labels"][[4, 5, 6, 9]])
