"""The step protocol of one rank: commit the gradients, not the state.

In: `(state, event, now)`. Out: `(state, actions)`. Pure: the engine, the links and the clock are the caller's.

    apply -> Params -> gather -> Compute -> Gradient -> reduce -> RecordOf -> VoteCast -> voted -> Committed -> apply
    anything -> Abort or Prepare -> stopped -> Prepared -> Activate -> apply

A rank votes for v+1 only when every box it vouches for stands at v and its record of v+1 is there; it updates only
what all members voted for. Once stopped it neither votes nor commits in its epoch, so it reports without being asked,
and the report counts for every attempt to follow that epoch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from elaswave_fx.control.protocol import rank_state
from elaswave_fx.control.protocol.messages import (
    COORDINATOR,
    Abort,
    Ack,
    Action,
    Activate,
    Committed,
    Compute,
    Fetch,
    Frame,
    Gradient,
    LinkDown,
    LinkUp,
    Load,
    Note,
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
from elaswave_fx.control.protocol.rank_state import (
    APPLY,
    COMPUTE,
    GATHER,
    REDUCE,
    STOPPED,
    VOTED,
    RankState,
    heartbeat,
    install,
    report,
)
from elaswave_fx.control.protocol.types import BoxId, Certificate, Copy, Part, Record, Stamp, Vote, WorkSpan
from elaswave_fx.plan.box import Box
from elaswave_fx.plan.topology import Epoch, Rank

HELD_FRAMES = 256
"""Frames of a newer epoch kept until it is installed; a rank sends at most a step's worth ahead."""

BACKLOG = 8
"""Records kept for a box whose base is still on its way; beyond it the base is asked for again."""

UNLEDGERED = 64
"""Commits that the ledger has not acknowledged; at the bound the rank pauses at its next vote."""

Result = tuple[RankState, tuple[Action, ...]]
Event = Frame | Ack | Prepare | Activate | Tick | Ran | LinkDown | LinkUp | StoreSeen


@dataclass(frozen=True, slots=True)
class Rules:
    """The guards on which safety rests, as a value: the simulator takes them away one by one and must notice."""

    is_stale: Callable[[RankState, Epoch], bool] = rank_state.is_stale
    owned: Callable[[RankState], Mapping[BoxId, Box]] = rank_state.owned_boxes
    is_committed: Callable[[RankState], bool] = rank_state.is_committed
    due_update: Callable[[RankState], BoxId | None] = rank_state.due_update
    may_vote: Callable[[RankState], bool] = rank_state.may_vote
    wrong_boxes: Callable[[RankState], tuple[BoxId, ...]] = rank_state.wrong_boxes
    computed_with: Callable[[RankState, tuple[BoxId, ...]], bool] = rank_state.computed_with


RULES = Rules()


def step(state: RankState, event: Event, now_s: float, sender: Rank = COORDINATOR, rules: Rules = RULES) -> Result:
    """One event at one rank; `sender` of messages. Nothing is changed in place."""
    kind = type(event)
    if kind in _FRAMES:
        state, actions = _on_frame(state, sender, event, rules)  # type: ignore[arg-type]
    else:
        state, actions = _CONTROL[kind](state, event, now_s)
    return _advance(state, actions, now_s, rules)


# --- Going on as far as possible ---


def _advance(state: RankState, actions: tuple[Action, ...], now_s: float, rules: Rules) -> Result:
    while state.phase != STOPPED:
        after, more = _next(state, now_s, rules)
        if after is state:
            break
        state, actions = after, actions + more
    return state, actions


def _next(state: RankState, now_s: float, rules: Rules) -> Result:
    """One transition that needs no event; the same state if there is none."""
    if state.running is None:
        if state.loads:
            return _run(replace(state, loads=state.loads[1:]), Load(state.serial + 1, state.loads[0], state.committed))
        due = rules.due_update(state)
        if due is not None:
            copy, record = state.copies[due], state.records[due][0]
            return _run(state, Update(state.serial + 1, due, copy, record))
    if state.phase == APPLY:
        return _publish(state, rules) if state.running is None else (state, ())
    if state.phase == GATHER:
        return _gather(state)
    if state.phase == REDUCE:
        return _reduce(state, now_s, rules)
    if state.phase == VOTED and rules.is_committed(state):
        return _commit(state)
    return state, ()


