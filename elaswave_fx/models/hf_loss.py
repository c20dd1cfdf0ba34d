"""Refusal, by name, of terms of transformers' own losses beyond the cross entropy that adapters sum.

Options from a user are refused by their names (`hf_config.refuse_loss_options`). For defaults and options of a folder
both losses are computed on a small sample, once per compiled program:

    output_router_logits=true   own loss 5.61, cross entropy of its logits 5.55   ->  ConfigError that names the options
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from elaswave_fx.errors import ConfigError
from elaswave_fx.models.hf import HFAdapter
from elaswave_fx.models.hf_config import acts_in_own_loss
from elaswave_fx.models.losses import token_loss_sum

_SWITCHES = ("output_router_logits", "output_aux_logits", "output_auxiliary_logits")
"""Keys that add a term to the loss by requesting its inputs."""

_TOLERANCE = 2e-5
SAMPLES, TOKENS = 2, 32


def check_own_loss(adapter: HFAdapter, batch: Mapping[str, Tensor]) -> None:
    """Compare the library's own loss with the cross entropy of the same logits on some samples of `batch`.

    Raises ConfigError if they differ by more than rounding. An architecture that has no loss of its own passes.
    """
    small = {name: tensor[:SAMPLES] for name, tensor in batch.items()}
    inputs, labels, predicted = adapter.own_loss_inputs(small, TOKENS)
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=()), kept(adapter):
            output = adapter.model(**inputs, labels=labels)
    except (TypeError, ValueError, RuntimeError, LookupError, AttributeError, AssertionError, NotImplementedError):
        return  # the architecture takes no labels, or cannot compute an unrequested output
    own, logits = getattr(output, "loss", None), getattr(output, "logits", None)
    if own is None or logits is None or logits.shape[:-1] != labels.shape:
        return
    expected = [_mean(logits, each) for each in (predicted, labels)]  # some shift no labels: the result is the same
    if not any(abs(float(own) - each) <= _TOLERANCE * max(1.0, abs(each)) for each in expected):
        raise ConfigError(_refusal(adapter.model.config, float(own), expected[0]))


def _mean(logits: Tensor, labels: Tensor) -> float:
    loss, count = token_loss_sum(logits, labels)
    return float(loss) / max(1, int(count))


@contextmanager
def kept(adapter: HFAdapter) -> Iterator[None]:
    """Restore what a forward pass may write: buffers, and the kind of problem, which the library stores."""
    config, buffers = vars(adapter.model.config), [(each, each.clone()) for each in adapter.buffers()]
    values = dict(config)
    try:
        yield
    finally:
        config.clear()
        config.update(values)
        for buffer, before in buffers:
            buffer.copy_(before)


def _refusal(config: Any, own: float, ours: float) -> str:
    values = config.to_dict()
    keys = [key for key in _SWITCHES if values.get(key)]
    keys += [key for key, value in values.items() if acts_in_own_loss(key, value)]
    cure = "train a model of your own (model._target_=…) that returns (loss sum, count)"
    if keys:
        named = ", ".join(f"{key}={values[key]}" for key in keys)
        off = next((key for key in keys if key in _SWITCHES), None)
        cure = (
            f"{named}: {f'set model.config.{off}=false' if off else 'set what is named here to 0 or null'}, or {cure}"
        )
    return (
        f"model.config: transformers' own loss of a {config.model_type} is {own:.6g} on a sample and the cross entropy "
        f"of its logits, which is what is trained here, {ours:.6g}; a way out: {cure}"
    )
