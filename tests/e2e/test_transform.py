"""Augmented samples are the same for whoever computes them: on any layout, and when a rank is lost."""

from __future__ import annotations

from pathlib import Path

import pytest

from elaswave_fx.config.keys import Config
from tests.recovery.harness import Finished, finish, job_config
from tests.runs import reference

STEPS = 12


def config(layout: tuple[int, int], *words: str) -> Config:
    transform = "data.transform._target_=tests.data.transforms.Noise"
    return job_config(layout, transform, f"steps={STEPS}", *words, recipe="two_tower")


def content(run: Finished) -> list[str]:
    """Hashes of what the steps consumed, bit for bit."""
    return [line["content_hash"] for line in run.ledger]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    run = finish(config((1, 1)), tmp_path_factory.mktemp("alone"))
    assert run.code == 0, run.console
    return run


@pytest.mark.parametrize(
    "words", [(), ("faults=[{step: 6, rank: 1, phase: backward}]",)], ids=["undisturbed", "a rank is lost"]
)
def test_layouts_see_the_same_samples(words: tuple[str, ...], alone: Finished, tmp_path: Path) -> None:
    run = finish(config((2, 2), *words), tmp_path)
    assert run.code == 0, run.console
    assert len(content(run)) == STEPS and content(run) == content(alone)
    assert run.losses == pytest.approx(alone.losses, rel=1e-5)
    assert len(run.summary["recoveries"]) == len(words)


def test_a_plain_loop_over_these_samples_computes_the_same(alone: Finished, tmp_path: Path) -> None:
    assert alone.losses == pytest.approx(reference(config((1, 1))).losses, rel=1e-5)
    plain = finish(job_config((1, 1), f"steps={STEPS}", recipe="two_tower"), tmp_path)
    assert not set(content(plain)) & set(content(alone)), "other samples without the transform"
