"""An engine that takes whole steps by itself leaves the same state and reports as the single frames of the step."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elaswave_fx.control.protocol.messages import (
    COORDINATOR,
    Abort,
    Ack,
    Action,
    LinkDown,
    Prepare,
    Prepared,
    Send,
    Tick,
)
from elaswave_fx.control.protocol.rank_state import STOPPED, Deadlines, Holdings, RankState, install
from elaswave_fx.control.protocol.step_commit import commit_whole, control, left, step
from elaswave_fx.control.protocol.types import SEED, Ballot, Certificate, Report, Stamp, Term, Version, Vote
from elaswave_fx.plan.topology import Epoch, Rank
from tests.control.test_step_commit import FIRST, ME, PEER, Driver, activate, vote_of

BALLOT = Ballot(Term(1), 1)
PREPARE = Prepare(BALLOT, None)


def whole() -> RankState:
    """A rank as its agent starts it: in the first epoch, without a single frame."""
    return install(RankState(ME, Deadlines(paused_s=1.0, lease_s=2.0), joining=False), activate().activation)


def holdings_of(state: RankState) -> Holdings:
    """What an engine in the place of that machine has in memory."""
    return Holdings(
        committed=state.committed,
        copies=state.copies,
        records=state.records,
        votes=tuple(state.votes.values()),
        complete=state.complete,
    )


def report_in(actions: tuple[Action, ...] | list[Action]) -> Report:
    (report,) = [a.message.report for a in actions if isinstance(a, Send) and isinstance(a.message, Prepared)]
    return report


def certificate(votes: dict[tuple[Version, Rank], Vote]) -> Certificate:
    return Certificate(FIRST, tuple(votes[FIRST.version, rank] for rank in (ME, PEER)))


@pytest.mark.parametrize("peer_voted", [False, True], ids=["before the commit", "after it"])
def test_a_lost_link_leads_to_the_same_report(peer_voted: bool) -> None:
    frames, engine = Driver(), whole()
    frames.until_voted()
    votes = dict(frames.state.votes)
    if peer_voted:
        frames.feed(vote_of(PEER), PEER)
        frames.ran(200)
        frames.ran(201)
        vote = vote_of(PEER).vote
        votes[vote.stamp.version, PEER] = vote
        engine = commit_whole(engine, certificate(votes))
    before = frames.state
    by_frames = frames.feed(LinkDown(PEER))
    engine, said = left(replace(engine, broken=frozenset({PEER})), holdings_of(before), PEER, 0.0)
    assert report_in(by_frames) == report_in(said)
    assert engine.phase == frames.state.phase == STOPPED and engine.suspect == frames.state.suspect == PEER
    by_frames = frames.feed(PREPARE)
    engine, answered = control(engine, PREPARE, 0.0)
    assert report_in(by_frames) == report_in(answered), "asked, it says the same once more"


def test_a_commit_known_by_its_votes_alone_is_taken_over() -> None:
    frames = Driver()
    frames.until_voted()
    frames.feed(vote_of(PEER), PEER)
    frames.ran(200)
    frames.ran(201)
    votes = (*frames.state.certificates[0].votes,)
    told = replace(holdings_of(frames.state), committed=FIRST, votes=votes)
    engine, _ = left(whole(), told, None, 0.0)
    assert engine.committed == FIRST and engine.certificates == frames.state.certificates and engine.votes == {}


def test_a_commit_out_of_order_or_without_a_vote_is_a_bug_of_ours() -> None:
    (mine, theirs) = (vote_of(rank).vote for rank in (ME, PEER))
    with pytest.raises(AssertionError, match="in flight is"):
        commit_whole(whole(), Certificate(Stamp(Version(2), Epoch(0)), (mine, theirs)))
    with pytest.raises(AssertionError, match="votes of"):
        commit_whole(whole(), Certificate(FIRST, (mine,)))


def test_votes_of_another_epoch_do_not_count() -> None:
    foreign = Vote(Stamp(Version(1), Epoch(7)), PEER, vote_of(PEER).vote.units, vote_of(PEER).vote.samples)
    told = Holdings(SEED, {}, {}, (foreign,))
    engine, _ = left(whole(), told, None, 0.0)
    assert engine.votes == {}


@pytest.mark.parametrize("quiet", [True, False], ids=["told by a tick", "by the clock alone"])
def test_a_rank_that_was_paused_accuses_nobody(quiet: bool) -> None:
    engine, now_s = whole(), 9.0
    if quiet:
        engine, _ = control(engine, Tick(), 9.0)
    engine, actions = left(engine, holdings_of(engine), PEER, now_s)
    assert engine.phase == STOPPED and engine.suspect is None
    assert not any(isinstance(a, Send) and isinstance(a.message, Abort) for a in actions)


def test_a_planned_stop_is_answered_when_the_rank_leaves_after_its_version() -> None:
    engine, actions = control(whole(), Prepare(BALLOT, Version(1)), 0.0)
    assert actions == () and engine.phase != STOPPED and engine.stop_after == 1
    votes = {(FIRST.version, rank): vote_of(rank).vote for rank in (ME, PEER)}
    engine = commit_whole(engine, certificate(votes))
    assert engine.phase != STOPPED
    engine, actions = left(engine, replace(holdings_of(engine), committed=FIRST), None, 0.0)
    assert report_in(actions).committed == FIRST


def test_an_excluded_rank_learns_it_without_a_step() -> None:
    engine, actions = control(whole(), Ack(Term(1), Epoch(1), False, Version(0)), 0.0)
    assert engine.joining and engine.phase == STOPPED
    assert all(a.target == COORDINATOR for a in actions if isinstance(a, Send))
    engine, actions = left(engine, holdings_of(engine), PEER, 0.0)
    assert engine.joining and not any(isinstance(a, Send) and isinstance(a.message, Prepared) for a in actions)


def test_frames_and_whole_steps_agree_on_an_acknowledged_ledger() -> None:
    frames, engine = Driver(), whole()
    frames.until_voted()
    frames.feed(vote_of(PEER), PEER)
    engine = commit_whole(engine, frames.state.certificates[0])
    assert engine.certificates == frames.state.certificates
    acked, _ = control(engine, Ack(Term(1), Epoch(0), True, Version(1)), 0.0)
    by_frames, _ = step(frames.state, Ack(Term(1), Epoch(0), True, Version(1)), 0.0)
    assert acked.certificates == by_frames.certificates == ()
