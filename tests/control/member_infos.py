"""Cards of ranks that listen nowhere."""

from __future__ import annotations

from elaswave_fx.control.protocol.member_info import MemberInfo
from elaswave_fx.plan.work.topology import Rank


def info_of(rank: int) -> MemberInfo:
    """Each on a host of its own."""
    return MemberInfo(Rank(rank), f"host-{rank}", f"host-{rank}", "127.0.0.1", 9000 + rank)
