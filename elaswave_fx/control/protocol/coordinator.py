"""The coordinator: which ranks are alive, and the epochs that follow.

In: `(state, event, now)`. Out: `(state, actions)`. Pure; the store, the links and the clock are the caller's. Nothing
here is needed to commit a step, and all of it can be rebuilt from the store and the ranks' heartbeats.

    taking -> steady -> preparing (PREPARED of all) -> swap in the store -> steady (ACTIVATE)
    anything -> over: a rank has finished, the remaining ranks have no plan, or they have waited too long for a last
                      replica; every rank that asks is notified

The failure detector determines which ranks failed and since when. Decisions are returned as events beside messages.

A rank that aborts its step notifies the others, and all of them report, so after a loss no rank needs to be asked.
PREPARE is for planned reconfigurations, and for ranks that do not report.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from elaswave_fx.control.protocol import events
from elaswave_fx.control.protocol.changed import replace
from elaswave_fx.control.protocol.coordinator_state import (
    EVERYBODY,
    NOBODY,
    ONE,
    OVER,
    PREPARING,
    RETIRED,
    STEADY,
    TAKING,
    Act,
    Coordinator,
    Event,
    FindFollowing,
    MayJoin,
    MostMembers,
    Result,
    WhyNeeded,
    always,
    as_it_is,
    as_many_as_come,
    not_known,
)
from elaswave_fx.control.protocol.decide import Decide, Replan, decide, was_left_out
from elaswave_fx.control.protocol.epoch_change import (
    conclude,
    drop_lost,
    is_of_history,
    joiners,
    prepare,
    propose,
    review,
)
from elaswave_fx.control.protocol.events import Cause, CauseKind
from elaswave_fx.control.protocol.failure_detector import FailureDetector, Timeouts
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
from elaswave_fx.control.protocol.register import Read, Register, StoreReply, Swap
from elaswave_fx.control.protocol.types import STOPPED, Ballot, Certificate, Report, Stamp, Term, Version, exports
from elaswave_fx.plan.work.topology import Rank

__all__ = [
    "OVER", "PREPARING", "RETIRED", "STEADY", "TAKING", "Act", "Coordinator", "Event", "Result", "Timeouts", "end",
    "start", "step", "with_timeouts",
]  # fmt: skip


def start(
    timeouts: Timeouts,
    replan: Replan,
    now_s: float,
    decide: Decide = decide,
    find_following: FindFollowing = as_it_is,
    why_needed: WhyNeeded = not_known,
    most_members: MostMembers = as_many_as_come,
    may_join: MayJoin = always,
    patience_s: float = math.inf,
) -> Result:
    """Start a coordinator process: it reads the store, then takes over by raising the term."""
    detector = FailureDetector(timeouts, began_s=now_s)
    ask = decide, find_following, why_needed, most_members, may_join
    return Coordinator(detector, replan, *ask, asked_s=now_s, tick_s=now_s, patience_s=patience_s), (Read(),)


def step(state: Coordinator, event: Event, now_s: float) -> Result:
    """Handle one event. Nothing is changed in place."""
    if state.phase == RETIRED:
        return state, ()
    return _EVENTS[type(event)](state, event, now_s)


def with_timeouts(state: Coordinator, timeouts: Timeouts) -> Coordinator:
    return replace(state, detector=replace(state.detector, timeouts=timeouts))


def end(state: Coordinator, reason: str) -> Result:
    """End the job: ranks that wait for an epoch are notified. Ledger lines are accepted as before."""
    state, actions = _close(state, reason)
    assert state.register is not None
    return state, (*actions, events.Over(state.register.epoch, reason))


def _close(state: Coordinator, reason: str) -> Result:
    state = replace(state, phase=OVER, over=reason)
    heard = sorted(state.detector.heard.items())
    waiting = tuple(last.heartbeat for _, last in heard if last.heartbeat.phase == STOPPED)
    return state, tuple(Send(each.rank, Over(reason)) for each in waiting if not _was_left_out(state, each))


def _was_left_out(state: Coordinator, said: Heartbeat | Report) -> bool:
    """Whether the rank is answered that it was evicted, instead of that the job is over."""
    assert state.register is not None
    return was_left_out(state.register, said.rank, said.epoch)


# --- The store ---


def _on_store(state: Coordinator, event: StoreReply, now_s: float) -> Result:
    register = event.register
    if event.probe is not None:
        return _vouch(state, register, event.probe, now_s)
    if state.phase == TAKING:
        return _take_over(state, register, now_s)
    if register.term != state.ballot.term:
        return replace(state, phase=RETIRED), (events.Superseded(state.ballot.term),)
    if state.proposal is None or register != state.proposal.new:
        return state, ()
    old = state.register
    state = replace(state, register=register, proposal=None)
    if old is None or old.epoch == register.epoch:
        # The writer repeats ledger lines until they are acknowledged.
        ack = _ack(state, register, register.members[0])
        state, numbered = _numbered(state, old, register)
        state, actions = conclude(state, now_s) if state.phase == PREPARING else _give_number(state, now_s)
        return state, (ack, *numbered, *actions)
    agreed = (state.proposed,) if state.proposed is not None else ()
    # Every member has reported, so findings against members are void; else the epoch would end immediately.
    detector = state.detector.without(register.members).afresh(now_s)
    state = replace(
        state,
        phase=STEADY,
        targets=(),
        reports={},
        stop_after=None,
        awaited=frozenset(),
        links_broken_since_s=None,
        detector=detector,
        proposed=None,
        told=frozenset(),
        waiting=None,
        going=frozenset(),
    )
    activate = Activate(state.ballot, register.activation)
    # Notify drained ranks now; otherwise they would be notified only after a commit without them.
    gone = Ack(state.ballot.term, register.epoch, False, register.committed.version)
    left = tuple(Send(rank, gone) for event in agreed for rank in event.left)
    return state, (*(Send(rank, activate) for rank in register.members), *left, *agreed)


def _on_probe(state: Coordinator, event: ProbeStore, now_s: float) -> Result:
    """Read the store after the question: this coordinator's register may be outdated by another one's."""
    return state, (Read(event),)


def _vouch(state: Coordinator, register: Register, probe: ProbeStore, now_s: float) -> Result:
    """Answer a rank's probe from the store. A coordinator that was superseded answers, and ends."""
    needed = register.needs(probe.rank)
    seen = Send(probe.rank, StoreSeen(register.term, register.epoch, needed, probe.asked_s, now_s))
    if state.phase == TAKING or register.term == state.ballot.term:
        return state, (seen,)
    return replace(state, phase=RETIRED), (seen, events.Superseded(state.ballot.term))


