"""exact=true: every layout and every history of losses has the bits of one rank that nothing ever happened to."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from elaswave_fx.config.compose import load_config
from elaswave_fx.config.keys import Config
from elaswave_fx.devices import make_device
from elaswave_fx.devices.mkl import branch
from elaswave_fx.errors import ConfigError
from elaswave_fx.worker.loop import refuse_other_bits
from tests.marks import slow
from tests.recovery.harness import Finished, finish, job_config
from tests.recovery.invariants import assert_same_bits
from tests.recovery.kinds import ALIKE_LAYOUTS, KINDS

STEPS = 8
PHASES = ("forward", "backward", "reduce", "update", "gather", "snapshot")
# Every kind of run on two layouts, every layout with several kinds.
PAIRS = [
    (kind, ALIKE_LAYOUTS[(2 * number + other) % len(ALIKE_LAYOUTS)])
    for number, kind in enumerate(KINDS)
    for other in (0, 3)
]


def exact(kind: str, layout: tuple[int, int] = (1, 1), *words: str) -> Config:
    recipe, *said = KINDS[kind]
    return job_config(layout, *said, f"steps={STEPS}", "eval.every=4", *words, recipe=recipe)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Finished]:
    """The run of one rank, by kind."""

    @cache
    def of(kind: str) -> Finished:
        return finish(exact(kind), tmp_path_factory.mktemp("alone") / "run")

    return of


def assert_ended_alike(run: Finished, alone: Finished) -> None:
    for each in (run, alone):
        assert each.code == 0, each.console[-3000:]
    assert_same_bits(run, alone)


SLOW = ("t5-bf16", "gpt2-bf16", "mixtral")
"""Whose reference takes long."""


@pytest.mark.parametrize(
    ("kind", "layout"),
    [slow(*pair) if pair[0] in SLOW else pair for pair in PAIRS],
    ids=lambda each: each if isinstance(each, str) else "{}x{}".format(*each),
)
def test_every_layout_has_the_bits_of_one_rank(
    kind: str, layout: tuple[int, int], alone: Callable[[str], Finished], tmp_path: Path
) -> None:
    assert_ended_alike(finish(exact(kind, layout), tmp_path), alone(kind))


@pytest.mark.parametrize(("layout", "phases"), [((4, 1), PHASES[:3]), ((2, 2), PHASES[3:4]), ((3, 2), PHASES[3:])])
def test_losses_in_every_phase_cost_no_bit(
    layout: tuple[int, int], phases: tuple[str, ...], alone: Callable[[str], Finished], tmp_path: Path
) -> None:
    ranks = [2 * number + 1 if layout == (3, 2) else number for number in range(len(phases))]
    faults = ",".join(
        f"{{step: {1 + 2 * number}, rank: {rank}, kind: kill, phase: {phase}}}"
        for number, (rank, phase) in enumerate(zip(ranks, phases, strict=True))
    )
    # With one replica the next loss, two steps later, may come before the replicas lost with the last are synced anew.
    run = finish(exact("gpt", layout, f"faults=[{faults}]", "copies.count=2"), tmp_path)
    assert len(run.of_kind("left")) == len(phases), "the ranks were lost"
    assert_ended_alike(run, alone("gpt"))


def test_a_run_goes_on_with_the_same_bits_in_another_layout(alone: Callable[[str], Finished], tmp_path: Path) -> None:
    words = ("checkpoint.every=2", "resume=auto")
    begun = finish(exact("gpt-bf16", (2, 2), *words, "steps=4"), tmp_path)
    assert begun.code == 0, begun.console
    gone_on = finish(exact("gpt-bf16", (3, 1), *words), tmp_path)
    assert_ended_alike(gone_on, alone("gpt-bf16"))


def test_nobody_goes_on_from_a_run_that_computed_other_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ("checkpoint.every=2", "resume=auto")
    assert finish(exact("gpt", (2, 1), *words, "steps=4"), tmp_path).code == 0
    there, told = os.environ["MKL_CBWR"], branch()
    monkeypatch.setenv("MKL_CBWR", "COMPATIBLE")
    refused = finish(exact("gpt", (2, 1), *words), tmp_path)
    assert refused.code == 2
    assert refused.console.splitlines()[-1].endswith(
        "step-4: exact=true cannot go on from it, its run computed other bits: "
        f"mkl_cbwr is COMPATIBLE, and was {told} there"
    )
    monkeypatch.setenv("MKL_CBWR", there)
    assert finish(exact("gpt", (2, 1), *words), tmp_path).code == 0, "nothing was lost"


def test_the_command_needs_nothing_of_its_environment(tmp_path: Path) -> None:
    """MKL's branch has to be chosen before the builder tries the model; tests say it by a variable, users do not."""
    words = ("recipe=two_tower", "exact=true", "steps=2", "eval.every=0", "hydra.run.dir=run", "cache.dir=cache")
    command = [sys.executable, "-m", "elaswave_fx.train", *words]
    environment = {name: value for name, value in os.environ.items() if name != "MKL_CBWR"}
    environment["PYTHONPATH"] = str(Path(__file__).resolve().parents[2])
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_rank_that_would_compute_other_bits_is_refused() -> None:
    device = make_device("cpu")
    inputs = SimpleNamespace(fingerprint={**device.fingerprint(), "torch": "1"})
    context = SimpleNamespace(rank=3, build=SimpleNamespace(data=inputs))
    with pytest.raises(ConfigError, match="exact=true: rank 3 would compute other bits than the builder: torch is 2"):
        refuse_other_bits(device, context)  # type: ignore[arg-type]


# --- Granules that cancel


class Scaled:
    """Every step has all samples. Large ones cancel, and what is left is far below what a double keeps beside them."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        scale = (1e10, -1e10, 1e-9)[index % 3]
        x = torch.sin(torch.arange(24.0) * (index + 1 if abs(scale) < 1.0 else 1))
        return {"x": x, "scale": torch.tensor([scale])}


class Linear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(24, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        return (self.second(torch.tanh(self.first(x))) * scale).sum(), torch.ones_like(scale).sum()


def cancelling(layout: tuple[int, int], *words: str) -> Config:
    return load_config([
        f"data._target_={__name__}.Scaled", f"model._target_={__name__}.Linear", "exact=true", f"steps={STEPS}",
        "global_batch=12", f"parallel.dp={layout[0]}", f"parallel.pp={layout[1]}", "schedule=constant",
        "eval.every=0", *words,
    ])  # fmt: skip


def test_what_a_double_cannot_hold_travels_beside_it(tmp_path: Path) -> None:
    """Without the residuals, sums of the same granules differ by the order of their ranks."""
    fault = "faults=[{step: 3, rank: 1, kind: kill, phase: reduce}]"
    runs = [
        finish(cancelling((dp, 1), *words), tmp_path / f"{dp}-{len(words)}")
        for dp, words in itertools.chain([(1, ()), (2, ()), (3, ()), (4, ()), (4, (fault,))])
    ]
    assert all(0.0 < line["grad_norm"] < 1e-6 for line in runs[0].metrics), "the large ones have cancelled"
    for run in runs[1:]:
        assert_ended_alike(run, runs[0])
    assert runs[-1].of_kind("left")
