"""DCP's index is read whatever Python has written it, and nothing but an index is made from it."""

from __future__ import annotations

import enum
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)

from elaswave_fx.checkpoint.storage import INDEX, _Reader


class OfPython3112(pickle.Pickler):
    """Python 3.11.0 to 3.11.3 write members of an enumeration as its attributes."""

    def reducer_override(self, obj: Any) -> Any:
        return (getattr, (type(obj), obj.name)) if isinstance(obj, enum.Enum) else NotImplemented


class Attribute:
    def __reduce__(self) -> Any:
        return getattr, (Metadata, "__init__")


def index() -> Metadata:
    size = torch.Size([4])
    properties = TensorProperties(torch.float32, memory_format=torch.channels_last)
    return Metadata({"a": TensorStorageMetadata(properties, size, [ChunkStorageMetadata(torch.Size([0]), size)])})


@pytest.mark.parametrize("pickler", [pickle.Pickler, OfPython3112])
def test_members_of_enumerations_are_read_however_they_were_written(
    pickler: type[pickle.Pickler], tmp_path: Path
) -> None:
    with (tmp_path / INDEX).open("wb") as file:
        pickler(file).dump(index())
    assert _Reader(tmp_path).read_metadata() == index()


@pytest.mark.parametrize("foreign", [Attribute(), print], ids=["an attribute", "a function"])
def test_nothing_else_is_made_from_it(foreign: object, tmp_path: Path) -> None:
    (tmp_path / INDEX).write_bytes(pickle.dumps(foreign))
    with pytest.raises(pickle.UnpicklingError, match="which is no part of an index"):
        _Reader(tmp_path).read_metadata()
