"""A rank's end of its control stream, for a rank that `faults` may cut off: nothing comes or goes while it is.

In: whether it is cut off now. Out: a `RankSocket` whose stream stays open. What the rank says meanwhile is lost, and
what is said to it arrives afterwards.
"""

from __future__ import annotations

import select
from collections.abc import Callable

from elaswave_fx.control.protocol.member_info import MemberInfo
from elaswave_fx.control.wire import RECONNECT_S_MAX, ControlAddress, Message, RankSocket


class CutSocket(RankSocket):
    """One thread uses it."""

    def __init__(self, address: ControlAddress, info: MemberInfo, is_cut: Callable[[], bool]) -> None:
        super().__init__(address, info)
        self._is_cut = is_cut

    def watch(self, poll: select.poll) -> None:
        if not self._is_cut():
            super().watch(poll)

    def connect(self, now_s: float) -> float | None:
        if self._is_cut() and not self.is_open:
            return now_s + RECONNECT_S_MAX
        return super().connect(now_s)

    def send(self, message: Message) -> None:
        if not self._is_cut():
            super().send(message)

    def receive(self) -> list[Message]:
        return [] if self._is_cut() else super().receive()
