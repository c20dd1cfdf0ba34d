"""The key of the program cache covers every option that the program depends on, and nothing that it does not."""

from __future__ import annotations

import pytest

from elaswave_fx.build.builder import program_key
from elaswave_fx.config.compose import load_config
from elaswave_fx.program.fingerprint import fingerprint
from elaswave_fx.program.forward_code import forward_code
from tests.passes.models import Classifier, vectors


def key(*overrides: str, samples: int = 2, model: Classifier | None = None) -> str:
    model, batch = model or Classifier(), vectors(samples, samples)
    return program_key(load_config(overrides), fingerprint(model), batch, forward_code(model, batch))


@pytest.mark.parametrize(
    "override",
    [
        "precision=bf16",
        "recompute=full",
        "passes.find_cuts.least=2",
        "parallel.granule=2",
        "optimizer.no_decay=none",
    ],
)
def test_what_changes_the_program_changes_the_key(override: str) -> None:
    more = ["global_batch=8"]
    assert key(override, *more) != key(*more)


def test_the_model_changes_the_key() -> None:
    assert key(model=Classifier(dropout=0.1)) != key()


@pytest.mark.parametrize(
    "override",
    ["seed=7", "steps=9", "optimizer.lr=0.5", "clip_norm=null", "parallel.micro_batch=1", "passes.dump=graphs"],
)
def test_what_does_not_change_the_program_keeps_the_key(override: str) -> None:
    assert key(override) == key()
    assert key(samples=5) == key(), "samples are not a part of the program"
