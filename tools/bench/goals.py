"""goals: throughput from a loss on, with goals in the background, in a stop (blocking), and with none, emulated.

Every run is one of `train`, which loses one rank by SIGKILL in a backward pass, and another one `COUNTED` steps later;
only `planner.goals` is another one. What counts is the wall time from the last commit before a loss to that of the
`COUNTED`th step after it: recovery, catching up and all planned stops are in it. Samples over that time are compared
with proportional, which is the undisturbed step of the same run, times ranks before over ranks left.

A link needs 0.3 to 0.4 s for the parameters of as many units as a stage has: about what the exchange takes of a step,
for whoever computes a unit exchanges its gradients over the same links in every step. So a stall is never much longer
than an exchange. What more there is to win are the steps after it: whoever has no copy of what it computes with is sent
its parameters in every step, until copies have caught up.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise

from elaswave_fx.plan.plan import Plan
from tools.bench.gpt_job import EmulatedLanes, GptJob, cases_named
from tools.bench.own_job import FOREVER, OwnJob, Variant
from tools.bench.processes import TEST_TIMEOUT_S
from tools.bench.results import Entry, Options, Outcome, in_turns, paired

STEP_S = 1.2
"""About an undisturbed step, without the exchange."""

BEFORE, COUNTED = 10, 50
"""Steps before the first loss, and from each loss on."""

MODES = ("background", "blocking", "never")
WANTED = 0.95
"""Of proportional, with goals in the background; these are to be above both others."""


@dataclass(frozen=True)
class Case(EmulatedLanes):
    """Who is lost, one after another, `counted` steps apart, the first after `before`. `memory_mb`: 1.5 times what the
    fullest rank needs by the undisturbed 1F1B plan. Backward passes stay whole: plans are made in half a second then,
    while the ranks take the same cores."""

    step_s: float = STEP_S
    lost: tuple[int, ...] = field(kw_only=True)
    memory_mb: float = field(kw_only=True)
    before: int = BEFORE
    counted: int = COUNTED
    bytes_per_s: float = 2e6

    @property
    def gpt(self) -> GptJob:
        """A GPT whose parameters are large against its activations."""
        return replace(super().gpt, width=64, seq_len=8, ranks_per_host=1, tied=False)

    @property
    def words(self) -> tuple[str, ...]:
        """The overrides: emulated ranks, each a host, and their links."""
        link = f"emulated.link={{latency_ms: 0.1, bytes_per_s: {self.bytes_per_s}}}"
        return *super().words, f"emulated.memory_mb={self.memory_mb}", link, "parallel.schedule=1f1b"


CASES = (
    Case(4, 4, 16, layers=15, lost=(5, 10), memory_mb=8.16),
    Case(2, 8, 32, layers=23, lost=(10, 13), memory_mb=9.12),
)
TINY = Case(2, 2, 2, layers=2, step_s=0.2, lost=(3,), memory_mb=64, before=3, counted=6)


@dataclass(frozen=True)
class Watched:
    """A run: the undisturbed step, and after each loss the mean step with all that came between, in milliseconds; its
    plans, and the steps of each, with what came before the first one."""

    whole_ms: float
    lost_ms: tuple[float, ...]
    plans: tuple[Plan, ...]
    steps_ms: Mapping[int, Sequence[float]]


def run(progress: Callable[[str], None], options: Options) -> Outcome:
    """All cases, all modes. Raises ConfigError where no case has the name that was asked for."""
    cases = (TINY,) if options.tiny else CASES
    entries: list[Entry] = []
    notes: list[str] = []
    for case in cases_named(cases, options.only):
        sides = {mode: partial(_run, case, mode) for mode in MODES}
        runs = in_turns(sides, options.repeats or 1, progress, f"{case.name}: all modes, turn")
        entries += _entries(case, runs)
        notes += ["", *_notes(case, {mode: found[0] for mode, found in runs.items()})]
    return Outcome(entries, notes)


def _run(case: Case, mode: str) -> Watched:
    losses = (
        f"{{step: {case.before + n * case.counted}, rank: {rank}, phase: backward}}" for n, rank in enumerate(case.lost)
    )
    last = case.before + len(case.lost) * case.counted - 1
    words = (*case.words, f"planner.goals={mode}", f"faults=[{', '.join(losses)}]")
    with OwnJob(case.gpt, Variant(words=words), FOREVER) as job:
        at_s, epochs = zip(*(_committed(job) for _ in range(last + 1)), strict=True)
        files = sorted(job.folder.glob("plan-*.json"), key=lambda path: int(path.stem.split("-")[1]))
        plans = tuple(Plan.from_json(path.read_text()) for path in files)
    ends = range(case.before - 1, last + 1, case.counted)
    lost_ms = tuple(1e3 * (at_s[end] - at_s[begin]) / case.counted for begin, end in pairwise(ends))
    steps_ms: dict[int, list[float]] = {}
    for (begin_s, end_s), epoch in zip(pairwise(at_s), epochs[1:], strict=True):
        steps_ms.setdefault(epoch, []).append(1e3 * (end_s - begin_s))
    whole_ms = 1e3 * statistics.median(b - a for a, b in pairwise(at_s[: case.before]))
    return Watched(whole_ms, lost_ms, plans, steps_ms)


def _committed(job: OwnJob) -> tuple[float, int]:
    """When the first rank has committed its next step, by the clock of all processes, and in which epoch."""
    while True:
        said = job.hear("step", TEST_TIMEOUT_S)
        if said["rank"] == 0:
            return said["at_s"], said["epoch"]


def _entries(case: Case, runs: Mapping[str, Sequence[Watched]]) -> Iterator[Entry]:
    ranks = case.dp * case.pp
    for lost in range(1, len(case.lost) + 1):
        name = f"{case.name}, {lost} lost"
        by_mode = {mode: [each.lost_ms[lost - 1] for each in found] for mode, found in runs.items()}
        for mode, found in runs.items():
            proportional = [each.whole_ms * ranks / (ranks - lost) for each in found]
            wanted = WANTED if mode == MODES[0] else None
            yield paired(f"{name}, {mode}: proportional", by_mode[mode], proportional, "ms", wanted)
        for mode in MODES[1:]:
            yield paired(f"{name}, background: {mode}", by_mode[MODES[0]], by_mode[mode], "ms", 1.0)


def _notes(case: Case, runs: Mapping[str, Watched]) -> Iterator[str]:
    """Of the first turn: which plans there were, and how long their steps took."""
    victims = ", ".join(map(str, case.lost))
    yield f"{case.name}: {case.gpt.text()}; ranks {victims} are lost, {case.counted} steps apart"
    for mode, found in runs.items():
        predicted_ms = 1e3 * found.plans[0].predicted.step_s
        yield f"  {mode}: an undisturbed step {found.whole_ms:.0f} ms ({predicted_ms:.0f} predicted)"
        for plan in found.plans[1:]:
            yield f"    epoch {plan.epoch}, {_steps_words(plan, found.steps_ms.get(plan.epoch, ()))}: {plan.reason}"


def _steps_words(plan: Plan, steps_ms: Sequence[float]) -> str:
    predicted = f"{1e3 * plan.predicted.step_s:.0f} ms predicted"
    if not steps_ms:
        return f"no step, {predicted}"
    rest = f", then {statistics.median(steps_ms[1:]):.0f}" if len(steps_ms) > 1 else ""
    return f"{len(steps_ms)} steps, the first {steps_ms[0]:.0f} ms{rest} ({predicted})"
