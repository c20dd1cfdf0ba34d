"""Why a run failed: from what its children said and how they ended to the one cause that the user is shown.

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
"""Errors that a rank has because another one is gone."""

_COSTS_THE_RANK = ("Excluded", "UpdateFailed")
"""Errors that nobody would have who does the rank's work from here on. Any other is likely to come again, so it ends
the run."""

_LEFT_OUT = ("Excluded",)
"""Errors of a rank in whose place another process can do its work."""

_OF_THE_JOB = ("JobOver",)
"""Errors that every rank has alike, and whose message is all that there is to say: nothing in the code has failed."""

_FOR_USERS = ("SampleError",)
"""Errors of code of the user, whose message says which, so that no name of a class is needed."""


@dataclass(frozen=True)
class Failure:
    """One child's end. `log` has more of it: a traceback, or its last words. `classes`: of the exception and its bases,
    nearest first; empty for a signal or an exit."""

    name: str
    message: str
    log: Path | None = None
    classes: tuple[str, ...] = ()
    lost_rank: int | None = None

    @property
    def follows(self) -> bool:
        """Whether it is likely the consequence of another rank's failure."""
        return self._is(_FOLLOWS)

    @property
    def costs_the_rank_alone(self) -> bool:
        """Whether the others can go on, as after the loss of its process."""
        return self._is(_COSTS_THE_RANK)

    @property
    def was_left_out(self) -> bool:
        """Whether the others went on without the rank, though it lives."""
        return self._is(_LEFT_OUT)

    @property
    def reason(self) -> str:
        """One line."""
        words = " ".join(self.message.split())
        if self._is(_OF_THE_JOB):
            return words
        kind = "" if not self.classes or self._is(_FOR_USERS) else f"{self.classes[0]}: "
        return f"{self.name.replace('-', ' ')}: {kind}{words}"

    def _is(self, kinds: Sequence[str]) -> bool:
        return any(kind in kinds for kind in self.classes)

    @property
    def line(self) -> str:
        """The reason, and where there is more of it unless it says all."""
        if self.log is None or self._is(_OF_THE_JOB):
            return self.reason
        return f"{self.reason}; {'the traceback is' if self.classes else 'its last words are'} in {self.log}"

    def expected(self) -> errors.ElasWaveError | None:
        """The error as the entry points know it, when it is the user's to mend (`ConfigError` and its kin)."""
        for kind in self.classes:
            known = getattr(errors, kind, None)
            if isinstance(known, type) and issubclass(known, errors.ConfigError):
                return known(self.message)
        return None


def from_message(name: str, fields: Mapping[str, Any], log: Path) -> Failure:
    """The failure that a child's `error` message tells of."""
    return Failure(name, fields["message"], log, tuple(fields["classes"]), fields["lost_rank"])


def from_exit(name: str, status: int, log: Path) -> Failure:
    """The failure of a child that ended without a word; `status` as of `os.waitpid`."""
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
    """The failure to show, of at least one in the order in which they were noticed: the first that is nobody else's
    consequence; else that of a rank which others lost; else the first."""
    for failure in failures:
        if not failure.follows:
            return failure
    lost = {f"rank-{failure.lost_rank}" for failure in failures}
    return next((failure for failure in failures if failure.name in lost), failures[0])
