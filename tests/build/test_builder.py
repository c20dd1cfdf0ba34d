"""What the builder makes beside the artifact, and what it leaves alone when the cache has it."""

from __future__ import annotations

import io
import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from elaswave_fx.build.builder import build
from elaswave_fx.checkpoint.initial_state import InitialState
from elaswave_fx.config.compose import load_config
from elaswave_fx.errors import CaptureError, DataError

_WARM = """
import sys
from pathlib import Path
from elaswave_fx.config.compose import load_config
import elaswave_fx.worker.loop
from elaswave_fx.build.build_job import build_job

words = ["recipe=two_tower", "data=synthetic", "data.layout=halves", f"cache.dir={sys.argv[1]}"]
build_job(load_config(words), Path(sys.argv[2]))
print("torch._dynamo" in sys.modules, "torch._functorch.aot_autograd" in sys.modules, "sympy" in sys.modules)
"""


def test_with_a_program_from_the_cache_nothing_that_compiles_is_imported(tmp_path: Path) -> None:
    def imported(name: str) -> str:
        command = [sys.executable, "-c", _WARM, str(tmp_path / "cache"), str(tmp_path / name)]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    assert imported("cold") == "True True True"
    assert imported("warm") == "False False False"


class LateBuffer(nn.Linear):
    """Registers a table when it is first called."""

    def __init__(self) -> None:
        super().__init__(2, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        if not hasattr(self, "table"):
            self.register_buffer("table", torch.ones(2))
        return (super().forward(x) * self.table).sum(), torch.full((), x.shape[0])


class Vectors:
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": torch.full((2,), 0.1 * index)}


class ResizedBuffer(nn.Linear):
    """Its table gets its size, or is made, by the first call. `none`: it is None before."""

    def __init__(self, none: bool) -> None:
        super().__init__(2, 2)
        self.register_buffer("table", None if none else torch.zeros(0))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        if self.table is None:
            self.table = torch.ones(2)
        elif not len(self.table):
            self.table.resize_(2).fill_(1.0)
        return (super().forward(x) * self.table).sum(), torch.full((), x.shape[0])


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("LateBuffer",), "forward registers the buffer table, "),
        (("ResizedBuffer", "+model.none=true"), "forward registers the buffer table, "),
        (("ResizedBuffer", "+model.none=false"), r"forward resizes the buffer table, of size \[0\] before"),
    ],
)
def test_a_buffer_without_a_value_is_refused(words: tuple[str, ...], reason: str, tmp_path: Path) -> None:
    name, *more = words
    here = [f"model._target_={__name__}.{name}", *more, f"data._target_={__name__}.Vectors", "global_batch=4"]
    with pytest.raises(CaptureError, match=f"model: {reason}.*its size in the constructor"):
        build(load_config(here), tmp_path)


class Evaluating(nn.Linear):
    """Its dropout is left in evaluation mode by the constructor; `stays`: and by train()."""

    def __init__(self, stays: bool) -> None:
        super().__init__(2, 2)
        self.stays, self.drop = stays, nn.Dropout(0.5).eval()

    def train(self, mode: bool = True) -> nn.Module:
        super().train(mode)
        if hasattr(self, "drop"):
            self.drop.train(mode and not self.stays)
        return self

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return self.drop(super().forward(x)).sum(), torch.full((), x.shape[0])


@pytest.mark.parametrize("stays", [True, False])
def test_a_module_that_leaves_evaluation_mode_is_named(tmp_path: Path, stays: bool) -> None:
    words = [f"model._target_={__name__}.Evaluating", f"model.stays={stays}", f"data._target_={__name__}.Vectors"]
    built = build(load_config([*words, "global_batch=4"]), tmp_path)
    assert any("in training mode, as model.train() sets it: drop;" in note for note in built.notes) is not stays
    assert ("dropout" in str(built.artifact.programs)) is not stays


class OfPrecision(nn.Linear):
    def __init__(self, dtype: str) -> None:
        super().__init__(2, 2, dtype=getattr(torch, dtype))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return super().forward(x.to(self.weight.dtype)).float().square().sum(), torch.full((), x.shape[0])


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_that_parameters_of_another_precision_are_kept_in_single_is_said(tmp_path: Path, dtype: str) -> None:
    words = [f"model._target_={__name__}.OfPrecision", f"+model.dtype={dtype}", f"data._target_={__name__}.Vectors"]
    built = build(load_config([*words, "global_batch=4"]), tmp_path)
    assert f"model: weight and 1 more in {dtype}: kept and updated in fp32, computed with as it is" in built.notes


