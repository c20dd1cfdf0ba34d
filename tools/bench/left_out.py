"""A rank's work when a loss takes samples with it: from some step on, those of a rank count for nothing.

It stands for replicas that are lost while the others go on with a smaller batch, as TorchFT does: gradients, loss and
what they are divided by come from the samples of the other ranks. Nobody dies, so nothing else is another: with
`lab.policy=smaller_batch`, which loses ranks, held-out batches would have fewer samples too, and their losses could
not be compared.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from elaswave_fx.config.faults import Fault
from elaswave_fx.config.keys import Config
from elaswave_fx.devices import make_device
from elaswave_fx.launch.job import WorkerContext
from elaswave_fx.models.losses import IGNORED_LABEL
from elaswave_fx.worker.feed import InputFeed, StepInputs
from elaswave_fx.worker.loop import Training
from elaswave_fx.worker.worker import Worker, set_up


class LeftOut(InputFeed):
    """The inputs of a rank's tile, whose labels are all ignored from step `since` on."""

    def __init__(self, worker: Worker, since: int) -> None:
        super().__init__(worker.config, worker.artifact, worker.plan, worker.rank, worker.source, first_step=0)
        self._since = since

    def next_batch(self, step: int) -> StepInputs:
        """What training step `step` reads."""
        fed = super().next_batch(step)
        if step < self._since:
            return fed
        return replace(fed, inputs={**fed.inputs, "labels": torch.full_like(fed.inputs["labels"], IGNORED_LABEL)})


def train_without(failures: Sequence[Fault], config: Config, context: WorkerContext) -> Mapping[str, Any] | None:
    """Train as `run_worker` does; the samples of a rank are left out from the step in which it would have failed."""
    device = make_device(config.device)
    device.set_up(threads=1)
    worker = set_up(config, context)
    for failure in failures:
        if failure.rank == worker.rank:
            assert worker.feed is not None
            worker.feed.close()
            worker.feed = LeftOut(worker, failure.step)
    return Training(worker, device).run()
