"""The artifact: a lowered program as plain data, which workers load instead of tracing.

    artifact.json          programs, units, values, buckets, folds
    constants.safetensors  lifted constants
    digests.json           of these two, so that a damaged one is not run
    costs.json             measured seconds by kind of unit, once something measured them
    tried.json             digests of the samples on which its sums were tried

It depends on the model and its options, never on ranks, stages or the cluster.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from elaswave_fx.errors import PlanError
from elaswave_fx.files import file_digest, replace_file, sync

FORMAT = 9
_PROGRAMS, _CONSTANTS, _DIGESTS, _COSTS = "artifact.json", "constants.safetensors", "digests.json", "costs.json"
_TRIED, _TRIED_MOST = "tried.json", 64
Seconds = tuple[float, float, float]
"""Per sample: forward, backward, and the part of backward that the gradients of parameters take (0 if not split)."""
Binding = tuple[Any, ...]
"""("param", bucket, offset, shape) | ("mutable", bucket, offset, shape, dtype) | ("frozen", name) | ("buffer", name) |
("constant", name) | ("value", index) | ("input", name) | ("keys",) | ("step_keys",);
for outputs ("value", index) | ("loss",) | ("count",) | ("fold", index, number) | ("none",)."""


@dataclass(frozen=True)
class BucketParam:
    """A parameter's place in its bucket: elements [offset, offset + product of shape)."""

    name: str
    offset: int
    shape: tuple[int, ...]


@dataclass(frozen=True)
class BucketBuffer:
    """A mutable buffer's place in its bucket: its bytes begin at the word `offset`, which is even."""

    name: str
    offset: int
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class BucketSpec:
    """Flat trained parameters of one unit, or one tied tensor, of one optimizer group. Units read them in `dtype`.

    Or the `buffers` that training changes of one unit: `numel` counts words of 32 bits then, there are no `params`, and
    `group` means nothing.
    """

    name: str
    group: int
    numel: int
    params: tuple[BucketParam, ...]
    users: tuple[int, ...]
    buffers: tuple[BucketBuffer, ...] = ()
    dtype: str = "float32"

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)


@dataclass(frozen=True)
class ValueSpec:
    """A border value; see `ir.BorderValue`. `axis` is -1 for values of a whole micro-batch."""

    name: str
    producer: int
    consumers: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: str
    axis: int
    has_grad: bool
    bytes_per_sample: int


@dataclass(frozen=True)
class UnitSpec:
    """A unit's programs by name, and the bindings of inputs, outputs and gradients.

    `flops` counts a sample's operations in the forward pass, `saved_bytes` its bytes kept for the backward pass. For a
    split backward program, `held_bytes` and `num_held` describe the values between its halves, `weights_share` is the
    second half's share of the operations.
    """

    index: int
    kind: str
    inputs: tuple[Binding, ...]
    outputs: tuple[Binding, ...]
    eval_outputs: tuple[Binding, ...]
    grads: tuple[Binding, ...]
    num_saved: int
    flops: float
    saved_bytes: int
    held_bytes: int = 0
    num_held: int = 0
    weights_share: float = 0.0


@dataclass(frozen=True)
class FoldSpec:
    """The update of a mutable buffer by program `fold.BUFFER`; `values` are (dtype, shape) of a granule's outputs.

    If `per_step`, all granules yield the same values, and it runs once per step.
    """

    buffer: str
    unit: int
    values: tuple[tuple[str, tuple[int, ...]], ...]
    per_step: bool = False


