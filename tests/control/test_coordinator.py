"""The coordinator, event by event."""

from dataclasses import replace

from elaswave_fx.control.protocol.coordinator import (
    OVER,
    PREPARING,
    RETIRED,
    STEADY,
    Act,
    Coordinator,
    Event,
    Timeouts,
    end,
    start,
    step,
    with_timeouts,
)
from elaswave_fx.control.protocol.events import Attempt, CauseKind, Detected
from elaswave_fx.control.protocol.messages import (
    Ack,
    Activate,
    Connected,
    Disconnected,
    Ended,
    Exited,
    Heartbeat,
    Over,
    Prepare,
    Prepared,
    Saved,
    Send,
    Tick,
)
from elaswave_fx.control.protocol.register import Read, Register, StoreReply, Swap, swap
from elaswave_fx.control.protocol.types import (
    NO_BALLOT,
    SEED,
    STOPPED,
    Activation,
    Ballot,
    Certificate,
    Copy,
    Report,
    Stamp,
    Term,
    Version,
    Vote,
    WorkSpan,
)
from elaswave_fx.plan.box import Span, numbered
from elaswave_fx.plan.topology import Epoch, Rank
from tests.control.toy_planner import first_assignment, replan

TIMEOUTS = Timeouts(
    silent_s=1.0, accused_s=0.5, stalled_s=2.0, resend_s=0.3, spread_s=0.05, mend_s=0.5, ack_s=0.5, connect_s=0.4
)
WORLD = 4


class Driver:
    """One coordinator and its store."""

    def __init__(self, register: Register | None = None) -> None:
        activation = Activation(Epoch(0), first_assignment(WORLD, 1), SEED, SEED, None, rollback=True)
        self.register = register or Register(Term(0), activation, SEED, SEED, None, SEED)
        self.now_s = 0.0
        self.did: list[Act] = []
        self.state: Coordinator
        self.state, actions = start(TIMEOUTS, replan, 0.0)
        self._serve(actions)

    def feed(self, event: Event) -> None:
        self.state, actions = step(self.state, event, self.now_s)
        self._serve(actions)

    def _serve(self, actions: tuple[Act, ...]) -> None:
        self.did += actions
        for action in actions:
            if isinstance(action, Swap):
                self.register, _ = swap(self.register, action)
            if isinstance(action, Swap | Read):
                self.feed(StoreReply(self.register))

    def heartbeat(self, rank: int, **changes: object) -> None:
        if Rank(rank) not in self.state.detector.connections:
            self.feed(Connected(Rank(rank)))  # a rank opens it before its first heartbeat
        heartbeat = Heartbeat(Rank(rank), self.register.epoch, Version(0), "reduce", None, None, False, True, ())
        self.feed(replace(heartbeat, **changes))  # type: ignore[arg-type]

    def beats(self, *ranks: int) -> None:
        for rank in ranks:
            self.heartbeat(rank)

    def prepared(self, rank: int, ballot: Ballot | None = None, **changes: object) -> None:
        boxes = self.register.activation.assignment.boxes
        copies = {box_id: Copy(SEED, 1) for box_id, box in numbered(boxes) if rank in box.replica_ranks}
        report = Report(Rank(rank), self.register.epoch, SEED, copies, {}, (), (), frozenset())
        self.feed(Prepared(ballot or self.state.ballot, replace(report, **changes)))  # type: ignore[arg-type]

    def sent(self, kind: type) -> list[Send]:
        return [a for a in self.did if isinstance(a, Send) and isinstance(a.message, kind)]

    def asked(self) -> set[int]:
        """Whom the newest attempt asked so far."""
        prepares = [a for a in self.did if isinstance(a, Send) and isinstance(a.message, Prepare)]
        return {a.target for a in prepares if isinstance(a.message, Prepare) and a.message.ballot == self.state.ballot}

    def later(self, seconds: float) -> None:
        self.now_s += seconds
        self.feed(Tick())


def test_it_takes_over_by_raising_the_term() -> None:
    job = Driver()
    assert job.state.phase == STEADY and job.register.term == 1


