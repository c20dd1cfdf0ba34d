"""The emulated device: durations by the plan, costs by `emulated.unit_ms`."""

from __future__ import annotations

import dataclasses
import math

import pytest

from elaswave_fx.build.builder import build
from elaswave_fx.build.initial_plan import plan_of, topology_of
from elaswave_fx.devices import make_device
from elaswave_fx.devices.emulated import kernels, paces
from elaswave_fx.errors import ConfigError
from elaswave_fx.plan.make.derive import make_plan
from elaswave_fx.plan.plan import Plan
from elaswave_fx.plan.work.topology import Host, HostLink, Link, Rank, local_topology
from tests.plan.samples import chain, even_lanes
from tests.runs import small_config


def plan_2x2() -> Plan:
    """Four units of 1, 2, 3, 4 ms; rank 1 is half as fast as the others."""
    workload = chain(costs=[1e-3, 2e-3, 3e-3, 4e-3])
    topology = local_topology(4)
    members = tuple(dataclasses.replace(member, speed=0.5 if member.rank == 1 else 1.0) for member in topology.members)
    return make_plan(dataclasses.replace(topology, members=members), workload, even_lanes(workload, 2, 2, 4), "")


def test_its_memory_is_the_cpus() -> None:
    emulated, cpu = make_device("emulated"), make_device("cpu")
    assert emulated.memory_total_bytes() == cpu.memory_total_bytes()
    assert emulated.fingerprint()["device"] == emulated.name == "emulated"


def test_kernels_take_what_the_plan_says_at_the_speed_of_the_rank() -> None:
    plan = plan_2x2()
    assert kernels(plan, Rank(0), 1.0) == {0: (1e-3, 2e-3, 1e-5, 0.0), 1: (2e-3, 4e-3, 2e-5, 0.0)}
    slow = kernels(plan, Rank(1), 0.5)
    assert list(slow) == [2, 3]
    assert slow[3] == pytest.approx((8e-3, 16e-3, 8e-5, 0.0))
    assert kernels(plan, Rank(3), 1.0)[3] == pytest.approx((4e-3, 8e-3, 4e-5, 0.0))


def test_links_between_hosts_are_emulated() -> None:
    topology = local_topology(6, speeds=(1.0,) * 6)
    assert paces(topology, Rank(0), False) == {}
    known = (HostLink((Host(0), Host(2)), Link(0.5, 1e6)),)
    assert paces(dataclasses.replace(topology, links=known), Rank(0), False) == {4: (0.5, 1e6), 5: (0.5, 1e6)}
    slow = dataclasses.replace(topology, between_hosts=Link(latency_s=0.1), links=known)
    assert paces(slow, Rank(5), True) == {0: (0.5, 1e6), 1: (0.5, 1e6), 2: (0.1, 3e9), 3: (0.1, 3e9)}
    assert paces(slow, Rank(5), False) == {0: (0.5, 1e6), 1: (0.5, 1e6)}, "what was measured needs no emulation"


def test_the_topology_of_emulated_ranks() -> None:
    words = ("device=emulated", "parallel.dp=2", "parallel.pp=2", "parallel.ranks_per_host=1")
    emulated = ("emulated.memory_mb=0.5", "emulated.speeds=[1,0.5,2,1]", "emulated.link.latency_ms=3")
    links = "topology.links=[{hosts: [3,1], latency_ms: 1, bytes_per_s: 1e6}]"
    topology = topology_of(small_config("two_tower", *words, *emulated, links))
    assert [member.speed for member in topology.members] == [1.0, 0.5, 2.0, 1.0]
    assert {member.memory_bytes for member in topology.members} == {2**19}
    assert topology.link(Rank(0), Rank(1)).latency_s == 3e-3
    assert topology.link(Rank(1), Rank(3)) == Link(1e-3, 1e6)


def test_a_rank_without_memory_for_its_stage_is_refused() -> None:
    words = ("parallel.dp=2", "parallel.pp=1", "device=emulated", "emulated.memory_mb=0.01")
    with pytest.raises(ConfigError, match=r"parallel.pp=1: does not fit in memory: .* a rank has 10.2 KiB"):
        config = small_config("two_tower", *words)
        plan_of(config, build(config, None).artifact)


def test_costs_are_scaled_and_keep_their_proportions() -> None:
    config = small_config("two_tower", "parallel.dp=2", "parallel.pp=2")
    artifact = build(config, None).artifact
    emulated = small_config("two_tower", "parallel.dp=2", "parallel.pp=2", "device=emulated")
    scaled = small_config("two_tower", "parallel.dp=2", "parallel.pp=2", "device=emulated", "emulated.unit_ms=3")
    computed = plan_of(config, artifact)
    assert plan_of(emulated, artifact) == computed
    units, before = plan_of(scaled, artifact).workload.units, computed.workload.units
    assert math.fsum(u.forward_s + u.backward_s for u in units) == pytest.approx(3e-3 * len(units))
    ratios = [now.forward_s / then.forward_s for now, then in zip(units, before, strict=True)]
    assert ratios == pytest.approx([ratios[0]] * len(ratios))
    assert ratios[0] > 1
    assert artifact == build(config, None).artifact  # nothing of it is kept
