"""Detection of a process's end before the kernel closes its sockets; contract in `native/liveness/liveness.h`."""

from typing import final

@final
class LivenessTable:
    """The watched processes of a launcher, which makes the table before it forks.

    Raises `RuntimeError` if the system refuses memory or a thread, `IndexError` for an invalid slot.
    """

    def __init__(self, slots: int) -> None: ...
    def hold(self, slot: int) -> None:
        """Hold a slot, in the process to watch, until it ends. Raises `RuntimeError` if another process holds it."""

    def watch(self, slot: int) -> None:
        """Watch a slot, in the launcher and after the fork: the end of its process is reported once."""

    def fileno(self) -> int:
        """Return a descriptor that is readable while `ended` has slots."""

    def ended(self) -> list[int]:
        """Return the slots whose processes have ended since the last call."""
