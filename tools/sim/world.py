"""One schedule: a queue of events in simulated seconds, processes, the network, the store, and the checker watching.

In: a seed. Out: `Outcome`; equal seeds give equal outcomes and traces, on any machine. Heartbeats, deadlines and limits
are those of a real run, in the same seconds.

    run_schedule(17)  ->  Outcome(seed=17, violation=None, committed=9, ...)
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from functools import partial
from heapq import heappop, heappush
from random import Random

from elaswave_fx.control.agent.agent import LIMITS
from elaswave_fx.control.protocol import rank as protocol
from elaswave_fx.control.protocol.events import EVENT_TYPES, Agreed, Over, Waiting, label
from elaswave_fx.control.protocol.failure_detector import HEARTBEAT_S
from elaswave_fx.control.protocol.messages import (
    COORDINATOR,
    Connected,
    Disconnected,
    Exited,
    Heartbeat,
    Numbered,
    NumberWanted,
    Saved,
    Send,
    StoreSeen,
    Tick,
)
from elaswave_fx.control.protocol.rank_state import STARTING, HeartbeatDue, LeaveAsked, RankState
from elaswave_fx.control.protocol.register import Read, Register, StoreReply, Swap, swap
from elaswave_fx.control.protocol.types import SEED, Activation, BoxId, Certificate, Stamp, Term
from elaswave_fx.errors import ExecError
from elaswave_fx.plan.work.box import numbered
from elaswave_fx.plan.work.topology import Epoch, Rank
from tools.sim.bugs import SOUND, Rules
from tools.sim.checker import Checker, Violation
from tools.sim.coordinator_process import CoordinatorProcess
from tools.sim.engine import Engine
from tools.sim.faults import CRASHES, SLOW, UNTOLD_S, WINDOW_STEPS, Fault, Moment, draw, draw_reshapes, draw_slow
from tools.sim.inject import STORE, Injector
from tools.sim.job import first_plan
from tools.sim.network import GIVEN_UP_S, Network
from tools.sim.outcome import Excused, Outcome
from tools.sim.rank_process import LinkNews, RankProcess

QUIET_STEPS = 2
"""Steps that must be committed after the last fault has ended."""

LIMIT_S = 300.0
"""Simulated seconds after the last fault in which that must have happened: a rank that hangs has thirty times the
slowest step, and one in which links were silent takes some seconds."""

ASK_AGAIN_S = 1.0
"""A joiner whose coordinator has gone asks the next one."""

MOST_EVENTS = 60_000
"""Of a schedule: several times what the longest of thousands has; ranks that recover for ever get there soon."""

WARM_STEPS = 2
"""Steps that are in the ledger before deadlines follow from measured ones; until then a start has its ten minutes."""

BULK_S = (0.05, 0.05, 0.4, 1.5)
"""What the state of a box takes on its way, up to 30 steps: also more than a rank keeps records for."""

MEND_S = 1.0
"""For one attempt of a rank to open its broken links, as in `worker/worker.py`."""

LEAVES_S = 4.0
"""A rank that was asked to leave has so long, while faults go on, before the end of the schedule is looked for."""

BLOCKED_S = 30.0
"""After this time a user looks after a rank that the job waits for."""

FIRST_COORDINATOR = -10
"""Coordinator processes have addresses downwards from here; COORDINATOR is the newest."""


class Killed(Exception):
    """The process ends in the middle of what it does."""


@dataclass(slots=True)
class Process:
    """A rank or a coordinator. `inbox` fills while it is paused; `keep`: messages that it still sends."""

    body: RankProcess | CoordinatorProcess
    alive: bool = True
    paused_until_s: float = 0.0
    inbox: list[tuple[object, Rank]] = field(default_factory=list)
    keep: int | None = None
    tick: Tick | None = None
    tick_due_s: float = 0.0
    tick_s: float = 0.0


class World:
    """The mutable part: everything that is not a decision."""

    def __init__(
        self,
        seed: int,
        rules: Rules = SOUND,
        faults: tuple[Fault, ...] | None = None,
        trace: bool = False,
        at_least_s: float = 0.5,
    ) -> None:
        self.random = Random(seed)
        self.rules = rules
        self.lines: list[str] | None = [] if trace else None
        self.now = 0.0
        self.count = 0
        self.sequence = 0
        self.queue: list[tuple[float, int, Rank, object, Rank, int]] = []
        self.network = Network(self.random, Random(f"copies of {seed}").choice(BULK_S))
        self.corrupted: set[tuple[Rank, BoxId]] = set()
        self.step_s = self.random.choice((0.05, 0.2, 0.5))
        self.limits = replace(
            LIMITS, lease_s=self.random.choice((LIMITS.lease_s, 1.5)), unledgered=self.random.choice((4096, 6))
        )
        world = self.random.choice((2, 3, 3, 4, 4, 5))
        first = first_plan(world, self.random.choice((1, 2)))
        self.plans = {first.assignment.plan_hash: first}
        activation = Activation(Epoch(0), first.assignment, SEED, SEED, None, rollback=True)
        self.patience_s = Random(f"patience of {seed}").choice((BLOCKED_S / 4, BLOCKED_S * 4))
        self.waits_from_s: float | None = None  # of the epoch, for a last replica
        self.register = Register(Term(0), activation, SEED, SEED, None, SEED, numbers=world)
        self.processes: dict[Rank, Process] = {}
        self.checker = Checker(self._living, self.register)
        self.coordinator = Rank(FIRST_COORDINATOR + 1)
        self.joiners: set[int] = set()  # their connections; they have no number yet
        self.untold: set[Rank] = set()
        self.lifelines: dict[Rank, Rank] = {}  # rank -> the coordinator that its stream is open to
        self.triggers: dict[type, dict[int, Fault]] = {}
        self.seen: Counter[type] = Counter()
        self.said: Counter[str] = Counter()
        self.struck: list[Fault] = []
        self.at_least_s = self.quiet_from = at_least_s
        self.goal: int | None = None
        self.least = 4  # versions that are to be committed at the end
        self.injector = Injector(self)
        for rank in activation.assignment.members:
            self.start_rank(protocol.member(rank, self.limits, activation, 0.0), activation)
        self.start_coordinator()
        if faults is None:
            # Of a generator of their own: schedules without wishes are as they would be if there were none.
            wishes = draw_reshapes(Random(f"wishes of {seed}"), world, self.step_s)
            slow = draw_slow(Random(f"slow ranks of {seed}"), world, self.step_s)
            faults = (*draw(self.random, world, self.step_s), *wishes, *slow)
        self.faults = faults
        self.armed = False
        if all(fault.kind in CRASHES and fault.told_s < UNTOLD_S for fault in self.faults):
            self._arm()

    def _arm(self) -> None:
        """Let faults strike from now on."""
        self.armed = True
        for fault in self.faults:
            if fault.kind == SLOW:  # It is to be seen what comes of it.
                self.least = max(self.least, int(self.register.committed.version + WINDOW_STEPS + fault.lasts_s))
            if isinstance(fault.at, Moment):
                self.triggers.setdefault(fault.at.event, {})[fault.at.nth] = fault
            else:
                self.push(self.now + fault.at, STORE, fault, STORE)
        self.quiet_from = max(self.quiet_from, self.now + self.at_least_s)

    def _living(self) -> list[Engine]:
        return [p.body.engine for p in self.processes.values() if p.alive and isinstance(p.body, RankProcess)]

    def start_rank(self, state: RankState, first: Activation | None) -> None:
        """A process of the first epoch, or one that asks to join."""
        body = RankProcess(self, state, self.rules)
        self.processes[state.rank] = Process(body)
        body.start(first)
        self.push(self.now + HEARTBEAT_S * self.random.random(), state.rank, HeartbeatDue(STARTING), state.rank)

    def ask_to_join(self, connection: int) -> None:
        """A process without a number asks for one until it has it."""
        self.joiners.add(connection)
        self._ask(connection)

    def _ask(self, connection: int) -> None:
        if connection in self.joiners:
            self.push(self.now, COORDINATOR, NumberWanted(connection), STORE)
            self.push(self.now + ASK_AGAIN_S, STORE, partial(self._ask, connection), STORE)

    def _join(self, numbered: Numbered) -> None:
        """A joiner has its number; one that it got because it had to ask twice is nobody's."""
        if numbered.number in self.processes:
            raise Violation(f"the number {numbered.number} is given again")
        if numbered.connection in self.joiners:
            self.joiners.remove(numbered.connection)
            self.start_rank(protocol.joiner(numbered.number, self.limits, self.now), None)

    def tell_to_leave(self, rank: Rank, grace_s: float) -> None:
        """Somebody sends a rank the signal that tells it to leave the job; it is to be seen what comes of it."""
        self.push(self.now, rank, LeaveAsked(grace_s), STORE)
        self.quiet_from = max(self.quiet_from, self.now + LEAVES_S)

    def start_coordinator(self) -> None:
        """Another coordinator process; the newest has the address."""
        self.coordinator = Rank(self.coordinator - 1)
        body = CoordinatorProcess(self.now, self.plans, self.rules, self.patience_s)
        process = self.processes[self.coordinator] = Process(body, tick_s=self.now)
        self._perform(self.coordinator, body.driver.first_actions)
        self._schedule_tick(self.coordinator, process, body)
        for rank, other in self.processes.items():
            if rank >= 0 and not other.alive and rank not in self.untold:
                self.push(self.now + 0.002, self.coordinator, Exited(rank), STORE)

    # --- The queue ---

    def push(self, at_s: float, target: Rank, event: object, sender: Rank, generation: int = -1) -> None:
        """Something that happens later; `generation`: of the link that it travels on."""
        self.sequence += 1
        heappush(self.queue, (at_s, self.sequence, target, event, sender, generation))

    def run(self) -> Outcome:
        """Run until the job has gone on for a while after the last fault, or something is wrong."""
        violation, excused = None, False
        try:
            while not self._finished():
                self._turn()
        except Violation as found:
            violation = str(found)
        except ExecError as refused:
            violation = f"a rank ends: {refused}"
        except Excused:
            excused = True
        return Outcome(
            -1,
            violation,
            self.register.committed.version,
            self.register.epoch,
            self.count,
            self.now,
            self.checker.orphans,
            self.checker.rollbacks,
            excused,
            tuple(self.struck),
            dict(self.said),
        )

    def _finished(self) -> bool:
        if self.now > self.quiet_from + LIMIT_S or self.count > MOST_EVENTS:
            ranks = [(e.rank, e.epoch, e.committed.version) for e in self._living()]
            raise Violation(f"no progress: {self.register.committed} in epoch {self.register.epoch}; ranks {ranks}")
        if all(self._has_ended(rank) for rank in self.processes if rank >= 0):
            return True
        if self.goal is None and self.armed and self.now > self.quiet_from:
            self.goal = max(QUIET_STEPS + self.register.committed.version, self.least)
        return self.goal is not None and self.register.committed.version >= self.goal

    def _has_ended(self, rank: Rank) -> bool:
        """Or hangs: the launcher ends it once all others have ended."""
        process = self.processes[rank]
        return not process.alive or (isinstance(process.body, RankProcess) and process.body.hangs)

    def _turn(self) -> None:
        at_s, sequence, target, event, sender, generation = heappop(self.queue)
        self.now = at_s
        if generation >= 0:
            if generation != self.network.generation(sender, target):
                return  # lost with the link
            until = self.network.silent_until(sender, target)
            if until > at_s:  # it keeps its place among those that wait: a link does not change their order
                return heappush(self.queue, (until, sequence, target, event, sender, generation))
        if target == STORE:
            return self._at_store(event, sender)
        if target == COORDINATOR:
            target = self.coordinator
        process = self.processes[target]
        if not process.alive:
            return
        if process.paused_until_s > at_s:
            process.inbox.append((event, sender))
            return
        self._handle(target, process, event, sender)

    def _handle(self, target: Rank, process: Process, event: object, sender: Rank) -> None:
        self.count += 1
        fault = self._due(event)
        if fault is not None:
            fault = replace(fault, rank=target if target >= 0 else fault.rank)
            if fault.kind in ("pause", "coordinator_pause", "hang", "update_fails"):
                self.injector.strike(fault)
                if process.paused_until_s > self.now:
                    process.inbox.append((event, sender))
                    return
            elif fault.kind == "coordinator_crash" if target < 0 else fault.kind in CRASHES and self.may_die(target):
                process.keep = fault.keep
        if self.lines is not None:
            self.lines.append(f"{self.now * 1000:9.3f} ms  {_name(target)} <- {_name(sender)}: {event}")
        try:
            if isinstance(process.body, CoordinatorProcess):
                self._at_coordinator(target, process, process.body, event)
            else:
                self._at_rank(target, process.body, event, sender)
        except Killed:
            pass
        if fault is not None and fault.kind not in ("pause", "coordinator_pause", "hang", "update_fails"):
            self.injector.strike(fault)

    def _due(self, event: object) -> Fault | None:
        kind = type(event)
        if kind not in self.triggers:
            return None
        self.seen[kind] += 1
        return self.triggers[kind].get(self.seen[kind])

    # --- Processes ---

    def _at_rank(self, rank: Rank, body: RankProcess, event: object, sender: Rank) -> None:
        if isinstance(event, HeartbeatDue):
            self.push(self.now + HEARTBEAT_S, rank, event, rank)
        if isinstance(event, LinkNews):
            self.network.notice(rank, sender)
        if isinstance(event, LeaveAsked) and body.state.leaves_by_s is not None and not self.may_die(rank):
            return  # one that was told before ends at once
        if isinstance(event, StoreSeen):
            self.checker.sees(rank, event)
        body.handle(event, sender)
        if self.corrupted:
            self._excuse_promotions()
        if body.ended is not None:
            self.said["left" if body.left else "ended by itself"] += 1
            self.crash(rank, 0.001, silent=False, last_too=True)

    def _at_coordinator(self, target: Rank, process: Process, body: CoordinatorProcess, event: object) -> None:
        if isinstance(event, Tick):
            if event is not process.tick:
                return  # another one was due before
            process.tick, process.tick_s = None, self.now
        actions = body.handle(event, self.now, process.tick_due_s)
        self._perform(target, actions)
        if body.driver.retired and target == self.coordinator:
            # A launcher whose coordinator exits starts another.
            self.push(self.now + HEARTBEAT_S, STORE, self.start_coordinator, STORE)
        if body.driver.retired:
            process.alive = False
        else:
            self._schedule_tick(target, process, body)

    def _schedule_tick(self, target: Rank, process: Process, body: CoordinatorProcess) -> None:
        due_s = max(self.now, process.tick_s + body.driver.pause_s)
        if process.tick is None or due_s < process.tick_due_s:
            process.tick, process.tick_due_s = Tick(), due_s
            self.push(due_s, target, process.tick, target)

    def _perform(self, source: Rank, actions: object) -> None:
        for action in actions:  # type: ignore[attr-defined]
            if isinstance(action, Send):
                self.send(source, action.target, action.message, False)
            elif isinstance(action, Numbered):
                self._join(action)
            elif isinstance(action, EVENT_TYPES):
                self.hear(source, label(action), action)
            elif isinstance(action, Read | Swap):
                self.send(source, STORE, action, False)

    def hear(self, source: Rank, name: str, said: object) -> None:
        """What a machine tells, under the name by which it is counted."""
        self.said[name] += 1
        if self.lines is not None:
            self.lines.append(f"{self.now * 1000:9.3f} ms  {_name(source)} says: {said}")
        if isinstance(said, Agreed) and said.back:
            self.said["back"] += 1
        if isinstance(said, Over):
            self._over()
        if isinstance(said, Agreed):
            self.waits_from_s = None
        if isinstance(said, Waiting):
            self.waits_from_s = self.now if self.waits_from_s is None else self.waits_from_s
            for rank in said.ranks:
                self.push(self.now + BLOCKED_S, STORE, partial(self._help, rank), STORE)

    def _over(self) -> None:
        """Nobody goes on: for want of anything to go on with, or because a last replica was waited for long enough."""
        if self.waits_from_s is not None and self.now - self.waits_from_s >= self.patience_s:
            self.said["waited in vain"] += 1
        else:
            self.checker.over()

    def _help(self, rank: Rank) -> None:
        """The user looks after a rank that the job waits for: one that has died is told of, one that hangs is ended."""
        body = self.processes[rank].body
        if rank in self.untold:
            self.untold.discard(rank)
            self.push(self.now, COORDINATOR, Exited(rank), STORE)
        elif isinstance(body, RankProcess) and body.hangs:
            self.crash(rank, 0.001, silent=False)
        self.quiet_from = max(self.quiet_from, self.now)

    # --- What a rank's process needs ---

    def send(self, source: Rank, target: Rank, message: object, bulk: bool) -> float | None:
        """Send a message, and return when it arrives if the way stays as it is; what is lost is lost."""
        process = self.processes.get(source)
        if process is not None and process.keep is not None:
            if process.keep == 0:
                raise Killed
            process.keep -= 1
        if target == COORDINATOR:
            target = self.coordinator
        at_s = self.network.arrival(source, target, bulk, self.now)
        if at_s is not None and (target < 0 or target in self.processes):
            if isinstance(message, Heartbeat) and self.lifelines.get(source) != target:
                self.lifelines[source] = target  # a rank opens it before its heartbeat
                self.push(at_s, target, Connected(source), source)
            self.push(at_s, target, message, source, self.network.generation(source, target))
        return at_s

    def after(self, seconds: float, rank: Rank, event: object) -> None:
        """An event of a rank's own."""
        self.push(self.now + seconds, rank, event, rank)

    def lost(self, rank: Rank) -> frozenset[Rank]:
        """Peers to which the links are down, as the rank knows."""
        return self.network.lost(rank)

    def chance(self, of: float) -> bool:
        """Whether something that may happen does."""
        return self.random.random() < of

    def compute_s(self) -> float:
        """How long a rank computes."""
        return self.step_s * self.random.uniform(0.8, 1.2)

    def mend(self, rank: Rank) -> None:
        """A rank tries for a while to open its broken links."""
        for peer in self.network.lost(rank):
            for wait_s in (0.002, 0.1, 0.3, MEND_S):
                self.push(self.now + wait_s, STORE, partial(self._mend, rank, peer), STORE)

    def end_link(self, rank: Rank, peer: Rank) -> None:
        """A rank goes on without another one, which notices soon, if it lives."""
        if not self.network.is_down(rank, peer):
            self.network.take_down(rank, peer)
            self.push(self.now + self.random.uniform(0.0002, 0.004), peer, LinkNews(), rank)
        self.network.notice(rank, peer)

    def _mend(self, rank: Rank, peer: Rank) -> None:
        ends = [self.processes[end] for end in (rank, peer)]
        able = all(end.alive and end.paused_until_s <= self.now for end in ends)
        if able and self.network.is_down(rank, peer) and self.network.is_free(rank, peer, self.now):
            self.network.open(rank, peer)
            for end, other in ((rank, peer), (peer, rank)):
                self.push(self.now, end, LinkNews(), other)

    # --- The store ---

    def _at_store(self, event: object, sender: Rank) -> None:
        if isinstance(event, Fault):
            return self.injector.strike(event)
        if callable(event):
            event()
        elif isinstance(event, Swap):
            after, done = swap(self.register, event)
            if self.lines is not None:
                self.lines.append(f"{self.now * 1000:9.3f} ms  store <- {_name(sender)}: swapped={done} {event}")
            if done:
                if after.epoch != self.register.epoch and not after.activation.rollback:
                    self._excuse(after)
                self.checker.swapped(after, event.lines, self.now)
                self.register = after
                self._let_one_get_on()
                self._save(event.lines)
                if not self.armed and after.committed.version >= WARM_STEPS:
                    self._arm()
            self.send(STORE, sender, StoreReply(self.register), False)
        else:
            assert isinstance(event, Read)
            self.send(STORE, sender, StoreReply(self.register, event.probe), False)

    def _save(self, lines: tuple[Certificate, ...]) -> None:
        for line in lines:
            if line.stamp.version % 3 == 0:
                self.push(self.now + 0.05, STORE, partial(self._saved, line.stamp), STORE)

    def _saved(self, stamp: Stamp) -> None:
        """A checkpoint is complete if every box was updated to it somewhere."""
        if all((box, stamp) in self.checker.truth for box, _ in numbered(self.register.activation.assignment.boxes)):
            self.push(self.now, COORDINATOR, Saved(stamp), STORE)

    def _excuse(self, register: Register) -> None:
        """End the schedule if an epoch makes a corrupted replica the owner: nothing is left to compare it with."""
        for box_id, box in numbered(register.activation.assignment.boxes):
            if (box.owner, box_id) in self.corrupted and self._is_wrong(box.owner, box_id):
                raise Excused

    def _excuse_promotions(self) -> None:
        self._excuse(self.register)

    def _is_wrong(self, rank: Rank, box: BoxId) -> bool:
        """Whether a replica is wrong, and its rank cannot know."""
        body = self.processes[rank].body
        assert isinstance(body, RankProcess)
        replica = body.engine.content.get(box)
        return (
            replica is not None
            and body.engine.intact(box)
            and self.checker.truth.get((box, replica.stamp)) != replica.digest
        )

    # --- What faults do to processes ---

    def may_die(self, address: Rank) -> bool:
        """One member always lives and gets on: without any there is nothing to check."""
        return address < 0 or any(not body.hangs for body in self._living_members() if body.rank != address)

    def _living_members(self) -> list[RankProcess]:
        members = [self.processes[rank] for rank in self.register.members]
        return [p.body for p in members if p.alive and isinstance(p.body, RankProcess)]

    def _let_one_get_on(self) -> None:
        """A hang is over if the new register has nobody else: whoever else there was has been left out meanwhile."""
        living = self._living_members()
        if living and all(body.hangs for body in living):
            living[0].get_on()

    def crash(self, rank: Rank, told_s: float, silent: bool, last_too: bool = False) -> None:
        """A process ends. `silent`: its peers see no broken link until they give it up."""
        process = self.processes[rank]
        if not process.alive or not (last_too or self.may_die(rank)):
            process.keep = None
            return
        process.alive = False
        if told_s == UNTOLD_S:
            self.untold.add(rank)
        else:
            self.push(self.now + told_s, COORDINATOR, Exited(rank), STORE)
            self.quiet_from = max(self.quiet_from, self.now + told_s)
        if not silent:
            self.end_lifeline(rank)
        for other in [r for r, p in self.processes.items() if r >= 0 and p.alive]:
            self.break_link(rank, other, GIVEN_UP_S if silent else None)

    def end_lifeline(self, rank: Rank) -> None:
        """The coordinator sees that a rank's stream has ended."""
        self.lifelines.pop(rank, None)
        self.push(self.now + self.random.uniform(0.0002, 0.004), self.coordinator, Disconnected(rank), STORE)

    def pause(self, rank: Rank, until: float) -> None:
        """A process stands still, and then takes what has come meanwhile."""
        process = self.processes[rank]
        process.paused_until_s = max(process.paused_until_s, until)
        self.quiet_from = max(self.quiet_from, until)
        self.push(process.paused_until_s, STORE, partial(self._wake, rank), STORE)

    def _wake(self, rank: Rank) -> None:
        process = self.processes[rank]
        if process.paused_until_s <= self.now:
            inbox, process.inbox = process.inbox, []
            for event, sender in inbox:
                self.push(self.now, rank, event, sender)

    def break_link(self, one: Rank, other: Rank, after_s: float | None) -> None:
        """A link goes down; both ends notice, soon or `after_s`."""
        self.network.take_down(one, other)
        for end, peer in ((one, other), (other, one)):
            wait_s = self.random.uniform(0.0002, 0.004) + (after_s or 0.0)
            self.push(self.now + wait_s, end, LinkNews(), peer)


def _name(address: Rank) -> str:
    if address >= 0:
        return f"rank {address}"
    return "store" if address == STORE else f"coordinator {FIRST_COORDINATOR - address}"


def run_schedule(seed: int, rules: Rules = SOUND) -> Outcome:
    """The schedule of a seed, from start to end."""
    return replace(World(seed, rules).run(), seed=seed)


def trace_schedule(seed: int, rules: Rules = SOUND) -> tuple[Outcome, list[str]]:
    """The same, with a line per event."""
    world = World(seed, rules, trace=True)
    outcome = replace(world.run(), seed=seed)
    return outcome, world.lines or []
