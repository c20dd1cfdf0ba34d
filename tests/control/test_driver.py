"""The coordinator with its deadlines and plans, as a process and the simulator run it."""

from __future__ import annotations

from elaswave_fx.control.coordinator.driver import IDLE_S, LATE_S, THINK_AFTER_S, TICK_S, CoordinatorDriver
from elaswave_fx.control.coordinator.plan_cache import Planned
from elaswave_fx.control.protocol.coordinator import Act
from elaswave_fx.control.protocol.events import Over
from elaswave_fx.control.protocol.messages import Activate, Connected, Exited, Heartbeat, Prepare, Prepared, Send, Tick
from elaswave_fx.control.protocol.register import Read, Register, StoreReply, Swap, swap
from elaswave_fx.control.protocol.types import (
    NO_BALLOT,
    SEED,
    STOPPED,
    Activation,
    Replica,
    Report,
    Stamp,
    Term,
    Version,
)
from elaswave_fx.plan.work.box import BoxId, numbered
from elaswave_fx.plan.work.topology import Epoch, Rank
from tests.control.member_infos import info_of
from tests.control.toy_job import ToyPlanning, text_of
from tests.control.toy_planner import first_assignment

WORLD = 4
FIRST = ToyPlanning().read(text_of(first_assignment(WORLD, 2)))


class Job:
    """A driver, a store, and plans on a disk; time is what a test says."""

    def __init__(self, planning: ToyPlanning | None = None) -> None:
        activation = Activation(Epoch(0), FIRST.assignment, SEED, SEED, None, rollback=True)
        self.register = Register(Term(0), activation, SEED, SEED, None, SEED)
        self.read: list[tuple[int, int]] = []
        self.did: list[Act] = []
        self.driver = CoordinatorDriver(planning or ToyPlanning(), self._read, lambda: 0.0, 0.0)
        self._serve(self.driver.first_actions, 0.0)

    def _read(self, epoch: Epoch, plan_hash: int) -> Planned:
        self.read.append((epoch, plan_hash))
        return FIRST

    def feed(self, event: object, now_s: float) -> None:
        self._serve(self.driver.handle(event, now_s), now_s)  # type: ignore[arg-type]

    def _serve(self, actions: tuple[Act, ...], now_s: float) -> None:
        self.did += actions
        for action in actions:
            if isinstance(action, Swap):
                self.register, _ = swap(self.register, action)
            if isinstance(action, Swap | Read):
                self.feed(StoreReply(self.register), now_s)

    def beats(self, now_s: float, step_s: float | None = None) -> None:
        for rank in range(WORLD):
            self.feed(Heartbeat(Rank(rank), Epoch(0), Version(3), "reduce", None, None, False, True, (), step_s), now_s)

    def asked(self) -> list[Prepare]:
        """To stop, so far."""
        return [act.message for act in self.did if isinstance(act, Send) and isinstance(act.message, Prepare)]

    def replicas_of(self, rank: Rank) -> dict[BoxId, Replica]:
        """As they are before the first step."""
        boxes = self.register.activation.assignment.boxes
        return {box_id: Replica(SEED, 1) for box_id, box in numbered(boxes) if rank in box.replica_ranks}

    def lose(self, lost: int, now_s: float) -> None:
        self.feed(Exited(Rank(lost)), now_s)
        for rank in set(range(WORLD)) - {lost}:
            report = Report(Rank(rank), Epoch(0), SEED, self.replicas_of(Rank(rank)), {}, (), (), frozenset())
            self.feed(Prepared(NO_BALLOT, report), now_s)


def test_deadlines_follow_what_was_heard_and_how_the_process_gets_on() -> None:
    job = Job()
    job.beats(0.1, step_s=4.0)
    job.feed(Tick(), 0.2)
    assert (job.driver.state.timeouts.stalled_s, job.driver.state.timeouts.silent_s) == (120.0, 2.0)
    job.driver.turn(0.3, due_s=0.3 - 0.9 * LATE_S)
    job.driver.turn(1.3, due_s=1.3 - 1.1 * LATE_S)
    job.feed(Tick(), 1.3)
    assert job.driver.state.timeouts.silent_s == 8.0, "nothing could be heard for a second"


