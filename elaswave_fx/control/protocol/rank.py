"""A rank's side of the control plane: its epoch, its reports, and its stops.

In: `(state, event, now)`. Out: `(state, actions)`. Pure: sockets and the engine are the caller's. The engine has the
rules of a step (`native/commit/`); this machine receives whole steps, and the state after an aborted one.

    Committed(certificate) …                     -> ledger lines on heartbeats, until they are acknowledged
    Prepare, Activate, Over of the coordinator   -> Interrupt, and kept until the main thread has left its step
    StepLeft(holdings, suspect)                  -> Prepared (the report) … Activate -> Answer(Go)

The main thread takes steps while `must_leave` and `may_step` allow it. After an aborted step it waits for an `Answer`.
Its report promises no further commit in that epoch, so it reports without being asked.
"""

from __future__ import annotations

from collections.abc import Callable

from elaswave_fx.control.protocol.changed import replace
from elaswave_fx.control.protocol.clock import nearer, of_round_trip
from elaswave_fx.control.protocol.epoch_start import has_missed
from elaswave_fx.control.protocol.messages import (
    COORDINATOR,
    Ack,
    Activate,
    Ended,
    Gone,
    Heartbeat,
    MustStay,
    Over,
    Prepare,
    Prepared,
    ProbeStore,
    Refused,
    Send,
    StoreSeen,
)
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
    Interrupt,
    LeaveAsked,
    Left,
    Limits,
    LinksDown,
    MendLinks,
    RankState,
    Result,
    StepLeft,
)
from elaswave_fx.control.protocol.replica_sync import ReplicaSync
from elaswave_fx.control.protocol.types import (
    STOPPED,
    Activation,
    BoxId,
    Certificate,
    Record,
    Replica,
    Report,
    Stamp,
    Version,
)
from elaswave_fx.plan.work.box import numbered
from elaswave_fx.plan.work.topology import Rank

LINES_PER_HEARTBEAT = 256
"""Maximum number of ledger lines in a heartbeat."""

FLUSH_S = 10.0
"""Time that a finished rank waits for the ledger to have the last steps."""


def member(rank: Rank, limits: Limits, first: Activation, now_s: float) -> RankState:
    """A rank in the first epoch of the job."""
    state = RankState(rank, limits, store_seen_s=now_s, tick_s=now_s, progress_s=now_s)
    return install(state, first)


def joiner(rank: Rank, limits: Limits, now_s: float) -> RankState:
    """A process that asks to become a member."""
    return RankState(rank, limits, waiting=True, store_seen_s=now_s, tick_s=now_s, progress_s=now_s)


def step(state: RankState, event: Event, now_s: float) -> Result:
    """Handle one event. Nothing is changed in place."""
    state, actions = _EVENTS[type(event)](state, event, now_s)
    state, answer = _answer(state)
    return state, (*actions, *answer)


# --- Questions ---


def must_leave(state: RankState, version: Version) -> bool:
    """Whether the main thread, which has committed `version`, must leave instead of starting another step."""
    return state.stop_requested or (state.stop_after is not None and version >= state.stop_after)


def may_step(state: RankState, now_s: float) -> bool:
    """Whether the store and the ledger were reachable recently; if not, others may have resumed without this rank."""
    return now_s - state.store_seen_s <= state.limits.lease_s and len(state.certificates) < state.limits.unledgered


def heartbeat(state: RankState) -> Heartbeat:
    """Return the heartbeat. The lowest member repeats ledger lines until they are acknowledged; at the end all members
    do, since no rank could replace a lost one then."""
    writes = bool(state.members) and (state.finished or state.rank == state.members[0])
    return Heartbeat(
        state.rank,
        state.epoch,
        state.committed.version,
        STOPPED if state.stopped else state.progress.phase,
        None if state.stopped else state.progress.awaited,
        state.suspect,
        state.joining,
        not state.joining and state.kept <= state.complete,
        state.certificates[:LINES_PER_HEARTBEAT] if writes else (),
        state.step_s,
        state.leave,
        not state.joining and not state.lagging,
    )


def report(state: RankState) -> Report:
    """Return everything that a decision about the step in flight may need."""
    return Report(
        state.rank,
        state.epoch,
        state.committed,
        state.replicas,
        state.records,
        state.votes,
        state.certificates,
        state.broken,
        state.suspect,
    )


# --- Epochs ---


