"""Plans by kinds: the same lanes, owners and steps as plans of all ranks, however many ranks there are."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elaswave_fx.errors import ConfigError, PlanError
from elaswave_fx.plan.check.check_plan import check_plan
from elaswave_fx.plan.lower.step import eval_program, step_program
from elaswave_fx.plan.make.compact import CompactPlan, Fleet, plan_compact
from elaswave_fx.plan.make.planner import Parallel, plan_uniform
from elaswave_fx.plan.work.cost import Workload
from elaswave_fx.plan.work.topology import Host, Member, Rank, local_topology
from tests.plan.samples import chain, two_towers


def check_same(plan: CompactPlan, workload: Workload, parallel: Parallel) -> None:
    """As the plan that names all ranks, and what follows from it for each."""
    full = plan_uniform(workload, plan.fleet.topology([Rank(r) for r in range(plan.fleet.count)]), parallel)
    assert tuple(plan.lanes) == full.lanes
    assert plan.pipeline_s == full.predicted.pipeline_s
    assert [(b.bucket, b.span, b.owner) for b in plan.boxes] == [(b.bucket, b.span, b.owner) for b in full.boxes]
    assert all(tuple(plan.readers(box.bucket)) == box.readers for box in full.boxes)
    for rank in full.ranks:
        assert plan.tile(rank) == full.tile(rank)
        assert plan.hops_of(rank) == tuple(hop for hop in full.hops if rank in (hop.source, hop.target))
        assert step_program(plan, rank) == step_program(full, rank)
        assert eval_program(plan, rank) == eval_program(full, rank)
    check_plan(plan.expanded())


@settings(deadline=None, max_examples=40)
@given(
    st.integers(1, 6), st.integers(1, 4), st.integers(24, 40), st.sampled_from((None, 2, 3)),
    st.sampled_from(("1f1b", "auto")), st.dictionaries(st.integers(0, 5), st.sampled_from((0.5, 2.0)), max_size=2),
)  # fmt: skip
def test_it_is_the_plan_of_all_ranks(
    dp: int, pp: int, batch: int, micro_batch: int | None, schedule: str, speeds: dict[int, float]
) -> None:
    workload, parallel = chain(8, batch), Parallel(dp, pp, micro_batch, schedule=schedule)
    others = {Rank(r): Member(Rank(r), Host(r // 2), speed) for r, speed in speeds.items() if r < dp * pp}
    check_same(plan_compact(workload, Fleet(dp * pp, others=others), parallel), workload, parallel)


def test_towers_and_copies() -> None:
    for copies in (0, 1, 2):
        parallel = Parallel(3, 4, copies=copies)
        plan = plan_compact(two_towers(18), Fleet(12), parallel)
        check_same(plan, two_towers(18), parallel)
        full = plan.expanded()
        assert [box.holders for box in plan.boxes] == [box.holders for box in full.boxes]


def large(lanes: int) -> CompactPlan:
    workload = replace(chain(8, 16 * lanes + 5), least_elements=25)
    return plan_compact(workload, Fleet(8 * lanes), Parallel(lanes, 8))


def test_a_plan_does_not_grow_with_its_ranks() -> None:
    """Two kinds: the first five lanes have a sample more. Boxes have the same owners and holders."""
    small, big = large(1_000), large(100_000)
    assert [group.count for group in small.groups] == [5, 995]
    assert [group.count for group in big.groups] == [5, 99_995]
    assert small.boxes == big.boxes
    far = big.tile(Rank(799_999))
    assert (far.units.hi, far.micro_batches[-1].hi) == (8, big.workload.global_batch)


def test_a_plan_depends_on_numbers_of_ranks_only_by_name() -> None:
    """The same place of two equal lanes has the same step, but for its peers and its samples."""
    plan = large(1_000)
    a, b = (step_program(plan, Rank(8 * lane + 3)) for lane in (7, 900))
    for mine, other in zip(a.instructions, b.instructions, strict=True):
        peer = mine[3] + 8 * (900 - 7) if mine[0] in ("SEND", "RECV") else None
        assert other == (mine if peer is None else (*mine[:3], peer, *mine[4:]))
    assert [len(m) for m in a.micro_batches] == [len(m) for m in b.micro_batches]


def test_few_ranks_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many in a fleet of 256 as in one of a million."""
    seen: list[int] = []
    member = Fleet.member

    def counted(self: Fleet, rank: Rank) -> Member:
        seen.append(rank)
        return member(self, rank)

    monkeypatch.setattr(Fleet, "member", counted)
    found = []
    for lanes in (32, 131_072):
        seen.clear()
        plan = large(lanes)
        assert plan.boxes
        found.append(len(seen))
    assert found[0] == found[1] < 300


def calls_of(lanes: int) -> int:
    """Python functions called to plan so many lanes of eight stages, and to derive the part of every rank."""
    count = 0

    def called(frame: object, event: str, what: object) -> None:
        nonlocal count
        count += event == "call"

    workload, topology = chain(16, 16 * lanes), local_topology(8 * lanes)
    sys.setprofile(called)
    try:
        plan = plan_uniform(workload, topology, Parallel(lanes, 8))
        for rank in plan.ranks:
            step_program(plan, rank)
            eval_program(plan, rank)
    finally:
        sys.setprofile(None)
    return count


def test_with_every_part_the_work_grows_as_the_ranks_do() -> None:
    calls_of(8)  # what is known for good afterwards
    assert calls_of(32) < 4.1 * calls_of(8)


def test_what_cannot_work_is_refused() -> None:
    with pytest.raises(ConfigError, match="parallel.dp=7 leaves a rank without samples"):
        plan_compact(chain(4, 6), Fleet(7), Parallel(7, 1))
    with pytest.raises(PlanError, match="dp 2 x pp 2 does not make 5 ranks"):
        plan_compact(chain(4), Fleet(5), Parallel(2, 2))
    with pytest.raises(PlanError, match="no micro-batch of 1 x 2 lanes fits in memory"):
        plan_compact(chain(4), Fleet(2, memory_bytes=100), Parallel(1, 2))
    with pytest.raises(PlanError, match="rank 4 is none of the 4 ranks"):
        plan_compact(chain(4), Fleet(4), Parallel(2, 2)).tile(Rank(4))
