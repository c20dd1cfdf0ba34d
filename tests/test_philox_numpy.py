"""The independent Philox of the tests: published vectors and the layout of draws."""

import numpy as np
import pytest

from tests.philox_numpy import draw_words, dropout_factor, philox, sample_keys, uniform

# Random123, tests/kat_vectors, lines `philox4x32 10`.
VECTORS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "expected"), VECTORS)
def test_random123_vectors(counter, key, expected):
    assert tuple(int(word) for word in philox(counter, key)) == expected


def test_keys_depend_on_seed_position_and_unit_only():
    keys = sample_keys(seed=7, first=10, count=6, unit=3)
    assert np.array_equal(keys[2:5], sample_keys(7, 12, 3, 3))
    others = [sample_keys(8, 10, 6, 3), sample_keys(7 + 2**32, 10, 6, 3), sample_keys(7, 10 + 2**32, 6, 3)]
    for other in [*others, sample_keys(7, 10, 6, 4)]:
        assert not np.intersect1d(keys, other).size
    assert len(set(keys.tolist())) == 6


def test_a_draw_does_not_depend_on_the_samples_beside_it():
    keys = sample_keys(1, 0, 5, 0)
    whole = draw_words(keys, (5, 3, 7), op=2, axis=0)
    assert np.array_equal(whole[1:4], draw_words(keys[1:4], (3, 3, 7), op=2, axis=0))


def test_the_axis_only_says_where_the_samples_lie():
    """A sample's elements are numbered without the sample index, wherever that index is and whatever is fused to it."""
    keys = sample_keys(1, 0, 4, 0)
    first = draw_words(keys, (4, 6, 5), op=0, axis=0)
    assert np.array_equal(first.reshape(24, 5), draw_words(keys, (24, 5), op=0, axis=0, period=6))
    assert np.array_equal(np.moveaxis(first, 0, 1), draw_words(keys, (6, 4, 5), op=0, axis=1))
    alone = draw_words(keys[:1], (6, 5), op=0, axis=-1)
    assert np.array_equal(alone, first[0])


def test_words_follow_the_counter():
    keys = sample_keys(3, 0, 1, 0)
    key = int(keys[0])
    block = philox((2, 0, 9, 0x454C5732), (key & 0xFFFFFFFF, key >> 32))
    assert np.array_equal(draw_words(keys, (1, 12), op=9, axis=0)[0, 8:], block)


def test_uniform_is_in_range_and_dropout_keeps_the_mean():
    keys = sample_keys(5, 0, 16, 0)
    drawn = uniform(keys, (16, 4096), op=0, axis=0)
    assert drawn.min() >= 0.0 and drawn.max() < 1.0
    assert abs(float(drawn.mean()) - 0.5) < 0.01
    factor = dropout_factor(keys, (16, 4096), 0.25, op=0, axis=0)
    assert set(np.unique(factor)) == {np.float32(0.0), np.float32(1.0 / 0.75)}
    assert np.array_equal(factor > 0, drawn >= 0.25)
