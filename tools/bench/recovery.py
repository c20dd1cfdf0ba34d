"""recovery: SIGKILL to the first step committed without the victim, less the median of ten normal steps.

Data parallel 4x1, the same model, batch and fused AdamW: ours as `train` runs it, TorchFT 0.2.0 in its manual loop
(lighthouse, Manager, ProcessGroupGloo) with its defaults and with shorter timeouts. Every side loses the same ranks at
the same points, spread evenly over a step; `--repeats` is their number. What counts is the distribution: median, 95th
percentile and worst. A setting of TorchFT that failed at all is not its best. Stopped ranks and links that go down come
apart, in a few runs each.
"""

from __future__ import annotations

import math
import signal
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from elaswave_fx.errors import ConfigError
from tools.bench.connection_resets import CannotCut
from tools.bench.gpt_job import FOUR_COLUMNS, GptJob, tiny
from tools.bench.own_job import OwnJob, Variant, work_of
from tools.bench.processes import BenchFailed
from tools.bench.recovery_trial import Fault, Loss, cut, kill, lose, parts_of, phases, stop
from tools.bench.results import Entry, Options, Outcome, aligned, medians, p95
from tools.bench.torch_job import Settings, TorchFTJob, need_torchft

POINTS = 24
DEFAULTS = Settings()
SWEEP = (
    DEFAULTS,
    Settings(5000, 100, 100, 5000),
    Settings(5000, 100, 10, 500),
    Settings(1000, 100, 20, 5000),
    Settings(500, 100, 10, 5000),
    Settings(500, 100, 10, 200),
    Settings(300, 50, 10, 200),
    Settings(200, 50, 10, 200, heartbeat=20),
)
"""TorchFT waits for its slowest timeout that matters: for the join timeout when all survivors ask for a quorum, for the
heartbeat timeout or gloo's, whichever is shorter, when some of them are still in the all-reduce."""

TOLD = {"told": True, "untold": False}
"""Whether our launcher, the parent of all ranks, tells the coordinator of a child that has ended, or ranks and
coordinator find out by their connections alone. TorchFT has no such word."""

OF_DEFAULTS = {"told": 1 / 0.02}
OF_BEST_MEDIAN, OF_BEST_P95 = {"told": 1 / 0.5, "untold": 1.0}, {"told": 1 / 0.2, "untold": 1 / 0.4}
"""Ratios wanted: medians against the defaults, medians and 95th percentiles against the best setting."""

Own = dict[str, list[Loss]]
"""What every point gave, by told or untold."""

EXTRA_RUNS = 5


@dataclass(frozen=True)
class Bench:
    """What is lost, and what every rank has in memory besides the model."""

    gpt: GptJob
    resident_bytes: int
    progress: Callable[[str], None]

    def own(self, victim: int, phase: float, fault: Fault = kill, told: bool = True) -> Loss:
        """Lose a rank of a run of ours."""
        variant = Variant((f"lab.exit_words={told}".lower(),), resident_bytes=self.resident_bytes)
        with OwnJob(self.gpt.config(*variant.words), work_of(variant)) as job:
            loss = lose(job, self.gpt.ranks, victim, phase, fault)
            return replace(loss, parts=parts_of(job.events(until="resumed"), loss))

    def peer(self, settings: Settings, victim: int, phase: float, fault: Fault = kill) -> Loss | None:
        """Lose a rank of a run of TorchFT's; return None when it did not get into step, or not past the loss."""
        try:
            with TorchFTJob(self.gpt, settings, self.resident_bytes) as job:
                return replace(lose(job, self.gpt.ranks, victim, phase, fault), why=job.awaited())
        except BenchFailed as error:
            self.progress(f"on; TorchFT failed with {settings}: {str(error).splitlines()[0]}")
            return None


