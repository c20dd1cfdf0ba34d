"""The coordinator: who is alive, and the epochs that follow from it.

In: `(state, event, now)`. Out: `(state, actions)`. Pure; the store, the links and the clock are the caller's. Nothing
here is needed to commit a step, and all of it can be rebuilt from the store and the ranks' heartbeats.

    taking -> steady -> preparing (PREPARED of all) -> swap in the store -> steady (ACTIVATE)
    anything -> over: a rank has finished, or there is no plan for those who are left; everyone who asks is told

A rank that leaves its step tells the others, and all of them report: after a loss there is nobody to ask. PREPARE is
for stops that are planned, and for ranks that keep silent.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from elaswave_fx.control.protocol.decide import Blocked, Decide, Proceed, Replan, decide, unreachable, wait_graph_sinks
from elaswave_fx.control.protocol.messages import (
    Ack,
    Activate,
    Ended,
    Exited,
    Heartbeat,
    Note,
    Over,
    Prepare,
    Prepared,
    Saved,
    Send,
    Tick,
)
from elaswave_fx.control.protocol.register import Read, Register, StoreReply, Swap
from elaswave_fx.control.protocol.types import NO_BALLOT, STOPPED, Ballot, Certificate, Report, Stamp, Term, Version
from elaswave_fx.plan.topology import Rank

TAKING, STEADY, PREPARING, RETIRED, OVER = "taking", "steady", "preparing", "retired", "over"

NOBODY, ONE, EVERYBODY = 0, 1, 1 << 30
"""How many ranks an attempt asks at once: those who are stopping anyway, one that tells the others, or each."""

WantsMove = Callable[[Register], bool]
"""Whether planning anew for the same members would move owners, or drop copies, now that all copies are complete."""


def never(register: Register) -> bool:
    """Owners stay where they are."""
    return False


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Seconds, derived by the caller: silence that excludes, standstill that excludes the sink, time to resend.

    `spread_s`: time for the news of a loss to reach all ranks and for their reports to come, before they are asked.
    `mend_s`: for broken links between living ranks to be opened again, before one of the ranks has to go.
    `ack_s`: a rank that nothing is to be told hears after so long that it was heard.
    `unheard_s`: silence that excludes a rank of which this coordinator has never heard; None: `silent_s`.
    `ahead`: so many versions before it a planned stop is announced, that it may reach every rank in time.
    """

    silent_s: float
    accused_s: float
    stalled_s: float
    resend_s: float
    spread_s: float
    mend_s: float
    ack_s: float
    unheard_s: float | None = None
    ahead: int = 1


class Heard(NamedTuple):
    """The last heartbeat of a rank, when it came, since when it shows the same place, and when one was answered."""

    heartbeat: Heartbeat
    at_s: float
    since_s: float
    acked_s: float


@dataclass(frozen=True, slots=True)
class Coordinator:
    """One coordinator process. `proposal` is the swap on its way; ranks that are `declared_dead` hang though they send
    heartbeats; `saved`: a checkpoint that the register does not name yet, for the ledger follows the steps.

    Of a transition: `targets` are the members wanted, `asked_all_s` is when those who keep silent were asked last,
    `links_broken_since_s` since when links between living ranks are known to be broken.
    """

    timeouts: Timeouts
    replan: Replan
    decide: Decide = decide
    wants_move: WantsMove = never
    phase: str = TAKING
    register: Register | None = None
    ballot: Ballot = NO_BALLOT
    heard: dict[Rank, Heard] = field(default_factory=dict)
    began_s: float = 0.0
    exited: frozenset[Rank] = frozenset()
    declared_dead: frozenset[Rank] = frozenset()
    rejoin_requested: frozenset[Rank] = frozenset()
    planned: bool = False
    targets: tuple[Rank, ...] = ()
    reports: dict[Rank, Report] = field(default_factory=dict)
    prepared_s: float = 0.0
    asked_all_s: float | None = None
    links_broken_since_s: float | None = None
    proposal: Swap | None = None
    asked_s: float = 0.0
    tick_s: float = 0.0
    saved: Stamp | None = None
    over: str = ""


Act = Send | Read | Swap | Note
Result = tuple[Coordinator, tuple[Act, ...]]
Event = Heartbeat | Prepared | StoreReply | Tick | Exited | Saved | Ended


