"""Kinds of runs that are to have the same bits on every layout: recipes and architectures, with what is said to them.

KINDS["gpt, sgd"]   ->  ("gpt_stdlib", "optimizer=sgd", "parallel.granule=2")
"""

from __future__ import annotations

KINDS: dict[str, tuple[str, ...]] = {
    "gpt": ("gpt_stdlib",),
    "gpt-bf16": ("gpt_stdlib", "precision=bf16", "copies.record=bf16"),
    "gpt-sgd": ("gpt_stdlib", "optimizer=sgd", "parallel.granule=2"),
    "gpt2-bf16": ("hf_gpt2", "precision=bf16"),
    "llama": ("hf_llama",),
    "resnet": ("resnet_digits", "parallel.granule=4"),
    "two-tower": ("two_tower",),
    "mixtral": ("mixtral", "parallel.granule=2"),
    "t5-bf16": ("t5", "precision=bf16"),
}

ALIKE_LAYOUTS = ((2, 1), (4, 1), (1, 2), (2, 2), (3, 2), (2, 3), (1, 4))
"""dp x pp, all compared with 1 x 1. Uneven tiles come with the losses of ranks."""
