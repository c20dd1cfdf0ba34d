"""Scenarios of particular moments and settings: start-up, evaluation, checkpoints, the end; no replicas, two replicas,
a launcher that dies, an overloaded machine.

They extend scenarios.py, and are used the same way.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path

from elaswave_fx.checkpoint.folder import complete
from elaswave_fx.checkpoint.manifest import check_files, read_manifest
from elaswave_fx.control.store.ledger import standing
from tests.recovery import fault_matrix as cases
from tests.recovery.fault_matrix import Layout
from tests.recovery.harness import Finished, Job, finish, job_config, lines_of, signal_process
from tests.recovery.invariants import assert_every_step_once, assert_same_arithmetic, assert_survived
from tests.recovery.references import References
from tests.recovery.scenarios import Scenario, assert_survived_or_lost, strike_later
from tests.waiting import await_true


def no_replicas(layout: Layout, rank: int, checkpoints: bool) -> Scenario:
    """`copies.count=0`: the run goes back to its newest checkpoint, or to the seed if that is allowed, and says so."""

    def check(folder: Path, references: References) -> Finished:
        words = ("steps=20", "copies.count=0", "checkpoint.every=4" if checkpoints else "recovery.allow_rollback=true")
        plain = job_config(layout, *words)
        run = finish(job_config(layout, *words, cases.faults_at([(14, rank, "backward")])), folder)
        assert_survived(run, references.of(plain), {rank}, rolled_back=True)
        (back,) = [line for line in run.ledger if "rolled_back_to" in line]
        assert back["rolled_back_to"] in ((4, 8, 12) if checkpoints else (0,)), back
        assert "ROLLED BACK" in run.console, "it is said loudly"
        assert run.summary["recoveries"][0]["rolled_back_to"] == back["rolled_back_to"]
        return run

    return Scenario(
        "no replicas", f"{cases.name_of(layout)}-rank{rank}-{'checkpoint' if checkpoints else 'seed'}", check
    )


def all_replicas(layout: Layout, ranks: tuple[int, int]) -> Scenario:
    """Both ranks that hold each other's boxes, at once and without a checkpoint: the run ends and says why."""

    def check(folder: Path, references: References) -> Finished:
        faults = cases.faults_at([(6, rank, "backward") for rank in ranks])
        run = finish(job_config(layout, "steps=20", faults), folder)
        assert "losing ranks 0, 2 or ranks 1, 3 together loses state" in run.console, "it was said at the start"
        assert run.code == 1, f"nobody may begin again, in {folder}"
        assert_survived_or_lost(run, run, set(ranks))
        return run

    return Scenario("all replicas", f"{cases.name_of(layout)}-ranks{ranks[0]}-{ranks[1]}", check)


def two_replicas(layout: Layout, ranks: tuple[int, int]) -> Scenario:
    """`copies.count=2`: ranks on two hosts at once, and nothing is lost."""

    def check(folder: Path, references: References) -> Finished:
        words = (f"steps={cases.STEPS}", "copies.count=2")
        plain = job_config(layout, *words)
        faults = cases.faults_at([(6, rank, "backward") for rank in ranks])
        run = finish(job_config(layout, *words, faults), folder)
        assert_survived(run, references.of(plain), ranks)
        return run

    return Scenario("two replicas", f"{cases.name_of(layout)}-ranks{ranks[0]}-{ranks[1]}", check)


def evaluating(layout: Layout, rank: int, seed: int) -> Scenario:
    """A rank dies while held-out batches are computed, or just after; the others make the evaluation again."""

    def check(folder: Path, references: References) -> Finished:
        draw = random.Random(seed)
        config = job_config(layout, "steps=24", "eval.every=8", "eval.batches=40")
        with Job(config, folder) as job:
            job.await_step(8)
            time.sleep(draw.uniform(0.0, 0.15))
            assert job.signal_rank(rank, signal.SIGKILL), f"the run was over, in {folder}"
            run = job.wait()
        undisturbed = references.of(config)
        assert_survived(run, undisturbed, {rank})
        ours, theirs = (lines_of(each.folder / "eval.jsonl") for each in (run, undisturbed))
        assert [(line["step"], line["count"]) for line in ours] == [(line["step"], line["count"]) for line in theirs], (
            f"evaluations {ours} against {theirs}, in {folder}"
        )
        return run

    return Scenario("evaluating", f"{cases.name_of(layout)}-rank{rank}-seed{seed}", check)


