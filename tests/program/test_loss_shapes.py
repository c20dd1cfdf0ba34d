"""Losses with a value for each sample have the samples in their shape."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from elaswave_fx.program.ir import calls, value_of
from tests.passes.compiled import front
from tests.passes.models import CLASSES, Classifier, vectors

LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "cross entropy": lambda s, y: F.cross_entropy(s, y, reduction="none"),
    "smoothed cross entropy": lambda s, y: F.cross_entropy(s, y, reduction="none", label_smoothing=0.1),
    "negative likelihood": lambda s, y: F.nll_loss(s.log_softmax(-1), y, reduction="none"),
    "binary": lambda s, y: F.binary_cross_entropy_with_logits(s[:, 0], (y > 0).float(), reduction="none"),
    "Kullback-Leibler": lambda s, y: F.kl_div(s.log_softmax(-1), F.one_hot(y, CLASSES) * 1.0, reduction="none").sum(1),
    "margin": lambda s, y: F.triplet_margin_loss(s, s.roll(1, -1), s.flip(-1) + y[:, None], reduction="none"),
    "ranking": lambda s, y: F.margin_ranking_loss(s[:, 0], s[:, 1], 2.0 * (y > 0) - 1, margin=0.5, reduction="none"),
    "hinge": lambda s, y: F.hinge_embedding_loss(s[:, 0], 2.0 * (y > 0) - 1, margin=0.5, reduction="none"),
    "several": lambda s, y: torch.stack(
        [F.cross_entropy(s, y, reduction="none"), F.mse_loss(s[:, 0], y.float(), reduction="none")], 1
    ).sum(1),
    "smooth": lambda s, y: F.smooth_l1_loss(s[:, 0], y.float(), reduction="none"),
}


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_of_every_sample_has_the_samples_in_its_shape(name: str) -> None:
    class Net(Classifier):
        def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            return (LOSSES[name](self.head(self.features(x)), y) * (1 + y)).sum(), torch.ones_like(y).sum()

    graph = front(Net(layers=1), vectors, 1).graph.graph
    product = next(node for node in calls(graph) if str(node.target) == "aten.mul.Tensor" and value_of(node).dim() == 1
                   and any(user.target == torch.ops.aten.sum.default for user in node.users))  # fmt: skip
    assert value_of(product.all_input_nodes[0]).dim() == 1