def install(state: RankState, activation: Activation) -> RankState:
    """Return the state at the start of an epoch. Only replicas and records that lead to `resume` remain. Those that the
    new plan drops remain too: they are in memory until it is installed, and may be needed.

    The ledger has every line up to `resume`, since one swap wrote both. After a missed epoch broken links are forgotten
    and reopened: others may have closed them when they evicted this rank.
    """
    boxes = activation.assignment.boxes
    kept = frozenset(box_id for box_id, box in numbered(boxes) if state.rank in box.replica_ranks)
    replicas, records = _leading_to(state, activation)
    complete = kept if activation.rollback else kept.intersection(replicas)
    return replace(
        state,
        epoch=activation.epoch,
        members=activation.assignment.members,
        kept=kept,
        complete=complete,
        lagging=kept - complete,
        stopped=False,
        joining=False,
        committed=activation.resume,
        certificates=(),
        replicas=replicas,
        records=records,
        votes=(),
        suspect=None,
        broken=frozenset() if has_missed(state.epoch, activation.epoch) else state.broken,
        report_owed=False,
        stop_after=None,
        commit_s=None,
    )


def _leading_to(
    state: RankState, activation: Activation
) -> tuple[dict[BoxId, Replica], dict[BoxId, tuple[Record, ...]]]:
    replicas, records = {}, {}
    if activation.rollback:
        return replicas, records
    for box, replica in state.replicas.items():
        pending = state.records.get(box, ())
        if replica.stamp == activation.resume:
            replicas[box] = replica
        elif replica.stamp == activation.previous and pending and pending[0].stamp == activation.resume:
            replicas[box], records[box] = replica, pending[:1]
    return replicas, records


def _on_activate(state: RankState, event: Activate, now_s: float) -> Result:
    activation = event.activation
    if event.ballot < state.ballot or activation.epoch <= state.epoch:
        return state, ()
    if not state.waiting:
        return _keep(state, event)
    if state.rank not in activation.assignment.members:
        return state, ()
    state = install(state, activation)
    state = replace(state, ballot=event.ballot, activate=event, store_seen_s=now_s, was_paused=False, progress_s=now_s)
    cut_off = state.broken.intersection(state.members)
    return _stop(state, min(cut_off)) if cut_off else (state, ())


def _on_prepare(state: RankState, event: Prepare, now_s: float) -> Result:
    if event.ballot < state.ballot or (event.ballot == state.ballot and state.report_owed):
        return state, ()
    stops = event.stop_after is None or state.committed.version >= event.stop_after
    if stops and not state.waiting:
        return _keep(state, event)
    state = replace(state, ballot=event.ballot, report_owed=True, stop_after=event.stop_after)
    state, actions = _report_if_owed(state)
    return state, ((MendLinks(), *actions) if state.broken else actions)


def _keep(state: RankState, news: Prepare | Activate) -> Result:
    """Keep a message that would stop the rank until the main thread has left its step."""
    last = state.kept_news[-1] if state.kept_news else None
    if last is None or news.ballot > last.ballot or (news.ballot == last.ballot and type(news) is not type(last)):
        state = replace(state, kept_news=(*state.kept_news, news))
    return _interrupt(state, f"epoch {state.epoch} is over")


def _interrupt(state: RankState, reason: str) -> Result:
    state = replace(state, stop_requested=True)
    return state, () if state.waiting else (Interrupt(reason),)


def _stop(state: RankState, suspect: Rank | None) -> Result:
    """Stop this rank in its epoch; a member reports."""
    return _report_if_owed(replace(state, stopped=True, suspect=suspect, report_owed=not state.joining))


def _report_if_owed(state: RankState) -> Result:
    if not state.stopped or not state.report_owed or state.excluded:
        return state, ()
    return replace(state, report_owed=False), (Send(COORDINATOR, Prepared(state.ballot, report(state))),)


def _answer(state: RankState) -> Result:
    """Answer the main thread, if it waits and there is an answer."""
    if not state.waiting:
        return state, ()
    if state.ended is not None:
        return replace(state, waiting=False), (Answer(state.ended),)
    if state.epoch > state.left_epoch and not state.stopped:
        assert state.activate is not None and state.activate.activation.epoch == state.epoch
        go = Go(state.activate.activation, state.activate.plan, state.activate.infos)
        return replace(state, waiting=False, stop_requested=False), (Answer(go),)
    return state, ()


# --- The main thread ---


