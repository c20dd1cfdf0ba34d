"""Training steps of the peers: plain DistributedDataParallel over gloo, and TorchFT 0.2.0 with its lighthouse.

In: a `GptJob`. Out: seconds of each step, or a job that tells of every commit. Each rank is a process with one thread.

    ddp_steps(gpt, steps=8, warm_up=3)              ->  Steps(seconds=(0.31, 0.30, …), …)
    torchft_steps(gpt, steps=8, warm_up=3)          ->  Steps(seconds=(0.33, 0.34, …), …)
    with TorchFTJob(gpt, Settings()) as job:
        job.hear("step")                                 ->  {"rank": 0, "at_s": …, "ranks": 4, …}
"""

from __future__ import annotations

import importlib.util
import logging
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import TCPStore

from elaswave_fx.errors import ConfigError
from elaswave_fx.launch.channel import Channel
from tools.bench.edit_gloo import on_loopback, start_store
from tools.bench.gpt_job import GptJob
from tools.bench.processes import TEST_TIMEOUT_S, BenchFailed, Processes, Reports
from tools.bench.results import Steps

_TIMEOUT = timedelta(seconds=TEST_TIMEOUT_S)


@dataclass(frozen=True)
class Settings:
    """Choices that a user of TorchFT has, in milliseconds. The defaults are those of `torchft_lighthouse` and of its
    Manager; gloo's timeout is the one of its train_ddp.py (the class's own is 60 s).
    """

    heartbeat_timeout: int = 5000
    join_timeout: int = 60000
    quorum_tick: int = 100
    gloo_timeout: int = 5000
    heartbeat: int = 100

    def __str__(self) -> str:
        beats = f" (sent every {self.heartbeat})" if self.heartbeat != Settings.heartbeat else ""
        return (
            f"heartbeat {self.heartbeat_timeout}{beats}, join {self.join_timeout}, tick {self.quorum_tick}, "
            f"gloo {self.gloo_timeout} ms"
        )


def need_torchft() -> None:
    """Check that it is there; raises `ConfigError` that says how to get it."""
    if importlib.util.find_spec("torchft") is None:
        raise ConfigError("torchft 0.2.0 is not installed; `pip install torchft==0.2.0` (the extra `bench`) adds it")


Step = Callable[[int], Tensor | None]
"""Takes the step of that number; returns its mean loss where the rank knows it."""


def peer_steps(
    ranks: int, steps: int, warm_up: int, serve: Callable[[Processes], Any], prepare: Callable[[int, Any], Step]
) -> Steps:
    """Time the steps of one job of a peer, a process per rank.

    `serve` starts what the ranks meet at and returns where it is; `prepare(rank, where)` makes the function that takes
    steps, in the rank's process. The losses are those of the last rank. Raises BenchFailed.
    """
    names = [f"rank-{rank}" for rank in range(ranks)]
    with Processes() as processes:
        where = serve(processes)
        for rank, name in enumerate(names):
            processes.fork(name, partial(_measure, prepare, rank, where, steps, warm_up))
        done = processes.hear(names, "measured")
    cpu_s = sum(rank["cpu_s"] for rank in done.values()) / steps
    return Steps(tuple(done[names[0]]["seconds"]), cpu_s, tuple(done[names[-1]]["losses"]))


def _measure(
    prepare: Callable[[int, Any], Step], rank: int, where: Any, steps: int, warm_up: int, channel: Channel
) -> None:
    step, seconds, losses, used = prepare(rank, where), [], [], 0.0
    for number in range(warm_up + steps):
        if number == warm_up:
            used = time.process_time()
        start = time.perf_counter()
        losses.append(step(number))
        seconds.append(time.perf_counter() - start)
    used = time.process_time() - used
    known = [loss.item() for loss in losses if loss is not None]
    channel.send("measured", seconds=seconds[warm_up:], cpu_s=used, losses=known)
    channel.receive(TEST_TIMEOUT_S)


