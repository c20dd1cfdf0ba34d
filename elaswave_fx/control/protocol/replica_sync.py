"""Sync state of the replicas that a rank gets in an epoch, as reported to the coordinator. Pure.

ReplicaSync().next_epoch({3, 5})  ->  syncing {3, 5}, lagging {3, 5}: their states must arrive first
    .after_step({3, 5}, {5})      ->  syncing {3, 5}, lagging {5}: box 3 is in sync after the next step, unless delayed
    .next_epoch({3})              ->  syncing {3}, lagging {3}, suppressed {3}: it was delayed; lagging until in sync
"""

from __future__ import annotations

from dataclasses import dataclass

from elaswave_fx.plan.work.box import BoxId

Boxes = frozenset[BoxId]


@dataclass(frozen=True, slots=True)
class ReplicaSync:
    """`syncing`: boxes whose replica here is not in sync. `lagging`: those not expected to be after the next step.
    `suppressed`: those that were nearly in sync when an earlier epoch ended; they are reported as lagging until
    they are in sync, so that no second planned reconfiguration comes too early."""

    syncing: Boxes = frozenset()
    lagging: Boxes = frozenset()
    suppressed: Boxes = frozenset()

    def next_epoch(self, syncing: Boxes) -> ReplicaSync:
        """Return the state at the start of an epoch in which these boxes must be synced."""
        return ReplicaSync(syncing, syncing, syncing & (self.suppressed | (self.syncing - self.lagging)))

    def after_step(self, syncing: Boxes, lagging: Boxes) -> ReplicaSync:
        """Return the state after a step, as the engine reports it."""
        syncing = self.syncing & syncing
        suppressed = self.suppressed & syncing
        return ReplicaSync(syncing, (lagging & syncing) | suppressed, suppressed)
