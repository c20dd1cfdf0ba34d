"""Machines that go off with all their ranks, and machines that cannot be reached: each a network namespace, with mounts
of its own and a failure domain that it names."""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from elaswave_fx.control.coordinator.job_file import JobFile
from elaswave_fx.control.token import TOKEN
from elaswave_fx.plan.plan import Plan
from elaswave_fx.plan.replicas.holders import fatal_domains
from tests.e2e.test_joins import MISSING, ROOT, assert_same_bits, config_of
from tests.recovery.harness import Finished, Job, finish
from tests.recovery.test_network import _at_rest
from tests.waiting import await_true
from tools.bench.namespaces import Host, hosts, missing

pytestmark = pytest.mark.skipif(
    missing() is not None or MISSING is not None, reason=f"no machines are played: {missing() or MISSING}"
)

PATIENCE_S = 3.0


def join(job: Job, host: Host, domain: str) -> subprocess.Popen[str]:
    """By its address, from a machine that does not have the run directory."""
    address = JobFile.read(job.folder).address()
    worker = [sys.executable, "-m", "elaswave_fx.worker", f"tcp://{address.host}:{address.port}"]
    worker += ["--host", host.address, "--failure-domain", domain]
    alone = f'mount -t tmpfs none {shlex.quote(str(job.folder))}; exec "$@"'
    words = ["env", f"{TOKEN}={address.token}", "unshare", "--mount", "sh", "-e", "-c", alone, "sh", *worker]
    return host.start(words, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


@contextmanager
def two_machines(folder: Path, ranks: int, joiners: int, *words: str) -> Iterator[tuple[Job, Host, Path]]:
    """Each rank of the first one emulates a host, so that the plan could take two ranks of a machine for two hosts."""
    hurry = folder / "hurry"
    with hosts(2) as (first, other):
        config = config_of(hurry, (ranks, 1), "parallel.ranks_per_host=1", f"launch.host={first.address}", *words)
        with Job(config, folder / "run", first.enter) as job:
            job.await_step(2)
            joined = [join(job, other, "other") for _ in range(joiners)]
            try:
                await_true(lambda: _at_rest(job, ranks + joiners), "all ranks are members, and replicas are there")
                yield job, other, hurry
            finally:
                for process in joined:
                    process.kill()
                    process.communicate()


def take_down(host: Host) -> None:
    """Its link is gone, so that nobody hears of what ends there."""
    subprocess.run(["ip", "-n", host.name, "link", "set", "eth0", "down"], check=True)


def power_off(host: Host) -> None:
    take_down(host)
    pids = subprocess.run(["ip", "netns", "pids", host.name], check=True, capture_output=True, text=True).stdout.split()
    subprocess.run(["kill", "-KILL", *pids], check=True)


def newest_plan(job: Job) -> Plan:
    epoch = job.events("agreed")[-1]["epoch"]
    return Plan.from_json((job.folder / f"plan-{epoch}.json").read_text())


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    folder = tmp_path_factory.mktemp("alone")
    (folder / "hurry").touch()
    return finish(config_of(folder / "hurry", (1, 1)), folder / "run")


def test_a_machine_goes_off_with_all_its_ranks_and_the_job_goes_on(alone: Finished, tmp_path: Path) -> None:
    with two_machines(tmp_path, 2, 2) as (job, other, hurry):
        plan = newest_plan(job)
        (home, _, two, three) = plan.topology.members
        assert two.machine == three.machine == "other" and two.host == three.host
        assert plan.topology.machines == (home.machine, "other")
        assert fatal_domains(plan.topology, (box.local_materializers for box in plan.boxes)) == ()
        assert {2, 3} & {box.owner for box in plan.boxes}, "it takes something with it"
        power_off(other)
        await_true(lambda: job.ended or job.events("agreed")[-1]["members"] == [0, 1], "the others go on")
        hurry.touch()
        run = job.wait()
    assert_same_bits(run, alone)
    assert run.of_kind("waiting") == [] and not any("rolled_back_to" in each for each in run.of_kind("agreed"))


def test_a_last_replica_that_cannot_be_reached_is_not_waited_for_for_ever(tmp_path: Path) -> None:
    words = ("copies.count=0", f"recovery.patience_s={PATIENCE_S:g}")
    with two_machines(tmp_path, 1, 1, *words) as (job, other, _):
        assert any(box.owner == 1 for box in newest_plan(job).boxes)
        take_down(other)
        await_true(lambda: job.ended, "the job ends")
        run = job.wait()
    assert run.code == 1 and run.orphans == (), run.console
    (reason,) = [line for line in run.console.splitlines() if line.startswith("error: ")]
    assert reason.startswith(
        f"error: waited {PATIENCE_S:g} s (recovery.patience_s) for rank 1, which cannot be reached"
    )
    assert "no checkpoint was written (checkpoint.every), so that a new run begins again from its seed" in reason
    assert run.of_kind("waiting") != []
