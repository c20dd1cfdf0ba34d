"""A common interface of everything that holds values by keys: snapshot, changes since, restore.

    noted = Entries(module.stats, "stats", Home("the model (Net)", module))      # {"calls": 0}
    model(**batch)
    list(changes_of(noted))     ->  [Slot(noted, "calls", before=0, after=1)], whose path is "stats['calls']"
    noted.restore()

Values are compared: replacing a list by an equal list is no change.
"""

from __future__ import annotations

import functools
import gc
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from types import (
    BuiltinFunctionType,
    ClassMethodDescriptorType,
    FunctionType,
    GetSetDescriptorType,
    MemberDescriptorType,
    MethodDescriptorType,
    MethodWrapperType,
    ModuleType,
    WrapperDescriptorType,
)
from typing import Any

import numpy as np
import torch
from torch import nn

from elaswave_fx.program.dense import tensor_text
from elaswave_fx.program.generators import generator_state, set_generator_state
from elaswave_fx.program.model_fingerprint import plain_text

_OF_TORCH = frozenset({"_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"})
_METHODS = (
    BuiltinFunctionType, ClassMethodDescriptorType, FunctionType, GetSetDescriptorType, MemberDescriptorType,
    MethodDescriptorType, WrapperDescriptorType, classmethod, functools.cached_property,
    functools.singledispatchmethod, property, staticmethod,
)  # fmt: skip
"""What classes hold that is code, not data."""
ABSENT = object()
"""The value of a key that is not there."""


@dataclass(frozen=True, eq=False)
class Slot:
    """A place that forward changed: the value at `key` of `container`; `path`: from the attribute or global that leads
    to it, such as "stats['calls']"."""

    container: Container
    key: Any
    before: Any
    after: Any

    @property
    def path(self) -> str:
        return self.container.path_of(self.key)

    @property
    def title(self) -> str:
        """The path and its owner, in words."""
        return f"{self.path} of {self.container.home.name}" if self.path else self.container.home.name

    def put(self, value: Any) -> None:
        self.container.put(self.key, value)


class Container:
    """A holder of values by keys. `home`: the module, class, function or global that it belongs to."""

    def __init__(self, owner: Any, path: str, home: Home) -> None:
        self.owner = owner
        self.path = path
        self.home = home
        self.saved = self.items()

    def items(self) -> dict[Any, Any]:
        raise NotImplementedError

    def put(self, key: Any, value: Any) -> None:
        raise NotImplementedError

    def path_of(self, key: Any) -> str:
        return f"{self.path}[{'…' if isinstance(key, torch.Tensor) else repr(key)}]"

    def grow(self, key: Any, value: Any, by: int) -> None:
        """Add entries like that of `key`, if the container can have more."""

    def restore(self) -> None:
        now = self.items()
        for key in now.keys() - self.saved.keys():
            self.put(key, ABSENT)
        for key, value in self.saved.items():
            if now.get(key, ABSENT) is not value:
                self.put(key, _fresh(value))


@dataclass(frozen=True)
class Home:
    """The owner of state, for messages: `name` as "layers.0 (Block)", `owner` the module, class or code."""

    name: str
    owner: Any


class Attributes(Container):
    """An object's `__dict__` and slots; of a class what is no method."""

    def items(self) -> dict[Any, Any]:
        found = dict(vars(self.owner)) if hasattr(self.owner, "__dict__") else {}
        for kind in type(self.owner).__mro__:
            slots = kind.__dict__.get("__slots__", ())
            for name in (slots,) if isinstance(slots, str) else slots:
                if name not in ("__dict__", "__weakref__") and hasattr(self.owner, name):
                    found[name] = getattr(self.owner, name)
        if isinstance(self.owner, nn.Module):
            return {key: value for key, value in found.items() if key not in _OF_TORCH}
        if isinstance(self.owner, type):
            return {
                key: value
                for key, value in found.items()
                if not key.startswith("__") and not isinstance(value, _METHODS)
            }
        return found

    def put(self, key: Any, value: Any) -> None:
        if isinstance(self.owner, type):
            delattr(self.owner, key) if value is ABSENT else setattr(self.owner, key, value)
        elif hasattr(self.owner, "__dict__") and (key in vars(self.owner) or not hasattr(type(self.owner), key)):
            vars(self.owner).pop(key, None) if value is ABSENT else vars(self.owner).__setitem__(key, value)
        else:
            object.__delattr__(self.owner, key) if value is ABSENT else object.__setattr__(self.owner, key, value)

    def path_of(self, key: Any) -> str:
        return f"{self.path}.{key}" if self.path else str(key)


