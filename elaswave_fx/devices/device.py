"""What the runtime asks of a device; each kind of device is one implementation beside this file."""

from collections.abc import Mapping
from typing import Protocol


class Device(Protocol):
    """One device of one rank. A worker calls `set_up` once, after its fork and before any other method."""

    @property
    def name(self) -> str:
        """The name in the configuration, `cpu` for one."""
        ...

    def set_up(self, threads: int, deterministic: bool = False) -> None:
        """Make the device this process's own; `threads` is the number of threads of one operator on a CPU.

        `deterministic`: operators of which torch says that they are not are errors that name them.
        """
        ...

    def memory_peak_bytes(self) -> int:
        """The most memory that this process has used on the device since `set_up`."""
        ...

    def keep(self, step_bytes: int) -> None:
        """Of what steps have freed, have so much at hand for the next ones; what is beyond goes back to the system.
        Called between steps, when it is known what a step of this rank takes."""
        ...

    def memory_total_bytes(self) -> int:
        """The memory of the device; shared with other processes on a CPU."""
        ...

    def fingerprint(self) -> Mapping[str, str]:
        """Return what decides the bits of a result on this device: ranks agree in exact mode only if all values are
        equal."""
        ...
