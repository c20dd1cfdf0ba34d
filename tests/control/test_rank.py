"""A rank's side of the control plane, event by event."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elaswave_fx.control.protocol.messages import (
    COORDINATOR,
    Ack,
    Activate,
    Ended,
    Gone,
    Heartbeat,
    Leave,
    MustStay,
    Over,
    Prepare,
    Prepared,
    ProbeStore,
    Send,
    StoreSeen,
)
from elaswave_fx.control.protocol.rank import FLUSH_S, joiner, may_step, member, must_leave, step
from elaswave_fx.control.protocol.rank_state import (
    Action,
    Answer,
    Closing,
    Committed,
    EndProcess,
    Event,
    Excluded,
    Go,
    HeartbeatDue,
    Holdings,
    Interrupt,
    LeaveAsked,
    Left,
    Limits,
    LinksDown,
    MendLinks,
    Progress,
    RankState,
    StepLeft,
)
from elaswave_fx.control.protocol.replica_sync import ReplicaSync
from elaswave_fx.control.protocol.types import (
    SEED,
    STOPPED,
    Activation,
    Assignment,
    Ballot,
    BoxId,
    Certificate,
    Record,
    Replica,
    Report,
    Stamp,
    Term,
    Version,
    Vote,
)
from elaswave_fx.plan.work.box import Box
from elaswave_fx.plan.work.spans import Span, WorkSpan
from elaswave_fx.plan.work.topology import Epoch, Rank

ME, PEER = Rank(0), Rank(1)
MINE, THEIRS = BoxId(0), BoxId(1)
FIRST, HALF, REST = Stamp(Version(1), Epoch(0)), Span(0, 6), Span(6, 12)
BALLOT = Ballot(Term(1), 1)
PREPARE = Prepare(BALLOT, None)
LIMITS = Limits(paused_s=1.0, lease_s=2.0, unledgered=3, hung_s=60.0, hung_over_step=30.0)
TICK = HeartbeatDue(Progress("forward 3", PEER))


def assignment(members: tuple[Rank, ...] = (ME, PEER)) -> Assignment:
    """Two ranks, each owning one box and holding the other's."""
    boxes = (Box(0, Span(0, 1), ME, (PEER,)), Box(0, Span(1, 2), PEER, (ME,)))
    return Assignment(members, boxes, 1)


def activate(epoch: int = 0, ballot: Ballot = BALLOT, resume: Stamp = SEED, rollback: bool = False) -> Activate:
    return Activate(ballot, Activation(Epoch(epoch), assignment(), resume, SEED, None, rollback), "the plan")


def certificate(version: int = 1, voters: tuple[Rank, ...] = (ME, PEER)) -> Certificate:
    stamp = Stamp(Version(version), Epoch(0))
    return Certificate(stamp, tuple(Vote(stamp, r, (WorkSpan(Span(0, 1), HALF if r == ME else REST),)) for r in voters))


def holdings(committed: Stamp = SEED, votes: tuple[Vote, ...] = ()) -> Holdings:
    """Replicas at the seed, and records of the first step."""
    replicas = {box: Replica(SEED, 100 + box) for box in (MINE, THEIRS)}
    records = {box: (Record(FIRST, (), replica.digest),) for box, replica in replicas.items()}
    return Holdings(committed, replicas, records, votes, frozenset(replicas))


class Driver:
    """Feeds one rank and keeps what it did."""

    def __init__(self, state: RankState | None = None) -> None:
        self.state = state or member(ME, LIMITS, activate(rollback=True).activation, 0.0)
        self.did: list[Action] = []

    def feed(self, event: Event, now_s: float = 0.0) -> list[Action]:
        self.state, actions = step(self.state, event, now_s)
        self.did += actions
        return list(actions)

    def sent(self, kind: type) -> list[Send]:
        return [a for a in self.did if isinstance(a, Send) and isinstance(a.message, kind)]

    def beat(self, now_s: float = 0.0) -> Heartbeat:
        sent = [action.message for action in self.feed(TICK, now_s) if isinstance(action, Send)]
        (found,) = [message for message in sent if isinstance(message, Heartbeat)]
        return found


def report_in(actions: list[Action]) -> Report:
    (report,) = [a.message.report for a in actions if isinstance(a, Send) and isinstance(a.message, Prepared)]
    return report


def answers(actions: list[Action]) -> list[object]:
    return [a.decision for a in actions if isinstance(a, Answer)]


# --- Steps


