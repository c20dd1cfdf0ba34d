"""The checker and what it checks share types and no code: read from the syntax trees, and tried without the code."""

from __future__ import annotations

import ast
import importlib
import inspect
import types
import typing
from functools import cached_property
from pathlib import Path

import pytest

from elaswave_fx.errors import PlanError
from elaswave_fx.plan import plan
from elaswave_fx.plan.check import check_plan as check
from elaswave_fx.plan.check.check_plan import check_instructions, plan_violations
from elaswave_fx.plan.lower.step import eval_program, step_program
from elaswave_fx.plan.make import planner
from elaswave_fx.plan.make.planner import plan_lanes
from elaswave_fx.plan.plan import Plan, Predicted, RankCost
from elaswave_fx.plan.work.box import Box
from elaswave_fx.plan.work.cost import Workload
from elaswave_fx.plan.work.operating_points import OperatingPoint, Power
from elaswave_fx.plan.work.spans import Runs, Span
from elaswave_fx.plan.work.tiling import Lane, Stage, Tile
from elaswave_fx.plan.work.topology import Member, Topology, local_topology
from tests.plan.samples import chain

CHECKER = sorted(Path(check.__file__).parent.glob("check*.py"))
CHECKED = {"elaswave_fx.plan.lower.step.step_program", "elaswave_fx.plan.lower.step.eval_program"}
"""What a check without lists begins with; it is the object of the check."""

SHARED = (
    Box,
    Span,
    Runs,
    Workload,
    Plan,
    Predicted,
    RankCost,
    Lane,
    Stage,
    Tile,
    Member,
    Topology,
    Power,
    OperatingPoint,
)


def imported(source: str) -> set[str]:
    """The names of ours that a module imports, but for those of the checker itself."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {f"{'.' * node.level}{node.module}.{alias.name}" for alias in node.names}
    return {name for name in found if name.startswith(("elaswave_fx", ".")) and ".plan.check" not in name}


def is_type(name: str) -> bool:
    """Whether a dotted name is a class, or another name for one."""
    module, _, last = name.rpartition(".")
    value = getattr(importlib.import_module(module), last)
    return isinstance(value, (type, typing.NewType, types.GenericAlias)) or typing.get_origin(value) is not None


def not_types(source: str) -> set[str]:
    return {name for name in imported(source) - CHECKED if not is_type(name)}


@pytest.mark.parametrize("path", CHECKER, ids=lambda path: path.name)
def test_the_checker_imports_types_alone(path: Path) -> None:
    assert not_types(path.read_text()) == set()


def test_the_rule_sees_code() -> None:
    assert len(CHECKER) == 3
    for name in (
        "order.hops.find_hops", "work.tiling.tiles_of", "order.schedule.levels", "work.cost.value_samples",
        "predict.memory",
    ):  # fmt: skip
        module, _, last = f"elaswave_fx.plan.{name}".rpartition(".")
        assert not_types(f"def f():\n    from {module} import {last}") == {f"elaswave_fx.plan.{name}"}
    assert (
        not_types("from elaswave_fx.plan.work.topology import Rank\nfrom elaswave_fx.plan.order.hops import Hop")
        == set()
    )


def derived_members(cls: type) -> list[str]:
    """What a type computes of its fields: properties and methods; operators are what the type means."""
    kinds = (property, cached_property, types.FunctionType, staticmethod)
    return [name for name, value in vars(cls).items() if isinstance(value, kinds) and not name.startswith("__")]


def without_code(monkeypatch: pytest.MonkeyPatch) -> None:
    for cls in SHARED:
        for name in derived_members(cls):
            monkeypatch.delattr(cls, name)
    for module in {inspect.getmodule(cls) for cls in SHARED} | {plan, planner}:
        for name, value in vars(module).copy().items():
            if isinstance(value, types.FunctionType):
                monkeypatch.delattr(module, name)


def test_the_checker_needs_nothing_that_types_can_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every property and method of the shared types is gone; what is compared with, tiles and hops, is there."""
    found = plan_lanes(chain(6, 25), local_topology(5, memory_bytes=10**6), [(1, 2), (1, 1)])
    wrong = plan_lanes(chain(6, 25), local_topology(5, memory_bytes=10**6), [(1, 2), (1, 1)])
    lists = {
        name: {rank: lower(found, rank).instructions for rank in found.ranks}
        for name, lower in (("training", step_program), ("evaluation", eval_program))
    }
    assert found.tiles and found.hops and wrong.tiles
    wrong.__dict__["hops"] = found.hops[1:]
    without_code(monkeypatch)
    with pytest.raises(AttributeError):
        found.groups  # noqa: B018
    assert list(plan_violations(found)) == []
    assert len(list(plan_violations(wrong))) == 1
    for name, each in lists.items():
        check_instructions(found, each, name)
    with pytest.raises(PlanError, match="rank 0 ends with units that have not run"):
        check_instructions(found, {**lists["training"], found.tiles[0].rank: ()})
