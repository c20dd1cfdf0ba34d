"""The one cause of a failed run that the user sees, from its children's messages and exits.

cause_of([PeerLost on rank 0, killed rank 2])  ->  killed rank 2
"""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elaswave_fx import errors

_FOLLOWS = ("CommError",)
"""Errors of a rank that follow from the loss of another one."""

_COSTS_THE_RANK = ("Excluded", "UpdateFailed")
"""Errors after which other ranks can take over the rank's work. Any other is likely to recur, so it ends the run."""

_LEFT_OUT = ("Excluded",)
"""Errors of a rank that a new process can replace."""

_OF_THE_JOB = ("JobOver",)
"""Errors that every rank has alike; their message is complete, and no code has failed."""

_FOR_USERS = ("SampleError",)
"""Errors of user code, whose message names it; the class name is omitted."""


@dataclass(frozen=True)
class Failure:
    """One child's end. `log` has the traceback or the last output. `classes`: of the exception and its bases, nearest
    first; empty for a signal or an exit."""

    name: str
    message: str
    log: Path | None = None
    classes: tuple[str, ...] = ()
    lost_rank: int | None = None

    @property
    def follows(self) -> bool:
        """Whether it is likely to follow from another rank's failure."""
        return self._is(_FOLLOWS)

    @property
    def costs_the_rank_alone(self) -> bool:
        """Whether the other ranks can continue, as after the loss of its process."""
        return self._is(_COSTS_THE_RANK)

    @property
    def was_left_out(self) -> bool:
        """Whether the rank was evicted although it lives."""
        return self._is(_LEFT_OUT)

    @property
    def reason(self) -> str:
        """The message in one line."""
        words = " ".join(self.message.split())
        if self._is(_OF_THE_JOB):
            return words
        kind = "" if not self.classes or self._is(_FOR_USERS) else f"{self.classes[0]}: "
        return f"{self.name.replace('-', ' ')}: {kind}{words}"

    def _is(self, kinds: Sequence[str]) -> bool:
        return any(kind in kinds for kind in self.classes)

    @property
    def line(self) -> str:
        """The reason, and the log's path unless the reason is complete."""
        if self.log is None or self._is(_OF_THE_JOB):
            return self.reason
        return f"{self.reason}; {'the traceback is' if self.classes else 'its last words are'} in {self.log}"

    def expected(self) -> errors.ElasWaveError | None:
        """The error as the entry points know it, if the user can fix it (`ConfigError` and subclasses)."""
        for kind in self.classes:
            known = getattr(errors, kind, None)
            if isinstance(known, type) and issubclass(known, errors.ConfigError):
                return known(self.message)
        return None


def from_message(name: str, fields: Mapping[str, Any], log: Path) -> Failure:
    return Failure(name, fields["message"], log, tuple(fields["classes"]), fields["lost_rank"])


def from_exit(name: str, status: int, log: Path) -> Failure:
    """The failure of a child that ended without a message; `status` as from `os.waitpid`."""
    has_words = log.exists() and log.stat().st_size > 0
    return Failure(name, describe_exit(status), log if has_words else None)


def describe_exit(status: int) -> str:
    """ "killed by SIGKILL …", "exited with code 3"."""
    if os.WIFSIGNALED(status):
        number = signal.Signals(os.WTERMSIG(status))
        hint = " (by someone, or by the system when memory ran out)" if number is signal.SIGKILL else ""
        return f"killed by {number.name}{hint}"
    code = os.waitstatus_to_exitcode(status)
    return f"exited with code {code}" if code else "exited before its work was done"


def cause_of(failures: Sequence[Failure]) -> Failure:
    """The failure to show, of at least one in order of detection: the first that does not follow from another; else one
    of a rank that others lost; else the first."""
    for failure in failures:
        if not failure.follows:
            return failure
    lost = {f"rank-{failure.lost_rank}" for failure in failures}
    return next((failure for failure in failures if failure.name in lost), failures[0])
