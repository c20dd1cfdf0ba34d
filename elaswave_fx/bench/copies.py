"""copies: step time and bytes with a redo log in another rank's memory, with the whole state there, with none.

Model, batch and link rate are fixed in `workload.py`. Jobs take turns, one of each kind per run; a run's sample is the
median of its steps. Bytes are counted on the endpoints: what a step sends with copies, less what it sends without.
`state` sends a box's master and moments after every update instead of its summed gradient before it.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch

from elaswave_fx.bench.own_job import Program, Run, Variant
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
    with Program(workload) as program:
        runs = take_turns(program, VARIANTS, options.repeats or REPEATS, STEPS, WARM_UP, progress)
        elements = program.elements()
    samples = {name: medians_ms(taken) for name, taken in runs.items()}
    sent = {name: [run.bytes_per_step for run in taken] for name, taken in runs.items()}
    extra = {name: [a - b for a, b in zip(sent[name], sent["none"], strict=True)] for name in runs}
    entries = [
        *(paired(f"step with {name}, against none", samples[name], samples["none"], "ms", OVERHEAD_WANTED)
          for name in BYTES_WANTED),
        paired("step with state, against none", samples["state"], samples["none"], "ms"),
        *(paired(f"step with {name}, against state", samples[name], samples["state"], "ms") for name in BYTES_WANTED),
        *(_bytes_entry(name, extra[name], extra["state"]) for name in BYTES_WANTED),
    ]  # fmt: skip
    notes = _notes(workload, elements, {name: extra[name][0] for name in runs if name != "none"})
    return Outcome(
        entries, (*notes, cpu_line({name: [run.cpu_s_per_step for run in taken] for name, taken in runs.items()}))
    )


def _notes(workload: Workload, elements: int, extra: dict[str, float]) -> tuple[str, ...]:
    """What was measured, and what each kind of copy would take of a real link."""
    per_rank_ms = {name: count / workload.ranks * 8e-6 / LINK_GBIT_S for name, count in extra.items()}
    return (
        "",
        workload.text() + f"; {elements:,} parameters",
        "bytes per parameter and step: " + ", ".join(f"{n} {count / elements:.4f}" for n, count in extra.items()),
        f"on a link of {LINK_GBIT_S:g} Gbit/s a rank's share would take (worked out, not measured): "
        + ", ".join(f"{name} {ms:.2f} ms" for name, ms in per_rank_ms.items()),
    )


def take_turns(
    program: Program,
    variants: dict[str, Variant],
    repeats: int,
    steps: int,
    warm_up: int,
    progress: Callable[[str], None],
) -> dict[str, list[Run]]:
    """A job of each variant per run; another one first each time."""
    runs: dict[str, list[Run]] = {name: [] for name in variants}
    names = list(variants)
    for turn in range(repeats):
        progress(f"run {turn + 1} of {repeats}")
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            runs[name].append(program.run(variants[name], steps, warm_up))
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
        f"bytes of a step, {name}, against state", [count / mib for count in ours], [count / mib for count in state],
        "MiB", BYTES_WANTED[name],
    )  # fmt: skip
