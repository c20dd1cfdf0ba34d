"""The model, batch and links that training benchmarks use, fixed here before anything is measured.

In: a name. Out: our configuration of it, and the same model and data for a plain PyTorch loop.

    COMPUTE_BOUND.config("copies.count=1")   ->  Config
    COMPUTE_BOUND.model(), COMPUTE_BOUND.batch(step=3, rank=1)
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import nn

from elaswave_fx.config.compose import load_config
from elaswave_fx.config.keys import Config
from elaswave_fx.models.gpt import GPT

LINK_GBIT_S = 10.0
"""The link between hosts for which the time of a step's records is worked out; what is measured crosses loopback."""

VOCABULARY = 256

FOREVER = 1_000_000
"""Steps that no job takes."""

EMULATED_MICRO_BATCH = 4
"""Samples of a micro-batch of emulated ranks, each of them a granule."""


@dataclass(frozen=True)
class GptJob:
    """A GPT without dropout on random tokens, AdamW: `ranks / stages` pipelines, `ranks_per_host` ranks on a host.

    `micro_batch`: the most samples that run at once; None: the planner chooses. `tied`: head and token embedding.
    """

    layers: int
    width: int
    heads: int
    seq_len: int
    global_batch: int
    ranks: int
    lr: float = 1e-3
    clip_norm: float | None = 1.0
    stages: int = 1
    micro_batch: int | None = None
    ranks_per_host: int = 1
    tied: bool = True

    def config(self, *overrides: str) -> Config:
        """Return the configuration, as the command line would give it; of a job that is ended when nothing more is
        wanted of it, unless its `steps` are given."""
        return load_config(
            [
                f"steps={FOREVER}",
                "model=gpt", f"model.layers={self.layers}", f"model.width={self.width}", f"model.heads={self.heads}",
                "data=synthetic", f"data.vocab_size={VOCABULARY}", f"seq_len={self.seq_len}",
                f"model.tied={_word(self.tied)}", f"global_batch={self.global_batch}",
                f"parallel.dp={self.ranks // self.stages}", f"parallel.pp={self.stages}",
                f"parallel.micro_batch={_word(self.micro_batch)}", f"parallel.ranks_per_host={self.ranks_per_host}",
                "optimizer=adamw", f"optimizer.lr={self.lr}", "schedule=constant",
                f"clip_norm={_word(self.clip_norm)}", "eval.every=0", *overrides,
            ]
        )  # fmt: skip

    def model(self) -> GPT:
        """Make the same architecture for plain PyTorch."""
        torch.manual_seed(0)
        return GPT(VOCABULARY, self.seq_len, self.layers, self.width, self.heads)

    def elements(self) -> int:
        """Return the number of parameters of the model."""
        return sum(parameter.numel() for parameter in self.model().parameters())

    def batch(self, step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return inputs and labels of a rank's share of a step, while all ranks are there."""
        draw = torch.Generator().manual_seed(1 + step * self.ranks + rank)
        shape = (self.global_batch // self.ranks, self.seq_len + 1)
        tokens = torch.randint(VOCABULARY, shape, generator=draw)
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def clip(self, parameters: Iterable[nn.Parameter]) -> None:
        """Clip the gradients of parameters, in plain PyTorch."""
        if self.clip_norm is not None:
            nn.utils.clip_grad_norm_(parameters, self.clip_norm)

    def text(self) -> str:
        """Describe the job in one line, for under the table."""
        layout = "data parallel, each on a host of its own"
        if self.stages > 1:
            layout = f"{self.ranks // self.stages} x {self.stages}, micro-batches of {self.micro_batch}"
        return (
            f"GPT of {self.layers} layers, width {self.width}, {self.heads} heads; {self.global_batch} samples of "
            f"{self.seq_len} tokens a step; {self.ranks} ranks, {layout}; AdamW, fp32"
        )


@dataclass(frozen=True)
class EmulatedLanes:
    """dp lanes of pp stages with m micro-batches each, on emulated ranks; an undisturbed step takes about `step_s`. The
    model has two units for each layer, and two more."""

    dp: int
    pp: int
    m: int
    layers: int
    step_s: float

    @property
    def name(self) -> str:
        """Such as 4x4, m=8."""
        return f"{self.dp}x{self.pp}, m={self.m}"

    @property
    def gpt(self) -> GptJob:
        """A GPT so small that its parameters take no time."""
        return GptJob(
            layers=self.layers, width=16, heads=2, seq_len=16, global_batch=self.dp * self.m * EMULATED_MICRO_BATCH,
            ranks=self.dp * self.pp, stages=self.pp, micro_batch=EMULATED_MICRO_BATCH, clip_norm=None,
        )  # fmt: skip

    @property
    def words(self) -> tuple[str, ...]:
        """The overrides that make ranks emulated ones, and samples granules."""
        units = (self.m + self.pp - 1) * (2 * self.layers + 2) * EMULATED_MICRO_BATCH
        return "device=emulated", f"emulated.unit_ms={1e3 * self.step_s * self.pp / units}", "parallel.granule=1"


COMPUTE_BOUND = GptJob(layers=4, width=256, heads=4, seq_len=128, global_batch=16, ranks=2)
"""`copies` and `steady` run this: there is a rank per core, and a step is almost all matrix products."""

FOUR_COLUMNS = GptJob(layers=2, width=128, heads=4, seq_len=64, global_batch=16, ranks=4)
"""`recovery` runs this, data parallel 4x1."""

PIPELINE_SMALL = GptJob(
    layers=8, width=64, heads=4, seq_len=64, global_batch=16, ranks=2, clip_norm=None, micro_batch=2, tied=False
)
"""`pipeline`, which sets the number of ranks, runs this: kernels take some tens of microseconds."""

PIPELINE_LARGE = replace(PIPELINE_SMALL, width=512, heads=8, seq_len=128, global_batch=8, micro_batch=1)
"""`pipeline` runs this: almost all of a step is matrix products."""

MEMORY = GptJob(
    layers=8, width=512, heads=8, seq_len=128, global_batch=16, ranks=4, stages=2, micro_batch=2, ranks_per_host=2
)
"""`startup` runs this: it is laid out as the demo, with hundreds of MB at each rank."""


def tiny(gpt: GptJob) -> GptJob:
    """Make it small, to see that a benchmark runs."""
    return replace(gpt, layers=1, width=16, heads=2, seq_len=16, global_batch=8)


def _word(value: float | None) -> str:
    """Spell a value as the command line does."""
    return json.dumps(value)
