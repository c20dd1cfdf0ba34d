"""The ports of a job on this machine: rank r listens on `launch.port` + r."""

from __future__ import annotations

import socket

from elaswave_fx.errors import ConfigError


def check_ports(port: int, ranks: int) -> None:
    """Refuse ports that are taken, before anything starts. Raises `ConfigError`."""
    if port == 0:
        return
    if port + ranks - 1 > 65535:
        raise ConfigError(
            f"launch.port={port}: {ranks} ranks need ports {port} to {port + ranks - 1}; "
            f"nearest valid: {65536 - ranks}, or 0 for any"
        )
    for rank in range(ranks):
        if not _is_free(port + rank):
            raise ConfigError(
                f"launch.port={port}: port {port + rank} (rank {rank}) is busy; "
                f"nearest valid: {_free_range(port + rank + 1, ranks)}, or 0 for any"
            )


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def _free_range(start: int, ranks: int) -> int:
    """The first port from `start` on with `ranks` free ports in a row; 0 when there is none up to the last."""
    run = 0
    for port in range(start, 65536):
        run = run + 1 if _is_free(port) else 0
        if run == ranks:
            return port - ranks + 1
    return 0
