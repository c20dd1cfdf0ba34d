"""startup: seconds from the command to the first step of the demo, and the memory of a rank against its parts.

Cold: no cache folder, so that the model is captured and compiled. Warm: the same command again. The clock begins before
the interpreter is started and ends when the first line stands in metrics.jsonl; the parts are told by what the command
prints. There is no peer: its column holds the most that is wanted, or the sum of the parts.

Memory: the peak of a rank's resident set (VmHWM, reset after the fork) against that of an idle rank, one that trains
next to nothing (interpreter, libraries, links), and what the plan expects beyond (`plan/predict/memory.py`).
"""

from __future__ import annotations

import re
import select
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from elaswave_fx.plan.predict.memory import memory_of
from tools.bench.gpt_job import MEMORY, GptJob, tiny
from tools.bench.own_job import Variant, run_steps
from tools.bench.processes import TEST_TIMEOUT_S, BenchFailed
from tools.bench.results import Entry, Options, Outcome, medians, p95

REPEATS = 5
WANTED_S = {"cold": 12.0, "warm": 6.0}
WANTED_MEMORY = 1.15
STEPS = 4
_RECIPE = ("recipe=lose_one_rank", "faults=[]")
_TINY = ("model.layers=2", "model.width=16", "seq_len=16", "data.limit_mb=1")
_LOOK_EVERY_S = 0.002
_MIB = 2.0**20


Start = tuple[float, dict[str, float]]
"""One start: the seconds from the command to its first step, and what they consist of."""


def run(progress: Callable[[str], None], options: Options) -> Outcome:
    """Cold and warm starts in pairs, then one job for the memory."""
    torch.set_num_threads(1)
    repeats = options.repeats or REPEATS
    overrides = (*_RECIPE, *(_TINY if options.tiny else ()))
    starts: dict[str, list[Start]] = {name: [] for name in WANTED_S}
    for turn in range(repeats):
        progress(f"start {turn + 1} of {repeats}")
        with tempfile.TemporaryDirectory(prefix="elaswave-bench-") as folder:
            for name in starts:
                starts[name].append(start(Path(folder), name, overrides))
    progress("memory")
    entry, line = _memory_entry(replace(tiny(MEMORY), layers=2) if options.tiny else MEMORY)
    return Outcome([*(_start_entry(name, found) for name, found in starts.items()), entry], ("", line))


def _start_entry(name: str, starts: Sequence[Start]) -> Entry:
    (seconds, parts), limit = zip(*starts, strict=True), WANTED_S[name]
    ours = statistics.median(seconds)
    return Entry(
        f"{name} start", limit / ours, ours, limit, "s", len(seconds), p95(seconds), target=1.0, parts=medians(parts)
    )


# --- Start-up


def start(folder: Path, name: str, overrides: Sequence[str]) -> Start:
    """Run the command until its first step. Raises BenchFailed."""
    run_dir, log = folder / f"run-{name}", folder / f"{name}.log"
    metrics = run_dir / "metrics.jsonl"
    command = [
        sys.executable, "-m", "elaswave_fx.train", *overrides, f"cache.dir={folder / 'cache'}",
        f"hydra.run.dir={run_dir}",
    ]  # fmt: skip
    with log.open("w") as errors:
        began = time.monotonic()
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors)
        try:
            said, first = _listen(process, metrics, began + TEST_TIMEOUT_S)
            process.send_signal(signal.SIGTERM)
            process.communicate(timeout=TEST_TIMEOUT_S)
        finally:
            process.kill()
            process.wait()
    if first is None:
        raise BenchFailed(f"startup: {' '.join(command)} took no step\n{log.read_text()[-2000:]}")
    return first - began, parts_of(said, began, first)


def _listen(
    process: subprocess.Popen[bytes], metrics: Path, end: float
) -> tuple[list[tuple[float, str]], float | None]:
    """Return the lines with when they came, until there is a first step, and when that was."""
    assert process.stdout is not None
    output, said, rest = process.stdout.fileno(), [], b""
    while process.poll() is None and time.monotonic() < end:
        ready, _, _ = select.select([output], [], [], _LOOK_EVERY_S)
        now = time.monotonic()
        if metrics.is_file() and metrics.stat().st_size:
            return said, now
        if ready:
            *lines, rest = (rest + process.stdout.read1()).split(b"\n")  # type: ignore[union-attr]
            said += [(now, line.decode()) for line in lines]
    return said, None


def parts_of(said: Sequence[tuple[float, str]], began: float, first: float) -> dict[str, float]:
    """Return what the seconds from `began` to `first` were spent on, by the lines and when they came.

    The builder's line says itself what its parts took; what it does not name is planning, and forking the builder.
    """
    building = next(at for at, line in said if line == "building")
    built, program = next((at, line) for at, line in said if line.startswith("program "))
    starting = next(at for at, line in said if line.startswith("starting "))
    laps = {name.strip(): float(seconds) for name, seconds in re.findall(r"([a-z ]+) (\d+\.\d+) s", program)}
    compiled = {name: laps.get(name, 0.0) for name in ("data", "model", "capture and passes", "measuring")}
    return {
        "interpreter and imports": building - began,
        **compiled,
        "plan": built - building - sum(compiled.values()),
        "fork": starting - built,
        "links, engine, first step": first - starting,
    }


# --- Memory


def _memory_entry(gpt: GptJob) -> tuple[Entry, str]:
    """Take the rank whose peak is highest against its parts."""
    idle = run_steps(tiny(gpt), Variant(), STEPS, 1).resident
    run = run_steps(gpt, Variant(), STEPS, 1)
    resident, expected = run.resident, [memory_of(run.plan, rank) for rank in run.plan.ranks]
    over = [
        found.peak_bytes / (small.peak_bytes + parts.total)
        for found, small, parts in zip(resident, idle, expected, strict=True)
    ]
    rank = over.index(max(over))
    found, small, needed = resident[rank], idle[rank].peak_bytes, expected[rank]
    parts = {
        "idle": small, "parameters": needed.params, "gradients": needed.grads, "state and copies": needed.state,
        "activations": needed.saved, "arriving": needed.received,
    }  # fmt: skip
    entry = Entry(
        "memory of a rank", 1 / over[rank], found.peak_bytes / _MIB, (small + needed.total) / _MIB, "MiB", 1,
        target=1 / WANTED_MEMORY, parts={name: size / _MIB for name, size in parts.items()},
    )  # fmt: skip
    strict = found.peak_bytes / (found.forked_bytes + needed.total)
    return entry, (
        f"memory: {gpt.text()}; {over[rank]:.3f}x the sum of the parts; without an idle rank in both "
        f"{(found.peak_bytes - small) / max(1, needed.total):.3f}x; with what a rank has right after its fork, "
        f"{found.forked_bytes / _MIB:.0f} MiB, as the idle one {strict:.3f}x"
    )
