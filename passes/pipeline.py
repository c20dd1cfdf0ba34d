"""The pipeline: which passes run in which order, as a value that prints as text; and the runner.

    str(STANDARD)                              ->  "normalize,…,find_cuts{heavy_share=0.002 slack=1.25 least=4},…"
    Pipeline.parse(str(STANDARD)) == STANDARD
    run_passes(capture(...), STANDARD.passes)  ->  units and the split derivative of each kind; then `lower`

The text has every option, defaults included: in a recipe or an artifact it keeps its meaning when a default changes.
User passes are written as their import paths. assign_stages is not part of a pipeline: it works on the artifact, for
every topology anew.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol

from elaswave_fx.config.validation import hint, read
from elaswave_fx.errors import ConfigError, PassError
from elaswave_fx.passes.choose_kernels import ChooseKernels
from elaswave_fx.passes.cut_units import CutUnits
from elaswave_fx.passes.differentiate import Differentiate
from elaswave_fx.passes.estimate_cost import EstimateCost
from elaswave_fx.passes.expand_attention import ExpandAttention
from elaswave_fx.passes.find_couplings import FindCouplings
from elaswave_fx.passes.find_cuts import FindCuts
from elaswave_fx.passes.fold_buffers import FoldBuffers
from elaswave_fx.passes.normalize import Normalize
from elaswave_fx.passes.pipeline_text import PassText, read_text, write_pass
from elaswave_fx.passes.recognize_causal import RecognizeCausal
from elaswave_fx.passes.recompute import Recompute
from elaswave_fx.passes.replicate_invariants import ReplicateInvariants
from elaswave_fx.passes.rewrite_rng import RewriteRng
from elaswave_fx.passes.simplify import Simplify
from elaswave_fx.passes.split_backward import SplitBackward
from elaswave_fx.passes.user_pass import load_pass_class
from elaswave_fx.program.invariants import verify
from elaswave_fx.program.ir import Program
from elaswave_fx.program.text import graph_text, program_text


class Pass(Protocol):
    """A frozen dataclass with a name, a reason (its docstring) and one effect. Its fields are its options."""

    name: ClassVar[str]

    def apply(self, program: Program) -> Program: ...


BUILT_IN: Mapping[str, Any] = {
    each.name: each
    for each in (
        Normalize, ReplicateInvariants, RecognizeCausal, ExpandAttention, RewriteRng, FoldBuffers, FindCouplings,
        EstimateCost, FindCuts, CutUnits, Differentiate, Simplify, ChooseKernels, Recompute, SplitBackward,
    )
}  # fmt: skip
"""The passes of the compiler by name, in their order."""

_DISPENSABLE = (
    "replicate_invariants", "recognize_causal", "expand_attention", "simplify", "choose_kernels", "split_backward",
)  # fmt: skip
_NEEDED = tuple(name for name in BUILT_IN if name not in _DISPENSABLE)


@dataclass(frozen=True)
class Pipeline:
    """Passes in the order in which they run."""

    passes: tuple[Pass, ...]

    def __str__(self) -> str:
        return ",".join(write_pass(_written_name(step), _options(step)) for step in self.passes)

    @staticmethod
    def parse(text: str, base: Pipeline | None = None) -> Pipeline:
        """The pipeline of a text. Omitted options are those of `base`, else the defaults.

        Raises ConfigError that names the column, the pass or option, and the nearest valid one.
        """
        return Pipeline(tuple(_parse_pass(written, base or STANDARD) for written in read_text(text)))

    def before(self, name: str) -> Pipeline:
        """The passes that run before the first one of this name."""
        return Pipeline(self.passes[: self._names().index(name)])

    def with_pass(self, step: Pass, *, after: str | None = None, before: str | None = None) -> Pipeline:
        """This pipeline with one more pass, right after the last or before the first pass of a name.

        Raises ConfigError for a name that no pass has; the nearest valid one is named.
        """
        names = self._names()
        name = after if after is not None else before
        if name not in names:
            raise ConfigError(f"{name}: no pass of that name in the pipeline; {hint(str(name), names, 'name')}")
        place = len(names) - names[::-1].index(name) if after is not None else names.index(name)
        return Pipeline((*self.passes[:place], step, *self.passes[place:]))

    def refuse_incomplete(self) -> None:
        """Raise ConfigError if a required pass is missing, doubled, or out of place."""
        found = [name for name in self._names() if name in _NEEDED]
        for wanted, name in itertools.zip_longest(_NEEDED, found):
            if wanted not in found:
                raise ConfigError(f"{wanted} is missing; these are needed, in this order: {', '.join(_NEEDED)}")
            if wanted != name:
                raise ConfigError(f"{name} is out of place; these are needed, in this order: {', '.join(_NEEDED)}")

    def _names(self) -> list[str]:
        return [step.name for step in self.passes]


def may_be_left_out(name: str) -> bool:
    """Whether a pipeline without this pass of the compiler is complete."""
    return name in _DISPENSABLE


def is_users(step: Pass) -> bool:
    """Whether a pass is a user's."""
    return type(step) is not BUILT_IN.get(step.name)


