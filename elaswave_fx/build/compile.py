"""Compilation of a model to an artifact: captured, checked against eager, through every pass, lowered; and the cost of
its units.

    compile_model(config, model, batches)   ->  (Artifact, constants)
    measure(config, model, folder, batch)   ->  {"block": (0.001, 0.002, 0.001), …} seconds per sample

Separate from builder.py, so that a cached program starts without torch.export and the passes.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from elaswave_fx.build.check_units import check_units
from elaswave_fx.build.configured_passes import make_pipeline
from elaswave_fx.build.unit_sequence import UnitSequence, measure_kinds
from elaswave_fx.config.keys import Config
from elaswave_fx.devices import make_device
from elaswave_fx.errors import CaptureError, ConfigError
from elaswave_fx.models.hf import HFAdapter
from elaswave_fx.models.hf_causal import check_causal
from elaswave_fx.models.hf_loss import check_own_loss
from elaswave_fx.models.losses import check_output
from elaswave_fx.optim.optimizer import GROUPS, group_of
from elaswave_fx.passes.check_evaluation import evaluation_agrees
from elaswave_fx.passes.lower import lower
from elaswave_fx.passes.normalize import Normalize
from elaswave_fx.passes.pipeline import is_users, run_passes
from elaswave_fx.program.artifact import Artifact, Seconds
from elaswave_fx.program.autocast import run_under_autocast
from elaswave_fx.program.batch_run import count_samples
from elaswave_fx.program.capture import TRACE_ERRORS, capture, failing_line
from elaswave_fx.program.check_against_eager import cure_of
from elaswave_fx.program.check_gradients import check_gradients
from elaswave_fx.program.gradient_hooks import note_of_hooks_on_saved_tensors
from elaswave_fx.program.held_state import python_state_kept
from elaswave_fx.program.ir import ParamSpec
from elaswave_fx.program.many_calls import ManyCalls
from elaswave_fx.program.operators import defining_modules
from elaswave_fx.program.same_branches import note_of_compiled_branch
from elaswave_fx.program.state_kept import buffer_sizes, refuse_other_buffers, state_kept
from elaswave_fx.program.value_checks import note_of_unchecked

_MOST_TRIED = 256
"""Samples at once, for a refusal's cure."""

State = Mapping[str, torch.Tensor]
Batch = dict[str, torch.Tensor]


def compile_model(
    config: Config,
    model: nn.Module,
    batches: tuple[Batch, Batch],
    dump: Path | None = None,
    calls: ManyCalls | None = None,
) -> tuple[Artifact, State]:
    """Capture, check, run every pass, lower. Return the artifact, with notes from trial runs, and the constants it
    reads. `calls`: the model's first call, in the precision of training; None if there was none.

    Raises ConfigError for invalid passes before anything is captured.
    """
    pipeline = make_pipeline(config.passes)
    is_adapted = isinstance(model, HFAdapter)
    if is_adapted:
        _refuse_unknown_fields(config, model, batches[0])
        with python_state_kept(model):
            _check_forward(model, batches[0], config.global_batch)
            check_causal(model, batches[0])
            check_own_loss(model, batches[0])  # in full precision, which separates losses better
    notes_of = (note_of_compiled_branch, note_of_unchecked, note_of_hooks_on_saved_tensors)
    notes = tuple(line for note_of in notes_of for line in note_of(model, batches[0]))
    if config.precision == "bf16":
        run_under_autocast(model)
    if not is_adapted:
        with python_state_kept(model):
            _check_forward(model, batches[0], config.global_batch)
    program = capture(model, batches, config.parallel.granule, calls)
    part, other_part = (
        batch if program.dynamic_batch else {name: tensor[: program.granule] for name, tensor in batch.items()}
        for batch in batches
    )
    with python_state_kept(model):
        notes += check_gradients(model, Normalize().apply(program), part, other_part)
        program, report = run_passes(program, pipeline.passes, dump)
        exact = evaluation_agrees(program, model, program.example.state, program.example.batch)
    artifact = lower(program, _group_rule(config), exact)
    check_units(program, artifact, _joined(batches) if program.dynamic_batch else part)
    own = [step for step in pipeline.passes if is_users(step)]
    modules = defining_modules(artifact, map(type, (*model.modules(), *own)))
    artifact = replace(
        artifact, modules=modules, pipeline=str(pipeline), seconds=report.seconds, notes=(*notes, *artifact.notes)
    )
    return artifact, program.tensors


