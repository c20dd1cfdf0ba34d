"""A rank's control socket for the fault `cut`: it transfers nothing while the rank is cut off.

In: whether it is cut off now. Out: a `RankSocket` whose stream stays open. Messages that the rank sends meanwhile are
lost; messages to it arrive afterwards.
"""

from __future__ import annotations

import select
from collections.abc import Callable

from elaswave_fx.control.protocol.member_info import MemberInfo
from elaswave_fx.control.wire import RECONNECT_S_MAX, ControlAddress, Message, RankSocket


class CutSocket(RankSocket):
    """A `RankSocket` with a cut; one thread uses it."""

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
