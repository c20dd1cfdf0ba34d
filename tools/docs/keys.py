"""keys.md: every key with its type and bounds (`elaswave_fx/config/`), its default and its meaning (`conf/`)."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from elaswave_fx.config import groups
from elaswave_fx.config.faults import KINDS, PHASES, Fault
from elaswave_fx.config.read import NOT_AVAILABLE_YET
from elaswave_fx.config.schema import Rule, show
from elaswave_fx.config.types import (
    LEAST,
    MOST,
    MOST_BYTES,
    Config,
    DataConfig,
    HostLinkConfig,
    OptimizerConfig,
    PointConfig,
    ScheduleConfig,
    TokenizerConfig,
)
from elaswave_fx.passes.pipeline import BUILT_IN
from tools.docs.comments import Key, read_keys
from tools.docs.markdown import ROOT, code, field_docs, first_paragraph, page_of, prose, table, wrapped

CONF = ROOT / "conf"
GROUPS: Mapping[str, tuple[type, ...]] = {
    "model": (groups.GptOptions, groups.ResnetOptions, groups.TwoTowerOptions, groups.HfOptions),
    "data": (DataConfig,),
    "tokenizer": (TokenizerConfig,),
    "optimizer": (OptimizerConfig,),
    "schedule": (ScheduleConfig,),
}
"""Groups with options of their own keys, and the classes that have the fields."""

LINKS: Mapping[str, str] = {
    "precision": "../start/recipes.md#precision",
    "exact": "../explain/exactness.md",
    "policy": "../explain/planning.md#policies",
    "parallel.schedule": "../explain/concepts.md#the-split-backward",
    "planner.goals": "../explain/planning.md#target-layouts",
    "planner.mtbf_s": "../explain/planning.md#candidate-layouts",
    "switch.memory": "../explain/planning.md#memory-while-replicas-sync",
    "passes.dump": "../start/passes.md#looking-at-graphs",
    "passes.pipeline": "../start/passes.md#the-pipeline-as-text",
    "passes.extra": "../start/passes.md#using-it",
    "rng.reshard": "../explain/exactness.md#convergence-under-failures",
    "checkpoint.every": "../start/operating.md#checkpoints",
    "launch.failure_domain": "../start/operating.md#machines",
    "launch.grace_s": "../start/operating.md#one-rank-less",
    "power.points": "../start/operating.md#clocks-and-energy",
    "device": "../explain/emulation.md",
    "data.transform": "../start/recipes.md#a-transform-of-samples",
    "faults": "#faults",
}
"""Pages that explain a key."""

ANY = Rule()
_ENTRIES = {"topology.links": HostLinkConfig, "power.points": PointConfig}
_HIDDEN = ("defaults", "hydra")


def page() -> str:
    """Return the page."""
    _, keys = read_keys(CONF / "config.yaml")
    keys = [key for key in keys if key.path.split(".")[0] not in _HIDDEN]
    names = {key.path for key in keys} | {f"launch.{key.path}" for key in read_keys(CONF / "launch" / "local.yaml")[1]}
    tops = [key for key in keys if "." not in key.path]
    plain = [key for key in tops if key.default]
    sections = ["## The run\n\n" + _table(plain, names)]
    sections += [
        f"## {top.path}\n\n" + (f"{_sentence(top.comment, names)}.\n\n" if top.comment else "")
        + _table([key for key in keys if key.path.startswith(f"{top.path}.") and key.default], names)
        for top in tops if not top.default
    ]  # fmt: skip
    sections += [_group(name, classes, names) for name, classes in GROUPS.items()]
    sections += [_launch(names), _faults(), _not_built()]
    return page_of(
        "Keys",
        "Every key: its default from `conf/config.yaml` or `conf/GROUP/OPTION.yaml`, what it may be, and its meaning. "
        "`--cfg job` prints what a command line composes to. An unknown key is an error that names the nearest one. "
        "Keys with a link are explained there. "
        "How to write recipes and classes of your own: [recipes](../start/recipes.md). RUN is the run directory, "
        "`hydra.run.dir`.",
        *sections,
    )


def type_words(hint: Any, rule: Rule = ANY) -> str:
    """Return what a field may be, in words."""
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        (inner,) = [part for part in parts if part is not type(None)]
        return f"{type_words(inner, rule)}, or `null`"
    if origin is tuple:
        if parts[-1] is Ellipsis:
            return f"list of {type_words(parts[0], rule)}"
        return "[" + ", ".join(type_words(part) for part in parts) + "]" + _bounds(rule)
    if origin is typing.Literal:
        return ", ".join(map(code, parts))
    if dataclasses.is_dataclass(hint):
        return "{" + ", ".join(field.name for field in dataclasses.fields(hint)) + "}"
    if rule.choices:
        return ", ".join(map(code, rule.choices))
    if isinstance(hint, type) and hint in (int, float, bool, str):
        return hint.__name__ + _bounds(rule)
    return "keys"


def _bounds(rule: Rule) -> str:
    least, most = rule.at_least, rule.at_most
    words = [f"≥ {least:g}"] if least is not None and least != LEAST else []
    words += [f"> {rule.above:g}"] if rule.above is not None else ["> 0"] if least == LEAST else []
    words += [f"≤ {most:g}"] if most is not None and most < MOST and most != MOST_BYTES else []
    words += [f"< {rule.below:g}"] if rule.below is not None else []
    return f" {', '.join(words)}" if words else ""


def _field(cls: type, name: str) -> str:
    field = {each.name: each for each in dataclasses.fields(cls)}.get(name)
    if field is None:
        return ""
    return type_words(typing.get_type_hints(cls)[name], field.metadata.get("rule", Rule()))


def _type_of(path: str) -> str:
    if path in _ENTRIES:
        return f"list of {type_words(_ENTRIES[path])}"
    if path in NOT_AVAILABLE_YET:
        return ", ".join(code(str(value)) for value in NOT_AVAILABLE_YET[path])
    if path == "eval.data":
        return "a group like `data`, or `null`"
    cls: Any = Config
    *parents, leaf = path.split(".")
    for number, parent in enumerate(parents):
        if parent == "passes" and len(parents) > number + 1:
            return _field(BUILT_IN[parents[number + 1]], leaf)
        cls = typing.get_type_hints(cls)[parent]
    if path in ("passes.extra", "faults"):
        return "list of keys"
    return _field(cls, leaf)


def _cells(path: str, default: str, may_be: str, comment: str, names: set[str]) -> tuple[str, str, str, str]:
    """The cells of a key; its values are left out where the meaning lists them all."""
    said = prose(comment, names)
    choices = may_be.removesuffix(", or `null`").split(", ")
    listed = len(choices) > 1 and all(choice.startswith("`") and choice in said for choice in choices)
    link = LINKS.get(path)
    return (f"[{code(path)}]({link})" if link else code(path), default, "" if listed else may_be, said)


def _table(keys: Sequence[Key], names: set[str], prefix: str = "") -> str:
    rows = [
        _cells(prefix + key.path, code(key.default), _type_of(prefix + key.path), key.comment, names) for key in keys
    ]
    return table(("key", "default", "may be", "meaning"), rows)


def _sentence(comment: str, names: set[str]) -> str:
    words = prose(comment, names)
    return words[:1].upper() + words[1:]


def _launch(names: set[str]) -> str:
    _, keys = read_keys(CONF / "launch" / "local.yaml")
    return "## launch\n\n" + _table([key for key in keys if key.path != "kind"], names, "launch.")


def _group(group: str, classes: Sequence[type], names: set[str]) -> str:
    """A group's options, and its keys: alike in all options that have them, or a row for each meaning."""
    files = {path.stem: read_keys(path) for path in sorted((CONF / group).glob("*.yaml"))}
    options = table(
        ("option", "what it is"), [(code(f"{group}={name}"), prose(head, names)) for name, (head, _) in files.items()]
    )
    rows: dict[tuple[str, str], list[tuple[str, str]]] = {}
    for name, (_, keys) in files.items():
        for key in keys:
            if key.path not in ("kind", "name", "_target_") or (key.path == "name" and name == "hf"):
                rows.setdefault((key.path, key.comment), []).append((name, key.default))
    listed = []
    for (path, comment), found in rows.items():
        may_be = _group_type(classes, path, found)
        key, default, may_be, meaning = _cells(f"{group}.{path}", _defaults(found), may_be, comment, names)
        listed.append((key, _options(found, files), default, may_be, meaning))
    return f"## {group}\n\n{options}\n\n" + table(("key", "options", "default", "may be", "meaning"), listed)


