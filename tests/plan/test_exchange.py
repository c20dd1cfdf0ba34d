"""What ranks wait for parameters of units that are new to them, over the links that there are."""

from __future__ import annotations

from dataclasses import replace

from elaswave_fx.plan.predict.exchange import ExchangeEstimate
from elaswave_fx.plan.work.cost import Bucket, UnitCost, Workload
from elaswave_fx.plan.work.options import PlanOptions
from elaswave_fx.plan.work.spans import Span
from elaswave_fx.plan.work.topology import Host, HostLink, Link, Rank, local_topology

ELEMENTS, FAST, SLOW = 1_000_000, Link(0.0, 1e8), Link(0.0, 1e6)
WORKLOAD = Workload(
    tuple(UnitCost(0.01, 0.02) for _ in range(4)),
    (),
    tuple(Bucket(f"b{u}", ELEMENTS, (u,)) for u in range(4)),
    PlanOptions(8),
)
BEFORE = {Rank(0): Span(0, 2), Rank(1): Span(2, 4), Rank(2): Span(0, 2), Rank(3): Span(2, 4)}
AFTER = [(Rank(0), Span(0, 3)), (Rank(1), Span(3, 4)), (Rank(2), Span(0, 2)), (Rank(3), Span(2, 4))]


def stall_s(*slow: tuple[int, int]) -> float:
    """Of rank 0, which gets unit 2, that ranks 1 and 3 had, where those pairs have slow links."""
    links = tuple(HostLink((Host(a), Host(b)), SLOW) for a, b in slow)
    topology = replace(local_topology(4, 1), within_host=FAST, between_hosts=FAST, links=links)
    return ExchangeEstimate(WORKLOAD, topology).stall_s(BEFORE, AFTER)


def test_a_unit_comes_over_the_fastest_link_to_one_who_ran_it() -> None:
    assert stall_s() == stall_s((0, 1)) == stall_s((0, 2), (1, 2)) == 0.04
    assert stall_s((0, 1), (0, 3)) == 4.0


def test_what_a_lost_rank_ran_comes_from_the_others() -> None:
    topology = replace(
        local_topology(4, 1), within_host=FAST, between_hosts=FAST, links=(HostLink((Host(0), Host(1)), SLOW),)
    )
    without_3 = replace(topology, members=topology.members[:3])
    assert ExchangeEstimate(WORKLOAD, without_3).stall_s(BEFORE, AFTER[:3]) == 4.0
