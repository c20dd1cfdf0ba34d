"""Real steps of one kind of module in this process: built as a job is, run by engines, ranks as threads.

losses_of(config, folder, stages=2)  ->  losses of the steps
plain(config)                        ->  those of one PyTorch process on the same samples
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch

from elaswave_fx import _native
from elaswave_fx.build.builder import build
from elaswave_fx.build.make_model import make_model
from elaswave_fx.build.optimizer_program import update_program
from elaswave_fx.checkpoint.initial_state import InitialState
from elaswave_fx.config.compose import load_config
from elaswave_fx.config.keys import Config
from elaswave_fx.data import load_batch, open_source
from elaswave_fx.optim.optimizer import make_optimizer, step_hypers
from elaswave_fx.passes.assign_stages import AssignStages
from elaswave_fx.plan.plan import Plan
from elaswave_fx.plan.work.options import PlanOptions
from elaswave_fx.plan.work.topology import Rank, local_topology
from elaswave_fx.worker.engine import RankEngine, engine_job, load_artifact
from elaswave_fx.worker.feed import InputFeed
from tests.plan.real_steps import TIMEOUT_S, by_rank
from tests.zoo.kinds import KINDS, SAMPLES

STEPS = 3
RATE = 0.1


def config_of(kind: str, *words: str) -> Config:
    """Plain gradient descent over all samples in every step."""
    return load_config([
        "model._target_=tests.zoo.kinds.net", f"+model.module='{kind}'", "data._target_=tests.zoo.kinds.Samples",
        f"+data.module='{kind}'", f"steps={STEPS}", f"global_batch={SAMPLES}",
        f"parallel.granule={KINDS[kind].granule}", "schedule=constant", "clip_norm=null", "optimizer=sgd",
        f"optimizer.lr={RATE}",
        "optimizer.momentum=0.0", "optimizer.weight_decay=0.0", *words,
    ])  # fmt: skip


class Trial:
    """A kind, built; `losses` runs it."""

    def __init__(self, config: Config, folder: Path) -> None:
        torch.set_num_threads(1)
        self._config = config
        built = build(config, folder)
        assert built.state is not None
        self._source, self._initial = built.source, InitialState(built.state)
        self.artifact, self._constants = load_artifact(built.folder)
        self._update = update_program(config)

    def losses(self, stages: int, micro_batch: int) -> list[float]:
        """The mean of each step, computed by so many ranks in a row."""
        topology = local_topology(stages, stages, 1 << 30)
        assign = AssignStages(PlanOptions(SAMPLES, self.artifact.granule, micro_batch), dp=1, pp=stages, replicas=0)
        plan = assign.apply(self.artifact, topology, state_tensors=0)
        return by_rank(plan, partial(self._steps, plan))[plan.ranks[0]]

    def _steps(self, plan: Plan, rank: Rank, endpoint: _native.Endpoint | None) -> list[float]:
        optimizer = make_optimizer(self._config.optimizer)
        engine = RankEngine(
            engine_job(self._config, self.artifact), self._constants, self._initial, rank, endpoint, optimizer,
            self._update, plan, 0,
        )  # fmt: skip
        feed = InputFeed(self._config, self.artifact, plan, rank, self._source, 0)
        try:
            return [self._step(engine, feed, step) for step in range(STEPS)]
        finally:
            feed.close()

    def _step(self, engine: RankEngine, feed: InputFeed, step: int) -> float:
        fed = feed.next_batch(step)
        options = _native.StepOptions(TIMEOUT_S, None, content=fed.content)
        hypers = step_hypers(make_optimizer(self._config.optimizer), step, RATE)
        result = engine.native.step(step, fed.inputs, hypers, options)
        return float(result.loss) / float(result.count)


def plain(config: Config) -> list[float]:
    """Losses of the same training by one PyTorch process."""
    source = open_source(config)
    model = make_model(config, source.dataset)
    optimizer = torch.optim.SGD([each for each in model.parameters() if each.requires_grad], lr=RATE)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss, count = model(**load_batch(source.dataset, source.train, step * SAMPLES, SAMPLES))
        (loss / count).backward()
        optimizer.step()
        losses.append(float((loss / count).detach()))
    return losses
