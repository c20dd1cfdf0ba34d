"""A launcher console that may disappear: training does not end when its output cannot be written.

with lasting_console():
    print("…")      # dropped once the terminal is closed, the pipe's reader has ended, or the disk is full
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
    """A text stream that ignores failures to write; everything else is the stream's own."""

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
    """Make writes to standard output and error never fail, and reserve their descriptors."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:  # `>&-`: otherwise the next opened file would become the console.
            os.open(os.devnull, os.O_RDWR)
    before = sys.stdout, sys.stderr
    with open(os.devnull, "w", encoding="utf-8") as nowhere:
        for stream in before:
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(errors="backslashreplace")  # PYTHONIOENCODING may be ASCII
        sys.stdout, sys.stderr = (_BestEffort(stream or nowhere) for stream in before)  # type: ignore[assignment]
        try:
            yield
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            sys.stdout, sys.stderr = before
