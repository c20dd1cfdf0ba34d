"""What the coordinator decides, as events for people: detected, waiting, stopped, agreed, planned, over.

In: its state before and after an event, and what it did. Out: (kind, epoch, fields) of lines of `events.jsonl`.

    a report accuses rank 3          ->  ("detected", 4, {"rank": 3, "cause": "rank 0 left the step, accusing 3"})
    the swap of epoch 5 took place   ->  ("agreed", 5, {"members": [0, 1, 2], "step": 118, …}), ("planned", 5, {})
"""

from __future__ import annotations

from typing import Any

from elaswave_fx.control.protocol.coordinator import OVER, PREPARING, STEADY, TAKING, Act, Coordinator
from elaswave_fx.control.protocol.messages import Note
from elaswave_fx.control.protocol.register import Register
from elaswave_fx.control.protocol.types import STOPPED
from elaswave_fx.plan.topology import Rank

Line = tuple[str, int, dict[str, Any]]


class TransitionEvents:
    """Remembers what it has told of the transition under way."""

    def __init__(self) -> None:
        self._told: frozenset[Rank] = frozenset()
        self._why = self._waits = ""
        self._redone = 0

    def events(self, before: Coordinator, after: Coordinator, actions: tuple[Act, ...]) -> list[Line]:
        """What is to be said of one event at the coordinator."""
        notes = [action.text for action in actions if isinstance(action, Note)]
        lines: list[Line] = []
        if after.phase == PREPARING and after.ballot != before.ballot:
            lines += self._detected(before, after, notes)
        if after.phase == PREPARING and after.register is not None and after.proposal is None:
            lines += self._waiting(after.register.epoch, notes)
        if after.proposal is not None and after.proposal is not before.proposal:
            lines += self._foresee(after, notes)
        old, new = before.register, after.register
        if after.phase == STEADY and old is not None and new is not None and new.epoch > old.epoch:
            lines += self._agreed(after, old.members)
        if before.phase == TAKING and after.phase == STEADY and new is not None and new.epoch > 0:
            lines += _found(new)
        if after.phase == OVER and before.phase != OVER:
            lines.append(("over", after.register.epoch if after.register else 0, {"reason": after.over}))
        return lines

    def _detected(self, before: Coordinator, after: Coordinator, notes: list[str]) -> list[Line]:
        """Once per lost rank and transition; nothing for a stop that was planned."""
        register = after.register
        assert register is not None
        cause = notes[0].rsplit(": wanted", 1)[0] if notes else ""
        if after.planned:
            return [("stopping", register.epoch, {"cause": cause})]
        accused = {heard.heartbeat.suspect for heard in after.heard.values() if heard.heartbeat.phase == STOPPED}
        accused |= {report.suspect for report in after.reports.values()}
        lost = [rank for rank in register.members if rank not in after.targets or rank in accused]
        new = [rank for rank in lost if rank not in self._told]
        again = before.phase == PREPARING
        self._told |= frozenset(new)
        if new or not again:
            return [("detected", register.epoch, {"rank": new[0] if new else None, "ranks": new, "cause": cause})]
        return []

    def _waiting(self, epoch: int, notes: list[str]) -> list[Line]:
        """Somebody left out is needed: said once, not with every tick."""
        found = [text for text in notes if "wait for ranks" in text or "copies are needed" in text]
        if not found or found[0] == self._waits:
            return []
        self._waits = found[0]
        return [("waiting", epoch, {"cause": found[0]})]

    def _foresee(self, after: Coordinator, notes: list[str]) -> list[Line]:
        """The proposal of an epoch: all have stopped. Keep why, and how many steps it makes the ranks do again."""
        register, proposal = after.register, after.proposal
        assert register is not None and proposal is not None
        new = proposal.new
        if new.epoch == register.epoch:
            return []
        said = next((text for text in notes if text.startswith(f"epoch {new.epoch}: ")), "")
        self._why = said.removeprefix(f"epoch {new.epoch}: ").removeprefix(f"members {list(new.members)}: ")
        reports = after.reports.values()
        newest = max((report.committed.version for report in reports), default=new.committed.version)
        if new.activation.rollback:
            self._redone = max(0, newest - new.committed.version)
        else:
            # Whoever had committed the last version was in the next step, unless all were to stop before it.
            dropped = all(report.committed == new.committed for report in reports)
            self._redone = int(dropped and not after.planned)
        return [("stopped", new.epoch, {"members": list(new.members)})]

    def _agreed(self, after: Coordinator, before: tuple[Rank, ...]) -> list[Line]:
        register = after.register
        assert register is not None
        fields: dict[str, Any] = {
            "members": list(register.members),
            "lost": [rank for rank in before if rank not in register.members],
            "step": register.activation.resume.version,
            "steps_redone": self._redone,
            "why": self._why,
        }
        if register.activation.rollback and self._redone:  # before the first step there is nothing to go back from
            fields["rolled_back_to"] = register.activation.resume.version
        self._told, self._waits = frozenset(), ""
        return [("agreed", register.epoch, fields), ("planned", register.epoch, {})]


def _found(register: Register) -> list[Line]:
    """The epoch in the store when a coordinator takes over: the one before may have ended between swap and word."""
    resume = register.activation.resume.version
    fields: dict[str, Any] = {
        "members": list(register.members),
        "lost": [],
        "step": resume,
        "steps_redone": 0,
        "why": "found by the coordinator that took over",
    }
    if register.activation.rollback:
        fields["rolled_back_to"] = resume
    return [("agreed", register.epoch, fields), ("planned", register.epoch, {})]
