"""The coordinator, event by event."""

from collections.abc import Mapping
from dataclasses import replace

import pytest

from elaswave_fx.control.protocol import events
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
from elaswave_fx.control.protocol.coordinator_state import Following
from elaswave_fx.control.protocol.events import Attempt, CauseKind, Detected
from elaswave_fx.control.protocol.messages import (
    Ack,
    Activate,
    Connected,
    Disconnected,
    Ended,
    Exited,
    Gone,
    Heartbeat,
    Leave,
    MustStay,
    Numbered,
    NumberWanted,
    Over,
    Prepare,
    Prepared,
    ProbeStore,
    Saved,
    Send,
    StoreSeen,
    Tick,
)
from elaswave_fx.control.protocol.register import Read, Register, StoreReply, Swap, swap
from elaswave_fx.control.protocol.types import (
    EXPORTING,
    NO_BALLOT,
    SEED,
    STOPPED,
    Activation,
    Ballot,
    Certificate,
    Replica,
    Report,
    Stamp,
    Term,
    Version,
    Vote,
)
from elaswave_fx.plan.work.box import numbered
from elaswave_fx.plan.work.spans import Span, WorkSpan
from elaswave_fx.plan.work.topology import Epoch, Rank
from tests.control.toy_planner import first_assignment, replan

TIMEOUTS = Timeouts(
    silent_s=1.0, accused_s=0.5, stalled_s=2.0, resend_s=0.3, spread_s=0.05, mend_s=0.5, ack_s=0.5, connect_s=0.4
)
WORLD = 4


class Driver:
    """One coordinator and its store."""

    def __init__(self, register: Register | None = None, most_members: int = 1 << 30) -> None:
        activation = Activation(Epoch(0), first_assignment(WORLD, 1), SEED, SEED, None, rollback=True)
        self.register = register or Register(Term(0), activation, SEED, SEED, None, SEED, numbers=WORLD)
        self.now_s = 0.0
        self.did: list[Act] = []
        self.state: Coordinator
        self.state, actions = start(TIMEOUTS, replan, 0.0, most_members=lambda register: most_members)
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
                self.feed(StoreReply(self.register, action.probe if isinstance(action, Read) else None))

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
        replicas = {box_id: Replica(SEED, 1) for box_id, box in numbered(boxes) if rank in box.replica_ranks}
        # It comes to a planned stop, with votes that do not matter here.
        committed = SEED if self.state.stop_after is None else Stamp(self.state.stop_after, self.register.epoch)
        report = Report(Rank(rank), self.register.epoch, committed, replicas, {}, (), (), frozenset())
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
    assert job.register.epoch == 0, "whatever rank goes, replicas go with it"
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
    assert {a.message.stop_after for a in job.sent(Prepare) if isinstance(a.message, Prepare)} == {Version(1)}, (
        "and costs no step in flight"
    )
    for rank in range(WORLD):
        job.prepared(rank)
    assert job.register.epoch == 1


def test_who_dials_again_while_it_is_asked_for_its_report_is_asked_again() -> None:
    """A planned stop would wait for it until somebody tries anew."""
    job = Driver()
    job.beats(*range(WORLD))
    job.heartbeat(7, epoch=Epoch(-1), joining=True)
    job.feed(Tick())
    for rank in (0, 1, 2, 7):
        job.prepared(rank, epoch=Epoch(-1) if rank == 7 else Epoch(0))
    asked = job.sent(Prepare)
    for rank in (3, 2):  # rank 2 has reported
        job.feed(Disconnected(Rank(rank)))
        job.feed(Connected(Rank(rank)))
    assert job.sent(Prepare) == [*asked, Send(Rank(3), Prepare(job.state.ballot, Version(1)))]
    job.prepared(3)
    assert job.register.members == (0, 1, 2, 3, 7)
    job.feed(Connected(Rank(3)))
    assert len(job.sent(Prepare)) == len(asked) + 1, "nobody is asked for anything"


