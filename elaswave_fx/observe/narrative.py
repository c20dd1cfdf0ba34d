"""Events as lines of the log: one per recovery or reconfiguration, with its parts as details (`log.level=debug`).

describe("agreed", 5, {"members": [0, 1, 3], "lost": [2], "step": 118, "steps_redone": 1, "why": "…"})
    ->  "epoch 5: ranks 0, 1, 3 resume at step 118, 1 step replayed"
recovered(entry, [0, 1, 3])
    ->  "epoch 5: rank 2 failed (killed by SIGKILL); resumed at step 118 on ranks 0, 1, 3 in 59 ms"
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Mapping
from typing import Any

from elaswave_fx.observe.run_log import RunLog
from elaswave_fx.words import rank_words

Fields = Mapping[str, Any]

_PARTS = ("pipeline", "exchange", "update", "step")
"""Parts of a step in the event `predicted`."""

_DETAILS = frozenset({
    "agreed", "called_off", "caught_up", "detected", "edited", "joined", "planned", "resumed", "stopped",
    "stopping", "transferred",
})  # fmt: skip
"""Parts of a recovery or of a planned reconfiguration, which has one line in all."""


class Narrator:
    """Adds the lines of events to the log; only the launcher's one thread uses it."""

    def __init__(self, log: RunLog, members: Collection[int]) -> None:
        """`members`: the ranks of the first epoch."""
        self._log, self._members, self._ranks = log, set(members), len(members)
        self._told: set[int] = set()  # recoveries with a line, by the epoch that they led to

    def event(self, kind: str, epoch: int, fields: Fields, recovery: Fields | None) -> None:
        """Add the line of an event. `recovery`: the result of `Recorder.event` for it."""
        (self._log.debug if self._is_detail(kind, fields, recovery) else self._log.info)(describe(kind, epoch, fields))
        if kind == "agreed":
            change = reconfigured(epoch, self._members, fields)
            self._members = set(fields["members"])
            if change is not None:
                self._log.info(change)
        if kind == "planned" and "layout" in fields:
            self._log.info(f"epoch {epoch}: the same ranks take another layout: {fields['layout']}")
        if recovery is not None and "members" in recovery and recovery["epoch"] not in self._told:
            self._told.add(recovery["epoch"])
            self._log.info(recovered(recovery, self._members))

    def _is_detail(self, kind: str, fields: Fields, recovery: Fields | None) -> bool:
        if kind == "clock":
            return fields["outcome"] == "applied"
        if kind == "predicted":  # Predictions assume that each rank has a core, or needs none.
            return "overslept_share" not in fields and len(os.sched_getaffinity(0)) < self._ranks
        if kind == "left":  # The line of the recovery, if still to come, names the cause.
            return recovery is None or recovery["epoch"] not in self._told
        return kind in _DETAILS


def describe(kind: str, epoch: int, fields: Fields) -> str:
    """Return the line of an event; one of an unknown kind lists its fields."""
    words = _WORDS.get(kind)
    if words is not None:
        return words(epoch, fields)
    said = ", ".join(f"{key} {value}" for key, value in fields.items() if key != "rank")
    who = f"rank {fields['rank']}: " if fields.get("rank") is not None else ""
    return f"{who}{kind.replace('_', ' ')}: {said}" if said else f"{who}{kind.replace('_', ' ')}"


def recovered(entry: Fields, members: Collection[int]) -> str:
    """Return the line of a recovery, an entry of `Recoveries` that ended with `members`."""
    if entry["ranks"]:
        own = re.compile(rf"^rank ({'|'.join(map(str, entry['ranks']))}):? ")
        causes = "; ".join(own.sub("", cause) for cause in entry["cause"].split("; "))
        what = f"{_numbers(entry['ranks'])} failed ({causes})"
    else:
        what = f"a step failed ({entry['cause']})"
    back = f", ROLLED BACK to step {entry['rolled_back_to']}" if "rolled_back_to" in entry else ""
    took = f" in {entry['mttr_ms']:.0f} ms" if entry["mttr_ms"] is not None else ""
    return f"epoch {entry['epoch']}: {what}; resumed at step {entry['step']}{back} on {_numbers(sorted(members))}{took}"


def reconfigured(epoch: int, before: Collection[int], fields: Fields) -> str | None:
    """Return the line of an `agreed` event if members joined, rejoined or were drained since `before`; else None."""
    back = fields.get("back", [])
    joined = sorted(set(fields["members"]) - set(before) - set(back))
    changes = [f"{_numbers(ranks)} {verb}" for ranks, verb in (
        (joined, "joined"), (back, "rejoined with the state that they had"), (fields.get("left", []), "left as asked"),
    ) if ranks]  # fmt: skip
    if not changes:
        return None
    return f"epoch {epoch}: {', '.join(changes)}; resumes at step {fields['step']} on {_numbers(fields['members'])}"