def join_gloo(rank: int, ranks: int, port: int) -> TCPStore:
    """Make this process a rank of a gloo world that meets at the store of that port."""
    on_loopback()
    store = TCPStore("127.0.0.1", port, is_master=False, timeout=_TIMEOUT)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=_TIMEOUT)
    return store


def ddp_steps(gpt: GptJob, steps: int, warm_up: int) -> Steps:
    """Time plain DDP, clipping and AdamW."""
    return peer_steps(gpt.ranks, steps, warm_up, start_store, partial(_ddp_step, gpt))


def torchft_steps(gpt: GptJob, steps: int, warm_up: int) -> Steps:
    """Time TorchFT's DistributedDataParallel and Optimizer, as its examples have them, with its defaults."""
    serve = partial(_start_lighthouse, settings=Settings(), min_replicas=gpt.ranks)
    return peer_steps(gpt.ranks, steps, warm_up, serve, partial(_torchft_step, gpt))


class TorchFTJob:
    """A job whose ranks run the manual loop as long as the block lasts."""

    def __init__(self, gpt: GptJob, settings: Settings, resident_bytes: int = 0) -> None:
        self._processes, self._reports = Processes(), Reports()
        self._names = [f"torchft-{rank}" for rank in range(gpt.ranks)]
        address = _start_lighthouse(self._processes, settings, 1)
        for rank, name in enumerate(self._names):
            body = _manual_body(gpt, rank, address, settings, self._reports, resident_bytes)
            self._processes.fork(name, body)
        self._reports.close_writer()
        self._processes.hear(self._names, "ready")  # all join the first quorum, however short its join timeout is
        self._processes.tell(self._names, "go")

    def __enter__(self) -> TorchFTJob:
        return self

    def __exit__(self, *_: object) -> None:
        self._processes.__exit__()
        self._reports.close_reader()

    def hear(self, kind: str, timeout_s: float = TEST_TIMEOUT_S) -> Mapping[str, Any]:
        """Return the next report of a rank; raises BenchFailed when none comes."""
        return self._reports.hear(kind, self._processes[self._names[0]].log, timeout_s)

    def awaited(self) -> str:
        """Return what the lighthouse waited for last before the first quorum of fewer ranks, by its log."""
        whole, reason, why = f"[{len(self._names)}/{len(self._names)} participants healthy]", "", ""
        for line in self._processes["lighthouse"].log.read_text().splitlines():
            if "quorum found" in line:
                why = "" if whole in line else why or reason
                reason = ""
            elif "Quorum status: " in line:
                reason = next((said for words, said in _REASONS.items() if words in line), reason)
        return why or "nothing"


_REASONS = {
    "need at least half": "a majority, until the heartbeat timeout or gloo's",
    "due to join timeout": "the lost rank, until the join timeout or the heartbeat timeout",
}
"""Words of TorchFT's lighthouse (`quorum_compute` in its lighthouse.rs) tell what it waits for."""


def _start_lighthouse(processes: Processes, settings: Settings, min_replicas: int) -> str:
    def body(channel: Channel) -> None:
        from torchft.coordination import LighthouseServer

        server = LighthouseServer(
            bind="127.0.0.1:0",
            min_replicas=min_replicas,
            join_timeout_ms=settings.join_timeout,
            quorum_tick_ms=settings.quorum_tick,
            heartbeat_timeout_ms=settings.heartbeat_timeout,
        )
        channel.send("address", address=f"http://127.0.0.1:{server.address().rsplit(':', 1)[1]}")
        channel.receive(1e6)

    processes.fork("lighthouse", body)
    return processes.hear(["lighthouse"], "address")["lighthouse"]["address"]


# --- Ranks


def _optimizer(model: nn.Module, gpt: GptJob) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=gpt.lr, fused=True)


