"""The commit machine as Python sees it; its rules are tested in `native/tests/test_commit.cc`."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest
import torch  # noqa: F401 - the module finds torch's libraries loaded

from elaswave_fx._native import StepMachine
from elaswave_fx.errors import ExecError

if TYPE_CHECKING:
    from elaswave_fx._native import BoxRoles, CommitAction

ROLES: list[BoxRoles] = [(0, 0, [1], [0, 1]), (0, 1, [0], [0, 1])]
"""Two boxes of one bucket; each of two ranks owns one and holds the other, both read both."""


def made(rank: int, without: tuple[str, ...] = ()) -> StepMachine:
    machine = StepMachine(rank, without=without)
    assert machine.install(0, [0, 1], ROLES) == ()
    for box in (0, 1):
        machine.load(box, 100 + box)
    return machine


def voted(machine: StepMachine) -> tuple[CommitAction, ...]:
    """Rank 0 up to its vote."""
    assert machine.begin_step() == (("expect_record", 1, 1, None, 1),)
    assert machine.bucket_reduced(0) == (("expect_part", 0, 1, None, 1), ("send_part", 1, 1, None, 1))
    assert machine.part_arrived(0, 1) == (("sum", 0, None, None, 1), ("send_record", 0, 1, None, 1))
    assert not machine.ready_to_vote() and machine.awaited == 1
    assert machine.record_arrived(1, 0, 101, True) == ()
    assert machine.ready_to_vote()
    return machine.cast_vote()


def test_a_step() -> None:
    machine = made(0)
    assert voted(machine) == (("send_vote", None, 1, None, 1), ("expect_vote", None, 1, None, 1))
    assert machine.vote_arrived(1) == (("commit", None, None, None, 1),)
    assert machine.commit() == () and machine.committed
    assert machine.update_bucket(0) == (("update", 0, None, 1, 1),)
    assert machine.updated(0, 200) == (("write_parameters", 0, None, None, 1),)
    assert machine.gather(0) == ()
    assert machine.update_replicas() == (("update", 1, None, 1, 1),)
    assert machine.updated(1, 2**64 - 1) == (("write_parameters", 1, None, None, 1),)
    machine.end_step()
    assert machine.holdings == [(0, 1, 200, False), (1, 1, 2**64 - 1, False)]
    asked = {name for name, count in machine.consulted.items() if count}
    assert asked == set(machine.consulted) - {
        "older_frames_are_dropped", "failed_update_drops_state", "replica_in_sync"
    }  # fmt: skip
    assert [machine.admit(epoch) for epoch in (0, 1)] == ["deliver", "hold"]


def test_an_update_that_fails_is_finished_without_its_box() -> None:
    machine = made(0)
    voted(machine)
    assert machine.leave() == () and machine.pending
    assert [held[3] for held in machine.holdings] == [True, True]
    assert machine.finish([0, 1]) == (("commit", None, None, None, 1),)
    assert machine.commit() == (("update", 0, None, 1, 1), ("update", 1, None, 1, 1))
    assert machine.update_failed(0) == (("drop_state", 0, None, None, 1),)
    assert machine.consulted["failed_update_drops_state"] == 1
    machine.updated(1, 300)
    machine.end_step()
    assert machine.holdings == [(1, 1, 300, False)] and machine.syncing == [0] and machine.stale(0)


def test_rules_can_be_taken_away() -> None:
    machine = made(0, without=("commit_needs_all_votes",))
    assert voted(machine)[-1] == ("commit", None, None, None, 1)
    with pytest.raises(ExecError, match="there is no guard of_mine"):
        StepMachine(0, without=["of_mine"])
    with pytest.raises(ExecError, match='copy mode "twice" is neither log nor state'):
        StepMachine(0, "twice")


@pytest.mark.parametrize("box", [2, -1])
def test_what_there_is_not(box: int) -> None:
    with pytest.raises(ExecError, match=re.escape(f"there is no box {box}")):
        made(0).state(box)
    with pytest.raises(ExecError, match="rank 2: is no member of epoch 1"):
        StepMachine(2).install(1, [0, 1], ROLES)
    with pytest.raises(ExecError, match="box 0: its owner, rank 0, cannot hold it too"):
        StepMachine(0).install(1, [0, 1], [(0, 0, [0], [0])])
