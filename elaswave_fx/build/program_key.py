"""The cache key of a program: equal where the same program would be captured.

code, computed = forward_code(model, batch), computed_text(model, batch)
program_key(config, fingerprint(model), batch, code, computed)   ->  "1f0c…", 24 hexadecimal digits
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import platform
from pathlib import Path

import torch
from torch import nn

from elaswave_fx.build.configured_passes import user_pass_sources
from elaswave_fx.config.keys import Config
from elaswave_fx.passes import assign_stages
from elaswave_fx.program import artifact as artifact_module
from elaswave_fx.program.artifact import FORMAT
from elaswave_fx.program.computation import record
from elaswave_fx.program.forward_code import ForwardCode
from elaswave_fx.program.state_kept import state_kept

Batch = dict[str, torch.Tensor]


def computed_text(model: nn.Module, batch: Batch) -> str:
    """The computation of loss and gradients, whatever code and values lead to it; empty for a model that does not run,
    as the capture reports."""
    with state_kept(model), contextlib.suppress(Exception):
        return record(model, batch, gradients=True).text()
    return ""


def program_key(config: Config, model_print: str, batch: Batch, code: ForwardCode, computed: str) -> str:
    """Everything the program depends on: the model by its fingerprint, its code, its computation, the batch, options,
    versions, and the code that compiles."""
    inputs = [(name, list(tensor.shape[1:]), str(tensor.dtype)) for name, tensor in batch.items()]
    options = [
        config.precision, config.parallel.granule, config.optimizer.no_decay, config.passes.pipeline,
        config.passes.options, config.passes.extra, user_pass_sources(config.passes),
        torch.__version__, platform.machine(), FORMAT,
    ]  # fmt: skip
    key = hashlib.sha256(json.dumps([model_print, code.lines(), computed, inputs, options]).encode())
    key.update(code_digest())
    return key.hexdigest()[:24]


@functools.cache
def code_digest() -> bytes:
    # Folders come from a module's own file: an editable package's __path__ names the folder of the installation, not of
    # the sources.
    roots = (Path(artifact_module.__file__).parent, Path(assign_stages.__file__).parent)
    code = hashlib.sha256()
    for path in sorted(path for root in roots for path in root.glob("*.py")):
        code.update(path.read_bytes())
    return code.digest()