def _run(state: RankState, instruction: Load | Update | Compute) -> Result:
    return replace(state, running=instruction, serial=instruction.serial), (instruction,)


def _publish(state: RankState, rules: Rules) -> Result:
    """All copies stand at the committed version: parameters to readers without a copy, bases to new holders."""
    assert state.view is not None
    view, version, copies = state.view, state.committed.version, state.copies
    owned = [(box_id, box) for box_id, box in rules.owned(state).items() if box_id in copies]
    actions: list[Action] = [
        Send(target, Shard(state.epoch, box, copies[box]), bulk=True) for box, target in state.owed
    ]
    for other in view.others:
        digests = tuple((i, copies[i].digest) for i, box in owned if other not in box.local_materializers)
        if digests:
            actions.append(Send(other, Params(state.epoch, version, digests)))
    own = tuple((box_id, copies[box_id].digest) for box_id in sorted(view.made) if box_id in copies)
    state = replace(state, phase=GATHER, params={**state.params, (version, state.rank): own}, owed=())
    return (state, tuple(actions)) if actions else _gather(state)


def _gather(state: RankState) -> Result:
    assert state.view is not None
    version = state.committed.version
    if state.stop_after is not None and version >= state.stop_after:
        return stop(state, None)
    if state.running is not None or any((version, sender) not in state.params for sender in state.view.senders):
        return state, ()
    return _run(replace(state, phase=COMPUTE), Compute(state.serial + 1, state.next_version))


def _reduce(state: RankState, now_s: float, rules: Rules) -> Result:
    """Make records of owned boxes, drop wrong bases, vote when all is there."""
    version = state.next_version
    actions: list[Action] = []
    records = state.records
    for box_id, box in rules.owned(state).items():
        if records.get(box_id) or box_id not in state.copies:
            continue
        if all((version, rank) in state.gradients for rank in box.readers):
            parts = tuple(Part(rank, state.gradients[version, rank]) for rank in box.readers)
            record = Record(Stamp(version, state.epoch), parts, state.copies[box_id].digest)
            records = {**records, box_id: (record,)}
            actions += [Send(h, RecordOf(state.epoch, box_id, record)) for h in box.holders if h != state.rank]
    if records is not state.records:
        return replace(state, records=records), tuple(actions)
    wrong = rules.wrong_boxes(state)
    if wrong:
        return _drop_wrong(state, wrong, rules)
    if not rules.may_vote(state) or _paused(state, now_s):
        return state, ()
    return _vote(state)


def _drop_wrong(state: RankState, wrong: tuple[BoxId, ...], rules: Rules) -> Result:
    """Copies that differ go. One that was computed with takes the step with it; others are fetched before the vote."""
    assert state.view is not None
    view = state.view
    note = Note(f"rank {state.rank}: boxes {sorted(wrong)} differ from their owners")
    state = replace(state, copies={box: copy for box, copy in state.copies.items() if box not in wrong})
    if rules.computed_with(state, wrong):
        state, actions = _call_off(state, None)
        return state, (note, *actions)
    fetches = tuple(Send(view.kept[box_id].owner, Fetch(state.epoch, box_id)) for box_id in wrong)
    return replace(state, fetching=state.fetching.union(wrong)), (note, *fetches)


def _paused(state: RankState, now_s: float) -> bool:
    """Whether the store has not been seen for so long that this side may have been left behind."""
    return now_s - state.store_seen_s > state.deadlines.lease_s or len(state.certificates) >= UNLEDGERED


def _vote(state: RankState) -> Result:
    assert state.view is not None
    view, version = state.view, state.next_version
    vote = Vote(Stamp(version, state.epoch), state.rank, (WorkSpan(view.units, view.samples),))
    state = replace(
        state,
        phase=VOTED,
        complete=state.complete | rank_state.ready_boxes(state),
        votes={**state.votes, (version, state.rank): vote},
    )
    frame = VoteCast(state.epoch, vote)
    return state, tuple(Send(r, frame) for r in view.others)


def _commit(state: RankState) -> Result:
    version = state.next_version
    votes = tuple(state.votes[version, r] for r in state.members if (version, r) in state.votes)
    certificate = Certificate(Stamp(version, state.epoch), votes)
    state = replace(
        state,
        phase=APPLY,
        committed=certificate.stamp,
        certificates=(*state.certificates, certificate),
        votes={key: vote for key, vote in state.votes.items() if key[0] > version},
        gradients={key: span for key, span in state.gradients.items() if key[0] > version},
        params={key: digests for key, digests in state.params.items() if key[0] >= version},
    )
    actions: tuple[Action, ...] = (Committed(certificate),)
    return state, (*actions, Send(COORDINATOR, heartbeat(state))) if state.rank == state.members[0] else actions


