"""What a rank says that cannot be costs its connection, and nobody else anything: each field, and any damage."""

from __future__ import annotations

import contextlib
import math
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from elaswave_fx.control.coordinator.rank_reports import fault_of_report
from elaswave_fx.control.protocol import coordinator as membership
from elaswave_fx.control.protocol.messages import (
    Connected,
    Disconnected,
    Ended,
    Gone,
    Heartbeat,
    Prepared,
    ProbeStore,
    RankReport,
    Reshape,
    Tick,
)
from elaswave_fx.control.protocol.register import Register, Swap
from elaswave_fx.control.protocol.types import (
    SEED,
    Activation,
    Ballot,
    BoxId,
    Certificate,
    Part,
    Record,
    Replica,
    Report,
    Stamp,
    Term,
    Version,
    Vote,
)
from elaswave_fx.control.protocol.validate import AHEAD_MOST, fault_of, fault_of_member, fault_of_reshape
from elaswave_fx.control.store.ledger import Payload, line_of
from elaswave_fx.control.wire import ControlAddress, CoordinatorSocket, OfRank, decode
from elaswave_fx.errors import CommError, PlanError
from elaswave_fx.launch.channel import Channel
from elaswave_fx.launch.channel import Message as ChannelMessage
from elaswave_fx.observe.metrics import StepReport
from elaswave_fx.observe.narrative import describe
from elaswave_fx.observe.rank_events import RankEvent
from elaswave_fx.observe.recorder import Recorder
from elaswave_fx.observe.run_directory import RunDirectory
from elaswave_fx.observe.run_event import received
from elaswave_fx.plan.work.spans import Span, WorkSpan
from elaswave_fx.plan.work.topology import Epoch, Rank
from tests.control.member_infos import info_of
from tests.control.test_wire import address, coordinator, heard, met  # noqa: F401 - two of them are fixtures
from tests.control.toy_planner import first_assignment

WORLD = 3
HUGE = 1 << 61
ASSIGNMENT = first_assignment(WORLD, 1)
REGISTER = Register(
    Term(2),
    Activation(Epoch(4), ASSIGNMENT, Stamp(Version(5), Epoch(3)), SEED, None),
    Stamp(Version(7), Epoch(4)), Stamp(Version(6), Epoch(4)), None, SEED, numbers=WORLD + 1,
)  # fmt: skip
NEXT = Stamp(Version(8), Epoch(4))
SPAN = (WorkSpan(Span(0, 2), Span(0, 4)),)


def vote(rank: int, stamp: Stamp = NEXT, payload: bytes | None = None) -> Vote:
    said = Payload(1.0, 0.5, consumed=SPAN, buckets=((0, 9),)).pack() if payload is None else payload
    return Vote(stamp, Rank(rank), SPAN, said)


LINE = Certificate(NEXT, tuple(vote(rank) for rank in range(WORLD)))
BEAT = Heartbeat(Rank(1), Epoch(4), Version(8), "FORWARD 3", Rank(0), None, False, True, (LINE,), 0.05)
RECORD = Record(NEXT, (Part(Rank(0), (Span(0, 3),)),), 7)
REPORT = Report(
    Rank(1), Epoch(4), REGISTER.committed, {BoxId(0): Replica(NEXT, 1)}, {BoxId(0): (RECORD,)}, (vote(1),), (LINE,),
    frozenset({Rank(2)}), Rank(2),
)  # fmt: skip
PREPARED = Prepared(Ballot(Term(2), 3), REPORT)
SOUND: tuple[OfRank, ...] = (BEAT, PREPARED, Ended(Rank(1)), Gone(Rank(1)), ProbeStore(Rank(1), 17.25))

