"""frequency: energy of a sample and length of a step, with the planner's clocks over fixed ones, on emulated ranks.

Every run is one of `train` with real processes and messages, whose kernels are waited for and take
longer or shorter by the clock of their rank. Fixed: all ranks at the nominal clock. Ours chooses among lower and higher
ones, once under the cap that all ranks draw at nominal clocks, and once under the least cap by which its plan promises
a step that is as short as the fixed one.

Step times are measured. Joules are not: they are the watts of a rank's clock for the time that its plan says it
computes, and `IDLE_W` for the rest of the measured step, by the same rule on both sides.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from elaswave_fx.plan.plan import Plan
from elaswave_fx.plan.predict.frequency import clock_words, with_clocks
from elaswave_fx.plan.work.cost import ROUNDING
from elaswave_fx.plan.work.operating_points import OperatingPoint, Power
from tools.bench.gpt_job import EmulatedLanes
from tools.bench.results import Entry, Options, Outcome, in_turns, paired
from tools.bench.whole_run import lines_of, run_folder

STEP_S = 1.0
"""About a step at nominal clocks."""

STEPS, SKIPPED = 8, 2
REPEATS = 2
POINTS = (
    OperatingPoint(1050, 0.7, 162),
    OperatingPoint(1200, 0.8, 198),
    OperatingPoint(1350, 0.9, 243),
    OperatingPoint(1500, 1.0, 300),
    OperatingPoint(1650, 1.1, 370),
    OperatingPoint(1800, 1.2, 453),
)
NOMINAL, IDLE_W = Power(POINTS).nominal, 60.0
CAP_STEP = 0.02
"""Of the cap, by which it is lowered while the step stays as short."""

WANTED_STEP = 0.99
"""Equal, but for noise."""


@dataclass(frozen=True)
class Case(EmulatedLanes):
    """With ranks of these speeds. Units of so few layers need not divide evenly."""

    layers: int = 4
    step_s: float = STEP_S
    speeds: tuple[float, ...] = ()

    @property
    def title(self) -> str:
        """Such as 2x4, m=4, rank 2 at 0.7."""
        slow = [f", rank {rank} at {speed:g}" for rank, speed in enumerate(self.speeds) if speed != 1]
        return f"{self.name}{''.join(slow)}"

    @property
    def nominal_w(self) -> float:
        """What all ranks draw at nominal clocks."""
        return NOMINAL.watts * self.dp * self.pp


CASES = (Case(2, 4, 16), Case(2, 4, 4), Case(2, 4, 16, layers=6, speeds=(1, 1, 0.7, 1, 1, 1, 1, 1)))


@dataclass(frozen=True)
class Measured:
    """A step and a sample of one run."""

    step_ms: float
    sample_j: float
    plan: Plan


def run(progress: Callable[[str], None], options: Options) -> Outcome:
    """The peer of every entry is the side with fixed clocks."""
    cases = (Case(1, 2, 2, layers=3, step_s=0.2),) if options.tiny else CASES
    entries: list[Entry] = []
    notes: list[str] = []
    with tempfile.TemporaryDirectory(prefix="elaswave-bench-") as cache:
        for case in cases:
            speeds = (f"emulated.speeds=[{','.join(map(str, case.speeds))}]",) if case.speeds else ()
            words = (*case.words, *speeds, f"steps={STEPS}", f"power.idle_w={IDLE_W:g}", f"cache.dir={cache}")
            progress(f"{case.title}: fixed, to know its plan")
            equal_w = _least_cap_w(_run(case, (*words, *_clocks((NOMINAL,)))).plan, case.nominal_w)
            sides = {
                "fixed": partial(_run, case, (*words, *_clocks((NOMINAL,)))),
                "capped": partial(_run, case, (*words, *_clocks(POINTS, case.nominal_w))),
                "equal": partial(_run, case, (*words, *_clocks(POINTS, equal_w))),
            }
            runs = in_turns(sides, options.repeats or REPEATS, progress, f"{case.title}: all sides, turn")
            entries += _entries(f"{case.title}, {case.nominal_w:g} W", runs["capped"], runs["fixed"])
            entries += _entries(f"{case.title}, {equal_w:g} W", runs["equal"], runs["fixed"])
            notes += ["", f"{case.title}: {case.gpt.text()}"]
            notes += [f"  {name}: {'; '.join(clock_words(found[0].plan))}" for name, found in runs.items()]
    return Outcome(entries, notes)


def _clocks(points: Sequence[OperatingPoint], cap_w: float | None = None) -> tuple[str, ...]:
    listed = ", ".join(f"{{mhz: {each.mhz:g}, speed: {each.speed:g}, watts: {each.watts:g}}}" for each in points)
    return f"power.points=[{listed}]", *(() if cap_w is None else (f"power.cap_w={cap_w:g}",))


def _least_cap_w(fixed: Plan, cap_w: float) -> float:
    """The least cap by which the same layout has a step as short as `fixed`, to `CAP_STEP`."""
    limit_s = fixed.predicted.step_s * (1 + ROUNDING)
    least_w = len(fixed.ranks) * Power(POINTS).least_w
    while (lower_w := round(cap_w * (1 - CAP_STEP))) > least_w:
        topology = replace(fixed.topology, power=Power(POINTS, lower_w, IDLE_W))
        if with_clocks(replace(fixed, topology=topology)).predicted.step_s > limit_s:
            break
        cap_w = lower_w
    return cap_w


def _run(case: Case, words: Sequence[str]) -> Measured:
    with run_folder(case.gpt.config(*words)) as folder:
        lines = lines_of(folder / "metrics.jsonl")[SKIPPED:]
        plan = Plan.from_json((folder / "plan-0.json").read_text())
    return Measured(
        statistics.median(line["step_ms"] for line in lines),
        statistics.median(line["energy_per_token_j"] for line in lines),
        plan,
    )


def _entries(name: str, ours: Sequence[Measured], fixed: Sequence[Measured]) -> Iterator[Entry]:
    yield paired(f"{name}: a step", [m.step_ms for m in ours], [m.step_ms for m in fixed], "ms", WANTED_STEP)
    yield paired(f"{name}: a sample", [m.sample_j for m in ours], [m.sample_j for m in fixed], "J")
