"""What becomes of the step in flight."""

from dataclasses import replace

import pytest

from elaswave_fx.control.protocol.decide import (
    Blocked,
    Proceed,
    Resumption,
    decide,
    unreachable,
    wait_graph_sinks,
    waiting_in_vain,
)
from elaswave_fx.control.protocol.register import Absent, Register, Swap, swap
from elaswave_fx.control.protocol.types import (
    SEED,
    Activation,
    BoxId,
    Certificate,
    Record,
    Replica,
    Report,
    Stamp,
    Term,
    Version,
    Vote,
)
from elaswave_fx.errors import PlanError
from elaswave_fx.plan.work.box import numbered
from elaswave_fx.plan.work.spans import Span, WorkSpan
from elaswave_fx.plan.work.topology import Epoch, Rank
from tests.control.toy_planner import first_assignment, replan

BASE, IN_FLIGHT = Stamp(Version(6), Epoch(3)), Stamp(Version(7), Epoch(3))
CHECKPOINT = Stamp(Version(3), Epoch(1))
NOBODY: frozenset[Rank] = frozenset()


def register() -> Register:
    """Four ranks, one box each, epoch 3, six steps in the ledger."""
    activation = Activation(Epoch(3), first_assignment(4, 1), BASE, BASE, None)
    return Register(Term(1), activation, BASE, Stamp(Version(5), Epoch(3)), None, CHECKPOINT)


def vote(rank: int) -> Vote:
    return Vote(IN_FLIGHT, Rank(rank), (WorkSpan(Span(0, 1), Span(3 * rank, 3 * rank + 3)),))


def reports(*ranks: int, votes: tuple[int, ...] = ()) -> dict[Rank, Report]:
    """Every rank with base and record of each box the assignment gives it."""
    boxes = register().activation.assignment.boxes
    found = {}
    for rank in map(Rank, ranks):
        kept = [box_id for box_id, box in numbered(boxes) if rank in box.replica_ranks]
        replicas = {box: Replica(BASE, 1) for box in kept}
        records = {box: (Record(IN_FLIGHT, (), 1),) for box in kept}
        cast = tuple(vote(v) for v in votes)
        found[rank] = Report(rank, Epoch(3), BASE, replicas, records, cast, (), NOBODY)
    return found


def replica_ranks(box: int) -> set[int]:
    return set(register().activation.assignment.boxes[box].replica_ranks)


def test_replicas_agree_where_all_stand_at_the_version_with_one_digest() -> None:
    def agrees(known: dict[Rank, Report]) -> bool:
        verdict = decide(register(), known, NOBODY, NOBODY, replan)
        assert isinstance(verdict, Proceed)
        return verdict.activation.copies_agree

    def with_replicas(rank: int, replicas: dict[BoxId, Replica]) -> dict[Rank, Report]:
        return known | {Rank(rank): replace(known[Rank(rank)], copies=replicas)}

    known = reports(0, 1, 2, 3)
    replicas = known[Rank(2)].copies
    first = next(iter(replicas))
    assert agrees(known)
    assert not agrees(with_replicas(2, {**replicas, first: Replica(BASE, 2)})), "another digest"
    assert not agrees(with_replicas(2, {box: replica for box, replica in replicas.items() if box != first})), (
        "a replica is gone"
    )
    assert not agrees(reports(0, 1, 2, 3, votes=(0, 1, 2, 3))), "the step is finished first"


def test_all_votes_among_the_survivors_roll_forward() -> None:
    known = reports(0, 1, votes=(0, 1)) | reports(2, votes=(2, 3))
    verdict = decide(register(), known, NOBODY, NOBODY, replan)
    assert isinstance(verdict, Proceed)
    assert verdict.activation.resume == IN_FLIGHT and verdict.activation.previous == BASE
    assert verdict.lines == (Certificate(IN_FLIGHT, tuple(vote(r) for r in range(4))),)


def test_a_missing_vote_drops_the_step_even_with_all_records() -> None:
    verdict = decide(register(), reports(0, 1, 2, votes=(0, 1, 2)), NOBODY, NOBODY, replan)
    assert isinstance(verdict, Proceed)
    assert verdict.activation.resume == BASE and not verdict.lines and not verdict.activation.rollback


