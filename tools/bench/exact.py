"""exact: what `exact=true` costs, against the same job in the default mode: processor time, bytes, a lost rank.

The same GPT with 128 and 512 tokens, two ranks. The default mode runs with micro-batches of 1, 2, 4 and 8 samples (of
512 tokens up to 4), exact mode with granules of as many. All these jobs live at once and take their steps in turns.
What counts is the processor time of the ranks (user and system, all threads), which a busy machine changes less than
the wall clock beside it. A rank lost: one job of four ranks stays whole and one has lost a rank, and the processor time
of the ranks with most to do is compared; on fewer cores than ranks the wall clock does not show who has most to do.
Bytes are counted: by the plan, and where ranks send. The last entry is of `verify`, against the run that it verifies.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial

import torch

from elaswave_fx.plan.plan import Plan
from elaswave_fx.plan.predict.memory import per_parameter
from tools.bench.gpt_job import COMPUTE_BOUND, FOUR_COLUMNS, GptJob, tiny
from tools.bench.own_job import Variant, run_steps
from tools.bench.paced_job import PacedJob, Turn
from tools.bench.processes import BenchFailed
from tools.bench.results import Entry, Options, Outcome, aligned, in_turns, paired

EXACT = ("exact=true",)
REPEATS = 10
LENGTHS = {128: COMPUTE_BOUND, 512: replace(COMPUTE_BOUND, seq_len=512, global_batch=8)}
STEPS = {128: 2, 512: 1}
"""Tokens of a sample -> steps of a turn that count, after one that does not."""

SIZES = (1, 2, 4, 8)
"""Samples of a micro-batch, and of a granule."""

AT_EQUAL_SIZE = {128: 1.10, 512: 1.05}
AGAINST_BEST = {128: 1.25, 512: 1.15}
AFTER_A_LOSS = 1.05
REDUCED, EXCHANGED, REMEMBERED = 2.0, 1.5, 4
"""Most that is wanted: times by tokens of a sample, against the share of the work; times the bytes; bytes of memory."""

FASTER_THAN_THE_RUN = 10.0
_VERIFIED_STEPS = {False: 400, True: 4}

RANKS_OF_LOSS, LOST = 4, 1
ALIKE = 0.98
"""Ranks with this much of what the busiest has to do count as the busiest, too."""
WIDTHS = (2, 3, 4, 6)
_COUNTED_STEPS = 20  # What is under way when a step is told of falls to the next one.
_MIB = 2.0**20

Turns = Mapping[int, Sequence[Turn]]
"""By samples of a micro-batch or granule, what was taken in turns."""


def run(progress: Callable[[str], None], options: Options) -> Outcome:
    """The peer is the default mode in each entry, but for the lost rank: there it is its share of the work."""
    torch.set_num_threads(1)
    repeats = options.repeats or REPEATS
    lengths, sizes, widths = LENGTHS, SIZES, WIDTHS
    losing, counted = replace(COMPUTE_BOUND, ranks=RANKS_OF_LOSS), replace(FOUR_COLUMNS, global_batch=12)
    if options.tiny:
        lengths, sizes, widths = {128: tiny(COMPUTE_BOUND)}, SIZES[:2], WIDTHS[:2]
        losing, counted = replace(tiny(losing), global_batch=16), replace(tiny(counted), global_batch=12)
    entries: list[Entry] = []
    rows: list[tuple[str, ...]] = [
        ("exact over default", "processor time", "at most", "wall clock", "processor ms of a sample")
    ]
    for tokens, gpt in lengths.items():
        possible = [size for size in sizes if size <= gpt.global_batch // gpt.ranks]
        default, exact = _measure(gpt, possible, STEPS[tokens], repeats, progress)
        for entry, row in _comparisons(gpt, tokens, default, exact):
            entries.append(entry)
            rows.append(row)
    loss, said = _lose_one(losing, repeats, progress)
    progress("bytes")
    counts = [_count(replace(counted, ranks=width)) for width in widths]
    progress("verify")
    train_s, verify_s = _train_and_verify(("recipe=gpt_stdlib", f"steps={_VERIFIED_STEPS[options.tiny]}"))
    verify = paired("verify, against its run", [verify_s], [train_s], "s", FASTER_THAN_THE_RUN)
    entries += [loss, *(entry for found, _ in counts for entry in found), verify]
    notes = ("", *aligned(rows), said, *(line for _, line in counts))
    return Outcome(entries, (*notes, *(gpt.text() for gpt in (*lengths.values(), losing, counted))))


# --- Processor time


def _measure(
    gpt: GptJob, sizes: Sequence[int], steps: int, repeats: int, progress: Callable[[str], None]
) -> tuple[Turns, Turns]:
    """Return the turns in the default mode and in exact mode, by size."""
    modes = {"default": lambda size: Variant(), "exact": lambda size: Variant((*EXACT, f"parallel.granule={size}"))}
    with ExitStack() as stack:
        jobs: dict[str, PacedJob] = {}
        for mode, variant in modes.items():
            for size in sizes:
                progress(f"{gpt.seq_len} tokens: starting {mode}, {size}")
                job = stack.enter_context(PacedJob(replace(gpt, micro_batch=size), variant(size)))
                job.await_ready()
                jobs[f"{mode}, {size}"] = job
        for job in jobs.values():
            job.take(1)
        for name, job in jobs.items():
            _check(name, job.plan(), int(name.split(", ")[1]))
        taken = in_turns(
            {name: partial(job.take, steps) for name, job in jobs.items()}, repeats, progress,
            f"{gpt.seq_len} tokens, turn",
        )  # fmt: skip
    default, exact = ({size: taken[f"{mode}, {size}"] for size in sizes} for mode in modes)
    return default, exact


def _check(name: str, plan: Plan, size: int) -> None:
    found = {len(samples) for tile in plan.tiles for samples in tile.micro_batches}
    if found != {size}:
        raise BenchFailed(f"exact: the plan of {name} has micro-batches of {sorted(found)} samples")


def _compare(
    name: str, exact: Sequence[Turn], default: Sequence[Turn], samples: int, most: float
) -> tuple[Entry, tuple[str, ...]]:
    """An exact job with a default one, turn by turn: the entry and its row. The processor time may be `most` times as
    long."""
    exact_ms, default_ms = ([1e3 * turn.all_cpu_s / samples for turn in turns] for turns in (exact, default))
    cpu = statistics.median(ours / theirs for ours, theirs in zip(exact_ms, default_ms, strict=True))
    wall = statistics.median(ours.wall_s / theirs.wall_s for ours, theirs in zip(exact, default, strict=True))
    each = ", ".join(f"{statistics.median(ms):.1f}" for ms in (exact_ms, default_ms))
    return paired(name, exact_ms, default_ms, "ms", 1 / most), (name, f"{cpu:.3f}", f"{most:g}", f"{wall:.3f}", each)


def _comparisons(gpt: GptJob, tokens: int, default: Turns, exact: Turns) -> Iterator[tuple[Entry, tuple[str, ...]]]:
    """Comparisons at every size, of both at their best."""

    def best(turns: Turns) -> int:
        return min(turns, key=lambda size: statistics.median(turn.all_cpu_s for turn in turns[size]))

    granule, micro_batch, length = best(exact), best(default), f"{gpt.seq_len} tokens"
    for size in exact:
        name = f"{length}: granules of {size}"
        yield _compare(name, exact[size], default[size], gpt.global_batch, AT_EQUAL_SIZE[tokens])
    name = f"{length}, each at its best: granules of {granule}, micro-batches of {micro_batch}"
    yield _compare(name, exact[granule], default[micro_batch], gpt.global_batch, AGAINST_BEST[tokens])


# --- A lost rank


def _lose_one(gpt: GptJob, repeats: int, progress: Callable[[str], None]) -> tuple[Entry, str]:
    """Compare a job that has lost a rank with one that has not: the ranks with most to do, by their processor time,
    with the growth of what they have to do, in granules through all units."""
    with ExitStack() as stack:
        whole, less = (stack.enter_context(PacedJob(gpt, Variant(EXACT))) for _ in range(2))
        for job in (whole, less):
            job.await_ready()
            job.take(1)
        less.lose(LOST)
        less.take(2)
        steps = STEPS[128]
        taken = in_turns(
            {"whole": partial(whole.take, steps), "less": partial(less.take, steps)}, repeats, progress,
            "one rank lost, turn",
        )  # fmt: skip
        (before, busy_before), (after, busy_after) = _busiest(whole.plan()), _busiest(less.plan())
    pairs = list(zip(taken["less"], taken["whole"], strict=True))
    cpu = [_mean(ours.cpu_s, busy_after) / _mean(theirs.cpu_s, busy_before) for ours, theirs in pairs]
    wall_x = statistics.median(ours.wall_s / theirs.wall_s for ours, theirs in pairs)
    cpu_x, share = statistics.median(cpu), after / before
    name = "one of 4 ranks lost, against its work"
    return paired(name, cpu, [share] * len(cpu), "x", 1 / AFTER_A_LOSS), (
        f"one of {RANKS_OF_LOSS} ranks lost: {after:.3g} granules to do for {before:.3g} are {share:.3f}x; "
        f"processor time of those who have them {cpu_x:.3f}x, {cpu_x / share:.3f}x of that, at most {AFTER_A_LOSS:g}; "
        f"wall clock of a step, on as many cores as there are, {wall_x:.3f}x"
    )


def _busiest(plan: Plan) -> tuple[float, list[int]]:
    """Return the most that a rank has to do, in granules through all units, and the ranks that have as much."""
    busy = {int(rank): cost.busy_s for rank, cost in plan.predicted.ranks.items()}
    granule_s, most_s = sum(busy.values()) / plan.workload.granules, max(busy.values())
    return most_s / granule_s, [rank for rank, seconds in busy.items() if seconds > ALIKE * most_s]


def _mean(seconds: Mapping[int, float], ranks: Sequence[int]) -> float:
    return statistics.fmean(seconds[rank] for rank in ranks)


# --- Bytes


def _count(gpt: GptJob) -> tuple[list[Entry], str]:
    """Compare the bytes of one number of ranks: what the plan says of gradients, and all that is sent."""
    exact, default = (run_steps(gpt, Variant(words), _COUNTED_STEPS, 1) for words in (EXACT, ()))
    reduced, planned = reduced_bytes(exact.plan), reduced_bytes(default.plan)
    name = f"{gpt.ranks} ranks, bytes of a step"
    entries = [
        paired(f"{name}, {what}", [ours / _MIB], [theirs / _MIB], "MiB", 1 / most)
        for what, ours, theirs, most in (
            ("gradients by the plan", reduced, planned, REDUCED),
            ("all that is sent", exact.bytes_per_step, default.bytes_per_step, EXCHANGED),
        )
    ]
    memory = [sum(per_parameter(run.plan).values()) for run in (exact, default)]
    return entries, (
        f"{gpt.ranks} ranks: bytes of gradients {reduced / planned:.3f}x (at most {REDUCED:g}), of all that is sent "
        f"{exact.bytes_per_step / default.bytes_per_step:.4f}x (at most {EXCHANGED:g}); memory of a parameter on each "
        f"rank {(memory[0] - memory[1]) / gpt.ranks:+.1f} bytes (at most {REMEMBERED})"
    )


def reduced_bytes(plan: Plan) -> int:
    """Bytes of summed gradients that readers send to owners in a step."""
    return plan.workload.sum_bytes * sum(len(box.span) * len({*box.readers} - {box.owner}) for box in plan.boxes)


# --- Verification


def _train_and_verify(words: Sequence[str]) -> tuple[float, float]:
    """Seconds of both commands, by the wall clock, their start included. Raises BenchFailed if either fails."""
    with tempfile.TemporaryDirectory() as run:
        train = ["elaswave_fx.train", "exact=true", f"hydra.run.dir={run}", *words]
        return _seconds(train), _seconds(["elaswave_fx.verify", run])


def _seconds(words: Sequence[str]) -> float:
    began = time.perf_counter()
    done = subprocess.run([sys.executable, "-m", *words], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        last = (done.stderr or done.stdout).strip().splitlines()[-1:]
        raise BenchFailed(f"exact: {' '.join(words)} failed: {' '.join(last)}")
    return time.perf_counter() - began
