"""Checks of a record against data, configuration and seed: which samples were fed, what counted, which keys were drawn.

Rank by rank and step by step, everything is computed again but the model: the samples of each rank's tile from the
dataset and the order, their count by the part of the program that counts, the keys from seed and positions.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

from elaswave_fx import _native
from elaswave_fx.audit.finding import Finding, holds, unchecked, wrong
from elaswave_fx.audit.program import Program, find_program
from elaswave_fx.audit.record import Line, Part, Record
from elaswave_fx.control.store.exact_total import ZERO, ExactTotal
from elaswave_fx.data import load_batch
from elaswave_fx.data.dataset import Batch
from elaswave_fx.errors import DataError, ExecError, SampleError
from elaswave_fx.plan.lower.engine_spec import key_stream
from elaswave_fx.plan.plan import Plan
from elaswave_fx.plan.work.tiling import Tile
from elaswave_fx.program.count import Counter, cut_count
from elaswave_fx.program.keyed_draws import sample_keys
from elaswave_fx.words import number_ranges
from elaswave_fx.worker.engine import vouched_inputs
from elaswave_fx.worker.feed import content_of

CHECKS = ("contents", "counts", "keys")
_STEP_KEY_BIT = 0x80000000
_WORD = 1 << 64


def check_inputs(
    record: Record, program: Program | str, each: Iterable[Line] | None = None, *, runs_code: bool
) -> Iterator[Finding]:
    """Findings of `CHECKS`; of each the first that is wrong. `each`: the record's lines, for whoever shows progress;
    `runs_code`: see `find_program`."""
    if isinstance(program, str):
        yield from (unchecked(check, program) for check in CHECKS)
        return
    found: dict[str, Finding] = {}
    missing = 0
    examiners: dict[int, _Examiner] = {}
    for line in each if each is not None else record.lines:
        part = record.part_of(line)
        plan = part.plans.get(line.plan)
        if plan is None:
            missing += 1
            continue
        if id(part) not in examiners:
            own = program if part is record.last else find_program(part, runs_code=runs_code)
            if isinstance(own, str):
                yield from (unchecked(check, own) for check in CHECKS if check not in found)
                return
            examiners[id(part)] = _Examiner(part, own)
        try:
            for finding in examiners[id(part)].examine(line, plan):
                found.setdefault(finding.check, finding)
        except (DataError, SampleError, ExecError) as error:
            found.setdefault("contents", unchecked("contents", f"step {line.step}: {' '.join(str(error).split())}"))
            break
    words = {
        "contents": "the samples that were fed are those of data, configuration and order",
        "counts": "what counts in these samples is what was counted",
        "keys": "random draws had the keys of seed and positions",
    }
    gap = f", but {missing} lines whose plans are not there" if missing else ""
    for check in CHECKS:
        yield found.get(check) or holds(check, f"{len(record.lines)} steps{gap}: {words[check]}")


@dataclass(frozen=True)
class _Keys:
    """The units that draw with keys of samples, and those that draw with a key of the step."""

    of_samples: frozenset[int]
    of_steps: frozenset[int]


class _Examiner:
    """The examination of one part of a run."""

    def __init__(self, part: Part, program: Program) -> None:
        self._config, self._artifact, self._source = part.config, program.artifact, program.source
        self._counter = cut_count(program.artifact)
        self._count = _native.Program(dict(self._counter.program)) if self._counter is not None else None
        units = program.artifact.units
        self._keys = _Keys(
            frozenset(unit.index for unit in units if ("keys",) in unit.inputs),
            frozenset(unit.index for unit in units if ("step_keys",) in unit.inputs),
        )

    def examine(self, line: Line, plan: Plan) -> Iterator[Finding]:
        """What is wrong with a line, or why it cannot be told."""
        batch = self._batch(line.step)
        yield from self._check_contents(line, plan, batch)
        yield from self._check_counts(line, plan, batch)
        yield from self._check_keys(line, plan)

    def _batch(self, step: int) -> Batch:
        size = self._config.global_batch
        return load_batch(self._source.dataset, self._source.train, step * size, size)

    def _check_contents(self, line: Line, plan: Plan, batch: Batch) -> Iterator[Finding]:
        first = line.step * self._config.global_batch
        total = 0
        for tile in plan.tiles:
            vouched = vouched_inputs(self._artifact, plan, tile.rank)
            own = {name: torch.cat([batch[name][s.lo : s.hi] for s in tile.spans]) for name in vouched}
            low, high, _ = content_of(own, [range(first + s.lo, first + s.hi) for s in tile.spans])
            total += low | high << 64
            if line.tile_hashes.get(str(tile.rank)) != f"{low | high << 64:032x}":
                yield wrong("contents", f"{_place(line, tile)}: was fed other samples than those of these positions")
                return
        if line.content_hash != f"{total % (1 << 128):032x}":
            yield wrong("contents", f"step {line.step} (line {line.number}): content_hash is not that of its tiles")

    def _check_counts(self, line: Line, plan: Plan, batch: Batch) -> Iterator[Finding]:
        counter, count = self._counter, self._count
        if counter is None or count is None:
            yield unchecked("counts", "what counts follows from what the model computes, not from the samples alone")
            return
        total = ZERO
        for tile in plan.tiles:
            if counter.unit in tile.units:
                total += sum((self._count_of(counter, batch, part.lo, part.hi) for part in tile.micro_batches), ZERO)
        if line.count != total.value.hex():
            yield wrong(
                "counts", f"step {line.step} (line {line.number}): {float.fromhex(line.count):g} targets were counted, "
                f"the samples have {total.value:g}"
            )  # fmt: skip

    def _count_of(self, counter: Counter, batch: Batch, lo: int, hi: int) -> ExactTotal:
        assert self._count is not None
        values = [None if name is None else batch[name][lo:hi] for name in counter.inputs]
        return ExactTotal.of(float(self._count.run(values)[0]))

    def _check_keys(self, line: Line, plan: Plan) -> Iterator[Finding]:
        for tile in plan.tiles:
            drawn = f"{self._sum_of_keys(line.step, plan, tile):016x}"
            if line.keys.get(str(tile.rank)) != drawn:
                units = f"units {number_ranges(list(tile.units))}"
                yield wrong("keys", f"{_place(line, tile)}, {units}: drew with keys of another seed or other positions")
                return

    def _sum_of_keys(self, step: int, plan: Plan, tile: Tile) -> int:
        stream = key_stream(self._config.seed, self._config.lab.reshard_rng, plan, tile.rank)
        total = 0
        for unit in self._keys.of_samples.intersection(tile.units):
            for start, part in zip(stream.starts, tile.micro_batches, strict=True):
                keys = sample_keys(stream.seed, step * stream.per_step + start, len(part), unit)
                total += int(torch.sum(keys))  # modulo 2^64, as tensors of integers add
        for unit in self._keys.of_steps.intersection(tile.units):
            total += tile.sample_count * int(sample_keys(stream.seed, step, 1, unit | _STEP_KEY_BIT))
        return total % _WORD


def _place(line: Line, tile: Tile) -> str:
    samples = ", ".join(f"{span.lo} to {span.hi - 1}" for span in tile.spans)
    return f"step {line.step} (line {line.number}), rank {tile.rank}, samples {samples}"
