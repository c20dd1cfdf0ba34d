"""`python -m elaswave_fx.verify RUN [OTHER] [replay=STEPS]`: check a finished run.

Checks: the ledger is a chain and covers every sample once; samples, counts and random draws follow from data,
configuration and seed; losses follow from the ledger; the model file is the run's last. OTHER adds the first step and
bucket in which two runs differ. `replay=40` or `replay=40-45` computes these steps again, on one rank, from the nearest
checkpoint. Only `replay` runs code that the run's files name. It first prints the owner of the run, and refuses a run
that another user may change.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: bits depend on it

from elaswave_fx.entry import run_command
from elaswave_fx.errors import ConfigError, ElasWaveError
from elaswave_fx.ownership import refuse_others, user_name

if TYPE_CHECKING:
    from elaswave_fx.audit.finding import Finding
    from elaswave_fx.audit.record import Record

USAGE = """usage: python -m elaswave_fx.verify RUN [OTHER] [replay=STEPS]

RUN      a run directory
OTHER    another one to compare it with: the first step and bucket that differ
replay   steps to do again on one rank, from the nearest checkpoint: replay=40, or replay=40-45

Models, data and passes of yours (_target_) are code that RUN names: it is run with replay alone, and only if no other
user may change RUN. What needs it is else not checked.

Prints a line for each check: holds, WRONG (with step and place), or not checked (with the reason).
Exit code: 0 nothing is wrong, 1 something is, 2 bad input, 130 after Ctrl-C."""

_STEPS = re.compile(r"(\d+)(?:-(\d+))?")


@dataclass(frozen=True)
class Wanted:
    """The arguments of a command line."""

    run: Path
    other: Path | None = None
    steps: tuple[int, int] | None = None


def main() -> int:
    words = sys.argv[1:]
    if {"-h", "--help"}.intersection(words):
        print(USAGE)
        return 0
    wanted = read_words(words)
    count = {"holds": 0, "WRONG": 0, "not checked": 0}
    try:
        for finding in verify(wanted, _progress):
            print(finding, flush=True)
            count[finding.verdict.value] += 1
    except ElasWaveError as error:  # raised for files in the run directory
        raise ConfigError(str(error)) from error
    print(f"{wanted.run}: {', '.join(f'{number} {verdict}' for verdict, number in count.items() if number)}")
    return 1 if count["WRONG"] else 0


def read_words(words: Iterable[str]) -> Wanted:
    """Parse the command line. Raises ConfigError."""
    folders, steps = [], None
    for word in words:
        key, _, value = word.partition("=")
        if key == "replay":
            match = _STEPS.fullmatch(value)
            if match is None:
                raise ConfigError(f"{word}: is no step and no range of steps; nearest valid: replay=40-45")
            steps = int(match[1]), int(match[2] or match[1])
        elif word.startswith("-"):
            raise ConfigError(f"{word}: unknown option; see --help")
        else:
            folders.append(Path(word))
    if not 1 <= len(folders) <= 2:
        raise ConfigError(f"verify takes one or two run directories, not {len(folders)}; see --help")
    return Wanted(folders[0], folders[1] if len(folders) == 2 else None, steps)


Progress = Callable[[str, int, int], None]
"""Called with (name of the check, steps done, all steps)."""


def verify(wanted: Wanted, progress: Progress) -> Iterator[Finding]:
    """Yield each finding as soon as it is known. Raises ConfigError if a folder is no run."""
    import torch

    from elaswave_fx.audit.compare import compare
    from elaswave_fx.audit.inputs import check_inputs
    from elaswave_fx.audit.lines import check_files
    from elaswave_fx.audit.model import check_model
    from elaswave_fx.audit.program import code_of, find_program
    from elaswave_fx.audit.record import read_record
    from elaswave_fx.audit.replay import replay
    from elaswave_fx.devices.mkl import fix_branch

    torch.set_num_threads(1)
    record = read_record(wanted.run)
    other = read_record(wanted.other) if wanted.other is not None else None
    runs_code = wanted.steps is not None
    if runs_code:
        if record.exact:
            fix_branch()  # before the user's code multiplies matrices
        _say_whose(record, sorted({path for part in record.parts for path in code_of(part.config)}))
    yield from check_files(record)
    program = find_program(record.last, runs_code=runs_code)

    def lines() -> Iterator:
        for done, line in enumerate(record.lines):
            progress("inputs", done, len(record.lines))
            yield line

    yield from check_inputs(record, program, lines(), runs_code=runs_code)
    yield check_model(record, program)
    if other is not None:
        yield from compare(record, other, None if isinstance(program, str) else program.artifact)
    if wanted.steps is not None:
        yield replay(record, program, *wanted.steps, lambda done, of: progress("replay", done, of))


def _say_whose(record: Record, code: list[str]) -> None:
    """Announce the code that a replay will run. Raises `ConfigError` if another user may have changed the run."""
    if code:
        refuse_others(record.folder, str(record.folder))
        owner = user_name(record.folder.stat().st_uid)
        print(f"replay runs {', '.join(code)}, which {record.folder} of {owner} names", flush=True)


def _progress(what: str, done: int, of: int) -> None:
    """Show progress, on a terminal only."""
    if sys.stderr.isatty() and (done % 16 == 0 or done + 1 >= of):
        end = "\r" if done + 1 < of else "\r" + " " * 40 + "\r"
        print(f"{what}: step {done + 1} of {of}", end=end, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(run_command(main))