def _take_over(state: Coordinator, register: Register, now_s: float) -> Result:
    """Raise the term, which makes this process the coordinator. It reports the epoch that it finds, since its
    predecessor may have ended between the swap and its report."""
    if state.proposal is None or register != state.proposal.new:
        state = replace(state, register=register)
        return propose(state, replace(register, term=Term(register.term + 1)), (), now_s)
    state = replace(
        state,
        phase=STEADY,
        register=register,
        proposal=None,
        ballot=Ballot(register.term, 0),
        detector=state.detector.afresh(now_s),
        tick_s=now_s,
    )
    if register.epoch == 0:
        return state, ()
    activation = register.activation
    step, back = activation.resume.version, activation.rollback
    return state, (events.Agreed(register.epoch, register.members, (), step, rolled_back=back),)


def _on_saved(state: Coordinator, event: Saved, now_s: float) -> Result:
    """Record a checkpoint on disk; rollbacks use it from now on, if it belongs to this history."""
    if state.saved is None or (event.stamp.epoch, event.stamp.version) > (state.saved.epoch, state.saved.version):
        state = replace(state, saved=event.stamp)
    return _name_checkpoint(state, event.stamp, now_s)


def _name_checkpoint(state: Coordinator, stamp: Stamp | None, now_s: float) -> Result:
    register = state.register
    if stamp is None or register is None or state.phase != STEADY or state.proposal is not None:
        return state, ()
    if not is_of_history(stamp, register, register.committed.version):
        return state, ()
    return propose(state, replace(register, checkpoint=stamp), (), now_s)


# --- Numbers ---


def _on_number_wanted(state: Coordinator, event: NumberWanted, now_s: float) -> Result:
    return _give_number(replace(state, unnumbered=(*state.unnumbered, event.connection)), now_s)


def _give_number(state: Coordinator, now_s: float) -> Result:
    """Give the first waiting joiner a number. The register counts it before the joiner receives it, so that no failure
    makes it given twice. Done only with nothing else in progress, which the swap would delay."""
    register = state.register
    if not state.unnumbered or register is None or state.phase != STEADY or state.proposal is not None:
        return state, ()
    return propose(state, replace(register, numbers=register.numbers + 1), (), now_s)


def _numbered(state: Coordinator, before: Register | None, register: Register) -> Result:
    """Assign the number that the register now counts to the first waiting joiner."""
    if before is None or register.numbers == before.numbers:
        return state, ()
    first, *rest = state.unnumbered
    return replace(state, unnumbered=tuple(rest)), (Numbered(first, Rank(before.numbers)),)


# --- The ranks ---