def run(progress: Callable[[str], None], options: Options) -> Outcome:
    """Lose a rank at every point, on all sides in turn."""
    torch.set_num_threads(1)
    need_torchft()
    if any(number >= len(SWEEP) for number in options.settings or ()):
        said = ",".join(map(str, options.settings or ()))
        raise ConfigError(f"--settings {said}: there are {len(SWEEP)}, 0 to {len(SWEEP) - 1}")
    gpt = tiny(FOUR_COLUMNS) if options.tiny else FOUR_COLUMNS
    bench = Bench(gpt, int(options.resident_gb * 2**30), progress)
    sweep = [SWEEP[number] for number in options.settings] if options.settings else list(SWEEP)
    own: Own = {name: [] for name in TOLD}
    peers: dict[Settings, list[Loss | None]] = {settings: [] for settings in sweep}
    points = phases(options.repeats or POINTS)
    for number, phase in enumerate(points):
        victim = number % gpt.ranks
        progress(f"point {number + 1} of {len(points)}: SIGKILL of rank {victim}")
        for name, told in TOLD.items():
            own[name].append(bench.own(victim, phase, told=told))
        for settings in sweep:
            peers[settings].append(bench.peer(settings, victim, phase))
    best = best_of(peers)
    notes = (*_table(own, peers, best), *_modes(peers), *_conditions(bench, own, peers))
    return Outcome(entries_of(own, peers), (*notes, *_other_faults(bench, best, points[:EXTRA_RUNS])))


def best_of(peers: dict[Settings, list[Loss | None]]) -> Settings | None:
    """Return the setting with the smallest median among those that never failed."""
    whole = {settings: times for settings, losses in peers.items() if (times := _times(losses)) and None not in losses}
    return min(whole, key=lambda settings: statistics.median(whole[settings]), default=None)


def entries_of(own: Own, peers: dict[Settings, list[Loss | None]]) -> list[Entry]:
    """Compare medians with all settings, 95th percentiles and the worst with the best one too. A setting's failed runs,
    which the name tells of, are left out of its times."""
    return [entry for told, losses in own.items() for entry in _entries(told, losses, peers)]


def _entries(told: str, own: Sequence[Loss], peers: dict[Settings, list[Loss | None]]) -> list[Entry]:
    ours, best, entries = _times(own), best_of(peers), []
    for settings, losses in peers.items():
        theirs = _times(losses)
        if not theirs:
            continue
        name = f"{told}, {_name(settings, best)}" + (f" ({losses.count(None)} failed)" if None in losses else "")
        wanted = {DEFAULTS: OF_DEFAULTS.get(told), best: OF_BEST_MEDIAN[told]}.get(settings)
        parts = medians([loss.parts for loss in own], 1e3) if not entries and all(loss.parts for loss in own) else {}
        entries.append(_entry(f"{name}: median", statistics.median, ours, theirs, wanted, parts))
        if settings == best:
            entries.append(_entry(f"{name}: p95", p95, ours, theirs, OF_BEST_P95[told]))
            entries.append(_entry(f"{name}: worst", max, ours, theirs))
    return entries


def _entry(
    name: str,
    statistic: Callable[[Sequence[float]], float],
    ours: Sequence[float],
    theirs: Sequence[float],
    wanted: float | None = None,
    parts: dict[str, float] | None = None,
) -> Entry:
    mine, peer = statistic(ours), statistic(theirs)
    return Entry(
        name, peer / mine, mine, peer, "ms", len(ours), p95(ours), p95(theirs), target=wanted, parts=parts or {}
    )


def _name(settings: Settings, best: Settings | None) -> str:
    kind = "defaults" if settings == DEFAULTS else "best" if settings == best else "other"
    return f"TorchFT {kind}: {settings}"


def _times(losses: Sequence[Loss | None]) -> list[float]:
    """Return the milliseconds of those that did not fail."""
    return [1e3 * loss.recovery_s for loss in losses if loss is not None]


