"""pipeline: training steps against torch.distributed.pipelining, Schedule1F1B over gloo, two and four stages.

The same GPT, weights, data, AdamW, micro-batches and one pipeline on both sides, a process with one thread per stage,
no clipping. Ours without copies, heartbeats and ledger, since the peer has nothing like them, with links over
shared memory, as ranks of one host have them, and, apart, over TCP as gloo's. Jobs take turns; a run's sample is the
median of its steps. The losses of all must be equal, or the benchmark fails.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch

from tools.bench.gpt_job import PIPELINE_LARGE, PIPELINE_SMALL, GptJob
from tools.bench.own_job import Run, Variant, run_steps
from tools.bench.pipeline_torch import pipelining_steps
from tools.bench.processes import BenchFailed
from tools.bench.results import Entry, Options, Outcome, Steps, cpu_line, in_turns, medians_ms, paired

REPEATS = 20
STAGES = (2, 4)
STEPS = {PIPELINE_SMALL.width: (20, 5), PIPELINE_LARGE.width: (3, 1)}
"""Width -> steps that count, and those before them that do not."""

WANTED = {PIPELINE_SMALL.width: 1.3, PIPELINE_LARGE.width: 1.0}
LOSS_TOLERANCE = 1e-4
ALONE = Variant(("copies.count=0",), guarded=False)


def run(progress: Callable[[str], None], options: Options) -> Outcome:
    """All widths and depths."""
    torch.set_num_threads(1)
    entries, lines = [], []
    for base in (PIPELINE_SMALL, PIPELINE_LARGE):
        for stages in STAGES:
            gpt = replace(base, ranks=stages, stages=stages, ranks_per_host=stages)
            if options.tiny:
                gpt = replace(gpt, layers=4, width=16, seq_len=16, global_batch=8, micro_batch=1)
            name = f"width {gpt.width}, {stages} stages"
            found, cpu = _compare(name, gpt, base, options, progress)
            entries += found
            lines += [gpt.text(), "  " + cpu]
    return Outcome(entries, ("", *lines))


def _compare(
    name: str, gpt: GptJob, base: GptJob, options: Options, progress: Callable[[str], None]
) -> tuple[list[Entry], str]:
    """Return the entries, and a line on CPU time. Raises BenchFailed where losses differ."""
    steps, warm_up = (2, 1) if options.tiny else STEPS[base.width]
    sides: dict[str, Callable[[], Steps]] = {
        "shm": partial(_ours, gpt, steps, warm_up),
        "tcp": partial(_ours, replace(gpt, ranks_per_host=1), steps, warm_up),
        "torch": partial(pipelining_steps, gpt, steps, warm_up),
    }
    jobs = in_turns(sides, options.repeats or REPEATS, progress, f"{name}, run")
    for turn in zip(*jobs.values(), strict=True):
        check_losses({side: job.losses for side, job in zip(jobs, turn, strict=True)})
    samples = {side: medians_ms(found) for side, found in jobs.items()}
    entries = [
        paired(name, samples["shm"], samples["torch"], "ms", WANTED[base.width]),
        paired(f"{name}, ours over TCP", samples["tcp"], samples["torch"], "ms"),
    ]
    return entries, cpu_line(jobs)


def _ours(gpt: GptJob, steps: int, warm_up: int) -> Run:
    """Run a job of ours, with as many micro-batches as the peer's. Raises BenchFailed."""
    assert gpt.micro_batch is not None
    done, wanted = run_steps(gpt, ALONE, steps, warm_up), gpt.global_batch // gpt.micro_batch
    found = {len(tile.micro_batches) for tile in done.plan.tiles}
    if found != {wanted}:
        raise BenchFailed(f"pipeline: our ranks have {sorted(found)} micro-batches, the peer's {wanted}")
    return done


def check_losses(losses: dict[str, Sequence[float]]) -> None:
    """Check that all sides have trained the same model on the same data. Raises BenchFailed."""
    for step, values in enumerate(zip(*losses.values(), strict=True)):
        if not all(abs(value - values[0]) <= LOSS_TOLERANCE for value in values):
            said = ", ".join(f"{side} {value:.6f}" for side, value in zip(losses, values, strict=True))
            raise BenchFailed(f"pipeline: the losses of step {step} differ: {said}")
