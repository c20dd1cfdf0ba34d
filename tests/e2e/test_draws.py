"""lab.reshard_rng: random draws follow the samples; without it they belong to the ranks, and layouts differ in them."""

from __future__ import annotations

from pathlib import Path

import pytest

from elaswave_fx.control.store.ledger import standing
from tests.recovery.harness import Finished, finish
from tests.runs import small_config

STEPS, LOST_IN = 6, 3
LOSES = f"faults=[{{step: {LOST_IN}, rank: 1, phase: backward}}]"


def keys_of(run: Finished) -> list[int]:
    """The sum of the keys that all ranks drew with, by step."""
    assert run.code == 0, run.console[-3000:]
    return [sum(int(keys, 16) for keys in line["keys"].values()) % 2**64 for line in standing(run.ledger)]


def trained(folder: Path, *words: str) -> Finished:
    return finish(small_config("gpt_stdlib", f"steps={STEPS}", "parallel.pp=1", *words), folder)


@pytest.mark.parametrize("reshard", ["true", "false"])
def test_draws_follow_the_samples_or_the_ranks(tmp_path: Path, reshard: str) -> None:
    word = f"lab.reshard_rng={reshard}"
    two, again, three, hurt = (
        trained(tmp_path / name, word, *more)
        for name, more in {
            "two": ("parallel.dp=2",),
            "again": ("parallel.dp=2",),
            "three": ("parallel.dp=3",),
            "hurt": ("parallel.dp=3", LOSES),
        }.items()
    )
    assert keys_of(two) == keys_of(again) and two.losses == again.losses, "the same draws in the same layout"
    assert keys_of(hurt)[:LOST_IN] == keys_of(three)[:LOST_IN]
    if reshard == "true":
        assert keys_of(two) == keys_of(three) == keys_of(hurt)
        assert hurt.losses == pytest.approx(two.losses, rel=1e-5)
    else:
        pairs = [*zip(keys_of(two), keys_of(three), strict=True)]
        pairs += zip(keys_of(hurt)[LOST_IN:], keys_of(three)[LOST_IN:], strict=True)
        assert all(one != other for one, other in pairs), "ranks with other samples draw anew"
        assert two.losses != pytest.approx(three.losses, rel=1e-4)
