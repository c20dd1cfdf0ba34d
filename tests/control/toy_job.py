"""Ranks with a real agent and a toy engine, a real coordinator, real processes and signals; no tensors.

A box is a number; a step turns it into another one that depends on the version alone, so a box that was updated twice
or not at all is wrong for ever. Votes travel as datagrams between the ranks' sockets, bases as files.

    with ToyJob(tmp_path, world=3, steps=200) as job:
        job.kill(1)
        job.wait()   ->  what each survivor holds in the end
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from elaswave_fx.control.agent.agent import Agent, Excluded, Go, Holdings, Progress
from elaswave_fx.control.coordinator.plan_cache import Held, Newcomers, Planned
from elaswave_fx.control.coordinator.service import CoordinatorSpec, run_coordinator
from elaswave_fx.control.home import JobHome
from elaswave_fx.control.protocol.card import Card, Conditions
from elaswave_fx.control.protocol.coming_copies import ComingCopies
from elaswave_fx.control.protocol.register import Register
from elaswave_fx.control.protocol.speed_meter import Expected
from elaswave_fx.control.protocol.trials import SlowRanks
from elaswave_fx.control.protocol.types import (
    SEED,
    Activation,
    Assignment,
    BoxId,
    Certificate,
    Copy,
    Record,
    Stamp,
    Term,
    Version,
    Vote,
    WorkSpan,
)
from elaswave_fx.control.store.exact_total import ExactTotal
from elaswave_fx.control.store.file_store import FileStore
from elaswave_fx.control.store.ledger import STOP_WANTED, Payload
from elaswave_fx.control.tcp import listen, port_of
from elaswave_fx.control.wire import ControlAddress
from elaswave_fx.errors import PlanError
from elaswave_fx.files import json_lines
from elaswave_fx.launch.channel import Channel
from elaswave_fx.plan.next.rank_news import RankNews
from elaswave_fx.plan.work.box import numbered
from elaswave_fx.plan.work.topology import Epoch, Rank
from tests.control import toy_planner
from tests.control.cards import card_of

WAIT_S = 60.0
"""How long anything may take on a busy machine; nothing waits for so long when it works."""

UNITS = 1


class ToyPlanning:
    """A planner for boxes that are numbers. `least`: fewer ranks are refused."""

    def __init__(self, least: int = 1) -> None:
        self.least = least

    def read(self, text: str) -> Planned:
        assignment = msgspec.json.decode(text, type=Assignment)
        return Planned(text, assignment, "toy", None)

    def replan(
        self, before: Planned, members: tuple[Rank, ...], held: Held, like: Planned | None = None,
        newcomers: Newcomers | None = None,
    ) -> Planned:  # fmt: skip
        if len(members) < self.least:
            raise PlanError(f"{len(members)} ranks are too few; {self.least} would do")
        assignment = toy_planner.replan(members, held, before.assignment)
        return Planned(text_of(assignment), assignment, f"over {len(members)} ranks", None, ("moved",))

    def loss_kind(self, before: Planned, rank: Rank) -> Hashable:
        return rank

    def expected(self, planned: Planned) -> Mapping[Rank, Expected]:
        return {}

    def slow_ranks(self, planned: Planned) -> SlowRanks:
        return SlowRanks()

    def successor(self, before: Planned, held: Held, news: RankNews) -> Planned | None:
        owners = [box.owner for box in before.assignment.boxes]
        counts = [owners.count(rank) for rank in before.assignment.members]
        if max(counts) - min(counts) < 2 and all(len(ranks) <= 2 for ranks in held.values()):
            return None
        return replace(self.replan(before, before.assignment.members, held), aim="owners move")


def text_of(assignment: Assignment) -> str:
    """The plan's text is the assignment itself."""
    return msgspec.json.encode(assignment).decode()


def value_at(box: int, version: int) -> int:
    """What a box is worth after so many updates."""
    value = box + 1
    for v in range(1, version + 1):
        value = (value * 31 + v) % (1 << 61)
    return value


class Lost(Exception):
    """The step failed; `peer` is to blame, or nobody."""

    def __init__(self, peer: Rank | None) -> None:
        super().__init__(f"lost {peer}")
        self.peer = peer


@dataclass
class Box:
    """A base, and the version whose record is there."""

    value: int
    stamp: Stamp
    record: Record | None = None


