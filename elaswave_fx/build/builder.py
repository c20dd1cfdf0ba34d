"""The builder: a configuration in, an artifact and an initial state on disk out. It runs once per job, in the
launcher's child; workers load its output and never trace.

    build(config, folder)  ->  Built(artifact=…, folder=~/.cache/elaswave_fx/programs/3f.., state=RUN/.init/…)
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import platform
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError
from torch import nn
from torch.nn.parameter import is_lazy

from elaswave_fx import _native
from elaswave_fx.build.check_sums import adds_up
from elaswave_fx.build.configured_passes import user_pass_classes, user_passes_of
from elaswave_fx.build.example_batches import example_batches
from elaswave_fx.build.link_costs import measure_link
from elaswave_fx.build.program_key import code_digest, computed_text, program_key
from elaswave_fx.build.rehearsal import rehearse
from elaswave_fx.build.state_dict import state_dict_names
from elaswave_fx.checkpoint.folder import set_aside
from elaswave_fx.checkpoint.initial_state import InitialState, save_state, tensor_digest
from elaswave_fx.checkpoint.manifest import plain_config
from elaswave_fx.checkpoint.start import ANEW, Start, checkpoint_folder
from elaswave_fx.config.keys import Config
from elaswave_fx.data import Source, check_evaluation, load_batch, open_source
from elaswave_fx.data.cached import cached_json, digest
from elaswave_fx.data.dataset import Dataset
from elaswave_fx.data.sample_digest import SampleDigest, digest_data
from elaswave_fx.devices import make_device
from elaswave_fx.devices.emulated import scaled_costs
from elaswave_fx.devices.fingerprint import hash_of
from elaswave_fx.devices.mkl import fix_branch
from elaswave_fx.errors import CaptureError, ConfigError, PlanError
from elaswave_fx.files import others_may_change
from elaswave_fx.launch.code_digests import target_code, targets_of
from elaswave_fx.launch.job import BuildResult, WorkerInputs
from elaswave_fx.launch.joined import files_for_joiners
from elaswave_fx.launch.location import here
from elaswave_fx.models.build import build_model
from elaswave_fx.models.hf_config import refuse_other_classes, task_of
from elaswave_fx.observe.run_directory import RunDirectory
from elaswave_fx.optim import optimizer as optimizer_module
from elaswave_fx.optim.learning_rate import make_schedule
from elaswave_fx.optim.optimizer import Optimizer, hyper_row, make_optimizer, trace_update, trace_users_update
from elaswave_fx.passes.assign_frequency import AssignFrequency
from elaswave_fx.passes.assign_stages import AssignStages, make_workload
from elaswave_fx.plan.describe import fatal_words, link_words, shape_words
from elaswave_fx.plan.plan import Plan
from elaswave_fx.plan.predict.memory import per_parameter
from elaswave_fx.plan.work.operating_points import OperatingPoint
from elaswave_fx.plan.work.options import PlanOptions
from elaswave_fx.plan.work.topology import Host, HostLink, Link, Topology, local_topology
from elaswave_fx.program.artifact import Artifact
from elaswave_fx.program.forward_code import forward_code
from elaswave_fx.program.held_state import HeldState, python_state_kept
from elaswave_fx.program.model_fingerprint import fingerprint
from elaswave_fx.program.operators import defining_modules
from elaswave_fx.program.shared_storage import refuse_shared_storage
from elaswave_fx.worker.checkpoints import check_start, contents_of, opened_digest, start_fields

_NO_ROOM = re.compile("can't allocate memory|Storage size calculation overflowed|integer multiplication overflow")
"""torch's messages for a tensor that is too large."""

_UPDATED = 1 << 22
"""Elements on which the optimizer is measured, more than a core's caches hold."""

_UPDATES = 3
"""Number of measured updates."""

Batch = dict[str, torch.Tensor]
Planner = Callable[[Config, Artifact], Plan]