def _fault(epoch: int, fields: Fields) -> str:
    if fields["fault"] == "slow":
        slow = f"rank {fields['rank']} runs at {fields['speed']:g} of its speed from step {fields['step']} on"
        return f"injected fault: {slow}"
    if fields["fault"] == "join":
        return f"injected fault: a process starts, which joins as rank {fields['rank']}"
    if fields["fault"] == "leave":
        return (
            f"injected fault: rank {fields['rank']} is asked to leave in step {fields['step']}, phase {fields['phase']}"
        )
    lasts = f", for {fields['seconds']:g} s" if "seconds" in fields else ""
    where = f"step {fields['step']}, phase {fields['phase']}"
    return f"injected fault: {fields['fault']} of rank {fields['rank']} in {where}{lasts}"


def _left(epoch: int, fields: Fields) -> str:
    return fields["cause"]


def _must_stay(epoch: int, fields: Fields) -> str:
    return f"rank {fields['rank']} was told to leave, and cannot: {fields['reason']}"


def _joined(epoch: int, fields: Fields) -> str:
    return f"epoch {epoch}: rank {fields['rank']} joined at step {fields['step']}"


def _detected(epoch: int, fields: Fields) -> str:
    return f"epoch {epoch}: failure detected: {fields['cause']}"


def _stopping(epoch: int, fields: Fields) -> str:
    return f"epoch {epoch}: planned reconfiguration: {fields['cause']}"


def _called_off(epoch: int, fields: Fields) -> str:
    return f"epoch {epoch}: planned reconfiguration cancelled: {fields['cause']}"


def _stopped(epoch: int, fields: Fields) -> str:
    return f"{_numbers(fields['members'])} stopped and reported"


def _agreed(epoch: int, fields: Fields) -> str:
    redone = fields["steps_redone"]
    again = f", {redone} step{'s' if redone != 1 else ''} replayed" if redone else ", no step replayed"
    again = "" if redone is None else again
    back = f", ROLLED BACK to step {fields['rolled_back_to']}" if "rolled_back_to" in fields else ""
    who = _numbers(fields["members"])
    left = f", without {_numbers(fields['left'])}, which left as asked" if fields.get("left") else ""
    why = "" if fields["how"] == "done again" else f" ({fields['why']})"
    returned = f"; {_numbers(fields['back'])} rejoined with the state that they had" if fields.get("back") else ""
    return f"epoch {epoch}: {who} resume at step {fields['step']}{left}{again}{back}{why}{returned}"


def _planned(epoch: int, fields: Fields) -> str:
    if "plan_ms" not in fields:
        return f"epoch {epoch}: planned"
    changes = "".join(f"\n    {line}" for line in fields["lines"])
    return f"epoch {epoch}: planned in {fields['plan_ms']:.1f} ms: {fields['reason']}{changes}"


def _slowed(epoch: int, fields: Fields) -> str:
    tried = set(map(str, fields.get("tried", ())))
    found = [f"rank {rank} runs at speed {speed:g}" for rank, speed in fields["speeds"].items() if rank not in tried]
    parts = [f"measured: {', '.join(found)}; work is rebalanced"] if found else []
    parts += [
        f"rank {rank}, which had no work because it was slow, gets a little on probation, at speed {speed:g}"
        for rank, speed in fields["speeds"].items()
        if rank in tried
    ]
    return f"epoch {epoch}: {'; '.join(parts)}"


def _edited(epoch: int, fields: Fields) -> str:
    return f"epoch {epoch}: edited in place in {fields['ms']:.1f} ms"


def _transferred(epoch: int, fields: Fields) -> str:
    behind = fields.get("bytes_behind", 0) / 2**20
    copies = f"; {behind:.2f} MiB of replicas sync in the background" if behind else ""
    return f"epoch {epoch}: moved {fields['bytes'] / 2**20:.2f} MiB of parameters in {fields['ms']:.1f} ms{copies}"


def _caught_up(epoch: int, fields: Fields) -> str:
    taken = fields["bytes"] / 2**20
    return f"epoch {epoch}: rank {fields['rank']}: replicas are in sync; {taken:.2f} MiB were buffered at most"


def _resumed(epoch: int, fields: Fields) -> str:
    return f"epoch {epoch}: step {fields['step']} committed"


def _coordinator(epoch: int, fields: Fields) -> str:
    return f"coordinator failed: {fields['cause']}; another one takes over, training continues"


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
