"""The step protocol of one rank, event by event."""

from dataclasses import replace

import pytest

from elaswave_fx.control.protocol.messages import (
    COORDINATOR,
    Abort,
    Ack,
    Action,
    Activate,
    Committed,
    Compute,
    Fetch,
    Gradient,
    Heartbeat,
    LinkDown,
    Load,
    Params,
    Prepare,
    Prepared,
    ProbeStore,
    Ran,
    RecordOf,
    Send,
    Shard,
    StoreSeen,
    Tick,
    Update,
    VoteCast,
)
from elaswave_fx.control.protocol.rank_state import COMPUTE, GATHER, REDUCE, STOPPED, VOTED, Deadlines, RankState
from elaswave_fx.control.protocol.step_commit import Event, step
from elaswave_fx.control.protocol.types import (
    SEED,
    Activation,
    Assignment,
    Ballot,
    BoxId,
    Copy,
    Part,
    Record,
    Stamp,
    Term,
    Version,
    Vote,
    WorkSpan,
)
from elaswave_fx.plan.box import Box, Span
from elaswave_fx.plan.tiling import Tile
from elaswave_fx.plan.topology import Epoch, Rank

ME, PEER = Rank(0), Rank(1)
MINE, THEIRS = BoxId(0), BoxId(1)
FIRST, HALF, REST = Stamp(Version(1), Epoch(0)), Span(0, 6), Span(6, 12)
BALLOT = Ballot(Term(1), 0)


def assignment(catching_up: tuple[Rank, ...] = ()) -> Assignment:
    """Two ranks, each owning one box and holding the other's, if it does not wait for a copy of it."""
    tiles = (Tile(ME, Span(0, 1), HALF, (HALF,)), Tile(PEER, Span(0, 1), REST, (REST,)))
    boxes = (
        Box(0, Span(0, 1), ME, (PEER,), tuple(r for r in catching_up if r == PEER), (ME, PEER)),
        Box(0, Span(1, 2), PEER, (ME,), tuple(r for r in catching_up if r == ME), (ME, PEER)),
    )
    return Assignment((ME, PEER), tiles, boxes, 1)


def activate(
    epoch: int = 0,
    ballot: Ballot = BALLOT,
    resume: Stamp = SEED,
    rollback: bool = True,
    catching_up: tuple[Rank, ...] = (),
) -> Activate:
    return Activate(ballot, Activation(Epoch(epoch), assignment(catching_up), resume, SEED, None, rollback))


class Driver:
    """Feeds one rank and keeps what it did."""

    def __init__(self) -> None:
        self.state = RankState(ME, Deadlines(paused_s=1.0, lease_s=2.0))
        self.did: list[Action] = []
        self.now_s = 0.0

    def feed(self, event: Event, sender: Rank = COORDINATOR) -> list[Action]:
        self.state, actions = step(self.state, event, self.now_s, sender)
        self.did += actions
        return list(actions)

    def ran(self, digest: int = 0) -> list[Action]:
        assert self.state.running is not None
        return self.feed(Ran(self.state.running.serial, digest))

    def sent(self, kind: type) -> list[Send]:
        return [a for a in self.did if isinstance(a, Send) and isinstance(a.message, kind)]

    def until_reduce(self, catching_up: tuple[Rank, ...] = ()) -> None:
        """Loaded, gathered, computed: the records are next."""
        self.feed(activate(catching_up=catching_up))
        self.ran(100)
        self.ran(101)
        if ME in catching_up:
            self.feed(Params(Epoch(0), SEED.version, ((THEIRS, 101),)), PEER)
        self.ran()
        assert self.state.phase == REDUCE

    def until_voted(self, base_digest: int = 101, catching_up: tuple[Rank, ...] = ()) -> None:
        self.until_reduce(catching_up)
        self.feed(Gradient(Epoch(0), Version(1), REST), PEER)
        self.feed(RecordOf(Epoch(0), THEIRS, record(base_digest)), PEER)


def record(base_digest: int) -> Record:
    return Record(FIRST, (Part(ME, HALF), Part(PEER, REST)), base_digest)


def vote_of(rank: Rank, epoch: int = 0) -> VoteCast:
    stamp = Stamp(Version(1), Epoch(epoch))
    return VoteCast(Epoch(epoch), Vote(stamp, rank, (WorkSpan(Span(0, 1), HALF if rank == ME else REST),)))


