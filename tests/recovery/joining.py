"""Processes that join a run that trains, as users start them, each with a log of its own beside the run.

with Joining(job) as joining:
    joiner = joining.start();  …;  joiner.kill()
"""

from __future__ import annotations

import re
import signal
from pathlib import Path
from types import TracebackType

from tests.commands import Command
from tests.recovery.harness import Job

ROOT = Path(__file__).resolve().parents[2]
END_S = 60.0
_RANK = re.compile(rb"^rank (\d+) gets ready$", re.MULTILINE)


class Joiner:
    """One process. `was_told`: to leave."""

    def __init__(self, folder: Path, number: int) -> None:
        self._log = folder / f"joiner-{number}.log"
        self.was_told = self.was_killed = False
        self.process = Command("elaswave_fx.worker", str(folder), log=self._log)

    @property
    def rank(self) -> int | None:
        """The number that it has, if it came so far; another one after it has joined anew."""
        found = _RANK.findall(self._log.read_bytes())
        return int(found[-1]) if found else None

    @property
    def has_ended(self) -> bool:
        """Whether its process has."""
        return self.process.poll() is not None

    @property
    def said(self) -> str:
        """Its whole log."""
        return self._log.read_text(errors="replace")

    def kill(self) -> None:
        """By SIGKILL."""
        self.was_killed = True
        self.process.kill()

    def tell_to_leave(self, *numbers: signal.Signals) -> None:
        """By SIGTERM, or by these."""
        self.was_told = True
        for number in numbers or (signal.SIGTERM,):
            self.process.send_signal(number)


class Joining:
    """As a context: none of the processes survives the block."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self.joiners: list[Joiner] = []

    def __enter__(self) -> Joining:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for each in self.joiners:
            each.process.kill()
            each.process.wait()

    def start(self) -> Joiner:
        """One more."""
        self.joiners.append(Joiner(self._job.folder, len(self.joiners)))
        return self.joiners[-1]

    def members(self) -> set[int]:
        """The ranks of those that have become members."""
        joined = {event["rank"] for event in self._job.events("joined")}
        return joined & {each.rank for each in self.joiners if each.rank is not None}

    def await_ends(self) -> None:
        """The run is over: they end by themselves, also those for which it was over too soon."""
        for each in self.joiners:
            code = each.process.wait(timeout=END_S)
            is_over = "has finished it" in each.said or "no coordinator of the job has answered" in each.said
            ends_well = code in (0, 2) or (code == 1 and is_over)
            assert each.was_killed or ends_well, f"exit code {code}, in {self._job.folder}:\n{each.said}"
