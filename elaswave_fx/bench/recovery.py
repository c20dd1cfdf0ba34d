"""recovery: SIGKILL to the first step committed without the victim, less the median of ten normal steps.

Data parallel 4x1, the same model and batch: ours as `train` runs it, TorchFT 0.2.0 in its manual loop (lighthouse,
Manager, ProcessGroupGloo), with its defaults and with shorter timeouts; the best of those that recovered every time
counts as its best. A run loses the same rank at the same point of a step on each side. A few stopped ranks (on both
sides, TorchFT with its best) and a few whose links go down (ours) come apart.
"""

from __future__ import annotations

import math
import random
import signal
import statistics
from collections.abc import Callable, Sequence

import torch

from elaswave_fx.bench.links import CannotCut
from elaswave_fx.bench.processes import BenchFailed
from elaswave_fx.bench.recovery_own import OwnLoss, Runs, cut, stop
from elaswave_fx.bench.results import Entry, Options, Outcome, medians, p95, paired
from elaswave_fx.bench.torch_job import GLOO_TIMEOUT, Lighthouse, Loss, need_torchft, torchft_loss
from elaswave_fx.bench.workload import FOUR_COLUMNS, Workload, tiny

REPEATS = 20
DEFAULTS = Lighthouse()
SWEEP = (
    DEFAULTS,
    Lighthouse(heartbeat_timeout_ms=5000, join_timeout_ms=100, quorum_tick_ms=100),
    Lighthouse(heartbeat_timeout_ms=1000, join_timeout_ms=100, quorum_tick_ms=20),
    Lighthouse(heartbeat_timeout_ms=500, join_timeout_ms=100, quorum_tick_ms=10),
    Lighthouse(heartbeat_timeout_ms=300, join_timeout_ms=50, quorum_tick_ms=10),
)
"""A replica's heartbeats are 100 ms apart: below three of them, living ranks are taken for dead on a busy machine."""

WANTED_OF_DEFAULTS, WANTED_OF_BEST = 1 / 0.05, 1 / 0.5
EXTRA_REPEATS = 5


def run(progress: Callable[[str], None], options: Options) -> Outcome:
    """All sides in turn, then a few stopped ranks."""
    torch.set_num_threads(1)
    need_torchft()
    workload = tiny(FOUR_COLUMNS) if options.tiny else FOUR_COLUMNS
    sweep = (SWEEP[0], SWEEP[3]) if options.tiny else SWEEP
    draw = random.Random(0)
    runs = Runs(workload)
    own: list[OwnLoss] = []
    peers: dict[Lighthouse, list[Loss | None]] = {lighthouse: [] for lighthouse in sweep}
    repeats = options.repeats or REPEATS
    for turn in range(repeats):
        victim, phase = draw.randrange(workload.ranks), draw.random()
        progress(f"run {turn + 1} of {repeats}: SIGKILL of rank {victim}")
        if turn % 2 == 0:
            own.append(runs.lose(victim, phase))
        for lighthouse in sweep:
            peers[lighthouse].append(_try_peer(workload, lighthouse, victim, phase, progress))
        if turn % 2 == 1:
            own.append(runs.lose(victim, phase))
    others = _other_blows(workload, runs, _best(own, peers), draw, min(EXTRA_REPEATS, repeats), progress)
    return Outcome(recovery_entries(own, peers), (*_notes(workload, own, peers), *others))


def _other_blows(
    workload: Workload,
    runs: Runs,
    best: Lighthouse | None,
    draw: random.Random,
    repeats: int,
    progress: Callable[[str], None],
) -> tuple[str, ...]:
    """What only silence tells, and what leaves the victim alive."""
    stopped: list[OwnLoss] = []
    theirs: list[Loss | None] = []
    unlinked: list[OwnLoss] = []
    why = ""
    for turn in range(repeats):
        victim, phase = draw.randrange(workload.ranks), draw.random()
        progress(f"run {turn + 1} of {repeats}: SIGSTOP, links down")
        stopped.append(runs.lose(victim, phase, stop))
        if best is not None:
            theirs.append(_try_peer(workload, best, victim, phase, progress, signal.SIGSTOP))
        try:
            unlinked.append(runs.lose(victim, phase, cut))
        except CannotCut as error:
            why = str(error)
    return (
        "SIGSTOP: a stopped rank's links stay whole, so that only silence tells",
        f"  ours {_in_words(stopped)}",
        f"  TorchFT, {best}: {_in_words([loss for loss in theirs if loss is not None])}",
        "links down: all connections of a rank that lives are reset; a host that falls silent is as in SIGSTOP",
        f"  ours {_in_words(unlinked)}{f'; {why}' if why else ''}",
    )


