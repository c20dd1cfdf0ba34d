"""The Plan: one immutable value that assigns all work and state, and its JSON form.

In: made by `derive.make_plan` from lanes. Out: read by `step.py`, the worker, `inspect` and the checker; stored as
`plan-EPOCH.json`. Ranks, units and micro-batches are counted from 0; samples count within the step. Tiles and hops are
derived from the lanes on access.

    Plan.from_json(plan.to_json()) == plan
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import NamedTuple

import msgspec

from elaswave_fx.errors import PlanError
from elaswave_fx.plan.order.hops import Hop, ValueRoutes, find_hops, rank_hops
from elaswave_fx.plan.order.schedule import Action
from elaswave_fx.plan.work.box import Box
from elaswave_fx.plan.work.cost import Bucket, UnitCost, Value, Workload
from elaswave_fx.plan.work.operating_points import OperatingPoint
from elaswave_fx.plan.work.options import PlanOptions
from elaswave_fx.plan.work.spans import Span
from elaswave_fx.plan.work.tiling import Lane, Tile, Tiling, tiles_of
from elaswave_fx.plan.work.topology import Epoch, Rank, Topology

FORMAT = 7
"""Version of the JSON form; grows with every change that an old reader would misread."""


@dataclass(frozen=True)
class RankCost:
    """Expected cost of a step for a rank; `in_flight` = most micro-batches between forward and backward, `waiting` =
    most between the halves of backward. `copied_bytes`: records of owned boxes, sent to their replica holders."""

    busy_s: float
    in_flight: int
    memory_bytes: int
    sent_bytes: int
    received_bytes: int
    reduced_bytes: int
    copied_bytes: int
    gathered_bytes: int
    waiting: int = 0


@dataclass(frozen=True)
class Predicted:
    """The cost model's view of the plan: `pipeline_s` runs the schedule, `exchange_s` reduces, copies and gathers,
    `update_s` is the update on the rank that keeps most elements. `energy_j`: of all ranks during the pipeline, where
    operating points are known."""

    pipeline_s: float
    exchange_s: float
    ranks: Mapping[Rank, RankCost]
    energy_j: float = 0.0
    update_s: float = 0.0

    @property
    def step_s(self) -> float:
        """Seconds of a whole step, exchange not overlapped."""
        return self.pipeline_s + self.exchange_s + self.update_s


@dataclass(frozen=True)
class TargetLayout:
    """The target layout: lanes to take next, once their ranks have replicas of what they will compute with. `step_s`:
    predicted; `reason`: a description. `is_asked`: requested by a user, better or not."""

    lanes: tuple[Lane, ...]
    step_s: float
    reason: str
    is_asked: bool = False


@dataclass(frozen=True)
class Plan:
    """All work and state of an epoch's steps, by rank.

    `lanes`: together they cover the plane once; none if its ranks compute nothing. A rank outside all lanes still takes
    part in the step: it votes, and updates and keeps boxes. `boxes`: in order of bucket and span, cut once for the
    whole job; a box is identified by its index here. `schedule`: per rank the order of its micro-batches. `reason`: the
    choice and its alternatives. `clocks`: clock of each rank's device; empty: clocks are not set, and units take their
    costs' seconds. `terminal_reason`: why these ranks can take no step, empty if they can; `boxes` then name the owners
    that save state. `target`: the target layout of the same ranks. `is_asked`: a user requested the lanes; no target is
    searched until ranks change. `given_up`: reasons of targets that these ranks began and did not reach, for want of
    memory; they are not begun again until ranks, or their speeds, change.
    """

    topology: Topology
    workload: Workload
    lanes: tuple[Lane, ...]
    boxes: tuple[Box, ...]
    schedule: Mapping[Rank, tuple[Action, ...]]
    predicted: Predicted
    reason: str
    terminal_reason: str = ""
    clocks: Mapping[Rank, OperatingPoint] = field(default_factory=dict)
    target: TargetLayout | None = None
    is_asked: bool = True
    given_up: tuple[str, ...] = ()

    @property
    def epoch(self) -> Epoch:
        """The epoch of the topology that this plan is for."""
        return self.topology.epoch

    @cached_property
    def ranks(self) -> tuple[Rank, ...]:
        """All ranks, ascending, including those that compute nothing."""
        return tuple(tile.rank for tile in self.tiles)

    @cached_property
    def tiles(self) -> Tiling:
        """The tile of each rank, in rank order; empty for a rank in no lane."""
        return tiles_of(self.lanes, self.topology.ranks)

    @cached_property
    def hops(self) -> tuple[Hop, ...]:
        """All transfers between ranks in a step, sorted."""
        return find_hops(self.routes, self.lanes)

    @cached_property
    def routes(self) -> ValueRoutes:
        """The stages that values visit, shared by the derivations of all ranks."""
        return ValueRoutes(self.workload)

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
        if rank not in self._tile_of:
            raise PlanError(f"plan {self.epoch}: rank {rank} has no tile")
        return self._tile_of[rank]

    def hops_of(self, rank: Rank) -> tuple[Hop, ...]:
        """Transfers of a rank in a step."""
        return tuple(rank_hops(self.routes, self._lane_of[rank], rank)) if rank in self._lane_of else ()

    def order(self, rank: Rank) -> tuple[Action, ...]:
        """The order of a rank's micro-batches; PlanError if there is none."""
        if rank not in self.schedule:
            raise PlanError(f"plan {self.epoch}: rank {rank} has no order of work")
        return self.schedule[rank]

    def owned_buckets(self, rank: Rank) -> frozenset[int]:
        """Buckets of which the rank owns a box."""
        return self._owned_buckets.get(rank, frozenset())

    @cached_property
    def _tile_of(self) -> Mapping[Rank, Tile]:
        return {tile.rank: tile for tile in reversed(self.tiles)}

    @cached_property
    def _lane_of(self) -> Mapping[Rank, Lane]:
        return {rank: lane for lane in reversed(self.lanes) for rank in lane.ranks}

    @cached_property
    def _owned_buckets(self) -> Mapping[Rank, frozenset[int]]:
        found: dict[Rank, set[int]] = {}
        for box in self.boxes:
            found.setdefault(box.owner, set()).add(box.bucket)
        return {rank: frozenset(buckets) for rank, buckets in found.items()}

    def slowdown(self, rank: Rank) -> float:
        """Factor of the times of a rank's units at its clock."""
        power = self.topology.power
        return 1.0 if power is None or rank not in self.clocks else power.slowdown(self.clocks[rank])

    def energy_j(self, step_s: float) -> float | None:
        """Joules of all ranks in a step of `step_s`, by the watts of their clocks; None without clocks."""
        power = self.topology.power
        if power is None or not self.clocks:
            return None
        return math.fsum(
            power.energy_j(self.predicted.ranks[rank].busy_s, step_s, point) for rank, point in self.clocks.items()
        )

    def to_json(self) -> str:
        """Stable text, a line per field: the same plan gives the same bytes."""
        lines = [f'"{name}": {_ENCODER.encode(value).decode()}' for name, value in vars(_file_of(self)).items()]
        return "{\n" + ",\n".join(lines) + "\n}\n"

    @staticmethod
    def from_json(text: str) -> Plan:
        """The plan that `to_json` wrote; PlanError if the text is not a plan."""
        try:
            found = _FORMAT_DECODER.decode(text).format
            if found != FORMAT:
                raise PlanError(f"plan: format {found} is not readable here; this version reads {FORMAT}")
            return _plan_of(_DECODER.decode(text))
        except (msgspec.MsgspecError, IndexError, RecursionError) as error:
            raise PlanError(f"plan: the text is not a plan ({type(error).__name__}: {error})") from error