def _table(own: Own, peers: dict[Settings, list[Loss | None]], best: Settings | None) -> tuple[str, ...]:
    """Print the distributions, a side per row."""
    ours: dict[str, list[Loss | None]] = {f"ours, {told}": [*losses] for told, losses in own.items()}
    sides = {**ours, **{_name(settings, best): losses for settings, losses in peers.items()}}
    rows: list[tuple[str, ...]] = [("ms from SIGKILL, less a normal step", "least", "median", "p95", "worst", "failed")]
    for side, losses in sides.items():
        times = _times(losses) or [math.nan]
        found = (min(times), statistics.median(times), p95(times), max(times))
        rows.append((side, *(f"{value:.0f}" for value in found), f"{losses.count(None)} of {len(losses)}"))
    return ("", *aligned(rows))


def _modes(peers: dict[Settings, list[Loss | None]]) -> tuple[str, ...]:
    """Say what TorchFT's lighthouse waited for, by its own log, and how long recoveries took then."""
    lines = ["", "what TorchFT's lighthouse waited for last, by its log"]
    for settings, losses in peers.items():
        found: dict[str, list[float]] = {}
        for loss in losses:
            if loss is not None:
                found.setdefault(loss.why, []).append(1e3 * loss.recovery_s)
        said = [f"{why}: {len(times)} runs, median {statistics.median(times):.0f} ms" for why, times in found.items()]
        lines.append(f"  {settings}: " + ("; ".join(said) or "no run went on"))
    return tuple(lines)


def _conditions(bench: Bench, runs: Own, peers: dict[Settings, list[Loss | None]]) -> tuple[str, ...]:
    own = [loss for losses in runs.values() for loss in losses]
    theirs = [loss for losses in peers.values() for loss in losses if loss is not None]
    steps = [statistics.median([1e3 * loss.normal_s for loss in side] or [math.nan]) for side in (own, theirs)]
    spread = [[loss.phase for loss in side] or [math.nan] for side in (own, theirs)]
    return (
        "",
        bench.gpt.text() + f"; {bench.resident_bytes / 2**30:g} GiB more in each rank",
        f"a normal step takes {steps[0]:.1f} ms (ours), {steps[1]:.1f} ms (TorchFT); medians, each taken off its own",
        f"signals came from {min(spread[0]):.2f} to {max(spread[0]):.2f} of a step after a commit (ours), "
        f"{min(spread[1]):.2f} to {max(spread[1]):.2f} (TorchFT)",
        "notified: our launcher, the parent of all ranks, reports that its child has ended; untold",
        "(lab.exit_words=false): nobody does. TorchFT has no such report.",
        "A commit of TorchFT's survivors counts even if it left out living ranks, too.",
    )


def _other_faults(bench: Bench, best: Settings | None, points: Sequence[float]) -> tuple[str, ...]:
    """Measure what only silence tells, and what leaves the victim alive."""
    stopped: list[Loss] = []
    theirs: list[Loss | None] = []
    unlinked: list[Loss] = []
    why = ""
    for number, phase in enumerate(points):
        victim = number % bench.gpt.ranks
        bench.progress(f"run {number + 1} of {len(points)}: {signal.SIGSTOP.name}, links down")
        stopped.append(bench.own(victim, phase, stop))
        if best is not None:
            theirs.append(bench.peer(best, victim, phase, stop))
        try:
            unlinked.append(bench.own(victim, phase, cut))
        except CannotCut as error:
            why = f"; {error}"
    return (
        "",
        "SIGSTOP: a stopped rank's links stay whole, so that only silence tells",
        f"  ours {_in_words(stopped)}",
        f"  TorchFT, {best}: {_in_words(theirs)}",
        "links down: all connections of a rank that lives are reset; a host that falls silent is as in SIGSTOP",
        f"  ours {_in_words(unlinked)}{why}",
    )


def _in_words(losses: Sequence[Loss | None]) -> str:
    times = _times(losses)
    if not times:
        return "not measured"
    return f"median {statistics.median(times):.0f} ms, worst {max(times):.0f} ms of {len(times)} runs"
