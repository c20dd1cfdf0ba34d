"""A keyed hash of integers, vectorised: the finalizer of SplitMix64 (Steele, Lea, Flood 2014, "Fast splittable
pseudorandom number generators"). Good enough to order samples and to make up data; not for secrets, and not the
generator of a model's random draws, which is Philox.
"""

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.uint64]

_GOLDEN = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


def mix(words: Words) -> Words:
    """64 bits to 64 bits, one to one, elementwise; wraps modulo 2^64."""
    z = words + np.uint64(_GOLDEN)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def derive(*parts: int) -> int:
    """One 64-bit key from several integers; their order matters."""
    state = np.zeros(1, np.uint64)
    for part in parts:
        state = mix(state ^ np.array([part & _MASK], np.uint64))
    return int(state[0])


def uniform(words: Words) -> npt.NDArray[np.float32]:
    """Numbers in [0, 1) from the upper 24 bits of hashed words."""
    return (mix(words) >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-24)
