"""Training steps of the peers: plain DistributedDataParallel over gloo, and TorchFT 0.2.0 with its lighthouse.

In: a workload. Out: seconds of each step; for a loss, the moments of commits. Each rank is a process with one thread.

    ddp_steps(workload, steps=8, warm_up=3)              ->  (0.31, 0.30, …)
    torchft_steps(workload, steps=8, warm_up=3)          ->  (0.33, 0.34, …)
    torchft_loss(workload, Lighthouse(), …)              ->  Loss(recovery_s=5.2, normal_s=0.05)
"""

from __future__ import annotations

import importlib.util
import logging
import signal
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import TCPStore

from elaswave_fx.bench.edit_gloo import on_loopback, start_store
from elaswave_fx.bench.processes import TEST_TIMEOUT_S, BenchFailed, Processes
from elaswave_fx.bench.workload import Workload
from elaswave_fx.errors import ConfigError
from elaswave_fx.launch.channel import Channel

_TIMEOUT = timedelta(seconds=TEST_TIMEOUT_S)
GLOO_TIMEOUT = timedelta(seconds=5)
"""Of TorchFT's process group, as in its train_ddp.py; the class's own default is 60 s. With the lighthouse's default
join timeout, ranks whose neighbours are alive notice a loss by it alone."""

NORMAL_STEPS = 10
"""Before a loss, to say how long one takes."""


@dataclass(frozen=True)
class Lighthouse:
    """TorchFT's settings; the defaults of `torchft_lighthouse`."""

    heartbeat_timeout_ms: int = 5000
    join_timeout_ms: int = 60000
    quorum_tick_ms: int = 100

    def __str__(self) -> str:
        return f"heartbeat {self.heartbeat_timeout_ms}, join {self.join_timeout_ms}, tick {self.quorum_tick_ms} ms"


@dataclass(frozen=True)
class Loss:
    """From SIGKILL to the first step that a survivor committed without the victim, less the median of ten before."""

    recovery_s: float
    normal_s: float


def need_torchft() -> None:
    """Raises `ConfigError` that says how to get it."""
    if importlib.util.find_spec("torchft") is None:
        raise ConfigError("torchft 0.2.0 is not installed; `pip install torchft==0.2.0` (the extra `bench`) adds it")


def ddp_steps(workload: Workload, steps: int, warm_up: int) -> tuple[float, ...]:
    """Plain DDP, clipping and AdamW."""
    with Processes() as processes:
        port = start_store(processes)
        for rank in range(workload.ranks):
            processes.fork(f"ddp-{rank}", _ddp_body(workload, rank, port, steps, warm_up))
        return _seconds(processes, [f"ddp-{rank}" for rank in range(workload.ranks)])


def torchft_steps(workload: Workload, steps: int, warm_up: int) -> tuple[float, ...]:
    """TorchFT's DistributedDataParallel and Optimizer, as its examples have them, with its defaults."""
    with Processes() as processes:
        address = _start_lighthouse(processes, Lighthouse(), workload.ranks)
        for rank in range(workload.ranks):
            processes.fork(f"torchft-{rank}", _torchft_body(workload, rank, address, steps, warm_up))
        return _seconds(processes, [f"torchft-{rank}" for rank in range(workload.ranks)])


def torchft_loss(
    workload: Workload,
    lighthouse: Lighthouse,
    victim: int,
    phase: float,
    number: signal.Signals = signal.SIGKILL,
) -> Loss:
    """Signal `victim` after some steps, `phase` of a normal step after a commit. Raises BenchFailed."""
    names = [f"torchft-{rank}" for rank in range(workload.ranks)]
    survivor = names[(victim + 1) % len(names)]
    with Processes() as processes:
        address = _start_lighthouse(processes, lighthouse, 1)
        for rank, name in enumerate(names):
            processes.fork(name, _manual_body(workload, rank, address))
        commits = []
        while len(commits) < NORMAL_STEPS + 3:
            fields = processes.hear([survivor], "commit")[survivor]
            commits = [*commits, fields["at_s"]] if fields["ranks"] == len(names) else []
        steps = [later - sooner for sooner, later in pairwise(commits[2:])]
        normal = statistics.median(steps)
        time.sleep(phase * normal)
        killed = processes.signal(names[victim], number)
        others = [name for name in names if name != names[victim]]
        firsts = [_first_without(processes, name, killed, len(names)) for name in others]
        return Loss(min(firsts) - killed - normal, normal)


def _first_without(processes: Processes, name: str, killed_s: float, ranks: int) -> float:
    """When a survivor first committed a step with fewer ranks; even if living ones were left out of it, too."""
    while True:
        fields = processes.hear([name], "commit")[name]
        if fields["at_s"] > killed_s and fields["ranks"] < ranks:
            return fields["at_s"]


def _seconds(processes: Processes, names: list[str]) -> tuple[float, ...]:
    done = processes.hear(names, "measured")
    return tuple(done[names[0]]["seconds"])


