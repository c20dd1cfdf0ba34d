"""Ways to disturb a run, each with what it has to show afterwards. Tests and `make chaos` choose from here.

    inside(losses, …)               ranks that kill themselves in a phase, as `faults` says
    outside(layout, rank, seed, …)  SIGKILL at a random moment
    ...

A scenario takes a folder for its run and the references to compare with, returns the finished run, and fails with an
AssertionError that names the run's folder.
"""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from elaswave_fx.control.protocol.failure_detector import SILENT_FLOOR_S
from elaswave_fx.plan.plan import Plan
from tests.recovery import fault_matrix as cases
from tests.recovery.fault_matrix import Layout, Loss
from tests.recovery.harness import Finished, Job, finish, is_stopped, job_config
from tests.recovery.invariants import (
    LOSS_RTOL,
    PARAMETER_RTOL,
    assert_plain_arithmetic,
    assert_same_bits,
    assert_survived,
    assert_went_on,
)
from tests.recovery.kinds import KINDS
from tests.recovery.references import References
from tests.waiting import await_true
from tools.bench.connection_resets import cut_links

Check = Callable[[Path, References], Finished]

STEPS, OUTSIDE_STEPS = f"steps={cases.STEPS}", "steps=120"
SLOWED_STEPS, SLOW_STEPS = 400, 120
"""Of a run with a slow rank, and of those the steps in which it is slow, if it has work in all of them."""

EARLIEST, LATEST = 4, 24
"""Steps that are committed before the first blow from outside; the run must still be going on after the last."""


@dataclass(frozen=True)
class Scenario:
    """`group`: a row of the table of `make chaos`; `name`: unique."""

    group: str
    name: str
    check: Check

    @property
    def folder(self) -> str:
        """A name for its run's folder."""
        return f"{self.group} {self.name}".replace(" ", "-")


def inside(
    losses: Sequence[Loss],
    *overrides: str,
    recipe: str = "gpt_stdlib",
    label: str = "",
    group: str = "",
    **tolerances: float,
) -> Scenario:
    """Losses at steps that are far enough apart for replicas to be made again. `label`: what is particular."""
    layout = losses[0].layout

    def check(folder: Path, references: References) -> Finished:
        words = (STEPS, *overrides)
        plain = job_config(layout, *words, recipe=recipe)
        run = finish(job_config(layout, *words, cases.faults_of(losses), recipe=recipe), folder)
        assert_survived(run, references.of(plain), {loss.rank for loss in losses}, **tolerances)  # type: ignore[arg-type]
        assert_fired(run, losses)
        return run

    name = "+".join(loss.name for loss in losses)
    group = group or "settings" if label else "several in one job" if len(losses) > 1 else "inside"
    return Scenario(group, f"{label}-{name}" if label else name, check)


def answered(policy: str, losses: Sequence[Loss]) -> Scenario:
    """The same losses, with another policy."""
    if policy == "smaller_batch":
        return _smaller_batch(losses)
    return inside(losses, f"lab.policy={policy}", label=policy, group="policies")


