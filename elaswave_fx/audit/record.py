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
from typing import Any

import msgspec

from elaswave_fx.audit.finding import Finding, wrong
from elaswave_fx.config.types import Config
from elaswave_fx.errors import ConfigError, PlanError
from elaswave_fx.files import json_lines
from elaswave_fx.plan.plan import Plan, plan_hash

Tiles = dict[str, list[tuple[int, int, int, int]]]


class Line(msgspec.Struct, frozen=True):
    """A line of the ledger for a committed step; see `control/store/ledger.py`. `number` counts lines from 1 on."""

    number: int
    step: int
    epoch: int
    tiles: Tiles
    tile_hashes: dict[str, str]
    content_hash: str
    keys: dict[str, str]
    loss: str
    count: str
    squares: str
    state_digest: str
    buckets: dict[str, str]
    plan: str
    fingerprint: str


class Rollback(msgspec.Struct, frozen=True):
    """Lines before it of steps from `rolled_back_to` on are void."""

    number: int
    rolled_back_to: int
    epoch: int


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
    metrics: tuple[Mapping[str, Any], ...]
    summary: Mapping[str, Any] | None
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
    text = (folder / "ledger.jsonl").read_text(encoding="utf-8")
    *texts, rest = text.split("\n")
    if rest:
        damage.append(wrong("ledger", f"line {len(texts) + 1} is cut off"))
    return Record(
        folder,
        tuple(texts),
        tuple(_standing(_read_lines(texts, damage))),
        parts,
        tuple(_read_json(folder / "metrics.jsonl", damage, lines=True) or ()),
        _read_json(folder / "summary.json", damage),
        tuple(damage),
    )


def _read_part(folder: Path, damage: list[Finding]) -> Part:
    path = folder / "run.json"
    try:
        said = json.loads(path.read_text(encoding="utf-8"))
        config = msgspec.convert(said["config"], Config)
        program, first_step, fingerprint = said["program"], int(said["first_step"]), dict(said["fingerprint"])
    except (ValueError, KeyError, TypeError) as error:  # msgspec's are the first kind
        raise ConfigError(f"{path}: cannot be read ({error})") from error
    plans = {}
    for plan_path in sorted(folder.glob("plan-*.json")):
        plan_text = plan_path.read_text(encoding="utf-8")
        try:
            plans[f"{plan_hash(plan_text):016x}"] = Plan.from_json(plan_text)
        except PlanError as error:
            damage.append(wrong("plans", f"{plan_path}: {error}"))
    return Part(first_step, config, program, fingerprint, said.get("resume_from"), plans)


def _read_lines(texts: Iterable[str], damage: list[Finding]) -> Iterable[Line | Rollback]:
    for number, text in enumerate(texts, 1):
        try:
            said = json.loads(text)
            kind = Rollback if "rolled_back_to" in said else Line
            yield msgspec.convert({**said, "number": number}, kind)
        except (ValueError, TypeError) as error:
            damage.append(wrong("ledger", f"line {number} is no line of a ledger ({error})"))


def _standing(lines: Iterable[Line | Rollback]) -> list[Line]:
    kept: list[Line] = []
    for line in lines:
        if isinstance(line, Rollback):
            kept = [old for old in kept if old.step < line.rolled_back_to]
        else:
            kept.append(line)
    return kept


def _read_json(path: Path, damage: list[Finding], lines: bool = False) -> Any:
    if not path.is_file():
        return None
    try:
        return json_lines(path) if lines else json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        damage.append(wrong("files", f"{path}: cannot be read ({error})"))
        return None


def sum_of_keys(line: Line) -> int:
    """The sum of the keys that all ranks drew with, modulo 2^64."""
    return sum(int(keys, 16) for keys in line.keys.values()) % (1 << 64)


def line_fields(line: Line) -> dict[str, Any]:
    """As `control/store/ledger.py` takes lines."""
    return msgspec.to_builtins(line)


def final_buckets(record: Record) -> Mapping[str, str] | None:
    """The digests of the state after the last step; None if the run has not said."""
    return (record.summary or {}).get("buckets")
