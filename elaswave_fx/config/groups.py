"""The Hydra groups (`model`, `data`, `optimizer`, `schedule`, …): from their YAML form to the form of the dataclasses.

In the YAML each kind has its own keys side by side, as one types them (`model.width=64`); `Config` holds the keys that
every kind has, and the rest in `options`:

    {"kind": "gpt", "width": 64, …}  ->  {"kind": "gpt", "name": "gpt", "task": None, "options": {"width": 64, …}}
    {"kind": "target", "_target_": "my.Net", "hidden": 8}
                                     ->  {"kind": "target", "name": "my.Net", …, "options": {"hidden": 8}}
"""

import dataclasses
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from elaswave_fx.config import validation
from elaswave_fx.config.keys import (
    LABELS,
    MOST,
    DataConfig,
    OptimizerConfig,
    Options,
    PassesConfig,
    ScheduleConfig,
    default_cache_dir,
)
from elaswave_fx.config.validation import constrained, keys_of_kind, nearest, nearest_key, show
from elaswave_fx.errors import ConfigError

TASKS = ("causal_lm", "masked_lm", "seq2seq_lm", "image_classification")


# The options of an own model are its class's keyword arguments, less what the data decides (vocabulary, `seq_len`).
@dataclass(frozen=True, kw_only=True)
class GptOptions:
    """The keys of `model=gpt`. With `tied` the output projection is the embedding."""

    layers: int = constrained(at_least=1, at_most=MOST)
    width: int = constrained(at_least=1, at_most=MOST)
    heads: int = constrained(at_least=1, at_most=MOST)
    dropout: float = constrained(at_least=0, below=1)
    attention_dropout: float = constrained(at_least=0, below=1)
    tied: bool
    bias: bool


@dataclass(frozen=True, kw_only=True)
class ResnetOptions:
    """The keys of `model=resnet`: `channels` of the input, `widths` of each group of blocks."""

    channels: int = constrained(at_least=1, at_most=MOST)
    classes: int = constrained(at_least=2, at_most=MOST)
    widths: tuple[int, ...] = constrained(at_least=1, at_most=MOST)
    blocks_per_group: int = constrained(at_least=1, at_most=MOST)


@dataclass(frozen=True, kw_only=True)
class TwoTowerOptions:
    left_size: int = constrained(at_least=1, at_most=MOST)
    right_size: int = constrained(at_least=1, at_most=MOST)
    classes: int = constrained(at_least=2, at_most=MOST)
    width: int = constrained(at_least=1, at_most=MOST)
    left_layers: int = constrained(at_least=1, at_most=MOST)
    right_layers: int = constrained(at_least=1, at_most=MOST)
    dropout: float = constrained(at_least=0, below=1)


@dataclass(frozen=True, kw_only=True)
class HfOptions:
    name: str | None
    task: str | None = constrained(choices=TASKS)
    config: Options
    mask_token: int | None = constrained(at_least=0)


OWN_MODELS: dict[str, type] = {"gpt": GptOptions, "resnet": ResnetOptions, "two_tower": TwoTowerOptions}

DATA_KINDS = ("stdlib", "files", "memmap", "hf", "digits", "synthetic", "target")


def read_groups(plain: Mapping[str, Any]) -> dict[str, Any]:
    """`plain` with its groups in the form of the dataclasses. Raises `ConfigError`."""
    groups = dict(plain)
    readers = {"model": _model, "data": _data, "optimizer": _optimizer, "schedule": _schedule}
    readers |= {"tokenizer": _tokenizer, "cache": _cache, "passes": _passes, "eval": _eval}
    for name, reader in readers.items():
        if name not in groups:
            continue  # `validation.read` says so.
        node = groups[name]
        if not isinstance(node, Mapping):
            raise ConfigError(f"{name}={show(node)}: must be a group of keys, not a single value")
        groups[name] = reader(node)
    return groups


def _model(node: Mapping[str, Any]) -> dict[str, Any]:
    if _is_target("model", "kind", node):
        set_elsewhere = ("task",) if node.get("task") is None else ()  # by model=hf, whose key it is
        name, options = _split_target("model", node, typed=("kind", *set_elsewhere))
        return {"kind": "target", "name": name, "task": None, "options": options}
    kind = _kind("model", "kind", node, (*OWN_MODELS, "hf", "target"))
    rest = {name: value for name, value in node.items() if name != "kind"}
    if kind == "hf":
        options = validation.read(HfOptions, rest, "model")
        typed = {"task": options.task, "mask_token": options.mask_token}
        return {"kind": kind, "name": options.name or "", "options": options.config, **typed}
    if "config" in rest:
        raise ConfigError(f"model.config: is a key of model=hf only; nearest valid: model.KEY=VALUE of model={kind}")
    options = validation.read(OWN_MODELS[kind], rest, "model")
    if isinstance(options, ResnetOptions) and not options.widths:
        raise ConfigError("model.widths=[]: must name at least one group, such as [16,32]")
    if isinstance(options, GptOptions) and options.width % options.heads:
        raise ConfigError(
            f"model.heads={options.heads}: must divide model.width={options.width}; "
            f"nearest valid: {_nearest_divisor(options.width, options.heads)}"
        )
    return {"kind": kind, "name": kind, "task": None, "options": dataclasses.asdict(options)}


def _eval(node: Mapping[str, Any]) -> dict[str, Any]:
    return {**node, "data": _data(node["data"], "eval.data")} if isinstance(node.get("data"), Mapping) else dict(node)


