"""Which of several failures is shown, and in which words."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from elaswave_fx import errors
from elaswave_fx.launch.failure import Failure, cause_of, describe_exit, from_exit, from_message
from elaswave_fx.launch.process import error_fields

LOST_BY_0 = Failure("rank-0", "gone", classes=("PeerLost", "CommError"), lost_rank=2)
LOST_BY_1 = Failure("rank-1", "gone", classes=("PeerLost", "CommError"), lost_rank=2)
LATE = Failure("rank-2", "too late", classes=("DeadlineExceeded", "CommError"))
KILLED = Failure("rank-2", "killed by SIGKILL")


@pytest.mark.parametrize(
    ("failures", "cause"),
    [
        ([LOST_BY_0, LOST_BY_1, KILLED], KILLED),
        ([LOST_BY_0, LATE, LOST_BY_1], LATE),
        ([LOST_BY_0, LOST_BY_1], LOST_BY_0),
        ([KILLED, LOST_BY_0], KILLED),
    ],
)
def test_the_cause_is_what_others_follow_from(failures: list[Failure], cause: Failure) -> None:
    assert cause_of(failures) is cause


@pytest.mark.parametrize(
    ("error", "alone"),
    [
        (errors.Excluded("the job went on"), True),
        (errors.UpdateFailed("box 3: its update failed"), True),
        (errors.ExecError("program forward: an operator failed"), False),
        (ZeroDivisionError("in the model"), False),
    ],
)
def test_an_error_that_would_come_again_is_not_the_ranks_alone(error: Exception, alone: bool) -> None:
    assert from_message("rank-1", error_fields(error), Path("log")).costs_the_rank_alone is alone


@pytest.mark.parametrize(
    ("status", "words"),
    [
        (signal.SIGSEGV, "killed by SIGSEGV"),
        (signal.SIGKILL, "killed by SIGKILL (by someone, or by the system when memory ran out)"),
        (3 << 8, "exited with code 3"),
        (0, "exited before its work was done"),
    ],
)
def test_exits_in_words(status: int, words: str) -> None:
    assert describe_exit(status) == words


def test_errors_come_back_as_their_class_when_the_user_can_mend_them() -> None:
    def back(error: Exception) -> Failure:
        return from_message("rank-0", error_fields(error), Path("RUN/log"))

    mended = back(errors.CaptureError("aten::nonzero in block.3")).expected()
    assert type(mended) is errors.CaptureError
    assert str(mended) == "aten::nonzero in block.3"

    class OwnError(errors.ConfigError):
        """Not known by name to the launcher."""

    assert type(back(OwnError("x")).expected()) is errors.ConfigError
    assert back(errors.ExecError("x")).expected() is None
    assert back(KeyError("k")).reason == "rank 0: KeyError: 'k'"
    assert back(KeyError("k")).line == "rank 0: KeyError: 'k'; the traceback is in RUN/log"
    assert back(errors.SampleError("mine.Points: sample 7 hangs")).reason == "rank 0: mine.Points: sample 7 hangs"
    over = back(errors.JobOver("all replicas are lost"))
    assert (over.reason, over.line) == ("all replicas are lost", "all replicas are lost")
    lost = back(errors.PeerLost("gone", rank=3))
    assert (lost.follows, lost.lost_rank) == (True, 3)


def test_the_last_words_of_a_child_are_named_if_there_are_any(tmp_path: Path) -> None:
    log = tmp_path / "rank-0.log"
    assert from_exit("rank-0", signal.SIGSEGV, log).line == "rank 0: killed by SIGSEGV"
    log.write_text("Fatal Python error: Segmentation fault\n")
    assert from_exit("rank-0", signal.SIGSEGV, log).line == f"rank 0: killed by SIGSEGV; its last words are in {log}"
