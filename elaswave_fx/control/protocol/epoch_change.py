"""The way from a loss or a reshape request to the next epoch: ranks are asked, they report, the store gets a proposal.

In: a `Coordinator` and a change. Out: its new state and actions; `coordinator.py` calls these functions.

    prepare -> (reports) -> conclude -> the swap that makes the epoch
    drop_lost, review: start over, with a higher ballot, if the target members change; ask ranks that do not report
"""

from __future__ import annotations

from elaswave_fx.control.protocol import events
from elaswave_fx.control.protocol.changed import replace
from elaswave_fx.control.protocol.coordinator_state import EVERYBODY, NOBODY, PREPARING, STEADY, Coordinator, Result
from elaswave_fx.control.protocol.decide import Blocked, Proceed, unreachable, was_left_out
from elaswave_fx.control.protocol.events import Cause, CauseKind
from elaswave_fx.control.protocol.messages import Prepare, Send
from elaswave_fx.control.protocol.register import Register, Swap
from elaswave_fx.control.protocol.types import SEED, STOPPED, Ballot, Certificate, Stamp, Version, exports
from elaswave_fx.errors import PlanError
from elaswave_fx.plan.work.box import numbered
from elaswave_fx.plan.work.topology import Rank
from elaswave_fx.words import rank_words


def propose(state: Coordinator, new: Register, lines: tuple[Certificate, ...], now_s: float) -> Result:
    """Propose `new` to the store in the place of the present register, and append `lines` to the ledger."""
    assert state.register is not None
    wanted = Swap(state.register.key, new, lines)
    return replace(state, proposal=wanted, asked_s=now_s), (wanted,)


def is_of_history(stamp: Stamp, register: Register, committed: Version) -> bool:
    """Whether a checkpoint is newer than the register's, and of a version that is known to be committed."""
    version, activation = stamp.version, register.activation
    of_this = stamp.epoch == register.epoch and activation.resume.version < version <= committed
    before = stamp.epoch < register.epoch and version <= activation.resume.version and not activation.rollback
    return (of_this or before) and version > register.checkpoint.version


def joiners(state: Coordinator, now_s: float) -> tuple[Rank, ...]:
    """Living joiners, as many as there is work for: the lowest numbers, which came first."""
    assert state.register is not None
    asking = sorted(_asking(state, now_s))
    if not asking:
        return ()
    return tuple(asking[: max(0, state.most_members(state.register) - len(state.register.members))])


def _asking(state: Coordinator, now_s: float) -> frozenset[Rank]:
    """Living ranks outside the epoch that ask to join; a joiner whose stream has ended asks again on another one."""
    assert state.register is not None
    members, detector = state.register.members, state.detector
    asking = (rank for rank, heard in detector.heard.items() if heard.heartbeat.joining and rank not in members)
    return frozenset(rank for rank in asking if detector.connections.get(rank) and detector.is_alive(rank, now_s))


def _wanted(state: Coordinator, now_s: float) -> tuple[Rank, ...]:
    """The members of the next epoch: living members; evicted ranks with new heartbeats, if awaited; joiners if planned;
    both if no member is left. A joiner that asks during a planned stop waits for the next one."""
    assert state.register is not None
    members, detector = state.register.members, state.detector
    wanted = {rank for rank in members if detector.is_alive(rank, now_s)}
    queue = frozenset(joiners(state, now_s))
    back = {rank for rank in state.register.left_out if rank in detector.heard and detector.is_alive(rank, now_s)}
    if not wanted:
        wanted = queue | back | {rank for rank in members if rank in detector.found.keys() - detector.exited}
    if state.planned:
        wanted |= _asking(state, now_s).intersection(state.targets) if state.targets else queue
    return tuple(sorted(wanted | (back & state.awaited)))


