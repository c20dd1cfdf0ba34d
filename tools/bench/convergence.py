"""convergence: how far training is led astray by ranks that fail, against what it learns when none does.

A small GPT with dropout learns the standard library's text on four ranks, data parallel, and loses two of them. The
same failures, one schedule for each seed, are met in four ways; each is compared with a run of the same seed and
precision in which nobody fails:

    exact=true          against one rank
    default             against the same four ranks
    lab.reshard_rng=false  against the same four ranks: each has a stream of its own, as in trainers that seed ranks
    a smaller batch     against `default` without failures: the samples of a lost rank are left out (left_out.py)

The deviation is the difference of the losses, in nats: its mean over all steps from the first failure on, and that of
the held-out loss at the end. With exact=true it is zero in every step, or the benchmark fails.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from elaswave_fx.config.compose import load_config
from elaswave_fx.config.faults import Fault
from elaswave_fx.config.keys import Config
from elaswave_fx.errors import ConfigError
from elaswave_fx.launch.job import WorkerContext
from elaswave_fx.pictures.drawing import pyplot
from elaswave_fx.worker.loop import run_worker
from tools.bench.convergence_plot import draw
from tools.bench.left_out import train_without
from tools.bench.own_job import OwnJob
from tools.bench.processes import BenchFailed
from tools.bench.results import Entry, Options, Outcome, aligned, paired

SEEDS, STEPS, RANKS = 5, 120, 4
LEAST_STEPS = 24
"""With fewer there is no time between two failures for new copies of the state."""

PRECISIONS = ("fp32", "bf16")
PUBLISHED = 0.78
"""ElasWave (arXiv 2510.00606): by so much convergence deviates less; less than what is not known to us."""

EXACT, DEFAULT, BY_RANK, SMALLER = "exact=true", "default", "lab.reshard_rng=false", "a smaller batch"
OVERRIDES = {EXACT: ("exact=true",), DEFAULT: (), BY_RANK: ("lab.reshard_rng=false",)}
WAYS = (EXACT, DEFAULT, BY_RANK, SMALLER)

_STUDY = (
    "recipe=gpt_stdlib", "parallel.pp=1", "parallel.ranks_per_host=1", "model.dropout=0.1",
    "model.attention_dropout=0.1",
)  # fmt: skip
_SMALL = ("model.layers=2", "model.width=64", "seq_len=64", "data.limit_mb=4", "eval.batches=8")
_TINY = ("model.layers=1", "model.width=16", "model.heads=2", "seq_len=16", "data.limit_mb=1", "eval.batches=1")


Work = Callable[[Config, WorkerContext], Mapping[str, Any] | None]
"""Does a rank's work and returns its share of the summary, as `run_worker`."""


@dataclass(frozen=True)
class WholeRun:
    """The mean loss of each step, and that of the held-out samples when they were looked at last."""

    losses: tuple[float, ...]
    held_out: float


def whole_run(config: Config, work: Work = run_worker) -> WholeRun:
    """Train to the end. Raises BenchFailed."""
    with OwnJob(config, lambda reports, *given: work(*given)) as job:
        job.join()
        losses = tuple(line["loss"] for line in job.lines("metrics.jsonl"))
        return WholeRun(losses, job.lines("eval.jsonl")[-1]["loss"])


@dataclass(frozen=True)
class Deviation:
    """Deviation of one run from another: the absolute difference of the losses of every step, its mean from the first
    failure on, and that of the held-out losses."""

    of_steps: tuple[float, ...]
    mean: float
    held_out: float


Found = Mapping[str, Sequence[Deviation]]
"""By the way in which failures are met, for each seed."""


@dataclass(frozen=True)
class Study:
    """What is trained, in the words of the command line, and for how many steps."""

    steps: int
    words: tuple[str, ...]

    def deviations(self, precision: str, seed: int, progress: Callable[[str], None]) -> dict[str, Deviation]:
        """Meet the failures of a seed in every way, beside the runs without them."""
        failures, found = failures_of(seed, self.steps), dict[str, Deviation]()
        first = failures[0].step
        faults = ",".join(f"{{step:{each.step},rank:{each.rank},phase:{each.phase}}}" for each in failures)

        def run(way: str, *words: str, ranks: int = RANKS, work: Work = run_worker) -> WholeRun:
            progress(f"{precision}, seed {seed}: {way}{', the ranks fail' if words else ''}")
            shape = (f"parallel.dp={ranks}", f"precision={precision}", f"seed={seed}")
            length = (f"steps={self.steps}", f"eval.every={self.steps}")
            return whole_run(load_config((*self.words, *OVERRIDES.get(way, ()), *words, *shape, *length)), work)

        for way in OVERRIDES:
            calm = run(way, ranks=1 if way == EXACT else RANKS)
            found[way] = deviation(calm, run(way, f"faults=[{faults}]"), first)
            if way == DEFAULT:
                smaller = run(SMALLER, work=partial(train_without, failures))
                found[SMALLER] = deviation(calm, smaller, first)
        return found