def _on_beat(state: Coordinator, event: Heartbeat, now_s: float) -> Result:
    state = replace(state, detector=state.detector.heartbeat(event, now_s))
    register = state.register
    if register is None or state.phase == TAKING:
        return state, ()
    state, actions = _answer(state, register, event, now_s)
    member = event.rank in register.members
    if state.phase == STEADY and member and event.epoch < register.epoch:
        return state, (*actions, Send(event.rank, Activate(state.ballot, register.activation)))
    if state.proposal is None and event.lines and event.epoch == register.epoch:
        state, more = _append(state, register, event.lines, now_s)
        actions += more
    if state.phase == OVER and event.phase == STOPPED and not _was_left_out(state, event):
        actions += (Send(event.rank, Over(state.over)),)
    if state.phase == STEADY and member and event.epoch == register.epoch and event.phase == STOPPED:
        # Its report was lost, or went to an earlier coordinator; so may those of others.
        state, more = prepare(state, now_s, _left(event.rank, event.suspect), ask=EVERYBODY)
        actions += more
    return state, actions


def _answer(state: Coordinator, register: Register, heartbeat: Heartbeat, now_s: float) -> Result:
    """Acknowledge a heartbeat; one without news only every `ack_s`, since the answer wakes a busy rank."""
    acked_s = state.acked_s.get(heartbeat.rank, -math.inf)
    written = bool(heartbeat.lines) and heartbeat.lines[0].stamp.version <= register.committed.version
    outside = heartbeat.rank not in register.members or heartbeat.epoch != register.epoch
    if not (written or outside or state.phase == OVER or now_s - acked_s >= state.timeouts.ack_s):
        return state, ()
    state = replace(state, acked_s={**state.acked_s, heartbeat.rank: now_s})
    return state, (_ack(state, register, heartbeat.rank),)


def _ack(state: Coordinator, register: Register, rank: Rank) -> Send:
    needed = rank in register.members or (state.phase != OVER and register.needs(rank))
    return Send(rank, Ack(state.ballot.term, register.epoch, needed, register.committed.version))


def _append(state: Coordinator, register: Register, lines: tuple[Certificate, ...], now_s: float) -> Result:
    """Write the ledger lines that follow the last one."""
    new, taken = register, []
    for line in lines:
        if line.stamp.version == new.committed.version + 1 and line.stamp.epoch == register.epoch:
            new = replace(new, committed=line.stamp, previous=new.committed, last=line)
            taken.append(line)
    return propose(state, new, tuple(taken), now_s) if taken else (state, ())


def _on_exited(state: Coordinator, event: Exited | Gone, now_s: float) -> Result:
    """Handle a process that has ended, or will after it was drained: its memory is lost."""
    state = replace(state, detector=state.detector.exit_word(event.rank))
    if state.register is None or state.phase == TAKING:
        return state, ()
    if state.phase == STEADY and event.rank in state.register.members:
        return prepare(state, now_s, Cause(CauseKind.EXITED, (event.rank,)), ask=ONE)
    return drop_lost(state, now_s) if state.phase == PREPARING else (state, ())


def _on_connected(state: Coordinator, event: Connected, now_s: float) -> Result:
    """Repeat the request to stop: it, or the report, may have been lost with the earlier stream."""
    state = replace(state, detector=state.detector.connected(event.rank, now_s))
    if state.phase != PREPARING or event.rank not in state.targets or event.rank in state.reports:
        return state, ()
    return state, (Send(event.rank, Prepare(state.ballot, state.stop_after)),)


def _on_disconnected(state: Coordinator, event: Disconnected, now_s: float) -> Result:
    """Handle a closed connection. It proves a loss only together with broken links: the rank may reopen it."""
    state = replace(state, detector=state.detector.disconnected(event.rank))
    return drop_lost(state, now_s) if state.phase == PREPARING else (state, ())


def _on_ended(state: Coordinator, event: Ended, now_s: float) -> Result:
    """Handle a rank that finished the job. All ranks finish together, so no new epoch is needed."""
    state = replace(state, detector=state.detector.ended(event.rank))
    if state.phase == OVER or state.register is None or event.rank not in state.register.members:
        return state, ()
    return _close(state, f"rank {event.rank} has finished it")


def _on_prepared(state: Coordinator, event: Prepared, now_s: float) -> Result:
    report = event.report
    rank, register = report.rank, state.register
    state = replace(state, detector=state.detector.reported(rank, now_s))
    if register is None or state.phase == TAKING:
        return state, ()
    if state.phase == OVER:
        left_out = _was_left_out(state, report)
        return state, (_ack(state, register, rank) if left_out else Send(rank, Over(state.over)),)
    of_this_epoch = report.epoch == register.epoch and rank in register.members
    if of_this_epoch and (state.phase == STEADY or _is_early(state, report)):
        state = replace(state, reports={**state.reports, rank: report})
        return prepare(state, now_s, _left(rank, report.suspect), ask=NOBODY)
    # A rank of an older epoch promises nothing about the present one, unless it was asked.
    if state.phase != PREPARING or rank not in state.targets or not (of_this_epoch or event.ballot == state.ballot):
        return state, ()
    state = replace(state, reports={**state.reports, rank: report})
    state, actions = drop_lost(state, now_s)
    return (state, actions) if actions else conclude(state, now_s)