@pytest.mark.parametrize("reported", [False, True])
def test_a_joiner_whose_stream_has_ended_is_not_waited_for_and_not_taken(reported: bool) -> None:
    job = Driver()
    job.beats(*range(WORLD))
    job.heartbeat(7, epoch=Epoch(-1), joining=True)
    job.feed(Tick())
    if reported:
        job.prepared(7, epoch=Epoch(-1))
    job.feed(Disconnected(Rank(7)))
    for rank in range(WORLD):
        job.prepared(rank)
    assert job.register.epoch == 1 and job.register.members == (0, 1, 2, 3)


def test_who_asks_while_a_planned_stop_is_on_its_way_waits_for_the_next() -> None:
    job = Driver()
    job.beats(*range(WORLD))
    job.heartbeat(7, epoch=Epoch(-1), joining=True)
    job.feed(Tick())
    job.heartbeat(6, epoch=Epoch(-1), joining=True)
    job.feed(Tick())
    assert job.state.targets == (0, 1, 2, 3, 7) and job.state.ballot.serial == 1
    for rank in range(WORLD):
        job.prepared(rank)
    job.prepared(7, epoch=Epoch(-1))
    assert job.register.epoch == 1 and job.register.members == (0, 1, 2, 3, 7)
    job.beats(*range(WORLD), 7)
    job.heartbeat(6, epoch=Epoch(-1), joining=True)
    job.feed(Tick())
    assert job.state.targets == (0, 1, 2, 3, 6, 7)


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


def test_a_rank_that_asks_for_the_store_is_told_what_the_store_says_and_not_what_the_coordinator_knows() -> None:
    job = Driver()
    job.beats(*range(WORLD))
    job.feed(ProbeStore(Rank(1), 7.5))
    assert job.did[-2:] == [
        Read(ProbeStore(Rank(1), 7.5)), Send(Rank(1), StoreSeen(Term(1), Epoch(0), True, 7.5, 0.0)),
    ]  # fmt: skip
    # Another coordinator has gone on without rank 1, and this one has heard nothing of it.
    assignment = first_assignment(3, 1)
    elsewhere = replace(assignment, members=(Rank(0), Rank(2), Rank(3)))
    activation = replace(job.register.activation, epoch=Epoch(1), assignment=elsewhere)
    job.register = replace(job.register, term=Term(2), activation=activation)
    job.feed(ProbeStore(Rank(1), 9.0))
    assert job.sent(StoreSeen)[-1] == Send(Rank(1), StoreSeen(Term(2), Epoch(1), False, 9.0, 0.0))
    assert job.state.phase == RETIRED


def test_a_store_that_does_not_answer_is_vouched_for_by_nobody() -> None:
    job = Driver()
    job.beats(*range(WORLD))
    job.state, actions = step(job.state, ProbeStore(Rank(1), 7.5), job.now_s)
    assert actions == (Read(ProbeStore(Rank(1), 7.5)),)
    job.later(0.2)
    assert job.sent(StoreSeen) == []


def test_while_it_takes_over_a_coordinator_passes_on_what_the_store_says() -> None:
    job = Driver()
    state, _ = start(TIMEOUTS, replan, 0.0)
    state, actions = step(state, ProbeStore(Rank(1), 7.5), 0.0)
    assert actions == (Read(ProbeStore(Rank(1), 7.5)),)
    state, actions = step(state, StoreReply(job.register, ProbeStore(Rank(1), 7.5)), 0.0)
    assert actions == (Send(Rank(1), StoreSeen(Term(1), Epoch(0), True, 7.5, 0.0)),) and state.register is None


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
    found = Following(tuple(map(Rank, range(WORLD))), "owners move")
    job.state = replace(job.state, find_following=lambda register, leaving, complete: found)
    job.state = with_timeouts(job.state, replace(TIMEOUTS, ahead=5))
    for rank in range(WORLD):
        job.heartbeat(rank, version=Version(7))
    job.feed(Tick())
    stops = {a.message.stop_after for a in job.sent(Prepare) if isinstance(a.message, Prepare)}
    assert stops == {Version(12)}
    (stopping,) = [act for act in job.did if isinstance(act, events.Stopping)]
    assert stopping.cause == events.Cause(CauseKind.MOVE, after=Version(12), aim="owners move")


def all_but_leavers(register: Register, leaving: Mapping[Rank, Leave], complete: bool) -> Following | None:
    """Everybody can be spared when all replicas are there."""
    staying = tuple(rank for rank in register.members if rank not in leaving)
    return Following(staying, "") if leaving and complete else None


