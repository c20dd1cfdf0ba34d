"""coupling: operators that couple samples are found, by rule or by trial, and means are refused."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from elaswave_fx.errors import CaptureError
from elaswave_fx.models.losses import token_loss_sum
from elaswave_fx.passes.normalize import Normalize
from elaswave_fx.program import eager_answers
from elaswave_fx.program.capture import capture
from elaswave_fx.program.check_gradients import check_gradients
from elaswave_fx.program.coupling import find_couplings
from elaswave_fx.program.coupling_rules import coupled_by_rule
from elaswave_fx.program.coupling_trial import coupled_by_trial
from elaswave_fx.program.ir import is_shuffled, unit_of
from tests.passes.compiled import assert_same, compile_model, eager, front, run_native, run_units, state_of
from tests.passes.models import (
    CLASSES,
    TOKENS,
    WIDTH,
    Balanced,
    Centered,
    Classifier,
    ExponentialMean,
    FixedBatch,
    Fused,
    GatedCentered,
    InBatch,
    MeanLoss,
    Normed,
    SequenceFirst,
    SoftmaxOverBatch,
    tokens,
    vectors,
)

GRANULE = 4


class Limited(Classifier):
    """What a limit does that the samples of a trial do not reach, and those of a later step may."""

    def __init__(self, limit: Callable[[Tensor], Tensor]) -> None:
        super().__init__(layers=1)
        self.limit = limit

    def features(self, x: Tensor) -> Tensor:
        h = super().features(x)
        return h * self.limit(h)


LIMITS: dict[str, Callable[[Tensor], Tensor]] = {
    "where": lambda h: torch.where(h.detach().norm() > 1e6, 1e6 / h.detach().norm(), 1.0),
    "clamp": lambda h: (1e6 / h.norm()).clamp(max=1.0),
    "maximum": lambda h: torch.maximum(h.abs().max() / 1e6, torch.ones(())),
    "relu": lambda h: 1 + (h.mean(0) - 1e6).relu(),
    "threshold of the inputs": lambda h: 1 + (h.std() > 1e6).float(),
    "count": lambda h: torch.where((h > 0).sum() > 10**6, 0.5, 1.0),
    "counts of features": lambda h: ((h > 0).sum(dim=0) + 1 <= 10**6).float(),
    "whether there is one": lambda h: torch.where((h > 1e6).sum() > 0, 0.5, 1.0),
    "any": lambda h: torch.where((h > 1e6).any(), 0.5, 1.0),
    "all": lambda h: 1.0 - 0.5 * (h < 1e6).all(dim=0).logical_not(),
}


@pytest.mark.parametrize("limit", LIMITS)
def test_limits_by_what_all_samples_have_are_found_though_none_reaches_them(limit: str) -> None:
    (by_rule, by_trial, together) = judged(Limited(LIMITS[limit]))
    assert not by_rule and by_trial == together and "aten.mul.Tensor" in together[0]


class Totals(Classifier):
    """Sums of losses [samples] and of ones, by which few samples count or a limit is near, on their way out."""

    def __init__(self, loss: Callable[[Tensor], Tensor], count: Callable[[Tensor], Tensor] = torch.sum) -> None:
        super().__init__(layers=1)
        self.loss, self.count = loss, count

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        losses = F.cross_entropy(self.features(x) @ torch.ones(WIDTH, CLASSES), y, reduction="none")
        return self.loss(losses), self.count((losses > -1).float())


class MeanTimesSamples(Classifier):
    """A mean over the labels that count is a sum only where all of them do."""

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return F.cross_entropy(self.head(self.features(x)), y) * x.shape[0], torch.full((), x.shape[0])


def places(losses: Tensor) -> Tensor:
    return torch.arange(losses.shape[0])


def far(losses: Tensor) -> Tensor:
    """A penalty that is 0 for every sample of a trial."""
    return F.relu(losses - 1e6)


class Bound(Totals):
    """With a penalty of parameters alone, which the first ones do not have, and a counter whose first steps are 0."""

    steps: Tensor

    def __init__(
        self, loss: Callable[[Tensor, Tensor, Tensor], Tensor], count: Callable[..., Tensor] = torch.sum
    ) -> None:
        super().__init__(lambda losses: loss(losses, F.relu(self.head.weight.abs() - 1e3).sum(), self.ramp()), count)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def ramp(self) -> Tensor:
        return ((self.steps % 1000) / 500).clamp(max=1.0)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        sums = super().forward(x, y)
        self.steps += 1
        return sums


class Followed(Classifier):
    """Means weigh by what a buffer has become: nothing at first."""

    weights: Tensor

    def __init__(self) -> None:
        super().__init__(layers=1)
        self.register_buffer("weights", torch.zeros(2))

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        features = self.features(x)
        loss, count = token_loss_sum(self.head(features), y)
        means = torch.stack([features.square().mean(), features.abs().mean()])
        loss = loss + (self.weights * means).sum()
        self.weights = (self.weights + 0.1).detach()
        return loss, count


BENT: dict[str, tuple[nn.Module, str]] = {
    "a bound of parameters": (
        Bound(lambda losses, penalty, ramp: losses.sum() + 3 * penalty),
        "aten.mul.*, a value of no sample in the loss, which is their sum: times x.shape.0. it is one",
    ),
    "a factor of parameters": (
        Bound(lambda losses, penalty, ramp: losses.sum() + penalty * losses.mean()),
        "^aten.mean.*, a mean over samples in the loss, which is their sum$",
    ),
    "a mean by a cyclical ramp": (
        Bound(lambda losses, penalty, ramp: losses.sum() + ramp * losses.mean()),
        "^aten.mean.*, a mean over samples in the loss, which is their sum$",
    ),
    "a mean by a buffer of several numbers": (
        Followed(),
        "^aten.*, a mean over samples in the loss",
    ),
    "a mean every fourth step": (
        Bound(lambda losses, penalty, ramp: losses.sum() + (ramp * 2000 % 4 == 3) * losses.mean()),
        "aten.mean.*, a mean over samples in the loss",
    ),
    "a mean by chance": (
        Totals(lambda losses: losses.sum() + (torch.rand(()) < 1e-9).float() * losses.mean()),
        "aten.mean.*, a mean over samples in the loss",
    ),
    "the square of a norm": (
        Totals(lambda losses: losses.norm().pow(2)),
        r"pow.*: a norm over the batch is none; h.pow\(2\).sum\(\) is one",
    ),
    "a count kept from 0": (Totals(torch.sum, lambda ones: ones.sum().clamp(min=1)), "count .* needs no lower bound"),
    "an integer": (Totals(torch.sum, lambda ones: (ones > 0).sum().clamp(min=1)), "count .* needs no lower bound"),
    "free bits": (Totals(lambda losses: (losses.sum() - 1e-9).clamp(min=0.0)), "loss is no sum over samples"),
    "relu of a sum": (Totals(lambda losses: F.relu(losses.sum())), "relu.* loss is no sum over samples"),
    "NaN to 0": (Totals(lambda losses: losses.sum().nan_to_num()), "nan_to_num.* loss is no sum over samples"),
    "mean of what is not NaN": (
        Totals(lambda losses: losses.nanmean() * losses.shape[0]),
        "nanmean.* loss is no sum over samples",
    ),
    "means by groups": (
        Totals(lambda losses: torch.zeros(64).scatter_reduce(0, places(losses), losses, "mean").sum()),
        "scatter_reduce.* loss is no sum over samples",
    ),
    "largest": (Totals(lambda losses: losses.sum() + 0 * losses.max()), "max.* loss is no sum over samples"),
    "mean over labels": (MeanTimesSamples(layers=1), "mean over the labels that count, and reduction='sum' is the sum"),
    "a mean times a count": (Totals(lambda losses: losses.mean() * (losses > -1).sum()), "mul.* return the sum itself"),
    "a mean of what none has": (
        Totals(lambda losses: losses.sum() + far(losses).mean()),
        "aten.mean.*, a mean over samples in the loss, which",
    ),
    "half of it": (Totals(lambda losses: losses.sum() + (far(losses).sum() / losses.shape[0]).div(2)), "not the sum"),
    "that of one": (
        Totals(lambda losses: losses.sum() + far(losses)[0]),
        "aten.select.*: the loss is no sum",
    ),
    "that of the first": (
        Totals(lambda losses: losses.sum() + far(losses)[:1].sum()),
        "aten.slice.*: the loss is no sum",
    ),
    "one of two means": (
        Totals(lambda losses: losses.mean() * losses.shape[0] + far(losses).mean()),
        "^aten.mean.default in the model, a mean over samples in the loss, which is their sum$",
    ),
    "variance of what none has": (Totals(lambda losses: losses.sum() + torch.var_mean(far(losses))[0]), "var_mean"),
    "a mean loss": (
        Totals(lambda losses: losses.sum() + F.mse_loss(far(losses), 0 * losses)),
        "aten.mse_loss.*, a mean over samples",
    ),
    "rows by number": (Totals(lambda losses: losses.sum() + far(losses)[[0]].sum()), "aten.index"),
    "a pool": (
        Totals(lambda losses: losses.sum() + F.adaptive_avg_pool1d(far(losses)[None], 1).sum()),
        "loss is no sum over samples",
    ),
    "any": (Totals(torch.sum, lambda ones: ones.sum() + (ones > 2).any().float()), "any.* count is no sum"),
    "where": (Totals(lambda losses: torch.where(losses.sum() > -1, losses.sum(), 0.0)), "where"),
}
LINEAR: dict[str, nn.Module] = {
    "a bound for each sample": Bound(lambda losses, penalty, ramp: losses.sum() + penalty * losses.shape[0]),
    "factors": Bound(lambda losses, penalty, ramp: losses.sum() * (1 + penalty) + ramp * losses.square().sum()),
    "no value of parameters": Bound(lambda losses, penalty, ramp: losses.sum() + torch.zeros_like(penalty)),
    "weights": Totals(lambda losses: 0.5 * losses.sum() / 3 + losses.square().sum() * torch.tensor(0.1)),
    "stacked": Totals(lambda losses: torch.stack([losses.sum(), losses.exp().sum()]).sum()),
    "a product": Totals(lambda losses: torch.stack([losses.sum(), losses.sum()]) @ torch.tensor([0.5, 2.0])),
    "an integer of floats": Totals(torch.sum, lambda ones: ones.sum().int()),
    "of another dtype": Totals(torch.sum, lambda ones: ones.sum(dtype=torch.float32).long()),
    "by groups": Totals(lambda losses: torch.zeros(3).index_add(0, 0 * places(losses), losses).sum()),
    "weights like it": Totals(lambda losses: losses.sum() * torch.tensor(0.5, dtype=torch.float64).type_as(losses)),
    "from zeros": Totals(lambda losses: losses.new_zeros(()) + torch.zeros_like(losses[0]) + losses.sum()),
    "not NaN": Totals(torch.nansum, lambda ones: ones.count_nonzero().float()),
    "means times samples": Totals(lambda losses: losses.sum() + far(losses).mean() * losses.shape[0]),
    "a mean over each": Totals(lambda losses: losses.sum() + far(torch.stack([losses, -losses], 1)).mean(1).sum()),
    "drawn rows": Totals(lambda losses: losses.sum() + F.softplus(torch.randn(losses.shape[0], 2)).sum()),
    "rows drawn like others": Totals(lambda losses: losses.sum() + F.softplus(torch.randn_like(losses)).sum()),
    "another dtype": Totals(lambda losses: losses.sum().double().float(), lambda ones: (ones > 0).sum().float()),
}


@pytest.mark.parametrize("name", BENT)
def test_what_bends_a_sum_over_samples_is_found_whatever_the_trial_sees(name: str) -> None:
    model, words = BENT[name]
    assert re.search(words, judged(model)[2][0])


@pytest.mark.parametrize("name", LINEAR)
def test_what_is_linear_leaves_a_sum_one(name: str) -> None:
    assert judged(LINEAR[name]) == ((), (), ())


def judged(model: nn.Module, granule: int = GRANULE) -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
    """By rule, by trial, together."""
    make = tokens if isinstance(model, SequenceFirst) else vectors
    program, state, batch = front(model, make, granule), state_of(model), make(2 * granule, 1)
    return (
        coupled_by_rule(program),
        coupled_by_trial(program, state, batch).reasons,
        find_couplings(program, state, batch).reasons,
    )


@pytest.mark.parametrize(
    ("model", "name", "by_rule"),
    [
        (Normed(layers=1), "aten._native_batch_norm_legit.no_stats in norm", True),
        (InBatch(layers=1), "aten.matmul.default in the model", True),
        (SoftmaxOverBatch(layers=1), "aten.softmax.int in the model", True),
        (ExponentialMean(layers=1), "buffer mean is updated by every batch", True),
        (Centered(layers=1), "elaswave_tests.center.default in the model", False),
        (GatedCentered(layers=1), "elaswave_tests.center.default in the model", False),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
def test_couplings_are_found(model: nn.Module, name: str, by_rule: bool) -> None:
    rule, trial, together = judged(model)
    assert (name in rule) == by_rule
    assert name in together
    assert by_rule or name in trial


@pytest.mark.parametrize(
    "model",
    [Classifier(layers=1), Fused(layers=1), SequenceFirst(layers=1, dropout=0.5)],
    ids=["plain", "fused", "sequence first, with dropout"],
)
def test_samples_that_stand_for_themselves(model: nn.Module) -> None:
    assert judged(model) == ((), (), ())


class Weighted(Classifier):
    """Losses with a weight a sample, or several, which are 1 in nearly all of them."""

    def __init__(self, scale: Callable[[Tensor], Tensor]) -> None:
        super().__init__(layers=1)
        self.scale = scale

    def forward(self, x: Tensor, y: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        losses = F.cross_entropy(self.head(self.features(x)), y, reduction="none")
        return (losses * self.scale(w).flatten(1).mean(1)).sum(), torch.ones_like(y).sum()


@pytest.mark.parametrize("shape", [(1,), (5,), (2, 3)])
@pytest.mark.parametrize(
    ("scale", "is_coupled"),
    [
        (lambda w: w / w.mean(), True),
        (lambda w: w / w.max(), True),
        (lambda w: w - w.mean() + 1, True),
        (lambda w: w, False),
        (lambda w: w.sqrt() + 1, False),
    ],
    ids=["over their mean", "over the largest", "about their mean", "as they are", "of their own"],
)
def test_weights_that_are_nearly_always_alike_hide_nothing(
    scale: Callable[[Tensor], Tensor], is_coupled: bool, shape: tuple[int, ...]
) -> None:
    def make(samples: int, seed: int) -> dict[str, Tensor]:
        return {**vectors(samples, seed), "w": torch.ones(samples, *shape)}

    model = Weighted(scale)
    found = find_couplings(front(model, make, 1), state_of(model), make(2, 1), make(3, 2))
    assert bool(found.reasons) == is_coupled


class Along(Classifier):
    """The sum of `operations` on the features [samples, WIDTH]."""

    def __init__(self, *operations: Callable[[Tensor], Tensor]) -> None:
        super().__init__(layers=1)
        self.operations = operations

    def features(self, x: Tensor) -> Tensor:
        features = super().features(x)
        return torch.stack([operate(features) for operate in self.operations]).sum(dim=0)


def test_operators_along_another_dimension_couple_nothing() -> None:
    within = Along(
        lambda f: f.cumsum(dim=1),
        lambda f: f.sort(-1)[0],
        lambda f: f.flip(-1),
        lambda f: f.roll(1, 1),
        lambda f: f.topk(WIDTH, 1)[0],
        lambda f: f.renorm(2, 0, 1.0),
        lambda f: nn.functional.layer_norm(f, (WIDTH,)),
        lambda f: nn.functional.instance_norm(f[:, None])[:, 0],
    )
    assert judged(within) == ((), (), ())


class Spread(Classifier):
    """The distances of all pairs, of which torch takes the number of samples without a word."""

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        features = self.features(x)
        count = torch.ones_like(y).sum()
        return token_loss_sum(self.head(features), y)[0] - torch.pdist(features).mean() * count, count


def test_distances_of_all_pairs_are_captured_at_one_batch_size() -> None:
    model, batch = Spread(layers=1), vectors(GRANULE, 1)
    (reason,) = judged(model)[2]
    assert reason == "the model exports at one fixed batch size only"
    assert_same(run_units(compile_model(model, vectors, GRANULE), batch), eager(model, batch))


@torch.library.custom_op("coupling::capped", mutates_args=())
def capped(h: Tensor) -> Tensor:
    return h * (1e6 / h.norm().clamp(min=1e6))


@capped.register_fake
def _(h: Tensor) -> Tensor:
    return torch.empty_like(h)


capped.register_autograd(lambda ctx, grad: grad)


@pytest.mark.parametrize(
    "operate",
    [
        lambda f: f.renorm(2, 1, 1e6),
        lambda f: f * torch.isin(f, f.exp() + 1e6).logical_not(),
        lambda f: f * torch.isin((1e3 * f).long(), 10**9 + (1e3 * f.exp()).long()).logical_not(),
        capped,
    ],
    ids=["a bound", "hits", "hits of integers", "an operator of one's own"],
)
def test_operators_that_couple_samples_at_values_which_the_trial_has_not(operate: Callable[[Tensor], Tensor]) -> None:
    rule, trial, together = judged(Along(operate))
    assert not rule and trial and together == trial


def test_operators_along_the_samples_couple_them() -> None:
    across = Along(lambda f: f.cumsum(dim=0), lambda f: f.flip(0), lambda f: f.roll(1, 0))
    assert [reason.split()[0] for reason in judged(across)[0]] == [
        *("aten.cumsum.default", "aten.flip.default", "aten.roll.default")
    ]


@pytest.mark.parametrize(
    "operate",
    [lambda f: f * torch.arange(f.shape[0])[:, None], lambda f: f + 1e-7 * f.mean(dim=0)],
    ids=["the position in the batch", "a trace of the mean"],
)
def test_the_trial_sees_what_no_rule_names(operate: Callable[[Tensor], Tensor]) -> None:
    rule, trial, together = judged(Along(operate))
    assert not rule and trial and together == trial


def test_a_small_part_of_the_loss_that_is_no_sum() -> None:
    """A thousandth of the loss, far below the rounding of a single precision sum, is seen."""
    (reason,) = judged(Balanced(layers=1))[2]
    assert reason.endswith("the loss of a batch is not the sum over its parts")


@pytest.mark.parametrize(
    ("counts", "granule"), [(True, GRANULE), (True, 1), (False, 1)],
    ids=["with a count, of granules", "with a count", "with the count one"],
)  # fmt: skip
def test_a_mean_loss_is_refused(counts: bool, granule: int) -> None:
    message = (
        r"model: the same samples given twice change the loss from (.*) to \1 instead of doubling it; a model returns"
    )
    with pytest.raises(CaptureError, match=message):
        judged(MeanLoss(counts), granule)


def test_a_mean_loss_with_another_constant_count_is_refused() -> None:
    class Sixteen(MeanLoss):
        def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            return super().forward(x, y)[0], torch.full((), 16.0)

    with pytest.raises(CaptureError, match="the same samples given twice change the loss"):
        judged(Sixteen(counts=False))


def test_a_mean_loss_with_the_count_one_is_of_granules() -> None:
    assert [reason.split(": ")[1] for reason in judged(MeanLoss(counts=False))[2]] == [
        "the loss of a batch is not the sum over its parts",
        "the count of a batch is not the sum over its parts",
    ]


def test_a_mean_over_coupled_samples() -> None:
    """The mean of a granule with the count one is a sum over granules; with a growing count it is not."""

    class NormedMean(Normed):
        def __init__(self, counts: bool) -> None:
            super().__init__(layers=1)
            self.counts = counts

        def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            loss, count = token_loss_sum(self.head(self.features(x)), y)
            return loss / count, count if self.counts else torch.ones((), dtype=torch.int64)

    assert judged(NormedMean(counts=False))[2]
    with pytest.raises(CaptureError, match="the same samples given twice change the loss"):
        judged(NormedMean(counts=True))


def test_a_constant_count_is_refused() -> None:
    class One(Classifier):
        def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            return super().forward(x, y)[0], torch.ones(())

    with pytest.raises(CaptureError, match="the same samples given twice change the count from 1 to 1"):
        judged(One(layers=1))


def test_one_batch_size_is_a_coupling() -> None:
    (reason,) = judged(FixedBatch(layers=1))[2]
    place = r"forward, line \d+ of models.py \(assert x.shape\[0\] == 4.*\) decides by the number of samples"
    assert re.fullmatch(f"the model exports at one fixed batch size only: {place}", reason)


@pytest.mark.parametrize(
    "count",
    [lambda y: torch.tensor(float(len(y))), lambda y: y.new_tensor(y.numel()), lambda y: 0 * y[0] + int(y.size(0))],
)
def test_what_makes_a_number_of_the_batch_size_is_named_with_a_cure(count: Callable[[Tensor], Tensor]) -> None:
    class Counted(Classifier):
        def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            return super().forward(x, y)[0], count(y)

    words = "one fixed batch size only: <lambda>, line .* of test_coupling.py .* makes a Python number"
    (reason,) = judged(Counted(layers=1))[2]
    assert re.search(words, reason) and "torch.full((), x.shape[0])" in reason


def test_an_operator_that_makes_a_number_of_the_batch_size_under_vmap_is_named() -> None:
    joined = torch.func.vmap(lambda f: torch.cat([f, -f])[:WIDTH])
    (reason,) = judged(Along(joined))[2]
    words = "<lambda>, line .* under torch.func that reads the number of samples .* torch.stack does not"
    assert re.search(words, reason)
    assert not judged(Along(torch.func.vmap(lambda f: torch.stack([f, -f])[0])))[2]


def test_distances_are_named_that_torch_takes_in_two_ways_by_the_number_of_samples() -> None:
    class Distances(Classifier):
        def __init__(self, **options: str) -> None:
            super().__init__(layers=1)
            self.options = options

        def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            codes = torch.linspace(-1, 1, CLASSES * WIDTH).view(CLASSES, WIDTH)
            return token_loss_sum(-torch.cdist(self.features(x), codes, **self.options), y)

    (reason,) = judged(Distances())[2]
    assert re.search("torch.cdist in .* decides by the number of samples; with compute_mode=", reason)
    assert not judged(Distances(compute_mode="donot_use_mm_for_euclid_dist"))[2]


BRANCHES: list[Callable[[int], bool]] = [
    lambda samples: samples > 300,
    lambda samples: samples % 128 == 124,
    lambda samples: samples == 16,
]


@pytest.mark.parametrize("branch", BRANCHES)
def test_a_branch_that_no_batch_of_the_capture_takes_is_found(branch: Callable[[int], bool]) -> None:
    class Branched(Classifier):
        def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            loss, count = super().forward(x, y)
            if branch(x.shape[0]):
                loss = 2 * loss
            return loss, count

    (reason,) = judged(Branched(layers=1))[2]
    assert re.search("one fixed batch size only: .* of test_coupling.py .* decides by the number of samples", reason)


FLAT = torch.cat([torch.ones(1000), torch.zeros(1000)])
"""A table whose first rows are equal."""
POSITIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mask": lambda h, at: h * (at < 1000)[:, None],
    "mask of integers": lambda h, at: h * (at < 1000).long()[:, None],
    "table": lambda h, at: h * FLAT[at][:, None],
    "rows of a table": lambda h, at: h * FLAT.index_select(0, at)[:, None],
    "table of integers": lambda h, at: h * FLAT.long().gather(0, at)[:, None],
    "table of columns": lambda h, at: h * FLAT[:, None][at, 0][:, None],
    "remainder": lambda h, at: h * FLAT[at % 2000][:, None],
    "whole division": lambda h, at: h * (1 + at // 1000)[:, None],
    "bound": lambda h, at: h[at.clamp(max=1000)],
    "class": lambda h, at: h * F.one_hot(at // 1000, 8)[:, :1],
    "written within a bound": lambda h, at: (
        h * torch.zeros(h.shape[0], 1).index_put((at.clamp(max=1000),), torch.ones(()))
    ),
}
ROWS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "taken": lambda h, at: h + h[at, at * 0][:, None],
    "of a flat view": lambda h, at: h + h.flatten()[at * WIDTH + 1][:, None],
    "ones written": lambda h, at: h * torch.zeros_like(h).index_put((at, at * 0), torch.ones(())),
    "of integers written": lambda h, at: (
        h * torch.zeros_like(h).long().index_put((at, at * 0), torch.ones((), dtype=torch.long))
    ),
    "added": lambda h, at: h + torch.zeros_like(h).index_add(0, at, torch.ones_like(h)),
    "repeated": lambda h, at: h[at.repeat_interleave(2)].unflatten(0, (-1, 2)).sum(1),
    "of samples by their tokens": lambda h, at: torch.zeros_like(h).index_add(
        0, torch.arange(3 * h.shape[0]) // 3, h.repeat_interleave(3, 0)
    ),
    "of a table by tokens": lambda h, at: h + FLAT[torch.arange(WIDTH * h.shape[0]) % WIDTH].view(-1, WIDTH),
}


class AtPositions(Classifier):
    def __init__(self, compute: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__(layers=1)
        self.compute = compute

    def features(self, x: Tensor) -> Tensor:
        return self.compute(super().features(x), torch.arange(x.shape[0]))


@pytest.mark.parametrize("positions", POSITIONS)
def test_what_positions_in_the_batch_decide_is_found_though_the_trial_is_within(positions: str) -> None:
    (reason,) = judged(AtPositions(POSITIONS[positions]))[2]
    assert re.match(r"aten\.(mul|index)\.Tensor in the model|aten.index_put", reason)


@pytest.mark.parametrize("rows", ROWS)
def test_rows_at_their_own_positions_couple_nothing(rows: str) -> None:
    assert judged(AtPositions(ROWS[rows])) == ((), (), ())


HALVES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "joined": lambda member, ones: torch.cat([ones * member[0], ones * member[1]]),
    "interleaved": lambda member, ones: member.repeat_interleave(ones.shape[0], 0),
    "by position": lambda member, ones: member[torch.arange(2 * ones.shape[0]) // ones.shape[0]],
    "a slice written": lambda member, ones: member[_second_half(ones.shape[0]).long()],
    "a mask": lambda member, ones: torch.where(_second_half(ones.shape[0])[:, None] > 0, member[1], member[0]),
}


def _second_half(samples: Any) -> Tensor:
    half = torch.zeros(2 * samples)
    half[samples:] = 1
    return half


class Ensemble(Classifier):
    """Two members, one batch after the other (BatchEnsemble), each with factors of its own."""

    def __init__(self, halves: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__(layers=1)
        self.members = nn.Parameter(torch.linspace(0.5, 1.5, 2 * WIDTH).view(2, WIDTH))
        self.halves = halves

    def features(self, x: Tensor) -> Tensor:
        h = super().features(x)
        twice = torch.cat([h, h]) * self.halves(self.members, torch.ones(x.shape[0], 1))
        return torch.tanh(twice).unflatten(0, (2, -1)).sum(0)


class TwoViews(Ensemble):
    """With paths that are dropped at random, and channels of zeros beside."""

    def features(self, x: Tensor) -> Tensor:
        h = Classifier.features(self, x)
        twice = torch.cat([h, h]) * self.members.repeat_interleave(x.shape[0], 0)
        twice = twice * twice.new_empty((twice.shape[0], 1)).bernoulli_(0.5)
        wider = torch.cat([twice, torch.zeros_like(twice)], dim=1)
        return wider.unflatten(0, (2, -1)).sum(0)[:, :WIDTH]


def test_draws_for_two_batches_couple_nothing() -> None:
    model = TwoViews(lambda member, ones: member)
    assert judged(model) == ((), (), ())


@pytest.mark.parametrize("halves", HALVES)
def test_two_batches_one_after_the_other_couple_nothing(halves: str) -> None:
    model, batch = Ensemble(HALVES[halves]), vectors(2 * GRANULE, 1)
    assert judged(model) == ((), (), ())
    assert_same(run_units(compile_model(model, vectors, GRANULE), batch), eager(model, batch))


COUNTS: dict[str, Callable[[Tensor], Any]] = {
    "clamp": lambda n: 1.0 + (n - 1000).clamp(min=0),
    "whole division": lambda n: 1.0 + n // 1000,
    "remainder": lambda n: 1.0 + torch.div(n, 1000, rounding_mode="trunc") % 7,
    "maximum": lambda n: torch.maximum(n, torch.tensor(1000)).float(),
    "power": lambda n: 0.5 ** (n // 1000),
    "choice": lambda n: torch.where(n > 1000, 3, 1),
    "logarithm": lambda n: 1.0 + (n // 1000).log1p(),
    "root": lambda n: 1.0 + (n // 1000).sqrt(),
    "bound": lambda n: torch.full((), 2.0).clamp(max=1 + n // 1000),
    "not": lambda n: torch.where(torch.logical_not(n // 1000), 1.0, 2.0),
    "is in": lambda n: torch.where(torch.isin(n, torch.tensor([1000, 2000])), 1.0, 2.0),
    "sought": lambda n: torch.searchsorted(torch.tensor([1000, 2000]), n).log1p(),
    "stacked": lambda n: torch.stack([n // 1000, n // 2000]).log1p().sum(),
}


@pytest.mark.parametrize("name", COUNTS)
def test_a_count_over_the_batch_that_weighs_is_found_though_it_is_small_in_the_trial(name: str) -> None:
    class Weighed(Classifier):
        def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            features = self.features(x) * COUNTS[name]((y >= 1).sum())
            return token_loss_sum(self.head(features), y)

    assert judged(Weighed(layers=1))[2]


PLACES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "embedding": lambda h, n: h + F.embedding(n, torch.arange(2.0 * WIDTH).view(2, WIDTH)),
    "row": lambda h, n: h + torch.arange(2.0 * WIDTH).view(2, WIDTH).index_select(0, n.reshape(1)),
    "order": lambda h, n: h[:, (torch.arange(WIDTH) + n) % WIDTH],
    "feature of each": lambda h, n: h + h.gather(1, n.expand(h.shape[0], 1)),
    "last of each": lambda h, n: h + h.index_select(1, (n + WIDTH - 1).reshape(1)),
    "of zeros": lambda h, n: h + h.gather(1, torch.zeros(h.shape[0], 1, dtype=torch.long) + n),
    "by the sample too": lambda h, n: h + h.gather(1, torch.minimum((h[:, :1] > 0).long(), n + 9)),
    "written": lambda h, n: h + torch.zeros(WIDTH).index_put((n,), torch.ones(())),
    "added": lambda h, n: torch.zeros_like(h).index_add(1, (torch.arange(WIDTH) + n) % WIDTH, h),
    "tokens": lambda h, n: h + F.embedding((h > 0).long()[:, (n + torch.arange(1)) % WIDTH], torch.eye(2, WIDTH))[:, 0],
}


@pytest.mark.parametrize("name", PLACES)
def test_a_place_that_all_samples_decide_couples_them_though_it_is_one_throughout_the_trial(name: str) -> None:
    class Placed(Classifier):
        def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            return token_loss_sum(self.head(PLACES[name](self.features(x), y.clamp(max=0).max())), y)

    assert judged(Placed(layers=1))[2]


CENTERS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": lambda h, rare: h + (h * rare[:, None]).sum(0),
    "product": lambda h, rare: h + rare @ h,
    "center": lambda h, rare: h - (h * rare[:, None]).sum(0) / rare.sum().clamp(min=1),
    "largest": lambda h, rare: h + h.masked_fill(rare[:, None] == 0, -1e9).max(0)[0].clamp(min=-1),
    "complex": lambda h, rare: h + torch.view_as_real(torch.complex(h * rare[:, None], h).sum(0)).prod(-1),
}


@pytest.mark.parametrize("name", CENTERS)
def test_a_sum_over_samples_of_a_class_that_no_sample_of_the_trial_has_couples_them(name: str) -> None:
    class OfTheRare(Classifier):
        def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            return token_loss_sum(self.head(CENTERS[name](self.features(x), (y == CLASSES + 1).float())), y)

    assert judged(OfTheRare(layers=1))[2]


class Warmed(Classifier):
    """A term that a counter in a buffer brings in after some steps."""

    def __init__(self, term: Callable[[Tensor], Tensor]) -> None:
        super().__init__(layers=1)
        self.term = term
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        self.steps.add_(1)
        h = self.features(x)
        loss, count = token_loss_sum(self.head(h), y)
        return loss + torch.where(self.steps > 100, 1.0, 0.0) * self.term(h), count


def test_a_term_that_comes_later_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    assert judged(Warmed(lambda h: h.mean(0).square().sum()))[2]
    assert judged(Warmed(lambda h: h.square().sum())) == ((), (), ())
    monkeypatch.setattr(eager_answers, "_refuse_to_detach", Tensor.detach_)  # what an export does not record
    with pytest.raises(CaptureError, match="something changes gradients on their way"):
        model = Warmed(lambda h: (h * h.clone().detach_()).sum())
        check_gradients(
            model, Normalize().apply(capture(model, (vectors(2, 1), vectors(3, 2)), 1)), vectors(4, 3), vectors(4, 3)
        )


def test_the_shape_of_a_count_couples_nothing() -> None:
    class Shaped(Classifier):
        def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            two = torch.full_like(y.max(), 2.0, dtype=torch.float32) * y.max().new_full((), 2.0, dtype=torch.float32)
            return token_loss_sum(self.head(self.features(x) * two), y)

    assert judged(Shaped(layers=1)) == ((), (), ())


@pytest.mark.parametrize("factor", [lambda samples: 1 + samples // 128, lambda samples: samples % 96])
def test_steps_of_the_batch_size_are_found_though_the_trial_sees_one(factor: Callable[[Any], Any]) -> None:
    class Stepped(Classifier):
        def features(self, x: Tensor) -> Tensor:
            return super().features(x) * factor(x.shape[0])

    by_rule, _, together = judged(Stepped(layers=1))
    assert by_rule == together and "of the number of samples" in by_rule[0]


def test_a_size_as_a_symbol_is_a_count() -> None:
    class Counted(Classifier):
        def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            return super().forward(x, y)[0], torch.full((), x.shape[0])

    assert judged(Counted(layers=1)) == ((), (), ())


def test_a_part_of_a_batch_that_cannot_run_is_a_coupling() -> None:
    """A reshape that wants whole granules: the trial says so instead of failing."""

    class Pairs(Classifier):
        def features(self, x: Tensor) -> Tensor:
            features = super().features(x)
            torch._check(features.shape[0] % 2 == 0)
            return features - features.view(-1, 2, WIDTH).mean(dim=1).repeat_interleave(2, dim=0)

    program = front(Pairs(layers=1), vectors, 2)
    state = state_of(Pairs(layers=1))
    assert find_couplings(program, state, vectors(4, 1)).reasons or not program.dynamic_batch


def test_tokens_of_one_sample_may_be_coupled() -> None:
    class OverTokens(Classifier):
        def features(self, x: Tensor) -> Tensor:
            x = self.layers[0](x)
            return (x - x.mean(dim=1, keepdim=True)).cumsum(dim=1)[:, TOKENS // 2]

    assert judged(OverTokens(layers=1))[2] == ()


# --- gradients --------------------------------------------------------------------------------------------------------


def own_operator(name: str, backward: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """The identity with a backward pass of its own."""

    @torch.library.custom_op(f"elaswave_tests::{name}", mutates_args=())
    def operate(x: Tensor) -> Tensor:
        return x.clone()

    operate.register_fake(torch.empty_like)
    operate.register_autograd(lambda ctx, gradient: backward(gradient))
    return lambda x: operate(x)  # A model that holds the operator itself could not be copied.


BACKWARD = {
    "by_samples": lambda gradient: gradient / gradient.shape[0],
    "centered": lambda gradient: gradient - gradient.mean(dim=0),
    "bounded": lambda gradient: gradient / (1 + gradient.norm()),
    "by_equals": lambda gradient: gradient / (gradient[:, None] == gradient[None]).all(-1).sum(1)[:, None],
}


@pytest.mark.parametrize("name", BACKWARD)
def test_backward_passes_that_look_at_the_batch_couple_it(name: str) -> None:
    """Forward keeps samples apart; no rule knows the operator."""
    rule, trial, (reason,) = judged(Along(own_operator(f"grad_{name}", BACKWARD[name])))
    assert not rule and not trial
    assert reason.startswith("the gradient of layers.0.")
    assert reason.endswith(
        f"is not the sum over its parts; the model calls elaswave_tests.grad_{name}.default in the model"
    )


def test_a_backward_pass_that_keeps_samples_apart_couples_nothing() -> None:
    assert judged(Along(own_operator("grad_half", lambda gradient: gradient / 2)))[2] == ()


@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_a_gradient_in_forward_of_a_loss_that_is_a_sum_couples_nothing(reduction: str) -> None:
    class Moved(Classifier):
        """Inputs are moved by the gradient of their loss, as in adversarial training."""

        def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            at = x.detach().clone().requires_grad_(True)
            loss = nn.functional.cross_entropy(self.head(self.features(at)), y, reduction=reduction)
            (gradient,) = torch.autograd.grad(loss, at)
            return super().forward((x + 0.1 * gradient).detach(), y)

    assert bool(judged(Moved(layers=1))[2]) == (reduction == "mean")


class ByFrequency(SequenceFirst):
    def __init__(self, embed: nn.Module) -> None:
        super().__init__(layers=1)
        self.embed = embed


@pytest.mark.parametrize("by_frequency", [True, False])
def test_gradients_by_frequency_couple_samples(by_frequency: bool) -> None:
    rule, _, together = judged(ByFrequency(nn.Embedding(16, WIDTH, scale_grad_by_freq=by_frequency)))
    assert rule == together
    assert ["scale_grad_by_freq" in reason for reason in together] == [True] * by_frequency


class Bags(Classifier):
    def __init__(self) -> None:
        super().__init__(layers=1)
        self.bag = nn.EmbeddingBag(CLASSES, WIDTH, mode="sum", scale_grad_by_freq=True)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return token_loss_sum(self.head(self.features(x) + self.bag(y[:, None])), y)


def test_so_do_those_of_bags() -> None:
    assert "scale_grad_by_freq" in judged(Bags())[2][0]


@pytest.mark.parametrize(
    ("model", "make"),
    [
        (ByFrequency(nn.Embedding(16, WIDTH, scale_grad_by_freq=True)), tokens),
        (Bags(), vectors),
        (Along(own_operator("grad_of_granules", BACKWARD["centered"])), vectors),
    ],
    ids=["embedding", "bag", "own operator"],
)
def test_a_granule_is_differentiated_as_a_whole(
    model: nn.Module, make: Callable[[int, int], dict[str, Tensor]]
) -> None:
    compiled = compile_model(model, make, GRANULE)
    assert compiled.program.batch_coupled
    batch = make(GRANULE, 5)
    assert_same(run_units(compiled, batch), eager(compiled.model, batch))
    assert_same(run_native(compiled, batch), eager(compiled.model, batch))


@pytest.mark.parametrize("dropout", [nn.FeatureAlphaDropout(0.3), nn.AlphaDropout(0.3), nn.Dropout1d(0.3)])
def test_masks_of_features_couple_nothing(dropout: nn.Module) -> None:
    """Memory that is filled by a draw holds anything before."""
    assert judged(Along(lambda f: dropout(f[:, :, None])[:, :, 0]))[2] == ()


# --- orders that are undone -------------------------------------------------------------------------------------------

Undo = Callable[[Tensor, Tensor], Tensor]


class Routed(Classifier):
    """Tokens go to experts sorted by expert, and `undo` brings them back."""

    def __init__(self, undo: Undo, capacity: int | None = None) -> None:
        super().__init__(layers=1)
        self.undo, self.capacity = undo, capacity
        self.router = nn.Linear(WIDTH, 3)
        self.experts = nn.Parameter(torch.randn(3, WIDTH))

    def features(self, x: Tensor) -> Tensor:
        rows = self.layers[0](x).reshape(-1, WIDTH)
        expert, order = self.router(rows).argmax(dim=-1).sort(stable=True)
        done = torch.tanh(rows[order] * self.experts[expert])
        if self.capacity is not None:
            place = torch.arange(expert.shape[0]) - torch.searchsorted(expert, expert)
            done = torch.where((place < self.capacity)[:, None], done, 0.0)
        return (rows + self.undo(done, order)).reshape(-1, TOKENS, WIDTH).mean(dim=1)


def of_all(order: Tensor) -> Tensor:
    """Ranks of samples, written at the places of an order."""
    return torch.empty_like(order).scatter(0, order, torch.arange(order.shape[0]))[:, None]


def positions(rows: Tensor) -> Tensor:
    """The tokens' positions in their samples, along the tokens of a batch."""
    return torch.linspace(0, 1, TOKENS)[:, None].repeat(rows.shape[0] // TOKENS, 1)


UNDONE: dict[str, Undo] = {
    "argsort": lambda rows, order: rows[order.argsort()],
    "index_copy": lambda rows, order: torch.empty_like(rows).index_copy(0, order, rows),
    "scatter": lambda rows, order: torch.zeros_like(rows).scatter(0, order[:, None].expand_as(rows), rows),
    "index_add": lambda rows, order: torch.zeros_like(rows).index_add(0, order, rows),
    "scatter_reduce": lambda rows, order: torch.zeros_like(rows).scatter_reduce(
        0, order[:, None].expand_as(rows), rows, "sum"
    ),
    "take_along_dim": lambda rows, order: rows.take_along_dim(order.argsort()[:, None], 0),
    "embedding": lambda rows, order: F.embedding(order.argsort(), rows),
    "places": lambda rows, order: (rows + positions(rows)[order])[order.argsort()] - positions(rows),
    "ones": lambda rows, order: (rows * torch.ones(rows.shape[0])[order][:, None])[order.argsort()],
}


@pytest.mark.parametrize("undo", UNDONE)
def test_an_order_that_is_undone_couples_nothing(undo: str) -> None:
    assert judged(Routed(UNDONE[undo])) == ((), (), ())


@pytest.mark.parametrize(
    "model",
    [
        Routed(lambda rows, order: rows),
        Routed(UNDONE["argsort"], capacity=10),
        Along(lambda f: f.sort(0)[0]),
        Along(lambda f: torch.where(f > f.sort(0, descending=True)[0][2], f, 0.0)),
        Along(lambda f: f * (f.argsort(0).argsort(0) < 9)),
        Along(lambda f: f * (1 - 0.1 * (f.argsort(0).argsort(0) - 9).clamp(min=0))),
        Along(lambda f: f * torch.linspace(1.0, 1.0, 64)[f[:, 0].argsort().argsort()][:, None]),
        Along(lambda f: f * (torch.searchsorted(f[:, 0].contiguous().sort()[0], f[:, 0].contiguous()) < 9)[:, None]),
        Along(lambda f: torch.where(of_all(f[:, 0].argsort()) > 9, f, 2.0 * f)),
        Along(lambda f: f * torch.zeros_like(f[:, 0]).index_fill(0, f[:, 0].argsort()[:1], 0.0).add(1)[:, None]),
    ],
    ids=[
        "left",
        "with a capacity",
        "values",
        "the largest of the batch",
        "ranks below 9",
        "weights by ranks",
        "a table by ranks",
        "ranks among sorted values",
        "the inverse written",
        "written at the first",
    ],
)
def test_an_order_that_counts_couples_samples(model: nn.Module) -> None:
    rule, _, together = judged(model)
    assert not rule and together


def test_no_unit_ends_between_a_sort_and_its_inverse() -> None:
    torch.manual_seed(0)
    compiled = compile_model(Routed(UNDONE["argsort"]), vectors)
    assert len(compiled.program.units) > 1
    inside = {unit_of(node) for node in compiled.program.graph.graph.nodes if is_shuffled(node)}
    assert len(inside) == 1
    for samples in (1, 3):
        batch = vectors(samples, 5)
        assert_same(run_units(compiled, batch), eager(compiled.model, batch))


def masked_mean(scores: Tensor, y: Tensor) -> Tensor:
    """A mean over the labels that count, of which two samples may have equally many."""
    counts = (y > 0).float()
    return (F.cross_entropy(scores, y, reduction="none") * counts).sum() / counts.sum().clamp(min=1) * y.numel()


def per_positive(scores: Tensor, y: Tensor) -> Tensor:
    """What detectors divide by: positives, at least one."""
    positive = (y == 1).float()
    return ((1 - scores.softmax(-1)[:, 1]) ** 2 * positive).sum() / positive.sum().clamp(min=1) * y.numel()


def balance(scores: Tensor, y: Tensor) -> Tensor:
    """What routers add: the shares of classes times their mean probabilities."""
    shares = F.one_hot((scores + 9 * F.one_hot(y, CLASSES)).argmax(-1), CLASSES).float().mean(0)
    return F.cross_entropy(scores, y, reduction="sum") + (shares * scores.softmax(-1).mean(0)).sum() * y.numel()


def hard_ones(scores: Tensor, y: Tensor) -> Tensor:
    """Samples that are worse than the mean of their batch."""
    losses = F.cross_entropy(scores, y, reduction="none")
    return (losses * (losses > losses.detach().mean())).sum()


@pytest.mark.parametrize("loss", [masked_mean, per_positive, balance, hard_ones])
def test_sums_that_parts_of_one_kind_hide_are_found_by_others(loss: Callable[[Tensor, Tensor], Tensor]) -> None:
    class Net(Classifier):
        def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            return loss(self.head(self.features(x)), y), torch.ones_like(y).sum()

    torch.manual_seed(0)
    model, batch, more = Net(layers=1), vectors(2, 1), vectors(3, 2)
    batch["y"], more["y"] = torch.tensor([1, 1]), torch.tensor([0, 1, 2])
    program = front(model, vectors, 1)
    (reason,) = find_couplings(program, state_of(model), batch, more).reasons
    # A mean that is compared with samples is seen by the trial already.
    found = "aten.gt.Tensor in the model" if loss is hard_ones else "the loss of a batch is not the sum over its parts"
    assert reason.endswith(found)


def test_a_sum_stays_one_with_other_samples() -> None:
    model = Classifier(layers=1)
    assert find_couplings(front(model, vectors, 1), state_of(model), vectors(2, 1), vectors(3, 2)).reasons == ()
