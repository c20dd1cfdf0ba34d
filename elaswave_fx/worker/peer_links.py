"""The links of a rank to the members of its epochs: those that are missing are opened when an epoch brings new members.

In: the infos of members. Out: links, or `CommError` when somebody cannot be reached in time; whoever was not is known.

    links.open(go.infos, timeout_s=5.0);  links.lost()  ->  {3}: rank 3 was not reached, or its link broke
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from elaswave_fx import _native
from elaswave_fx.control.protocol.member_info import MemberInfo


class PeerLinks:
    """`open` is the main thread's; `lost` may be called from any."""

    def __init__(self, endpoint: _native.Endpoint) -> None:
        self._endpoint = endpoint
        self._hosts: dict[int, str] = {}
        self._unlinked: frozenset[int] = frozenset()  # These had no link when they were looked for last.

    def open(self, infos: Iterable[MemberInfo], timeout_s: float, anew: Collection[int] = ()) -> None:
        """A link to everybody to whom there has been none, and to those of `anew` to whom it is known to be over; other
        broken ones are mended elsewhere. Raises `CommError`."""
        lost = (rank for rank in self._endpoint.lost_peers if rank not in anew)
        known = {self._endpoint.rank, *self._endpoint.peers, *lost}
        missing = {info.number: (info.host, info.port, info.memory_domain) for info in infos}
        self._hosts |= {int(rank): host for rank, (host, *_) in missing.items()}
        missing = {int(rank): place for rank, place in missing.items() if rank not in known}
        self._unlinked = frozenset(missing)
        self._endpoint.connect(missing, timeout_s)

    def host(self, rank: int) -> str:
        """The address or the name of the host of a rank that has been a member, as others reach it."""
        return self._hosts.get(rank, "host not known")

    def lost(self) -> set[int]:
        """The ranks to which there should be a link, and is none."""
        return {*self._endpoint.lost_peers, *self._unlinked.difference(self._endpoint.peers)}
