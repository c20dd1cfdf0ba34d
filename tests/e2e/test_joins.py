"""Processes join a job that trains, with the bits of one rank; their end before that costs nothing, after it a loss."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import elaswave_fx
from elaswave_fx.audit.finding import Verdict
from elaswave_fx.checkpoint.folder import complete
from elaswave_fx.checkpoint.manifest import check_files, read_manifest
from elaswave_fx.config.keys import Config
from elaswave_fx.control.agent.ask_to_join import ask_to_join
from elaswave_fx.control.coordinator.job_file import JobFile
from elaswave_fx.control.tcp import listen, port_of
from elaswave_fx.control.wire import ControlAddress
from elaswave_fx.errors import ConfigError
from elaswave_fx.launch.versions import versions
from elaswave_fx.plan.plan import Plan
from elaswave_fx.verify import Wanted, verify
from tests.commands import Command
from tests.marks import slow
from tests.recovery.harness import Finished, Job, finish
from tests.slow_job import slow_config
from tests.waiting import await_true

ROOT = Path(__file__).resolve().parents[2]
STEPS = 500


class Running:
    """A slow job, and processes that join it."""

    def __init__(self, job: Job, hurry: Path) -> None:
        self.job, self._hurry = job, hurry
        self.joining: list[subprocess.Popen[str] | Command] = []

    def join(self, *words: str, **environment: str) -> Command:
        process = Command("elaswave_fx.worker", *(words or (str(self.job.folder),)), env=environment)
        self.joining.append(process)
        return process

    def join_from_elsewhere(self, *hidden: Path, **environment: str) -> subprocess.Popen[str]:
        """By the address, and with empty folders in place of the run directory, cached programs, and `hidden`."""
        address = JobFile.read(self.job.folder).address()
        assert self.job.config.cache.path is not None
        folders = (self.job.folder, self.job.config.cache.path / "programs", *hidden)
        mounts = "; ".join(f"mount -t tmpfs none {shlex.quote(str(folder))}" for folder in folders)
        apart = ("unshare", "--mount", "sh", "-e", "-c", f'{mounts}; exec "$@"', "sh")
        place = f"tcp://{address.host}:{address.port}"
        return self._start(apart, (place,), {"ELASWAVE_TOKEN": address.token, **environment})

    def join_with(self, other: Path, place: Path) -> subprocess.Popen[str]:
        """By a process that sees another file at its place."""
        mount = f'mount --bind {shlex.quote(str(other))} {shlex.quote(str(place))}; exec "$@"'
        apart = ("unshare", "--mount", "sh", "-e", "-c", mount, "sh")
        return self._start(apart, (str(self.job.folder),), {"PYTHONDONTWRITEBYTECODE": "1"})

    def _start(
        self, before: tuple[str, ...], words: tuple[str, ...], environment: dict[str, str]
    ) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [*before, sys.executable, "-m", "elaswave_fx.worker", *words],
            cwd=ROOT, env={**os.environ, **environment}, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        self.joining.append(process)
        return process

    def wait(self) -> Finished:
        """To the end, at full speed."""
        self._hurry.touch()
        return self.job.wait()


def config_of(hurry: Path, layout: tuple[int, int], *words: str, recipe: str = "gpt_stdlib") -> Config:
    return slow_config(hurry, layout, f"steps={STEPS}", *words, recipe=recipe)


@contextmanager
def running(folder: Path, layout: tuple[int, int], *words: str, recipe: str = "gpt_stdlib") -> Iterator[Running]:
    hurry = folder / "hurry"
    with Job(config_of(hurry, layout, *words, recipe=recipe), folder / "run") as job:
        found = Running(job, hurry)
        job.await_step(2)
        try:
            yield found
        finally:
            for process in found.joining:
                process.kill()
                process.communicate()


def missing_namespaces() -> str | None:
    """What this machine lacks for `join_from_elsewhere`, in words."""
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        return "mount namespaces need root and `unshare`"
    made = subprocess.run(["unshare", "--mount", "true"], check=False, capture_output=True, text=True)
    return f"no mount namespaces here: {made.stderr.strip()}" if made.returncode != 0 else None


MISSING = missing_namespaces()
apart = pytest.mark.skipif(MISSING is not None, reason=str(MISSING))


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    folder = tmp_path_factory.mktemp("alone")
    (folder / "hurry").touch()
    run = finish(config_of(folder / "hurry", (1, 1)), folder / "run")
    assert run.code == 0, run.console
    return run


def assert_same_bits(run: Finished, alone: Finished) -> None:
    assert run.code == 0 and run.orphans == (), run.console
    assert run.losses == alone.losses
    assert run.summary["params_digest"] == alone.summary["params_digest"]


def end_of(process: subprocess.Popen[str] | Command) -> tuple[int, str]:
    out, errors = process.communicate(timeout=60)
    return process.returncode, out + errors


def test_a_rank_joins_and_its_replicas_sync(alone: Finished, tmp_path: Path) -> None:
    with running(tmp_path, (2, 1)) as now:
        process = now.join()
        now.job.await_event("joined")
        assert (now.job.folder / ".init" / "state.safetensors").exists(), "for the next one"
        epochs = len(now.job.events("agreed"))
        now.job.await_event("agreed", epochs + 1)  # its replicas are there, and owners move
        run = now.wait()
        code, said = end_of(process)
    assert code == 0, said
    assert_same_bits(run, alone)
    (joined, *more) = run.of_kind("joined")
    assert joined["rank"] == 2 and not more and run.summary["recoveries"] == []
    assert all(event["steps_redone"] == 0 for event in run.of_kind("agreed"))
    assert run.ledger[-1]["tiles"]["2"], "it computes"
    epoch = run.of_kind("agreed")[-1]["epoch"]
    last = Plan.from_json((run.folder / f"plan-{epoch}.json").read_text())
    assert any(2 in box.replica_ranks for box in last.boxes)
    assert not any(box.catching_up for box in last.boxes), "its replicas are there"
    assert "rank 2 is a member" in (run.folder / "logs" / "rank-2.log").read_text()
    assert not (run.folder / ".init").exists()


def test_ranks_come_one_after_the_other_and_the_first_one_is_lost(alone: Finished, tmp_path: Path) -> None:
    with running(tmp_path, (2, 1)) as now:
        now.join()
        now.join()
        now.job.await_event("joined", 2)
        await_true(
            lambda: "joined; resumes at step " in (now.job.folder / "console.log").read_text(), "they have joined"
        )
        count = len(now.job.events("resumed"))
        now.job.signal_rank(0, signal.SIGKILL)
        now.job.await_event("resumed", count + 1)
        run = now.wait()
        ends = [end_of(process) for process in now.joining]
    assert [code for code, _ in ends] == [0, 0], ends
    assert_same_bits(run, alone)
    assert run.of_kind("agreed")[-1]["members"] == [1, 2, 3]


def end_without_rank_0(now: Running) -> Finished:
    """Once a joiner has all replicas, rank 0 is killed."""
    now.job.await_event("joined")
    now.job.await_event("agreed", 2)  # it has its replicas
    now.job.await_event("resumed", 2)
    now.job.signal_rank(0, signal.SIGKILL)
    now.job.await_event("resumed", 3)
    return now.wait()


def test_the_job_goes_on_when_only_a_rank_that_joined_is_left(alone: Finished, tmp_path: Path) -> None:
    with running(tmp_path, (1, 1)) as now:
        process = now.join()
        run = end_without_rank_0(now)
        code, said = end_of(process)
    assert code == 0, said
    assert_same_bits(run, alone)
    assert run.of_kind("agreed")[-1]["members"] == [1] and len(run.summary["recoveries"]) == 1


@pytest.mark.slow
def test_a_joiner_has_its_part_in_the_checkpoint_of_the_step_after_which_it_comes(tmp_path: Path) -> None:
    steps = 200
    with running(tmp_path, (2, 1), f"steps={steps}", "checkpoint.every=1", "checkpoint.keep=3") as now:
        now.join()
        now.job.await_event("joined")
        run = now.wait()
    assert run.code == 0, run.console
    (joined,) = run.of_kind("joined")
    assert run.of_kind("detected") == [], "nobody waits for a checkpoint that another rank does not make"
    saved = [event["step"] for event in run.of_kind("checkpoint") if "path" in event]
    assert joined["step"] in saved and steps in saved
    for path in complete(run.folder / "checkpoints").values():
        check_files(path, read_manifest(path))


def assert_nobody_came_or_went(run: Finished) -> None:
    """Of two ranks. On a busy machine one may have got less to do."""
    assert run.of_kind("joined") == run.of_kind("detected") == []
    assert all(event["members"] == [0, 1] for event in run.of_kind("agreed"))


BATCH_NORM = ("parallel.granule=4", "global_batch=24", "steps=400", "eval.every=100")


@pytest.fixture(scope="module")
def alone_with_buffers(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    folder = tmp_path_factory.mktemp("alone-with-buffers")
    (folder / "hurry").touch()
    run = finish(config_of(folder / "hurry", (1, 1), *BATCH_NORM, recipe="resnet_digits"), folder / "run")
    assert run.code == 0, run.console
    return run


def await_replicas(job: Job) -> None:
    """Until steps were committed in which replicas that small have come."""
    job.await_step(job.steps + 8)


@pytest.mark.parametrize("sizes", [(2,), slow((2, 4)), slow((2, 4, 6))], ids=str)
def test_buffers_come_with_a_join_and_outlive_all_ranks_that_began(
    alone_with_buffers: Finished, tmp_path: Path, sizes: tuple[int, ...]
) -> None:
    """1 -> 2 -> 1 ranks, or more between: who is left got running statistics as replicas, and has those of one rank."""
    losses = sizes[-1] - 1
    with running(tmp_path, (1, 1), *BATCH_NORM, f"copies.count={losses}", recipe="resnet_digits") as now:
        for ranks in sizes:
            while len(now.joining) < ranks - 1:
                now.join()
            now.job.await_event("joined", ranks - 1)
            await_replicas(now.job)
        for gone in range(losses):
            resumed = len(now.job.events("resumed"))
            if gone == 0:
                now.job.signal_rank(0, signal.SIGKILL)
            else:
                now.joining[gone - 1].kill()
            now.job.await_event("resumed", resumed + 1)
            await_replicas(now.job)
        run = now.wait()
        assert now.joining[-1].wait(timeout=60) == 0
    assert_same_bits(run, alone_with_buffers)
    assert len(run.of_kind("agreed")[-1]["members"]) == 1
    assert all(event["steps_redone"] <= 1 for event in run.of_kind("agreed"))
    assert run.summary["buckets"] == alone_with_buffers.summary["buckets"], "buffers are among them"
    found, expected = (load_file(each.folder / "model.safetensors") for each in (run, alone_with_buffers))
    statistics = [name for name in expected if "running_" in name or "num_batches" in name]
    assert len(statistics) > 20
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    wanted = Wanted(run.folder, alone_with_buffers.folder, (100, 110))
    rest = [each for each in verify(wanted, lambda *_: None) if each.verdict is not Verdict.HOLDS]
    assert [each.check for each in rest] == ["recipes"], f"other paths to wait for, and nothing else: {rest}"


@apart
def test_a_rank_joins_from_where_nothing_of_the_job_is(alone: Finished, tmp_path: Path) -> None:
    """And the coordinator dies before the joiner has fetched anything."""
    with running(tmp_path, (2, 1)) as now:
        process = now.join_from_elsewhere(TMPDIR=str(tmp_path))
        assert process.stdout is not None and process.stdout.readline() == "rank 2 gets ready\n"
        assert now.job.signal_coordinator(signal.SIGKILL)
        now.job.await_event("joined")
        await_true(lambda: not list(tmp_path.glob("elaswave-join-*")), "it has mapped what it needs, and keeps no file")
        run = now.wait()
        code, said = end_of(process)
    assert code == 0, said
    assert_same_bits(run, alone)
    assert "rank 2 has program and initial tensors, " in said and "rank 2 is a member from epoch 1 on" in said
    assert not (run.folder / "logs" / "rank-2.log").exists()
    assert [event["rank"] for event in run.of_kind("joined")] == [2] and run.summary["recoveries"] == []


@pytest.mark.slow
@apart
def test_the_model_is_written_where_the_last_rank_is(alone: Finished, tmp_path: Path) -> None:
    """Only a rank is left for which the run directory is a name."""
    with running(tmp_path, (1, 1)) as now:
        process = now.join_from_elsewhere(TMPDIR=str(tmp_path), HOME=str(tmp_path))
        run = end_without_rank_0(now)
        code, said = end_of(process)
    assert code == 0, said
    assert_same_bits(run, alone)
    (event,) = run.of_kind("model")
    place = Path(event["path"])
    try:
        assert event["rank"] == 1 and place.name.startswith("run-") and place.stat().st_size > 0
        assert f"the model cannot be written there; it is in {place} on 127.0.0.1" in run.console
        assert run.summary["model"] == str(place) and not (run.folder / "model.safetensors").exists()
    finally:
        place.unlink()


@pytest.mark.slow
@apart
def test_a_rank_that_is_left_alone_begins_again_from_the_tensors_that_it_has_fetched(
    alone: Finished, tmp_path: Path
) -> None:
    """The others end with all that they own, and there is no checkpoint."""

    def rollbacks(agreed: list[dict[str, Any]]) -> list[int]:
        return [event["rolled_back_to"] for event in agreed if "rolled_back_to" in event]

    with running(tmp_path, (2, 1), "copies.count=0", "recovery.allow_rollback=true") as now:
        process = now.join_from_elsewhere(TMPDIR=str(tmp_path), HOME=str(tmp_path))
        now.job.await_event("joined")
        for rank in (0, 1):
            now.job.signal_rank(rank, signal.SIGKILL)
        await_true(lambda: rollbacks(now.job.events("agreed")) == [0], "it begins again")
        run = now.wait()
        code, said = end_of(process)
    assert code == 0, said
    assert_same_bits(run, alone)
    assert rollbacks(run.of_kind("agreed")) == [0]
    Path(run.summary["model"]).unlink()


@apart
@pytest.mark.parametrize("of_run", [slow(True), False], ids=["RUN/checkpoints", "checkpoint.dir"])
def test_who_cannot_reach_the_checkpoints_is_no_member(alone: Finished, tmp_path: Path, of_run: bool) -> None:
    place = tmp_path / ("run" if of_run else "") / "checkpoints"
    words = ("checkpoint.every=200",) if of_run else ("checkpoint.every=200", f"checkpoint.dir={place}")
    with running(tmp_path, (2, 1), *words) as now:
        code, said = end_of(now.join_from_elsewhere(*(() if of_run else (place,))))
        run = now.wait()
    assert code == 2 and said.startswith("rank 2 gets ready\n")
    assert said.endswith(
        f"\nerror: {place}: the job's checkpoints go there, and this process cannot write to that folder\n"
    )
    assert_same_bits(run, alone)
    assert_nobody_came_or_went(run)
    assert run.of_kind("checkpoint") != []


@apart
def test_who_has_other_code_or_data_is_no_member_and_hears_which(tmp_path: Path) -> None:
    """Without checkpoints, too. Each sees another file at the same path: ours, the user's, a text."""
    text = tmp_path / "text.txt"
    text.write_text("the same words again and again, and some others\n" * 4000)
    words = ("data=files", f"data.paths=[{text}]")
    places = {"it has other code of elaswave_fx: ": Path(elaswave_fx.__file__), "its tests/slow_job.py differs: ":
              ROOT / "tests" / "slow_job.py", "it reads other data: ": text}  # fmt: skip
    with running(tmp_path, (2, 1), *words) as now:
        for number, (why, place) in enumerate(places.items()):
            other = tmp_path / f"other-{number}"
            other.write_bytes(place.read_bytes().replace(b"others", b"OTHERS") + b"\n")
            code, said = end_of(now.join_with(other, place))
            assert code == 2 and why in said and said.splitlines()[-1].startswith("error: "), said
        run = now.wait()
    assert run.code == 0, run.console
    assert_nobody_came_or_went(run)


