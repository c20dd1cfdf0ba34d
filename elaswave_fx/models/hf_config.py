"""Resolve a Hugging Face configuration from a type name, the user's options and the sizes of the data.

Every architecture goes through the same rules; none is known by name here. A value from the user is kept or refused; a
missing value is set to what the data needs:

    resolve("some_type", {"num_hidden_layers": 2}, task="causal_lm", sizes=DataSizes(vocab_size=256, seq_len=64))
      -> task causal_lm, config with vocab_size=256 and at least 64 positions
"""

import inspect
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from elaswave_fx.config.keys import ModelConfig
from elaswave_fx.config.validation import nearest
from elaswave_fx.errors import ConfigError
from elaswave_fx.models.sizes import DataSizes

# The default is the first auto-class of this order that knows the type, of an encoder and decoder both.
TASKS: Mapping[str, str] = {
    "causal_lm": "AutoModelForCausalLM",
    "masked_lm": "AutoModelForMaskedLM",
    "seq2seq_lm": "AutoModelForSeq2SeqLM",
    "image_classification": "AutoModelForImageClassification",
}
_HEADS = ("ForCausalLM", "ForMaskedLM", "ForConditionalGeneration", "ForImageClassification")
"""Ends of the names of their classes, of subclasses too."""
# Keys of a `config.json` about the storage of its weights, not about the model.
_NOT_FROM_BASE = ("model_type", "dtype", "torch_dtype", "transformers_version")
_DTYPES = ("dtype", "torch_dtype")
MOST_OF_BYTES = 512
"""Largest vocabulary of bytes: 256 of them, special tokens, and rounding up."""

_LOSS_NAMES = re.compile(r"(^|_)(loss|losses|label_smoothing|focal_alpha)(_|$)|^(problem_type|class_weights?)$")
_NEUTRAL = (None, False, 0, "single_label_classification")
_SPECIAL_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "decoder_start_token_id")
_READ_HERE = ("decoder_start_token_id",)
"""Undeclared keys that configurations hold: labels are shifted behind this token."""


@dataclass(frozen=True)
class Resolved:
    """A task, its auto-class and the complete configuration of the model to build."""

    task: str
    auto_class: Any
    config: Any


def import_transformers() -> ModuleType:
    """The optional package; raises `ConfigError` that says how to install it."""
    try:
        import transformers
    except ImportError as error:
        raise ConfigError(f"model=hf: needs transformers ({error}): pip install 'elaswave_fx[hf]'") from error
    return transformers


def resolve(
    model_type: str,
    options: Mapping[str, Any],
    *,
    task: str | None,
    sizes: DataSizes,
    base: Mapping[str, Any] | None = None,
    mask_token: int | None = None,
) -> Resolved:
    """Check type, task and options, and fill in sizes from the data; raise `ConfigError` naming the key.

    `base` is the `config.json` of a folder; `options` override it. `mask_token` is None where the mask is a new token.
    """
    default = _make_config(model_type, {})
    _check_keys(default, options)
    task, auto_class = _choose_task(model_type, default, task, (base or {}).get("architectures"))
    extra = 1 if task == "masked_lm" and mask_token is None and not sizes.masked else 0
    # Aliases (`attribute_map`) let one architecture call its positions or layers differently: compare canonical names.
    aliases: Mapping[str, str] = getattr(default, "attribute_map", {})
    kept = {key: value for key, value in (base or {}).items() if key not in _NOT_FROM_BASE}
    given = {aliases.get(key, key): value for key, value in (*kept.items(), *options.items())}
    images = task == "image_classification"
    values = _image_values(default, given, sizes) if images else _text_values(default, given, task, sizes, extra)
    for key, value in values:
        given.setdefault(aliases.get(key, key), value)
    config = _make_config(model_type, given)
    if base:
        _refuse_without_effect(default, options, config)
    if hasattr(config, "use_cache"):
        config.use_cache = False
    if images:
        refuse_loss_options({"problem_type": getattr(config, "problem_type", None)})
        _check_patches(config)
    return Resolved(task, auto_class, config)