# --- Frames ---


def _on_frame(state: RankState, sender: Rank, frame: Frame, rules: Rules) -> Result:
    if rules.is_stale(state, frame.epoch):
        return state, ()
    if frame.epoch > state.epoch:
        held = (*state.held, (sender, frame)) if len(state.held) < HELD_FRAMES else state.held
        return replace(state, held=held), ()
    if state.phase == STOPPED and not isinstance(frame, VoteCast):
        return state, ()
    return _FRAMES[type(frame)](state, sender, frame)


def _on_gradient(state: RankState, sender: Rank, frame: Gradient) -> Result:
    return replace(state, gradients={**state.gradients, (frame.version, sender): frame.samples}), ()


def _on_params(state: RankState, sender: Rank, frame: Params) -> Result:
    return replace(state, params={**state.params, (frame.version, sender): frame.digests}), ()


def _on_vote(state: RankState, sender: Rank, frame: VoteCast) -> Result:
    return replace(state, votes={**state.votes, (frame.vote.stamp.version, sender): frame.vote}), ()


def _on_record(state: RankState, sender: Rank, frame: RecordOf) -> Result:
    pending = state.records.get(frame.box, ())
    copy = state.copies.get(frame.box)
    if copy is not None and frame.record.stamp.version <= copy.stamp.version:
        return state, ()
    if len(pending) >= BACKLOG:
        state = replace(state, records={**state.records, frame.box: (frame.record,)})
        return state, (Send(sender, Fetch(state.epoch, frame.box)),)
    return replace(state, records={**state.records, frame.box: (*pending, frame.record)}), ()


def _on_fetch(state: RankState, sender: Rank, frame: Fetch) -> Result:
    copy = state.copies.get(frame.box)
    return state, (Send(sender, Shard(state.epoch, frame.box, copy), bulk=True),) if copy else ()


def _on_shard(state: RankState, sender: Rank, frame: Shard) -> Result:
    box = frame.box
    later = tuple(r for r in state.records.get(box, ()) if r.stamp.version > frame.copy.stamp.version)
    return replace(
        state,
        copies={**state.copies, box: frame.copy},
        records={**state.records, box: later},
        fetching=state.fetching - {box},
    ), ()


def _on_abort(state: RankState, sender: Rank, frame: Abort) -> Result:
    assert state.view is not None
    flood: tuple[Action, ...] = tuple(Send(r, frame) for r in state.view.others if r not in (sender, frame.suspect))
    state, actions = stop(state, frame.suspect)
    return state, flood + actions


# --- The engine, the clock, the links ---


def _on_ran(state: RankState, event: Ran, now_s: float) -> Result:
    running = state.running
    if running is None or running.serial != event.serial:
        return state, ()
    state = replace(state, running=None)
    if isinstance(running, Compute):
        return _computed(state) if state.phase == COMPUTE else (state, ())
    stamp = running.stamp if isinstance(running, Load) else running.record.stamp
    state = replace(state, copies={**state.copies, running.box: Copy(stamp, event.digest)})
    if isinstance(running, Update):
        state = replace(state, records={**state.records, running.box: state.records[running.box][1:]})
    return _answer(state) if state.phase == STOPPED else (state, ())


def _computed(state: RankState) -> Result:
    assert state.view is not None
    version, samples, owners = state.next_version, state.view.samples, state.view.owners
    frame = Gradient(state.epoch, version, samples)
    state = replace(state, phase=REDUCE, gradients={**state.gradients, (version, state.rank): samples})
    return state, tuple(Send(owner, frame) for owner in sorted(owners) if owner != state.rank)


def _on_tick(state: RankState, event: Tick, now_s: float) -> Result:
    quiet = state.quiet or now_s - state.tick_s > state.deadlines.paused_s
    state = replace(state, tick_s=now_s, quiet=quiet)
    actions: tuple[Action, ...] = (Send(COORDINATOR, heartbeat(state)),)
    if now_s - state.store_seen_s > state.deadlines.lease_s / 2:
        actions += (ProbeStore(),)
    return state, actions


