"""The optimizer as a unit program, and the time that it takes. Both are cached, unless the optimizer is the user's.

update_program(config)  ->  {"name": "update", "nodes": […], …}
update_seconds(config)  ->  9.1e-10     # an element
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from elaswave_fx import _native
from elaswave_fx.build.program_cache import cache_folder
from elaswave_fx.build.program_key import code_digest
from elaswave_fx.config.keys import Config
from elaswave_fx.data.cached import cached_json, digest
from elaswave_fx.devices import make_device
from elaswave_fx.optim import optimizer as optimizer_module
from elaswave_fx.optim.optimizer import Optimizer, hyper_row, make_optimizer, trace_update, trace_users_update

_UPDATED = 1 << 22
"""Elements on which the optimizer is measured, more than a core's caches hold."""

_UPDATES = 3
"""Number of measured updates."""


def update_program(config: Config) -> Mapping[str, Any]:
    """The optimizer as a unit program, cached unless it is the user's, which may change under its name."""
    optimizer = make_optimizer(config.optimizer)

    def make() -> str:
        from elaswave_fx.passes.unit_program import lower_graph

        users = config.optimizer.name == "target"
        graph = trace_users_update(optimizer, str(config.optimizer.target)) if users else trace_update(optimizer)
        return json.dumps(lower_graph("update", graph))

    return json.loads(_cached_of(optimizer, config, "update", make))


def update_seconds(config: Config) -> float:
    """Seconds in which an engine updates an element; cached as the optimizer's program."""
    optimizer = make_optimizer(config.optimizer)

    def make() -> str:
        make_device(config.device).set_up(threads=1)  # as in workers
        numbers = hyper_row(optimizer, 0, 1e-3, "decay")
        taken_s = _native.update_seconds(update_program(config), numbers, _UPDATED, _UPDATES)
        return json.dumps(taken_s / _UPDATED)

    return float(json.loads(_cached_of(optimizer, config, "update_seconds", make)))


def _cached_of(optimizer: Optimizer, config: Config, name: str, make: Callable[[], str]) -> str:
    folder = cache_folder(config) if config.optimizer.name != "target" else None
    code = Path(optimizer_module.__file__).read_bytes()
    return cached_json(folder, name, digest(repr(optimizer), torch.__version__, code, code_digest()), make)
