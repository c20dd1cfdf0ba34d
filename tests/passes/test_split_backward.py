"""split_backward: halves of backward programs give the bits of the whole, and split the work."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
import torch

from elaswave_fx.errors import PassError
from elaswave_fx.models.gpt import GPT
from elaswave_fx.models.resnet import ResNet
from elaswave_fx.passes.estimate_cost import VIEWS
from elaswave_fx.passes.recompute import Derivative, Policy
from elaswave_fx.passes.split_backward import SplitBackward
from elaswave_fx.program.ir import Role
from elaswave_fx.program.text import graph_text
from tests.passes.compiled import (
    Compiled,
    Tensors,
    artifact_of,
    assert_bits,
    calls_of,
    compile_model,
    run_native,
    run_units,
)
from tests.passes.models import TOKENS, tokens
from tests.passes.zoo import MODELS, compiled

POLICIES: tuple[Policy, ...] = ("none", "light", "full")


def images(samples: int, seed: int) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    return {
        "image": torch.rand(samples, 1, 8, 8, generator=generator),
        "label": torch.randint(10, (samples,), generator=generator),
    }


def assert_halves_are_the_whole(result: Compiled, batch: Tensors) -> None:
    for policy in POLICIES:
        split = result.with_policy(policy)
        whole = run_units(split, batch)
        assert_bits(run_units(split, batch, halves=True), whole)
        assert_bits(run_native(split, batch, halves=True), whole)


@pytest.mark.parametrize("name", MODELS)
def test_halves_give_the_bits_of_the_whole(name: str) -> None:
    _, make, granule = MODELS[name]
    samples = granule if compiled(name).program.batch_coupled else 3
    assert_halves_are_the_whole(compiled(name), make(samples, 11))


def test_halves_of_a_model_with_dropout_and_of_convolutions() -> None:
    torch.manual_seed(0)
    gpt = GPT(vocab_size=16, seq_len=TOKENS, layers=1, width=16, heads=2, dropout=0.5, attention_dropout=0.5)
    assert_halves_are_the_whole(compile_model(gpt, tokens), tokens(3, 7))
    resnet = compile_model(ResNet(widths=(4, 8), blocks_per_group=1), images, granule=4)
    assert_halves_are_the_whole(resnet, images(4, 3))
    masks = {
        part: {tuple(node.args[10]) for kind in resnet.program.kinds.values() if getattr(kind.halves, part)
               for node in getattr(kind.halves, part).graph.nodes if "convolution_backward" in str(node.target)}
        for part in ("inputs", "weights")
    }  # fmt: skip
    assert masks == {"inputs": {(True, False, False)}, "weights": {(False, True, False)}}


@pytest.mark.parametrize("name", ["gpt", "tied", "several inputs", "fused axes"])
def test_no_call_runs_twice_but_views(name: str) -> None:
    for each in compiled(name).program.kinds.values():
        assert isinstance(each, Derivative) and each.backward is not None and each.halves is not None
        halves = Counter(calls_of(each.halves.inputs))
        halves += Counter(calls_of(each.halves.weights)) if each.halves.weights is not None else Counter()
        more = halves - Counter(calls_of(each.backward))
        assert all(call.startswith(VIEWS) for call in more), more


def test_the_first_half_gives_gradients_of_values_and_the_second_those_of_parameters() -> None:
    program = compiled("gpt").program
    for unit in program.units:
        halves = program.kinds[unit.kind].halves
        roles = {source.role for source, wanted in zip(unit.sources, unit.grad_inputs, strict=True) if wanted}
        assert (halves.weights is not None) == (Role.PARAM in roles)
        assert bool(calls_of(halves.inputs)) == (Role.VALUE in roles), "nobody waits for the first unit"


def test_what_halves_cost_is_in_the_artifact() -> None:
    artifact = artifact_of(compiled("gpt"))
    assert artifact.is_split
    assert artifact.units[0].weights_share == 1.0
    heaviest = max(unit.flops for unit in artifact.units)
    blocks = [unit for unit in artifact.units if unit.flops > heaviest / 4]
    assert len(blocks) > 1
    assert all(0.2 < unit.weights_share < 0.6 for unit in blocks), [unit.weights_share for unit in blocks]
    assert all(0 < unit.held_bytes < 2 * unit.saved_bytes for unit in blocks)
    lean = artifact_of(compiled("gpt").with_policy("full"))
    assert all(new.held_bytes <= 2 * old.held_bytes for new, old in zip(lean.units, artifact.units, strict=True))


def test_what_trains_nothing_stays_whole() -> None:
    first = compiled("frozen").program.units[0]
    assert compiled("frozen").program.kinds[first.kind].halves is None
    assert artifact_of(compiled("frozen")).is_split


def test_split_backward_needs_a_backward_program() -> None:
    message = "split_backward: there is no backward program to split; run `recompute` first"
    with pytest.raises(PassError, match=message):
        SplitBackward().apply(compiled("gpt").differentiated)


def test_golden_of_halves(golden: Callable[[str, str], None]) -> None:
    program = compiled("fused axes").program
    split = program.kinds[program.units[-1].kind]
    parts = {"whole": split.backward, "inputs": split.halves.inputs, "weights": split.halves.weights}
    golden("passes/split_backward.txt", "\n".join(f"{name}\n{graph_text(graph)}" for name, graph in parts.items()))