def start(
    timeouts: Timeouts, replan: Replan, now_s: float, decide: Decide = decide, wants_move: WantsMove = never
) -> Result:
    """A new coordinator process: it reads the store, then takes it over by raising the term."""
    return Coordinator(timeouts, replan, decide, wants_move, began_s=now_s, asked_s=now_s, tick_s=now_s), (Read(),)


def step(state: Coordinator, event: Event, now_s: float) -> Result:
    """One event at the coordinator. Nothing is changed in place."""
    if state.phase == RETIRED:
        return state, ()
    return _EVENTS[type(event)](state, event, now_s)


def end(state: Coordinator, reason: str) -> Result:
    """No epoch follows: whoever waits for one is told so. Ledger lines are taken as before."""
    state = replace(state, phase=OVER, over=reason)
    waiting = tuple(rank for rank, heard in sorted(state.heard.items()) if heard.heartbeat.phase == STOPPED)
    return state, (Note(f"the job is over: {reason}"), *(Send(rank, Over(reason)) for rank in waiting))


# --- The store ---


def _propose(state: Coordinator, new: Register, lines: tuple[Certificate, ...], now_s: float) -> Result:
    assert state.register is not None
    wanted = Swap(state.register.key, new, lines)
    return replace(state, proposal=wanted, asked_s=now_s), (wanted,)


def _on_store(state: Coordinator, event: StoreReply, now_s: float) -> Result:
    register = event.register
    if state.phase == TAKING:
        if state.proposal is not None and register == state.proposal.new:
            ballot = Ballot(register.term, 0)
            return replace(
                state, phase=STEADY, register=register, proposal=None, ballot=ballot, began_s=now_s, tick_s=now_s
            ), ()
        state = replace(state, register=register)
        return _propose(state, replace(register, term=Term(register.term + 1)), (), now_s)
    if register.term != state.ballot.term:
        return replace(state, phase=RETIRED), (Note(f"coordinator of term {state.ballot.term}: superseded"),)
    if state.proposal is None or register != state.proposal.new:
        return state, ()
    old = state.register
    state = replace(state, register=register, proposal=None)
    if old is None or old.epoch == register.epoch:
        # Its writer repeats ledger lines until it hears that they are there.
        ack = _ack(state, register, register.members[0])
        state, actions = _conclude(state, now_s) if state.phase == PREPARING else (state, ())
        return state, (ack, *actions)
    state = replace(
        state,
        phase=STEADY,
        targets=(),
        reports={},
        planned=False,
        rejoin_requested=frozenset(),
        links_broken_since_s=None,
        began_s=now_s,
    )
    activate = Activate(state.ballot, register.activation)
    return state, tuple(Send(rank, activate) for rank in register.members)


def _on_saved(state: Coordinator, event: Saved, now_s: float) -> Result:
    """A checkpoint is on disk: from now on a rollback leads to it, if it is of this history."""
    if state.saved is None or (event.stamp.epoch, event.stamp.version) > (state.saved.epoch, state.saved.version):
        state = replace(state, saved=event.stamp)
    return _name_checkpoint(state, event.stamp, now_s)


def _name_checkpoint(state: Coordinator, stamp: Stamp | None, now_s: float) -> Result:
    register = state.register
    if stamp is None or register is None or state.phase != STEADY or state.proposal is not None:
        return state, ()
    if not _is_of_history(stamp, register, register.committed.version):
        return state, ()
    return _propose(state, replace(register, checkpoint=stamp), (), now_s)


def _is_of_history(stamp: Stamp, register: Register, committed: Version) -> bool:
    """Whether a checkpoint is newer than the register's, and of a version that is known to be committed."""
    version, activation = stamp.version, register.activation
    of_this = stamp.epoch == register.epoch and activation.resume.version < version <= committed
    before = stamp.epoch < register.epoch and version <= activation.resume.version and not activation.rollback
    return (of_this or before) and version > register.checkpoint.version


# --- The ranks ---


def _on_beat(state: Coordinator, event: Heartbeat, now_s: float) -> Result:
    before = state.heard.get(event.rank)
    same = before is not None and _place(before.heartbeat) == _place(event)
    since_s = before.since_s if before is not None and same else now_s
    heard = Heard(event, now_s, since_s, -math.inf if before is None else before.acked_s)
    declared_dead = state.declared_dead - {event.rank} if event.joining else state.declared_dead
    state = replace(state, heard={**state.heard, event.rank: heard}, declared_dead=declared_dead)
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
    if state.phase == OVER and event.phase == STOPPED:
        actions += (Send(event.rank, Over(state.over)),)
    if state.phase == STEADY and member and event.epoch == register.epoch and event.phase == STOPPED:
        # Its report got lost, or came to a coordinator before this one: so may those of others.
        why = f"rank {event.rank} left the step, accusing {event.suspect}"
        state, more = _prepare(state, now_s, why, ask=EVERYBODY)
        actions += more
    return state, actions


