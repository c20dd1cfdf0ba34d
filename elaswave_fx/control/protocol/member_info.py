"""Member info: identity and address of a rank, and the conditions of a job that it must meet.

In: the member info of a rank that has proved the token, and the coordinator's data. Out: why the rank is refused, as
text, or None. Pure. A refused rank ends without effect on the job.

    refusal(MemberInfo(3, …, versions={"torch": "2.12.0"}), Conditions({"torch": "2.13.0"}, …), 4, None)
        ->  "it has torch 2.12.0, the job torch 2.13.0"
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from elaswave_fx.plan.work.topology import Member, Rank, host_named

CONTROL_VERSION = "11"
"""Version of the control messages; raised when ranks and coordinators of two versions do not understand each other."""


OWN_CODE = "code of elaswave_fx"
"""Key of this package's digest among the versions."""


UNNUMBERED = Rank(-2)
"""Number of a process that has none yet."""


@dataclass(frozen=True, slots=True)
class MemberInfo:
    """One rank, for as long as it lives.

    `number`: unique in the job, never reused. Ranks of one `failure_domain`, a machine, are lost together; those of one
    `memory_domain` of it, a host, may share memory. It listens on `port` of `host`, an address or a name for the other
    ranks. `memory_bytes`: memory for plans, None: unlimited. `versions`: must be equal on all ranks. `data_digest`: of
    the samples that it reads, "" if not computed. `code`: digests of the user's files, and versions of the packages
    that these use, by name.
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
    """The values that every rank's member info must have."""

    versions: dict[str, str] = field(default_factory=dict)
    data_digest: str = ""
    code: dict[str, str] = field(default_factory=dict)


def member_of(info: MemberInfo) -> Member:
    """A rank for the planner, of unknown speed."""
    host = host_named(info.memory_domain)
    return Member(info.number, host, memory_bytes=info.memory_bytes, machine=info.failure_domain)


def refusal(info: MemberInfo, conditions: Conditions, numbers: int, before: MemberInfo | None) -> str | None:
    """Return why a rank is refused; None if it is accepted.

    `numbers`: how many numbers the job has given, from 0 on. `before`: the earlier info of this number, if any: a rank
    that reconnects must send the same one.
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
    """The first version that differs from the job's, as text; None if all are equal."""
    job = conditions.versions
    for what in sorted({*here, *job}):
        if here.get(what) != job.get(what):
            if what == OWN_CODE:
                return f"it has other {what}: {_shown(here.get(what, ''))}, the job {_shown(job.get(what, ''))}"
            return f"it has {what} {here.get(what, 'of no version')}, the job {what} {job.get(what, 'of no version')}"
    return None


def _other_code(here: Mapping[str, str], job: Mapping[str, str]) -> str | None:
    """The first file or package of user code that differs from the job's, as text; None if all are equal."""
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
