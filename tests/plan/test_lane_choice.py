"""What is chosen against brute force on small cases: cuts, shares of samples, and what is done after a loss.

`make proofs` tries more of the same; here are the first cases of one seed, so nothing is left to chance.
"""

from __future__ import annotations

import pytest

from elaswave_fx.plan.work.tiling import Lane
from elaswave_fx.plan.work.topology import Topology, local_topology
from tests.marks import slow
from tests.plan.brute_force import BruteForce, lane_seconds
from tests.plan.campaign import KINDS, Kind, minimax_cases, try_kind
from tests.plan.samples import chain, even_lanes, lane

FEWER = [("minimax", 1000), ("shares", 600), ("choice", 150), ("halves", 6)]
ALL = [("minimax", 3000), ("shares", 2000), ("choice", 500), ("halves", 12)]


@pytest.mark.parametrize(("name", "cases"), [*FEWER, *(slow(*each) for each in ALL)])
def test_no_other_cut_share_or_candidate_is_better(name: str, cases: int) -> None:
    """The slowest stage of a lane is as fast as with any cut that fits, for 8 units and 4 stages of any speeds; no
    other cut and no other share of the granules among up to 6 ranks, in lanes of all shapes, makes a shorter step; and
    after losses none of all candidates does, with every cut that fits and every share."""
    found = try_kind(KINDS[name], cases, seed=1)
    assert found.over == 0 and found.holds(KINDS[name]), found.worst.words


def test_a_bound_that_does_not_hold_is_seen() -> None:
    kind = Kind(minimax_cases, 10, bound=0.5)
    assert not try_kind(kind, 10, seed=1).holds(kind)


def seconds(each: Lane, topology: Topology | None = None) -> float:
    return lane_seconds(chain(4, 4, costs=[1.0] * 4), each, topology or local_topology(4))


def test_brute_force_counts_as_one_does_by_hand() -> None:
    """A unit takes 1 s forward and 2 s backward, and 0.01 s each time."""
    workload = chain(4, 4, costs=[1.0] * 4)
    whole, two = even_lanes(workload, 1, 1, 4)[0], even_lanes(workload, 1, 2, 2)[0]
    assert seconds(whole) == pytest.approx(4 * 4 * 3 + 0.08)
    # F0 on the first stage, then two micro-batches of forward and backward on the second, then B1 on the first.
    assert seconds(two) == pytest.approx((4 + 2 * 12 + 8) + 0.02 * (1 + 2 * 2 + 1))
    slow = local_topology(4, speeds=(1.0, 0.5, 1.0, 1.0))
    assert seconds(two, slow) == pytest.approx((4 + 4 * 12 + 8) + 0.02 * (1 + 4 * 2 + 1))
    wide = lane([((0, 1), (0, 2)), ((2, 3), (2, 4))], two.micro_batches)
    assert seconds(wide) == pytest.approx(4 * 2 * 3 + 0.08), "each rank has one micro-batch"
    best = BruteForce(workload).shortest([], 2)
    assert best is None, "nobody does the work"
