"""Code of the user that hangs or raises is named; whoever waits for it goes on."""

import re
import threading
import time

import pytest

from elaswave_fx.data import UserCode
from elaswave_fx.errors import DataError, SampleError

PLACE = "data._target_=mine.Points"


def read(code: UserCode, what: str, call: object) -> object:
    def job() -> object:
        with code.watched(PLACE, what):
            return call()  # type: ignore[operator]

    return code.run(job)


def test_all_calls_are_made_by_one_thread() -> None:
    code = UserCode(60, DataError)
    found = {read(code, "sample 3", threading.get_ident) for _ in range(3)}
    assert len(found) == 1 and threading.get_ident() not in found


def test_a_call_that_hangs_is_named_and_so_is_every_later_one() -> None:
    code, ends = UserCode(0.2, SampleError), threading.Event()
    expected = f"{PLACE}: sample 7 has not been read after 0.2 s \\(data.deadline_s\\)"
    with pytest.raises(SampleError, match=expected) as caught:
        read(code, "sample 7", ends.wait)
    assert "ends.wait" not in str(caught.value) and "in wait" in caught.value.__notes__[0], "the note says where"
    with pytest.raises(SampleError, match=expected):
        read(code, "sample 8", int)
    ends.set()


def test_every_call_has_the_whole_deadline() -> None:
    code = UserCode(1.0, DataError)

    def job() -> None:
        for index in range(4):
            with code.watched(PLACE, f"sample {index}"):
                time.sleep(0.4)

    code.run(job)


def test_an_error_of_the_users_has_a_name_and_ours_stay_as_they_are() -> None:
    code = UserCode(60, SampleError)

    def fails(error: Exception) -> object:
        raise error

    with pytest.raises(SampleError, match=f"{PLACE}: sample 7 cannot be read \\(OSError: no disk\\)") as caught:
        read(code, "sample 7", lambda: fails(OSError("no\n disk")))
    assert isinstance(caught.value.__cause__, OSError)
    with pytest.raises(DataError, match="^as it is$"):
        read(code, "sample 7", lambda: fails(DataError("as it is")))
    with pytest.raises(ZeroDivisionError):
        code.run(lambda: 1 // 0)
    assert read(code, "sample 8", lambda: 8) == 8, "it goes on"


def test_progress_tells_what_is_read_and_changes_with_time() -> None:
    code = UserCode(60, DataError)
    assert code.progress() == ""

    def call() -> str:
        before = code.progress()
        time.sleep(1.1)
        return f"{before}, {code.progress()}"

    assert re.fullmatch(r"reads sample 7 for 0 s, reads sample 7 for [1-9]\d* s", read(code, "sample 7", call))
    assert code.progress() == ""
