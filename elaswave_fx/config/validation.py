"""Read a plain mapping into a frozen dataclass, or say in one line what is wrong with it.

In: a mapping as YAML gives it (`{"steps": 10}`), a dataclass, the mapping's place in the configuration (`"parallel"`).
Out: an instance whose fields are exactly the mapping's keys, checked and converted (lists become tuples, ints become
floats where a float is wanted). A `ConfigError` names the key, the value, the rule and the nearest key or value that
would have been accepted:

    read(Parallel, {"dp": 0}, "parallel")   ->  ConfigError("parallel.dp=0: must be at least 1; nearest valid: 1")

Types that a field may have: int, float, bool, str, `Literal["a", "b"]`, `X | None`, `tuple[X, ...]`, `tuple[X, Y]`,
a mapping (taken as it is), or another dataclass.
"""

import copy
import dataclasses
import difflib
import math
import types
import typing
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from elaswave_fx.errors import ConfigError

T = TypeVar("T")

_MOVED = {
    "policy": "lab.policy", "planner.axes": "lab.axes", "planner.goals": "lab.goals", "copies.mode": "lab.copy_mode",
    "rng.reshard": "lab.reshard_rng", "launch.exit_words": "lab.exit_words",
}  # fmt: skip
"""Keys of earlier versions, and what they are called now."""

_NAMES_ELSEWHERE = {
    **_MOVED,
    "rng": "lab.reshard_rng",
    **dict.fromkeys(("batch_size", "train_batch_size", "per_device_train_batch_size"), "global_batch"),
    **dict.fromkeys(("micro_batch_size", "micro_batch", "gradient_accumulation_steps"), "parallel.micro_batch"),
    **dict.fromkeys(("learning_rate", "optimizer.learning_rate"), "optimizer.lr"),
    **dict.fromkeys(("max_steps", "num_steps", "iterations", "epochs", "num_epochs", "num_train_epochs"), "steps"),
    **dict.fromkeys(("max_grad_norm", "grad_clip", "gradient_clip_val", "optimizer.clip_norm"), "clip_norm"),
    **dict.fromkeys(("max_seq_len", "max_length", "block_size", "context_length", "sequence_length"), "seq_len"),
    **dict.fromkeys(("dtype", "bf16", "fp16", "mixed_precision"), "precision"),
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "model.hidden_size", "model.d_model"), "model.width"),
    **dict.fromkeys(("num_layers", "n_layer", "model.num_layers", "model.n_layer"), "model.layers"),
    **dict.fromkeys(("num_heads", "n_head", "model.num_heads", "model.n_head"), "model.heads"),
    **dict.fromkeys(("dp", "world_size", "num_processes", "nproc_per_node", "data_parallel_size"), "parallel.dp"),
    **dict.fromkeys(("pp", "pipeline_parallel_size", "num_stages"), "parallel.pp"),
    **dict.fromkeys(("lr_scheduler", "lr_scheduler_type"), "schedule"),
    **dict.fromkeys(("warmup", "num_warmup_steps"), "schedule.warmup_steps"),
    **dict.fromkeys(("save_steps", "save_interval", "save_every"), "checkpoint.every"),
    **dict.fromkeys(("eval_steps", "eval_interval", "eval_every"), "eval.every"),
    **dict.fromkeys(("output_dir", "run_dir", "out_dir", "save_dir"), "hydra.run.dir"),
    **dict.fromkeys(("resume_from", "resume_from_checkpoint", "ckpt_path"), "resume"),
    **dict.fromkeys(("random_seed", "manual_seed"), "seed"),
    **dict.fromkeys(("activation_checkpointing", "gradient_checkpointing"), "recompute"),
    "dataset": "data",
}
"""What other trainers, and earlier versions, call our keys."""

_RULE = "rule"
_KINDS = "kinds"


@dataclasses.dataclass(frozen=True)
class Rule:
    """What a value must satisfy beside its type; bounds are inclusive unless `below` says otherwise."""

    at_least: float | None = None
    at_most: float | None = None
    below: float | None = None
    above: float | None = None
    choices: tuple[str, ...] = ()


def constrained(
    *,
    at_least: float | None = None,
    at_most: float | None = None,
    below: float | None = None,
    above: float | None = None,
    choices: tuple[str, ...] = (),
    kinds: tuple[str, ...] = (),
    default: Any = dataclasses.MISSING,
    default_factory: Any = dataclasses.MISSING,
) -> Any:
    """A dataclass field with a `Rule`; without a default the key must be present.

    `kinds`: the kinds of a group (`data=files`, `optimizer=adamw`) that have the key; none named: all of them.
    """
    rule = Rule(at_least=at_least, at_most=at_most, below=below, above=above, choices=choices)
    return dataclasses.field(default=default, default_factory=default_factory, metadata={_RULE: rule, _KINDS: kinds})


