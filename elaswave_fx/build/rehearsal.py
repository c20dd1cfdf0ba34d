"""The rehearsal of an exact run: before training, an engine takes steps of its programs, alone on a rank.

    rehearse(config, artifact, folder, …)  ->  Rehearsal({1: 0.0019, 2: 0.0015, 4: 0.0012, 8: None})
    rehearsal.json beside the program      ->  {"update": "3f…", "seconds": {"1": 0.0019, …}}

Operators without a deterministic implementation are refused here, by name. The granule decides bits, so the user
chooses it, not a measurement: the rehearsal reports the time of a sample with each possible granule.
"""

from __future__ import annotations

import json
import math
import re
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from elaswave_fx import _native
from elaswave_fx.checkpoint.initial_state import InitialState
from elaswave_fx.config.keys import Config
from elaswave_fx.data import Source, load_batch
from elaswave_fx.data.cached import digest
from elaswave_fx.devices import make_device
from elaswave_fx.errors import ConfigError, ExecError
from elaswave_fx.files import replace_file
from elaswave_fx.optim.optimizer import make_optimizer, step_hypers
from elaswave_fx.passes.assign_stages import AssignStages
from elaswave_fx.plan.work.options import PlanOptions
from elaswave_fx.plan.work.topology import Rank, local_topology
from elaswave_fx.program.artifact import Artifact
from elaswave_fx.program.operators import import_modules
from elaswave_fx.worker.engine import RankEngine, engine_job, input_names

FILE = "rehearsal.json"
SIZES = (1, 2, 4, 8)
"""Granules, in samples, that are tried beside the run's own."""

_STEPS_MIN, _STEPS_MAX = 2, 20
"""Steps of each size; the first one does not count."""

_SIZE_S, _ALL_S = 0.5, 2.0
"""After the first limit a size begins no further step beyond the minimum; after the second no size begins."""

_DEADLINE_S = 3600.0  # of a step; no peer is waited for
_RANK = Rank(0)
_REFUSED = re.compile(
    r"program (?P<program>\S+), instruction \d+ \((?P<operator>[^)]+)\): "
    r".*?(?P<kernel>\S+) does not have a deterministic implementation"
)


@dataclass(frozen=True)
class Rehearsal:
    """Seconds of a sample by granule size, the run's own first: forward, backward, and its part in exact sums; None:
    too long, or too much memory. `notes`: faults of an earlier run's file."""

    seconds: Mapping[int, float | None]
    notes: tuple[str, ...] = ()

    def line(self) -> str:
        """The line by which a user chooses a granule."""
        own, *others = self.seconds
        times = {size: _milliseconds(taken) for size, taken in self.seconds.items() if taken is not None}
        said = "".join(f", {times[size]} at {size}" for size in others if size in times)
        left_out = " and ".join(str(size) for size in others if size not in times)
        tail = f"; not measured at {left_out}" if left_out else ""
        return f"exact: {times[own]} ms a sample at parallel.granule={own} (this run's){said}{tail}"


def rehearse(
    config: Config, artifact: Artifact, folder: Path, state: Path, source: Source, update: Mapping[str, Any]
) -> Rehearsal:
    """Take steps with the first samples, unless an earlier run with the same programs did. The device is set up.

    `folder` is the artifact's, `state` the initial state. Raise ConfigError for an operator that is not deterministic.
    """
    path, updated_by, sizes = folder / FILE, digest(json.dumps(update)), sizes_of(config, artifact)
    known, notes = _read(path, updated_by, sizes[0])
    if not known.keys() >= set(sizes):
        batch = load_batch(source.dataset, source.train, 0, max(sizes))
        import_modules(artifact)
        constants = Artifact.load_constants(folder)
        known |= _Stage(config, artifact, constants, InitialState(state), update, batch).seconds(sizes)
        found = {"update": updated_by, "seconds": {str(size): taken for size, taken in known.items()}}
        replace_file(path, json.dumps(found).encode(), durable=True)
    return Rehearsal({size: known[size] for size in sizes}, notes)


