"""Generators of Python and NumPy: their states, and states that draw the least or the most.

    steer(PYTHONS, "lowest")    ->  random.random() is 0.0
    steer(NUMPYS, "highest")    ->  np.random.rand() is 1 - 2**-53
    steer(PYTHONS, "seed 3")    ->  as after random.seed(3)

At least one of them takes a branch that is taken once in a thousand draws.
"""

from __future__ import annotations

import copy
import random
from typing import Any

import numpy as np

PYTHONS: random.Random = random._inst  # type: ignore[attr-defined]
"""The generator behind the functions of `random`."""
NUMPYS: np.random.RandomState = np.random.mtrand._rand  # type: ignore[attr-defined]
"""The generator behind the functions of `numpy.random`."""
DRAWS = ("lowest", "highest", "seed 1", "seed 2", "seed 3", "seed 4")
"""Draws that a generator can be set to."""

_WORDS = 624
_EXTREME = 256
"""Number of least or most words; the following ones end loops that wait for another draw."""


def is_generator(value: Any) -> bool:
    return isinstance(value, (random.Random, np.random.RandomState, np.random.Generator))


def can_be_steered(value: Any) -> bool:
    """False for algorithms other than the Mersenne Twister, which cannot be set to given draws."""
    if isinstance(value, (np.random.Generator, random.SystemRandom)):
        return False
    return not isinstance(value, np.random.RandomState) or generator_state(value)[0] == "MT19937"


def generator_state(generator: Any) -> Any:
    if isinstance(generator, random.Random):
        return None if isinstance(generator, random.SystemRandom) else generator.getstate()
    if isinstance(generator, np.random.RandomState):
        return generator.get_state()
    return copy.deepcopy(generator.bit_generator.state)


def set_generator_state(generator: Any, state: Any) -> None:
    if isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    elif isinstance(generator, np.random.RandomState):
        generator.set_state(state)
    elif state is not None:
        generator.setstate(state)


def steer(generator: Any, draws: str) -> None:
    words = _words(draws)
    if isinstance(generator, np.random.RandomState):
        generator.set_state(("MT19937", np.array(words, dtype=np.uint32), 0, 0, 0.0))
    else:
        generator.setstate((3, (*words, 0), None))


def _words(draws: str) -> list[int]:
    """A state of the Mersenne Twister, whose words are drawn in order after tempering."""
    others = random.Random(draws)
    words = [others.getrandbits(32) for _ in range(_WORDS)]
    if draws in ("lowest", "highest"):
        words[:_EXTREME] = [0 if draws == "lowest" else _untempered(0xFFFFFFFF)] * _EXTREME
    return words


def _untempered(drawn: int) -> int:
    """The word that is drawn as `drawn` (Matsumoto and Nishimura 1998, the tempering backwards)."""
    word = drawn ^ (drawn >> 18)
    word ^= (word << 15) & 0xEFC60000
    seven = word
    for _ in range(5):
        seven = word ^ ((seven << 7) & 0x9D2C5680)
    eleven = seven
    for _ in range(3):
        eleven = seven ^ (eleven >> 11)
    return eleven & 0xFFFFFFFF
