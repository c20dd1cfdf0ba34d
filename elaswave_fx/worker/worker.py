"""A worker's objects, for the whole run and for the current epoch, and their setup.

WorkerContext (rank, plan, artifact, token) -> set_up -> Worker: links to every rank, a declared engine, a running agent
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from elaswave_fx import _native
from elaswave_fx.checkpoint.disk_work import DiskWork
from elaswave_fx.checkpoint.initial_state import InitialState
from elaswave_fx.config.keys import Config
from elaswave_fx.control.agent.agent import Agent, Progress
from elaswave_fx.control.protocol.failure_detector import SILENT_FLOOR_S
from elaswave_fx.control.protocol.member_info import MemberInfo
from elaswave_fx.control.protocol.rank_state import STARTING
from elaswave_fx.control.protocol.training_loop import LoopState
from elaswave_fx.control.protocol.types import Certificate, Stamp, Vote
from elaswave_fx.control.store.ledger import Payload
from elaswave_fx.data import Source, UserCode, open_source
from elaswave_fx.devices.clocks.rank_clock import RankClock
from elaswave_fx.devices.emulated import kernels, paces
from elaswave_fx.errors import Aborted, CommError, ConfigError, SampleError
from elaswave_fx.launch.job import WorkerContext
from elaswave_fx.optim.learning_rate import Schedule, make_schedule
from elaswave_fx.optim.optimizer import Optimizer, make_optimizer
from elaswave_fx.plan.plan import Plan
from elaswave_fx.plan.work.topology import Rank, Topology
from elaswave_fx.program.artifact import Artifact
from elaswave_fx.scheduling import collect_rarely
from elaswave_fx.worker.checkpoints import Checkpoints, check_opened_alike
from elaswave_fx.worker.clocks import rank_clock, set_clock
from elaswave_fx.worker.cross_check import is_needed
from elaswave_fx.worker.engine import RankEngine, engine_job, load_artifact
from elaswave_fx.worker.feed import InputFeed, reads_alike
from elaswave_fx.worker.next_epoch import NextEpoch
from elaswave_fx.worker.peer_links import PeerLinks, link_members

START_S = 180.0
"""Timeout for links between the ranks of a start, which come one after another."""
BARRIER_S = 60.0
"""Timeout for the ranks of an epoch that wait for each other outside of steps."""
MEND_S = 1.0
"""Timeout of one attempt to mend broken links; another request retries."""
_GROUP = 1  # the id of the group of all ranks, in every generation


@dataclass
class Worker:
    """One rank. Fields that change with epochs come last. `at`: state of the training loop."""

    config: Config
    context: WorkerContext
    artifact: Artifact
    engine: RankEngine
    next_epoch: NextEpoch
    endpoint: _native.Endpoint
    links: PeerLinks
    initial: InitialState
    optimizer: Optimizer
    schedule: Schedule
    source: Source
    agent: Agent
    disk_work: DiskWork
    at: LoopState
    plan: Plan
    group: _native.Group = field(init=False)
    feed: InputFeed | None = None
    checkpoints: Checkpoints | None = None
    clock: RankClock | None = None

    @property
    def rank(self) -> Rank:
        return Rank(self.context.rank)

    @property
    def is_first(self) -> bool:
        """Whether this rank reports for the ranks of its epoch."""
        return self.rank == self.plan.ranks[0]

    def begin_epoch(self, plan: Plan) -> None:
        """Set the clock, group and checkpoints of the epoch, and the feed if another is needed."""
        if self.clock is not None:
            set_clock(self.clock, plan, self.rank, self.context)
        stays = self.next_epoch.reads_alike(self.plan, plan)
        self.join_group(plan)
        if self.feed is not None and stays:
            return  # it serves any step
        if self.feed is not None:
            self.feed.close()
        self.feed = self.next_epoch.feed(plan, self.at.committed.version)

    def join_group(self, plan: Plan) -> None:
        """Become a rank of the plan, without starting its steps."""
        self.plan = plan
        self.group = _native.Group(self.endpoint, _GROUP, list(plan.ranks), int(plan.epoch))
        with self.disk_work("clears away checkpoints that were given up"):
            self.checkpoints = Checkpoints(
                self.config, self.context, self.artifact, self.initial, plan, self.optimizer, self.engine.native,
                self.endpoint, self.group, self.leave_if_over, self.checkpoints,
            )  # fmt: skip

    def leave_if_over(self) -> None:
        """Raise Aborted if the rank must leave its epoch, and so must not begin anything else in it."""
        if self.agent.stop_requested:
            raise Aborted(f"rank {self.rank}: called off before step {self.at.committed.version}")


@dataclass
class Equipment:
    """A rank's objects that outlive epochs. `engine` is set in the first epoch. `cross_check`: whether samples are read
    again because ranks opened the data separately."""

    config: Config
    info: MemberInfo
    endpoint: _native.Endpoint
    links: PeerLinks
    artifact: Artifact
    constants: Mapping[str, torch.Tensor]
    initial: InitialState
    optimizer: Optimizer
    code: UserCode
    source: Source
    cross_check: bool
    disk_work: DiskWork = field(default_factory=DiskWork)
    engine: RankEngine | None = None
    next_epoch: NextEpoch = field(init=False)

    def __post_init__(self) -> None:
        rank, started = Rank(self.info.number), self.config.parallel.ranks
        alike = partial(reads_alike, rank=rank, started=started, cross_check=self.cross_check)
        self.next_epoch = NextEpoch(rank, lambda: self.engine, self._feed, alike)

    def progress(self) -> Progress:
        """Return the rank's current activity."""
        if self.engine is None:
            return STARTING
        now = self.engine.native.progress()
        # Slow data or a disk changes the place every second, so it is no hang: its own deadline ends it.
        in_step = now.instruction is not None
        place = f"{now.instruction} {now.number}" if in_step else self.disk_work.progress() or self.code.progress()
        return Progress(place, Rank(now.awaited) if now.awaited is not None else None)

    def _feed(self, plan: Plan, first_step: int) -> InputFeed:
        rank = self.info.number
        return InputFeed(self.config, self.artifact, plan, rank, self.source, first_step, self.cross_check)

    def interrupt(self, reason: str) -> None:
        """Abort the step, here and at the other ranks."""
        self.endpoint.abort(reason)
        self.endpoint.broadcast_abort(None)


