"""verify: broken programs are named, with the pass that broke them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from torch import fx

from elaswave_fx.errors import PassError
from elaswave_fx.passes.cut_units import CutUnits
from elaswave_fx.passes.estimate_cost import EstimateCost
from elaswave_fx.passes.find_cuts import FindCuts
from elaswave_fx.passes.pipeline import run_passes
from elaswave_fx.program.invariants import verify
from elaswave_fx.program.ir import Program, ResultKind, calls, placeholders, source_of
from tests.passes.compiled import front
from tests.passes.models import Classifier, vectors


@pytest.fixture(scope="module")
def sound() -> Program:
    return run_passes(front(Classifier(), vectors), (EstimateCost(), FindCuts(), CutUnits()))[0]


def changed(program: Program, change: Callable[[fx.Graph], object]) -> Program:
    program = program.clone()
    change(program.graph.graph)
    return program


def no_value(graph: fx.Graph) -> None:
    next(calls(graph)).meta.pop("val")


def constant_batch(graph: fx.Graph) -> None:
    for node in placeholders(graph):
        if source_of(node).role.value == "input":
            node.meta["val"] = node.meta["val"].new_empty(4)


def test_a_sound_program_passes(sound: Program) -> None:
    verify(sound, "test")


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (lambda p: changed(p, no_value), "test: node layer_norm has no value; passes add calls through `emit`"),
        (lambda p: changed(p, constant_batch), "test: the batch size became a constant"),
        (lambda p: replace(p, params={}), "test: input .* reads the unknown param 'layers.0.norm.weight'"),
        (lambda p: replace(p, results=p.results[:1]), "test: the graph returns 2 values for 1 results"),
        (lambda p: replace(p, values=p.values[1:]), "test: unit 0 gives .*, which is declared as None"),
        (lambda p: replace(p, units=p.units[1:]), "test: no unit gives the values"),
        (lambda p: replace(p, units=p.units[:-1]), r"test: the loss is given by units \[\]; exactly one gives it"),
        (lambda p: replace(p, units=(*p.units, p.units[-1])), "test: the loss is given by units"),
        (
            lambda p: replace(p, values=(replace(p.values[0], producer=3), *p.values[1:])),
            "test: unit 0 gives .*, which is declared as BorderValue",
        ),
        (
            lambda p: replace(p, units=(replace(p.units[0], sources=()), *p.units[1:])),
            "test: unit 0: its graph does not read and return what the unit declares",
        ),
        (
            lambda p: replace(p, values=(replace(p.values[0], consumers=()), *p.values[1:])),
            "test: unit 1 reads .*, which is declared as BorderValue",
        ),
    ],
)
def test_broken_programs_are_named(sound: Program, broken: Callable[[Program], Program], message: str) -> None:
    with pytest.raises(PassError, match=message):
        verify(broken(sound), "test")


def test_values_only_flow_to_later_units(sound: Program) -> None:
    first, second, *rest = sound.units
    swapped = (replace(second, index=0), replace(first, index=1), *rest)
    values = tuple(replace(v, producer=1) if v.producer == 0 else v for v in sound.values)
    with pytest.raises(PassError, match="values only flow to later units"):
        verify(replace(sound, units=swapped, values=values), "test")


def test_a_malformed_graph(sound: Program) -> None:
    program = sound.clone()
    node = next(calls(program.graph.graph))
    node.args = (next(reversed(list(calls(program.graph.graph)))), *node.args[1:])
    with pytest.raises(PassError, match="test: the graph is malformed"):
        verify(program, "test")
    assert ResultKind.LOSS in {result.kind for result in program.results}