def prepare(
    state: Coordinator, now_s: float, cause: Cause, *, ask: int, stop_after: Version | None = None, anew: bool = False,
    going: frozenset[Rank] = frozenset(),
) -> Result:  # fmt: skip
    """Begin an attempt, which supersedes any other: all target ranks stop and report. `going`: ranks that this attempt
    drains; they stay if another one follows.

    Reports of this epoch stay valid, since their ranks have stopped in it. Only links may change, so an attempt for
    links starts `anew`. `ask`: how many targets are asked first.
    """
    register = state.register
    assert register is not None
    again = state.phase == PREPARING
    state = replace(
        state,
        phase=PREPARING,
        stop_after=stop_after,
        ballot=Ballot(state.ballot.term, state.ballot.serial + 1),
        prepared_s=now_s,
        asked_all_s=now_s if ask >= EVERYBODY else None,
        going=going,
    )
    targets, epoch = _wanted(state, now_s), register.epoch
    kept = {} if anew else {r: said for r, said in state.reports.items() if r in targets and said.epoch == epoch}
    state = replace(state, targets=targets, reports=kept)
    message = Prepare(state.ballot, stop_after)
    asked = tuple(Send(r, message) for r in [r for r in targets if r not in kept][:ask])
    state, told = _tell_loss(state, cause, again)
    state, more = conclude(state, now_s)
    return state, (*asked, events.Attempt(message.ballot, cause, targets), *told, *more)


def _tell_loss(state: Coordinator, cause: Cause, again: bool) -> Result:
    """Report each loss once per transition, also that of a suspect that may stay."""
    register, detector = state.register, state.detector
    assert register is not None
    if state.planned:
        return state, (() if again else (events.Stopping(register.epoch, cause),))
    stopped = (heard.heartbeat for heard in detector.heard.values() if heard.heartbeat.phase == STOPPED)
    accused = {heartbeat.suspect for heartbeat in stopped if heartbeat.epoch == register.epoch}
    accused |= {report.suspect for report in state.reports.values() if report.epoch == register.epoch}
    lost = (rank for rank in register.members if rank not in state.targets or rank in accused)
    new = tuple(rank for rank in lost if rank not in state.told)
    if again and not new:
        return state, ()
    state = replace(state, told=state.told | frozenset(new))
    return state, (events.Detected(register.epoch, new, cause, detector.since_s(new)),)


def drop_lost(state: Coordinator, now_s: float) -> Result:
    """Start a transition over if its target members have changed. A planned stop that only a joiner has left stays
    planned: no step is replayed for a rank that no other needs."""
    assert state.register is not None
    if _is_swapping(state):
        return state, ()
    members = frozenset(state.register.members)
    detector = state.detector.with_evidence(members, state.reports, now_s)
    state = replace(state, detector=detector)
    wanted = _wanted(state, now_s)
    if wanted == state.targets:
        return state, ()
    gone = tuple(rank for rank in state.targets if rank not in wanted)
    findings = [found for rank in gone if (found := detector.finding(rank, now_s)) is not None]
    kind = findings[0].kind if findings else CauseKind.MEMBERS
    if state.planned and members.isdisjoint(gone):
        after, going = state.stop_after, state.going
        return prepare(state, now_s, Cause(kind, gone), ask=EVERYBODY, stop_after=after, going=going)
    return prepare(state, now_s, Cause(kind, gone), ask=NOBODY)


def _is_swapping(state: Coordinator) -> bool:
    """Whether the swap that makes the epoch is in progress. It decides; a later loss supersedes the epoch."""
    register, proposal = state.register, state.proposal
    return proposal is not None and register is not None and proposal.new.epoch > register.epoch


