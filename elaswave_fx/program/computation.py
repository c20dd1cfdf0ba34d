"""The computation of a forward pass as a comparable value: equal for two runs that would be captured as one program.

Operators are recorded while the model runs. Everything that leads to loss, count or a buffer counts, with its numbers
and in its order. Values kept for inspection only do not count, and neither does how a constant was made: a mask built
in the first call and kept equals one built in every call.

    record(model, batch) == record(model, batch)       # as long as nothing but samples, parameters and draws counts
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.jit._fuser import optimized_execution
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from elaswave_fx.program.ir import UNSET
from elaswave_fx.program.model_fingerprint import ADDRESS
from elaswave_fx.program.state_kept import SEED

_TORCH = os.path.dirname(torch.__file__) + os.sep
_CALLS = ("_call_impl", "_wrapped_call_impl")
_ENDLESS = 20
"""Bound of a run's length, in multiples of the run it is compared with."""


class TooLong(RuntimeError):
    """Raised by a run that exceeds its bound of operators."""


@dataclass(frozen=True)
class Computation:
    """`results`: digests of how loss, count and updated buffers are computed; `calls`: operators that take part, digest
    -> place."""

    results: Mapping[str, str]
    calls: Mapping[str, str] = field(compare=False, repr=False)
    length: int = field(compare=False)

    def text(self) -> str:
        """A text that is equal in every process for the same computation."""
        return "\n".join(f"{name} {digest}" for name, digest in sorted(self.results.items()))

    def first_difference(self, other: Computation) -> str:
        """ " in CLASS.METHOD, line N": place of a call of `other` that this computation lacks."""
        return next((place for digest, place in other.calls.items() if digest not in self.calls and place), "")


def record(
    model: nn.Module, batch: Mapping[str, torch.Tensor], most: int | None = None, gradients: bool = False
) -> Computation:
    """Run forward once, with torch's generator as after `torch.manual_seed(SEED)`, and return its computation.

    `most`: bound of operators, beyond which TooLong is raised. `gradients`: include the gradient of the loss for every
    trained parameter; models with a backward pass of the user's own always include it.
    """
    inputs = {name: tensor.clone() for name, tensor in batch.items()}
    buffers = dict(model.named_buffers())
    trained = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    kind = _SkippedRecorder if "torch._dynamo" in sys.modules else _Recorder
    recorder = kind({**dict(model.named_parameters()), **buffers, **{f"input {n}": t for n, t in inputs.items()}},
                         most)  # fmt: skip
    try:
        # TorchScript computes with other operators from its second call on, once it has profiled the first.
        with torch.random.fork_rng(), optimized_execution(False), recorder:
            torch.manual_seed(SEED)
            outputs = tree_leaves(model(**inputs))
            found = _gradients(model, outputs[0]) if gradients or _has_own_backward(outputs[0]) else {}
    finally:
        if recorder.compiled:
            torch.compiler.reset()  # Code compiled under a recorder is useless outside of it.
    results = {f"result {i}": recorder.digest(value) for i, value in enumerate(outputs)}
    results |= {f"gradient {name}": recorder.digest(tensor) for name, tensor in found.items()}
    results |= {name: recorder.digest(tensor) for name, tensor in buffers.items() if recorder.wrote(tensor)}
    now = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    results |= {f"trained {name}": str(flag) for name, flag in now.items() if flag != trained.get(name)}
    return Computation(results, recorder.calls_of(results.values()), recorder.length)


def _gradients(model: nn.Module, loss: Any) -> dict[str, torch.Tensor | None]:
    trained = {name: tensor for name, tensor in model.named_parameters() if tensor.requires_grad}
    if not trained or not isinstance(loss, torch.Tensor) or not loss.requires_grad:
        return {}
    found = torch.autograd.grad(loss.sum(), list(trained.values()), allow_unused=True)
    return dict(zip(trained, found, strict=True))


def _has_own_backward(loss: Any) -> bool:
    """Whether a Python torch.autograd.Function takes part in a tensor's derivative."""
    waiting = [loss.grad_fn] if isinstance(loss, torch.Tensor) and loss.grad_fn is not None else []
    known = {*waiting}
    while waiting:
        node = waiting.pop()
        if isinstance(node, torch.autograd.function.BackwardCFunction):
            return True
        more = {source for source, _ in node.next_functions if source is not None} - known
        known |= more
        waiting += more
    return False


def allowance(base: Computation) -> int:
    """Bound of operators for a run that is compared with `base`."""
    return _ENDLESS * base.length + 10_000


@dataclass
class _Call:
    """An operator's call; `constant`: its inputs depend on no samples, parameters, buffers or draws."""

    digest: str
    constant: bool
    sources: tuple[str, ...]
    place: str


