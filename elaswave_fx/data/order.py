"""The sample at each position of training: a keyed permutation that needs no memory.

In: a seed and a number of samples. Out: for a range of global positions, the indices of the samples there. Position
p = step x global_batch + i lies in data epoch p div n; each epoch is another permutation of the n samples.

    SampleOrder(seed=0, num_samples=5).indices(first=3, count=4)   ->  two of epoch 0, then two of epoch 1
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from elaswave_fx.data.hashing import Words, derive, mix

Indices = npt.NDArray[np.int64]

_ROUNDS = 8
_KEYS = 0x6B657973
_SPLIT = 0x73706C69
"""Separates the seeds of keys and of the split from those of permutations."""


class Order(Protocol):
    """Positions to sample indices."""

    @property
    def num_samples(self) -> int: ...

    def indices(self, first: int, count: int) -> Indices:
        """The sample indices at positions [first, first + count)."""
        ...

    def keys(self, first: int, count: int) -> Words:
        """A key for each of these positions, for draws that differ at every use of a sample."""
        ...


@dataclass(frozen=True)
class Shuffle:
    """A keyed permutation of all `num_samples` samples of a dataset: its first places train, its last are held out."""

    seed: int
    num_samples: int

    def indices(self, places: Indices) -> Indices:
        key = derive(self.seed, _SPLIT)
        return permute(places.astype(np.uint64), self.num_samples, key).astype(np.int64)


@dataclass(frozen=True)
class SampleOrder:
    """An order that is shuffled anew in every data epoch. Each epoch visits each sample at the first `num_samples`
    places once: places of `shuffle`, or of the dataset itself."""

    seed: int
    num_samples: int
    shuffle: Shuffle | None = None

    def samples(self, places: Indices) -> Indices:
        """The training samples at places 0..num_samples-1."""
        return places if self.shuffle is None else self.shuffle.indices(places)

    def indices(self, first: int, count: int) -> Indices:
        positions = np.arange(first, first + count, dtype=np.int64)
        epochs, places = np.divmod(positions, self.num_samples)
        result = np.empty(count, np.int64)
        for epoch in np.unique(epochs):
            here = epochs == epoch
            key = derive(self.seed, int(epoch))
            result[here] = permute(places[here].astype(np.uint64), self.num_samples, key).astype(np.int64)
        return self.samples(result)

    def keys(self, first: int, count: int) -> Words:
        """A different key at every position, so in every data epoch."""
        return mix(np.arange(first, first + count, dtype=np.uint64) ^ np.uint64(derive(self.seed, _KEYS)))


@dataclass(frozen=True)
class HeldOutOrder:
    """The samples at places first_place..first_place+num_samples-1 of `shuffle`, or of the dataset itself, in that
    order, cyclically."""

    first_place: int
    num_samples: int
    shuffle: Shuffle | None = None

    def indices(self, first: int, count: int) -> Indices:
        places = self.first_place + np.arange(first, first + count, dtype=np.int64) % self.num_samples
        return places if self.shuffle is None else self.shuffle.indices(places)

    def keys(self, first: int, count: int) -> Words:
        """Each sample's fixed key: every evaluation sees the same."""
        return keys_of(self.indices(first, count))


def keys_of(indices: Indices) -> Words:
    """Keys that depend on the samples only."""
    return mix(indices.astype(np.uint64))


def key_of(index: int) -> int:
    return int(keys_of(np.array([index]))[0])


def permute(places: Words, size: int, key: int) -> Words:
    """The images of `places` (each below `size`) under the permutation of 0..size-1 that `key` names.

    A Feistel network over the bits of `size` (Luby, Rackoff 1988) permutes the next power of two; cycle walking (Black,
    Rogaway 2002, "Ciphers with arbitrary finite domains") repeats it until the image is below `size`: fewer than two
    rounds on average.
    """
    bits = max(2, (size - 1).bit_length())
    turn_keys = mix(np.uint64(key) ^ mix(np.arange(_ROUNDS, dtype=np.uint64)))
    image = _feistel(places, bits, turn_keys)
    outside = image >= size
    while outside.any():
        image[outside] = _feistel(image[outside], bits, turn_keys)
        outside = image >= size
    return image


def _feistel(words: Words, bits: int, turn_keys: Words) -> Words:
    """A permutation of 0..2^bits-1; the halves differ by a bit if `bits` is odd, and are changed alternately."""
    right_bits = bits // 2
    left_bits = np.uint64(bits - right_bits)
    right_mask = np.uint64((1 << right_bits) - 1)
    left_mask = np.uint64((1 << int(left_bits)) - 1)
    left, right = words >> np.uint64(right_bits), words & right_mask
    for turn, turn_key in enumerate(turn_keys):
        if turn % 2:
            right = right ^ (mix(left ^ turn_key) & right_mask)
        else:
            left = left ^ (mix(right ^ turn_key) & left_mask)
    return (left << np.uint64(right_bits)) | right
