"""One loss with torch.distributed and gloo, clocked as ours: from the abort's delivery to the last checked exchange.

In: the number of ranks, and which way. Out: seconds. The survivors are told who is left, free of charge: gloo has no
agreement. A process of its own keeps the TCPStore, which nobody loses.

    full      destroy_process_group, then world (a fresh prefix of the store), stages and pipelines anew
    partial   new_group of the stages and pipelines that changed, and of the survivors in place of the world; the old
              world stays, broken, and is not used again

    lose_gloo(16, depth=2, victim=5, way="partial")   ->  PeerEdit(total_s=0.09, affected_s=0.04)
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

from elaswave_fx.launch.channel import Channel
from tools.bench.processes import TEST_TIMEOUT_S, Processes
from tools.bench.views import Checks, Group, Views

_TIMEOUT = timedelta(seconds=TEST_TIMEOUT_S)


@dataclass(frozen=True)
class PeerEdit:
    """`affected_s`: until the stages and pipelines that changed were checked, the group of all survivors left aside."""

    total_s: float
    affected_s: float


def lose_gloo(ranks: int, depth: int, victim: int, way: str) -> PeerEdit:
    """Start a job, kill `victim`, tell the others, take the time until all have their groups. Raises BenchFailed."""
    names = [f"gloo-{rank}" for rank in range(ranks)]
    survivors = [name for rank, name in enumerate(names) if rank != victim]
    with Processes() as processes:
        port = start_store(processes)
        for rank, name in enumerate(names):
            processes.fork(name, _rank_body(rank, Views.first(ranks, depth), victim, way, port))
        processes.hear(names, "ready")
        processes.kill(names[victim])
        processes[names[victim]].reap()
        processes.tell(survivors, "abort")
        laps = list(processes.hear(survivors, "done").values())
        began = min(lap["delivered"] for lap in laps)
        return PeerEdit(max(lap["done"] for lap in laps) - began, max(lap["affected"] for lap in laps) - began)


def start_store(processes: Processes) -> int:
    """A TCPStore in a process of its own; its port."""
    processes.fork("store", _keep_store)
    return processes.hear(["store"], "port")["store"]["port"]


def _keep_store(channel: Channel) -> None:
    """Keep the store until the channel closes."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    channel.send("port", port=store.port)
    channel.receive(1e6)


def on_loopback() -> None:
    """Gloo looks up the host's name otherwise, which may lead anywhere."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")


def _rank_body(rank: int, views: Views, victim: int, way: str, port: int) -> Callable[[Channel], None]:
    def body(channel: Channel) -> None:
        on_loopback()
        store = TCPStore("127.0.0.1", port, is_master=False, timeout=_TIMEOUT)
        groups = _build("first", store, views, rank)
        _check_all(rank, Checks(rank, groups), groups)
        after = views.less(victim)
        checks = Checks(rank, after.of(rank) if rank != victim else ())
        channel.send("ready")
        channel.receive(TEST_TIMEOUT_S)  # the victim hears nothing
        delivered = time.monotonic()
        if way == "full":
            affected = _full(store, after, rank, checks)
        else:
            affected = _partial(groups, views, after, rank, checks)
        channel.send("done", delivered=delivered, affected=affected, done=time.monotonic())
        channel.receive(TEST_TIMEOUT_S)

    return body


def _build(prefix: str, store: Any, views: Views, rank: int) -> dict[Group, Any]:
    """World, then every stage and pipeline, which all ranks make together; those of this rank."""
    number = {member: place for place, member in enumerate(views.world)}
    dist.init_process_group(
        "gloo", store=PrefixStore(prefix, store), rank=number[rank], world_size=len(number), timeout=_TIMEOUT
    )
    found: dict[Group, Any] = {views.world: dist.group.WORLD}
    for members in (*views.stages, *views.pipelines):
        group = dist.new_group([number[member] for member in members], timeout=_TIMEOUT)
        if rank in members:
            found[members] = group
    return found


def _full(store: Any, after: Views, rank: int, checks: Checks) -> float:
    dist.destroy_process_group()
    _check_all(rank, checks, _build("second", store, after, rank))
    return time.monotonic()


def _partial(groups: dict[Group, Any], before: Views, after: Views, rank: int, checks: Checks) -> float:
    """Ranks keep the numbers that they had in the first world; all survivors call `new_group` in the same order.

    `use_local_synchronization` is of no use: a group's name then depends on how many groups each rank has.
    """
    world, stage, pipeline = after.of(rank)
    for members in after.changed(before):
        group = dist.new_group(list(members), timeout=_TIMEOUT)
        if rank in members:
            groups[members] = group
    _check_all(rank, checks, {members: groups[members] for members in (stage, pipeline)})
    affected = time.monotonic()
    _check_all(rank, checks, {world: dist.new_group(list(world), timeout=_TIMEOUT)})
    return affected


def _check_all(rank: int, checks: Checks, groups: dict[Group, Any]) -> None:
    for members, group in groups.items():
        checks(members, partial(_all_gather, members.index(rank), group))


def _all_gather(place: int, group: Any, data: torch.Tensor, spans: list[tuple[int, int]]) -> None:
    dist.all_gather_into_tensor(data, data[slice(*spans[place])].clone(), group=group)
