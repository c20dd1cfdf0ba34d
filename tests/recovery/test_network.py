"""Silent cuts between hosts: frames vanish, no connection is reset, and the job goes on without those who are cut off.

Launcher and coordinator are on the first host, with the ranks that the job begins with. The others have joined; between
hosts all links are TCP.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from elaswave_fx.control.protocol.failure_detector import SILENT_FLOOR_S
from tests.e2e.test_joins import ROOT, assert_same_bits, config_of
from tests.marks import slow
from tests.recovery.harness import Finished, Job, finish
from tests.waiting import await_true
from tools.bench.namespaces import Host, hosts, missing, silence

pytestmark = pytest.mark.skipif(missing() is not None, reason=f"no cuts between hosts are tried: {missing()}")

SLACK = 3.0
"""A busy machine lengthens deadlines: the coordinator's grow with the gaps between heartbeats."""

QUIET_STEPS = 20

BOTH = ((2, 0), (0, 2), (2, 1), (1, 2))
CUTS: dict[str, tuple[Sequence[tuple[int, int]], set[int]]] = {
    "off in both directions": (BOTH, {2}),
    "nothing that it sends arrives": (((2, 0), (2, 1)), {2}),
    "nothing arrives there": (((0, 2), (1, 2)), {2}),
    "from a rank that the coordinator hears": (((1, 2), (2, 1)), {1, 2}),
    "from such a rank, in one direction": (((1, 2),), {1, 2}),
}
"""What is cut, from host to host; and of whom one has to go."""

BOTH_WAYS, HEARD = "off in both directions", "from a rank that the coordinator hears"

ONE_EACH, TWO_EACH = (1, 3), (2, 2)
"""Ranks of a host, and hosts."""


@dataclass(frozen=True)
class Spread:
    """A job on several hosts, and what was started on all but the first."""

    job: Job
    hosts: tuple[Host, ...]
    joined: dict[int, subprocess.Popen[str]]
    hurry: Path

    def wait(self) -> Finished:
        """To the end, at full speed."""
        self.hurry.touch()
        return self.job.wait()


@contextmanager
def spread(folder: Path, placed: tuple[int, int] = ONE_EACH) -> Iterator[Spread]:
    hurry = folder / "hurry"
    each, count = placed
    with hosts(count) as machines:
        first, *others = machines
        config = config_of(hurry, (each, 1), f"parallel.ranks_per_host={each}", f"launch.host={first.address}")
        with Job(config, folder / "run", first.enter) as job:
            job.await_step(2)
            joined = dict(_join(job, host) for host in others for _ in range(each))
            try:
                await_true(lambda: _at_rest(job, each * count), "all ranks are members, and their replicas are there")
                yield Spread(job, machines, joined, hurry)
            finally:
                for process in joined.values():
                    process.kill()
                    process.communicate()


def _join(job: Job, host: Host) -> tuple[int, subprocess.Popen[str]]:
    words = [sys.executable, "-m", "elaswave_fx.worker", str(job.folder), "--host", host.address]
    process = host.start(words, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert process.stdout is not None
    said = process.stdout.readline()
    assert said.startswith("rank ") and said.endswith(" gets ready\n"), said
    return int(said.split()[1]), process


def _at_rest(job: Job, ranks: int) -> bool:
    """All have been members for a while: a planned move may follow a join, when replicas are there."""
    assert not job.ended, job.folder
    agreed = job.events("agreed")
    if not agreed or agreed[-1]["members"] != [*range(ranks)]:
        return False
    return len(job.events("stopping")) == len(agreed) and job.steps > agreed[-1]["step"] + QUIET_STEPS


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    folder = tmp_path_factory.mktemp("alone")
    (folder / "hurry").touch()
    return finish(config_of(folder / "hurry", (1, 1)), folder / "run")


@pytest.mark.parametrize("cut", [cut if cut == HEARD else slow(cut) for cut in CUTS])
def test_a_silent_cut(cut: str, alone: Finished, tmp_path: Path) -> None:
    ways, suspects = CUTS[cut]
    with spread(tmp_path) as now:
        job, epochs = now.job, len(now.job.events("agreed"))
        began_s = time.monotonic()
        for one, other in ways:
            silence(now.hosts[one], now.hosts[other])
        job.await_event("agreed", epochs + 1)
        job.await_event("resumed", epochs + 1)
        took_s = time.monotonic() - began_s
        run = now.wait()
    assert_same_bits(run, alone)
    went = run.of_kind("agreed")[epochs]
    (lost,) = went["lost"]
    assert lost in suspects and went["steps_redone"] <= 1, went
    assert took_s < SLACK * 3 * SILENT_FLOOR_S, f"{took_s} s, in {run.folder}"
    # The ledger has one line a step: who was cut off has committed nothing that is not in it.
    after = [line for line in run.ledger if line["epoch"] == went["epoch"]]
    assert after[0]["step"] == went["step"] and all(str(lost) not in line["tiles"] for line in after), run.folder


def test_a_silent_host_of_two_ranks(alone: Finished, tmp_path: Path) -> None:
    with spread(tmp_path, TWO_EACH) as now:
        job, epochs = now.job, len(now.job.events("agreed"))
        resumed = len(job.events("resumed"))
        here, there = now.hosts
        began_s = time.monotonic()
        silence(here, there)
        silence(there, here)
        await_true(lambda: job.ended or _members(job) == [0, 1], "the ranks of the other host are left out")
        job.await_event("resumed", resumed + 1)
        took_s = time.monotonic() - began_s
        run = now.wait()
    assert_same_bits(run, alone)
    after = run.of_kind("agreed")[epochs:]
    assert {rank for event in after for rank in event["lost"]} == {2, 3}, after
    assert sum(event["steps_redone"] for event in after) <= 1, after
    assert took_s < SLACK * 3 * SILENT_FLOOR_S, f"{took_s} s, in {run.folder}"
    last = [line for line in run.ledger if line["epoch"] >= after[-1]["epoch"]]
    assert last and all(not {"2", "3"} & line["tiles"].keys() for line in last), run.folder


def _members(job: Job) -> list[int]:
    return job.events("agreed")[-1]["members"]