def test_a_version_of_before_a_rollback_is_no_commit_of_the_epoch_after_it() -> None:
    """A second loss comes before the rank has entered that epoch, in which its version is the next one again."""
    rank = Driver()
    rank.feed(Committed(certificate(), 0.0))
    held = holdings(FIRST)
    rank.feed(StepLeft(held, None))
    rank.feed(activate(1, rollback=True))
    rank.feed(Prepare(Ballot(Term(1), 9), None))
    report = report_in(rank.feed(StepLeft(held, None))[-1:])
    assert report.epoch == 1 and report.committed == SEED


def test_commits_are_told_until_the_ledger_has_them() -> None:
    rank = Driver()
    rank.feed(Committed(certificate(), 0.0))
    assert rank.beat().lines == (certificate(),) and rank.beat().version == 1
    rank.feed(Ack(Term(1), Epoch(0), True, Version(1)))
    assert rank.beat().lines == ()


def test_a_rank_that_is_not_the_first_hands_its_lines_in_when_it_has_finished() -> None:
    rank = Driver(member(PEER, LIMITS, activate(rollback=True).activation, 0.0))
    rank.feed(Committed(certificate(), 0.0))
    assert rank.beat().lines == ()
    (said,) = rank.feed(Closing(finished=True))
    assert isinstance(said, Send) and isinstance(said.message, Heartbeat) and said.message.lines == (certificate(),)


def test_a_commit_out_of_order_or_without_a_vote_is_a_bug_of_ours() -> None:
    with pytest.raises(AssertionError, match="in flight is"):
        Driver().feed(Committed(certificate(2), 0.0))
    with pytest.raises(AssertionError, match="votes of"):
        Driver().feed(Committed(certificate(1, (ME,)), 0.0))


def test_a_rank_pauses_before_its_next_step_while_store_or_ledger_are_out_of_reach() -> None:
    rank = Driver()
    assert may_step(rank.state, 2.0) and not may_step(rank.state, 2.1)
    rank.feed(StoreSeen(Term(1), Epoch(0), True, 0.0, 500.0), 0.2)
    rank.feed(TICK, 0.9)
    assert rank.sent(ProbeStore) == []
    rank.feed(TICK, 1.1)
    assert rank.sent(ProbeStore) == [Send(COORDINATOR, ProbeStore(ME, 1.1))]
    rank.feed(StoreSeen(Term(1), Epoch(0), True, 1.1, 501.5), 1.9)
    assert may_step(rank.state, 3.1) and not may_step(rank.state, 3.2), "the lease begins when the rank asked"
    rank.feed(StoreSeen(Term(1), Epoch(0), True, 0.4, 502.4), 2.5)
    assert may_step(rank.state, 3.1), "an answer that was overtaken takes nothing back"
    for version in (1, 2, 3):
        assert may_step(rank.state, 1.2)
        rank.feed(Committed(certificate(version), 0.0))
    assert not may_step(rank.state, 1.2)
    rank.feed(Ack(Term(1), Epoch(0), True, Version(1)))
    assert may_step(rank.state, 1.2)


def test_a_rank_compares_its_clock_with_the_coordinators_as_soon_as_it_can() -> None:
    rank = Driver()
    for now_s in (0.2, 0.4):
        rank.feed(TICK, now_s)
        assert rank.sent(ProbeStore)[-1] == Send(COORDINATOR, ProbeStore(ME, now_s))
    rank.feed(StoreSeen(Term(1), Epoch(0), True, 0.4, 700.5), 0.6)
    assert rank.state.clock is not None and rank.state.clock.offset_s == pytest.approx(700.0)
    rank.feed(TICK, 0.8)
    assert len(rank.sent(ProbeStore)) == 2


def test_the_heartbeat_says_where_the_engine_is_and_whether_all_replicas_are_there() -> None:
    rank = Driver()
    beat = rank.beat()
    assert (beat.phase, beat.awaited, beat.complete) == ("forward 3", PEER, True)
    rank.feed(StepLeft(replace(holdings(), complete=frozenset({MINE})), None))
    beat = rank.beat()
    assert (beat.phase, beat.awaited, beat.complete) == (STOPPED, None, False)
    assert not beat.close
    rank.feed(ReplicaSync(frozenset({THEIRS}), frozenset()))
    assert (rank.beat().complete, rank.beat().close) == (False, True)
    rank.feed(ReplicaSync(frozenset({THEIRS}), frozenset({THEIRS})))
    assert not rank.beat().close, "it was of no use, and comes anew"
    rank.feed(ReplicaSync())
    assert rank.beat().complete and rank.beat().close


# --- A loss


