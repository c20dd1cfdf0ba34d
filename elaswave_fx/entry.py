"""The end of every command: an exit code, and one line for each error.

    sys.exit(run_command(main))
    error: [Errno 28] No space left on device: … (OSError, …/compile.py, line 40); the traceback is in /tmp/…     code 1

An `ElasWaveError` is printed as its message. Any other exception is a bug or an unforeseen environment: its traceback
goes to a file that the user can report.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from elaswave_fx.errors import ConfigError, ElasWaveError
from elaswave_fx.launch.console import lasting_console
from elaswave_fx.launch.stop import SIGNALLED

DONE = 0
"""The command did what it was asked for; of a run: all steps are committed, each once in the ledger, whichever ranks
failed."""

FAILED = 1
"""Anything else, also a fault of `faults` that never fired, or no step that changed a parameter; the last line has the
reason. `verify`: something is wrong."""

REFUSED = 2
"""The configuration, the model or the data cannot work; one line names the cause and the nearest valid value."""

_UTF8 = "PYTHONUTF8"


@dataclass(frozen=True)
class End:
    """The exit code of a command; `line`: the error, unless the command has printed it itself."""

    code: int
    line: str = ""


def run_command(command: Callable[[], int]) -> int:
    """Run a command and return its exit code; errors go to standard error. Must be all that this process does."""
    _speak_utf8()
    with lasting_console():
        end = end_of(command)
        say(end)
    _let_go_of_console()
    return end.code


def say(end: End) -> None:
    if end.line:
        print(f"error: {end.line}", file=sys.stderr, flush=True)


def end_of(command: Callable[[], int], folder: Path | None = None) -> End:
    """Call a command. The traceback of an unforeseen error goes to `folder`, or to the folder for temporary files."""
    try:
        return End(command())
    except KeyboardInterrupt:
        return End(SIGNALLED + signal.SIGINT, "interrupted")
    except ConfigError as error:
        return End(REFUSED, one_line(error))
    except ElasWaveError as error:
        return End(FAILED, one_line(error))
    except Exception as error:  # noqa: BLE001 - the last handler
        return End(FAILED, unforeseen(error, folder))


def one_line(error: BaseException) -> str:
    """The message of an exception, or its type if it has none."""
    return " ".join(str(error).split()) or type(error).__name__


def unforeseen(error: BaseException, folder: Path | None = None) -> str:
    """The message of an exception and where it was raised, in one line that names the file with its traceback."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f", {frames[-1].filename}, line {frames[-1].lineno}" if frames else ""
    words = "".join(traceback.format_exception(error))
    for home in (folder, None):
        with contextlib.suppress(OSError, UnicodeError):
            number, path = tempfile.mkstemp(".txt", "traceback-", home)
            with open(number, "w", encoding="utf-8", errors="backslashreplace") as file:
                file.write(words)
            return f"{one_line(error)} ({type(error).__name__}{place}); the traceback is in {path}"
    return f"{one_line(error)} ({type(error).__name__}{place}); no folder takes a file with the traceback"


def _speak_utf8() -> None:
    """Restart in UTF-8 if the locale selects another encoding. Names of files, parameters and units are Unicode; native
    code and our files use UTF-8."""
    if sys.getfilesystemencoding() == "utf-8" or os.environ.get(_UTF8) == "1":
        return
    os.environ[_UTF8] = "1"  # inherited by child processes
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def _let_go_of_console() -> None:
    """Flush, or drop what a closed console does not take: otherwise Python's own exit fails on it."""
    for number, stream in ((1, sys.stdout), (2, sys.stderr)):
        try:
            if stream is not None:
                stream.flush()
        except (OSError, ValueError):
            with contextlib.suppress(OSError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), number)
