"""Checks of a record that need its files alone: the chain of the ledger, cover, plans, metrics, summary."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator

from elaswave_fx.audit.finding import Finding, holds, unchecked, wrong
from elaswave_fx.audit.record import Line, Record, line_fields
from elaswave_fx.control.store.ledger import (
    CHAIN_START,
    covers_once,
    first_break,
    hash_of,
    restored_alike,
    sum_of_digests,
)
from elaswave_fx.devices.fingerprint import hash_of as hash_of_fingerprint
from elaswave_fx.errors import PlanError
from elaswave_fx.plan.plan import Plan


def check_files(record: Record) -> Iterator[Finding]:
    """All of them, in an order that names the cause before what follows from it."""
    yield from record.damage
    yield check_chain(record)
    yield check_cover(record)
    yield check_tiles(record)
    yield check_fingerprints(record)
    yield check_states(record)
    yield check_metrics(record)
    yield check_summary(record)


def check_chain(record: Record) -> Finding:
    """Every line has the hash of the one before, and the summary that of the last."""
    try:
        number = first_break(record.texts)
    except (ValueError, AttributeError, RecursionError):
        return unchecked("chain", "a line of the ledger cannot be read")
    if number is not None:
        return wrong(
            "chain", f"line {number} does not follow line {number - 1}: one of them was edited, moved, or lies behind "
            "one that was removed"
        )  # fmt: skip
    head = hash_of(record.texts[-1]) if record.texts else CHAIN_START
    told = record.summary.ledger_head if record.summary is not None else None
    if told is None:
        return unchecked("chain", f"{len(record.texts)} lines follow each other, but no summary says which is the last")
    if told != head:
        return wrong("chain", f"line {len(record.texts)} is not the last one of the run, or was edited")
    return holds("chain", f"{len(record.texts)} lines follow each other, to the one that the summary names")


def check_cover(record: Record) -> Finding:
    """Every unit of every sample of every step was computed once, but for samples that the step's plan skips."""
    plan = _any_plan(record)
    if plan is None:
        return unchecked("cover", "no plan can be read")
    steps = _steps(record)
    first = record.parts[0].first_step
    units, samples = len(plan.workload.units), plan.workload.options.global_batch
    skipped = {name: each.workload.skipped for part in record.parts for name, each in part.plans.items()}
    found = covers_once([line_fields(line) for line in record.lines], units, samples, first, steps, skipped)
    if found is not None:
        return wrong("cover", found.removeprefix("ledger: "))
    left_out = sum(skipped.get(line.plan, 0) for line in record.lines)
    but = f", but for {left_out} that plans left out of their steps" if left_out else ""
    return holds("cover", f"steps {first} to {steps - 1}: {units} units of {samples} samples, each once{but}")


def check_tiles(record: Record) -> Finding:
    """Every rank consumed its tile of the plan that its line names."""
    missing = set()
    for line in record.lines:
        plan = record.part_of(line).plans.get(line.plan)
        if plan is None:
            missing.add(line.plan)
            continue
        try:
            tiles = {tile.rank: [piece.edges for piece in tile.work] for tile in plan.tiles}
        except PlanError as error:
            return wrong("tiles", f"{_place(line)}: its plan is none ({error})")
        for rank, planned in tiles.items():
            if line.tiles.get(str(rank), []) != planned:
                return wrong(
                    "tiles", f"{_place(line)}: rank {rank} consumed {line.tiles.get(str(rank))}, "
                    f"its tile is {planned}"
                )  # fmt: skip
    if missing:
        return unchecked("tiles", f"{len(missing)} plans that lines name are not there: {', '.join(sorted(missing))}")
    return holds("tiles", f"{len(record.lines)} lines have the areas of their plans")


def check_fingerprints(record: Record) -> Finding:
    """Lines name the machine and the program that `run.json` does."""
    known = {hash_of_fingerprint(part.fingerprint, part.program) for part in record.parts}
    for line in record.lines:
        if line.fingerprint not in known:
            return wrong("fingerprint", f"{_place(line)}: another machine or program computed it than run.json says")
    return holds("fingerprint", f"{len(known)} of machine and program, as run.json says")


def check_states(record: Record) -> Finding:
    """Digests of buckets add up; a rollback went back to the state that was."""
    for line in record.lines:
        total = sum_of_digests(int(digest, 16) for digest in line.buckets.values())
        if f"{total:032x}" != line.state_digest:
            return wrong("states", f"{_place(line)}: the digests of its buckets do not add up to state_digest")
    try:
        found = restored_alike(map(json.loads, record.texts))
    except (ValueError, KeyError, TypeError, RecursionError):
        return unchecked("states", "a line of the ledger cannot be read")
    if found is not None:
        return wrong("states", found.removeprefix("ledger: "))
    return holds("states", "digests of buckets add up, and rollbacks went back to the states that were")


def check_metrics(record: Record) -> Finding:
    """`metrics.jsonl` has the loss and the norm that the bits in the ledger make."""
    by_step = {line.step: line for line in record.metrics}
    ended, newest = record.summary is not None, max(by_step, default=-1)
    for line in record.lines:
        told = by_step.pop(line.step, None)
        if told is None and not ended and line.step > newest:
            continue  # It is yet to be written.
        if told is None:
            return wrong("metrics", f"step {line.step} has no line in metrics.jsonl")
        try:
            expected = _expected_metrics(line)
        except (ValueError, OverflowError) as error:
            return wrong("metrics", f"{_place(line)}: its totals are no numbers ({error})")
        for name, value in expected.items():
            if getattr(told, name) != (value if math.isfinite(value) else None):
                said = f"the ledger's line {line.number} says {value}"
                return wrong("metrics", f"step {line.step}: {name} is {getattr(told, name)}, {said}")
    if by_step and ended:
        return wrong("metrics", f"metrics.jsonl has step {min(by_step)}, which the ledger has not")
    return holds("metrics", f"losses, norms and counts of {len(record.lines)} steps follow from the ledger")


def _expected_metrics(line: Line) -> dict[str, float]:
    loss, count, squares = (float.fromhex(text) for text in (line.loss, line.count, line.squares))
    return {
        "loss": loss / count if count else math.nan,
        "grad_norm": math.sqrt(squares) / count if count > 0 else 0.0,
        "tokens": float(int(count)),
    }


def check_summary(record: Record) -> Finding:
    """The summary has as many steps as the ledger, and the last loss."""
    summary = record.summary
    if summary is None:
        return unchecked("summary", "there is none: the run goes on, or was killed")
    if summary.steps != _steps(record):
        return wrong("summary", f"says {summary.steps} steps, the ledger has {_steps(record)}")
    last = record.metrics[-1].loss if record.metrics else None
    if summary.loss_last != last:
        return wrong("summary", f"says that the last loss is {summary.loss_last}; metrics.jsonl says {last}")
    if summary.buckets is None:
        return unchecked("summary", "it has no digests of the last state; the run did not come to its end")
    total = sum_of_digests(int(digest, 16) for digest in summary.buckets.values())
    if f"{total:032x}" != summary.state_digest:
        return wrong("summary", "the digests of its buckets do not add up to state_digest")
    return holds("summary", f"{summary.steps} steps, last loss {last}")


def _steps(record: Record) -> int:
    return max((line.step + 1 for line in record.lines), default=record.parts[0].first_step)


def _any_plan(record: Record) -> Plan | None:
    return next((plan for part in record.parts for plan in part.plans.values()), None)


def _place(line: Line) -> str:
    return f"step {line.step} (line {line.number})"
