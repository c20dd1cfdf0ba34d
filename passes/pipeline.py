"""The pass pipeline: order, verification, timing and dumps of every pass.

    run_passes(capture(...), front_passes()) -> keyed and foldable; find_couplings() decides on granules;
    run_passes(..., back_passes("none"))     -> units and the split derivative of each kind; then `lower`

assign_stages comes later, per topology.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Protocol

from elaswave_fx.program.ir import Program
from elaswave_fx.program.text import graph_text, program_text
from elaswave_fx.program.verify import verify
from passes.choose_kernels import ChooseKernels
from passes.cut_units import CutUnits
from passes.differentiate import Differentiate
from passes.estimate_cost import EstimateCost
from passes.expand_attention import ExpandAttention
from passes.find_cuts import FindCuts
from passes.fold_buffers import FoldBuffers
from passes.normalize import Normalize
from passes.recognize_causal import RecognizeCausal
from passes.recompute import Policy, Recompute
from passes.replicate_invariants import ReplicateInvariants
from passes.rewrite_rng import RewriteRng
from passes.simplify import Simplify


class Pass(Protocol):
    """A frozen value with a name, a reason (its docstring) and one effect."""

    name: ClassVar[str]

    def apply(self, program: Program) -> Program: ...


@dataclass(frozen=True)
class Report:
    """What the runner saw: seconds per pass, in order."""

    seconds: tuple[tuple[str, float], ...]


def front_passes() -> tuple[Pass, ...]:
    """Capture's graph to one with keyed randomness and foldable buffers; sample analysis runs on its result."""
    return (Normalize(), ReplicateInvariants(), RecognizeCausal(), ExpandAttention(), RewriteRng(), FoldBuffers())


def back_passes(recompute: Policy) -> tuple[Pass, ...]:
    """From there to split derivatives of every distinct unit."""
    return (
        EstimateCost(), FindCuts(), CutUnits(), Differentiate(), Simplify(), ChooseKernels(), Recompute(recompute)
    )  # fmt: skip


def run_passes(
    program: Program, passes: Sequence[Pass], dump: Path | None = None, first: int = 0
) -> tuple[Program, Report]:
    """Apply passes in order; verify after each; write `NN-name.txt` to `dump`.

    Raises PassError or CaptureError from the pass or the verifier.
    """
    seconds = []
    for number, step in enumerate(passes, start=first):
        start = time.perf_counter()
        program = step.apply(program)
        seconds.append((step.name, time.perf_counter() - start))
        verify(program, step.name)
        if dump is not None:
            dump.mkdir(parents=True, exist_ok=True)
            (dump / f"{number:02d}-{step.name}.txt").write_text(render(program))
    return program, Report(tuple(seconds))


def render(program: Program) -> str:
    """Stable text of a program: the whole graph before units exist, one section per unit after."""
    return program_text(program) if program.units else graph_text(program.graph)
