"""Runs with `lab.policy=smaller_batch`: steps without the samples of lanes that left are means over the others."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from elaswave_fx.audit.finding import Verdict
from elaswave_fx.verify import Wanted, verify
from tests.recovery.harness import Finished, finish
from tests.recovery.invariants import LOSS_RTOL, PARAMETER_RTOL, assert_plain_arithmetic, assert_went_on
from tests.runs import small_config

LOST = "faults=[{step: 2, rank: 3, phase: reduce}]"
SHAPE = ("lab.policy=smaller_batch", "parallel.dp=2", "parallel.pp=2")


def sum_of_keys(line: Mapping[str, Any]) -> int:
    return sum(int(keys, 16) for keys in line["keys"].values()) % 2**64


def assert_in_order(run: Finished) -> None:
    found = verify(Wanted(run.folder), lambda what, done, of: None)
    assert [str(each) for each in found if each.verdict is not Verdict.HOLDS] == []


def test_granules_of_a_batch_coupled_model_leave_whole(tmp_path: Path) -> None:
    """Running statistics are those of the granules that are left."""
    config = small_config("resnet_digits", *SHAPE, "parallel.granule=8", "steps=6", LOST)
    run = finish(config, tmp_path)
    assert_went_on(run, 6, {3})
    assert [line["samples"] for line in run.metrics] == [32, 32, 16, 16, 16, 16]
    assert_plain_arithmetic(run, config, LOSS_RTOL, PARAMETER_RTOL)


def test_a_run_that_is_gone_on_with_has_the_whole_batch_again(tmp_path: Path) -> None:
    """Its samples and draws are those of a run that lost nobody, and the summary counts what was left out before."""
    words = (*SHAPE, "model.dropout=0.1", "checkpoint.every=2", "resume=auto")
    first = finish(small_config("gpt_stdlib", *words, "steps=4", LOST), tmp_path / "run")
    assert_went_on(first, 4, {3})
    run = finish(small_config("gpt_stdlib", *words, "steps=7"), tmp_path / "run")
    assert run.code == 0, run.console
    assert [line["samples"] for line in run.metrics] == [8, 8, 4, 4, 8, 8, 8]
    assert (run.summary["samples_seen"], run.summary["samples_skipped"]) == (48, 8)
    assert_in_order(run)
    undisturbed = finish(small_config("gpt_stdlib", *SHAPE, "model.dropout=0.1", "steps=7"), tmp_path / "other")
    fed = [[(line["content_hash"], sum_of_keys(line)) for line in each.ledger] for each in (run, undisturbed)]
    assert [mine == other for mine, other in zip(*fed, strict=True)] == [True, True, False, False, True, True, True]