def _on_committed(state: RankState, event: Committed, now_s: float) -> Result:
    """Record a commit. If the epoch ends with it, interrupt a main thread that has begun another step. One that leaves
    by itself is not interrupted: that would abort the step of ranks that are still in it."""
    if state.excluded:
        return state, ()  # the others have decided its outcome
    state = replace(_measure_step(state, event.at_s), progress_s=now_s)
    state = _commit(state, event.certificate)
    after = state.stop_after
    ends = after is not None and state.committed.version >= after
    if ends and not event.leaves and not state.stop_requested:
        return _interrupt(state, f"epoch {state.epoch} ends with version {after}")
    return state, ()


def _measure_step(state: RankState, at_s: float) -> RankState:
    """Measure a step. The time until the first commit of an epoch, a start or a recovery, is no step."""
    if state.commit_s is None:
        return replace(state, commit_s=at_s)
    step_s = at_s - state.commit_s
    return replace(state, commit_s=at_s, step_s=step_s, slowest_s=max(state.slowest_s, step_s))


def _commit(state: RankState, certificate: Certificate) -> RankState:
    expected = Stamp(state.next_version, state.epoch)
    assert certificate.stamp == expected, f"rank {state.rank}: committed {certificate.stamp}, in flight is {expected}"
    voters = tuple(sorted(vote.rank for vote in certificate.votes))
    assert voters == tuple(sorted(state.members)), f"rank {state.rank}: votes of {voters}, not of {state.members}"
    return replace(state, committed=certificate.stamp, certificates=(*state.certificates, certificate), votes=())


def _on_replica_sync(state: RankState, event: ReplicaSync, now_s: float) -> Result:
    return replace(state, complete=state.kept - event.syncing, lagging=event.lagging), ()


def _on_step_left(state: RankState, event: StepLeft, now_s: float) -> Result:
    """Handle an aborted step; first record a commit known only by its votes. A paused rank has no suspect."""
    state = replace(state, waiting=True, left_epoch=state.epoch, progress_s=now_s)
    if state.excluded:
        return state, ()
    holdings = event.holdings
    votes = [vote for vote in holdings.votes if vote.stamp.epoch == state.epoch]
    if holdings.committed == Stamp(state.next_version, state.epoch):
        cast = tuple(vote for vote in votes if vote.stamp == holdings.committed)
        state = _commit(state, Certificate(holdings.committed, cast))
    state = replace(
        state,
        replicas=holdings.replicas,
        records=holdings.records,
        votes=tuple(vote for vote in votes if vote.stamp.version == state.next_version),
        complete=holdings.complete,
        lagging=state.kept - holdings.complete,
    )
    paused = state.was_paused or now_s - state.tick_s > state.limits.paused_s
    accused = event.suspect if event.suspect in state.members and not paused else None
    state, actions = _stop(state, accused)
    return _hear_kept_news(state, actions, now_s)


def _hear_kept_news(state: RankState, actions: tuple[Action, ...], now_s: float) -> Result:
    kept, state = state.kept_news, replace(state, kept_news=())
    for news in kept:
        state, more = step(state, news, now_s)
        actions += more
    return state, actions


def _on_closing(state: RankState, event: Closing, now_s: float) -> Result:
    state = replace(state, finished=event.finished, closes_by_s=now_s + FLUSH_S)
    lines: tuple[Action, ...] = (Send(COORDINATOR, heartbeat(state)),) if event.finished and not state.excluded else ()
    state, actions = _close_if_flushed(state, now_s)
    return state, lines + actions


def _close_if_flushed(state: RankState, now_s: float) -> Result:
    """Close once the ledger has the last steps, or cannot get them from here; no new epoch is made after that."""
    if state.closes_by_s is None or state.closed:
        return state, ()
    in_vain = not state.finished or state.ended is not None or now_s > state.closes_by_s
    if state.certificates and not in_vain:
        return state, ()
    last: tuple[Action, ...] = (Send(COORDINATOR, Ended(state.rank)),) if state.finished else ()
    if isinstance(state.ended, Left):
        last = (Send(COORDINATOR, Gone(state.rank)),)
    return replace(state, closed=True), last


def _on_leave_asked(state: RankState, event: LeaveAsked, now_s: float) -> Result:
    """Start to drain: report it immediately and with every heartbeat. A process that is no member yet just leaves."""
    if state.leaves_by_s is not None:
        return state, (
            EndProcess(f"rank {state.rank}: was asked to leave a second time: it ends at once and counts as failed"),
        )
    state = replace(state, leaves_by_s=now_s + event.grace_s)
    if state.joining:
        return _end(state, Left(f"rank {state.rank} was asked to leave, before it was a member"))
    return state, () if state.excluded else (Send(COORDINATOR, heartbeat(state)),)


def _on_must_stay(state: RankState, event: MustStay, now_s: float) -> Result:
    return replace(state, must_stay=event.reason), ()