def _in_words(losses: Sequence[OwnLoss | Loss]) -> str:
    if not losses:
        return "not measured"
    seconds = [loss.recovery_s for loss in losses]
    parts = [loss.parts for loss in losses if isinstance(loss, OwnLoss)]
    words = ", ".join(f"{name} {value:.1f}" for name, value in medians(parts, 1e3).items()) if parts else ""
    detail = f": {words} ms" if words else ""
    return f"{statistics.median(seconds):.3f} s (median), {p95(seconds):.3f} s (p95) of {len(seconds)}{detail}"


def _try_peer(
    workload: Workload,
    lighthouse: Lighthouse,
    victim: int,
    phase: float,
    progress: Callable[[str], None],
    number: signal.Signals = signal.SIGKILL,
) -> Loss | None:
    """None when TorchFT did not get into step, or not past the loss: counted, and left out of its times."""
    try:
        return torchft_loss(workload, lighthouse, victim, phase, number)
    except BenchFailed as error:
        progress(f"on; TorchFT failed with {lighthouse}: {str(error).splitlines()[0]}")
        return None


def recovery_entries(own: list[OwnLoss], peers: dict[Lighthouse, list[Loss | None]]) -> list[Entry]:
    """Pairs of which TorchFT's half failed are left out; a setting that failed at all is not its best."""
    pairs = {
        lighthouse: [
            (1e3 * ours.recovery_s, 1e3 * loss.recovery_s)
            for ours, loss in zip(own, losses, strict=True)
            if loss is not None
        ]
        for lighthouse, losses in peers.items()
    }
    best = _best(own, peers)
    entries = []
    for lighthouse, samples in pairs.items():
        if not samples:
            continue
        ours, theirs = zip(*samples, strict=True)
        target = WANTED_OF_DEFAULTS if lighthouse == DEFAULTS else WANTED_OF_BEST if lighthouse == best else None
        name = "defaults" if lighthouse == DEFAULTS else "best" if lighthouse == best else "other"
        parts = medians([loss.parts for loss in own], 1e3) if lighthouse == DEFAULTS else None
        entries.append(paired(f"TorchFT {name}: {lighthouse}", ours, theirs, "ms", target, parts))
    return entries


def _best(own: list[OwnLoss], peers: dict[Lighthouse, list[Loss | None]]) -> Lighthouse | None:
    whole = {key: [loss.recovery_s for loss in losses if loss is not None] for key, losses in peers.items()}
    never_failed = [key for key, seconds in whole.items() if len(seconds) == len(own)]
    return min(never_failed, key=lambda key: statistics.median(whole[key]), default=None)


def _notes(workload: Workload, own: list[OwnLoss], peers: dict[Lighthouse, list[Loss | None]]) -> tuple[str, ...]:
    theirs = [loss.normal_s for losses in peers.values() for loss in losses if loss is not None]
    steps = [1e3 * statistics.median(found or [math.nan]) for found in ([loss.normal_s for loss in own], theirs)]
    failed = [
        f"{losses.count(None)} of {len(own)} with {lighthouse}"
        for lighthouse, losses in peers.items()
        if None in losses
    ]
    return (
        "",
        workload.text(),
        f"a normal step takes {steps[0]:.1f} ms (ours), {steps[1]:.1f} ms (TorchFT); medians, each taken off its own",
        "TorchFT's failed runs, left out above: " + ("; ".join(failed) or "none"),
        f"TorchFT's ProcessGroupGloo has a timeout of {GLOO_TIMEOUT.total_seconds():g} s, as in its train_ddp.py;",
        "  its class's default is 60 s. A commit of its survivors counts even if it left out living ranks, too",
    )