@dataclass(frozen=True)
class Built:
    """The artifact and its folder; the location of the initial state; the open data; seconds of each part."""

    artifact: Artifact
    folder: Path
    state: Path | None
    source: Source
    seconds: dict[str, float]
    origin: str
    """Origin of the program, in words."""
    notes: tuple[str, ...] = ()
    """Faults of the cache, and modules left in evaluation mode."""
    coverage: str = ""
    """Contents of the program's key."""
    state_dict: Mapping[str, str] = field(default_factory=dict)
    """Key of the model's own state dict -> logical parameter or buffer."""


def build(config: Config, folder: Path | None, calibrate: bool = False) -> Built:
    """Build the model, capture and lower it unless the cache has its program, and write the initial state.

    Args:
        folder: of the state, and of the artifact too when the cache is off; None: write no state.
        calibrate: measure every kind of unit, unless measured before.

    Raises:
        ConfigError, CaptureError, DataError: one line for the user.
    """
    clock = _Clock()
    source = open_source(config)
    check_evaluation(source)
    clock.lap("data")
    model = make_model(config, source.dataset)
    awake = (*_set_to_train(model), *_doubles(model), *_extra_states(model))
    if config.model.kind == "hf":
        refuse_other_classes(cast("Any", model).model.config, source.dataset.class_names)
        if config.model.task is None:
            task = task_of(config.model, config.init_from)
            awake = (*awake, f"model: {config.model.name or 'the one of init_from'} is trained as {task} (model.task)")
    state, stored = None, {name for name, _ in model.named_buffers()}
    if folder is not None:
        state = folder / "state.safetensors"
        save_state(initial_state(model), state)
    clock.lap("model")
    batches = example_batches(config, source)
    model_print = fingerprint(model)  # before the model runs, which may leave traces in it
    with python_state_kept(model):
        code = forward_code(model, batches[0])
        computed = computed_text(model, batches[0])
    _refuse_late_buffers(model, stored)
    _refuse_state_set_outside(config, source, model, batches[0], computed)
    key = program_key(config, model_print, batches[0], code, computed)
    home, notes = _home(config, folder or Path(tempfile.mkdtemp()))
    target = home / key
    cached, damage = _from_cache(config, model, target)
    samples = _digest_of(batches)
    if cached is not None and not _is_for(samples, batches, config, cached, model, target):
        target = home / digest(key, samples)[: len(key)]
        cached, damage = _from_cache(config, model, target)
    if damage is not None:
        notes += (f"cache: {target} is damaged, {damage}; the program is captured again",)
        shutil.rmtree(target)
    dump = Path(config.passes.dump) if config.passes.dump else None
    if cached is None or dump is not None:
        # Importing torch.export and the passes takes seconds, which a cached program saves.
        from elaswave_fx.build.compile import compile_model

        made, constants = compile_model(config, model, batches, dump)
        with _written(config, target):
            made.save(target, constants)
            Artifact.save_tried(target, samples)
        clock.lap("capture and passes")
    artifact = cached or Artifact.load(target)
    if calibrate and not artifact.measured:
        from elaswave_fx.build.compile import measure

        artifact = replace(artifact, measured=measure(config, model, target, batches[0]))
        with _written(config, target):
            Artifact.save_costs(target, artifact.measured)
        clock.lap("measuring")
    origin = _origin(cached is not None, dump)
    coverage = f"the program's key covers {code.words()}"
    return Built(
        artifact, target, state, source, clock.laps, origin, (*awake, *notes), coverage, state_dict_names(model)
    )


def _doubles(model: nn.Module) -> tuple[str, ...]:
    """That parameters in double precision are trained in single, if there are any."""
    found = [name for name, parameter in model.named_parameters() if parameter.dtype == torch.float64]
    more = f" and {len(found) - 1} more" if len(found) > 1 else ""
    return (f"model: {found[0]}{more} in float64: kept and updated in fp32, computed with as it is",) if found else ()


def _extra_states(model: nn.Module) -> tuple[str, ...]:
    """That checkpoints have tensors alone, if modules have state of another kind."""
    own = [each for each in model.modules() if type(each).get_extra_state is not nn.Module.get_extra_state]
    more = f" and {len(own) - 1} more" if len(own) > 1 else ""
    return (f"model: checkpoints leave out get_extra_state() of {type(own[0]).__name__}{more}",) if own else ()


