"""The record of a run as its directory has it: ledger, metrics, plans, summary, and what it was a run of.

    record = read_record(Path("runs/today"))
    record.lines[-1].step, record.parts[0].config.seed

A run that was gone on with has several parts, the earlier ones in `earlier/N/`. Nothing here is trusted: what is torn
or edited makes a `Finding`, and what is left is still checked.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec

from elaswave_fx.audit.finding import Finding, unchecked, wrong
from elaswave_fx.config.keys import Config
from elaswave_fx.config.validation import with_keys_of_today
from elaswave_fx.errors import ConfigError, PlanError
from elaswave_fx.plan.plan import Plan, plan_hash

Tiles = dict[str, list[tuple[int, int, int, int]]]
Hex = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{1,64}$")]
Rank = Annotated[str, msgspec.Meta(pattern="^[0-9]{1,9}$")]
Bucket = Rank


_UNREADABLE = (ValueError, TypeError, RecursionError)  # msgspec's errors are of the first kind


class Line(msgspec.Struct, frozen=True):
    """A line of the ledger for a committed step, made of the votes that committed it (`control/store/ledger.py`).
    `number` counts lines from 1 on."""

    number: int
    step: int
    """From 0."""
    epoch: int
    tiles: Tiles
    """Per rank, what it ran: first unit, last + 1, first sample, last + 1."""
    tile_hashes: dict[Rank, Hex]
    """Of the samples that each rank read."""
    content_hash: Hex
    """The sum of `tile_hashes` modulo 2^128."""
    keys: dict[Rank, Hex]
    """Per rank, the sum modulo 2^64 of the keys of its random draws."""
    loss: str
    """The sum over the step, as a C99 hexadecimal float."""
    count: str
    """The divisor of the loss, likewise; also `weight_sum`, as a number."""
    squares: str
    """Of the gradient, likewise."""
    state_digest: Hex
    """The sum of `buckets`."""
    buckets: dict[Bucket, Hex]
    """Digests of parameters and optimizer state before the step."""
    plan: str
    """The hash of the epoch's plan."""
    fingerprint: str
    """The hash of the machine's fingerprint and the program's key, both in `run.json`."""


class Rollback(msgspec.Struct, frozen=True):
    """Lines before it of steps from `rolled_back_to` on are void."""

    number: int
    rolled_back_to: int
    epoch: int


class Metric(msgspec.Struct, frozen=True):
    """A line of `metrics.jsonl`, as far as the ledger says the same."""

    step: int
    loss: float | None
    grad_norm: float | None
    tokens: int


class Summary(msgspec.Struct, frozen=True):
    """`summary.json`, as far as something can be held against it."""

    steps: int
    loss_last: float | None = None
    ledger_head: Hex | None = None
    state_digest: Hex | None = None
    buckets: dict[Bucket, Hex] | None = None
    params_digest: Hex | None = None
    model: str | None = None


class _Run(msgspec.Struct, frozen=True):
    """`run.json`."""

    first_step: int
    program: str
    fingerprint: dict[str, str]
    config: Config
    resume_from: str | None = None


@dataclass(frozen=True)
class Part:
    """A run, or what was done of it at a stretch: what `run.json` says, and the plans by the names that lines have."""

    first_step: int
    config: Config
    program: str
    fingerprint: Mapping[str, str]
    resume_from: str | None
    plans: Mapping[str, Plan]


@dataclass(frozen=True)
class Record:
    """All of it. `texts`: the ledger's lines as they are; `lines`: those that stand; `parts`: the oldest first."""

    folder: Path
    texts: tuple[str, ...]
    lines: tuple[Line, ...]
    parts: tuple[Part, ...]
    metrics: tuple[Metric, ...]
    summary: Summary | None
    damage: tuple[Finding, ...]

    @property
    def last(self) -> Part:
        """What the run directory says of its newest part."""
        return self.parts[-1]

    @property
    def exact(self) -> bool:
        """Whether all of the run was computed with exact sums."""
        return all(part.config.exact for part in self.parts)

    def part_of(self, line: Line) -> Part:
        """The newest part that may have committed a line that stands."""
        return next(
            (part for part in reversed(self.parts) if part.first_step <= line.step and line.plan in part.plans),
            next((part for part in reversed(self.parts) if part.first_step <= line.step), self.parts[0]),
        )


