"""No machine has the last replica of anything while another one could have one."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

import pytest

from elaswave_fx.plan.check.check_plan import check_plan
from elaswave_fx.plan.describe import fatal_words
from elaswave_fx.plan.make.planner import plan_lanes
from elaswave_fx.plan.next.replan import replan
from elaswave_fx.plan.plan import Plan
from elaswave_fx.plan.replicas.holders import failure_domains, fatal_domains
from elaswave_fx.plan.work.box import BoxId, numbered
from elaswave_fx.plan.work.topology import Member, Rank, Topology, emulated_host, host_named, local_topology
from tests.plan.samples import chain

HISTORIES = 60
CHANGES = 8


def member(rank: int, machine: str, ranks_per_host: int | None = None) -> Member:
    """On a host that the machine emulates, or on the machine's own."""
    host = machine if ranks_per_host is None else emulated_host(rank, ranks_per_host)
    return Member(Rank(rank), host_named(host), machine=machine)


def first_plan(ranks: int, replicas: int, topology: Topology | None = None) -> Plan:
    topology = topology or local_topology(ranks, 2, machine="home")
    return plan_lanes(
        chain(4, 4 * ranks), topology, [[1] * 2] * (ranks // 2) if ranks > 1 else [[1]], replicas=replicas
    )


def in_sync(plan: Plan) -> dict[BoxId, tuple[Rank, ...]]:
    return {number: box.replica_ranks for number, box in numbered(plan.boxes)}


def changed(rng: random.Random, plan: Plan, next_rank: int, replicas: int) -> Plan | None:
    """After losses of ranks or of a machine, after joins of ranks of one machine, or once replicas are in sync; None
    where all replicas of something are lost."""
    held, members = in_sync(plan), list(plan.ranks)
    if rng.random() < 0.3:  # those that sync have not done so
        held = {number: box.local_materializers for number, box in numbered(plan.boxes)}
    what = rng.choice(("rank", "machine", "join", "join", "rest"))
    if what == "rank":
        members.remove(rng.choice(members))
    elif what == "machine":
        gone = rng.choice(plan.topology.machines)
        members = [m.rank for m in plan.topology.members if m.machine != gone]
    joiners = {}
    if what == "join":
        machine = rng.choice(("home", "one", "two", "three"))
        host = 2 if machine == "home" else None
        ranks = range(next_rank, next_rank + rng.randint(1, 3))
        joiners = {Rank(rank): member(rank, machine, host) for rank in ranks}
    left = {number: tuple(rank for rank in ranks if rank in members) for number, ranks in held.items()}
    if not all(left.values()):
        return None
    return replan(plan, tuple(sorted((*members, *joiners))), left, replicas, joiners)


def history(seed: int) -> Iterator[tuple[Plan, int]]:
    """Plans, and how many replicas they have besides the owner's."""
    rng = random.Random(seed)
    replicas = rng.choice((1, 1, 2, 3))
    plan, next_rank = first_plan(rng.choice((1, 2, 4, 6)), replicas), 6
    yield plan, replicas
    for _ in range(CHANGES):
        following = changed(rng, plan, next_rank, replicas)
        if following is not None:
            plan, next_rank = following, max(next_rank, *following.ranks) + 1
            yield plan, replicas


def assert_apart(plan: Plan) -> None:
    """Machines come first; hosts of one machine are apart where all are on it."""
    domain = failure_domains(plan.topology)
    if len(set(domain.values())) == 1:
        return
    for number, box in numbered(plan.boxes):
        assert len({domain[rank] for rank in box.replica_ranks}) > 1, f"box {number}: {box} in {plan.topology}"
    assert fatal_domains(plan.topology, (box.replica_ranks for box in plan.boxes)) == ()


@pytest.mark.parametrize("first", range(0, HISTORIES, 10))
def test_no_failure_domain_has_all_replicas_while_another_has_room(first: int) -> None:
    machines = 0
    for seed in range(first, first + 10):
        for plan, replicas in history(seed):
            check_plan(plan)
            assert_apart(plan)
            machines = max(machines, len(plan.topology.machines))
            fewest = min(len(box.holders) for box in plan.boxes)
            assert fewest >= min(replicas, len(plan.ranks) - 1), "and none is missing for that"
    assert machines > 1


@pytest.mark.parametrize("replicas", [1, 2])
def test_first_plans_keep_machines_apart(replicas: int) -> None:
    for machines in (("a", "a", "b", "b"), ("a", "b", "a", "b"), ("a", "a", "a", "b", "b", "c")):
        members = tuple(member(rank, name, 1) for rank, name in enumerate(machines))
        assert_apart(first_plan(len(machines), replicas, Topology(members)))


def test_two_that_come_from_one_machine_are_not_each_others_only_replicas() -> None:
    plan = first_plan(2, 1)
    joiners = {Rank(rank): member(rank, "other") for rank in (2, 3)}
    for _ in range(4):
        plan = replan(plan, (*map(Rank, range(4)),), in_sync(plan), 1, joiners)
        assert_apart(plan)
        lost = {Rank(2), Rank(3)}
        assert all(set(box.replica_ranks) - lost for box in plan.boxes), "it may go off"
    assert {box.owner for box in plan.boxes} > {2, 3}, "though they own some"
    assert [m.machine for m in plan.topology.members] == ["home", "home", "other", "other"]


def test_replicas_that_have_no_room_elsewhere_are_said() -> None:
    plan = first_plan(2, 1)
    joiners = {Rank(2): member(2, "other")}
    alone = {number: (box.owner,) for number, box in numbered(plan.boxes)}
    after = replan(plan, (Rank(0), Rank(1), Rank(2)), alone, 0, joiners)
    assert "the state is lost with home (ranks 0, 1)" in after.reason
    both = replan(plan, (Rank(0), Rank(1), Rank(2)), alone, 1, joiners)
    assert "the state is lost" not in both.reason
    near = replace(both, boxes=tuple(replace(b, owner=Rank(0), holders=(Rank(1),), catching_up=()) for b in both.boxes))
    assert "and so does losing all of home (ranks 0, 1)" in fatal_words(near)


def test_member_infos_say_more_than_numbers() -> None:
    plan = first_plan(2, 1)
    joiner = Member(Rank(2), host_named("other/4026531840"), memory_bytes=1 << 34, machine="other")
    after = replan(plan, (Rank(0), Rank(1), Rank(2)), in_sync(plan), 1, {Rank(2): joiner})
    assert after.topology.member(Rank(2)) == joiner
    assert host_named("host-7") == 7 and host_named("host-x") >= 100_000 and host_named("other") >= 100_000
    assert Plan.from_json(after.to_json()) == after
