"""Operators from outside of torch: workers must import the modules that register them before executing.

unit programs that call mine::swish, a model of class net.Net   ->   ("net",)
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable

from elaswave_fx.errors import ConfigError
from elaswave_fx.program.artifact import Artifact

_KNOWN = ("aten", "elaswave", "prim", "prims", "int", "float")


def foreign_operators(artifact: Artifact) -> tuple[str, ...]:
    """Operators from neither torch nor this library, in order of first use."""
    instructions = [entry for program in artifact.programs.values() for entry in program["instructions"]]
    return tuple(dict.fromkeys(e["op"] for e in instructions if e["op"].split("::")[0] not in _KNOWN))


def defining_modules(artifact: Artifact, classes: Iterable[type]) -> tuple[str, ...]:
    """Python modules of `classes` (a model's modules, a user's passes), if the programs call foreign operators: these
    imports are known to suffice."""
    if not foreign_operators(artifact):
        return ()
    names = dict.fromkeys(kind.__module__ for kind in classes)
    return tuple(name for name in names if name.split(".")[0] != "torch")


def import_modules(artifact: Artifact) -> None:
    """Import the modules of `defining_modules`. Raise ConfigError with the operator and the module on failure."""
    for name in artifact.modules:
        try:
            importlib.import_module(name)
        except ImportError as error:
            raise ConfigError(
                f"model: {', '.join(foreign_operators(artifact))} cannot run in a worker: {name} cannot be imported "
                f"({error}); a way out is to register operators in a module on the import path"
            ) from error