def review(state: Coordinator, now_s: float) -> Result:
    """Start a transition over if needed, else ask ranks that have not reported."""
    register = state.register
    assert register is not None
    if _is_swapping(state):
        return state, ()
    waited_s, timeouts = now_s - state.prepared_s, state.timeouts
    unheard = tuple(r for r in state.targets if r not in state.reports)
    if state.planned:
        # Ranks take steps until a planned stop, so hung ones are found as in a steady state.
        found, _ = state.detector.standing_still([r for r in unheard if r in register.members], now_s)
    else:
        found = state.detector.unreported(unheard, register.epoch, state.reports, waited_s, now_s)
    state = replace(state, detector=found)
    state, actions = drop_lost(state, now_s)
    if actions:
        return state, actions
    if state.planned and _comes_too_late(state):
        state = replace(
            state, phase=STEADY, targets=(), reports={}, stop_after=None, going=frozenset(), asked_all_s=None
        )
        return state, (events.CalledOff(register.epoch),)
    if state.planned and waited_s > timeouts.stalled_s and not _gets_there(state, unheard, now_s):
        return prepare(state, now_s, Cause(CauseKind.RETRY), ask=NOBODY)
    asked_s = state.asked_all_s
    often = asked_s is None or (not unheard and _mends(state, now_s))
    early = now_s - (state.prepared_s if asked_s is None else asked_s) <= (
        timeouts.spread_s if often else timeouts.resend_s
    )
    if early or state.planned:
        return state, ()
    if not unheard:
        return prepare(state, now_s, Cause(CauseKind.RETRY), ask=EVERYBODY, anew=True)
    message = Prepare(state.ballot, None)
    return replace(state, asked_all_s=now_s), tuple(Send(rank, message) for rank in _to_ask(state, unheard, now_s))


def _comes_too_late(state: Coordinator) -> bool:
    """Whether members export the model before the version of the planned stop, and no member has reported, so none has
    reached it: no further step is taken."""
    assert state.register is not None and state.stop_after is not None
    members, heard = state.register.members, state.detector.heard
    last = (heard[rank].heartbeat for rank in members if rank in heard)
    before = any(exports(each.phase) and each.version < state.stop_after for each in last)
    return before and state.reports.keys().isdisjoint(members)


def _gets_there(state: Coordinator, unheard: tuple[Rank, ...], now_s: float) -> bool:
    """Whether a planned stop waits only for members with progress that have not reached its version."""
    assert state.register is not None and state.stop_after is not None
    detector, members, after = state.detector, state.register.members, state.stop_after
    return bool(unheard) and all(
        rank in members and detector.gets_on(rank, now_s) and detector.heard[rank].heartbeat.version < after
        for rank in unheard
    )


def _to_ask(state: Coordinator, unheard: tuple[Rank, ...], now_s: float) -> tuple[Rank, ...]:
    """Return the ranks without a report, and those that reported before their link to a cut-off rank broke."""
    cut_off = state.detector.cut_off(unheard, now_s)
    early = tuple(rank for rank, report in state.reports.items() if not cut_off <= report.broken)
    return (*unheard, *early)


def conclude(state: Coordinator, now_s: float) -> Result:
    """Decide once all reports are here, and propose the epoch to the store."""
    register = state.register
    assert register is not None
    if state.proposal is not None or len(state.reports) < len(state.targets):
        return state, ()
    if not state.targets:
        return _await_left_out(state, register, now_s)
    of_epoch = {rank: report for rank, report in state.reports.items() if report.epoch == register.epoch}
    cut_off = unreachable(of_epoch)  # ranks from outside have no links yet, or closed ones
    if cut_off and state.links_broken_since_s is None:
        # Ask again: ranks then check and reopen their links; more may have broken, or all may be up.
        state = replace(state, links_broken_since_s=now_s)
        return prepare(state, now_s, Cause(CauseKind.LINKS, tuple(sorted(cut_off))), ask=EVERYBODY, anew=True)
    if cut_off and _mends(state, now_s):
        return state, ()
    reports = {rank: report for rank, report in state.reports.items() if rank not in cut_off}
    newest = max((report.committed.version for report in reports.values()), default=register.committed.version)
    if state.saved is not None and is_of_history(state.saved, register, newest):
        register = replace(register, checkpoint=state.saved)
    verdict = state.decide(register, reports, state.detector.exited, state.going, state.replan)
    if cut_off and (isinstance(verdict, Blocked) or verdict.activation.rollback):
        return _wait(state, register, events.Waiting(register.epoch, (), tuple(sorted(cut_off))), now_s)
    if isinstance(verdict, Blocked):
        state = replace(
            state,
            awaited=state.awaited | verdict.blockers,
            detector=state.detector.without(verdict.blockers),
        )
        waiting = events.Waiting(register.epoch, verdict.boxes, tuple(sorted(verdict.blockers)))
        return _wait(state, register, waiting, now_s)
    return _propose_epoch(state, register, verdict, now_s)


