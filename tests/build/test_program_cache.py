"""Programs from the cache are whole, import nothing that the recipe does not name, and heal."""

from __future__ import annotations

import errno
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.utils.data import Dataset

from elaswave_fx.build.builder import build
from elaswave_fx.build.program_cache import writing_program
from elaswave_fx.config.compose import load_config
from elaswave_fx.errors import ConfigError
from elaswave_fx.program.artifact import Artifact


def words(cache: Path) -> list[str]:
    """A model that is captured in a second, with a constant."""
    return [
        f"model._target_={__name__}.Weighted", "model.over_mean=false", f"data._target_={__name__}.WeightedVectors",
        "data.second=1", "global_batch=4", f"cache.dir={cache}",
    ]  # fmt: skip


def truncate(folder: Path) -> None:
    text = (folder / "artifact.json").read_text()
    (folder / "artifact.json").write_text(text[: len(text) // 2])


def edit(folder: Path) -> None:
    path = folder / "constants.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(bytes(data))


def import_something(folder: Path) -> None:
    body = json.loads((folder / "artifact.json").read_text())
    first = next(iter(body["programs"].values()))
    first["instructions"][0]["op"] = "mine::operator"
    Artifact.save(
        Artifact(**{**_fields(folder), "modules": ("antigravity",), "programs": body["programs"]}),
        _aside(folder),
        Artifact.load_constants(folder),
    )
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()
    _aside(folder).rename(folder)


def _fields(folder: Path) -> dict[str, object]:
    return dict(vars(Artifact.load(folder)))


def _aside(folder: Path) -> Path:
    return folder.with_name("aside")


class Weighted(nn.Module):
    """Losses by whole weights over their mean: a sum where all are alike."""

    def __init__(self, over_mean: bool) -> None:
        super().__init__()
        self.head = nn.Linear(4, 2)
        self.over_mean = over_mean
        self.scale = torch.linspace(1, 2, 4)

    def forward(self, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        weight = weight.float()
        factor = weight / weight.mean() if self.over_mean else weight
        return (self.head(self.scale * x).square().sum(1) * factor).sum(), torch.ones_like(weight).sum()


class WeightedVectors(Dataset[dict[str, Tensor]]):
    def __init__(self, second: int) -> None:
        self.second = second

    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": torch.linspace(0, 1, 4) + index, "weight": torch.tensor(self.second if index % 2 else 1)}


@pytest.mark.parametrize("over_mean", [True, False])
def test_a_program_from_the_cache_is_tried_on_other_data(over_mean: bool, tmp_path: Path) -> None:
    def built(second: int) -> tuple[str, tuple[str, ...]]:
        words = [
            f"model._target_={__name__}.Weighted", f"model.over_mean={over_mean}",
            f"data._target_={__name__}.WeightedVectors", f"data.second={second}",
            "global_batch=4", f"cache.dir={tmp_path}",
        ]  # fmt: skip
        found = build(load_config(words), None)
        return found.origin, found.artifact.batch_coupled

    origin, coupled = built(1)
    assert origin == "program captured"
    assert bool(coupled) == over_mean  # whatever weights the first data have
    assert built(3) == ("program from the cache", coupled)
    assert built(1) == ("program from the cache", coupled)


class Classifier(nn.Linear):
    """Of two classes, by the weights of `WeightedVectors` less one."""

    def __init__(self) -> None:
        super().__init__(4, 2)

    def forward(self, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        losses = nn.functional.cross_entropy(super().forward(x), weight - 1, reduction="none")
        return losses.sum(), torch.ones_like(losses).sum()


def test_labels_beyond_the_classes_are_named_also_where_the_program_is_cached(tmp_path: Path) -> None:
    def built(second: int) -> str:
        words = [
            f"model._target_={__name__}.Classifier", f"data._target_={__name__}.WeightedVectors",
            f"data.second={second}", "global_batch=4", f"cache.dir={tmp_path}",
        ]  # fmt: skip
        return build(load_config(words), None).origin

    assert built(2) == "program captured"
    with pytest.raises(
        ConfigError, match="IndexError: Target 6 is out of bounds; labels are below the number of logits"
    ):
        built(7)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "truncated": truncate,
    "empty": lambda folder: (folder / "artifact.json").write_text(""),
    "edited": edit,
    "missing": lambda folder: (folder / "constants.safetensors").unlink(),
    "no digests": lambda folder: (folder / "digests.json").unlink(),
    "digests of nothing": lambda folder: (folder / "digests.json").write_text("{}"),
    "costs": lambda folder: (folder / "costs.json").write_text("{"),
    "foreign import": import_something,
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_program_is_captured_again(name: str, tmp_path: Path) -> None:
    config = load_config(words(tmp_path / "cache"))
    first = build(config, None)
    text = (first.folder / "artifact.json").read_text()
    DAMAGES[name](first.folder)
    second = build(config, None)
    assert (second.origin, second.folder) == ("program captured", first.folder)
    assert any(f"{first.folder} is damaged" in note for note in second.notes)
    body, before = json.loads((second.folder / "artifact.json").read_text()), json.loads(text)
    assert body["programs"] == before["programs"] and body["modules"] == []
    third = build(config, None)
    assert third.origin == "program from the cache" and third.notes == ()
    assert [path.name for path in (tmp_path / "cache" / "programs").iterdir()] == [first.folder.name]


def test_a_cache_that_cannot_be_written_costs_a_capture(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    built = build(load_config(words(tmp_path / "file" / "cache")), tmp_path / "run")
    assert built.origin == "program captured" and built.folder.parent == tmp_path / "run"
    assert any("cannot be written" in note and "not kept" in note for note in built.notes)


def test_a_cache_that_another_user_may_change_is_not_used(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    config = load_config(words(cache))
    kept = build(config, tmp_path / "first").folder
    for place in (cache, cache / "programs"):
        place.chmod(0o777)
        built = build(config, tmp_path / "run")
        assert built.origin == "program captured" and built.folder.parent == tmp_path / "run"
        assert any("another user may change it" in note for note in built.notes)
        assert not (cached := list(cache.glob("*/*.json"))), cached
        shutil.rmtree(tmp_path / "run")
        place.chmod(0o755)
    cache.chmod(0o1777)
    assert build(config, tmp_path / "run").folder == kept, "what lies in /tmp is its owner's alone"


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), SafetensorError("No space")])
def test_a_full_disk_is_the_users_to_mend(error: Exception, tmp_path: Path) -> None:
    config = load_config([f"cache.dir={tmp_path}"])
    with pytest.raises(ConfigError) as caught, writing_program(config, tmp_path / "programs" / "3f"):
        raise error
    assert str(caught.value).startswith(f"cache.dir={tmp_path}: the program cannot be written (")
    assert str(caught.value).endswith("; nearest valid: cache.enabled=false")
    why = "^hydra.run.dir=/run-1/.init: the program cannot be written"
    with pytest.raises(ConfigError, match=why), writing_program(config, Path("/run-1/.init/3f")):
        raise error