def _set_to_train(model: nn.Module) -> tuple[str, ...]:
    """Put a model in training mode as loops do. Return the modules that its constructor had left in evaluation mode."""
    quiet = [name for name, module in model.named_modules() if name and not module.training]
    model.train()
    awake = [name for name in quiet if model.get_submodule(name).training]
    if not awake:
        return ()
    names = f"{', '.join(awake[:3])}{f' and {len(awake) - 3} more' if len(awake) > 3 else ''}"
    return (f"in training mode, as model.train() sets it: {names}; a train() of the model's own keeps them evaluating",)


def _refuse_late_buffers(model: nn.Module, stored: set[str]) -> None:
    """Raise CaptureError for buffers that a forward pass has registered."""
    for name in [name for name, _ in model.named_buffers() if name not in stored]:
        raise CaptureError(
            f"model: forward registers the buffer {name}, of which the initial state has nothing; a way out is to "
            "register it in the constructor, or to keep the table as a plain attribute"
        )


def _home(config: Config, spare: Path) -> tuple[Path, tuple[str, ...]]:
    """The folder of programs: the cache if it is writable, which is tested before anything is compiled."""
    if not config.cache.path:
        return spare, ()
    home = config.cache.path / "programs"
    try:
        if others_may_change(home):
            return spare, (f"cache.dir={config.cache.path}: another user may change it; no program is taken or kept",)
        home.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=home):
            return home, ()
    except OSError as error:
        return spare, (f"cache.dir={config.cache.path}: cannot be written ({error.strerror}); the program is not kept",)


@contextlib.contextmanager
def _written(config: Config, target: Path) -> Iterator[None]:
    """Turn a full disk into an error that the user can fix."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        shutil.rmtree(target.with_name(f"{target.name}.{os.getpid()}.partial"), ignore_errors=True)
        cached = config.cache.path is not None and config.cache.path in target.parents
        key = f"cache.dir={config.cache.path}" if cached else f"hydra.run.dir={target.parent}"
        cure = "; nearest valid: cache.enabled=false" if cached else ""
        raise ConfigError(f"{key}: the program cannot be written ({error}){cure}") from error


def _from_cache(config: Config, model: nn.Module, folder: Path) -> tuple[Artifact | None, str | None]:
    """The cached program, or its fault; neither if there is none. A program may only import modules that the model and
    its passes name."""
    damage = Artifact.damage(folder)
    if damage is not None or not folder.exists():
        return None, damage
    try:
        artifact = Artifact.load(folder)
    except (PlanError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        return None, f"it is no program ({error})"
    own = defining_modules(artifact, (*map(type, model.modules()), *user_pass_classes(config.passes)))
    foreign = sorted(set(artifact.modules) - set(own))
    if foreign:
        return None, f"it wants to import {foreign[0]}, which the model does not name"
    return artifact, None


def _digest_of(batches: tuple[Batch, Batch]) -> str:
    tensors = [(name, tensor) for batch in batches for name, tensor in batch.items()]
    return digest(*(part for name, tensor in tensors for part in (name, tensor_digest(tensor))))


def _is_for(
    samples: str, batches: tuple[Batch, Batch], config: Config, artifact: Artifact, model: nn.Module, folder: Path
) -> bool:
    """Whether the sums of a cached program are sums on these samples too. If not, the samples get a program of their
    own."""
    if samples in Artifact.tried(folder):
        return True
    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    if not adds_up(artifact, Artifact.load_constants(folder), state, batches):
        return False
    with _written(config, folder):
        Artifact.save_tried(folder, samples)
    return True


def _origin(cached: bool, dump: Path | None) -> str:
    if dump is None:
        return "program from the cache" if cached else "program captured"
    again = ", though the cache has it," if cached else ""
    return f"program captured{again} with its graphs in {dump}"


def update_program(config: Config) -> Mapping[str, Any]:
    """The optimizer as a unit program, cached unless it is the user's, which may change under its name."""
    optimizer = make_optimizer(config.optimizer)

    def make() -> str:
        from elaswave_fx.passes.unit_program import lower_graph

        users = config.optimizer.name == "target"
        graph = trace_users_update(optimizer, str(config.optimizer.target)) if users else trace_update(optimizer)
        return json.dumps(lower_graph("update", graph))

    return json.loads(_cached_of(optimizer, config, "update", make))