def test_a_commit_known_to_one_survivor_is_kept() -> None:
    known = reports(0, 1, 2)
    line = Certificate(IN_FLIGHT, tuple(vote(r) for r in range(4)))
    known[Rank(1)] = replace(known[Rank(1)], committed=IN_FLIGHT, certificates=(line,))
    verdict = decide(register(), known, NOBODY, NOBODY, replan)
    assert isinstance(verdict, Proceed) and verdict.activation.resume == IN_FLIGHT


def test_votes_of_an_older_epoch_prove_nothing() -> None:
    old = tuple(Vote(Stamp(Version(7), Epoch(2)), Rank(r), (WorkSpan(Span(0, 1), Span(0, 3)),)) for r in range(4))
    known = {rank: replace(report, votes=old) for rank, report in reports(0, 1, 2).items()}
    verdict = decide(register(), known, NOBODY, NOBODY, replan)
    assert isinstance(verdict, Proceed) and verdict.activation.resume == BASE


def test_owners_are_made_of_ranks_with_a_replica() -> None:
    verdict = decide(register(), reports(0, 1, 2), frozenset({Rank(3)}), NOBODY, replan)
    assert isinstance(verdict, Proceed)
    for box_id, box in numbered(verdict.activation.assignment.boxes):
        assert box.owner in replica_ranks(box_id)
        assert not set(box.catching_up) & replica_ranks(box_id)


def test_who_is_going_counts_with_what_it_knows_and_not_with_what_it_has() -> None:
    known = reports(0, 1, 2, 3)
    line = Certificate(IN_FLIGHT, tuple(vote(r) for r in range(4)))
    known[Rank(1)] = replace(known[Rank(1)], committed=IN_FLIGHT, certificates=(line,))
    verdict = decide(register(), known, NOBODY, frozenset({Rank(1)}), replan)
    assert isinstance(verdict, Proceed) and verdict.activation.resume == IN_FLIGHT
    assert verdict.activation.assignment.members == (0, 2, 3)
    assert not any(1 in box.replica_ranks for box in verdict.activation.assignment.boxes)
    assert [absent.rank for absent in verdict.absent] == [1], "until it says that it is gone"


def test_who_is_going_and_has_the_last_replica_stays() -> None:
    known = without_box(0) | reports(min(replica_ranks(0)))
    verdict = decide(register(), known, NOBODY, frozenset({Rank(min(replica_ranks(0)))}), replan)
    assert isinstance(verdict, Proceed) and not verdict.activation.rollback
    assert verdict.activation.assignment.members == tuple(sorted(known))


def without_box(box: int) -> dict[Rank, Report]:
    return reports(*(r for r in range(4) if r not in replica_ranks(box)))


def test_the_last_replicas_are_waited_for_while_their_holders_may_live() -> None:
    verdict = decide(register(), without_box(0), NOBODY, NOBODY, replan)
    assert isinstance(verdict, Blocked)
    assert BoxId(0) in verdict.boxes and set(verdict.blockers) == replica_ranks(0)


def test_a_box_that_is_gone_rolls_back_to_the_checkpoint() -> None:
    verdict = decide(register(), without_box(0), frozenset(map(Rank, replica_ranks(0))), NOBODY, replan)
    assert isinstance(verdict, Proceed)
    assert verdict.activation.rollback and verdict.activation.resume == CHECKPOINT
    assert verdict.how is Resumption.BACK and BoxId(0) in verdict.lost


def test_without_a_checkpoint_nobody_begins_again_unless_it_is_allowed() -> None:
    gone = frozenset(map(Rank, replica_ranks(0)))
    bare = replace(register(), checkpoint=SEED)
    with pytest.raises(PlanError, match=r"all replicas of \d+ of \d+ boxes are lost with ranks .*no checkpoint"):
        decide(bare, without_box(0), gone, NOBODY, replan)
    assert isinstance(decide(bare, without_box(0), NOBODY, NOBODY, replan), Blocked), "a holder may be alive"
    verdict = decide(bare, without_box(0), gone, NOBODY, replan, allow_rollback=True)
    assert isinstance(verdict, Proceed) and verdict.activation.resume == SEED


