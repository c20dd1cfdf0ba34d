"""Decisions of a rank at the start of an epoch, without effects; the worker carries them out.

In: the activation and the local state. Out: how the step in flight ends, which parameters must be gathered again, which
replicas must be verified, and which are sent.

    resolve(2, activation, Stamp(7, 3), was=3, pending=True)  ->  the certificate that finishes step 7, to resume at 8
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from elaswave_fx.control.protocol.rank_state import Holdings
from elaswave_fx.control.protocol.types import Activation, Certificate, Record, Replica, Stamp, Version, Vote
from elaswave_fx.plan.work.box import Box, BoxId, numbered
from elaswave_fx.plan.work.topology import Epoch, Rank


def holdings(
    committed: Stamp,
    epoch: Epoch,
    digests: Mapping[BoxId, int],
    recorded: Iterable[BoxId],
    votes: Sequence[Vote] | None,
) -> Holdings:
    """Return a rank's report: replicas at `committed`, with their `digests`.

    `votes`: received for a step that was aborted after the own vote, None if there is none. `recorded`: boxes whose
    records of that step are in memory.
    """
    replicas = {box: Replica(committed, digest) for box, digest in digests.items()}
    if votes is None:
        return Holdings(committed, replicas, {}, (), frozenset(replicas))
    flight = Stamp(Version(committed.version + 1), epoch)
    records = {box: (Record(flight, (), replicas[box].digest),) for box in recorded if box in replicas}
    return Holdings(committed, replicas, records, tuple(votes), frozenset(replicas))


def is_elsewhere(committed: Stamp, was: Epoch, activation: Activation) -> bool:
    """Whether a rank's state, at `committed` in the epoch `was`, is useless because all ranks roll back. They may have
    done so in an epoch that it missed: then it is neither at `resume` nor one step before, with that step in flight."""
    if activation.rollback:
        return True
    resume = activation.resume
    leads_there = committed == resume or (committed == activation.previous and resume.epoch == was)
    return has_missed(was, activation.epoch) and not leads_there


def resolve(rank: Rank, activation: Activation, committed: Stamp, was: Epoch, pending: bool) -> Certificate | None:
    """Return the certificate that finishes the step in flight after `committed`; None: any such step is dropped. `was`:
    the rank's last epoch.

    Raises RuntimeError if the version to resume at cannot be reached from here: a bug.
    """
    version, resume = committed.version, activation.resume.version
    if is_elsewhere(committed, was, activation) or version >= resume:
        return None
    if activation.certificate is None or not pending or version + 1 != resume:
        raise RuntimeError(f"rank {rank}: stands at version {version} and cannot follow to {resume}")
    return activation.certificate


def unchecked_buckets(
    rank: Rank, before: Sequence[Box], after: Sequence[Box], replicas_agree: bool, damaged: Iterable[BoxId]
) -> set[int]:
    """Return buckets with a part that this rank made, as a holder, from a replica that it does not keep; and buckets of
    `damaged` boxes, from which readers would make parameters.

    A kept replica is checked with the next record; a dropped one is not, so its part must be made again, unless all
    replicas were compared at the stop.
    """
    wrong = {after[box].bucket for box in damaged}
    if replicas_agree:
        return wrong
    boxes = zip(before, after, strict=True)
    made = [(old, new) for old, new in boxes if rank in old.local_materializers - {old.owner}]
    return wrong | {old.bucket for old, new in made if rank not in new.local_materializers}


def has_missed(was: Epoch, now: Epoch) -> bool:
    """Whether a rank that enters `now` after `was` has missed an epoch, in which the others may have evicted it."""
    return now > was + 1


def anew(before: Iterable[Rank], was: Epoch, after: Iterable[Rank], now: Epoch) -> frozenset[Rank]:
    """Return the members of the epoch `now` to which a rank of the epoch `was` must open new links: those that were not
    in it. After a missed epoch, all of them, for they may have closed theirs."""
    return frozenset(after) if has_missed(was, now) else frozenset(after).difference(before)


def promoted(rank: Rank, before: Sequence[Box], after: Sequence[Box]) -> list[BoxId]:
    """Return the boxes to verify. Replicas of boxes that this rank comes to own become authoritative. Replicas of boxes
    that it comes to compute with become parameters, and may have changed since their digest."""
    found = []
    for (box_id, old), new in zip(numbered(before), after, strict=True):
        reads_anew = rank in new.readers and rank not in old.readers and rank in new.local_materializers
        if new.owner == rank != old.owner or reads_anew:
            found.append(box_id)
    return found


def outside(boxes: Sequence[Box], rank: Rank) -> tuple[Box, ...]:
    """Boxes as seen by a rank outside of them: no reader and no replica."""

    def others(ranks: tuple[Rank, ...]) -> tuple[Rank, ...]:
        return tuple(each for each in ranks if each != rank)

    return tuple(
        replace(box, holders=others(box.holders), catching_up=others(box.catching_up), readers=others(box.readers))
        for box in boxes
    )


def replica_transfers(boxes: Sequence[Box]) -> list[tuple[BoxId, Rank, Rank]]:
    """Return the state transfers to start: (box, owner, new holder)."""
    return [(box_id, box.owner, holder) for box_id, box in numbered(boxes) for holder in box.catching_up]