UNSOUND: dict[str, OfRank] = {
    "an epoch to come": replace(BEAT, epoch=Epoch(5)),
    "an absurd epoch": replace(BEAT, epoch=Epoch(-HUGE)),
    "a version far ahead": replace(BEAT, version=Version(8 + AHEAD_MOST)),
    "a negative version": replace(BEAT, version=Version(-1)),
    "awaits nobody's number": replace(BEAT, awaited=Rank(4)),
    "accuses a negative number": replace(BEAT, suspect=Rank(-1)),
    "a long phase": replace(BEAT, phase="x" * 5000),
    "a step of no time": replace(BEAT, step_s=math.nan),
    "an endless step": replace(BEAT, step_s=math.inf),
    "a negative step": replace(BEAT, step_s=-1.0),
    "a line of another epoch": replace(BEAT, lines=(Certificate(Stamp(Version(8), Epoch(9)), ()),)),
    "a line without votes": replace(BEAT, lines=(Certificate(NEXT, ()),)),
    "a line with too few votes": replace(BEAT, lines=(Certificate(NEXT, LINE.votes[:2]),)),
    "a line with two votes of one": replace(BEAT, lines=(Certificate(NEXT, (*LINE.votes, vote(0))),)),
    "a line with votes for another": replace(
        BEAT, lines=(Certificate(NEXT, (vote(0), vote(1), vote(2, REGISTER.committed))),)
    ),
    "a vote that says nothing known": replace(
        BEAT, lines=(Certificate(NEXT, (*LINE.votes[:2], vote(2, payload=b"x"))),)
    ),
    "a vote that was busy for ever": replace(
        BEAT, lines=(Certificate(NEXT, (*LINE.votes[:2], vote(2, payload=Payload(busy_s=math.inf).pack()))),)
    ),
    "a report of an epoch to come": Prepared(PREPARED.ballot, replace(REPORT, epoch=Epoch(6))),
    "a report far ahead": Prepared(PREPARED.ballot, replace(REPORT, committed=Stamp(Version(HUGE), Epoch(4)))),
    "a box that is not there": Prepared(PREPARED.ballot, replace(REPORT, copies={BoxId(99): Replica(NEXT, 1)})),
    "a record of no box": Prepared(PREPARED.ballot, replace(REPORT, records={BoxId(-1): (RECORD,)})),
    "too many records": Prepared(PREPARED.ballot, replace(REPORT, records={BoxId(0): (RECORD,) * 99})),
    "a link to nobody": Prepared(PREPARED.ballot, replace(REPORT, broken=frozenset({Rank(77)}))),
    "a certificate without votes": Prepared(PREPARED.ballot, replace(REPORT, certificates=(Certificate(NEXT, ()),))),
    "a vote of nobody": Prepared(PREPARED.ballot, replace(REPORT, votes=(vote(44),))),
    "a ballot of nobody": Prepared(Ballot(Term(-1), 3), REPORT),
    "finished without being a member": Ended(Rank(3)),
    "asked at no time": ProbeStore(Rank(1), math.nan),
}


@pytest.mark.parametrize("message", SOUND, ids=lambda message: type(message).__name__)
def test_what_can_be_is_taken(message: OfRank) -> None:
    assert fault_of(message, REGISTER) is None


@pytest.mark.parametrize("kind", UNSOUND)
def test_what_cannot_be_is_named(kind: str) -> None:
    assert fault_of(UNSOUND[kind], REGISTER) is not None


def test_a_rank_that_is_far_ahead_of_the_ledger_is_heard() -> None:
    """The store waits for a disk, ranks do not."""
    assert fault_of(replace(BEAT, version=Version(7 + AHEAD_MOST)), REGISTER) is None


@pytest.mark.parametrize(
    "changed", [{"port": 0}, {"port": 65536}, {"port": -1}, {"memory_bytes": 0}, {"memory_bytes": 1 << 63},
                {"host": ""}, {"host": "h" * 2000}, {"versions": {"torch": "2" * 2000}},
                {"code": {"mine.py": "2" * 2000}}],
    ids=str,
)  # fmt: skip
def test_a_card_that_nobody_could_dial_is_refused(changed: dict[str, Any]) -> None:
    assert fault_of_member(info_of(1)) is None
    assert fault_of_member(replace(info_of(1), **changed)) is not None


def test_lanes_are_positive_and_bounded() -> None:
    assert fault_of_reshape(Reshape(2, 4)) is fault_of_reshape(Reshape(None, None)) is None
    assert (
        fault_of_reshape(Reshape(0, 1)) and fault_of_reshape(Reshape(1, HUGE)) and fault_of_reshape(Reshape(-3, None))
    )


# --- What is told to the launcher