def test_a_step_from_load_to_update() -> None:
    rank = Driver()
    rank.until_voted()
    assert rank.state.phase == VOTED and [a.target for a in rank.sent(VoteCast)] == [PEER]
    assert [type(a) for a in rank.did if not isinstance(a, Send)] == [Load, Load, Compute]
    actions = rank.feed(vote_of(PEER), PEER)
    assert [type(a) for a in actions] == [Committed, Send, Update]
    assert rank.state.committed == FIRST
    (second,) = rank.ran(200)
    assert isinstance(second, Update) and second.box == THEIRS
    rank.ran(201)
    assert rank.state.phase == COMPUTE and not rank.sent(Params)
    assert rank.state.copies == {MINE: Copy(FIRST, 200), THEIRS: Copy(FIRST, 201)}


def test_parameters_go_to_readers_without_a_copy_and_are_awaited_there() -> None:
    rank = Driver()
    rank.feed(activate(catching_up=(ME, PEER)))
    rank.ran(100)
    rank.ran(101)
    assert [a.message for a in rank.sent(Params)] == [Params(Epoch(0), SEED.version, ((MINE, 100),))]
    assert rank.state.phase == GATHER
    rank.feed(Params(Epoch(0), SEED.version, ((THEIRS, 101),)), PEER)
    assert rank.state.phase == COMPUTE


def test_nothing_is_updated_before_every_vote() -> None:
    rank = Driver()
    rank.until_voted()
    rank.feed(Tick())
    assert not any(isinstance(a, Update | Committed) for a in rank.did)


def test_no_vote_without_the_record_of_a_held_box() -> None:
    rank = Driver()
    rank.until_reduce()
    rank.feed(Gradient(Epoch(0), Version(1), REST), PEER)
    assert rank.state.phase == REDUCE and not rank.sent(VoteCast)


def test_a_base_that_differs_and_was_computed_with_takes_the_step_with_it() -> None:
    rank = Driver()
    rank.until_voted(base_digest=999)
    assert rank.state.phase == STOPPED and THEIRS not in rank.state.copies
    assert [a.message for a in rank.sent(Abort)] == [Abort(Epoch(0), Version(1), None)]
    assert not rank.sent(VoteCast) and not rank.sent(Fetch)


def test_another_base_that_differs_is_fetched_before_the_vote() -> None:
    rank = Driver()
    rank.until_voted(base_digest=999, catching_up=(ME,))
    assert [a.message for a in rank.sent(Fetch)] == [Fetch(Epoch(0), THEIRS)]
    assert not rank.sent(VoteCast)
    rank.feed(Shard(Epoch(0), THEIRS, Copy(SEED, 999)), PEER)
    assert rank.state.phase == VOTED


def test_frames_of_an_older_epoch_are_dropped_and_newer_ones_held() -> None:
    rank = Driver()
    rank.until_voted()
    rank.feed(vote_of(PEER, epoch=1), PEER)
    assert rank.state.held == ((PEER, vote_of(PEER, epoch=1)),)
    rank.feed(LinkDown(PEER))
    rank.feed(Prepare(Ballot(Term(1), 1), None))
    rank.feed(activate(1, Ballot(Term(1), 1), rollback=False))
    # The link is still down: the new epoch is left at once; yet it is the new one.
    assert rank.state.epoch == 1 and rank.state.phase == STOPPED
    before = rank.state
    assert rank.feed(vote_of(PEER, epoch=0), PEER) == [] and rank.state == before


def test_the_first_to_notice_floods_and_stops() -> None:
    rank = Driver()
    rank.until_voted()
    actions = rank.feed(LinkDown(PEER))
    assert rank.state.phase == STOPPED
    reports = [a.message.report for a in actions if isinstance(a, Send) and isinstance(a.message, Prepared)]
    assert [report.suspect for report in reports] == [PEER]


def test_an_abort_is_forwarded_once() -> None:
    rank = Driver()
    rank.until_reduce()
    third = Rank(2)
    rank.feed(Abort(Epoch(0), Version(1), third), third)
    assert [a.target for a in rank.sent(Abort)] == [PEER]
    rank.feed(Abort(Epoch(0), Version(1), third), PEER)
    assert len(rank.sent(Abort)) == 1


def test_a_rank_that_was_paused_accuses_nobody() -> None:
    rank = Driver()
    rank.until_voted()
    rank.now_s = 5.0
    actions = rank.feed(LinkDown(PEER))
    assert rank.state.phase == STOPPED and rank.state.suspect is None
    assert not any(isinstance(a, Send) and isinstance(a.message, Abort) for a in actions)


def test_after_its_report_a_rank_commits_no_more() -> None:
    rank = Driver()
    rank.until_voted()
    rank.feed(Prepare(Ballot(Term(1), 1), None))
    assert len(rank.sent(Prepared)) == 1
    rank.feed(vote_of(PEER), PEER)
    assert rank.state.committed == SEED and not any(isinstance(a, Committed) for a in rank.did)
    rank.feed(Prepare(Ballot(Term(1), 2), None))
    again = rank.sent(Prepared)[-1].message
    assert isinstance(again, Prepared) and {v.rank for v in again.report.votes} == {ME, PEER}


