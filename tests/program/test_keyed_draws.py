"""keys: the library's keyed operators agree with the published algorithm, written apart in numpy."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from elaswave_fx.program.keyed_draws import keyed_dropout, keyed_normal, keyed_uniform, sample_keys
from tests import philox_numpy


def as_words(keys: torch.Tensor) -> philox_numpy.Keys:
    return keys.numpy().view(np.uint64)


def test_sample_keys() -> None:
    keys = sample_keys(seed=2**40 + 7, first=2**33, count=5, unit=3)
    assert np.array_equal(as_words(keys), philox_numpy.sample_keys(2**40 + 7, 2**33, 5, 3))
    assert torch.equal(keys[2:4], sample_keys(2**40 + 7, 2**33 + 2, 2, 3))


@pytest.mark.parametrize(
    ("size", "axis", "period"), [((3, 7, 5), 0, 1), ((7, 3, 5), 1, 1), ((6, 5), 0, 2), ((4, 5), -1, 1)]
)
def test_draws_of_a_sample(size: tuple[int, ...], axis: int, period: int) -> None:
    keys = sample_keys(1, 0, 1 if axis < 0 else 3, 0)
    ours = keyed_uniform(keys, size, 2, axis, period, dtype=torch.float32, device=torch.device("cpu"))
    assert np.array_equal(ours.numpy(), philox_numpy.uniform(as_words(keys), size, 2, axis, period))
    dropped = keyed_dropout(torch.ones(size), keys, 0.3, 2, axis, period)
    factor = philox_numpy.dropout_factor(as_words(keys), size, 0.3, 2, axis, period)
    assert np.array_equal(dropped.numpy(), factor)


def test_dropout_is_linear_and_its_own_derivative() -> None:
    keys = sample_keys(1, 0, 4, 0)
    x = torch.randn(4, 9, requires_grad=True)
    keyed_dropout(x, keys, 0.5, 0, 0, 1).sum().backward()
    assert torch.equal(x.grad, keyed_dropout(torch.ones(4, 9), keys, 0.5, 0, 0, 1))


def test_normal_draws() -> None:
    keys = sample_keys(1, 0, 100, 0)
    drawn = keyed_normal(keys, (100, 200), 0, 0, 1, dtype=torch.float32, device=torch.device("cpu"))
    assert abs(float(drawn.mean())) < 0.03 and abs(float(drawn.std()) - 1) < 0.03
