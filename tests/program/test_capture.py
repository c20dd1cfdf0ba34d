"""capture: what is exported is what the model computes, or a refusal says why not."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from elaswave_fx.errors import CaptureError
from elaswave_fx.models.losses import token_loss_sum
from elaswave_fx.passes.normalize import Normalize
from elaswave_fx.program import eager_answers
from elaswave_fx.program.autocast import run_under_autocast
from elaswave_fx.program.capture import capture
from elaswave_fx.program.check_gradients import check_gradients
from elaswave_fx.program.ir import ResultKind, Role, Source, calls, module_of, placeholders, source_of
from tests.passes.compiled import captured, run_graph
from tests.passes.models import (
    CLASSES,
    TOKENS,
    WIDTH,
    Classifier,
    ExponentialMean,
    FixedBatch,
    Normed,
    Tied,
    tokens,
    vectors,
)


def sources(model: nn.Module) -> set[Source]:
    make = tokens if isinstance(model, Tied) else vectors
    return {source_of(node) for node in placeholders(captured(model, make).graph.graph)}


class Small(Classifier):
    def __init__(self) -> None:
        super().__init__(layers=1)


def test_a_program_knows_its_sources() -> None:
    class Sourced(Small):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("table", torch.ones(WIDTH))
            self.unused = nn.Parameter(torch.ones(3))
            self.constant = torch.full((WIDTH,), 2.0)

        def features(self, x: Tensor) -> Tensor:
            return super().features(x) * self.table + self.constant

    program = captured(Sourced(), vectors)
    assert program.dynamic_batch
    read = {source_of(node) for node in placeholders(program.graph.graph)}
    assert {s.name for s in read if s.role == Role.PARAM} == {n for n, _ in Small().named_parameters()}
    assert {s.name for s in read if s.role == Role.BUFFER} == {"table"}
    assert {s.name for s in read if s.role == Role.INPUT} == {"x", "y"}
    ((constant, tensor),) = program.tensors.items()
    assert Source(Role.CONSTANT, constant) in read and torch.equal(tensor, torch.full((WIDTH,), 2.0))
    assert not program.params["unused"].aliases and "unused" in program.params


def test_the_graph_computes_the_model_for_any_batch() -> None:
    model = Small()
    program = captured(model, vectors)
    for samples in (1, 2, 5):
        batch = vectors(samples, samples)
        with torch.no_grad():
            expected = model(**batch)
        for got, wanted in zip(run_graph(program, model, batch), expected, strict=True):
            torch.testing.assert_close(got, wanted, rtol=1e-6, atol=1e-6)


def test_one_tensor_given_as_two_inputs_is_captured_as_two() -> None:
    class Both(Small):
        def forward(self, x: Tensor, target: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            return token_loss_sum(self.head(self.features(x) - 2 * target[:, 0]), y)

    def twice(samples: int, seed: int) -> dict[str, Tensor]:
        batch = vectors(samples, seed)
        return {"x": batch["x"], "target": batch["x"], "y": batch["y"]}

    model = Both()
    program = captured(model, twice)
    batch = {**twice(3, 5), "target": torch.ones(3, TOKENS, WIDTH)}
    with torch.no_grad():
        torch.testing.assert_close(run_graph(program, model, batch)[0], model(**batch)[0], rtol=1e-6, atol=1e-6)


def test_capturing_leaves_parameters_and_buffers_as_they_were() -> None:
    model = Normed()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    captured(model, vectors)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_a_tied_tensor_is_one_parameter() -> None:
    program = captured(Tied(), tokens)
    assert program.params["embed.weight"].aliases == ("head.weight",)
    assert "head.weight" not in program.params
    assert Source(Role.PARAM, "embed.weight") in sources(Tied())


def test_a_buffer_under_two_names_is_one() -> None:
    class Shared(Small):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("table", torch.ones(WIDTH))
            self.again = nn.Module()
            self.again.register_buffer("table", self.table)

        def features(self, x: Tensor) -> Tensor:
            return super().features(x) * self.table + self.again.table

    assert set(captured(Shared(), vectors).buffers) == {"table"}


def test_updates_of_buffers_are_results() -> None:
    program = captured(ExponentialMean(layers=1), vectors)
    updated = {result.name for result in program.results if result.kind == ResultKind.BUFFER}
    assert updated == {"mean", "last"}


def test_where_only_one_batch_size_exports_the_granule_serves() -> None:
    model = FixedBatch(layers=1)
    program = captured(model, vectors, granule=4)
    assert not program.dynamic_batch
    batch = vectors(4, 9)
    with torch.no_grad():
        torch.testing.assert_close(run_graph(program, model, batch)[0], model(**batch)[0], rtol=1e-6, atol=1e-6)


def test_parameters_become_contiguous() -> None:
    model = Small()
    model.head.weight = nn.Parameter(torch.randn(WIDTH, CLASSES).t())
    captured(model, vectors)
    assert model.head.weight.is_contiguous()


class Branching(Small):
    def features(self, x: Tensor) -> Tensor:
        features = super().features(x)
        return features * 2 if features.sum() > 0 else features


class Conditional(Small):
    def features(self, x: Tensor) -> Tensor:
        features = super().features(x)
        return torch.cond(features.sum() > 0, lambda f: f * 2, lambda f: f + 1, (features,))


class Coin(Small):
    def features(self, x: Tensor) -> Tensor:
        return super().features(x) * random.random()


class WritesInput(Small):
    def features(self, x: Tensor) -> Tensor:
        x.mul_(2)
        return super().features(x)


class Clamped(Small):
    def features(self, x: Tensor) -> Tensor:
        self.head.bias.data.clamp_(max=2.0)
        return super().features(x)


class Renormed(Small):
    def features(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.head.weight.div_(self.head.weight.norm(dim=1, keepdim=True))
        return super().features(x)


class Growing(Small):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(1))

    def features(self, x: Tensor) -> Tensor:
        self.seen = torch.cat([self.seen, torch.ones(1)])
        return super().features(x)


class Derived(Small):
    def features(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        super().features(x).sum().backward()
        assert x.grad is not None
        return x.grad.mean(dim=1)


class Unshaped(Small):
    def features(self, x: Tensor) -> Tensor:
        lengths = torch.full((x.shape[0],), TOKENS)
        scores = x.log_softmax(dim=-1).transpose(0, 1)
        lost = nn.functional.ctc_loss(scores, torch.ones(x.shape[0], 2, dtype=torch.int64), lengths, lengths * 0 + 2)
        return super().features(x) + lost


def split(net: Small, x: Tensor) -> Tensor:
    first, second = Small.features(net, x).chunk(2, 0)
    return torch.cat((first - second, second - first))


class Pairs(Small):
    """Its method calls it by another name than self."""

    features = split


class Scripted(Small):
    def __init__(self) -> None:
        super().__init__()
        self.head = torch.jit.script(self.head)


class Averaged(Small):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Sequential(self.head, nn.BatchNorm1d(3, momentum=None))


class OneResult(Small):
    def forward(self, x: Tensor, y: Tensor) -> Any:
        return super().forward(x, y)[0]


class ThreeResults(Small):
    def forward(self, x: Tensor, y: Tensor) -> Any:
        loss, count = super().forward(x, y)
        return loss, count, loss * 2


class NeedsTwo(Small):
    def features(self, x: Tensor) -> Tensor:
        if x.shape[0] < 2:
            raise ValueError("one sample is not enough")
        return super().features(x)


class Squeezed(Small):
    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        scores = self.head(self.features(x))[:, :1].squeeze()
        loss = F.binary_cross_entropy_with_logits(scores, (y > 0).float(), reduction="sum")
        return loss, torch.ones_like(y).sum()


class Mixed(Small):
    def __init__(self) -> None:
        super().__init__()
        self.head = self.head.double()


class Autocast(Small):
    """Casts are part of the graph."""

    def features(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return super().features(x).float()


class Keyword(Small):
    """An operator whose argument is called `from`."""

    def features(self, x: Tensor) -> Tensor:
        return super().features(x) + torch.empty(x.shape[0], 1).random_(0, 10)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (Keyword(), r"an argument with the name of a Python keyword.*; a way out is torch\.randint"),
        (
            Branching(),
            r"Branching cannot be exported in Branching\.features, line \d+ \(.*\): Python looks at a value that only",
        ),
        (Conditional(), "model: cond in .* is a control-flow operator; it cannot be cut"),
        (
            Coin(),
            r"forward draws from Python's generator \(module random\) in Coin.features, line \d+ .*by torch, such as",
        ),
        (WritesInput(), "model: forward changes its input 'x' in place"),
        (Clamped(), "model: forward changes the trained parameter head.bias in place, and only the optimizer may"),
        (Renormed(), "model: forward changes the trained parameter head.weight in place, and only the optimizer may"),
        (Growing(), r"model: forward makes the buffer 'seen' float32 \[2\], it was float32 \[1\]"),
        (Derived(), r"exported in Derived\.features, line \d+ \(.*\): forward calls backward\(\).*autograd\.grad"),
        (Unshaped(), r"aten\._ctc_loss\.Tensor looks at values that only the data tells.*data-dependent control flow"),
        (
            Pairs(),
            r"in Pairs\.split, line \d+ .*not enough values to unpack.*; a way out is parallel\.granule=the samples",
        ),
        (Scripted(), r"cannot be exported.*: head is scripted.*; a way out is the module before torch\.jit\.script"),
        (Averaged(), r"cannot be exported.*: a batch norm with momentum=None.*; a way out is a number as its momentum"),
        (OneResult(), r"model: returns a single value; a model returns \(loss sum, count\)"),
        (ThreeResults(), r"model: returns more than two values; a model returns \(loss sum, count\)"),
        (NeedsTwo(), "NeedsTwo"),
        (
            Squeezed(),
            r"in Squeezed\.forward, .*: for a single sample, Target size .*; a way out is squeeze\(dim\), where",
        ),
        (Mixed(), "model: head.weight is torch.float64 and layers.0.norm.weight is torch.float32"),
        (Small().requires_grad_(False), "model: Small has no parameter to train"),
        (Small().to("meta"), "model: must be built on the cpu, but .* is on meta"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
def test_refusals(model: nn.Module, message: str, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(CaptureError, match=message) as refused:
        captured(model, vectors, granule=1)
    assert "\n" not in str(refused.value), "one line for the user"
    assert capfd.readouterr().err == ""


def test_autocast_becomes_casts() -> None:
    model = Autocast()
    program = captured(model, vectors)
    batch = vectors(3, 5)
    with torch.no_grad():
        torch.testing.assert_close(run_graph(program, model, batch)[0], model(**batch)[0], rtol=1e-5, atol=1e-5)


class Squares(Small):
    """The squared distance from the class, by one_hot."""

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        scores = self.head(self.features(x))
        return (scores - F.one_hot(y, scores.shape[1])).square().sum(), torch.ones_like(y).sum()


def test_a_class_out_of_range_is_an_error_as_in_eager_code() -> None:
    model = Squares()
    program = captured(model, vectors)
    batch = vectors(3, 5)
    with torch.no_grad():
        torch.testing.assert_close(run_graph(program, model, batch)[0], model(**batch)[0], rtol=1e-5, atol=1e-5)
    with pytest.raises((RuntimeError, IndexError), match="out of bounds"):
        run_graph(program, model, {**batch, "y": batch["y"] + 10})


def test_data_that_the_model_cannot_take_is_no_matter_of_batch_sizes() -> None:
    def with_a_bad_label(samples: int, seed: int) -> dict[str, Tensor]:
        batch = vectors(samples, seed)
        return {**batch, "y": batch["y"].index_fill(0, torch.tensor([samples - 1]), 10)}

    with pytest.raises(CaptureError, match=r"Squares fails on \d samples of the data: Class values must be smaller"):
        captured(Squares(), with_a_bad_label, granule=1)


def test_a_model_that_fails_on_one_granule_says_so() -> None:
    batches = (vectors(4, 1), vectors(6, 2))
    assert capture(NeedsTwo(), batches, granule=2).granule == 2
    with pytest.raises(CaptureError, match=r"NeedsTwo .*one sample is not enough"):
        capture(NeedsTwo(), batches, granule=1)


class Stateful(Small):
    """A buffer of a module inside is assigned, and another one changed by way of `.data`."""

    inner: Any

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Module()
        self.inner.register_buffer("steps", torch.zeros(()))
        self.inner.register_buffer("mean", torch.zeros(WIDTH))

    def features(self, x: Tensor) -> Tensor:
        features = super().features(x)
        self.inner.steps = self.inner.steps + 1
        self.inner.mean.data = 0.9 * self.inner.mean.data + features.detach().mean(dim=0)
        return features


class Follower(Small):
    """A frozen layer follows a trained one, as the encoder of keys in momentum contrast does."""

    def __init__(self) -> None:
        super().__init__()
        self.follower = nn.Linear(WIDTH, CLASSES).requires_grad_(False)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        for mine, theirs in zip(self.follower.parameters(), self.head.parameters(), strict=True):
            mine.data = 0.9 * mine.data + 0.1 * theirs.data
        return token_loss_sum(self.head(self.features(x)) + self.follower(self.features(x)), y)


@pytest.mark.parametrize(
    ("model", "names"),
    [(Stateful(), {"inner.steps", "inner.mean"}), (Follower(), {"follower.weight", "follower.bias"})],
    ids=["buffers", "frozen parameters"],
)
def test_however_state_is_updated_the_update_is_a_result(model: Small, names: set[str]) -> None:
    program = captured(model, vectors)
    assert {result.name for result in program.results if result.kind == ResultKind.BUFFER} == names
    assert program.buffers.keys() == names and not names & program.params.keys()


class Named(nn.Module):
    """A parameter, a buffer that is updated, and a module of one name each; inputs whose names are no identifiers."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.own, self.state = nn.Module(), nn.Module()
        for owner, kind in ((self, "parameter"), (self.own, "parameter"), (self.state, "buffer")):
            value = torch.full((WIDTH,), 0.5)
            if kind == "parameter":
                owner.register_parameter(name, nn.Parameter(value))
            else:
                owner.register_buffer(name, value)
        self.heads = nn.ModuleDict({name: nn.Linear(WIDTH, CLASSES)})

    def forward(self, **inputs: Tensor) -> tuple[Tensor, Tensor]:
        x = inputs["class"].mean(dim=1) * self._parameters[self.name] * self.own._parameters[self.name]
        self.state._buffers[self.name].mul_(0.5)
        return token_loss_sum(self.heads[self.name](x), inputs["Code"])


