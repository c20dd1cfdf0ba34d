"""migration: what a planned change of lanes costs while training goes on, over slow links between hosts of their own.

Each rank is a process in a network namespace; all namespaces hang on one switch, by cables that `tc tbf` slows down.
Ranks are emulated, so that their messages have the two cores for themselves; boxes, records and parameters are real.
The job is given other lanes by the command for it, once with `planner.goals=background`, where copies travel behind
the steps, and once with `blocking`, where parameters travel while everybody waits.

What counts is the exposed stall: by how much the time from the reshape to the last stop is longer than that of as many
normal steps, each by the lanes that it had.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

from elaswave_fx.config.types import Config
from elaswave_fx.errors import ConfigError
from elaswave_fx.launch.job import WorkerContext
from elaswave_fx.plan.make.planner import are_uniform
from elaswave_fx.plan.plan import Plan
from tools.bench.gpt_job import GptJob, cases_named, tiny
from tools.bench.namespaces import Host, hosts, missing
from tools.bench.own_job import FOREVER, OwnJob, Variant, Work, work_of
from tools.bench.planned_stops import Step, next_step
from tools.bench.processes import TEST_TIMEOUT_S, BenchFailed, Reports
from tools.bench.results import Entry, Options, Outcome, in_turns, paired

MODES = ("background", "blocking")
"""Values of `planner.goals`."""

RANKS, MICRO_BATCH = 4, 4

CABLE_BYTES_PER_S = 31.25e6
"""Of each rank: 250 Mbit/s."""

QUIET, MOST = 8, 200
"""So many steps with the same plan and all its copies say that no stop follows; so many may pass until then."""

STALL, LONGEST = 5.0, 2.0
"""Wanted: blocking stalls so many times longer, which is 80 % less; and no step so many times longer than a normal one
of its lanes."""


@dataclass(frozen=True)
class Case:
    """A change from lanes that the job is given first, so that one rank has nothing to do, to others, dp x pp; what the
    cable of each host carries; `unit_ms`: of an emulated rank."""

    gpt: GptJob
    before: tuple[int, int]
    after: tuple[int, int]
    bytes_per_s: float
    unit_ms: float

    @property
    def name(self) -> str:
        """Such as 3x1 to 4x1, width 352."""
        (dp, pp), (next_dp, next_pp) = self.before, self.after
        return f"{dp}x{pp} to {next_dp}x{next_pp}, width {self.gpt.width}"

    def variant(self, mode: str, host: Host) -> Variant:
        """How the job is started."""
        return Variant(
            words=(
                "device=emulated", f"emulated.unit_ms={self.unit_ms}", "parallel.granule=1", f"planner.goals={mode}",
                f"launch.host={host.address}", "parallel.schedule=1f1b",
            )
        )  # fmt: skip


def run(progress: Callable[[str], None], options: Options) -> Outcome:
    """Both modes in turns. Raises `ConfigError` where there can be no such hosts."""
    lacking = missing(("ip", "tc"))
    if lacking is not None:
        raise ConfigError(f"migration: {lacking}")
    entries: list[Entry] = []
    notes = [""]
    for case in cases_named(_cases(options.tiny), options.only):
        sides = {mode: partial(_migrate, case, mode) for mode in MODES}
        found = in_turns(sides, options.repeats or 1, progress, case.name)
        entries += _entries(case, found["background"], found["blocking"])
        for mode in MODES:
            notes += [f"{case.name}, {mode}: {each.words()}" for each in found[mode]]
    return Outcome(entries, notes)


def _cases(is_tiny: bool) -> tuple[Case, ...]:
    """A lane more, whose rank gets all parameters; and a stage more, for which units move at every border, of a model
    and of one that has twice as many parameters, and does twice as much for each sample."""
    lanes = GptJob(
        layers=4, width=352, heads=8, seq_len=16, global_batch=12, ranks=RANKS, micro_batch=MICRO_BATCH, clip_norm=None
    )
    if is_tiny:
        return (Case(tiny(lanes), (3, 1), (4, 1), 1e7, 2.0),)
    stages = replace(lanes, layers=6, width=480)
    return (
        Case(lanes, (3, 1), (4, 1), CABLE_BYTES_PER_S, 72.0),
        Case(stages, (1, 3), (1, 4), CABLE_BYTES_PER_S, 20.0),
        Case(replace(stages, width=680), (1, 3), (1, 4), CABLE_BYTES_PER_S, 40.0),
    )


@dataclass(frozen=True)
class Migrated:
    """A change that was watched. `steps`: from the one before the reshape on; `before_s`, `after_s`: normal steps with
    the lanes before and after, which came with `epoch`; `load`: how much of a cable the fullest one carried before;
    `moved_mb`: parameters in stops, and states behind steps."""

    steps: Sequence[Step]
    epoch: int
    before_s: float
    after_s: float
    load: float
    moved_mb: tuple[float, float]

    def over_s(self) -> list[tuple[int, float, float]]:
        """Of each step its epoch, its seconds, and those of a normal one."""
        return [
            (b.epoch, b.at_s - a.at_s, self.before_s if b.epoch < self.epoch else self.after_s)
            for a, b in pairwise(self.steps)
        ]

    @property
    def stall_s(self) -> float:
        """Beyond normal steps, all together."""
        return sum(taken - normal for _, taken, normal in self.over_s())

    @property
    def longest(self) -> float:
        """The longest step over a normal one."""
        return max(taken / normal for _, taken, normal in self.over_s())

    def words(self) -> str:
        """For under the table."""
        in_stops, behind = self.moved_mb
        steps = " ".join(f"{epoch}:{taken:.2f}" for epoch, taken, _ in self.over_s())
        return (
            f"{in_stops:.3g} MB in stops, {behind:.3g} MB behind steps; steps of {self.before_s:.2f} s before, with "
            f"{self.load:.0%} of the fullest cable, {self.after_s:.2f} s after; longest {self.longest:.2f}x; {steps}"
        )


def _entries(case: Case, ours: Sequence[Migrated], peer: Sequence[Migrated]) -> Iterator[Entry]:
    yield paired(
        f"{case.name}: exposed stall, background against blocking",
        [1e3 * each.stall_s for each in ours],
        [1e3 * each.stall_s for each in peer],
        "ms",
        STALL,
    )
    yield paired(
        f"{case.name}: the longest step against {LONGEST:g} normal ones",
        [each.longest for each in ours],
        [LONGEST] * len(ours),
        "x",
        1.0,
    )


def _migrate(case: Case, mode: str) -> Migrated:
    with hosts(RANKS, case.bytes_per_s) as machines:
        variant = case.variant(mode, machines[0])
        work = partial(_on_its_host, machines, work_of(variant))
        with OwnJob(case.gpt, variant, FOREVER, work, machines[0].enter) as job:
            watched = _Watched(job)
            watched.until(lambda plan: plan.epoch == 0)
            asking = _asking(job, machines[0], case.before)
            watched.until(lambda plan: are_uniform(plan.lanes, *case.before), asking)
            _answer(asking)
            return _watch(case, watched, machines)


def _on_its_host(
    machines: Sequence[Host], work: Work, reports: Reports, config: Config, context: WorkerContext
) -> Mapping[str, Any] | None:
    """Do a rank's work in the namespace of its number, where others reach it by another address."""
    host = machines[context.rank]
    host.enter()
    context.host = host.address
    return work(reports, config, context)


