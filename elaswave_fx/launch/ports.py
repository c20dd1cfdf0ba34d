"""The ports of a job on this machine: rank r listens on `launch.port` + r.

A job has its ports from before it is built, when no rank listens yet, until the last of its processes has ended.
"""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from elaswave_fx.errors import ConfigError


@contextmanager
def claimed_ports(port: int, ranks: int) -> Iterator[None]:
    """Have `ranks` ports from `port` on to ourselves, also against jobs that are still being built; 0: any.

    Children that are forked meanwhile hold the claim for as long as they live. Raises `ConfigError` for ports that
    others use or have claimed."""
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
            if claim is None or not _can_be_bound(port + rank):
                raise ConfigError(
                    f"launch.port={port}: port {port + rank} (rank {rank}) is busy; "
                    f"nearest valid: {_free_range(port + rank + 1, ranks)}, or 0 for any"
                )
            claims.enter_context(claim)
        yield


def _claim(port: int) -> socket.socket | None:
    """A claim that lasts until it is closed in every process; None if somebody has it.

    It is a name in the kernel's memory, and no file: nothing of it is left by a job that is killed."""
    claim = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        claim.bind(f"\0elaswave-port-{port}")
    except OSError as error:
        claim.close()
        if error.errno != errno.EADDRINUSE:
            raise
        return None
    return claim


def _can_be_bound(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def _is_free(port: int) -> bool:
    claim = _claim(port)
    if claim is None:
        return False
    with claim:
        return _can_be_bound(port)


def _free_range(start: int, ranks: int) -> int:
    """The first port from `start` on with `ranks` free ports in a row; 0 when there is none up to the last."""
    run = 0
    for port in range(start, 65536):
        run = run + 1 if _is_free(port) else 0
        if run == ranks:
            return port - ranks + 1
    return 0