def keys_of_kind(cls: type, kind: str) -> set[str]:
    """The fields of dataclass `cls` that a group of this kind has."""
    kinds = {field.name: field.metadata.get(_KINDS) for field in dataclasses.fields(cls)}
    return {name for name, named in kinds.items() if not named or kind in named}


def show(value: object) -> str:
    """A value as one would type it on the command line."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{name}:{show(item)}" for name, item in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ",".join(show(item) for item in value) + "]"
    return str(value)


def refuse_non_utf8(text: str, place: str) -> None:
    """Raise `ConfigError` for a name of a file whose bytes are not UTF-8: neither a run's files nor its messages can
    hold it."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(f"{place}={text}: has bytes that are not UTF-8; nearest valid: another name") from error


def nearest(word: str, candidates: Iterable[str]) -> str | None:
    """The candidate most like `word`, or None when nothing is alike; ties go to the first in sorted order."""
    found = difflib.get_close_matches(word, sorted(set(candidates)), n=1, cutoff=0.5)
    return found[0] if found else None


def hint(word: str, candidates: Iterable[str], kind: str) -> str:
    """`nearest valid KIND: X`, or the list of what is valid when nothing is alike."""
    names = sorted(set(candidates))
    best = nearest(word, names)
    return f"nearest valid {kind}: {best}" if best else f"valid {kind}s: {', '.join(names)}"


