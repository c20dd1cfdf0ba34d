"""The program that a run was of, and its data, for checks that need them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from elaswave_fx.audit.record import Part
from elaswave_fx.build.builder import build
from elaswave_fx.data import Source, open_source
from elaswave_fx.errors import ElasWaveError
from elaswave_fx.program.artifact import Artifact
from elaswave_fx.worker.engine import load_artifact


@dataclass(frozen=True)
class Program:
    """An artifact with its constants, and the data opened."""

    artifact: Artifact
    constants: Mapping[str, torch.Tensor]
    source: Source


def find_program(part: Part) -> Program | str:
    """The program of a part, from the cache or captured again; or why there is none, in words."""
    config = part.config
    try:
        folder = config.cache.path / "programs" / part.program if config.cache.path else None
        if folder is not None and folder.is_dir() and Artifact.damage(folder) is None:
            return Program(*load_artifact(folder), open_source(config))
        built = build(config, None)
        if built.folder.name != part.program:
            return f"model, code or data make another program now ({built.folder.name}, not {part.program})"
        return Program(*load_artifact(Path(built.folder)), built.source)
    except ElasWaveError as error:
        return f"model or data cannot be opened as they were: {' '.join(str(error).split())}"
