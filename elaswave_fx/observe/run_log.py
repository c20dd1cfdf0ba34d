"""The log of a run: the console shows a line per event, `logs/console.log` keeps every line with the time of day.

log = RunLog("info") log.info("epoch 1: rank 2 failed (killed by SIGKILL); resumed at step 60 on ranks 0, 1, 3 in 59
ms") log.debug("epoch 1: planned in 0.2 ms: …")          # on the console with log.level=debug log.write_to(run_dir /
"logs" / "console.log")      # includes the lines so far
"""

from __future__ import annotations

import contextlib
import logging
import logging.handlers
import os
import sys
from pathlib import Path
from types import TracebackType

from rich.console import Console

from elaswave_fx.files import open_log

_FORMAT = "%(asctime)s.%(msecs)03d %(message)s"
_KEPT = 1
"""A level below every console's."""

_MOST_EARLY = 10_000
"""Maximum number of lines that wait for the run directory."""


class RunLog:
    """The launcher's lines. Neither a closed console nor a full disk ends the run."""

    def __init__(self, level: str = "info", console: Console | None = None) -> None:
        """Show lines from `level` ("debug", "info") on `console`; None: standard output."""
        self.console = console or Console(file=sys.stdout, highlight=False, soft_wrap=True)
        self._logger = logging.Logger("elaswave_fx")
        shown = _ConsoleHandler(self.console)
        shown.setLevel(level.upper())
        self._early = logging.handlers.MemoryHandler(_MOST_EARLY, flushLevel=logging.CRITICAL + 1)
        self._logger.addHandler(shown)
        self._logger.addHandler(self._early)
        self._file: _FileHandler | None = None

    def info(self, text: str) -> None:
        """Add a line for all users."""
        self._logger.info("%s", text)

    def debug(self, text: str) -> None:
        self._logger.debug("%s", text)

    def keep(self, text: str) -> None:
        """Add a line to the file only, because the user sees it elsewhere."""
        self._logger.log(_KEPT, "%s", text)

    def write_to(self, path: Path) -> None:
        """Append all lines, past and future, to a file. If it cannot be opened, a line reports it."""
        self._logger.removeHandler(self._early)
        try:
            file = os.fdopen(open_log(path), "a", encoding="utf-8", errors="backslashreplace")
        except OSError as error:
            return self.info(f"{path}: cannot be written ({error.strerror})")
        self._file = _FileHandler(file)
        self._file.setFormatter(logging.Formatter(_FORMAT, "%Y-%m-%d %H:%M:%S"))
        self._early.setTarget(self._file)
        self._early.close()
        self._logger.addHandler(self._file)

    def __enter__(self) -> RunLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is not None:
            self._logger.removeHandler(self._file)
            self._file.close()
            self._file = None


class _ConsoleHandler(logging.Handler):
    """Prints above the console's progress bar, if any."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        self._console.print(record.getMessage(), markup=False, highlight=False)


class _FileHandler(logging.StreamHandler):  # type: ignore[type-arg]
    """A file on a disk that may be full."""

    def handleError(self, record: logging.LogRecord) -> None:
        """Drop the line."""

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.stream.close()
        super().close()