def test_the_report_waits_for_a_half_done_update() -> None:
    rank = Driver()
    rank.until_voted()
    rank.feed(vote_of(PEER), PEER)
    rank.feed(Prepare(Ballot(Term(1), 1), None))
    assert not rank.sent(Prepared)
    rank.ran(200)
    (answer,) = rank.sent(Prepared)
    assert isinstance(answer.message, Prepared)
    report = answer.message.report
    assert report.copies == {MINE: Copy(FIRST, 200), THEIRS: Copy(SEED, 101)} and THEIRS in report.records
    assert [c.stamp for c in report.certificates] == [FIRST]


def test_a_planned_stop_comes_after_its_version() -> None:
    rank = Driver()
    rank.until_voted()
    rank.feed(Prepare(Ballot(Term(1), 1), Version(1)))
    assert not rank.sent(Prepared)
    rank.feed(vote_of(PEER), PEER)
    rank.ran(200)
    rank.ran(201)
    assert len(rank.sent(Prepared)) == 1 and rank.state.phase == STOPPED


@pytest.mark.parametrize("ballot", [Ballot(Term(0), 9), Ballot(Term(1), 0)])
def test_lower_ballots_are_refused(ballot: Ballot) -> None:
    rank = Driver()
    rank.until_voted()
    rank.feed(Prepare(Ballot(Term(1), 1), None))
    rank.feed(activate(1, ballot))
    assert rank.state.epoch == 0
    before = len(rank.sent(Prepared))
    rank.feed(Prepare(ballot, None))
    assert len(rank.sent(Prepared)) == before


def test_roll_forward_applies_the_record_and_drop_forgets_it() -> None:
    for resume in (FIRST, SEED):
        rank = Driver()
        rank.until_voted()
        rank.feed(Prepare(Ballot(Term(1), 1), None))
        actions = rank.feed(activate(1, Ballot(Term(1), 1), resume, rollback=False))
        updates = [a for a in actions if isinstance(a, Update)]
        assert [u.record.stamp for u in updates] == ([FIRST] if resume == FIRST else [])
        assert bool(rank.state.records) is (resume == FIRST)
        assert rank.state.committed == resume and rank.state.votes == {}


def test_a_rank_pauses_at_its_vote_while_the_store_is_out_of_reach() -> None:
    rank = Driver()
    rank.until_reduce()
    rank.feed(Gradient(Epoch(0), Version(1), REST), PEER)
    rank.now_s = 2.5
    rank.feed(RecordOf(Epoch(0), THEIRS, record(101)), PEER)
    assert rank.state.phase == REDUCE
    assert any(isinstance(a, ProbeStore) for a in rank.feed(Tick()))
    rank.feed(StoreSeen(Term(1), Epoch(0), (ME, PEER)))
    assert rank.state.phase == VOTED


@pytest.mark.parametrize(
    "news", [Ack(Term(1), Epoch(1), False, Version(0)), StoreSeen(Term(1), Epoch(1), (PEER,))], ids=["ack", "store"]
)
def test_an_excluded_rank_stops_and_asks_to_join_with_its_copies(news: Ack | StoreSeen) -> None:
    rank = Driver()
    rank.until_voted()
    copies = rank.state.copies
    rank.feed(news)
    assert rank.state.joining and rank.state.phase == STOPPED and rank.state.copies == copies
    (heartbeat,) = [a.message for a in rank.feed(Tick()) if isinstance(a, Send) and isinstance(a.message, Heartbeat)]
    assert heartbeat.joining


def test_a_new_holder_catches_up_from_a_base_and_the_records_since() -> None:
    rank = Driver()
    rank.until_reduce(catching_up=(ME,))
    rank.state = replace(rank.state, copies={MINE: rank.state.copies[MINE]}, complete=frozenset({MINE}))
    rank.feed(Gradient(Epoch(0), Version(1), REST), PEER)
    # It votes without the box that it does not have yet, and keeps the record.
    assert rank.state.phase == VOTED
    rank.feed(RecordOf(Epoch(0), THEIRS, record(101)), PEER)
    rank.feed(vote_of(PEER), PEER)
    rank.ran(200)
    actions = rank.feed(Shard(Epoch(0), THEIRS, Copy(SEED, 101)), PEER)
    assert [a.box for a in actions if isinstance(a, Update)] == [THEIRS]
    rank.ran(201)
    assert rank.state.copies[THEIRS] == Copy(FIRST, 201)
