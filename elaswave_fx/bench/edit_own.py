"""One loss with our own parts: native endpoints, an agent per rank, the coordinator process and its store.

In: the number of ranks. Out: `Edit`, seconds of each part between the abort's delivery and the last checked all-reduce.
Only plans and steps are small: a box per rank with one copy, as the simulator assigns them, and no engine. Ranks stand
in an all-reduce that the victim never enters; the launcher's word that it is gone reaches the coordinator as in a job.

    lose_own(ranks=16, depth=2, victim=5)   ->  Edit(total_s=0.021, parts={"notice": …, "report": …, …}, …)
"""

from __future__ import annotations

import secrets
import select
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from elaswave_fx import _native
from elaswave_fx.bench.processes import TEST_TIMEOUT_S, BenchFailed, Processes, meet
from elaswave_fx.bench.views import Checks, Group, Views, summand
from elaswave_fx.control.agent.agent import Agent, Go, Holdings, Progress
from elaswave_fx.control.coordinator.plan_cache import Held, Planned
from elaswave_fx.control.coordinator.service import CoordinatorSpec, Service, plan_path
from elaswave_fx.control.protocol.register import Register
from elaswave_fx.control.protocol.types import SEED, Activation, Assignment, Copy, Term
from elaswave_fx.control.store.file_store import FileStore
from elaswave_fx.control.wire import ControlAddress, CoordinatorSocket, Message
from elaswave_fx.errors import CommError
from elaswave_fx.launch.channel import Channel
from elaswave_fx.plan.box import numbered
from elaswave_fx.plan.topology import Epoch, Rank
from elaswave_fx.sim import cluster

RANKS_PER_HOST = 2
HEARD_S = 0.35
"""So that every rank has sent a few heartbeats before the loss."""

PARTS = ("notice", "report", "store", "activate", "views", "all-reduce")
"""abort delivered -> the coordinator knows -> all have reported and it has decided -> the epoch is in the store -> the
last survivor knows -> groups are made -> the last checked all-reduce is done."""


@dataclass(frozen=True)
class Edit:
    """One measured loss. `counts`: messages and links of the edit, by kind."""

    total_s: float
    parts: dict[str, float]
    counts: dict[str, int]


class BenchPlanning:
    """The simulator's planner; the text of a plan is its assignment."""

    def read(self, text: str) -> Planned:
        return Planned(text, msgspec.json.decode(text, type=Assignment), "first", None)

    def replan(self, before: Planned, members: tuple[Rank, ...], held: Held) -> Planned:
        assignment = cluster.replan(members, held, before.assignment)
        return Planned(msgspec.json.encode(assignment).decode(), assignment, f"over {len(members)} ranks", None)

    def wants_move(self, before: Planned, held: Held) -> bool:
        return False


class CountingSocket(CoordinatorSocket):
    """Counts messages by kind, both ways."""

    def __init__(self, url: str, token: str) -> None:
        super().__init__(url, token)
        self.counts: Counter[str] = Counter()

    def send(self, rank: int, message: Message) -> None:
        self.counts[type(message).__name__] += 1
        super().send(rank, message)

    def receive(self) -> Message | None:
        message = super().receive()
        if message is not None:
            self.counts[type(message).__name__] += 1
        return message


def lose_own(ranks: int, depth: int, victim: int) -> Edit:
    """Start a job, kill `victim`, and take the time until all survivors have their new groups. Raises BenchFailed."""
    names = [f"rank-{rank}" for rank in range(ranks)]
    survivors = [name for rank, name in enumerate(names) if rank != victim]
    with Processes() as processes:
        address = ControlAddress(f"ipc://@elaswave-bench-{secrets.token_hex(8)}", "t" * 32, processes.folder)
        first = _first_epoch(processes.folder, ranks)
        processes.fork("coordinator", lambda channel: _coordinate(address, processes.folder, channel))
        for rank, name in enumerate(names):
            processes.fork(name, _rank_body(rank, Views.first(ranks, depth), victim, address, first))
        processes.introduce(names)
        processes.hear(names, "ready")
        time.sleep(HEARD_S)
        processes.kill(names[victim])
        select.select([processes[names[victim]].pidfd], [], [], TEST_TIMEOUT_S)
        processes.tell(["coordinator"], "exited", rank=victim)
        laps = processes.hear(survivors, "done")
        processes.tell(["coordinator"], "counts")
        said = _coordinator_says(processes)
        return _edit(list(laps.values()), said)


def _first_epoch(folder: Path, ranks: int) -> Activation:
    assignment = cluster.first_assignment(ranks, units=2)
    first = Activation(Epoch(0), assignment, SEED, SEED, None, rollback=True)
    FileStore.create(folder, Register(Term(0), first, SEED, SEED, None, SEED))
    plan_path(folder, 0).write_text(msgspec.json.encode(assignment).decode())
    return first


# --- The coordinator


class _LauncherSide:
    """The channel to the launcher, which here also asks what was counted."""

    def __init__(self, channel: Channel, socket: CountingSocket) -> None:
        self._channel, self._socket = channel, socket
        self.closed = False

    def fileno(self) -> int:
        return self._channel.fileno()

    def send(self, kind: str, **fields: Any) -> None:
        self._channel.send(kind, **fields)

    def drain(self) -> list[Any]:
        messages = self._channel.drain()
        self.closed = self._channel.closed
        if any(message.kind == "counts" for message in messages):
            self._channel.send("counts", **self._socket.counts)
        return messages


def _coordinate(address: ControlAddress, folder: Path, channel: Channel) -> None:
    socket = CountingSocket(address.url, address.token)
    spec = CoordinatorSpec(address=address, run_dir=folder, planning=BenchPlanning())
    Service(spec, socket, _LauncherSide(channel, socket)).run()


