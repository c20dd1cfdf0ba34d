"""find_cuts: divide any program into units where little is live, never by the names of modules.

The graph's order is kept. Between two heavy calls there is one candidate: the last position at which the fewest
bytes are live. A candidate stays if it is about as narrow as the narrowest ones nearby on at least one side: in a
residual network that leaves the residual stream, also where it shrinks, in an encoder-decoder the stream and the
encoder's output.

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
        widths = [width for i in candidates if (width := live[i]) is not None]
        return [position for number, position in enumerate(candidates) if self._narrow(widths, number, reach)]

    def _narrow(self, widths: list[int], number: int, reach: int) -> bool:
        """Whether there is a side on which nothing nearby is much narrower."""
        sides = (widths[max(0, number - reach) : number], widths[number + 1 : number + reach + 1])
        bounds = [min(side) for side in sides if side]
        return not bounds or widths[number] <= self.slack * max(bounds)


def live_bytes(program: Program, main: list[fx.Node]) -> list[int | None]:
    """Bytes per sample alive after each MAIN call; None where the program cannot be cut."""
    axes = locate_samples(program)
    order = {node: i for i, node in enumerate(main)}
    end = len(main)
    live: list[int | None] = [0] * end
    folded = _last_of_fold(program, order)
    for i, node in enumerate(main):
        last = max((order[user] for user in node.users if user in order), default=i)
        last = max(last, folded.get(node, i))
        cuttable = _can_cross(program, node, axes)
        size = value_bytes(value_of(node))
        for position in range(i, min(last, end)):
            current = live[position]
            live[position] = None if current is None or not cuttable else current + size
    return [None if size == 0 else size for size in live]


def _last_of_fold(program: Program, order: dict[fx.Node, int]) -> dict[fx.Node, int]:
    """The values of a fold leave together: each lives until the last of them is there."""
    groups: dict[str, list[fx.Node]] = {}
    for node, result in zip(output_nodes(program.graph.graph), program.results, strict=True):
        if result.kind == ResultKind.FOLD and node in order:
            groups.setdefault(result.name, []).append(node)
    return {node: max(order[other] for other in group) for group in groups.values() for node in group}


def _can_cross(program: Program, node: fx.Node, axes: SampleAxes) -> bool:
    """Single tensors cross, in slices of samples or, when micro-batches are whole granules, as a whole. Sizes are made
    anew where they are needed."""
    value = value_of(node)
    if isinstance(value, (torch.SymInt, int)):
        return True
    if not isinstance(value, torch.Tensor) or axes.data_dependent(node):
        return False
    return bool(program.batch_coupled) or axes.sliceable(node) is not None