def leaving_job(rank: int) -> Driver:
    """Asked everybody to stop, for that rank is to go."""
    job = Driver()
    job.state = replace(job.state, find_following=all_but_leavers)
    for each in range(WORLD):
        job.heartbeat(each, leave=Leave.WHEN_SPARED if each == rank else Leave.NO)
    job.feed(Tick())
    return job


@pytest.mark.parametrize("leave", [Leave.NO, Leave.WHEN_SPARED])
def test_a_stop_is_announced_when_replicas_are_nearly_in_sync_but_they_are_there_when_somebody_leaves(
    leave: Leave,
) -> None:
    job, everybody = Driver(), tuple(map(Rank, range(WORLD)))

    def when_there(register: Register, leaving: Mapping[Rank, Leave], there: bool) -> Following | None:
        return Following(everybody, "other lanes") if there else None

    job.state = replace(job.state, find_following=when_there)
    for complete, close in ((False, False), (False, True), (True, True)):
        for rank in everybody:
            job.heartbeat(
                rank, complete=complete or rank > 0, close=close or rank > 0, leave=leave if rank else Leave.NO
            )
        job.feed(Tick())
        assert (job.asked() != set()) is (complete or (close and leave is Leave.NO))
        if job.asked():
            break


def test_who_was_told_to_leave_goes_at_a_planned_stop_and_is_no_loss() -> None:
    job = leaving_job(2)
    assert job.asked() == {0, 1, 2, 3}
    (stopping,) = [act for act in job.did if isinstance(act, events.Stopping)]
    assert (stopping.cause.kind, stopping.cause.ranks) == (events.CauseKind.LEAVE, (2,))
    for rank in range(WORLD):
        job.prepared(rank)
    assert job.register.members == (0, 1, 3) and job.state.phase == STEADY
    (agreed,) = [act for act in job.did if isinstance(act, events.Agreed)]
    assert (agreed.left, agreed.lost, agreed.steps_redone) == ((2,), (), 0)
    assert not [act for act in job.did if isinstance(act, events.Detected)]
    told = job.sent(Ack)[-1]
    assert isinstance(told.message, Ack) and (told.target, told.message.needed, told.message.epoch) == (2, False, 1)
    assert {act.target for act in job.sent(Activate)} == {0, 1, 3}
    job.feed(Gone(Rank(2)))
    assert Rank(2) in job.state.detector.exited and job.state.phase == STEADY


def test_a_loss_before_the_stop_keeps_who_was_to_leave() -> None:
    job = leaving_job(2)
    job.prepared(2)
    job.feed(Exited(Rank(0)))
    for rank in (1, 3):
        job.prepared(rank)
    assert job.register.members == (1, 2, 3), "its replicas may be needed now"
    (agreed,) = [act for act in job.did if isinstance(act, events.Agreed)]
    assert (agreed.left, agreed.lost) == ((), (0,))


def test_a_new_coordinator_tells_who_has_left() -> None:
    job = leaving_job(2)
    for rank in range(WORLD):
        job.prepared(rank)
    again = Driver(job.register)
    again.heartbeat(2, epoch=Epoch(0), leave=Leave.WHEN_SPARED)
    assert _told(again, 2) == [True], "until something is committed without it"
    again.heartbeat(0, version=Version(1), lines=(_commit(0, 1, 3),))
    again.later(TIMEOUTS.ack_s)
    again.heartbeat(2, epoch=Epoch(0), leave=Leave.WHEN_SPARED)
    assert _told(again, 2)[-1] is False


def test_who_is_overdue_and_needed_hears_why_once() -> None:
    job = Driver()
    job.state = replace(job.state, why_needed=lambda register, rank: f"rank {rank} is needed")
    for leave, count in ((Leave.WHEN_SPARED, 0), (Leave.OVERDUE, 1), (Leave.OVERDUE, 1)):
        for rank in range(WORLD):
            job.heartbeat(rank, leave=leave if rank == 1 else Leave.NO)
        job.feed(Tick())
        assert [act.target for act in job.sent(MustStay)] == [1] * count
    (said,) = [act for act in job.did if isinstance(act, events.CannotLeave)]
    assert (said.rank, said.reason) == (1, "rank 1 is needed") and job.state.phase == STEADY


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


