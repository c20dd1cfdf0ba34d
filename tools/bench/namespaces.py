"""Hosts of their own on one machine: network namespaces on one switch, whose frames can be made to vanish.

    with hosts(3) as (one, two, three):
        process = two.start([sys.executable, …])   runs there; `one.enter` takes a forked child to its host
        silence(two, one)                          frames from `two` to `one` vanish, and nobody is told
        heal(two, one)
    with hosts(2, bytes_per_s=1e8) as (one, two)   the cable of each carries so much, in each direction

Needs root and `ip` of iproute2, and `tc` of it for links of a certain speed. Each host knows the others' hardware
addresses from the start. One that is to be silenced is given a wrong one for the other: its frames then go to nobody,
in one direction, between these two hosts alone, and no error comes back, as behind a switch that has lost its way.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

_CLONE_NEWNET = 0x40000000
_NOBODY = "02:00:00:00:ff:ff"
_PREFIX = "elaswave-"
_COUNT = itertools.count()


@dataclass(frozen=True)
class Host:
    """A network namespace. `address`: IPv4, on the switch that all hosts share."""

    name: str
    address: str
    hardware: str

    def start(self, words: Sequence[str], **options: Any) -> subprocess.Popen[str]:
        """A process on this host."""
        return subprocess.Popen(["ip", "netns", "exec", self.name, *words], text=True, **options)

    def bytes_sent(self) -> int:
        """What has left it by its cable so far, heads of packets included."""
        words = ["ip", "-n", self.name, "-s", "-j", "link", "show", "eth0"]
        done = subprocess.run(words, check=True, capture_output=True, text=True)
        return json.loads(done.stdout)[0]["stats64"]["tx"]["bytes"]

    def enter(self) -> None:
        """Take the calling process, which has one thread, to this host, for good."""
        libc = ctypes.CDLL(None, use_errno=True)
        with open(f"/run/netns/{self.name}") as namespace:
            if libc.setns(namespace.fileno(), _CLONE_NEWNET) != 0:
                raise OSError(ctypes.get_errno(), f"setns({self.name})")


def missing(tools: Sequence[str] = ("ip",)) -> str | None:
    """What this machine lacks for `hosts`, in words; None if it can make them. `tools`: `tc` too, for slow links."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    for tool in tools:
        if shutil.which(tool) is None:
            return f"`{tool}` of iproute2 is not installed"
    trial = f"{_PREFIX}{os.getpid()}-trial"
    made = subprocess.run(["ip", "netns", "add", trial], check=False, capture_output=True, text=True)
    if made.returncode != 0:
        return f"no network namespaces here: {made.stderr.strip()}"
    subprocess.run(["ip", "netns", "delete", trial], check=True)
    return None


@contextmanager
def hosts(count: int, bytes_per_s: float | None = None) -> Iterator[tuple[Host, ...]]:
    """Make so many hosts, which reach each other, and nothing else. They go with the block, whatever still runs there;
    those of a process that was killed go with the next ones.
    `bytes_per_s`: what the cable of each carries, in each direction; None: as much as the machine can."""
    _clear_away()
    prefix = f"{_PREFIX}{os.getpid()}-{next(_COUNT)}"
    switch = f"{prefix}-switch"
    found = tuple(Host(f"{prefix}-{n}", f"10.77.0.{n + 1}", f"02:00:00:00:00:{n + 1:02x}") for n in range(count))
    with ExitStack() as namespaces:
        for name in (switch, *(host.name for host in found)):
            _ip("netns", "add", name)
            namespaces.callback(_ip, "netns", "delete", name)
            _ip("-n", name, "link", "set", "lo", "up")
        _ip("-n", switch, "link", "add", "switch", "type", "bridge")
        _ip("-n", switch, "link", "set", "switch", "up")
        for n, host in enumerate(found):
            port = f"port{n}"
            _ip("-n", switch, "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", host.name)
            _ip("-n", switch, "link", "set", port, "master", "switch", "up")
            _ip("-n", host.name, "link", "set", "eth0", "address", host.hardware, "up")
            _ip("-n", host.name, "address", "add", f"{host.address}/24", "dev", "eth0")
            if bytes_per_s is not None:
                _slow_down(host.name, "eth0", bytes_per_s)
                _slow_down(switch, port, bytes_per_s)
        for one, other in itertools.permutations(found, 2):
            heal(one, other)
        yield found


def _clear_away() -> None:
    """What processes have left behind that were killed."""
    listed = subprocess.run(["ip", "-j", "netns", "list"], check=True, capture_output=True, text=True).stdout
    for each in json.loads(listed or "[]"):
        owner = each["name"].removeprefix(_PREFIX).split("-")[0]
        if each["name"].startswith(_PREFIX) and owner.isdecimal() and not os.path.exists(f"/proc/{owner}"):
            # Another process may clear away, too.
            subprocess.run(["ip", "netns", "delete", each["name"]], check=False, capture_output=True)


def silence(one: Host, other: Host) -> None:
    """What `one` sends to `other` arrives nowhere from now on."""
    _know(one, other, _NOBODY)


def heal(one: Host, other: Host) -> None:
    """What `one` sends to `other` arrives there."""
    _know(one, other, other.hardware)


def _know(one: Host, other: Host, hardware: str) -> None:
    known = ("dev", "eth0", "nud", "permanent")
    _ip("-n", one.name, "neighbour", "replace", other.address, "lladdr", hardware, *known)


def _slow_down(namespace: str, device: str, bytes_per_s: float) -> None:
    """What a device sends goes at that rate; 20 ms of it may queue, as in a switch."""
    rate = f"{round(bytes_per_s)}bps"  # for `tc`, bytes per second
    shape = ("root", "tbf", "rate", rate, "burst", "256kb", "latency", "20ms")
    words = ["tc", "-n", namespace, "qdisc", "add", "dev", device, *shape]
    subprocess.run(words, check=True, capture_output=True, text=True)


def slow_loopback(host: Host, bytes_per_s: float) -> None:
    """What the host sends to itself goes at that rate, in packets of Ethernet's size."""
    _ip("-n", host.name, "link", "set", "lo", "mtu", "1500")
    _slow_down(host.name, "lo", bytes_per_s)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)