def sizes_of(config: Config, artifact: Artifact) -> tuple[int, ...]:
    """Possible granules of the run, its own first. A batch-coupled model has only its own, as others change what it
    learns."""
    own, batch = config.parallel.granule, config.global_batch
    if artifact.batch_coupled:
        return (own,)
    fit = (size for size in SIZES if batch % size == 0 and batch // size >= config.parallel.dp)
    return (own, *(size for size in fit if size != own))


def _read(path: Path, updated_by: str, own: int) -> tuple[dict[int, float | None], tuple[str, ...]]:
    """Measurements of an earlier run, and faults of the file."""
    try:
        found = json.loads(path.read_text())
        seconds = {int(size): taken if taken is None else float(taken) for size, taken in found["seconds"].items()}
        if seconds[own] is None or not all(0.0 < taken < math.inf for taken in seconds.values() if taken is not None):
            raise ValueError("seconds are above 0, and known of the run's own granule")
        return (seconds if found["update"] == updated_by else {}), ()
    except FileNotFoundError:
        return {}, ()
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        return {}, (f"cache: {path} is damaged ({type(error).__name__}: {error}); the program is rehearsed again",)


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.0f}" if seconds >= 0.1 else f"{1e3 * seconds:.2g}"


# --- Steps


@dataclass(frozen=True)
class _Stage:
    """Inputs of an engine except its plan, and the samples of the largest granule."""

    config: Config
    artifact: Artifact
    constants: Mapping[str, torch.Tensor]
    initial: InitialState
    update: Mapping[str, Any]
    batch: Mapping[str, torch.Tensor]

    def seconds(self, sizes: Sequence[int]) -> dict[int, float | None]:
        """Seconds as in `Rehearsal`; the first of `sizes`, the run's own, is measured however long it takes."""
        own, *others = sizes
        end_s = time.perf_counter() + _ALL_S
        found: dict[int, float | None] = {own: self._seconds_per_sample(own)}
        for size in others:
            try:
                found[size] = self._seconds_per_sample(size) if time.perf_counter() < end_s else None
            except ConfigError:  # the run would be refused with that granule
                found[size] = None
        return found

    def _seconds_per_sample(self, size: int) -> float:
        """Seconds of steps with one granule each; evaluation runs once."""
        optimizer = make_optimizer(self.config.optimizer)
        artifact = replace(self.artifact, granule=size)
        topology = local_topology(1, 1, make_device(self.config.device).memory_total_bytes())
        stages = AssignStages(PlanOptions(size, size, exact=True), dp=1, pp=1, replicas=0)
        plan = stages.apply(artifact, topology, len(optimizer.init(torch.zeros(1))))
        job = engine_job(self.config, artifact)
        inputs = {name: self.batch[name][:size] for name in input_names(artifact, plan, _RANK)}
        hyper = step_hypers(optimizer, 0, 0.0)
        options = _native.StepOptions(_DEADLINE_S, self.config.clip_norm)
        try:
            engine = RankEngine(job, self.constants, self.initial, _RANK, None, optimizer, self.update, plan, 0).native
            taken_s: list[float] = []
            end_s = time.perf_counter() + _SIZE_S
            while len(taken_s) < _STEPS_MIN or (len(taken_s) < _STEPS_MAX and time.perf_counter() < end_s):
                timings = engine.step(len(taken_s), inputs, hyper, options).timings
                taken_s.append(timings["FORWARD"].seconds + timings["BACKWARD"].seconds)
            engine.evaluate(0, inputs, _DEADLINE_S)
        except ExecError as error:
            refused = _REFUSED.search(str(error))
            if refused is None:
                raise
            raise ConfigError(_refusal(artifact, **refused.groupdict())) from error
        return statistics.median(taken_s[1:]) / size


def _refusal(artifact: Artifact, program: str, operator: str, kernel: str) -> str:
    kind, _, way = program.rpartition(".")
    unit = next((unit.index for unit in artifact.units if unit.kind == kind), None)
    place = f"program {program}" if unit is None else f"unit {unit}, {way}"
    return (
        f"exact=true: {operator} in {place}: torch has no deterministic implementation of {kernel}; a way out is to "
        "compute the same with other operators, or exact=false"
    )
