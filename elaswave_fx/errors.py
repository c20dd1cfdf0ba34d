"""The errors that elaswave_fx raises on purpose.

Each message names the place, the fact and the rule that was broken. Anything else that escapes is a bug of ours.
"""

from collections.abc import Iterator
from contextlib import contextmanager


class ElasWaveError(Exception):
    """Base of every expected error."""


class ConfigError(ElasWaveError):
    """The user's configuration cannot work; names the key and the nearest valid value."""


class CaptureError(ConfigError):
    """The model cannot be captured as a graph; names the operator and the module."""


class DataError(ConfigError):
    """The data is missing, empty, too short or of the wrong kind."""


class SampleError(ElasWaveError):
    """A sample could not be read while training, or not in time; any other rank would fail in the same way."""


class DamagedCheckpoint(ConfigError):
    """A checkpoint on disk is not what was written; names the file."""


class PassError(ElasWaveError):
    """A compiler pass met a program that breaks its rules: a bug of the compiler."""


class PlanError(ElasWaveError):
    """A plan is invalid, a bug of the planner, or no plan exists."""


class ExecError(ElasWaveError):
    """The native runtime refused a program or an operator failed."""


class ReplicaDiffers(ExecError):
    """A replica of a box differs from its owner's; it was dropped, and the step aborted before its commit."""


class InputsDiffer(ExecError):
    """A rank has read other samples than the rank that fed them; all ranks aborted the step before its commit."""


class UpdateFailed(ExecError):
    """The update of a box failed, whose step is committed: this rank ends, the others continue with their replicas."""


class CheckpointError(ElasWaveError):
    """A checkpoint could not be written; names the rank and the reason."""


class Excluded(ElasWaveError):
    """This rank was evicted; it ends, and touches nothing of the job. No failure of the run."""


class HasLeft(ElasWaveError):
    """This rank was drained and is no member of the job any more: an orderly end."""


class JobOver(ElasWaveError):
    """The job ends; the message says why."""


class CommError(ElasWaveError):
    """A link or a group could not do what was asked."""


class Aborted(CommError):
    """The ranks abort the step; `rank` is the suspect that the first rank to notice named, if any."""

    def __init__(self, message: str, rank: int | None = None) -> None:
        super().__init__(message)
        self.rank = rank


class DeadlineExceeded(CommError):
    """An operation did not finish in its time."""


class PeerLost(CommError):
    """A peer died or its link broke; `rank` is the peer."""

    def __init__(self, message: str, rank: int) -> None:
        super().__init__(message)
        self.rank = rank


@contextmanager
def importing() -> Iterator[None]:
    """Raise ImportError if a user's module ends the process on import (`SystemExit`)."""
    try:
        yield
    except SystemExit as error:
        raise ImportError(
            f"its module ends the process when it is imported (SystemExit: {error}); keep what only a script does, "
            'such as parse_args(), under `if __name__ == "__main__":`'
        ) from error
