"""What a rank has to do at the start of an epoch, decided without touching anything; the worker does it.

In: the activation, and what is here. Out: what becomes of the step in flight, which parameters have to be made anew,
which copies have to be looked at once more, and which go on their way.

    resolve(2, activation, Stamp(7, 3), was=3, pending=True)  ->  the certificate to finish with, if it goes on from 8
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from elaswave_fx.control.protocol.rank_state import Holdings
from elaswave_fx.control.protocol.types import Activation, Certificate, Copy, Record, Stamp, Version, Vote
from elaswave_fx.plan.work.box import Box, BoxId, numbered
from elaswave_fx.plan.work.topology import Epoch, Rank


def holdings(
    committed: Stamp,
    epoch: Epoch,
    digests: Mapping[BoxId, int],
    recorded: Iterable[BoxId],
    votes: Sequence[Vote] | None,
) -> Holdings:
    """What a rank reports: copies that stand at `committed`, by their `digests`.

    `votes`: those that have come of a step that was left after the own vote, None if there is no such step; of that
    step the records of the boxes in `recorded` are here.
    """
    copies = {box: Copy(committed, digest) for box, digest in digests.items()}
    if votes is None:
        return Holdings(committed, copies, {}, (), frozenset(copies))
    flight = Stamp(Version(committed.version + 1), epoch)
    records = {box: (Record(flight, (), copies[box].digest),) for box in recorded if box in copies}
    return Holdings(committed, copies, records, tuple(votes), frozenset(copies))


def is_elsewhere(committed: Stamp, was: Epoch, activation: Activation) -> bool:
    """Whether nothing of what a rank has is of use, which has `committed` and was in the epoch `was`: all go back; or
    they have gone back in an epoch that this rank has missed, for that was over before it had entered it. It stands
    neither where they do then, nor a step before with that step in flight."""
    if activation.rollback:
        return True
    resume = activation.resume
    leads_there = committed == resume or (committed == activation.previous and resume.epoch == was)
    return has_missed(was, activation.epoch) and not leads_there


def resolve(rank: Rank, activation: Activation, committed: Stamp, was: Epoch, pending: bool) -> Certificate | None:
    """What the step in flight, after what was `committed` in the epoch `was` or before, is finished with; None: it is
    given up, if there is one.

    RuntimeError if the epoch goes on from a version that cannot be reached from here, which would be a bug of ours.
    """
    version, resume = committed.version, activation.resume.version
    if is_elsewhere(committed, was, activation) or version >= resume:
        return None
    if activation.certificate is None or not pending or version + 1 != resume:
        raise RuntimeError(f"rank {rank}: stands at version {version} and cannot follow to {resume}")
    return activation.certificate


def unchecked_buckets(
    rank: Rank, before: Sequence[Box], after: Sequence[Box], copies_agree: bool, damaged: Iterable[BoxId]
) -> set[int]:
    """Buckets with a part that this rank has made as a holder, from a copy which it does not keep; and those of boxes
    whose copies here are `damaged`, for who comes to compute with them makes parameters of what there is.

    A wrong copy shows when the next record comes, so nobody would notice any more that the part is wrong; unless all
    copies were compared when everybody had stopped.
    """
    wrong = {after[box].bucket for box in damaged}
    if copies_agree:
        return wrong
    boxes = zip(before, after, strict=True)
    made = [(old, new) for old, new in boxes if rank in old.local_materializers - {old.owner}]
    return wrong | {old.bucket for old, new in made if rank not in new.local_materializers}


def has_missed(was: Epoch, now: Epoch) -> bool:
    """Whether a rank that goes from the epoch `was` to `now` has missed one: the others may have gone on without it."""
    return now > was + 1


def anew(before: Iterable[Rank], was: Epoch, after: Iterable[Rank], now: Epoch) -> frozenset[Rank]:
    """Members of the epoch `now` to whom a rank of the epoch `was` opens links, whatever became of earlier ones: those
    that were not with it. If it has missed an epoch, these may have ended theirs, too."""
    return frozenset(after) if has_missed(was, now) else frozenset(after).difference(before)


def promoted(rank: Rank, before: Sequence[Box], after: Sequence[Box]) -> list[BoxId]:
    """Boxes that this rank comes to own: their copies become the truth, and nobody could tell later. And those that it
    comes to compute with, for it makes parameters from its copy, which has had time to change since its digest."""
    found = []
    for (box_id, old), new in zip(numbered(before), after, strict=True):
        reads_anew = rank in new.readers and rank not in old.readers and rank in new.local_materializers
        if new.owner == rank != old.owner or reads_anew:
            found.append(box_id)
    return found


def outside(boxes: Sequence[Box], rank: Rank) -> tuple[Box, ...]:
    """Boxes as they are for a rank that has no part in them: nothing to compute with, and no copy."""

    def others(ranks: tuple[Rank, ...]) -> tuple[Rank, ...]:
        return tuple(each for each in ranks if each != rank)

    return tuple(
        replace(box, holders=others(box.holders), catching_up=others(box.catching_up), readers=others(box.readers))
        for box in boxes
    )


def copies_due(boxes: Sequence[Box]) -> list[tuple[BoxId, Rank, Rank]]:
    """States that go on their way: of which box, from its owner, to which new holder."""
    return [(box_id, box.owner, holder) for box_id, box in numbered(boxes) for holder in box.catching_up]
