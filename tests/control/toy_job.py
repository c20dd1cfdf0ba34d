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

from elaswave_fx.control.agent.agent import Agent, Excluded, Progress
from elaswave_fx.control.agent.ask_to_join import asking, await_members
from elaswave_fx.control.coordinator.plan_cache import Held, Joiners, Planned
from elaswave_fx.control.coordinator.service import CoordinatorSpec, run_coordinator
from elaswave_fx.control.job_folder import JobFolder
from elaswave_fx.control.protocol import do
from elaswave_fx.control.protocol.member_info import Conditions, MemberInfo
from elaswave_fx.control.protocol.probation import SlowRanks
from elaswave_fx.control.protocol.register import Register
from elaswave_fx.control.protocol.speed_meter import Expected
from elaswave_fx.control.protocol.training_loop import LoopState, StepFailed, perform, training
from elaswave_fx.control.protocol.types import (
    SEED,
    Activation,
    Assignment,
    BoxId,
    Certificate,
    Stamp,
    Term,
    Version,
    Vote,
)
from elaswave_fx.control.store.exact_total import ExactTotal
from elaswave_fx.control.store.file_store import FileStore
from elaswave_fx.control.store.ledger import STOP_WANTED, Payload
from elaswave_fx.control.tcp import listen, port_of
from elaswave_fx.control.wire import ControlAddress
from elaswave_fx.errors import PlanError
from elaswave_fx.files import json_lines
from elaswave_fx.launch.channel import Channel
from elaswave_fx.plan.next.replan_request import ReplanRequest
from elaswave_fx.plan.work.box import numbered
from elaswave_fx.plan.work.topology import Epoch, Rank
from tests.control import toy_planner
from tests.control.member_infos import info_of

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
        joiners: Joiners | None = None,
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

    def successor(self, before: Planned, held: Held, request: ReplanRequest) -> Planned | None:
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


@dataclass
class Box:
    """What it is worth, and since when."""

    value: int
    stamp: Stamp


