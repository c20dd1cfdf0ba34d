"""Every recipe on every layout agrees with a plain single-process PyTorch loop."""

from functools import cache
from pathlib import Path

import pytest

from tests.reference import ReferenceRun, relative_difference
from tests.runs import SMALL, STEPS, reference, run_job, small_config

UNDISTURBED = sorted(SMALL.keys() - {"lose_and_regain", "storm"})
"""Recipes without faults, which name ranks that a layout may not have; `tests/recovery` has the others."""

LAYOUTS = ((1, 1), (2, 1), (1, 2), (2, 2), (3, 2), (1, 4))


@cache
def expected(recipe: str) -> ReferenceRun:
    return reference(small_config(recipe))


@pytest.mark.parametrize(("dp", "pp"), LAYOUTS)
@pytest.mark.parametrize("recipe", UNDISTURBED)
def test_agrees_with_plain_pytorch(recipe: str, dp: int, pp: int, tmp_path: Path) -> None:
    run = run_job(small_config(recipe, f"parallel.dp={dp}", f"parallel.pp={pp}"), tmp_path)
    assert run.code == 0
    reference = expected(recipe)
    assert len(run.losses) == STEPS
    for step, (ours, theirs) in enumerate(zip(run.losses, reference.losses, strict=True)):
        assert ours == pytest.approx(theirs, rel=1e-5), f"loss of step {step}"
    tensors = run.tensors
    assert relative_difference({name: tensors[name] for name in reference.parameters}, reference.parameters) < 1e-4
    statistics = {name: each for name, each in reference.buffers.items() if each.is_floating_point()}
    if statistics:
        assert relative_difference({name: tensors[name] for name in statistics}, statistics) < 1e-4
    for name in reference.buffers.keys() - statistics.keys():
        assert name.endswith("num_batches_tracked") and int(tensors[name]) == STEPS, "it counts steps, not granules"
    summary = run.summary
    assert summary["samples_seen"] == STEPS * small_config(recipe).global_batch
    assert (summary["samples_duplicated"], summary["samples_skipped"]) == (0, 0)
