"""messages: our links against gloo's, there and back between two ranks, both in the same processes, in turns.

Shared memory, as ranks of one host have it, and plain TCP; gloo has TCP over loopback, as torch gives it. A step's
gradients, records and activations travel as such messages. A sample is the first rank's time for a few exchanges in a
row; before each both meet. A bare socket (blocking calls, nothing else) says what the kernel takes for it.

Then what 64 KB of a step wait behind 64 MB on the same link: of copies, which are sent in bulk, against how it would be
if they were sent like the step's own (`overtaking`).
"""

from __future__ import annotations

import socket
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

from elaswave_fx import _native
from elaswave_fx.errors import ConfigError
from elaswave_fx.launch.channel import Channel
from tools.bench.edit_gloo import start_store
from tools.bench.overtaking import LINKS, SMALL, measure
from tools.bench.processes import TEST_TIMEOUT_S, Processes, meet
from tools.bench.results import Entry, Options, Outcome, in_turns, paired
from tools.bench.torch_job import join_gloo

REPEATS = 20
SIZES = (1 << 10, 64 << 10, 1 << 20, 16 << 20, 64 << 20)
"""Bytes of a message."""

RANKS = 2
WANTED = {"shm": 1.3, "tcp": 1.0}
OVERTAKES = 9
OVERTAKING = 20.0
"""How much less a message has to wait behind bulk than in its turn, on a link of 800 Mbit/s."""

LARGE = 1 << 20
"""A smaller message has no target: its time is a wake-up's."""

_FEW_BYTES, _MOST_CALLS = 4 << 20, 20
"""A sample takes so many calls that they move a few MB, and not too many."""

Call = Callable[[torch.Tensor], object]


Samples = dict[int, dict[str, list[float]]]
"""Seconds of an exchange by size and side."""


def run(progress: Callable[[str], None], options: Options) -> Outcome:
    """All sizes."""
    torch.set_num_threads(1)
    sizes = SIZES[:3] if options.tiny else SIZES
    copied = _memcpy_bytes_per_s()
    progress("two ranks")
    taken = _measure(sizes, options.repeats or REPEATS)
    entries = [_entry(size, side, samples) for size, samples in taken.items() for side in WANTED]
    progress("a step's message behind bulk")
    behind, overtaken = _overtaking(8 << 20 if options.tiny else 64 << 20, options.repeats or OVERTAKES)
    return Outcome(
        entries + behind,
        (
            "",
            f"one thread copies {copied / 1e9:.1f} GB/s in memory; of that, by shared memory:",
            *_reached(taken, copied),
            "",
            "there and back over TCP, against a bare socket:",
            *_bare(taken),
            "",
            f"{_text(SMALL)} of a step, the link to itself and behind a large message (medians):",
            *overtaken,
        ),
    )


def _entry(size: int, side: str, samples: dict[str, list[float]]) -> Entry:
    wanted = WANTED[side] if size >= LARGE else None
    ours, gloo = ([1e3 * s for s in samples[name]] for name in (side, "gloo"))
    return paired(f"{_text(size)}, {side}", ours, gloo, "ms", wanted)


def _overtaking(large: int, repeats: int) -> tuple[list[Entry], list[str]]:
    """A step's message behind `large` bytes on each kind of link: entries, and lines in words."""
    entries, lines = [], []
    for link in LINKS:
        try:
            taken = measure(link, large, repeats)
        except ConfigError as error:
            lines.append(f"  {link}: skipped, {error}")
            continue
        ours, before = ([1e3 * s for s in taken[side]] for side in ("bulk", "step"))
        name = f"{_text(SMALL)} behind {_text(large)}, {link}"
        entries.append(paired(name, ours, before, "ms", OVERTAKING if link == LINKS[-1] else None))
        alone, bulk, step, whole, whole_step = (1e3 * statistics.median(samples) for samples in taken.values())
        lines.append(
            f"  {link}: alone {alone:.2f} ms, behind bulk {bulk:.2f} ms, in its turn {step:.2f} ms; the large one takes"
            f" {whole:.0f} ms in bulk, {whole_step:.0f} ms as a step's"
        )
    return entries, lines


