"""keys.md: every key with its type and bounds (`elaswave_fx/config/`), its default and its meaning (`conf/`)."""

from __future__ import annotations

import dataclasses
import re
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from elaswave_fx.config import groups
from elaswave_fx.config.faults import KINDS, PHASES, Fault
from elaswave_fx.config.keys import (
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
from elaswave_fx.config.read import NOT_AVAILABLE_YET
from elaswave_fx.config.validation import Rule, show
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
    "lab.policy": "../explain/planning.md#policies",
    "parallel.schedule": "../explain/concepts.md#the-split-backward",
    "lab.goals": "../explain/planning.md#target-layouts",
    "planner.mtbf_s": "../explain/planning.md#candidate-layouts",
    "switch.memory": "../explain/planning.md#memory-while-replicas-sync",
    "passes.dump": "../start/passes.md#looking-at-graphs",
    "passes.pipeline": "../start/passes.md#the-pipeline-as-text",
    "passes.extra": "../start/passes.md#using-it",
    "lab.reshard_rng": "../explain/exactness.md#convergence-under-failures",
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
LAB = "lab"
"""The group that no usual run sets, which comes last."""
ENOUGH = 3
"""Groups with fewer keys stand in the table of the run."""
_BOUND = re.compile(r",? [≥>≤<] [\d.e+-]+")
_OBVIOUS = re.compile(r" (≥ 0|≥ 0, ≤ 65535)(?=,|$)")


def page() -> str:
    """Return the page."""
    _, keys = read_keys(CONF / "config.yaml")
    keys = [key for key in keys if key.path.split(".")[0] not in _HIDDEN]
    names = {key.path for key in keys} | {f"launch.{key.path}" for key in read_keys(CONF / "launch" / "local.yaml")[1]}
    tops = [key for key in keys if "." not in key.path]
    plain = [key for key in tops if key.default]
    below = {top: [key for key in keys if key.path.startswith(f"{top.path}.") and key.default] for top in tops}
    few = [key for under in below.values() if len(under) < ENOUGH for key in under]
    sections = ["## The run\n\n" + _table([*plain, *few], names)]
    *usual, lab = (
        f"## {top.path}\n\n" + (f"{_sentence(top.comment, names)}.\n\n" if top.comment else "") + _table(under, names)
        for top, under in sorted(below.items(), key=lambda item: item[0].path == LAB) if len(under) >= ENOUGH
    )  # fmt: skip
    sections += [*usual, *(_group(name, classes, names) for name, classes in GROUPS.items())]
    sections += [_launch(names), _faults(), lab, _not_built()]
    return page_of(
        "Keys",
        "Every key with its default, from `conf/config.yaml` or `conf/GROUP/OPTION.yaml`, and its meaning. "
        "Other values and bounds stand beside a default where it does not show them; no number is negative. "
        "`--cfg job` prints what a command line composes to. "
        "Links explain a key; [recipes](../start/recipes.md) says how to write one. RUN is the run directory.",
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


def _cells(path: str, default: str, may_be: str, comment: str, names: set[str]) -> tuple[str, str, str]:
    """The cells of a key; what it may be is left out where default or meaning show it."""
    said = prose(comment, names)
    link = LINKS.get(path)
    return (f"[{code(path)}]({link})" if link else code(path), _default(default, may_be, said), said)


def _default(default: str, may_be: str, meaning: str) -> str:
    """A default as code, with what it does not show: `100` of `int ≥ 1` is alone, `0.1` of `float < 1` is not."""
    may_be = _OBVIOUS.sub("", may_be.removesuffix(", or `null`"))
    choices = [choice for choice in may_be.split(", ") if choice.startswith("`")]
    others = [choice for choice in choices if choice.strip("`") not in default]
    if choices:
        listed = not others or all(choice in meaning for choice in choices)
        return default if listed else f"{default}, or {', '.join(others)}"
    return ", ".join([default, *(bound.strip(", ") for bound in _BOUND.findall(may_be))])


def _table(keys: Sequence[Key], names: set[str], prefix: str = "") -> str:
    rows = [
        _cells(prefix + key.path, code(key.default), _type_of(prefix + key.path), key.comment, names) for key in keys
    ]
    return table(("key", "default", "meaning"), rows)


def _sentence(comment: str, names: set[str]) -> str:
    words = prose(comment, names)
    return words[:1].upper() + words[1:]


def _launch(names: set[str]) -> str:
    _, keys = read_keys(CONF / "launch" / "local.yaml")
    return "## launch\n\n" + _table([key for key in keys if key.path != "kind"], names, "launch.")


def _group(group: str, classes: Sequence[type], names: set[str]) -> str:
    """A group's options with those of their keys that need no words, and the other keys: a row for each meaning."""
    files = {path.stem: read_keys(path) for path in sorted((CONF / group).glob("*.yaml"))}
    rows: dict[tuple[str, str], list[tuple[str, str]]] = {}
    options = []
    for name, (head, keys) in files.items():
        hidden = {"kind", "_target_", *([] if name == "hf" else ["name"])}
        own = [key for key in keys if key.path not in hidden]
        for key in own:
            if key.comment:
                rows.setdefault((key.path, key.comment), []).append((name, key.default))
        plain = ", ".join(code(f"{key.path}={key.default}") for key in own if not key.comment)
        options.append(f"- {code(f'{group}={name}')}: {prose(head, names)}" + (f" Keys: {plain}." if plain else ""))
    listed = []
    for (path, comment), found in rows.items():
        may_be = _group_type(classes, path, found)
        key, default, meaning = _cells(f"{group}.{path}", _defaults(found), may_be, comment, names)
        listed.append((key, _options(found, files), default, meaning))
    return "\n\n".join([f"## {group}", "\n".join(options), table(("key", "options", "default", "meaning"), listed)])


def _options(found: Sequence[tuple[str, str]], files: Mapping[str, object]) -> str:
    names = [name for name, _ in found]
    others = [name for name in files if name not in names]
    return "all" if not others else f"all but {others[0]}" if len(others) == 1 < len(names) else ", ".join(names)


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
    rows = []
    for field in dataclasses.fields(Fault):
        default = "required" if field.default is dataclasses.MISSING else code(show(field.default))
        may_be = type_words(hints[field.name], rules.get(field.name, Rule()))
        meaning = docs.get(field.name, "")
        rows.append((code(field.name), _default(default, may_be, meaning), meaning))
    said = wrapped(first_paragraph(Fault.__doc__))
    return f"## faults\n\n{said}\n\n" + table(("key", "default", "meaning"), rows)


def _not_built() -> str:
    keys = ", ".join(code(key) for key in NOT_AVAILABLE_YET)
    return "## Not built yet\n\n" + wrapped(
        f"Other values of {keys} are to come (`device=cuda`, `npu`; `launch=env`) and refused."
    )
