"""The launcher's console as something that may go away: nobody's training ends because nobody reads of it.

with lasting_console():
    print("…")      # goes nowhere once the terminal is closed, the pipe's reader gone, or the disk full
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO


class _BestEffort:
    """A text stream whose failures to write are passed over; all else is the stream's own."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError, ValueError):
            return self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def lasting_console() -> Iterator[None]:
    """Have standard output and error never fail, and their descriptors never be anything else's."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:  # `>&-`: the next file that is opened would be taken for the console.
            os.open(os.devnull, os.O_RDWR)
    before = sys.stdout, sys.stderr
    with open(os.devnull, "w", encoding="utf-8") as nowhere:
        for stream in before:
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(errors="backslashreplace")  # PYTHONIOENCODING may say ASCII
        sys.stdout, sys.stderr = (_BestEffort(stream or nowhere) for stream in before)  # type: ignore[assignment]
        try:
            yield
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            sys.stdout, sys.stderr = before