def task_of(model: ModelConfig, init_from: str | Path | None) -> str:
    """The task of `model`, of kind hf. Raise `ConfigError` if it has none."""
    base = read_hf_config(init_from) if init_from is not None else {}
    model_type = model.name or base.get("model_type", "")
    return model.task or _choose_task(model_type, _make_config(model_type, {}), None, base.get("architectures"))[0]


def read_hf_config(folder: str | Path) -> dict[str, Any]:
    """The `config.json` of a Hugging Face folder; raises `ConfigError`."""
    path = Path(folder) / "config.json"
    try:
        config = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"init_from={folder}: config.json cannot be read: {error}") from error
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        raise ConfigError(f"init_from={folder}: config.json names no model_type")
    if config.get("quantization_config"):
        raise ConfigError(
            f"init_from={folder}: config.json has a quantization_config, and quantized weights are not trained; save "
            "the model without it (`dequantize()`, `save_pretrained`), or take the folder that it was made from"
        )
    return config


def refuse_other_classes(config: Any, class_names: Mapping[str, Sequence[str]]) -> None:
    """Raise `ConfigError` where a named class of both data and architecture has different numbers."""
    known = {str(name).lower(): int(number) for number, name in (getattr(config, "id2label", None) or {}).items()}
    for field, names in class_names.items():
        for number, name in enumerate(names):
            if known.get(name.lower(), number) != number:
                raise ConfigError(
                    f"model.config.id2label: class {known[name.lower()]} of the model is {name}, which is {number} in "
                    f"{field} of the data ({', '.join(names)}); number labels as the model does, as data.transform may"
                )


def _make_config(model_type: str, options: Mapping[str, Any]) -> Any:
    transformers = import_transformers()
    known = list(transformers.CONFIG_MAPPING.keys())
    if model_type not in known:
        raise ConfigError(f"model.name={model_type}: is no model type of transformers{_nearest(model_type, known)}")
    from huggingface_hub.errors import StrictDataclassError

    try:
        return transformers.AutoConfig.for_model(model_type, **options)
    except (StrictDataclassError, ValueError, TypeError, KeyError, AttributeError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"model.config: does not suit {model_type}, {reason}") from error


def _nearest(word: str, known: Iterable[str]) -> str:
    best = nearest(word, known)
    return f"; nearest valid: {best}" if best else ""


def _check_keys(default: Any, options: Mapping[str, Any]) -> None:
    """Refuse unknown keys: a configuration class takes any keyword silently, so a misspelling would have no effect."""
    for key in options:
        if key in _DTYPES and options[key] not in (None, "float32"):
            raise ConfigError(
                f"model.config.{key}={options[key]}: has no effect, parameters are fp32; precision=bf16 computes in "
                "bf16"
            )
        if not hasattr(default, key) and key not in _READ_HERE and not _is_taken(default, key, options[key]):
            known = [*default.to_dict(), *getattr(default, "attribute_map", {})]
            raise ConfigError(f"model.config.{key}: is no option of {default.model_type}{_nearest(key, known)}")


def _is_taken(default: Any, key: str, value: Any) -> bool:
    """Whether a key that a configuration class does not declare acts: the code of the architecture reads it, or what
    the class turns it into, as it does with older names."""
    others = set[str]()
    numbers = isinstance(value, (int, float)) and not isinstance(value, bool)
    for tried in (value, 2 * value + 1) if numbers else (value,):
        try:
            made = _make_config(default.model_type, {key: tried}).to_dict()
        except ConfigError:
            continue
        others |= {path[-1] for path, _ in _changed({**default.to_dict(), key: None}, {**made, key: None})}
    words = [rf"""config(\.{name}\b|, ["']{name}["'])""" for name in map(re.escape, {key, *others})]
    words += [rf"""["']{re.escape(name)}["']""" for name in others]  # in a mapping, as rope_parameters are
    read = re.compile("|".join(words))
    folder = Path(inspect.getfile(type(default))).parent
    return any(read.search(path.read_text()) for path in folder.glob("modeling_*.py"))


