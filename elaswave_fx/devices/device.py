"""The interface of a device; each module beside this file implements one kind."""

from collections.abc import Mapping
from typing import Protocol


class Device(Protocol):
    """One device of one rank. A worker calls `set_up` once, after its fork and before any other method."""

    @property
    def name(self) -> str:
        """The name in the configuration, such as `cpu`."""
        ...

    def set_up(self, threads: int, deterministic: bool = False) -> None:
        """Make the device this process's own; `threads` is the number of threads of one operator on a CPU.

        `deterministic`: operators that torch declares nondeterministic raise errors that name them.
        """
        ...

    def keep(self, step_bytes: int) -> None:
        """Keep `step_bytes` of freed memory for the next steps and return the rest to the system. Called between steps,
        once the memory of a step is known."""
        ...

    def memory_total_bytes(self) -> int:
        """The memory of the device; shared with other processes on a CPU."""
        ...

    def fingerprint(self) -> Mapping[str, str]:
        """Return everything that decides the bits of a result on this device; in exact mode ranks need equal values."""
        ...
