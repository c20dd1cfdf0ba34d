"""The recipes in which ranks come and go do what they say: small, and slow until who joins has joined."""

from pathlib import Path

import pytest

from elaswave_fx.plan.plan import Plan
from tests.recovery.harness import Finished, Job, job_config
from tests.recovery.invariants import assert_survived
from tests.recovery.leaves import assert_left, left_as_told
from tests.recovery.references import References
from tests.slow_job import slow_config
from tests.waiting import await_true

LAYOUT = (2, 2)


def test_lose_and_regain(tmp_path: Path, references: References) -> None:
    words, hurry = ("steps=300", "model.layers=4"), tmp_path / "hurry"  # Of two layers there are too few boxes to move.
    with Job(slow_config(hurry, LAYOUT, *words, recipe="lose_and_regain"), tmp_path / "run") as job:
        job.await_event("joined")
        epochs = len(job.events("agreed"))
        job.await_event("agreed", epochs + 1)  # Replicas are there, and owners move.
        hurry.touch()
        run = job.wait()
    assert_survived(run, references.of(job_config(LAYOUT, *words)), {2})
    (joined,) = run.of_kind("joined")
    (recovery,) = run.summary["recoveries"]
    assert joined["rank"] == 4 and recovery["epoch"] < joined["epoch"] < run.of_kind("agreed")[-1]["epoch"], run.folder
    before, after = (plan_of(run, epoch) for epoch in (joined["epoch"] - 1, joined["epoch"]))
    assert before.lanes != after.lanes and 4 in {tile.rank for tile in after.tiles if tile.spans}, run.folder
    last = plan_of(run, run.of_kind("agreed")[-1]["epoch"])
    assert any(box.owner == 4 for box in last.boxes), f"it owns what it has a replica of, in {run.folder}"


@pytest.mark.slow
def test_storm(tmp_path: Path, references: References) -> None:
    steps, hurry = "steps=400", tmp_path / "hurry"
    with Job(slow_config(hurry, LAYOUT, steps, recipe="storm"), tmp_path / "run") as job:
        job.await_event("joined", 2)
        await_true(lambda: left_as_told(job) == [3] or job.ended, f"rank 3 leaves, in {tmp_path}")
        hurry.touch()
        run = job.wait()
    assert_left(run, references.of(job_config(LAYOUT, steps)), [3], {0, 2})
    assert sorted(event["rank"] for event in run.of_kind("joined")) == [4, 5], run.folder
    assert run.of_kind("agreed")[-1]["members"] == [1, 4, 5], run.folder
    assert {event["fault"] for event in run.of_kind("fault")} == {"slow", "kill", "join", "leave"}, run.folder


def plan_of(run: Finished, epoch: int) -> Plan:
    return Plan.from_json((run.folder / f"plan-{epoch}.json").read_text())