def _watch(case: Case, watched: _Watched, machines: Sequence[Host]) -> Migrated:
    """From the reshape until all is quiet again."""
    steps = watched.steps
    load = _load(case, watched, machines)
    before_s = _normal_s(steps[-QUIET:])
    begin, epochs = len(steps) - 1, steps[-1].epoch
    asking = _asking(watched.job, machines[0], case.after)
    watched.until(lambda plan: are_uniform(plan.lanes, *case.after), asking)
    _answer(asking)
    after_s = _normal_s(steps[-QUIET:])
    taken = next(e for e in range(epochs + 1, steps[-1].epoch + 1) if are_uniform(watched.plan(e).lanes, *case.after))
    moved = [event for event in watched.job.events("transferred") if event["kind"] == "transferred"]
    moved = [event for event in moved if event["epoch"] > epochs]
    mb = sum(event["bytes"] for event in moved) / 1e6, sum(event["bytes_behind"] for event in moved) / 1e6
    return Migrated(steps[begin : 1 - QUIET], taken, before_s, after_s, load, mb)


class _Watched:
    """The steps of a job, as its first rank has committed them."""

    def __init__(self, job: OwnJob) -> None:
        self.job, self.steps = job, [next_step(job)]
        self._plans: dict[int, Plan] = {}

    def plan(self, epoch: int | None = None) -> Plan:
        """That of an epoch, or of the last step."""
        epoch = self.steps[-1].epoch if epoch is None else epoch
        if epoch not in self._plans:
            self._plans[epoch] = Plan.from_json(self.job.read(f"plan-{epoch}.json"))
        return self._plans[epoch]

    def until(self, reached: Callable[[Plan], bool], asking: subprocess.Popen[str] | None = None) -> None:
        """Until a plan with that property has been there for a while, with all its copies. Raises `BenchFailed` when it
        does not come within `MOST` steps after the command that asks for it has ended."""
        quiet, left = 0, MOST
        while left:
            left -= asking is None or asking.poll() is not None
            self.steps.append(next_step(self.job))
            same = self.steps[-1].epoch == self.steps[-2].epoch
            quiet = quiet + 1 if same and (quiet or self._has_all_copies()) and reached(self.plan()) else 0
            if quiet > QUIET:
                return
        raise BenchFailed(f"migration: {MOST} steps after it was wanted, the job has no such plan")

    def _has_all_copies(self) -> bool:
        """Whether no copy is on its way any more, in the epoch of the last step."""
        events = self.job.events("monotonic")
        plan = self.plan()
        here = {e["rank"] for e in events if e["kind"] == "caught_up" and e["epoch"] == plan.epoch}
        return here.issuperset(rank for box in plan.boxes for rank in box.catching_up)


