"""pipeline: training steps against torch.distributed.pipelining, Schedule1F1B over gloo, two and four stages.

The same GPT, weights, data, AdamW, micro-batches and one pipeline on both sides, a process with one thread per stage,
no clipping. Ours without copies, heartbeats and ledger, since the peer has nothing like them, with links over
shared memory, as ranks of one host have them, and, apart, over TCP as gloo's. Jobs take turns; a run's sample is the
median of its steps. The losses of all must be equal, or the benchmark fails.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from elaswave_fx.bench.copies import cpu_line
from elaswave_fx.bench.own_job import Run, Variant, run_steps
from elaswave_fx.bench.pipeline_torch import PeerRun, pipelining_steps
from elaswave_fx.bench.processes import BenchFailed
from elaswave_fx.bench.results import Entry, Options, Outcome, paired
from elaswave_fx.bench.workload import PIPELINE_LARGE, PIPELINE_SMALL, Workload

REPEATS = 20
STAGES = (2, 4)
STEPS = {PIPELINE_SMALL.width: (20, 5), PIPELINE_LARGE.width: (3, 1)}
"""Width -> steps that count, and those before them that do not."""

WANTED = {PIPELINE_SMALL.width: 1.3, PIPELINE_LARGE.width: 1.0}
LOSS_TOLERANCE = 1e-4
ALONE = Variant(copies=0, guarded=False)


def run(progress: Callable[[str], None], options: Options) -> Outcome:
    """All widths and depths."""
    torch.set_num_threads(1)
    entries, lines = [], []
    for base in (PIPELINE_SMALL, PIPELINE_LARGE):
        for stages in STAGES:
            workload = replace(base, ranks=stages, stages=stages, ranks_per_host=stages)
            if options.tiny:
                workload = replace(workload, layers=4, width=16, seq_len=16, global_batch=8, micro_batch=1)
            name = f"width {workload.width}, {stages} stages"
            found, cpu = _compare(name, workload, base, options, progress)
            entries += found
            lines += [workload.text(), "  " + cpu]
    return Outcome(entries, ("", *lines))


def _compare(
    name: str, workload: Workload, base: Workload, options: Options, progress: Callable[[str], None]
) -> tuple[list[Entry], str]:
    """The entries, and a line on CPU time."""
    steps, warm_up = (2, 1) if options.tiny else STEPS[base.width]
    repeats = options.repeats or REPEATS
    samples: dict[str, list[float]] = {}
    cpu: dict[str, list[float]] = {}
    sides: dict[str, Callable[[], Run | PeerRun]] = {
        "shm": lambda: _ours(workload, steps, warm_up),
        "tcp": lambda: _ours(replace(workload, ranks_per_host=1), steps, warm_up),
        "torch": lambda: pipelining_steps(workload, steps, warm_up),
    }
    names = list(sides)
    for turn in range(repeats):
        progress(f"{name}, run {turn + 1} of {repeats}")
        losses = {}
        first = turn % len(names)
        for side in names[first:] + names[:first]:
            done = sides[side]()
            losses[side] = done.losses
            samples.setdefault(side, []).append(1e3 * statistics.median(done.seconds))
            cpu.setdefault(side, []).append(done.cpu_s_per_step)
        check_losses(losses)
    entries = [
        paired(name, samples["shm"], samples["torch"], "ms", WANTED[base.width]),
        paired(f"{name}, ours over TCP", samples["tcp"], samples["torch"], "ms"),
    ]
    return entries, cpu_line(cpu)


def _ours(workload: Workload, steps: int, warm_up: int) -> Run:
    """A job of ours, with as many micro-batches as the peer's. Raises BenchFailed."""
    assert workload.micro_batch is not None
    done, wanted = run_steps(workload, ALONE, steps, warm_up), workload.global_batch // workload.micro_batch
    found = {len(tile.micro_batches) for tile in done.plan.tiles}
    if found != {wanted}:
        raise BenchFailed(f"pipeline: our ranks have {sorted(found)} micro-batches, the peer's {wanted}")
    return done


def check_losses(losses: dict[str, Sequence[float]]) -> None:
    """All sides have trained the same model on the same data. Raises BenchFailed."""
    for step, values in enumerate(zip(*losses.values(), strict=True)):
        if not all(abs(value - values[0]) <= LOSS_TOLERANCE for value in values):
            said = ", ".join(f"{side} {value:.6f}" for side, value in zip(losses, values, strict=True))
            raise BenchFailed(f"pipeline: the losses of step {step} differ: {said}")
