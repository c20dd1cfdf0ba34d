"""A pass of the user's: a class found by its import path, and whether it is a pass.

    load_pass_class("mine.DropUnitScale")   ->  the class
    load_pass_class("mine.helper")          ->  ConfigError("mine.helper: is no class; a pass is a frozen dataclass …")

This module imports nothing that compiles, so that the cache can be queried for a program with user passes.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Iterable
from typing import Any

from elaswave_fx.config.validation import unreadable_fields
from elaswave_fx.errors import ConfigError, importing

PLACES = ("after", "before")
"""Keys of an entry of `passes.extra` that are not options."""


def load_pass_class(path: str, taken: Iterable[str] = ()) -> Any:
    """The class at an import path. `taken`: names of passes that it must not have.

    Raises ConfigError with the path, the fault and the requirements of a pass.
    """
    module, _, name = path.rpartition(".")
    try:
        with importing():
            found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError, TypeError, SyntaxError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"{path}: cannot be loaded: {type(error).__name__}: {reason}") from error
    fault = _fault(found, set(taken))
    if fault is not None:
        raise ConfigError(f"{path}: {fault}")
    return found


def _fault(found: Any, taken: set[str]) -> str | None:
    """Why an object is not a pass; None if it is one."""
    if not isinstance(found, type):
        return "is no class; a pass is a frozen dataclass with `name`, `apply(program)` and a docstring"
    if not dataclasses.is_dataclass(found) or not found.__dataclass_params__.frozen:  # type: ignore[attr-defined]
        return "is no frozen dataclass; a pass is one, its fields are its options"
    if not callable(getattr(found, "apply", None)):
        return "has no method apply(program), which returns the program that it makes"
    name = getattr(found, "name", None)
    if not isinstance(name, str) or not name.isidentifier():
        return 'has no name; a pass has one, such as name: ClassVar[str] = "drop_unit_scale"'
    if name in taken:
        return f"is named {name}, as a pass of the compiler is"
    # A dataclass without a docstring gets its signature as one.
    if not (found.__doc__ or "").strip() or (found.__doc__ or "").startswith(f"{found.__name__}("):
        return "has no docstring; its first line says why the pass is there"
    wrong = unreadable_fields(found)
    if wrong:
        return f"its option {wrong[0]}; options are int, float, bool, str, tuples of them, or one of them or None"
    reserved = [field.name for field in dataclasses.fields(found) if field.name in PLACES]
    if reserved:
        return f"its option {reserved[0]} cannot be set: passes.extra takes that key for the place of the pass"
    return None