def read_record(folder: Path) -> Record:
    """The record in a run directory. Raises `ConfigError` if there is none, or one that this version cannot read."""
    if not (folder / "ledger.jsonl").is_file():
        raise ConfigError(f"{folder}: is no run directory, it has no ledger.jsonl")
    folders = sorted((folder / "earlier").glob("*"), key=lambda path: int(path.name) if path.name.isdigit() else 0)
    damage: list[Finding] = []
    parts = tuple(_read_part(place, damage) for place in (*folders, folder) if (place / "run.json").is_file())
    if not parts or not (folder / "run.json").is_file():
        raise ConfigError(f"{folder}: has no run.json; it is a run of an earlier version, or was not begun")
    *texts, rest = _text_of(folder / "ledger.jsonl").split("\n")
    summary = _read_summary(folder, damage)
    if rest and summary is None:
        damage.append(unchecked("ledger", f"line {len(texts) + 1} is being written, or is cut off"))
    elif rest:
        damage.append(wrong("ledger", f"line {len(texts) + 1} is cut off"))
    lines = tuple(_standing(_read_lines(texts, damage)))
    return Record(folder, tuple(texts), lines, parts, _read_metrics(folder, damage), summary, tuple(damage))


def _text_of(path: Path) -> str:
    """What is no text becomes text that is no JSON."""
    return path.read_text(encoding="utf-8", errors="replace")


def _read_part(folder: Path, damage: list[Finding]) -> Part:
    path = folder / "run.json"
    try:
        recorded = json.loads(_text_of(path))
        if isinstance(recorded, dict) and isinstance(recorded.get("config"), dict):
            recorded["config"] = with_keys_of_today(recorded["config"])
        said = msgspec.convert(recorded, _Run)
    except _UNREADABLE as error:
        raise ConfigError(f"{path}: cannot be read ({error})") from error
    plans = {}
    for plan_path in sorted(folder.glob("plan-*.json")):
        plan_text = _text_of(plan_path)
        try:
            plans[f"{plan_hash(plan_text):016x}"] = Plan.from_json(plan_text)
        except PlanError as error:
            damage.append(wrong("plans", f"{plan_path}: {error}"))
    return Part(said.first_step, said.config, said.program, said.fingerprint, said.resume_from, plans)


def _read_lines(texts: Iterable[str], damage: list[Finding]) -> Iterable[Line | Rollback]:
    for number, text in enumerate(texts, 1):
        try:
            said = json.loads(text)
            kind = Rollback if "rolled_back_to" in said else Line
            yield msgspec.convert({**said, "number": number}, kind)
        except _UNREADABLE as error:
            damage.append(wrong("ledger", f"line {number} is no line of a ledger ({error})"))


def _read_metrics(folder: Path, damage: list[Finding]) -> tuple[Metric, ...]:
    path = folder / "metrics.jsonl"
    found = []
    for number, text in enumerate(_text_of(path).split("\n")[:-1] if path.is_file() else (), 1):
        try:
            found.append(msgspec.convert(json.loads(text), Metric))
        except _UNREADABLE as error:
            damage.append(wrong("metrics", f"line {number} of metrics.jsonl cannot be read ({error})"))
    return tuple(found)


def _read_summary(folder: Path, damage: list[Finding]) -> Summary | None:
    path = folder / "summary.json"
    if not path.is_file():
        return None
    try:
        return msgspec.convert(json.loads(_text_of(path)), Summary)
    except _UNREADABLE as error:
        damage.append(wrong("summary", f"{path}: cannot be read ({error})"))
        return None


def _standing(lines: Iterable[Line | Rollback]) -> list[Line]:
    kept: list[Line] = []
    for line in lines:
        if isinstance(line, Rollback):
            kept = [old for old in kept if old.step < line.rolled_back_to]
        else:
            kept.append(line)
    return kept


def sum_of_keys(line: Line) -> int:
    """The sum of the keys that all ranks drew with, modulo 2^64."""
    return sum(int(keys, 16) for keys in line.keys.values()) % (1 << 64)


def line_fields(line: Line) -> dict[str, Any]:
    """The line's fields, as `control/store/ledger.py` takes them."""
    return msgspec.to_builtins(line)
