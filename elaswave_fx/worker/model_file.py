"""The model file of a run, written at its end: to its directory, where room was reserved, or to another one with room.

write_model(run_dir, tensors)  ->  run_dir / "model.safetensors"
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from elaswave_fx.errors import JobOver
from elaswave_fx.files import open_new
from elaswave_fx.observe.run_directory import MODEL, RunDirectory


def write_model(run_dir: Path, tensors: Mapping[str, torch.Tensor], has_run_dir: bool = True) -> Path:
    """Write all logical parameters and buffers as one safetensors file that readers see whole, and return its path.

    If the run directory is removed, full or not on this machine, another folder is used. Raises `JobOver` if none
    works.
    """
    if has_run_dir:
        RunDirectory.release(run_dir)
    refused = []
    for path in _places(run_dir, has_run_dir):
        partial = path.with_suffix(".partial")
        try:
            open_new(partial).close()  # in the place of any link of that name
            save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, partial)
            partial.replace(path)
            return path
        except (OSError, SafetensorError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            refused.append(f"{path.parent} ({reason})")
            with contextlib.suppress(OSError):
                partial.unlink()
    raise JobOver(f"the model cannot be written to any of {', '.join(refused)}")


def _places(run_dir: Path, has_run_dir: bool) -> Iterator[Path]:
    """The run directory, then other folders of this user, by free space."""
    if has_run_dir:
        yield run_dir / MODEL
    others = {folder for folder in (Path.cwd(), Path.home(), Path(tempfile.gettempdir())) if folder.is_dir()}
    for folder in sorted(others, key=lambda place: (-shutil.disk_usage(place).free, place)):
        yield folder / f"{run_dir.name}-{os.getpid()}-{MODEL}"