def test_a_new_coordinator_plans_from_the_plan_that_it_reads_once() -> None:
    job = Job()
    job.beats(0.1)
    job.lose(3, 0.2)
    assert job.register.members == (0, 1, 2) and job.read == [(0, FIRST.assignment.plan_hash)]
    sent = [act.message for act in job.did if isinstance(act, Send) and isinstance(act.message, Activate)]
    new = job.driver.plan(job.register.key.plan_hash)
    assert [message.plan for message in sent] == 3 * [new.text] and len({id(message) for message in sent}) == 1
    assert new.assignment.members == (0, 1, 2) and job.driver.register is job.driver.state.register


def test_it_looks_at_the_clock_more_often_while_there_is_something_to_do() -> None:
    job = Job()
    assert job.driver.pause_s == IDLE_S
    job.beats(0.1)
    job.driver.think_ahead(0.5 * THINK_AFTER_S)
    assert job.driver.pause_s == IDLE_S
    for number in range(WORLD):
        job.driver.think_ahead(THINK_AFTER_S + number)
        assert job.driver.pause_s == TICK_S, "plans are being made"
    job.driver.think_ahead(10.0)
    assert job.driver.pause_s == IDLE_S
    job.feed(Exited(Rank(3)), 11.0)
    assert job.driver.pause_s == TICK_S


def test_it_plans_ahead_again_when_replicas_have_come() -> None:
    job = Job()
    job.beats(0.1)
    job.lose(3, 0.2)
    assert any(box.catching_up for box in job.register.activation.assignment.boxes)

    def think(complete: bool) -> float:
        for rank in job.register.members:
            job.feed(Heartbeat(rank, Epoch(1), Version(3), "reduce", None, None, False, complete, (), None), 1.0)
        job.driver.think_ahead(1.0 + THINK_AFTER_S)
        return job.driver.pause_s

    job.driver.think_ahead(1.0)
    asked = [think(complete=False) for _ in range(WORLD)]
    assert asked == [*(WORLD - 1) * [TICK_S], IDLE_S], "all losses are planned for"
    assert think(complete=False) == IDLE_S
    assert think(complete=True) == TICK_S, "a loss may be answered with more replicas"


def test_a_planned_stop_says_what_it_is_for() -> None:
    job = Job()
    job.beats(0.1)
    job.driver.infos[Rank(4)] = info_of(4)
    job.feed(Connected(Rank(4)), 0.2)
    job.feed(Heartbeat(Rank(4), Epoch(-1), Version(0), "ready", None, None, True, False, (), None), 0.2)
    job.feed(Tick(), 0.3)
    asked = job.asked()
    assert len(asked) == WORLD + 1 and len({id(message) for message in asked}) == 1, "it is encoded once"
    assert asked[0].stop_after is not None
    for rank in range(WORLD):
        replicas = job.replicas_of(Rank(rank))
        there = Stamp(asked[0].stop_after, Epoch(0))
        report = Report(Rank(rank), Epoch(0), there, replicas, {}, (), (), frozenset())
        job.feed(Prepared(asked[0].ballot, report), 0.4)
    job.feed(Prepared(asked[0].ballot, Report(Rank(4), Epoch(-1), SEED, {}, {}, (), (), frozenset())), 0.4)
    assert job.register.members == tuple(range(WORLD + 1))
    assert asked[0].plan == job.driver.plan(job.register.key.plan_hash).text
    job.feed(Heartbeat(Rank(0), Epoch(1), Version(0), STOPPED, None, None, False, True, (), None), 0.5)
    unplanned = job.asked()[len(asked) :]
    assert unplanned and all(message.stop_after is None and not message.plan for message in unplanned)


def test_without_a_plan_the_job_is_over() -> None:
    job = Job(ToyPlanning(least=WORLD))
    job.beats(0.1)
    job.lose(3, 0.2)
    assert [act.reason for act in job.did if isinstance(act, Over)] == ["3 ranks are too few; 4 would do"]
    assert job.register.epoch == 0
