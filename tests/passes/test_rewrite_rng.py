"""rewrite_rng: every draw becomes a keyed one, of the same distribution, and what cannot be keyed is refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from elaswave_fx.errors import CaptureError
from elaswave_fx.passes.normalize import Normalize
from elaswave_fx.passes.rewrite_rng import RewriteRng
from elaswave_fx.program.coupling_trial import coupled_by_trial
from elaswave_fx.program.invariants import verify
from elaswave_fx.program.ir import argument, calls, is_aten, output_node
from elaswave_fx.program.keyed_draws import DROPOUT, draw_index, draws
from elaswave_fx.program.text import graph_text
from tests import philox_numpy
from tests.passes.compiled import Program, captured, front, keys_for, run_graph, state_of
from tests.passes.models import TOKENS, WIDTH, Classifier, Fused, SequenceFirst, tokens, vectors


class Noisy(Classifier):
    """`noise(features)` is added to the features of one layer."""

    def __init__(self, noise: Callable[[Tensor], Tensor], dropout: float = 0.0) -> None:
        super().__init__(layers=1, dropout=dropout)
        self.noise = noise

    def features(self, x: Tensor) -> Tensor:
        x = self.layers[0](x)
        return (x + self.noise(x)).mean(dim=1)


def rewritten(model: nn.Module) -> Program:
    return RewriteRng().apply(Normalize().apply(captured(model, vectors, 1)))


def more_draws(x: Tensor) -> Tensor:
    """Draws into memory that holds nothing yet, and draws of places."""
    places = torch.multinomial(x.flatten(1).softmax(-1), WIDTH, True)[:, None]
    return F.feature_alpha_dropout(F.alpha_dropout(x, 0.2), 0.2) + torch.empty_like(x).geometric_(0.3) * places


def all_draws(x: Tensor) -> Tensor:
    mask = torch.bernoulli(torch.full_like(x, 0.25))
    return mask * torch.rand_like(x) + torch.randn(WIDTH) * torch.randint(0, 3, (x.shape[0], 1, 1))


def test_golden(golden: Callable[[str, str], None]) -> None:
    program = rewritten(Noisy(all_draws, dropout=0.5))
    verify(program, "rewrite_rng")
    golden("passes/rewrite_rng.txt", graph_text(program.graph))


def test_draws_are_numbered_and_placed() -> None:
    found = draws(rewritten(Noisy(all_draws, dropout=0.5)).graph.graph)
    assert [draw_index(node) for node in found] == list(range(5))
    assert [argument(node, "axis") for node in found] == [0, 0, 0, -1, 0]


DISTRIBUTIONS: dict[str, tuple[Callable[[Tensor], Tensor], float, float]] = {
    "bernoulli": (lambda x: torch.bernoulli(torch.full_like(x, 0.25)), 0.25, (0.25 * 0.75) ** 0.5),
    "bernoulli_": (lambda x: torch.empty_like(x).bernoulli_(0.75), 0.75, (0.25 * 0.75) ** 0.5),
    "rand": (lambda x: torch.rand(x.shape[0], TOKENS, WIDTH), 0.5, 12**-0.5),
    "randn": (torch.randn_like, 0.0, 1.0),
    "randint_like": (lambda x: torch.randint_like(x, 2, 5), 3.0, (2 / 3) ** 0.5),
    "randint": (lambda x: torch.randint(5, (x.shape[0], TOKENS, WIDTH)).to(x.dtype), 2.0, 2**0.5),
    "uniform_": (lambda x: torch.empty_like(x).uniform_(-1, 3), 1.0, 4 * 12**-0.5),
    "normal_": (lambda x: torch.empty_like(x).normal_(2.0, 0.5), 2.0, 0.5),
    "exponential_": (lambda x: torch.empty_like(x).exponential_(2.0), 0.5, 0.5),
    "bernoulli_ of tensor": (lambda x: torch.empty_like(x).bernoulli_(torch.full((WIDTH,), 0.5)), 0.5, 0.5),
    "normal of tensors": (lambda x: torch.normal(0 * x + 1, 0 * x + 2), 1.0, 2.0),
    "normal of a size": (lambda x: torch.normal(1.0, 2.0, (x.shape[0], TOKENS, WIDTH)), 1.0, 2.0),
    "log_normal_": (lambda x: torch.empty_like(x).log_normal_(0.0, 0.5), 1.1331, 0.6039),
    "geometric_": (lambda x: torch.empty_like(x).geometric_(0.5), 2.0, 2**0.5),
    "cauchy_": (lambda x: torch.empty_like(x).cauchy_().atan(), 0.0, torch.pi / 12**0.5),
    "random_": (lambda x: torch.empty_like(x).random_(5), 2.0, 2**0.5),
    "rrelu": (lambda x: F.rrelu(0 * x - 1, training=True), -11 / 48, 5 / 24 / 12**0.5),
    "multinomial": (lambda x: chosen(x, torch.tensor([0.5, 0.25, 0.25]), True), 0.75, 0.6875**0.5),
    "multinomial, once each": (lambda x: chosen(x, torch.ones(WIDTH), False), 3.5, 5.25**0.5),
}


def chosen(x: Tensor, weights: Tensor, replacement: bool) -> Tensor:
    """Indices drawn by weights, in the shape of x."""
    drawn = torch.multinomial(weights.expand(x.shape[0] * TOKENS, -1), WIDTH, replacement)
    return drawn.view(-1, TOKENS, WIDTH).to(x.dtype)


def test_distributions() -> None:
    """Mean and deviation of every kind of draw, read off the call that collects them."""
    model = Noisy(lambda x: torch.stack([draw(x) for draw, _, _ in DISTRIBUTIONS.values()]).sum(dim=0))
    program = rewritten(model)
    assert len(draws(program.graph.graph)) == len(DISTRIBUTIONS)
    stack = next(node for node in calls(program.graph.graph) if is_aten(node, "aten.stack"))
    output_node(program.graph.graph).args = ((stack,),)
    program.graph.recompile()
    samples = 200
    (drawn,) = run_graph(program, model, vectors(samples, 1))
    count = samples * TOKENS * WIDTH
    for (name, (_, mean, spread)), values in zip(DISTRIBUTIONS.items(), drawn, strict=True):
        assert abs(float(values.mean()) - mean) < 5 * spread / count**0.5, name
        assert abs(float(values.std()) - spread) < 0.05 * spread, name


def test_an_exponential_draw_is_never_zero() -> None:
    """Where the uniform one is: softmax of Gumbel noise, -log of it, would be NaN."""
    keys = torch.tensor([421346])
    assert philox_numpy.uniform(keys.numpy().view("uint64"), (1, TOKENS, WIDTH), 0, 0)[0, 2, 5] == 0.0
    model = Noisy(lambda x: torch.empty_like(x).exponential_(4.0))
    program = rewritten(model)
    (drawn,) = (
        node for node in calls(program.graph.graph) if is_aten(node, "aten.mul.Scalar") and node.args[1] == -0.25
    )
    output_node(program.graph.graph).args = ((drawn,),)
    program.graph.recompile()
    (values,) = run_graph(program, model, vectors(1, 1), keys)
    assert values[0, 2, 5] == 2.0**-26 and (values > 0.0).all()


@pytest.mark.parametrize("drawn", [all_draws, more_draws])
def test_a_sample_draws_the_same_in_any_batch(drawn: Callable[[Tensor], Tensor]) -> None:
    model = Noisy(drawn, dropout=0.5)
    program = rewritten(model)
    assert not coupled_by_trial(program, state_of(model), vectors(4, 3)).reasons
    batch, step_keys = vectors(4, 3), keys_for(1)
    together = run_graph(program, model, batch, step_keys=step_keys)[0]
    apart = []
    for index in range(4):
        one = {name: tensor[index : index + 1] for name, tensor in batch.items()}
        keys = keys_for(4)[index : index + 1]
        apart.append(run_graph(program, model, one, keys, step_keys)[0])
    torch.testing.assert_close(torch.stack(apart).sum(), together, rtol=1e-5, atol=1e-5)


def test_masks_are_those_of_the_reference() -> None:
    class Ones(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            ones = self.scale * torch.ones_like(x)
            return (F.dropout(ones, 0.3).sum(dim=(1, 2)) * 2.0**y).sum(), y.sum()

    model = Ones()
    batch = vectors(3, 1)
    keys = keys_for(3)
    factor = philox_numpy.dropout_factor(keys.numpy().view("uint64"), tuple(batch["x"].shape), 0.3, 0, 0)
    expected = (torch.from_numpy(factor).sum(dim=(1, 2)) * 2.0 ** batch["y"]).sum()
    torch.testing.assert_close(run_graph(rewritten(model), model, batch)[0], expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("model", [Fused(dropout=0.5), SequenceFirst(dropout=0.5)], ids=["fused", "sequence first"])
def test_fused_axes_are_keyed_by_sample(model: nn.Module) -> None:
    """Also where samples are the inner index: the draws of a sample do not depend on who stands beside it."""
    make = vectors if isinstance(model, Fused) else tokens
    program = front(model, make)
    assert draws(program.graph.graph)
    batch = make(3, 4)
    keys = keys_for(3)
    together = run_graph(program, model, batch)[0]
    parts = [
        run_graph(program, model, {n: t[lo:hi] for n, t in batch.items()}, keys[lo:hi], keys[:1])[0]
        for lo, hi in ((0, 1), (1, 3))
    ]
    torch.testing.assert_close(parts[0] + parts[1], together, rtol=1e-5, atol=1e-5)


def test_a_draw_over_samples_as_inner_index() -> None:
    """[TOKENS * samples, WIDTH]: drawn as [TOKENS, samples, WIDTH]."""

    class Inner(Classifier):
        def features(self, x: Tensor) -> Tensor:
            flat = self.layers[0](x).transpose(0, 1).reshape(-1, WIDTH)
            flat = F.dropout(F.dropout(flat, 0.5), 0.5) * (1 + torch.rand_like(flat))
            return flat.view(TOKENS, -1, WIDTH).mean(dim=0)

    model = Inner(layers=1)
    program = rewritten(model)
    assert [(argument(n, "axis"), argument(n, "period")) for n in draws(program.graph.graph)] == [(1, 1)] * 3
    batch, keys = vectors(3, 4), keys_for(3)
    together = run_graph(program, model, batch)[0]
    first, rest = (
        run_graph(program, model, {n: t[lo:hi] for n, t in batch.items()}, keys[lo:hi])[0]
        for lo, hi in ((0, 1), (1, 3))
    )
    torch.testing.assert_close(first + rest, together, rtol=1e-5, atol=1e-5)


def test_dropout_in_evaluation_mode_and_of_zero_is_no_draw() -> None:
    class Quiet(Classifier):
        def features(self, x: Tensor) -> Tensor:
            return F.dropout(F.dropout(super().features(x), 0.5, training=False), 0.0)

    assert not draws(rewritten(Quiet(layers=1)).graph.graph)


@pytest.mark.parametrize(
    ("draw", "name"),
    [
        (lambda x: torch.poisson(x.abs()), "aten.poisson.default"),
        (lambda x: torch.ops.aten._standard_gamma(x.abs() + 1), "aten._standard_gamma.default"),
        (lambda x: torch.empty_like(x).random_(), "aten.random.default"),
    ],
    ids=["poisson", "gamma", "random_"],
)
def test_draws_that_cannot_be_keyed_are_refused(draw: Callable[[Tensor], Tensor], name: str) -> None:
    with pytest.raises(CaptureError, match=f"model: {name} in .* draws random numbers that cannot be keyed"):
        rewritten(Noisy(draw))


def test_integers_beyond_what_a_draw_tells_apart_are_refused() -> None:
    with pytest.raises(CaptureError, match="draws from 33554432 integers; a keyed draw tells 16777216 apart"):
        rewritten(Noisy(lambda x: torch.randint_like(x, 2**25)))


def test_complex_draws_are_refused_with_what_to_write() -> None:
    with pytest.raises(
        CaptureError, match=r"aten.randn.default in .* draws complex numbers; a way out is to draw real"
    ):
        rewritten(Noisy(lambda x: x + torch.randn(x.shape[0], *x.shape[1:], dtype=torch.cfloat).real))


def test_a_permutation_has_every_place_once() -> None:
    model = Noisy(lambda x: torch.randperm(50).to(x.dtype).sort().values[:TOKENS, None] * torch.randperm(7)[1:, None])
    program = rewritten(model)
    orders = [node for node in calls(program.graph.graph) if is_aten(node, "aten.argsort")]
    output_node(program.graph.graph).args = (tuple(orders),)
    program.graph.recompile()
    for order, size in zip(run_graph(program, model, vectors(2, 1)), (50, 7), strict=True):
        assert order.sort().values.tolist() == list(range(size)) != order.tolist()


def test_mixup_takes_other_samples_of_its_granule() -> None:
    model = Noisy(lambda x: x[torch.randperm(x.shape[0])])
    (reason,) = coupled_by_trial(rewritten(model), state_of(model), vectors(4, 3)).reasons
    assert reason == "aten.argsort.stable in the model, whose order is not undone"


def test_a_mask_that_is_used_is_refused() -> None:
    def masked(x: Tensor) -> Tensor:
        kept, mask = torch.native_dropout(x, 0.5, True)
        return kept + mask

    with pytest.raises(CaptureError, match="model: the mask of aten.native_dropout.default in .* is used"):
        rewritten(Noisy(masked))


def test_a_draw_that_mixes_samples_is_refused() -> None:
    with pytest.raises(CaptureError, match=r"draws a tensor of shape \(.*\) that mixes samples; it cannot be keyed"):
        rewritten(Noisy(lambda x: torch.rand(x.shape[0], x.shape[0]).sum() * x))


def test_a_program_of_one_batch_size_draws_with_the_first_key_of_its_granule() -> None:
    class Four(Classifier):
        def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            assert x.shape[0] == 4
            return super().forward(x, y)

    program = RewriteRng().apply(Normalize().apply(captured(Four(layers=1, dropout=0.5), vectors, 4)))
    (draw,) = draws(program.graph.graph)
    assert (str(draw.target), argument(draw, "axis")) == (f"{DROPOUT}.default", -1)
