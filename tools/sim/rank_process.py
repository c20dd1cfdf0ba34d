"""A rank's process: the control machine of `protocol/rank.py`, a main thread, an engine, and the ends of its links.

The main thread does what `protocol/training_loop.py` says, as the worker's does, with digests in place of tensors: each
method is a generator that yields where the worker waits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from elaswave_fx.control.coordinator.plan_cache import Planned
from elaswave_fx.control.protocol import do
from elaswave_fx.control.protocol import rank as protocol
from elaswave_fx.control.protocol.epoch_start import outside
from elaswave_fx.control.protocol.messages import (
    COORDINATOR,
    Ack,
    Activate,
    MustStay,
    Over,
    Prepare,
    Prepared,
    Send,
    StoreSeen,
)
from elaswave_fx.control.protocol.rank_state import (
    Answer,
    Closing,
    Committed,
    Decision,
    Event,
    Go,
    HeartbeatDue,
    Interrupt,
    LeaveAsked,
    Left,
    LinksDown,
    MendLinks,
    Progress,
    RankState,
    StepLeft,
)
from elaswave_fx.control.protocol.training_loop import Ended, LoopState, StepFailed, training
from elaswave_fx.control.protocol.types import Activation, Certificate
from elaswave_fx.plan.work.box import BoxId, numbered
from elaswave_fx.plan.work.topology import Epoch, Rank
from tools.sim.bugs import Rules
from tools.sim.checker import Checker
from tools.sim.engine import Engine
from tools.sim.frames import Abort, Frame, Wishes
from tools.sim.surroundings import UpdateFailed, Wait

REPLICA_DIFFERS = "replica differs"
"""What a rank says that finds a replica other than its owner's; the coordinator's events have names of their own."""


LINK_S, LINK_AGAIN_S, LINK_LOOK_S = 5.0, 1.0, 0.01
"""For the links to new members, as in `worker/recovery.py`; until they are dialed again, and until the next look."""
BULK_LOOK_S = 0.002
"""Until a rank looks again whether what it sent in bulk has arrived."""


class Surroundings(Protocol):
    """What a process needs of the world."""

    now: float
    checker: Checker
    plans: dict[int, Planned]

    def send(self, source: Rank, target: Rank, message: object, bulk: bool) -> float | None: ...
    def after(self, seconds: float, rank: Rank, event: object) -> None: ...
    def lost(self, rank: Rank) -> frozenset[Rank]: ...
    def mend(self, rank: Rank) -> None: ...
    def end_link(self, rank: Rank, peer: Rank) -> None: ...
    def hear(self, source: Rank, name: str, said: object) -> None: ...
    def chance(self, of: float) -> bool: ...
    def may_die(self, address: Rank) -> bool: ...
    def compute_s(self) -> float: ...


@dataclass(frozen=True, eq=False)
class Ran:
    """The time that an instruction takes has passed."""


@dataclass(frozen=True, eq=False)
class Wake:
    """The main thread has said something to the control thread."""


class RankProcess:
    """One rank. Methods that the world calls: `start`, `handle`. `ended`: the process is over by itself."""

    def __init__(self, world: Surroundings, state: RankState, rules: Rules) -> None:
        self.world, self.state, self._rules = world, state, rules
        self.rank = state.rank
        self.engine = Engine(self.rank, self, world.checker, rules.without)
        self.ended: str | None = None
        self.left = False  # it was asked to leave, and has
        self.hangs = self.update_will_fail = False
        self.aborted: Abort | None = None
        self._told: Abort | None = None  # the newest abort that a peer told of
        self._broadcast = Epoch(-1)
        self._peers: frozenset[Rank] = frozenset(state.members)
        self._linked = self._next = self._peers  # to whom there was a link; members of the epoch to come
        self._said: deque[Any] = deque()
        self._decision: Decision | None = None
        self._ran: object = None
        self._busy: object = None
        self._awaits: Callable[[], Rank | None] = lambda: None
        self._phase = "starting"
        self._wishes: dict[Rank, frozenset[int]] = {}
        self._slow: tuple[float, int] = (1.0, 0)  # its speed, for so many steps
        self._main: Iterator[None] = iter(())

    @property
    def generation(self) -> Epoch:
        """The epoch that the links are in."""
        return self.engine.epoch

    # --- For the world ---

    def start(self, first: Activation | None) -> None:
        """Start as a member of the first epoch, or as one that asks to join."""
        self._main = self._run(first)
        next(self._main)

    def handle(self, event: object, sender: Rank) -> None:
        """One event of the process, and what the main thread makes of it."""
        if isinstance(event, Ran):
            self._ran = event
        elif isinstance(event, Abort):
            self._told = event if self._told is None or event.epoch >= self._told.epoch else self._told
            self._follow_abort()
        elif isinstance(event, HeartbeatDue):
            self._feed(HeartbeatDue(Progress(self._phase, None if self._busy else self._awaits())))
        elif isinstance(event, Ack | Prepare | Activate | Over | StoreSeen | LeaveAsked | MustStay):
            if isinstance(event, Prepare):
                self._feed(self._links_down())
            self._feed(event)
        elif isinstance(event, LinkNews):
            if self.state.waiting and (links := self._links_down()).peers != self.state.broken:
                self._feed(links)
        elif not isinstance(event, Wake):
            self.engine.receive(sender, event)  # type: ignore[arg-type]
        self._hear_main_thread()
        if self.ended is None and self._busy is self._ran:
            self._busy = self._ran = None
            next(self._main, None)

    # --- The control thread ---

    def _hear_main_thread(self) -> None:
        while self._said:
            said = self._said.popleft()
            if isinstance(said, StepLeft):
                self._feed(self._links_down())
            self._feed(said)

    def _links_down(self) -> LinksDown:
        return LinksDown(self.world.lost(self.rank).intersection(self.state.members))

    def _say(self, what: object, wakes: bool) -> None:
        self._said.append(what)
        if wakes:
            self.world.after(0.0001, self.rank, Wake())

    def _feed(self, event: Event) -> None:
        self.state, actions = protocol.step(self.state, event, self.world.now)
        for action in actions:
            if isinstance(action, Send):
                if isinstance(action.message, Prepared):
                    self.world.checker.reports(self.rank, action.message.report)
                self.world.send(self.rank, COORDINATOR, action.message, False)
            elif isinstance(action, Interrupt):
                self._broadcast_abort(None)
            elif isinstance(action, Answer):
                self._decision = action.decision
            elif isinstance(action, MendLinks):
                self.world.mend(self.rank)
            else:
                self.ended = action.reason

    # --- Links ---

    @property
    def now(self) -> float:
        """Seconds of the simulated world."""
        return self.world.now

    def send(self, peer: Rank, frame: Frame, bulk: bool = False) -> float | None:
        """A frame to a rank, and when it arrives; lost if the link is down."""
        return self.world.send(self.rank, peer, frame, bulk)

    def _broadcast_abort(self, suspect: Rank | None) -> None:
        """Here, and at the peers 1, 2, 4, ... places further in the ring, who pass it on; once per generation."""
        epoch = self.generation
        self.aborted = self.aborted or Abort(epoch, suspect)
        if self._broadcast >= epoch:
            return
        self._broadcast = epoch
        peers = sorted(self._peers - {self.rank} - self.world.lost(self.rank))
        ring = [r for r in peers if r > self.rank] + [r for r in peers if r < self.rank]
        distance = 1
        while distance <= len(ring):
            self.send(ring[distance - 1], Abort(epoch, suspect))
            distance *= 2

    def _follow_abort(self) -> None:
        """One of an older generation is over; one of a newer waits until we get there."""
        if self._told is not None and self._told.epoch == self.generation and self.aborted is None:
            self._broadcast_abort(self._told.suspect)

    def _take_over(self, activation: Activation) -> Wait:
        """Its roles, and what its plan, whose text a real rank is sent, has this rank compute."""
        assignment = activation.assignment
        tile = self.world.plans[assignment.plan_hash].plan.tile(self.rank)
        yield from self.engine.install(activation.epoch, assignment, tile)

    def _check_members(self) -> None:
        """Between two instructions: whether the step can still be finished."""
        if self.aborted is not None:
            raise StepFailed(self.aborted.suspect, "aborted")
        lost = self.world.lost(self.rank).intersection(self.state.members)
        if lost:
            self._broadcast_abort(min(lost))
            raise StepFailed(min(lost), "a link is down")

    # --- The main thread ---

    def sleep(self, seconds: float) -> Wait:
        """The main thread works for so long."""
        self._busy = ran = Ran()
        if not self.hangs:
            self.world.after(seconds, self.rank, ran)
        yield

    def slow_down(self, speed: float, steps: int) -> None:
        """Slow down for so many steps."""
        self._slow = (speed, steps)

    def _compute(self) -> Wait:
        """The units of the tile, which take longer while the rank is slow; what the vote says is of the tile's size,
        though the time here is not."""
        (speed, steps), mean_s = self._slow, self.world.compute_s()
        self._slow = (speed, steps - 1)
        seconds = mean_s / speed if steps > 0 else mean_s
        self.engine.busy_s = seconds * self.engine.tile_size
        yield from self.sleep(seconds)

    def get_on(self) -> None:
        """The main thread hangs no more."""
        self.hangs = False
        if self._busy is not None:
            self.world.after(0.0, self.rank, self._busy)

    def update_fails(self) -> bool:
        """Whether the update that has just run failed; not that of the last one that gets on."""
        fails, self.update_will_fail = self.update_will_fail and self.world.may_die(self.rank), False
        return fails

    def _wait(self, phase: str, done: Callable[[], bool], awaits: Callable[[], Rank | None]) -> Wait:
        """Take what comes until `done`, or the step fails."""
        self._phase, self._awaits = phase, awaits
        while True:
            self._check_members()
            yield from self.engine.progress()
            if done():
                return
            yield

    def _run(self, first: Activation | None) -> Wait:
        go = None
        if first is None:  # it joins
            decision = yield from self._decide()
            if not isinstance(decision, Go):
                return self._end(decision)
            go, first = decision, decision.activation
            self.engine.load(first.resume, lambda box: 0, ())
        self._first = first
        boxes, members = first.assignment.boxes, first.assignment.members
        self.loop = (
            LoopState(self.rank, first.epoch, members, boxes, first.resume)
            if go is None
            else LoopState(self.rank, first.epoch, members, outside(boxes, self.rank), first.resume, started=True)
        )
        try:
            self._end((yield from self._follow(training(self.loop, go))))
        except UpdateFailed as error:
            self.ended = str(error)

    def _end(self, why: Ended | None) -> None:
        assert why is not None, "nobody finishes here"
        if isinstance(why, Left):
            self.left = True
            self._say(Closing(finished=False), wakes=False)
        self.ended = why.reason

    def _follow(self, loop: Generator[Any, Any, Ended | None]) -> Generator[None, None, Ended | None]:
        """Do what the loop says, but for what the rules leave out."""
        answer: Any = None
        failed: StepFailed | None = None
        while True:
            try:
                do = loop.send(answer) if failed is None else loop.throw(failed)
            except StopIteration as end:
                return end.value
            answer = failed = None
            if type(do) in self._rules.left_out:
                answer = self._rules.left_out[type(do)]
                continue
            try:
                answer = _DOES[type(do)](self, do)
                if isinstance(answer, Generator):
                    answer = yield from answer
            except StepFailed as error:
                failed = error

    def _begin(self, _: do.Begin) -> Wait:
        boxes, resume, truth = self.loop.boxes, self.loop.committed, self.world.checker.truth
        kept = [box_id for box_id, box in numbered(boxes) if self.rank in box.replica_ranks]
        yield from self._take_over(self._first)
        self.engine.load(resume, lambda box: truth[box, resume], kept)
        self.engine.start_from_seed(box_id for box_id, box in numbered(boxes) if self.rank in box.readers)

    def _barrier(self, _: do.Barrier) -> Wait:
        yield

    def _must_leave(self, _: do.MustLeave) -> bool:
        return protocol.must_leave(self.state, self.loop.committed.version)

    def _may_step(self, _: do.MayStep) -> Generator[None, None, bool]:
        self._phase, self._awaits = "between", lambda: None
        if protocol.may_step(self.state, self.world.now):
            return True
        yield
        return False

    def _take_step(self, _: do.TakeStep) -> Generator[None, None, Certificate]:
        engine = self.engine
        self._check_members()
        engine.begin_step()
        yield from self._wait("gather", engine.parameters_ready, self._awaited)
        self._phase = "compute"
        self.world.checker.computes(engine, engine.parameters())
        yield from self._compute()
        self._check_members()
        yield from engine.send_replicas()
        engine.reduce()
        yield from self._wait("reduce", engine.machine.ready_to_vote, self._awaited)
        engine.send_catch_up_records()
        while engine.awaits_bulk():
            yield from self.sleep(BULK_LOOK_S)
            self._check_members()
        yield from engine.send_replicas()
        engine.cast_vote()
        yield from self._wait("vote", lambda: engine.certificate is not None, self._awaited)
        self._phase = "update"
        if self.aborted is not None and self.world.chance(0.3):
            raise StepFailed(self.aborted.suspect, "aborted while it sends what follows from the commit")
        yield from engine.update()
        certificate = engine.take_certificate()
        assert certificate is not None
        return certificate

    def _awaited(self) -> Rank | None:
        awaited = self.engine.machine.awaited
        return None if awaited is None else Rank(awaited)

    def _report_commit(self, what: do.ReportCommit) -> None:
        leaves = protocol.must_leave(self.state, what.certificate.stamp.version)
        self._say(Committed(what.certificate, self.world.now, leaves), wakes=False)

    def _read_sync_state(self, _: do.ReadSyncState) -> tuple[frozenset[BoxId], frozenset[BoxId]]:
        return _boxes(self.engine.machine.syncing), _boxes(self.engine.machine.lagging)

    def _report_sync_state(self, what: do.ReportSyncState) -> None:
        self._say(what.sync, wakes=True)

    def _report_mismatch(self, what: do.ReportMismatch) -> None:
        self.world.hear(self.rank, REPLICA_DIFFERS, what)
        self._broadcast_abort(what.suspect)

    def _abort_step(self, what: do.AbortStep) -> Generator[None, None, do.Inventory]:
        engine = self.engine
        self.aborted = self.aborted or Abort(self.generation, what.suspect)
        yield from engine.leave()
        found = engine.machine.holdings
        return do.Inventory(
            engine.take_certificate(),
            {BoxId(box): digest for box, _, digest, _ in found},
            tuple(BoxId(box) for box, _, _, recorded in found if recorded),
            tuple(engine.votes[rank] for rank in sorted(engine.votes)) if engine.machine.pending else None,
        )

    def _report(self, what: do.Report) -> Generator[None, None, Decision]:
        self._say(StepLeft(what.holdings, what.suspect), wakes=True)
        decision = yield from self._decide()
        if isinstance(decision, Go) and not self._rules.misses_are_seen:
            self.loop.epoch = Epoch(decision.activation.epoch - 1)
        return decision

    def _decide(self) -> Generator[None, None, Decision]:
        """Wait for what comes next, as long as that takes."""
        self._phase, self._decision = "left", None
        while self._decision is None:
            yield
        return self._decision

    def _open_links(self, what: do.OpenLinks) -> Wait:
        members = frozenset(what.go.activation.assignment.members)
        wanted, until_s, mend_s = what.anew | (members - self._linked), self.world.now + LINK_S, self.world.now
        while self.world.lost(self.rank).intersection(wanted):
            if self.world.now > until_s:
                raise StepFailed(None, "a member cannot be reached")
            if self.world.now >= mend_s:
                self.world.mend(self.rank)
                mend_s += LINK_AGAIN_S
            yield from self.sleep(LINK_LOOK_S)
        self._linked |= members
        self._next = members

    def _verify_replicas(self, what: do.VerifyReplicas) -> set[BoxId]:
        return {box for box in what.boxes if not self.engine.intact(box)}

    def _finish_step(self, what: do.FinishStep) -> Wait:
        yield from self.engine.finish(what.certificate)
        self.engine.certificate = None

    def _drop_step(self, _: do.DropStep) -> None:
        self.engine.drop()

    def _advance_links(self, what: do.AdvanceLinks) -> None:
        for gone in what.gone:
            self.world.end_link(self.rank, gone)
        self._peers, self.aborted, self.engine.epoch = self._next, None, what.epoch

    def _install_plan(self, what: do.InstallPlan) -> Generator[None, None, set[int]]:
        activation, engine = what.go.activation, self.engine
        yield from self._take_over(activation)
        self._follow_abort()
        if what.restart:
            engine.load(activation.resume, lambda box: 0, ())
            return set(engine.buckets)
        return {bucket for bucket in engine.read if engine.machine.stale(bucket)}

    def _restore(self, what: do.Restore) -> None:
        truth = self.world.checker.truth
        kept = [box_id for box_id, box in numbered(self.loop.boxes) if self.rank in box.replica_ranks]
        self.engine.load(what.to, lambda box: truth[box, what.to], kept)

    def _gather_parameters(self, what: do.GatherParameters) -> Wait:
        """Everybody tells everybody what it lacks; then it is sent."""
        engine, members = self.engine, self.loop.members
        self._wishes = {self.rank: what.stale}
        for member in members:
            if member != self.rank:
                self.send(member, Wishes(engine.epoch, what.stale))
        yield from self._wait("wishes", lambda: self._all_wishes(members), lambda: self._missing_wish(members))
        takers = {b: [r for r in members if b in self._wishes[r]] for b in engine.buckets}
        yield from engine.refresh(takers)
        yield from self._wait("refresh", engine.parameters_ready, self._awaited)

    def _sync_replicas(self, what: do.SyncReplicas) -> Generator[None, None, frozenset[BoxId]]:
        yield from self.engine.replicate(what.transfers)
        return _boxes(self.engine.machine.syncing)

    def _all_wishes(self, members: tuple[Rank, ...]) -> bool:
        for member in members:
            if member not in self._wishes and (found := self.engine.take_wish(member)) is not None:
                self._wishes[member] = found
        return len(self._wishes) == len(members)

    def _missing_wish(self, members: tuple[Rank, ...]) -> Rank | None:
        return next((member for member in members if member not in self._wishes), None)


def _boxes(numbers: Iterable[int]) -> frozenset[BoxId]:
    return frozenset(BoxId(number) for number in numbers)


@dataclass(frozen=True, eq=False)
class LinkNews:
    """A link of the process broke, or is open again."""


_DOES: Mapping[type, Callable[[RankProcess, Any], Any]] = {
    do.Begin: RankProcess._begin,
    do.Barrier: RankProcess._barrier,
    do.MustLeave: RankProcess._must_leave,
    do.FlushSends: lambda process, what: None,
    do.MayStep: RankProcess._may_step,
    do.BetweenSteps: lambda process, what: True,
    do.TakeStep: RankProcess._take_step,
    do.ReportCommit: RankProcess._report_commit,
    do.ReadSyncState: RankProcess._read_sync_state,
    do.ReportSyncState: RankProcess._report_sync_state,
    do.ReportMismatch: RankProcess._report_mismatch,
    do.AbortStep: RankProcess._abort_step,
    do.Report: RankProcess._report,
    do.OpenLinks: RankProcess._open_links,
    do.VerifyReplicas: RankProcess._verify_replicas,
    do.FinishStep: RankProcess._finish_step,
    do.DropStep: RankProcess._drop_step,
    do.AdvanceLinks: RankProcess._advance_links,
    do.InstallPlan: RankProcess._install_plan,
    do.Restore: RankProcess._restore,
    do.GatherParameters: RankProcess._gather_parameters,
    do.SyncReplicas: RankProcess._sync_replicas,
    do.EpochBegun: lambda process, what: None,
}
