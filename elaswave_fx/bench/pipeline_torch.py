"""Training steps of torch.distributed.pipelining: Schedule1F1B over gloo, one process and thread per stage.

In: a workload whose ranks are one pipeline. Out: seconds of each step at the first stage, and the losses.

    pipelining_steps(workload, steps=6, warm_up=2)   ->  PeerRun(seconds=(0.05, …), losses=(5.56, …), …)

Blocks are divided evenly, the embedding in the first stage, the head in the last. AdamW is the fused one, the loss is
divided by the step's tokens where it is made, and the batches lie ready before the first step: all of it is faster than
what else this peer offers.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from elaswave_fx.bench.edit_gloo import on_loopback, start_store
from elaswave_fx.bench.processes import TEST_TIMEOUT_S, Processes
from elaswave_fx.bench.workload import Workload
from elaswave_fx.build.builder import make_model
from elaswave_fx.config.types import Config
from elaswave_fx.data import load_batch, open_source
from elaswave_fx.launch.channel import Channel
from elaswave_fx.models.gpt import GPT
from elaswave_fx.models.losses import token_loss_sum

_TIMEOUT = timedelta(seconds=TEST_TIMEOUT_S)


@dataclass(frozen=True)
class PeerRun:
    """Of one job: seconds of the steps that count, CPU seconds of all ranks in one, mean losses of all steps."""

    seconds: tuple[float, ...]
    cpu_s_per_step: float
    losses: tuple[float, ...]


def pipelining_steps(workload: Workload, steps: int, warm_up: int) -> PeerRun:
    """One job. Raises BenchFailed."""
    names = [f"stage-{stage}" for stage in range(workload.stages)]
    with Processes() as processes:
        port = start_store(processes)
        for stage, name in enumerate(names):
            processes.fork(name, _stage_body(workload, stage, port, steps, warm_up))
        done = processes.hear(names, "measured")
        cpu_s = sum(stage["cpu_s"] for stage in done.values()) / steps
        return PeerRun(tuple(done[names[0]]["seconds"]), cpu_s, tuple(done[names[-1]]["losses"]))


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


def _stage_body(workload: Workload, stage: int, port: int, steps: int, warm_up: int) -> Callable[[Channel], None]:
    def body(channel: Channel) -> None:
        on_loopback()
        store = TCPStore("127.0.0.1", port, is_master=False, timeout=_TIMEOUT)
        dist.init_process_group("gloo", store=store, rank=stage, world_size=workload.stages, timeout=_TIMEOUT)
        seconds, cpu_s, losses = _train(workload, stage, warm_up + steps)
        channel.send("measured", seconds=seconds[warm_up:], cpu_s=sum(cpu_s[warm_up:]), losses=losses)
        channel.receive(TEST_TIMEOUT_S)

    return body


def _train(workload: Workload, stage: int, steps: int) -> tuple[list[float], list[float], list[float]]:
    """Seconds and CPU seconds of each step, and the losses, which only the last stage knows."""
    config = workload.config()
    source = open_source(config)
    model = make_model(config, source.dataset)
    assert isinstance(model, GPT) and workload.micro_batch is not None
    module = Stage(model, stage, workload.stages).train()
    optimizer = _optimizer(module, config)
    tokens = workload.global_batch * workload.seq_len

    def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
        return token_loss_sum(logits, labels)[0] / tokens

    schedule = Schedule1F1B(
        PipelineStage(module, stage, workload.stages, torch.device("cpu")),
        workload.global_batch // workload.micro_batch,
        loss_fn=loss_of,
        scale_grads=False,
    )
    batch = workload.global_batch
    batches = [load_batch(source.dataset, source.train, step * batch, batch) for step in range(steps)]
    seconds: list[float] = []
    cpu_s: list[float] = []
    sums: list[Tensor] = []
    dist.barrier()
    lap, used = time.perf_counter(), time.process_time()
    for fed in batches:
        optimizer.zero_grad()
        losses: list[Tensor] = []
        schedule.step(
            *((fed["input_ids"],) if stage == 0 else ()),
            target=fed["labels"] if stage == workload.stages - 1 else None,
            losses=losses,
            return_outputs=False,
        )
        optimizer.step()
        if losses:
            sums.append(torch.stack([loss.detach() for loss in losses]).sum())
        now, by_now = time.perf_counter(), time.process_time()
        seconds.append(now - lap)
        cpu_s.append(by_now - used)
        lap, used = now, by_now
    return seconds, cpu_s, [loss.item() for loss in sums]


def _optimizer(module: nn.Module, config: Config) -> torch.optim.Optimizer:
    """As ours: no decay of parameters with fewer than two dimensions."""
    groups: dict[bool, list[nn.Parameter]] = {True: [], False: []}
    for parameter in module.parameters():
        groups[parameter.dim() >= 2].append(parameter)
    chosen = config.optimizer
    return torch.optim.AdamW(
        [{"params": groups[True], "weight_decay": chosen.weight_decay}, {"params": groups[False], "weight_decay": 0.0}],
        lr=chosen.lr, betas=chosen.betas, eps=chosen.eps, fused=True,
    )  # fmt: skip
