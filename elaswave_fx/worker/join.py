"""A rank that joins a running job: it prepares separately, asks to become a member, and is then like any other.

In: `Welcome`. Out: the committed steps and all steps of the job, at its end.

    files (program, initial tensors), data -> links to the members -> agent: joining … Go -> engine -> Training

It builds nothing: the files come from the coordinator. Its failure before `Go` costs the job nothing. It starts without
state: boxes come as replicas, parameters from their owners, unchanged tensors from the initial ones.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import msgspec

from elaswave_fx.config.keys import Config
from elaswave_fx.control.agent.agent import Excluded, Go, Left
from elaswave_fx.control.agent.fetch_files import fetch_files
from elaswave_fx.control.agent.join_folder import join_folder
from elaswave_fx.control.protocol.epoch_start import outside
from elaswave_fx.control.protocol.member_info import Conditions, MemberInfo
from elaswave_fx.control.protocol.messages import Over, Welcome
from elaswave_fx.control.protocol.training_loop import LoopState
from elaswave_fx.control.wire import ControlAddress
from elaswave_fx.data import open_source
from elaswave_fx.data.sample_digest import SampleDigest, digest_data
from elaswave_fx.devices import make_device
from elaswave_fx.devices.device import Device
from elaswave_fx.errors import CommError, ConfigError, HasLeft, JobOver
from elaswave_fx.launch.code_digests import target_code, targets_of
from elaswave_fx.launch.job import BuildResult
from elaswave_fx.launch.job_facts import JobFacts
from elaswave_fx.launch.joined import JoinedContext, build_here, place_in_job
from elaswave_fx.launch.location import Location, here
from elaswave_fx.launch.stop import WARNINGS
from elaswave_fx.observe.rank_events import Joined
from elaswave_fx.plan.plan import Plan
from elaswave_fx.plan.work.topology import Rank
from elaswave_fx.scheduling import collect_rarely
from elaswave_fx.words import size_text
from elaswave_fx.worker.checkpoints import check_reach
from elaswave_fx.worker.loop import Training, refuse_other_bits
from elaswave_fx.worker.worker import Worker, equip, make_worker, start_agent, start_engine

LINKS_S = 30.0
"""Timeout for links to all members, long enough for a coordinator that takes over or plans."""

Say = Callable[[str], None]
"""Prints a line for the user."""


def run_joined(
    welcome: Welcome,
    facts: JobFacts,
    address: ControlAddress,
    host: str | None,
    versions: Mapping[str, str],
    say: Say,
    joins: Callable[[], None],
    failure_domain: str | None = None,
) -> tuple[int, int] | None:
    """Train to the end of the job or to its stop; return the committed steps and all steps, or None if the rank was
    drained.

    `host`: address of this machine for other ranks; None: the launcher's. `failure_domain`: see `here`. `joins` is
    called before the rank can become a member. Raises `ConfigError` for differences from the job, `JobOver` if the job
    ends first, and the errors of `run_worker`.
    """
    with join_folder() as folder:
        built = build_here(facts, folder)
        config = msgspec.convert(built.run["config"], Config)
        device = make_device(config.device)
        device.set_up(threads=1, deterministic=config.exact)  # before any computation
        own = Conditions(dict(versions), _samples_here(config, built), target_code(targets_of(built.run["config"])))
        place = place_in_job(facts.place, welcome.number, config.parallel.ranks_per_host, here(failure_domain))
        if place.boot != facts.place.boot and config.emulated.memory_mb is None:
            built = dataclasses.replace(built, memory_bytes=_share_of_memory(device, welcome.infos, place))
        context = JoinedContext(welcome, facts, built, address, host or facts.host, place, own)
        check_reach(config, context)
        if config.exact:
            refuse_other_bits(device, context)
        size = fetch_files(address, welcome.offers, folder)
        say(f"rank {context.rank} has program and initial tensors, {size_text(size)}")
        worker, go = _join(config, context, say, joins)
    try:
        share = Training(worker, device).run(go)
        return None if share is None else (worker.at.committed.version, config.steps)
    finally:
        if worker.clock is not None:
            worker.clock.restore()


def _samples_here(config: Config, built: BuildResult) -> str:
    """The digest of as many samples as are in the job's."""
    if not built.data_digest:
        return ""
    return digest_data(config, open_source(config).dataset, SampleDigest.read(built.data_digest)).text()


def _share_of_memory(device: Device, infos: Sequence[MemberInfo], place: Location) -> int:
    """Return this rank's memory for plans: an equal share of its machine's among the ranks on it."""
    there = sum(place.boot in info.memory_domain for info in infos)
    return device.memory_total_bytes() // (there + 1)


def _join(config: Config, context: JoinedContext, say: Say, joins: Callable[[], None]) -> tuple[Worker, Go]:
    """Ask to join, and wait until the rank is a member."""
    try:
        has = equip(config, context, None, LINKS_S)
    except CommError as error:
        raise ConfigError(f"the ranks of the job cannot be reached from here ({error})") from error
    say(f"rank {context.rank} is ready, and asks to become a member")
    joins()
    agent = start_agent(config, context, has, say, WARNINGS)  # a scheduler's, for this process alone
    context.relay.tell = agent.tell
    context.detach(agent.job_time)
    go = agent.wait()
    if isinstance(go, Excluded):
        raise ConfigError(go.reason)
    if isinstance(go, Left):
        raise HasLeft(go.reason)
    if isinstance(go, Over):
        raise JobOver(go.reason)
    resume = go.activation.resume
    plan = plan_outside(Plan.from_json(go.plan), Rank(context.rank))
    engine = start_engine(config, context, has, plan, resume)
    # It has already started: no initial load.
    at = LoopState(Rank(context.rank), plan.epoch, tuple(plan.ranks), plan.boxes, resume, started=True)
    worker = make_worker(config, context, has, engine, agent, plan, at)
    collect_rarely()
    say(f"rank {context.rank} is a member from epoch {go.activation.epoch} on, after step {resume.version}")
    context.report_event(Joined(step=resume.version), go.activation.epoch)
    return worker, go


def plan_outside(plan: Plan, rank: Rank) -> Plan:
    """A plan as seen by a rank outside of it: no work and no replica."""
    boxes, schedule = outside(plan.boxes, rank), dict.fromkeys(plan.ranks, ())
    return dataclasses.replace(plan, lanes=(), boxes=boxes, schedule=schedule, target=None)
