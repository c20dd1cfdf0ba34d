"""The Plan: one immutable value that says who does what, and its JSON form.

In: made by `derive.make_plan` from a tiling. Out: read by `step.py`, the worker, `inspect` and the checker; stored as
`plan-EPOCH.json`. Ranks, units and micro-batches are counted from 0; samples count within the step.

    Plan.from_json(plan.to_json()) == plan
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from elaswave_fx.errors import PlanError
from elaswave_fx.plan.box import Box, Span
from elaswave_fx.plan.cost import Bucket, UnitCost, Value, Workload
from elaswave_fx.plan.tiling import Tile
from elaswave_fx.plan.topology import Epoch, Host, Member, Rank, Topology

FORMAT = 3
"""Version of the JSON form; grows with every change that an old reader would misread."""

Action = tuple[str, int]
"""("F", micro-batch) or ("B", micro-batch): one micro-batch through all units of the rank's tile."""


@dataclass(frozen=True, order=True)
class Hop:
    """A piece of a value between neighbouring stages of its users; the gradient takes the same hop back.

    `value` is an index into the workload's values, `samples` counts within the step. For a value without a
    sample axis the piece is the whole value, taken from the source micro-batch of `samples`.
    """

    value: int
    source: Rank
    source_micro_batch: int
    target: Rank
    target_micro_batch: int
    samples: Span


@dataclass(frozen=True)
class RankCost:
    """What a rank is expected to spend in a step; `in_flight` = most micro-batches between forward and backward.

    `copied_bytes`: records of owned boxes, sent to their holders.
    """

    busy_s: float
    in_flight: int
    memory_bytes: int
    sent_bytes: int
    received_bytes: int
    reduced_bytes: int
    copied_bytes: int
    gathered_bytes: int


@dataclass(frozen=True)
class Predicted:
    """The cost model's view of the plan: `pipeline_s` runs the schedule, `exchange_s` reduces, copies and gathers."""

    pipeline_s: float
    exchange_s: float
    ranks: Mapping[Rank, RankCost]

    @property
    def step_s(self) -> float:
        """Seconds of a whole step, exchange not overlapped."""
        return self.pipeline_s + self.exchange_s


@dataclass(frozen=True)
class Plan:
    """Who does what in every step of an epoch.

    `boxes`: in order of bucket and span, cut once for the whole job; a box is known by its place among them.
    `schedule`: per rank the order of its micro-batches. `reason`: what was chosen, what it beat and why.
    `terminal_reason`: why these ranks can take no step, empty if they can; the boxes say who has what is to be saved.
    """

    topology: Topology
    workload: Workload
    tiles: tuple[Tile, ...]
    boxes: tuple[Box, ...]
    hops: tuple[Hop, ...]
    schedule: Mapping[Rank, tuple[Action, ...]]
    predicted: Predicted
    reason: str
    terminal_reason: str = ""

    @property
    def epoch(self) -> Epoch:
        """The epoch of the topology that this plan is for."""
        return self.topology.epoch

    @property
    def ranks(self) -> tuple[Rank, ...]:
        """The ranks that have a tile, ascending."""
        return tuple(tile.rank for tile in self.tiles)

    @cached_property
    def groups(self) -> Mapping[str, tuple[Rank, ...]]:
        """Bucket name -> the ranks that read any of its boxes, ascending."""
        found: dict[str, set[Rank]] = {bucket.name: set() for bucket in self.workload.buckets}
        for box in self.boxes:
            found[self.workload.buckets[box.bucket].name].update(box.readers)
        return {name: tuple(sorted(ranks)) for name, ranks in found.items()}

    @cached_property
    def layouts(self) -> Mapping[str, tuple[tuple[Rank, Span], ...]]:
        """Bucket name -> (owner, span) of its boxes in order of spans; a rank may own several spans of a bucket."""
        found: dict[str, list[tuple[Rank, Span]]] = {bucket.name: [] for bucket in self.workload.buckets}
        for box in self.boxes:
            found[self.workload.buckets[box.bucket].name].append((box.owner, box.span))
        return {name: tuple(parts) for name, parts in found.items()}

    def tile(self, rank: Rank) -> Tile:
        """The tile of a rank; PlanError if it has none."""
        for tile in self.tiles:
            if tile.rank == rank:
                return tile
        raise PlanError(f"plan {self.epoch}: rank {rank} has no tile")

    def to_json(self) -> str:
        """Stable text, a line per field: the same plan gives the same bytes."""
        # Indented text would take the slow encoder, several times slower, on the way from a loss to the next step.
        lines = [f'"{key}": {json.dumps(value)}' for key, value in _plan_data(self).items()]
        return "{\n" + ",\n".join(lines) + "\n}\n"

    @staticmethod
    def from_json(text: str) -> Plan:
        """The plan that `to_json` wrote; PlanError if the text is none."""
        try:
            data = json.loads(text)
            if data["format"] != FORMAT:
                raise PlanError(f"plan: format {data['format']} is not readable here; this version reads {FORMAT}")
            return _plan_of(data)
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise PlanError(f"plan: the text is not a plan ({type(error).__name__}: {error})") from error


