"""Faults, done to a world: processes that end, fall silent or stop, links that break, bytes that change.

In: a fault that is due. Out: what the world does from then on.
"""

from __future__ import annotations

from functools import partial
from random import Random
from typing import Any, Protocol

from elaswave_fx.control.protocol.messages import ReshapeWanted
from elaswave_fx.control.protocol.register import Register
from elaswave_fx.control.protocol.types import Replica
from elaswave_fx.plan.next.replan_request import ReshapeRequest
from elaswave_fx.plan.work.box import BoxId, numbered
from elaswave_fx.plan.work.topology import Rank
from tools.sim.checker import WORD
from tools.sim.faults import RESHAPE, SLOW, UNTOLD_S, Fault
from tools.sim.job import host_of
from tools.sim.network import GIVEN_UP_S, Network
from tools.sim.rank_process import RankProcess

STORE = Rank(-2)
"""The address of the store; things that happen by themselves come from there, too."""


class Struck(Protocol):
    """What a fault needs of a world; `processes` are by their addresses."""

    now: float
    count: int
    random: Random
    network: Network
    processes: dict[Rank, Any]
    register: Register
    coordinator: Rank
    quiet_from: float
    corrupted: set[tuple[Rank, BoxId]]
    struck: list[Fault]
    lines: list[str] | None

    def push(self, at_s: float, target: Rank, event: object, sender: Rank, generation: int = -1) -> None: ...
    def ask_to_join(self, connection: int) -> None: ...
    def tell_to_leave(self, rank: Rank, grace_s: float) -> None: ...
    def start_coordinator(self) -> None: ...
    def may_die(self, address: Rank) -> bool: ...
    def crash(self, rank: Rank, told_s: float, silent: bool, last_too: bool = False) -> None: ...
    def end_lifeline(self, rank: Rank) -> None: ...
    def pause(self, rank: Rank, until: float) -> None: ...
    def break_link(self, one: Rank, other: Rank, after_s: float | None) -> None: ...


