"""Ranks without links get the members' infos from the coordinator: all at once, from the next one, or why not."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from elaswave_fx.control.agent.ask_to_join import ask_to_join, asking, await_members
from elaswave_fx.control.protocol.member_info import MemberInfo
from elaswave_fx.control.protocol.messages import Members, MembersRequest
from elaswave_fx.errors import CommError, ConfigError
from elaswave_fx.plan.work.topology import Rank
from tests.control.member_infos import info_of
from tests.control.toy_job import WAIT_S, ToyJob

ALL = tuple(info_of(rank) for rank in range(3))


class Start:
    """A coordinator of three ranks, which come when the test says so."""

    def __init__(self, folder: Path, threads: ThreadPoolExecutor) -> None:
        self.job = ToyJob(folder, world=3, steps=1)
        self._threads = threads

    def comes(self, info: MemberInfo, timeout_s: float = WAIT_S) -> Future[tuple[MemberInfo, ...]]:
        def wait() -> tuple[MemberInfo, ...]:
            with asking(self.job.address) as line:
                return await_members(line, info, time.monotonic() + timeout_s)

        return self._threads.submit(wait)

    def missing(self, info: MemberInfo) -> tuple[Rank, ...]:
        """Of whom the coordinator does not know, once this rank has registered."""
        with asking(self.job.address) as line:
            answer = line.ask(MembersRequest(info), WAIT_S)
        assert isinstance(answer, Members)
        return answer.missing


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    with ExitStack() as stack:
        threads = ThreadPoolExecutor(8)
        stack.callback(threads.shutdown, wait=False, cancel_futures=True)
        found = Start(tmp_path, threads)
        stack.push(found.job.__exit__)
        found.job.start_coordinator()
        yield found


def test_ranks_that_come_one_by_one_learn_of_each_other(start: Start) -> None:
    first = start.comes(ALL[2])
    start.job.until(lambda: start.missing(ALL[0]) == (1,), "two have come")
    assert not first.done()
    last = start.comes(ALL[1])
    assert first.result(WAIT_S) == last.result(WAIT_S) == ALL


def test_who_does_not_come_is_named(start: Start) -> None:
    assert start.missing(ALL[0]) == (1, 2)
    with pytest.raises(CommError, match=r"^ranks 1, 2 have not joined$"):
        start.comes(ALL[0], timeout_s=0.2).result(WAIT_S)
    start.missing(ALL[2])
    with pytest.raises(CommError, match=r"^rank 1 has not joined$"):
        start.comes(ALL[0], timeout_s=0.2).result(WAIT_S)


def test_a_coordinator_that_does_not_answer_is_no_users_error(tmp_path: Path) -> None:
    job = ToyJob(tmp_path, world=3, steps=1)  # its listener alone
    why = r"^tcp://.*: cannot be reached \(it does not answer\)"
    with asking(job.address) as line, pytest.raises(CommError, match=why):
        await_members(line, ALL[0], time.monotonic())
    job.listener.close()


def test_the_next_coordinator_learns_of_them_again(start: Start) -> None:
    """Who has been answered by the first one asks again while it lacks a link; who has all links need not."""
    waiting = start.comes(ALL[0])
    with asking(start.job.address) as line:
        answered = start.comes(ALL[1])
        by_s = time.monotonic() + WAIT_S
        assert await_members(line, ALL[2], by_s) == answered.result(WAIT_S) == waiting.result(WAIT_S) == ALL
        start.job.kill_coordinator()
        start.job.start_coordinator()
        late = start.comes(ALL[0])
        assert start.missing(ALL[1]) in ((2,), (0, 2)) and not late.done()
        start.job.until(lambda: start.missing(ALL[1]) == (2,), "two have come again")
        assert await_members(line, ALL[1], by_s, linked=(2,)) == ALL[:2]
        assert await_members(line, ALL[2], by_s) == late.result(WAIT_S) == ALL


def test_a_coordinator_that_dies_while_ranks_wait(start: Start) -> None:
    waiting = [start.comes(info) for info in ALL[:2]]
    start.job.until(lambda: start.missing(ALL[0]) == (2,), "both are known")
    start.job.kill_coordinator()
    start.job.start_coordinator()
    last = start.comes(ALL[2])
    assert [each.result(WAIT_S) for each in (*waiting, last)] == [ALL] * 3


@pytest.mark.parametrize(
    ("info", "why"),
    [
        (replace(ALL[1], versions={"torch": "1.0"}), r"it has torch 1\.0"),
        (replace(ALL[1], data_digest="ff"), "it reads other data"),
        (info_of(3), "no rank of the job has the number 3"),
        (replace(ALL[0], port=1), "rank 0 is another process already"),
    ],
    ids=["versions", "data", "number", "twice"],
)
def test_who_is_refused_hears_why_at_once(start: Start, info: MemberInfo, why: str) -> None:
    waiting = start.comes(ALL[0])
    start.job.until(lambda: start.missing(ALL[2]) == (1,), "two have come")
    with pytest.raises(ConfigError, match=f"the job refuses this process: {why}"):
        start.comes(info).result(WAIT_S)
    assert start.comes(ALL[1]).result(WAIT_S) == waiting.result(WAIT_S) == ALL


def test_a_joiner_learns_of_the_members_alone(start: Start) -> None:
    assert [each.result(WAIT_S) for each in [start.comes(info) for info in ALL]] == [ALL] * 3
    number = ask_to_join(start.job.address, {}, WAIT_S).number
    assert number == 3 and start.comes(info_of(number)).result(WAIT_S) == ALL
