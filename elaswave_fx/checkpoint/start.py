"""The first step of a run: 0, or that after a checkpoint. The launcher determines it before anything is built.

find_start(config, run_dir)   ->  Start(step=50, path=RUN/checkpoints/step-50, same_run=True, …)
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from elaswave_fx.checkpoint.folder import MANIFEST, complete
from elaswave_fx.checkpoint.manifest import changed_keys, check_files, check_samples, read_manifest
from elaswave_fx.config.keys import Config
from elaswave_fx.config.validation import nearest
from elaswave_fx.errors import ConfigError, DamagedCheckpoint


@dataclass(frozen=True)
class Start:
    """`step` steps are completed in the checkpoint at `path`; `same_run`: this run directory made it, so its lines are
    kept. `lines` are for the user. `damaged`: newer checkpoints that were skipped."""

    step: int = 0
    path: Path | None = None
    same_run: bool = False
    lines: tuple[str, ...] = ()
    damaged: tuple[Path, ...] = ()


ANEW = Start()


def checkpoint_folder(config: Config, run_dir: Path) -> Path | None:
    """Return the folder of this run's checkpoints, None if it makes none."""
    if config.checkpoint.dir is not None:
        return _resolved("checkpoint.dir", config.checkpoint.dir)
    return run_dir / "checkpoints" if config.checkpoint.every else None


def find_start(config: Config, run_dir: Path) -> Start:
    """The start that `resume` requests. Raises ConfigError if the checkpoint is missing or does not fit."""
    folder = checkpoint_folder(config, run_dir)
    if config.checkpoint.dir is not None and folder is not None:
        _try(folder)
    start = ANEW
    if config.resume == "auto":
        found = complete(folder or run_dir / "checkpoints")
        if not found:
            line = f"resume=auto: no complete checkpoint in {folder or run_dir / 'checkpoints'}; starting anew"
            return Start(lines=(line,))
        start = _newest_whole(config, found, run_dir)
    elif config.resume != "off":
        start = _start_at(config, _named(config.resume), run_dir)
    newest = max(complete(folder), default=0) if folder is not None else 0
    if newest > start.step and not start.damaged:
        raise ConfigError(
            f"checkpoint.dir={folder}: holds step-{newest} of an earlier run, and this one starts at step "
            f"{start.step}; nearest valid: resume=auto, or another checkpoint.dir"
        )
    return start


def _newest_whole(config: Config, found: Mapping[int, Path], run_dir: Path) -> Start:
    """The start at the newest undamaged checkpoint. Raises ConfigError if all are damaged, or if it does not fit."""
    damaged: dict[Path, DamagedCheckpoint] = {}
    for step in sorted(found, reverse=True):
        try:
            start = _start_at(config, found[step], run_dir)
        except DamagedCheckpoint as error:
            damaged[found[step]] = error
        else:
            told = (f"DAMAGED, kept as {path.name}.damaged: {error}" for path, error in damaged.items())
            return replace(start, lines=(*told, *start.lines), damaged=tuple(damaged))
    raise next(iter(damaged.values()))


def _start_at(config: Config, path: Path, run_dir: Path) -> Start:
    manifest = read_manifest(path)
    check_samples(manifest, config, path)
    check_files(path, manifest)
    line = f"resuming after step {manifest.step} from {path}"
    changed = changed_keys(manifest, config)
    lines = (line, f"changed since that checkpoint: {', '.join(changed)}") if changed else (line,)
    same_run = run_dir in path.parents or manifest.run_dir == str(run_dir)
    return Start(manifest.step, path, same_run, lines)


def _resolved(key: str, words: str) -> Path:
    try:
        return Path(words).resolve()
    except (OSError, RuntimeError) as error:
        raise ConfigError(f"{key}={words}: its symbolic links lead in a circle") from error


def _try(folder: Path) -> None:
    """Refuse an unwritable checkpoint folder before anything is computed."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return
    except OSError as error:
        raise ConfigError(f"checkpoint.dir={folder}: cannot be written ({error.strerror})") from error


def _named(words: str) -> Path:
    """The checkpoint that `words` names: itself, or the newest one in a folder of checkpoints or in a run directory."""
    path = _resolved("resume", words)
    if (path / MANIFEST).is_file():
        return path
    for folder in (path, path / "checkpoints"):
        found = complete(folder)
        if found:
            return found[max(found)]
    if path.is_dir():
        raise ConfigError(f"resume={words}: holds no complete checkpoint")
    siblings = [str(other) for other in path.parent.glob("*/")]
    best = nearest(words, ("auto", "off")) or nearest(str(path), siblings)
    raise ConfigError(f"resume={words}: no such folder{f'; nearest valid: {best}' if best else ''}")
