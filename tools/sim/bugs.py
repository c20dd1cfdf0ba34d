"""Protocol bugs, planted one at a time by taking a guard away, or both where one hides the other's absence: the checker
has to find each of them.

In: a name. Out: the `Rules` without that guard. Each guard stands in code that a real run enters: those of a step in
`native/commit/guards.h`, the decision in `control/protocol/decide.py`, reading the store in
`control/coordinator/service.py`, what a rank does and in which order in `control/protocol/training_loop.py`.

    BUGS["update_before_commit"]  ->  the protocol in which a rank's own yes is enough to commit
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from elaswave_fx.control.protocol import do
from elaswave_fx.control.protocol.decide import Decide, Replan, Verdict, decide
from elaswave_fx.control.protocol.register import Register
from elaswave_fx.control.protocol.types import Report
from elaswave_fx.plan.work.box import numbered
from elaswave_fx.plan.work.topology import Rank


def deaf_to_commits(
    register: Register, reports: Mapping[Rank, Report], gone: frozenset[Rank], going: frozenset[Rank], replan: Replan
) -> Verdict:
    """Always drops the step in flight, also if a survivor knows that it was committed."""
    deaf = {rank: replace(report, votes=(), certificates=()) for rank, report in reports.items()}
    return decide(register, deaf, gone, going, replan)


def waits_for_nobody(
    register: Register, reports: Mapping[Rank, Report], gone: frozenset[Rank], going: frozenset[Rank], replan: Replan
) -> Verdict:
    """Takes unreachable for dead: rolls back while the last holder may be alive."""
    return decide(register, reports, gone, going, replan, allow_rollback=True)


def promotes_early(
    register: Register, reports: Mapping[Rank, Report], gone: frozenset[Rank], going: frozenset[Rank], replan: Replan
) -> Verdict:
    """Takes a replica for complete that is still on its way."""
    boxes = register.activation.assignment.boxes
    here = {box: replica for report in reports.values() for box, replica in report.copies.items()}
    believed = {
        rank: replace(
            report,
            copies={box: here[box] for box, each in numbered(boxes) if box in here and rank in each.catching_up}
            | report.copies,
        )
        for rank, report in reports.items()
    }
    return decide(register, believed, gone, going, replan)


def lets_go_at_once(
    register: Register, reports: Mapping[Rank, Report], gone: frozenset[Rank], going: frozenset[Rank], replan: Replan
) -> Verdict:
    """Does not look whether the others have replicas of all that a rank has that leaves."""
    staying = {rank: report for rank, report in reports.items() if rank not in going}
    return decide(register, staying, gone | going, frozenset(), replan)


@dataclass(frozen=True, slots=True)
class Rules:
    """What the simulator runs: the commit machine `without` some of its guards, and the coordinator's decision.
    `store_is_read`: for a rank that asks what the store says; else the coordinator answers with what it knows.
    `leavers_wait`: until the planner can spare them. `misses_are_seen`: by a rank, of epochs that were over before it
    had entered them; else it takes itself for one that comes from the epoch before. `left_out`: requests of the
    training loop that a rank does not carry out, by type, with the result that is sent back instead."""

    without: tuple[str, ...] = ()
    decide: Decide = decide
    store_is_read: bool = True
    leavers_wait: bool = True
    misses_are_seen: bool = True
    left_out: Mapping[type, Any] = field(default_factory=dict)


SOUND = Rules()
"""The protocol as it is."""

BUGS: Mapping[str, Rules] = {
    "update_before_commit": Rules(("commit_needs_all_votes",)),
    "stale_frame_accepted": Rules(("older_frames_are_dropped",)),
    "two_owners": Rules(("only_owner_publishes",)),
    "vote_without_base": Rules(("vote_needs_state_and_record", "digests_are_compared")),
    "holder_not_applied": Rules(("replicas_are_updated",)),
    "wrong_replica_computed_with": Rules(("wrong_replica_ends_step",)),
    "failed_update_swallowed": Rules(("failed_update_drops_state",)),
    "old_base_accepted": Rules(("replica_in_sync",)),
    "reader_with_old_parameters": Rules(("old_parameters_are_stale",)),
    "promoted_before_in_sync": Rules(decide=promotes_early),
    "known_commit_dropped": Rules(decide=deaf_to_commits),
    "unreachable_taken_for_dead": Rules(decide=waits_for_nobody),
    "store_vouched_for_unread": Rules(store_is_read=False),
    "leaver_with_the_last_replica": Rules(decide=lets_go_at_once, leavers_wait=False),
    "missed_epoch_not_seen": Rules(misses_are_seen=False),
    "commit_not_reported": Rules(left_out={do.ReportCommit: None}),
    "promoted_replica_not_checked": Rules(left_out={do.VerifyReplicas: set()}),
    "step_not_finished": Rules(left_out={do.FinishStep: None}),
    "step_not_dropped": Rules(left_out={do.DropStep: None}),
    "links_not_advanced": Rules(left_out={do.AdvanceLinks: None}),
    "end_of_epoch_not_heard": Rules(left_out={do.MustLeave: False}),
    "state_not_restored": Rules(left_out={do.Restore: None}),
    "parameters_not_gathered": Rules(left_out={do.GatherParameters: None}),
    "replicas_not_sent": Rules(left_out={do.SyncReplicas: frozenset()}),
}