def test_a_step_that_was_left_is_reported_without_being_asked_and_again_when_asked() -> None:
    rank = Driver()
    vote = certificate().votes[0]
    rank.feed(LinksDown(frozenset({PEER})))
    report = report_in(rank.feed(StepLeft(holdings(votes=(vote,)), PEER)))
    assert (report.suspect, report.broken, report.votes) == (PEER, {PEER}, (vote,))
    assert report.copies == holdings().replicas and report.records == holdings().records
    rank.feed(LinksDown(frozenset()))
    assert report_in(rank.feed(PREPARE)) == replace(report, broken=frozenset())


def test_links_that_break_after_the_report_are_reported_too() -> None:
    rank = Driver()
    assert rank.feed(LinksDown(frozenset())) == []
    assert report_in(rank.feed(StepLeft(holdings(), PEER))).broken == frozenset()
    assert report_in(rank.feed(LinksDown(frozenset({PEER})))).broken == {PEER}
    assert rank.feed(LinksDown(frozenset({PEER}))) == [] and rank.feed(LinksDown(frozenset())) == []


def test_asked_for_its_report_a_rank_starts_to_mend_its_links() -> None:
    rank = Driver()
    rank.feed(StepLeft(holdings(), PEER))
    assert MendLinks() not in rank.feed(Prepare(Ballot(Term(1), 1), None))
    rank.feed(LinksDown(frozenset({PEER})))
    assert rank.feed(Prepare(Ballot(Term(1), 2), None))[0] == MendLinks()


def test_a_commit_known_by_its_votes_alone_is_taken_over() -> None:
    rank = Driver()
    report = report_in(rank.feed(StepLeft(holdings(FIRST, certificate().votes), None)))
    assert report.committed == FIRST and report.certificates == (certificate(),) and report.votes == ()


def test_votes_of_another_epoch_do_not_count() -> None:
    foreign = certificate().votes[1]._replace(stamp=Stamp(Version(1), Epoch(7)))
    assert report_in(Driver().feed(StepLeft(holdings(votes=(foreign,)), None))).votes == ()


@pytest.mark.parametrize("ticks", [True, False], ids=["told by a tick", "by the clock alone"])
def test_a_rank_that_was_paused_accuses_nobody(ticks: bool) -> None:
    rank = Driver()
    if ticks:
        rank.feed(TICK, 9.0)
    assert report_in(rank.feed(StepLeft(holdings(), PEER), 9.0)).suspect is None


def test_once_the_coordinator_has_spoken_a_paused_rank_may_accuse_again() -> None:
    rank = Driver()
    rank.feed(TICK, 9.0)
    rank.feed(Ack(Term(1), Epoch(0), True, Version(0)), 9.0)
    assert report_in(rank.feed(StepLeft(holdings(), PEER), 9.0)).suspect == PEER


def test_what_would_stop_the_rank_waits_until_its_main_thread_has_left_its_step() -> None:
    rank = Driver()
    assert rank.feed(PREPARE) == [Interrupt("epoch 0 is over")]
    assert must_leave(rank.state, Version(0)) and rank.beat().phase != STOPPED
    rank.feed(activate(1))
    actions = rank.feed(StepLeft(holdings(), None))
    # It reports twice, by itself and as it was asked, and goes on.
    assert len(rank.sent(Prepared)) == 2 and answers(actions) == [Go(activate(1).activation, "the plan")]
    assert rank.state.epoch == 1 and not must_leave(rank.state, Version(0))


def test_news_that_come_again_are_kept_once() -> None:
    rank = Driver()
    rank.feed(PREPARE)
    rank.feed(PREPARE)
    assert rank.state.kept_news == (PREPARE,)


def test_a_planned_stop_comes_after_its_version() -> None:
    rank = Driver()
    assert rank.feed(Prepare(BALLOT, Version(1))) == [] and not must_leave(rank.state, Version(0))
    assert must_leave(rank.state, Version(1)), "the main thread, which is ahead of this machine"
    assert rank.feed(Committed(certificate(), 0.0)) == [Interrupt("epoch 0 ends with version 1")]
    assert report_in(rank.feed(StepLeft(replace(holdings(), committed=FIRST), None))).committed == FIRST


def test_a_rank_that_leaves_after_the_last_step_by_itself_calls_nobody_off() -> None:
    rank = Driver()
    rank.feed(Prepare(BALLOT, Version(1)))
    assert rank.feed(Committed(certificate(), 0.0, leaves=True)) == []
    assert must_leave(rank.state, Version(1))
    assert report_in(rank.feed(StepLeft(replace(holdings(), committed=FIRST), None))).committed == FIRST


