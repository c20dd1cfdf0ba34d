"""Models that are compiled once for all tests of a process."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from elaswave_fx.models.gpt import GPT
from tests.passes.compiled import Compiled, MakeBatch, compile_model
from tests.passes.models import (
    TOKENS,
    Centered,
    EncoderDecoder,
    ExponentialMean,
    FixedBatch,
    Frozen,
    Fused,
    InBatch,
    Normed,
    Recurrent,
    SequenceFirst,
    Tied,
    pairs,
    tokens,
    vectors,
)

MODELS: dict[str, tuple[Callable[[], nn.Module], MakeBatch, int]] = {
    "gpt": (lambda: GPT(vocab_size=16, seq_len=TOKENS, layers=1, width=16, heads=2), tokens, 1),
    "tied": (Tied, tokens, 1),
    "frozen": (Frozen, vectors, 1),
    "several inputs": (EncoderDecoder, pairs, 1),
    "sequence first": (lambda: SequenceFirst(layers=1), tokens, 1),
    "recurrent": (Recurrent, vectors, 1),
    "fused axes": (lambda: Fused(layers=1), vectors, 1),
    "batch norm": (lambda: Normed(layers=1), vectors, 4),
    "in-batch negatives": (lambda: InBatch(layers=1), vectors, 4),
    "unknown operator": (lambda: Centered(layers=1), vectors, 4),
    "fixed batch": (lambda: FixedBatch(layers=1), vectors, 4),
    "own buffer": (lambda: ExponentialMean(layers=1), vectors, 4),
}
_COMPILED: dict[str, Compiled] = {}


def compiled(name: str) -> Compiled:
    if name not in _COMPILED:
        torch.manual_seed(0)
        build, make, granule = MODELS[name]
        _COMPILED[name] = compile_model(build(), make, granule)
    return _COMPILED[name]