def _load(case: Case, watched: _Watched, machines: Sequence[Host]) -> float:
    """How much of its cable the host used that sends most, over some steps."""
    sent, began_s = [host.bytes_sent() for host in machines], watched.steps[-1].at_s
    for _ in range(QUIET):
        watched.steps.append(next_step(watched.job))
    most = max(host.bytes_sent() - before for host, before in zip(machines, sent, strict=True))
    return most / (watched.steps[-1].at_s - began_s) / case.bytes_per_s


def _normal_s(steps: Sequence[Step]) -> float:
    return statistics.median(b.at_s - a.at_s for a, b in pairwise(steps))


# --- Commands, as users give them


def _asking(job: OwnJob, host: Host, layout: tuple[int, int]) -> subprocess.Popen[str]:
    reshape = (f"parallel.dp={layout[0]}", f"parallel.pp={layout[1]}")
    words = [sys.executable, "-m", "elaswave_fx.reshape", str(job.folder), *reshape, f"--timeout={TEST_TIMEOUT_S}"]
    # A command takes a second of a core to start, which it would not take from the ranks of another machine.
    words = ["nice", "-n", "19", *words]
    return host.start(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=os.environ)


def _answer(asking: subprocess.Popen[str]) -> None:
    said, _ = asking.communicate(timeout=TEST_TIMEOUT_S)
    if asking.returncode != 0:
        raise BenchFailed(f"migration: the job was not given other lanes: {said}")
