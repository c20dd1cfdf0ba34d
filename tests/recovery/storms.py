"""Storms: several blows from outside, of kinds, to processes and at moments that a seed draws, some before the last was
recovered from: kills, short stops, SIGTERM to leave, processes that join and may be killed or asked to leave in their
turn, beside a rank that is slow. A run whose last replica of something is gone goes back to a checkpoint. Every run
that comes to its end has the bits of one rank that nothing ever happened to.

    storm(seed=7).check(folder, references)
"""

from __future__ import annotations

import math
import random
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.recovery.fault_matrix import LAYOUTS, Layout, name_of, ranks_of
from tests.recovery.harness import Finished, Job, job_config
from tests.recovery.invariants import LOSS_RTOL, PARAMETER_RTOL, assert_every_step_once, assert_same_arithmetic
from tests.recovery.joining import Joining
from tests.recovery.kinds import KINDS
from tests.recovery.leaves import left_as_told
from tests.recovery.references import References
from tests.recovery.scenarios import Scenario, assert_survived_or_lost
from tests.slow_job import slow_config
from tests.waiting import WAIT_S, await_true

STEPS = 160
STEP_S = 0.15
"""Of a step at first, until the storm is over."""

MOST_PAUSE_S = 0.4
STOPPED_S = 0.1
"""Too short for anybody to be taken for dead."""

Blow = tuple[str, int | None]
"""What happens, and to which rank. None stands for the coordinator, and for the process that came last."""

_KINDS = ("gpt", "gpt-bf16", "gpt-sgd", "two-tower", "resnet")


@dataclass
class Struck:
    """Whom the blows met: ranks that are lost, and those that were asked to leave."""

    lost: set[int] = field(default_factory=set)
    told: set[int] = field(default_factory=set)


