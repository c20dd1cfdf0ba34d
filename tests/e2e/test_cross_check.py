"""Ranks that join with data of which one sample differs, where no digest covers it: nobody trains on it."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from elaswave_fx.config.compose import load_config
from elaswave_fx.config.keys import Config
from elaswave_fx.data.order import SampleOrder
from elaswave_fx.data.sample_digest import _spread
from tests.commands import Command
from tests.e2e.points import COUNT, OTHER_POINT, Points
from tests.marks import slow
from tests.recovery.harness import Finished, Job, finish

ROOT = Path(__file__).resolve().parents[2]
NAME = f"{Points.__module__}.Points"
STEPS, SHORT, BATCH = 8000, 600, 8
EPOCH = COUNT // BATCH
ORDER = SampleOrder(0, COUNT)
UNSEEN = list(_spread(COUNT, COUNT))[-400:]
"""A start and a joiner look at the others alone, as far as half a second goes."""

BAD = UNSEEN[0]
LATE = next(bad for bad in UNSEEN if bad not in ORDER.indices((EPOCH + 8) * BATCH, (2 * EPOCH - 20) * BATCH))
"""Two epochs go by, nearly, before it trains again."""


def config(hurry: Path, layout: tuple[int, int], *words: str) -> Config:
    dp, pp = layout
    return load_config([
        f"data._target_={NAME}", f"data.hurry={hurry}", f"model._target_={Points.__module__}.Net", f"steps={STEPS}",
        f"global_batch={BATCH}", f"parallel.dp={dp}", f"parallel.pp={pp}", "exact=true",
        "schedule=constant", *words,
    ])  # fmt: skip


@contextmanager
def running(folder: Path, layout: tuple[int, int], *words: str) -> Iterator[Job]:
    with Job(config(folder / "hurry", layout, *words), folder / "run") as job:
        job.await_step(2)
        yield job


@contextmanager
def joining(job: Job, **environment: str) -> Iterator[Command]:
    process = Command("elaswave_fx.worker", str(job.folder), env=environment)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """Some epochs of one rank."""
    folder = tmp_path_factory.mktemp("alone")
    (folder / "hurry").touch()
    run = finish(config(folder / "hurry", (1, 1), f"steps={SHORT}"), folder / "run")
    assert run.code == 0, run.console
    return run


def hurry_once_joined(job: Job, count: int = 1) -> None:
    job.await_event("joined", count)
    job.await_event("resumed", count)
    (job.folder.parent / "hurry").touch()


def assert_named(run: Finished, alone: Finished, bad: int, *readers: tuple[int, int]) -> None:
    """The run ended before the update of a step that has the sample, with the line that names it and two ranks."""
    assert run.code == 1 and run.orphans == (), run.console
    last, step = run.console.splitlines()[-1], len(run.losses)
    assert last in {
        f"error: step {step}: rank {fed_by} (127.0.0.1) fed other data than rank {reader} (127.0.0.1) reads for sample "
        f"{bad}, so the step was not taken; every rank has to read the same (data._target_={NAME}): give all of them "
        "the same files, and let a sample depend on nothing but its index and its key"
        for fed_by, reader in readers
    }, last
    assert run.summary["reason"] == last.removeprefix("error: ") and "Traceback" not in run.console
    assert bad in ORDER.indices(step * BATCH, BATCH), "it is one of the step's samples"
    assert run.losses[:SHORT] == alone.losses[: len(run.losses)], "nothing else was trained"


def test_a_joiner_of_which_one_sample_differs_ends_the_job_with_both_names(alone: Finished, tmp_path: Path) -> None:
    with running(tmp_path, (1, 1)) as job, joining(job, **{OTHER_POINT: str(BAD)}) as process:
        hurry_once_joined(job)
        run = job.wait()
        said = "".join(process.communicate(timeout=60))
    assert_named(run, alone, BAD, (0, 1), (1, 0))
    (joined,) = run.of_kind("joined")
    assert len(run.losses) <= joined["step"] + 2 * EPOCH, "in the epoch that began next, if not before"
    assert "pieces are compared with those of a rank that joins" in run.console
    assert process.returncode == 1 and run.console.splitlines()[-1] in said, said


@pytest.mark.parametrize("layout", [(2, 1), slow((1, 2))])
def test_what_a_joiner_feeds_is_looked_at_before_it_trains(
    layout: tuple[int, int], alone: Finished, tmp_path: Path
) -> None:
    """Two ranks are of the launcher, and the joiner reads what one of them feeds at a time."""
    with running(tmp_path, layout) as job, joining(job, **{OTHER_POINT: str(BAD)}):
        hurry_once_joined(job)
        run = job.wait()
    assert_named(run, alone, BAD, (0, 2), (1, 2), (2, 0), (2, 1))


@pytest.mark.slow
def test_a_sample_that_each_process_draws_for_itself_ends_the_job(tmp_path: Path) -> None:
    with running(tmp_path, (1, 1), f"data.noisy={BAD}") as job, joining(job):
        hurry_once_joined(job)
        run = job.wait()
    assert run.code == 1 and f" reads for sample {BAD}, so the step was not taken" in run.console.splitlines()[-1]
    (joined,) = run.of_kind("joined")
    assert len(run.losses) <= joined["step"] + 2 * EPOCH


def test_ranks_that_joined_say_it_when_they_are_alone(alone: Finished, tmp_path: Path) -> None:
    """The rank that the launcher started is lost before the sample comes."""
    with running(tmp_path, (1, 1)) as job, joining(job):
        job.await_event("joined")
        with joining(job, **{OTHER_POINT: str(LATE)}):
            job.await_event("joined", 2)
            job.await_event("resumed", 3)
            job.signal_rank(0, signal.SIGKILL)
            hurry_once_joined(job, 2)
            run = job.wait()
    assert_named(run, alone, LATE, (1, 2), (2, 1), (0, 2), (2, 0))


@pytest.mark.parametrize("layout", [(2, 1), slow((1, 2))])
def test_the_same_samples_train_as_if_nobody_had_joined(
    layout: tuple[int, int], alone: Finished, tmp_path: Path
) -> None:
    with running(tmp_path, layout, f"steps={SHORT}") as job, joining(job) as process:
        hurry_once_joined(job)
        run = job.wait()
        process.communicate(timeout=60)
    assert run.code == process.returncode == 0, run.console
    assert run.losses == alone.losses and run.summary["params_digest"] == alone.summary["params_digest"]
    assert len(run.of_kind("joined")) == 1
    assert [line["content_hash"] for line in run.ledger] == [line["content_hash"] for line in alone.ledger]