class ToyRank:
    """One rank: its main thread does what `training_loop` says."""

    def __init__(
        self, info: MemberInfo, first: Activation, address: ControlAddress, job_folder: JobFolder, folder: Path,
        steps: int, pause_s: float,
    ) -> None:  # fmt: skip
        self.rank, self.folder, self.steps, self.pause_s = info.number, folder, steps, pause_s
        self.info, self.address = info, address
        assignment = first.assignment
        self.activation = first
        self.loop = LoopState(self.rank, first.epoch, assignment.members, assignment.boxes, first.resume)
        self.boxes: dict[BoxId, Box] = {}
        self.missing: set[BoxId] = set()
        self.votes: dict[tuple[Stamp, Rank], Vote] = {}
        self.voted: Stamp | None = None  # a step that is not committed here
        self.aborted: str | None = None
        self.phase, self.awaited = "start", None
        self.epochs = 1
        self.stopped = False  # somebody's vote said so
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind(self._path(self.rank))
        self.socket.settimeout(0.005)
        self.agent = Agent(
            info, first, address, job_folder, interrupt=self._interrupt, progress=self._progress,
            lost=self._links_down, mend=lambda: None, say=print,
        )  # fmt: skip
        self._does: dict[type, Callable[[Any], Any]] = {
            do.Begin: lambda _: self._load(first),
            do.MustLeave: lambda _: self.agent.stop_requested,
            do.MayStep: self._may_step,
            do.BetweenSteps: lambda what: what.done < self.steps and not self.stopped,
            do.TakeStep: self._take_step,
            do.ReportCommit: self._report_commit,
            do.ReadSyncState: lambda _: (frozenset(self.missing), frozenset(self.missing)),
            do.ReportSyncState: lambda what: self.agent.report_sync(what.sync),
            do.AbortStep: self._leave_step,
            do.Report: lambda what: self.agent.report_and_wait(what.holdings, what.suspect),
            do.VerifyReplicas: lambda _: set(),
            do.FinishStep: lambda what: self._update(what.certificate.stamp),
            do.DropStep: self._drop_step,
            do.InstallPlan: self._install,
            do.Restore: lambda _: self._load(self.activation),
            do.SyncReplicas: self._send_replicas,
            do.EpochBegun: self._enter,
            do.Finish: self._finish,
        }

    def _interrupt(self, reason: str) -> None:
        self.aborted = reason

    def _progress(self) -> Progress:
        return Progress(self.phase, self.awaited)

    def await_members(self) -> tuple[MemberInfo, ...]:
        """The infos of all first ranks, once they have come."""
        with asking(self.address) as line:
            return await_members(line, self.info, time.monotonic() + WAIT_S)

    def run(self) -> dict[str, Any]:
        """To the end of the job; what the rank has then."""
        self.agent.start()
        ended = perform(training(self.loop), lambda said: self._does.get(type(said), lambda _: None)(said))
        if ended is not None:
            self.agent.close(finished=False)
            return {"end": "excluded" if isinstance(ended, Excluded) else "over", "reason": ended.reason}
        self.phase = "end"
        (self.folder / f"phase-{self.rank}").write_text(self.phase)
        self.agent.close()
        values = {str(box): [held.value, held.stamp.version] for box, held in self.boxes.items()}
        return {"end": "done", "version": self.loop.committed.version, "boxes": values, "epochs": self.epochs,
                "members": list(self.loop.members)}  # fmt: skip

    # --- Epochs

    def _load(self, activation: Activation) -> None:
        """The state that an epoch begins with, which everybody can make."""
        resume, boxes = activation.resume, activation.assignment.boxes
        kept = [box_id for box_id, box in numbered(boxes) if self.rank in box.replica_ranks]
        self.boxes = {box: Box(value_at(box, resume.version), resume) for box in kept}

    def _leave_step(self, what: do.AbortStep) -> do.Inventory:
        in_flight = [vote for (stamp, _), vote in self.votes.items() if stamp == self.voted]
        recorded = () if self.voted is None else tuple(self.boxes)
        digests = {box: held.value & 0xFFFF for box, held in self.boxes.items()}
        return do.Inventory(None, digests, recorded, tuple(in_flight) if self.voted is not None else None)

    def _drop_step(self, _: do.DropStep) -> None:
        self.voted = None

    def _install(self, what: do.InstallPlan) -> frozenset[int]:
        assert what.go.activation.epoch > self.activation.epoch
        self.activation, self.aborted = what.go.activation, None
        kept = {
            box_id: box for box_id, box in numbered(self.activation.assignment.boxes) if self.rank in box.replica_ranks
        }
        self.boxes = {box: held for box, held in self.boxes.items() if box in kept and not what.restart}
        self.missing = set(kept) - set(self.boxes)
        for box in self.missing:
            assert what.restart or self.rank in kept[box].catching_up, f"rank {self.rank} has no replica of box {box}"
        return frozenset()

    def _send_replicas(self, what: do.SyncReplicas) -> frozenset[BoxId]:
        self.missing -= set(self.boxes)
        for box, owner, _ in what.transfers:
            if owner == self.rank:
                held = self.boxes[box]
                beside = self.folder / f".base-{box}-{self.activation.epoch}"
                beside.write_text(json.dumps([held.value, *held.stamp]))
                beside.rename(self.folder / f"base-{box}-{self.activation.epoch}")
        return frozenset(self.missing)

    def _enter(self, _: do.EpochBegun) -> None:
        self.epochs += 1

    def _update(self, stamp: Stamp) -> None:
        """A step is committed: every box is another number."""
        for held in self.boxes.values():
            held.value, held.stamp = (held.value * 31 + stamp.version) % (1 << 61), stamp
        self.voted = None
        self.votes = {key: old for key, old in self.votes.items() if key[0].version > stamp.version}

    def _catch_up(self) -> None:
        """Take bases that have come; what happened since depends on the version alone."""
        committed = self.loop.committed
        for box in sorted(self.missing):
            path = self.folder / f"base-{box}-{self.activation.epoch}"
            if path.exists():
                value, version, _ = json.loads(path.read_text())
                for v in range(version + 1, committed.version + 1):
                    value = (value * 31 + v) % (1 << 61)
                self.boxes[box] = Box(value, committed)
                self.missing.discard(box)
        if not self.missing:
            (self.folder / f"whole-{self.rank}-{self.activation.epoch}").touch()

    def _finish(self, _: do.Finish) -> None:
        """No rank ends before all have the last step: the end of one is the end of the job."""
        others = [self.folder / f"finished-{rank}-{self.loop.epoch}" for rank in self.loop.members]
        (self.folder / f"finished-{self.rank}-{self.loop.epoch}").touch()
        while not all(other.exists() for other in others):
            if self.aborted is not None:
                raise StepFailed(None, self.aborted)
            time.sleep(0.002)

    # --- Steps

    def _may_step(self, _: do.MayStep) -> bool:
        if not self.agent.may_step:
            print(f"rank {self.rank} waits for the store", flush=True)
        return self.agent.await_store(5.0)

    def _take_step(self, what: do.TakeStep) -> Certificate:
        self._catch_up()
        members = self.loop.members
        stamp = Stamp(Version(what.step + 1), self.loop.epoch)
        self.before_step()
        self.phase = "compute"
        time.sleep(self.pause_s)
        tile = toy_planner.tile_of(self.rank, self.activation.assignment)
        flags = STOP_WANTED if self.wants_stop() else 0
        payload = Payload(
            count=ExactTotal.of(tile.sample_count), content_hash=stamp.version, buckets=((0, self.rank),), flags=flags
        )
        vote = Vote(stamp, self.rank, tile.work, payload.pack())
        self.votes[stamp, self.rank], self.voted = vote, stamp
        for peer in members:
            self._send(peer, vote)
        self.phase = "vote"
        while any((stamp, peer) not in self.votes for peer in members):
            self._receive(stamp)
        certificate = Certificate(stamp, tuple(self.votes[stamp, peer] for peer in members))
        self.stopped = any(Payload.unpack(vote.payload).flags & STOP_WANTED for vote in certificate.votes)
        self.phase = "update"
        self._update(stamp)
        return certificate

    def _report_commit(self, what: do.ReportCommit) -> None:
        self.agent.committed(what.certificate)
        self.after_step(what.certificate)

    def wants_stop(self) -> bool:
        """Whether this rank votes for the end."""
        return False

    def before_step(self) -> None:
        """Where something may go wrong."""

    def after_step(self, certificate: Certificate) -> None:
        """Where a step is reported."""

    def _receive(self, stamp: Stamp) -> None:
        if self.aborted is not None:
            raise StepFailed(None, self.aborted)
        members = self.loop.members
        self.awaited = next((peer for peer in members if (stamp, peer) not in self.votes), None)
        try:
            heard = msgspec.msgpack.decode(self.socket.recv(1 << 16), type=Vote)
            if heard.stamp.epoch >= self.loop.epoch:
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
                raise StepFailed(peer, f"rank {peer} is gone") from None

    def _probe(self, peer: Rank) -> None:
        """Whether the peer's process is there."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as probe:
            try:
                probe.connect(self._path(peer))
            except (ConnectionRefusedError, FileNotFoundError):
                raise StepFailed(peer, f"rank {peer} is gone") from None

    def _links_down(self) -> list[Rank]:
        """The peers whose process is gone; called from the agent's thread."""
        down = []
        for peer in self.activation.assignment.members:
            try:
                self._probe(peer)
            except StepFailed:
                down.append(peer)
        return down

    def _path(self, peer: Rank) -> str:
        return str(self.folder / f"{peer}.sock")


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
        self.job_folder = JobFolder(self.store.folder, folder)
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
        toy = ToyRank(info_of(rank), self.first, self.address, self.job_folder, self.folder, self.steps, self.pause_s)
        toy.await_members()
        result = toy.run()
        beside = self.folder / f".result-{rank}"
        beside.write_text(json.dumps(result))
        beside.rename(self.folder / f"result-{rank}")

    def start_coordinator(self) -> int:
        """Another coordinator process; the newest gets the request of exits."""
        ours, theirs = Channel.pair()

        def body() -> int:
            ours.close()
            spec = CoordinatorSpec(
                address=self.address, job_folder=self.job_folder, planning=self.planning, conditions=Conditions()
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
        """Whether no replica syncs, so that any one rank may be lost."""
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
