"""Operators that are not torch's: workers execute them, and have to import first what registers them.

unit programs that call mine::swish, a model of class net.Net   ->   ("net",)
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable

from elaswave_fx.errors import ConfigError
from elaswave_fx.program.artifact import Artifact

_KNOWN = ("aten", "elaswave", "prim", "prims", "int", "float")


def foreign_operators(artifact: Artifact) -> tuple[str, ...]:
    """The operators that neither torch nor this library brings, in order of first use."""
    instructions = [entry for program in artifact.programs.values() for entry in program["instructions"]]
    return tuple(dict.fromkeys(e["op"] for e in instructions if e["op"].split("::")[0] not in _KNOWN))


def defining_modules(artifact: Artifact, classes: Iterable[type]) -> tuple[str, ...]:
    """The Python modules of `classes` (of a model's modules, a user's passes), if the programs call foreign operators:
    what ran with these imported runs."""
    if not foreign_operators(artifact):
        return ()
    names = dict.fromkeys(kind.__module__ for kind in classes)
    return tuple(name for name in names if name.split(".")[0] != "torch")


def import_modules(artifact: Artifact) -> None:
    """Import what `defining_modules` found. Raises ConfigError that names operator and module."""
    for name in artifact.modules:
        try:
            importlib.import_module(name)
        except ImportError as error:
            raise ConfigError(
                f"model: {', '.join(foreign_operators(artifact))} cannot run in a worker: {name} cannot be imported "
                f"({error}); a way out is to register operators in a module on the import path"
            ) from error
