"""Draws from the generators that a whole process shares, which an augmentation that is rarely seen gives away.

    global_draws(lambda: dataset[0])   ->  ["torch's generator"], where a sample is flipped if torch.rand(1) < 0.5

A generator that is seeded anew before each draw, as by torch.manual_seed(index), gives the same numbers to everybody.
"""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable

import numpy as np
import torch

_SEEDS = (1, 2)


def global_draws(read: Callable[[], object]) -> list[str]:
    """The shared generators from which `read` draws. All are as before afterwards."""
    torchs, pythons, numpys = torch.get_rng_state(), random.getstate(), np.random.get_state()
    ends = []
    try:
        for seed in _SEEDS:
            torch.manual_seed(seed)
            random.seed(seed)
            np.random.seed(seed)
            begin = _states()
            read()
            ends.append({name: state for name, state in _states().items() if state != begin[name]})
    finally:
        torch.set_rng_state(torchs)
        random.setstate(pythons)
        np.random.set_state(numpys)
    return [name for name, state in ends[0].items() if name in ends[1] and ends[1][name] != state]


def _states() -> dict[str, object]:
    return {
        "torch's generator": torch.get_rng_state().numpy().tobytes(),
        "Python's generator (module random)": random.getstate(),
        "NumPy's generator (numpy.random)": pickle.dumps(np.random.get_state()),
    }
