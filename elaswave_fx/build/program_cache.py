"""Programs kept between jobs: a folder each, named by the program's key, whose content is not trusted.

home, notes = home_of_programs(config, spare)     # the cache, or `spare` with the reason
artifact, damage = cached_program(config, model, home / key)
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import nn

from elaswave_fx.build.check_sums import adds_up
from elaswave_fx.build.configured_passes import user_pass_classes
from elaswave_fx.checkpoint.initial_state import tensor_digest
from elaswave_fx.config.keys import Config
from elaswave_fx.data.cached import digest
from elaswave_fx.errors import ConfigError, PlanError
from elaswave_fx.files import others_may_change
from elaswave_fx.program.artifact import Artifact
from elaswave_fx.program.operators import defining_modules

Batch = dict[str, torch.Tensor]


def home_of_programs(config: Config, spare: Path) -> tuple[Path, tuple[str, ...]]:
    """The folder of programs: the cache if it is writable, which is tested before anything is compiled."""
    if not config.cache.path:
        return spare, ()
    home = config.cache.path / "programs"
    try:
        if others_may_change(home):
            return spare, (f"cache.dir={config.cache.path}: another user may change it; no program is taken or kept",)
        home.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=home):
            return home, ()
    except OSError as error:
        return spare, (f"cache.dir={config.cache.path}: cannot be written ({error.strerror}); the program is not kept",)


def cache_folder(config: Config) -> Path | None:
    """The folder for measured costs and the like; None if there is none that is ours alone and writable."""
    home, trouble = home_of_programs(config, Path())
    return home if config.cache.path and not trouble else None


@contextlib.contextmanager
def writing_program(config: Config, target: Path) -> Iterator[None]:
    """Turn a full disk into an error that the user can fix."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        shutil.rmtree(target.with_name(f"{target.name}.{os.getpid()}.partial"), ignore_errors=True)
        cached = config.cache.path is not None and config.cache.path in target.parents
        key = f"cache.dir={config.cache.path}" if cached else f"hydra.run.dir={target.parent}"
        cure = "; nearest valid: cache.enabled=false" if cached else ""
        raise ConfigError(f"{key}: the program cannot be written ({error}){cure}") from error


def cached_program(config: Config, model: nn.Module, folder: Path) -> tuple[Artifact | None, str | None]:
    """The cached program, or its fault; neither if there is none. A program may only import modules that the model and
    its passes name."""
    damage = Artifact.damage(folder)
    if damage is not None or not folder.exists():
        return None, damage
    try:
        artifact = Artifact.load(folder)
    except (PlanError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        return None, f"it is no program ({error})"
    own = defining_modules(artifact, (*map(type, model.modules()), *user_pass_classes(config.passes)))
    foreign = sorted(set(artifact.modules) - set(own))
    if foreign:
        return None, f"it wants to import {foreign[0]}, which the model does not name"
    return artifact, None


def digest_of_samples(batches: tuple[Batch, Batch]) -> str:
    """A name of the example batches by their values."""
    tensors = [(name, tensor) for batch in batches for name, tensor in batch.items()]
    return digest(*(part for name, tensor in tensors for part in (name, tensor_digest(tensor))))


def is_for_samples(
    samples: str, batches: tuple[Batch, Batch], config: Config, artifact: Artifact, model: nn.Module, folder: Path
) -> bool:
    """Whether the sums of a cached program are sums on these samples too. If not, the samples get a program of their
    own."""
    if samples in Artifact.tried(folder):
        return True
    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    if not adds_up(artifact, Artifact.load_constants(folder), state, batches):
        return False
    with writing_program(config, folder):
        Artifact.save_tried(folder, samples)
    return True
