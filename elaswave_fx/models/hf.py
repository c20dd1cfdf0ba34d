"""Adapters that make any Hugging Face architecture return (loss sum, count).

The architecture's own loss is a mean, so it is not used: an adapter takes the logits and sums the cross entropy itself.
One adapter per task; each names its inputs as the data names them:

    causal_lm, masked_lm, seq2seq_lm  forward(input_ids, labels)  int64 (batch, tokens), labels are the next tokens
    image_classification              forward(image, label)       float (batch, channels, height, width), int64 (batch,)

Token adapters also take an `attention_mask`, int64 (batch, tokens), 1: a token, 0: padding, for samples of different
lengths. `labels` are -100 where nothing is predicted, and only the others are counted.

A model is built from its configuration alone (`build_hf`); `weights.py` fills it from a folder.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from elaswave_fx.errors import ConfigError
from elaswave_fx.models.hf_config import Resolved, refuse_loss_options, resolve
from elaswave_fx.models.losses import IGNORED_LABEL, token_loss_sum
from elaswave_fx.models.sizes import DataSizes

MASKED_SHARE = 0.15


class HFAdapter(nn.Module):
    """Base of the adapters; `model` is the architecture, whose `config` is complete."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The state dict of the architecture, under its own names."""
        return self.model.state_dict(*args, **kwargs)

    def own_loss_inputs(self, batch: Mapping[str, Tensor], tokens: int) -> tuple[dict[str, Tensor], Tensor, Tensor]:
        """The architecture's inputs of at most `tokens` tokens of `batch`, labels for its own loss, and the same labels
        at this adapter's positions."""
        raise NotImplementedError


def _read(input_ids: Tensor, attention_mask: Tensor | None) -> dict[str, Tensor]:
    """Inputs; a mask only if the data has one, as not every architecture takes it."""
    return {"input_ids": input_ids} | ({} if attention_mask is None else {"attention_mask": attention_mask})


