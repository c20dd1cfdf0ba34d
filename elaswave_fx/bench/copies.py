"""copies: step time and bytes with a redo log in another rank's memory, against none.

Model, batch and link rate are fixed in `workload.py`. Jobs take turns, one of each kind per run; a run's sample is the
median of its steps. Bytes are counted on the endpoints: what a step sends with copies, less what it sends without.
The bytes of the state are worked out, not measured: master and two moments in fp32, 12 bytes per parameter and step.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch

from elaswave_fx.bench.own_job import Program, Run, Variant
from elaswave_fx.bench.results import Entry, Options, Outcome, paired
from elaswave_fx.bench.workload import COMPUTE_BOUND, LINK_GBIT_S, tiny

REPEATS = 20
STEPS, WARM_UP = 6, 2
"""Of each job."""

STATE_BYTES = 12.0
"""Per parameter."""

VARIANTS = {
    "none": Variant(copies=0),
    "fp32 records": Variant(copies=1),
    "bf16 records": Variant(copies=1, record="bf16"),
}
OVERHEAD_WANTED = 1 / 1.03
BYTES_WANTED = {"fp32 records": 1 / 0.34, "bf16 records": 1 / 0.17}
"""Least ratios of peer to ours."""


def run(progress: Callable[[str], None], options: Options) -> Outcome:
    """Peer: a job without copies for times, the whole state for bytes."""
    torch.set_num_threads(1)
    workload = tiny(COMPUTE_BOUND) if options.tiny else COMPUTE_BOUND
    with Program(workload) as program:
        runs = take_turns(program, VARIANTS, options.repeats or REPEATS, STEPS, WARM_UP, progress)
        elements = program.elements()
    samples = {name: medians_ms(taken) for name, taken in runs.items()}
    logs = [name for name in VARIANTS if name != "none"]
    without = runs["none"][0].bytes_per_step
    extra = {name: runs[name][0].bytes_per_step - without for name in logs}
    entries = [
        paired(f"step with {name}, against none", samples[name], samples["none"], "ms", OVERHEAD_WANTED)
        for name in logs
    ]
    entries += [_bytes_entry(name, extra[name], STATE_BYTES * elements) for name in logs]
    wire_ms = {name: extra[name] / workload.ranks * 8e-6 / LINK_GBIT_S for name in logs}
    return Outcome(
        entries,
        (
            "",
            workload.text() + f"; {elements:,} parameters",
            "state bytes are worked out (12 per parameter and step), record bytes are counted",
            "on a link of "
            + f"{LINK_GBIT_S:g} Gbit/s each rank's records would take (worked out) "
            + ", ".join(f"{ms:.2f} ms ({name})" for name, ms in wire_ms.items())
            + " of a step, sent under the backward pass",
        ),
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


def medians_ms(runs: list[Run]) -> list[float]:
    """A sample per run."""
    return [1e3 * statistics.median(run.seconds) for run in runs]


def _bytes_entry(name: str, ours: float, state: float) -> Entry:
    """The state's bytes over the records'."""
    mib = 2.0**20
    return Entry(
        f"bytes of a step, {name}, against the state", state / ours, ours / mib, state / mib, "MiB", 1,
        target=BYTES_WANTED[name],
    )  # fmt: skip
