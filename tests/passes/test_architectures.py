"""Architectures that nobody here wrote: built from their configuration alone, compiled, compared with autograd."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from elaswave_fx.config.keys import ModelConfig
from elaswave_fx.models.build import build_model
from elaswave_fx.passes.check_evaluation import evaluation_agrees
from tests.marks import slow
from tests.passes.compiled import assert_bits, assert_same, compile_model, eager, run_native, run_units

VOCABULARY, LENGTH, CLASSES = 32, 12, 4
SIZES = {"num_hidden_layers": 2, "hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}
QUIET = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
EXPERTS = {"num_key_value_heads": 2, "num_local_experts": 4}


def texts(samples: int, seed: int) -> dict[str, Tensor]:
    ids = torch.randint(0, VOCABULARY, (samples, LENGTH + 1), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids[:, :-1].clone(), "labels": ids[:, 1:].clone()}


def images(samples: int, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    image = torch.randn(samples, 3, 16, 16, generator=generator)
    return {"image": image, "label": torch.randint(0, CLASSES, (samples,), generator=generator)}


@pytest.mark.parametrize(
    ("name", "options", "units"),
    [
        slow("gpt2", {"n_layer": 2, "n_embd": 16, "n_head": 2, "resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}, 6),
        ("llama", {**SIZES, "num_key_value_heads": 1}, 6),
        slow("bert", {**SIZES, **QUIET}, 6),
        ("vit", {**SIZES, **QUIET, "image_size": 16, "patch_size": 8, "num_channels": 3}, 5),
        slow("t5", {"num_layers": 2, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_heads": 2, "dropout_rate": 0.0}, 11),
        slow("mixtral", {**SIZES, **EXPERTS}, 6),
        ("convnext", {"hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2, "patch_size": 4}, 4),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_any_architecture(name: str, options: dict[str, Any], units: int) -> None:
    make = images if name in ("vit", "convnext") else texts
    given: dict[str, Any] = {"vocab_size": VOCABULARY, "seq_len": LENGTH} if make is texts else {"vocab_size": None}
    if make is images:
        given |= {"seq_len": None, "image_shape": (3, 16, 16), "classes": CLASSES}
    model = build_model(ModelConfig(kind="hf", name=name, task=None, options=options), seed=0, **given)
    result = compile_model(model, make)
    assert len(result.program.units) >= units
    assert result.program.dynamic_batch
    batch = make(1 if result.program.batch_coupled else 3, 5)
    ours = run_units(result, batch)
    assert_bits(run_native(result, batch), ours)
    assert_bits(run_units(result.with_policy("light"), batch), ours)
    if name != "bert":  # it draws which tokens to mask
        assert_same(ours, eager(model, batch))
    assert evaluation_agrees(result.program, model, result.state, batch)
