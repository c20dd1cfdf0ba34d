"""The decision about the step in flight: roll forward, drop, wait, or roll back. A pure function of the reports.

In: the register, the reports of the remaining ranks, the ranks known to have ended. Out: a `Verdict`.

    all votes of v among the reports           -> Proceed(resume v): roll forward
    a vote missing, every box has a replica    -> Proceed(resume v-1): v is dropped and replayed
    a box without replica, its holder may live -> Blocked(for that holder)
    a box without replica, no holder lives     -> Proceed(resume checkpoint, rollback); PlanError if there is none
    a draining rank has the only replica       -> it stays a member
    no member of the last epoch                -> Blocked for one; all ended: Proceed(resume the ledger's last)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from elaswave_fx.control.protocol.register import Absent, Register
from elaswave_fx.control.protocol.types import (
    SEED,
    Activation,
    Assignment,
    BoxId,
    Certificate,
    Report,
    Stamp,
    Version,
)
from elaswave_fx.errors import PlanError
from elaswave_fx.plan.work.box import numbered
from elaswave_fx.plan.work.topology import Epoch, Rank
from elaswave_fx.words import rank_words

Replan = Callable[[tuple[Rank, ...], Mapping[BoxId, tuple[Rank, ...]], Assignment], Assignment]
"""(members, replica holders of each box, the last assignment) -> the next one; the planner as a function.

