"""State that a step reads and updates trains as in a plain loop with the whole batch in one call."""

from __future__ import annotations

from pathlib import Path

import pytest

from elaswave_fx.build.builder import build
from elaswave_fx.build.initial_plan import plan_of
from elaswave_fx.config.compose import load_config
from elaswave_fx.config.keys import Config
from elaswave_fx.errors import ConfigError
from tests.reference import relative_difference
from tests.runs import reference, run_job


def config_of(model: str, *words: str) -> Config:
    data = ("data=synthetic", "data.layout=flat", "global_batch=8", "steps=4", "eval.every=0")
    return load_config([f"model._target_=tests.e2e.stateful.{model}", *data, *words])


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("Gate", ("parallel.dp=2", "parallel.pp=2")),
        ("Gate", ("exact=true", "parallel.dp=2", "parallel.granule=2")),
        ("Memory", ("parallel.granule=8", "parallel.pp=2")),
        ("Follower", ("parallel.dp=2",)),
    ],
)
def test_trains_as_with_the_whole_batch_in_one_call(model: str, words: tuple[str, ...], tmp_path: Path) -> None:
    config = config_of(model, *words)
    run, expected = run_job(config, tmp_path), reference(config)
    assert run.code == 0
    assert run.losses == pytest.approx(expected.losses, rel=1e-5)
    state = {**expected.buffers, **expected.parameters}
    tensors = run.tensors
    assert relative_difference({name: tensors[name] for name in state}, state) < 1e-5


def test_a_part_of_a_batch_is_refused_where_the_whole_is_needed() -> None:
    config = config_of("Memory", "parallel.dp=2")
    artifact = build(config, None).artifact
    message = "parallel.granule=1: buffer 'memory' is read by .* parallel.granule=8 parallel.dp=1$"
    with pytest.raises(ConfigError, match=message):
        plan_of(config, artifact)