def _refuse_without_effect(default: Any, options: Mapping[str, Any], config: Any) -> None:
    """Refuse an older name of a value that the folder's configuration gives by its newer one, which wins."""
    found = config.to_dict()
    for key in [key for key in options if not hasattr(default, key) and key not in _READ_HERE]:
        try:
            made = _make_config(default.model_type, {key: options[key]}).to_dict()
        except ConfigError:
            continue  # it needs others beside it
        for path, value in _changed({**default.to_dict(), key: None}, {**made, key: None}):
            inner = found
            for name in path:
                inner = inner.get(name) if isinstance(inner, Mapping) else None
            if len(path) > 1 and inner != value:
                raise ConfigError(
                    f"model.config.{key}={options[key]}: has no effect, as config.json of init_from has "
                    f"{'.'.join(path)}={inner}; nearest valid: model.config.{path[0]} with all of its values"
                )


def _changed(before: Any, after: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Paths of the innermost keys that two configurations have other values of, with the later value."""
    for key in {*before, *after}:
        one, other = before.get(key), after.get(key)
        if isinstance(one, Mapping) and isinstance(other, Mapping):
            yield from _changed(one, other, (*path, str(key)))
        elif one != other:
            yield (*path, str(key)), other


def acts_in_own_loss(key: str, value: Any) -> bool:
    """Whether a key of a configuration acts only in the library's own loss, which no adapter uses."""
    return bool(_LOSS_NAMES.search(key)) and value not in _NEUTRAL


def refuse_loss_options(options: Mapping[str, Any]) -> None:
    """Raise ConfigError for keys of a configuration that act only in the library's own loss."""
    for key, value in options.items():
        if acts_in_own_loss(key, value):
            raise ConfigError(
                f"model.config.{key}={value}: acts in transformers' own loss alone, which is a mean and is not used: "
                "the cross entropy of the logits is summed instead; leave the key out, or write the loss into a model "
                "of your own (model._target_=…) that returns (loss sum, count)"
            )


def _choose_task(
    model_type: str, default: Any, task: str | None, architectures: Sequence[str] | None
) -> tuple[str, Any]:
    """The task and its class: the given task, that of the class in a folder's `architectures`, or the first. The
    library has some classes for several tasks, such as BART's for masked tokens."""
    transformers = import_transformers()
    if task is not None and task not in TASKS:
        raise ConfigError(f"model.task={task}: is unknown{_nearest(task, TASKS)}")
    classes = {name: getattr(transformers, class_name) for name, class_name in TASKS.items()}
    fitting = [name for name, auto in classes.items() if type(default) in auto._model_mapping]
    if not fitting:
        raise ConfigError(f"model.name={model_type}: has no model for any of the tasks {', '.join(TASKS)}")
    both = getattr(default, "is_encoder_decoder", False) and "seq2seq_lm" in fitting
    first = "seq2seq_lm" if both else fitting[0]  # such a type may have a class for its decoder only
    named = next((name for name in (first, *fitting) if _names(architectures, classes[name], default)), None)
    others = [name for name in architectures or () if "For" in name and not name.endswith(_HEADS)]
    if task is None and named is None and others:
        raise ConfigError(
            f"init_from: holds a {others[0]}, a class of none of the tasks {', '.join(fitting)}; load it in a model of "
            "your own (model._target_=…), or give the task as model.task if the weights have its head"
        )
    chosen = task or named or first
    if chosen not in fitting:
        raise ConfigError(f"model.task={task}: does not exist for {model_type}; it has {', '.join(fitting)}")
    return chosen, classes[chosen]


def _names(architectures: Sequence[str] | None, auto_class: Any, default: Any) -> bool:
    """Whether `architectures` contains the class of `auto_class` for a configuration."""
    found = auto_class._model_mapping[type(default)]
    classes = found if isinstance(found, (list, tuple)) else (found,)
    return any(each.__name__ in (architectures or ()) for each in classes)


def _text_values(
    default: Any, given: Mapping[str, Any], task: str, sizes: DataSizes, extra: int
) -> list[tuple[str, Any]]:
    values: list[tuple[str, Any]] = []
    vocab_size = given.get("vocab_size")
    if sizes.vocab_size is not None:
        # Masked models replace tokens by one that the tokenizer cannot produce, unless it has a mask token.
        least = sizes.vocab_size + extra
        pad = getattr(default, "pad_token_id", None)
        is_token = sizes.tokenizer is not None and isinstance(pad, int) and pad < least and "pad_token_id" not in given
        if is_token and (vocab_size is None or vocab_size > least):
            # A padding token of the data would not be trained or attended to: padding is one token more.
            values.append(("pad_token_id", least))
            least += 1
        if vocab_size is None:
            vocab_size = least
            values.append(("vocab_size", least))
        elif vocab_size < least:
            why = ", the mask one more" if extra else ""
            raise ConfigError(
                f"model.config.vocab_size={vocab_size}: is too small, the tokenizer has {sizes.vocab_size} tokens{why}"
            )
        elif sizes.tokenizer == "bytes" and vocab_size > MOST_OF_BYTES:
            raise ConfigError(
                f"tokenizer=bytes: the model has {vocab_size} tokens of a tokenizer of its own, and would read bytes "
                "as if they were these; give ids that its tokenizer made (data=memmap, data=hf with a column of ids), "
                f"or train from scratch with model.config.vocab_size={least}"
            )
    if vocab_size is not None:
        values.extend((key, None) for key in _SPECIAL_TOKENS if _out_of_range(getattr(default, key, None), vocab_size))
    values.extend(_positions(default, given, sizes))
    if task == "causal_lm" and hasattr(default, "is_decoder"):
        encoders = import_transformers().AutoModelForMaskedLM._model_mapping
        if given.get("is_decoder") is False and type(default) in encoders:  # others look back whatever it says
            raise ConfigError(
                "model.config.is_decoder=False: every token would see those that it is to predict; nearest valid: "
                "model.config.is_decoder=true"
            )
        # Without it an encoder type attends to the tokens that it predicts.
        values.append(("is_decoder", True))
    return values


def _out_of_range(token: Any, vocab_size: int) -> bool:
    ids = token if isinstance(token, (list, tuple)) else [token]
    return any(isinstance(i, int) and i >= vocab_size for i in ids)


def _positions(default: Any, given: Mapping[str, Any], sizes: DataSizes) -> list[tuple[str, Any]]:
    key = "max_position_embeddings"
    known = getattr(default, key, None)
    if sizes.seq_len is None or not isinstance(known, int) or known < 0:  # -1 means no limit in XLNet
        return []
    canonical = getattr(default, "attribute_map", {}).get(key, key)
    configured = given.get(canonical)
    if configured is None:
        return [(key, sizes.seq_len)] if known < sizes.seq_len else []
    if configured < sizes.seq_len:
        raise ConfigError(f"model.config.{canonical}={configured}: is too small for seq_len={sizes.seq_len}")
    return []


def _image_values(default: Any, given: Mapping[str, Any], sizes: DataSizes) -> list[tuple[str, Any]]:
    values: list[tuple[str, Any]] = []
    if sizes.classes is not None:
        labels = len(given["id2label"]) if "id2label" in given else given.get("num_labels", sizes.classes)
        if labels < sizes.classes:
            raise ConfigError(f"model.config.num_labels={labels}: is too small, the data has {sizes.classes} classes")
        if "id2label" not in given:
            values.append(("num_labels", sizes.classes))
    if sizes.image_shape is None:
        return values
    channels, height, width = sizes.image_shape
    if sizes.channels_look_last and "num_channels" not in given:
        raise ConfigError(
            f"model.config.num_channels: images of {[*sizes.image_shape]} look like height x width x channels; "
            f"channels come first here, which data.transform can see to (or set model.config.num_channels={channels})"
        )
    if given.get("num_channels", channels) != channels:
        raise ConfigError(
            f"model.config.num_channels={given['num_channels']}: does not fit the data, whose images have {channels}"
        )
    # A given size stays: many architectures take images of any size, and the others fail at run time.
    sides = height if height == width else (height, width)
    values.extend((k, v) for k, v in (("num_channels", channels), ("image_size", sides)) if hasattr(default, k))
    return values


def _check_patches(config: Any) -> None:
    """Refuse a patch larger than the image, or one that leaves a remainder: it drops pixels silently or fails far from
    here."""
    image, patch = getattr(config, "image_size", None), getattr(config, "patch_size", None)
    if not isinstance(patch, int) or image is None:
        return
    for side in image if isinstance(image, (list, tuple)) else (image,):
        if side % patch != 0:
            raise ConfigError(f"model.config.patch_size={patch}: does not divide the image size {side}")
