"""frequency: energy of a sample and length of a step, with the planner's clocks over fixed ones, on emulated ranks.

Every run is one of `train` with real processes and messages, whose kernels are waited for (docs/emulation.md) and take
longer or shorter by the clock of their rank. Fixed: all ranks at the nominal clock. At equal step time ours may choose
lower clocks, nothing higher; under the cap, which is what all ranks draw at nominal clocks, higher ones too.

Step times are measured. Joules are not: they are the watts of a rank's clock for the time that its plan says it
computes, and `IDLE_W` for the rest of the measured step, by the same rule on both sides.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from elaswave_fx.bench.results import Entry, Options, Outcome, in_turns, paired
from elaswave_fx.bench.whole_run import lines_of, run_folder
from elaswave_fx.bench.workload import Workload
from elaswave_fx.plan.plan import Plan

MICRO_BATCH = 4
STEP_S = 1.0
"""About a step at nominal clocks."""

STEPS, SKIPPED = 8, 2
REPEATS = 3
NOMINAL = "{mhz: 1500, speed: 1, watts: 300}"
LOWER = "{mhz: 900, speed: 0.6, watts: 120}, {mhz: 1200, speed: 0.8, watts: 190}"
HIGHER = "{mhz: 1800, speed: 1.2, watts: 480}"
NOMINAL_W, IDLE_W = 300, 60

WANTED_STEP = 0.99
"""Equal, but for noise."""


@dataclass(frozen=True)
class Case:
    """dp lanes of pp stages with m micro-batches each, at these speeds; so many layers do not divide evenly."""

    dp: int
    pp: int
    m: int
    layers: int = 9
    speeds: tuple[float, ...] = ()
    step_s: float = STEP_S

    @property
    def name(self) -> str:
        """Such as 2x4, m=4, rank 2 at 0.7."""
        slow = [f", rank {rank} at {speed:g}" for rank, speed in enumerate(self.speeds) if speed != 1]
        return f"{self.dp}x{self.pp}, m={self.m}{''.join(slow)}"

    @property
    def workload(self) -> Workload:
        """A GPT so small that its parameters take no time."""
        return Workload(
            layers=self.layers, width=16, heads=2, seq_len=16, global_batch=self.dp * self.m * MICRO_BATCH,
            ranks=self.dp * self.pp, stages=self.pp, micro_batch=MICRO_BATCH, clip_norm=None,
        )  # fmt: skip

    @property
    def words(self) -> tuple[str, ...]:
        """The overrides of every side."""
        unit_ms = 1e3 * self.step_s * self.pp / ((self.m + self.pp - 1) * (2 * self.layers + 2) * MICRO_BATCH)
        speeds = f"emulated.speeds=[{','.join(map(str, self.speeds))}]"
        return (
            "device=emulated", f"emulated.unit_ms={unit_ms}", "parallel.granule=1", f"steps={STEPS}",
            f"power.idle_w={IDLE_W}", *((speeds,) if self.speeds else ()),
        )  # fmt: skip

    @property
    def sides(self) -> Mapping[str, tuple[str, ...]]:
        """What each is told of clocks."""
        return {
            "fixed": (f"power.points=[{NOMINAL}]",),
            "ours": (f"power.points=[{LOWER}, {NOMINAL}]",),
            "ours, capped": (
                f"power.points=[{LOWER}, {NOMINAL}, {HIGHER}]", f"power.cap_w={NOMINAL_W * self.dp * self.pp}",
            ),
        }  # fmt: skip


CASES = (Case(2, 4, 4), Case(2, 4, 16), Case(2, 4, 4, speeds=(1, 1, 0.7, 1, 1, 1, 1, 1)))


@dataclass(frozen=True)
class Measured:
    """A step and a sample of one run; `reason`: of its plan."""

    step_ms: float
    sample_j: float
    reason: str


def run(progress: Callable[[str], None], options: Options) -> Outcome:
    """The peer of every entry is the side with fixed clocks."""
    cases = (Case(1, 2, 2, layers=3, step_s=0.2),) if options.tiny else CASES
    entries: list[Entry] = []
    notes: list[str] = []
    with tempfile.TemporaryDirectory(prefix="elaswave-bench-") as cache:
        for case in cases:
            sides = {
                name: partial(_run, case, (*case.words, f"cache.dir={cache}", *clocks))
                for name, clocks in case.sides.items()
            }
            runs = in_turns(sides, options.repeats or REPEATS, progress, f"{case.name}: all sides, turn")
            entries += _entries(case, runs)
            notes += ["", f"{case.name}: {case.workload.text()}"]
            notes += [f"  {name}: {found[0].reason}" for name, found in runs.items()]
    return Outcome(entries, notes)


def _run(case: Case, words: Sequence[str]) -> Measured:
    with run_folder(case.workload.config(*words)) as folder:
        lines = lines_of(folder / "metrics.jsonl")[SKIPPED:]
        reason = Plan.from_json((folder / "plan-0.json").read_text()).reason
    return Measured(
        statistics.median(line["step_ms"] for line in lines),
        statistics.median(line["energy_per_token_j"] for line in lines),
        reason,
    )


def _entries(case: Case, runs: Mapping[str, Sequence[Measured]]) -> Iterator[Entry]:
    def step(name: str) -> list[float]:
        return [each.step_ms for each in runs[name]]

    def joules(name: str) -> list[float]:
        return [each.sample_j for each in runs[name]]

    cap = f"{case.name}, {NOMINAL_W * case.dp * case.pp} W"
    yield paired(f"{case.name}: a step", step("ours"), step("fixed"), "ms", WANTED_STEP)
    yield paired(f"{case.name}: a sample", joules("ours"), joules("fixed"), "J")
    yield paired(f"{cap}: a step", step("ours, capped"), step("fixed"), "ms", WANTED_STEP)
    yield paired(f"{cap}: a sample", joules("ours, capped"), joules("fixed"), "J")
