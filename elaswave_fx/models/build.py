"""Build the model that a configuration names, seeded.

In: `ModelConfig`, the sizes of the data, a seed. Out: a `torch.nn.Module` in training mode, in fp32 on the CPU, whose
`forward` returns (loss sum, count). The same arguments give the same bits, in any process.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from elaswave_fx.config.keys import ModelConfig
from elaswave_fx.config.targets import import_target, instantiate
from elaswave_fx.data.global_draws import seed_all
from elaswave_fx.errors import ConfigError
from elaswave_fx.models.gpt import GPT
from elaswave_fx.models.hf_config import read_hf_config
from elaswave_fx.models.resnet import ResNet
from elaswave_fx.models.sizes import DataSizes
from elaswave_fx.models.two_tower import TwoTower

_TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "spiece.model", "vocab.json", "vocab.txt",
    "merges.txt", "sentencepiece.bpe.model",
)  # fmt: skip

_BYTES = (256, 257)
"""Vocabularies of weights trained here on bytes, with or without a mask."""


def build_model(
    model: ModelConfig,
    *,
    vocab_size: int | None,
    seq_len: int | None,
    seed: int,
    image_shape: tuple[int, int, int] | None = None,
    classes: int | None = None,
    tokenizer: str | None = None,
    masked: bool = False,
    init_from: str | Path | None = None,
) -> nn.Module:
    """The module that `model` describes, made with torch's, Python's and NumPy's generators seeded, whatever its file
    seeds on import.

    The sizes come from the data; None where the data has none. `image_shape` is (channels, height, width). `init_from`
    is a Hugging Face folder whose configuration `model.options` override and whose weights are loaded. Raise
    `ConfigError` with the key on failure.
    """
    sizes = DataSizes(vocab_size, seq_len, image_shape, classes, tokenizer, masked)
    seed_all(seed)
    if model.kind == "target":
        import_target("model", model.spec)
        seed_all(seed)
    if model.kind == "hf":
        return _build_hf(model, sizes, init_from)
    if init_from is not None:
        raise ConfigError(f"init_from={init_from}: needs model=hf, not model={model.kind}")
    return _build_target(model, sizes) if model.kind == "target" else _build_own(model.kind, model.options, sizes)


def _build_hf(model: ModelConfig, sizes: DataSizes, init_from: str | Path | None) -> nn.Module:
    from elaswave_fx.models.hf import MaskedLM, build_hf
    from elaswave_fx.models.mask_token import mask_token_of
    from elaswave_fx.models.weights import load_hf_weights

    base = read_hf_config(init_from) if init_from is not None else {}
    name = model.name or base.get("model_type", "")
    if base and name != base["model_type"]:
        raise ConfigError(f"model.name={name}: init_from={init_from} holds a model of type {base['model_type']}")
    if init_from is not None:
        _refuse_other_tokenizer(Path(init_from), {**base, **model.options}.get("vocab_size"), sizes)
    mask_token = model.mask_token
    if mask_token is None:
        mask_token = mask_token_of(init_from, {**base, **model.options})
    built = build_hf(name, model.options, task=model.task, sizes=sizes, base=base, mask_token=mask_token).train()
    if model.mask_token is not None and not isinstance(built, MaskedLM):
        raise ConfigError(f"model.mask_token={model.mask_token}: is a key of model.task=masked_lm, which this is not")
    if init_from is not None:
        load_hf_weights(built, init_from)
    return built


def _refuse_other_tokenizer(folder: Path, vocab_size: object, sizes: DataSizes) -> None:
    """Refuse tokens of another tokenizer than that of the weights."""
    if sizes.tokenizer is None:
        return
    files = sorted(name for name in _TOKENIZER_FILES if (folder / name).is_file())
    if sizes.tokenizer == "bytes" and not files and vocab_size in _BYTES:
        return
    why = {
        "bpe": "tokenizer=bpe was trained on this data",
        "bytes": "tokenizer=bytes takes the bytes of the text for ids",
    }[sizes.tokenizer]
    own = f"its {files[0]} says which" if files else f"{vocab_size} of them"
    raise ConfigError(
        f"init_from={folder}: its weights know the tokens of a tokenizer of their own ({own}), and {why}, so that ids "
        "would mean other tokens; give ids that the folder's tokenizer made: data=memmap, or data=hf with a column of "
        "token ids"
    )


def _build_target(model: ModelConfig, sizes: DataSizes) -> nn.Module:
    offered = {"vocab_size": sizes.vocab_size, "seq_len": sizes.seq_len}
    known = {name: value for name, value in offered.items() if value is not None}
    built = instantiate("model", model.spec, offered=known)
    if not isinstance(built, nn.Module):
        raise ConfigError(f"model._target_={model.name}: gives a {type(built).__name__}, not a torch.nn.Module")
    return built


def _build_own(kind: str, options: Mapping[str, Any], sizes: DataSizes) -> nn.Module:
    if kind == "gpt":
        if sizes.seq_len is None:
            raise ConfigError(
                "model=gpt: needs data of tokens, such as data=stdlib, or data.fields=[input_ids,labels] with "
                "data.vocab_size"
            )
        if sizes.vocab_size is None:
            raise ConfigError(
                "model=gpt: the data does not say how many tokens there are; data.vocab_size does, or "
                "an attribute vocab_size of a dataset of yours"
            )
        return GPT(vocab_size=sizes.vocab_size, seq_len=sizes.seq_len, **options)
    if sizes.classes is not None and options.get("classes", sizes.classes) < sizes.classes:
        raise ConfigError(f"model.classes={options['classes']}: the data has {sizes.classes} classes")
    if kind == "two_tower":
        return TwoTower(**options)
    if kind == "resnet":
        channels = sizes.image_shape[0] if sizes.image_shape is not None else None
        if sizes.channels_look_last and sizes.image_shape is not None:
            raise ConfigError(
                f"model.channels: images of {[*sizes.image_shape]} look like height x width x channels; channels come "
                "first here, which data.transform can see to"
            )
        if channels is not None and options.get("channels", channels) != channels:
            raise ConfigError(f"model.channels={options['channels']}: the images of the data have {channels} channels")
        return ResNet(**options)
    raise ConfigError(f"model={kind}: is none of gpt, resnet, two_tower, hf, target")
