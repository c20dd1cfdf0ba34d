"""Python state of a model: attributes of its modules and their classes, nested values, closure variables, globals that
its code names, what its cached functions keep, environment variables, and the generators of `random` and NumPy.

    held = HeldState(model)
    model(**batch)
    held.changes()      ->  [Slot("calls", of "layers.0", before=0, after=1)]
    held.restore()      ->  as it was, by the same objects

Parameters, buffers and torch's generator are not included.
"""

from __future__ import annotations

import ctypes
import functools
import os
import sys
from array import array
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from contextvars import ContextVar
from types import BuiltinMethodType, CodeType, FunctionType, MethodType, MethodWrapperType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import nn
from torch._library.custom_ops import CustomOpDef

from elaswave_fx.program.containers import (
    Attributes,
    Cache,
    CNumber,
    Container,
    Contents,
    ContextValue,
    Elements,
    Entries,
    Environment,
    GeneratorState,
    GlobalName,
    Home,
    Members,
    ObjectArray,
    Slot,
    Variable,
    changes_of,
    is_iterator,
    set_aside,
)
from elaswave_fx.program.forward_code import is_installed, is_library
from elaswave_fx.program.generators import NUMPYS, PYTHONS, is_generator
from elaswave_fx.program.state_kept import state_kept

_MOST = 200_000
_WALKED = ("_thread", "argparse", "collections", "functools", "queue", "types", "weakref")
"""Python's own modules whose objects are searched; objects of other standard modules hold no model state."""
_WALKED_TOO = ("torch.optim", "multiprocessing.sharedctypes")
"""A schedule's object may count a model's calls, and so may a number that processes share."""
_BY_TEXT = frozenset({"__dict__", "getattr", "globals", "modules", "setattr", "vars"})
"""What takes names as texts."""
_NUMBERS_OF_C = frozenset("bBhHiIlLqQfdg?")


@contextmanager
def python_state_kept(model: nn.Module) -> Iterator[None]:
    """Restore the model's Python state afterwards."""
    held = HeldState(model)
    try:
        yield
    finally:
        held.restore()


def try_forward(model: nn.Module, batch: Mapping[str, torch.Tensor], patch: AbstractContextManager[object]) -> None:
    """Run forward once within `patch`, to watch it: all state is restored, and an error ends the trial alone."""
    with (
        python_state_kept(model),
        state_kept(model),
        torch.random.fork_rng(devices=()),
        patch,
        suppress(Exception),
    ):
        model(**{name: tensor.clone() for name, tensor in batch.items()})


