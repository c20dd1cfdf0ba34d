"""Scenarios: a job runs, something disturbs it, figures are read off its recording and compared with a target, with the
same run before, or with a rival.

A scenario is a row of a table (`lost_ranks.py`, `speeds.py`, `reconfigurations.py`). Its sides take turns: jobs
of the same recipe, each with overrides and a script of its own. What is special about a row is a function that it
names: a script, which watches the run and may disturb it; `figures`; `notes`, which describes runs under the table.

    Table((Scenario("2x2", gpt, {"ours": Side(), "restart": Side(("lab.policy=restart",))}, figures, (
        Comparison("{case}: a step", "step", "step", rival="restart", target=1.0),
    )),)).run(progress, options)       ->  Outcome: an entry "2x2: a step", restart over ours
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from elaswave_fx.config.keys import Config
from elaswave_fx.errors import ConfigError
from elaswave_fx.launch.job import WorkerContext
from tools.bench.gpt_job import GptJob
from tools.bench.namespaces import Host, hosts
from tools.bench.own_job import OwnJob, Work, work_of
from tools.bench.processes import JobEnded, Reports
from tools.bench.recording import LiveRun, Recording
from tools.bench.results import Entry, Options, Outcome, in_turns, p95, paired

Figures = Mapping[str, float | list[float]]
"""Numbers of one run by name, several where the run has several samples. `pause/2x1 to 1x2` is a part of `pause`."""

Runs = Mapping[str, Sequence[Recording]]
"""The recordings of a scenario by side, in the order of turns."""


def to_the_end(live: LiveRun, may_fail: bool = False) -> None:
    """Watch all steps; the configuration has the disturbances. `may_fail`: the run may end because it cannot go on."""
    with suppress(JobEnded):
        while True:
            live.take()
    if not may_fail:
        live.job.join()


@dataclass(frozen=True)
class Side:
    """One of the variants that take turns: its overrides, and what watches the run until everything is measured."""

    words: tuple[str, ...] = ()
    script: Callable[[LiveRun], object] = to_the_end


@dataclass(frozen=True)
class Comparison:
    """An entry: a figure of a side against one of a `rival`, which is the same side if none is named; left out where a
    run lacks either. `name`: may have figures in braces, and the scenario's name as `{case}`. `brief`: no percentiles.
    """

    name: str
    ours: str
    peer: str
    unit: str = "ms"
    target: float | None = None
    side: str = "ours"
    rival: str = ""
    brief: bool = False

    def entries(self, case: str, figures: Mapping[str, Sequence[Figures]]) -> Iterator[Entry]:
        """One of all samples of all runs, or none; a peer of one sample is the peer of all of them."""
        found, first = figures[self.side], figures[self.side][0]
        ours, peer = _samples(found, self.ours), _samples(figures[self.rival or self.side], self.peer)
        if ours and peer:
            head, name = f"{self.ours}/", self.name.format_map({"case": case, **first})
            parts = {n.removeprefix(head): statistics.median(_samples(found, n)) for n in first if n.startswith(head)}
            if len(peer) == len(ours):
                entry = paired(name, ours, peer, self.unit, self.target, parts)
            else:  # single samples may be 0, as pauses are
                (one,), median, count = peer, statistics.median(ours), len(ours)
                entry = Entry(name, one / median, median, one, self.unit, count, p95(ours), None, self.target, parts)
            yield replace(entry, ours_p95=None, peer_p95=None) if self.brief else entry


def _samples(figures: Sequence[Figures], name: str) -> list[float]:
    """Samples of all runs; none where a run lacks the figure."""
    found: list[float] = []
    for each in figures:
        if name not in each:
            return []
        samples = each[name]
        found += samples if isinstance(samples, list) else [samples]
    return found


@dataclass(frozen=True)
class Scenario:
    """A row. `words`: overrides of all sides. `reference`: a side that runs once, before the others, for `prepare` to
    complete the scenario by its recording; it counts as a side of that name. `bytes_per_s`: each rank has a host of its
    own, whose cable carries so much. `beside`: what else the machine does. `repeats`: turns if nothing else is said."""

    name: str
    gpt: GptJob
    sides: Mapping[str, Side]
    figures: Callable[[Recording], Figures]
    comparisons: Sequence[Comparison] = ()
    notes: Callable[[Scenario, Runs], Iterable[str]] = lambda scenario, runs: ()
    words: tuple[str, ...] = ()
    reference: Side | None = None
    prepare: Callable[[Scenario, Recording], Scenario] = lambda scenario, reference: scenario
    bytes_per_s: float | None = None
    beside: Callable[[], AbstractContextManager[object]] = nullcontext
    repeats: int = 1

    def record(self, side: Side) -> Recording:
        """Run a side once. Raises `BenchFailed`."""
        with ExitStack() as stack:
            stack.enter_context(self.beside())
            words, work, machines, begin = (*self.words, *side.words), work_of(), (), lambda: None
            if self.bytes_per_s is not None:
                machines = stack.enter_context(hosts(self.gpt.ranks, self.bytes_per_s))
                words, begin = (*words, f"launch.host={machines[0].address}"), machines[0].enter
                work = partial(_on_its_host, machines, work)
            job = stack.enter_context(OwnJob(self.gpt.config(*words), work, begin))
            live = LiveRun(job, self.gpt, words, machines)
            side.script(live)
            return live.recording()

    def outcome(self, progress: Callable[[str], None], repeats: int | None) -> Outcome:
        """All sides in turns, after the reference."""
        scenario, runs = self, dict[str, list[Recording]]()
        if self.reference is not None:
            progress(f"{self.name}: reference")
            runs["reference"] = [self.record(self.reference)]
            scenario = self.prepare(self, runs["reference"][0])
        sides = {name: partial(scenario.record, side) for name, side in scenario.sides.items()}
        runs |= in_turns(sides, repeats or self.repeats, progress, f"{self.name}: turn")
        figures = {side: [scenario.figures(run) for run in found] for side, found in runs.items()}
        entries = [entry for each in scenario.comparisons for entry in each.entries(self.name, figures)]
        return Outcome(entries, tuple(scenario.notes(scenario, runs)))


@dataclass(frozen=True)
class Table:
    """A benchmark: its rows, or with --tiny others; `of_ranks` makes a row for each of some numbers of ranks instead.
    `header`: lines above the notes of the rows. `check` raises ConfigError where the machine lacks something."""

    rows: Sequence[Scenario]
    tiny: Sequence[Scenario]
    header: Sequence[str] = ()
    of_ranks: Callable[[int, bool], Scenario] | None = None
    check: Callable[[], object] = lambda: None

    def run(self, progress: Callable[[str], None], options: Options) -> Outcome:
        """All rows that were chosen. Raises ConfigError where none has the requested name."""
        self.check()
        entries, notes = list[Entry](), [*self.header]
        rows = self.tiny if options.tiny else self.rows
        if options.ranks and self.of_ranks:
            rows = [self.of_ranks(number, options.tiny) for number in options.ranks]
        chosen = [row for row in rows if options.only in row.name]
        if not chosen:
            names = "; ".join(row.name for row in rows)
            raise ConfigError(f"--only {options.only}: no case has this in its name; there are {names}")
        with tempfile.TemporaryDirectory(prefix="elaswave-bench-") as cache:
            for row in chosen:
                found = replace(row, words=(f"cache.dir={cache}", *row.words)).outcome(progress, options.repeats)
                entries += found.entries
                notes += found.notes
        return Outcome(entries, notes)


def _on_its_host(
    machines: Sequence[Host], work: Work, reports: Reports, config: Config, context: WorkerContext
) -> Mapping[str, Any] | None:
    """Do a rank's work in the namespace of its number, where others reach it by another address."""
    host = machines[context.rank]
    host.enter()
    context.host = host.address
    return work(reports, config, context)
