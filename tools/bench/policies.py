"""policies: a step after one, two and three losses by every policy, on emulated ranks of one runtime.

Every run is one of `train` with real processes and messages, whose kernels are waited for. All runs
of a case start from the same plan, have the same micro-batches, batch and memory, and lose the same ranks at the same
steps, by SIGKILL; only `policy`, `planner.axes` or `parallel.schedule` is another one. A sample is the median of the
steps between two losses, but for the first ones, which are done again or wait for copies.

Proportional is the undisturbed step of the same run, times ranks before over ranks left. A step of fewer samples
(`smaller_batch`, which is what TorchFT does) is compared by its time per sample, times those of the whole batch. Memory
of a rank is what the undisturbed 1F1B plan needs at most, times `ROOM`. What ReCycle's staggered optimizer would bring
to `recycle` is simulated, and stands in the notes.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from elaswave_fx.plan.plan import Plan
from tools.bench.gpt_job import EmulatedLanes, cases_named
from tools.bench.results import Entry, Options, Outcome, in_turns, paired
from tools.bench.staggered import staggered_step_s
from tools.bench.whole_run import lines_of, run_folder

ROOM = 1.5
"""Memory of each rank, over what it needs while nobody is lost: a lane one stage shallower needs about 4/3 of it."""

STEP_S = 2.2
"""About an undisturbed step: so long that what 16 ranks do on two cores besides waiting is a few hundredths of it."""

STEPS, SKIPPED = 5, 2
"""From one loss to the next, and how many of them do not count."""

WAYS: Mapping[str, tuple[str, ...]] = {
    "ours": (),
    "recycle": ("policy=recycle",),
    "drop_replica": ("policy=drop_replica",),
    "smaller_batch": ("policy=smaller_batch",),
    "restart": ("policy=restart",),
    "ours without dataflow": ("planner.axes=[graph,frequency]",),
    "ours without graph": ("planner.axes=[dataflow,frequency]",),
    "ours without split": ("parallel.schedule=1f1b",),
}
"""What each is told; `recycle` has units that stay, with the halves of backward wherever they pay."""

WANTED = {"proportional": (0.96, 0.95, None), "drop_replica": (1.15,) * 3, "predicted": (0.97,) * 4}
NOISE = 0.99
"""Wanted against all others."""


@dataclass(frozen=True)
class Case(EmulatedLanes):
    """Who is lost, one after another."""

    layers: int = 24
    step_s: float = STEP_S
    lost: tuple[int, ...] = field(kw_only=True)


CASES = tuple(
    Case(dp, pp, times * pp, lost=lost)
    for dp, pp, lost in ((4, 4, (5, 10, 7)), (2, 8, (10, 13, 15)))
    for times in (1, 2, 4, 8)
)
"""Each stage keeps a rank, and some lane stays whole, so that every policy has an answer to every loss."""


@dataclass(frozen=True)
class Phase:
    """The steps between two losses."""

    step_ms: float
    plan: Plan

    @property
    def predicted_ms(self) -> float:
        """The plan's step."""
        return 1e3 * self.plan.predicted.step_s

    @property
    def whole_batch_ms(self) -> float:
        """As long as the samples of the whole batch take at the rate of the step."""
        return self.step_ms * self.plan.workload.options.global_batch / self.plan.workload.samples


Phases = tuple[Phase, ...]
"""Before the first loss, after it, …; fewer than losses where the policy had no answer."""


def run(progress: Callable[[str], None], options: Options) -> Outcome:
    """All cases, all ways. Raises ConfigError where no case has the name that was asked for."""
    cases = CASES
    if options.tiny:
        cases = (Case(2, 2, 2, lost=(3,), layers=6, step_s=0.2),)
    entries: list[Entry] = []
    notes: list[str] = []
    for case in cases_named(cases, options.only):
        found, lines = _case(case, progress, options.repeats or 1)
        entries += found
        notes += ["", *lines]
    return Outcome(entries, notes)