STEP = StepReport(
    step=7, loss=2.5, tokens=64, step_ms=3.5, lr=1e-3, grad_norm=0.5, epoch=4, consumed=((0, 2, 0, 4),), world_size=3
)
TOLD = {
    "step": msgspec.to_builtins(STEP),
    "eval": {"step": 7, "loss": math.nan, "count": 128},
    "share": {
        "summary": {"params_digest": "ab", "buckets": {"0": "ff"}, "memory_per_parameter": {"host": {"state": 12.0}}}
    },
}
EVENTS: dict[str, dict[str, Any]] = {
    "joined": {"step": 7},
    "resumed": {"step": 7},
    "edited": {"ms": 1.5},
    "transferred": {"ms": 1.5, "bytes": 0, "bytes_behind": 99},
    "caught_up": {"bytes": 5},
    "copy_differs": {"cause": "box 3"},
    "left": {"step": -1, "cause": "told to", "asked": True},
    "skipped_update": {"step": 7, "grad_norm": math.inf},
    "gave_up": {"step": 7, "reason": "nothing is learned"},
    "checkpoint": {"step": 7, "path": "/x/step-7", "megabytes": 1.5, "copy_ms": 0.1, "write_ms": 0.2},
    "clock": {"wanted_mhz": None, "outcome": "applied", "mhz": 800.0, "why": ""},
    "model": {"path": "/x/model", "run_dir": "/y", "host": "h"},
}


def told(kind: str, fields: dict[str, Any]) -> RankReport:
    return RankReport(Rank(3), kind, fields)


def event(kind: str, **fields: Any) -> RankReport:
    return told("event", {"event": kind, "epoch": 4, "at_s": 3.5, **fields})


def test_what_ranks_tell_the_launcher_is_passed_on() -> None:
    for kind, fields in TOLD.items():
        assert fault_of_report(told(kind, fields), 100) is None
    for kind, fields in EVENTS.items():
        assert fault_of_report(event(kind, **fields), 100) is None, kind


@pytest.mark.parametrize("kind", [*TOLD, *(f"event {kind}" for kind in EVENTS)])
def test_each_field_has_to_be_there_and_of_its_type(kind: str) -> None:
    whole = TOLD.get(kind) or {"event": kind.split()[1], "epoch": 4, "at_s": 3.5, **EVENTS[kind.split()[1]]}
    name = kind.split()[0]
    for field in whole:
        for wrong in ({"no": "such"}, [[]], "words" if isinstance(whole[field], (int, float)) else 3.25):
            if (isinstance(wrong, float) and isinstance(whole[field], str | list | dict)) or not isinstance(
                wrong, float
            ):
                assert fault_of_report(told(name, {**whole, field: wrong}), 100) is not None, (field, wrong)
    assert fault_of_report(told(name, {**whole, "rolled_back_to": 3}), 100) is not None
    assert fault_of_report(told(name, {}), 100) is not None


@pytest.mark.parametrize(
    "wrong",
    [
        told("done", {}), told("error", {"classes": []}), told("hello", {"info": {}}), told("x" * 5000, {}),
        event("agreed", members=[1], lost=[], step=3, steps_redone=0, how=None, why="", rolled_back_to=0),
        event("over", reason="I say so"), event("detected", ranks=[0], cause="me"), told("event", {"event": ["left"]}),
        event("left", step=3, cause="gone"), told("eval", {**TOLD["eval"], "step": 101}),
        told("step", {**TOLD["step"], "consumed": [[0, 2, 0, 4]] * 2000}), told("step", {**TOLD["step"], "tokens": -1}),
    ],
    ids=lambda each: f"{each.kind[:10]} {str(each.fields)[:40]}",
)  # fmt: skip
def test_what_the_launcher_would_fall_over_stays_away(wrong: RankReport) -> None:
    assert fault_of_report(wrong, 100) is not None


# --- Any damage: what is taken for sound breaks no machine


def damaged(draw: random.Random, value: Any) -> Any:
    """The plain data of a message with one place changed."""
    if isinstance(value, dict) and value and draw.random() < 0.9:
        key = draw.choice(list(value))
        return {**value, key: damaged(draw, value[key])}
    if isinstance(value, (list, tuple)) and value and draw.random() < 0.9:
        place = draw.randrange(len(value))
        return [*value[:place], damaged(draw, value[place]), *value[place + 1 :]]
    numbers = (-1, 0, 1, 2, 3, 4, 5, 8, 9, 70_000, HUGE, -HUGE, 0.5, math.nan, math.inf)
    return draw.choice((*numbers, None, True, "", "x" * 3000, b"", b"\xff" * 624, [], {}, [value, value], [[value]]))


