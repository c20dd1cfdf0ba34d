"""Protocol bugs, planted one at a time by replacing its guard, or both where one hides the other's absence: the checker
has to find each of them.

In: a name. Out: the `Protocol` with that guard broken.

    BUGS["update_before_commit"]  ->  the protocol in which a rank's own yes is enough to commit
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from elaswave_fx.control.protocol import rank_state
from elaswave_fx.control.protocol.decide import Decide, Replan, Verdict, decide
from elaswave_fx.control.protocol.rank_state import RankState
from elaswave_fx.control.protocol.register import Register
from elaswave_fx.control.protocol.step_commit import RULES, Rules
from elaswave_fx.control.protocol.types import Report
from elaswave_fx.plan.box import Box, BoxId
from elaswave_fx.plan.topology import Epoch, Rank


def own_yes_is_enough(state: RankState) -> bool:
    """Does not wait for the others' votes."""
    return (state.next_version, state.rank) in state.votes


def nothing_is_stale(state: RankState, epoch: Epoch) -> bool:
    """Takes frames of every older epoch."""
    return False


def first_holder_owns_too(state: RankState) -> Mapping[BoxId, Box]:
    """After the first change of members, a holder takes itself for the owner as well."""
    kept = state.view.kept if state.view else {}
    late = state.epoch > 0
    return {i: b for i, b in kept.items() if b.owner == state.rank or (late and b.holders[:1] == (state.rank,))}


def records_are_enough(state: RankState) -> bool:
    """Says yes when the records are there, whatever the bases."""
    return all(state.records.get(box_id) for box_id in (state.view.kept if state.view else ()))


def compares_nothing(state: RankState) -> tuple[BoxId, ...]:
    """Does not look at the owner's digests, which would have most wrong bases dropped before the vote."""
    return ()


def only_owners_update(state: RankState) -> BoxId | None:
    """A holder keeps the record and never applies it."""
    due = rank_state.due_update(state)
    return due if state.view is not None and due in state.view.owned else None


def keeps_the_step(state: RankState, boxes: tuple[BoxId, ...]) -> bool:
    """Fetches a wrong copy and goes on with what it has computed from it."""
    return False


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
class Protocol:
    """The guards of both machines, as the simulator runs them."""

    rules: Rules = RULES
    decide: Decide = decide


SOUND = Protocol()
"""The protocol as it is."""

BUGS: Mapping[str, Protocol] = {
    "update_before_commit": Protocol(replace(RULES, is_committed=own_yes_is_enough)),
    "stale_frame_accepted": Protocol(replace(RULES, is_stale=nothing_is_stale)),
    "two_owners": Protocol(replace(RULES, owned=first_holder_owns_too)),
    "vote_without_base": Protocol(replace(RULES, may_vote=records_are_enough, wrong_boxes=compares_nothing)),
    "holder_not_applied": Protocol(replace(RULES, due_update=only_owners_update)),
    "wrong_copy_computed_with": Protocol(replace(RULES, computed_with=keeps_the_step)),
    "known_commit_dropped": Protocol(decide=deaf_to_commits),
    "unreachable_taken_for_dead": Protocol(decide=waits_for_nobody),
}
