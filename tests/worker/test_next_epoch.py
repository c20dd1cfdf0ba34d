"""Plans that are read before anybody stops for them."""

from __future__ import annotations

from typing import cast

import pytest

from elaswave_fx.errors import PlanError
from elaswave_fx.plan.make.planner import plan_lanes
from elaswave_fx.plan.plan import Plan
from elaswave_fx.plan.work.topology import Rank, local_topology
from elaswave_fx.worker.engine import RankEngine
from elaswave_fx.worker.feed import InputFeed
from elaswave_fx.worker.next_epoch import NextEpoch
from tests.plan.samples import chain

TWO, ONE = (plan_lanes(chain(), local_topology(ranks), [(1,) * ranks], replicas=0).to_json() for ranks in (2, 1))


class Engine:
    """What an engine is told to precompute; it runs the plan for one rank."""

    def __init__(self) -> None:
        self.told: list[Plan] = []
        self.plan = Plan.from_json(ONE)

    def precompute(self, plan: Plan) -> None:
        self.told.append(plan)


class Feed:
    """Of a plan, from a step on."""

    def __init__(self, plan: Plan, first_step: int) -> None:
        self.plan, self.first_step = plan, first_step
        self.closed = False

    def close(self) -> None:
        self.closed = True


class Feeds:
    """All that were made."""

    def __init__(self) -> None:
        self.made: list[Feed] = []

    def __call__(self, plan: Plan, first_step: int) -> InputFeed:
        self.made.append(Feed(plan, first_step))
        return cast(InputFeed, self.made[-1])


def next_epoch(engine: Engine | None, rank: int = 1, feeds: Feeds | None = None) -> NextEpoch:
    def reads_alike(was: Plan, now: Plan) -> bool:
        return was.tile(Rank(rank)) == now.tile(Rank(rank))

    return NextEpoch(Rank(rank), lambda: cast(RankEngine, engine), feeds or Feeds(), reads_alike)


def test_a_plan_that_was_expected_is_that_which_the_engine_was_told() -> None:
    engine = Engine()
    found = next_epoch(engine, rank=0)
    found.prepare(TWO, 7)
    found.prepare(TWO, 7)
    plan = found.plan(TWO)
    assert [id(told) for told in engine.told] == [id(plan)] and plan.to_json() == TWO
    assert found.plan(TWO) is not plan, "one epoch has a plan"


def test_another_one_may_come() -> None:
    engine = Engine()
    found = next_epoch(engine, rank=0)
    found.prepare(TWO, 7)
    assert found.plan(ONE).to_json() == ONE
    assert next_epoch(engine).plan(TWO).to_json() == TWO, "none was expected"


@pytest.mark.parametrize("engine", [Engine(), None])
def test_who_leaves_or_has_no_engine_yet_prepares_no_more_than_the_plan(engine: Engine | None) -> None:
    feeds = Feeds()
    found = next_epoch(engine, feeds=feeds)
    found.prepare(ONE if engine is not None else TWO, 7)
    assert found.plan(ONE if engine is not None else TWO).ranks
    assert engine is None or not engine.told
    assert not feeds.made


def test_what_is_no_plan_is_said_to_whoever_asks_for_it() -> None:
    found = next_epoch(Engine())
    found.prepare("{}", 7)
    with pytest.raises(PlanError):
        found.plan("{}")


def test_the_feed_of_another_tile_is_made_with_the_plan() -> None:
    feeds = Feeds()
    found = next_epoch(Engine(), rank=0, feeds=feeds)
    found.prepare(TWO, 7)
    plan = found.plan(TWO)
    (ahead,) = feeds.made
    assert (ahead.plan, ahead.first_step) == (plan, 7)
    assert found.feed(plan, 7) is cast(InputFeed, ahead) and not ahead.closed
    assert found.feed(plan, 9) is not cast(InputFeed, ahead), "it has been given away"
    found.close()
    assert [feed.closed for feed in feeds.made] == [False, False], "who has a feed closes it"


def test_the_feed_of_a_tile_that_stays_is_not_made_anew() -> None:
    feeds = Feeds()
    found = next_epoch(Engine(), rank=0, feeds=feeds)
    found.prepare(ONE, 7)
    assert found.plan(ONE).to_json() == ONE and not feeds.made


@pytest.mark.parametrize("then", ["another is expected", "another comes", "the work is over"])
def test_the_feed_of_a_plan_that_does_not_come_is_closed(then: str) -> None:
    feeds = Feeds()
    found = next_epoch(Engine(), rank=0, feeds=feeds)
    found.prepare(TWO, 7)
    if then == "another is expected":
        found.prepare(TWO + " ", 9)
        found.plan(TWO + " ")
    elif then == "another comes":
        found.plan(TWO)
        found.feed(Plan.from_json(TWO), 9)
    else:
        found.close()
    later = [] if then == "the work is over" else [False]
    assert [feed.closed for feed in feeds.made] == [True, *later]
