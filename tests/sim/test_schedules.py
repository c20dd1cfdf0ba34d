"""Random schedules under the checker: the protocol passes, every planted bug is found, equal seeds are equal runs."""

import random
import re
from dataclasses import replace

import pytest

from elaswave_fx.control.protocol.failure_detector import STALLED_FLOOR_S
from elaswave_fx.control.protocol.messages import Prepared
from elaswave_fx.plan.work.spans import Span
from elaswave_fx.plan.work.topology import Rank
from tools.sim.__main__ import campaign, main
from tools.sim.bugs import BUGS
from tools.sim.checker import covers
from tools.sim.faults import UNTOLD_S, Fault, Moment
from tools.sim.frames import VoteCast
from tools.sim.rank_process import Ran
from tools.sim.world import BLOCKED_S, World, run_schedule, trace_schedule

SCHEDULES = 1000

MISSES_ROLLBACK = 101312
"""A rank misses how the others go back to a checkpoint; none of the first thousands has it."""

WITHIN = {
    # Schedules, from seed 0, in which each planted bug must have been found: at most ten times those it took.
    "update_before_commit": 10,
    "two_owners": 10,
    "holder_not_applied": 10,
    "vote_without_base": 10,
    "failed_update_swallowed": 40,
    "stale_frame_accepted": 360,
    "wrong_replica_computed_with": 690,
    "old_base_accepted": 50,
    "promoted_before_in_sync": 250,
    "reader_with_old_parameters": 10,
    "known_commit_dropped": 440,
    "unreachable_taken_for_dead": 400,
    "store_vouched_for_unread": 110,
    "leaver_with_the_last_replica": 1000,
    "missed_epoch_not_seen": 1,
    "commit_not_reported": 10,
    "promoted_replica_not_checked": 10,
    "step_not_finished": 400,
    "step_not_dropped": 20,
    "links_not_advanced": 20,
    "end_of_epoch_not_heard": 20,
    "state_not_restored": 500,
    "parameters_not_gathered": 200,
    "replicas_not_sent": 40,
}

FROM = {
    "missed_epoch_not_seen": MISSES_ROLLBACK,
    "promoted_replica_not_checked": 1490,
    "end_of_epoch_not_heard": 1090,
}
"""Where other seeds than 0 are the first."""


@pytest.mark.parametrize("quarter", range(4))
def test_schedules_keep_every_promise(quarter: int, capsys: pytest.CaptureFixture[str]) -> None:
    size = SCHEDULES // 4
    assert campaign(quarter * size, (quarter + 1) * size, None, jobs=1) == 0, capsys.readouterr().out
    said = capsys.readouterr().out
    # A campaign in which nothing happened would prove nothing.
    for mark in ("rolled forward", "done again", "joining", "replica differs", "standing still", "left", "cannotleave"):
        assert re.search(rf"{mark} [1-9]", said), said


def test_a_rank_that_missed_a_rollback_starts_without_state() -> None:
    assert run_schedule(MISSES_ROLLBACK).violation is None


def test_every_planted_bug_has_a_bound() -> None:
    assert set(WITHIN) == set(BUGS)


@pytest.mark.parametrize("bug", sorted(WITHIN))
def test_the_checker_finds_the_bug(bug: str) -> None:
    first = FROM.get(bug, 0)
    seeds = range(first, first + WITHIN[bug])
    found = next((seed for seed in seeds if run_schedule(seed, BUGS[bug]).violation), None)
    assert found is not None, f"{bug} went unnoticed in {WITHIN[bug]} schedules"


def test_a_seed_is_a_schedule() -> None:
    first, lines = trace_schedule(11)
    again, same = trace_schedule(11)
    assert (first, lines) == (again, same)
    assert first == run_schedule(11)
    assert run_schedule(12) != first


def test_a_failing_seed_prints_the_command_that_repeats_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--seeds", "0:3", "--bug", "update_before_commit"]) == 1
    command = re.search(r"again: python -m tools.sim (.*)", capsys.readouterr().out)
    assert command is not None
    assert main(command.group(1).split()) == 1
    assert "has not voted for it" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("spans", "whole"),
    [
        ([Span(0, 12)], True),
        ([Span(6, 12), Span(0, 6)], True),
        ([Span(0, 6), Span(5, 12)], False),
        ([Span(0, 6), Span(7, 12)], False),
        ([Span(0, 11)], False),
        ([], False),
    ],
)
def test_a_step_is_covered_once(spans: list[Span], whole: bool) -> None:
    assert covers(spans) is whole


def fault(
    kind: str, at: Moment | float, rank: int = 0, lasts_s: float = 0.0, told_s: float = 0.001, dies: bool = False
) -> Fault:
    return Fault(kind, at, Rank(rank), Rank(1), frozenset(), 9, lasts_s, told_s, dies)


