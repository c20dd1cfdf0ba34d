"""Synthetic data of keyed random numbers: every sample is a pure function of its index, and learnable.

Tokens count up in steps of 1, 2 or 3 from a random start, one in eight replaced by noise. Images are their class's
random pattern plus noise, in the layouts of `digits`.
"""

import numpy as np
import torch

from elaswave_fx.data.dataset import ArrayDataset, Arrays, Batch, Dataset, Sample
from elaswave_fx.data.digits import arrange
from elaswave_fx.data.hashing import Words, derive, mix, uniform
from elaswave_fx.data.order import Indices

_NOISE_SHARE = 0.125
_NOISE_SCALE = 0.25


class SyntheticTokens(Dataset):
    """`input_ids` and `labels`, int64 [seq_len]; labels are the next tokens."""

    def __init__(self, samples: int, seq_len: int, vocab_size: int) -> None:
        self._samples = samples
        self._seq_len = seq_len
        self._vocab_size = vocab_size

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    def __len__(self) -> int:
        return self._samples

    def arrays(self) -> Arrays:
        """These numbers only; samples run no user code."""
        numbers = np.array([self._samples, self._seq_len, self._vocab_size])
        return 1, lambda piece: {"numbers": numbers}

    def sample(self, index: int, key: int | None = None) -> Sample:
        return {name: tensor[0] for name, tensor in self.batch(np.array([index], np.int64)).items()}

    def batch(self, indices: Indices, keys: Words | None = None) -> Batch:
        rows = indices.astype(np.uint64)[:, None]
        columns = np.arange(self._seq_len + 1, dtype=np.uint64)[None, :]
        size = np.uint64(self._vocab_size)
        start = mix(rows ^ np.uint64(derive(1)))
        stride = np.uint64(1) + mix(rows ^ np.uint64(derive(2))) % np.uint64(3)
        # Modulo before adding: the sum must not wrap at 2^64.
        counted = (start % size + stride * columns) % size
        cells = mix(rows ^ np.uint64(derive(3))) ^ columns
        noisy = uniform(cells) < _NOISE_SHARE
        windows = np.where(noisy, mix(cells ^ np.uint64(derive(4))) % size, counted).astype(np.int64)
        tokens = torch.from_numpy(windows)
        return {"input_ids": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].contiguous()}


def synthetic_images(samples: int, classes: int, layout: str) -> ArrayDataset:
    """Images of 8x8 in [0, 1]; `label` is the number of the pattern."""
    indices = np.arange(samples, dtype=np.uint64)
    labels = mix(indices ^ np.uint64(derive(5))) % np.uint64(classes)
    pixels = np.arange(64, dtype=np.uint64)
    patterns = uniform(mix(labels ^ np.uint64(derive(6)))[:, None] ^ pixels)
    noise = uniform(mix(indices ^ np.uint64(derive(7)))[:, None] ^ pixels)
    mixed = np.float32(1 - _NOISE_SCALE) * patterns + np.float32(_NOISE_SCALE) * noise
    return ArrayDataset(
        {**arrange(mixed.reshape(samples, 1, 8, 8), layout), "label": labels.astype(np.int64)}, classes=classes
    )
