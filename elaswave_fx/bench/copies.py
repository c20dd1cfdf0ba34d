"""copies: step time and bytes with a redo log in another rank's memory, with the whole state there, with none.

Model, batch and link rate are fixed in `workload.py`. Jobs take turns, one of each kind per run; a run's sample is the
median of its steps. The bytes of copies are counted where engines send records and states. Beside them stands what a
step sends in all, counted on the endpoints, more than one without copies: holders of records make parameters that they
would be sent otherwise. `state` sends a box's master and moments after every update instead of its summed gradient
before it.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch

from elaswave_fx.bench.own_job import Run, Variant, run_steps
from elaswave_fx.bench.results import Entry, Options, Outcome, paired
from elaswave_fx.bench.workload import COMPUTE_BOUND, LINK_GBIT_S, Workload, tiny

REPEATS = 20
STEPS, WARM_UP = 6, 2
"""Of each job."""

VARIANTS = {
    "none": Variant(copies=0),
    "state": Variant(copies=1, mode="state"),
    "fp32 records": Variant(copies=1),
    "bf16 records": Variant(copies=1, record="bf16"),
}
OVERHEAD_WANTED = 1 / 1.03
BYTES_WANTED = {"fp32 records": 1 / 0.34, "bf16 records": 1 / 0.17}
"""Least ratios of peer to ours."""


def run(progress: Callable[[str], None], options: Options) -> Outcome:
    """Peer: a job without copies, or one that copies the whole state."""
    torch.set_num_threads(1)
    workload = tiny(COMPUTE_BOUND) if options.tiny else COMPUTE_BOUND
    runs = _take_turns(workload, options.repeats or REPEATS, progress)
    elements = workload.elements()
    samples = {name: medians_ms(taken) for name, taken in runs.items()}
    copied = {name: [run.copied_per_step for run in taken] for name, taken in runs.items() if name != "none"}
    more = {name: runs[name][0].bytes_per_step - runs["none"][0].bytes_per_step for name in copied}
    entries = [
        *(paired(f"step with {name}, against none", samples[name], samples["none"], "ms", OVERHEAD_WANTED)
          for name in BYTES_WANTED),
        paired("step with state, against none", samples["state"], samples["none"], "ms"),
        *(paired(f"step with {name}, against state", samples[name], samples["state"], "ms") for name in BYTES_WANTED),
        *(_bytes_entry(name, copied[name], copied["state"]) for name in BYTES_WANTED),
    ]  # fmt: skip
    notes = _notes(workload, elements, {name: counts[0] for name, counts in copied.items()}, more)
    return Outcome(
        entries, (*notes, cpu_line({name: [run.cpu_s_per_step for run in taken] for name, taken in runs.items()}))
    )


def _notes(workload: Workload, elements: int, copied: dict[str, float], more: dict[str, float]) -> tuple[str, ...]:
    """What was measured, and what each kind of copy would take of a real link."""
    per_rank_ms = {name: count / workload.ranks * 8e-6 / LINK_GBIT_S for name, count in copied.items()}
    return (
        "",
        workload.text() + f"; {elements:,} parameters",
        "bytes of copies per parameter and step: "
        + ", ".join(f"{name} {count / elements:.4f}" for name, count in copied.items()),
        "sent in all per parameter and step, more than without copies: "
        + ", ".join(f"{name} {count / elements:+.4f}" for name, count in more.items()),
        f"on a link of {LINK_GBIT_S:g} Gbit/s a rank's share would take (worked out, not measured): "
        + ", ".join(f"{name} {ms:.2f} ms" for name, ms in per_rank_ms.items()),
    )


def _take_turns(workload: Workload, repeats: int, progress: Callable[[str], None]) -> dict[str, list[Run]]:
    """A job of each variant per run; another one first each time."""
    runs: dict[str, list[Run]] = {name: [] for name in VARIANTS}
    names = list(VARIANTS)
    for turn in range(repeats):
        progress(f"run {turn + 1} of {repeats}")
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            runs[name].append(run_steps(workload, VARIANTS[name], STEPS, WARM_UP))
    return runs


def cpu_line(samples: dict[str, list[float]]) -> str:
    """CPU time of a step by kind of job: what a busy machine does not change much."""
    return "CPU time of a step, all ranks, all threads (medians): " + ", ".join(
        f"{name} {1e3 * statistics.median(seconds):.1f} ms" for name, seconds in samples.items()
    )


def medians_ms(runs: list[Run]) -> list[float]:
    """A sample per run."""
    return [1e3 * statistics.median(run.seconds) for run in runs]


def _bytes_entry(name: str, ours: list[float], state: list[float]) -> Entry:
    """The state's bytes over the records'."""
    mib = 2.0**20
    return paired(
        f"bytes of copies in a step, {name}, against state",
        [count / mib for count in ours], [count / mib for count in state], "MiB", BYTES_WANTED[name],
    )  # fmt: skip