def test_ranks_behind_the_store_are_given_its_epoch() -> None:
    job = Driver()
    job.heartbeat(2, epoch=Epoch(-1), joining=True)
    assert [a.target for a in job.sent(Activate)] == [2]


def test_an_exit_makes_an_epoch_of_the_others() -> None:
    job = Driver()
    job.beats(*range(WORLD))
    job.feed(Exited(Rank(3)))
    assert job.state.phase == PREPARING and job.asked() == {0}, "one is told, which tells the others"
    for rank in range(3):
        job.prepared(rank)
    assert job.register.epoch == 1 and job.register.members == (0, 1, 2)
    assert {a.target for a in job.sent(Activate)} == {0, 1, 2}


def test_ranks_that_left_their_step_report_without_being_asked() -> None:
    job = Driver()
    job.beats(*range(WORLD))
    for rank in (2, 0, 1):
        job.prepared(rank, NO_BALLOT, suspect=Rank(3))
    assert job.state.phase == PREPARING and set(job.state.reports) == {0, 1, 2}
    job.feed(Exited(Rank(3)))
    assert job.register.members == (0, 1, 2) and not job.sent(Prepare)


def test_a_rank_without_any_connection_is_left_out_at_once() -> None:
    """Nobody was told that the process of rank 3 has ended; its control connection closes after the first report."""
    job = Driver()
    for rank in range(WORLD):
        job.feed(Connected(Rank(rank)))
    job.beats(*range(WORLD))
    job.prepared(2, NO_BALLOT, suspect=Rank(3), broken=frozenset({Rank(3)}))
    job.feed(Disconnected(Rank(3)))
    job.prepared(0, NO_BALLOT, suspect=Rank(3), broken=frozenset({Rank(3)}))
    assert job.register.epoch == 0
    job.prepared(1, NO_BALLOT, broken=frozenset({Rank(3)}))
    assert job.register.members == (0, 1, 2) and not job.sent(Prepare)


def test_a_rank_that_died_before_the_coordinator_began_is_left_out_when_it_had_the_time_to_connect() -> None:
    """Nobody was told, and no connection of rank 3 was ever open here; rank 2 accuses nobody, as after a pause."""
    job = Driver()
    job.beats(0, 1, 2)
    for rank in range(3):
        job.prepared(rank, NO_BALLOT, broken=frozenset({Rank(3)}))
    job.later(0.9 * TIMEOUTS.connect_s)
    assert job.register.epoch == 0
    job.beats(0, 1, 2)
    job.later(0.2 * TIMEOUTS.connect_s)
    assert job.register.members == (0, 1, 2)
    (loss,) = [act for act in job.did if isinstance(act, Detected) and act.ranks]
    assert loss.ranks == (3,) and loss.cause.kind == CauseKind.UNREACHABLE and loss.since_s is None


def test_who_saw_its_link_break_too_late_is_asked_again() -> None:
    job = Driver()
    job.feed(Connected(Rank(3)))
    job.beats(*range(WORLD))
    job.feed(Disconnected(Rank(3)))
    for rank, broken in ((0, {Rank(3)}), (1, set[Rank]()), (2, {Rank(3)})):
        job.prepared(rank, NO_BALLOT, suspect=Rank(3), broken=frozenset(broken))
    assert job.register.epoch == 0
    job.later(1.1 * TIMEOUTS.spread_s)
    assert job.asked() == {1, 3}
    job.prepared(1, broken=frozenset({Rank(3)}))
    assert job.register.members == (0, 1, 2)


def test_a_lost_control_connection_alone_interrupts_nothing() -> None:
    job = Driver()
    job.feed(Connected(Rank(3)))
    job.beats(*range(WORLD))
    job.feed(Disconnected(Rank(3)))
    job.later(0.5 * TIMEOUTS.silent_s)
    assert job.state.phase == STEADY and not job.sent(Prepare)


def test_those_who_keep_silent_are_asked_after_a_while() -> None:
    job = Driver()
    job.beats(*range(WORLD))
    job.prepared(0, NO_BALLOT, suspect=Rank(3))
    job.later(0.5 * TIMEOUTS.spread_s)
    assert not job.asked()
    job.later(TIMEOUTS.spread_s)
    assert job.asked() == {1, 2, 3}