class ToyRank:
    """The main thread of one rank."""

    def __init__(
        self, card: Card, first: Activation, address: ControlAddress, home: JobHome, folder: Path, steps: int,
        pause_s: float,
    ) -> None:  # fmt: skip
        self.rank, self.folder, self.steps, self.pause_s = card.number, folder, steps, pause_s
        self.activation = first
        self.committed = first.resume
        self.boxes: dict[BoxId, Box] = {}
        self.missing: set[BoxId] = set()
        self.votes: dict[tuple[Stamp, Rank], Vote] = {}
        self.aborted: str | None = None
        self.phase, self.awaited = "start", None
        self.redone = self.epochs = 0
        self.stopped = False  # somebody's vote said so
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind(self._path(self.rank))
        self.socket.settimeout(0.005)
        self.agent = Agent(
            card, first, address, home, interrupt=self._interrupt, progress=self._progress,
            lost=self._links_down, mend=lambda: None, say=print,
        )  # fmt: skip

    def _interrupt(self, reason: str) -> None:
        self.aborted = reason

    def _progress(self) -> Progress:
        return Progress(self.phase, self.awaited)

    def run(self) -> dict[str, Any]:
        """To the end of the job; what the rank has then."""
        while not all(os.path.exists(self._path(peer)) for peer in self.activation.assignment.members):
            time.sleep(0.005)
        self.agent.start()
        self._install(self.activation)
        while self.committed.version < self.steps and not self.stopped:
            suspect = None
            if not self.agent.stop_requested:
                try:
                    self._step()
                    continue
                except Lost as lost:
                    suspect = lost.peer
            decision = self.agent.report_and_wait(self._holdings(), suspect)
            if not isinstance(decision, Go):
                self.agent.close(finished=False)
                kind = "excluded" if isinstance(decision, Excluded) else "over"
                return {"end": kind, "reason": decision.reason}
            self._install(decision.activation)
        self.phase = "end"
        (self.folder / f"phase-{self.rank}").write_text(self.phase)
        self.agent.close()
        values = {str(box): [held.value, held.stamp.version] for box, held in self.boxes.items()}
        return {"end": "done", "version": self.committed.version, "boxes": values, "epochs": self.epochs,
                "redone": self.redone, "members": list(self.activation.assignment.members)}  # fmt: skip

    def _install(self, activation: Activation) -> None:
        assert activation.epoch == 0 or activation.epoch > self.activation.epoch
        self.activation, resume = activation, activation.resume
        self.redone += self.committed.version - resume.version if self.committed.version > resume.version else 0
        self.epochs += 1
        self.committed, self.aborted = resume, None
        kept = {box_id: box for box_id, box in numbered(activation.assignment.boxes) if self.rank in box.replica_ranks}
        boxes: dict[BoxId, Box] = {}
        for box, plan in kept.items():
            held = self.boxes.get(box)
            if activation.rollback:
                boxes[box] = Box(value_at(box, resume.version), resume)
            elif held is not None and held.stamp == resume:
                boxes[box] = replace(held, record=None)
            elif held is not None and held.record is not None and held.record.stamp == resume:
                boxes[box] = held
                self._update(box, held)
            else:
                assert self.rank in plan.catching_up, f"rank {self.rank} was given box {box} that it has no copy of"
        self.boxes, self.missing = boxes, set(kept) - set(boxes)
        for box, plan in kept.items():
            if plan.owner == self.rank and plan.catching_up:
                held = boxes[box]
                beside = self.folder / f".base-{box}-{activation.epoch}"
                beside.write_text(json.dumps([held.value, *held.stamp]))
                beside.rename(self.folder / f"base-{box}-{activation.epoch}")

    def _update(self, box: BoxId, held: Box) -> None:
        assert held.record is not None
        held.stamp = held.record.stamp
        held.value = (held.value * 31 + held.stamp.version) % (1 << 61)
        held.record = None

    def _catch_up(self) -> None:
        """Take bases that have come; what happened since depends on the version alone."""
        for box in sorted(self.missing):
            path = self.folder / f"base-{box}-{self.activation.epoch}"
            if path.exists():
                value, version, _ = json.loads(path.read_text())
                for v in range(version + 1, self.committed.version + 1):
                    value = (value * 31 + v) % (1 << 61)
                self.boxes[box] = Box(value, self.committed)
                self.missing.discard(box)
                missing = frozenset(self.missing)
                self.agent.copies_come(ComingCopies(missing, missing))
        if not self.missing:
            (self.folder / f"whole-{self.rank}-{self.activation.epoch}").touch()

    def _step(self) -> None:
        if not self.agent.may_step:
            print(f"rank {self.rank} waits for the store", flush=True)
        if not self.agent.await_store(5.0):
            return
        self._catch_up()
        members = self.activation.assignment.members
        stamp = Stamp(Version(self.committed.version + 1), self.activation.epoch)
        self.before_step()
        self.phase = "compute"
        time.sleep(self.pause_s)
        for held in self.boxes.values():
            held.record = Record(stamp, (), 0)
        tile = toy_planner.tile_of(self.rank, self.activation.assignment)
        flags = STOP_WANTED if self.wants_stop() else 0
        payload = Payload(
            count=ExactTotal.of(tile.sample_count), content_hash=stamp.version, buckets=((0, self.rank),), flags=flags
        )
        vote = Vote(stamp, self.rank, tuple(WorkSpan(tile.units, span) for span in tile.spans), payload.pack())
        self.votes[stamp, self.rank] = vote
        for peer in members:
            self._send(peer, vote)
        self.phase = "vote"
        while any((stamp, peer) not in self.votes for peer in members):
            self._receive(stamp)
        certificate = Certificate(stamp, tuple(self.votes[stamp, peer] for peer in members))
        self.stopped = any(Payload.unpack(vote.payload).flags & STOP_WANTED for vote in certificate.votes)
        self.phase = "update"
        self.committed = stamp
        self.agent.committed(certificate)
        self.votes = {key: old for key, old in self.votes.items() if key[0].version > stamp.version}
        for box, held in self.boxes.items():
            self._update(box, held)
        self.after_step(certificate)

    def wants_stop(self) -> bool:
        """Whether this rank votes for the end."""
        return False

    def before_step(self) -> None:
        """Where something may go wrong."""

    def after_step(self, certificate: Certificate) -> None:
        """Where a step is reported."""

    def _receive(self, stamp: Stamp) -> None:
        if self.aborted is not None:
            raise Lost(None)
        members = self.activation.assignment.members
        self.awaited = next((peer for peer in members if (stamp, peer) not in self.votes), None)
        try:
            heard = msgspec.msgpack.decode(self.socket.recv(1 << 16), type=Vote)
            if heard.stamp.epoch >= self.activation.epoch:
                self.votes[heard.stamp, heard.rank] = heard
        except TimeoutError:
            for peer in members:
                if peer != self.rank and (stamp, peer) not in self.votes:
                    self._probe(peer)
        self.awaited = None

    def _send(self, peer: Rank, vote: Vote) -> None:
        while peer != self.rank and self.aborted is None:
            try:
                self.socket.sendto(msgspec.msgpack.encode(vote), self._path(peer))
                return
            except TimeoutError:
                continue  # its queue is full
            except (ConnectionRefusedError, FileNotFoundError):
                raise Lost(peer) from None

    def _probe(self, peer: Rank) -> None:
        """Whether the peer's process is there."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as probe:
            try:
                probe.connect(self._path(peer))
            except (ConnectionRefusedError, FileNotFoundError):
                raise Lost(peer) from None

    def _links_down(self) -> list[Rank]:
        """The peers whose process is gone; called from the agent's thread."""
        down = []
        for peer in self.activation.assignment.members:
            try:
                self._probe(peer)
            except Lost:
                down.append(peer)
        return down

    def _path(self, peer: Rank) -> str:
        return str(self.folder / f"{peer}.sock")

    def _holdings(self) -> Holdings:
        copies = {box: Copy(held.stamp, held.value & 0xFFFF) for box, held in self.boxes.items()}
        records = {box: (held.record,) for box, held in self.boxes.items() if held.record is not None}
        return Holdings(self.committed, copies, records, tuple(self.votes.values()), frozenset(copies))