@pytest.mark.parametrize("name", ["code", "graph", "meta", "lambda", "None", "grün", "a-b", "model"])
def test_names_are_free(name: str) -> None:
    def batch(samples: int, seed: int) -> dict[str, Tensor]:
        made = vectors(samples, seed)
        return {"class": made["x"], "Code": made["y"]}

    program = captured(Named(name), batch)
    assert program.params.keys() == dict(Named(name).named_parameters()).keys()
    assert program.buffers.keys() == {f"state.{name}"}
    assert {s.name for s in map(source_of, placeholders(program.graph.graph)) if s.role == Role.INPUT} == {
        "class",
        "Code",
    }
    assert {module_of(node) for node in calls(program.graph.graph)} == {"the model", f"heads.{name}"}


class Checked(Small):
    """Looks at values by torch's own modules, losses and distributions."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1)
        self.decoder = nn.TransformerDecoderLayer(WIDTH, 2, 16, dropout=0.0, batch_first=True)
        self.prior = torch.distributions.Normal(0.0, 1.0, validate_args=True)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        mask = nn.Transformer.generate_square_subsequent_mask(TOKENS)
        x = self.encoder(x, mask=mask)
        x = self.decoder(x, x, tgt_mask=mask, memory_mask=mask)
        loss, count = super().forward(x, y)
        mean, scale = x.mean(dim=(1, 2)), 1 + x.var(dim=(1, 2))
        normal = torch.distributions.Normal(mean, scale)
        several = torch.distributions.MultivariateNormal(x[:, 0], torch.eye(WIDTH).expand(x.shape[0], WIDTH, WIDTH))
        loss = (
            loss - self.prior.log_prob(mean).sum() - normal.log_prob(y.float()).sum() - several.log_prob(x[:, 1]).sum()
        )
        loss = loss + nn.functional.gaussian_nll_loss(mean, y.float(), scale, reduction="sum")
        torch._assert_async((scale > 0).all())
        return loss, count


def test_torchs_own_looks_at_values_are_no_branches() -> None:
    before = torch.Tensor.__bool__, torch.autograd.grad
    assert captured(Checked(), vectors).dynamic_batch
    assert (torch.Tensor.__bool__, torch.autograd.grad) == before and "data" not in vars(torch.Tensor)


class Reentrant(Small):
    def features(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x + self.head.bias.mean(), use_reentrant=True)
        return x.mean(dim=1)


class Nested(Small):
    """A checkpoint within a checkpoint."""

    def features(self, x: Tensor) -> Tensor:
        within = lambda z: checkpoint(self.layers[0], z, use_reentrant=False)  # noqa: E731
        return checkpoint(within, x, use_reentrant=False).mean(dim=1)


class Cast(Small):
    """A checkpoint whose forward pass is cast by its context."""

    def features(self, x: Tensor) -> Tensor:
        contexts = lambda: (torch.autocast("cpu", torch.bfloat16), torch.autocast("cpu", torch.bfloat16))  # noqa: E731
        made = checkpoint(self.layers[0].up, x, use_reentrant=False, context_fn=contexts)
        assert made.dtype == torch.bfloat16
        return x.mean(dim=1) * made.float().mean()


def test_the_context_of_a_checkpoint_is_captured() -> None:
    casts = [node for node in captured(Cast(), vectors).graph.graph.nodes if node.kwargs.get("dtype") is torch.bfloat16]
    casts += [node for node in captured(Cast(), vectors).graph.graph.nodes if torch.bfloat16 in node.args]
    assert casts


class Spectral(Small):
    """Its power iteration is a no_grad() that changes buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.utils.parametrizations.spectral_norm(self.head)