def equip(config: Config, context: WorkerContext, topology: Topology | None, connect_s: float = START_S) -> Equipment:
    """Open links to all members within `connect_s` and load everything that no plan changes. `topology`: the first
    plan's, if it contains the rank; it lists the emulated links."""
    is_emulated, has_slow_hosts = config.device == "emulated", config.emulated.link.is_slowed
    endpoint = listen_for_peers(
        context,
        rank=context.rank,
        token=context.token,
        listen_host=context.host,
        port=context.port,
        host_id=context.host_id,
        silence_timeout_s=SILENT_FLOOR_S,
        paces=paces(topology, Rank(context.rank), has_slow_hosts) if is_emulated and topology is not None else {},
        may_be_cut=_may_be_cut(context),
    )
    info, links = context.info(endpoint.port), PeerLinks(endpoint)
    link_members(context.control, info, links, connect_s, joins=context.first is None)
    artifact, constants = load_artifact(Path(context.build.data.artifact))
    code = UserCode(config.data.deadline_s, SampleError)
    source = open_source(config, code=code)
    check_opened_alike(source, context)
    return Equipment(
        config, info, endpoint, links, artifact, constants, InitialState(Path(context.build.data.state)),
        make_optimizer(config.optimizer), code, source,
        is_needed(config, context.build.data_digest),
    )  # fmt: skip