MOMENTS = {"detected": "knew_s", "stopped": "decided_s", "agreed": "agreed_s"}
"""What events of the coordinator are called here."""


def _coordinator_says(processes: Processes) -> dict[str, Any]:
    """When it knew, decided and had the epoch in the store; what it counted."""
    said: dict[str, Any] = {}
    end = time.monotonic() + TEST_TIMEOUT_S
    while "counts" not in said and time.monotonic() < end:
        message = processes["coordinator"].channel.receive(1.0)
        if message is None:
            continue
        fields = message.fields
        if message.kind == "counts":
            said["counts"] = dict(fields)
        elif message.kind == "event" and fields["event"] in MOMENTS:
            said.setdefault(MOMENTS[fields["event"]], fields["at_s"])
    if not {"knew_s", "decided_s", "agreed_s", "counts"} <= said.keys():
        raise BenchFailed(f"bench: the coordinator said only {sorted(said)}")
    return said


# --- A rank


def _rank_body(
    rank: int, views: Views, victim: int, address: ControlAddress, first: Activation
) -> Callable[[Channel], None]:
    def body(channel: Channel) -> None:
        endpoint = _native.Endpoint(rank, address.token, host_id=host_of(rank))
        meet(endpoint, channel, host_of)
        agent = Agent(
            Rank(rank), first, address, interrupt=endpoint.abort, progress=lambda: Progress("reduce", None),
            lost=lambda: endpoint.lost_peers, mend=lambda: endpoint.mend(TEST_TIMEOUT_S),
        )  # fmt: skip
        agent.start()
        groups = groups_of(endpoint, views.of(rank), int(first.epoch))
        check_all(Checks(rank, views.of(rank)), groups)
        channel.send("ready")
        if rank == victim:
            _wait(channel)  # for ever
        channel.send("done", **_survive(rank, views, victim, endpoint, agent, groups[0], first))
        _wait(channel)

    return body


def host_of(rank: int) -> str:
    """Neighbours share a host."""
    return f"host-{rank // RANKS_PER_HOST}"


def _wait(channel: Channel) -> Any:
    message = channel.receive(TEST_TIMEOUT_S)
    return message.fields if message is not None else {}


def _survive(
    rank: int, views: Views, victim: int, endpoint: Any, agent: Agent, world: Any, first: Activation
) -> dict[str, Any]:
    """Stand in a step, leave it, agree, take the new views; the moments of it."""
    after = views.less(victim).of(rank)
    checks = Checks(rank, after)
    delivered, error = stand(rank, world, victim)
    suspect = getattr(error, "rank", -1)
    links = set(endpoint.peers) - {victim}
    endpoint.broadcast_abort(suspect)
    decision = agent.report_and_wait(_holdings(rank, first), Rank(suspect) if suspect >= 0 else None)
    if not isinstance(decision, Go):
        raise ValueError(f"rank {rank}: {decision}")
    agreed, sent = time.monotonic(), endpoint.bytes_sent
    epoch = int(decision.activation.epoch)
    endpoint.disconnect(victim)
    endpoint.advance(epoch)
    groups = groups_of(endpoint, after, epoch)
    viewed, moved = time.monotonic(), endpoint.bytes_sent - sent
    check_all(checks, groups)
    done = time.monotonic()
    opened = len(set(endpoint.peers) - links)
    return {"delivered": delivered, "agreed": agreed, "viewed": viewed, "done": done, "opened": opened, "moved": moved}


def stand(rank: int, world: Any, victim: int) -> tuple[float, CommError]:
    """In an all-reduce that `victim` never enters: when it was left, and why."""
    try:
        world.all_reduce(summand(rank), TEST_TIMEOUT_S)
    except CommError as error:
        return time.monotonic(), error
    raise ValueError(f"rank {rank}: an all-reduce went through without rank {victim}")


def groups_of(endpoint: Any, views: Iterable[Group], epoch: int) -> list[Any]:
    """A rank's groups of an epoch."""
    return [_native.Group(endpoint, 1 + number, list(group), epoch) for number, group in enumerate(views)]


def check_all(checks: Checks, groups: Iterable[Any]) -> None:
    """A checked all-reduce on each."""
    for group in groups:
        checks(tuple(group.ranks), lambda data, group=group: group.all_reduce(data, TEST_TIMEOUT_S))


def _holdings(rank: int, first: Activation) -> Holdings:
    boxes = [box_id for box_id, box in numbered(first.assignment.boxes) if rank in box.replica_ranks]
    copies = {box: Copy(SEED, int(box) + 1) for box in boxes}
    return Holdings(SEED, copies, {}, (), frozenset(boxes))


def _edit(laps: list[Any], said: dict[str, Any]) -> Edit:
    """Between the first sign of the loss, at a survivor or at the coordinator, and the last survivor's end."""
    began = min(said["knew_s"], *(lap["delivered"] for lap in laps))
    told, viewed = max(lap["agreed"] for lap in laps), max(lap["viewed"] for lap in laps)
    done = max(lap["done"] for lap in laps)
    moments = [began, said["knew_s"], said["decided_s"], said["agreed_s"], told, viewed, done]
    parts = {name: later - sooner for name, sooner, later in zip(PARTS, moments, moments[1:], strict=False)}
    counts = said["counts"]
    return Edit(
        done - began,
        parts,
        {
            "links opened": sum(lap["opened"] for lap in laps),
            "bytes between ranks": sum(lap["moved"] for lap in laps),
            "Prepare": counts.get("Prepare", 0),
            "Prepared": counts.get("Prepared", 0),
            "Activate": counts.get("Activate", 0),
        },
    )
