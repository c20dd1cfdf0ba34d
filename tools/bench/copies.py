"""copies: step time and bytes with a redo log in another rank's memory, with the whole state there, with none.

Model, batch and link rate are fixed in `gpt_job.py`. Jobs take turns, one of each kind per run; a run's sample is the
median of its steps. The bytes of copies are counted where engines send records and states. Beside them stands what a
step sends in all, counted on the endpoints, more than one without copies: holders of records make parameters that they
would be sent otherwise. `state` sends a box's master and moments after every update instead of its summed gradient
before it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from tools.bench.gpt_job import COMPUTE_BOUND, LINK_GBIT_S, GptJob, tiny
from tools.bench.own_job import Variant, run_steps
from tools.bench.results import Entry, Options, Outcome, cpu_line, in_turns, medians_ms, paired

REPEATS = 20
STEPS, WARM_UP = 6, 2
"""Each job takes so many steps after those of its warm-up."""

VARIANTS = {
    "none": Variant(("copies.count=0",)),
    "state": Variant(("lab.copy_mode=state",)),
    "fp32 records": Variant(),
    "bf16 records": Variant(("copies.record=bf16",)),
}
OVERHEAD_WANTED = 1 / 1.03
BYTES_WANTED = {"fp32 records": 1 / 0.34, "bf16 records": 1 / 0.17}
"""Least ratios of peer to ours."""


def run(progress: Callable[[str], None], options: Options) -> Outcome:
    """The peer is a job without copies, or one that copies the whole state."""
    torch.set_num_threads(1)
    gpt = tiny(COMPUTE_BOUND) if options.tiny else COMPUTE_BOUND
    jobs = {name: partial(run_steps, gpt, variant, STEPS, WARM_UP) for name, variant in VARIANTS.items()}
    runs = in_turns(jobs, options.repeats or REPEATS, progress)
    elements = gpt.elements()
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
    notes = _notes(gpt, elements, {name: counts[0] for name, counts in copied.items()}, more)
    return Outcome(entries, (*notes, cpu_line(runs)))


def _notes(gpt: GptJob, elements: int, copied: dict[str, float], more: dict[str, float]) -> tuple[str, ...]:
    """Say what was measured, and what each kind of copy would take of a real link."""
    per_rank_ms = {name: count / gpt.ranks * 8e-6 / LINK_GBIT_S for name, count in copied.items()}
    return (
        "",
        gpt.text() + f"; {elements:,} parameters",
        "bytes of copies per parameter and step: "
        + ", ".join(f"{name} {count / elements:.4f}" for name, count in copied.items()),
        "sent in all per parameter and step, more than without copies: "
        + ", ".join(f"{name} {count / elements:+.4f}" for name, count in more.items()),
        f"on a link of {LINK_GBIT_S:g} Gbit/s a rank's share would take (worked out, not measured): "
        + ", ".join(f"{name} {ms:.2f} ms" for name, ms in per_rank_ms.items()),
    )


def _bytes_entry(name: str, ours: list[float], state: list[float]) -> Entry:
    """Compare the state's bytes with the records'."""
    mib = 2.0**20
    return paired(
        f"bytes of copies in a step, {name}, against state",
        [count / mib for count in ours], [count / mib for count in state], "MiB", BYTES_WANTED[name],
    )  # fmt: skip