def _options(found: Sequence[tuple[str, str]], files: Mapping[str, object]) -> str:
    return "all" if len(found) == len(files) else ", ".join(name for name, _ in found)


def _defaults(found: Sequence[tuple[str, str]]) -> str:
    values = dict.fromkeys(value for _, value in found)
    if len(values) == 1:
        return code(found[0][1]) if found[0][1] != "???" else "required"
    return ", ".join(f"{name} {code(value)}" for name, value in found)


def _group_type(classes: Iterable[type], path: str, found: Sequence[tuple[str, str]]) -> str:
    own = [cls for cls in classes if cls.__name__.removesuffix("Options").lower() in
           {name.replace("_", "") for name, _ in found}]  # fmt: skip
    words = [_field(cls, path) for cls in own or classes]
    return next((each for each in words if each), "")


def _faults() -> str:
    docs, hints = field_docs(Fault), typing.get_type_hints(Fault)
    rules = {"kind": Rule(choices=KINDS), "phase": Rule(choices=PHASES)}
    rows = [
        (code(field.name), "required" if field.default is dataclasses.MISSING else code(show(field.default)),
         type_words(hints[field.name], rules.get(field.name, Rule())), docs.get(field.name, ""))
        for field in dataclasses.fields(Fault)
    ]  # fmt: skip
    said = wrapped(first_paragraph(Fault.__doc__))
    return f"## faults\n\n{said}\n\n" + table(("key", "default", "may be", "meaning"), rows)


def _not_built() -> str:
    rows = [(code(key), ", ".join(code(str(value)) for value in values)) for key, values in NOT_AVAILABLE_YET.items()]
    return (
        "## Not built yet\n\nOther values of these keys are to come (`device=cuda`, `npu`; `launch=env`), and answer, "
        "for instance, `error: device=cuda is not available yet`.\n\n" + table(("key", "values now"), rows)
    )