def plan_hash(text: str) -> int:
    """63 bits of a plan's text: the same on every machine and in every process, so that nobody acts on another plan."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def _pair(span: Span) -> list[int]:
    return [span.lo, span.hi]


def _plan_data(plan: Plan) -> dict[str, Any]:
    # Most boxes are read by the same ranks as others.
    readers = list(dict.fromkeys(box.readers for box in plan.boxes))
    places = {ranks: place for place, ranks in enumerate(readers)}
    return {
        "format": FORMAT,
        "epoch": plan.epoch,
        "reason": plan.reason,
        **({"terminal_reason": plan.terminal_reason} if plan.terminal_reason else {}),
        "topology": {**vars(plan.topology), "members": [vars(m) for m in plan.topology.members]},
        "workload": _workload_data(plan.workload),
        "tiles": [[t.rank, _pair(t.units), _pair(t.samples), [_pair(m) for m in t.micro_batches]] for t in plan.tiles],
        "readers": readers,
        "boxes": [
            [b.bucket, b.span.lo, b.span.hi, b.owner, b.holders, b.catching_up, places[b.readers]] for b in plan.boxes
        ],
        "hops": [
            [h.value, h.source, h.source_micro_batch, h.target, h.target_micro_batch, h.samples.lo, h.samples.hi]
            for h in plan.hops
        ],
        "schedule": {rank: [f"{kind}{mb}" for kind, mb in actions] for rank, actions in plan.schedule.items()},
        "predicted": {
            "pipeline_s": plan.predicted.pipeline_s,
            "exchange_s": plan.predicted.exchange_s,
            "ranks": {rank: vars(cost) for rank, cost in plan.predicted.ranks.items()},
        },
    }


def _workload_data(workload: Workload) -> dict[str, Any]:
    return {
        **vars(workload),
        "units": [vars(unit) for unit in workload.units],
        "values": [vars(value) for value in workload.values],
        "buckets": [vars(bucket) for bucket in workload.buckets],
    }


def _plan_of(data: dict[str, Any]) -> Plan:
    predicted = data["predicted"]
    readers = [tuple(ranks) for ranks in data["readers"]]
    return Plan(
        topology=_topology_of(data["topology"]),
        workload=_workload_of(data["workload"]),
        tiles=tuple(
            Tile(Rank(rank), Span(*units), Span(*samples), tuple(Span(*m) for m in micro_batches))
            for rank, units, samples, micro_batches in data["tiles"]
        ),
        boxes=tuple(
            Box(bucket, Span(lo, hi), Rank(owner), tuple(holders), tuple(catching_up), readers[place])
            for bucket, lo, hi, owner, holders, catching_up, place in data["boxes"]
        ),
        hops=tuple(
            Hop(value, Rank(source), source_mb, Rank(target), target_mb, Span(lo, hi))
            for value, source, source_mb, target, target_mb, lo, hi in data["hops"]
        ),
        schedule={
            Rank(int(rank)): tuple((action[0], int(action[1:])) for action in actions)
            for rank, actions in data["schedule"].items()
        },
        predicted=Predicted(
            predicted["pipeline_s"],
            predicted["exchange_s"],
            {Rank(int(rank)): RankCost(**cost) for rank, cost in predicted["ranks"].items()},
        ),
        reason=data["reason"],
        terminal_reason=data.get("terminal_reason", ""),
    )


def _topology_of(data: dict[str, Any]) -> Topology:
    members = tuple(Member(Rank(m["rank"]), Host(m["host"]), m["speed"], m["memory_bytes"]) for m in data["members"])
    return Topology(members, data["ranks_per_host"], Epoch(data["epoch"]), data["link_bytes_per_s"])


def _workload_of(data: dict[str, Any]) -> Workload:
    return Workload(
        units=tuple(UnitCost(**unit) for unit in data["units"]),
        values=tuple(Value(**{**value, "consumers": tuple(value["consumers"])}) for value in data["values"]),
        buckets=tuple(Bucket(**{**bucket, "users": tuple(bucket["users"])}) for bucket in data["buckets"]),
        global_batch=data["global_batch"],
        granule=data["granule"],
        batch_coupled=data["batch_coupled"],
        state_bytes_per_element=data["state_bytes_per_element"],
        work_bytes_per_element=data["work_bytes_per_element"],
        micro_batch=data["micro_batch"],
        least_elements=data["least_elements"],
    )