class _Recorder(TorchDispatchMode):
    """Records operator calls by the memory that they write: a view is identified by its place in that memory."""

    supports_higher_order_operators = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """False, as telling dynamo to skip this class imports it, which takes seconds that a cached program saves."""
        return False

    def __init__(self, named: Mapping[str, torch.Tensor], most: int | None) -> None:
        super().__init__()
        self.names = {_memory(tensor): name for name, tensor in named.items()}
        self.most = most
        self.length = 0
        self.compiled = False
        self.draws = 0
        self.writers: dict[int, _Call] = {}
        self.by_digest: dict[str, _Call] = {}
        self.contents: dict[tuple[Any, ...], str] = {}
        self.alive: list[Any] = list(named.values())
        """Keeps memory alive: freed memory could be reused by another tensor."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.length += 1
        self.compiled |= not isinstance(func, torch._ops.OpOverload)
        if self.most is not None and self.length > self.most:
            raise TooLong(f"calls more than {self.most} operators")
        values = tree_leaves((args, kwargs or {}))
        before = [self.digest(value) for value in values]
        constant = all(self.constant(value) for value in values) and not _draws(func)
        result = func(*args, **(kwargs or {}))
        if str(getattr(func, "overloadpacket", "")) in UNSET:
            result.zero_()  # the contents of uninitialized memory differ in every call
        self._note(func, values, before, constant, result)
        return result

    def _note(self, func: Any, values: list[Any], before: list[str], constant: bool, result: Any) -> None:
        made = [value for value in tree_leaves(result) if isinstance(value, torch.Tensor)]
        read = dict.fromkeys(_memory(value) for value in values if isinstance(value, torch.Tensor))
        written = dict.fromkeys(map(_memory, made))
        if isinstance(func, torch._ops.OpOverload) and func._schema.is_mutable:
            written = {memory: None for memory in written if memory in read} or read
        else:
            written = {memory: None for memory in written if memory not in read}
        if _draws(func):
            self.draws += 1
        self.alive += made
        for number, memory in enumerate(written):
            text = f"{func} {torch.is_grad_enabled()} {self.draws if not constant else ''} {number} {before}"
            call = _Call(_sha(text.encode()), constant, tuple(before), "" if constant else _place())
            self.writers[memory] = self.by_digest[call.digest] = call

    def constant(self, value: Any) -> bool:
        if not isinstance(value, torch.Tensor):
            return True
        writer = self.writers.get(_memory(value))
        return writer.constant if writer is not None else _memory(value) not in self.names

    def wrote(self, tensor: torch.Tensor) -> bool:
        return _memory(tensor) in self.writers

    def digest(self, value: Any) -> str:
        """Text of an operator's input: the call that made it, or its contents."""
        if not isinstance(value, torch.Tensor):
            return f"{type(value).__name__} {ADDRESS.sub('', str(getattr(value, '__qualname__', value)))}"
        place = f"{value.dtype} {tuple(value.shape)}"
        if value.layout == torch.strided:
            place += f" {value.stride()} {value.storage_offset()} {value.is_conj()} {value.is_neg()}"
        if self.constant(value):
            return f"{place} {self._contents(value)}"
        writer = self.writers.get(_memory(value))
        return f"{place} {writer.digest if writer is not None else self.names[_memory(value)]} {value.requires_grad}"

    def _contents(self, value: torch.Tensor) -> str:
        if value.layout != torch.strided or value.device.type == "meta":
            return "opaque"
        key = (_memory(value), value._version, tuple(value.shape), value.stride(), value.storage_offset())
        if key not in self.contents:
            self.alive.append(value)
            data = value.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
            self.contents[key] = _sha(data.numpy().tobytes())
        return self.contents[key]

    def calls_of(self, results: Any) -> dict[str, str]:
        """Calls that lead to `results`, in order: digest -> place."""
        found: set[str] = set()
        stack = [word for text in results for word in text.split()]
        while stack:
            word = stack.pop()
            if word in self.by_digest and word not in found:
                found.add(word)
                stack += [other for text in self.by_digest[word].sources for other in text.split()]
        return {digest: call.place for digest, call in self.by_digest.items() if digest in found}


class _SkippedRecorder(_Recorder):
    """A recorder that dynamo skips, for models that compile parts of themselves."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return super().__torch_dispatch__(func, types, args, kwargs)


def _draws(func: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in getattr(func, "tags", ())


def _memory(tensor: torch.Tensor) -> int:
    """Key of tensors that share memory."""
    return tensor.untyped_storage()._cdata if tensor.layout == torch.strided else id(tensor)


def _sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _frames() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def _place() -> str:
    """ " in CLASS.METHOD, line N" of the innermost running method of a module that is not torch's own, if any; else of
    one of torch's."""
    found = ""
    for frame in _frames():
        code = frame.f_code
        if code.co_name in _CALLS or not isinstance(owner := frame.f_locals.get("self"), nn.Module):
            continue
        place = f" in {type(owner).__name__}.{code.co_name}, line {frame.f_lineno}"
        if not code.co_filename.startswith(_TORCH):
            return place
        found = found or place
    return found
