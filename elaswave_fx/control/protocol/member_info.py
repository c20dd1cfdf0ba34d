"""Member info: who a rank is and where, made by whoever starts it, and what it must agree with in a job.

In: the member info of a rank that has proved the token, and what the coordinator knows. Out: why the rank is refused,
in words, or None. Pure. A rank that is refused ends; the job does not notice.

    refusal(MemberInfo(3, …, versions={"torch": "2.12.0"}), Conditions({"torch": "2.13.0"}, …), 4, None)
        ->  "it has torch 2.12.0, the job torch 2.13.0"
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from elaswave_fx.plan.work.topology import Member, Rank, host_named

CONTROL_VERSION = "8"
"""Of the messages of the control plane; it grows when ranks and coordinators of two of them do not understand each
other."""


OWN_CODE = "code of elaswave_fx"
"""Among versions, the digest of this package."""


UNNUMBERED = Rank(-2)
"""What a process says that has no number yet."""


@dataclass(frozen=True, slots=True)
class MemberInfo:
    """One rank, for as long as it lives.

    `number`: the rank's, which no other rank of the job has ever had. Ranks of one `failure_domain`, a machine, are
    lost together; those of one `memory_domain` of it, a host, may share memory. It listens on `port` of `host`, an
    address or a name, as the others reach it. `memory_bytes`: what plans may reckon with, None: all that they like.
    `versions`: of what has to be the same on all ranks. `data_digest`: of the samples that it reads, "" if nobody has
    looked. `code`: digests of the user's files, and versions of the packages that these use, by name.
    """

    number: Rank
    failure_domain: str
    memory_domain: str
    host: str
    port: int
    memory_bytes: int | None = None
    versions: dict[str, str] = field(default_factory=dict)
    data_digest: str = ""
    code: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Conditions:
    """What the member info of every rank of a job must say."""

    versions: dict[str, str] = field(default_factory=dict)
    data_digest: str = ""
    code: dict[str, str] = field(default_factory=dict)


def member_of(info: MemberInfo) -> Member:
    """A rank as plans know it, of whose speed nothing is known yet."""
    host = host_named(info.memory_domain)
    return Member(info.number, host, memory_bytes=info.memory_bytes, machine=info.failure_domain)


def refusal(info: MemberInfo, conditions: Conditions, numbers: int, before: MemberInfo | None) -> str | None:
    """Why a rank is refused; None if it is one of the job's.

    `numbers`: so many the job has given so far, from 0 on. `before`: the info that this number has come with, if it
    has: a rank that opens its stream again shows the same one.
    """
    if not 0 <= info.number < numbers:
        return f"no rank of the job has the number {info.number}, they go from 0 to {numbers - 1}"
    differs = other_versions(info.versions, conditions)
    if differs is not None:
        return differs
    differs = _other_code(info.code, conditions.code)
    if differs is not None:
        return differs
    if info.data_digest != conditions.data_digest:
        return f"it reads other data: the digest of its samples is {_shown(info.data_digest)}, the job's " + _shown(
            conditions.data_digest
        )
    if before is not None and info != before:
        return f"rank {info.number} is another process already, that of {before.host} port {before.port}"
    return None


def other_versions(here: Mapping[str, str], conditions: Conditions) -> str | None:
    """Which version differs from the job's, in words; None if all are the same."""
    job = conditions.versions
    for what in sorted({*here, *job}):
        if here.get(what) != job.get(what):
            if what == OWN_CODE:
                return f"it has other {what}: {_shown(here.get(what, ''))}, the job {_shown(job.get(what, ''))}"
            return f"it has {what} {here.get(what, 'of no version')}, the job {what} {job.get(what, 'of no version')}"
    return None


def _other_code(here: Mapping[str, str], job: Mapping[str, str]) -> str | None:
    """Which file or package of the user's code differs from the job's, in words; None if all are the same."""
    for name in sorted({*here, *job}):
        if name not in here:
            return f"it has no {name}, which the job has"
        if name not in job:
            return f"it has {name}, which the job has not"
        if here[name] != job[name]:
            return f"its {name} differs: it is {here[name]}, the job's {job[name]}"
    return None


def _shown(digest: str) -> str:
    return digest[:16] or "not known"
