"""What the coordinator tells of a loss, from its first sign to the next epoch."""

from __future__ import annotations

from typing import Any

from elaswave_fx.control.coordinator.event_log import job_event, log_line
from elaswave_fx.control.protocol.coordinator import Event, end, step
from elaswave_fx.control.protocol.events import EVENT_TYPES, Over, Superseded
from elaswave_fx.control.protocol.messages import Connected, Exited, Heartbeat, Prepared, Tick
from elaswave_fx.control.protocol.register import Read, Register, StoreReply, Swap, swap
from elaswave_fx.control.protocol.types import STOPPED, Replica, Report, Term, Version
from elaswave_fx.observe import job_events
from elaswave_fx.observe.run_event import fields_of
from elaswave_fx.plan.work.box import numbered
from elaswave_fx.plan.work.topology import Rank
from tests.control.test_coordinator import WORLD, Driver, line


class Recorded(Driver):
    """A coordinator whose events are written down."""

    def __init__(self, register: Register | None = None) -> None:
        self.lines: list[tuple[str, int, dict[str, Any]]] = []
        super().__init__(register)

    def feed(self, event: Event) -> None:
        self.state, actions = step(self.state, event, self.now_s)
        for action in actions:
            found = job_event(action, self.now_s) if isinstance(action, EVENT_TYPES) else None
            if found is not None:
                fields = fields_of(found)
                self.lines.append((fields.pop("event"), action.epoch, fields))
        self.did += actions
        for action in actions:
            if isinstance(action, Swap):
                self.register, _ = swap(self.register, action)
            if isinstance(action, Swap | Read):
                self.feed(StoreReply(self.register))


def test_a_loss_is_told_once_and_then_what_was_agreed() -> None:
    job = Recorded()
    job.beats(*range(WORLD))
    job.now_s = 0.1
    job.heartbeat(0, phase=STOPPED, suspect=Rank(3))
    job.feed(Exited(Rank(3)))
    for rank in range(3):
        job.prepared(rank)
    kinds = [kind for kind, _, _ in job.lines]
    assert kinds == ["detected", "stopped", "agreed"]
    assert job.lines[0] == ("detected", 0, {
        "rank": 3, "ranks": [3], "cause": "rank 0 aborted the step and reported rank 3 lost",
        "silent_ms": 100.0, "exited": False,
    })  # fmt: skip
    assert job.lines[1] == ("stopped", 1, {"members": [0, 1, 2]})
    _, epoch, fields = job.lines[2]
    assert epoch == 1 and fields == {
        "members": [0, 1, 2], "lost": [3], "step": 0, "steps_redone": 1, "how": "done again",
        "why": "step 0 is done again",
    }  # fmt: skip


def test_a_second_loss_is_told_too() -> None:
    job = Recorded()
    job.beats(*range(WORLD))
    job.feed(Exited(Rank(3)))
    job.feed(Exited(Rank(2)))
    assert [(kind, fields["ranks"]) for kind, _, fields in job.lines] == [("detected", [3]), ("detected", [2])]


def test_a_planned_stop_is_no_loss() -> None:
    job = Recorded()
    job.beats(*range(WORLD))
    job.feed(Connected(Rank(7)))
    job.feed(Heartbeat(Rank(7), job.register.epoch, Version(0), STOPPED, None, None, True, False, ()))
    job.feed(Tick())
    assert [kind for kind, _, _ in job.lines] == ["stopping"]


def test_who_is_waited_for_is_said_once() -> None:
    """Two ranks fall silent after a step; what they alone have a replica of is not taken from anywhere older."""
    job = Recorded()
    job.beats(*range(WORLD))
    job.heartbeat(0, lines=(line(1),))
    boxes = job.register.activation.assignment.boxes
    silent = set(boxes[0].replica_ranks)
    others = [rank for rank in range(WORLD) if rank not in silent]
    first = job.register.committed
    for tick in range(1, 12):
        job.now_s = 0.3 * tick
        for rank in others:
            job.heartbeat(rank, version=Version(1), phase=f"at {tick}")
        job.feed(Tick())
        for rank in others:
            replicas = {box_id: Replica(first, 1) for box_id, box in numbered(boxes) if rank in box.replica_ranks}
            report = Report(Rank(rank), job.register.epoch, first, replicas, {}, (), (), frozenset())
            job.feed(Prepared(job.state.ballot, report))
    (waiting,) = [fields for kind, _, fields in job.lines if kind == "waiting"]
    assert waiting["cause"] == f"boxes [0, 2] wait for ranks {sorted(silent)}" and job.register.epoch == 0


def test_who_takes_over_tells_of_the_epoch_that_it_finds() -> None:
    """The coordinator before may have been killed between the swap and its word."""
    job = Recorded()
    job.beats(*range(WORLD))
    job.feed(Exited(Rank(3)))
    for rank in range(3):
        job.prepared(rank)
    heir = Recorded(job.register)
    assert [(kind, epoch) for kind, epoch, _ in heir.lines] == [("agreed", 1)]
    assert heir.lines[0][2]["members"] == [0, 1, 2] and "rolled_back_to" not in heir.lines[0][2]
    assert heir.lines[0][2]["steps_redone"] is None, "nobody knows that any more"
    assert not Recorded().lines, "there is nothing to tell of the first epoch"


def test_a_rank_that_was_never_heard_has_no_last_sign_of_life() -> None:
    job = Recorded()
    job.beats(0, 1, 2)
    job.feed(Exited(Rank(3)))
    assert job.lines[0][2]["silent_ms"] is None


def test_the_end_is_told_with_its_reason() -> None:
    job = Recorded()
    _, actions = end(job.state, "2 ranks are too few")
    (over,) = [action for action in actions if isinstance(action, Over)]
    assert job_event(over, 0.0) == job_events.Over(reason="2 ranks are too few")


def test_what_only_the_log_says() -> None:
    assert job_event(Superseded(Term(4)), 0.0) is None
    assert log_line(Superseded(Term(4))) == "coordinator of term 4: superseded"
