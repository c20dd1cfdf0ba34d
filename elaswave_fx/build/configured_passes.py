"""The pipeline of the keys under `passes`, and the cache's key of user passes.

make_pipeline(config.passes)    ->  STANDARD with options set, or that of `passes.pipeline`, and passes.extra in it
user_pass_sources(config.passes)  ->  (("mine.DropUnitScale", "3f0c…"),)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from elaswave_fx.config.keys import PassesConfig
from elaswave_fx.config.validation import read, refuse_unknown, show
from elaswave_fx.errors import ConfigError
from elaswave_fx.passes.pipeline_text import read_text, write_pass
from elaswave_fx.passes.user_pass import PLACES, load_pass_class
from elaswave_fx.program.model_fingerprint import class_sources

DEFAULT_PLACE = "normalize"
"""The pass after which a user's pass runs by default: all later passes then see its result."""


def make_pipeline(config: PassesConfig) -> Any:
    """The `Pipeline` of the keys. Raise ConfigError with the key on failure."""
    # Importing the passes takes seconds, which a cached program saves.
    from elaswave_fx.passes.pipeline import BUILT_IN, Pipeline

    refuse_unknown(config.options, BUILT_IN, "passes")
    pipeline = Pipeline(
        tuple(read(kind, config.options.get(name, {}), f"passes.{name}") for name, kind in BUILT_IN.items())
    )
    if config.pipeline is not None:
        try:
            pipeline = Pipeline.parse(config.pipeline, pipeline)
            pipeline.refuse_incomplete()
        except ConfigError as error:
            raise ConfigError(f"passes.pipeline: {error}") from error
    last: dict[str, str] = {}  # Entries of one place keep their order: each goes behind the last one put there.
    for number, entry in enumerate(config.extra):
        key = f"passes.extra[{number}]"
        step = _user_pass(entry, key, BUILT_IN)
        before, after = _place(entry, key)
        try:
            if before is not None:
                pipeline = pipeline.with_pass(step, before=before)
            else:
                pipeline = pipeline.with_pass(step, after=last.get(after, after))
                last[after] = step.name
        except ConfigError as error:
            raise ConfigError(f"{key}.{'after' if before is None else 'before'}={error}") from error
    return pipeline


def user_pass_sources(config: PassesConfig) -> tuple[tuple[str, str], ...]:
    """The import path and a digest of the source of every user pass. Raise ConfigError if one cannot be loaded."""
    return tuple((f"{kind.__module__}.{kind.__qualname__}", class_sources(kind)) for kind in user_pass_classes(config))


def user_pass_classes(config: PassesConfig) -> list[type]:
    """The class of every user pass. Raise ConfigError if one cannot be loaded."""
    kinds = [_load(entry, f"passes.extra[{number}]") for number, entry in enumerate(config.extra)]
    if config.pipeline is not None:
        try:
            kinds += [load_pass_class(each.name) for each in read_text(config.pipeline) if "." in each.name]
        except ConfigError as error:
            raise ConfigError(f"passes.pipeline: {error}") from error
    return kinds


def user_passes_of(pipeline: str) -> tuple[str, ...]:
    """User passes in a pipeline's text, as written there."""
    return tuple(write_pass(each.name, each.options) for each in read_text(pipeline) if "." in each.name)


def _user_pass(entry: Mapping[str, object], key: str, taken: Mapping[str, Any]) -> Any:
    options = {name: value for name, value in entry.items() if name not in ("_target_", *PLACES)}
    return read(_load(entry, key, taken), options, key)


def _load(entry: Mapping[str, object], key: str, taken: Iterable[str] = ()) -> Any:
    """The class named by an entry of `passes.extra`."""
    target = entry.get("_target_")
    if target is None:
        raise ConfigError(f"{key}._target_: is missing; it is the import path of a pass, such as mine.DropUnitScale")
    if not isinstance(target, str) or "." not in target.strip("."):
        raise ConfigError(f"{key}._target_={show(target)}: must be an import path such as mine.DropUnitScale")
    try:
        return load_pass_class(target, taken)
    except ConfigError as error:
        raise ConfigError(f"{key}._target_={error}") from error


def _place(entry: Mapping[str, object], key: str) -> tuple[str | None, str]:
    """(before, after) as names of passes; `before` is None where `after` counts."""
    before, after = entry.get("before"), entry.get("after")
    if before is not None and after is not None:
        raise ConfigError(f"{key}: has both after={show(after)} and before={show(before)}; one of them says the place")
    return None if before is None else str(before), DEFAULT_PLACE if after is None else str(after)