def _written_name(step: Pass) -> str:
    kind = type(step)
    return f"{kind.__module__}.{kind.__qualname__}" if is_users(step) else step.name


def _options(step: Any) -> dict[str, object]:
    return {field.name: getattr(step, field.name) for field in dataclasses.fields(step)}


def _parse_pass(written: PassText, base: Pipeline) -> Pass:
    try:
        if "." in written.name:
            kind = load_pass_class(written.name, BUILT_IN)
        elif written.name in BUILT_IN:
            kind = BUILT_IN[written.name]
        else:
            raise ConfigError(f"{written.name}: no such pass; {hint(written.name, BUILT_IN, 'name')}")
        defaults = next((_options(step) for step in base.passes if type(step) is kind), {})
        return read(kind, {**defaults, **written.options}, written.name)
    except ConfigError as error:
        raise ConfigError(f"column {written.column}: {error}") from error


STANDARD = Pipeline(tuple(kind() for kind in BUILT_IN.values()))
"""All passes of the compiler with their defaults."""


@dataclass(frozen=True)
class Report:
    """Measurements of the runner: seconds per pass, in order."""

    seconds: tuple[tuple[str, float], ...]


def run_passes(program: Program, passes: Sequence[Pass], dump: Path | None = None) -> tuple[Program, Report]:
    """Apply passes in order and verify after each.

    `dump`: a folder for the graphs, `00-capture.txt` and `NN-NAME.txt` after each pass; older graphs are deleted. The
    input of a failing pass is there when it fails.

    Raises PassError or CaptureError from the pass or the verifier.
    """
    seconds = []
    if dump is not None:
        _clear(dump)
        _dump(dump, 0, "capture", program)
    for number, step in enumerate(passes, start=1):
        start = time.perf_counter()
        program = step.apply(program)
        seconds.append((step.name, time.perf_counter() - start))
        if not isinstance(program, Program):
            raise PassError(f"{step.name}: apply returns a {type(program).__name__}; a pass returns the program")
        verify(program, step.name)
        if dump is not None:
            _dump(dump, number, step.name, program)
    return program, Report(tuple(seconds))


def _clear(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path in folder.glob("[0-9][0-9]-*.txt"):
            path.unlink()
    except OSError as error:
        raise ConfigError(f"passes.dump={folder}: cannot be written ({error.strerror})") from error


def _dump(folder: Path, number: int, name: str, program: Program) -> None:
    """Write one file atomically."""
    path = folder / f"{number:02d}-{name}.txt"
    partial = path.with_suffix(f".{os.getpid()}.partial")
    partial.write_text(render(program))
    partial.replace(path)


def render(program: Program) -> str:
    """Stable text of a program: the whole graph before units exist, one section per unit after."""
    return program_text(program) if program.units else graph_text(program.graph)
