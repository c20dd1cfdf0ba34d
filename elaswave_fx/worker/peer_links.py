"""The links of a rank to the members of its epochs; an epoch with new members opens the missing ones.

In: the infos of members. Out: links, or `CommError` if a member cannot be reached in time; `lost` then names it.

    links.open(go.infos, timeout_s=5.0);  links.lost()  ->  {3}: rank 3 was not reached, or its link broke
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from elaswave_fx import _native
from elaswave_fx.control.protocol.member_info import MemberInfo


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

    def host(self, rank: int) -> str:
        """The address or host name of a present or former member."""
        return self._hosts.get(rank, "host not known")

    def lost(self) -> set[int]:
        """The ranks whose link is missing or broken."""
        return {*self._endpoint.lost_peers, *self._unlinked.difference(self._endpoint.peers)}
