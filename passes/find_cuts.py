"""find_cuts: divide any program into units where little is live, never by the names of modules.

The graph's order is kept. Between two heavy calls there is one candidate: the last position at which the fewest
bytes are live. Candidates in a valley stay: on either side the live bytes rise before they fall. In a residual network
that leaves the residual stream, in an encoder-decoder the stream beside the encoder's output.

    add (h, 1x) | layer_norm, qkv (4x), attention (2x), proj, add (h, 1x) | layer_norm, fc (5x), fc2, add (h, 1x) |
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import fx

from elaswave_fx.config.validation import constrained
from elaswave_fx.errors import PassError
from elaswave_fx.passes.estimate_cost import value_bytes
from elaswave_fx.program.dependence import Nature, natures
from elaswave_fx.program.ir import (
    Program,
    ResultKind,
    calls,
    flops_of,
    is_shuffled,
    output_nodes,
    set_unit,
    value_of,
)
from elaswave_fx.program.samples import SampleAxes, locate_samples


@dataclass(frozen=True)
class FindCuts:
    """Cut where few bytes are live.

    `heavy_share`: a call is heavy when it has this share of all operations. `slack`: by how much two candidates of
    about the same width may differ. `least`: with fewer units than that, the heaviest one is cut at its narrowest.
    """

    name: ClassVar[str] = "find_cuts"
    heavy_share: float = constrained(above=0, at_most=1, default=2e-3)
    slack: float = constrained(at_least=1, default=1.25)
    least: int = constrained(at_least=1, default=4)

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
        flops = [flops_of(node) for node in main]
        candidates = self._candidates(live_bytes(program, main), flops)
        positions, widths = list(candidates), list(candidates.values())
        cuts = [positions[i] for i in range(len(positions)) if self._in_valley(widths, i)]
        while len(cuts) + 1 < self.least and len(cuts) < len(candidates):
            cuts = sorted([*cuts, _best_in_heaviest(candidates, cuts, flops)])
        return cuts

    def _candidates(self, live: list[int | None], flops: list[float]) -> dict[int, int]:
        """Position after a possible cut -> bytes live there; one between every two heavy calls."""
        heavy = [i for i, amount in enumerate(flops) if amount >= self.heavy_share * sum(flops)]
        found = {}
        for first, last in zip([-1, *heavy], heavy, strict=False):
            inside = {i: width for i in range(max(first, 0), last) if (width := live[i]) is not None}
            if inside:
                narrowest = min(inside.values())
                found[max(i for i, width in inside.items() if width == narrowest)] = narrowest
        return found

    def _in_valley(self, widths: list[int], number: int) -> bool:
        return self._rises(widths, number, -1) and self._rises(widths, number, 1)

    def _rises(self, widths: list[int], number: int, step: int) -> bool:
        """Whether the nearest candidate of another width in direction `step` is wider; true if there is none."""
        here, at = widths[number], number + step
        while 0 <= at < len(widths):
            if widths[at] > self.slack * here:
                return True
            if self.slack * widths[at] < here:
                return False
            at += step
        return True


def _best_in_heaviest(candidates: dict[int, int], cuts: list[int], flops: list[float]) -> int:
    """The narrowest candidate, then the most even, inside the heaviest unit that has one."""
    spans = [(first + 1, last + 1) for first, last in itertools.pairwise([-1, *cuts, len(flops) - 1])]
    open_spans = [(lo, hi) for lo, hi in spans if any(lo <= i < hi - 1 for i in candidates)]
    lo, hi = max(open_spans, key=lambda span: sum(flops[span[0] : span[1]]))
    inside = [i for i in candidates if lo <= i < hi - 1]
    return min(inside, key=lambda i: (candidates[i], abs(sum(flops[lo : i + 1]) - sum(flops[i + 1 : hi]))))


def live_bytes(program: Program, main: list[fx.Node]) -> list[int | None]:
    """Bytes per sample live after each MAIN call; None where the program cannot be cut."""
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
    """The last value of each fold: they leave together, so each lives until the last is computed."""
    groups: dict[str, list[fx.Node]] = {}
    for node, result in zip(output_nodes(program.graph.graph), program.results, strict=True):
        if result.kind == ResultKind.FOLD and node in order:
            groups.setdefault(result.name, []).append(node)
    return {node: max(order[other] for other in group) for group in groups.values() for node in group}


def _can_cross(program: Program, node: fx.Node, axes: SampleAxes) -> bool:
    """Whether a value can cross a border: single tensors, in slices of samples or, when micro-batches are whole
    granules, whole. Sizes are recomputed where needed."""
    value = value_of(node)
    if isinstance(value, (torch.SymInt, int)):
        return True
    if not isinstance(value, torch.Tensor) or axes.data_dependent(node):
        return False
    return bool(program.batch_coupled) or (axes.sliceable(node) is not None and not is_shuffled(node))
