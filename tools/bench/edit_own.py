"""One loss in a job of ours: the real launcher, coordinator, store, planner, agents, engines and links.

In: the number of ranks. Out: `Edit`, seconds of each part between the first sign of the loss and the last survivor's
checked exchange. The job is what `train` runs, but that its ranks take no step: they stand in a barrier which the
victim never enters, so that what is timed is the edit alone: leave, report, agree, plan, install the plan in every
engine, put the links and the group of all ranks in their new state, gather parameters that are missing.

    lose_own(ranks=16, depth=2, victim=5)   ->  Edit(total_s=0.021, parts={"notice": …, "report": …, …}, …)
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

from elaswave_fx import _native
from elaswave_fx.config.keys import Config
from elaswave_fx.control.protocol import do
from elaswave_fx.control.protocol.training_loop import StepFailed, begin, perform, recover
from elaswave_fx.devices import make_device
from elaswave_fx.launch.job import WorkerContext
from elaswave_fx.plan.plan import Plan
from elaswave_fx.worker.loop import Training
from elaswave_fx.worker.worker import Worker, set_up
from tools.bench.gpt_job import GptJob
from tools.bench.own_job import OwnJob
from tools.bench.processes import TEST_TIMEOUT_S, BenchFailed, Reports
from tools.bench.views import Checks

SETTLE_S = 0.5
"""Every rank has sent a few heartbeats, and plans for the loss of a rank are made ahead, before one is lost."""

PLAN_S = 0.1
"""Allowed for making one of them ahead; one that was not made in time is made in `plan`."""

PARTS = ("notice", "report", "plan", "store", "activate", "install", "exchange")
"""first sign -> the coordinator knows -> all survivors have reported -> the next plan is there -> the epoch is in the
store -> the last survivor knows -> it has installed the plan and its links -> the last checked exchange is done."""


@dataclass(frozen=True)
class Edit:
    """One measured loss. `links_opened`, `bytes_moved`: of all survivors, from the agreement to the first exchange."""

    total_s: float
    parts: dict[str, float]
    links_opened: int
    bytes_moved: int


def lose_own(ranks: int, depth: int, victim: int) -> Edit:
    """Start a job, kill `victim`, and take the time until all survivors stand in the new epoch. Raises BenchFailed."""
    gpt = GptJob(
        layers=2, width=16, heads=2, seq_len=8, global_batch=ranks, ranks=ranks, stages=depth, micro_batch=1,
        ranks_per_host=2,
    )  # fmt: skip
    with OwnJob(gpt.config("steps=1"), partial(_work, victim)) as job:
        ready = [job.hear("ready") for _ in range(ranks)]
        time.sleep(SETTLE_S + PLAN_S * ranks)
        os.kill(next(report["pid"] for report in ready if report["rank"] == victim), signal.SIGKILL)
        laps = [job.hear("done") for _ in range(ranks - 1)]
        return _edit(laps, job.events(until="agreed"))


# --- A rank


def _work(victim: int, reports: Reports, config: Config, context: WorkerContext) -> Mapping[str, Any]:
    """Everything that `run_worker` does but steps; ends when it is killed."""
    device = make_device(config.device)
    device.set_up(threads=1)
    worker = set_up(config, context)
    training = Training(worker, device)
    perform(begin(worker.at), training.do)
    reports.say("ready", rank=context.rank, pid=os.getpid())
    if context.rank != victim:
        reports.say("done", rank=context.rank, **_survive(worker, training))
    while True:
        signal.pause()


def _survive(worker: Worker, training: Training) -> dict[str, Any]:
    """Stand in a barrier, leave it, agree, install what comes next; the moments of it."""
    try:
        training.do(do.Barrier())
    except StepFailed as error:
        left_s, failed = time.monotonic(), error
    else:
        raise BenchFailed(f"rank {worker.rank}: a barrier opened without the lost rank")
    links = set(worker.endpoint.peers)
    told_s, sent = left_s, 0

    def performer(said: Any) -> Any:
        nonlocal told_s, sent
        answer = training.do(said)
        if isinstance(said, do.Report):
            told_s, sent = time.monotonic(), worker.endpoint.bytes_sent
        return answer

    perform(recover(worker.at, failed), performer)
    installed_s, moved = time.monotonic(), worker.endpoint.bytes_sent - sent
    groups = _groups(worker.plan)
    checks = Checks(worker.rank, (members for members in groups if worker.rank in members))
    for members in checks.groups:
        number = _FIRST_GROUP + groups.index(members)
        group = _native.Group(worker.endpoint, number, list(members), int(worker.plan.epoch))
        checks(members, lambda data, spans, group=group: group.all_gather(data, spans, TEST_TIMEOUT_S))
    opened = len(set(worker.endpoint.peers) - links)
    return {
        "left_s": left_s, "told_s": told_s, "installed_s": installed_s, "done_s": time.monotonic(),
        "opened": opened, "moved": moved,
    }  # fmt: skip


_FIRST_GROUP = 100
"""The ids of the groups that are made for checks; the worker's own come before."""


def _groups(plan: Plan) -> list[tuple[int, ...]]:
    """All ranks, and the ranks that reduce a bucket of parameters together; equal on all ranks."""
    found = {tuple(plan.ranks), *(tuple(group) for group in plan.groups.values())}
    return sorted(tuple(int(member) for member in group) for group in found if len(group) > 1)


# --- Between the first sign of the loss, at a survivor or at the coordinator, and the last survivor's end


def _edit(laps: Sequence[Mapping[str, Any]], events: Sequence[Mapping[str, Any]]) -> Edit:
    """The edit, from the moments of the survivors and the events of the run, which have one clock."""
    at_s = {event["kind"]: event["at_s"] for event in events if event["kind"] in ("stopped", "agreed")}
    detected_s = min(event["at_s"] for event in events if event["kind"] == "detected")
    plan_ms = next(event["plan_ms"] for event in events if event["kind"] == "planned" and event["epoch"] == 1)
    began_s = min(detected_s, *(lap["left_s"] for lap in laps))
    moments_s = (
        began_s, detected_s, at_s["stopped"], at_s["stopped"] + plan_ms / 1e3, at_s["agreed"],
        *(max(lap[moment] for lap in laps) for moment in ("told_s", "installed_s", "done_s")),
    )  # fmt: skip
    parts = {name: end - begin for name, (begin, end) in zip(PARTS, pairwise(moments_s), strict=True)}
    return Edit(sum(parts.values()), parts, sum(lap["opened"] for lap in laps), sum(lap["moved"] for lap in laps))
