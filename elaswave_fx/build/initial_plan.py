"""The plan that a job begins with, of the ranks that its configuration names.

plan_of(config, artifact)   ->  Plan(…)     # checked
topology_of(config)         ->  Topology(members=(…), within_host=Link(…), …)
"""

from __future__ import annotations

from dataclasses import replace

import torch

from elaswave_fx.build.link_costs import links_of
from elaswave_fx.build.optimizer_program import update_seconds
from elaswave_fx.config.keys import Config
from elaswave_fx.devices import make_device
from elaswave_fx.devices.emulated import scaled_costs
from elaswave_fx.errors import ConfigError
from elaswave_fx.launch.location import here
from elaswave_fx.optim.optimizer import make_optimizer
from elaswave_fx.passes.assign_frequency import AssignFrequency
from elaswave_fx.passes.assign_stages import AssignStages, make_workload
from elaswave_fx.plan.plan import Plan
from elaswave_fx.plan.work.operating_points import OperatingPoint
from elaswave_fx.plan.work.options import PlanOptions
from elaswave_fx.plan.work.topology import Host, HostLink, Link, Topology, local_topology
from elaswave_fx.program.artifact import Artifact


def plan_of(config: Config, artifact: Artifact) -> Plan:
    """The checked plan of a configuration's starting shape. Raise ConfigError naming the key."""
    parallel = config.parallel
    _refuse_parts_of_a_batch(config, artifact)
    _refuse_single_samples(config, artifact)
    topology = topology_of(config)
    state_tensors = len(make_optimizer(config.optimizer).init(torch.zeros(1)))
    options = options_of(config)
    if config.emulated.unit_ms is not None:
        costs = make_workload(artifact, options, state_tensors).units
        artifact = replace(artifact, measured=scaled_costs(artifact, costs, config.emulated.unit_ms))
    stages = AssignStages(options, parallel.dp, parallel.pp, config.copies.count)
    tokens = config.seq_len if "input_ids" in artifact.inputs else 0
    plan = stages.apply(artifact, topology, state_tensors, update_seconds(config), tokens)
    has_clocks = config.power.points and "frequency" in config.lab.axes
    return _clocks_of(config).apply(plan) if has_clocks else plan


def options_of(config: Config) -> PlanOptions:
    """The options of the job's plans, from its configuration."""
    parallel, lab = config.parallel, config.lab
    return PlanOptions(
        config.global_batch, parallel.granule, parallel.micro_batch, config.exact, parallel.schedule, config.lab.policy,
        lab.axes, lab.goals,
    )  # fmt: skip


def topology_of(config: Config) -> Topology:
    """The ranks that a job starts with: speeds, memory, links and expected life."""
    parallel, emulated = config.parallel, config.emulated
    memory = make_device(config.device).memory_total_bytes() // parallel.ranks
    if emulated.memory_mb is not None:
        memory = int(emulated.memory_mb * 2**20)
    machine = here(config.launch.failure_domain).machine
    topology = local_topology(parallel.ranks, parallel.ranks_per_host, memory, speeds=emulated.speeds, machine=machine)
    within, between = links_of(config)
    links = tuple(
        HostLink((Host(each.hosts[0]), Host(each.hosts[1])), _link(each.latency_ms, each.bytes_per_s, between))
        for each in config.topology.links
    )
    between = _link(emulated.link.latency_ms, emulated.link.bytes_per_s, between)
    life_s, switch_bytes = config.planner.life_s, config.switch.memory_bytes
    return replace(
        topology, within_host=within, between_hosts=between, links=links, life_s=life_s, switch_bytes=switch_bytes
    )


def _clocks_of(config: Config) -> AssignFrequency:
    power = config.power
    points = tuple(OperatingPoint(point.mhz, point.speed, point.watts) for point in power.points)
    return AssignFrequency(points, power.cap_w, power.idle_w, power.clocked)


def _link(latency_ms: float | None, bytes_per_s: float | None, usual: Link) -> Link:
    """A link with `usual` values where none are given."""
    return Link(
        usual.latency_s if latency_ms is None else 1e-3 * latency_ms,
        usual.bytes_per_s if bytes_per_s is None else bytes_per_s,
    )


def _refuse_parts_of_a_batch(config: Config, artifact: Artifact) -> None:
    """Refuse granules below the whole batch where a step reads state that it updates from its samples."""
    parallel = config.parallel
    if artifact.whole_batch and parallel.granule != config.global_batch:
        one = " parallel.dp=1" if parallel.dp > 1 else ""
        raise ConfigError(
            f"parallel.granule={parallel.granule}: {artifact.whole_batch[0]}, so that all samples of a step have to be "
            f"computed together; nearest valid: parallel.granule={config.global_batch}{one}"
        )


def _refuse_single_samples(config: Config, artifact: Artifact) -> None:
    """Refuse single-sample granules for a model that computes with several samples together."""
    if artifact.batch_coupled and config.parallel.granule == 1 and config.global_batch > 1:
        share, rest = divmod(config.global_batch, config.parallel.dp)
        raise ConfigError(
            f"parallel.granule=1: the model computes with samples of a batch together ({artifact.batch_coupled[0]}), "
            f"and would get each alone; nearest valid: parallel.granule={config.global_batch if rest else share}"
        )