class Extra(nn.Module):
    """Has state that is no tensor, in a part."""

    def __init__(self) -> None:
        super().__init__()
        self.part = Part()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.part(x).square().sum(), torch.full((), x.shape[0])


class Part(nn.Linear):
    def __init__(self) -> None:
        super().__init__(2, 2)

    def get_extra_state(self) -> dict[str, int]:
        return {"version": 3}

    def set_extra_state(self, state: dict[str, int]) -> None:
        assert state == {"version": 3}


def test_that_checkpoints_leave_out_extra_state_is_said(tmp_path: Path) -> None:
    words = [f"model._target_={__name__}.Extra", f"data._target_={__name__}.Vectors", "global_batch=4"]
    assert "model: checkpoints leave out get_extra_state() of Part" in build(load_config(words), tmp_path).notes


NOW = {"step": 0, "index": 0}


class Told(nn.Linear):
    """Reads what others note in a global."""

    def __init__(self, name: str) -> None:
        super().__init__(2, 2)
        self.name = name

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return super().forward(x).square().sum() * (1.0 + NOW[self.name]), torch.full((), x.shape[0])


def noting(step: int) -> float:
    NOW["step"] = step
    return 1.0


class Noting(Vectors):
    def __getitem__(self, index: int) -> dict[str, Tensor]:
        NOW["index"] = index
        return super().__getitem__(index)


@pytest.mark.parametrize("name", ["step", "index", "none"])
def test_what_a_schedule_or_a_dataset_tells_forward_is_refused(tmp_path: Path, name: str) -> None:
    NOW["none"] = 0
    words = [f"model._target_={__name__}.Told", f"+model.name={name}", f"data._target_={__name__}.Noting"]
    config = load_config([*words, f"schedule._target_={__name__}.noting", "global_batch=4", "steps=9"])
    if name == "none":
        assert build(config, tmp_path).artifact.programs
        return
    with pytest.raises(CaptureError, match="forward depends on NOW.*, which the schedule, .* changes"):
        build(config, tmp_path)


class Counting(Vectors):
    """Samples that are others after 100 reads."""

    def __init__(self, by: str) -> None:
        super().__init__()
        self.by = by
        self.log: list[int] = []
        self.numbers = itertools.count()
        self.file = io.BytesIO()

    def count(self, index: int) -> int:
        if self.by == "log":
            self.log.append(index)
            return len(self.log)
        if self.by == "forward":
            return NOW["calls"]
        return next(self.numbers) if self.by == "iterator" else self.file.write(b"x") + self.file.tell()

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        x = super().__getitem__(index)["x"]
        return {"x": x if self.count(index) < 100 else x + 1}


class Counted(Told):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        NOW["calls"] += 1
        return super().forward(x)


@pytest.mark.parametrize("by", ["log", "iterator", "file", "forward"])
def test_samples_that_are_others_after_many_steps_are_refused(tmp_path: Path, by: str) -> None:
    NOW.update(none=0, calls=0)
    words = [f"model._target_={__name__}.Counted", "+model.name=none", f"data._target_={__name__}.Counting"]
    config = load_config([*words, f"+data.by={by}", "global_batch=4", "steps=9"])
    with pytest.raises(DataError, match=r"Counting: sample .* is another one after \d+ steps: .* a way out is"):
        build(config, tmp_path)


class Late(Told):
    """By a text, which nothing counts."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        loss, count = super().forward(x)
        return loss * (1.0 if len(os.environ.get("STEPS_OF_LATE", "")) < 100 else 2.0), count


def noting_outside(step: int) -> float:
    os.environ["STEPS_OF_LATE"] = os.environ.get("STEPS_OF_LATE", "") + "x"
    return 1.0


def test_forward_that_is_another_after_many_steps_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STEPS_OF_LATE", "")
    NOW["none"] = 0
    words = [f"model._target_={__name__}.Late", "+model.name=none", f"data._target_={__name__}.Vectors"]
    config = load_config([*words, f"schedule._target_={__name__}.noting_outside", "global_batch=4", "steps=9"])
    with pytest.raises(CaptureError, match=r"forward computes something else after \d+ steps .*the schedule"):
        build(config, tmp_path)


CALLS_OF_WARMING = io.BytesIO()


class Warming(Told):
    """By a count of calls where nothing looks, over within a build's first ones."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        loss, count = super().forward(x)
        CALLS_OF_WARMING.write(b"x")
        return loss * min(1.0, CALLS_OF_WARMING.tell() / 2), count


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_forward_that_is_another_in_its_first_calls_is_refused(tmp_path: Path, precision: str) -> None:
    CALLS_OF_WARMING.seek(0)
    NOW["none"] = 0
    words = [f"model._target_={__name__}.Warming", "+model.name=none", f"data._target_={__name__}.Vectors"]
    with pytest.raises(CaptureError, match="Warming computes something else in later calls with the same samples"):
        build(load_config([*words, "global_batch=4", "steps=9", f"precision={precision}"]), tmp_path)


