"""A long run with a fault every 50 steps, none of which costs a rank: memory, descriptors and threads stay flat.

    enduring((2, 2), 10_000)   ->  a scenario that prints, for every process of the run, what it held at first and last

In turn the links of a rank are cut, a rank stops for a moment, and the launcher does; once in every ten faults the
coordinator is killed instead, for one that ends oftener is started again only after a pause. What the processes hold is
read in every round of ten, and after the last fault. The first figures count from a tenth of the steps on, and not
before every kind of fault has been met.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.recovery import fault_matrix as cases
from tests.recovery.fault_matrix import Layout
from tests.recovery.harness import Finished, Job, job_config
from tests.recovery.invariants import assert_survived
from tests.recovery.references import References
from tests.recovery.scenarios import Scenario
from tests.waiting import await_true
from tools.bench.connection_resets import cut_links, links_between

EVERY = 50
"""Steps between two faults."""

AT_THE_END = 3
"""So many times that number pass without a fault, while the last figures are read."""

RANK_STOPS_S, LAUNCHER_STOPS_S = 0.3, 0.2
"""Shorter than the silence after which a rank is left out."""

MEMORY_MIB, MEMORY_PER_FAULT_MIB = 16.0, 0.1
"""What a process may hold more at the end: so much, and so much for every fault since the first figures."""

MOST_MORE = 2
"""Descriptors, and threads, that a process may have more at the end: one that is just being opened or handed over."""

_READINGS, _PAUSE_S = 3, 0.004
_MIB = float(1 << 20)


@dataclass(frozen=True)
class Held:
    """What one process holds: memory that is its alone, open descriptors, threads."""

    memory_mib: float
    descriptors: int
    threads: int


def enduring(layout: Layout, steps: int) -> Scenario:
    """A fault every 50 steps; nobody is lost, and nothing grows."""

    def check(folder: Path, references: References) -> Finished:
        config = job_config(layout, f"steps={steps}", "global_batch=12", "parallel.ranks_per_host=1")
        readings: list[tuple[int, dict[str, Held]]] = []
        planned = steps // EVERY - AT_THE_END
        number = 0
        with Job(config, folder) as job:
            for number in range(planned):
                job.await_step((number + 1) * EVERY)
                if job.steps > steps - AT_THE_END * EVERY:
                    break  # Steps are so fast that many pass while one fault is recovered from.
                ROUND[number % len(ROUND)](job, number)
                job.await_step(job.steps + EVERY // 5)
                if number % len(ROUND) == ALL_KINDS - 1:
                    readings.append((number + 1, holdings(job)))
            assert not job.ended and number >= planned // 2, f"only {number} faults, in {folder}"
            readings.append((number + 1, holdings(job)))
            run = job.wait()
        warm = next(each for each in readings if each[0] * EVERY >= steps // 10)
        print("\n".join(described(warm, readings[-1])), flush=True)
        assert_flat(warm, readings[-1], folder)
        assert_survived(run, references.of(config), set())
        return run

    return Scenario("enduring", f"{cases.name_of(layout)}-{steps}-steps-fault-every-{EVERY}", check)


def holdings(job: Job) -> dict[str, Held]:
    """What the ranks, the launcher and the coordinator hold now."""
    await_true(lambda: job.coordinator() is not None, "a coordinator")
    coordinator = job.coordinator()
    assert coordinator is not None
    pids = {f"rank {rank}": pid for rank, pid in job.pids.items()}
    pids |= {"launcher": job.launcher, "coordinator": coordinator}
    assert job.signal_rank(0, signal.SIGSTOP), f"the run is over, in {job.folder}"  # all wait for it
    try:
        return {name: _held(pid) for name, pid in pids.items()}
    except psutil.NoSuchProcess as error:
        raise AssertionError(f"{error} after {job.steps} steps, in {job.folder}") from error
    finally:
        job.signal_rank(0, signal.SIGCONT)


def _held(pid: int) -> Held:
    """The least of some readings: a file that is being written is open for a moment."""
    process = psutil.Process(pid)
    found = []
    for _ in range(_READINGS):
        found.append((process.memory_full_info().uss / _MIB, process.num_fds(), process.num_threads()))
        time.sleep(_PAUSE_S)
    memory_mib, descriptors, threads = map(min, zip(*found, strict=True))
    return Held(memory_mib, int(descriptors), int(threads))


def described(first: tuple[int, dict[str, Held]], last: tuple[int, dict[str, Held]]) -> list[str]:
    """A line for every process."""
    lines = [f"      after {first[0]} and after {last[0]} faults:"]
    for name, before in first[1].items():
        after = last[1][name]
        lines.append(
            f"      {name:12} memory {before.memory_mib:6.1f} -> {after.memory_mib:6.1f} MiB, "
            f"descriptors {before.descriptors} -> {after.descriptors}, threads {before.threads} -> {after.threads}"
        )
    return lines


def assert_flat(first: tuple[int, dict[str, Held]], last: tuple[int, dict[str, Held]], folder: Path) -> None:
    """What was held after the last fault, against what was held when it had become warm."""
    faults = last[0] - first[0]
    assert faults > 0, "nothing to compare"
    for name, before in first[1].items():
        after = last[1][name]
        told = f"{name}: {before} at first, {after} after {faults} more faults, in {folder}"
        assert after.descriptors <= before.descriptors + MOST_MORE, told
        assert after.threads <= before.threads + MOST_MORE, told
        assert after.memory_mib <= before.memory_mib + MEMORY_MIB + MEMORY_PER_FAULT_MIB * faults, told


# --- The faults: (run, number of the fault), which also chooses the rank


def _cut(job: Job, number: int) -> None:
    rank = _rank(job, number)
    others = [pid for other, pid in job.pids.items() if other != rank]
    await_true(
        lambda: len(links_between(job.pids[rank], others)) == len(others) or job.ended,
        f"fault {number}: rank {rank} has its links, in {job.folder}",
    )
    recovered = len(job.events("resumed"))
    assert cut_links(job.pids[rank], others), f"fault {number}: rank {rank} has no links, in {job.folder}"
    job.await_event("resumed", recovered + 1)


def _kill_coordinator(job: Job, number: int) -> None:
    ended = len(job.events("coordinator"))
    assert job.signal_coordinator(signal.SIGKILL), f"fault {number}: nobody there to be killed, in {job.folder}"
    job.await_event("coordinator", ended + 1)


def _stop_rank(job: Job, number: int) -> None:
    rank = _rank(job, number)
    assert job.signal_rank(rank, signal.SIGSTOP), f"fault {number}: rank {rank} has ended, in {job.folder}"
    time.sleep(RANK_STOPS_S)
    assert job.signal_rank(rank, signal.SIGCONT), f"fault {number}: rank {rank} has ended, in {job.folder}"


def _stop_launcher(job: Job, number: int) -> None:
    assert job.signal_launcher(signal.SIGSTOP), f"fault {number}: the launcher has ended, in {job.folder}"
    time.sleep(LAUNCHER_STOPS_S)
    assert job.signal_launcher(signal.SIGCONT), f"fault {number}: the launcher has ended, in {job.folder}"


def _rank(job: Job, number: int) -> int:
    return (number // 3) % len(job.pids)


ROUND: tuple[Callable[[Job, int], None], ...] = (
    _cut, _kill_coordinator, _stop_rank, _stop_launcher, *2 * (_cut, _stop_rank, _stop_launcher),
)  # fmt: skip
ALL_KINDS = 4
"""So many of a round have each kind once."""