def storm(seed: int) -> Scenario:
    """One storm. One or more of the ranks that were started are never killed nor asked to leave."""
    draw = random.Random(seed)
    layout, kind = LAYOUTS[seed % len(LAYOUTS)], _KINDS[seed % len(_KINDS) - seed // len(LAYOUTS) % len(_KINDS)]
    blows = _drawn(draw, ranks_of(layout))
    recipe, *words = KINDS[kind]
    words += [f"steps={STEPS}", "checkpoint.every=10"]

    def check(folder: Path, references: References) -> Finished:
        hurry, struck = folder / "hurry", Struck()
        config = slow_config(hurry, layout, *words, *_slow(draw, layout, recipe, words), recipe=recipe, may_end=True)
        with Job(config, folder) as job, Joining(job) as joining:
            job.await_step(draw.randint(2, 6))
            for blow, rank in blows:
                if job.ended or job.steps > STEPS - 10:
                    break  # A slow machine: the storm comes too late.
                _strike(job, joining, struck, blow, rank)
                time.sleep(draw.uniform(0.0, MOST_PAUSE_S) * draw.choice((0.0, 1.0)))
            await_true(lambda: job.ended or job.steps > STEPS - 10 or _is_over(job, joining, struck), f"{folder}")
            hurry.touch()
            run = job.wait(2 * WAIT_S)
            joining.await_ends()
            struck.lost |= {each.rank for each in joining.joiners if each.was_killed and each.rank is not None}
        if run.code == 0:
            assert_weathered(run, references.of(job_config(layout, *words, recipe=recipe)), struck)
        else:  # All replicas of something were lost before there was a checkpoint.
            assert_survived_or_lost(run, run, struck.lost)
        return run

    return Scenario("storm", f"{seed}-{kind}-{name_of(layout)}", check)


def _drawn(draw: random.Random, ranks: Sequence[int]) -> list[Blow]:
    """The blows, in their order."""
    gone = draw.sample(ranks, draw.randint(1, len(ranks) - 1))
    blows: list[Blow] = [(draw.choice(("kill", "kill", "leave")), rank) for rank in gone]
    blows += [("kill coordinator", None)] * draw.randint(0, 2)
    blows += [("stop", draw.choice(ranks)) for _ in range(draw.randint(0, 2))]
    for _ in range(draw.randint(0, 2)):
        blows.append((draw.choice(("join", "join and wait")), None))
        blows += [(draw.choice(("kill joiner", "dismiss joiner")), None)] * draw.randint(0, 1)
    draw.shuffle(blows)
    return blows


def _slow(draw: random.Random, layout: Layout, recipe: str, words: Sequence[str]) -> tuple[str, ...]:
    """Every step takes a while at first, and in every second storm a rank is slow from the second step on."""
    config = job_config(layout, *words, recipe=recipe)
    mine = math.ceil(config.global_batch / config.parallel.dp)
    found = (f"data.transform.sample_s={STEP_S / mine}",)
    if draw.random() < 0.5:
        return found
    rank, speed = draw.choice(ranks_of(layout)), draw.choice((0.1, 0.3, 0.6))
    return (*found, f"faults=[{{step: 1, rank: {rank}, kind: slow, speed: {speed}, steps: {STEPS // 2}}}]")


def _strike(job: Job, joining: Joining, struck: Struck, blow: str, rank: int | None) -> None:
    last = joining.joiners[-1] if joining.joiners else None
    match blow:
        case "kill" if rank is not None and job.signal_rank(rank, signal.SIGKILL):
            struck.lost.add(rank)
        case "leave" if rank is not None and job.signal_rank(rank, signal.SIGTERM):
            struck.told.add(rank)
        case "stop" if rank is not None and job.signal_rank(rank, signal.SIGSTOP):
            time.sleep(STOPPED_S)
            job.signal_rank(rank, signal.SIGCONT)
        case "kill coordinator":
            job.signal_coordinator(signal.SIGKILL)
        case "join" | "join and wait":
            joiner = joining.start()
            if blow == "join and wait":
                await_true(lambda: job.ended or joiner.has_ended or joiner.rank in joining.members(), "it joins")
        case "kill joiner" if last is not None:
            last.kill()
        case "dismiss joiner" if last is not None and not last.was_told and last.rank in joining.members():
            last.tell_to_leave()
        case _:
            pass  # There is nobody any more, or not yet.


def _is_over(job: Job, joining: Joining, struck: Struck) -> bool:
    """Whether all that come have come, and all that were asked to leave have left."""
    there, left = joining.members(), set(left_as_told(job))
    come = all(each.was_killed or each.has_ended or each.rank in there for each in joining.joiners)
    told = struck.told | {each.rank for each in joining.joiners if each.was_told and not each.was_killed}
    return come and told - struck.lost <= left


def assert_weathered(run: Finished, undisturbed: Finished, struck: Struck) -> None:
    """The run came to its end with every step once and the bits of one rank; who was lost, and nobody else, is named as
    lost; at most the step in flight was done again, unless the run went back to a checkpoint."""
    told = f"in {run.folder}:\n{run.console[-3000:]}"
    assert run.summary["outcome"] == "completed" and not run.orphans, f"orphans {run.orphans} {told}"
    assert_every_step_once(run, len(undisturbed.metrics))
    assert_same_arithmetic(run, undisturbed, LOSS_RTOL, PARAMETER_RTOL)
    named = {rank for recovery in run.summary["recoveries"] for rank in recovery["ranks"]}
    assert named <= struck.lost, f"recoveries name {sorted(named)}, lost were {sorted(struck.lost)}, {told}"
    started = {int(rank) for rank in run.of_kind("started")[0]["pids"]}
    assert struck.lost & started <= named, f"recoveries name {sorted(named)}, not {sorted(struck.lost)}, {told}"
    agreed = run.of_kind("agreed")
    went_back = any("rolled_back_to" in event for event in agreed)
    assert went_back or all((event["steps_redone"] or 0) <= 1 for event in agreed), told
    members = set(agreed[-1]["members"]) if agreed else started
    assert started - struck.lost - struck.told <= members, f"members at the end were {sorted(members)}, {told}"
