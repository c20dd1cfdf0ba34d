"""replicate_invariants, recognize_causal, expand_attention: what becomes of masks and tables."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from elaswave_fx.models.losses import token_loss_sum
from elaswave_fx.passes.expand_attention import ExpandAttention
from elaswave_fx.passes.normalize import Normalize
from elaswave_fx.passes.recognize_causal import RecognizeCausal
from elaswave_fx.passes.replicate_invariants import ReplicateInvariants
from elaswave_fx.program.dependence import Nature, natures
from elaswave_fx.program.invariants import verify
from elaswave_fx.program.ir import argument, calls, is_aten
from elaswave_fx.program.text import graph_text
from tests.passes.compiled import Program, calls_of, captured, run_graph
from tests.passes.models import CLASSES, TOKENS, WIDTH, Classifier, vectors

Mask = Callable[[int], Tensor | None]
Masks = Mask | tuple[Mask, ...]


class Attending(nn.Module):
    """Attentions; `mask` makes the boolean mask of each of them from the batch size."""

    def __init__(self, mask: Masks, dropout: float = 0.0, causal: bool = False, layers: int = 2) -> None:
        super().__init__()
        self.masks = mask if isinstance(mask, tuple) else layers * (mask,)
        self.dropout = dropout
        self.causal = causal
        self.queries = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(layers))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        for layer, mask in zip(self.queries, self.masks, strict=True):
            q = layer(x)[:, None]
            mixed = F.scaled_dot_product_attention(
                q, x[:, None], x[:, None], mask(x.shape[0]), self.dropout, self.causal
            )
            x = x + mixed[:, 0]
        return token_loss_sum(self.head(x.mean(dim=1)), y)


def over_batch(mask: Tensor, batch: int) -> Tensor:
    """[batch, 1, TOKENS, TOKENS], as some libraries write it."""
    return mask.expand(batch, 1, TOKENS, TOKENS) & (torch.arange(batch) >= 0).view(-1, 1, 1, 1)


def causal(batch: int) -> Tensor:
    rows = torch.arange(TOKENS)
    return (rows[None, :] <= rows[:, None]).expand(batch, 1, TOKENS, TOKENS) & (torch.arange(batch) >= 0).view(
        -1, 1, 1, 1
    )


def banded(batch: int) -> Tensor:
    rows = torch.arange(TOKENS)
    return over_batch((rows[None, :] - rows[:, None]).abs() < 2, batch)


def prepared(mask: Masks, **options: object) -> tuple[Attending, Program]:
    model = Attending(mask, **options)  # type: ignore[arg-type]
    return model, Normalize().apply(captured(model, vectors, 1))


def attentions(program: Program) -> list[torch.fx.Node]:
    return [node for node in calls(program.graph.graph) if is_aten(node, "aten.scaled_dot_product_attention")]


def test_golden_replicate_invariants(golden: Callable[[str, str], None]) -> None:
    program = ReplicateInvariants().apply(prepared(banded)[1])
    verify(program, "replicate_invariants")
    golden("passes/replicate_invariants.txt", graph_text(program.graph))


def test_a_mask_is_built_once_and_from_constants_alone() -> None:
    model, before = prepared(banded)
    after = ReplicateInvariants().apply(before)
    masks = {argument(node, "attn_mask") for node in attentions(after)}
    assert len(masks) == 2, "each attention expands the mask for itself"
    kinds = natures(after)
    assert len({mask.args[0] for mask in masks}) == 1
    assert {kinds[mask.args[0]] for mask in masks} == {Nature.FIXED}
    batch = vectors(3, 5)
    assert all(
        torch.equal(a, b) for a, b in zip(run_graph(before, model, batch), run_graph(after, model, batch), strict=True)
    )


def test_a_table_that_differs_between_samples_is_left_alone() -> None:
    class Numbered(Classifier):
        def features(self, x: Tensor) -> Tensor:
            return super().features(x) + torch.arange(x.shape[0]).view(-1, 1)

    before = Normalize().apply(captured(Numbered(), vectors))
    after = ReplicateInvariants().apply(before)
    assert calls_of(after.graph) == calls_of(before.graph)


def test_a_random_table_is_no_invariant() -> None:
    class Noisy(Classifier):
        def features(self, x: Tensor) -> Tensor:
            features = super().features(x)
            return features + torch.rand(WIDTH) + torch.rand(WIDTH)

    after = ReplicateInvariants().apply(Normalize().apply(captured(Noisy(), vectors)))
    assert calls_of(after.graph).count("aten.rand") == 2


def test_golden_recognize_causal(golden: Callable[[str, str], None]) -> None:
    program = RecognizeCausal().apply(ReplicateInvariants().apply(prepared(causal)[1]))
    verify(program, "recognize_causal")
    golden("passes/recognize_causal.txt", graph_text(program.graph))


MASKS: dict[str, tuple[Callable[[int], Tensor | None], tuple[bool, bool]]] = {
    "causal": (causal, (False, True)),
    "banded": (banded, (True, False)),
    "one": (lambda batch: torch.ones(1, 1, dtype=torch.bool), (False, False)),
    "all": (lambda batch: torch.ones(TOKENS, TOKENS, dtype=torch.bool), (False, False)),
    "almost causal": (lambda batch: torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril(1), (True, False)),
    "drawn": (lambda batch: torch.rand(TOKENS, TOKENS) < 2.0, (True, False)),
}


def test_which_masks_become_flags() -> None:
    """(is there a mask left, is_causal) of one attention after the other."""
    model, program = prepared(tuple(make for make, _ in MASKS.values()), layers=len(MASKS))
    program = ReplicateInvariants().apply(program)
    after = RecognizeCausal().apply(program)
    found = [(argument(n, "attn_mask") is not None, argument(n, "is_causal", False)) for n in attentions(after)]
    assert dict(zip(MASKS, found, strict=True)) == {name: flags for name, (_, flags) in MASKS.items()}
    batch = vectors(3, 5)
    for old, new in zip(run_graph(program, model, batch), run_graph(after, model, batch), strict=True):
        torch.testing.assert_close(new, old, rtol=1e-5, atol=1e-5)


def test_golden_expand_attention(golden: Callable[[str, str], None]) -> None:
    program = ExpandAttention().apply(prepared(lambda batch: None, dropout=0.5, causal=True)[1])
    verify(program, "expand_attention")
    golden("passes/expand_attention.txt", graph_text(program.graph))


@pytest.mark.parametrize(("mask", "groups"), [("none", 1), ("causal", 2), ("bool", 2), ("float", 1)])
def test_expanded_attention_is_attention(mask: str, groups: int) -> None:
    """With a probability of almost zero, so that the expansion can be compared with the operator."""
    given = {"bool": causal(1)[0], "float": torch.randn(TOKENS, TOKENS)}.get(mask)

    class Grouped(Classifier):
        def features(self, x: Tensor) -> Tensor:
            x = self.layers[0](x)
            q, k = x.view(-1, TOKENS, 4, 2).transpose(1, 2), x.view(-1, TOKENS, 4, 2).transpose(1, 2)[:, : 4 // groups]
            mixed = F.scaled_dot_product_attention(
                q, k, k, given, 1e-12, mask == "causal", scale=0.3, enable_gqa=groups > 1
            )
            return mixed.transpose(1, 2).reshape(-1, TOKENS, WIDTH).mean(dim=1)

    model = Grouped()
    before = Normalize().apply(captured(model, vectors, 1))
    after = ExpandAttention().apply(before)
    assert "aten._safe_softmax" in calls_of(after.graph)
    batch = vectors(3, 5)
    for old, new in zip(run_graph(before, model, batch), run_graph(after, model, batch), strict=True):
        torch.testing.assert_close(new, old, rtol=1e-5, atol=1e-5)
