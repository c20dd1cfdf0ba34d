"""collectives: our groups against gloo, both in the same processes of this machine, in turns.

Shared memory, as ranks of one host have it, and plain TCP; gloo has TCP over loopback, as torch gives it. A sample is
the first rank's time for a few calls in a row; before each all ranks meet. Latency is an all-reduce of 1 KB; send/recv
is there and back, and a bare socket (blocking calls, nothing else) says what the kernel takes for it.
"""

from __future__ import annotations

import socket
import statistics
import time
from collections.abc import Callable
from datetime import timedelta
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

from elaswave_fx import _native
from elaswave_fx.bench.edit_gloo import on_loopback, start_store
from elaswave_fx.bench.processes import TEST_TIMEOUT_S, Processes, meet
from elaswave_fx.bench.results import Entry, Options, Outcome, paired
from elaswave_fx.launch.channel import Channel

REPEATS = 20
SIZES = (1 << 10, 64 << 10, 1 << 20, 16 << 20, 64 << 20)
"""Bytes of the whole tensor."""

RANKS = (2, 4, 8)
LARGE = 1 << 20
WANTED = {"all-reduce": 2.0, "reduce-scatter": 2.0, "all-gather": 2.0, "send/recv": 1.3}
LATENCY_WANTED, TCP_WANTED = 2.0, 1.0
_FEW_BYTES, _MOST_CALLS = 4 << 20, 20
"""Calls of a sample: so many that they move a few MB, and not too many."""

Call = Callable[[torch.Tensor], object]


def run(progress: Callable[[str], None], options: Options) -> Outcome:
    """All sizes and numbers of ranks."""
    torch.set_num_threads(1)
    sizes = SIZES[:3] if options.tiny else SIZES
    copied = _memcpy_bytes_per_s()
    entries, reached, bare = [], [], []
    for ranks in options.ranks or RANKS:
        progress(f"{ranks} ranks")
        taken = _measure(ranks, sizes, options.repeats or REPEATS)
        entries += [_entry(ranks, what, size, side, samples) for (what, size), samples in taken.items()
                    for side in ("shm", "tcp")]  # fmt: skip
        reached += _reached(ranks, taken, copied)
        bare += _bare(ranks, taken)
    return Outcome(
        entries,
        (
            "",
            f"one thread copies {copied / 1e9:.1f} GB/s in memory; of that, by shared memory:",
            *reached,
            "",
            "there and back over TCP, against a bare socket:",
            *bare,
        ),
    )


def _entry(ranks: int, what: str, size: int, side: str, samples: dict[str, list[float]]) -> Entry:
    if side == "tcp":
        wanted = TCP_WANTED
    elif size >= LARGE:
        wanted = WANTED[what]
    else:
        wanted = LATENCY_WANTED if size == SIZES[0] and what == "all-reduce" else None
    name = f"{ranks} ranks, {what}, {_text(size)}, {side}"
    return paired(name, [1e3 * s for s in samples[side]], [1e3 * s for s in samples["gloo"]], "ms", wanted)


def _reached(ranks: int, taken: dict[tuple[str, int], dict[str, list[float]]], copied: float) -> list[str]:
    """A rank has to read, at least, what the others have for it: that many bytes against what a copy takes."""
    lines = []
    for (what, size), samples in taken.items():
        if size < LARGE:
            continue
        share = {"all-reduce": 2 * (ranks - 1) / ranks, "send/recv": 2.0}.get(what, (ranks - 1) / ranks)
        rate = share * size / statistics.median(samples["shm"])
        lines.append(f"  {ranks} ranks, {what}, {_text(size)}: {rate / copied:.0%} per rank")
    return lines


def _bare(ranks: int, taken: dict[tuple[str, int], dict[str, list[float]]]) -> list[str]:
    lines = []
    for (what, size), samples in taken.items():
        if what != "send/recv" or size < LARGE:
            continue
        ours, socket_s, gloo = (1e3 * statistics.median(samples[side]) for side in ("tcp", "socket", "gloo"))
        lines.append(
            f"  {ranks} ranks, {_text(size)}: socket {socket_s:.2f} ms, ours {ours:.2f} ms, gloo {gloo:.2f} ms"
        )
    return lines


def _measure(ranks: int, sizes: tuple[int, ...], repeats: int) -> dict[tuple[str, int], dict[str, list[float]]]:
    names = [f"rank-{rank}" for rank in range(ranks)]
    with Processes() as processes:
        port = start_store(processes)
        for rank, name in enumerate(names):
            processes.fork(name, _rank_body(rank, ranks, port, sizes, repeats))
        for _ in ("shm", "tcp"):
            processes.introduce(names)
        said = processes.hear(names, "measured")
    found: dict[tuple[str, int], dict[str, list[float]]] = {}
    for what, size, side, samples in said[names[0]]["samples"]:
        found.setdefault((what, size), {})[side] = samples
    return found


# --- A rank