class Contrast(nn.Linear):
    """Written for eight samples."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.others = 1 - torch.eye(8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        h = super().forward(x)
        return (h @ h.t() * self.others).sum(), torch.full((), x.shape[0])


def test_a_model_for_one_number_of_samples_gets_them_by_granules(tmp_path: Path) -> None:
    words = [f"model._target_={__name__}.Contrast", f"data._target_={__name__}.Vectors", "global_batch=8", "steps=9"]
    built = build(load_config([*words, "parallel.granule=8", "parallel.micro_batch=8"]), tmp_path)
    assert built.artifact.batch_coupled and built.artifact.granule == 8
    message = r"Contrast runs on 8 and not on 2 samples in Contrast.forward, line \d+ .*, or parallel.granule=8, with"
    with pytest.raises(CaptureError, match=message):
        build(load_config(words), tmp_path)


def test_an_initial_state_that_was_let_go_is_still_there(tmp_path: Path) -> None:
    path = tmp_path / "state.safetensors"
    save_file({"weight": torch.arange(4.0)}, path)
    initial = InitialState(path)
    before = initial.tensor("weight")
    initial.let_go()
    path.unlink()
    assert torch.equal(initial.tensor("weight"), before)


class Spread(nn.Linear):
    """Values that are checked: a variance by a loss of torch or a distribution, a mean by an assertion."""

    def __init__(self, by: str) -> None:
        super().__init__(2, 2)
        self.by = by

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        mean, spread = super().forward(x).unbind(1)
        if self.by == "assertion":
            torch._assert_async((mean < 1e6).all())
            loss = (mean - x[:, 0]).square().sum()
        elif self.by == "loss":
            loss = nn.functional.gaussian_nll_loss(mean, x[:, 0], spread.square() + 1, reduction="sum")
        else:
            loss = -torch.distributions.Normal(mean, spread.square() + 1).log_prob(x[:, 0]).sum()
        return loss, torch.full((), x.shape[0])


@pytest.mark.parametrize(
    ("by", "name"),
    [
        ("loss", "nn.functional.gaussian_nll_loss"),
        ("law", "torch.distributions"),
        ("assertion", "torch._assert_async"),
    ],
)
def test_that_values_are_not_checked_while_training_is_said(tmp_path: Path, by: str, name: str) -> None:
    torch.distributions.Distribution.set_default_validate_args(True)  # torch's compiler turns that off in its process
    words = [f"model._target_={__name__}.Spread", f"+model.by={by}", f"data._target_={__name__}.Vectors"]
    built = build(load_config([*words, "global_batch=4"]), tmp_path)
    assert f"model: values are checked by {name} at the start, and not while it trains" in built.artifact.notes


class Layers(nn.Module):
    """Forward changes a layer in its first call, and never again."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.first = nn.Linear(2, 2)
        self.gate: nn.Module | None = nn.Tanh()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.first(x) if self.gate is None else self.gate(self.first(x))
        if self.how == "makes head" and not hasattr(self, "head"):
            self.head = nn.Linear(2, 2)
        if self.how == "removes gate":
            self.gate = None
        if self.how == "replaces gate" and isinstance(self.gate, nn.Tanh):
            self.gate = nn.Identity()
        if self.how == "replaces first.weight":
            self.first.weight = nn.Parameter(self.first.weight.detach())
        return h.square().sum(), torch.full((), x.shape[0])


@pytest.mark.parametrize("how", ["makes head", "removes gate", "replaces gate", "replaces first.weight"])
def test_layers_that_forward_changes_are_named(tmp_path: Path, how: str) -> None:
    words = [f"model._target_={__name__}.Layers", f"+model.how='{how}'", f"data._target_={__name__}.Vectors"]
    with pytest.raises(CaptureError, match=f"forward {how} of Layers: .*a way out is to do that in the constructor"):
        build(load_config([*words, "global_batch=4", "steps=9"]), tmp_path)