class Entries(Container):
    """A dictionary, read without the overrides of its class: reading some entries loads modules."""

    def items(self) -> dict[Any, Any]:
        return dict(dict.items(self.owner))

    def put(self, key: Any, value: Any) -> None:
        kind: Any = OrderedDict if isinstance(self.owner, OrderedDict) else dict
        if value is ABSENT:
            kind.pop(self.owner, key, None)
        else:
            kind.__setitem__(self.owner, key, value)

    def grow(self, key: Any, value: Any, by: int) -> None:
        for other in _others(key, by):
            self.put(other, value)


class Elements(Container):
    """A list, deque or Python array: its elements, or all of them under the key None."""

    def items(self) -> dict[Any, Any]:
        return dict(enumerate(self.owner))

    def put(self, key: Any, value: Any) -> None:
        if key is None:
            self._refill(value)
        elif value is not ABSENT:
            self.owner[key] = value

    def path_of(self, key: Any) -> str:
        return self.path if key is None else super().path_of(key)

    def grow(self, key: Any, value: Any, by: int) -> None:
        self.put(None, [*value, *value[-1:] * by])

    def restore(self) -> None:
        now = list(self.owner)
        if len(now) != len(self.saved) or any(a is not b for a, b in zip(now, self.saved.values(), strict=True)):
            self._refill([_fresh(value) for value in self.saved.values()])

    def _refill(self, values: list[Any]) -> None:
        while self.owner:  # methods that all of them have
            self.owner.pop()
        self.owner.extend(values)


class ObjectArray(Container):
    """An array of objects: its elements."""

    def items(self) -> dict[Any, Any]:
        return dict(enumerate(self.owner.flat))

    def put(self, key: Any, value: Any) -> None:
        self.owner.flat[key] = value


class Members(Container):
    """A set."""

    def items(self) -> dict[Any, Any]:
        return {element: element for element in self.owner}

    def put(self, key: Any, value: Any) -> None:
        self.owner.discard(key) if value is ABSENT else self.owner.add(value)

    def grow(self, key: Any, value: Any, by: int) -> None:
        self.owner.update(_others(key, by))


class Variable(Container):
    """A closure variable."""

    def items(self) -> dict[Any, Any]:
        try:
            return {"": self.owner.cell_contents}
        except ValueError:
            return {}

    def put(self, key: Any, value: Any) -> None:
        if value is not ABSENT:
            self.owner.cell_contents = value

    def path_of(self, key: Any) -> str:
        return self.path


class Contents(Container):
    """The contents of a tensor that is neither parameter nor buffer, or of an array."""

    def items(self) -> dict[Any, Any]:
        if isinstance(self.owner, np.ndarray):
            return {"": _Data(self._print(), self.owner.copy())}
        return {"": _Data(self._print(), self.owner.detach().clone())}

    def put(self, key: Any, value: Any) -> None:
        if isinstance(self.owner, np.ndarray):
            self.owner[...] = value.data
        else:
            with torch.inference_mode(self.owner.is_inference()), torch.no_grad():
                self.owner.copy_(value.data)

    def restore(self) -> None:
        kept = self.saved[""]
        if self._print() != kept.print:
            self.put("", kept)
            self.saved = self.items()

    def _print(self) -> Any:
        if isinstance(self.owner, np.ndarray):
            return self.owner.tobytes()
        return tensor_text(self.owner) if self.owner.is_inference() else self.owner._version

    def path_of(self, key: Any) -> str:
        return self.path