def plan_hash(text: str) -> int:
    """A 63-bit hash of a plan's text, equal on every machine and in every process, so that ranks can compare their
    plans."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


# --- JSON form


@dataclass(frozen=True)
class _Format:
    """The part of a text that every version can read."""

    format: int


class _BoxLine(NamedTuple):
    """A box; `readers`: index into the distinct sets of readers, which most boxes share."""

    bucket: int
    lo: int
    hi: int
    owner: Rank
    holders: tuple[Rank, ...]
    catching_up: tuple[Rank, ...]
    readers: int


@dataclass(frozen=True)
class _WorkloadLine:
    """A workload with its options among its own fields: the format predates their separation."""

    units: tuple[UnitCost, ...]
    values: tuple[Value, ...]
    buckets: tuple[Bucket, ...]
    global_batch: int
    granule: int
    batch_coupled: bool
    state_bytes_per_element: int
    update_s: float
    sample_tokens: int
    micro_batch: int | None
    least_elements: int
    exact: bool
    schedule: str
    policy: str
    axes: tuple[str, ...]
    goals: str
    skipped: int

    @staticmethod
    def of(workload: Workload) -> _WorkloadLine:
        known = {**vars(workload.options), **vars(workload)}
        return _WorkloadLine(**{each.name: known[each.name] for each in fields(_WorkloadLine)})

    def workload(self) -> Workload:
        options = PlanOptions(**{each.name: getattr(self, each.name) for each in fields(PlanOptions)})
        own = {each.name: getattr(self, each.name) for each in fields(Workload) if each.name != "options"}
        return Workload(options=options, **own)


@dataclass(frozen=True)
class _PlanFile:
    """The written form of a plan, field by field, by name. Every rank parses it between a failure and its next step."""

    format: int
    epoch: Epoch
    reason: str
    terminal_reason: str
    topology: Topology
    workload: _WorkloadLine
    lanes: tuple[Lane, ...]
    readers: tuple[tuple[Rank, ...], ...]
    boxes: tuple[_BoxLine, ...]
    schedule: Mapping[Rank, tuple[Action, ...]]
    predicted: Predicted
    clocks: Mapping[Rank, OperatingPoint]
    goal: TargetLayout | None  # its name in the file
    is_asked: bool
    given_up: tuple[str, ...] = ()


_ENCODER = msgspec.json.Encoder()
_FORMAT_DECODER = msgspec.json.Decoder(_Format)
_DECODER = msgspec.json.Decoder(_PlanFile)


def _file_of(plan: Plan) -> _PlanFile:
    readers = tuple(dict.fromkeys(box.readers for box in plan.boxes))
    places = {ranks: place for place, ranks in enumerate(readers)}
    boxes = tuple(
        _BoxLine(b.bucket, b.span.lo, b.span.hi, b.owner, b.holders, b.catching_up, places[b.readers])
        for b in plan.boxes
    )
    return _PlanFile(
        FORMAT, plan.epoch, plan.reason, plan.terminal_reason, plan.topology, _WorkloadLine.of(plan.workload),
        plan.lanes, readers, boxes, plan.schedule, plan.predicted, plan.clocks, plan.target, plan.is_asked,
        plan.given_up,
    )  # fmt: skip


def _plan_of(file: _PlanFile) -> Plan:
    boxes = tuple(
        Box(b.bucket, Span(b.lo, b.hi), b.owner, b.holders, b.catching_up, file.readers[b.readers]) for b in file.boxes
    )
    return Plan(
        file.topology, file.workload.workload(), file.lanes, boxes, file.schedule, file.predicted, file.reason,
        file.terminal_reason, file.clocks, file.goal, file.is_asked, file.given_up,
    )  # fmt: skip
