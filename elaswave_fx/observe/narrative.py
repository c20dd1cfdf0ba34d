"""This module tells an event as a line on the console: what happened, what was decided, why.

describe("agreed", 5, {"members": [0, 1, 3], "lost": [2], "step": 118, "steps_redone": 1, "why": "…"})
    ->  "epoch 5: ranks 0, 1, 3 go on from step 118, 1 step is done again"
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from elaswave_fx.words import rank_words

Fields = Mapping[str, Any]

_PARTS = ("pipeline", "exchange", "update", "step")
"""Of a step, in `predicted`."""


def describe(kind: str, epoch: int, fields: Fields) -> str:
    """Return the line of an event; one of an unknown kind lists its fields."""
    words = _WORDS.get(kind)
    if words is not None:
        return words(epoch, fields)
    said = ", ".join(f"{key} {value}" for key, value in fields.items() if key != "rank")
    who = f"rank {fields['rank']}: " if fields.get("rank") is not None else ""
    return f"{who}{kind.replace('_', ' ')}: {said}" if said else f"{who}{kind.replace('_', ' ')}"


def _fault(epoch: int, fields: Fields) -> str:
    if fields["fault"] == "slow":
        return f"rank {fields['rank']}: fault: at {fields['speed']:g} of its speed from step {fields['step']} on"
    if fields["fault"] == "join":
        return f"fault: a process is started, to join as rank {fields['rank']}"
    if fields["fault"] == "leave":
        return f"rank {fields['rank']}: fault: told to leave in step {fields['step']}, phase {fields['phase']}"
    lasts = f", for {fields['seconds']:g} s" if "seconds" in fields else ""
    return f"rank {fields['rank']}: fault: {fields['fault']} in step {fields['step']}, phase {fields['phase']}{lasts}"


def _left(epoch: int, fields: Fields) -> str:
    return fields["cause"] if fields.get("asked") else f"lost: {fields['cause']}"


def _must_stay(epoch: int, fields: Fields) -> str:
    return f"rank {fields['rank']} was told to leave, and cannot: {fields['reason']}"


def _joined(epoch: int, fields: Fields) -> str:
    return f"epoch {epoch}: rank {fields['rank']} has joined, from step {fields['step']} on"


def _detected(epoch: int, fields: Fields) -> str:
    ranks = _numbers(fields.get("ranks") or [])
    return f"epoch {epoch} ends{f' for the loss of {ranks}' if ranks else ''}: {fields['cause']}"


def _stopping(epoch: int, fields: Fields) -> str:
    return f"epoch {epoch} will end as planned: {fields['cause']}"


def _called_off(epoch: int, fields: Fields) -> str:
    return f"epoch {epoch} does not end as planned: {fields['cause']}"


def _stopped(epoch: int, fields: Fields) -> str:
    return f"{_numbers(fields['members'])} have left the step and said what they have"


def _agreed(epoch: int, fields: Fields) -> str:
    redone = fields["steps_redone"]
    again = f", {redone} step{'s are' if redone != 1 else ' is'} done again" if redone else ", nothing is done again"
    again = "" if redone is None else again
    back = f", ROLLED BACK to step {fields['rolled_back_to']}" if "rolled_back_to" in fields else ""
    who = _numbers(fields["members"])
    left = f", without {_numbers(fields['left'])}, as told" if fields.get("left") else ""
    why = "" if fields["how"] == "done again" else f" ({fields['why']})"
    returned = f"; back with what they have: {_numbers(fields['back'])}" if fields.get("back") else ""
    return f"epoch {epoch}: {who} go on from step {fields['step']}{left}{again}{back}{why}{returned}"


def _planned(epoch: int, fields: Fields) -> str:
    if "plan_ms" not in fields:
        return f"epoch {epoch}: planned"
    changes = "".join(f"\n    {line}" for line in fields["lines"])
    return f"epoch {epoch}: planned in {fields['plan_ms']:.1f} ms: {fields['reason']}{changes}"


def _slowed(epoch: int, fields: Fields) -> str:
    tried = set(map(str, fields.get("tried", ())))
    found = [f"rank {rank} has a speed of {speed:g}" for rank, speed in fields["speeds"].items() if rank not in tried]
    parts = [f"{', '.join(found)}, as its steps said; work is shared by that"] if found else []
    parts += [
        f"rank {rank} has had no work for its speed; whether it has {speed:g} by now is tried with a little"
        for rank, speed in fields["speeds"].items()
        if rank in tried
    ]
    return f"epoch {epoch}: {'; '.join(parts)}"


def _edited(epoch: int, fields: Fields) -> str:
    return f"epoch {epoch}: edited in place in {fields['ms']:.1f} ms"


def _transferred(epoch: int, fields: Fields) -> str:
    behind = fields.get("bytes_behind", 0) / 2**20
    copies = f"; {behind:.2f} MiB of copies follow behind the steps" if behind else ""
    return f"epoch {epoch}: moved {fields['bytes'] / 2**20:.2f} MiB of parameters in {fields['ms']:.1f} ms{copies}"


def _caught_up(epoch: int, fields: Fields) -> str:
    taken = fields["bytes"] / 2**20
    return f"epoch {epoch}: rank {fields['rank']} has all of its copies; on their way they took {taken:.2f} MiB of it"


def _resumed(epoch: int, fields: Fields) -> str:
    return f"epoch {epoch}: step {fields['step']} is committed, the run goes on"


def _coordinator(epoch: int, fields: Fields) -> str:
    return f"coordinator: {fields['cause']}; another one takes over, training goes on"


def _clock(epoch: int, fields: Fields) -> str:
    clock = f"{fields['wanted_mhz']:g} MHz" if fields["wanted_mhz"] is not None else "its clock as before"
    return f"rank {fields['rank']}: {clock}: {fields['outcome']}{', ' + fields['why'] if fields['why'] else ''}"


def _predicted(epoch: int, fields: Fields) -> str:
    parts = (f"{part} {fields[f'{part}_ms']:.1f} ({fields[f'predicted_{part}_ms']:.1f})" for part in _PARTS)
    overslept = f"; overslept {fields['overslept_share']:.2%}" if "overslept_share" in fields else ""
    return (
        f"measured (predicted) ms, medians of {fields['steps']} steps of {fields['ranks']} ranks: {', '.join(parts)}; "
        f"{fields['step_over_predicted']:.3f} of predicted{overslept}"
    )


def _model(epoch: int, fields: Fields) -> str:
    return f"{fields['run_dir']}: the model cannot be written there; it is in {fields['path']} on {fields['host']}"


def _over(epoch: int, fields: Fields) -> str:
    return f"the job is over: {fields['reason']}"


def _numbers(ranks: list[int]) -> str:
    return rank_words(ranks) if ranks else ""


_WORDS: Mapping[str, Callable[[int, Fields], str]] = {
    "fault": _fault,
    "left": _left,
    "must_stay": _must_stay,
    "joined": _joined,
    "detected": _detected,
    "stopping": _stopping,
    "called_off": _called_off,
    "stopped": _stopped,
    "agreed": _agreed,
    "planned": _planned,
    "slowed": _slowed,
    "edited": _edited,
    "transferred": _transferred,
    "caught_up": _caught_up,
    "resumed": _resumed,
    "coordinator": _coordinator,
    "clock": _clock,
    "predicted": _predicted,
    "model": _model,
    "over": _over,
}
