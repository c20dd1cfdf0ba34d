"""Write pieces to files and read them, by `torch.distributed.checkpoint` without a process group.

    files = ShardFiles(folder, all_pieces, paths)
    written = files.write(rank, tensor_of)         # each rank, its own pieces; returns plain data
    files.write_index(all ranks' written)          # one rank, last: DCP's .metadata
    read_pieces(folder, manifest, pieces, target)  # each rank, any pieces, however they were cut

In DCP a coordinator merges the plans of all ranks and distributes the result. Here each rank computes the same global
plan, and only the places of written pieces are sent. As in DCP, the index maps each tensor to its path in a nested
state dict: a tensor with two names is written once and listed twice.
"""

from __future__ import annotations

import dataclasses
import enum
import io
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
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

from elaswave_fx.checkpoint.layout import KeyPath, Piece
from elaswave_fx.checkpoint.manifest import Manifest
from elaswave_fx.errors import ConfigError

Paths = Mapping[str, Sequence[KeyPath]]
"""Logical tensor -> its paths in the nested state dict, one for each of its names."""

Row = tuple[str, Sequence[int], int, str, int, int]
"""(key, offsets, bytes, file, offset in it, length in it) of a written piece."""

Written = Sequence[Row]

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
    "pathlib._local": {"Path", "PosixPath"},  # needed by Python 3.13 and later
}  # fmt: skip


class ShardFiles:
    """The files of a checkpoint in `folder`; `all_pieces`: those of every rank, in rank order. Raises OSError."""

    def __init__(self, folder: Path, all_pieces: Sequence[Sequence[Piece]], paths: Paths) -> None:
        self._writer = FileSystemWriter(folder, single_file_per_rank=True, sync_files=True, overwrite=False)
        self._planner, self._paths = _SavePlanner(), paths
        self._writer.set_up_storage_writer(is_coordinator=True)
        self._writer.prepare_local_plan(SavePlan([]))  # This creates the folder.
        self._pieces = [{self._index(piece): piece for piece in pieces} for pieces in all_pieces]
        plans, self._metadata = self._planner.create_global_plan(
            [SavePlan([_write_item(index, piece) for index, piece in own.items()]) for own in self._pieces]
        )
        self._plans = self._writer.prepare_global_plan(plans)

    def write(self, place: int, tensor_of: Callable[[Piece], torch.Tensor]) -> Written:
        """Write and sync the pieces of one rank; `tensor_of` returns each."""
        own = self._pieces[place]
        self._planner.tensor_of = lambda index: tensor_of(own[index])
        results = self._writer.write_data(self._plans[place], self._planner).wait()
        return [_as_row(result) for result in results]

    def write_index(self, written: Sequence[Written]) -> None:
        """Write and sync the index of all written pieces."""
        names = {_key(first): [_key(path) for path in (first, *others)] for first, *others in self._paths.values()}
        stored = self._metadata.state_dict_metadata
        index = dataclasses.replace(
            self._metadata,
            state_dict_metadata={name: metadata for key, metadata in stored.items() for name in names[key]},
            planner_data={
                _key(path): path for paths in self._paths.values() for path in paths if _key(paths[0]) in stored
            },
        )
        self._writer.finish(index, [list(_named(rows, names)) for rows in written])

    def _index(self, piece: Piece) -> MetadataIndex:
        return MetadataIndex(_key(self._paths[piece.tensor][0]), torch.Size(piece.offsets))


def read_pieces(
    folder: Path, manifest: Manifest, pieces: Sequence[Piece], target_of: Callable[[Piece], torch.Tensor]
) -> None:
    """Fill `target_of(piece)`, tensors of the sizes of the pieces, from the checkpoint of this manifest."""
    reader = _Reader(folder)
    index = reader.read_metadata()
    reader.set_up_storage_reader(index, is_coordinator=False)
    paths = manifest.contents.key_paths()
    items: list[ReadItem] = []
    targets: dict[MetadataIndex, torch.Tensor] = {}
    for wanted in pieces:
        key, piece = (wanted.tensor, wanted.flat()) if manifest.is_flat else (_key(paths[wanted.tensor][0]), wanted)
        chunk = _chunk(piece)
        found = create_read_items_for_chunk_list(key, _stored(index, key, piece, folder), [chunk])
        if sum(item.lengths.numel() for item in found) != len(piece.span):
            raise ConfigError(f"resume={folder}: {key} {piece.span} is not wholly in it")
        targets[MetadataIndex(key, chunk.offsets)] = target_of(piece)
        items += found
    reader.read_data(LoadPlan(items), _LoadPlanner(targets)).wait()


def _stored(index: Metadata, key: str, piece: Piece, folder: Path) -> TensorStorageMetadata:
    stored = index.state_dict_metadata.get(key)
    if not isinstance(stored, TensorStorageMetadata) or stored.size != torch.Size(piece.shape):
        raise ConfigError(f"resume={folder}: {key} is not in it as {list(piece.shape)}")
    return stored


def _key(path: KeyPath) -> str:
    """The name of a nested entry in DCP."""
    return ".".join(map(str, path))


def _chunk(piece: Piece) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(piece.offsets), torch.Size(piece.sizes))


def _write_item(index: MetadataIndex, piece: Piece) -> WriteItem:
    properties = TensorProperties(dtype=getattr(torch, piece.dtype))
    data = TensorWriteData(_chunk(piece), properties, torch.Size(piece.shape))
    return WriteItem(index, WriteItemType.SHARD, tensor_data=data)


def _as_row(result: WriteResult) -> Row:
    index, place = result.index, result.storage_data
    assert index.offset is not None
    return index.fqn, tuple(index.offset), result.size_in_bytes, place.relative_path, place.offset, place.length


def _named(rows: Written, names: Mapping[str, Sequence[str]]) -> Iterator[WriteResult]:
    """Yield the written pieces under each name of their tensors."""
    for key, offsets, size, file, offset, length in rows:
        for name in names[key]:
            yield WriteResult(MetadataIndex(name, torch.Size(offsets)), size, _StorageInfo(file, offset, length))


class _SavePlanner(DefaultSavePlanner):
    """DCP's own global plan and checks over our pieces."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.tensor_of: Callable[[MetadataIndex], torch.Tensor]

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        return self.tensor_of(write_item.index)


class _LoadPlanner(LoadPlanner):
    """Copies what was read into the target tensors."""

    def __init__(self, targets: dict[MetadataIndex, torch.Tensor]) -> None:
        self._targets = targets

    def set_up_planner(self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False) -> None:
        """No-op: the constructor has all arguments."""

    def create_local_plan(self) -> LoadPlan:
        return LoadPlan([])

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        raise AssertionError(f"{read_item.dest_index.fqn}: our checkpoints hold tensors only")

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        target = self._targets[read_item.dest_index]
        for dimension, (offset, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            target = target.narrow(dimension, offset, length)
        return target

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """No-op: the tensor was read into its place."""


class _Reader(FileSystemReader):
    """Reads DCP's index, a pickle, and creates only DCP's own classes from it."""

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
    """Return a member of an enumeration, which Python 3.11.0 to 3.11.3 pickle as an attribute; refuse anything else."""
    if isinstance(kind, type) and issubclass(kind, enum.Enum) and name in kind.__members__:
        return kind[str(name)]
    raise pickle.UnpicklingError(f"{INDEX} names {name} of {kind!r}, which is no part of an index")