@pytest.mark.parametrize("seed", range(20))
def test_without_faults_nobody_is_excluded_and_nothing_is_done_again(seed: int) -> None:
    outcome = World(seed, faults=()).run()
    assert outcome.violation is None and outcome.epochs == 0 and not outcome.said


@pytest.mark.parametrize("seed", range(5))
def test_training_goes_on_while_there_is_no_coordinator(seed: int) -> None:
    outcome = World(seed, faults=(fault("coordinator_crash", 0.06, lasts_s=3.0),)).run()
    assert outcome.violation is None and outcome.epochs == 0
    assert outcome.committed >= 5


@pytest.mark.parametrize("seed", [148, 187, 279, 315, 320])
def test_a_heartbeat_that_comes_after_its_rank_died_opens_no_connection(seed: int) -> None:
    """The connections alone tell of the death; nobody waits for a deadline."""
    draw = random.Random(1)
    at_s = [draw.uniform(0.05, 0.6) for _ in range(seed + 1)][-1]
    outcome = World(seed, faults=(fault("crash", at_s, told_s=UNTOLD_S, dies=True),)).run()
    assert outcome.violation is None
    assert outcome.said["unreachable"] == 1 and "silent" not in outcome.said


@pytest.mark.parametrize("seed", [0, 2, 6, 7, 10])
def test_a_new_coordinator_finds_a_rank_that_hangs_as_soon_as_the_one_before_would_have(seed: int) -> None:
    """How long steps take it hears from the ranks, for it has seen none."""
    away = fault("coordinator_crash", 3.0, lasts_s=1.0)
    outcome = World(seed, faults=(fault("hang", Moment(Ran, 5)), away)).run()
    assert len(outcome.faults) == 2
    assert outcome.violation is None and outcome.said["standing still"] == 1
    assert outcome.simulated_s < 2 * STALLED_FLOOR_S


@pytest.mark.parametrize("seed", [1, 6, 7, 34])
def test_a_hang_is_over_if_everybody_else_was_left_out(seed: int) -> None:
    """The simulator's own promise: one member of the register always gets on."""
    world = World(seed, faults=(fault("one_way", 0.137, lasts_s=2.67), fault("hang", 1.47)))
    outcome = world.run()
    assert outcome.violation is None and outcome.said["stopped"] == 1
    assert world.register.members == (Rank(0),), "the one that hung"


def test_a_replica_that_leads_to_no_known_commit_saves_no_job() -> None:
    """An update fails on the last rank that can bring its box to a step which others know to be committed; a rank that
    was left out before has the state of the step before it."""
    outcome = run_schedule(3004683)
    assert outcome.violation is None and outcome.said["over"] == 1


def test_a_link_keeps_its_order_while_it_is_silent() -> None:
    """A vote waits for the end of one silence, and the next one for the end of another, which is later."""
    assert run_schedule(200263).violation is None


def test_a_coordinator_that_was_superseded_while_it_waited_does_not_end_the_job() -> None:
    """It was stopped, another one took over, and it alone had waited for a replica as long as a job may."""
    assert run_schedule(20005047).violation is None


def test_a_job_that_is_over_does_not_wait_for_one_that_hangs() -> None:
    outcome = run_schedule(1_098_308)
    assert outcome.violation is None and outcome.said["over"] == 1


@pytest.mark.parametrize(("seed", "at_s"), [(1, 2.3), (34, 2.32)])
def test_who_was_left_out_brings_the_last_replicas_back(seed: int, at_s: float) -> None:
    """A rank that was paused for too long, and the one that has gone on without it dies before the next commit."""
    pause, crash = fault("pause", 0.3, rank=1, lasts_s=3.2), fault("crash", at_s, rank=0)
    world = World(seed, faults=(pause, crash), at_least_s=8.0)
    outcome = world.run()
    assert outcome.violation is None and outcome.rollbacks == 0
    assert outcome.said["back"] == 1 and Rank(1) in world.register.members


@pytest.mark.parametrize("seed", range(2, 8))
def test_a_rank_that_is_slow_for_long_gets_less_work(seed: int) -> None:
    slow = fault("slow", 0.1, rank=1, lasts_s=60.0)
    world = World(seed, faults=(replace(slow, keep=2),), at_least_s=0.5)
    outcome = world.run()
    assert outcome.violation is None and "detected" not in outcome.said
    shares = {plan.speeds.get(Rank(1), 1.0) for plan in world.plans.values()}
    assert min(shares) < 0.5, "it was taken for slow"


@pytest.mark.parametrize("seed", range(8))
def test_who_is_told_to_leave_goes_and_nothing_is_done_again(seed: int) -> None:
    """Of two ranks one as of five, whose replicas the others have; the time that it has is not over before."""
    world = World(seed, faults=(fault("leave", 0.06, lasts_s=30.0),), at_least_s=15.0, trace=True)
    outcome = world.run()
    assert outcome.violation is None and outcome.said["left"] == 1 and Rank(0) not in world.register.members
    agreed = [line for line in world.lines or () if "says: Agreed(" in line]
    assert "detected" not in outcome.said and len(agreed) == outcome.said["stopped"] > 0
    assert all("steps_redone=0," in line for line in agreed)