def listen_for_peers(context: WorkerContext, **options: Any) -> _native.Endpoint:
    """Return the rank's endpoint. Raises `ConfigError` if its port was taken since the launcher's check."""
    try:
        return _native.Endpoint(**options)
    except CommError as error:
        if context.port == 0:
            raise
        raise ConfigError(
            f"launch.port={context.port - context.rank}: rank {context.rank}: {error}; another process has taken the "
            "port since the start; nearest valid: 0 for any"
        ) from error


def start_agent(
    config: Config,
    context: WorkerContext,
    has: Equipment,
    say: Callable[[str], None],
    warnings: tuple[signal.Signals, ...] = (),
) -> Agent:
    """Start the agent, which contacts the coordinator. SIGTERM and each of `warnings` drains the rank. `say(line)`
    prints for users of this process alone."""
    agent = Agent(
        has.info, context.first, context.control, context.job_folder, interrupt=has.interrupt, progress=has.progress,
        lost=has.links.lost, mend=lambda: has.endpoint.mend(MEND_S), say=say,
        is_cut=(lambda: has.endpoint.is_cut) if _may_be_cut(context) else None, prepare_next=has.next_epoch.prepare,
    )  # fmt: skip
    agent.start()
    agent.leave_on(signal.SIGTERM, warnings, config.launch.grace_s)
    return agent


def _may_be_cut(context: WorkerContext) -> bool:
    return any(fault.kind == "cut" for fault in context.faults)


def start_engine(config: Config, context: WorkerContext, has: Equipment, plan: Plan, resume: Stamp) -> RankEngine:
    """Return an engine for a plan, with the initial state of the rank's boxes, which counts as that after `resume`."""
    speeds = config.emulated.speeds
    speed = 1.0 if speeds is None or context.rank >= len(speeds) else speeds[context.rank]
    engine = RankEngine(
        engine_job(config, has.artifact), has.constants, has.initial, Rank(context.rank), has.endpoint, has.optimizer,
        context.build.data.update, plan, resume.version,
        partial(kernels, speed=speed) if config.device == "emulated" else None,
    )  # fmt: skip
    has.initial.let_go()
    has.engine = engine
    return engine


def set_up(config: Config, context: WorkerContext) -> Worker:
    """Set up a rank that the launcher started: links to every rank, an engine, a running agent."""
    assert context.first is not None, "whoever joins is set up by `join`"
    plan = Plan.from_json(context.build.plan)
    has = equip(config, context, plan.topology)
    engine = start_engine(config, context, has, plan, context.first.resume)
    agent = start_agent(config, context, has, partial(print, flush=True))
    context.detach(agent.job_time)
    at = LoopState(Rank(context.rank), plan.epoch, tuple(plan.ranks), plan.boxes, context.first.resume)
    worker = make_worker(config, context, has, engine, agent, plan, at)
    worker.begin_epoch(plan)
    collect_rarely()
    return worker


def make_worker(
    config: Config,
    context: WorkerContext,
    has: Equipment,
    engine: RankEngine,
    agent: Agent,
    plan: Plan,
    at: LoopState,
) -> Worker:
    """Return a rank that has not entered the epoch of `plan` yet."""
    return Worker(
        config, context, has.artifact, engine, has.next_epoch, has.endpoint, has.links, has.initial, has.optimizer,
        make_schedule(config.schedule, config.steps), has.source, agent, has.disk_work, at, plan,
        clock=rank_clock(config, context.run_dir, context.rank),
    )  # fmt: skip


def certificate_of(stamp: Stamp, votes: Mapping[Rank, bytes]) -> Certificate:
    """The proof of a commit, from the engine's votes."""
    return Certificate(stamp, tuple(vote_of(stamp, rank, payload) for rank, payload in sorted(votes.items())))


def vote_of(stamp: Stamp, rank: int, payload: bytes) -> Vote:
    """One rank's vote; its payload contains what it consumed."""
    return Vote(stamp, Rank(rank), Payload.unpack(payload).consumed, payload)
