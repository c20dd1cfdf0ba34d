"""Samples for language models: windows of a stream of tokens.

In: a stream (an array, a memory-mapped file, several of them in a row). Out: `TokenDataset`: sample i is the window
of `seq_len` tokens from i x seq_len, and its labels, the same window one token later:

    TokenDataset(ArrayTokens([7, 8, 9, 10, 11]), seq_len=2, …).sample(1)
      ->  {"input_ids": [9, 10], "labels": [10, 11]}
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch

from elaswave_fx.data.dataset import PIECE_BYTES, Arrays, Batch, Dataset, Sample
from elaswave_fx.data.hashing import Words
from elaswave_fx.data.order import Indices
from elaswave_fx.data.tokenizer import Tokenizer
from elaswave_fx.errors import DataError

_SCAN = 1 << 24
"""Tokens per block in the search for the largest id."""

_PROBE, _PROBES = 1 << 15, 64
"""Tokens per probe, and number of probes, before training starts."""


class TokenStream(Protocol):
    def __len__(self) -> int: ...

    def read(self, start: int, stop: int) -> np.ndarray:
        """Tokens [start, stop), any integer type."""
        ...


class ArrayTokens:
    """A stream in one array, in memory or memory-mapped."""

    def __init__(self, tokens: np.ndarray) -> None:
        self._tokens = tokens

    def __len__(self) -> int:
        return len(self._tokens)

    def read(self, start: int, stop: int) -> np.ndarray:
        return self._tokens[start:stop]


class PiecedTokens:
    """A stream of pieces anywhere in one array: piece i is `lengths[i]` tokens from `starts[i]`."""

    def __init__(self, tokens: np.ndarray, starts: np.ndarray, lengths: np.ndarray) -> None:
        self._tokens = tokens
        self._starts = starts
        self._ends = np.cumsum(lengths, dtype=np.int64)  # positions in the stream

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def read(self, start: int, stop: int) -> np.ndarray:
        parts: list[np.ndarray] = [self._tokens[:0]]
        piece = int(np.searchsorted(self._ends, start, side="right"))
        while start < stop:
            begin = int(self._ends[piece - 1]) if piece else 0
            end = min(stop, int(self._ends[piece]))
            offset = int(self._starts[piece]) + start - begin
            parts.append(self._tokens[offset : offset + end - start])
            start, piece = end, piece + 1
        return np.concatenate(parts)


class JoinedTokens:
    def __init__(self, streams: Sequence[TokenStream]) -> None:
        self._streams = tuple(streams)
        self._ends = np.cumsum([len(stream) for stream in streams], dtype=np.int64)

    def __len__(self) -> int:
        return int(self._ends[-1])

    def read(self, start: int, stop: int) -> np.ndarray:
        parts: list[np.ndarray] = []
        for stream, end in zip(self._streams, self._ends, strict=True):
            begin = int(end) - len(stream)
            if start < end and stop > begin:
                part = stream.read(max(start - begin, 0), min(stop - begin, len(stream)))
                parts.append(part.astype(np.int64))
        return np.concatenate(parts) if parts else np.empty(0, np.int64)


def _ends(tokens: np.ndarray) -> tuple[int, int]:
    return int(tokens.min()), int(tokens.max())


class TokenDataset(Dataset):
    """Windows of `seq_len` tokens; `vocab_size` None is measured on first use. `name` is for messages."""

    def __init__(
        self,
        stream: TokenStream,
        seq_len: int,
        vocab_size: int | None,
        name: str,
        tokenizer: Tokenizer | None = None,
    ) -> None:
        if len(stream) < seq_len + 1:
            longest = max(len(stream) - 1, 0)
            advice = f"nearest valid: seq_len={longest}" if longest else "give more data"
            raise DataError(
                f"seq_len={seq_len}: {name} holds {len(stream)} tokens, one sample needs {seq_len + 1}; {advice}"
            )
        self._stream = stream
        self._seq_len = seq_len
        self._vocab_size = vocab_size
        self._name = name
        self._tokenizer = tokenizer

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self._tokenizer

    @property
    def vocab_size(self) -> int:
        if self._vocab_size is None:
            count = len(self._stream)
            ranges = ((start, min(start + _SCAN, count)) for start in range(0, count, _SCAN))
            ends = [_ends(self._stream.read(start, stop)) for start, stop in ranges]
            self._refuse_negative(min(least for least, _ in ends))
            self._vocab_size = max(most for _, most in ends) + 1
        return self._vocab_size

    def refuse_foreign(self) -> None:
        """Probe tokens. Raises `DataError` if one is outside the given vocabulary."""
        count = len(self._stream)
        starts = np.unique(np.linspace(0, max(count - _PROBE, 0), _PROBES).astype(np.int64))
        ends = [_ends(self._stream.read(int(start), min(int(start) + _PROBE, count))) for start in starts]
        self._refuse_negative(min(least for least, _ in ends))
        most = max(most for _, most in ends)
        if most >= 2**63:
            raise DataError(f"{self._name}: holds token {most}; ids of 2**63 and more are not supported")
        if self._vocab_size is not None and most >= self._vocab_size:
            raise DataError(
                f"data.vocab_size={self._vocab_size}: {self._name} holds token {most}; nearest valid: {most + 1}"
            )

    def _refuse_negative(self, least: int) -> None:
        if least < 0:
            raise DataError(f"{self._name}: holds the negative token id {least}")

    def __len__(self) -> int:
        return (len(self._stream) - 1) // self._seq_len

    def arrays(self) -> Arrays:
        return -(-len(self._stream) // PIECE_BYTES), lambda piece: {
            "tokens": self._stream.read(piece * PIECE_BYTES, min((piece + 1) * PIECE_BYTES, len(self._stream)))
        }

    def sample(self, index: int, key: int | None = None) -> Sample:
        return {name: tensor[0] for name, tensor in self.batch(np.array([index], np.int64)).items()}

    def batch(self, indices: Indices, keys: Words | None = None) -> Batch:
        """`input_ids` and `labels`, int64 (len(indices), seq_len). Raises `DataError` for a token out of range."""
        windows = np.empty((len(indices), self._seq_len + 1), np.int64)
        for row, index in enumerate(indices):
            start = int(index) * self._seq_len
            windows[row] = self._stream.read(start, start + self._seq_len + 1)
        self._refuse_out_of_range(windows, indices)
        tokens = torch.from_numpy(windows)
        return {"input_ids": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].contiguous()}

    def _refuse_out_of_range(self, windows: np.ndarray, indices: Indices) -> None:
        if not windows.size or self._vocab_size is None:
            return
        bad = (windows < 0) | (windows >= self._vocab_size)
        if bad.any():
            row, column = (int(place[0]) for place in np.nonzero(bad))
            raise DataError(
                f"data.vocab_size={self._vocab_size}: {self._name} holds token {windows[row, column]} in sample "
                f"{int(indices[row])}; nearest valid: {max(int(windows.max()) + 1, 2)}"
            )
