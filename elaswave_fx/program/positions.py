"""Values made of the samples' positions in their batch, and those among them that may differ for other samples.

w[torch.arange(B)], a table read at positions                              -> decides
torch.zeros_like(c).index_put((torch.arange(B), y), one), each its own row -> does not
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from elaswave_fx.program.ir import Program, is_aten, value_of
from elaswave_fx.program.samples import SampleAxes, split_samples
from elaswave_fx.program.sized_values import SizedValues, many_samples

READS_ROWS = (
    "aten.embedding", "aten.gather", "aten.index", "aten.index_select", "aten.take", "aten.take_along_dim",
    "aten._unsafe_index",
)  # fmt: skip
"""Calls that take rows of their first argument."""
WRITES_ROWS = (
    "aten.index_add", "aten.index_copy", "aten.index_put", "aten.index_reduce", "aten.scatter", "aten.scatter_add",
    "aten.scatter_reduce",
)  # fmt: skip
"""Calls that write rows at given places."""


class Positions:
    """What is made of positions in the batch, of the values that `see` was told of.

    `placed`: all of these. Integers among them that only tell samples apart, such as offsets of their rows, couple
    nothing by themselves.
    """

    def __init__(self, program: Program, axes: SampleAxes) -> None:
        self.placed: set[fx.Node] = set()
        self._deciding: set[fx.Node] = set()
        self._axes = axes
        self._granule = program.granule
        self._values = SizedValues(program)

    def see(self, node: fx.Node, joins: bool) -> None:
        """Take note of a value that samples and parameters do not both enter. `joins`: its parts of a trial batch join
        to the whole."""
        sources = self._sources(node)
        if joins and self.placed.isdisjoint(sources):
            return
        growth = self._growth(node) if node in self._values.sized else None
        if growth == 0:
            return  # the same for every sample: arange(B * 16) % 16
        self.placed.add(node)
        bends = node in self._values.sized and growth is None
        if bends or not _is_integer(node) or self._reads_table(node) or not self._deciding.isdisjoint(sources):
            self._deciding.add(node)

    def decide(self, node: fx.Node) -> bool:
        """Whether a call computes with what may differ for samples at other positions, such as a mask by positions."""
        return not self._deciding.isdisjoint(node.all_input_nodes)

    def _sources(self, node: fx.Node) -> set[fx.Node]:
        """The inputs whose positions a value keeps: rows of the samples are theirs wherever they are taken from or
        written."""
        rows: tuple[Any, ...] = tuple(node.all_input_nodes)
        if is_aten(node, *READS_ROWS) and not self._reads_table(node):
            rows = node.args[:1]
        elif is_aten(node, *WRITES_ROWS) and self._axes.of(node) is not None:
            rows = (node.args[0], rows_written(node))
        return {source for source in node.all_input_nodes if source in rows or source in self._deciding}

    def _reads_table(self, node: fx.Node) -> bool:
        """Whether a call reads what has no row of each sample."""
        return is_aten(node, *READS_ROWS) and self._axes.of(node.args[0]) is None  # type: ignore[arg-type]

    def _growth(self, node: fx.Node) -> float | None:
        """By how much a value that the number of samples tells grows from sample to sample; None if not by the same
        number everywhere: arange(B) // 8 may be 0 for all samples of a trial."""
        axis = self._axes.of(node)
        one = self._values.at(node, self._granule)
        if axis is None or one is None or one.is_complex():
            return None
        samples = max(2, many_samples(one) // self._granule) * self._granule
        whole, rest = self._values.at(node, samples), self._values.at(node, samples - self._granule)
        if whole is None or rest is None:
            return None
        rows = split_samples(whole, axis).narrow(axis.axis + 1, self._granule, samples - self._granule)
        grown = rows.double() - split_samples(rest, axis).double()
        first = float(grown.flatten()[0])
        return first if bool((grown == first).all()) else None


def rows_written(node: fx.Node) -> Any:
    """The rows that a call writes at given places; None for another call."""
    if not is_aten(node, *WRITES_ROWS):
        return None
    return node.args[2 if is_aten(node, "aten.index_put") else 3]


def is_of_integers(value: torch.Tensor) -> bool:
    return not (value.is_floating_point() or value.is_complex() or value.dtype == torch.bool)


def _is_integer(node: fx.Node) -> bool:
    value = value_of(node)
    return not isinstance(value, torch.Tensor) or is_of_integers(value)