def test_the_user_may_allow_a_rollback_past_ranks_that_may_live() -> None:
    verdict = decide(register(), without_box(0), NOBODY, NOBODY, replan, allow_rollback=True)
    assert isinstance(verdict, Proceed) and verdict.activation.rollback


def test_without_any_member_of_the_epoch_nobody_goes_on_unless_all_are_gone() -> None:
    joiner = Rank(9)
    boxes = {box_id: Replica(BASE, 1) for box_id, _ in numbered(register().activation.assignment.boxes)}
    known = {joiner: Report(joiner, Epoch(2), BASE, boxes, {}, (), (), NOBODY)}
    assert isinstance(decide(register(), known, frozenset({Rank(0)}), NOBODY, replan), Blocked)
    verdict = decide(register(), known, frozenset(map(Rank, range(4))), NOBODY, replan)
    assert isinstance(verdict, Proceed)
    assert verdict.activation.resume == BASE and verdict.how is Resumption.LEDGER


def test_a_rank_left_out_is_remembered_while_its_replicas_are_current() -> None:
    verdict = decide(register(), reports(0, 1, 2), NOBODY, NOBODY, replan)
    assert isinstance(verdict, Proceed)
    (absent,) = verdict.absent
    assert absent.rank == 3 and absent.version == BASE.version
    later = replace(register(), absent=(Absent(Rank(8), frozenset({BoxId(0)}), Version(5)),))
    verdict = decide(later, reports(0, 1, 2, 3), NOBODY, NOBODY, replan)
    assert isinstance(verdict, Proceed) and verdict.absent == ()


def cut(*pairs: tuple[int, int]) -> dict[Rank, Report]:
    known = reports(0, 1, 2, 3)
    for one, other in pairs:
        known[Rank(one)] = replace(known[Rank(one)], broken=known[Rank(one)].broken | {Rank(other)})
    return known


@pytest.mark.parametrize(
    ("pairs", "left_out"),
    [((), set()), (((0, 1),), {1}), (((0, 1), (0, 2), (3, 0)), {0}), (((0, 7),), set())],
)
def test_broken_links_leave_out_as_few_as_possible(pairs: tuple[tuple[int, int], ...], left_out: set[int]) -> None:
    assert unreachable(cut(*pairs)) == left_out


@pytest.mark.parametrize(
    ("waits", "stalled", "blamed"),
    [
        ({0: 1, 1: 2, 2: None}, {0, 1, 2}, {2}),
        ({0: 1, 1: 2, 2: None}, {0, 1}, set()),
        ({0: 1, 1: 0}, {0, 1}, set()),
        ({0: 2, 1: 2, 2: None, 3: None}, {0, 1, 2, 3}, {2, 3}),
    ],
)
def test_the_sink_of_the_wait_for_graph_is_suspected(
    waits: dict[int, int | None], stalled: set[int], blamed: set[int]
) -> None:
    graph = {Rank(r): None if w is None else Rank(w) for r, w in waits.items()}
    assert wait_graph_sinks(graph, frozenset(map(Rank, stalled))) == blamed


@pytest.mark.parametrize(
    ("waits", "stalled", "in_vain"),
    [
        ({0: 1, 1: 2, 2: None}, {0, 1, 2}, {0, 1, 2}),
        ({0: 1, 1: 2, 2: None}, {0, 1}, set()),
        ({0: 1, 1: 0, 2: None}, {0, 1}, {0, 1}),
        ({0: 3, 1: 2, 2: None}, {0, 1}, {0}),
    ],
    ids=["the end hangs", "the end gets on", "a circle", "the end is unheard"],
)
def test_who_waits_for_one_that_gets_on_does_not_wait_in_vain(
    waits: dict[int, int | None], stalled: set[int], in_vain: set[int]
) -> None:
    graph = {Rank(r): None if w is None else Rank(w) for r, w in waits.items()}
    assert waiting_in_vain(graph, frozenset(map(Rank, stalled))) == in_vain


def test_a_swap_needs_the_key_and_may_be_repeated() -> None:
    old = register()
    wanted = Swap(old.key, replace(old, term=Term(2)))
    new, done = swap(old, wanted)
    assert done and new.term == 2
    assert swap(new, wanted) == (new, False)
    late = Swap(old.key, replace(old, term=Term(3)))
    assert swap(new, late) == (new, False)
