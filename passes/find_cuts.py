"""find_cuts: divide any program into units where little is live, never by the names of modules.

The graph's order is kept. Between two heavy calls there is one candidate: the last position at which the fewest
bytes are live. A candidate stays if it is about as narrow as the narrowest ones nearby: in a residual network that
leaves the residual stream, in an encoder-decoder the stream and the encoder's output.

    add (h, 1x) | layer_norm, qkv (4x), attention (2x), proj, add (h, 1x) | layer_norm, fc (5x), fc2, add (h, 1x) |
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import fx

from elaswave_fx.errors import PassError
from elaswave_fx.program.dependence import Nature, natures
from elaswave_fx.program.ir import Program, ResultKind, calls, flops_of, output_nodes, set_unit, value_of
from elaswave_fx.program.samples import SampleAxes, locate_samples
from passes.estimate_cost import value_bytes


@dataclass(frozen=True)
class FindCuts:
    """Cut where few bytes are live.

    `heavy_share`: a call is heavy when it has this share of all operations. `slack`: how much wider than its
    narrowest neighbour a cut may be. `reach`: how many neighbours on each side are compared.
    """

    name: ClassVar[str] = "find_cuts"
    heavy_share: float = 2e-3
    slack: float = 1.25
    reach: int = 4

    def apply(self, program: Program) -> Program:
        program = program.clone()
        kinds = natures(program)
        main = [node for node in calls(program.graph.graph) if kinds[node] == Nature.MAIN]
        if not main:
            raise PassError("find_cuts: no call depends on both samples and parameters; there is nothing to train")
        cuts = set(self._cuts(program, main))
        unit = 0
        for position, node in enumerate(main):
            set_unit(node, unit)
            unit += position in cuts
        return replace(program, num_units=unit + 1)

    def _cuts(self, program: Program, main: list[fx.Node]) -> list[int]:
        live = live_bytes(program, main)
        total = sum(flops_of(node) for node in main)
        heavy = [i for i, node in enumerate(main) if flops_of(node) >= self.heavy_share * total]
        candidates = []
        for first, last in zip([-1, *heavy], heavy, strict=False):
            inside = [i for i in range(max(first, 0), last) if live[i] is not None]
            if inside:
                narrowest = min(live[i] for i in inside)  # type: ignore[type-var]
                candidates.append(max(i for i in inside if live[i] == narrowest))
        reach = max(self.reach, len(heavy) // 16)
        widths = [live[i] for i in candidates]
        return [
            position
            for number, position in enumerate(candidates)
            if widths[number] <= self.slack * min(widths[max(0, number - reach) : number + reach + 1])  # type: ignore[operator,type-var]
        ]


def live_bytes(program: Program, main: list[fx.Node]) -> list[int | None]:
    """Bytes per sample alive after each MAIN call; None where the program cannot be cut."""
    axes = locate_samples(program)
    order = {node: i for i, node in enumerate(main)}
    end = len(main)
    live: list[int | None] = [0] * end
    outputs = zip(output_nodes(program.graph.graph), program.results, strict=True)
    kept = {node for node, result in outputs if result.kind in (ResultKind.LOSS, ResultKind.COUNT)}
    for i, node in enumerate(main):
        last = max((order[user] for user in node.users if user in order), default=i)
        last = end if node in kept else last
        cuttable = _can_cross(program, node, axes)
        size = value_bytes(value_of(node))
        for position in range(i, min(last, end)):
            current = live[position]
            live[position] = None if current is None or not cuttable else current + size
    return [None if size == 0 else size for size in live]


def _can_cross(program: Program, node: fx.Node, axes: SampleAxes) -> bool:
    """Single tensors cross, in slices of samples or, when micro-batches are whole granules, as a whole. Sizes are made
    anew where they are needed."""
    value = value_of(node)
    if isinstance(value, (torch.SymInt, int)):
        return True
    if not isinstance(value, torch.Tensor) or axes.data_dependent(node):
        return False
    return bool(program.batch_coupled) or axes.sliceable(node) is not None
