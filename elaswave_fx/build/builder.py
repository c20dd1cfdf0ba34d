"""The builder: a configuration in, an artifact and an initial state on disk out. It runs once per job, in the
launcher's child; workers load its output and never trace.

    build(config, folder)  ->  Built(artifact=…, folder=~/.cache/elaswave_fx/programs/3f.., state=RUN/.init/…)
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

from elaswave_fx.build.example_batches import example_batches, first_calls
from elaswave_fx.build.make_model import initial_state, make_model, notes_of, set_to_train
from elaswave_fx.build.program_cache import (
    cached_program,
    digest_of_samples,
    home_of_programs,
    is_for_samples,
    writing_program,
)
from elaswave_fx.build.program_key import computed_text, program_key
from elaswave_fx.build.sample_types import refuse_other_types
from elaswave_fx.build.shared_state import make_stepper, refuse_changes_in_steps, refuse_shared_state
from elaswave_fx.build.state_dict import state_dict_names
from elaswave_fx.checkpoint.initial_state import save_state
from elaswave_fx.config.keys import Config
from elaswave_fx.data import Source, check_evaluation, open_source
from elaswave_fx.data.cached import digest
from elaswave_fx.models.hf_config import refuse_other_classes
from elaswave_fx.program.artifact import Artifact
from elaswave_fx.program.autocast import in_precision
from elaswave_fx.program.forward_code import forward_code
from elaswave_fx.program.held_state import python_state_kept
from elaswave_fx.program.layers_kept import layers_kept
from elaswave_fx.program.model_fingerprint import fingerprint


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
    """Faults of the cache, and what is trained or kept otherwise than the model suggests; more are the artifact's."""
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
    notes = (*set_to_train(model), *notes_of(config, model))
    if config.model.kind == "hf":
        refuse_other_classes(cast("Any", model).model.config, source.dataset.class_names)
    state = None
    if folder is not None:
        state = folder / "state.safetensors"
        save_state(initial_state(model), state)
    clock.lap("model")
    batches = example_batches(config, source)
    model_print = fingerprint(model)  # before the model runs, which may leave traces in it
    with python_state_kept(model), layers_kept(model):
        with in_precision(model, config.precision):
            batches, calls = first_calls(model, batches, max(config.parallel.granule, 1))
        code = forward_code(model, batches[0])
        computed = computed_text(model, batches[0])
    for dataset in (source.dataset, source.evaluation) if source.eval_batches else (source.dataset,):
        refuse_other_types(dataset, model, batches[0])
    take_step = make_stepper(config)  # once: a user's optimizer is checked when it is made
    refuse_shared_state(config, source, model, batches[0], computed, take_step)
    key = program_key(config, model_print, batches[0], code, computed)
    home, trouble = home_of_programs(config, folder or Path(tempfile.mkdtemp()))
    target = home / key
    notes += trouble
    cached, damage = cached_program(config, model, target)
    samples = digest_of_samples(batches)
    if cached is not None and not is_for_samples(samples, batches, config, cached, model, target):
        target = home / digest(key, samples)[: len(key)]
        cached, damage = cached_program(config, model, target)
    if damage is not None:
        notes += (f"cache: {target} is damaged, {damage}; the program is captured again",)
        shutil.rmtree(target)
    dump = Path(config.passes.dump) if config.passes.dump else None
    if cached is None or dump is not None:
        # Importing torch.export and the passes takes seconds, which a cached program saves.
        from elaswave_fx.build.compile import compile_model

        made, constants = compile_model(config, model, batches, dump, calls)
        with writing_program(config, target):
            made.save(target, constants)
            Artifact.save_tried(target, samples)
        clock.lap("capture and passes")
    refuse_changes_in_steps(config, source, model, batches[0], take_step)
    artifact = cached or Artifact.load(target)
    if calibrate and not artifact.measured:
        from elaswave_fx.build.compile import measure

        artifact = replace(artifact, measured=measure(config, model, target, batches[0]))
        with writing_program(config, target):
            Artifact.save_costs(target, artifact.measured)
        clock.lap("measuring")
    origin = _origin(cached is not None, dump)
    coverage = f"the program's key covers {code.words()}"
    return Built(artifact, target, state, source, clock.laps, origin, notes, coverage, state_dict_names(model))


def _origin(cached: bool, dump: Path | None) -> str:
    if dump is None:
        return "program from the cache" if cached else "program captured"
    again = ", though the cache has it," if cached else ""
    return f"program captured{again} with its graphs in {dump}"


class _Clock:
    def __init__(self) -> None:
        self.laps: dict[str, float] = {}
        self.last = time.perf_counter()

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.laps[name] = now - self.last
        self.last = now
