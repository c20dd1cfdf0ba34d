"""A watch over calls that may never return, kept by the parent of the process that makes them.

A process can end a call that hangs only while its other threads run. One that holds the interpreter's lock, such as a
read of a mapped file whose server is gone, stops them all, and then the parent alone can say what has happened.

    dog = Watchdog()                                   # in the parent, before it forks
    dog.guard()                                        # in the child
    expect(120, "sample 7 has not been read after 60 s"); …; fulfilled()
    dog.overdue(time.monotonic())                      # in the parent  ->  "sample 7 has not …" after 120 s, else None
"""

from __future__ import annotations

import mmap
import struct

_LENGTH = struct.Struct("<I")
"""The length of the call's text. It is 0 while no call is under way and while the fields behind it are written."""

_CALL = struct.Struct("<Qd")
"""The number of the call and its limit in seconds. The text follows."""

_TEXT_AT = _LENGTH.size + _CALL.size

_BYTES = 1024

_LONGEST_LOOK_S = 2.0
"""So much counts at most between two looks; whoever did not look for longer was stopped, and so were others maybe."""

_guards: list[Watchdog] = []
"""The watchdog of this process, if it has one."""


class Waited:
    """How long something has been waited for, by whoever looks again and again: the time in which nobody did, as after
    Ctrl-Z, does not count."""

    def __init__(self) -> None:
        self._what: object = None
        self._seconds, self._looked_s = 0.0, 0.0

    def look(self, what: object, now: float) -> float:
        """The seconds for which `what` has been seen; 0.0 if it is seen for the first time."""
        self._seconds = self._seconds + min(now - self._looked_s, _LONGEST_LOOK_S) if what == self._what else 0.0
        self._what, self._looked_s = what, now
        return self._seconds


class Watchdog:
    """The parent's watch over one child. It is made before the fork, since both share its memory."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, _BYTES)
        self._waited = Waited()
        self._number = 0

    def guard(self) -> None:
        """Watch over this process, the child."""
        _guards[:] = [self]

    def overdue(self, now: float) -> str | None:
        """The text of a call that takes longer than its limit. The parent asks every second or more often."""
        seen = self._memory[:]
        if seen != self._memory[:]:
            return None  # The child has written between the two looks: this call is a new one.
        (length,) = _LENGTH.unpack_from(seen)
        number, limit_s = _CALL.unpack_from(seen, _LENGTH.size)
        if not length or self._waited.look(number, now) < limit_s:
            return None
        return seen[_TEXT_AT : _TEXT_AT + length].decode(errors="replace")

    def write(self, limit_s: float, text: str) -> None:
        """The child's side: a call begins or, if `text` is empty, has returned.

        The child may be stopped between any two of these lines, for longer than the parent's two looks take. So the
        length is 0 from before the first field changes until the last has its new value.
        """
        self._number += 1
        words = text.encode()[: _BYTES - _TEXT_AT]
        _LENGTH.pack_into(self._memory, 0, 0)
        _CALL.pack_into(self._memory, _LENGTH.size, self._number, limit_s)
        self._memory[_TEXT_AT : _TEXT_AT + len(words)] = words
        _LENGTH.pack_into(self._memory, 0, len(words))


def expect(limit_s: float, text: str) -> None:
    """A call begins that is to return within `limit_s`; `text` says what has happened if it does not."""
    for dog in _guards:
        dog.write(limit_s, text)


def fulfilled() -> None:
    """The call has returned."""
    for dog in _guards:
        dog.write(0.0, "")
