"""Keyed random numbers in numpy, written from the published algorithm and apart from the native kernels.

Philox 4x32-10: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011, section 4.3. The
keys of samples and the layout of a draw are those of the library: a draw is a function of (seed, position of the
sample, unit, op, element of the sample) and of nothing else.
"""

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.uint32]
Keys = npt.NDArray[np.uint64]

_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (0x9E3779B9, 0xBB67AE85)
_LOW = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)
_KEY_DOMAIN = 0x454C5731
_DRAW_DOMAIN = 0x454C5732


def philox(counter: Sequence[npt.ArrayLike], key: Sequence[npt.ArrayLike]) -> Words:
    """Philox 4x32-10 of four counter words and two key words (each an array or a number); shape (..., 4)."""
    c0, c1, c2, c3 = (np.asarray(word, dtype=np.uint64) for word in counter)
    k0, k1 = (np.asarray(word, dtype=np.uint64) for word in key)
    for round_index in range(10):
        if round_index > 0:
            k0 = (k0 + np.uint64(_WEYL[0])) & _LOW
            k1 = (k1 + np.uint64(_WEYL[1])) & _LOW
        product0, product1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            (product1 >> _SHIFT) ^ c1 ^ k0,
            product1 & _LOW,
            (product0 >> _SHIFT) ^ c3 ^ k1,
            product0 & _LOW,
        )
    return np.stack(np.broadcast_arrays(c0, c1, c2, c3), axis=-1).astype(np.uint32)


def sample_keys(seed: int, first: int, count: int, unit: int) -> Keys:
    """The 64-bit keys of the samples at positions first..first+count-1 for draws of `unit`; shape (count,)."""
    positions = np.arange(first, first + count, dtype=np.uint64)
    words = philox(
        (positions & _LOW, positions >> _SHIFT, unit, _KEY_DOMAIN), (seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF)
    ).astype(np.uint64)
    return words[:, 0] | (words[:, 1] << _SHIFT)


def step_keys(seed: int, step: int, unit: int) -> Keys:
    """The one key of draws that belong to no sample; the top bit of the unit sets it apart from all samples' keys."""
    return sample_keys(seed, step, 1, unit | 0x80000000)


def draw_words(keys: Keys, size: Sequence[int], op: int, axis: int, period: int = 1) -> Words:
    """One 32-bit word for every element of a tensor of `size`.

    Dimension `axis` holds keys.size samples of `period` entries each; axis -1: the tensor belongs to no sample and
    there is one key. The elements of a sample are numbered row-major.
    """
    size = tuple(size)
    samples = len(keys)
    if axis < 0:
        assert samples == 1, f"a draw without a sample axis has one key, not {samples}"
        return _words_of_samples(keys, math.prod(size), op).reshape(size)
    assert size[axis] == samples * period, f"dimension {axis} of {size} does not hold {samples} samples of {period}"
    per_sample = (*size[:axis], period, *size[axis + 1 :])
    words = _words_of_samples(keys, math.prod(per_sample), op).reshape(samples, *per_sample)
    return np.moveaxis(words, 0, axis).reshape(size)


def _words_of_samples(keys: Keys, elements: int, op: int) -> Words:
    blocks = np.arange((elements + 3) // 4, dtype=np.uint64)
    key = (keys & _LOW)[:, None], (keys >> _SHIFT)[:, None]
    words = philox((blocks & _LOW, blocks >> _SHIFT, op, _DRAW_DOMAIN), key)
    return words.reshape(len(keys), -1)[:, :elements]


def uniform(keys: Keys, size: Sequence[int], op: int, axis: int, period: int = 1) -> npt.NDArray[np.float32]:
    """Uniform numbers in [0, 1), multiples of 2**-24."""
    return (draw_words(keys, size, op, axis, period) >> np.uint32(8)).astype(np.float32) * np.float32(2.0**-24)


def dropout_factor(
    keys: Keys, size: Sequence[int], p: float, op: int, axis: int, period: int = 1
) -> npt.NDArray[np.float32]:
    """What dropout multiplies by: 0 with probability `p`, else 1 / (1 - p)."""
    kept = uniform(keys, size, op, axis, period).astype(np.float64) >= p
    return (kept / (1.0 - p)).astype(np.float32)