def test_numbers_are_given_once_and_counted_before() -> None:
    job = Driver()
    job.feed(NumberWanted(7))
    job.feed(NumberWanted(9))
    given = [act for act in job.did if isinstance(act, Numbered)]
    assert given == [Numbered(7, Rank(WORLD)), Numbered(9, Rank(WORLD + 1))] and job.register.numbers == WORLD + 2
    at = [job.did.index(act) for act in given]
    swaps = [job.did.index(act) for act in job.did if isinstance(act, Swap) and act.new.numbers > WORLD]
    assert swaps[0] < at[0] and swaps[1] < at[1], "the register has it first"
    other = Driver(job.register)
    other.feed(NumberWanted(7))
    assert Numbered(7, Rank(WORLD + 2)) in other.did, "also for another coordinator"


def test_nobody_gets_a_number_while_an_epoch_is_made() -> None:
    job = Driver()
    job.beats(*range(WORLD))
    job.feed(Exited(Rank(3)))
    assert job.state.phase == PREPARING
    job.feed(NumberWanted(1))
    assert not any(isinstance(act, Numbered) for act in job.did)
    for rank in range(3):
        job.prepared(rank)
    assert job.register.epoch == 1
    job.feed(Tick())
    assert Numbered(1, Rank(WORLD)) in job.did and job.register.numbers == WORLD + 1


def test_a_swap_that_is_repeated_late_takes_no_number_back() -> None:
    job = Driver()
    job.feed(NumberWanted(1))
    (first,) = [act for act in job.did if isinstance(act, Swap) and act.new.numbers == WORLD + 1]
    job.feed(NumberWanted(2))
    after, done = swap(job.register, first)
    assert not done and after.numbers == WORLD + 2


def test_who_comes_beyond_the_room_waits_until_there_is_some() -> None:
    job = Driver(most_members=WORLD + 1)
    job.beats(*range(WORLD))
    for rank in (6, 5):
        job.heartbeat(rank, joining=True, phase=STOPPED)
    job.feed(Tick())
    attempts = [act for act in job.did if isinstance(act, Attempt)]
    assert [attempt.targets for attempt in attempts] == [(0, 1, 2, 3, 5)]


def test_nobody_stops_for_a_join_before_its_plan_is_there() -> None:
    asked: list[tuple[Rank, ...]] = []
    job = Driver()

    def may_join(register: Register, joining: tuple[Rank, ...]) -> bool:
        asked.append(joining)
        return len(asked) > 1

    job.state = replace(job.state, may_join=may_join)
    job.beats(*range(WORLD))
    job.heartbeat(5, joining=True, phase=STOPPED)
    job.feed(Tick())
    assert job.state.phase == STEADY and asked == [(5,)]
    job.feed(Tick())
    assert job.state.phase == PREPARING and job.state.targets == (0, 1, 2, 3, 5)


def _without_rank_3() -> Driver:
    """Its silence has made epoch 1 of the others, who have committed nothing since."""
    job = Driver()
    job.beats(*range(WORLD))
    job.later(0.6 * TIMEOUTS.silent_s)
    job.beats(0, 1, 2)
    job.later(0.5 * TIMEOUTS.silent_s)
    for rank in range(3):
        job.prepared(rank)
    assert job.register.members == (0, 1, 2)
    return job


def _commit(*members: int) -> Certificate:
    """Of the first step, in epoch 1."""
    stamp = Stamp(Version(1), Epoch(1))
    return Certificate(
        stamp, tuple(Vote(stamp, Rank(rank), (WorkSpan(Span(0, 1), Span(rank, rank + 1)),)) for rank in members)
    )


def _told(job: Driver, rank: int) -> list[bool]:
    return [a.message.needed for a in job.sent(Ack) if a.target == rank and isinstance(a.message, Ack)]


