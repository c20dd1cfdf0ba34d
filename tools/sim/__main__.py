"""Run schedules: `python -m tools.sim --seeds 0:100000`, and one again: `--seed 4711 --trace`.

Prints what was run and found; exit code 1 if a promise was broken.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections import Counter
from collections.abc import Iterable
from multiprocessing import get_context

from tools.sim.bugs import BUGS, SOUND
from tools.sim.outcome import Outcome
from tools.sim.world import run_schedule, trace_schedule

CHUNK = 250
"""Schedules that a process takes at a time."""


def run_range(work: tuple[int, int, str | None]) -> list[Outcome]:
    """The outcomes of seeds [first, last); with a planted bug up to the first violation."""
    first, last, bug = work
    outcomes = []
    for seed in range(first, last):
        outcomes.append(run_schedule(seed, BUGS[bug] if bug else SOUND))
        if bug and outcomes[-1].violation is not None:
            break
    return outcomes


def chunks(first: int, last: int, bug: str | None) -> list[tuple[int, int, str | None]]:
    """The seeds in portions."""
    return [(at, min(at + CHUNK, last), bug) for at in range(first, last, CHUNK)]


def campaign(first: int, last: int, bug: str | None, jobs: int) -> int:
    """Run all seeds and print the sums; the number of violations found."""
    started_s, cpu_s = time.monotonic(), time.process_time()
    totals: Counter[str] = Counter()
    kinds: Counter[str] = Counter()
    said: Counter[str] = Counter()
    work = chunks(first, last, bug)
    if jobs > 1:
        with get_context("fork").Pool(jobs) as pool:
            failed = _collect(pool.imap(run_range, work), totals, kinds, said, bug)
    else:
        failed = _collect(map(run_range, work), totals, kinds, said, bug)
    seconds = f"{time.monotonic() - started_s:.0f} s"
    if jobs == 1:
        seconds += f", {time.process_time() - cpu_s:.0f} s of CPU"
    print(f"{totals['schedules']} schedules, {totals['events']} events, {seconds}: {failed} violations")
    print(", ".join(f"{name} {totals[name]}" for name in ("committed", "epochs", "rollbacks", "orphans", "excused")))
    print("said: " + ", ".join(f"{mark} {count}" for mark, count in sorted(said.items())))
    print("faults that struck: " + ", ".join(f"{kind} {count}" for kind, count in sorted(kinds.items())))
    return failed


def _collect(
    results: Iterable[list[Outcome]], totals: Counter[str], kinds: Counter[str], said: Counter[str], bug: str | None
) -> int:
    failed = 0
    for outcomes in results:
        for outcome in outcomes:
            totals["schedules"] += 1
            for name in ("events", "committed", "epochs", "rollbacks", "orphans", "excused"):
                totals[name] += getattr(outcome, name)
            kinds.update(fault.kind for fault in outcome.faults)
            said.update(outcome.said)
            if outcome.violation is not None:
                failed += 1
                again = f"python -m tools.sim --seed {outcome.seed} --trace" + (f" --bug {bug}" if bug else "")
                print(f"seed {outcome.seed}: {outcome.violation}\n  again: {again}", flush=True)
    return failed


def main(arguments: list[str] | None = None) -> int:
    """The command; 0 if every promise held."""
    parser = argparse.ArgumentParser(prog="python -m tools.sim", description=__doc__)
    parser.add_argument("--seeds", default="0:2000", help="A:B, the seeds from A to before B")
    parser.add_argument("--seed", type=int, help="one seed")
    parser.add_argument("--trace", action="store_true", help="with --seed: a line per event")
    parser.add_argument("--bug", choices=sorted(BUGS), help="plant a protocol bug")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    options = parser.parse_args(arguments)
    gc.freeze()  # else collections scan all modules, which takes a third of the time
    if options.seed is None:
        first, last = (int(part) for part in options.seeds.split(":"))
        return 1 if campaign(first, last, options.bug, options.jobs) else 0
    outcome, lines = trace_schedule(options.seed, BUGS[options.bug] if options.bug else SOUND)
    if options.trace:
        print("\n".join(lines))
    print(outcome)
    return 1 if outcome.violation is not None else 0


if __name__ == "__main__":
    sys.exit(main())