def _answer(state: Coordinator, register: Register, heartbeat: Heartbeat, now_s: float) -> Result:
    """Of heartbeats that have nothing new on either side, one now and then is answered: a busy rank is woken by it."""
    heard = state.heard[heartbeat.rank]
    written = bool(heartbeat.lines) and heartbeat.lines[0].stamp.version <= register.committed.version
    outside = heartbeat.rank not in register.members or heartbeat.epoch != register.epoch
    if not (written or outside or state.phase == OVER or now_s - heard.acked_s >= state.timeouts.ack_s):
        return state, ()
    state = replace(state, heard={**state.heard, heartbeat.rank: heard._replace(acked_s=now_s)})
    return state, (_ack(state, register, heartbeat.rank),)


def _ack(state: Coordinator, register: Register, rank: Rank) -> Send:
    return Send(rank, Ack(state.ballot.term, register.epoch, rank in register.members, register.committed.version))


def _place(heartbeat: Heartbeat) -> tuple[object, ...]:
    return heartbeat.epoch, heartbeat.version, heartbeat.phase, heartbeat.awaited


def _append(state: Coordinator, register: Register, lines: tuple[Certificate, ...], now_s: float) -> Result:
    """Write the ledger lines that follow the last one."""
    new, taken = register, []
    for line in lines:
        if line.stamp.version == new.committed.version + 1 and line.stamp.epoch == register.epoch:
            new = replace(new, committed=line.stamp, previous=new.committed, last=line)
            taken.append(line)
    return _propose(state, new, tuple(taken), now_s) if taken else (state, ())


def _on_exited(state: Coordinator, event: Exited, now_s: float) -> Result:
    state = replace(state, exited=state.exited | {event.rank})
    if state.register is None or state.phase == TAKING:
        return state, ()
    if state.phase == STEADY and event.rank in state.register.members:
        return _prepare(state, now_s, f"rank {event.rank} exited", ask=ONE)
    return _review(state, now_s) if state.phase == PREPARING else (state, ())


def _on_ended(state: Coordinator, event: Ended, now_s: float) -> Result:
    """A rank has finished the job, which all of them do together: from here on nobody needs a new epoch."""
    state = replace(state, heard={rank: heard for rank, heard in state.heard.items() if rank != event.rank})
    if state.phase == OVER or state.register is None or event.rank not in state.register.members:
        return state, ()
    return end(state, f"rank {event.rank} has finished it")


def _on_prepared(state: Coordinator, event: Prepared, now_s: float) -> Result:
    report = event.report
    rank, register = report.rank, state.register
    if state.phase == OVER:
        return state, (Send(rank, Over(state.over)),)
    if register is None or state.phase == TAKING:
        return state, ()
    of_this_epoch = report.epoch == register.epoch and rank in register.members
    if state.phase == STEADY and of_this_epoch:
        state = replace(state, reports={rank: report})
        return _prepare(state, now_s, f"rank {rank} left the step, accusing {report.suspect}", ask=NOBODY)
    # A rank of an older epoch promises nothing about the present one, unless it was asked.
    if state.phase != PREPARING or rank not in state.targets or not (of_this_epoch or event.ballot == state.ballot):
        return state, ()
    state = replace(state, reports={**state.reports, rank: report})
    return _conclude(state, now_s)


# --- A transition ---


def _alive(state: Coordinator, rank: Rank, now_s: float) -> bool:
    """Not known to be gone, and not silent for too long, counted from when this coordinator could have heard it."""
    if rank in state.exited or rank in state.declared_dead:
        return False
    timeouts = state.timeouts
    if rank not in state.heard and timeouts.unheard_s is not None:
        return now_s - state.began_s <= timeouts.unheard_s
    return now_s - _last_s(state, rank) <= timeouts.silent_s


def _last_s(state: Coordinator, rank: Rank) -> float:
    heard = state.heard.get(rank)
    return max(heard.at_s if heard else 0.0, state.began_s)


