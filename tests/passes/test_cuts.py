"""estimate_cost, find_cuts, cut_units: where a program is divided, and what its pieces are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from elaswave_fx.config.compose import load_config
from elaswave_fx.errors import PassError
from elaswave_fx.models.gpt import GPT
from elaswave_fx.models.losses import token_loss_sum
from elaswave_fx.models.two_tower import TwoTower
from elaswave_fx.passes.cut_units import CutUnits, draws_of
from elaswave_fx.passes.estimate_cost import EstimateCost, elements, value_bytes
from elaswave_fx.passes.find_cuts import FindCuts
from elaswave_fx.passes.pipeline import run_passes
from elaswave_fx.program.invariants import verify
from elaswave_fx.program.ir import Program, ResultKind, Role, calls, flops_of, is_aten, unit_of, value_of
from elaswave_fx.program.text import program_text
from tests.passes.compiled import MakeBatch, front
from tests.passes.models import (
    TOKENS,
    WIDTH,
    Classifier,
    InBatch,
    OtherNames,
    tokens,
    vectors,
)
from tests.passes.zoo import compiled


def cut(model: nn.Module, make: MakeBatch, granule: int = 1, coupled: tuple[str, ...] = ()) -> Program:
    program = replace(front(model, make, granule), batch_coupled=coupled)
    return run_passes(program, (EstimateCost(), FindCuts(), CutUnits()))[0]


def gpt(layers: int = 2, dropout: float = 0.0) -> GPT:
    return GPT(vocab_size=16, seq_len=TOKENS, layers=layers, width=16, heads=2, dropout=dropout)


@pytest.fixture(scope="module")
def cut_gpt() -> Program:
    return cut(gpt(layers=3, dropout=0.1), tokens)


def test_operations_per_sample() -> None:
    @torch.library.custom_op("elaswave_tests::product", mutates_args=())
    def product(x: Tensor, weight: Tensor) -> Tensor:
        return x @ weight.t()

    product.register_fake(lambda x, weight: x.new_empty(*x.shape[:-1], weight.shape[0]))

    class Products(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, 16)
            self.conv = nn.Conv1d(TOKENS, 3, 5, padding=2)

        def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            h = self.linear(x)
            scores = torch.matmul(h, h.transpose(1, 2))
            own = product(x, self.linear.weight).sum()
            mixed = nn.functional.scaled_dot_product_attention(h, h, h).sum()
            return self.conv(scores @ x).sum() + mixed + own, y.sum()

    program = EstimateCost().apply(front(Products(), vectors))
    found: dict[str, float] = {}
    for node in calls(program.graph.graph):
        found.setdefault(str(node.target), flops_of(node))
    assert found["aten.linear.default"] == 2 * TOKENS * WIDTH * 16
    assert found["aten.matmul.default"] == 2 * TOKENS * TOKENS * 16
    assert found["aten.conv1d.default"] == 2 * (3 * WIDTH) * (TOKENS * 5)
    assert found["aten.scaled_dot_product_attention.default"] == 2 * 2 * TOKENS * TOKENS * 16
    assert found["aten.transpose.int"] == 0
    assert found["elaswave_tests.product.default"] == 2 * TOKENS * WIDTH * 16, "counted as the product it is"


def test_a_fixed_batch_is_counted_by_sample() -> None:
    class Four(Classifier):
        def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            assert x.shape[0] == 4
            return super().forward(x, y)

    fixed, free = (EstimateCost().apply(front(model, vectors, 4)) for model in (Four(layers=1), Classifier(layers=1)))
    linear = [
        next(flops_of(n) for n in calls(program.graph.graph) if is_aten(n, "aten.linear")) for program in (fixed, free)
    ]
    assert linear[0] == linear[1] > 0


def test_sizes_of_values() -> None:
    value = torch.zeros(2, 3, dtype=torch.bfloat16)
    assert elements(value) == 6 and value_bytes([value, value]) == 24


def test_golden_of_a_gpt(golden: Callable[[str, str], None], cut_gpt: Program) -> None:
    verify(cut_gpt, "cut_units")
    golden("passes/cut_units.txt", program_text(cut_gpt))


def test_two_units_a_block_and_the_ends(cut_gpt: Program) -> None:
    assert len(cut_gpt.units) == 2 * 3 + 2
    kinds = [unit.kind for unit in cut_gpt.units]
    assert kinds[1] == kinds[3] == kinds[5] and kinds[2] == kinds[4], "equal halves of blocks are of one kind"
    assert all(value.shape == (1, TOKENS, 16) and value.has_grad for value in cut_gpt.values)


def test_inputs_enter_where_they_are_read(cut_gpt: Program) -> None:
    readers = {
        source.name: unit.index for unit in cut_gpt.units for source in unit.sources if source.role == Role.INPUT
    }
    assert readers == {"input_ids": 0, "labels": len(cut_gpt.units) - 1}


def test_draws_are_numbered_within_their_unit(cut_gpt: Program) -> None:
    assert draws_of(cut_gpt.units) == [(unit, 0) for unit in range(7)]


def test_cuts_do_not_depend_on_names() -> None:
    ours, theirs = cut(Classifier(), vectors), cut(OtherNames(), vectors)
    assert len(ours.units) > 2
    assert [unit.kind for unit in ours.units] == [unit.kind for unit in theirs.units]


def test_a_tied_tensor_is_read_by_both_ends() -> None:
    program = compiled("tied").program
    readers = [u.index for u in program.units for s in u.sources if (s.role, s.name) == (Role.PARAM, "embed.weight")]
    assert readers == [0, len(program.units) - 1]


def test_a_value_that_lives_long() -> None:
    program = compiled("several inputs").program
    long = [value for value in program.values if len(value.consumers) > 1]
    assert long, "the encoder's output is read by two layers of the decoder"
    assert all(value.producer < min(value.consumers) for value in program.values)


def test_branches_are_cut_one_after_the_other() -> None:
    def halves(samples: int, seed: int) -> dict[str, Tensor]:
        x = vectors(samples, seed)
        return {"left": x["x"][:, 0].clone(), "right": x["x"][:, 1].clone(), "label": x["y"]}

    program = cut(TwoTower(WIDTH, WIDTH, 5, WIDTH, left_layers=1, right_layers=2), halves)
    readers = {s.name: u.index for u in program.units for s in u.sources if s.role == Role.INPUT}
    assert 0 == readers["left"] < readers["right"] < readers["label"], "inputs enter where they are read"
    skipping = [value for value in program.values if max(value.consumers) > value.producer + 1]
    assert len(skipping) == 1, "the first branch's result waits for the second, and nothing else"


def test_nothing_is_cut_where_samples_are_the_inner_index() -> None:
    class Inner(Classifier):
        def features(self, x: Tensor) -> Tensor:
            flat = x.transpose(0, 1).reshape(-1, WIDTH)
            for layer in self.layers:
                flat = layer(flat)
            return flat.view(TOKENS, -1, WIDTH).mean(dim=0)

    program = cut(Inner(), vectors)
    assert [value.shape for value in program.values] == [(1, WIDTH)]


def test_values_of_a_whole_granule() -> None:
    class Similarities(InBatch):
        def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            features = self.features(x)
            mixed = torch.tanh((features @ features.t()).softmax(dim=-1)) @ features
            return token_loss_sum(self.head(mixed), y)

    program = front(Similarities(layers=1), vectors, 4)
    program = EstimateCost().apply(replace(program, batch_coupled=("matmul",)))
    program = FindCuts().apply(program)
    softmax = next(node for node in calls(program.graph.graph) if is_aten(node, "aten.softmax"))
    for node in calls(program.graph.graph):  # a cut right behind the similarities
        if unit_of(node) is not None:
            node.meta["elaswave_unit"] = int(list(program.graph.graph.nodes).index(node) > position(program, softmax))
    program = CutUnits().apply(replace(program, num_units=2))
    verify(program, "cut_units")
    square = next(value for value in program.values if value.sample_axis is None)
    assert square.shape == (4, 4) and square.bytes_per_sample == 64


def position(program: Program, node: torch.fx.Node) -> int:
    return list(program.graph.graph.nodes).index(node)


def test_what_no_sample_enters_is_computed_once() -> None:
    class Table(Classifier):
        def features(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x) + torch.arange(TOKENS).float().sqrt()[:, None]
            return x.mean(dim=1)

    program = cut(Table(), vectors)
    assert program.invariants is not None
    assert len(program.invariants.meta["names"]) == 1
    readers = [u.index for u in program.units for s in u.sources if s.role == Role.CONSTANT]
    assert len(readers) == 2
    with pytest.raises(StopIteration):
        next(n for u in program.units for n in calls(u.graph.graph) if is_aten(n, "aten.sqrt"))


def test_border_values_are_contiguous() -> None:
    class Turned(Classifier):
        def features(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x).transpose(1, 2).transpose(1, 2) if layer is self.layers[0] else layer(x)
            return x.mean(dim=1)

    program = cut(Turned(), vectors)
    for unit in program.units:
        outputs = unit.graph.graph.output_node().args[0]
        for node, result in zip(outputs, unit.results, strict=True):  # type: ignore[arg-type]
            assert result.kind != ResultKind.VALUE or value_of(node).is_contiguous()


def test_a_program_that_trains_nothing_is_refused() -> None:
    class Constant(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.unused = nn.Parameter(torch.zeros(3))

        def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            return x.sum(), y.sum()

    with pytest.raises(PassError, match="find_cuts: no call depends on both samples and parameters"):
        cut(Constant(), vectors)


def test_four_stages_for_every_recipe() -> None:
    """The smallest of the recipes' models has four units; the others are larger in the same way."""
    from elaswave_fx.models.resnet import ResNet

    options = dict(load_config(["recipe=resnet_digits"]).model.options)

    def images(samples: int, seed: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        image = torch.randn(samples, 1, 8, 8, generator=generator)
        return {"image": image, "label": torch.randint(0, 10, (samples,), generator=generator)}

    program = cut(ResNet(**options), images, 4, coupled=("batch norm",))  # type: ignore[arg-type]
    assert len(program.units) >= 4