def test_who_was_left_out_hears_so_when_something_was_committed_without_it() -> None:
    job = _without_rank_3()
    job.heartbeat(3, epoch=Epoch(0))
    assert _told(job, 3)[-1], "its replicas may still be wanted"
    job.heartbeat(0, version=Version(1), lines=(_commit(0, 1, 2),))
    job.later(TIMEOUTS.ack_s)
    job.heartbeat(3, epoch=Epoch(0))
    assert not _told(job, 3)[-1]
    job.feed(ProbeStore(Rank(3), 1.0))
    (seen,) = job.sent(StoreSeen)
    assert isinstance(seen.message, StoreSeen) and not seen.message.needed


def test_a_rank_that_was_left_out_comes_back_with_the_replicas_that_others_wait_for() -> None:
    """Box 3 had replicas at rank 3, and at the one that is lost now."""
    job = _without_rank_3()
    holders = {box.owner for box in job.register.activation.assignment.boxes if Rank(3) not in box.replica_ranks}
    boxes = job.register.activation.assignment.boxes
    lost = boxes[3].owner
    assert lost in holders or boxes[3].catching_up, "it was promoted, and another replica is on its way"
    left = tuple(rank for rank in job.register.members if rank != lost)
    job.beats(*left)
    job.feed(Exited(lost))
    for rank in left:
        has = {box_id: Replica(SEED, 1) for box_id, box in numbered(boxes) if rank in box.local_materializers}
        job.prepared(rank, copies=has)
    (waiting,) = [act for act in job.did if isinstance(act, events.Waiting)]
    assert waiting.ranks == (3,) and job.register.epoch == 1
    job.heartbeat(3, epoch=Epoch(0), phase=STOPPED)
    job.later(0.01)
    assert job.state.targets == (*left, 3) and not job.asked()
    job.later(1.1 * TIMEOUTS.spread_s)
    assert job.asked() == {3}
    old = {box_id: Replica(SEED, 1) for box_id, _ in numbered(boxes)}
    apart = frozenset({Rank(0), Rank(1), Rank(2)})
    job.prepared(3, epoch=Epoch(0), copies=old, broken=apart)
    assert job.register.epoch == 2 and job.register.members == (*left, 3), "links with it are opened anew"
    assert not job.register.activation.rollback
    (agreed,) = [act for act in job.did if isinstance(act, events.Agreed) and act.epoch == 2]
    assert agreed.back == (3,) and agreed.lost == (lost,)


def test_who_was_left_out_hears_that_and_not_that_the_job_is_over() -> None:
    """The others hand the model back without another step: it is lost to them, and their run has not failed."""
    job = _without_rank_3()
    job.heartbeat(3, epoch=Epoch(0), phase=STOPPED)
    before = _told(job, 3)
    assert all(before)
    job.feed(Ended(Rank(0)))
    job.heartbeat(3, epoch=Epoch(0), phase=STOPPED)
    job.prepared(3, epoch=Epoch(0))
    assert _told(job, 3)[len(before) :] == [False, False] and not [a for a in job.sent(Over) if a.target == 3]


def test_nobody_is_accused_by_a_rank_that_was_left_out() -> None:
    """It has lost all of them, for they have ended their links with it."""
    job = _without_rank_3()
    job.heartbeat(3, epoch=Epoch(0), phase=STOPPED, suspect=Rank(0))
    job.beats(0, 1, 2)
    job.feed(Exited(Rank(1)))
    assert [act.ranks for act in job.did if isinstance(act, Detected)][-1] == (1,)
    job.prepared(2)
    job.later(1.4 * TIMEOUTS.accused_s)
    assert 0 in job.state.targets


def test_the_last_rank_may_be_one_that_was_left_out() -> None:
    job = _without_rank_3()
    for rank in range(3):
        job.feed(Exited(Rank(rank)))
    for _ in range(2):
        job.later(0.6 * TIMEOUTS.silent_s)
    assert job.register.epoch == 1 and job.state.targets == ()
    assert [act.ranks for act in job.did if isinstance(act, events.Waiting)] == [(3,)]
    job.heartbeat(3, epoch=Epoch(0), phase=STOPPED)
    job.later(0.01)
    job.later(1.1 * TIMEOUTS.spread_s)
    assert job.asked() == {3}
    everything = {box_id: Replica(SEED, 1) for box_id, _ in numbered(job.register.activation.assignment.boxes)}
    job.prepared(3, epoch=Epoch(0), copies=everything)
    assert job.register.epoch == 2 and job.register.members == (3,)