def _forward(model: nn.Module, gpt: GptJob, step: int, rank: int) -> None:
    """Run forward and backward of the mean loss."""
    inputs, labels = gpt.batch(step, rank)
    loss, count = model(inputs, labels)
    (loss / count).backward()


def _ddp_step(gpt: GptJob, rank: int, port: int) -> Step:
    join_gloo(rank, gpt.ranks, port)
    model = nn.parallel.DistributedDataParallel(gpt.model().train())
    return partial(_take_step, model, _optimizer(model, gpt), gpt, rank)


def _take_step(model: nn.Module, optimizer: Any, gpt: GptJob, rank: int, number: int) -> None:
    optimizer.zero_grad()
    _forward(model, gpt, number, rank)
    gpt.clip(model.parameters())
    optimizer.step()


def _manager(
    model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, address: str, settings: Settings, least: int
) -> tuple[Any, Any]:
    """Make the manager of a replica group of one rank, and the store that it needs for as long as it lives."""
    from torchft.manager import Manager
    from torchft.process_group import ProcessGroupGloo

    on_loopback()
    logging.disable(logging.WARNING)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def load(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(milliseconds=settings.gloo_timeout)),
        load_state_dict=load,  # type: ignore[arg-type]
        state_dict=lambda: {"model": model.state_dict(), "optimizer": optimizer.state_dict()},
        min_replica_size=least,
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        lighthouse_addr=address,
        replica_id=f"rank_{rank}",
        heartbeat_interval=timedelta(milliseconds=settings.heartbeat),
        hostname="127.0.0.1",
        init_sync=False,
    )
    return manager, store


def _torchft_step(gpt: GptJob, rank: int, address: str) -> Step:
    from torchft.ddp import DistributedDataParallel
    from torchft.optim import OptimizerWrapper

    inner = gpt.model().train()
    base = _optimizer(inner, gpt)
    manager, store = _manager(inner, base, rank, address, Settings(), gpt.ranks)
    model, optimizer = DistributedDataParallel(manager, inner), OptimizerWrapper(manager, base)

    def step(number: int, _kept: object = store) -> None:  # The manager needs the store as long as it lives.
        _take_step(model, optimizer, gpt, rank, number)
        if manager.num_participants() != gpt.ranks:
            raise BenchFailed(f"torchft: step {number} had {manager.num_participants()} participants")

    return step


def _manual_body(
    gpt: GptJob, rank: int, address: str, settings: Settings, reports: Reports, resident_bytes: int
) -> Callable[[Channel], None]:
    """Run the manual loop for ever: quorum, forward and backward, one all-reduce of the flat gradient, vote, update."""

    def body(channel: Channel) -> None:
        reports.close_reader()
        ballast = torch.ones(resident_bytes, dtype=torch.uint8)
        model = gpt.model().train()
        optimizer = _optimizer(model, gpt)
        manager, _store = _manager(model, optimizer, rank, address, settings, 1)
        parameters = list(model.parameters())
        channel.send("ready")
        channel.receive(TEST_TIMEOUT_S)
        while ballast is not None:
            manager.start_quorum()
            optimizer.zero_grad()
            _forward(model, gpt, manager.current_step(), rank)
            flat = torch.cat([parameter.grad.view(-1) for parameter in parameters if parameter.grad is not None])
            manager.allreduce(flat).wait()
            if manager.should_commit():
                _scatter(flat, parameters)
                gpt.clip(parameters)
                optimizer.step()
                reports.say(
                    "step", rank=rank, pid=os.getpid(), at_s=time.monotonic(), epoch=0, ranks=manager.num_participants()
                )

    return body


def _scatter(flat: torch.Tensor, parameters: list[nn.Parameter]) -> None:
    """Give the reduced gradient back to its parameters."""
    offset = 0
    for parameter in parameters:
        parameter.grad = flat[offset : offset + parameter.numel()].view_as(parameter)
        offset += parameter.numel()