def checkpointing(layout: Layout, rank: int, seed: int, every: int = 3) -> Scenario:
    """A rank dies while checkpoints are written; none is ever broken, and the newest can be gone on from."""

    def check(folder: Path, references: References) -> Finished:
        draw = random.Random(seed)
        config = job_config(layout, "steps=24", f"checkpoint.every={every}", "checkpoint.keep=3")
        with Job(config, folder) as job:
            job.await_step(draw.randint(2, 12))
            time.sleep(draw.uniform(0.0, 0.1))
            assert job.signal_rank(rank, signal.SIGKILL), f"the run was over, in {folder}"
            await_true(lambda: assert_whole(folder) or job.ended, "the run ends")
            run = job.wait()
        assert_survived(run, references.of(config), {rank})
        causes = [event["cause"] for event in run.of_kind("detected")]
        assert len(causes) == 1, f"some wait for a checkpoint that others do not make: {causes}, in {folder}"
        assert max(complete(folder / "checkpoints")) == 24
        assert not list((folder / "checkpoints").glob("*.partial")), f"what is half written is swept up, in {folder}"
        again = finish(job_config(layout, "steps=30", f"resume={folder}"), folder / "again")
        assert again.code == 0, f"exit code {again.code}, in {again.folder}:\n{again.console[-3000:]}"
        return run

    return Scenario("checkpointing", f"{cases.name_of(layout)}-rank{rank}-every{every}-seed{seed}", check)


def assert_whole(folder: Path) -> bool:
    """Every checkpoint that is named as complete is; false, to be asked again."""
    for path in complete(folder / "checkpoints").values():
        try:
            check_files(path, read_manifest(path))
        except Exception as error:  # noqa: BLE001 - it may be discarded while it is read
            assert not path.exists(), f"{path}: {error}"
    return False


def exporting(layout: Layout, rank: int, seed: int) -> Scenario:
    """A rank dies when the last step is committed, while the first rank collects the model, or a moment after."""

    def check(folder: Path, references: References) -> Finished:
        draw = random.Random(seed)
        config = job_config(layout, "steps=12")
        with Job(config, folder) as job:
            job.await_step(12)
            time.sleep(draw.uniform(0.0, 0.02))
            job.signal_rank(rank, signal.SIGKILL)
            run = job.wait()
        left = {event["rank"] for event in run.of_kind("left")}
        assert left <= {rank}, f"{left} left, in {folder}:\n{run.console[-3000:]}"
        assert run.code == 0, f"exit code {run.code}, in {folder}:\n{run.console[-3000:]}"
        undisturbed = references.of(config)
        assert_every_step_once(run, 12)
        assert_same_arithmetic(run, undisturbed, 1e-5, 1e-4)
        assert run.summary["params_digest"] is not None, f"nobody wrote the model, in {folder}"
        assert not run.orphans
        return run

    return Scenario("exporting", f"{cases.name_of(layout)}-rank{rank}-seed{seed}", check)


def starting(layout: Layout, rank: int, seed: int) -> Scenario:
    """A rank dies before the first step. While ranks still meet, the run fails and says who; later it goes on."""

    def check(folder: Path, references: References) -> Finished:
        draw = random.Random(seed)
        config = job_config(layout, "steps=120")  # more than are taken until the blow
        with Job(config, folder) as job:
            job.await_event("started")
            time.sleep(draw.uniform(0.0, 0.4))
            assert job.signal_rank(rank, signal.SIGKILL)
            run = job.wait()
        assert not run.orphans, f"{run.orphans} outlived the launcher, in {folder}"
        if run.code == 0:
            assert_survived(run, references.of(config), {rank})
            return run
        assert job.steps == 0, f"it had begun, in {folder}"
        last = run.console.splitlines()[-1]
        assert run.code == 1 and last.startswith(f"error: rank {rank}: killed by SIGKILL"), f"{last}, in {folder}"
        return run

    return Scenario("starting", f"{cases.name_of(layout)}-rank{rank}-seed{seed}", check)


def launcher(layout: Layout, seed: int, checkpoints: bool) -> Scenario:
    """The launcher dies: the workers save what they have, if they are to, and end. What was saved is gone on from."""

    def check(folder: Path, references: References) -> Finished:
        draw = random.Random(seed)
        words = ("checkpoint.every=1000", "checkpoint.keep=2") if checkpoints else ()
        config = job_config(layout, "steps=400", *words)
        with Job(config, folder) as job:
            strike_later(job, draw)
            assert job.signal_launcher(signal.SIGKILL)
            job.await_empty()
            killed = job.wait()
        assert killed.code == -signal.SIGKILL
        assert_recorded(killed)
        if not checkpoints:
            return killed
        found = complete(folder / "checkpoints")
        assert found and max(found) == len(killed.metrics), f"{sorted(found)} saved, in {folder}"
        steps = max(found) + 6
        again = finish(job_config(layout, f"steps={steps}", "resume=auto", *words), folder)
        assert again.code == 0, f"exit code {again.code}, in {folder}:\n{again.console[-3000:]}"
        assert [line["step"] for line in standing(again.ledger)] == list(range(steps)), folder
        assert [line["step"] for line in again.metrics] == list(range(steps)), folder
        return again

    return Scenario("launcher", f"{cases.name_of(layout)}-{'saves' if checkpoints else 'ends'}-seed{seed}", check)