def test_who_hands_the_model_back_is_not_asked_for_a_planned_stop() -> None:
    job = Driver()
    job.heartbeat(4, epoch=Epoch(-1), joining=True)
    for rank in range(WORLD):
        job.heartbeat(rank, phase=f"{EXPORTING}: writes the model for 7 s" if rank == 2 else "compute")
    job.later(0.1)
    assert job.state.phase == STEADY and not job.sent(Prepare)


def test_who_waits_for_a_disk_does_not_stand_still() -> None:
    """It shows another place every second: while the model is exported, and when somebody else is lost."""
    job = Driver()
    for second in range(int(3 * TIMEOUTS.stalled_s)):
        for rank in range(WORLD):
            job.heartbeat(rank, phase=f"{EXPORTING}: writes the model for {second} s")
        job.later(1.0)
    assert job.state.phase == STEADY and not job.sent(Prepare)
    job.feed(Exited(Rank(3)))
    for rank in (0, 1):
        job.prepared(rank)
    for second in range(int(3 * TIMEOUTS.stalled_s)):
        for rank in range(WORLD - 1):
            job.heartbeat(rank, phase=f"reads a checkpoint, to go back to it for {second} s" if rank == 2 else STOPPED)
        job.later(1.0)
    assert job.state.phase == PREPARING and set(job.state.targets) == {0, 1, 2}
    job.prepared(2)
    assert job.register.members == (0, 1, 2)


def test_a_planned_stop_that_a_rank_leaves_before_its_version_is_one_like_any_other() -> None:
    """Those that wait for a disk meanwhile are asked at once, and leave."""
    job = Driver()
    job.beats(*range(WORLD))
    job.heartbeat(4, epoch=Epoch(-1), joining=True)
    job.later(0.1)
    assert job.state.planned
    for rank in (0, 2, 3):
        job.prepared(rank, committed=SEED, suspect=Rank(2) if rank == 0 else None)
    assert job.state.phase == PREPARING and not job.state.planned
    job.later(1.1 * TIMEOUTS.spread_s)
    assert Send(Rank(1), Prepare(job.state.ballot, None)) in job.sent(Prepare)
    for rank in (1, 4):
        job.prepared(rank, epoch=Epoch(-1) if rank == 4 else Epoch(0))
    assert job.register.epoch == 1 and {0, 1, 2, 3} <= set(job.register.members)


def test_a_planned_stop_waits_for_ranks_that_wait_for_a_disk_before_it() -> None:
    job = Driver()
    job.beats(*range(WORLD))
    job.heartbeat(4, epoch=Epoch(-1), joining=True)
    job.later(0.1)
    assert job.state.planned and job.state.stop_after is not None
    job.prepared(4, epoch=Epoch(-1), copies={})
    for second in range(int(3 * TIMEOUTS.stalled_s)):
        for rank in range(WORLD):
            job.heartbeat(rank, phase=f"waits for the checkpoint before for {second} s")
        job.later(1.0)
    assert job.state.planned and job.state.phase == PREPARING


def test_a_planned_stop_that_nobody_reaches_any_more_is_called_off() -> None:
    """It was announced for a version after the last one."""
    job = Driver()
    job.beats(*range(WORLD))
    job.heartbeat(4, epoch=Epoch(-1), joining=True)
    job.later(0.1)
    assert job.state.planned and job.asked() == {0, 1, 2, 3, 4}
    job.prepared(4, epoch=Epoch(-1), copies={})
    job.heartbeat(0, phase=EXPORTING, version=job.state.stop_after)
    job.later(0.1)
    assert job.state.planned, "it has come to that version, and stops before it gets on"
    for rank in range(WORLD):
        job.heartbeat(rank, phase=EXPORTING)
    job.later(0.1)
    assert job.state.phase == STEADY and job.register.epoch == 0
    assert [act for act in job.did if isinstance(act, events.CalledOff)] == [events.CalledOff(Epoch(0))]
    job.feed(Exited(Rank(3)))
    assert job.state.phase == PREPARING and not job.state.planned, "a loss is one as ever"
