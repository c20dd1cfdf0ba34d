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

KINDS = ("kill", "stop", "leave", "cut", "join", "slow")
_SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "leave": signal.SIGTERM}
_WITHOUT_PHASE = {
    "slow": "a rank is slow in whole steps",
    "join": "a process is started between two steps",
}
MOST_SECONDS = 86_400.0
"""Of a cut with an end."""

PHASES = ("forward", "backward", "reduce", "update", "gather", "snapshot", "any")


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A failure injected on purpose. The victim raises the signal on itself in `phase` of `step`, or of the next step
    if a recovery finished that step without it. A rank is killed, stopped, cut off or drained at most once, and not all
    ranks are. A fault that never fired fails the run.
    """

    step: int
    """From 0."""
    rank: int
    """The victim; with `kind: join` the number of the joiner, the job's next one."""
    kind: str = "kill"
    """`kill`: SIGKILL; `stop`: SIGSTOP; `leave`: SIGTERM, which drains the rank; `cut`: no message from or to the
    rank arrives; `join`: one more process starts before the step; `slow`: units take longer from that step on."""
    phase: str = "any"
    """Of the step, for all kinds but `join` and `slow`."""
    speed: float = 0.5
    """`slow`: the share of the rank's own speed."""
    steps: int | None = None
    """`slow`: how many steps; null: to the end."""
    seconds: float | None = None
    """`cut`: how long, at most a day; null: to the end."""

    @property
    def strikes_in_a_phase(self) -> bool:
        """Whether it comes in the midst of a step."""
        return self.kind not in _WITHOUT_PHASE

    @property
    def takes_out(self) -> bool:
        """Whether the job goes on without the rank, as far as is known before."""
        return self.kind in _SIGNALS or (self.kind == "cut" and self.seconds is None)

    @property
    def signal(self) -> signal.Signals:
        """What the victim of a kind with a signal raises on itself."""
        return _SIGNALS[self.kind]

    def slows(self, step: int) -> bool:
        """Whether the rank is slow in that step."""
        return self.kind == "slow" and self.step <= step and (self.steps is None or step < self.step + self.steps)

    def __str__(self) -> str:
        if self.kind == "slow":
            return f"slowing down of rank {self.rank} in step {self.step}"
        if self.kind == "join":
            return f"{self.kind} of rank {self.rank} in step {self.step}"
        return f"{self.kind} of rank {self.rank} in step {self.step}, phase {self.phase}"


def check_faults(faults: Sequence[Fault], ranks: int, steps: int, first_step: int = 0) -> None:
    """Refuse what cannot happen. Raises `ConfigError` that names the entry, the fact and what would be valid.

    `first_step`: where a run goes on that has done some steps before.
    """
    seen: dict[int, int] = {}
    newest = ranks - 1
    for number, fault in enumerate(faults):
        place = f"faults[{number}]"
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
        if fault.kind == "join":
            newest += 1
            if fault.rank != newest:
                raise ConfigError(f"{place}.rank={fault.rank}: numbers are given in turn; nearest valid: {newest}")
        elif not 0 <= fault.rank < ranks:
            raise ConfigError(f"{place}.rank={fault.rank}: the run has {ranks} ranks; nearest valid: {ranks - 1}")
        _check_kind(place, fault)
        if not fault.strikes_in_a_phase:
            continue
        if fault.rank in seen:
            raise ConfigError(
                f"{place}.rank={fault.rank}: faults[{seen[fault.rank]}] strikes that rank already; "
                "a rank that was lost does not come back, but as another one"
            )
        seen[fault.rank] = number
    if sum(fault.takes_out for fault in faults) == ranks:
        raise ConfigError(f"faults: every one of the {ranks} ranks is taken out; at least one must be left to go on")


def _check_kind(place: str, fault: Fault) -> None:
    """What only some kinds have."""
    if not fault.strikes_in_a_phase and fault.phase != "any":
        raise ConfigError(
            f"{place}.phase={fault.phase}: {_WITHOUT_PHASE[fault.kind]}; leave it out with kind={fault.kind}"
        )
    other = Fault(step=0, rank=0)
    for key, kind in (("speed", "slow"), ("steps", "slow"), ("seconds", "cut")):
        if fault.kind != kind and getattr(fault, key) != getattr(other, key):
            raise ConfigError(f"{place}.{key}={getattr(fault, key)}: is for kind={kind}")
    if fault.seconds is not None and not 0 < fault.seconds <= MOST_SECONDS:
        valid = f"must be above 0 and at most {MOST_SECONDS:g}; leave it out for a cut without an end"
        raise ConfigError(f"{place}.seconds={fault.seconds:g}: {valid}")
    if fault.kind != "slow":
        return
    if not 0 < fault.speed < 1:
        raise ConfigError(f"{place}.speed={fault.speed:g}: must be above 0 and below 1, as fast as it was")
    if fault.steps is not None and fault.steps < 1:
        raise ConfigError(f"{place}.steps={fault.steps}: must be at least 1; nearest valid: 1")
