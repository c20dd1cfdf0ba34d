"""What is tried before an exact run begins: every operator is deterministic; what a sample takes by granule."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from elaswave_fx.build import rehearsal
from elaswave_fx.build.build_job import build_job
from elaswave_fx.build.rehearsal import Rehearsal, sizes_of
from elaswave_fx.config.compose import load_config
from elaswave_fx.config.keys import Config
from elaswave_fx.errors import ConfigError
from elaswave_fx.models.losses import token_loss_sum


class Unpooled(nn.Module):
    """Features that go back to where the largest ones were, as in SegNet (Badrinarayanan et al. 2017)."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(64, 64), nn.Linear(64, 10)

    def forward(self, image: Tensor, label: Tensor) -> tuple[Tensor, Tensor]:
        x = self.enter(image).unflatten(1, (1, 8, 8))
        pooled, places = F.max_pool2d(x, 2, return_indices=True)
        return token_loss_sum(self.leave(F.max_unpool2d(pooled, places, [2, 2]).flatten(1)), label)


@torch.library.custom_op("elaswave_rehearsal::half", mutates_args=())
def half(x: Tensor) -> Tensor:
    """Half of x; only its derivative has no order, or says so."""
    return 0.5 * x


@torch.library.custom_op("elaswave_rehearsal::written", mutates_args=())
def written(x: Tensor) -> Tensor:
    """x, an element of which is written by an operator that could write another one over it."""
    return x.clone().put_(torch.zeros(1, dtype=torch.int64), x.flatten()[:1])


half.register_fake(torch.empty_like)
written.register_fake(torch.empty_like)
half.register_autograd(lambda ctx, grad: 0.5 * written(grad))


class Halved(Unpooled):
    def forward(self, image: Tensor, label: Tensor) -> tuple[Tensor, Tensor]:
        return token_loss_sum(self.leave(half(self.enter(image))), label)


IMAGES = ("data=synthetic", "data.layout=flat", "eval.every=0")
TOWERS = (
    "recipe=two_tower", "data=synthetic", "data.layout=halves", "global_batch=8", "parallel.dp=2", "parallel.pp=1",
)  # fmt: skip


REFUSED = {
    "Unpooled": r"exact=true: aten::max_unpool2d in unit \d, forward: .* implementation of max_unpool\w+; a way out",
    "Halved": r"exact=true: elaswave_rehearsal::written in unit \d, backward: .* implementation of put_; a way out",
}


@pytest.fixture(autouse=True)
def any_operator() -> Iterator[None]:
    """A builder is a process of its own; this one goes on."""
    yield
    torch.set_deterministic_debug_mode("default")


def config_of(folder: Path, *words: str) -> Config:
    return load_config([*words, f"cache.dir={folder / 'cache'}"])


def start(folder: Path, *words: str) -> list[str]:
    """What a start of a small run says of its rehearsal."""
    lines = build_job(config_of(folder, *TOWERS, *words), folder / "run").lines
    return [line for line in lines if line.startswith("exact: ") or rehearsal.FILE in line]


def kept(folder: Path) -> Path:
    (found,) = (folder / "cache" / "programs").glob(f"*/{rehearsal.FILE}")
    return found