def _rank_body(rank: int, ranks: int, port: int, sizes: tuple[int, ...], repeats: int) -> Callable[[Channel], None]:
    def body(channel: Channel) -> None:
        on_loopback()
        store = TCPStore("127.0.0.1", port, is_master=False)
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=TEST_TIMEOUT_S)
        )
        sides: dict[str, dict[str, Call]] = {
            "gloo": _gloo_calls(rank, ranks),
            "socket": {"send/recv": _socket_call(rank, store)},
        }
        endpoints = []
        for side in ("shm", "tcp"):
            endpoint = _native.Endpoint(rank, "t" * 32, host_id="host", allow_shm=side == "shm")
            meet(endpoint, channel, lambda rank: "host")
            endpoints.append(endpoint)
            sides[side] = _own_calls(endpoint, rank, ranks)
        taken = []
        for size in sizes:
            for what in WANTED:
                chosen = {side: calls[what] for side, calls in sides.items() if what in calls}
                samples = _sample(chosen, size, repeats)
                taken += [(what, size, side, found) for side, found in samples.items()]
        channel.send("measured", samples=taken)
        channel.receive(TEST_TIMEOUT_S)

    return body


def _sample(calls: dict[str, Call], size: int, repeats: int) -> dict[str, list[float]]:
    """Seconds of a call of each side; a different side is first each time."""
    data = torch.ones(size // 4)
    number = max(1, min(_MOST_CALLS, _FEW_BYTES // size))
    found: dict[str, list[float]] = {side: [] for side in calls}
    for turn in range(1 + repeats):
        first = turn % len(calls)
        for side in [*calls][first:] + [*calls][:first]:
            dist.barrier()
            began = time.perf_counter()
            for _ in range(number):
                calls[side](data)
            if turn > 0:  # the first one opens connections and touches memory
                found[side].append((time.perf_counter() - began) / number)
        data.fill_(1.0)
    return found


def _gloo_calls(rank: int, ranks: int) -> dict[str, Call]:
    def scatter(data: torch.Tensor) -> None:
        part = torch.empty(data.numel() // ranks)
        dist.reduce_scatter_tensor(part, data[: part.numel() * ranks])

    def gather(data: torch.Tensor) -> None:
        lo, hi = _part(data, rank, ranks)
        dist.all_gather_into_tensor(data[: (hi - lo) * ranks], data[lo:hi].clone())

    def pass_on(data: torch.Tensor) -> None:
        if rank == 0:
            dist.send(data, 1)
            dist.recv(data, 1)
        elif rank == 1:
            dist.recv(data, 0)
            dist.send(data, 0)

    return {"all-reduce": dist.all_reduce, "reduce-scatter": scatter, "all-gather": gather, "send/recv": pass_on}


def _socket_call(rank: int, store: TCPStore) -> Call:
    """There and back between the first two ranks."""
    link = None
    if rank == 0:
        with socket.create_server(("127.0.0.1", 0)) as server:
            store.set("socket", str(server.getsockname()[1]))
            link, _ = server.accept()
    elif rank == 1:
        link = socket.create_connection(("127.0.0.1", int(store.get("socket"))))
    if link is None:
        return lambda data: None
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def take(whole: memoryview) -> None:
        at = 0
        while at < len(whole):
            at += link.recv_into(whole[at:])

    def pass_on(data: torch.Tensor) -> None:
        whole = data.numpy().data.cast("B")
        for turn in (link.sendall, take) if rank == 0 else (take, link.sendall):
            turn(whole)

    return pass_on


def _own_calls(endpoint: Any, rank: int, ranks: int) -> dict[str, Call]:
    group = _native.Group(endpoint, 1, list(range(ranks)))

    def scatter(data: torch.Tensor) -> None:
        borders = [data.numel() // ranks * r for r in range(ranks + 1)]
        group.reduce_scatter(data, list(pairwise(borders)), torch.empty(data.numel() // ranks), TEST_TIMEOUT_S)

    def gather(data: torch.Tensor) -> None:
        borders = [data.numel() // ranks * r for r in range(ranks + 1)]
        group.all_gather(data, list(pairwise(borders)), TEST_TIMEOUT_S)

    def pass_on(data: torch.Tensor) -> None:
        if rank == 0:
            endpoint.wait(endpoint.send(1, 1, data), TEST_TIMEOUT_S)
            endpoint.wait(endpoint.recv(1, 2, data), TEST_TIMEOUT_S)
        elif rank == 1:
            endpoint.wait(endpoint.recv(0, 1, data), TEST_TIMEOUT_S)
            endpoint.wait(endpoint.send(0, 2, data), TEST_TIMEOUT_S)

    return {
        "all-reduce": lambda data: group.all_reduce(data, TEST_TIMEOUT_S),
        "reduce-scatter": scatter,
        "all-gather": gather,
        "send/recv": pass_on,
    }


def _part(data: torch.Tensor, rank: int, ranks: int) -> tuple[int, int]:
    size = data.numel() // ranks
    return rank * size, (rank + 1) * size


def _memcpy_bytes_per_s() -> float:
    """Of 64 MB, out of the caches."""
    source, target = torch.ones(16 << 20), torch.empty(16 << 20)
    taken = []
    for _ in range(9):
        began = time.perf_counter()
        target.copy_(source)
        taken.append(time.perf_counter() - began)
    return source.numel() * 4 / statistics.median(taken)


def _text(size: int) -> str:
    return f"{size >> 20} MB" if size >= 1 << 20 else f"{size >> 10} KB"
