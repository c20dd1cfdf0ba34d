"""The model of a configuration, with its initial weights.

model = make_model(config, dataset)     # seeded, fp32
set_to_train(model)                     ->  ("in training mode, as model.train() sets it: encoder; …",)
initial_state(model)                    ->  {"encoder.weight": tensor, …}
"""

from __future__ import annotations

import re

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from elaswave_fx.config.keys import Config
from elaswave_fx.data.dataset import Dataset
from elaswave_fx.errors import CaptureError, ConfigError
from elaswave_fx.models.build import build_model
from elaswave_fx.models.hf_config import task_of
from elaswave_fx.models.weights import unused_tensors
from elaswave_fx.program.dense import refuse_not_dense
from elaswave_fx.program.shared_storage import refuse_shared_storage

_NO_ROOM = re.compile("can't allocate memory|Storage size calculation overflowed|integer multiplication overflow")
"""torch's messages for a tensor that is too large."""


def make_model(config: Config, dataset: Dataset) -> nn.Module:
    """The model with seeded initial weights. Raises ConfigError or CaptureError if it cannot be made or trained."""
    image_shape = seq_len = None
    sample = dataset.sample(0)
    if "input_ids" in sample and sample["input_ids"].dim():
        seq_len = len(sample["input_ids"])
    if "image" in sample and sample["image"].dim() == 3:
        image_shape = tuple(sample["image"].shape)
    try:
        model = build_model(
            config.model,
            vocab_size=dataset.vocab_size,
            seq_len=seq_len,
            seed=config.seed,
            image_shape=image_shape,  # type: ignore[arg-type]
            classes=dataset.classes,
            tokenizer=dataset.tokenizer.kind if dataset.tokenizer is not None else None,
            masked=dataset.masked,
            init_from=config.init_from,
        )
    except (MemoryError, RuntimeError) as error:
        if not isinstance(error, MemoryError) and not _NO_ROOM.search(str(error)):
            raise
        raise ConfigError(
            f"model={config.model.kind}: there is no memory for it ({str(error).partition(chr(10))[0]})"
        ) from error
    lazy = [name for name, tensor in (*model.named_parameters(), *model.named_buffers()) if is_lazy(tensor)]
    if lazy:
        raise ConfigError(
            f"model={config.model.kind}: {lazy[0]} has no shape yet, as in a LazyLinear; give its sizes, or call the "
            "module once at the end of its constructor"
        )
    _refuse_own_parameters(model)
    _refuse_unkept_values(model)
    refuse_shared_storage(model)
    return model


def initial_state(model: nn.Module) -> dict[str, torch.Tensor]:
    """Every logical parameter (fp32) and buffer by its first name."""
    params: dict[str, torch.Tensor] = {}
    storages: set[int] = set()
    for name, parameter in model.named_parameters():
        values = parameter.detach().float().contiguous()
        storage = values.untyped_storage().data_ptr()  # Frozen parameters may share one; files need separate tensors.
        params[name] = values.clone() if storage in storages else values
        storages.add(storage)
    return params | {name: b.detach().clone().contiguous() for name, b in model.named_buffers()}


def set_to_train(model: nn.Module) -> tuple[str, ...]:
    """Put a model in training mode as loops do. Return the modules that its constructor had left in evaluation mode."""
    quiet = [name for name, module in model.named_modules() if name and not module.training]
    model.train()
    awake = [name for name in quiet if model.get_submodule(name).training]
    if not awake:
        return ()
    names = f"{', '.join(awake[:3])}{f' and {len(awake) - 3} more' if len(awake) > 3 else ''}"
    return (f"in training mode, as model.train() sets it: {names}; a train() of the model's own keeps them evaluating",)


def notes_of(config: Config, model: nn.Module) -> tuple[str, ...]:
    """Lines on what of a model is trained or kept otherwise than its code suggests."""
    notes = (*_other_precisions(model), *_extra_states(model))
    if config.model.kind == "hf" and config.model.task is None:
        task = task_of(config.model, config.init_from)
        notes += (f"model: {config.model.name or 'the one of init_from'} is trained as {task} (model.task)",)
    unused = unused_tensors(model)
    if unused:
        names = ", ".join(unused[:2]) + (f" and {len(unused) - 2} more" if len(unused) > 2 else "")
        notes += (f"init_from: {names} are ignored: the model has no such module",)
    return notes


def _refuse_own_parameters(model: nn.Module) -> None:
    """Raise CaptureError if methods of the model's own give other parameters than its modules have: loops train those
    that parameters() gives."""
    held = {id(each) for module in model.modules() for each in module._parameters.values() if each is not None}
    for name, given in (
        ("parameters", model.parameters()),
        ("named_parameters", dict(model.named_parameters()).values()),
    ):
        found = {id(each) for each in given}
        if found != held:
            raise CaptureError(
                f"model: {name}() of {type(model).__name__} gives {len(found & held)} of its {len(held)} parameters; a "
                "way out is torch's own method, with requires_grad_(False) for those that are not trained"
            )


def _refuse_unkept_values(model: nn.Module) -> None:
    """Raise CaptureError for parameters and buffers that are not dense, or that fp32 values do not hold."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        refuse_not_dense(name, tensor)
    for name, parameter in model.named_parameters():
        if parameter.is_complex():
            raise CaptureError(
                f"model: the parameter {name} is complex, and parameters are kept in fp32; a way out is a real one "
                "with torch.view_as_real() of it, read by torch.view_as_complex() in forward, or a buffer if it is "
                "not trained"
            )
        if not parameter.is_floating_point() and not torch.equal(parameter, parameter.float().to(parameter.dtype)):
            raise CaptureError(
                f"model: the parameter {name} ({parameter.dtype}) has values that fp32, in which parameters are kept, "
                "does not hold exactly; a way out is to make it a buffer"
            )


def _other_precisions(model: nn.Module) -> tuple[str, ...]:
    """A line for each type of trained parameters in double or half precision, which are kept in single."""
    names: dict[torch.dtype, list[str]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter.is_floating_point() and parameter.dtype != torch.float32:
            names.setdefault(parameter.dtype, []).append(name)
    return tuple(
        f"model: {found[0]}{f' and {len(found) - 1} more' if len(found) > 1 else ''} in {str(dtype)[6:]}: kept and "
        "updated in fp32, computed with as it is"
        for dtype, found in names.items()
    )


def _extra_states(model: nn.Module) -> tuple[str, ...]:
    """A line on modules with state that is no tensor, which checkpoints leave out."""
    own = [each for each in model.modules() if type(each).get_extra_state is not nn.Module.get_extra_state]
    more = f" and {len(own) - 1} more" if len(own) > 1 else ""
    return (f"model: checkpoints leave out get_extra_state() of {type(own[0]).__name__}{more}",) if own else ()
