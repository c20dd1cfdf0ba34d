"""Checkpoints of any model, made one file by torch's own converter: a state dict that its class loads, all of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint import FileSystemWriter, save
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from elaswave_fx.build.make_model import make_model
from elaswave_fx.checkpoint.folder import complete
from elaswave_fx.checkpoint.manifest import check_files, read_manifest, write_manifest
from elaswave_fx.config.compose import load_config
from elaswave_fx.config.keys import Config
from elaswave_fx.data import open_source
from elaswave_fx.files import file_digest
from tests.runs import Run, run_job, small_config

MIXED = ("model._target_=tests.checkpoint.test_state_dict.Mixed", "data=synthetic", "data.layout=flat", "steps=6",
         "global_batch=8", "parallel.granule=8", "eval.every=0", "checkpoint.every=2", "checkpoint.keep=3")  # fmt: skip


class Mixed(nn.Module):
    """Frozen, tied, scalar and parametrized parameters; buffers that are kept and that are not, changed and not."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.utils.parametrizations.weight_norm(nn.Linear(64, 6))
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.norm = nn.BatchNorm1d(6)
        self.fold = nn.Parameter(torch.randn(3, 1, 2))
        self.gain = nn.Parameter(torch.ones(()))
        self.again = self.frozen
        self.leave = nn.Linear(6, 10)
        self.twin = self.leave
        self.register_buffer("mask", torch.arange(6) > 0)
        self.register_buffer("unkept", torch.full((6,), 0.5), persistent=False)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64), persistent=False)
        self.register_buffer("unused", torch.eye(2))

    def forward(self, image: Tensor, label: Tensor) -> tuple[Tensor, Tensor]:
        self.seen += 1
        h = self.norm(self.again(self.frozen(self.enter(image))))
        h = h * self.mask * self.unkept * self.gain + self.fold.flatten()
        logits = self.leave(h.relu())
        return nn.functional.cross_entropy(logits, label, reduction="sum"), torch.ones_like(label).sum()


def built(config: Config) -> nn.Module:
    return make_model(config, open_source(config).dataset)


def converted(run: Path, step: int, to: Path) -> dict[str, Any]:
    dcp_to_torch_save(run / "checkpoints" / f"step-{step}", to)
    return torch.load(to)


@pytest.mark.parametrize(
    "recipe", ["gpt_stdlib", "resnet_digits", "hf_gpt2", "hf_llama"], ids=["tied", "buffers", "hf, tied", "hf, rotary"]
)
def test_the_models_class_loads_what_torch_converts(recipe: str, tmp_path: Path) -> None:
    config = small_config(recipe, "parallel.dp=2", "parallel.pp=1", "steps=2", "checkpoint.every=2")
    run = run_job(config, tmp_path / "run")
    assert run.code == 0
    loaded_alike(config, run.tensors, converted(tmp_path / "run", 2, tmp_path / "all.pt")["model"])


def loaded_alike(config: Config, tensors: dict[str, Tensor], state: dict[str, Tensor]) -> None:
    model = built(config)
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.zero_()
    inner = getattr(model, "model", model)
    assert inner.load_state_dict(state, strict=True) == ([], [])
    kept = {id(tensor) for tensor in inner.state_dict(keep_vars=True).values()}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        assert id(tensor) not in kept or torch.equal(tensor, tensors[name]), name


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """6 steps of two stages of the model with everything, with checkpoints after 2, 4 and 6."""
    run = run_job(load_config([*MIXED, "parallel.pp=2", "parallel.dp=1"]), tmp_path_factory.mktemp("mixed"))
    assert run.code == 0
    return run


def test_what_is_frozen_tied_or_a_buffer_is_there_by_all_its_names(mixed: Run, tmp_path: Path) -> None:
    stored = converted(mixed.folder, 6, tmp_path / "all.pt")
    loaded_alike(load_config(list(MIXED)), mixed.tensors, stored["model"])
    assert set(stored) == {"model", "optimizer", "buffers"}
    assert stored["buffers"]["seen"] == 6
    moments = stored["optimizer"]["fold"]
    assert [tuple(each.shape) for each in moments] == [(3, 1, 2)] * 2 and "frozen.weight" not in stored["optimizer"]


def test_what_training_leaves_alone_is_written_once(mixed: Run) -> None:
    """The last file of a checkpoint, after those of the ranks."""
    files = [mixed.folder / "checkpoints" / f"step-{step}" / "__2_0.distcp" for step in (2, 4, 6)]
    assert len({file.stat().st_ino for file in files}) == 1
    assert read_manifest(files[0].parent).files[files[0].name] == read_manifest(files[2].parent).files[files[2].name]


def test_checkpoints_are_whole_whoever_was_lost_between_them(tmp_path: Path) -> None:
    """The number of a file says another thing when there are fewer ranks: of three, the third wrote this one."""
    lost = "faults=[{rank: 2, step: 5, kind: kill}]"
    config = [*MIXED, "parallel.dp=1", "steps=12", "checkpoint.keep=6"]
    run = run_job(load_config([*config, "parallel.pp=3", lost]), tmp_path / "run")
    assert run.code == 0
    found = complete(run.folder / "checkpoints")
    assert list(found)[-4:] == [6, 8, 10, 12]  # One that was being written when the rank was lost is given up.
    for folder in found.values():
        check_files(folder, read_manifest(folder))
    loaded_alike(load_config(config), run.tensors, converted(run.folder, 12, tmp_path / "all.pt")["model"])
    again = run_job(load_config([*config, "parallel.pp=2", f"resume={found[8]}"]), tmp_path / "again")
    assert (again.code, again.losses) == (0, pytest.approx(run.losses[8:], rel=1e-5))


def test_another_layout_goes_on_from_rectangles(mixed: Run, tmp_path: Path) -> None:
    path = mixed.folder / "checkpoints" / "step-2"
    run = run_job(load_config([*MIXED, "parallel.pp=1", "parallel.dp=1", f"resume={path}"]), tmp_path)
    assert run.code == 0
    assert run.losses == pytest.approx(mixed.losses[2:], rel=1e-5)


def test_a_flat_checkpoint_of_before_is_gone_on_from(mixed: Run, tmp_path: Path) -> None:
    path = as_format_1(mixed.folder / "checkpoints" / "step-2", tmp_path / "before" / "step-2")
    run = run_job(load_config([*MIXED, "parallel.pp=2", "parallel.dp=1", f"resume={path}"]), tmp_path / "run")
    assert (run.code, run.losses) == (0, mixed.losses[2:])
    assert run.summary["params_digest"] == mixed.summary["params_digest"]


def as_format_1(path: Path, to: Path) -> Path:
    """A checkpoint as versions before 2 wrote them: flat, under logical names, and without what is not trained."""
    manifest = read_manifest(path)
    stored = converted(path.parents[1], manifest.step, path.parent / "all.pt")
    places = manifest.contents.key_paths()
    flat = {}
    for name in manifest.contents.tensors:
        tensor: Any = stored
        for key in places[name][0]:
            tensor = tensor[key]
        flat[name] = tensor.flatten()
    save(flat, storage_writer=FileSystemWriter(to), no_dist=True)
    contents = replace(manifest.contents, state_dict={}, unchanged={})
    files = {each.name: (each.stat().st_size, file_digest(each)) for each in to.iterdir()}
    write_manifest(to, replace(manifest, contents=contents, files=files, format=1))
    return to