def test_who_dies_while_it_gets_ready_costs_nothing(alone: Finished, tmp_path: Path) -> None:
    with running(tmp_path, (2, 1)) as now:
        process = now.join()
        assert process.stdout is not None and process.stdout.readline() == "rank 2 gets ready\n"
        process.kill()
        process.wait()
        again = now.join()
        now.job.await_event("joined")
        run = now.wait()
        assert end_of(again)[0] == 0
    assert_same_bits(run, alone)
    assert run.of_kind("detected") == [] and [event["rank"] for event in run.of_kind("joined")] == [3]


@pytest.mark.slow
def test_whoever_gets_ready_while_a_rank_is_lost_joins_the_others(alone: Finished, tmp_path: Path) -> None:
    """Its number stays the same: it asks for the members when it needs links, and again while it lacks one."""
    with running(tmp_path, (3, 1), "data.transform.sample_s=0.06") as now:
        process = now.join()
        assert process.stdout is not None and process.stdout.readline() == "rank 3 gets ready\n"
        assert now.job.signal_rank(2, signal.SIGKILL)
        now.job.await_event("joined")
        run = now.wait()
        code, said = end_of(process)
    assert code == 0, said
    assert_same_bits(run, alone)
    assert "joins anew" not in said
    (joined,) = run.of_kind("joined")
    assert joined["rank"] == 3 and [recovery["ranks"] for recovery in run.summary["recoveries"]] == [[2]]