def with_keys_of_today(recorded: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration that a run or a checkpoint of an earlier version recorded, with each key where it is now."""
    today = copy.deepcopy(dict(recorded))
    for old, new in _MOVED.items():
        *groups, name = old.split(".")
        group: Any = today
        for each in groups:
            group = group.get(each) if isinstance(group, dict) else None
        if isinstance(group, dict) and name in group:
            top, _, key = new.partition(".")
            found = today.setdefault(top, {})
            if isinstance(found, dict):
                found.setdefault(key, group.pop(name))
    return today


def nearest_key(dotted: str, known: Iterable[str]) -> str:
    """A hint for dotted keys: `optimizer.lrr` is compared as a whole and by its last part within its parent."""
    names = sorted(set(known))
    if dotted in _NAMES_ELSEWHERE:
        return f"nearest valid key: {_NAMES_ELSEWHERE[dotted]}"
    parent, _, leaf = dotted.rpartition(".")
    siblings = [name for name in names if name.rpartition(".")[0] == parent]
    by_leaf = nearest(leaf, [name.rpartition(".")[2] for name in siblings])
    if by_leaf is not None:
        return f"nearest valid key: {parent}.{by_leaf}" if parent else f"nearest valid key: {by_leaf}"
    elsewhere = [name for name in names if name.rpartition(".")[2] == leaf]
    if elsewhere:
        return f"nearest valid key: {elsewhere[0]}"
    if parent and siblings:
        return f"valid keys: {', '.join(siblings)}"
    return hint(dotted, [name for name in names if "." not in name], "key")


def read(cls: type[T], node: object, place: str, extra: Iterable[str] = ()) -> T:
    """`node` as an instance of dataclass `cls`; keys in `extra` are allowed and ignored. Raises `ConfigError`."""
    if not isinstance(node, Mapping):
        raise ConfigError(f"{place}={show(node)}: must be a group of keys, not a single value")
    hints = typing.get_type_hints(cls)
    fields = {field.name: field for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
    refuse_unknown(node, {*fields, *extra}, place)
    values: dict[str, object] = {}
    for name, field in fields.items():
        key = f"{place}.{name}" if place else name
        if name in node:
            values[name] = _convert(hints[name], node[name], key, field.metadata.get(_RULE, Rule()))
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise ConfigError(f"{key}: is missing")
    return cls(**values)


def unreadable_fields(cls: type) -> list[str]:
    """`NAME: TYPE` for each field of a dataclass whose values no text can give: none of the types above but mappings
    and dataclasses."""
    hints = typing.get_type_hints(cls)
    names = [field.name for field in dataclasses.fields(cls)]  # type: ignore[arg-type]
    return [f"{name}: {hints[name]}" for name in names if not _is_readable(hints[name])]


def _is_readable(wanted: Any) -> bool:
    origin, parts = typing.get_origin(wanted), typing.get_args(wanted)
    if origin in (types.UnionType, typing.Union):
        inner = [part for part in parts if part is not type(None)]
        return len(inner) == 1 and _is_readable(inner[0])
    if origin is typing.Literal:
        return all(isinstance(part, str) for part in parts)
    if origin is tuple:
        return bool(parts) and all(part is Ellipsis or _is_readable(part) for part in parts)
    return wanted in (int, float, bool, str)


def refuse_unknown(node: Mapping[Any, object], known: Iterable[str], place: str) -> None:
    """Raise `ConfigError` for the first key of `node` that is not in `known`."""
    names = set(known)
    for name in node:
        if name not in names:
            key = f"{place}.{name}" if place else str(name)
            full = [f"{place}.{other}" if place else other for other in names]
            raise ConfigError(f"{key}: unknown key; {nearest_key(key, full)}")


def _convert(wanted: Any, value: object, key: str, rule: Rule) -> object:
    origin = typing.get_origin(wanted)
    if origin in (types.UnionType, typing.Union):
        (inner,) = [part for part in typing.get_args(wanted) if part is not type(None)]
        return None if value is None else _convert(inner, value, key, rule)
    if origin is typing.Literal:
        return _within(_convert_scalar(str, value, key), key, Rule(choices=typing.get_args(wanted)))
    if origin is tuple:
        return _convert_tuple(typing.get_args(wanted), value, key, rule)
    if dataclasses.is_dataclass(wanted):
        return read(typing.cast(type, wanted), value, key)
    if origin is not None and issubclass(origin, Mapping):
        if not isinstance(value, Mapping):
            raise ConfigError(f"{key}={show(value)}: must be a group of keys, not a single value")
        return dict(value)
    return _within(_convert_scalar(wanted, value, key, rule), key, rule)


def _convert_tuple(parts: tuple[Any, ...], value: object, key: str, rule: Rule) -> tuple[object, ...]:
    if isinstance(value, str) and parts[0] is str:
        value = [value]  # One path is a list of one.
    if not isinstance(value, (list, tuple)):
        raise ConfigError(f"{key}={show(value)}: must be a list such as [a,b]")
    if parts[-1] is Ellipsis:
        nested = not _is_readable(parts[0])
        places = [f"{key}[{number}]" if nested else key for number in range(len(value))]
        return tuple(_convert(parts[0], item, place, rule) for item, place in zip(value, places, strict=True))
    if len(value) != len(parts):
        raise ConfigError(f"{key}={show(value)}: must be a list of {len(parts)} values")
    return tuple(_convert(part, item, key, rule) for part, item in zip(parts, value, strict=True))


def _convert_scalar(wanted: type, value: object, key: str, rule: Rule = Rule()) -> object:
    if wanted is object:
        return value
    if wanted is bool and isinstance(value, bool):
        return value
    if wanted is int and isinstance(value, int) and not isinstance(value, bool):
        return value
    if wanted is int and isinstance(value, float) and math.isfinite(value):
        least = -math.inf if rule.at_least is None else rule.at_least
        most = math.inf if rule.at_most is None else rule.at_most
        best = round(min(max(value, least), most))
        raise ConfigError(f"{key}={show(value)}: must be a whole number; nearest valid: {best}")
    if wanted is float and isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    if wanted is str and isinstance(value, str):
        return value
    if wanted is str and isinstance(value, (int, float)) and not isinstance(value, bool):
        return str(value)  # A folder may be named 2024.
    if wanted is str and value is False:
        return "off"  # YAML 1.1 reads the word off as a boolean.
    names = {bool: "true or false", int: "a whole number", float: "a number", str: "a word"}
    raise ConfigError(f"{key}={show(value)}: must be {names[wanted]}")


def _within(value: object, key: str, rule: Rule) -> object:
    if rule.choices and isinstance(value, str) and value not in rule.choices:
        best = nearest(value, rule.choices)
        tail = f"; nearest valid: {best}" if best else ""
        raise ConfigError(f"{key}={value}: must be one of {', '.join(rule.choices)}{tail}")
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return value
    if not math.isfinite(value):
        raise ConfigError(f"{key}={value}: must be a finite number")
    if rule.at_least is not None and value < rule.at_least:
        raise ConfigError(f"{key}={value}: must be at least {rule.at_least:.15g}; nearest valid: {rule.at_least:.15g}")
    if rule.at_most is not None and value > rule.at_most:
        raise ConfigError(f"{key}={value}: must be at most {rule.at_most:.15g}; nearest valid: {rule.at_most:.15g}")
    if rule.above is not None and value <= rule.above:
        raise ConfigError(f"{key}={value}: must be above {rule.above:g}")
    if rule.below is not None and value >= rule.below:
        raise ConfigError(f"{key}={value}: must be below {rule.below:g}")
    return value
