"""Ranks open links to all members: those of a start by one coordinator or the next, a joiner to those before it."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
import torch  # noqa: F401  (its libraries, for the extension)

from elaswave_fx import _native
from elaswave_fx.control.agent.ask_to_join import asking
from elaswave_fx.control.protocol.member_info import MemberInfo
from elaswave_fx.control.protocol.messages import Members, MembersRequest
from elaswave_fx.errors import CommError
from elaswave_fx.worker import peer_links
from elaswave_fx.worker.peer_links import PeerLinks, link_members
from tests.control.member_infos import info_of
from tests.control.toy_job import WAIT_S, ToyJob


class Ranks:
    """A coordinator of three ranks, and their endpoints."""

    def __init__(self, folder: Path, threads: ThreadPoolExecutor) -> None:
        self.job, self._threads = ToyJob(folder, world=3, steps=1), threads
        self._endpoints = [
            _native.Endpoint(
                rank=rank, token=self.job.address.token, listen_host="127.0.0.1", port=0, host_id=f"host-{rank}",
                silence_timeout_s=WAIT_S,
            )
            for rank in range(3)
        ]  # fmt: skip
        self.infos = [replace(info_of(rank), port=self._endpoints[rank].port) for rank in range(3)]
        self.links = [PeerLinks(endpoint) for endpoint in self._endpoints]

    def close(self) -> None:
        for endpoint in self._endpoints:
            endpoint.close()

    def opens(self, rank: int, timeout_s: float = WAIT_S, joins: bool = False) -> Future[None]:
        info, links = self.infos[rank], self.links[rank]
        return self._threads.submit(link_members, self.job.address, info, links, timeout_s, joins=joins)

    def register(self, info: MemberInfo) -> Members:
        with asking(self.job.address) as line:
            answer = line.ask(MembersRequest(info), WAIT_S)
        assert isinstance(answer, Members)
        return answer


@pytest.fixture
def ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Ranks]:
    monkeypatch.setattr(peer_links, "ATTEMPT_S", 0.3)
    monkeypatch.setattr(peer_links, "AGAIN_S", 0.01)
    with ExitStack() as stack:
        threads = ThreadPoolExecutor(3)
        stack.callback(threads.shutdown, wait=False, cancel_futures=True)
        found = Ranks(tmp_path, threads)
        stack.callback(found.close)
        stack.push(found.job.__exit__)
        found.job.start_coordinator()
        yield found


def peers(ranks: Ranks) -> list[list[int]]:
    return [sorted(links.peers) for links in ranks.links]


def test_ranks_of_a_start_have_links_to_each_other(ranks: Ranks) -> None:
    for opened in [ranks.opens(rank) for rank in (2, 0, 1)]:
        opened.result(WAIT_S)
    assert peers(ranks) == [[1, 2], [0, 2], [0, 1]]


def test_ranks_register_again_until_they_have_links(ranks: Ranks) -> None:
    """Two know all and wait for the third one to dial them, which the first coordinator does not answer any more."""
    ranks.register(ranks.infos[2])
    early = [ranks.opens(rank) for rank in (0, 1)]
    ranks.job.until(lambda: peers(ranks)[:2] == [[1], [0]], "two have a link")
    ranks.job.kill_coordinator()
    ranks.job.start_coordinator()
    ranks.opens(2).result(WAIT_S)
    for opened in early:
        opened.result(WAIT_S)
    assert peers(ranks) == [[1, 2], [0, 2], [0, 1]]


def test_who_cannot_be_reached_is_named_in_the_end(ranks: Ranks) -> None:
    ranks.register(ranks.infos[1])
    ranks.register(ranks.infos[2])
    with pytest.raises(CommError, match=r"no link by the deadline with rank 1 \(127.0.0.1:\d+\), rank 2"):
        ranks.opens(0, timeout_s=0.8).result(WAIT_S)


def test_a_joiner_waits_for_no_later_rank(ranks: Ranks) -> None:
    """That one dials it at the beginning of their epoch, and not before."""
    ranks.register(ranks.infos[0])
    ranks.register(ranks.infos[2])
    ranks.opens(1, joins=True).result(WAIT_S)
    assert sorted(ranks.links[1].peers) == [0]
    assert ranks.links[1].lost() == set()