def _is_early(state: Coordinator, report: Report) -> bool:
    """Whether a rank left before the version of a planned stop, which the others then cannot reach."""
    return state.stop_after is not None and report.committed.version < state.stop_after


def _left(rank: Rank, suspect: Rank | None) -> Cause:
    return Cause(CauseKind.LEFT, () if suspect is None else (suspect,), by=rank)


# --- The clock ---


def _on_tick(state: Coordinator, event: Tick, now_s: float) -> Result:
    paused = now_s - state.tick_s > state.timeouts.silent_s
    # A coordinator that was stopped has received nothing for that reason: silence counts from now.
    state = replace(state, tick_s=now_s, detector=state.detector.afresh(now_s) if paused else state.detector)
    actions: tuple[Act, ...] = ()
    # While it waits for a replica, another one may have taken over: only the store tells, and it must not end the job.
    asks = state.phase == TAKING or state.proposal or (state.phase == PREPARING and state.waiting)
    if asks and now_s - state.asked_s > state.timeouts.resend_s:
        state = replace(state, asked_s=now_s)
        actions += (state.proposal if state.proposal is not None else Read(),)
    if state.phase == PREPARING:
        state, more = conclude(state, now_s)
        if not any(isinstance(act, Swap) for act in more):
            state, again = review(state, now_s)
            more += again
        return state, actions + more
    if state.phase == STEADY:
        state, named = _name_checkpoint(state, state.saved, now_s)
        state, given = _give_number(state, now_s)
        state, more = _watch(state, now_s)
        return state, actions + named + given + more
    return state, actions


def _watch(state: Coordinator, now_s: float) -> Result:
    """Check the members in a steady state for silence, hangs, joiners, draining ranks and a better plan."""
    register = state.register
    assert register is not None
    members = register.members
    silent = tuple(rank for rank in members if not state.detector.is_alive(rank, now_s))
    if silent:
        return prepare(state, now_s, Cause(CauseKind.SILENT, silent), ask=ONE)
    detector, stalled = state.detector.standing_still(members, now_s)
    if stalled:
        state = replace(state, detector=detector)
        return prepare(state, now_s, Cause(CauseKind.STALLED, stalled), ask=ONE)
    here = [detector.heard[rank].heartbeat for rank in members if rank in detector.heard]
    if len(here) < len(members) or any(heartbeat.epoch != register.epoch for heartbeat in here):
        return state, ()
    if any(exports(heartbeat.phase) for heartbeat in here):
        return state, ()  # no step follows for a planned stop
    after = Version(max(heartbeat.version for heartbeat in here) + state.timeouts.ahead)
    queue = joiners(state, now_s)
    if queue and state.may_join(register, queue):
        return prepare(state, now_s, Cause(CauseKind.JOIN, queue, after=after), ask=EVERYBODY, stop_after=after)
    leaving = {heartbeat.rank: heartbeat.leave for heartbeat in here if heartbeat.leave}
    # A draining rank's replicas leave with it, so all others must be in sync; otherwise nearly in sync suffices.
    there = all(heartbeat.complete or (heartbeat.close and not leaving) for heartbeat in here)
    following = state.find_following(register, leaving, there)
    if following is None:
        return _keep_back(state, register, leaving)
    going = frozenset(members) - frozenset(following.members)
    kind = CauseKind.LEAVE if going else CauseKind.MOVE
    cause = Cause(kind, tuple(sorted(going)), after=after, aim="" if going else following.aim)
    return prepare(state, now_s, cause, ask=EVERYBODY, stop_after=after, going=going)


def _keep_back(state: Coordinator, register: Register, leaving: Mapping[Rank, Leave]) -> Result:
    """Notify overdue draining ranks once why they cannot leave."""
    actions: tuple[Act, ...] = ()
    for rank in sorted(rank for rank, leave in leaving.items() if leave is Leave.OVERDUE):
        why = None if rank in state.must_stay else state.why_needed(register, rank)
        if why is not None:
            state = replace(state, must_stay=state.must_stay | {rank})
            actions += (Send(rank, MustStay(why)), events.CannotLeave(register.epoch, rank, why))
    return state, actions


_EVENTS: dict[type, Callable[..., Result]] = {
    Heartbeat: _on_beat,
    Prepared: _on_prepared,
    ProbeStore: _on_probe,
    StoreReply: _on_store,
    Tick: _on_tick,
    Exited: _on_exited,
    Connected: _on_connected,
    Disconnected: _on_disconnected,
    NumberWanted: _on_number_wanted,
    Saved: _on_saved,
    Ended: _on_ended,
    Gone: _on_exited,
}