def assert_recorded(killed: Finished) -> None:
    """A run whose launcher was killed has a line for every step, a model and a summary, as if it had been stopped."""
    steps = len(killed.metrics)
    assert [line["step"] for line in killed.metrics] == list(range(steps)), killed.folder
    summary = killed.summary
    assert (summary["outcome"], summary["steps"]) == ("interrupted", steps), summary
    assert "launcher" in summary["reason"] and summary["params_digest"] is not None, summary
    assert (summary["loss_first"], summary["loss_last"]) == (killed.metrics[0]["loss"], killed.metrics[-1]["loss"])
    assert (killed.folder / "model.safetensors").exists(), killed.folder
    assert not (killed.folder / ".init").exists(), killed.folder


def launcher_and_more(layout: Layout, rank: int, how: signal.Signals, coordinator: bool) -> Scenario:
    """The launcher dies with a rank, or while that one is stopped, and maybe with the coordinator: the others go on
    without them by a coordinator that they start, save, and leave no process and no token behind."""

    def check(folder: Path, references: References) -> Finished:
        words = ("checkpoint.every=1000", "checkpoint.keep=2")
        with Job(job_config(layout, "steps=4000", *words), folder) as job:
            job.await_step(20)
            memory = (folder / "control").resolve()
            assert not coordinator or job.signal_coordinator(signal.SIGKILL)
            assert job.signal_rank(rank, how) and job.signal_launcher(signal.SIGKILL)
            job.await_empty()
            killed = job.wait()
        assert not memory.exists() and not (folder / "control" / "job.json").exists(), folder
        assert_recorded(killed)
        saved = max(complete(folder / "checkpoints"))
        assert saved == len(killed.metrics), f"{saved} saved, in {folder}"
        again = finish(job_config(layout, f"steps={saved + 6}", "resume=auto", *words), folder)
        assert again.code == 0, f"exit code {again.code}, in {folder}:\n{again.console[-3000:]}"
        assert [line["step"] for line in standing(again.ledger)] == list(range(saved + 6)), folder
        assert [line["step"] for line in again.metrics] == list(range(saved + 6)), folder
        return again

    who = "launcher-coordinator" if coordinator else "launcher"
    return Scenario("launcher", f"{cases.name_of(layout)}-{who}-rank{rank}-{how.name}", check)


# --- An overloaded machine


def overloaded(layout: Layout, steps: int, hogs: int, timeout_s: float) -> Scenario:
    """Processes that never rest beside the ranks: slow is not dead, so nobody is left out."""

    def check(folder: Path, references: References) -> Finished:
        config = job_config(layout, f"steps={steps}", "global_batch=4")
        with busy(hogs, timeout_s), Job(config, folder) as job:
            run = job.wait(timeout_s)
        assert run.code == 0, f"exit code {run.code}, in {folder}:\n{run.console[-3000:]}"
        signs = [e for kind in ("detected", "left") for e in run.of_kind(kind)]
        signs += [e for e in run.of_kind("agreed") if e["lost"]]  # Who has less of a processor may get less to do.
        assert not signs, f"{len(signs)} signs of a loss that there was not, first {signs[0]}, in {folder}"
        assert_every_step_once(run, steps)
        return run

    return Scenario("overloaded", f"{cases.name_of(layout)}-{steps}-steps-{hogs}-hogs", check)


@contextlib.contextmanager
def busy(count: int, timeout_s: float) -> Iterator[None]:
    """So many processes that do nothing but compute, until the end of the block, at most for `timeout_s`."""
    hogs = []
    try:
        for _ in range(count):
            pid = os.fork()
            if pid == 0:
                end = time.monotonic() + timeout_s
                parent = os.getppid()
                while time.monotonic() < end and os.getppid() == parent:
                    sum(range(100_000))
                os._exit(0)
            hogs.append(pid)
        yield
    finally:
        for pid in hogs:
            signal_process(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
