"""Names of parameters and buffers in a model's own state dict, as used in checkpoints.

state_dict_names(model)   ->  {"wte.weight": "wte.weight", "lm_head.weight": "wte.weight"}
"""

from __future__ import annotations

import torch
from torch import nn

from elaswave_fx.errors import ConfigError


def state_dict_names(model: nn.Module) -> dict[str, str]:
    """Key of the model's own state dict -> logical parameter or buffer; a tied tensor has several keys. Raise
    ConfigError where a user's state_dict fails."""
    try:
        stored = model.state_dict()
    except Exception as error:  # the user's code may fail in any way
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise ConfigError(
            f"model: state_dict() of {type(model).__name__} fails ({reason}), and checkpoints have its names; a way "
            "out is to leave it as torch has it"
        ) from error
    # Match by memory: the tensors are detached, and a user's state_dict may take no keep_vars.
    names = {_memory(tensor): name for name, tensor in (*model.named_parameters(), *model.named_buffers())}
    tensors = {key: value for key, value in stored.items() if isinstance(value, torch.Tensor)}
    return {key: names[_memory(value)] for key, value in tensors.items() if _memory(value) in names}


def _memory(tensor: torch.Tensor) -> tuple[object, ...]:
    return tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride()