class CNumber(Container):
    """A number of C's, such as that of a multiprocessing.Value."""

    def items(self) -> dict[Any, Any]:
        return {"": self.owner.value}

    def put(self, key: Any, value: Any) -> None:
        self.owner.value = value

    def path_of(self, key: Any) -> str:
        return self.path


class Cache(Container):
    """Results of a function with `functools.cache` or `lru_cache`. Restoring takes out new ones that may hold state; a
    bounded cache is emptied of such where it was empty, and else stays as it is."""

    def __init__(self, owner: Any, path: str, home: Home) -> None:
        held = [each for each in gc.get_referents(owner) if each is not vars(owner)]
        is_bounded = owner.cache_parameters()["maxsize"] is not None
        self._results = None if is_bounded else next((each for each in held if isinstance(each, dict)), None)
        self._was_empty = not owner.cache_info().currsize
        super().__init__(owner, path, home)

    def items(self) -> dict[Any, Any]:
        if self._results is not None:
            return dict(self._results)
        held = (each for each in gc.get_referents(self.owner) if each is not vars(self.owner))
        return dict(enumerate(each for each in held if not _are_links(each)))

    def put(self, key: Any, value: Any) -> None:
        if self._results is not None:
            self._results.pop(key, None) if value is ABSENT else self._results.__setitem__(key, value)

    def restore(self) -> None:
        new = {key: value for key, value in self.items().items() if self.saved.get(key, ABSENT) is not value}
        if not any(map(_may_hold_state, new.values())):
            return  # operators that are defined once, say
        if self._results is not None:
            super().restore()
        elif self._was_empty:
            self.owner.cache_clear()

    def path_of(self, key: Any) -> str:
        return self.path


class ContextValue(Container):
    """What a context variable is in the current context."""

    def items(self) -> dict[Any, Any]:
        try:
            return {"": self.owner.get()}
        except LookupError:
            return {}

    def put(self, key: Any, value: Any) -> None:
        if value is not ABSENT:
            self.owner.set(value)

    def path_of(self, key: Any) -> str:
        return self.path


class Environment(Container):
    """Variables of the process, as numbers where they are written as such."""

    def items(self) -> dict[Any, Any]:
        return {key: _number(value) for key, value in self.owner.items()}

    def restore(self) -> None:
        now = self.items()
        for key in now.keys() | self.saved.keys():
            before = self.saved.get(key, ABSENT)
            if now.get(key, ABSENT) != before:
                self.put(key, before)

    def put(self, key: Any, value: Any) -> None:
        if value is ABSENT:
            self.owner.pop(key, None)
        else:
            self.owner[key] = str(value)

    def path_of(self, key: Any) -> str:
        return str(key)


class GeneratorState(Container):
    """A generator of random numbers: its state."""

    def items(self) -> dict[Any, Any]:
        return {"": generator_state(self.owner)}

    def put(self, key: Any, value: Any) -> None:
        set_generator_state(self.owner, value)

    def path_of(self, key: Any) -> str:
        return self.path


@dataclass(frozen=True)
class _Data:
    """Contents: a copy, and a number or bytes that identify them."""

    print: Any
    data: Any


@dataclass(frozen=True)
class Advanced:
    """A copy of an iterator, or the iterator itself if it cannot be copied; and its position."""

    iterator: Any
    text: str


class GlobalName(Container):
    """One name of a module's globals."""

    def __init__(self, space: dict[str, Any], name: str, home: Home) -> None:
        self.name = name
        self.ident = hash((id(space), name))
        super().__init__(space, name, home)

    def items(self) -> dict[Any, Any]:
        return {self.name: self.owner[self.name]} if self.name in self.owner else {}

    def put(self, key: Any, value: Any) -> None:
        self.owner.pop(key, None) if value is ABSENT else self.owner.__setitem__(key, value)

    def path_of(self, key: Any) -> str:
        return self.name


