"""A process's failure domain, and its memory domain, within which memory can be shared.

    here()            ->  Location("machine-e912ca2eb5f5", "machine-e912ca2eb5f5/4026531840", "machine-e912ca2eb5f5")
    here("rack 7")    ->  Location("rack 7", "rack 7/machine-e912ca2eb5f5/4026531840", "machine-e912ca2eb5f5")

A machine is identified by its boot id, which its containers share. Links through shared memory begin with a socket that
only processes of one network namespace reach.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

_BOOT = Path("/proc/sys/kernel/random/boot_id")
_NETWORK = "/proc/self/ns/net"


@dataclass(frozen=True)
class Location:
    """`machine`: the failure domain. `host`: the memory domain, within one machine. `boot`: the machine itself."""

    machine: str
    host: str
    boot: str


def here(failure_domain: str | None = None) -> Location:
    """The location of this process. `failure_domain`: the user's name for it, such as a rack; None: the machine."""
    boot = f"machine-{_BOOT.read_text().strip().replace('-', '')[:12]}"
    machine = failure_domain or boot
    parts = dict.fromkeys((machine, boot, str(os.stat(_NETWORK).st_ino)))
    return Location(machine, "/".join(parts), boot)