def _smaller_batch(losses: Sequence[Loss]) -> Scenario:
    """Each loss takes the samples of a lane with it, unless the lane has left before."""
    layout = losses[0].layout

    def check(folder: Path, references: References) -> Finished:
        config = job_config(layout, STEPS, "exact=false", "lab.policy=smaller_batch", cases.faults_of(losses))
        run = finish(config, folder)
        assert_went_on(run, cases.STEPS, {loss.rank for loss in losses})
        assert_fired(run, losses)
        lanes_left = layout[0] - len({loss.rank // layout[1] for loss in losses})
        at_the_end = run.metrics[-1]["samples"] / config.global_batch
        assert abs(at_the_end - lanes_left / layout[0]) < 1 / config.global_batch, f"{at_the_end}, in {run.folder}"
        assert_plain_arithmetic(run, config, LOSS_RTOL, PARAMETER_RTOL)
        return run

    name = "+".join(loss.name for loss in losses)
    return Scenario("policies", f"smaller_batch-{name}", check)


def alike(kind: str, layout: Layout) -> Scenario:
    """Nobody is lost: a layout has the bits of one rank."""

    def check(folder: Path, references: References) -> Finished:
        recipe, *words = KINDS[kind]
        config = job_config(layout, *words, "steps=8", "eval.every=4", recipe=recipe)
        run = finish(config, folder)
        assert run.code == 0, f"exit code {run.code}, in {folder}:\n{run.console[-3000:]}"
        assert_same_bits(run, references.of(config))
        return run

    return Scenario("alike", f"{kind}-{cases.name_of(layout)}", check)


def assert_fired(run: Finished, losses: Sequence[Loss]) -> None:
    """Each fault was told of by its victim, in its phase."""
    told = {(event["rank"], event["phase"]) for event in run.of_kind("fault")}
    assert told == {(loss.rank, loss.phase) for loss in losses}, f"{told}, in {run.folder}"


def host(layout: Layout, ranks: Sequence[int], phase: str) -> Scenario:
    """All ranks of a host in the same step."""

    def check(folder: Path, references: References) -> Finished:
        plain = job_config(layout, STEPS)
        faults = cases.faults_at([(6, rank, phase) for rank in ranks])
        run = finish(job_config(layout, STEPS, faults), folder)
        assert_survived(run, references.of(plain), ranks)
        return run

    return Scenario("host", f"{cases.name_of(layout)}-host-of-{'-'.join(map(str, ranks))}-{phase}", check)


# --- From outside


def outside(layout: Layout, rank: int, seed: int) -> Scenario:
    """SIGKILL at a random moment: mid-frame, holding shared memory, between steps."""

    def check(folder: Path, references: References) -> Finished:
        draw = random.Random(seed)
        config = job_config(layout, OUTSIDE_STEPS)
        with Job(config, folder) as job:
            strike_later(job, draw)
            assert job.signal_rank(rank, signal.SIGKILL), f"the run was over, in {folder}"
            run = job.wait()
        assert_survived(run, references.of(config), {rank})
        return run

    return Scenario("outside", f"{cases.name_of(layout)}-rank{rank}-seed{seed}", check)


def one_after_another(layout: Layout, first: int, second: int, seed: int) -> Scenario:
    """Two kills from outside; the second when the first was recovered from and replicas were made again."""

    def meanwhile(job: Job, draw: random.Random) -> None:
        job.await_event("resumed")
        job.await_step(job.steps + 6)
        time.sleep(draw.uniform(0.0, 0.03))

    return _two_kills("two kills", layout, (first, second), seed, meanwhile)


def while_recovering(layout: Layout, first: int, second: int, seed: int) -> Scenario:
    """A second kill up to 150 ms after the first: before that was noticed, in each part of the recovery, after it."""
    return _two_kills(
        "second during recovery", layout, (first, second), seed, lambda _, draw: time.sleep(draw.uniform(0.0, 0.15))
    )


def _two_kills(
    group: str, layout: Layout, ranks: tuple[int, int], seed: int, meanwhile: Callable[[Job, random.Random], None]
) -> Scenario:
    """`meanwhile` passes between the kills."""

    def check(folder: Path, references: References) -> Finished:
        draw = random.Random(seed)
        config = job_config(layout, OUTSIDE_STEPS)
        with Job(config, folder) as job:
            strike_later(job, draw)
            assert job.signal_rank(ranks[0], signal.SIGKILL)
            meanwhile(job, draw)
            assert job.signal_rank(ranks[1], signal.SIGKILL), f"the run was over, in {folder}"
            run = job.wait()
        assert_survived_or_lost(run, references.of(config), set(ranks))
        return run

    return Scenario(group, f"{cases.name_of(layout)}-ranks{ranks[0]}-{ranks[1]}-seed{seed}", check)


def coordinator(layout: Layout, rank: int | None, seed: int) -> Scenario:
    """The coordinator is killed, alone twice, or with a rank just before or after it."""

    def check(folder: Path, references: References) -> Finished:
        draw = random.Random(seed)
        config = job_config(layout, OUTSIDE_STEPS)
        with Job(config, folder) as job:
            strike_later(job, draw)
            victims: list[int | None] = [None]
            if rank is not None:
                victims.insert(draw.randrange(2), rank)
            for victim in victims:
                if victim is None:
                    there = job.signal_coordinator(signal.SIGKILL)
                else:
                    there = job.signal_rank(victim, signal.SIGKILL)
                assert there, f"nobody there to be killed, in {folder}"
                time.sleep(draw.uniform(0.0, 0.05))
            if rank is None:
                await_true(lambda: job.coordinator() is not None or job.ended, "a coordinator again")
                job.signal_coordinator(signal.SIGKILL)
            run = job.wait()
        assert_survived(run, references.of(config), set() if rank is None else {rank})
        assert run.of_kind("coordinator"), "the launcher says that the coordinator has ended"
        return run

    with_whom = "alone" if rank is None else f"with-rank{rank}"
    return Scenario("coordinator", f"{cases.name_of(layout)}-{with_whom}-seed{seed}", check)


def stopped(layout: Layout, rank: int, seed: int, wakes: bool) -> Scenario:
    """SIGSTOP: left out after its silence. Woken while the others go on it ends by itself and does no harm."""

    def check(folder: Path, references: References) -> Finished:
        draw = random.Random(seed)
        config = job_config(layout, "steps=400")
        with Job(config, folder) as job:
            strike_later(job, draw)
            assert job.signal_rank(rank, signal.SIGSTOP)
            await_true(lambda: is_stopped(job.pids[rank]), f"rank {rank} is stopped")
            job.await_event("resumed")
            if wakes:
                time.sleep(draw.uniform(0.0, 0.1))
                assert job.signal_rank(rank, signal.SIGCONT)
                await_true(lambda: any(e["rank"] == rank for e in job.events("left")) or job.ended, "it leaves")
            run = job.wait()
        assert_survived(run, references.of(config), {rank}, stopped=not wakes)
        recovery = next(each for each in run.summary["recoveries"] if rank in each["ranks"])
        silent_ms = 1e3 * SILENT_FLOOR_S
        assert min(recovery["detect_ms"], recovery["mttr_ms"]) > silent_ms / 2, f"{recovery}: it was silent for longer"
        return run

    return Scenario("stopped", f"{cases.name_of(layout)}-rank{rank}-{'wakes' if wakes else 'sleeps'}-seed{seed}", check)


def stops_itself(layout: Layout, rank: int, phase: str) -> Scenario:
    """`faults` of kind stop."""

    def check(folder: Path, references: References) -> Finished:
        plain = job_config(layout, STEPS)
        run = finish(job_config(layout, STEPS, cases.faults_at([(6, rank, phase)], kind="stop")), folder)
        assert_survived(run, references.of(plain), {rank}, stopped=True)
        return run

    return Scenario("stopped", f"{cases.name_of(layout)}-rank{rank}-stops-itself-{phase}", check)


def cut_off(loss: Loss) -> Scenario:
    """`faults` of kind cut, from that phase of a step on, to the end: no link breaks, and the rank goes on alone."""

    def check(folder: Path, references: References) -> Finished:
        plain = job_config(loss.layout, STEPS)
        run = finish(job_config(loss.layout, STEPS, cases.faults_of([loss], kind="cut")), folder)
        assert_survived(run, references.of(plain), {loss.rank}, stopped=True)
        assert_fired(run, [loss])
        return run

    return Scenario("cut", loss.name, check)


def slowed(layout: Layout, rank: int) -> Scenario:
    """`faults` of kind slow: the rank gets less work for a while, and its share again; nobody is lost."""

    def check(folder: Path, references: References) -> Finished:
        words = (f"steps={SLOWED_STEPS}", "global_batch=12", "eval.every=0")
        fault = f"faults=[{{step: {cases.FIRST_STEP}, rank: {rank}, kind: slow, speed: 0.03, steps: {SLOW_STEPS}}}]"
        run = finish(job_config(layout, *words, fault), folder)
        assert_survived(run, references.of(job_config(layout, *words)), set())
        assert run.summary["recoveries"] == [], run.folder
        slow = [event for event in run.of_kind("slowed") if event["speeds"].get(str(rank), 1.0) < 1.0]
        # Who is alone with its units is held against its own first steps, most of which were slow here.
        assert slow or layout[0] == 1, f"nobody noticed, in {run.folder}"
        return run

    return Scenario("slow", f"{cases.name_of(layout)}-rank{rank}", check)


def unlinked(layout: Layout, rank: int, seed: int) -> Scenario:
    """All its connections to other hosts go down, at both ends at once: they are opened again, and all go on."""

    def check(folder: Path, references: References) -> Finished:
        draw = random.Random(seed)
        config = job_config(layout, OUTSIDE_STEPS, "parallel.ranks_per_host=1")
        with Job(config, folder) as job:
            strike_later(job, draw)
            others = [pid for other, pid in job.pids.items() if other != rank]
            assert cut_links(job.pids[rank], others) == len(others)
            run = job.wait()
        assert_survived(run, references.of(config), set())
        assert run.summary["recoveries"], "it went unnoticed"
        return run

    return Scenario("unlinked", f"{cases.name_of(layout)}-rank{rank}-seed{seed}", check)


def strike_later(job: Job, draw: random.Random) -> None:
    """Return somewhere within a step or two after a drawn number of them."""
    job.await_step(draw.randint(EARLIEST, LATEST))
    time.sleep(draw.uniform(0.0, 0.03))


# --- What may be lost


def assert_survived_or_lost(run: Finished, undisturbed: Finished, lost: set[int]) -> None:
    """Two losses at once may take all replicas of a box with them. Only then may a run without checkpoints end early,
    and it says why, last."""
    if run.code == 0:
        return assert_survived(run, undisturbed, lost)
    newest = max((event["epoch"] for event in run.of_kind("agreed")), default=0)
    assert had_no_replica(run, newest, lost), f"every box had a replica, in {run.folder}"
    reason = run.summary["reason"]
    assert reason.startswith("all replicas of ") and "recovery.allow_rollback" in reason, f"{reason}, in {run.folder}"
    assert run.console.rstrip().endswith(reason), run.folder
    assert "Traceback" not in run.console and not run.orphans, f"orphans {run.orphans}, in {run.folder}"
    steps = len(run.metrics)
    assert [line["step"] for line in run.metrics] == list(range(steps)), run.folder


def had_no_replica(run: Finished, epoch: int, lost: set[int]) -> bool:
    """Whether a box of that epoch may have had all its replicas at the ranks lost; whoever was syncing had none."""
    plan = Plan.from_json((run.folder / f"plan-{epoch}.json").read_text())
    return any(box.local_materializers <= lost for box in plan.boxes)
