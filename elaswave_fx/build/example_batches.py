"""Example batches of a model before training: samples of the data that differ.

Two sentences of one length hide that a loss is a mean over the labels of its batch. The samples are therefore chosen,
among the first of training, by features that masks, paddings and labels show in: zeros, NaN and infinities,
negative numbers, the count of the last number, the first number.

    example_batches(config, source)            ->  (two granules, three granules)
    first_calls(model, batches, granule)       ->  the same, or (one granule, one granule) where forward runs on no more
"""

from __future__ import annotations

import time

import torch
from torch import nn

from elaswave_fx.config.keys import Config
from elaswave_fx.data import Source, load_batch
from elaswave_fx.program.batch_run import count_samples
from elaswave_fx.program.many_calls import ManyCalls

Batch = dict[str, torch.Tensor]

_EXAMINED_FIRST, _EXAMINED_MOST = 16, 256
_EXAMINED_BYTES, _EXAMINED_S = 16 << 20, 0.5
"""Limits of size and reading time, beyond which only the first samples are examined."""


def example_batches(config: Config, source: Source) -> tuple[Batch, Batch]:
    """Two batches of different samples and sizes, whole granules both."""
    granule = max(config.parallel.granule, 1)
    first, both = 2 * granule, 5 * granule
    few = max(both, _EXAMINED_FIRST)
    began_s = time.perf_counter()
    pool = load_batch(source.dataset, source.train, 0, few)
    sample_s = (time.perf_counter() - began_s) / few
    sample_bytes = sum(tensor.nbytes for tensor in pool.values()) // few
    many = min(_EXAMINED_MOST, source.train.num_samples, _EXAMINED_BYTES // max(sample_bytes, 1))
    if many > few and many * sample_s < _EXAMINED_S:
        rest = load_batch(source.dataset, source.train, few, many - few)
        pool = {name: torch.cat([tensor, rest[name]]) for name, tensor in pool.items()}
    chosen = _most_different(torch.cat([_signs(tensor) for tensor in pool.values()], dim=1), both)
    return _part(pool, chosen[:first]), _part(pool, chosen[first:])


def first_calls(model: nn.Module, batches: tuple[Batch, Batch], granule: int) -> tuple[tuple[Batch, Batch], ManyCalls]:
    """The batches, or the first granule of each if the model runs on each granule alone, but not on several: it may
    hold a state or a mask for so many samples. And the call of the first batch, with which later ones are compared.

    Parameters and buffers are restored; other state is for the caller to restore.
    """
    calls = ManyCalls(model, batches[0])
    if granule == 1 or calls.runs:
        return batches, calls
    (first, *rest), (other, *more) = (_granules(batch, granule) for batch in batches)
    single = ManyCalls(model, first)
    if single.runs and all(ManyCalls(model, each).runs for each in (*rest, other, *more)):
        return (first, other), single
    return batches, calls


def _granules(batch: Batch, granule: int) -> list[Batch]:
    starts = range(0, count_samples(batch), granule)
    return [{name: tensor[at : at + granule].clone() for name, tensor in batch.items()} for at in starts]


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