# --- The clock, the store, the links ---


def _on_heartbeat_due(state: RankState, event: HeartbeatDue, now_s: float) -> Result:
    was_paused = state.was_paused or now_s - state.tick_s > state.limits.paused_s
    progress_s = now_s if event.progress.phase != state.progress.phase else state.progress_s
    state = replace(state, tick_s=now_s, was_paused=was_paused, progress=event.progress, progress_s=progress_s)
    actions: tuple[Action, ...] = () if state.excluded else (Send(COORDINATOR, heartbeat(state)),)
    if not state.excluded and (state.clock is None or now_s - state.store_seen_s > state.limits.lease_s / 2):
        actions += (Send(COORDINATOR, ProbeStore(state.rank, now_s)),)
    limits = state.limits
    since_s = now_s if state.orphaned_since_s is None else state.orphaned_since_s
    state = replace(state, orphaned_since_s=since_s if event.orphaned else None)
    if state.joining and event.orphaned and now_s - since_s > 2 * limits.lease_s:
        nobody = f"no coordinator of the job has answered for {2 * limits.lease_s:g} s: it is over, or out of reach"
        state, more = _end(state, Over(nobody))
        return state, actions + more
    if event.orphaned and now_s - state.progress_s > max(limits.hung_s, limits.hung_over_step * state.slowest_s):
        reason = f"rank {state.rank}: nobody is left who would end it, and nothing makes progress: it ends"
        actions += (EndProcess(reason),)
    state, more = _close_if_flushed(state, now_s)
    return state, actions + more


def _on_links_down(state: RankState, event: LinksDown, now_s: float) -> Result:
    """Record broken links. A rank that has reported reports again if more have broken since: they break one by one."""
    broken = event.peers.intersection(state.members)
    more = state.stopped and not state.joining and not broken <= state.broken
    return _report_if_owed(replace(state, broken=broken, report_owed=state.report_owed or more))


def _on_store_seen(state: RankState, event: StoreSeen, now_s: float) -> Result:
    """Renew the lease from when the rank asked, since the answer may have been delayed."""
    clock = nearer(state.clock, of_round_trip(event.asked_s, event.answered_s, now_s))
    state = replace(state, clock=clock)
    if event.epoch <= state.epoch:  # else others may resume without this rank
        state = replace(state, store_seen_s=max(state.store_seen_s, event.asked_s))
    return _exclude(state) if event.epoch > state.epoch and not event.needed else (state, ())


def _on_ack(state: RankState, event: Ack, now_s: float) -> Result:
    if event.term < state.ballot.term:
        return state, ()
    certificates = state.certificates
    if certificates and certificates[0].stamp.version <= event.ledgered and event.epoch == state.epoch:
        certificates = tuple(c for c in certificates if c.stamp.version > event.ledgered)
    state = replace(state, was_paused=False, certificates=certificates)
    if not event.needed and event.epoch > state.epoch:
        return _exclude(state)
    return _close_if_flushed(state, now_s)


def _on_over(state: RankState, event: Over, now_s: float) -> Result:
    return _end(state, event)


def _on_refused(state: RankState, event: Refused, now_s: float) -> Result:
    reason = f"the coordinator refuses rank {state.rank}: {event.reason}"
    return _end(replace(state, stopped=True), Excluded(reason))


def _exclude(state: RankState) -> Result:
    """End a rank that was evicted or drained; a joiner continues to wait."""
    if state.joining:
        return state, ()
    if state.leaves_by_s is not None:
        reason = f"rank {state.rank} was asked to leave, and left after step {state.committed.version - 1}"
        return _end(replace(state, stopped=True), Left(reason))
    return _end(replace(state, stopped=True), Excluded(f"the job went on without rank {state.rank}"))


def _end(state: RankState, end: Excluded | Left | Over) -> Result:
    if state.ended is not None:
        return state, ()
    return _interrupt(replace(state, ended=end), end.reason)


_EVENTS: dict[type, Callable[..., Result]] = {
    HeartbeatDue: _on_heartbeat_due,
    Committed: _on_committed,
    ReplicaSync: _on_replica_sync,
    StepLeft: _on_step_left,
    Closing: _on_closing,
    LinksDown: _on_links_down,
    StoreSeen: _on_store_seen,
    Ack: _on_ack,
    Prepare: _on_prepare,
    Activate: _on_activate,
    Over: _on_over,
    Refused: _on_refused,
    LeaveAsked: _on_leave_asked,
    MustStay: _on_must_stay,
}
