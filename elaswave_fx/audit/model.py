"""The model file of a run, held against what the summary says of it."""

from __future__ import annotations

from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file

from elaswave_fx.audit.finding import Finding, holds, unchecked, wrong
from elaswave_fx.audit.program import Program
from elaswave_fx.audit.record import Record
from elaswave_fx.checkpoint.initial_state import params_digest, tensor_digest


def check_model(record: Record, program: Program | str) -> Finding:
    """The parameters in the file are those that the run ended with."""
    summary = record.summary
    if summary is None or summary.model is None or summary.params_digest is None:
        return unchecked("model", "the run has written none")
    path = _place_of(record, summary.model)
    if isinstance(program, str):
        return unchecked("model", program)
    if not path.is_file():
        return wrong("model", f"{path}: is missing")
    try:
        tensors = load_file(path)
        digests = {info.name: tensor_digest(tensors[info.name]) for info in program.artifact.params}
    except (OSError, SafetensorError) as error:
        return wrong("model", f"{path}: cannot be read ({error})")
    except KeyError as error:
        return wrong("model", f"{path}: has no parameter {error.args[0]}")
    if params_digest(program.artifact, digests) != summary.params_digest:
        return wrong("model", f"{path}: its parameters are not those that the run ended with (params_digest)")
    return holds("model", f"{len(digests)} parameters are those that the run ended with")


def _place_of(record: Record, told: str) -> Path:
    """Where the file is now, if the directory was moved."""
    here = record.folder / Path(told).name
    return here if here.is_file() else Path(told)
