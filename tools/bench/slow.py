"""slow: one of eight emulated ranks at half of its speed, from a step on, and again at its whole; and a busy machine.

The first run is one of `train`, data parallel, whose rank `VICTIM` is slow for a while. What counts is how many steps
pass until the plan has less work for it, and the steps after that against proportional: the undisturbed step of the
same run, times ranks over the sum of their speeds. The second run computes, on this machine, beside as many processes
that spin as it has cores: no plan may change.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from tools.bench.gpt_job import COMPUTE_BOUND, EmulatedLanes, tiny
from tools.bench.processes import BenchFailed
from tools.bench.results import Entry, Options, Outcome
from tools.bench.whole_run import lines_of, run_folder

RANKS, VICTIM, SPEED = 8, 3, 0.5
MICRO_BATCHES, STEP_S = 6, 0.3
"""Of a lane: 24 granules, so that shares of half of one can be met. A step is as short as many are here."""

STEPS, TINY_STEPS = (20, 60, 40), (6, 30, 4)
"""Before the rank is slow, while it is, and after that."""

MOST_STEPS, PROPORTIONAL = 20, 0.95
OVERLOADED_STEPS = 5000


def run(progress: Callable[[str], None], options: Options) -> Outcome:
    """A slow rank, and none."""
    steps, overloaded = (TINY_STEPS, 20) if options.tiny else (STEPS, OVERLOADED_STEPS)
    entries: list[Entry] = []
    progress(f"rank {VICTIM} of {RANKS} at {SPEED:g} of its speed")
    entries += _slow(*steps)
    progress(f"{overloaded} steps on a busy machine")
    entries.append(_overloaded(overloaded))
    return Outcome(entries, _NOTES)


_NOTES = (
    "",
    f"proportional: the undisturbed step of the same run, times {RANKS} over {RANKS - 1 + SPEED:g}",
    "steps until less work: from the first slow step to the first one of the new plan; until its share again: from the",
    "first step at the old speed; left out where the run ended before",
)


def _slow(before: int, slow_steps: int, after: int) -> Iterator[Entry]:
    lanes = EmulatedLanes(RANKS, 1, MICRO_BATCHES, layers=2, step_s=STEP_S)
    until = before + slow_steps
    fault = f"{{step: {before}, rank: {VICTIM}, kind: slow, speed: {SPEED}, steps: {slow_steps}}}"
    words = (*lanes.words, f"steps={until + after}", f"faults=[{fault}]")
    with run_folder(lanes.gpt.config(*words)) as folder:
        lines, events = lines_of(folder / "metrics.jsonl"), lines_of(folder / "events.jsonl")
    changes = [_first_step(lines, event["epoch"]) for event in events if event["kind"] == "slowed"]
    if not changes:
        raise BenchFailed(f"slow: no plan had less work for rank {VICTIM} in {slow_steps} steps")
    less, *again = changes
    whole_ms = _median_ms(lines[2:before])
    yield _steps("steps until less work", less - before)
    wanted_ms = whole_ms * RANKS / (RANKS - 1 + SPEED)
    shared_ms = _median_ms(lines[less + 1 : until])
    count = until - less - 1
    yield Entry(
        "a step with less work: proportional",
        wanted_ms / shared_ms,
        shared_ms,
        wanted_ms,
        "ms",
        count,
        target=PROPORTIONAL,
    )
    held_up_ms = _median_ms(lines[before + 1 : less])
    yield Entry("a step with less work: as it was before", held_up_ms / shared_ms, shared_ms, held_up_ms, "ms", count)
    if again:
        yield _steps("steps until its share again", again[0] - until)


def _steps(name: str, taken: int) -> Entry:
    return Entry(name, MOST_STEPS / max(1, taken), float(taken), float(MOST_STEPS), "steps", 1, target=1.0)


def _first_step(lines: Sequence[dict[str, Any]], epoch: int) -> int:
    return next(line["step"] for line in lines if line["epoch"] == epoch)


def _median_ms(lines: Sequence[dict[str, Any]]) -> float:
    return statistics.median(line["step_ms"] for line in lines) if lines else float("nan")


def _overloaded(steps: int) -> Entry:
    """Plans that have changed, of which none is wanted: as many as one more than there were."""
    gpt = tiny(COMPUTE_BOUND)
    with _spinning(os.cpu_count() or 1), run_folder(gpt.config(f"steps={steps}")) as folder:
        slowed = [event for event in lines_of(folder / "events.jsonl") if event["kind"] == "slowed"]
        ms = _median_ms(lines_of(folder / "metrics.jsonl"))
    found = 1.0 + len(slowed)
    name = f"plans of {steps} steps of {ms:.3g} ms on a busy machine"
    return Entry(name, 1.0 / found, found, 1.0, "plans", 1, target=1.0)


@contextmanager
def _spinning(count: int) -> Iterator[None]:
    """Processes that do nothing else, one at least for each core."""
    spin = "\nwhile True:\n    pass\n"
    processes = [subprocess.Popen([sys.executable, "-c", spin]) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()
