"""Real runs for tests: launcher, builder and workers as processes, forked from the test's own."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from elaswave_fx.build.builder import build
from elaswave_fx.build.make_model import make_model
from elaswave_fx.config.compose import Job, load_config
from elaswave_fx.config.keys import Config
from elaswave_fx.data import load_batch, open_source
from elaswave_fx.optim.learning_rate import make_schedule
from elaswave_fx.train import train
from tests.reference import RandomOp, ReferenceRun, reference_run

# Every recipe at a size at which 20 steps take seconds; the learning rate as the equality promise allows.
SMALL: dict[str, tuple[str, ...]] = {
    "gpt_stdlib": ("model.layers=2", "model.width=32", "seq_len=32", "global_batch=8", "data.limit_mb=1"),
    "hf_gpt2": ("seq_len=32", "global_batch=8", "data.limit_mb=1", "model.config.n_layer=2", "model.config.n_embd=32"),
    "hf_llama": (
        "seq_len=32", "global_batch=8", "data.limit_mb=1", "model.config.num_hidden_layers=2",
    ),
    "resnet_digits": ("optimizer.lr=1e-3", "global_batch=32"),
    "two_tower": ("global_batch=16",),
}  # fmt: skip
# The same with ranks that come and go.
SMALL |= dict.fromkeys(("lose_and_regain", "storm"), SMALL["gpt_stdlib"])
# Architectures without a recipe, as their users would write them.
_HF = ("model=hf", "data=synthetic", "data.vocab_size=256", "seq_len=16", "global_batch=8")
ARCHITECTURES: dict[str, tuple[str, ...]] = {
    "mixtral": (
        *_HF, "model.name=mixtral", "model.config.hidden_size=32", "model.config.intermediate_size=32",
        "model.config.num_hidden_layers=2", "model.config.num_attention_heads=4",
        "model.config.num_key_value_heads=2", "model.config.num_local_experts=4",
        "model.config.num_experts_per_tok=2",
    ),
    "t5": (
        *_HF, "model.name=t5", "model.config.d_model=32", "model.config.d_kv=8", "model.config.d_ff=64",
        "model.config.num_layers=2", "model.config.num_heads=4",
    ),
}  # fmt: skip
STEPS = 20


@dataclass(frozen=True)
class Run:
    """What a finished run left behind."""

    code: int
    folder: Path

    @property
    def metrics(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / "metrics.jsonl").read_text().splitlines()]

    @property
    def losses(self) -> list[float]:
        return [line["loss"] for line in self.metrics]

    @property
    def summary(self) -> dict[str, Any]:
        return json.loads((self.folder / "summary.json").read_text())

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        return load_file(self.folder / "model.safetensors")


def small_config(recipe: str, *overrides: str) -> Config:
    """A recipe, or one of `ARCHITECTURES`, at a small size."""
    words = (f"recipe={recipe}", *SMALL[recipe]) if recipe in SMALL else ARCHITECTURES[recipe]
    return load_config([*words, f"steps={STEPS}", "eval.every=0", *overrides])


def run_job(config: Config, folder: Path) -> Run:
    """Train as the command would, in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    return Run(train(Job(config, folder, {}, ())), folder)


def reference(config: Config, samples: Sequence[int] | None = None) -> ReferenceRun:
    """The plain PyTorch loop on the same model, data, seed and keyed draws. `samples`: how many of the batch each step
    takes, the first ones; None: all."""
    torch.set_num_threads(1)
    artifact = build(config, None).artifact
    source = open_source(config)
    batch, granule = config.global_batch, config.parallel.granule
    sizes = [batch] * config.steps if samples is None else samples
    spans = [(lo, lo + granule) for lo in range(0, batch, granule)] if artifact.batch_coupled else None
    return reference_run(
        lambda: make_model(config, source.dataset),
        (load_batch(source.dataset, source.train, step * batch, size) for step, size in enumerate(sizes)),
        optimizer=config.optimizer,
        global_batch=batch,
        factor=make_schedule(config.schedule, config.steps),
        clip_norm=config.clip_norm,
        seed=config.seed,
        spans=spans,
        random_ops=[RandomOp(unit, op) for unit, op in artifact.draws],
    )
