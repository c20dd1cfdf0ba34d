"""A rank's process: the control machine of `protocol/rank.py`, a main thread, an engine, and the ends of its links.

The main thread is the worker's loop and recovery without their tensors: what they decide is the same pure functions
(`rank.must_leave`, `epoch_start.resolve`, ...). It is a generator that yields where the worker waits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from elaswave_fx.control.coordinator.plan_cache import Planned
from elaswave_fx.control.protocol import epoch_start
from elaswave_fx.control.protocol import rank as protocol
from elaswave_fx.control.protocol.coming_copies import ComingCopies
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
    Holdings,
    Interrupt,
    LeaveAsked,
    Left,
    LinksDown,
    MendLinks,
    Progress,
    RankState,
    StepLeft,
)
from elaswave_fx.control.protocol.types import Activation
from elaswave_fx.plan.work.box import Box, BoxId, numbered
from elaswave_fx.plan.work.topology import Epoch, Rank
from tools.sim.bugs import Rules
from tools.sim.checker import Checker
from tools.sim.engine import Engine
from tools.sim.frames import Abort, Frame, Wishes
from tools.sim.surroundings import StepFailed, UpdateFailed, Wait

COPY_DIFFERS = "copy differs"
"""What a rank says that finds a copy other than its owner's; the coordinator's events have names of their own."""


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
        self.left = False  # it was told to leave, and has
        self.hangs = self.update_will_fail = False
        self.aborted: Abort | None = None
        self._told: Abort | None = None  # the newest abort that a peer told of
        self._broadcast = Epoch(-1)
        self._peers: frozenset[Rank] = frozenset(state.members)
        self._boxes: tuple[Box, ...] = ()
        self._was: tuple[frozenset[Rank], Epoch] = (self._peers, state.epoch)  # members of the epoch of `_boxes`
        self._said: deque[Any] = deque()
        self._decision: Decision | None = None
        self._ran: object = None
        self._busy: object = None
        self._awaits: Callable[[], Rank | None] = lambda: None
        self._phase = "starting"
        self._coming = ComingCopies()
        self._damaged: frozenset[BoxId] = frozenset()
        self._stale: set[int] = set()  # buckets whose parameters are not whole, as long as nobody has sent them
        self._wishes: dict[Rank, frozenset[int]] = {}
        self._slow: tuple[float, int] = (1.0, 0)  # its speed, for so many steps
        self._main: Iterator[None] = iter(())

    @property
    def generation(self) -> Epoch:
        """The epoch that the links are in."""
        return self.engine.epoch

    # --- For the world ---

    def start(self, first: Activation | None) -> None:
        """As a member of the first epoch, or as one who asks to join."""
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

    def _open_links(self, peers: frozenset[Rank]) -> Wait:
        """To members of a new epoch."""
        until_s, mend_s = self.world.now + LINK_S, self.world.now
        while self.world.lost(self.rank).intersection(peers):
            if self.world.now > until_s:
                raise StepFailed(None, "a member cannot be reached")
            if self.world.now >= mend_s:
                self.world.mend(self.rank)
                mend_s += LINK_AGAIN_S
            yield from self.sleep(LINK_LOOK_S)

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
        """For so many steps."""
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
        failed: StepFailed | None = None
        begun = False
        try:
            while True:
                try:
                    if not begun:
                        begun = True
                        yield from self._begin(first)
                    if failed is not None:
                        yield from self._recover(failed)
                        failed = None
                    yield from self._between_steps()
                    yield from self._step()
                except StepFailed as error:
                    failed = error
        except UpdateFailed as error:
            self.ended = str(error)
        except _Over as over:
            self.ended = str(over)

    def _begin(self, first: Activation | None) -> Wait:
        """The state that the run begins with, on all ranks; a joiner waits until it is one of them."""
        if first is None:
            yield from self._install_epoch((yield from self._decide()))
            return
        boxes = self._boxes = first.assignment.boxes
        kept = [box_id for box_id, box in numbered(boxes) if self.rank in box.replica_ranks]
        yield from self._take_over(first)
        self.engine.load(first.resume, lambda box: self.world.checker.truth[box, first.resume], kept)
        self.engine.start_from_seed(box_id for box_id, box in numbered(boxes) if self.rank in box.readers)
        yield

    def _between_steps(self) -> Wait:
        self._phase, self._awaits = "between", lambda: None
        version = self.engine.committed.version
        if protocol.must_leave(self.state, version):
            raise StepFailed(None, "called off")
        while not protocol.may_step(self.state, self.world.now):
            if protocol.must_leave(self.state, version):
                raise StepFailed(None, "called off")
            yield

    def _step(self) -> Wait:
        engine = self.engine
        machine_awaits = self._awaited
        self._check_members()
        engine.begin_step()
        yield from self._wait("gather", engine.parameters_ready, machine_awaits)
        self._phase = "compute"
        self.world.checker.computes(engine, engine.parameters())
        yield from self._compute()
        self._check_members()
        yield from engine.send_copies()
        engine.reduce()
        yield from self._wait("reduce", engine.machine.ready_to_vote, machine_awaits)
        engine.send_late_records()
        while engine.awaits_bulk():
            yield from self.sleep(BULK_LOOK_S)
            self._check_members()
        yield from engine.send_copies()
        engine.cast_vote()
        yield from self._wait("vote", lambda: engine.certificate is not None, machine_awaits)
        self._phase = "update"
        if self.aborted is not None and self.world.chance(0.3):
            raise StepFailed(self.aborted.suspect, "aborted while it sends what follows from the commit")
        yield from engine.update()
        self._tell_commit()

    def _awaited(self) -> Rank | None:
        awaited = self.engine.machine.awaited
        return None if awaited is None else Rank(awaited)

    def _tell_commit(self) -> None:
        certificate, self.engine.certificate = self.engine.certificate, None
        assert certificate is not None
        leaves = protocol.must_leave(self.state, certificate.stamp.version)
        self._say(Committed(certificate, self.world.now, leaves), wakes=False)
        if self._coming.behind:
            machine, before = self.engine.machine, self._coming
            self._coming = before.seen(_boxes(machine.catching_up), _boxes(machine.far_behind))
            if self._coming != before:
                self._say(self._coming, wakes=True)

    def _recover(self, failed: StepFailed) -> Wait:
        engine = self.engine
        self.aborted = self.aborted or Abort(self.generation, failed.suspect)
        if failed.tells:
            self.world.hear(self.rank, COPY_DIFFERS, failed)
            self._broadcast_abort(failed.suspect)
        yield from engine.leave()
        if engine.certificate is not None:
            self._tell_commit()
        self._say(StepLeft(self._holdings(), failed.suspect), wakes=True)
        yield from self._install_epoch((yield from self._decide()))

    def _holdings(self) -> Holdings:
        machine, damaged = self.engine.machine, self._damaged
        found = [each for each in machine.holdings if each[0] not in damaged]
        votes = [self.engine.votes[rank] for rank in sorted(self.engine.votes)] if machine.pending else None
        return epoch_start.holdings(
            self.engine.committed,
            self.engine.epoch,
            {BoxId(box): digest for box, _, digest, _ in found},
            [BoxId(box) for box, _, _, recorded in found if recorded],
            votes,
        )

    def _decide(self) -> Any:
        """Wait for what comes next, as long as that takes."""
        self._phase, self._decision = "left", None
        while self._decision is None:
            yield
        if isinstance(self._decision, Left):
            self.left = True
            self._say(Closing(finished=False), wakes=False)
        if not isinstance(self._decision, Go):
            raise _Over(self._decision.reason)
        return self._decision

    def _install_epoch(self, go: Go) -> Wait:
        engine, activation = self.engine, go.activation
        boxes, joins = activation.assignment.boxes, not self._boxes
        before = self._boxes or boxes
        (was_members, was_epoch), members = self._was, frozenset(activation.assignment.members)
        if not self._rules.misses_are_seen:
            was_epoch = Epoch(activation.epoch - 1)
        elsewhere = not joins and epoch_start.is_elsewhere(engine.committed, was_epoch, activation)
        yield from self._open_links(epoch_start.anew(was_members, was_epoch, members, activation.epoch))
        if not elsewhere:
            self._check_promoted(before, boxes)
        yield from self._resolve_in_flight_step(activation, was_epoch)
        for gone in was_members - members:
            self.world.end_link(self.rank, gone)
        self._peers = members
        self.aborted, engine.epoch = None, activation.epoch
        if protocol.must_leave(self.state, engine.committed.version):
            raise StepFailed(None, "the epoch is over already")
        yield from self._take_over(activation)
        self._follow_abort()
        self._boxes, self._was = boxes, (members, activation.epoch)
        agree = activation.copies_agree and not epoch_start.has_missed(was_epoch, activation.epoch)
        self._stale |= epoch_start.unchecked_buckets(self.rank, before, boxes, agree, self._damaged)
        if elsewhere or joins:
            self._stale |= set(engine.buckets)
        if elsewhere:
            self._damaged = frozenset()
        if activation.rollback:
            kept = [box_id for box_id, box in numbered(boxes) if self.rank in box.replica_ranks]
            engine.load(activation.resume, lambda box: self.world.checker.truth[box, activation.resume], kept)
        elif elsewhere or joins:
            engine.load(activation.resume, lambda box: 0, ())
        yield from self._gather_parameters(activation)
        self._stale.clear()
        yield from engine.replicate(epoch_start.copies_due(boxes))
        self._coming = self._coming.anew(_boxes(engine.machine.catching_up))
        self._damaged = frozenset()

    def _resolve_in_flight_step(self, activation: Activation, was: Epoch) -> Wait:
        engine = self.engine
        if not self._boxes:
            return
        certificate = epoch_start.resolve(self.rank, activation, engine.committed, was, engine.machine.pending)
        if certificate is not None:
            yield from engine.finish(certificate)
            engine.certificate = None
        else:
            engine.drop()

    def _check_promoted(self, before: tuple[Box, ...], after: tuple[Box, ...]) -> None:
        found = [box for box in epoch_start.promoted(self.rank, before, after) if not self.engine.intact(box)]
        self._damaged |= frozenset(found)
        if found:
            raise StepFailed(None, f"copies of boxes {found} were damaged in memory")

    def _gather_parameters(self, activation: Activation) -> Wait:
        """Everybody tells everybody what it lacks; then it is sent."""
        engine, members = self.engine, activation.assignment.members
        own = frozenset(b for b in engine.read if b in self._stale or engine.machine.stale(b))
        self._wishes = {self.rank: own}
        for member in members:
            if member != self.rank:
                self.send(member, Wishes(engine.epoch, own))
        yield from self._wait("wishes", lambda: self._all_wishes(members), lambda: self._missing_wish(members))
        takers = {b: [r for r in members if b in self._wishes[r]] for b in engine.buckets}
        yield from engine.refresh(takers)
        yield from self._wait("refresh", engine.parameters_ready, self._awaited)

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


class _Over(Exception):
    """The process ends: it was left out, or nobody goes on."""
