"""What a run says of its plan's predictions: of the slowest rank, in the newest epoch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from elaswave_fx.plan.make.derive import make_plan
from elaswave_fx.plan.plan import Plan
from elaswave_fx.plan.work.topology import Epoch, Rank, local_topology
from elaswave_fx.worker.predictions import Predictions
from tests.plan.samples import chain, even_lanes


def plan_2x2(epoch: int = 0) -> Plan:
    workload = replace(chain(), update_s=1e-5)
    return make_plan(local_topology(4, epoch=Epoch(epoch)), workload, even_lanes(workload, 2, 2, 4), "")


class OtherRanks:
    """A group whose other members have written `rows`."""

    def __init__(self, rows: list[list[float]]) -> None:
        self._rows = torch.tensor(rows, dtype=torch.float64)

    def all_gather(self, tensor: torch.Tensor, intervals: list[tuple[int, int]], timeout_s: float) -> None:
        assert intervals == [(0, 5), (5, 10), (10, 15), (15, 20)]
        own = tensor.view(4, 5)
        tensor.copy_(torch.where(own != 0, own, self._rows).view(-1))


BOTH = {"UPDATE": 0.004, "SNAPSHOT": 0.006}


def taken(
    pipeline_s: float,
    modelled_s: float = 0.0,
    overslept_s: float = 0.0,
    seconds: float = 1.0,
    update: Mapping[str, float] = BOTH,
) -> Any:
    """The part of a step's result that is looked at."""
    times = SimpleNamespace(modelled_s=modelled_s, overslept_s=overslept_s)
    timings = {name: SimpleNamespace(seconds=seconds) for name, seconds in {**update, "VOTE": 7.0}.items()}
    return SimpleNamespace(emulated=times, pipeline_seconds=pipeline_s, seconds=seconds, timings=timings)


def test_the_report_is_of_the_slowest_rank() -> None:
    plan, found = plan_2x2(), Predictions()
    predicted_s = plan.predicted.pipeline_s
    for seconds in (0.5, 0.2, 0.2):  # the first step waits for others to start
        found.step(plan, taken(predicted_s, modelled_s=0.1, overslept_s=0.001), seconds)
    slow, quick = [0.25, 1.5 * predicted_s, 0.02, 0.3, 0.003], [0.1, 0.1, 0.01, 0.3, 0.0]
    others = [[0.0] * 5, slow, quick, quick]
    report = found.report(plan, Rank(0), OtherRanks(others))
    assert report.pipeline_over_predicted == 1.5
    assert report.step_ms == 250.0
    assert report.step_over_predicted == pytest.approx(0.25 / plan.predicted.step_s, abs=1e-4)
    assert report.update_ms == 20.0
    assert report.exchange_ms == pytest.approx(250.0 - report.pipeline_ms - report.update_ms, abs=2e-3)
    assert report.predicted_exchange_ms == pytest.approx(1e3 * plan.predicted.exchange_s, abs=1e-3)
    assert report.predicted_update_ms == pytest.approx(1e3 * plan.predicted.update_s, abs=1e-3) != 0.0
    assert report.overslept_share == pytest.approx(0.006 / 1.2)
    assert (report.ranks, report.steps) == (4, 3)


@pytest.mark.parametrize(("update", "update_ms"), [(BOTH, 10.0), ({"SNAPSHOT": 0.006}, 6.0), ({}, 0.0)])
def test_the_update_is_that_of_owned_boxes_and_of_replicas(update: dict[str, float], update_ms: float) -> None:
    """A rank that owns nothing has no UPDATE, one that computes nothing may have neither."""
    plan, found = plan_2x2(), Predictions()
    found.step(plan, taken(0.5, update=update), 1.0)
    assert found.report(plan, Rank(0), OtherRanks([[0.0] * 5] * 4)).update_ms == update_ms


def test_only_the_newest_epoch_counts() -> None:
    old, new, found = plan_2x2(), plan_2x2(1), Predictions()
    found.step(old, taken(1.0), 1.0)
    found.step(new, taken(2.0), 2.0)
    found.step(new, taken(0.0, seconds=0.0), 9.0)  # finished after it had been left
    others = OtherRanks([[0.0] * 5] * 4)
    report = found.report(new, Rank(2), others)
    assert report is not None and (report.steps, report.step_ms, report.pipeline_ms) == (1, 2000.0, 2000.0)
    assert found.report(plan_2x2(2), Rank(2), others) is None