@pytest.mark.parametrize("ballot", [Ballot(Term(0), 9), Ballot(Term(1), 0)])
def test_lower_ballots_are_refused(ballot: Ballot) -> None:
    rank = Driver()
    rank.feed(StepLeft(holdings(), None))
    rank.feed(PREPARE)
    reported = len(rank.sent(Prepared))
    assert rank.feed(Prepare(ballot, None)) == [] and rank.feed(activate(1, ballot)) == []
    assert rank.state.epoch == 0 and len(rank.sent(Prepared)) == reported


def test_a_new_epoch_keeps_what_leads_to_its_version() -> None:
    for resume in (FIRST, SEED):
        rank = Driver()
        rank.feed(StepLeft(holdings(), PEER))
        actions = rank.feed(activate(1, resume=resume))
        assert answers(actions) == [Go(activate(1, resume=resume).activation, "the plan")]
        assert bool(rank.state.records) is (resume == FIRST) and rank.state.complete == {MINE, THEIRS}
        assert rank.state.committed == resume


def test_a_replica_that_the_plan_drops_is_reported_until_the_rank_has_taken_it_over() -> None:
    """Two others may die as they enter the epoch for which this rank was to let its replica go."""
    rank = Driver()
    rank.feed(StepLeft(holdings(), PEER))
    news = activate(1)
    mine, theirs = news.activation.assignment.boxes
    without = replace(news.activation.assignment, boxes=(mine, replace(theirs, holders=())))
    rank.feed(replace(news, activation=replace(news.activation, assignment=without)))
    assert rank.state.kept == rank.state.complete == {MINE} and rank.state.replicas.keys() == {MINE, THEIRS}


def test_an_epoch_whose_links_are_down_is_left_at_once() -> None:
    rank = Driver()
    rank.feed(LinksDown(frozenset({PEER})))
    rank.feed(StepLeft(holdings(), PEER))
    actions = rank.feed(activate(1, resume=FIRST))
    report = report_in(actions)
    assert answers(actions) == [] and (report.epoch, report.suspect) == (1, PEER)
    assert report.copies == holdings().replicas and report.records == holdings().records
    rank.feed(LinksDown(frozenset()))
    assert answers(rank.feed(activate(2, resume=FIRST))) == [Go(activate(2, resume=FIRST).activation, "the plan")]


# --- The end


@pytest.mark.parametrize(
    "news",
    [Ack(Term(1), Epoch(1), False, Version(0)), StoreSeen(Term(1), Epoch(1), False, 0.0, 0.0)],
    ids=["ack", "store"],
)
def test_an_excluded_rank_learns_it_within_a_step_and_falls_silent(news: Ack | StoreSeen) -> None:
    rank = Driver()
    reason = "the job went on without rank 0"
    assert rank.feed(news) == [Interrupt(reason)] and must_leave(rank.state, Version(0))
    rank.feed(Committed(certificate(), 0.0))
    actions = rank.feed(StepLeft(holdings(), PEER))
    assert answers(actions) == [Excluded(reason)] and not rank.sent(Prepared)
    assert rank.feed(TICK) == []


def test_when_the_job_is_over_the_rank_that_waits_is_told() -> None:
    rank = Driver()
    rank.feed(StepLeft(holdings(), PEER))
    assert answers(rank.feed(Over("too few ranks"))) == [Over("too few ranks")]


def test_a_rank_that_has_finished_waits_for_the_ledger_but_not_for_ever() -> None:
    flushed, in_vain = Driver(), Driver()
    for rank in (flushed, in_vain):
        rank.feed(Committed(certificate(), 0.0))
        rank.feed(Closing(finished=True), 1.0)
        assert not rank.state.closed
    flushed.feed(Ack(Term(1), Epoch(0), True, Version(1)), 1.0)
    in_vain.feed(TICK, 1.1 + FLUSH_S)
    for rank in (flushed, in_vain):
        assert rank.state.closed and rank.sent(Ended) == [Send(COORDINATOR, Ended(ME))]


def test_a_rank_that_ends_without_having_finished_just_falls_silent() -> None:
    rank = Driver()
    rank.feed(Committed(certificate(), 0.0))
    assert rank.feed(Closing(finished=False)) == [] and rank.state.closed


