"""Plans that are read before anybody stops for them."""

from __future__ import annotations

from typing import cast

import pytest

from elaswave_fx.errors import PlanError
from elaswave_fx.plan.plan import Plan
from elaswave_fx.plan.planner import plan_lanes
from elaswave_fx.plan.topology import Rank, local_topology
from elaswave_fx.worker.engine import RankEngine
from elaswave_fx.worker.foresight import Foresight
from tests.plan.samples import chain

TWO, ONE = (plan_lanes(chain(), local_topology(ranks), [(1,) * ranks], copies=0).to_json() for ranks in (2, 1))


class Engine:
    """What an engine is told to foresee."""

    def __init__(self) -> None:
        self.told: list[Plan] = []

    def foresee(self, plan: Plan) -> None:
        self.told.append(plan)


def foresight(engine: Engine | None, rank: int = 1) -> Foresight:
    return Foresight(Rank(rank), lambda: cast(RankEngine, engine))


def test_a_plan_that_was_expected_is_that_which_the_engine_was_told() -> None:
    engine = Engine()
    found = foresight(engine)
    found.expect(TWO)
    found.expect(TWO)
    plan = found.plan(TWO)
    assert [id(told) for told in engine.told] == [id(plan)] and plan.to_json() == TWO
    assert found.plan(TWO) is not plan, "one epoch has a plan"


def test_another_one_may_come() -> None:
    engine = Engine()
    found = foresight(engine)
    found.expect(TWO)
    assert found.plan(ONE).to_json() == ONE
    assert foresight(engine).plan(TWO).to_json() == TWO, "none was expected"


@pytest.mark.parametrize("engine", [Engine(), None])
def test_who_leaves_or_has_no_engine_yet_foresees_no_more_than_the_plan(engine: Engine | None) -> None:
    found = foresight(engine)
    found.expect(ONE if engine is not None else TWO)
    assert found.plan(ONE if engine is not None else TWO).ranks
    assert engine is None or not engine.told


def test_what_is_no_plan_is_said_to_whoever_asks_for_it() -> None:
    found = foresight(Engine())
    found.expect("{}")
    with pytest.raises(PlanError):
        found.plan("{}")