def update_seconds(config: Config) -> float:
    """Seconds in which an engine updates an element; cached as the optimizer's program."""
    optimizer = make_optimizer(config.optimizer)

    def make() -> str:
        make_device(config.device).set_up(threads=1)  # as in workers
        numbers = hyper_row(optimizer, 0, 1e-3, "decay")
        taken_s = _native.update_seconds(update_program(config), numbers, _UPDATED, _UPDATES)
        return json.dumps(taken_s / _UPDATED)

    return float(json.loads(_cached_of(optimizer, config, "update_seconds", make)))


def links_of(config: Config) -> tuple[Link, Link]:
    """Measured links between two ranks of one host, and of different hosts, emulated or not; cached as the optimizer's
    program. If the job has only one kind, it stands for both."""
    parallel = config.parallel
    if parallel.ranks == 1:
        return Link(), Link()
    within = _link_of(config, one_host=True) if parallel.ranks_per_host > 1 else None
    between = _link_of(config, one_host=False) if parallel.ranks > parallel.ranks_per_host else None
    known = within or between
    assert known is not None
    return within or known, between or known


def _link_of(config: Config, one_host: bool) -> Link:
    home, trouble = _home(config, Path())
    folder = home if config.cache.path and not trouble else None
    key = digest(torch.__version__, platform.node(), Path(_native.__file__).stat().st_size)
    name = "link" if one_host else "link_of_hosts"
    found = cached_json(folder, name, key, functools.partial(_measured_link, one_host))
    latency_s, bytes_per_s = json.loads(found)
    return Link(latency_s, bytes_per_s)


def _measured_link(one_host: bool) -> str:
    link = measure_link(one_host)
    return json.dumps([link.latency_s, link.bytes_per_s])


def _cached_of(optimizer: Optimizer, config: Config, name: str, make: Callable[[], str]) -> str:
    home, trouble = _home(config, Path())
    folder = home if config.cache.path and not trouble and config.optimizer.name != "target" else None
    code = Path(optimizer_module.__file__).read_bytes()
    return cached_json(folder, name, digest(repr(optimizer), torch.__version__, code, code_digest()), make)


def options_of(config: Config) -> PlanOptions:
    """The options of the job's plans, from its configuration."""
    parallel, lab = config.parallel, config.lab
    return PlanOptions(
        config.global_batch, parallel.granule, parallel.micro_batch, config.exact, parallel.schedule, config.lab.policy,
        lab.axes, lab.goals,
    )  # fmt: skip


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


def _clocks_of(config: Config) -> AssignFrequency:
    power = config.power
    points = tuple(OperatingPoint(point.mhz, point.speed, point.watts) for point in power.points)
    return AssignFrequency(points, power.cap_w, power.idle_w, power.clocked)


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


def _refuse_state_set_outside(
    config: Config, source: Source, model: nn.Module, batch: dict[str, torch.Tensor], computed: str
) -> None:
    """Refuse a forward pass that reads what the schedule or the dataset changes, such as a global with the step.
    `computed`: `computed_text` of before."""
    held = HeldState(model)
    try:
        make_schedule(config.schedule, config.steps)(config.steps - 1)
        load_batch(source.dataset, source.train, config.global_batch, 1)
        changes = held.changes()
        if changes and computed_text(model, batch) != computed:
            raise CaptureError(
                f"model: forward depends on {changes[0].title}, which the schedule or the dataset changes: its program "
                "is captured once; a way out is a field of the samples, or a buffer that forward updates"
            )
    finally:
        held.restore()