It makes only replica holders owners, and keeps them as holders while other replicas sync.
"""


class Resumption(StrEnum):
    """The way in which an epoch resumes, relative to the step that was in flight."""

    FORWARD = "rolled forward"
    AGAIN = "done again"
    BACK = "rolled back"
    LEDGER = "back to the ledger"


@dataclass(frozen=True, slots=True)
class Proceed:
    """The next epoch, its ledger lines, and the evicted ranks that may hold replicas.

    `lost`: boxes without a replica, which make the epoch start from a checkpoint.
    """

    activation: Activation
    lines: tuple[Certificate, ...]
    absent: tuple[Absent, ...]
    how: Resumption
    lost: tuple[BoxId, ...] = ()


@dataclass(frozen=True, slots=True)
class Blocked:
    """`boxes` have no replica in the reports, but `blockers` may be alive with one."""

    boxes: tuple[BoxId, ...]
    blockers: frozenset[Rank]


Verdict = Proceed | Blocked

Decide = Callable[[Register, Mapping[Rank, Report], frozenset[Rank], frozenset[Rank], Replan], Verdict]
"""The type of `decide`."""


def certificate_for(register: Register, reports: Mapping[Rank, Report], version: Version) -> Certificate | None:
    """Return the proof of `version` in the register's epoch: a rank's certificate, or one made from votes."""
    stamp, members = Stamp(version, register.epoch), register.members
    for report in reports.values():
        for certificate in report.certificates:
            if certificate.stamp == stamp:
                return certificate
    votes = {vote.rank: vote for report in reports.values() for vote in report.votes if vote.stamp == stamp}
    return Certificate(stamp, tuple(votes[r] for r in members)) if all(r in votes for r in members) else None


def committed_since(register: Register, reports: Mapping[Rank, Report]) -> tuple[Certificate, ...]:
    """Return the commits that the ledger lacks, in order."""
    found: list[Certificate] = []
    version = register.committed.version
    while (certificate := certificate_for(register, reports, Version(version + 1))) is not None:
        found.append(certificate)
        version += 1
    return tuple(found)


def sources(report: Report, previous: Stamp, resume: Stamp) -> frozenset[BoxId]:
    """Return the boxes that a rank can bring to `resume`: it has them there, or one version before with the record."""
    found = []
    for box, replica in report.copies.items():
        pending = report.records.get(box, ())
        if replica.stamp == resume or (replica.stamp == previous and pending and pending[0].stamp == resume):
            found.append(box)
    return frozenset(found)


def replicas_agree(assignment: Assignment, reports: Mapping[Rank, Report], resume: Stamp) -> bool:
    """Whether all replicas that parameters were made from are at `resume`, with one digest per box."""
    for box_id, box in numbered(assignment.boxes):
        made_of = reports.keys() & box.local_materializers
        found = {reports[rank].copies.get(box_id) for rank in made_of}
        if len(found) > 1 or any(replica is None or replica.stamp != resume for replica in found):
            return False
    return True


def still_absent(
    register: Register, present: frozenset[Rank], gone: frozenset[Rank], version: Version
) -> tuple[Absent, ...]:
    """Return evicted ranks that may hold replicas of `version`: evicted now, or earlier without a commit since."""
    found = [a for a in register.absent if a.rank not in present | gone and a.version == version]
    kept = register.activation.assignment.boxes
    for rank in register.members:
        if rank not in present | gone:
            boxes = frozenset(box_id for box_id, box in numbered(kept) if rank in box.replica_ranks)
            found.append(Absent(rank, boxes, version))
    return tuple(found)


def decide(
    register: Register,
    reports: Mapping[Rank, Report],
    gone: frozenset[Rank],
    going: frozenset[Rank],
    replan: Replan,
    allow_rollback: bool = False,
) -> Verdict:
    """Return the next epoch of the ranks in `reports`, or the ranks to wait for. Evicted ranks are members if they have
    usable replicas. Ranks that are `going` are no members if the others have replicas of all boxes: their votes count,
    their replicas do not.

    Raises PlanError if there is no plan, or no state: a box has neither a replica nor a checkpoint, and a restart from
    the seed is not allowed.
    """
    lines = committed_since(register, reports)
    resume = lines[-1].stamp if lines else register.committed
    previous = (lines[-2].stamp if len(lines) > 1 else register.committed) if lines else register.previous
    last = lines[-1] if lines else register.last
    assignment = register.activation.assignment
    has = {rank: sources(report, previous, resume) for rank, report in reports.items()}
    staying = {rank: boxes for rank, boxes in has.items() if rank not in going}
    if len(frozenset[BoxId]().union(*staying.values())) == len(assignment.boxes):
        has = staying
    members = tuple(sorted(rank for rank in has if has[rank] or not was_left_out(register, rank, reports[rank].epoch)))
    absent = still_absent(register, frozenset(has), gone, resume.version)
    held: dict[BoxId, tuple[Rank, ...]] = {box_id: () for box_id, _ in numbered(assignment.boxes)}
    for rank in members:
        for box in has[rank]:
            held[box] = (*held[box], rank)
    epoch = Epoch(register.epoch + 1)
    # Before its first step a job can always load the seed.
    fresh = register.activation.rollback and resume == register.activation.resume
    lost = tuple(box for box, ranks in held.items() if not ranks)
    # Each member knows every commit of its epoch, or has it in flight; without any member nothing is known.
    unknown = not set(members) & set(register.members)
    if unknown and not allow_rollback and (mute := frozenset(register.members) - gone):
        return Blocked(lost, mute)
    if lost:
        blockers = frozenset(a.rank for a in absent if a.boxes & set(lost))
        if blockers and not allow_rollback and not fresh:
            return Blocked(lost, blockers)
        target = resume if fresh else register.checkpoint
        if target == SEED and not fresh and not allow_rollback:
            raise PlanError(_nothing_left(register, members, len(lost)))
        # All replicas are dropped, so it does not matter where they lead.
        everybody = tuple(sorted(has))
        held = dict.fromkeys(held, everybody)
        activation = Activation(epoch, replan(everybody, held, assignment), target, target, None, rollback=True)
        return Proceed(activation, lines, (), Resumption.BACK, lost)
    agree = replicas_agree(assignment, reports, resume)
    activation = Activation(epoch, replan(members, held, assignment), resume, previous, last, copies_agree=agree)
    if unknown:
        how = Resumption.LEDGER
    else:
        how = Resumption.FORWARD if lines else Resumption.AGAIN
    return Proceed(activation, lines, absent, how)


def was_left_out(register: Register, rank: Rank, epoch: Epoch) -> bool:
    """Whether a rank whose newest epoch is `epoch` was once a member, but not in the last epoch. Replicas that lead
    nowhere are useless: it may have received all votes for a step that the others have replayed without its vote."""
    return rank not in register.members and epoch >= 0


def _nothing_left(register: Register, members: tuple[Rank, ...], boxes: int) -> str:
    """Return why no rank can continue, for the user."""
    gone = [rank for rank in register.members if rank not in members]
    who = f"with {rank_words(gone)}" if gone else "to damage in memory"
    return (
        f"all replicas of {boxes} of {len(register.activation.assignment.boxes)} boxes are lost {who}, and no "
        "checkpoint was written (checkpoint.every); recovery.allow_rollback=true would begin again from step 0"
    )


def unreachable(reports: Mapping[Rank, Report]) -> frozenset[Rank]:
    """Return few ranks, greedily, whose removal leaves no broken link between the others; of equals the highest."""
    if not any(report.broken for report in reports.values()):
        return frozenset()
    left = set(reports)
    while True:
        broken = {r: sum(o != r and (o in reports[r].broken or r in reports[o].broken) for o in left) for r in left}
        worst = max(left, key=lambda r: (broken[r], r), default=None)
        if worst is None or not broken[worst]:
            return frozenset(reports) - left
        left.remove(worst)


def waiting_in_vain(waits: Mapping[Rank, Rank | None], stalled: frozenset[Rank]) -> frozenset[Rank]:
    """Return the stalled ranks, except those that wait, maybe through others, for a rank with progress."""
    ends = {rank: _end_of_wait(rank, waits) for rank in stalled}
    return frozenset(rank for rank, end in ends.items() if end in stalled or end not in waits)


def wait_graph_sinks(waits: Mapping[Rank, Rank | None], stalled: frozenset[Rank]) -> frozenset[Rank]:
    """Return the ends of the wait-for graph: stalled ranks that wait for none, and so are to blame."""
    ends = {_end_of_wait(rank, waits) for rank in stalled}
    return frozenset(end for end in ends if waits.get(end) is None and end in stalled)


def _end_of_wait(rank: Rank, waits: Mapping[Rank, Rank | None]) -> Rank:
    """Return the end of a rank's chain of waits; in a cycle, the last one before it closes."""
    seen = {rank}
    while (next_rank := waits.get(rank)) is not None and next_rank not in seen:
        seen.add(next_rank)
        rank = next_rank
    return rank
