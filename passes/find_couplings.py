"""find_couplings: find operators that couple the samples of a batch, and refuse losses that are means.

The analysis (`program/coupling.py`) runs the program on its capture's batch, whole and in parts. A coupled program runs
granule by granule from here on. Values whose rows are temporarily sorted across samples are marked: no unit ends there.

    batch_norm over [B, 16, 8, 8]   ->   batch_coupled = ("aten._native_batch_norm_legit.no_stats in stem_norm",)
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from elaswave_fx.program.coupling import find_couplings
from elaswave_fx.program.ir import Program, set_shuffled


@dataclass(frozen=True)
class FindCouplings:
    """Find samples that must be computed together, so that no micro-batch separates them."""

    name: ClassVar[str] = "find_couplings"

    def apply(self, program: Program) -> Program:
        program = program.clone()
        found = find_couplings(program, program.example.state, program.example.batch, program.example.more)
        for node in found.shuffled:
            set_shuffled(node)
        return replace(program, batch_coupled=found.reasons)