def _data(node: Mapping[str, Any], place: str = "data") -> dict[str, Any]:
    if _is_target(place, "kind", node):
        typed = keys_of_kind(DataConfig, "target") - {"name", "options"}
        if node.get("labels") not in LABELS:
            typed -= {"labels"}  # It is an argument of the class, by that name.
        if not isinstance(node.get("transform"), Mapping) or "_target_" not in node["transform"]:
            typed -= {"transform"}  # It is an argument of the class, by that name.
        name, options = _split_target(place, node, typed=typed)
        kept = {key: node[key] for key in typed if key in node}
        _check_transform(kept.get("transform"), f"{place}.transform")
        return {**kept, "fields": node.get("fields") or (), "name": name, "options": options}
    kind = _kind(place, "kind", node, DATA_KINDS)
    validation.refuse_unknown(node, keys_of_kind(DataConfig, kind), place)
    _check_transform(node.get("transform"), f"{place}.transform")
    if kind in ("files", "memmap", "hf") and not node.get("paths"):
        raise ConfigError(
            f"{place}.paths: is missing, {place}={kind} needs at least one path, such as {place}.paths=[DIR/*.txt]"
        )
    if kind in ("digits", "synthetic"):
        layouts = ("image", "flat", "halves") + (("tokens",) if kind == "synthetic" else ())
        layout = str(node.get("layout"))
        if layout not in layouts:
            best = nearest(layout, layouts) or layouts[0]
            raise ConfigError(f"{place}.layout={layout}: must be one of {', '.join(layouts)}; nearest valid: {best}")
    return dict(node)


def _check_transform(node: object, place: str) -> None:
    if node is None:
        return
    if not isinstance(node, Mapping) or "_target_" not in node:
        raise ConfigError(f"{place}={show(node)}: needs an import path, such as {place}._target_=package.Class")
    _split_target(place, node, typed=())


def _optimizer(node: Mapping[str, Any]) -> dict[str, Any]:
    if _is_target("optimizer", "name", node):
        typed = keys_of_kind(OptimizerConfig, "target") - {"target", "options"}
        target, options = _split_target("optimizer", node, typed=typed)
        kept = {name: node[name] for name in typed if name in node}
        return {**kept, "name": "target", "target": target, "options": options}
    validation.refuse_unknown(node, keys_of_kind(OptimizerConfig, str(node.get("name"))), "optimizer")
    return dict(node)


def _schedule(node: Mapping[str, Any]) -> dict[str, Any]:
    if _is_target("schedule", "name", node):
        target, options = _split_target("schedule", node, typed=("name",))
        return {"name": "target", "target": target, "options": options}
    validation.refuse_unknown(node, keys_of_kind(ScheduleConfig, str(node.get("name"))), "schedule")
    return dict(node)


def _tokenizer(node: Mapping[str, Any]) -> dict[str, Any]:
    kind, size = node.get("kind"), node.get("vocab_size")
    if kind == "bytes" and size != 256:
        raise ConfigError(f"tokenizer.vocab_size={show(size)}: tokenizer=bytes has 256 tokens; nearest valid: 256")
    if kind == "bpe" and isinstance(size, int) and size < 257:
        raise ConfigError(f"tokenizer.vocab_size={size}: must hold 256 bytes and the end mark; nearest valid: 257")
    return dict(node)


def _cache(node: Mapping[str, Any]) -> dict[str, Any]:
    folder = node.get("dir")
    path = default_cache_dir() if folder is None else str(folder)
    path = os.path.abspath(os.path.expanduser(path))
    validation.refuse_non_utf8(path, "cache.dir")
    return {**node, "dir": path}


def _passes(node: Mapping[str, Any]) -> dict[str, Any]:
    """Keys of the compiler itself, and groups of keys that are named after passes."""
    own = keys_of_kind(PassesConfig, "") - {"options"}
    options = {name: value for name, value in node.items() if isinstance(value, Mapping) and name not in own}
    validation.refuse_unknown(node, {*own, *options}, "passes")
    return {**{name: node[name] for name in own if name in node}, "options": options}


def _kind(group: str, key: str, node: Mapping[str, Any], kinds: tuple[str, ...]) -> str:
    kind = str(node.get(key))
    if kind not in kinds:
        best = nearest(kind, kinds)
        tail = f"; nearest valid: {best}" if best else ""
        raise ConfigError(f"{group}={kind}: must be one of {', '.join(kinds)}{tail}")
    return kind


def _is_target(group: str, key: str, node: Mapping[str, Any]) -> bool:
    """Whether the group names a class of the user; refuses a mixture of it and one of our kinds."""
    if "_target_" not in node:
        if node.get(key) == "target":
            raise ConfigError(
                f"{group}._target_: is missing, {group}=target needs an import path such as package.Class"
            )
        return False
    if node.get(key) != "target":
        raise ConfigError(
            f"{group}._target_={node['_target_']}: cannot be mixed with {group}={node.get(key)}; nearest valid: "
            f"{group}=target (in a recipe: `override /{group}: target` in its defaults), and another name for an "
            f"argument of the class that is called {key}"
        )
    return True


def _split_target(group: str, node: Mapping[str, Any], typed: Collection[str]) -> tuple[str, dict[str, Any]]:
    target = node["_target_"]
    if not isinstance(target, str) or "." not in target.strip("."):
        raise ConfigError(f"{group}._target_={show(target)}: must be an import path such as package.Class")
    misspelled = [name for name in node if name.startswith("_") and name not in ("_target_", "_args_", "_partial_")]
    if misspelled:
        known = [f"{group}.{name}" for name in ("_target_", "_args_", "_partial_")]
        raise ConfigError(f"{group}.{misspelled[0]}: unknown key; {nearest_key(f'{group}.{misspelled[0]}', known)}")
    return target, {name: value for name, value in node.items() if name not in ("_target_", *typed)}


def _nearest_divisor(width: int, heads: int) -> int:
    return min((n for n in range(1, width + 1) if width % n == 0), key=lambda n: (abs(n - heads), n))