def build_job(config: Config, run_dir: Path, planner: Planner = plan_of, start: Start = ANEW) -> BuildResult:
    """Inputs of the workers, passed on by the launcher: the plan's text and the locations of artifact and state.

    Raises ConfigError when the checkpoint to start from is not of this model and data.
    """
    make_schedule(config.schedule, config.steps)  # A user's schedule is refused here, not by the workers.
    if config.exact:
        fix_branch()  # Before the model is tried, which multiplies matrices.
    built = build(config, RunDirectory.initial(run_dir), calibrate=True)
    artifact = built.artifact
    plan = planner(config, artifact)
    eval_batches = built.source.eval_batches
    if eval_batches and not artifact.evaluation_exact:
        raise ConfigError(
            f"eval.every={config.eval.every}: the model computes something else in evaluation mode than dropout and "
            "batch norm explain, or changes parameters or buffers in it; nearest valid: eval.every=0"
        )
    device = make_device(config.device)
    device.set_up(threads=1, deterministic=config.exact)
    fingerprint = device.fingerprint()
    assert built.state is not None, "a job has a state"
    update = update_program(config)
    kinds_of_data = (config.data.kind, config.eval.data.kind if config.eval.data is not None else None)
    of_checkpoints, changes = _checkpoint_fields(config, run_dir, built, fingerprint, start)
    data = WorkerInputs(
        artifact=str(built.folder),
        state=str(built.state),
        update=update,
        fingerprint=fingerprint,
        eval_batches=eval_batches,
        samples=opened_digest(built.source) if "target" in kinds_of_data else None,
        **of_checkpoints,
    )
    rehearsed = _rehearsal_lines(config, built, update) if config.exact else ()
    samples = digest_data(config, built.source.dataset)  # Last: a read that hangs would block all later ones.
    RunDirectory.reserve(run_dir, built.state.stat().st_size)
    took = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in built.seconds.items())
    kinds = len({unit.kind for unit in artifact.units})
    return BuildResult(
        plan=plan.to_json(),
        units=len(artifact.units),
        samples=config.global_batch,
        data=data,
        data_digest=samples.text(),
        code=target_code(targets_of(plain_config(config))),
        memory_bytes=plan.topology.members[0].memory_bytes,
        files=files_for_joiners(Artifact.copy_for_joiners(built.folder, built.state.parent), built.state),
        run={
            "program": built.folder.name,
            "fingerprint": fingerprint,
            "resume_from": str(start.path) if start.path is not None else None,
            "config": plain_config(config),
        },
        fingerprint=hash_of(fingerprint, built.folder.name),
        lines=(
            f"{built.origin}: {len(artifact.units)} units of {kinds} kinds ({took})",
            *built.source.lines,
            *built.notes,
            *artifact.notes,
            *(f"pass of yours: {name}" for name in user_passes_of(artifact.pipeline)),
            f"plan: {shape_words(plan)}",
            _replicas_line(config, plan, start.path is not None or checkpoint_folder(config, run_dir) is not None),
            *_samples_line(samples),
            *rehearsed,
            *start.lines,
            *changes,
        ),
        details=(
            built.coverage,
            *_links_line(config, plan),
            f"plan: {plan.reason}",
            _memory_line(plan, config.lab.copy_mode),
        ),
    )


def _rehearsal_lines(config: Config, built: Built, update: Mapping[str, Any]) -> tuple[str, ...]:
    assert built.state is not None, "a job has a state"
    rehearsal = rehearse(config, built.artifact, built.folder, built.state, built.source, update)
    return (*rehearsal.notes, rehearsal.line())


def _links_line(config: Config, plan: Plan) -> Iterator[str]:
    """The measured links; empty for a single rank."""
    topology = plan.topology
    within, between = link_words(topology.within_host), link_words(topology.between_hosts)
    if topology.within_host == Link():
        return
    if within == between:
        yield f"links between ranks, measured: {within}"
    else:
        is_slowed = config.emulated.link.is_slowed
        hosts = f"emulated between hosts: {between}" if is_slowed else f"{between} between hosts"
        yield f"links between ranks, measured: {within} on one host; {hosts}"


def _samples_line(samples: SampleDigest) -> Iterator[str]:
    """A line if only part of the data is compared when a rank joins."""
    if samples.covered < samples.pieces:
        yield f"data: {samples.covered} of its {samples.pieces} pieces are compared with those of a rank that joins"