def machine(draw: random.Random) -> membership.Coordinator:
    """Steady, or while ranks are being asked by an attempt that a report may answer."""
    timeouts = membership.Timeouts(9.0, 9.0, 99.0, 1.0, 0.1, 1.0, 1.0, 9.0)
    state, _ = membership.start(timeouts, lambda *asked: ASSIGNMENT, 0.0)
    state = replace(state, phase=membership.STEADY, register=REGISTER, ballot=Ballot(Term(2), 0))
    if draw.random() < 0.5:
        return state
    reports = {Rank(rank): replace(REPORT, rank=Rank(rank), broken=frozenset()) for rank in (0, 2)}
    targets = tuple(map(Rank, range(WORLD)))
    return replace(state, phase=membership.PREPARING, ballot=PREPARED.ballot, targets=targets, reports=reports)


def run_on(state: membership.Coordinator, said: OfRank) -> None:
    state, actions = membership.step(state, said, 1.0)
    for at_s in (1.1, 2.2, 3.3):
        for swap in (action for action in actions if isinstance(action, Swap)):
            for line in swap.lines:
                line_of(line)  # as the store does
        state, actions = membership.step(state, Tick(), at_s)


@pytest.mark.parametrize("kind", ["Heartbeat", "Prepared", "ProbeStore", "Ended", "Gone"])
def test_whatever_is_taken_for_sound_breaks_no_machine(kind: str) -> None:
    (message,) = (each for each in SOUND if type(each).__name__ == kind)
    plain, taken = msgspec.to_builtins(message, builtin_types=(bytes,)), 0
    for seed in range(1500):
        draw = random.Random(seed)
        body = msgspec.msgpack.encode([kind, damaged(draw, plain)])
        try:
            said = decode(body)
        except CommError:
            continue
        assert isinstance(said, type(message))
        if fault_of(said, REGISTER) is not None:
            continue
        taken += 1
        with contextlib.suppress(PlanError):  # a rank that has nothing any more, or goes with it, as one that dies
            run_on(machine(draw), said)
    assert taken > 20


@pytest.mark.parametrize("kind", ["step", "eval", "share", *(f"event {kind}" for kind in EVENTS)])
def test_whatever_is_passed_on_breaks_no_launcher(kind: str, tmp_path: Path) -> None:
    name = kind.split()[0]
    whole = TOLD.get(kind) or {"event": kind.split()[1], "epoch": 4, "at_s": 3.5, **EVENTS[kind.split()[1]]}
    for seed in range(300):
        fields = damaged(random.Random(seed), whole)
        try:
            said = decode(msgspec.msgpack.encode(["RankReport", {"rank": 3, "kind": name, "fields": fields}]))
        except CommError:
            continue
        assert isinstance(said, RankReport)
        if fault_of_report(said, 1000) is not None:
            continue
        recorder = Recorder(RunDirectory(tmp_path))
        recorder._expect(2, 4)
        try:
            take(recorder, Channel.unpacked(Channel.packed(said.kind, **said.fields)))
        finally:
            recorder.directory.close()


def take(recorder: Recorder, message: ChannelMessage) -> None:
    """As the launcher takes it."""
    fields = message.fields
    if message.kind == "step":
        recorder.step(StepReport.from_fields(fields))
    elif message.kind == "eval":
        recorder.evaluation(fields["step"], fields["loss"], fields["count"])
        assert f"step {fields['step']}: held-out loss {fields['loss']:.4f}"
    elif message.kind == "share":
        recorder.ended(3, fields["summary"])
        recorder.finish("completed", None)
    else:
        event, epoch, at_s = received(RankEvent, {**fields, "rank": 3})
        recorder.event(event, epoch, at_s)
        assert isinstance(describe(event, epoch), str)


# --- On the wire


def test_it_costs_the_sender_alone(coordinator: CoordinatorSocket, address: ControlAddress) -> None:  # noqa: F811
    faults: list[str] = []
    coordinator.doubt, coordinator.on_fault = (lambda message: fault_of(message, REGISTER)), faults.append
    bad, good = met(coordinator, address, 1, 2)
    of_rank_1 = {kind: message for kind, message in UNSOUND.items() if not isinstance(message, Ended)}
    for kind, message in of_rank_1.items():
        bad.send(message)
        bad.send(BEAT)  # nobody hears it any more
        good.send(replace(BEAT, rank=Rank(2)))
        found = heard(coordinator, 3, bad, good)
        assert Disconnected(Rank(1)) in found and replace(BEAT, rank=Rank(2)) in found, kind
        assert Connected(Rank(1)) in found, "it may come again"
        assert BEAT not in found and message not in found
        assert "rank 1 says what cannot be" in faults[-1]
    assert len(faults) == coordinator.refused == len(of_rank_1)
    for rank in (bad, good):
        rank.close()
