"""All that the launcher needs of a configuration: what workers and joiners read, the first plan, lines for the console.

build_job(config, run_dir)  ->  BuildResult(plan="…", units=26, data=WorkerInputs(artifact=…, state=…), lines=(…))
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from elaswave_fx.build.builder import Built, build
from elaswave_fx.build.configured_passes import user_passes_of
from elaswave_fx.build.initial_plan import plan_of
from elaswave_fx.build.optimizer_program import update_program
from elaswave_fx.build.rehearsal import rehearse
from elaswave_fx.checkpoint.folder import set_aside
from elaswave_fx.checkpoint.initial_state import InitialState
from elaswave_fx.checkpoint.manifest import plain_config
from elaswave_fx.checkpoint.start import ANEW, Start, checkpoint_folder
from elaswave_fx.config.keys import Config
from elaswave_fx.data.sample_digest import SampleDigest, digest_data
from elaswave_fx.devices import make_device
from elaswave_fx.devices.fingerprint import hash_of
from elaswave_fx.devices.mkl import fix_branch
from elaswave_fx.errors import ConfigError
from elaswave_fx.launch.code_digests import target_code, targets_of
from elaswave_fx.launch.job import BuildResult, WorkerInputs
from elaswave_fx.launch.joined import files_for_joiners
from elaswave_fx.observe.run_directory import RunDirectory
from elaswave_fx.optim.learning_rate import make_schedule
from elaswave_fx.optim.optimizer import make_optimizer
from elaswave_fx.plan.describe import fatal_words, link_words, shape_words
from elaswave_fx.plan.plan import Plan
from elaswave_fx.plan.predict.memory import per_parameter
from elaswave_fx.plan.work.topology import Link
from elaswave_fx.program.artifact import Artifact
from elaswave_fx.worker.checkpoints import check_start, contents_of, opened_digest, start_fields

Planner = Callable[[Config, Artifact], Plan]


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
    _refuse_other_evaluation(config, built)
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
        eval_batches=built.source.eval_batches,
        samples=opened_digest(built.source) if "target" in kinds_of_data else None,
        **of_checkpoints,
    )
    rehearsed = _rehearsal_lines(config, built, update) if config.exact else ()
    samples = digest_data(config, built.source.dataset)  # Last: a read that hangs would block all later ones.
    RunDirectory.reserve(run_dir, built.state.stat().st_size)
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
            _program_line(built),
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


def _refuse_other_evaluation(config: Config, built: Built) -> None:
    if built.source.eval_batches and not built.artifact.evaluation_exact:
        raise ConfigError(
            f"eval.every={config.eval.every}: the model computes something else in evaluation mode than dropout and "
            "batch norm explain, keeps a dropout there (training=self.training ends it), has no loss there, or changes "
            "parameters or buffers in it; nearest valid: eval.every=0"
        )


def _program_line(built: Built) -> str:
    units = built.artifact.units
    took = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in built.seconds.items())
    return f"{built.origin}: {len(units)} units of {len({unit.kind for unit in units})} kinds ({took})"


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
