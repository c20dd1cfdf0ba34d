"""The plan as a value, as JSON, as a table; and the values it is made of."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings

from elaswave_fx.errors import PlanError
from elaswave_fx.plan.check.check_plan import check_plan
from elaswave_fx.plan.describe import describe
from elaswave_fx.plan.make.derive import make_plan
from elaswave_fx.plan.make.planner import plan_lanes, plan_uniform
from elaswave_fx.plan.plan import Plan, plan_hash
from elaswave_fx.plan.replicas.holders import kept_elements
from elaswave_fx.plan.work.cost import Bucket, UnitCost, Value, Workload
from elaswave_fx.plan.work.options import PlanOptions
from elaswave_fx.plan.work.spans import Runs
from elaswave_fx.plan.work.tiling import Lane, Tile
from elaswave_fx.plan.work.topology import Epoch, Host, HostLink, Link, Member, Rank, Topology, local_topology
from tests.plan.samples import chain, even_lanes, uneven_lanes, world

Golden = Callable[[str, str], None]


@settings(deadline=None, max_examples=40)
@given(uneven_lanes())
def test_json_brings_back_the_same_plan(found: tuple[Workload, tuple[Lane, ...]]) -> None:
    workload, lanes = found
    plan = make_plan(local_topology(world(lanes), memory_bytes=10**9, epoch=Epoch(3)), workload, lanes, "random")
    text = plan.to_json()
    assert Plan.from_json(text) == plan
    assert Plan.from_json(text).to_json() == text
    assert json.loads(text)["epoch"] == 3


def test_text_that_is_no_plan_is_refused() -> None:
    for text in ("", "[]", "{}", '{"format": 7}'):
        with pytest.raises(PlanError, match="plan: the text is not a plan"):
            Plan.from_json(text)
    with pytest.raises(PlanError, match="plan: format 99 is not readable here; this version reads 7"):
        Plan.from_json('{"format": 99}')


def small_text(reason: str = "small") -> str:
    workload = chain(2, 4)
    return make_plan(local_topology(2), workload, even_lanes(workload, 1, 2, 2), reason).to_json()


def test_the_hash_is_that_of_the_text() -> None:
    assert plan_hash(small_text()) == plan_hash(Plan.from_json(small_text()).to_json())
    assert plan_hash(small_text("another")) != plan_hash(small_text())
    assert 0 <= plan_hash(small_text()) < 2**63


def test_the_hash_does_not_depend_on_the_process() -> None:
    code = "from tests.plan.test_plan import *\nprint(plan_hash(small_text()))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(run.stdout) == plan_hash(small_text())


def test_the_table_of_equal_tiles(golden: Golden) -> None:
    golden("plan_2x2.txt", describe(plan_uniform(chain(6), local_topology(4), 2, 2)))


def test_the_table_of_wide_stages(golden: Golden) -> None:
    golden("plan_wide.txt", describe(plan_lanes(chain(10, 24), local_topology(5), [(3, 2)])))


def test_the_json_of_a_plan(golden: Golden) -> None:
    workload = chain(2, 4)
    golden("plan_1x2.json", make_plan(local_topology(2), workload, even_lanes(workload, 1, 2, 2), "two").to_json())


def test_a_rank_in_no_lane_has_an_empty_tile() -> None:
    workload = chain(2, 4)
    plan = make_plan(local_topology(3), workload, even_lanes(workload, 1, 2, 2), "one rank is spare")
    check_plan(plan)
    assert plan.tile(Rank(2)) == Tile(Rank(2), Runs(), ()) and not plan.hops_of(Rank(2))
    with pytest.raises(PlanError, match="plan 0: rank 3 has no tile"):
        plan.tile(Rank(3))


UNIT = UnitCost(1.0, 1.0)


@pytest.mark.parametrize(
    ("values", "buckets", "message"),
    [
        ((Value("h", 1, (0,), 4),), (), "value h goes from unit 1 to units (0,)"),
        ((Value("h", 0, (), 4),), (), r"value h goes from unit 0 to units \(\)"),
        ((Value("h", 0, (2,), 4),), (), "value h names unit 2; there are units 0..1"),
        ((), (Bucket("b", 4, ()),), r"bucket b has users \(\)"),
        ((), (Bucket("b", 4, (1, 0)),), r"bucket b has users \(1, 0\)"),
        ((), (Bucket("b", 4, (5,)),), "bucket b names unit 5; there are units 0..1"),
    ],
)
def test_a_workload_makes_sense(values: tuple[Value, ...], buckets: tuple[Bucket, ...], message: str) -> None:
    with pytest.raises(PlanError, match="^workload: " + message.replace("(0,)", r"\(0,\)")):
        Workload((UNIT, UNIT), values, buckets, PlanOptions(4))


def test_a_workload_has_units_and_samples() -> None:
    with pytest.raises(PlanError, match="no units"):
        Workload((), (), (), PlanOptions(4))
    with pytest.raises(PlanError, match="global_batch 0 and granule 1 must be positive"):
        PlanOptions(0)
    with pytest.raises(PlanError, match="global_batch 8 and granule 3 must be positive, and one a multiple of"):
        PlanOptions(8, 3)
    with pytest.raises(PlanError, match="micro_batch 1 is below granule 2"):
        PlanOptions(8, 2, 1)


@pytest.mark.parametrize("skipped", [-2, 1, 8])
def test_a_step_skips_whole_granules_and_never_all(skipped: int) -> None:
    work = Workload((UNIT,), (), (), PlanOptions(8, 2), skipped=2)
    assert (work.samples, work.granules, work.options.global_batch) == (6, 3, 8)
    with pytest.raises(PlanError, match=f"workload: a step skips {skipped} of 8 samples; it skips whole granules of 2"):
        replace(work, skipped=skipped)


def test_a_topology_has_distinct_ranks_and_speeds() -> None:
    with pytest.raises(PlanError, match=r"ranks \[1, 0\] must be distinct, ascending"):
        Topology((Member(Rank(1), Host(0)), Member(Rank(0), Host(0))))
    with pytest.raises(PlanError, match="rank 0 has speed 0; a speed is above 0"):
        Topology((Member(Rank(0), Host(0), speed=0),))
    with pytest.raises(PlanError, match="rank 7 is not alive in epoch 0"):
        local_topology(2).member(Rank(7))
    assert [m.host for m in local_topology(5, ranks_per_host=2).members] == [0, 0, 1, 1, 2]
    assert [m.speed for m in local_topology(2, speeds=(1.0, 0.5)).members] == [1.0, 0.5]


def test_a_topology_has_links() -> None:
    known, usual = Link(1e-3, 1e8), Link(2e-3, 1e9)
    links = (HostLink((Host(2), Host(0)), known),)
    topology = replace(local_topology(6), between_hosts=usual, links=links)
    assert topology.link(Rank(0), Rank(4)) == topology.link(Rank(5), Rank(1)) == known
    assert topology.link(Rank(0), Rank(2)) == usual
    assert topology.link(Rank(0), Rank(1)) == Link()
    for bad in (Link(-1.0), Link(float("nan")), Link(0.0, 0.0), Link(0.0, float("nan"))):
        with pytest.raises(PlanError, match="a latency is at least 0 and a rate above 0"):
            Topology(topology.members, between_hosts=bad)
        with pytest.raises(PlanError, match="a latency is at least 0 and a rate above 0"):
            Topology(topology.members, links=(HostLink((Host(0), Host(1)), bad),))


def test_the_update_is_part_of_the_step() -> None:
    workload = replace(chain(4, 8), update_s=1e-3)
    plans = [make_plan(local_topology(4), workload, even_lanes(workload, 2, 2, 2), "", n) for n in (0, 1)]
    for plan in plans:
        most = max(kept_elements(plan.boxes).values())
        assert plan.predicted.update_s == pytest.approx(1e-3 * most)
        assert plan.predicted.step_s == pytest.approx(
            plan.predicted.pipeline_s + plan.predicted.exchange_s + 1e-3 * most
        )
    elements = sum(bucket.numel for bucket in workload.buckets)
    assert plans[1].predicted.update_s >= 2 * 1e-3 * elements / 4 > plans[0].predicted.update_s / 2
    assert ", update " in describe(plans[0]) and ", update " not in describe(
        plan_uniform(chain(6), local_topology(4), 2, 2)
    )


def test_links_are_part_of_the_plan() -> None:
    workload, tiles = chain(4, 8), even_lanes(chain(4, 8), 2, 2, 2)
    links = (HostLink((Host(0), Host(1)), Link(0.25, 1e6)),)
    members = local_topology(4, speeds=(1.0, 1.0, 0.5, 1.0)).members
    plain = make_plan(Topology(members), workload, tiles, "plain")
    slow = make_plan(Topology(members, links=links), workload, tiles, "slow")
    assert Plan.from_json(slow.to_json()) == slow
    # Pipelines are within hosts, so only the exchange crosses: three phases, each with a message to the other host.
    assert slow.predicted.pipeline_s == plain.predicted.pipeline_s
    assert slow.predicted.exchange_s > plain.predicted.exchange_s + 3 * 0.25
    assert "links between hosts 0 and 1: 250 ms, 976.6 KiB/s" in describe(slow)
    assert "speeds of ranks 0-3: 1, 1, 0.5, 1" in describe(slow)