def test_a_coordinator_that_missed_the_reports_asks_everybody() -> None:
    job = Driver()
    job.beats(1, 2, 3)
    job.heartbeat(0, phase=STOPPED, suspect=Rank(3))
    assert job.asked() == {0, 1, 2, 3}


def test_a_second_loss_supersedes_the_attempt_and_reports_stay_true() -> None:
    job = Driver()
    job.beats(*range(WORLD))
    job.feed(Exited(Rank(3)))
    first = job.state.ballot
    job.prepared(0)
    job.feed(Exited(Rank(2)))
    assert job.state.ballot > first and set(job.state.reports) == {0}
    job.prepared(1, first)
    assert job.register.members == (0, 1)


def test_a_report_of_an_older_epoch_counts_for_the_attempt_that_asked_for_it_alone() -> None:
    job = Driver()
    job.beats(*range(WORLD))
    job.feed(Exited(Rank(3)))
    first = job.state.ballot
    job.prepared(0)
    job.prepared(1, epoch=Epoch(-1))
    job.feed(Exited(Rank(2)))
    assert set(job.state.reports) == {0}
    job.prepared(1, first, epoch=Epoch(-1))
    assert set(job.state.reports) == {0}
    job.later(2 * TIMEOUTS.spread_s)
    assert job.asked() == {1}
    job.prepared(1, epoch=Epoch(-1))
    assert job.register.members == (0, 1)


def test_an_attempt_that_leads_nowhere_is_made_anew() -> None:
    """Links may have been mended since: old reports would not say so."""
    job = Driver()
    job.beats(*range(WORLD))
    apart = {rank: frozenset(Rank(other) for other in range(WORLD) if other != rank) for rank in range(WORLD)}
    for rank in range(WORLD):
        job.prepared(rank, NO_BALLOT, broken=apart[rank])
    assert not job.state.reports and job.asked() == {0, 1, 2, 3}, "they are looked at once more"
    first = job.state.ballot
    for rank in range(WORLD):
        job.prepared(rank, broken=apart[rank])
    assert job.register.epoch == 0 and job.state.ballot == first, "they are being opened again"
    job.later(1.1 * TIMEOUTS.mend_s)
    assert job.asked() == {0, 1, 2, 3}
    second = job.state.ballot
    for rank in range(WORLD):
        job.prepared(rank, broken=apart[rank])
    assert job.register.epoch == 0, "whatever rank goes, copies go with it"
    job.later(1.1 * TIMEOUTS.resend_s)
    assert job.state.ballot > second and job.asked() == {0, 1, 2, 3} and not job.state.reports
    for rank in range(WORLD):
        job.prepared(rank)
    assert job.register.epoch == 1 and job.register.members == (0, 1, 2, 3)


def test_who_is_cut_off_is_known_when_all_links_have_gone_down() -> None:
    """The first reports came while the links of rank 2 went down one by one; by them rank 3 would have to go."""
    job = Driver()
    job.beats(*range(WORLD))
    early = {0: (), 1: (), 2: (3,), 3: (2,)}
    for rank, peers in early.items():
        job.prepared(rank, NO_BALLOT, broken=frozenset(Rank(peer) for peer in peers))
    assert job.register.epoch == 0 and job.asked() == {0, 1, 2, 3}
    late = {0: (2,), 1: (2,), 2: (0, 1, 3), 3: (2,)}
    for rank, peers in late.items():
        job.prepared(rank, broken=frozenset(Rank(peer) for peer in peers))
    assert job.register.epoch == 0, "they may come up again"
    job.later(1.1 * TIMEOUTS.mend_s)
    assert job.register.members == (0, 1, 3)


