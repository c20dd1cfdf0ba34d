"""Fill a Hugging Face model with the weights of a folder (safetensors, one file or shards with an index).

transformers itself reads the files: it knows prefixes, older names, merged expert tensors and ties of every
architecture. This module decides whether they fit: every tensor of the model comes from the folder, every tensor of the
folder has a place in the model, or is of a part that the model has not (another task's head), and shapes agree.
Anything else is refused, with names:

    init_from=DIR: does not fit the model: the folder lacks head.weight; shapes differ at embed.weight (folder 300x8,
    model 97x8)
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from elaswave_fx.errors import ConfigError
from elaswave_fx.models.hf import HFAdapter

_NAMES_SHOWN = 4


_unused: WeakKeyDictionary[nn.Module, tuple[str, ...]] = WeakKeyDictionary()
"""Not an attribute of the model, on which its program depends."""


def unused_tensors(module: nn.Module) -> tuple[str, ...]:
    """Tensors of the folder whose weights the model has, for which it has no part."""
    return _unused.get(module, ())


def load_hf_weights(module: nn.Module, folder: str | Path) -> None:
    """Overwrite parameters and buffers of `module`, an `HFAdapter`, in place; ties stay ties.

    Raises `ConfigError` if the folder has no safetensors or does not fit. `module` is unchanged then.
    """
    if not isinstance(module, HFAdapter):
        raise ConfigError(f"init_from={folder}: needs model=hf, the model is a {type(module).__name__}")
    if not any(Path(folder).glob("*.safetensors")):
        raise ConfigError(f"init_from={folder}: holds no .safetensors file")
    from safetensors import SafetensorError

    try:
        loaded, report = type(module.model).from_pretrained(
            folder,
            config=module.model.config,
            dtype=torch.float32,
            attn_implementation=module.model.config._attn_implementation,
            local_files_only=True,
            use_safetensors=True,
            ignore_mismatched_sizes=True,  # shapes are reported together with names, below
            output_loading_info=True,
        )
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise ConfigError(f"init_from={folder}: cannot be read: {' '.join(str(error).split())}") from error
    other_parts = sorted(name for name in report["unexpected_keys"] if _is_of_other_part(name, module.model))
    differences = _differences({**report, "unexpected_keys": set(report["unexpected_keys"]) - {*other_parts}})
    if differences:
        raise ConfigError(f"init_from={folder}: does not fit the model: {'; '.join(differences)}")
    untied = _untied(loaded, module.model)
    if untied:
        raise ConfigError(
            f"init_from={folder}: has {untied[0]} and {untied[1]} with different values, and the model ties them; "
            "nearest valid: model.config.tie_word_embeddings=false"
        )
    _copy(loaded, module.model)
    _unused[module] = tuple(other_parts)


def _is_of_other_part(name: str, model: nn.Module) -> bool:
    """Whether a tensor is of a named module that the model has not, such as another head, and not of a numbered layer
    or a part of one. A missing tensor, such as a bias, is of a module that is there."""
    module, parts = model, name.split(".")
    for at, part in enumerate(parts[:-1]):
        child = module._modules.get(part)
        if child is None:
            return not any(each.isdigit() for each in parts[: at + 1])
        module = child
    return False


def _untied(source: nn.Module, target: nn.Module) -> tuple[str, str] | None:
    """Two names of one tensor of `target` under which `source` has different values; None if there are none."""
    values = {**dict(source.named_parameters(remove_duplicate=False)), **dict(source.named_buffers())}
    first: dict[int, str] = {}
    for name, tensor in target.named_parameters(remove_duplicate=False):
        other = first.setdefault(id(tensor), name)
        if not torch.equal(values[name], values[other]):
            return name, other
    return None


def _differences(report: dict[str, Any]) -> list[str]:
    differences = []
    if report["missing_keys"]:
        differences.append(f"the folder lacks {_listed(report['missing_keys'])}")
    if report["unexpected_keys"]:
        differences.append(f"the model has no {_listed(report['unexpected_keys'])}")
    if report["mismatched_keys"]:
        shapes = (
            f"{name} (folder {_shape(theirs)}, model {_shape(ours)})"
            for name, theirs, ours in report["mismatched_keys"]
        )
        differences.append(f"shapes differ at {_listed(shapes)}")
    return differences


def _listed(names: Iterable[str]) -> str:
    ordered = sorted(names)
    more = len(ordered) - _NAMES_SHOWN
    return ", ".join(ordered[:_NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")


def _shape(shape: Iterable[int]) -> str:
    return "x".join(str(size) for size in shape)


def _copy(source: nn.Module, target: nn.Module) -> None:
    """Copy in place instead of replacing the module: names and ties of `target` are captured and checked."""
    values = {**dict(source.named_parameters()), **dict(source.named_buffers())}
    with torch.no_grad():
        for name, tensor in (*target.named_parameters(), *target.named_buffers()):
            tensor.copy_(values[name])