def _reached(taken: Samples, copied: float) -> list[str]:
    """A message is there and back, so its bytes are read twice, at least; against what a copy takes."""
    rates = {size: 2 * size / statistics.median(samples["shm"]) for size, samples in taken.items() if size >= LARGE}
    return [f"  {_text(size)}: {rate / copied:.0%} per rank" for size, rate in rates.items()]


def _bare(taken: Samples) -> list[str]:
    lines = []
    for size, samples in taken.items():
        bare, ours, gloo = (1e3 * statistics.median(samples[side]) for side in ("socket", "tcp", "gloo"))
        if size >= LARGE:
            lines.append(f"  {_text(size)}: socket {bare:.2f} ms, ours {ours:.2f} ms, gloo {gloo:.2f} ms")
    return lines


def _measure(sizes: tuple[int, ...], repeats: int) -> Samples:
    names = [f"rank-{rank}" for rank in range(RANKS)]
    with Processes() as processes:
        port = start_store(processes)
        for rank, name in enumerate(names):
            processes.fork(name, _rank_body(rank, port, sizes, repeats))
        for _ in WANTED:
            processes.introduce(names)
        said = processes.hear(names, "measured")
    found: Samples = {}
    for size, side, samples in said[names[0]]["samples"]:
        found.setdefault(size, {})[side] = samples
    return found


# --- A rank


def _rank_body(rank: int, port: int, sizes: tuple[int, ...], repeats: int) -> Callable[[Channel], None]:
    def body(channel: Channel) -> None:
        store = join_gloo(rank, RANKS, port)
        calls: dict[str, Call] = {"gloo": _gloo_call(rank), "socket": _socket_call(rank, store)}
        endpoints = []
        for side in WANTED:
            endpoint = _native.Endpoint(rank, "t" * 32, host_id="host", allow_shm=side == "shm")
            meet(endpoint, channel, lambda rank: "host")
            endpoints.append(endpoint)
            calls[side] = _own_call(endpoint, rank)
        taken = [(size, side, found) for size in sizes for side, found in _sample(calls, size, repeats).items()]
        channel.send("measured", samples=taken)
        channel.receive(TEST_TIMEOUT_S)

    return body


def _sample(calls: dict[str, Call], size: int, repeats: int) -> dict[str, list[float]]:
    """Seconds of a call of each side; a different side is first each time."""
    data = torch.ones(size // 4)
    number = max(1, min(_MOST_CALLS, _FEW_BYTES // size))

    def seconds(call: Call) -> float:
        data.fill_(1.0)
        dist.barrier()
        began = time.perf_counter()
        for _ in range(number):
            call(data)
        return (time.perf_counter() - began) / number

    taken = in_turns({side: partial(seconds, call) for side, call in calls.items()}, 1 + repeats, lambda turn: None)
    return {side: found[1:] for side, found in taken.items()}  # the first one opens connections and touches memory


def _gloo_call(rank: int) -> Call:
    def pass_on(data: torch.Tensor) -> None:
        for turn in (dist.send, dist.recv) if rank == 0 else (dist.recv, dist.send):
            turn(data, 1 - rank)

    return pass_on


def _socket_call(rank: int, store: TCPStore) -> Call:
    if rank == 0:
        with socket.create_server(("127.0.0.1", 0)) as server:
            store.set("socket", str(server.getsockname()[1]))
            link, _ = server.accept()
    else:
        link = socket.create_connection(("127.0.0.1", int(store.get("socket"))))
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


def _own_call(endpoint: _native.Endpoint, rank: int) -> Call:
    def pass_on(data: torch.Tensor) -> None:
        for turn in (endpoint.send, endpoint.recv) if rank == 0 else (endpoint.recv, endpoint.send):
            endpoint.wait(turn(1 - rank, 1, data), TEST_TIMEOUT_S)

    return pass_on


def _memcpy_bytes_per_s() -> float:
    """Return the rate at which 64 MB are copied, out of the caches."""
    source, target = torch.ones(16 << 20), torch.empty(16 << 20)
    taken = []
    for _ in range(9):
        began = time.perf_counter()
        target.copy_(source)
        taken.append(time.perf_counter() - began)
    return source.numel() * 4 / statistics.median(taken)


def _text(size: int) -> str:
    return f"{size >> 20} MB" if size >= 1 << 20 else f"{size >> 10} KB"