def _wanted(state: Coordinator, now_s: float) -> tuple[Rank, ...]:
    """The members of the next epoch: living members; joiners if planned, or if the job cannot go on without them."""
    assert state.register is not None
    members = state.register.members
    wanted = {rank for rank in members if _alive(state, rank, now_s)}
    joiners = {
        r for r, h in state.heard.items() if h.heartbeat.joining and r not in members and _alive(state, r, now_s)
    }
    if not wanted:
        wanted = joiners | {r for r in members if r in state.declared_dead - state.exited}
    if state.planned:
        wanted |= joiners
    return tuple(sorted(wanted | (joiners & state.rejoin_requested)))


def _prepare(
    state: Coordinator, now_s: float, why: str, *, ask: int, stop_after: Version | None = None, anew: bool = False
) -> Result:
    """A new attempt: everybody wanted stops and reports. It supersedes whatever was under way.

    What ranks of this epoch have reported stays true, for they have stopped in it; what may have changed since are
    their links, so an attempt for the sake of links starts `anew`. `ask`: how many targets are asked at once.
    """
    register = state.register
    assert register is not None
    state = replace(
        state,
        phase=PREPARING,
        planned=stop_after is not None,
        ballot=Ballot(state.ballot.term, state.ballot.serial + 1),
        prepared_s=now_s,
        asked_all_s=now_s if ask >= EVERYBODY else None,
    )
    targets, epoch = _wanted(state, now_s), register.epoch
    kept = {} if anew else {r: said for r, said in state.reports.items() if r in targets and said.epoch == epoch}
    state = replace(state, targets=targets, reports=kept)
    message = Prepare(state.ballot, stop_after)
    asked = [r for r in targets if r not in kept][:ask]
    state, more = _conclude(state, now_s)
    return state, (Note(f"{why}: wanted are {list(targets)}"), *(Send(r, message) for r in asked), *more)


def _review(state: Coordinator, now_s: float) -> Result:
    """During a transition: start it over if the wanted members have changed, else ask those who keep silent."""
    if state.proposal is not None and state.register is not None and state.proposal.new.epoch > state.register.epoch:
        # The swap decides first; a loss after it supersedes the new epoch.
        return state, ()
    waited_s, timeouts = now_s - state.prepared_s, state.timeouts
    unheard = {r for r in state.targets if r not in state.reports}
    if not state.planned:
        blamed = {h.heartbeat.suspect for h in state.heard.values()} | {r.suspect for r in state.reports.values()}
        hung = unheard if waited_s > timeouts.stalled_s else set()
        silent = {r for r in unheard & blamed if now_s - _last_s(state, r) > timeouts.accused_s}
        state = replace(state, declared_dead=state.declared_dead | hung | silent)
    if _wanted(state, now_s) != state.targets or (state.planned and waited_s > timeouts.stalled_s):
        return _prepare(state, now_s, "the members have changed", ask=NOBODY)
    asked_s = state.asked_all_s
    complete = len(state.reports) == len(state.targets)
    often = asked_s is None or (complete and _mends(state, now_s))
    early = now_s - (state.prepared_s if asked_s is None else asked_s) <= (
        timeouts.spread_s if often else timeouts.resend_s
    )
    if early or state.planned:
        return state, ()
    if complete:
        return _prepare(state, now_s, "still without a way to go on", ask=EVERYBODY, anew=True)
    message = Prepare(state.ballot, None)
    return replace(state, asked_all_s=now_s), tuple(Send(r, message) for r in state.targets if r not in state.reports)


def _conclude(state: Coordinator, now_s: float) -> Result:
    """All reports are here: decide, and propose the epoch to the store."""
    register = state.register
    assert register is not None
    if state.proposal is not None or not state.targets or len(state.reports) < len(state.targets):
        return state, ()
    cut_off = unreachable(state.reports)
    if cut_off and state.links_broken_since_s is None:
        # Asked again, ranks look at their links anew, and open them: more may have gone down, or all may be up.
        state = replace(state, links_broken_since_s=now_s)
        why = f"links between living ranks are broken, as {sorted(cut_off)} show"
        return _prepare(state, now_s, why, ask=EVERYBODY, anew=True)
    if cut_off and _mends(state, now_s):
        return state, ()
    reports = {rank: report for rank, report in state.reports.items() if rank not in cut_off}
    newest = max((report.committed.version for report in reports.values()), default=register.committed.version)
    if state.saved is not None and _is_of_history(state.saved, register, newest):
        register = replace(register, checkpoint=state.saved)
    verdict = state.decide(register, reports, state.exited, state.replan)
    if cut_off and (isinstance(verdict, Blocked) or verdict.activation.rollback):
        return state, (Note(f"links of {sorted(cut_off)} are broken, but their copies are needed"),)
    if isinstance(verdict, Blocked):
        state = replace(
            state,
            rejoin_requested=state.rejoin_requested | verdict.blockers,
            declared_dead=state.declared_dead - verdict.blockers,
        )
        return state, (Note(f"boxes {list(verdict.boxes)} wait for ranks {sorted(verdict.blockers)}"),)
    return _propose_epoch(state, register, verdict, now_s)