def test_links_that_were_opened_again_cost_nobody_the_membership() -> None:
    job = Driver()
    job.beats(*range(WORLD))
    for rank, peers in {0: (1,), 1: (0,), 2: (), 3: ()}.items():
        job.prepared(rank, NO_BALLOT, broken=frozenset(Rank(peer) for peer in peers))
    assert job.asked() == {0, 1, 2, 3}
    for rank in range(WORLD):
        job.prepared(rank, broken=frozenset({Rank(0)} if rank == 1 else ()))
    job.later(1.1 * TIMEOUTS.spread_s)
    assert job.register.epoch == 0 and job.asked() == {0, 1, 2, 3}, "asked more often than those who keep silent"
    for rank in range(WORLD):
        job.prepared(rank)
    assert job.register.epoch == 1 and job.register.members == (0, 1, 2, 3)


def test_silence_excludes_and_a_paused_coordinator_blames_nobody_for_it() -> None:
    job = Driver()
    job.beats(*range(WORLD))
    job.now_s = 0.6
    job.feed(Tick())
    job.beats(0, 1, 2)
    job.now_s = 1.1
    job.feed(Tick())
    assert job.state.targets == (0, 1, 2) and job.asked() == {0}
    slept = Driver()
    slept.beats(*range(WORLD))
    slept.now_s = 9.0
    slept.feed(Tick())
    assert slept.state.phase == STEADY


def test_a_hung_rank_is_left_out_though_it_beats() -> None:
    job = Driver()
    for tick in range(6):
        job.now_s = 0.5 * tick
        for rank in range(WORLD):
            job.heartbeat(rank, phase="compute" if rank == 1 else "gather", awaited=None if rank == 1 else Rank(1))
        job.feed(Tick())
    assert job.state.targets == (0, 2, 3) and 1 not in job.asked()


def test_a_planned_stop_hides_nobody_who_hangs() -> None:
    job = Driver()
    for tick in range(6):
        job.now_s = 0.5 * tick
        for rank in range(WORLD):
            job.heartbeat(rank, phase="compute" if rank == 1 else "gather", awaited=None if rank == 1 else Rank(1))
        job.heartbeat(7, epoch=Epoch(-1), joining=True)
        if tick == 1:
            job.prepared(7, epoch=Epoch(-1))
        job.feed(Tick())
    causes = [act.cause.kind for act in job.did if isinstance(act, Attempt)]
    assert causes == [CauseKind.JOIN, CauseKind.STALLED]
    assert job.now_s < 2 * TIMEOUTS.stalled_s and job.state.targets == (0, 2, 3)


def test_joiners_wait_for_a_planned_stop() -> None:
    job = Driver()
    job.beats(*range(WORLD))
    job.heartbeat(7, epoch=Epoch(-1), joining=True)
    assert job.state.phase == STEADY
    job.feed(Tick())
    assert job.asked() == {0, 1, 2, 3, 7}
    assert {a.message.stop_after for a in job.sent(Prepare) if isinstance(a.message, Prepare)} == {Version(1)}
    job.feed(Exited(Rank(7)))
    assert job.state.targets == (0, 1, 2, 3), "a joiner's death leaves the members to go on by themselves"
    for rank in range(WORLD):
        job.prepared(rank)
    assert job.register.epoch == 1


def test_ledger_lines_follow_each_other_and_are_acknowledged() -> None:
    job = Driver()

    def line(version: int, epoch: int = 0) -> Certificate:
        stamp = Stamp(Version(version), Epoch(epoch))
        return Certificate(stamp, (Vote(stamp, Rank(0), (WorkSpan(Span(0, 1), Span(0, 12)),)),))

    job.heartbeat(0, lines=(line(2),))
    job.heartbeat(0, lines=(line(1, epoch=5),))
    assert job.register.committed == SEED
    job.heartbeat(0, lines=(line(1), line(2)))
    assert job.register.committed.version == 2 and job.register.previous.version == 1
    ack = job.sent(Ack)[-1]
    assert isinstance(ack.message, Ack) and ack.message.ledgered == 2 and ack.target == 0
    job.heartbeat(0, lines=(line(1), line(2)))
    assert len(job.sent(Ack)) == 3, "a writer that repeats them has not heard it"
    assert job.register.committed.version == 2