class Modes(Small):
    """A gradient inside of no_grad()."""

    def features(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            still = super().features(x)
            with torch.enable_grad():
                moving = super().features(x)
        return still * moving


class Inference(Small):
    """A factor without a gradient, and a method that never has one."""

    def features(self, x: Tensor) -> Tensor:
        with torch.inference_mode():
            still = super().features(x)
        return super().features(x) * still.clone() + self.scale(x)

    @torch.inference_mode()
    def scale(self, x: Tensor) -> Tensor:
        return self.layers[0](x).mean()


class Half(Small):
    """Gradients in float16, which are not finite beyond 65504."""

    def features(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.float16):
            return super().features(x).float()


@pytest.mark.parametrize(
    "model", [Reentrant(), Nested(), Spectral(), Modes(), Inference(), Half()], ids=lambda model: type(model).__name__
)
def test_gradients_are_those_of_backward(model: Small) -> None:
    program = Normalize().apply(captured(model, vectors))
    check_gradients(model, program, vectors(4, 3), vectors(4, 3))
    assert all(parameter.grad is None for parameter in model.parameters())


class ClampedInPlace(Small):
    """As in torch.distributions.Gamma.rsample."""

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        loss = self.head(self.features(x)).square().sum()
        loss.detach().clamp_(min=1e-6)
        return loss, torch.ones_like(y).sum()


def test_a_write_in_place_behind_detach_is_refused_as_such() -> None:
    program = Normalize().apply(captured(model := ClampedInPlace(), vectors))
    with pytest.raises(CaptureError, match=r"captured graph 0: .*, as does a write in place behind detach\(\)"):
        check_gradients(model, program, vectors(4, 3), vectors(4, 3))


class Reseeded(Classifier):
    """Seeds torch's generator in forward: the same draw in every step, where keyed draws are new ones."""

    def features(self, x: Tensor) -> Tensor:
        torch.manual_seed(0)
        return super().features(x) * (torch.rand(WIDTH) > 0.5)


def test_a_generator_that_forward_seeds_is_refused() -> None:
    with pytest.raises(CaptureError, match="something in it is not seen by the capture"):
        capture(Reseeded(layers=1), (vectors(2, 1), vectors(3, 2)), granule=1)


def test_a_trained_parameter_without_elements_is_refused() -> None:
    model = Classifier(layers=1)
    model.nothing = nn.Parameter(torch.zeros(0, 4))
    with pytest.raises(CaptureError, match=r"the parameter nothing \[0, 4\] has no elements"):
        capture(model, (vectors(2, 1), vectors(3, 2)), granule=1)


class Tabled(Classifier):
    """Reads a tensor that is no buffer."""

    def __init__(self, table: Tensor) -> None:
        super().__init__(layers=1)
        self.table = table

    def features(self, x: Tensor) -> Tensor:
        return super().features(x) + torch.zeros_like(self.table, device="cpu").sum().real


@pytest.mark.parametrize(
    ("table", "reason"),
    [
        (torch.empty(WIDTH, device="meta"), r"the tensor \S+ of forward is on the meta device"),
        (torch.ones(WIDTH, dtype=torch.cdouble), r"the tensor \S+ of forward is in torch.complex128"),
        (torch.eye(WIDTH).to_sparse(), "cannot be exported.* computes with a sparse tensor .* times h, torch.zeros"),
        (
            torch.eye(WIDTH).to_sparse_csr(),
            "cannot be exported.* computes with a sparse tensor .* times h, torch.zeros",
        ),
    ],
)
def test_a_constant_that_is_not_dense_is_refused(table: Tensor, reason: str) -> None:
    with pytest.raises(CaptureError, match=reason):
        capture(Tabled(table), (vectors(2, 1), vectors(3, 2)), granule=1)


class Graphed(Classifier):
    """Sums over neighbours by a sparse matrix, as libraries for graphs make it."""

    def features(self, x: Tensor) -> Tensor:
        features = super().features(x)
        places = torch.arange(WIDTH).expand(2, WIDTH)
        return torch.sparse.mm(torch.sparse_coo_tensor(places, torch.ones(WIDTH), (WIDTH, WIDTH)), features.mT).mT


def test_a_sparse_matrix_made_in_forward_is_refused() -> None:
    with pytest.raises(CaptureError, match="sparse_coo_tensor.* in the model makes a sparse_coo tensor.*index_add"):
        capture(Graphed(layers=1), (vectors(2, 1), vectors(3, 2)), granule=1)


class Truncated(Classifier):
    def features(self, x: Tensor) -> Tensor:
        features = super().features(x)
        features.mean().detach_()
        features.detach_()
        return features


def test_detach_in_place_is_refused_with_the_line() -> None:
    words = r"Truncated.features, line \d+ \(features.mean\(\).detach_\(\)\): .* detach_.* is h = h.detach\(\)"
    with pytest.raises(CaptureError, match=words):
        capture(Truncated(layers=1), (vectors(2, 1), vectors(3, 2)), granule=1)


class Rounded(torch.autograd.Function):
    """A hard gate."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        rounded = x.round()
        ctx.mark_non_differentiable(rounded)
        return rounded

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> None:
        return None


class Gated(Classifier):
    def __init__(self, detached: bool) -> None:
        super().__init__(layers=1)
        self.gate, self.detached = nn.Linear(WIDTH, WIDTH), detached

    def features(self, x: Tensor) -> Tensor:
        features = super().features(x)
        return features + Rounded.apply(self.gate(features.detach()).detach() if self.detached else self.gate(features))


def test_a_parameter_that_nothing_differentiable_leads_to_would_decay() -> None:
    """Torch's optimizers skip a parameter without a gradient; one with a gradient of zeros decays."""
    batch, batches = vectors(4, 3), (vectors(2, 1), vectors(3, 2))
    with pytest.raises(CaptureError, match="gate.bias in Gated gets no gradient, as where an autograd.Function marks"):
        check_gradients(
            model := Gated(detached=False), Normalize().apply(capture(model, batches, granule=1)), batch, batch
        )
    check_gradients(model := Gated(detached=True), Normalize().apply(capture(model, batches, granule=1)), batch, batch)


class Behind(Small):
    """A factor behind a gate that is 0 at first."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.zeros(()))

    def features(self, x: Tensor) -> Tensor:
        still = super().features(x)
        still.detach_()
        return super().features(x) + self.gate * still


class Beyond(Small):
    """A term of large features alone, behind an in-place detach()."""

    def features(self, x: Tensor) -> Tensor:
        features = super().features(x)
        still = nn.functional.relu(features.abs() - 3)
        still.detach_()
        return features + still


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("kind", [Behind, Beyond])
def test_gradients_that_first_weights_hide_are_compared(
    kind: type[Small], precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(eager_answers, "_refuse_to_detach", Tensor.detach_)  # what an export does not record
    model = kind()
    if precision == "bf16":
        run_under_autocast(model)
    with pytest.raises(CaptureError, match="something changes gradients on their way"):
        check_gradients(model, Normalize().apply(captured(model, vectors)), vectors(4, 3), vectors(4, 3))
