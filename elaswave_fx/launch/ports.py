"""The ports of a job on this machine: rank r listens on `launch.port` + r, the coordinator on `launch.control_port`.

A job claims its ports before it is built, when no rank listens yet, until its last process has ended.
"""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from ipaddress import ip_address

from elaswave_fx.control.tcp import listen, port_of, resolve
from elaswave_fx.errors import CommError, ConfigError

SELF_S = 2.0
"""Timeout of a connection of this machine to itself."""


@contextmanager
def claimed_ports(host: str, port: int, ranks: int) -> Iterator[None]:
    """Claim `ranks` ports of `host` from `port` on, also against jobs that are still being built; 0: any.

    Forked children keep the claim while they live. Raises `ConfigError` for ports that are used or claimed.
    """
    if port == 0:
        yield
        return
    if port + ranks - 1 > 65535:
        raise ConfigError(
            f"launch.port={port}: {ranks} ranks need ports {port} to {port + ranks - 1}; "
            f"nearest valid: {65536 - ranks}, or 0 for any"
        )
    with ExitStack() as claims:
        for rank in range(ranks):
            claim = _claim(port + rank)
            if claim is None or not _can_be_bound(host, port + rank):
                raise ConfigError(
                    f"launch.port={port}: port {port + rank} (rank {rank}) is busy; "
                    f"nearest valid: {_free_range(host, port + rank + 1, ranks)}, or 0 for any"
                )
            claims.enter_context(claim)
        yield


@contextmanager
def control_listener(host: str, port: int, others: range) -> Iterator[socket.socket]:
    """The listening socket of the coordinator, whichever process that is; 0: any port but `others`, the ranks'. Raises
    `ConfigError` for an invalid host or port."""
    if port in others:
        raise ConfigError(
            f"launch.control_port={port}: rank {port - others.start} listens on it; nearest valid: {others.stop}, or 0 "
            "for any"
        )
    with ExitStack() as listeners:
        while True:
            try:
                listener = listeners.enter_context(listen(host, port))
            except CommError as error:
                raise ConfigError(f"launch.control_port={port}: {error}; nearest valid: 0 for any") from error
            if port_of(listener) not in others:
                break
        yield listener


def check_host(host: str) -> None:
    """Raise `ConfigError` for a host that is not this machine, or that other hosts cannot connect to."""
    try:
        places = resolve(host, 0)
    except CommError as error:
        raise ConfigError(f"launch.host={host}: {error}; nearest valid: 127.0.0.1") from error
    if any(ip_address(str(place.address[0]).partition("%")[0]).is_unspecified for place in places):
        raise ConfigError(f"launch.host={host}: is no address that others can dial; nearest valid: 127.0.0.1")
    if not _can_be_bound(host, 0):
        raise ConfigError(f"launch.host={host}: is no address of this machine; nearest valid: 127.0.0.1")
    with listen(host, 0) as listener:
        try:
            socket.create_connection(listener.getsockname()[:2], SELF_S).close()
        except OSError as error:
            raise ConfigError(
                f"launch.host={host}: ranks cannot reach each other there, for this machine does not reach itself "
                f"({error.strerror or error}); a way out is `ip link set lo up`, or the address of another interface"
            ) from error


def _claim(port: int) -> socket.socket | None:
    """A claim until it is closed in every process; None if the port is claimed.

    It is a name in the kernel's memory, not a file, so a killed job leaves nothing.
    """
    claim = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        claim.bind(f"\0elaswave-port-{port}")
    except OSError as error:
        claim.close()
        if error.errno != errno.EADDRINUSE:
            raise
        return None
    return claim


def _can_be_bound(host: str, port: int) -> bool:
    for place in resolve(host, port):
        with socket.socket(place.family) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(place.address)
            except OSError:
                continue
            return True
    return False


def _is_free(host: str, port: int) -> bool:
    claim = _claim(port)
    if claim is None:
        return False
    with claim:
        return _can_be_bound(host, port)


def _free_range(host: str, start: int, ranks: int) -> int:
    """The first port from `start` on with `ranks` free ports in a row; 0 if there is none."""
    run = 0
    for port in range(start, 65536):
        run = run + 1 if _is_free(host, port) else 0
        if run == ranks:
            return port - ranks + 1
    return 0
