"""Every kind of module of the table trains as a plain PyTorch loop does, or is refused for the reason it says."""

from __future__ import annotations

from pathlib import Path

import pytest

from elaswave_fx.build.initial_plan import plan_of
from elaswave_fx.errors import ConfigError
from tests.marks import slow
from tests.zoo.kinds import KINDS, SAMPLES
from tests.zoo.page import rows, shown
from tests.zoo.trial import Trial, config_of, plain

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "models.md"

RUNS = [name for name, kind in KINDS.items() if not kind.refused]
REFUSED = [name for name, kind in KINDS.items() if kind.refused]
COUPLED = [name for name, kind in KINDS.items() if kind.granule > 1]


def test_the_page_has_every_kind() -> None:
    """Made anew by `make models`; what it says of refusals is compared where they are tried."""
    assert len(KINDS) >= 60
    lines = PAGE.read_text().splitlines()
    assert [line for line in lines if line.startswith("| ")][1:] == rows()
    assert [line.split("**")[1] for line in lines if line.startswith("- **")] == REFUSED


@pytest.mark.parametrize("name", [name if number % 3 == 0 else slow(name) for number, name in enumerate(RUNS)])
def test_trains_as_plain_pytorch_does(name: str, tmp_path: Path) -> None:
    """By one rank in micro-batches of three samples, and by two stages in others: draws know neither. Every third kind
    by `make test`, all of them by `make test-all`."""
    config = config_of(name)
    trial = Trial(config, tmp_path)
    granule = KINDS[name].granule
    one = trial.losses(stages=1, micro_batch=max(3, granule))
    assert trial.losses(stages=2, micro_batch=max(2, granule)) == pytest.approx(one, rel=1e-5)
    if not KINDS[name].draws:
        assert one == pytest.approx(plain(config), rel=1e-5, abs=1e-5)


@pytest.mark.parametrize("name", REFUSED)
def test_is_refused_in_one_line_with_the_reason(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as refusal:
        Trial(config_of(name), tmp_path)
    assert "\n" not in str(refusal.value)
    assert all(words.lower() in str(refusal.value).lower() for words in KINDS[name].refused), str(refusal.value)
    assert f"- **{name}**: `{shown(str(refusal.value))}`" in PAGE.read_text().splitlines(), str(refusal.value)


@pytest.mark.parametrize("name", COUPLED)
def test_samples_that_belong_together_are_not_separated(name: str, tmp_path: Path) -> None:
    config = config_of(name, "parallel.granule=1")
    with pytest.raises(ConfigError, match=f"parallel.granule=({SAMPLES}|the samples of a step)"):
        plan_of(config, Trial(config, tmp_path).artifact)
