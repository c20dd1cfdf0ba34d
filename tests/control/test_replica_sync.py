"""What a rank says of replicas that come to it."""

from __future__ import annotations

from elaswave_fx.control.protocol.replica_sync import ReplicaSync
from elaswave_fx.plan.work.box import BoxId

ONE, TWO = BoxId(1), BoxId(2)
NONE, FIRST, SECOND, BOTH = frozenset[BoxId](), frozenset({ONE}), frozenset({TWO}), frozenset({ONE, TWO})


def test_replicas_lag_until_the_engine_says_otherwise() -> None:
    sync = ReplicaSync().next_epoch(BOTH)
    assert sync == ReplicaSync(BOTH, BOTH) == sync.after_step(BOTH, BOTH)
    assert sync.after_step(BOTH, SECOND) == ReplicaSync(BOTH, SECOND)
    assert sync.after_step(SECOND, SECOND).after_step(NONE, NONE) == ReplicaSync()


def test_one_that_is_asked_for_anew_lags_again() -> None:
    assert ReplicaSync().next_epoch(BOTH).after_step(BOTH, NONE).after_step(BOTH, FIRST).lagging == FIRST


def test_of_one_that_was_nearly_in_sync_in_vain_nothing_is_foretold_until_it_counts() -> None:
    sync = ReplicaSync().next_epoch(BOTH).after_step(BOTH, SECOND).next_epoch(BOTH)
    assert sync == ReplicaSync(BOTH, BOTH, FIRST)
    assert sync.after_step(BOTH, NONE).lagging == FIRST and sync.after_step(SECOND, NONE).lagging == NONE
    assert sync.next_epoch(FIRST).suppressed == FIRST, "nor after the next epoch"
    assert sync.after_step(SECOND, SECOND).next_epoch(BOTH) == ReplicaSync(BOTH, BOTH)