def _start_lighthouse(processes: Processes, lighthouse: Lighthouse, min_replicas: int) -> str:
    def body(channel: Channel) -> None:
        from torchft.coordination import LighthouseServer

        server = LighthouseServer(
            bind="127.0.0.1:0",
            min_replicas=min_replicas,
            join_timeout_ms=lighthouse.join_timeout_ms,
            quorum_tick_ms=lighthouse.quorum_tick_ms,
            heartbeat_timeout_ms=lighthouse.heartbeat_timeout_ms,
        )
        channel.send("address", address=f"http://127.0.0.1:{server.address().rsplit(':', 1)[1]}")
        channel.receive(1e6)

    processes.fork("lighthouse", body)
    return processes.hear(["lighthouse"], "address")["lighthouse"]["address"]


# --- Ranks


def _optimizer(model: nn.Module, workload: Workload) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=workload.lr, fused=True)


def _forward(model: nn.Module, workload: Workload, step: int, rank: int) -> None:
    """Forward and backward of the mean loss."""
    inputs, labels = workload.batch(step, rank)
    loss, count = model(inputs, labels)
    (loss / count).backward()


def _measure(step: Callable[[int], None], steps: int, warm_up: int, channel: Channel) -> None:
    seconds = []
    for number in range(warm_up + steps):
        start = time.perf_counter()
        step(number)
        seconds.append(time.perf_counter() - start)
    channel.send("measured", seconds=seconds[warm_up:])
    channel.receive(TEST_TIMEOUT_S)


def _ddp_body(workload: Workload, rank: int, port: int, steps: int, warm_up: int) -> Callable[[Channel], None]:
    def body(channel: Channel) -> None:
        on_loopback()
        store = TCPStore("127.0.0.1", port, is_master=False, timeout=_TIMEOUT)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=workload.ranks, timeout=_TIMEOUT)
        model = nn.parallel.DistributedDataParallel(workload.model().train())
        optimizer = _optimizer(model, workload)

        def step(number: int) -> None:
            optimizer.zero_grad()
            _forward(model, workload, number, rank)
            workload.clip(model.parameters())
            optimizer.step()

        _measure(step, steps, warm_up, channel)

    return body


def _manager(
    model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, address: str, least: int
) -> tuple[Any, Any]:
    """The manager of a replica group of one rank, and the store that it needs for as long as it lives."""
    from torchft.manager import Manager
    from torchft.process_group import ProcessGroupGloo

    on_loopback()
    logging.disable(logging.WARNING)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def load(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=GLOO_TIMEOUT),
        load_state_dict=load,  # type: ignore[arg-type]
        state_dict=lambda: {"model": model.state_dict(), "optimizer": optimizer.state_dict()},
        min_replica_size=least,
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        lighthouse_addr=address,
        replica_id=f"rank_{rank}",
        hostname="127.0.0.1",
        init_sync=False,
    )
    return manager, store


def _torchft_body(workload: Workload, rank: int, address: str, steps: int, warm_up: int) -> Callable[[Channel], None]:
    def body(channel: Channel) -> None:
        from torchft.ddp import DistributedDataParallel
        from torchft.optim import OptimizerWrapper

        inner = workload.model().train()
        base = _optimizer(inner, workload)
        manager, _store = _manager(inner, base, rank, address, workload.ranks)
        model, optimizer = DistributedDataParallel(manager, inner), OptimizerWrapper(manager, base)

        def step(number: int) -> None:
            optimizer.zero_grad()
            _forward(model, workload, number, rank)
            workload.clip(model.parameters())
            optimizer.step()
            if manager.num_participants() != workload.ranks:
                raise BenchFailed(f"torchft: step {number} had {manager.num_participants()} participants")

        _measure(step, steps, warm_up, channel)

    return body


def _manual_body(workload: Workload, rank: int, address: str) -> Callable[[Channel], None]:
    """The manual loop: quorum, forward and backward, one all-reduce of the flat gradient, vote, update; for ever."""

    def body(channel: Channel) -> None:
        model = workload.model().train()
        optimizer = _optimizer(model, workload)
        manager, _store = _manager(model, optimizer, rank, address, 1)
        parameters = list(model.parameters())
        while True:
            manager.start_quorum()
            optimizer.zero_grad()
            _forward(model, workload, manager.current_step(), rank)
            flat = torch.cat([parameter.grad.view(-1) for parameter in parameters if parameter.grad is not None])
            manager.allreduce(flat).wait()
            if manager.should_commit():
                _scatter(flat, parameters)
                workload.clip(parameters)
                optimizer.step()
                channel.send("commit", at_s=time.monotonic(), ranks=manager.num_participants())

    return body


def _scatter(flat: torch.Tensor, parameters: list[nn.Parameter]) -> None:
    """The reduced gradient back to its parameters."""
    offset = 0
    for parameter in parameters:
        parameter.grad = flat[offset : offset + parameter.numel()].view_as(parameter)
        offset += parameter.numel()