def _mends(state: Coordinator, now_s: float) -> bool:
    """Whether broken links may still be opened again."""
    return state.links_broken_since_s is not None and now_s - state.links_broken_since_s <= state.timeouts.mend_s


def _propose_epoch(state: Coordinator, register: Register, verdict: Proceed, now_s: float) -> Result:
    activation = verdict.activation
    new = replace(
        register,
        activation=activation,
        committed=activation.resume,
        previous=activation.previous,
        last=activation.certificate,
        absent=verdict.absent,
    )
    state, actions = _propose(state, new, verdict.lines, now_s)
    return state, (Note(f"epoch {activation.epoch}: {verdict.reason}"), *actions)


# --- The clock ---


def _on_tick(state: Coordinator, event: Tick, now_s: float) -> Result:
    paused = now_s - state.tick_s > state.timeouts.silent_s
    # A coordinator that was stopped has heard nobody for that reason: it starts listening afresh.
    state = replace(state, tick_s=now_s, began_s=now_s if paused else state.began_s)
    actions: tuple[Act, ...] = ()
    if (state.phase == TAKING or state.proposal) and now_s - state.asked_s > state.timeouts.resend_s:
        state = replace(state, asked_s=now_s)
        actions += (state.proposal if state.proposal is not None else Read(),)
    if state.phase == PREPARING:
        state, more = _conclude(state, now_s)
        if not any(isinstance(act, Swap) for act in more):
            state, again = _review(state, now_s)
            more += again
        return state, actions + more
    if state.phase == STEADY:
        state, named = _name_checkpoint(state, state.saved, now_s)
        state, more = _watch(state, now_s)
        return state, actions + named + more
    return state, actions


def _watch(state: Coordinator, now_s: float) -> Result:
    """Nothing is under way: look for silence, standstill, and joiners in the queue."""
    assert state.register is not None
    members = state.register.members
    silent = [rank for rank in members if not _alive(state, rank, now_s)]
    if silent:
        return _prepare(state, now_s, f"ranks {silent} are silent or gone", ask=ONE)
    here = {r: state.heard[r] for r in members if r in state.heard}
    limit = state.timeouts.stalled_s
    stalled = frozenset(r for r, h in here.items() if now_s - max(h.since_s, state.began_s) > limit)
    if stalled:
        hung = wait_graph_sinks({r: h.heartbeat.awaited for r, h in here.items()}, stalled)
        state = replace(state, declared_dead=state.declared_dead | hung)
        return _prepare(state, now_s, f"ranks {sorted(stalled)} stand still, because of {sorted(hung)}", ask=ONE)
    in_step = len(here) == len(members) and all(h.heartbeat.epoch == state.register.epoch for h in here.values())
    queue = [r for r, h in state.heard.items() if h.heartbeat.joining and r not in members and _alive(state, r, now_s)]
    if in_step and queue:
        after = Version(max(h.heartbeat.version for h in here.values()) + state.timeouts.ahead)
        return _prepare(state, now_s, f"ranks {queue} join after version {after}", ask=EVERYBODY, stop_after=after)
    if in_step and all(h.heartbeat.complete for h in here.values()) and state.wants_move(state.register):
        after = Version(max(h.heartbeat.version for h in here.values()) + state.timeouts.ahead)
        why = f"copies are complete; owners move after version {after}"
        return _prepare(state, now_s, why, ask=EVERYBODY, stop_after=after)
    return state, ()


_EVENTS: dict[type, Callable[..., Result]] = {
    Heartbeat: _on_beat,
    Prepared: _on_prepared,
    StoreReply: _on_store,
    Tick: _on_tick,
    Exited: _on_exited,
    Saved: _on_saved,
    Ended: _on_ended,
}
