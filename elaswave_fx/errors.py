"""The errors that elaswave_fx raises on purpose.

Each message names the place, the fact and the rule that was broken. Anything else that escapes is a bug of ours.
"""


class ElasWaveError(Exception):
    """Base of every expected error."""


class ConfigError(ElasWaveError):
    """The user's configuration cannot work; one line, names the key and the nearest valid value. Exit code 2."""


class CaptureError(ConfigError):
    """The model cannot be captured as a graph; names the operator and the module."""


class DataError(ConfigError):
    """The data is missing, empty, too short or of the wrong kind."""


class SampleError(ElasWaveError):
    """A sample could not be read while training, or not in time; whoever reads it next would have the same."""


class DamagedCheckpoint(ConfigError):
    """What is on disk is not what was written; names the file."""


class PassError(ElasWaveError):
    """A compiler pass met a program that breaks its rules."""


class PlanError(ElasWaveError):
    """A plan is invalid or no plan exists."""


class ExecError(ElasWaveError):
    """The native runtime refused a program or an operator failed."""


class CopyDiffers(ExecError):
    """A copy of a box differs from its owner's; it was dropped, and the step was left before its commit."""


class InputsDiffer(ExecError):
    """A rank has read other samples than the rank that fed them; the step was left by all ranks, before its commit."""


class UpdateFailed(ExecError):
    """The update of a box failed, whose step is committed: this rank's state of the box is gone, and the rank ends. The
    other copies are updated by themselves, so the others go on."""


class CheckpointError(ElasWaveError):
    """A checkpoint could not be written; names the rank and the reason."""


class Excluded(ElasWaveError):
    """The other ranks go on without this one; it ends, and touches nothing of the job."""


class HasLeft(ElasWaveError):
    """This rank was told to leave the job, and is a member of it no more: an orderly end. The message tells of it."""


class JobOver(ElasWaveError):
    """Nobody goes on; the message says why."""


class CommError(ElasWaveError):
    """A link or a group could not do what was asked."""


class Aborted(CommError):
    """The ranks leave what is under way; `rank` is whom the first to notice accuses, if anybody."""

    def __init__(self, message: str, rank: int | None = None) -> None:
        super().__init__(message)
        self.rank = rank


class DeadlineExceeded(CommError):
    """An operation did not finish in its time."""


class PeerLost(CommError):
    """A peer died or its link broke; `rank` says who."""

    def __init__(self, message: str, rank: int) -> None:
        super().__init__(message)
        self.rank = rank