@pytest.mark.parametrize("seed", range(5))
def test_who_leaves_while_there_is_no_coordinator_tells_the_next_one(seed: int) -> None:
    away = fault("coordinator_crash", 0.06, lasts_s=2.0)
    world = World(seed, faults=(away, fault("leave", 0.5, lasts_s=30.0)), at_least_s=15.0)
    outcome = world.run()
    assert outcome.violation is None and outcome.said["left"] == 1 and Rank(0) not in world.register.members


@pytest.mark.parametrize("seed", range(5))
def test_a_stopped_rank_is_excluded_and_ends_when_it_wakes(seed: int) -> None:
    world = World(seed, faults=(fault("pause", 0.06, lasts_s=4.0),))
    outcome = world.run()
    assert outcome.violation is None
    assert outcome.said["silent"] == 1 and outcome.said["ended by itself"] == 1
    assert Rank(0) not in world.register.members


@pytest.mark.parametrize("kind", ["crash", "silent_host"])
@pytest.mark.parametrize("seed", range(3))
def test_a_loss_that_nobody_tells_of_is_found(kind: str, seed: int) -> None:
    world = World(seed, faults=(fault(kind, 0.06, lasts_s=60.0, told_s=UNTOLD_S, dies=True),))
    outcome = world.run()
    assert outcome.violation is None and outcome.epochs >= 1 and "exited" not in outcome.said
    assert Rank(0) not in world.register.members


@pytest.mark.parametrize("seed", [0, 2, 4, 8])
def test_a_host_that_dies_untold_while_there_is_no_coordinator_is_left_out_by_the_next_one(seed: int) -> None:
    """Of two ranks the others accuse one; neither has ever spoken to the coordinator that finds them."""
    away = fault("coordinator_crash", 0.06, lasts_s=3.0)
    world = World(seed, faults=(away, fault("host", 0.5, rank=1, told_s=UNTOLD_S)))
    outcome = world.run()
    assert outcome.violation is None and outcome.said["unreachable"] == 1 and "silent" not in outcome.said
    assert not {Rank(0), Rank(1)}.intersection(world.register.members)


@pytest.mark.parametrize("kind", ["silent_link", "one_way"])
@pytest.mark.parametrize("seed", range(3))
def test_a_link_that_falls_silent_costs_at_most_the_wait_for_it(kind: str, seed: int) -> None:
    outcome = World(seed, faults=(fault(kind, 0.06, lasts_s=20.0),)).run()
    assert outcome.violation is None and outcome.committed >= 4


@pytest.mark.parametrize("seed", range(5))
def test_a_crash_at_a_vote_and_another_during_the_recovery(seed: int) -> None:
    outcome = World(seed, faults=(fault("crash", Moment(VoteCast, 4)), fault("crash", Moment(Prepared, 1), 1))).run()
    assert outcome.violation is None and outcome.epochs >= 1


@pytest.mark.parametrize("seed", [2, 3, 4, 5, 6])  # the rank that is struck in schedule 0 keeps no box
def test_an_update_that_fails_ends_its_rank_and_loses_nothing(seed: int) -> None:
    outcome = World(seed, faults=(fault("update_fails", Moment(Ran, 12)),)).run()
    assert outcome.violation is None and outcome.said["ended by itself"] == 1 and outcome.epochs >= 1
    assert outcome.rollbacks == 0


@pytest.mark.parametrize("seed", [18, 23, 47, 52])
def test_when_all_replicas_are_gone_a_job_ends_unless_it_has_a_checkpoint(seed: int) -> None:
    """Ranks 0 and 2 hold each other's boxes. Nothing is saved when they die early; nobody tells that they died late."""
    early, late = (tuple(fault("crash", 0.2, rank=r, told_s=told_s) for r in (0, 2)) for told_s in (0.001, UNTOLD_S))
    outcome = World(seed, faults=early).run()
    assert outcome.violation is None and outcome.said["over"] == 1 and outcome.epochs == 0
    world = World(seed, faults=late)
    outcome = world.run()
    assert outcome.violation is None and outcome.said["waiting"] == 1
    helped = world.patience_s > BLOCKED_S  # by the user, who allows to go back
    assert (outcome.rollbacks, outcome.said.get("waited in vain", 0)) == ((1, 0) if helped else (0, 1))


def test_a_corrupted_replica_costs_the_step_that_computed_with_it() -> None:
    outcome = World(3, faults=(fault("corrupt", 0.06),)).run()
    assert outcome.violation is None and outcome.said["replica differs"] == 1 and outcome.said["done again"] == 1