def _case(case: Case, progress: Callable[[str], None], repeats: int) -> tuple[list[Entry], list[str]]:
    with tempfile.TemporaryDirectory(prefix="elaswave-bench-") as cache:
        words = (
            *case.words, f"cache.dir={cache}", f"steps={STEPS * (len(case.lost) + 1)}",
        )  # fmt: skip
        progress(f"{case.name}: 1f1b, undisturbed")
        plain, memory_mb = _undisturbed(case, (*words, f"steps={STEPS}", "parallel.schedule=1f1b"))
        sides = {
            name: partial(_run, case, (*words, f"emulated.memory_mb={memory_mb}", *own)) for name, own in WAYS.items()
        }
        runs = in_turns(sides, repeats, progress, f"{case.name}: all policies, turn")
    notes = list(_notes(case, {name: found[0] for name, found in runs.items()}, memory_mb))
    return list(_entries(case, plain, runs)), notes


def _undisturbed(case: Case, words: Sequence[str]) -> tuple[Phase, float]:
    """With 1F1B and all the memory that it wants; and that memory, in MiB, times `ROOM`."""
    with run_folder(case.gpt.config(*words)) as folder:
        plan = Plan.from_json((folder / "plan-0.json").read_text())
        most = max(cost.memory_bytes for cost in plan.predicted.ranks.values())
        return _phases(folder)[0], round(ROOM * most / 2**20, 4)


def _run(case: Case, words: Sequence[str]) -> Phases:
    losses = (f"{{step: {STEPS * (n + 1)}, rank: {rank}, phase: backward}}" for n, rank in enumerate(case.lost))
    with run_folder(case.gpt.config(*words, f"faults=[{', '.join(losses)}]"), may_fail=True) as folder:
        return _phases(folder)


def _phases(folder: Path) -> Phases:
    """By number of ranks; of several plans for the same ranks, the last one."""
    by_size: dict[int, list[tuple[float, int]]] = {}
    for line in lines_of(folder / "metrics.jsonl"):
        by_size.setdefault(line["world_size"], []).append((line["step_ms"], line["epoch"]))
    found = []
    for steps in by_size.values():
        plan = Plan.from_json((folder / f"plan-{steps[-1][1]}.json").read_text())
        counted = steps[SKIPPED:] or steps
        found.append(Phase(statistics.median(ms for ms, _ in counted), plan))
    return tuple(found)


def _entries(case: Case, plain: Phase, runs: Mapping[str, Sequence[Phases]]) -> Iterator[Entry]:
    ours = runs["ours"]
    first = [phases[0].step_ms for phases in ours]
    yield paired(f"{case.name}, undisturbed: against 1f1b", first, [plain.step_ms] * len(first), "ms", NOISE)
    for lost in range(len(case.lost) + 1):
        name = f"{case.name}, {lost} lost"
        own = [phases[lost].step_ms for phases in ours]
        predicted = [phases[lost].predicted_ms for phases in ours]
        yield paired(f"{name}: as predicted", own, predicted, "ms", WANTED["predicted"][lost])
        if not lost:
            continue
        ranks = case.dp * case.pp
        proportional = [step_ms * ranks / (ranks - lost) for step_ms in first]
        yield paired(f"{name}: proportional", own, proportional, "ms", WANTED["proportional"][lost - 1])
        for rival, found in runs.items():
            if rival != "ours" and all(len(phases) > lost for phases in found):
                wanted = WANTED[rival][lost - 1] if rival in WANTED else NOISE
                yield paired(f"{name}: {rival}", own, [phases[lost].whole_batch_ms for phases in found], "ms", wanted)


def _notes(case: Case, runs: Mapping[str, Phases], memory_mb: float) -> Iterator[str]:
    """Of the first turn: what each did."""
    victims = ", ".join(map(str, case.lost))
    yield f"{case.name}: {case.gpt.text()}; {memory_mb:g} MiB a rank; ranks {victims} are lost"
    for name, phases in runs.items():
        for lost, phase in enumerate(phases):
            if lost or name == "ours":
                over, work = phase.step_ms / phase.predicted_ms, phase.plan.workload
                of_batch = f" for {work.samples} of {work.options.global_batch} samples" if work.skipped else ""
                took = f"{phase.step_ms:.0f} ms{of_batch}, {over:.3f} of predicted"
                yield f"  {lost} lost, {name}: {took}; {phase.plan.reason}"
        if len(phases) <= len(case.lost):
            yield f"  {len(phases)} lost, {name}: no answer, the run ended"
    for lost, phase in enumerate(runs["recycle"]):
        gain = phase.plan.predicted.step_s / staggered_step_s(phase.plan)
        yield f"  {lost} lost, recycle with its staggered optimizer (simulated): {gain:.3f} of recycle's throughput"