def _others(key: Any, count: int) -> list[Any]:
    """Keys similar to a number or a text."""
    if isinstance(key, int):
        return [key + 1 + number for number in range(count)]
    return [f"{key} {number}" for number in range(count)] if isinstance(key, str) else []


def _number(text: str) -> Any:
    """The number that is written so, or the text."""
    is_number = text.isdecimal() and len(text) < 19 and str(int(text)) == text
    return int(text) if is_number else text


def _may_hold_state(value: Any) -> bool:
    constant = (type(None), bool, int, float, complex, str, bytes, type, FunctionType, ModuleType)
    return not isinstance(value, (*constant, torch._ops.OpOverload, torch._ops.OpOverloadPacket))


def _are_links(value: Any) -> bool:
    """Whether this is the dictionary of a bounded cache, of the links of a chain that has the results."""
    return isinstance(value, dict) and all(type(each).__name__ == "_lru_list_element" for each in value.values())


def is_iterator(value: Any) -> bool:
    """Whether reading a value advances it, as with iterators of itertools and generators, or calling it, as with the
    method `__next__` of one."""
    if isinstance(value, MethodWrapperType):
        return value.__name__ == "__next__" and is_iterator(value.__self__)
    kind = type(value)
    if not hasattr(kind, "__next__") or not hasattr(kind, "__iter__") or hasattr(value, "__dict__"):
        return False
    return not any("__slots__" in vars(each) for each in kind.__mro__)


def set_aside(iterator: Any) -> Advanced:
    """A copy of an iterator and of those that it reads from, as of a chain, which give the same objects; or itself,
    where it cannot be copied."""
    try:
        return Advanced(_apart(iterator), _text(iterator))
    except (TypeError, ValueError, AttributeError, RuntimeError):
        return Advanced(iterator, _text(iterator))


def _apart(value: Any) -> Any:
    """Iterators made anew, in tuples and lists too, by what they tell `pickle`."""
    if is_iterator(value):
        make, args, *state = value.__reduce__()
        found = make(*map(_apart, args))
        if state:
            found.__setstate__(_apart(state[0]))
        return found
    if type(value) is tuple or (type(value) is list and any(map(is_iterator, value))):
        return type(value)(map(_apart, value))
    return value


def _fresh(value: Any) -> Any:
    """A copy to restore, which may be changed afterwards."""
    return set_aside(value.iterator).iterator if isinstance(value, Advanced) else value


def changes_of(container: Container) -> Iterator[Slot]:
    now = container.items()
    if isinstance(container, Elements) and len(now) != len(container.saved):
        yield Slot(container, None, list(container.saved.values()), list(now.values()))
        return
    for key in dict.fromkeys((*container.saved, *now)):
        before, after = container.saved.get(key, ABSENT), now.get(key, ABSENT)
        if before is not after and not _same(before, after):
            yield Slot(container, key, before, after)


def _same(before: Any, after: Any) -> bool:
    if before is ABSENT or after is ABSENT:
        return False
    if isinstance(before, _Data):
        return before.print == after.print
    if isinstance(before, Advanced):
        return is_iterator(after) and before.text == _text(after)
    if isinstance(before, np.ndarray) and isinstance(after, np.ndarray):
        return before.dtype == after.dtype and before.shape == after.shape and before.tobytes() == after.tobytes()
    return plain_text(before) == plain_text(after)


def _text(iterator: Any) -> str:
    frame = getattr(iterator, "gi_frame", None)
    if frame is not None:
        inner = getattr(iterator, "gi_yieldfrom", None)
        return f"{frame.f_lasti} {plain_text(frame.f_locals)} {_text(inner) if is_iterator(inner) else ''}"
    try:
        return _reduced(iterator.__reduce__())
    except TypeError:
        return "unknown"


def _reduced(value: Any) -> str:
    if isinstance(value, tuple):
        return "(" + ", ".join(_reduced(item) for item in value) + ")"
    return _text(value) if is_iterator(value) else plain_text(value)