class ToyJob:
    """The launcher's part: starts and ends processes, and tells the coordinator who has exited, if `tells`."""

    def __init__(
        self, folder: Path, world: int, steps: int, *, pause_s: float = 0.004, least: int = 1, tells: bool = True
    ) -> None:
        self.folder, self.world, self.steps, self.pause_s, self.tells = folder, world, steps, pause_s, tells
        self.planning = ToyPlanning(least)
        assignment = toy_planner.first_assignment(world, UNITS)
        self.first = Activation(Epoch(0), assignment, SEED, SEED, None, rollback=True)
        first = Register(Term(0), self.first, SEED, SEED, None, SEED, numbers=world)
        self.store = FileStore.create(folder, first, text_of(assignment))
        self.listener = listen("127.0.0.1", 0)
        self.address = ControlAddress("127.0.0.1", port_of(self.listener), "t" * 32)
        self.home = JobHome(self.store.folder, folder)
        self.pids: dict[int, int] = {}
        self.ended: dict[int, int] = {}
        self.coordinators: list[int] = []
        self.channel: Channel | None = None
        self.said: list[tuple[str, dict[str, Any]]] = []

    def __enter__(self) -> ToyJob:
        self.start_coordinator()
        for rank in range(self.world):
            self.pids[rank] = self._fork(f"rank-{rank}", lambda rank=rank: self._rank(rank))
        return self

    def __exit__(self, *_: object) -> None:
        for pid in (*self.pids.values(), *self.coordinators):
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
        self.listener.close()
        with contextlib.suppress(OSError):
            self.store.settle()

    def _fork(self, name: str, body: Callable[[], int | None]) -> int:
        pid = os.fork()
        if pid:
            return pid
        code = 1
        try:
            log = os.open(self.folder / f"{name}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(log, 1)
            os.dup2(log, 2)
            sys.stdout, sys.stderr = os.fdopen(1, "w", 1, closefd=False), os.fdopen(2, "w", 1, closefd=False)
            code = body() or 0
        except BaseException:  # noqa: BLE001
            traceback.print_exc()
        finally:
            os._exit(code)

    def _rank(self, rank: int) -> None:
        self.listener.close()
        result = ToyRank(
            card_of(rank), self.first, self.address, self.home, self.folder, self.steps, self.pause_s
        ).run()
        beside = self.folder / f".result-{rank}"
        beside.write_text(json.dumps(result))
        beside.rename(self.folder / f"result-{rank}")

    def start_coordinator(self) -> int:
        """Another coordinator process; the newest gets the news of exits."""
        ours, theirs = Channel.pair()

        def body() -> int:
            ours.close()
            spec = CoordinatorSpec(
                address=self.address, home=self.home, planning=self.planning, conditions=Conditions()
            )
            return run_coordinator(spec, theirs, listener=self.listener)

        pid = self._fork("coordinator", body)
        theirs.close()
        self.channel = ours
        self.coordinators.append(pid)
        for rank in self.ended:
            self._tell(rank)
        return pid

    def _tell(self, rank: int) -> None:
        if self.tells and self.channel is not None and not self.channel.closed:
            self.channel.send("exited", rank=rank)

    def signal(self, rank: int, number: signal.Signals) -> None:
        os.kill(self.pids[rank], number)

    def kill_coordinator(self) -> None:
        pid = self.coordinators.pop()
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)

    def turn(self) -> None:
        """Look after the processes once."""
        for rank, pid in self.pids.items():
            if rank not in self.ended:
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    self.ended[rank] = status
                    self._tell(rank)
        if self.channel is not None:
            for message in self.channel.drain():
                if message.kind != "alive":
                    self.said.append((message.kind, dict(message.fields)))

    def until(self, happened: Callable[[], bool], what: str) -> None:
        end = time.monotonic() + WAIT_S
        while not happened():
            assert time.monotonic() < end, f"did not happen: {what}\n{self.logs()}"
            self.turn()
            time.sleep(0.005)

    def until_committed(self, version: int) -> None:
        self.until(lambda: self.store.read().committed.version >= version, f"version {version}")

    def places(self) -> list[str]:
        """How far each rank says it is."""
        paths = [self.folder / f"phase-{rank}" for rank in self.pids]
        return [path.read_text() if path.exists() else "" for path in paths]

    def settled(self) -> bool:
        """Whether nothing is being copied, so that any one rank may be lost."""
        register = self.store.read()
        return all((self.folder / f"whole-{rank}-{register.epoch}").exists() for rank in register.members)

    def wait(self, *ranks: int) -> dict[int, dict[str, Any]]:
        """Until these ranks (or all that were not killed) have ended; what they said."""
        self.until(lambda: all(rank in self.ended for rank in ranks or self.pids), "the end")
        paths = {rank: self.folder / f"result-{rank}" for rank in self.pids}
        return {rank: json.loads(path.read_text()) for rank, path in paths.items() if path.exists()}

    def events(self, kind: str) -> list[dict[str, Any]]:
        return [fields for said, fields in self.said if said == "event" and fields["event"] == kind]

    def ledger(self) -> list[dict[str, Any]]:
        self.store.flush()
        return json_lines(self.folder / "ledger.jsonl")

    def logs(self) -> str:
        return "\n".join(f"== {path.name}\n{path.read_text()[-3000:]}" for path in sorted(self.folder.glob("*.log")))
