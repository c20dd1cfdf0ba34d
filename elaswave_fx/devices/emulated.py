"""The emulated device: real processes and messages, kernels replaced by sleeps of the plan's durations.

    kernels(plan, rank, 1.0)         -> {unit: (s per sample forward, backward, s per call, share)}, at its speed
    paces(plan.topology, rank, True) -> {other rank: (latency in s, bytes per s)}, that its messages take
    scaled_costs(artifact, 2.0)      -> costs by kind of unit, of 2 ms per sample and unit on average

Sleeping ranks use no processor, so many fit on few cores. Every run measures its fidelity: by how much sleeps were too
long, and measured against predicted step times (`worker/predictions.py`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from elaswave_fx.devices.cpu import CpuDevice
from elaswave_fx.plan.plan import Plan
from elaswave_fx.plan.work.cost import UnitCost
from elaswave_fx.plan.work.topology import Rank, Topology
from elaswave_fx.program.artifact import Artifact, Seconds

Kernels = Mapping[int, tuple[float, float, float, float]]
"""Unit -> seconds per sample forward and backward, and per call; the share of weights in backward."""


class EmulatedDevice(CpuDevice):
    """A device with the CPU's memory and tensors; see `Device`."""

    name = "emulated"


def kernels(plan: Plan, rank: Rank, speed: float) -> Kernels:
    """Return the durations of the units of a rank's tile at its clock and real `speed`, whatever the plan assumes."""
    speed /= plan.slowdown(rank)
    costs = {unit: plan.workload.units[unit] for unit in plan.tile(rank).units}
    return {
        unit: (cost.forward_s / speed, cost.backward_s / speed, cost.fixed_s / speed, cost.weights_share)
        for unit, cost in costs.items()
    }


def paces(topology: Topology, rank: Rank, between_hosts: bool) -> dict[int, tuple[float, float]]:
    """Rank -> (latency in seconds, bytes per second) of the emulated links: pairs of hosts that are named in the
    topology, with `between_hosts` also all other pairs."""
    host = {member.rank: member.host for member in topology.members}
    named = {frozenset(each.hosts) for each in topology.links}
    pairs = {other: frozenset((host[rank], host[other])) for other in topology.ranks if host[other] != host[rank]}
    links = {other: topology.link(rank, other) for other, pair in pairs.items() if between_hosts or pair in named}
    return {other: (link.latency_s, link.bytes_per_s) for other, link in links.items()}


def scaled_costs(artifact: Artifact, costs: Sequence[UnitCost], unit_ms: float) -> dict[str, Seconds]:
    """Seconds per sample by kind, scaled so that a unit takes `unit_ms` per sample on average, forward and backward
    together. `costs`: of the artifact's units."""
    whole_s = math.fsum(cost.forward_s + cost.backward_s for cost in costs)
    scale = 1e-3 * unit_ms * len(costs) / whole_s
    by_kind = zip(artifact.units, costs, strict=True)
    return {
        unit.kind: (scale * cost.forward_s, scale * cost.backward_s, scale * cost.backward_s * cost.weights_share)
        for unit, cost in by_kind
    }
