"""The internal form of all data: a map from an index to named tensors.

In: arrays, or any map-style dataset of the user (`__len__` and `__getitem__`, giving dicts, data classes or tuples).
Out: `Dataset`.

    MapDataset([(image, 3), …], fields=("image", "label"), …).sample(0)   ->  {"image": float32[…], "label": int64[]}
"""

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from elaswave_fx.config.targets import parameters_of
from elaswave_fx.data.global_draws import again, generator_states, refuse_global_draws
from elaswave_fx.data.hashing import Words
from elaswave_fx.data.order import Indices, key_of, keys_of
from elaswave_fx.data.own_counters import OwnStates, same_bits
from elaswave_fx.data.tokenizer import Tokenizer
from elaswave_fx.data.user_code import UserCode
from elaswave_fx.errors import DataError

Sample = dict[str, Tensor]
"""Tensors of a sample, without a batch dimension."""

Batch = dict[str, Tensor]
"""Tensors whose dimension 0 counts samples."""


Arrays = tuple[int, Callable[[int], Mapping[str, Any]]]
"""Number of pieces, and a function that returns the arrays of a piece by name."""


PIECE_BYTES = 1 << 20
"""Size of a piece of arrays."""

ROUNDED_FROM = 2.0**14
"""Magnitude from which float32 is off by a thousandth or more."""

BEYOND_FLOAT32 = "which is beyond float32; scale the values, or take their logarithm"

_MOST_COMPARED = 8

ID_FIELDS = ("input_ids", "decoder_input_ids", "labels")
"""Fields of token ids, if there is a vocabulary."""

IGNORED = -100
"""Label of positions that are neither predicted nor counted."""

_IMAGE_MODES = ("1", "L", "LA", "RGB", "RGBA", "I", "F", "I;16", "I;16L", "I;16B", "I;16N")
"""Modes of images whose arrays are colors, grays or booleans."""

_PALETTE_MODES = ("P", "PA")

_NOT_CALLED = ("set_epoch", "collate_fn", "collater")
"""Methods that other training loops call on datasets; a map from an index to a sample has no use for them."""


class Dataset(ABC):
    """Samples by index; the same index gives the same bits in every process and every call."""

    _first: Sample | None = None
    """The sample whose form all others must have."""

    @property
    def vocab_size(self) -> int | None:
        """Number of different tokens, for data made of tokens."""
        return None

    @property
    def classes(self) -> int | None:
        """Number of labels, for classification."""
        return None

    @property
    def class_names(self) -> Mapping[str, tuple[str, ...]]:
        """Names of labels by field, where the data has them."""
        return {}

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer of texts; None for ids that were tokenized elsewhere."""
        return None

    @property
    def masked(self) -> bool:
        """Whether tokens are masked already, so that `labels` are predicted; for masked language models."""
        return False

    @property
    def notes(self) -> tuple[str, ...]:
        """Lines for the user: implicit changes to samples."""
        return ()

    @property
    def users(self) -> "UserDataset | None":
        """What runs a user's code for the samples, if anything does."""
        return None

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def sample(self, index: int, key: int | None = None) -> Sample:
        """The sample at `index`, 0 <= index < len. `key` seeds what is drawn for each use of the sample; None: a key of
        the index. Raises `DataError` if it has another form than the first sample."""

    def given(self, index: int, key: int | None = None) -> Sample:
        """The sample in the types of the user's code that made it, if any, before they are widened."""
        return self.sample(index, key)

    def batch(self, indices: Indices, keys: Words | None = None) -> Batch:
        """The samples at `indices`, stacked; datasets that load batches faster override this."""
        keys = keys_of(indices) if keys is None else keys
        samples = [self.sample(int(index), int(key)) for index, key in zip(indices, keys, strict=True)]
        if not samples:
            return {name: tensor.new_empty((0, *tensor.shape)) for name, tensor in self.sample(0).items()}
        if self._first is None:
            self._first = self.sample(0)
        for index, sample in zip(indices, samples, strict=True):
            _refuse_unlike(self._first, sample, 0, int(index))
        return {name: torch.stack([sample[name] for sample in samples]) for name in samples[0]}

    def arrays(self) -> Arrays | None:
        """Arrays behind the samples; None where foreign code makes each sample."""
        return None

    def for_evaluation(self) -> "Dataset":
        """The same samples in the form for evaluation."""
        return self