@pytest.mark.parametrize("number", [signal.SIGKILL, slow(signal.SIGINT)], ids=["killed", "Ctrl-C"])
def test_the_end_of_one_that_has_joined_is_a_loss(alone: Finished, tmp_path: Path, number: signal.Signals) -> None:
    with running(tmp_path, (2, 1)) as now:
        process = now.join()
        now.job.await_event("joined")
        now.job.await_event("resumed")
        process.send_signal(number)
        now.job.await_event("detected")
        now.job.await_event("resumed", 2)
        run = now.wait()
    assert_same_bits(run, alone)
    assert run.of_kind("agreed")[-1]["members"] == [0, 1]
    assert sum(event["steps_redone"] for event in run.of_kind("agreed")) <= 1


def test_refusals_leave_the_job_untouched(alone: Finished, tmp_path: Path) -> None:
    with running(tmp_path, (2, 1), "lab.axes=[graph]") as now:
        folder = now.job.folder
        address = JobFile.read(folder).address()
        place = f"tcp://{address.host}:{address.port}"
        code, said = end_of(now.join("--help"))
        assert code == 0 and said.startswith("usage: python -m elaswave_fx.worker")
        for words, environment, why in (
            ((str(tmp_path / "nothing"),), {}, "holds no job that runs"),
            ((place,), {}, "ELASWAVE_TOKEN is not set"),
            ((place,), {"ELASWAVE_TOKEN": "f" * 64}, "does not hold the job's token"),
            (("tcp://127.0.0.1",), {}, "is no tcp://HOST:PORT"),
            ((str(folder),), {}, "the job is full: it has 2 ranks, and work for 2"),
            ((place,), {"ELASWAVE_TOKEN": address.token}, "the job is full"),
        ):
            code, said = end_of(now.join(*words, **environment))
            assert code == 2 and why in said and said.startswith("error: ") and said.count("\n") == 1, said
        with pytest.raises(ConfigError, match=r"it has torch 1\.0, the job torch"):
            ask_to_join(address, {**versions(), "torch": "1.0"}, 5.0)
        run = now.wait()
        code, said = end_of(now.join())
        assert code == 2 and "holds no job that runs" in said
    assert_same_bits(run, alone)
    assert_nobody_came_or_went(run)
    log = (run.folder / "logs" / "coordinator.log").read_text()
    assert "refused: somebody who wants to join: the job is full" in log and "it has torch 1.0" in log
    (line,) = [line for line in log.splitlines() if "token" in line]
    assert "refused: 127.0.0.1:" in line and line.endswith("somebody came, and left without a proof of the job's token")


def test_an_address_where_nobody_is() -> None:
    with listen("127.0.0.1", 0) as place:
        port = port_of(place)
    with pytest.raises(ConfigError, match=rf"tcp://127.0.0.1:{port}: cannot be reached"):
        ask_to_join(ControlAddress("127.0.0.1", port, "t"), {}, 0.3)
