"""Failures injected on purpose: what `faults` lists, and which of it can happen.

In: `faults=[{step: 12, rank: 2, kind: kill, phase: backward}]`. Out: `Fault`s, of which the victim alone knows: it
raises the real signal on itself in that phase of that step, or of a later one if the recovery from another failure
finished that step without it. One that never fired fails the run.

    check_faults((Fault(step=900, rank=2, kind="kill"),), ranks=4, steps=200)
        ->  ConfigError("faults[0].step=900: the run has 200 steps, …")
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass

from elaswave_fx.errors import ConfigError

KINDS = ("kill", "stop")
NOT_AVAILABLE_YET = ("leave", "join", "slow", "cut")
PHASES = ("forward", "backward", "reduce", "update", "gather", "snapshot", "any")


@dataclass(frozen=True, kw_only=True)
class Fault:
    """Rank `rank` gets the signal of `kind` in `phase` of `step`; steps count from 0."""

    step: int
    rank: int
    kind: str = "kill"
    phase: str = "any"

    @property
    def signal(self) -> signal.Signals:
        """What the victim raises on itself."""
        return signal.SIGKILL if self.kind == "kill" else signal.SIGSTOP

    def __str__(self) -> str:
        return f"{self.kind} of rank {self.rank} in step {self.step}, phase {self.phase}"


def check_faults(faults: Sequence[Fault], ranks: int, steps: int, first_step: int = 0) -> None:
    """Refuse what cannot happen. Raises `ConfigError` that names the entry, the fact and what would be valid.

    `first_step`: where a run goes on that has done some steps before.
    """
    seen: dict[int, int] = {}
    for number, fault in enumerate(faults):
        place = f"faults[{number}]"
        if fault.kind in NOT_AVAILABLE_YET:
            raise ConfigError(f"{place}.kind={fault.kind} is not available yet")
        if fault.kind not in KINDS:
            raise ConfigError(f"{place}.kind={fault.kind}: must be one of {', '.join(KINDS)}")
        if fault.phase not in PHASES:
            raise ConfigError(f"{place}.phase={fault.phase}: must be one of {', '.join(PHASES)}")
        if not 0 <= fault.step < steps:
            raise ConfigError(f"{place}.step={fault.step}: the run has {steps} steps; nearest valid: {steps - 1}")
        if fault.step < first_step:
            raise ConfigError(
                f"{place}.step={fault.step}: the run goes on from step {first_step}; nearest valid: {first_step}"
            )
        if not 0 <= fault.rank < ranks:
            raise ConfigError(f"{place}.rank={fault.rank}: the run has {ranks} ranks; nearest valid: {ranks - 1}")
        if fault.rank in seen:
            raise ConfigError(
                f"{place}.rank={fault.rank}: faults[{seen[fault.rank]}] takes that rank out already; "
                "a rank that was lost does not come back"
            )
        seen[fault.rank] = number
    if len(seen) == ranks:
        raise ConfigError(f"faults: every one of the {ranks} ranks is lost; at least one must be left to go on")
