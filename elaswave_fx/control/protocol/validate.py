"""Validation of ranks' messages: numbers that the job has given, epochs that exist, versions that may be committed.

In: a decoded message of a rank that holds the token, and the register. Out: its fault as text, or None. Pure. The
machines trust messages and index plans, boxes and votes by them; so a rank loses its connection for a fault, which then
harms no other rank.

    fault_of(Heartbeat(rank=2, epoch=9, …), register at epoch 4)   ->  "epoch 9 does not exist, the newest is 4"
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator

from elaswave_fx.control.protocol.member_info import MemberInfo
from elaswave_fx.control.protocol.messages import Ended, Gone, Heartbeat, Prepared, ProbeStore, RankReport, Reshape
from elaswave_fx.control.protocol.register import Register
from elaswave_fx.control.protocol.types import Ballot, Certificate, Report, Stamp, Vote
from elaswave_fx.control.store.ledger import fault_of_payload
from elaswave_fx.plan.work.topology import Epoch, Rank

AHEAD_MOST = 1 << 16
"""Maximum number of committed steps that the ledger lacks: it waits for a disk, ranks do not."""

TEXT_MOST, STEP_MOST_S, RANKS_MOST, RECORDS_MOST = 1024, 86_400.0, 1 << 20, 64
FILES_MOST = 1 << 14
"""Maximum number of files of user code."""

_HIGHEST = (1 << 63) - 1


def fault_of(message: Heartbeat | Prepared | Ended | Gone | ProbeStore | RankReport, register: Register) -> str | None:
    """Return the first fault in a rank's message."""
    job = _Job(register)
    if isinstance(message, Heartbeat):
        return next(job.of_heartbeat(message), None)
    if isinstance(message, Prepared):
        return next(job.of_prepared(message), None)
    if isinstance(message, ProbeStore) and not math.isfinite(message.asked_s):
        return f"it asked at {message.asked_s}"
    if isinstance(message, Ended) and message.rank not in register.members:
        return "it has finished a job of which it is no member"
    return None


def fault_of_member(info: MemberInfo) -> str | None:
    """Return the fault in a rank's member info, to whose address all others connect."""
    if not 1 <= info.port <= 65535:
        return f"it listens on port {info.port}"
    if info.memory_bytes is not None and not 0 < info.memory_bytes <= _HIGHEST:
        return f"it has {info.memory_bytes} bytes of memory"
    texts = (info.host, info.failure_domain, info.memory_domain, info.data_digest)
    texts += (*info.versions, *info.versions.values(), *info.code, *info.code.values())
    too_many = len(info.versions) > TEXT_MOST or len(info.code) > FILES_MOST
    if not info.host or max(map(len, texts)) > TEXT_MOST or too_many:
        return "it names no host, or has a field that is too long"
    return None


def fault_of_reshape(reshape: Reshape) -> str | None:
    """Return the fault in a requested layout."""
    numbers = [number for number in (reshape.dp, reshape.pp) if number is not None]
    if any(not 1 <= number <= RANKS_MOST for number in numbers):
        return f"{reshape.dp} lanes of {reshape.pp} stages are none"
    return None


class _Job:
    """The bounds for messages. Each method yields all faults, most direct first."""

    def __init__(self, register: Register) -> None:
        self._register = register
        self._boxes = len(register.activation.assignment.boxes)
        self._last = register.committed.version + AHEAD_MOST

    def of_heartbeat(self, beat: Heartbeat) -> Iterator[str]:
        yield from self._of_epoch(beat.epoch)
        yield from self._of_version(beat.version)
        yield from self._of_ranks([rank for rank in (beat.awaited, beat.suspect) if rank is not None])
        if len(beat.phase) > TEXT_MOST:
            yield f"its phase has {len(beat.phase)} characters"
        if beat.step_s is not None and not 0 <= beat.step_s <= STEP_MOST_S:
            yield f"its last step took {beat.step_s} s"
        yield from self._of_certificates(beat.lines)

    def of_prepared(self, prepared: Prepared) -> Iterator[str]:
        report = prepared.report
        yield from self._of_ballot(prepared.ballot)
        yield from self._of_epoch(report.epoch)
        yield from self._of_stamps([report.committed])
        yield from self._of_ranks([*report.broken, *([] if report.suspect is None else [report.suspect])])
        yield from self._of_what_it_has(report)
        yield from self._of_votes(report.votes)
        yield from self._of_certificates(report.certificates)

    def _of_what_it_has(self, report: Report) -> Iterator[str]:
        for box in {**report.copies, **report.records}:
            if not 0 <= box < self._boxes:
                yield f"it has box {box}, and there are {self._boxes}"
        yield from self._of_stamps(replica.stamp for replica in report.copies.values())
        for records in report.records.values():
            if len(records) > RECORDS_MOST:
                yield f"it has {len(records)} records of a box"
            yield from self._of_stamps(record.stamp for record in records)
            yield from self._of_ranks([part.rank for record in records for part in record.parts])

    def _of_certificates(self, certificates: Collection[Certificate]) -> Iterator[str]:
        members = self._register.members
        for certificate in certificates:
            yield from self._of_stamps([certificate.stamp])
            voters = [vote.rank for vote in certificate.votes]
            if len(set(voters)) != len(voters):
                yield f"version {certificate.stamp.version} has two votes of a rank"
            if certificate.stamp.epoch == self._register.epoch and set(voters) != set(members):
                yield f"version {certificate.stamp.version} has votes of {sorted(voters)[:16]}, not of all members"
            if any(vote.stamp != certificate.stamp for vote in certificate.votes):
                yield f"version {certificate.stamp.version} has votes for another one"
            yield from self._of_votes(certificate.votes)

    def _of_votes(self, votes: Iterable[Vote]) -> Iterator[str]:
        for vote in votes:
            yield from self._of_stamps([vote.stamp])
            yield from self._of_ranks([vote.rank])
            wrong = fault_of_payload(vote.payload)
            if wrong is not None:
                yield f"the payload of a vote of rank {vote.rank} {wrong}"

    def _of_stamps(self, stamps: Iterable[Stamp]) -> Iterator[str]:
        for stamp in stamps:
            yield from self._of_epoch(stamp.epoch)
            yield from self._of_version(stamp.version)

    def _of_epoch(self, epoch: Epoch) -> Iterator[str]:
        if not -1 <= epoch <= self._register.epoch:
            yield f"epoch {epoch} does not exist, the newest is {self._register.epoch}"

    def _of_version(self, version: int) -> Iterator[str]:
        if not 0 <= version <= self._last:
            yield f"version {version} cannot be, the ledger has {self._register.committed.version}"

    def _of_ranks(self, ranks: Iterable[Rank]) -> Iterator[str]:
        for rank in ranks:
            if not 0 <= rank < self._register.numbers:
                yield f"no rank of the job has the number {rank}, they go from 0 to {self._register.numbers - 1}"

    def _of_ballot(self, ballot: Ballot) -> Iterator[str]:
        if not (0 <= ballot.term <= _HIGHEST and 0 <= ballot.serial <= _HIGHEST):
            yield f"no coordinator has asked with {tuple(ballot)}"
