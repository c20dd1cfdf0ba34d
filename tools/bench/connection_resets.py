"""Links that go down while both ends live: every TCP connection between a process and some others is reset.

In: process ids on this machine. Out: how many connections were cut. The kernel does it (`ss -K`, of iproute2), which
takes the right to administer the network and a kernel built with INET_DIAG_DESTROY; neither end is asked.

    cut_links(pid, [other, another])   ->  2
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path

_ESTABLISHED = "01"


class CannotCut(RuntimeError):
    """Raised where the machine does not let us reset connections."""


End = tuple[str, str]
"""An address and port, as /proc/net/tcp writes them."""


def cut_links(pid: int, others: Iterable[int]) -> int:
    """Reset what connects `pid` with any of `others`. Raises `CannotCut`."""
    tool = shutil.which("ss")
    if tool is None:
        raise CannotCut("links: `ss` (iproute2) is not installed")
    ours = links_between(pid, others)
    if not ours:
        return 0
    matches = " or ".join(f"( sport = :{_port(local)} and dport = :{_port(remote)} )" for local, remote in ours)
    subprocess.run([tool, "-K", "-t", "-n", matches], check=False, capture_output=True)
    left = len(set(_connections(pid)) & set(ours))
    if left:
        raise CannotCut(f"links: {left} of {len(ours)} connections of process {pid} could not be reset; root can")
    return len(ours)


def links_between(pid: int, others: Iterable[int]) -> list[tuple[End, End]]:
    """The process's ends of them: (local, remote)."""
    theirs = {(local, remote) for other in others for local, remote in _connections(other)}
    return [(local, remote) for local, remote in _connections(pid) if (remote, local) in theirs]


def _connections(pid: int) -> list[tuple[End, End]]:
    """Return (local, remote) of a process's established connections."""
    sockets = set()
    for entry in os.scandir(f"/proc/{pid}/fd"):
        try:
            target = os.readlink(entry.path)
        except FileNotFoundError:  # closed meanwhile
            continue
        if target.startswith("socket:["):
            sockets.add(target.removeprefix("socket:[").removesuffix("]"))
    found = []
    for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]:
        words = line.split()
        if words[3] == _ESTABLISHED and words[9] in sockets:
            found.append((_end(words[1]), _end(words[2])))
    return found


def _end(text: str) -> End:
    address, port = text.split(":")
    return address, port


def _port(end: End) -> int:
    return int(end[1], 16)
