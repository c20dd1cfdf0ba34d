"""One schedule: a queue of events in simulated seconds, processes, links, the store, and the checker watching.

In: a seed. Out: `Outcome`; equal seeds give equal outcomes and traces, on any machine.

    run_schedule(17)  ->  Outcome(seed=17, violation=None, committed=9, ...)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from heapq import heappop, heappush
from random import Random

from elaswave_fx.control.protocol import coordinator as membership
from elaswave_fx.control.protocol import events, step_commit
from elaswave_fx.control.protocol.events import EVENT_TYPES, label
from elaswave_fx.control.protocol.messages import (
    COORDINATOR,
    Action,
    Activate,
    Compute,
    Exited,
    LinkDown,
    LinkUp,
    Load,
    Note,
    ProbeStore,
    Ran,
    Saved,
    Send,
    StoreSeen,
    Tick,
    Update,
)
from elaswave_fx.control.protocol.rank_state import Deadlines, RankState
from elaswave_fx.control.protocol.register import Read, Register, StoreReply, Swap, swap
from elaswave_fx.control.protocol.types import SEED, Activation, BoxId, Certificate, Stamp, Term
from elaswave_fx.plan.box import numbered
from elaswave_fx.plan.topology import Epoch, Rank
from elaswave_fx.sim.bugs import SOUND, Protocol
from elaswave_fx.sim.checker import Checker, Violation, seed_digest, updated_digest
from elaswave_fx.sim.cluster import first_assignment, replan, unbalanced
from elaswave_fx.sim.faults import Fault, Moment, draw
from elaswave_fx.sim.outcome import COPY_DIFFERS, Excused, Outcome

HEARTBEAT_S = 0.02
TIMEOUTS = membership.Timeouts(
    silent_s=0.09, accused_s=0.04, stalled_s=0.15, resend_s=0.03, spread_s=0.01, mend_s=0.03, ack_s=0.05
)
DEADLINES = Deadlines(paused_s=0.06, lease_s=0.2)
QUIET_STEPS = 2
"""Steps that must be committed after the last fault has ended."""

LIMIT_S = 4.0
"""Simulated seconds in which that must have happened."""

STORE = Rank(-2)
FIRST_COORDINATOR = -10
"""Coordinator processes have addresses downwards from here; COORDINATOR is the newest."""


@dataclass(slots=True)
class Process:
    """A rank or a coordinator. `inbox` fills while it is paused; `hung`: its next computation never ends."""

    state: RankState | membership.Coordinator
    alive: bool = True
    paused_until_s: float = 0.0
    inbox: list[tuple[object, Rank]] = field(default_factory=list)
    hung: bool = False


class World:
    """The mutable part: everything that is not a decision."""

    def __init__(
        self,
        seed: int,
        protocol: Protocol = SOUND,
        faults: tuple[Fault, ...] | None = None,
        trace: bool = False,
        at_least_s: float = 0.05,
    ) -> None:
        self.random = Random(seed)
        self.protocol = protocol
        self.lines: list[str] | None = [] if trace else None
        self.now = 0.0
        self.count = 0
        self.sequence = 0
        self.queue: list[tuple[float, int, Rank, object, Rank, int]] = []
        self.arrived: dict[tuple[Rank, Rank, bool], float] = {}
        self.cut_until: dict[tuple[Rank, Rank], float] = {}
        self.stalled_until: dict[tuple[Rank, Rank], float] = {}
        self.slow = self.random.choice((0.02, 0.02, 0.1, 0.3))
        self.generation: dict[tuple[Rank, Rank], int] = {}
        self.corrupted: set[tuple[Rank, BoxId]] = set()
        world = self.random.choice((2, 3, 3, 4, 4, 5))
        assignment = first_assignment(world, self.random.choice((1, 2)))
        activation = Activation(Epoch(0), assignment, SEED, SEED, None, rollback=True)
        self.register = Register(Term(0), activation, SEED, SEED, None, SEED)
        self.digests: dict[tuple[BoxId, Stamp], int] = {
            (box_id, SEED): seed_digest(box_id) for box_id, _ in numbered(assignment.boxes)
        }
        self.processes: dict[Rank, Process] = {}
        self.checker = Checker(self._living, self.register)
        self.coordinator = Rank(FIRST_COORDINATOR + 1)
        self.next_rank = Rank(world)
        for rank in assignment.members:
            self._start_rank(rank)
        self._start_coordinator()
        self.faults = draw(self.random, world) if faults is None else faults
        self.triggers: dict[type, dict[int, Fault]] = {}
        self.seen: Counter[type] = Counter()
        self.said: Counter[str] = Counter()
        self.struck: list[Fault] = []
        self.quiet_from = at_least_s
        self.goal: int | None = None
        for fault in self.faults:
            if isinstance(fault.at, Moment):
                self.triggers.setdefault(fault.at.event, {})[fault.at.nth] = fault
            else:
                self._push(fault.at, STORE, fault, STORE)

    def _living(self) -> list[RankState]:
        return [p.state for p in self.processes.values() if p.alive and isinstance(p.state, RankState)]

    def _start_rank(self, rank: Rank) -> None:
        self.processes[rank] = Process(RankState(rank, DEADLINES, store_seen_s=self.now, tick_s=self.now))
        self._push(self.now + HEARTBEAT_S * self.random.random() / 4, rank, Tick(), rank)

    def _start_coordinator(self) -> None:
        self.coordinator = Rank(self.coordinator - 1)
        state, actions = membership.start(TIMEOUTS, replan, self.now, self.protocol.decide, unbalanced)
        self.processes[self.coordinator] = Process(state)
        self._perform(self.coordinator, actions)
        self._push(self.now + HEARTBEAT_S, self.coordinator, Tick(), self.coordinator)
        for rank, process in self.processes.items():
            if rank >= 0 and not process.alive:
                self._push(self.now + 0.002, self.coordinator, Exited(rank), STORE)

    # --- The queue ---

    def _push(self, at_s: float, target: Rank, event: object, sender: Rank, generation: int = -1) -> None:
        self.sequence += 1
        heappush(self.queue, (at_s, self.sequence, target, event, sender, generation))

    def run(self) -> Outcome:
        """Until the job has gone on for a while after the last fault, or something is wrong."""
        violation, excused = None, False
        try:
            while not self._finished():
                self._turn()
        except Violation as found:
            violation = str(found)
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
        if self.now > LIMIT_S:
            states = [(s.rank, s.phase, s.epoch, s.committed.version) for s in self._living()]
            raise Violation(f"no progress: {self.register.committed} in epoch {self.register.epoch}; ranks {states}")
        if not any(p.alive for rank, p in self.processes.items() if rank >= 0):
            return True
        if self.goal is None and self.now > self.quiet_from:
            self.goal = max(QUIET_STEPS + self.register.committed.version, 4)
        return self.goal is not None and self.register.committed.version >= self.goal

    def _turn(self) -> None:
        at_s, _, target, event, sender, generation = heappop(self.queue)
        self.now = at_s
        if generation >= 0 and generation != self.generation.get(_pair(sender, target), 0):
            return  # lost with the link
        if generation >= 0 and self.stalled_until and self.stalled_until.get(_pair(sender, target), 0.0) > at_s:
            return self._push(self.stalled_until[_pair(sender, target)], target, event, sender, generation)
        if target == STORE:
            return self._at_store(event, sender)
        process = self.processes[target if target != COORDINATOR else self.coordinator]
        if not process.alive:
            return
        if process.paused_until_s > at_s:
            process.inbox.append((event, sender))
            return
        self._handle(target if target != COORDINATOR else self.coordinator, process, event, sender)

    def _handle(self, target: Rank, process: Process, event: object, sender: Rank) -> None:
        self.count += 1
        kind = type(event)
        fault = None
        if kind in self.triggers:
            self.seen[kind] += 1
            fault = self.triggers[kind].get(self.seen[kind])
        if fault is not None and fault.kind in ("pause", "coordinator_pause", "hang"):
            self._strike(replace(fault, rank=target if target >= 0 else fault.rank))
            if process.paused_until_s > self.now:
                process.inbox.append((event, sender))
                return
        if self.lines is not None:
            self.lines.append(f"{self.now * 1000:9.3f} ms  {_name(target)} <- {_name(sender)}: {event}")
        if kind is Tick:
            self._push(self.now + HEARTBEAT_S, target, event, target)
        if target < 0:
            process.state, actions = membership.step(process.state, event, self.now)  # type: ignore[arg-type]
            if process.state.phase == membership.RETIRED:
                self._retire(target, process)
        else:
            self._note_copy(process, event)
            process.state, actions = step_commit.step(process.state, event, self.now, sender, self.protocol.rules)  # type: ignore[arg-type]
        if fault is not None and fault.kind not in ("pause", "coordinator_pause", "hang"):
            actions = actions[: fault.keep] if "crash" in fault.kind and self._may_die(target) else actions
        if self.corrupted and kind is Activate:
            self._excuse(self.register)
        if target >= 0 and actions:
            self.checker.acts(process.state, actions)  # type: ignore[arg-type]
        self._perform(target, actions)
        if fault is not None and fault.kind not in ("pause", "coordinator_pause", "hang"):
            self._strike(replace(fault, rank=target if target >= 0 else fault.rank))

    def _retire(self, address: Rank, process: Process) -> None:
        """A superseded coordinator exits; if the ranks speak to this one, the launcher starts another."""
        process.alive = False
        if address == self.coordinator:
            self._push(self.now + 0.002, STORE, self._start_coordinator, STORE)

    def _note_copy(self, process: Process, event: object) -> None:
        """An update or load is done: tell the checker which base came out of it."""
        state = process.state
        if type(event) is Ran and isinstance(state, RankState):
            running = state.running
            if running is not None and running.serial == event.serial and not isinstance(running, Compute):
                self.checker.ran(running, event.digest)

    # --- Actions ---

    def _perform(self, source: Rank, actions: Sequence[Action | Read | Swap | events.Event]) -> None:
        for action in actions:
            if isinstance(action, Send):
                self._send(source, action.target, action.message, action.bulk)
            elif isinstance(action, Compute):
                process = self.processes[source]
                if process.hung:
                    process.hung = False  # this one never comes back
                else:
                    self._push(self.now + self.random.uniform(0.004, 0.012), source, Ran(action.serial), source)
            elif isinstance(action, Update):
                digest = updated_digest(action.copy, action.record)
                self._push(self.now + 0.0004, source, Ran(action.serial, digest), source)
            elif isinstance(action, Load):
                digest = self.checker.truth[action.box, action.stamp]
                self._push(self.now + 0.001, source, Ran(action.serial, digest), source)
            elif isinstance(action, ProbeStore | Read | Swap):
                self._send(source, STORE, action, False)
            elif isinstance(action, Note):
                self._hear(source, COPY_DIFFERS, action)
            elif isinstance(action, EVENT_TYPES):
                self._hear(source, label(action), action)

    def _hear(self, source: Rank, name: str, said: object) -> None:
        self.said[name] += 1
        if self.lines is not None:
            self.lines.append(f"{self.now * 1000:9.3f} ms  {_name(source)} says: {said}")

    def _send(self, source: Rank, target: Rank, message: object, bulk: bool) -> None:
        if target == COORDINATOR:
            target = self.coordinator
        pair = _pair(source, target)
        if self.cut_until.get(pair, 0.0) > self.now:
            return
        random = self.random.random
        delay = (
            0.0001 + 0.0008 * random() + (0.008 * random() if random() < self.slow else 0.0) + (0.02 if bulk else 0.0)
        )
        lane = (source, target, bulk)
        at_s = max(self.now + delay, self.arrived.get(lane, 0.0) + 1e-6)
        self.arrived[lane] = at_s
        self._push(at_s, target, message, source, self.generation.get(pair, 0))

    def _at_store(self, event: object, sender: Rank) -> None:
        if isinstance(event, Fault):
            return self._strike(event)
        if callable(event):
            event()
        elif isinstance(event, Swap):
            after, done = swap(self.register, event)
            if self.lines is not None:
                self.lines.append(f"{self.now * 1000:9.3f} ms  store <- {_name(sender)}: swapped={done} {event}")
            if done:
                if after.epoch != self.register.epoch and not after.activation.rollback:
                    self._excuse(after)
                self.checker.swapped(after, event.lines)
                self.register = after
                self._save(event.lines)
            self._send(STORE, sender, StoreReply(self.register), False)
        elif isinstance(event, Read):
            self._send(STORE, sender, StoreReply(self.register), False)
        else:
            seen = StoreSeen(self.register.term, self.register.epoch, self.register.members)
            self._send(STORE, sender, seen, False)

    def _save(self, lines: tuple[Certificate, ...]) -> None:
        for line in lines:
            if line.stamp.version % 3 == 0:
                self._push(self.now + 0.005, STORE, partial(self._saved, line.stamp), STORE)

    def _saved(self, stamp: Stamp) -> None:
        """A checkpoint is complete if every box was updated to it somewhere."""
        boxes = self.register.activation.assignment.boxes
        if all((box_id, stamp) in self.checker.truth for box_id, _ in numbered(boxes)):
            self._push(self.now, COORDINATOR, Saved(stamp), STORE)

    def _excuse(self, register: Register) -> None:
        """End the schedule if an epoch makes a corrupted copy the owner: nothing is left to compare it with."""
        for box_id, box in numbered(register.activation.assignment.boxes):
            if (box.owner, box_id) in self.corrupted and self._is_wrong(box.owner, box_id):
                raise Excused

    def _is_wrong(self, rank: Rank, box: BoxId) -> bool:
        state = self.processes[rank].state
        copy = state.copies.get(box) if isinstance(state, RankState) else None
        return copy is not None and self.checker.truth.get((box, copy.stamp)) != copy.digest

    # --- Faults ---

    def _strike(self, fault: Fault) -> None:
        if self.lines is not None:
            self.lines.append(f"{self.now * 1000:9.3f} ms  FAULT {fault.kind} at {fault}")
        self.struck.append(fault)
        until = self.now + fault.lasts_s
        if fault.kind == "crash":
            self._crash(fault.rank, fault)
        elif fault.kind == "host":
            for rank in [r for r in self.processes if r >= 0 and r // 2 == fault.rank // 2]:
                self._crash(rank, fault)
        elif fault.kind == "pause":
            self._pause(fault.rank, until)
        elif fault.kind == "hang":
            self.processes[fault.rank].hung = True
        elif fault.kind == "corrupt":
            self._corrupt(fault.rank)
        elif fault.kind == "join":
            self._start_rank(self.next_rank)
            self.next_rank = Rank(self.next_rank + 1)
        elif fault.kind.startswith("coordinator"):
            self._strike_coordinator(fault, until)
        else:
            self._cut(fault, until)
        self.quiet_from = max(self.quiet_from, self.now + 0.001)

    def _may_die(self, address: Rank) -> bool:
        """One rank always lives: without any there is nothing to check."""
        return address < 0 or any(r >= 0 and r != address and p.alive for r, p in self.processes.items())

    def _crash(self, rank: Rank, fault: Fault) -> None:
        process = self.processes[rank]
        if not process.alive or not self._may_die(rank):
            return
        process.alive = False
        others = [r for r, p in self.processes.items() if r >= 0 and p.alive]
        self._push(self.now + fault.told_s, COORDINATOR, Exited(rank), STORE)
        self.quiet_from = max(self.quiet_from, self.now + fault.told_s)
        for other in others:
            self.cut_until[_pair(rank, other)] = float("inf")
            if not fault.silent:
                self._push(self.now + self.random.uniform(0.0002, 0.004), other, LinkDown(rank), other)

    def _pause(self, rank: Rank, until: float) -> None:
        process = self.processes[rank]
        process.paused_until_s = max(process.paused_until_s, until)
        self.quiet_from = max(self.quiet_from, until)
        self._push(process.paused_until_s, STORE, lambda: self._wake(rank), STORE)

    def _wake(self, rank: Rank) -> None:
        process = self.processes[rank]
        if process.paused_until_s <= self.now:
            inbox, process.inbox = process.inbox, []
            for event, sender in inbox:
                self._push(self.now, rank, event, sender)

    def _corrupt(self, rank: Rank) -> None:
        """A held copy changes in memory; its digest, computed from its bytes, shows it."""
        process = self.processes[rank]
        state = process.state
        if not process.alive or not isinstance(state, RankState) or state.view is None:
            return
        for box_id, box in state.view.kept.items():
            if box.owner != rank and box_id in state.copies:
                copy = state.copies[box_id]
                process.state = replace(
                    state, copies={**state.copies, box_id: copy._replace(digest=hash((copy.digest, self.count)))}
                )
                self.corrupted.add((rank, box_id))
                return

    def _strike_coordinator(self, fault: Fault, until: float) -> None:
        address, process = self.coordinator, self.processes[self.coordinator]
        self.quiet_from = max(self.quiet_from, until)
        if fault.kind == "coordinator_cut":
            self._break(address, STORE, until)
            for rank in fault.side:
                self._break(address, rank, until)
            return
        if fault.kind == "coordinator_crash":
            process.alive = False
        else:
            self._pause(address, until)
        again = self.now + fault.lasts_s * (1.0 if fault.kind == "coordinator_crash" else 0.5)
        self._push(again, STORE, self._start_coordinator, STORE)

    def _cut(self, fault: Fault, until: float) -> None:
        self.quiet_from = max(self.quiet_from, until)
        ranks = [r for r, p in self.processes.items() if r >= 0 and p.alive]
        if fault.kind == "stall":
            for other in [r for r in ranks if r != fault.rank]:
                self.stalled_until[_pair(fault.rank, other)] = until
        elif fault.kind == "cut":
            self._break(fault.rank, fault.other, until)
        elif fault.kind == "no_store":
            self._break(fault.rank, STORE, until)
            self._break(fault.rank, self.coordinator, until)
        else:
            for one in (r for r in ranks if r in fault.side):
                for other in (r for r in ranks if r not in fault.side):
                    self._break(one, other, until)
                if fault.keep % 2:
                    self._break(one, self.coordinator, until)
                    self._break(one, STORE, until)

    def _break(self, one: Rank, other: Rank, until: float) -> None:
        """Cut a link: what was under way is lost; between ranks both ends notice, and again when it is back."""
        pair = _pair(one, other)
        if one == other or self.cut_until.get(pair, 0.0) == float("inf"):
            return
        self.generation[pair] = self.generation.get(pair, 0) + 1
        self.cut_until[pair] = max(until, self.cut_until.get(pair, 0.0))
        if one >= 0 and other >= 0:
            for end, peer in ((one, other), (other, one)):
                self._push(self.now + self.random.uniform(0.0002, 0.003), end, LinkDown(peer), end)
            self._push(self.cut_until[pair], STORE, lambda: self._mend(one, other), STORE)

    def _mend(self, one: Rank, other: Rank) -> None:
        if self.cut_until[_pair(one, other)] <= self.now:
            # After the news of the cut, wherever that took its time.
            for end, peer in ((one, other), (other, one)):
                self._push(self.now + 0.0031, end, LinkUp(peer), end)


def _pair(one: Rank, other: Rank) -> tuple[Rank, Rank]:
    return (one, other) if one < other else (other, one)


def _name(address: Rank) -> str:
    if address >= 0:
        return f"rank {address}"
    return "store" if address == STORE else f"coordinator {FIRST_COORDINATOR - address}"


def run_schedule(seed: int, protocol: Protocol = SOUND) -> Outcome:
    """The schedule of a seed, from start to end."""
    return replace(World(seed, protocol).run(), seed=seed)


def trace_schedule(seed: int, protocol: Protocol = SOUND) -> tuple[Outcome, list[str]]:
    """The same, with a line per event."""
    world = World(seed, protocol, trace=True)
    outcome = replace(world.run(), seed=seed)
    return outcome, world.lines or []
