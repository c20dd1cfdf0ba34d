"""The part of a program that counts: the divisor of the loss, as far as it follows from the inputs alone.

counter = cut_count(artifact)      # of unit 5: [("input", "labels")] -> count
counter.unit, counter.inputs, counter.program
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from elaswave_fx.program.artifact import Artifact

_COUNT = ("count",)


@dataclass(frozen=True)
class Counter:
    """A unit program with the count of a micro-batch as its only output.

    `inputs`: one name per input of the program, None where it reads none.
    """

    unit: int
    inputs: tuple[str | None, ...]
    program: Mapping[str, Any]


def cut_count(artifact: Artifact) -> Counter | None:
    """The counter of an artifact; None if the count depends on more than batch inputs (on parameters, say)."""
    unit = next((unit for unit in artifact.units if _COUNT in unit.outputs), None)
    if unit is None:
        return None
    whole = artifact.programs[f"{unit.kind}.forward"]
    output = whole["outputs"][unit.outputs.index(_COUNT)]
    needed, kept = {output}, []
    for instruction in reversed(whole["instructions"]):
        if needed.intersection(instruction["outs"]):
            needed.update(slot for argument in instruction["args"] for slot in _slots(argument))
            kept.append({**instruction, "frees": []})
    inputs: list[str | None] = []
    for slot, binding in enumerate(unit.inputs):
        if slot not in needed:
            inputs.append(None)
        elif binding[0] == "input":
            inputs.append(binding[1])
        else:
            return None
    program = {**whole, "name": f"{unit.kind}.count", "outputs": [output], "instructions": kept[::-1]}
    return Counter(unit.index, tuple(inputs), program)


def _slots(argument: Any) -> Iterator[int]:
    """The slots named by an argument of an instruction: ["slot", 3], or inside a list."""
    if argument[0] == "slot":
        yield argument[1]
    elif argument[0] == "list":
        for item in argument[1]:
            yield from _slots(item)