def measures(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The sizes of each time that something is measured from here on, in no time."""
    found: list[tuple[int, ...]] = []

    def seconds(stage: object, sizes: tuple[int, ...]) -> dict[int, float | None]:
        found.append(sizes)
        return {size: 0.002 / size for size in sizes}

    monkeypatch.setattr(rehearsal._Stage, "seconds", seconds)
    return found


@pytest.mark.parametrize("name", REFUSED)
def test_an_operator_without_order_is_refused_by_name_at_every_start(name: str, tmp_path: Path) -> None:
    words = (f"model._target_=tests.build.test_rehearsal.{name}", *IMAGES)
    for _ in ("captured", "from the cache"):
        with pytest.raises(ConfigError, match=REFUSED[name]) as refusal:
            build_job(config_of(tmp_path, *words, "exact=true"), tmp_path / "run")
        assert "\n" not in str(refusal.value)
        torch.set_deterministic_debug_mode("default")
    assert not list((tmp_path / "cache" / "programs").glob(f"*/{rehearsal.FILE}"))
    build_job(config_of(tmp_path, *words), tmp_path / "run")


def test_a_start_says_what_a_sample_takes_by_granule(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rehearsal, "_ALL_S", 60.0)
    number = r"\d+(\.\d+)?"
    (line,) = start(tmp_path, "exact=true")
    wanted = rf"exact: {number} ms a sample at parallel.granule=1 \(this run's\), {number} at 2, {number} at 4"
    assert re.fullmatch(wanted, line), line
    assert start(tmp_path) == [], "any other run rehearses nothing"


def test_a_program_is_rehearsed_once_with_an_update(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured = measures(monkeypatch)
    first = start(tmp_path, "exact=true")
    assert first == ["exact: 2 ms a sample at parallel.granule=1 (this run's), 1 at 2, 0.5 at 4"]
    assert start(tmp_path, "exact=true") == first and measured == [(1, 2, 4)]
    start(tmp_path, "exact=true", "global_batch=4")
    assert len(measured) == 1, "all its sizes are known"
    start(tmp_path, "exact=true", "global_batch=16")
    assert measured[1:] == [(1, 2, 4, 8)]
    start(tmp_path, "exact=true", "optimizer=sgd")
    assert measured[2:] == [(1, 2, 4)]


DAMAGES = {
    "empty": "",
    "half": '{"update": "3f',
    "a list": "[]",
    "nothing of its granule": '{"update": "3f", "seconds": {"2": 0.1}}',
    "no number": '{"update": "3f", "seconds": {"1": "fast"}}',
    "no time": '{"update": "3f", "seconds": {"1": -1}}',
    "no end": '{"update": "3f", "seconds": {"1": Infinity}}',
    "no update": '{"seconds": {"1": 0.1}}',
    "deep": "[" * 100_000,
}


def test_a_damaged_rehearsal_is_done_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured = measures(monkeypatch)
    (line,) = start(tmp_path, "exact=true")
    for turn, damage in enumerate(DAMAGES.values(), 1):
        kept(tmp_path).write_text(damage)
        note, again = start(tmp_path, "exact=true")
        assert note.startswith(f"cache: {kept(tmp_path)} is damaged (") and "\n" not in note
        assert again == line and len(measured) == 1 + turn
    assert start(tmp_path, "exact=true") == [line] and len(measured) == 1 + len(DAMAGES)


def test_sizes_are_what_the_run_could_have() -> None:
    def sizes(*words: str, coupled: tuple[str, ...] = ()) -> tuple[int, ...]:
        return sizes_of(load_config([*TOWERS, *words]), SimpleNamespace(batch_coupled=coupled))  # type: ignore[arg-type]

    assert sizes("global_batch=8", "parallel.dp=1") == (1, 2, 4, 8)
    assert sizes("global_batch=8", "parallel.dp=3") == (1, 2), "every rank has one at least"
    assert sizes("global_batch=12", "parallel.dp=1", "parallel.granule=6") == (6, 1, 2, 4)
    assert sizes("parallel.granule=2", coupled=("batch_norm",)) == (2,)


def test_other_sizes_are_not_worth_long_measurements(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rehearsal, "_ALL_S", 0.0)
    (line,) = start(tmp_path, "exact=true")
    assert line.endswith("ms a sample at parallel.granule=1 (this run's); not measured at 2 and 4")
    assert json.loads(kept(tmp_path).read_text())["seconds"].keys() == {"1", "2", "4"}
    assert Rehearsal({2: 0.15, 1: 0.2001, 4: 0.0123}).line() == (
        "exact: 150 ms a sample at parallel.granule=2 (this run's), 200 at 1, 12 at 4"
    )
