"""Draws from generators shared by a process, which also reveal rarely taken augmentations.

    global_draws(lambda: dataset[0])   ->  ["torch's generator"], where a sample is flipped if torch.rand(1) < 0.5

A generator seeded before each draw, as by torch.manual_seed(index), gives the same numbers on every rank.
"""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch

from elaswave_fx.errors import DataError

_SEEDS = (1, 2)


def refuse_global_draws(read: Callable[[], object], place: str, index: int, cure: str) -> None:
    """Raise DataError if reading sample `index` of `place` draws from a shared generator; `cure` is the remedy."""
    drawn = global_draws(read)
    if drawn:
        raise DataError(f"{place}: sample {index} draws from {drawn[0]}, and may be another one later, {again(cure)}")


def again(cure: str) -> str:
    """The end of a refusal of samples that differ between reads."""
    return f"but a step that is done again has to see the same samples; a way out is {cure}"


def seed_all(seed: int) -> None:
    """Seed the shared generators."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed the shared generators, and restore them afterwards."""
    torchs, pythons, numpys = torch.get_rng_state(), random.getstate(), np.random.get_state()
    try:
        seed_all(seed)
        yield
    finally:
        torch.set_rng_state(torchs)
        random.setstate(pythons)
        np.random.set_state(numpys)


def global_draws(read: Callable[[], object]) -> list[str]:
    """The shared generators from which `read` draws; they are restored afterwards."""
    ends = []
    for seed in _SEEDS:
        with seeded(seed):
            begin = generator_states()
            read()
            ends.append({name: state for name, state in generator_states().items() if state != begin[name]})
    return [name for name, state in ends[0].items() if name in ends[1] and ends[1][name] != state]


def generator_states() -> dict[str, object]:
    """States of the shared generators by name, for comparison."""
    return {
        "torch's generator": torch.get_rng_state().numpy().tobytes(),
        "Python's generator (module random)": random.getstate(),
        "NumPy's generator (numpy.random)": pickle.dumps(np.random.get_state()),
    }
