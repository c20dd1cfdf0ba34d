"""An update that fails on one rank costs that rank: its replicas become the truth elsewhere, and training goes on."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from elaswave_fx.config.keys import Config
from elaswave_fx.optim.optimizer import GROUPS
from elaswave_fx.plan.plan import Plan
from elaswave_fx.plan.work.box import Box
from elaswave_fx.worker.loop import Training
from tests.recovery.harness import Finished, finish, job_config
from tests.recovery.invariants import assert_survived

BAD_STEP = 6
FAR = 1e9


class ProbingDescent:
    """Gradient descent that reads the entry of a table at `place`, a hyper value, and adds nothing of it. Beyond the
    end of the table that fails, as an operator may that finds no memory."""

    def init(self, param: Tensor) -> tuple[Tensor, ...]:
        return ()

    def update(self, param: Tensor, grad: Tensor, state: Any, hyper: tuple[Tensor, ...]) -> tuple[Tensor, Any]:
        lr, place = hyper
        probe = torch.zeros(8).index_select(0, place.long().reshape(1))
        return param - grad * lr + probe * 0.0, ()

    def hyper_values(self, step: int, lr: float, group: str) -> list[float]:
        return [lr, 0.0]


def config() -> Config:
    own = f"optimizer._target_={__name__}.{ProbingDescent.__name__}"
    return job_config((2, 2), "steps=16", own, "optimizer.weight_decay=null")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    run = finish(config(), tmp_path_factory.mktemp("undisturbed"))
    assert run.code == 0, run.console
    return run


@pytest.mark.parametrize("rank", [0, 2])
def test_the_others_go_on_with_their_replicas(
    rank: int, undisturbed: Finished, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hyper = Training._hyper

    def failing(training: Training, step: int) -> list[list[float]]:
        rows = hyper(training, step)
        if training._worker.rank == rank and step == BAD_STEP:
            rows[GROUPS.index("no_decay")][-1] = FAR
        return rows

    monkeypatch.setattr(Training, "_hyper", failing)
    run = finish(config(), tmp_path)
    assert_survived(run, undisturbed, {rank})
    (left,) = run.of_kind("left")
    assert f"rank {rank}: UpdateFailed: box " in left["cause"]
    assert f"its update failed on rank {rank}, which drops its state" in left["cause"]
    agreed, *later = run.of_kind("agreed")
    assert agreed["lost"] == [rank] and agreed["step"] == BAD_STEP + 1, "the step is committed, and stays so"
    assert all(event["lost"] == [] for event in later), "what may follow is a planned change towards a better plan"
    named = re.search(r"box (\d+) ", left["cause"])
    assert named is not None
    before, after = (boxes_of(run, epoch)[int(named.group(1))] for epoch in (0, 1))
    assert rank in before.replica_ranks and after.owner in set(before.replica_ranks) - {rank}


def boxes_of(run: Finished, epoch: int) -> tuple[Box, ...]:
    return Plan.from_json((run.folder / f"plan-{epoch}.json").read_text()).boxes
