"""A watchdog in the parent process for a child's calls that may never return.

A process can end a hung call only while its other threads run. A call that holds the interpreter's lock, such as a read
of a mapped file whose server is down, stops them all. Then only the parent can report the cause.

    dog = Watchdog()                                   # in the parent, before it forks
    dog.guard()                                        # in the child
    expect(120, "sample 7 has not been read after 60 s"); …; fulfilled()
    dog.overdue(time.monotonic())                      # in the parent  ->  "sample 7 has not …" after 120 s, else None
"""

from __future__ import annotations

import mmap
import struct

_LENGTH = struct.Struct("<I")
"""The length of the call's text; 0 while no call is in progress and while the fields after it are written."""

_CALL = struct.Struct("<Qd")
"""The number of the call and its limit in seconds. The text follows."""

_TEXT_AT = _LENGTH.size + _CALL.size

_BYTES = 1024

_LONGEST_LOOK_S = 2.0
"""The most that counts between two looks. In a longer gap this process was stopped, and maybe the child too."""

_guards: list[Watchdog] = []
"""The watchdog of this process, if it has one."""


class Waited:
    """The time for which a condition has been waited for, by repeated looks. A pause of the looking process, such as
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
        """The text of the call that exceeds its limit, or None. The parent must call this at least every second."""
        seen = self._memory[:]
        if seen != self._memory[:]:
            return None  # The child wrote between the two reads: the call is new.
        (length,) = _LENGTH.unpack_from(seen)
        number, limit_s = _CALL.unpack_from(seen, _LENGTH.size)
        if not length or self._waited.look(number, now) < limit_s:
            return None
        return seen[_TEXT_AT : _TEXT_AT + length].decode(errors="replace")

    def write(self, limit_s: float, text: str) -> None:
        """The child's side: a call begins or, if `text` is empty, has returned.

        The child may be stopped between any two of these lines, for longer than the parent's two reads take. So the
        length is 0 from before the first field changes until the last has its new value.
        """
        self._number += 1
        words = text.encode()[: _BYTES - _TEXT_AT]
        _LENGTH.pack_into(self._memory, 0, 0)
        _CALL.pack_into(self._memory, _LENGTH.size, self._number, limit_s)
        self._memory[_TEXT_AT : _TEXT_AT + len(words)] = words
        _LENGTH.pack_into(self._memory, 0, len(words))


def expect(limit_s: float, text: str) -> None:
    """Announce a call that must return within `limit_s`; `text` is the error if it does not."""
    for dog in _guards:
        dog.write(limit_s, text)


def fulfilled() -> None:
    for dog in _guards:
        dog.write(0.0, "")