class WrappedDataset(Dataset):
    """A wrapper of a dataset that changes its samples."""

    def __init__(self, wrapped: Dataset) -> None:
        self._wrapped = wrapped

    @property
    def vocab_size(self) -> int | None:
        return self._wrapped.vocab_size

    @property
    def classes(self) -> int | None:
        return self._wrapped.classes

    @property
    def class_names(self) -> Mapping[str, tuple[str, ...]]:
        return self._wrapped.class_names

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self._wrapped.tokenizer

    @property
    def masked(self) -> bool:
        return self._wrapped.masked

    @property
    def notes(self) -> tuple[str, ...]:
        return self._wrapped.notes

    @property
    def users(self) -> "UserDataset | None":
        return self._wrapped.users

    def __len__(self) -> int:
        return len(self._wrapped)

    def arrays(self) -> Arrays | None:
        return self._wrapped.arrays()


class UserDataset(WrappedDataset):
    """A dataset that runs user code. The code must return every sample in time, must not draw from shared generators,
    and must not depend on its own numbers and generators that reading changes. `place`: its name in refusals; `cure`:
    their remedy; `owner`: the user's object.

    Batches whose samples draw, or change `owner`, are read again, for a limited number of batches of each kind: a
    dataset may seed what it draws from, or count its reads.
    """

    def __init__(self, wrapped: Dataset, code: UserCode, place: str, cure: str, owner: object = None) -> None:
        super().__init__(wrapped)
        self.place, self.cure, self.owner = place, cure, owner
        self._code = code
        self._own = OwnStates(owner)
        self._draws_compared, self._changes_compared = 0, 0

    @property
    def notes(self) -> tuple[str, ...]:
        return self._code.run(lambda: self._wrapped.notes)

    @property
    def users(self) -> "UserDataset":
        return self

    def __len__(self) -> int:
        return self._code.run(lambda: len(self._wrapped))

    def sample(self, index: int, key: int | None = None) -> Sample:
        return self._code.run(lambda: self._wrapped.sample(index, key))

    def given(self, index: int, key: int | None = None) -> Sample:
        return self._code.run(lambda: self._wrapped.given(index, key))

    def batch(self, indices: Indices, keys: Words | None = None) -> Batch:
        return self._code.run(lambda: self._batch(indices, keys_of(indices) if keys is None else keys))

    def refuse_draws(self, index: int, key: int | None = None) -> None:
        """Raise DataError if reading this sample draws from a shared generator."""
        refuse_global_draws(lambda: self.sample(index, key), self.place, index, self.cure)

    def refuse_change(self, index: int, first: Sample, second: Sample) -> None:
        """Raise DataError if the second reading of a sample differs from the first one."""
        for field, tensor in first.items():
            if field not in second or not same_bits(tensor, second[field]):
                raise DataError(
                    f"{self.place}: {field} of sample {index} is another one when it is read again, {again(self.cure)}"
                )

    def for_evaluation(self) -> "UserDataset":
        return UserDataset(self._wrapped.for_evaluation(), self._code, self.place, self.cure, self.owner)

    def _batch(self, indices: Indices, keys: Words) -> Batch:
        before, own = generator_states(), self._own.now() if self._changes_compared < _MOST_COMPARED else None
        made = self._wrapped.batch(indices, keys)
        if self._draws_compared < _MOST_COMPARED and generator_states() != before:
            self._draws_compared += 1
            for index, key in zip(indices, keys, strict=True):
                self.refuse_draws(int(index), int(key))
        if own is not None and self._own.now() != own:
            self._changes_compared += 1
            second = self._wrapped.batch(indices, keys)
            for row, index in enumerate(indices):
                self.refuse_change(int(index), *({name: each[row] for name, each in b.items()} for b in (made, second)))
        return made


