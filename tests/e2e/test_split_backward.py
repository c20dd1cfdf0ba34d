"""parallel.schedule=split: a run has the bits that it has with whole backward passes, also when ranks are lost."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.recovery.harness import Finished, finish, job_config
from tests.recovery.invariants import assert_same_bits, assert_survived

STEPS = 6
LAYOUTS = [(1, 2), (2, 2), (1, 4)]


def run_of(layout: tuple[int, int], schedule: str, folder: Path, *words: str, recipe: str = "gpt_stdlib") -> Finished:
    config = job_config(layout, f"steps={STEPS}", f"parallel.schedule={schedule}", *words, recipe=recipe)
    run = finish(config, folder / schedule)
    assert run.code == 0, run.console[-3000:]
    kinds = {kind for order in json.loads((run.folder / "plan-0.json").read_text())["schedule"].values()
             for kind, _ in order}  # fmt: skip
    assert kinds == set("FIW" if schedule == "split" else "FB")
    return run


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS, ids="{0[0]}x{0[1]}".format)
def test_halves_cost_no_bit(layout: tuple[int, int], exact: bool, tmp_path: Path) -> None:
    whole, halves = (run_of(layout, schedule, tmp_path, f"exact={exact}") for schedule in ("1f1b", "split"))
    assert [line["loss"] for line in halves.ledger] == [line["loss"] for line in whole.ledger]
    assert_same_bits(halves, whole)


def test_halves_of_convolutions_and_running_statistics_cost_no_bit(tmp_path: Path) -> None:
    runs = [run_of((1, 2), kind, tmp_path, "parallel.granule=4", recipe="resnet_digits") for kind in ("1f1b", "split")]
    assert_same_bits(*runs)


@pytest.mark.parametrize("exact", [False, True])
def test_losses_between_halves_cost_a_step_at_most(exact: bool, tmp_path: Path) -> None:
    faults = "faults=[{step: 1, rank: 1, kind: kill, phase: backward}, {step: 3, rank: 2, kind: kill, phase: reduce}]"
    undisturbed = run_of((2, 2), "1f1b", tmp_path, f"exact={exact}")
    run = run_of((2, 2), "split", tmp_path, f"exact={exact}", faults)
    assert_survived(run, undisturbed, {1, 2})
    if exact:
        assert_same_bits(run, undisturbed)
