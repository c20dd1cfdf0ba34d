"""Protocol bugs, planted one at a time by replacing one guard: the checker has to find each of them.

In: a name. Out: the `Rules` with that guard broken.

    BUGS["update_before_commit"]  ->  Rules in which a rank's own yes is enough to commit
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from elaswave_fx.control import rank_state
from elaswave_fx.control.rank_state import RankState
from elaswave_fx.control.step_commit import RULES, Rules
from elaswave_fx.control.words import BoxPlan
from elaswave_fx.plan.topology import Epoch


def own_yes_is_enough(state: RankState) -> bool:
    """Does not wait for the others' votes."""
    return (state.next_version, state.rank) in state.votes


def nothing_is_stale(state: RankState, epoch: Epoch) -> bool:
    """Takes frames of every older epoch."""
    return False


def first_holder_owns_too(state: RankState) -> tuple[BoxPlan, ...]:
    """After the first change of members, a holder takes itself for the owner as well."""
    kept = state.view.kept if state.view else ()
    return tuple(p for p in kept if p.owner == state.rank or (state.epoch > 0 and p.holders[:1] == (state.rank,)))


def records_are_enough(state: RankState) -> bool:
    """Says yes when the records are there, whatever the bases."""
    return all(state.records.get(plan.box) for plan in (state.view.kept if state.view else ()))


def only_owners_update(state: RankState) -> BoxPlan | None:
    """A holder keeps the record and never applies it."""
    due = rank_state.due_update(state)
    return due if due is not None and due.owner == state.rank else None


BUGS: Mapping[str, Rules] = {
    "update_before_commit": replace(RULES, is_committed=own_yes_is_enough),
    "stale_frame_accepted": replace(RULES, is_stale=nothing_is_stale),
    "two_owners": replace(RULES, owned=first_holder_owns_too),
    "vote_without_base": replace(RULES, may_vote=records_are_enough),
    "holder_not_applied": replace(RULES, due_update=only_owners_update),
}
