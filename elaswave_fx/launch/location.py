"""Where a process runs: what it is lost with, and the part of its machine within which memory can be shared.

    here()            ->  Location("machine-e912ca2eb5f5", "machine-e912ca2eb5f5/4026531840", "machine-e912ca2eb5f5")
    here("rack 7")    ->  Location("rack 7", "rack 7/machine-e912ca2eb5f5/4026531840", "machine-e912ca2eb5f5")

Containers of a machine are lost with it: it is known by its boot, which they have in common. Links through shared
memory begin with a socket that only processes of the same network namespace reach.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

_BOOT = Path("/proc/sys/kernel/random/boot_id")
_NETWORK = "/proc/self/ns/net"


@dataclass(frozen=True)
class Location:
    """`machine`: the failure domain. `host`: the memory domain, of one machine. `boot`: of that machine, in which all
    names of its hosts are alike."""

    machine: str
    host: str
    boot: str


def here(failure_domain: str | None = None) -> Location:
    """The place of this process. `failure_domain`: the user's name for what it is lost with, as a rack; None: the
    machine as its kernel knows it."""
    boot = f"machine-{_BOOT.read_text().strip().replace('-', '')[:12]}"
    machine = failure_domain or boot
    parts = dict.fromkeys((machine, boot, str(os.stat(_NETWORK).st_ino)))
    return Location(machine, "/".join(parts), boot)