class HeldState:
    """A snapshot, taken on construction."""

    def __init__(self, model: nn.Module) -> None:
        self.containers: dict[int, Container] = {}
        self._modules = {id(module): _module_name(name, module) for name, module in model.named_modules()}
        self._known = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
        self._waiting: list[tuple[Any, str, Home]] = []
        self.functions: list[FunctionType] = []
        """Functions that forward may run, outside of torch and Python."""
        self._walk(model)

    def changes(self) -> list[Slot]:
        """Differences from the snapshot, by value."""
        return [slot for container in self.containers.values() for slot in changes_of(container)]

    def restore(self) -> None:
        for container in self.containers.values():
            container.restore()

    def _walk(self, model: nn.Module) -> None:
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            self._add(Attributes(tensor, name, Home(_module_name("", model), model)))
        self._add(Environment(os.environ, "", Home("the environment (os.environ)", None)))
        self._add(GeneratorState(PYTHONS, "", Home("Python's generator (module random)", None)))
        self._add(GeneratorState(NUMPYS, "", Home("NumPy's generator (numpy.random)", None)))
        for name, module in model.named_modules():
            home = Home(_module_name(name, module), module)
            self._add(Attributes(module, "", home))
            for kind in type(module).__mro__:
                if not is_library(kind.__module__):
                    self._class(kind)
        while self._waiting and len(self.containers) < _MOST:
            self._look_at(*self._waiting.pop())

    def _add(self, container: Container, aspect: str = "") -> None:
        """`aspect`: of an owner with several containers."""
        ident = hash((id(container.owner), aspect)) if aspect else id(container.owner)
        if ident in self.containers:
            return
        self.containers[ident] = container
        for key, value in container.saved.items():
            if is_iterator(value):
                container.saved[key] = set_aside(value)
            elif not isinstance(container, (Contents, Environment, GeneratorState)):
                self._waiting.append((value, container.path_of(key), container.home))

    def _class(self, kind: type) -> None:
        if id(kind) in self.containers:
            return
        self._add(Attributes(kind, "", Home(f"class {kind.__name__}", kind)))
        for value in vars(kind).values():
            value = getattr(value, "__func__", getattr(value, "fget", value))
            if isinstance(value, FunctionType):
                self._function(value)
            elif isinstance(value, functools._lru_cache_wrapper):
                self._look_at(value, getattr(value, "__name__", ""), Home(f"class {kind.__name__}", kind))
        for other in (*kind.__mro__, type(kind)):  # a metaclass may keep what it makes
            self._users_class(other)

    def _users_class(self, kind: type) -> None:
        if _is_users(sys.modules.get(kind.__module__)):
            self._class(kind)

    def _look_at(self, value: Any, path: str, home: Home) -> None:
        if id(value) in self.containers or id(value) in self._modules or value is None:
            return
        if isinstance(value, (bool, int, float, complex, str, bytes, ModuleType)):
            return
        if isinstance(value, (dict, list, deque, set)) and getattr(value, "__dict__", None):
            self._add(Attributes(value, path, home), "attributes")
        if isinstance(value, type):
            self._users_class(value)
        elif isinstance(value, torch.Tensor):
            if id(value) not in self._known and value.layout == torch.strided and value.device.type == "cpu":
                self._add(Contents(value, path, home))
        elif isinstance(value, np.ndarray):
            self._add((Contents if value.dtype != object else ObjectArray)(value, path, home))
        elif is_generator(value):
            self._add(GeneratorState(value, path, home))
        elif isinstance(value, MethodType):
            self._waiting += [(value.__self__, path, home), (value.__func__, path, home)]
        elif isinstance(value, (BuiltinMethodType, MethodWrapperType)):
            self._waiting.append((value.__self__, path, home))
        elif isinstance(value, functools._lru_cache_wrapper):
            self._add(Cache(value, path, home))
            self._waiting.append((getattr(value, "__wrapped__", None), path, home))
        elif isinstance(value, CustomOpDef):
            self._waiting += [(each, path, home) for each in vars(value).values() if isinstance(each, FunctionType)]
        elif isinstance(value, ContextVar):
            self._add(ContextValue(value, path, home))
        elif isinstance(value, FunctionType):
            self._function(value)
        elif isinstance(value, dict):
            self._add(Entries(value, path, home))
        elif isinstance(value, (list, deque, array, bytearray)):
            self._add(Elements(value, path, home))
        elif isinstance(value, set):
            self._add(Members(value, path, home))
        elif isinstance(value, (tuple, frozenset)):
            self._waiting += [(item, path, home) for item in value]
        elif isinstance(value, (functools.partial, functools.partialmethod)):
            self._waiting += [(each, path, home) for each in (value.func, value.args, value.keywords)]
        elif isinstance(value, ctypes._SimpleCData) and getattr(value, "_type_", "") in _NUMBERS_OF_C:
            self._add(CNumber(value, path, home))
        elif isinstance(value, nn.Module) or _is_walked(type(value).__module__):
            self._add(Attributes(value, path, home))
            self._users_class(type(value))

    def _function(self, function: FunctionType) -> None:
        """Note closure variables, defaults, and, for a user's function, the globals that it names."""
        if id(function) in self.containers or is_library(function.__module__):
            return
        self.functions.append(function)
        home = Home(f"function {function.__qualname__}", function)
        self._add(Attributes(function, function.__name__, home))
        self._waiting += [(value, name, home) for name, value in _defaults(function)]
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            if id(cell) not in self.containers:
                self._add(Variable(cell, name, home))
        if not is_installed(function.__code__.co_filename):
            names, seen = frozenset(names_of(function.__code__)), set[int]()
            self._globals(function.__globals__, names, seen)
            package = function.__globals__.get("__package__")
            for name in sorted(names):  # a module that the function imports itself
                module = sys.modules.get(name) or sys.modules.get(f"{package}.{name}")
                if module is not None and not is_library(name) and _is_users(module) and id(vars(module)) not in seen:
                    self._globals(vars(module), names, seen)

    def _globals(self, space: dict[str, Any], names: frozenset[str], seen: set[int]) -> None:
        """Note some of a module's globals, each as a separate slot, and those of modules and classes among them."""
        seen.add(id(space))
        for name in names & space.keys():
            value = space[name]
            if isinstance(value, ModuleType):
                if id(vars(value)) not in seen and not is_library(value.__name__) and _is_users(value):
                    self._globals(vars(value), names, seen)
            elif isinstance(value, type):
                self._users_class(value)
            else:
                title = f"module {space.get('__name__', '?')}"
                container = GlobalName(space, name, Home(title, space))
                if container.ident not in self.containers:
                    self.containers[container.ident] = container
                    self._waiting.append((value, name, container.home))
                    if is_iterator(value):
                        container.saved[name] = set_aside(value)


def names_of(code: CodeType) -> Iterator[str]:
    """Globals and attributes named by code and its inner functions, also in texts, as in globals()["calls"]."""
    yield from code.co_names
    by_text = not _BY_TEXT.isdisjoint(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from names_of(constant)
        elif by_text and isinstance(constant, str):
            yield constant


def _is_walked(module: str | None) -> bool:
    return not is_library(module, _WALKED) or str(module).startswith(_WALKED_TOO)


def _is_users(module: ModuleType | None) -> bool:
    source = getattr(module, "__file__", None)
    return source is not None and not is_installed(source)


def _module_name(name: str, module: nn.Module) -> str:
    return f"{name or 'the model'} ({type(module).__name__})"


def _defaults(function: FunctionType) -> Iterable[tuple[str, Any]]:
    code = function.__code__
    given = function.__defaults__ or ()
    named = code.co_varnames[: code.co_argcount][code.co_argcount - len(given) :]
    return (*zip(named, given, strict=True), *(function.__kwdefaults__ or {}).items())