def run(progress: Callable[[str], None], options: Options) -> Outcome:
    """Compare the default with the two ways of others; say of all of them how far they deviate."""
    steps = options.steps or (LEAST_STEPS if options.tiny else STEPS)
    if steps < LEAST_STEPS:
        raise ConfigError(f"--steps {steps}: two failures need at least {LEAST_STEPS}")
    words = (*_STUDY, *(_TINY if options.tiny else _SMALL))
    precisions, seeds = options.precision or PRECISIONS, options.seeds or (1 if options.tiny else SEEDS)
    for precision in precisions:
        load_config((*words, f"precision={precision}"))
    if options.plot is not None:
        pyplot("convergence", options.plot)
    study = Study(steps, words)
    found: dict[str, Found] = {}
    for precision in precisions:
        trials = [study.deviations(precision, seed, progress) for seed in range(seeds)]
        found[precision] = {way: [trial[way] for trial in trials] for way in WAYS}
        check_exact(precision, found[precision][EXACT])
    notes = [line for precision, ways in found.items() for line in ("", *_table(precision, ways))]
    if options.plot is not None:
        lines = {
            precision: {way: [each.of_steps for each in of] for way, of in ways.items()}
            for precision, ways in found.items()
        }
        draw(lines, [failure.step for seed in range(seeds) for failure in failures_of(seed, steps)], options.plot)
        notes += ["", f"drawn: {options.plot}"]
    return Outcome([entry for each in found for entry in _entries(each, found[each])], (*notes, *_conditions(steps)))


def failures_of(seed: int, steps: int) -> tuple[Fault, Fault]:
    """Two ranks fail before the step's commit, one in the second sixth of the run, another in the fourth one."""
    draws = random.Random(seed)
    first, second = draws.sample(range(RANKS), 2)
    phases = [draws.choice(("forward", "backward", "reduce")) for _ in range(2)]
    at = [draws.randrange(sixth * steps // 6, (sixth + 1) * steps // 6) for sixth in (1, 3)]
    return Fault(step=at[0], rank=first, phase=phases[0]), Fault(step=at[1], rank=second, phase=phases[1])


def deviation(calm: WholeRun, hurt: WholeRun, first: int) -> Deviation:
    """Compare a run with one in which nobody failed; `first`: the step of the first failure."""
    steps = tuple(abs(a - b) for a, b in zip(calm.losses, hurt.losses, strict=True))
    return Deviation(steps, statistics.fmean(steps[first:]), abs(calm.held_out - hurt.held_out))


def check_exact(precision: str, found: Sequence[Deviation]) -> None:
    """Raise BenchFailed unless every loss, of every step and of what is held out, is the same to the last bit."""
    for seed, each in enumerate(found):
        if any(each.of_steps) or each.held_out:
            raise BenchFailed(f"convergence: {precision}, seed {seed}: exact=true deviates by {max(each.of_steps):.3g}")


# --- In words


def _entries(precision: str, found: Found) -> list[Entry]:
    """A ratio of 1 / (1 - 0.78) is a deviation that is 78 % lower."""
    micronats = {way: [1e6 * each.mean for each in of] for way, of in found.items()}
    return [
        paired(
            f"{precision}, default against {peer}", micronats[DEFAULT], micronats[peer], "µnats", 1 / (1 - PUBLISHED)
        )
        for peer in (BY_RANK, SMALLER)
    ]


def _table(precision: str, found: Found) -> list[str]:
    rows: list[tuple[str, ...]] = [
        (f"{precision}: deviation (nats)", "median", "worst", "held out, median", "worst", f"less than {BY_RANK}",
         f"than {SMALLER}"),
    ]  # fmt: skip
    for way, of in found.items():
        means, held_out = [each.mean for each in of], [each.held_out for each in of]
        numbers = (statistics.median(means), max(means), statistics.median(held_out), max(held_out))
        less = ("-" if way in (BY_RANK, SMALLER) else _less(of, found[peer]) for peer in (BY_RANK, SMALLER))
        rows.append((way, *(f"{number:.2g}" if number else "0.0" for number in numbers), *less))
    return aligned(rows)


def _less(ours: Sequence[Deviation], peer: Sequence[Deviation]) -> str:
    """How much lower the mean deviation is, the median over seeds; 100 % is said only of none at all."""
    left = 100 * statistics.median(a.mean / b.mean for a, b in zip(ours, peer, strict=True))
    return f"{100 - float(f'{left:.2g}'):.10g} %"


def _conditions(steps: int) -> tuple[str, ...]:
    return (
        "",
        f"Published is that ElasWave's deviation is about {100 * PUBLISHED:.0f} % lower; of what run, than whose, is "
        "not known to us.",
        f"{RANKS} ranks, data parallel, {steps} steps; two ranks are lost; the seed says which, when, in which phase.",
        "Each way is compared with itself without failures, exact=true on one rank, a smaller batch with the default.",
        "A smaller batch: losses of steps are means over the samples that are left, the held-out loss is as elsewhere.",
    )
