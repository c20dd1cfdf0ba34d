"""Protocol bugs, planted one at a time by taking a guard away, or both where one hides the other's absence: the checker
has to find each of them.

In: a name. Out: the `Rules` without that guard. Each guard stands in code that a real run enters: those of a step in
`native/commit/guards.h`, the decision in `control/protocol/decide.py`.

    BUGS["update_before_commit"]  ->  the protocol in which a rank's own yes is enough to commit
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from elaswave_fx.control.protocol.decide import Decide, Replan, Verdict, decide
from elaswave_fx.control.protocol.register import Register
from elaswave_fx.control.protocol.types import Report
from elaswave_fx.plan.topology import Rank


def deaf_to_commits(
    register: Register, reports: Mapping[Rank, Report], gone: frozenset[Rank], replan: Replan
) -> Verdict:
    """Always drops the step in flight, also if a survivor knows that it was committed."""
    deaf = {rank: replace(report, votes=(), certificates=()) for rank, report in reports.items()}
    return decide(register, deaf, gone, replan)


def waits_for_nobody(
    register: Register, reports: Mapping[Rank, Report], gone: frozenset[Rank], replan: Replan
) -> Verdict:
    """Takes unreachable for dead: rolls back while the last holder may be alive."""
    return decide(register, reports, gone, replan, allow_rollback=True)


@dataclass(frozen=True, slots=True)
class Rules:
    """What the simulator runs: the commit machine `without` some of its guards, and the coordinator's decision."""

    without: tuple[str, ...] = ()
    decide: Decide = decide


SOUND = Rules()
"""The protocol as it is."""

BUGS: Mapping[str, Rules] = {
    "update_before_commit": Rules(("commit_needs_all_votes",)),
    "stale_frame_accepted": Rules(("older_frames_are_dropped",)),
    "two_owners": Rules(("only_owner_publishes",)),
    "vote_without_base": Rules(("vote_needs_state_and_record", "digests_are_compared")),
    "holder_not_applied": Rules(("replicas_are_updated",)),
    "wrong_copy_computed_with": Rules(("wrong_copy_ends_step",)),
    "failed_update_swallowed": Rules(("failed_update_drops_state",)),
    "known_commit_dropped": Rules(decide=deaf_to_commits),
    "unreachable_taken_for_dead": Rules(decide=waits_for_nobody),
}