@dataclass(frozen=True)
class TensorInfo:
    """A logical tensor of the model: shape, dtype in which units read it, other names of a tied one."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    aliases: tuple[str, ...] = ()

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)


@dataclass(frozen=True)
class Artifact:
    """Everything about a model that execution needs, apart from its state."""

    granule: int
    batch_coupled: tuple[str, ...]
    inputs: tuple[str, ...]
    params: tuple[TensorInfo, ...]
    buffers: tuple[TensorInfo, ...]
    programs: Mapping[str, Any]
    units: tuple[UnitSpec, ...]
    values: tuple[ValueSpec, ...]
    buckets: tuple[BucketSpec, ...]
    folds: tuple[FoldSpec, ...]
    invariant_inputs: tuple[Binding, ...]
    invariant_names: tuple[str, ...]
    draws: tuple[tuple[int, int], ...]
    evaluation_exact: bool
    text: str
    pipeline: str = ""
    """The passes that made it and their options, as text."""
    seconds: tuple[tuple[str, float], ...] = ()
    measured: Mapping[str, Seconds] = dataclasses.field(default_factory=dict)
    """Seconds by kind, where measured."""
    modules: tuple[str, ...] = ()
    """Python modules to import before programs run: those that register the model's own operators."""
    notes: tuple[str, ...] = ()
    """Deviations from the computation that the model asks for, in words for its user."""
    whole_batch: tuple[str, ...] = ()
    """Reasons why a granule has to be all samples of a step."""
    format: int = FORMAT

    @property
    def tensors(self) -> tuple[TensorInfo, ...]:
        return (*self.params, *self.buffers)

    @property
    def is_split(self) -> bool:
        """Whether every backward program also exists in halves."""
        kinds = {unit.kind for unit in self.units if f"{unit.kind}.backward" in self.programs}
        return all(f"{kind}.backward_inputs" in self.programs for kind in kinds)

    def save(self, folder: Path, constants: Mapping[str, torch.Tensor]) -> None:
        """Write both files; a reader never sees half of them because the folder is renamed into place last."""
        partial = folder.with_name(f"{folder.name}.{os.getpid()}.partial")
        partial.mkdir(parents=True, exist_ok=True)
        (partial / _PROGRAMS).write_text(json.dumps(dataclasses.asdict(self)))
        save_file({name: tensor.contiguous() for name, tensor in constants.items()}, partial / _CONSTANTS)
        (partial / _DIGESTS).write_text(
            json.dumps({name: file_digest(partial / name) for name in (_PROGRAMS, _CONSTANTS)})
        )
        for path in (*partial.iterdir(), partial):
            sync(path)
        try:
            os.replace(partial, folder)
        except OSError:  # another process finished the same artifact first: its content is equal
            shutil.rmtree(partial)

    @staticmethod
    def copy_for_joiners(folder: Path, to: Path) -> dict[str, Path]:
        """Files, by name, that `load` and `load_constants` read of an artifact on disk. Costs are copied to the folder
        `to`, as another run of the same program may measure them anew."""
        found = {name: folder / name for name in (_PROGRAMS, _CONSTANTS, _DIGESTS)}
        if (folder / _COSTS).is_file():
            found[_COSTS] = Path(shutil.copyfile(folder / _COSTS, to / _COSTS))
        return found

    @staticmethod
    def damage(folder: Path) -> str | None:
        """Why an artifact on disk is damaged; None if it is intact or absent."""
        if not folder.exists():
            return None
        try:
            digests = json.loads((folder / _DIGESTS).read_text())
            for name in (_PROGRAMS, _CONSTANTS):  # both, whatever the digests name
                if file_digest(folder / name) != digests.get(name):
                    return f"{name} is not as it was written"
            if (folder / _COSTS).is_file():
                json.loads((folder / _COSTS).read_text())
        except (OSError, ValueError, AttributeError, RecursionError) as error:
            return f"it cannot be read ({error})"
        return None

    @staticmethod
    def save_costs(folder: Path, measured: Mapping[str, Seconds]) -> None:
        """Add measured costs to an artifact on disk, whole or not at all."""
        replace_file(folder / _COSTS, json.dumps(measured).encode(), durable=True)

    @staticmethod
    def tried(folder: Path) -> list[str]:
        """Digests of samples on which the program was tried, oldest first."""
        try:
            return [str(each) for each in json.loads((folder / _TRIED).read_text())]
        except (OSError, ValueError, TypeError, RecursionError):
            return []

    @staticmethod
    def save_tried(folder: Path, samples: str) -> None:
        """Add the digest of samples. A digest lost to a concurrent write only costs another trial."""
        known = [each for each in Artifact.tried(folder) if each != samples]
        replace_file(folder / _TRIED, json.dumps([*known, samples][-_TRIED_MOST:]).encode(), durable=False)

    @staticmethod
    def load(folder: Path) -> Artifact:
        """Read `artifact.json`, and the costs if measured. Raise PlanError for another format."""
        data = json.loads((folder / _PROGRAMS).read_text())
        if (folder / _COSTS).is_file():
            data["measured"] = json.loads((folder / _COSTS).read_text())
        if data.get("format") != FORMAT:
            raise PlanError(f"{folder}: artifact format {data.get('format')}, this version reads {FORMAT}")
        return _from_json(data)

    @staticmethod
    def load_constants(folder: Path) -> dict[str, torch.Tensor]:
        """The lifted constants by name."""
        return load_file(folder / _CONSTANTS)


def _frozen(value: Any) -> Any:
    return tuple(_frozen(item) for item in value) if isinstance(value, list) else value


def _from_json(data: dict[str, Any]) -> Artifact:
    rows = {"units": UnitSpec, "values": ValueSpec, "folds": FoldSpec, "params": TensorInfo, "buffers": TensorInfo}
    made: dict[str, Any] = {}
    for key, value in data.items():
        if key in rows:
            made[key] = tuple(rows[key](**{k: _frozen(v) for k, v in row.items()}) for row in value)
        elif key == "buckets":
            made[key] = tuple(_bucket(row) for row in value)
        elif key in ("programs", "measured"):
            made[key] = value
        else:
            made[key] = _frozen(value)
    return Artifact(**made)


def _bucket(row: dict[str, Any]) -> BucketSpec:
    params = tuple(BucketParam(p["name"], p["offset"], tuple(p["shape"])) for p in row["params"])
    buffers = tuple(BucketBuffer(b["name"], b["offset"], tuple(b["shape"]), b["dtype"]) for b in row["buffers"])
    return BucketSpec(row["name"], row["group"], row["numel"], params, tuple(row["users"]), buffers, row["dtype"])