def test_heartbeats_without_news_are_answered_now_and_then() -> None:
    job = Driver()
    for turn in range(10):
        job.now_s = 0.3 * turn * TIMEOUTS.ack_s
        job.beats(1, 2)
    assert [a.target for a in job.sent(Ack)] == [1, 2] * 3, "with the 1st, the 5th and the 9th"
    job.heartbeat(1, joining=True, epoch=Epoch(-1))
    job.heartbeat(3)
    job.heartbeat(3)
    assert [a.target for a in job.sent(Ack)][6:] == [1, 3], "a rank that is not in step, or new, is answered at once"


def test_a_superseded_coordinator_retires() -> None:
    job = Driver()
    job.beats(*range(WORLD))
    job.register = replace(job.register, term=Term(5))
    job.feed(Exited(Rank(3)))
    for rank in range(3):
        job.prepared(rank)
    assert job.state.phase == RETIRED and job.register.epoch == 0


def line(version: int, epoch: int = 0) -> Certificate:
    stamp = Stamp(Version(version), Epoch(epoch))
    return Certificate(stamp, (Vote(stamp, Rank(0), (WorkSpan(Span(0, 1), Span(0, 12)),)),))


def test_when_a_rank_has_finished_no_epoch_follows() -> None:
    job = Driver()
    job.beats(*range(WORLD))
    job.feed(Ended(Rank(3)))
    job.feed(Exited(Rank(3)))
    job.heartbeat(0, phase=STOPPED, suspect=Rank(3))
    assert job.state.phase == OVER and not job.sent(Prepare)
    assert [a.target for a in job.sent(Over)] == [0]
    job.heartbeat(1, lines=(line(1),))
    assert job.register.committed.version == 1, "lines are taken to the end"


def test_the_end_of_an_outsider_is_nothing_to_the_job() -> None:
    job = Driver()
    job.beats(*range(WORLD))
    job.feed(Ended(Rank(9)))
    assert job.state.phase == STEADY


def test_without_a_plan_everyone_who_waits_is_told() -> None:
    job = Driver()
    job.beats(*range(WORLD))
    job.heartbeat(1, phase=STOPPED, suspect=Rank(3))
    job.state, actions = end(job.state, "2 ranks are too few; 3 would do")
    assert [(a.target, a.message) for a in actions if isinstance(a, Send)] == [
        (1, Over("2 ranks are too few; 3 would do"))
    ]
    job.heartbeat(2, phase=STOPPED)
    assert job.sent(Over)[-1].target == 2


def test_a_rank_that_was_never_heard_has_time_to_start() -> None:
    job = Driver()
    job.state = with_timeouts(job.state, replace(TIMEOUTS, unheard_s=50.0))
    for tick in range(12):
        job.now_s = 0.5 * tick
        for rank in range(3):
            job.heartbeat(rank, phase=f"start {tick}")
        job.feed(Tick())
    assert job.state.phase == STEADY
    job.heartbeat(3)
    for job.now_s in (6.1, 6.6):
        job.beats(0, 1, 2)
        job.feed(Tick())
    assert job.state.targets == (0, 1, 2), "once heard, silence counts"


def test_a_planned_stop_is_announced_as_far_ahead_as_needed() -> None:
    job = Driver()
    job.state = with_timeouts(replace(job.state, wants_move=lambda register: True), replace(TIMEOUTS, ahead=5))
    for rank in range(WORLD):
        job.heartbeat(rank, version=Version(7))
    job.feed(Tick())
    stops = {a.message.stop_after for a in job.sent(Prepare) if isinstance(a.message, Prepare)}
    assert stops == {Version(12)}


def test_a_checkpoint_of_this_history_is_where_a_rollback_leads() -> None:
    job = Driver()
    job.heartbeat(0, lines=(line(1), line(2), line(3)))
    job.feed(Saved(Stamp(Version(4), Epoch(0))))
    assert job.register.checkpoint == SEED, "a version that nobody has committed"
    job.feed(Saved(Stamp(Version(2), Epoch(0))))
    assert job.register.checkpoint == Stamp(Version(2), Epoch(0))
    job.feed(Saved(Stamp(Version(1), Epoch(0))))
    assert job.register.checkpoint.version == 2, "an older one came late"
    job.heartbeat(0, lines=(line(4),))
    job.feed(Tick())
    assert job.register.checkpoint.version == 4, "the ledger knows the version by now"
