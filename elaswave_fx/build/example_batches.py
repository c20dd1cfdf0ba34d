"""Example batches of a model before training: samples of the data that differ.

Two sentences of one length hide that a loss is a mean over the labels of its batch. The samples are therefore chosen,
among the first of training, by features that masks, paddings and labels show in: zeros, NaN and infinities,
negative numbers, the count of the last number, the first number.

    example_batches(config, source)   ->  (two granules, three granules)
"""

from __future__ import annotations

import torch

from elaswave_fx.config.keys import Config
from elaswave_fx.data import Source, load_batch

Batch = dict[str, torch.Tensor]

_EXAMINED = (16, 256)
_EXAMINED_BYTES = 16 << 20
"""Of large samples, such as images, fewer are examined: to read them takes time."""


def example_batches(config: Config, source: Source) -> tuple[Batch, Batch]:
    """Two batches of different samples and sizes, whole granules both."""
    granule = max(config.parallel.granule, 1)
    first, both = 2 * granule, 5 * granule
    few, many = _EXAMINED
    pool = load_batch(source.dataset, source.train, 0, max(both, few))
    sample = sum(tensor.nbytes for tensor in pool.values()) // max(both, few)
    examined = min(many, source.train.num_samples, _EXAMINED_BYTES // max(sample, 1))
    if examined > max(both, few):
        pool = load_batch(source.dataset, source.train, 0, examined)
    chosen = _most_different(torch.cat([_signs(tensor) for tensor in pool.values()], dim=1), both)
    return _part(pool, chosen[:first]), _part(pool, chosen[first:])


def _part(pool: Batch, chosen: list[int]) -> Batch:
    return {name: tensor[chosen] for name, tensor in pool.items()}


def _signs(tensor: torch.Tensor) -> torch.Tensor:
    """Numbers [samples, …] that characterize the samples of a field."""
    values = tensor.reshape(len(tensor), -1)
    if not values.shape[1]:
        return torch.zeros(len(tensor), 0)
    found = [(values == 0).sum(1)]
    if tensor.is_floating_point() or tensor.is_complex():
        found += [values.isnan().sum(1), values.isinf().sum(1)]
    else:
        found += [(values < 0).sum(1), (values == values[:, -1:]).sum(1), values[:, 0]]
    return torch.stack([each.double() for each in found], dim=1)


def _most_different(signs: torch.Tensor, count: int) -> list[int]:
    """`count` samples, each with the most signs that earlier ones lack."""
    chosen = [0]
    new = signs != signs[0]
    while len(chosen) < count:
        rest = new.sum(1)
        rest[chosen] = -1
        chosen.append(int(rest.argmax()))
        new &= signs != signs[chosen[-1]]
    return chosen
