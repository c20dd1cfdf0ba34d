"""Steps of an exact run once more, on one rank, from the nearest checkpoint: the same states, or which bucket not.

    replay(record, program, first=40, last=45)

Nothing of this machine's timing or of the run's layout enters: with exact sums one rank computes what any number of
ranks have computed. A machine that would compute other bits says so instead.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from elaswave_fx import _native
from elaswave_fx.audit.compare import bucket_name
from elaswave_fx.audit.finding import Finding, holds, unchecked, wrong
from elaswave_fx.audit.program import Program
from elaswave_fx.audit.record import Line, Part, Record
from elaswave_fx.build.initial_plan import plan_of
from elaswave_fx.build.make_model import initial_state, make_model
from elaswave_fx.build.optimizer_program import update_program
from elaswave_fx.checkpoint.folder import complete
from elaswave_fx.checkpoint.initial_state import InitialState, save_state
from elaswave_fx.checkpoint.manifest import check_files, read_manifest
from elaswave_fx.checkpoint.start import checkpoint_folder
from elaswave_fx.config.keys import Config
from elaswave_fx.control.store.ledger import Payload, digests_of_buckets
from elaswave_fx.devices import make_device
from elaswave_fx.devices.fingerprint import difference
from elaswave_fx.errors import ConfigError, ElasWaveError
from elaswave_fx.optim.learning_rate import make_schedule
from elaswave_fx.optim.optimizer import make_optimizer, step_hypers
from elaswave_fx.plan.plan import Plan
from elaswave_fx.plan.work.box import numbered
from elaswave_fx.plan.work.topology import Rank
from elaswave_fx.worker.checkpoints import restore
from elaswave_fx.worker.engine import RankEngine, engine_job
from elaswave_fx.worker.feed import InputFeed

_DEADLINE_S = 24 * 3600.0
"""A step of one rank alone waits for nobody."""

_ALONE = Rank(0)


@dataclass(frozen=True)
class _Origin:
    """Where the replay begins: after `step` steps, with the state of `checkpoint`, or that of the beginning."""

    step: int
    checkpoint: Path | None


def replay(
    record: Record, program: Program | str, first: int, last: int, on_step: Callable[[int, int], None] | None = None
) -> Finding:
    """Do the steps `first` to `last` again. `on_step` hears of the step that was done, and how many are to be done.

    Raises `ConfigError` for steps that the run has not.
    """
    by_step = {line.step: line for line in record.lines}
    known = sorted(by_step)
    if not known or not known[0] <= first <= last <= known[-1]:
        raise ConfigError(
            f"replay={first}-{last}: the run has steps {known[0]} to {known[-1]}" if known else "replay: no steps"
        )
    part = record.part_of(by_step[first])
    refusal = _why_not(record, part, program)
    if refusal is not None or isinstance(program, str):
        return unchecked("replay", refusal or str(program))
    origin = _origin(part, record, first)
    if origin is None:
        return unchecked("replay", f"no checkpoint is left from before step {first}, and the run began after step 0")
    try:
        with tempfile.TemporaryDirectory() as folder:
            alone = _Replay(part.config, program, Path(folder))
            end = record.summary.buckets if record.summary is not None else None
            return alone.run(origin, last, by_step, end, on_step)
    except ElasWaveError as error:
        return unchecked("replay", " ".join(str(error).split()))


def _why_not(record: Record, part: Part, program: Program | str) -> str | None:
    if not part.config.exact:
        return "the run was without exact=true, which alone promises that one rank computes the same bits"
    if isinstance(program, str):
        return program
    device = make_device(part.config.device)
    device.set_up(threads=1, deterministic=True)
    other = difference(device.fingerprint(), part.fingerprint)
    return None if other is None else f"this machine computes other bits: {other}"


def _origin(part: Part, record: Record, first: int) -> _Origin | None:
    """The newest beginning that is not behind step `first`."""
    folder = checkpoint_folder(part.config, record.folder) or record.folder / "checkpoints"
    found = [_Origin(step, path) for step, path in complete(folder).items() if step <= first]
    if part.resume_from is not None and Path(part.resume_from).is_dir() and part.first_step <= first:
        found.append(_Origin(part.first_step, Path(part.resume_from)))
    if record.parts[0].first_step == 0:
        found.append(_Origin(0, None))
    return max(found, key=lambda origin: origin.step, default=None)


class _Replay:
    """One rank with all of the state."""

    def __init__(self, config: Config, program: Program, folder: Path) -> None:
        parallel = replace(config.parallel, dp=1, pp=1, micro_batch=None)
        self._config = replace(config, parallel=parallel, copies=replace(config.copies, count=0), faults=())
        self._program = program
        self._optimizer = make_optimizer(config.optimizer)
        self._schedule = make_schedule(config.schedule, config.steps)
        self._plan: Plan = plan_of(self._config, program.artifact)
        state = folder / "state.safetensors"
        save_state(initial_state(make_model(config, program.source.dataset)), state)
        self._initial = InitialState(state)

    def run(
        self, origin: _Origin, last: int, lines: Mapping[int, Line], end: Mapping[str, str] | None,
        on_step: Callable[[int, int], None] | None,
    ) -> Finding:  # fmt: skip
        engine = self._engine(origin)
        source = self._program.source
        feed = InputFeed(self._config, self._program.artifact, self._plan, _ALONE, source, origin.step)
        begin = f"from {origin.checkpoint.name}" if origin.checkpoint is not None else "from the beginning"
        try:
            for step in range(origin.step, last + 1):
                found = self._step(engine, feed, step, lines.get(step))
                if found is not None:
                    return wrong("replay", f"{found}; steps {origin.step} to {step} were done again {begin}")
                if on_step is not None:
                    on_step(step - origin.step + 1, last + 1 - origin.step)
        finally:
            feed.close()
        after = lines[last + 1].buckets if last + 1 in lines else end
        found = self._difference(self._state(engine), after) if after is not None else None
        if found is not None:
            return wrong("replay", f"step {last}: after it {found} is another one than the run's ({begin})")
        words = f"steps {origin.step} to {last} once more {begin}: the same losses, norms and states"
        return holds("replay", words if after is not None else f"{words} at their beginnings")

    def _engine(self, origin: _Origin) -> RankEngine:
        config, artifact = self._config, self._program.artifact
        engine = RankEngine(
            engine_job(config, artifact),
            self._program.constants, self._initial, _ALONE, None, self._optimizer, update_program(config), self._plan,
            origin.step,
        )  # fmt: skip
        if origin.checkpoint is not None:
            check_files(origin.checkpoint, read_manifest(origin.checkpoint))
            restore(origin.checkpoint, artifact, self._plan, _ALONE, self._optimizer, engine.native)
            engine.native.refresh([[_ALONE] for _ in artifact.buckets], _DEADLINE_S)
        return engine

    def _step(self, engine: RankEngine, feed: InputFeed, step: int, line: Line | None) -> str | None:
        """What differs from the run, in words."""
        fed = feed.next_batch(step)
        lr = self._config.optimizer.lr * self._schedule(step)
        options = _native.StepOptions(_DEADLINE_S, self._config.clip_norm, content=fed.content)
        result = engine.native.step(step, fed.inputs, step_hypers(self._optimizer, step, lr), options)
        if line is None:
            return None
        vote = Payload.unpack(result.votes[_ALONE])
        bucket = self._difference(digests_of_buckets(vote.buckets), line.buckets)
        if bucket is not None:
            return f"step {step} (line {line.number}): the state that it began from has another {bucket}"
        values = {
            "loss": (vote.loss, line.loss),
            "count": (vote.count, line.count),
            "squares": (vote.squares, line.squares),
        }
        other = next((name for name, (mine, its) in values.items() if mine.value.hex() != its), None)
        return None if other is None else f"step {step} (line {line.number}): {other} is another one"

    def _state(self, engine: RankEngine) -> Mapping[int, int]:
        def digest(number: int) -> int:
            state = engine.native.read(number)
            assert state is not None, "this rank keeps everything"
            low, high = state.digest
            return low | high << 64

        return digests_of_buckets((box.bucket, digest(number)) for number, box in numbered(self._plan.boxes))

    def _difference(self, own: Mapping[int, int], told: Mapping[str, str]) -> str | None:
        """The first bucket that is another one, by name."""
        for number in sorted({*own, *map(int, told)}):
            mine = own.get(number)
            if mine is None or told.get(str(number)) != f"{mine:032x}":
                return bucket_name(number, self._program.artifact)
        return None
