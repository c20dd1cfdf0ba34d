"""What is asked of emulated ranks and of links, checked against the shape of the job.

check_emulation(config)   ->  ConfigError("emulated.speeds=[1.0,0.5]: has 2 speeds for 4 ranks, …")
check_links(config)       ->  ConfigError("topology.links[0].hosts=[0,7]: …")
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from elaswave_fx.config.validation import show
from elaswave_fx.errors import ConfigError

if TYPE_CHECKING:
    from elaswave_fx.config.keys import Config

UNDER_WAY_MOST = 1 << 30
"""Bytes on an emulated link: so much memory is set aside for each at most."""


def check_emulation(config: Config) -> None:
    """Refuse emulation where something is computed, and speeds that are not one per rank. Raises `ConfigError`."""
    emulated = config.emulated
    asked = {
        "unit_ms": emulated.unit_ms,
        "memory_mb": emulated.memory_mb,
        "speeds": emulated.speeds,
        "link.latency_ms": emulated.link.latency_ms,
        "link.bytes_per_s": emulated.link.bytes_per_s,
    }
    for name, value in asked.items():
        if value is not None and config.device != "emulated":
            shown = f"{value:g}" if isinstance(value, float) else show(value)
            raise ConfigError(
                f"emulated.{name}={shown}: device={config.device} is what it is; nearest valid: device=emulated"
            )
    ranks = config.parallel.ranks
    if emulated.speeds is not None and len(emulated.speeds) != ranks:
        raise ConfigError(
            f"emulated.speeds={show(emulated.speeds)}: has {len(emulated.speeds)} speeds for {ranks} ranks, and each "
            f"rank has one; nearest valid: {show((*emulated.speeds, *([1.0] * ranks))[:ranks])}"
        )
    _check_under_way("emulated.link", emulated.link.latency_ms, emulated.link.bytes_per_s)


def check_links(config: Config) -> None:
    """Refuse links of hosts that are not there, with themselves, or twice. Raises `ConfigError`."""
    last = (config.parallel.ranks - 1) // config.parallel.ranks_per_host
    seen: dict[frozenset[int], int] = {}
    for number, each in enumerate(config.topology.links):
        key, hosts = f"topology.links[{number}]", frozenset(each.hosts)
        if len(hosts) == 1:
            raise ConfigError(f"{key}.hosts={show(each.hosts)}: must be two hosts; ranks of one host share its memory")
        if max(hosts) > last:
            raise ConfigError(
                f"{key}.hosts={show(each.hosts)}: {config.parallel.ranks} ranks with parallel.ranks_per_host="
                f"{config.parallel.ranks_per_host} are on {last + 1} hosts; nearest valid: at most {last}"
            )
        if hosts in seen:
            raise ConfigError(f"{key}.hosts={show(each.hosts)}: topology.links[{seen[hosts]}] is of the same two hosts")
        seen[hosts] = number
        _check_under_way(key, each.latency_ms, each.bytes_per_s)


def _check_under_way(key: str, latency_ms: float | None, bytes_per_s: float | None) -> None:
    """Refuse a link with more bytes under way than are set aside for it."""
    if not latency_ms or not bytes_per_s or 1e-3 * latency_ms * bytes_per_s <= UNDER_WAY_MOST:
        return
    raise ConfigError(
        f"{key}.latency_ms={latency_ms:g}: with {key}.bytes_per_s={bytes_per_s:g} more than 1 GiB would be under way; "
        f"nearest valid: {1e3 * UNDER_WAY_MOST / bytes_per_s:g}"
    )
