"""Training steps of torch.distributed.pipelining: Schedule1F1B over gloo, one process and thread per stage.

In: a `GptJob` whose ranks are one pipeline. Out: seconds of each step at the first stage, and the losses.

    pipelining_steps(gpt, steps=6, warm_up=2)   ->  Steps(seconds=(0.05, …), losses=(5.56, …), …)

Blocks are divided evenly, the embedding in the first stage, the head in the last. AdamW is the fused one, the loss is
divided by the step's tokens where it is made, and the batches lie ready before the first step: all of it is faster than
what else this peer offers.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from elaswave_fx.build.make_model import make_model
from elaswave_fx.config.keys import Config
from elaswave_fx.data import load_batch, open_source
from elaswave_fx.models.gpt import GPT
from elaswave_fx.models.losses import token_loss_sum
from tools.bench.edit_gloo import start_store
from tools.bench.gpt_job import GptJob
from tools.bench.results import Steps
from tools.bench.torch_job import Step, join_gloo, peer_steps


def pipelining_steps(gpt: GptJob, steps: int, warm_up: int) -> Steps:
    """Run one job. Raises BenchFailed."""
    return peer_steps(gpt.stages, steps, warm_up, start_store, partial(_prepare, gpt, warm_up + steps))


class Stage(nn.Module):
    """An even share of a GPT's blocks: tokens into the first, logits out of the last, between them what blocks give.

    Its parameters are the model's, by reference.
    """

    def __init__(self, model: GPT, stage: int, stages: int) -> None:
        super().__init__()
        blocks = list(model.blocks)
        self.blocks = nn.ModuleList(blocks[len(blocks) * stage // stages : len(blocks) * (stage + 1) // stages])
        first, last = stage == 0, stage == stages - 1
        self.token_embedding = model.token_embedding if first else None
        self.position_embedding = model.position_embedding if first else None
        self.norm, self.head = (model.norm, model.head) if last else (None, None)

    def forward(self, x: Tensor) -> Tensor:
        if self.token_embedding is not None and self.position_embedding is not None:
            positions = torch.arange(x.shape[1], device=x.device)
            x = self.token_embedding(x) + self.position_embedding(positions)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)) if self.head is not None and self.norm is not None else x


def _prepare(gpt: GptJob, steps: int, stage: int, port: int) -> Step:
    """Make the function that takes a step of this stage; only the last one knows the loss."""
    join_gloo(stage, gpt.stages, port)
    config = gpt.config()
    source = open_source(config)
    model = make_model(config, source.dataset)
    assert isinstance(model, GPT) and gpt.micro_batch is not None
    module = Stage(model, stage, gpt.stages).train()
    optimizer = _optimizer(module, config)
    tokens = gpt.global_batch * gpt.seq_len

    def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
        return token_loss_sum(logits, labels)[0] / tokens

    schedule = Schedule1F1B(
        PipelineStage(module, stage, gpt.stages, torch.device("cpu")),
        gpt.global_batch // gpt.micro_batch,
        loss_fn=loss_of,
        scale_grads=False,
    )
    batch = gpt.global_batch
    batches = [load_batch(source.dataset, source.train, step * batch, batch) for step in range(steps)]

    def step(number: int) -> Tensor | None:
        optimizer.zero_grad()
        losses: list[Tensor] = []
        schedule.step(
            *((batches[number]["input_ids"],) if stage == 0 else ()),
            target=batches[number]["labels"] if stage == gpt.stages - 1 else None,
            losses=losses,
            return_outputs=False,
        )
        optimizer.step()
        return torch.stack([loss.detach() for loss in losses]).sum() if losses else None

    dist.barrier()
    return step


def _optimizer(module: nn.Module, config: Config) -> torch.optim.Optimizer:
    """Make the optimizer as ours is: parameters with fewer than two dimensions do not decay."""
    groups: dict[bool, list[nn.Parameter]] = {True: [], False: []}
    for parameter in module.parameters():
        groups[parameter.dim() >= 2].append(parameter)
    chosen = config.optimizer
    return torch.optim.AdamW(
        [{"params": groups[True], "weight_decay": chosen.weight_decay}, {"params": groups[False], "weight_decay": 0.0}],
        lr=chosen.lr, betas=chosen.betas, eps=chosen.eps, fused=True,
    )  # fmt: skip