def _joined(batches: tuple[Batch, Batch]) -> Batch:
    return {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}


def _refuse_unknown_fields(config: Config, model: nn.Module, batch: Batch) -> None:
    """Refuse columns of a tokenizer that an adapter does not take."""
    known = list(inspect.signature(model.forward).parameters)
    for name in batch:
        if name not in known:
            raise ConfigError(
                f"data.fields: {name} is no input of model=hf, which takes {', '.join(known)} "
                f"({type(model).__name__}, model.task={config.model.task or 'null'}); leave it out, or have "
                "data.transform give it one of these names"
            )


def measure(config: Config, model: nn.Module, folder: Path, batch: Batch) -> dict[str, Seconds]:
    """Seconds per sample of every kind of unit, in a process set up as a worker is."""
    make_device(config.device).set_up(threads=1)
    artifact, constants = Artifact.load(folder), Artifact.load_constants(folder)
    units = UnitSequence.of(artifact, constants, {**dict(model.named_parameters()), **dict(model.named_buffers())})
    part = {name: tensor[: max(1, config.parallel.granule)] for name, tensor in batch.items()}
    return measure_kinds(units, artifact, part)


def _check_forward(model: nn.Module, batch: Batch, of_a_step: int) -> None:
    """Refuse a model that does not run on the data, or does not return a loss sum and a count. `of_a_step`: samples."""
    try:
        with torch.enable_grad(), state_kept(model):  # forward itself may take gradients
            sizes = buffer_sizes(model)
            output = model(**{name: tensor.clone() for name, tensor in batch.items()})
            refuse_other_buffers(model, sizes)
    except TRACE_ERRORS as error:
        reason = f"{type(error).__name__}: {' '.join(str(error).split()).rstrip('.')}"
        samples = count_samples(batch)
        fitting = _fitting_number(model, batch, of_a_step)
        if fitting is not None:
            granule = "" if fitting == 1 else f", or parallel.granule={fitting}, with which it gets all of a step"
            raise CaptureError(
                f"model: {type(model).__name__} runs on {fitting} and not on {samples} samples{failing_line(error)}: "
                f"{reason}; forward takes any number of granules; a way out is x.shape[0] where it fixes the number of "
                f"samples{granule}"
            ) from error
        fields = ", ".join(f"{name} {list(each.shape)}" for name, each in batch.items())
        takes = "forward takes them by these names, samples first, a multiple of parallel.granule at once"
        raise CaptureError(
            f"model: {type(model).__name__} does not run{failing_line(error)} on the fields of the data, {fields}: "
            f"{reason}; {cure_of(reason, takes)}"
        ) from error
    check_output(output)


def _fitting_number(model: nn.Module, batch: Batch, of_a_step: int) -> int | None:
    """The number of samples on which a model runs that does not run on `batch`: those of a step, if they are few, or
    single ones."""
    samples = range(count_samples(batch))
    repeated = torch.arange(min(of_a_step, _MOST_TRIED)) % len(samples)
    whole = {name: tensor[repeated] for name, tensor in batch.items()}
    if len(samples) < of_a_step <= _MOST_TRIED and _runs(model, whole):
        return of_a_step
    single = all(_runs(model, {name: tensor[at : at + 1] for name, tensor in batch.items()}) for at in samples)
    return 1 if single else None


def _runs(model: nn.Module, batch: Batch) -> bool:
    try:
        with state_kept(model):
            model(**{name: tensor.clone() for name, tensor in batch.items()})
    except TRACE_ERRORS:
        return False
    return True


def _group_rule(config: Config) -> Any:
    def rule(name: str, spec: ParamSpec) -> int:
        return GROUPS.index(group_of(len(spec.shape), config.optimizer.no_decay))

    return rule
