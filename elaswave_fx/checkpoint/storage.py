"""Pieces to files and back, by `torch.distributed.checkpoint` without a process group.

    files = ShardFiles(folder, all_pieces, rank)
    written = files.write(tensor_of)               # each rank, its own pieces; plain data comes out
    files.write_index(everybody's written)         # one rank, last: DCP's .metadata
    read_pieces(folder, pieces, target_of)         # each rank, whatever it wants, however it was cut when written

DCP asks a coordinator to make one plan of everybody's and to hand it out. Here each rank makes the same plan of all
ranks' pieces by itself, and only what was written where has to travel.
"""

from __future__ import annotations

import enum
import io
import pickle
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.storage import WriteResult

from elaswave_fx.checkpoint.layout import Piece
from elaswave_fx.errors import ConfigError

Written = list[tuple[str, int, int, str, int, int]]
"""(tensor, first element, bytes, file, offset in it, length in it) of every piece that a rank wrote."""

INDEX = ".metadata"
_IN_AN_INDEX = {
    "torch.distributed.checkpoint.metadata": {
        "Metadata", "MetadataIndex", "TensorStorageMetadata", "ChunkStorageMetadata", "TensorProperties", "StorageMeta",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size"},
    "pathlib": {"Path", "PosixPath"},
    "pathlib._local": {"Path", "PosixPath"},  # Python 3.13 and later demand it.
}  # fmt: skip


class ShardFiles:
    """One rank's part in writing one checkpoint to `folder`. `all_pieces` are those of every rank, in rank order.

    Raises OSError.
    """

    def __init__(self, folder: Path, all_pieces: Sequence[Sequence[Piece]], place: int) -> None:
        self._writer = FileSystemWriter(folder, single_file_per_rank=True, sync_files=True, overwrite=False)
        self._planner = _SavePlanner()
        self._writer.set_up_storage_writer(place == 0)
        self._writer.prepare_local_plan(SavePlan([]))  # This makes the folder.
        plans, self._metadata = self._planner.create_global_plan(
            [SavePlan([_write_item(piece) for piece in pieces]) for pieces in all_pieces]
        )
        self._plan = self._writer.prepare_global_plan(plans)[place]

    def write(self, tensor_of: Callable[[str, int], torch.Tensor]) -> Written:
        """Write and sync this rank's pieces; `tensor_of(tensor, first element)` gives each, flat."""
        self._planner.tensor_of = tensor_of
        results = self._writer.write_data(self._plan, self._planner).wait()
        return [_as_row(result) for result in results]

    def write_index(self, written: Sequence[Written]) -> None:
        """Write and sync the index over what all ranks wrote."""
        self._writer.finish(self._metadata, [[_from_row(row) for row in rows] for rows in written])


def read_pieces(folder: Path, pieces: Sequence[Piece], target_of: Callable[[Piece], torch.Tensor]) -> None:
    """Fill `target_of(piece)`, flat tensors of as many elements as the pieces have, from a checkpoint."""
    reader = _Reader(folder)
    index = reader.read_metadata()
    reader.set_up_storage_reader(index, is_coordinator=False)
    items: list[ReadItem] = []
    targets: dict[MetadataIndex, torch.Tensor] = {}
    for piece in pieces:
        chunk = _chunk(piece)
        found = create_read_items_for_chunk_list(piece.tensor, _stored(index, piece, folder), [chunk])
        if sum(item.lengths.numel() for item in found) != len(piece.span):
            raise ConfigError(f"resume={folder}: {piece.tensor} {piece.span} is not wholly in it")
        targets[MetadataIndex(piece.tensor, chunk.offsets)] = target_of(piece)
        items += found
    reader.read_data(LoadPlan(items), _LoadPlanner(targets)).wait()


def _stored(index: Metadata, piece: Piece, folder: Path) -> TensorStorageMetadata:
    stored = index.state_dict_metadata.get(piece.tensor)
    if not isinstance(stored, TensorStorageMetadata) or stored.size != torch.Size([piece.numel]):
        raise ConfigError(f"resume={folder}: {piece.tensor} is not in it with {piece.numel} elements")
    return stored


def _chunk(piece: Piece) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size([piece.span.lo]), torch.Size([len(piece.span)]))


def _write_item(piece: Piece) -> WriteItem:
    chunk = _chunk(piece)
    properties = TensorProperties(dtype=getattr(torch, piece.dtype))
    data = TensorWriteData(chunk, properties, torch.Size([piece.numel]))
    return WriteItem(MetadataIndex(piece.tensor, chunk.offsets), WriteItemType.SHARD, tensor_data=data)


def _as_row(result: WriteResult) -> tuple[str, int, int, str, int, int]:
    index, place = result.index, result.storage_data
    assert index.offset is not None
    return index.fqn, index.offset[0], result.size_in_bytes, place.relative_path, place.offset, place.length


def _from_row(row: Sequence[Any]) -> WriteResult:
    tensor, first, size, file, offset, length = row
    return WriteResult(MetadataIndex(tensor, torch.Size([first])), size, _StorageInfo(file, offset, length))


class _SavePlanner(DefaultSavePlanner):
    """DCP's own global plan and checks over our pieces."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.tensor_of: Callable[[str, int], torch.Tensor]

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        assert write_item.index.offset is not None
        return self.tensor_of(write_item.index.fqn, write_item.index.offset[0])


class _LoadPlanner(LoadPlanner):
    """Puts what was read where it is wanted."""

    def __init__(self, targets: dict[MetadataIndex, torch.Tensor]) -> None:
        self._targets = targets

    def set_up_planner(self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False) -> None:
        """Nothing is left to do: the constructor was told everything."""

    def create_local_plan(self) -> LoadPlan:
        return LoadPlan([])

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        raise AssertionError(f"{read_item.dest_index.fqn}: our checkpoints hold tensors only")

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        return self._targets[read_item.dest_index].narrow(0, read_item.dest_offsets[0], read_item.lengths[0])

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """Nothing is left to do: the tensor was read into its place."""


class _Reader(FileSystemReader):
    """DCP's index is a pickle: only its own classes are made from it, whatever the file says."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        with (Path(self.path) / INDEX).open("rb") as file:
            return _IndexUnpickler(file).load()


class _IndexUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return _member
        dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if dtype or name in _IN_AN_INDEX.get(module, ()):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{INDEX} names {module}.{name}, which is no part of an index")


def _member(kind: object, name: object) -> enum.Enum:
    """A member of an enumeration, which Python 3.11.0 to 3.11.3 write as an attribute; nothing else is got so."""
    if isinstance(kind, type) and issubclass(kind, enum.Enum) and name in kind.__members__:
        return kind[str(name)]
    raise pickle.UnpicklingError(f"{INDEX} names {name} of {kind!r}, which is no part of an index")