def _await_left_out(state: Coordinator, register: Register, now_s: float) -> Result:
    """Wait for evicted ranks, if they may live: no other rank has any state."""
    left_out = register.left_out - state.detector.exited
    if not left_out:
        return state, ()
    state = replace(state, detector=state.detector.without(left_out))
    boxes = tuple(box_id for box_id, _ in numbered(register.activation.assignment.boxes))
    return _wait(state, register, events.Waiting(register.epoch, boxes, tuple(sorted(left_out))), now_s)


def _wait(state: Coordinator, register: Register, waiting: events.Waiting, now_s: float) -> Result:
    """Report a wait when it changes, not with every tick. Raises PlanError after `patience_s`: the holders of the last
    replicas may be alive, so the others do not roll back."""
    since_s = now_s if state.waiting is None else state.waits_since_s
    if now_s - since_s > state.patience_s:
        raise PlanError(_waited_in_vain(register, waiting, state.patience_s))
    told = () if waiting == state.waiting else (waiting,)
    return replace(state, waiting=waiting, waits_since_s=since_s), told


def _waited_in_vain(register: Register, waiting: events.Waiting, patience_s: float) -> str:
    """Return why the job ends, and to which state it can be resumed, for the user."""
    total = len(register.activation.assignment.boxes)
    lacks = (
        f"the only replicas of {len(waiting.boxes)} of {total} boxes" if waiting.boxes else "replicas that are needed"
    )
    if register.checkpoint == SEED:
        back = "no checkpoint was written (checkpoint.every), so that a new run begins again from its seed"
    else:
        back = f"the last checkpoint is of step {register.checkpoint.version}, from where resume=auto goes on"
    return (
        f"waited {patience_s:g} s (recovery.patience_s) for {rank_words(waiting.ranks)}, which cannot be reached and "
        f"may have {lacks}; {back}, and recovery.allow_rollback=true would not have waited"
    )


def _mends(state: Coordinator, now_s: float) -> bool:
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
    redone = _steps_redone(state, new)
    missing = tuple(rank for rank in register.members if rank not in new.members)
    reported = (state.reports[rank] for rank in new.members if rank in state.reports)
    back = (report.rank for report in reported if was_left_out(register, report.rank, report.epoch))
    agreed = events.Agreed(
        new.epoch,
        new.members,
        lost=tuple(rank for rank in missing if rank not in state.going),
        step=activation.resume.version,
        steps_redone=redone,
        how=verdict.how,
        lost_boxes=verdict.lost,
        rolled_back=activation.rollback and redone > 0,  # before the first step there is no rollback
        left=tuple(rank for rank in missing if rank in state.going),
        back=tuple(back),
    )
    state, actions = propose(replace(state, proposed=agreed), new, verdict.lines, now_s)
    return state, (*actions, events.Stopped(new.epoch, new.members))


def _steps_redone(state: Coordinator, new: Register) -> int:
    """Return the number of steps that the ranks replay in the new epoch."""
    reports = [report for report in state.reports.values() if report.epoch + 1 == new.epoch]
    if new.activation.rollback:
        newest = max((report.committed.version for report in reports), default=new.committed.version)
        return max(0, newest - new.committed.version)
    # A rank that had committed the last version was in the next step, unless a planned stop came before it.
    dropped = all(report.committed == new.committed for report in reports)
    return int(dropped and not state.planned)
