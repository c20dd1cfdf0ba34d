"""Check that a next-token architecture does not see the tokens it predicts: it would learn to copy, and its loss would
mean nothing.

xlnet, 16 tokens, the last 8 of them exchanged   ->  logits of the first 8 are others: ConfigError
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from elaswave_fx.errors import ConfigError
from elaswave_fx.models.hf import CausalLM, HFAdapter, Seq2SeqLM
from elaswave_fx.models.hf_loss import SAMPLES, TOKENS, kept

_TOLERANCE = 1e-4
"""Fraction of the largest logit, above which a difference is not rounding."""


def check_causal(adapter: HFAdapter, batch: Mapping[str, Tensor]) -> None:
    """Compare the logits of the first half of some tokens of `batch` with those for another second half.

    Raises ConfigError if they differ. Architectures that cannot run so pass.
    """
    if not isinstance(adapter, CausalLM | Seq2SeqLM):
        return
    inputs, _, _ = adapter.own_loss_inputs({name: tensor[:SAMPLES] for name, tensor in batch.items()}, TOKENS)
    read = "decoder_input_ids" if isinstance(adapter, Seq2SeqLM) else "input_ids"
    half = inputs[read].shape[1] // 2
    if not half:
        return
    head, tail = inputs[read].tensor_split([half], dim=1)
    other = torch.cat((head, torch.where(tail > 0, tail - 1, 1)), dim=1)
    was_training = adapter.training
    adapter.eval()
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=()), kept(adapter):
            logits = []
            for tokens in (inputs[read], other):
                torch.manual_seed(0)
                logits.append(adapter.model(**{**inputs, read: tokens}).logits[:, :half].float())
    except (TypeError, ValueError, RuntimeError, LookupError, AttributeError, AssertionError, NotImplementedError):
        return
    finally:
        adapter.train(was_training)
    if logits[0].shape != logits[1].shape:
        return
    apart, size = float((logits[0] - logits[1]).abs().max()), float(logits[0].abs().max())
    if apart > _TOLERANCE * size:
        config = adapter.model.config
        cure = "nearest valid: an architecture with a causal mask"
        if getattr(config, "causal", None) is False:
            cure = "nearest valid: model.config.causal=true"
        raise ConfigError(
            f"model.name={config.model_type}: sees the tokens that it is to predict: what it gives at a token depends "
            f"on those behind it; {cure}"
        )
