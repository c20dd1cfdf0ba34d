"""Copies that come to a rank in an epoch, and what it can say of them to the coordinator.

In: what the engine says after each step. Out: the same, with what was foretold in vain. Pure.

    ComingCopies().anew({3, 5})  ->  behind {3, 5}, far {3, 5}: their states have to come first
    .seen({3, 5}, {5})           ->  behind {3, 5}, far {5}: box 3 counts after the next step, unless something is late
    .anew({3})                   ->  behind {3}, far {3}, missed {3}: something was; now it is far until it counts
"""

from __future__ import annotations

from dataclasses import dataclass

from elaswave_fx.plan.work.box import BoxId

Boxes = frozenset[BoxId]


@dataclass(frozen=True, slots=True)
class ComingCopies:
    """`behind`: boxes of which the copy does not count yet. `far`: those of them of which it will not after the next
    step either. `missed`: those of them that were close in an epoch before, which ended without them: nothing is
    foretold of these, so that no second stop comes too early for the same box."""

    behind: Boxes = frozenset()
    far: Boxes = frozenset()
    missed: Boxes = frozenset()

    def anew(self, behind: Boxes) -> ComingCopies:
        """In another epoch, at whose beginning these boxes have to come."""
        return ComingCopies(behind, behind, behind & (self.missed | (self.behind - self.far)))

    def seen(self, behind: Boxes, far: Boxes) -> ComingCopies:
        """After a step, by the engine's word."""
        behind = self.behind & behind
        missed = self.missed & behind
        return ComingCopies(behind, (far & behind) | missed, missed)
