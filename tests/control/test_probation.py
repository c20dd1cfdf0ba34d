"""Ranks that were too slow for any work are tried again, ever more rarely while they stay slow."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import pytest

from elaswave_fx.control.coordinator.plan_cache import PlanCache, Planner
from elaswave_fx.control.protocol.probation import MOST_WAIT_S, WAIT_S, DrainedRank, Probation, SlowRanks
from elaswave_fx.control.protocol.speed_meter import WINDOW, Expected, SpeedMeter
from elaswave_fx.plan.check.check_plan import check_plan
from elaswave_fx.plan.make.planner import plan_uniform
from elaswave_fx.plan.next.replan_request import ReplanRequest
from elaswave_fx.plan.plan import Plan
from elaswave_fx.plan.work.box import numbered
from elaswave_fx.plan.work.topology import Rank, local_topology
from tests.plan.samples import asking, chain

TWO = Rank(2)
DRAINED = SlowRanks({TWO: DrainedRank(0.1, 1.0)})
ON_TRIAL = SlowRanks(on_trial=frozenset({TWO}))


def test_what_is_assumed_doubles_until_it_is_what_others_have() -> None:
    probation = Probation().seen(DRAINED, 5.0)
    assert probation.seen(DRAINED, 50.0) == probation, "it has waited since the first look"
    times = [5.0 + waits * WAIT_S for waits in (0.0, 0.9, 1.0, 2.5, 3.0, 4.0, 1e6)]
    assert [probation.speeds(now_s).get(TWO) for now_s in times] == [None, None, 0.2, 0.4, 0.8, 1.0, 1.0]


def test_who_proves_slow_again_waits_twice_as_long_and_who_was_fast_does_not() -> None:
    probation, now_s, waits = Probation(), 0.0, []
    for _ in range(9):
        probation = probation.seen(DRAINED, now_s)
        waits.append(probation.wait_s[TWO])
        assert probation.speeds(now_s + waits[-1] - 1e-3) == {} and probation.speeds(now_s + waits[-1]) == {TWO: 0.2}
        now_s += waits[-1]
        probation = probation.seen(ON_TRIAL, now_s)
        assert probation.speeds(now_s) == {}
    assert waits[:3] == [WAIT_S, 2 * WAIT_S, 4 * WAIT_S] and waits[-1] == MOST_WAIT_S
    probation = probation.seen(SlowRanks(), now_s)  # it was measured, and is on trial no more
    assert probation == Probation() and probation.seen(DRAINED, now_s).wait_s == {TWO: WAIT_S}


def test_a_new_coordinator_waits_from_its_first_look_and_knows_who_is_on_trial() -> None:
    assert Probation().seen(DRAINED, 1000.0).speeds(1000.0 + WAIT_S) == {TWO: 0.2}
    probation = Probation().seen(ON_TRIAL, 1000.0).seen(DRAINED, 1010.0)
    assert probation.wait_s == {TWO: 2 * WAIT_S}


def test_a_rank_on_trial_is_held_against_those_whose_speeds_are_known() -> None:
    """Alone with its units, it has been slow from their first step on; beside one that is alike, it may be faster."""
    known = {Rank(0): Expected(1.0, 0.5, 0), Rank(1): Expected(1.0, 0.5, 1)}
    for kind in (0, 2):
        tried = SpeedMeter.of({**known, TWO: Expected(0.2, 0.5, kind, on_trial=True)})
        for speed, found in ((0.1, 0.1), (0.2, None), (1.0, 1.0)):
            meter = tried
            for _ in range(WINDOW):
                meter = meter.heard({Rank(0): 0.5, Rank(1): 0.5, TWO: 0.5 * 0.2 / speed})
            assert meter.speeds() == (None if found is None else {0: 1.0, 1: 1.0, 2: found})


def plans(layout: tuple[int, int], speed_at: Callable[[float], float], until_s: float) -> Iterator[tuple[float, Plan]]:
    """The plan of each step, and when it ended, in a job whose rank 2 has that speed; replicas are there at once."""
    planner, now_s = Planner(1), 0.0
    workload = asking(chain(6, 24, costs=[2e-3] * 6), micro_batch=1)
    plan = plan_uniform(workload, local_topology(layout[0] * layout[1]), *layout)
    present, ahead = planner.read(plan.to_json()), PlanCache(planner)
    meter, probation = SpeedMeter.of(planner.expected(present)), Probation()
    while now_s < until_s:
        expected = planner.expected(present)
        true = {rank: speed_at(now_s) if rank == TWO else 1.0 for rank in expected}
        busy_s = {rank: each.busy_s * each.speed / true[rank] for rank, each in expected.items()}
        now_s += max(busy_s.values())
        meter = meter.heard(busy_s)
        probation = probation.seen(planner.slow_ranks(present), now_s)
        held = {number: box.replica_ranks for number, box in numbered(present.plan.boxes)}
        following = ahead.successor(
            present, held, ReplanRequest(meter.speeds() or {}, probation=probation.speeds(now_s))
        )
        if following is not None:
            check_plan(following.plan)
            assert Plan.from_json(following.text) == following.plan, "another coordinator reads the same"
            present, meter = following, SpeedMeter.of(planner.expected(following))
        yield now_s, present.plan


def has_work(plan: Plan) -> bool:
    return bool(plan.tile(TWO).units)


SLOW_FROM_S = 20.0
LAYOUTS = [(4, 1), (2, 2), (1, 3)]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_rank_that_recovers_has_its_share_again(layout: tuple[int, int]) -> None:
    fast_from_s = 140.0
    seen = list(plans(layout, lambda now_s: 0.05 if SLOW_FROM_S < now_s < fast_from_s else 1.0, 700.0))
    assert any(not has_work(plan) for now_s, plan in seen if now_s < fast_from_s)
    assert [has_work(plan) for now_s, plan in seen if now_s > fast_from_s + 7 * WAIT_S].count(False) == 0
    last = seen[-1][1]
    assert last.topology.member(TWO).speed == pytest.approx(1.0, abs=0.05) and not last.topology.on_trial
    assert last.predicted.step_s <= 1.03 * seen[0][1].predicted.step_s


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_rank_that_stays_slow_costs_little(layout: tuple[int, int]) -> None:
    seen = list(plans(layout, lambda now_s: 0.05 if now_s > SLOW_FROM_S else 1.0, 3000.0))
    drained_from = next(place for place, (_, plan) in enumerate(seen) if not has_work(plan))
    after = [(has_work(plan), now_s) for now_s, plan in seen[drained_from:]]
    runs = [(works, [now_s for _, now_s in run]) for works, run in itertools.groupby(after, key=lambda each: each[0])]
    tried_s = sum(times[-1] - times[0] for works, times in runs if works)
    assert any(works for works, _ in runs), "it is tried"
    pauses_s = [times[-1] - times[0] for works, times in runs if not works][:-1]
    assert all(later > 1.5 * earlier for earlier, later in itertools.pairwise(pauses_s)), "ever more rarely"
    assert tried_s < 0.1 * (after[-1][1] - after[0][1])