def _on_link_down(state: RankState, event: LinkDown, now_s: float) -> Result:
    state = replace(state, broken=state.broken | {event.peer})
    if state.phase == STOPPED or event.peer not in state.members:
        return state, ()
    if state.quiet or now_s - state.tick_s > state.deadlines.paused_s:
        # Links break under a paused process through no fault of its peers: it stops, and accuses nobody.
        return stop(state, None)
    return _call_off(state, event.peer)


def _call_off(state: RankState, suspect: Rank | None) -> Result:
    """First to know: everybody leaves the step."""
    assert state.view is not None
    frame = Abort(state.epoch, state.next_version, suspect)
    flood: tuple[Action, ...] = tuple(Send(r, frame) for r in state.view.others if r != suspect)
    state, actions = stop(state, suspect)
    return state, flood + actions


def _on_link_up(state: RankState, event: LinkUp, now_s: float) -> Result:
    return replace(state, broken=state.broken - {event.peer}), ()


def stop(state: RankState, suspect: Rank | None) -> Result:
    """Leave the step at the next instruction; the epoch is over for this rank, which reports, if it is a member."""
    return _answer(replace(state, phase=STOPPED, suspect=suspect, answer=state.answer or not state.joining))


def _answer(state: RankState) -> Result:
    """The report, if one is owed and no half-done update stands in the way."""
    if not state.answer or isinstance(state.running, Update | Load):
        return state, ()
    return replace(state, answer=False), (Send(COORDINATOR, Prepared(state.ballot, report(state))),)


# --- The coordinator and the store ---


def _on_prepare(state: RankState, event: Prepare, now_s: float) -> Result:
    if event.ballot < state.ballot or (event.ballot == state.ballot and state.answer):
        return state, ()
    state = replace(state, ballot=event.ballot, answer=True, stop_after=event.stop_after)
    if state.phase == STOPPED:
        return _answer(state)
    if event.stop_after is not None and state.committed.version < event.stop_after:
        return state, ()
    return stop(state, None) if event.stop_after is not None else _call_off(state, None)


def _on_activate(state: RankState, event: Activate, now_s: float) -> Result:
    activation = event.activation
    refused = event.ballot < state.ballot or activation.epoch <= state.epoch
    if refused or state.rank not in activation.assignment.members:
        return state, ()
    state = replace(install(state, activation), ballot=event.ballot, store_seen_s=now_s, quiet=False)
    held, actions = state.held, ()
    state = replace(state, held=tuple(f for f in held if f[1].epoch > state.epoch))
    cut_off = state.broken.intersection(state.members)
    if cut_off:
        return _call_off(state, min(cut_off))
    for sender, frame in held:
        if frame.epoch == state.epoch and state.phase != STOPPED:
            state, more = _FRAMES[type(frame)](state, sender, frame)
            actions += more
    return state, actions


def _on_ack(state: RankState, event: Ack, now_s: float) -> Result:
    if event.term < state.ballot.term:
        return state, ()
    certificates = state.certificates
    if certificates and certificates[0].stamp.version <= event.ledgered and event.epoch == state.epoch:
        certificates = tuple(c for c in certificates if c.stamp.version > event.ledgered)
    state = replace(state, quiet=False, certificates=certificates)
    return _left(state) if not event.member and event.epoch > state.epoch else (state, ())


def _on_store_seen(state: RankState, event: StoreSeen, now_s: float) -> Result:
    state = replace(state, store_seen_s=now_s)
    if event.epoch > state.epoch and state.rank not in event.members:
        return _left(state)
    return state, ()


def _left(state: RankState) -> Result:
    """The job went on without this rank: it stops, keeps its copies in case they are the last, and asks to join."""
    if state.joining:
        return state, ()
    return stop(replace(state, joining=True, assignment=None, view=None), None)


_FRAMES: dict[type, Callable[..., Result]] = {
    Gradient: _on_gradient,
    RecordOf: _on_record,
    VoteCast: _on_vote,
    Params: _on_params,
    Abort: _on_abort,
    Fetch: _on_fetch,
    Shard: _on_shard,
}
_CONTROL: dict[type, Callable[..., Result]] = {
    Ran: _on_ran,
    Tick: _on_tick,
    LinkDown: _on_link_down,
    LinkUp: _on_link_up,
    Prepare: _on_prepare,
    Activate: _on_activate,
    Ack: _on_ack,
    StoreSeen: _on_store_seen,
}
