"""The end of a process, noticed before the kernel has closed its sockets; contract in `native/liveness/liveness.h`."""

from typing import final

@final
class LivenessTable:
    """Made by a launcher before it forks.

    Raises `RuntimeError` when the system refuses memory or a thread, `IndexError` for a slot that is not there.
    """

    def __init__(self, slots: int) -> None: ...
    def hold(self, slot: int) -> None:
        """In the process that is to be watched: until it ends. Raises `RuntimeError` if another one holds the slot."""

    def watch(self, slot: int) -> None:
        """In the launcher, after the fork: the end of the slot's process will be told, once."""

    def fileno(self) -> int:
        """Readable while `ended` has something to say."""

    def ended(self) -> list[int]:
        """The slots whose processes have ended since the last call."""
