"""The order of samples: a permutation in every epoch, from nothing but a seed."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elaswave_fx.data.hashing import derive, mix, uniform
from elaswave_fx.data.order import HeldOutOrder, SampleOrder, permute

seeds = st.integers(0, 2**63 - 1)


@given(size=st.integers(1, 3000), key=st.integers(0, 2**64 - 1))
@settings(max_examples=150, deadline=None)
def test_permute_is_a_bijection(size: int, key: int) -> None:
    image = permute(np.arange(size, dtype=np.uint64), size, key)
    assert np.array_equal(np.sort(image), np.arange(size))


@pytest.mark.parametrize("size", [2**16 - 1, 2**16, 2**16 + 1])
def test_permute_is_a_bijection_around_a_power_of_two(size: int) -> None:
    image = permute(np.arange(size, dtype=np.uint64), size, 99)
    assert np.array_equal(np.sort(image), np.arange(size))


def test_permute_reaches_far_beyond_32_bits() -> None:
    size = 10**12 + 39
    image = permute(np.arange(10_000, dtype=np.uint64), size, 1)
    assert len(np.unique(image)) == 10_000
    assert image.max() < size
    # Uniform images have a mean of size / 2; 10 000 of them stray by 0.3 percent of the size (one sigma).
    assert abs(float(image.mean()) / size - 0.5) < 0.015


def test_permute_moves_neighbours_apart() -> None:
    image = permute(np.arange(1000, dtype=np.uint64), 1000, 5).astype(np.int64)
    assert (np.abs(np.diff(image)) == 1).sum() < 20  # two are expected
    assert abs(np.corrcoef(np.arange(1000), image)[0, 1]) < 0.15


def test_small_permutations_all_occur() -> None:
    seen = {tuple(SampleOrder(seed, 3).indices(0, 3)) for seed in range(200)}
    assert len(seen) == 6


@given(seed=seeds, size=st.integers(1, 200), first=st.integers(0, 10**12), count=st.integers(0, 300))
@settings(max_examples=100, deadline=None)
def test_any_range_is_the_same_as_its_parts(seed: int, size: int, first: int, count: int) -> None:
    order = SampleOrder(seed, size)
    whole = order.indices(first, count)
    cut = count // 3
    parts = np.concatenate([order.indices(first, cut), order.indices(first + cut, count - cut)])
    assert whole.dtype == np.int64
    assert np.array_equal(whole, parts)


def test_every_epoch_visits_every_sample_once_in_another_order() -> None:
    epochs = SampleOrder(3, 50).indices(0, 150).reshape(3, 50)
    for epoch in epochs:
        assert np.array_equal(np.sort(epoch), np.arange(50))
    assert not np.array_equal(epochs[0], epochs[1])
    assert not np.array_equal(epochs[1], epochs[2])


def test_seeds_differ() -> None:
    assert not np.array_equal(SampleOrder(0, 50).indices(0, 50), SampleOrder(1, 50).indices(0, 50))


PINNED = [4, 9, 7, 5, 1, 8, 3, 6, 2, 0, 2, 5, 4, 8, 3, 6, 1, 0, 9, 7]


def test_order_is_pinned() -> None:
    """A change of these numbers changes every run: it breaks comparison with, and resumption of, older ones."""
    assert SampleOrder(0, 10).indices(0, 20).tolist() == PINNED


def test_held_out_order_goes_round() -> None:
    assert HeldOutOrder(7, 3).indices(1, 5).tolist() == [8, 9, 7, 8, 9]


def test_mix_is_splitmix64() -> None:
    """The first outputs of SplitMix64 with seed 0, as published with the algorithm: mix(k x golden) for k = 0, 1, 2."""
    golden = np.uint64(0x9E3779B97F4A7C15)
    outputs = mix(np.arange(3, dtype=np.uint64) * golden)
    assert [hex(int(word)) for word in outputs] == ["0xe220a8397b1dcdaf", "0x6e789e6aa1b965f4", "0x6c45d188009454f"]


def test_derive_depends_on_order_and_number_of_parts() -> None:
    assert len({derive(), derive(0), derive(0, 0), derive(1, 2), derive(2, 1), derive(-1)}) == 6


def test_uniform_is_in_range() -> None:
    numbers = uniform(np.arange(10_000, dtype=np.uint64))
    assert numbers.dtype == np.float32
    assert numbers.min() >= 0
    assert numbers.max() < 1
    assert abs(float(numbers.mean()) - 0.5) < 0.02
