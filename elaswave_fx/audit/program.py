"""The program that a run was of, and its data, for checks that need them; and the code that the run's files name.

code_of(part.config)                  ->  ("my_models.Net",)
find_program(part, runs_code=False)   ->  "takes code that run.json names (my_models.Net), which …"
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from elaswave_fx.audit.record import Part
from elaswave_fx.build.builder import build
from elaswave_fx.config.keys import Config
from elaswave_fx.data import Source, open_source
from elaswave_fx.errors import ElasWaveError
from elaswave_fx.files import others_may_change
from elaswave_fx.program.artifact import Artifact
from elaswave_fx.worker.engine import load_artifact


@dataclass(frozen=True)
class Program:
    """An artifact with its constants, and the data opened."""

    artifact: Artifact
    constants: Mapping[str, torch.Tensor]
    source: Source


def code_of(config: Config) -> tuple[str, ...]:
    """The import paths of the code that a run's configuration names, which would be run with it."""
    by_key = [
        config.model.name if config.model.kind == "target" else None,
        config.data.name if config.data.kind == "target" else None,
        config.optimizer.target,
        config.schedule.target,
    ]
    options = (config.model.options, config.data.options, config.data.transform, config.passes.extra)
    return tuple(dict.fromkeys(str(path) for path in (*by_key, *_targets(options)) if path))


def _targets(options: Any) -> Iterator[object]:
    """What options name by `_target_`, however deep."""
    if isinstance(options, Mapping):
        if "_target_" in options:
            yield options["_target_"]
        options = tuple(options.values())
    if isinstance(options, (list, tuple)):
        for each in options:
            yield from _targets(each)


def find_program(part: Part, *, runs_code: bool) -> Program | str:
    """The program of a part, from the cache or captured again; or why there is none, in words. `runs_code`: also code
    that the files of the run name."""
    config, code = part.config, code_of(part.config)
    if code and not runs_code:
        return f"takes code that run.json names ({', '.join(code)}), which only replay=STEPS runs"
    try:
        folder = config.cache.path / "programs" / part.program if config.cache.path else None
        is_ours = folder is not None and folder.is_dir() and not others_may_change(folder.parent)
        if folder is not None and is_ours and Artifact.damage(folder) is None:
            return Program(*load_artifact(folder), open_source(config))
        built = build(config, None)
        if built.folder.name != part.program:
            return f"model, code or data make another program now ({built.folder.name}, not {part.program})"
        return Program(*load_artifact(Path(built.folder)), built.source)
    except ElasWaveError as error:
        return f"model or data cannot be opened as they were: {' '.join(str(error).split())}"