class ArrayDataset(Dataset):
    """Arrays of equal length, dimension 0 counting samples, held in memory."""

    def __init__(self, arrays: Mapping[str, np.ndarray], classes: int | None = None) -> None:
        self._tensors = {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in arrays.items()}
        self._classes = classes

    @property
    def classes(self) -> int | None:
        return self._classes

    def __len__(self) -> int:
        return len(next(iter(self._tensors.values())))

    def sample(self, index: int, key: int | None = None) -> Sample:
        return {name: tensor[index].clone() for name, tensor in self._tensors.items()}

    def arrays(self) -> Arrays:
        rows = max(1, PIECE_BYTES // max(1, sum(tensor[:1].nbytes for tensor in self._tensors.values())))
        return -(-len(self) // rows), lambda piece: {
            name: tensor[piece * rows : (piece + 1) * rows] for name, tensor in self._tensors.items()
        }

    def batch(self, indices: Indices, keys: Words | None = None) -> Batch:
        rows = torch.from_numpy(indices)
        return {name: tensor.index_select(0, rows) for name, tensor in self._tensors.items()}


class MapDataset(Dataset):
    """A map-style dataset of the user; `fields` names the positions of tuples, or chooses from dicts.

    A `__getitem__(index, key)` also gets the key, a 64-bit integer: it differs for each use of the sample, and is the
    same on any rank that replays a step.
    """

    def __init__(self, wrapped: Any, fields: Sequence[str], name: str, code: UserCode) -> None:
        for method in ("__len__", "__getitem__"):
            if not hasattr(wrapped, method):
                raise DataError(
                    f"data._target_={name}: has no {method}; a map-style dataset has __len__ and __getitem__"
                )
        self._wrapped = wrapped
        self._fields = tuple(fields)
        self._name = name
        self._code = code
        self._keyed = _takes_key(wrapped)

    @property
    def vocab_size(self) -> int | None:
        """The dataset's own attribute, if it has one."""
        size = getattr(self._wrapped, "vocab_size", None)
        return int(size) if isinstance(size, (int, np.integer)) and size > 1 else None

    def __len__(self) -> int:
        with self._code.watched(f"data._target_={self._name}", "its length"):
            return len(self._wrapped)

    @property
    def notes(self) -> tuple[str, ...]:
        unused = tuple(f"data: {name} of {self._name} is not called" for name in _NOT_CALLED
                       if callable(getattr(self._wrapped, name, None)))  # fmt: skip
        lost = () if self._keyed else _keyed_within(self._wrapped)
        unkeyed = tuple(f"data: {outer} passes no key on to {inner}, whose draws are the same in every epoch"
                        for outer, inner in dict.fromkeys(lost))  # fmt: skip
        first = self._item(0, None)
        return (*rounded_notes(first), *notes_of_palettes(first), *unused, *unkeyed)

    def sample(self, index: int, key: int | None = None) -> Sample:
        return {name: widened(value, self._place(name)) for name, value in self.given(index, key).items()}

    def given(self, index: int, key: int | None = None) -> Sample:
        named = self._item(index, key).items()
        made = {name: plain_tensor(value, self._place(name)) for name, value in named}
        if self.vocab_size is not None:
            self._refuse_foreign_ids(made, index, self.vocab_size)
        return made

    def _place(self, field: str) -> str:
        return f"data._target_={self._name}: field {field}"

    def _refuse_foreign_ids(self, sample: Sample, index: int, vocab_size: int) -> None:
        for name in set(ID_FIELDS) & sample.keys():
            ids = sample[name].long()  # in narrow types a comparison wraps the bound around
            wrong = ids[(ids >= vocab_size) | ((ids < 0) & ~((ids == IGNORED) & (name == "labels")))]
            if wrong.numel():
                raise DataError(
                    f"data._target_={self._name}: {name} of sample {index} holds token {int(wrong.flatten()[0])}, and "
                    f"the dataset's vocab_size is {vocab_size}"
                )

    def _item(self, index: int, key: int | None) -> Mapping[str, Any]:
        with self._code.watched(f"data._target_={self._name}", f"sample {index}"):
            if self._keyed:
                item = self._wrapped.__getitem__(index, key_of(index) if key is None else key)
            else:
                item = self._wrapped[index]
        if item is None:
            raise DataError(f"data._target_={self._name}: sample {index} is None; leave such samples out of its length")
        item = self._by_name(item)
        named = self._from_dict(item) if isinstance(item, Mapping) else self._from_tuple(item)
        if not named:
            raise DataError(f"data._target_={self._name}: sample {index} has no fields")
        return named

    def _by_name(self, item: Any) -> Any:
        """A data class as a dict, and a named tuple unless `fields` gives its parts other names."""
        if isinstance(item, Mapping):
            return item
        if dataclasses.is_dataclass(item) and not isinstance(item, type):
            return {field.name: getattr(item, field.name) for field in dataclasses.fields(item)}
        names = getattr(item, "_fields", None) if isinstance(item, tuple) else None
        return item._asdict() if names and set(self._fields) <= set(names) else item  # type: ignore[attr-defined]

    def _from_dict(self, item: Mapping[str, Any]) -> Mapping[str, Any]:
        if not self._fields:
            return item
        missing = [name for name in self._fields if name not in item]
        if missing:
            raise DataError(f"data.fields: {missing[0]} is not in the samples, which hold {', '.join(map(str, item))}")
        return {name: item[name] for name in self._fields}

    def _from_tuple(self, item: Any) -> Mapping[str, Any]:
        parts = tuple(item) if isinstance(item, (tuple, list)) else (item,)
        if len(parts) != len(self._fields):
            raise DataError(
                f"data.fields=[{','.join(self._fields)}]: must name the {len(parts)} parts of a {self._name} sample, "
                f"such as data.fields=[{','.join(f'name{place}' for place in range(1, len(parts) + 1))}]"
            )
        return dict(zip(self._fields, parts, strict=True))


def _takes_key(wrapped: Any) -> bool:
    """Whether samples take a key: `__getitem__(self, index, key)`. An index may be named `key`, too."""
    found = list(parameters_of(type(wrapped).__getitem__).values())[2:]
    return any(each.name == "key" and each.default in (each.empty, None) for each in found)


def _keyed_within(outer: Any) -> Iterator[tuple[str, str]]:
    """(type of a dataset, type of a nested one) where the nested one takes a key, as in torch's Subset and
    ConcatDataset, at any depth."""
    several = getattr(outer, "datasets", ())
    for inner in (getattr(outer, "dataset", None), *(several if isinstance(several, (list, tuple)) else ())):
        if hasattr(type(inner), "__getitem__"):
            if _takes_key(inner):
                yield type(outer).__name__, type(inner).__name__
            else:
                yield from _keyed_within(inner)


def rounded_notes(item: Mapping[str, Any]) -> tuple[str, ...]:
    """A line that names the fields of an item which float32 rounds visibly, if any."""
    return notes_of_rounding([name for name, value in item.items() if _is_rounded(value)])


def notes_of_rounding(names: Sequence[str]) -> tuple[str, ...]:
    if not names:
        return ()
    return (f"data: float64 is read as float32, in {', '.join(names)}: times and the like want an origin nearby",)


def notes_of_palettes(item: Mapping[str, Any]) -> tuple[str, ...]:
    """A line that names the images of an item whose numbers are palette indices, if any."""
    names = [name for name, value in item.items() if image_mode(value) in _PALETTE_MODES]
    if not names:
        return ()
    return (f"data: images with a palette are read as colors, in {', '.join(names)}: save ids of classes as grays",)


def image_mode(value: Any) -> str | None:
    """The mode of a Pillow image."""
    mode = getattr(value, "mode", None)
    return mode if isinstance(mode, str) and hasattr(value, "convert") else None


def _is_rounded(value: Any) -> bool:
    """Whether float32 loses precision: a float64 array, or Python floats where it is visible."""
    if hasattr(value, "dtype"):
        return value.dtype in (torch.float64, np.float64)
    array = np.asarray(value)
    return array.dtype == np.float64 and bool((np.abs(array) >= ROUNDED_FROM).any())


def as_tensor(value: Any, place: str) -> Tensor:
    """Numbers, arrays and nested lists as tensors in the types of samples, see `widened`."""
    return widened(plain_tensor(value, place), place)


def plain_tensor(value: Any, place: str) -> Tensor:
    """Numbers, arrays and nested lists as tensors."""
    try:
        tensor = value if isinstance(value, Tensor) else torch.as_tensor(_array(value))
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(f"{place}: a {type(value).__name__} is no tensor ({error})") from error
    if tensor.is_nested or tensor.is_quantized or tensor.is_meta:
        kind = "nested" if tensor.is_nested else "quantized" if tensor.is_quantized else "meta"
        raise DataError(f"{place}: is a {kind} tensor; samples are plain tensors with values")
    if tensor.layout != torch.strided:
        raise DataError(f"{place}: a tensor of layout {tensor.layout}; give it as .to_dense()")
    if tensor.dtype.is_complex:
        raise DataError(f"{place}: complex numbers are not supported")
    return tensor.detach()


def computable(tensor: Tensor, place: str) -> Tensor:
    """The tensor in its own type, for user code; widened where torch has few operators of that type, or it is rounded
    in the end."""
    own = (torch.int8, torch.int16, torch.int32, torch.float16, torch.bfloat16)
    return tensor.clone() if tensor.dtype in own else widened(tensor, place)


def widened(tensor: Tensor, place: str) -> Tensor:
    """Whole numbers as int64, others as float32, bool and uint8 unchanged. They own their memory, as a dataset may fill
    one buffer for all samples."""
    if tensor.dtype == torch.uint64 and bool((tensor.view(torch.int64) < 0).any()):
        raise DataError(f"{place}: whole numbers of 2**63 and more are not supported")
    if tensor.dtype in (torch.bool, torch.uint8):
        return tensor.clone()
    made = tensor.to(torch.float32 if tensor.dtype.is_floating_point else torch.int64, copy=True)
    if tensor.dtype == torch.float64 and bool((made.isinf() & tensor.isfinite()).any()):
        raise DataError(f"{place}: holds {float(tensor[tensor.isfinite()].abs().max()):g}, {BEYOND_FLOAT32}")
    return made


def _array(value: Any) -> np.ndarray:
    """A value as an array that torch takes. A Pillow image with palette indices or printer inks is converted to
    colors."""
    if image_mode(value) not in (None, *_IMAGE_MODES):
        value = value.convert("RGB")
    if np.ma.is_masked(value):
        raise ValueError("a masked array has no values where it is masked; fill them, as .filled(0) does")
    array = np.asarray(value)
    is_made_float = isinstance(value, (list, tuple)) and array.dtype == np.float64 and (np.abs(array) >= 2.0**63).any()
    if is_made_float and any(isinstance(each, int) for each in np.asarray(value, object).flat if abs(each) >= 2**63):
        raise ValueError("whole numbers of 2**63 and more are not supported")
    if array.dtype == np.ulonglong:
        return array.astype(np.uint64)  # a dtype that torch does not recognize
    return array if array.flags.writeable else array.copy()


def _refuse_unlike(reference: Sample, sample: Sample, first: int, index: int) -> None:
    if reference.keys() != sample.keys():
        raise DataError(f"data: sample {index} has fields {sorted(sample)}, sample {first} has {sorted(reference)}")
    for name, tensor in sample.items():
        wanted = reference[name]
        if tensor.shape != wanted.shape or tensor.dtype != wanted.dtype:
            raise DataError(
                f"data: {name} of sample {index} is {tensor.dtype} {list(tensor.shape)}, of sample {first} "
                f"{wanted.dtype} {list(wanted.shape)}; all samples must have one shape"
            )