def _memory_line(plan: Plan, mode: str) -> str:
    parts = per_parameter(plan, mode)
    words = ", ".join(f"{name} {size:.1f}" for name, size in parts.items())
    return f"memory per parameter, all ranks: {sum(parts.values()):.1f} bytes on the host ({words}), none on a device"


def _replicas_line(config: Config, plan: Plan, has_checkpoint: bool) -> str:
    """Failures that cost more than the step in flight, and their cost in this run."""
    if has_checkpoint:
        cost = "the run goes back to its last checkpoint"
    elif config.recovery.allow_rollback:
        cost = "the run, which makes no checkpoints, begins again from step 0"
    else:
        cost = "the run, which makes no checkpoints, ends (recovery.allow_rollback=false)"
    under_way = (
        "but for a rank whose state is being sent (lab.copy_mode=state), " if config.lab.copy_mode == "state" else ""
    )
    return f"replicas: {under_way}{fatal_words(plan, cost)}"


def _checkpoint_fields(
    config: Config, run_dir: Path, built: Built, fingerprint: Mapping[str, str], start: Start
) -> tuple[Mapping[str, Any], tuple[str, ...]]:
    """Checkpoint fields for workers, once the starting checkpoint is checked, and lines about it."""
    if start.path is None and checkpoint_folder(config, run_dir) is None:
        return {}, ()
    assert built.state is not None, "a job has a state"
    initial = InitialState(built.state)
    optimizer = make_optimizer(config.optimizer)
    contents = contents_of(
        built.artifact, built.folder.name, initial, optimizer, built.source, fingerprint, built.state_dict
    )
    lines = check_start(start, contents, config)
    for path in start.damaged:
        set_aside(path)
    return start_fields(start, contents, config), lines


class _Clock:
    def __init__(self) -> None:
        self.laps: dict[str, float] = {}
        self.last = time.perf_counter()

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.laps[name] = now - self.last
        self.last = now


def make_model(config: Config, dataset: Dataset) -> nn.Module:
    """The model with seeded fp32 initial weights."""
    image_shape = seq_len = None
    sample = dataset.sample(0)
    if "input_ids" in sample and sample["input_ids"].dim():
        seq_len = len(sample["input_ids"])
    if "image" in sample and sample["image"].dim() == 3:
        image_shape = tuple(sample["image"].shape)
    try:
        model = build_model(
            config.model,
            vocab_size=dataset.vocab_size,
            seq_len=seq_len,
            seed=config.seed,
            image_shape=image_shape,  # type: ignore[arg-type]
            classes=dataset.classes,
            tokenizer=dataset.tokenizer.kind if dataset.tokenizer is not None else None,
            masked=dataset.masked,
            init_from=config.init_from,
        )
    except (MemoryError, RuntimeError) as error:
        if not isinstance(error, MemoryError) and not _NO_ROOM.search(str(error)):
            raise
        raise ConfigError(
            f"model={config.model.kind}: there is no memory for it ({str(error).partition(chr(10))[0]})"
        ) from error
    lazy = [name for name, tensor in (*model.named_parameters(), *model.named_buffers()) if is_lazy(tensor)]
    if lazy:
        raise ConfigError(
            f"model={config.model.kind}: {lazy[0]} has no shape yet, as in a LazyLinear; give its sizes, or call the "
            "module once at the end of its constructor"
        )
    refuse_shared_storage(model)
    return model


def initial_state(model: nn.Module) -> dict[str, torch.Tensor]:
    """Every logical parameter (fp32) and buffer by its first name."""
    params: dict[str, torch.Tensor] = {}
    storages: set[int] = set()
    for name, parameter in model.named_parameters():
        values = parameter.detach().float().contiguous()
        storage = values.untyped_storage().data_ptr()  # Frozen parameters may share one; files need separate tensors.
        params[name] = values.clone() if storage in storages else values
        storages.add(storage)
    return params | {name: b.detach().clone().contiguous() for name, b in model.named_buffers()}
