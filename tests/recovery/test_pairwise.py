"""Ranks killed in every phase: each pair of layout and phase, layout and rank, kind of rank and phase."""

from pathlib import Path

import pytest

from tests.marks import slow
from tests.recovery.fault_matrix import LAYOUTS, PHASES, Loss, in_jobs, kind_of, pairwise, product, ranks_of
from tests.recovery.references import References
from tests.recovery.scenario_registry import policies
from tests.recovery.scenarios import Scenario, inside

JOBS = in_jobs(pairwise())


def test_the_full_product_is_every_rank_in_every_phase() -> None:
    assert len(set(product())) == sum(dp * pp for dp, pp in LAYOUTS) * len(PHASES) == 138


def test_the_pairwise_set_covers_every_pair() -> None:
    losses = [loss for job in JOBS for loss in job]
    assert {(loss.layout, loss.phase) for loss in losses} == {(layout, phase) for layout in LAYOUTS for phase in PHASES}
    assert {(loss.layout, loss.rank) for loss in losses} == {(a, rank) for a in LAYOUTS for rank in ranks_of(a)}
    kinds = {kind_of(layout, rank) for layout in LAYOUTS for rank in ranks_of(layout)}
    assert {(loss.kind, loss.phase) for loss in losses} == {(kind, phase) for kind in kinds for phase in PHASES}


@pytest.mark.parametrize("losses", JOBS, ids=lambda losses: "+".join(loss.name for loss in losses))
def test_lost_ranks_are_gone_on_without(losses: tuple[Loss, ...], tmp_path: Path, references: References) -> None:
    inside(losses).check(tmp_path, references)


SCENARIOS = policies(job for job in JOBS if len(job) > 1)


@pytest.mark.parametrize(
    "scenario",
    [each if "-2x2-rank2" in each.name else slow(each) for each in SCENARIOS],
    ids=lambda scenario: scenario.name,
)
def test_every_policy_goes_on(scenario: Scenario, tmp_path: Path, references: References) -> None:
    scenario.check(tmp_path, references)
