"""Refusal of parts that change one another: forward and the samples may not depend on what the dataset, the schedule,
the optimizer or forward leave behind. In a run these are in several processes, and forward is called in none.

    schedule: NOW["step"] = step         forward: loss * NOW["step"]            ->  CaptureError
    forward: self.stage.step += 1        dataset: crop(self.stage.step)         ->  DataError
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Mapping

import torch
from torch import nn

from elaswave_fx.build.program_key import computed_text
from elaswave_fx.config.keys import Config
from elaswave_fx.data import Source, load_batch
from elaswave_fx.data.dataset import Dataset, Sample, UserDataset
from elaswave_fx.data.global_draws import again
from elaswave_fx.data.own_counters import same_sample
from elaswave_fx.errors import CaptureError, ConfigError, DataError, ElasWaveError
from elaswave_fx.optim.learning_rate import make_schedule
from elaswave_fx.optim.optimizer import make_optimizer, step_hypers
from elaswave_fx.program.held_state import HeldState
from elaswave_fx.program.many_calls import ManyCalls, numbers_within_budget
from elaswave_fx.program.state_kept import state_kept

_OTHERS = "the schedule, the dataset or the optimizer"
_WAY_OUT = "a way out is a field of the samples, or a buffer that forward updates"


def refuse_shared_state(
    config: Config,
    source: Source,
    model: nn.Module,
    batch: dict[str, torch.Tensor],
    computed: str,
    take_step: Callable[[int], None],
) -> None:
    """Raise CaptureError where forward depends on what other parts change. `computed`: `computed_text` of before."""
    held = HeldState(model)
    try:
        take_step(config.steps - 1)
        load_batch(source.dataset, source.train, config.global_batch, 1)
        changes = held.changes()
        if changes and computed_text(model, batch) != computed:
            raise CaptureError(
                f"model: forward depends on {changes[0].title}, which {_OTHERS} changes: its program is captured once; "
                f"{_WAY_OUT}"
            )
    finally:
        held.restore()


def refuse_changes_in_steps(
    config: Config,
    source: Source,
    model: nn.Module,
    batch: dict[str, torch.Tensor],
    take_step: Callable[[int], None],
) -> None:
    """Call the user's parts and forward in turn many times, as in a loop of one process. Raise DataError where samples
    change, CaptureError where forward computes something else."""
    users = source.dataset.users
    if users is None and "target" not in (config.schedule.name, config.optimizer.name):
        return
    held = HeldState(model)
    try:
        with state_kept(model), contextlib.redirect_stdout(io.StringIO()):
            samples = {index: source.dataset.sample(index) for index in (0, len(source.dataset) // 3)}
            calls = ManyCalls(model, batch)
            for number in numbers_within_budget():
                take_step(number % config.steps)
                _refuse_other_samples(source.dataset, users, samples, number)
                if calls.differ():
                    raise CaptureError(
                        f"model: forward computes something else after {number} steps with the same samples and "
                        f"parameters: it depends on what {_OTHERS} changes, or on how often it is called, but its "
                        f"program is captured once; {_WAY_OUT}"
                    )
    finally:
        held.restore()


def make_stepper(config: Config) -> Callable[[int], None]:
    """A function that asks the schedule and the optimizer for their values at a step."""
    schedule, optimizer = make_schedule(config.schedule, config.steps), make_optimizer(config.optimizer)

    def take_step(step: int) -> None:
        try:
            step_hypers(optimizer, step, config.optimizer.lr * schedule(step))
        except ElasWaveError:
            raise
        except Exception as error:
            raise ConfigError(
                f"schedule={config.schedule.name}, optimizer={config.optimizer.name}: fail at step {step}: "
                f"{type(error).__name__}: {' '.join(str(error).split())}"
            ) from error

    return take_step


def _refuse_other_samples(
    dataset: Dataset, users: UserDataset | None, samples: Mapping[int, Sample], steps: int
) -> None:
    """Read samples twice, and raise DataError if one is not as it was."""
    for index in (*samples, *samples):
        if not same_sample(samples[index], dataset.sample(index)):
            place, cure = (users.place, users.cure) if users is not None else ("data", "a copy of what others change")
            raise DataError(
                f"{place}: sample {index} is another one after {steps} steps: it depends on how often it is read, or "
                f"on what forward, the schedule or the optimizer changes, {again(cure)}"
            )