class CausalLM(HFAdapter):
    """Predict the next token."""

    def forward(self, input_ids: Tensor, labels: Tensor, attention_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """(batch, tokens) int64 each, to (loss sum fp32, count int64)."""
        return token_loss_sum(self.model(**_read(input_ids, attention_mask)).logits, labels)

    def own_loss_inputs(self, batch: Mapping[str, Tensor], tokens: int) -> tuple[dict[str, Tensor], Tensor, Tensor]:
        ids = batch["input_ids"][:, :tokens]
        following = torch.cat((ids[:, 1:], torch.full_like(ids[:, :1], IGNORED_LABEL)), dim=1)
        return {"input_ids": ids}, ids, following


class MaskedLM(HFAdapter):
    """Predict the tokens that a draw replaced by `mask_token` (Devlin et al. 2019, every chosen token is replaced);
    None: the data is masked, and `labels` are predicted as given."""

    def __init__(self, model: Any, mask_token: int | None) -> None:
        super().__init__(model)
        self.mask_token = mask_token

    def forward(self, input_ids: Tensor, labels: Tensor, attention_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """(batch, tokens) int64 each, to (loss sum fp32, count int64). Where this adapter masks, only -100 of `labels`
        is used, for no loss there. Tokens outside `attention_mask` have no loss either."""
        if self.mask_token is None:
            return token_loss_sum(self.model(**_read(input_ids, attention_mask)).logits, labels)
        drawn = torch.rand(input_ids.shape, device=input_ids.device) < MASKED_SHARE
        masked = drawn & (labels != IGNORED_LABEL)
        if attention_mask is not None:
            masked = masked & (attention_mask != 0)
        shown = input_ids.masked_fill(masked, self.mask_token)
        logits = self.model(**_read(shown, attention_mask)).logits
        return token_loss_sum(logits, input_ids.masked_fill(~masked, IGNORED_LABEL))

    def own_loss_inputs(self, batch: Mapping[str, Tensor], tokens: int) -> tuple[dict[str, Tensor], Tensor, Tensor]:
        ids = batch["input_ids"][:, :tokens]
        return {"input_ids": ids}, ids, ids


class Seq2SeqLM(HFAdapter):
    """Encode the input, and predict each label from the labels before it. The architecture shifts labels itself: behind
    a start token, with a pad token where labels are -100; MBart puts the language behind the last label."""

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        start = _start_token(model.config)
        for key in ("decoder_start_token_id", "pad_token_id"):
            if getattr(model.config, key, None) is None:
                setattr(model.config, key, start)

    def forward(self, input_ids: Tensor, labels: Tensor, attention_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """(batch, tokens) int64 each, to (loss sum fp32, count int64); the mask applies to `input_ids`."""
        encoded = _read(input_ids, attention_mask)
        return token_loss_sum(self.model(**encoded, decoder_input_ids=self._shifted(labels)).logits, labels)

    def own_loss_inputs(self, batch: Mapping[str, Tensor], tokens: int) -> tuple[dict[str, Tensor], Tensor, Tensor]:
        ids = batch["input_ids"][:, :tokens]
        labels = batch["labels"][:, :tokens].clamp(min=0)
        return {"input_ids": ids, "decoder_input_ids": labels}, labels, labels

    def _shifted(self, labels: Tensor) -> Tensor:
        prepare = getattr(self.model, "prepare_decoder_input_ids_from_labels", None)
        if prepare is not None:
            return prepare(labels)
        config = self.model.config
        start = torch.full_like(labels[:, :1], config.decoder_start_token_id)
        shifted = torch.cat((start, labels[:, :-1]), dim=1)
        return shifted.masked_fill(shifted == IGNORED_LABEL, config.pad_token_id)


class ImageClassification(HFAdapter):
    """Predict the class of an image."""

    def forward(self, image: Tensor, label: Tensor) -> tuple[Tensor, Tensor]:
        """(batch, channels, height, width) float, (batch,) int64, to (loss sum fp32, count int64)."""
        return token_loss_sum(self.model(pixel_values=image).logits, label)

    def own_loss_inputs(self, batch: Mapping[str, Tensor], tokens: int) -> tuple[dict[str, Tensor], Tensor, Tensor]:
        return {"pixel_values": batch["image"]}, batch["label"], batch["label"]


def build_hf(
    model_type: str,
    options: Mapping[str, Any],
    *,
    task: str | None,
    sizes: DataSizes,
    base: Mapping[str, Any] | None = None,
    mask_token: int | None = None,
) -> HFAdapter:
    """An adapter around a freshly initialized model of `model_type`.

    `options` are keys of its configuration (over `base`, the `config.json` of a folder), `task` is one of
    `hf_config.TASKS` or None for the first that exists, `mask_token` stands for masked tokens.
    Raises `ConfigError` for an unknown type, task or option and for options that do not fit the data.
    """
    refuse_loss_options(options)
    resolved = resolve(model_type, options, task=task, sizes=sizes, base=base, mask_token=mask_token)
    if resolved.task == "masked_lm" and not sizes.masked:
        resolved.config.mask_token_id = _mask_token(resolved.config, mask_token, sizes, has_weights=bool(base))
    model = _from_config(resolved, model_type)
    if resolved.task == "masked_lm":
        return MaskedLM(model, None if sizes.masked else resolved.config.mask_token_id)
    if resolved.task == "seq2seq_lm":
        return Seq2SeqLM(model)
    return {"causal_lm": CausalLM, "image_classification": ImageClassification}[resolved.task](model)


def _from_config(resolved: Resolved, model_type: str) -> nn.Module:
    config = resolved.config
    model_class = resolved.auto_class._model_mapping[type(config)]
    if isinstance(model_class, (list, tuple)):
        # A type may have several heads for one task: the folder's choice counts, else the first, as in transformers.
        named = [each for each in model_class if each.__name__ in (config.architectures or ())]
        model_class = (named or model_class)[0]
        config.architectures = [model_class.__name__]
    attention = "sdpa" if getattr(model_class, "_supports_sdpa", False) else "eager"
    try:
        return resolved.auto_class.from_config(config, attn_implementation=attention, dtype=torch.float32)
    except (ValueError, TypeError, AssertionError, ZeroDivisionError, ImportError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        if "allocate memory" in reason:
            raise
        raise ConfigError(f"model.config: does not suit {model_type}: {reason}") from error


def _mask_token(config: Any, known: int | None, sizes: DataSizes, has_weights: bool) -> int:
    """The known id; a model without pretrained weights can add one token to the data's."""
    if known is not None and known >= config.vocab_size:
        raise ConfigError(f"model.mask_token={known}: is no token of a vocabulary of {config.vocab_size}")
    if known is None and has_weights:
        raise ConfigError(
            "model.mask_token: init_from holds a trained model and no tokenizer file that names its mask token; give "
            "the id, as in model.mask_token=103, or put the model's tokenizer.json beside its weights"
        )
    if known is None and sizes.vocab_size is None:
        raise ConfigError(
            "model.mask_token: the data does not say how many tokens it has, so that none is known to be free for "
            f"masks; give an id below model.config.vocab_size={config.vocab_size} that the data does not use"
        )
    token = sizes.vocab_size if known is None else known
    assert token is not None
    return token


def _start_token(config: Any) -> int:
    for key in ("decoder_start_token_id", "pad_token_id", "bos_token_id"):
        token = getattr(config, key, None)
        if token is not None:
            return token
    return 0