def test_a_step_is_measured_from_commit_to_commit_of_an_epoch() -> None:
    rank = Driver()
    rank.feed(Committed(certificate(1), 40.0), 40.2)
    assert rank.beat(41.0).step_s is None, "what passed until the first commit was a start"
    rank.feed(Committed(certificate(2), 42.5), 42.5)
    assert rank.beat(43.0).step_s == 2.5
    rank.feed(StepLeft(holdings(Stamp(Version(2), Epoch(0))), PEER), 44.0)
    rank.feed(activate(1, resume=Stamp(Version(2), Epoch(0))), 90.0)
    stamp = Stamp(Version(3), Epoch(1))
    votes = tuple(vote._replace(stamp=stamp) for vote in certificate(3).votes)
    rank.feed(Committed(Certificate(stamp, votes), 91.0), 91.0)
    assert rank.beat(91.5).step_s == 2.5, "nor is a recovery a step"


def test_a_step_is_as_long_as_it_took_though_it_is_heard_of_later() -> None:
    rank = Driver()
    for version, at_s in ((1, 40.0), (2, 40.03), (3, 40.05)):
        rank.feed(Committed(certificate(version), at_s), 40.2)
    assert rank.beat(40.2).step_s == pytest.approx(0.02)


@pytest.mark.parametrize("orphaned", [True, False])
def test_a_rank_without_launcher_that_makes_no_progress_ends_itself(orphaned: bool) -> None:
    rank, tick = Driver(), replace(TICK, orphaned=orphaned)
    rank.feed(tick, 1.0)
    assert not any(isinstance(a, EndProcess) for a in rank.feed(tick, 60.0))
    assert any(isinstance(a, EndProcess) for a in rank.feed(tick, 62.0)) is orphaned


def test_a_joiner_that_nobody_answers_any_more_gives_up() -> None:
    """One that has waited for long, and whose coordinator is away for a moment, does not."""
    rank, alone = Driver(joiner(PEER, LIMITS, 0.0)), replace(TICK, orphaned=True)
    for now_s, tick in ((100.0, TICK), (100.2, alone), (101.0, alone), (101.2, TICK), (110.0, alone), (113.9, alone)):
        assert answers(rank.feed(tick, now_s)) == []
    (over,) = answers(rank.feed(alone, 114.1))
    assert isinstance(over, Over) and over.reason.startswith("no coordinator of the job has answered for 4 s")


def test_a_joiner_asks_until_it_is_a_member() -> None:
    rank = Driver(joiner(PEER, LIMITS, 0.0))
    assert rank.beat().joining
    assert rank.feed(Ack(Term(1), Epoch(3), False, Version(0))) == []
    assert report_in(rank.feed(PREPARE)).copies == {}
    assert answers(rank.feed(activate(4))) == [Go(activate(4).activation, "the plan")]
    assert not rank.beat().joining


# --- Leaving


def test_who_is_told_to_leave_says_so_for_as_long_as_it_is_a_member() -> None:
    rank = Driver()
    (said,) = rank.feed(LeaveAsked(5.0), 1.0)
    assert isinstance(said, Send) and isinstance(said.message, Heartbeat) and said.message.leave is Leave.WHEN_SPARED
    assert rank.beat(5.9).leave is Leave.WHEN_SPARED and rank.beat(6.0).leave is Leave.OVERDUE
    rank.feed(MustStay("it is the last rank of the job"))
    assert rank.state.must_stay == "it is the last rank of the job"


def test_who_has_left_ends_in_order_and_says_that_it_is_gone() -> None:
    rank = Driver()
    rank.feed(LeaveAsked(5.0))
    rank.feed(Committed(certificate(), 0.0))
    rank.feed(Prepare(BALLOT, Version(1)))
    rank.feed(StepLeft(holdings(FIRST), None))
    (left,) = answers(rank.feed(Ack(Term(1), Epoch(1), False, Version(1))))
    assert left == Left("rank 0 was asked to leave, and left after step 0")
    assert rank.feed(TICK, 1.0) == [], "it is heard no more"
    assert rank.feed(Closing(finished=False)) == [Send(COORDINATOR, Gone(ME))] and rank.state.closed


def test_who_is_told_twice_ends_at_once() -> None:
    rank = Driver()
    rank.feed(LeaveAsked(5.0))
    (end,) = rank.feed(LeaveAsked(5.0))
    assert isinstance(end, EndProcess) and "a second time" in end.reason


def test_who_is_told_to_leave_before_it_is_a_member_just_ends() -> None:
    rank = Driver(joiner(ME, LIMITS, 0.0))
    (left,) = answers(rank.feed(LeaveAsked(5.0)))
    assert isinstance(left, Left) and "before it was a member" in left.reason
