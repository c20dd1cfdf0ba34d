"""A dataset that never gives a sample, or raises, ends the run with the rank and the sample as its reason."""

from __future__ import annotations

import ctypes
import signal
import time
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from elaswave_fx.config.compose import load_config
from elaswave_fx.config.keys import Config
from elaswave_fx.data.order import HeldOutOrder, SampleOrder, Shuffle
from tests.marks import slow
from tests.recovery.harness import Finished, Job, finish
from tests.waiting import await_true

DEADLINE_S = 4
SAMPLES, BATCH, BAD_STEP = 640, 8, 5
FOREVER_S = 1e6
SAMPLE_S = 0.05
"""Of each: when it starts a run looks at samples for a while, and these shall be few."""


class Points:
    """One sample of which is not to be had. `alone`: no other thread runs while it hangs."""

    def __init__(self, bad: int, raises: bool = False, touched: str | None = None, alone: bool = False) -> None:
        self.bad, self.raises, self.touched, self.alone = bad, raises, touched, alone

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if index == self.bad:
            if self.touched is not None:
                Path(self.touched).touch()
            if self.raises:
                raise OSError("no disk")
            if self.alone:
                ctypes.PyDLL(None).sleep(int(FOREVER_S))
            time.sleep(FOREVER_S)
        time.sleep(SAMPLE_S)
        return {"x": torch.full((3,), index / SAMPLES)}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(3, 8), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.leave(torch.tanh(self.enter(x))).square().sum(), torch.ones_like(x[:, 0]).sum()


def sample_at(step: int, place: int) -> int:
    return int(SampleOrder(0, SAMPLES).indices(step * BATCH, BATCH)[place])


def config(bad: int, *words: str) -> Config:
    return load_config([
        f"data._target_={__name__}.Points", f"model._target_={__name__}.Net", f"data.bad={bad}", "steps=12",
        f"global_batch={BATCH}", "parallel.dp=2", "parallel.pp=2", "checkpoint.every=2", *words,
    ])  # fmt: skip


def seconds_between(run: Finished, first: str, second: str) -> float:
    return 1e-3 * (run.of_kind(second)[-1]["t_ms"] - run.of_kind(first)[-1]["t_ms"])


def last_line(run: Finished) -> tuple[str, str]:
    """The reason, and the file with more of it."""
    reason, _, log = run.console.splitlines()[-1].partition("; the traceback is in ")
    return reason, log


@pytest.mark.parametrize(
    ("place", "ranks", "raises", "error"),
    [
        slow(0, {0, 1}, False, "sample {} has not been read after 4 s (data.deadline_s)"),
        (BATCH - 1, {2, 3}, False, "sample {} has not been read after 4 s (data.deadline_s)"),
        (BATCH - 1, {2, 3}, True, "sample {} cannot be read (OSError: no disk)"),
    ],
    ids=["hangs for the first pipeline", "hangs for the second", "raises"],
)
def test_no_rank_is_left_out_for_a_sample_that_nobody_can_read(
    place: int, ranks: set[int], raises: bool, error: str, tmp_path: Path
) -> None:
    bad = sample_at(BAD_STEP, place)
    run = finish(config(bad, f"data.deadline_s={DEADLINE_S}", f"data.raises={raises}"), tmp_path)
    assert run.code == 1, run.console
    last, log = last_line(run)  # the ranks of a pipeline read the same samples
    wanted = f"data._target_={__name__}.Points: {error.format(bad)}"
    assert last in {f"error: rank {rank}: {wanted}" for rank in ranks}
    assert run.summary["reason"] == last.removeprefix("error: ")
    assert not run.orphans
    assert not run.of_kind("agreed") and not run.of_kind("left"), "whoever took over would have the same"
    assert raises or "time.sleep(FOREVER_S)" in Path(log).read_text(), "it is shown where the sample hangs"
    assert "Traceback" not in run.console
    assert seconds_between(run, "checkpoint", "finished") < 6 * DEADLINE_S
    assert run.of_kind("checkpoint")[-1]["step"] in (2, 4)
    healed = finish(config(-1, "resume=auto"), tmp_path)
    assert healed.code == 0 and healed.summary["samples_seen"] == 12 * BATCH, healed.console


def test_a_sample_that_stops_all_threads_of_whoever_reads_it_ends_the_run(tmp_path: Path) -> None:
    bad = sample_at(BAD_STEP, 0)
    run = finish(config(bad, f"data.deadline_s={DEADLINE_S}", "data.alone=true"), tmp_path)
    assert run.code == 1 and not run.orphans
    wanted = f"data._target_={__name__}.Points: sample {bad} has not been read after {DEADLINE_S} s (data.deadline_s)"
    assert last_line(run)[0] in {f"error: rank {rank}: {wanted}" for rank in range(4)}
    silent, finished = run.of_kind("detected")[0], run.of_kind("finished")[0]
    assert finished["t_ms"] - silent["t_ms"] + (silent.get("silent_ms") or 0) < 8e3 * DEADLINE_S


def test_a_held_out_sample_is_named_too(tmp_path: Path) -> None:
    train = SAMPLES - SAMPLES // 20
    bad = int(HeldOutOrder(train, SAMPLES - train, Shuffle(0, SAMPLES)).indices(1, 1)[0])
    run = finish(config(bad, f"data.deadline_s={DEADLINE_S}", "eval.every=4"), tmp_path)
    assert run.code == 1 and not run.orphans
    named = f"data._target_={__name__}.Points: sample {bad} has not been read after 4 s"
    assert last_line(run)[0].endswith(f"{named} (data.deadline_s)")
    assert len(run.losses) == 4 and not run.of_kind("agreed")


@pytest.mark.parametrize(
    ("bad", "alone"),
    [(SAMPLES // 2, False), (sample_at(0, 0), False), (0, True)],
    ids=["tried", "captured with", "stops all threads"],
)
def test_before_anything_starts_it_is_the_users_to_mend(bad: int, alone: bool, tmp_path: Path) -> None:
    run = finish(config(bad, "data.deadline_s=1", f"data.alone={alone}"), tmp_path)
    assert run.code == 2 and not run.orphans
    assert run.console.splitlines()[-1] == (
        f"error: data._target_={__name__}.Points: sample {bad} has not been read after 1 s (data.deadline_s)"
    )


def test_ctrl_c_ends_a_start_that_hangs(tmp_path: Path) -> None:
    touched = tmp_path / "touched"
    with Job(config(0, f"data.touched={touched}"), tmp_path) as job:
        await_true(touched.exists, "the sample is being read")
        job.signal_launcher(signal.SIGINT)
        run = job.wait()
    assert run.code == 130 and not run.orphans
    assert "stopped by SIGINT" in run.console.splitlines()[-1]


def test_ctrl_c_twice_ends_ranks_that_hang(tmp_path: Path) -> None:
    touched = tmp_path / "touched"
    with Job(config(sample_at(BAD_STEP, 0), f"data.touched={touched}"), tmp_path) as job:
        await_true(touched.exists, "the sample is being read")
        job.signal_launcher(signal.SIGINT)
        job.await_event("stopping")
        job.signal_launcher(signal.SIGINT)
        run = job.wait()
    assert run.code == 130 and not run.orphans
    assert "stopped by SIGINT" in run.console.splitlines()[-1]
