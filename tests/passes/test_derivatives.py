"""differentiate, recompute, lower: chained units compute what eager autograd computes, under every policy."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from elaswave_fx.errors import CaptureError, PassError
from elaswave_fx.models.gpt import GPT
from elaswave_fx.models.losses import token_loss_sum
from elaswave_fx.passes.differentiate import differentiate_unit
from elaswave_fx.passes.lower import lower
from elaswave_fx.passes.recompute import Recompute
from elaswave_fx.program.artifact import Artifact
from elaswave_fx.program.text import graph_text
from tests.passes.compiled import (
    artifact_of,
    assert_bits,
    assert_same,
    calls_of,
    compile_model,
    eager,
    run_native,
    run_units,
)
from tests.passes.models import (
    TOKENS,
    WIDTH,
    Classifier,
    tokens,
    vectors,
)
from tests.passes.zoo import MODELS, compiled


def fresh_batch(name: str) -> dict[str, Tensor]:
    """Other samples, and another number of them where samples stand for themselves."""
    _, make, granule = MODELS[name]
    return make(granule if compiled(name).program.batch_coupled else 3, 11)


@pytest.mark.parametrize("name", MODELS)
def test_units_compute_what_autograd_computes(name: str) -> None:
    batch = fresh_batch(name)
    ours = run_units(compiled(name), batch)
    assert_same(ours, eager(compiled(name).model, batch))
    assert_bits(run_native(compiled(name), batch), ours)


@pytest.mark.parametrize("policy", ["light", "full"])
@pytest.mark.parametrize("name", MODELS)
def test_recomputing_changes_no_bit(name: str, policy: str) -> None:
    batch = fresh_batch(name)
    again = compiled(name).with_policy(policy)  # type: ignore[arg-type]
    assert_bits(run_units(again, batch), run_units(compiled(name), batch))


def test_recomputing_keeps_less() -> None:
    saved = {
        policy: sum(unit.saved_bytes for unit in artifact_of(compiled("gpt").with_policy(policy)).units)  # type: ignore[arg-type]
        for policy in ("none", "light", "full")
    }
    assert saved["full"] < saved["light"] < saved["none"]


def test_keyed_draws_are_made_again_and_not_kept() -> None:
    model = GPT(vocab_size=16, seq_len=TOKENS, layers=1, width=16, heads=2, dropout=0.5, attention_dropout=0.5)
    result = compile_model(model, tokens)
    batch = tokens(3, 7)
    outcomes = [run_units(result.with_policy(policy), batch) for policy in ("none", "light", "full")]
    for other in outcomes[1:]:
        assert_bits(other, outcomes[0])
    assert_bits(run_native(result, batch), outcomes[0])
    backward = [call for split in result.program.kinds.values() for call in calls_of(split.backward)]
    assert "elaswave.keyed_dropout" in backward


def test_bf16() -> None:
    torch.manual_seed(0)
    model = GPT(vocab_size=16, seq_len=TOKENS, layers=1, width=16, heads=2).to(torch.bfloat16)
    result = compile_model(model, tokens)
    batch = tokens(3, 7)
    ours = run_units(result, batch)
    assert_same(ours, eager(model, batch), tolerance=3e-2)
    assert_bits(run_native(result, batch), ours)
    assert {gradient.dtype for gradient in ours.gradients.values()} == {torch.bfloat16}


def test_frozen_parameters_have_neither_bucket_nor_gradient() -> None:
    artifact = artifact_of(compiled("frozen"))
    frozen = {name for name, p in compiled("frozen").model.named_parameters() if not p.requires_grad}
    assert len(frozen) > 1
    assert not frozen & {param.name for bucket in artifact.buckets for param in bucket.params}
    assert {b[1] for unit in artifact.units for b in unit.inputs if b[0] == "frozen"} == frozen
    assert not any(value.has_grad for value in artifact.values[:1]), "nothing to train before the frozen layer"


def test_a_tied_tensor_has_one_bucket_and_a_gradient_for_each_use() -> None:
    artifact = artifact_of(compiled("tied"))
    index, tied = next((i, b) for i, b in enumerate(artifact.buckets) if len(b.users) > 1)
    assert (tied.name, tied.users) == ("tied.embed.weight", (0, len(artifact.units) - 1))
    givers = [unit.index for unit in artifact.units for grad in unit.grads if grad[:2] == ("param", index)]
    assert tuple(givers) == tied.users
    (info,) = (param for param in artifact.params if param.name == "embed.weight")
    assert info.aliases == ("head.weight",)


def test_buckets_hold_each_trained_parameter_once_and_apart_by_group() -> None:
    artifact = artifact_of(compiled("gpt"))
    names = [param.name for bucket in artifact.buckets for param in bucket.params]
    assert sorted(names) == sorted(name for name, _ in compiled("gpt").model.named_parameters())
    for bucket in artifact.buckets:
        assert {int(len(param.shape) < 2) for param in bucket.params} == {bucket.group}
        ends = [param.offset + torch.Size(param.shape).numel() for param in bucket.params]
        assert [0, *ends] == [*(param.offset for param in bucket.params), bucket.numel]


def test_folds_are_given_by_one_unit() -> None:
    artifact = artifact_of(compiled("batch norm"))
    assert {fold.buffer for fold in artifact.folds} == dict(compiled("batch norm").model.named_buffers()).keys()
    for number, fold in enumerate(artifact.folds):
        given = [(unit.index, b[2]) for unit in artifact.units for b in unit.outputs if b[:2] == ("fold", number)]
        assert given == [(fold.unit, i) for i in range(len(fold.values))]


def test_an_artifact_survives_the_disk(tmp_path: Path) -> None:
    for name in ("gpt", "own buffer"):
        artifact = artifact_of(compiled(name))
        artifact.save(tmp_path / name, compiled(name).program.tensors)
        assert Artifact.load(tmp_path / name) == artifact
        loaded = Artifact.load_constants(tmp_path / name)
        assert loaded.keys() == compiled(name).program.tensors.keys()


def test_golden_of_the_joint_graph_and_its_halves(golden: Callable[[str, str], None]) -> None:
    layer = compiled("fused axes").differentiated.units[0]
    joint = compiled("fused axes").differentiated.kinds[layer.kind]
    parts = {"joint": joint.graph}
    for policy in ("none", "light", "full"):
        split = Recompute(policy).apply(compiled("fused axes").differentiated).kinds[layer.kind]
        parts |= {f"{policy}: forward": split.forward, f"{policy}: backward": split.backward}
    golden("passes/differentiate.txt", "\n".join(f"{name}\n{graph_text(graph)}" for name, graph in parts.items()))


def test_golden_of_a_unit_program(golden: Callable[[str, str], None]) -> None:
    artifact = artifact_of(compiled("fused axes"))
    head = artifact.units[-1]
    programs = {way: artifact.programs[f"{head.kind}.{way}"] for way in ("forward", "backward", "evaluate")}
    lines = [line for way in programs for line in _lines(programs[way])]
    bindings = [f"{name} {binding}" for name in ("inputs", "outputs", "grads") for binding in getattr(head, name)]
    golden("passes/lower.txt", "\n".join([*lines, *bindings]) + "\n")


def _lines(program: dict[str, object]) -> list[str]:
    head = f"{str(program['name']).split('.')[1]}: {program['num_inputs']} inputs, {program['num_slots']} slots"
    instructions: list[dict[str, object]] = program["instructions"]  # type: ignore[assignment]
    return [head, *map(json.dumps, instructions), f"returns {program['outputs']}"]


@pytest.mark.filterwarnings("ignore:Error detected in GeneratedBackward")
def test_an_operator_without_a_derivative_is_refused() -> None:
    @torch.library.custom_op("elaswave_tests::opaque", mutates_args=())
    def opaque(x: Tensor) -> Tensor:
        return x * 2

    opaque.register_fake(torch.empty_like)

    class Opaque(Classifier):
        def features(self, x: Tensor) -> Tensor:
            return opaque(super().features(x))

    message = "model: unit . cannot be differentiated at elaswave_tests.opaque.default in the model: .*a way out is to"
    with pytest.raises(CaptureError, match=message):
        compile_model(Opaque(layers=1), vectors)


class Usage(Classifier):
    """Counts how often every target came."""

    def __init__(self) -> None:
        super().__init__(layers=1)
        self.register_buffer("seen", torch.zeros(WIDTH, dtype=torch.int64))

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        self.seen += torch.bincount(y.flatten(), minlength=WIDTH)
        return super().forward(x, y)


class Weighted(Usage):
    """Looks counts up by whole numbers first."""

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        weights = self.seen.clone()[y].sum()
        loss, count = super().forward(x, y)
        return loss * (1 + weights), count


class Picked(Classifier):
    """A mask as an index gives as many values as the data has."""

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        counts = y > 0
        return token_loss_sum(self.head(self.features(x))[counts], y[counts])[0], counts.sum().float()


class Positives(Classifier):
    """A factor after its layers: how many positive numbers came before them."""

    def features(self, x: Tensor) -> Tensor:
        x = self.layers[0](x)
        count = torch.where(x.detach() > 0)[0].numel()
        return super().features(x) * count


class Curriculum(Classifier):
    """A factor from a table, by a counter."""

    def __init__(self) -> None:
        super().__init__(layers=1)
        self.register_buffer("step", torch.zeros((), dtype=torch.int64))
        self.register_buffer("table", torch.linspace(0, 1, 9))

    def features(self, x: Tensor) -> Tensor:
        factor = self.table[self.step.clamp(max=8)]
        self.step += 1
        return super().features(x) * factor


class Pooled(Classifier):
    """What goes backward makes a plain number of the number of samples."""

    def features(self, x: Tensor) -> Tensor:
        wide = self.layers[0](x)[:, None].repeat(1, 1, 2, 2)
        return super().features(F.fractional_max_pool2d(wide, 2, output_size=(TOKENS, WIDTH))[:, 0])


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (
            Pooled(layers=1),
            r"derivative \(.*aten.fractional_max_pool2d_backward.default\) makes a plain number of the number",
        ),
        (Usage(), r"aten.bincount.default in the model makes .* a way out is one_hot\(index, number\).sum\(0\)"),
        (Weighted(), r"aten.bincount.default in the model makes .* a way out is one_hot\(index, number\).sum\(0\)"),
        (
            Picked(layers=1),
            r"aten.index.Tensor in the model makes .* is to multiply by the mask, torch.where, or",
        ),
        (
            Curriculum(),
            r"aten.item.default in the model makes a number .* a way out is to keep it a tensor: table.index",
        ),
        (Positives(), r"aten.where.default in the model makes a number .* to another unit; a way out is to multiply"),
    ],
    ids=["samples", "size", "size after an index", "mask", "number", "number for another unit"],
)
def test_numbers_and_sizes_of_values_are_refused_with_what_to_write(model: Classifier, message: str) -> None:
    with pytest.raises(CaptureError, match=message):
        compile_model(model, vectors)


def test_a_gradient_that_autograd_leaves_undefined_is_zero() -> None:
    @torch.library.custom_op("elaswave_tests::half_known", mutates_args=())
    def half_known(x: Tensor, y: Tensor) -> Tensor:
        return x + y.sign()

    half_known.register_fake(lambda x, y: torch.empty_like(x))
    half_known.register_autograd(lambda ctx, gradient: (gradient, None))

    class HalfKnown(Classifier):
        def features(self, x: Tensor) -> Tensor:
            first = self.layers[0](x)
            return half_known(self.layers[1](x), first).mean(dim=1)

    model = HalfKnown()
    result = compile_model(model, vectors)
    batch = vectors(3, 5)
    ours, theirs = run_units(result, batch), eager(model, batch)
    silent = {name: gradient for name, gradient in ours.gradients.items() if name not in theirs.gradients}
    assert silent and all(not gradient.any() for gradient in silent.values())


def test_recompute_needs_a_derivative() -> None:
    unfinished = compiled("gpt").program
    with pytest.raises(PassError, match="recompute: the program is not differentiated; run `differentiate` first"):
        Recompute("none").apply(unfinished)


def test_a_unit_that_trains_nothing_has_no_backward_program() -> None:
    first = compiled("frozen").program.units[0]
    assert not any(first.grad_results)
    assert compiled("frozen").program.kinds[first.kind].backward is None
    assert differentiate_unit(first).num_results == len(first.results)
    artifact = lower(compiled("frozen").program, lambda name, spec: 0, True)
    assert f"{first.kind}.backward" not in artifact.programs


def test_the_loss_of_a_mean_over_tokens_of_each_sample() -> None:
    """A loss that is a sum over samples of something nonlinear, and a count that is no integer."""

    class Weighted(Classifier):
        def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            loss, count = token_loss_sum(self.head(self.features(x)), y)
            return loss + self.features(x).square().mean(dim=1).sqrt().sum(), count * 0.5

    result = compile_model(Weighted(layers=1), vectors)
    assert not result.program.batch_coupled
    batch = vectors(3, 5)
    assert_same(run_units(result, batch), eager(result.model, batch))