class Injector:
    """Strikes one world."""

    def __init__(self, world: Struck) -> None:
        self.world = world

    def strike(self, fault: Fault) -> None:
        if self.world.lines is not None:
            self.world.lines.append(f"{self.world.now * 1000:9.3f} ms  FAULT {fault.kind} at {fault}")
        self.world.struck.append(fault)
        until = self.world.now + fault.lasts_s
        process = self.world.processes[fault.rank]
        if fault.kind == "crash":
            self.world.crash(fault.rank, fault.told_s, silent=False)
        elif fault.kind == "host":
            # The rank that it struck first: it may be dead in the midst of what it did.
            for rank in sorted(self._on_host(fault.rank), key=lambda rank: rank != fault.rank):
                self.world.crash(rank, fault.told_s, silent=False)
        elif fault.kind == "silent_host":
            self._silence_host(fault, until)
        elif fault.kind == "pause":
            self.world.pause(fault.rank, until)
        elif fault.kind == "corrupt":
            self._corrupt(fault.rank)
        elif fault.kind == "join":
            self.world.ask_to_join(len(self.world.struck))
        elif fault.kind == SLOW:
            if isinstance(process.body, RankProcess):
                process.body.slow_down(speed=1 / (2 + fault.keep), steps=int(fault.lasts_s))
        elif fault.kind == RESHAPE:
            reshape = (
                ReshapeRequest()
                if fault.dies and fault.keep == 0
                else ReshapeRequest(1 + fault.keep % 3, 1 + fault.rank % 2)
            )
            self.world.push(
                self.world.now, self.world.coordinator, ReshapeWanted(len(self.world.struck), reshape), STORE
            )
        elif fault.kind == "leave":
            for rank in sorted({fault.rank, *(fault.side if fault.dies else ())}):
                self.world.tell_to_leave(rank, fault.lasts_s)
        elif fault.kind.startswith("coordinator"):
            self._strike_coordinator(fault, until)
        elif isinstance(process.body, RankProcess) and fault.kind == "hang":
            process.body.hangs = self.world.may_die(fault.rank)
        elif isinstance(process.body, RankProcess) and fault.kind == "update_fails":
            process.body.update_will_fail = self.world.may_die(fault.rank)
        else:
            self._cut(fault, until)
        self.world.quiet_from = max(self.world.quiet_from, self.world.now + 0.01)

    def _on_host(self, rank: Rank) -> list[Rank]:
        return [r for r, p in self.world.processes.items() if r >= 0 and p.alive and host_of(r) == host_of(rank)]

    def _silence_host(self, fault: Fault, until: float) -> None:
        """Every process of a host falls silent: it has died, or comes back."""
        ranks = self._on_host(fault.rank)
        for rank in ranks:
            for other in (STORE, *self.world.processes):
                if other not in ranks:
                    self._silence(rank, other, until)
                    self._silence(other, rank, until)
        if fault.dies:
            for rank in ranks:
                self.world.crash(rank, UNTOLD_S, silent=True)

    def _silence(self, source: Rank, target: Rank, until: float) -> None:
        self.world.network.silence(source, target, until)
        self.world.quiet_from = max(self.world.quiet_from, until)
        if source >= 0 and target >= 0:
            self.world.push(self.world.now + GIVEN_UP_S, STORE, partial(self._give_up, source, target), STORE)

    def _give_up(self, source: Rank, target: Rank) -> None:
        if self.world.network.silent_until(source, target) > self.world.now:
            self.world.break_link(source, target, 0.0)

    def _corrupt(self, rank: Rank) -> None:
        """A held replica changes in memory; what is computed from its bytes from now on shows it."""
        process = self.world.processes[rank]
        body = process.body
        if not process.alive or not isinstance(body, RankProcess):
            return
        for box_id, box in numbered(self.world.register.activation.assignment.boxes):
            if rank in box.holders and box_id in body.engine.content:
                replica = body.engine.content[box_id]
                body.engine.content[box_id] = Replica(replica.stamp, hash((replica.digest, self.world.count)) & WORD)
                self.world.corrupted.add((rank, box_id))
                return

    def _strike_coordinator(self, fault: Fault, until: float) -> None:
        address, process = self.world.coordinator, self.world.processes[self.world.coordinator]
        self.world.quiet_from = max(self.world.quiet_from, until)
        if fault.kind == "coordinator_cut":
            self.world.network.cut(address, STORE, until)
            for rank in fault.side:
                self._cut_control(rank, until)
            return
        if fault.kind == "coordinator_crash":
            process.alive = False
        else:
            self.world.pause(address, until)
        again = self.world.now + fault.lasts_s * (1.0 if fault.kind == "coordinator_crash" else 0.5)
        self.world.push(again, STORE, self.world.start_coordinator, STORE)

    def _cut(self, fault: Fault, until: float) -> None:
        self.world.quiet_from = max(self.world.quiet_from, until)
        ranks = [r for r, p in self.world.processes.items() if r >= 0 and p.alive]
        others = [r for r in ranks if r != fault.rank]
        if fault.kind == "stall":
            for other in others:
                self._silence(fault.rank, other, until)
                self._silence(other, fault.rank, until)
        elif fault.kind in ("one_way", "silent_link"):
            if fault.rank != fault.other:
                self._silence(fault.rank, fault.other, until)
                if fault.kind == "silent_link":
                    self._silence(fault.other, fault.rank, until)
        elif fault.kind == "cut":
            self._cut_link(fault.rank, fault.other, until)
        elif fault.kind == "no_store":
            self.world.network.cut(fault.rank, STORE, until)
            self._cut_control(fault.rank, until)
        else:
            for one in (r for r in ranks if r in fault.side):
                for other in (r for r in ranks if r not in fault.side):
                    self._cut_link(one, other, until)
                if fault.keep % 2:
                    self._cut_control(one, until)
                    self.world.network.cut(one, STORE, until)

    def _cut_link(self, one: Rank, other: Rank, until: float) -> None:
        if one != other:
            self.world.network.cut(one, other, until)
            self.world.break_link(one, other, None)

    def _cut_control(self, rank: Rank, until: float) -> None:
        """No way from a rank to the coordinator."""
        self.world.network.cut(rank, self.world.coordinator, until)
        self.world.end_lifeline(rank)
