"""The links of a rank to the members of its epochs; an epoch with new members opens the missing ones.

In: the infos of members. Out: links, or `CommError` if a member cannot be reached in time; `lost` then names it.

    link_members(address, info, links, timeout_s=180.0, joins=False)
    links.open(go.infos, timeout_s=5.0);  links.lost()  ->  {3}: rank 3 was not reached, or its link broke
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Sequence

from elaswave_fx import _native
from elaswave_fx.control.agent.ask_to_join import asking, await_members
from elaswave_fx.control.protocol.member_info import MemberInfo
from elaswave_fx.control.wire import ControlAddress
from elaswave_fx.errors import CommError

ATTEMPT_S, AGAIN_S = 4.0, 0.5
"""Timeout of one attempt to open all links, and pause before the next: a rank that has died is no member by then."""


def link_members(address: ControlAddress, info: MemberInfo, links: PeerLinks, timeout_s: float, *, joins: bool) -> None:
    """Register a rank with the coordinator and open a link to each member. Members, and the coordinator that knew them,
    may be lost meanwhile. `joins`: it is no member itself yet. Raises `CommError` after the timeout, `ConfigError` if
    it is refused."""
    by_s = time.monotonic() + timeout_s
    with asking(address) as line:
        while True:
            infos = await_members(line, info, by_s, links.peers)
            if joins:
                infos = [each for each in infos if each.number < info.number]  # later ones dial it once it is a member
            left_s = max(0.0, by_s - time.monotonic())
            is_last = left_s < 2 * ATTEMPT_S
            try:
                return links.open(infos, left_s if is_last else ATTEMPT_S, anew=[each.number for each in infos])
            except CommError:
                if is_last:
                    raise
            time.sleep(AGAIN_S)


class PeerLinks:
    """The links of a rank. `open` is for the main thread; any thread may call `lost`."""

    def __init__(self, endpoint: _native.Endpoint) -> None:
        self._endpoint = endpoint
        self._hosts: dict[int, str] = {}
        self._unlinked: frozenset[int] = frozenset()  # ranks without a link at the last `open`

    def open(self, infos: Iterable[MemberInfo], timeout_s: float, anew: Collection[int] = ()) -> None:
        """Open links to all ranks that never had one, and to ranks in `anew` whose link is known to be broken; other
        broken links are mended elsewhere. Raises `CommError`."""
        lost = (rank for rank in self._endpoint.lost_peers if rank not in anew)
        known = {self._endpoint.rank, *self._endpoint.peers, *lost}
        missing = {info.number: (info.host, info.port, info.memory_domain) for info in infos}
        self._hosts |= {int(rank): host for rank, (host, *_) in missing.items()}
        missing = {int(rank): place for rank, place in missing.items() if rank not in known}
        self._unlinked = frozenset(missing)
        self._endpoint.connect(missing, timeout_s)

    @property
    def peers(self) -> Sequence[int]:
        """The ranks to which there are links."""
        return self._endpoint.peers

    def host(self, rank: int) -> str:
        """The address or host name of a present or former member."""
        return self._hosts.get(rank, "host not known")

    def lost(self) -> set[int]:
        """The ranks whose link is missing or broken."""
        return {*self._endpoint.lost_peers, *self._unlinked.difference(self._endpoint.peers)}
