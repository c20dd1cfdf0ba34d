"""Lowering of a plan to the instruction lists that each rank's engine executes in order.

    ("RECV", value, mb, peer, tag, lo, hi, grad)   post the receive of samples [lo, hi) of micro-batch mb; never blocks
    ("SEND", value, mb, peer, tag, lo, hi, grad)   wait for the value (or its gradient), then send without blocking
    ("FORWARD", unit, mb)  ("BACKWARD", unit, mb)  wait for the pieces they read, run the unit
    ("BACKWARD_INPUTS", unit, mb)  ("BACKWARD_WEIGHTS", unit, mb)  the same as BACKWARD in halves
    ("REDUCE", bucket)  ("VOTE",)  ("UPDATE", bucket)  ("GATHER", bucket)  ("SNAPSHOT",)

value, unit, bucket are indices into the workload; mb counts the rank's own micro-batches; lo, hi are relative to mb (0,
1 for a value without a sample axis). A tag is kind << 56 | value << 32 | receiver's mb; the order on the link
distinguishes equal tags of later steps.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from elaswave_fx.errors import PlanError
from elaswave_fx.plan.order.hops import Hop
from elaswave_fx.plan.order.schedule import Action
from elaswave_fx.plan.plan import Plan
from elaswave_fx.plan.work.spans import Span
from elaswave_fx.plan.work.topology import Rank

Instruction = tuple[str | int, ...]

ACTIVATION, GRADIENT = 1, 2
"""Kinds of tags chosen here; 3 and above are the engine's own."""

LOOK_AHEAD = 2
"""Receives are posted this many receiving actions ahead of their use: one micro-batch more than is in flight."""

_BACKWARD = {"B": "BACKWARD", "I": "BACKWARD_INPUTS", "W": "BACKWARD_WEIGHTS"}

TAG_LIMIT = 1 << 24
"""Bound of the value index and the micro-batch number that a tag can encode."""


@dataclass(frozen=True)
class StepProgram:
    """The instructions of one rank; `micro_batches` in step coordinates."""

    rank: Rank
    instructions: tuple[Instruction, ...]
    micro_batches: tuple[Span, ...]


def step_program(plan: Plan, rank: Rank) -> StepProgram:
    """The training step of a rank: its schedule, reductions as soon as they delay no other rank, vote, update, gather.

    Buckets of which the rank owns a box, but which its units do not read, come first in the reductions (their REDUCE
    only posts receives), and last in updates and gathers.
    """
    lowering = _Lowering(plan, rank)
    used = lowering.buckets_by_first_use()
    owned = plan.owned_buckets(rank)
    foreign = sorted(owned - set(used))
    instructions: list[Instruction] = [("REDUCE", bucket) for bucket in foreign]
    instructions += lowering.actions(plan.order(rank), train=True)
    instructions.append(("VOTE",))
    for bucket in (*used, *foreign):
        if bucket in owned:
            instructions.append(("UPDATE", bucket))
        instructions.append(("GATHER", bucket))
    instructions.append(("SNAPSHOT",))
    return lowering.program(instructions)


def eval_program(plan: Plan, rank: Rank) -> StepProgram:
    """The forward-only pass of a rank over the same tile and hops, micro-batches in the order of training."""
    lowering = _Lowering(plan, rank)
    forwards = [action for action in plan.order(rank) if action[0] == "F"]
    return lowering.program(lowering.actions(forwards, train=False))


def tag(kind: int, value: int, micro_batch: int) -> int:
    """The tag of a value, or of its gradient, for a micro-batch of the receiver; PlanError if it does not fit."""
    if micro_batch >= TAG_LIMIT or value >= TAG_LIMIT:
        raise PlanError(
            f"step: value {value}, micro-batch {micro_batch} do not fit a tag, which tells {TAG_LIMIT} apart"
        )
    return kind << 56 | value << 32 | micro_batch


class _Lowering:
    def __init__(self, plan: Plan, rank: Rank) -> None:
        self._plan = plan
        self._tile = plan.tile(rank)
        self._units = tuple(self._tile.units)
        self._held = frozenset(self._units)
        self._values = plan.workload.values
        self._out: dict[int, list[Hop]] = defaultdict(list)
        self._in: dict[int, list[Hop]] = defaultdict(list)
        for hop in plan.hops_of(rank):
            if hop.source == rank:
                self._out[hop.source_micro_batch].append(hop)
            else:
                self._in[hop.target_micro_batch].append(hop)

    def _first_here(self, units: Sequence[int]) -> int | None:
        """The first of ascending units that lies in this tile."""
        for unit in units:
            if unit in self._held:
                return unit
        return None

    def program(self, instructions: Sequence[Instruction]) -> StepProgram:
        tile = self._tile
        return StepProgram(tile.rank, tuple(instructions), tile.micro_batches)

    def actions(self, order: Sequence[Action], train: bool) -> list[Instruction]:
        """All actions in order, each receive posted `LOOK_AHEAD` actions before its use."""
        posts = self._post_positions(order)
        last = max((i for i, action in enumerate(order) if action[0] in "BW"), default=-1)
        instructions: list[Instruction] = []
        for position, (kind, mb) in enumerate(order):
            for action in posts[position]:
                instructions += self._receives(action)
            if kind == "F":
                instructions += self._forward(mb)
            else:
                instructions += self._backward(kind, mb, reduce=train and position == last)
        return instructions

    def buckets_by_first_use(self) -> list[int]:
        """Buckets read by this tile, in the order in which the next step's forward reads them."""
        by_unit = self._buckets_of
        return [bucket for unit in sorted(by_unit) for bucket in by_unit[unit]]

    @cached_property
    def _buckets_of(self) -> dict[int, list[int]]:
        """Unit -> the buckets of which it is the first user within this tile."""
        found: dict[int, list[int]] = defaultdict(list)
        for index, bucket in enumerate(self._plan.workload.buckets):
            first = self._first_here(bucket.users)
            if first is not None:
                found[first].append(index)
        return found

    def _post_positions(self, order: Sequence[Action]) -> dict[int, list[Action]]:
        """Position -> actions whose receives are posted before it; gradients not before their own forward ran."""
        receiving = [position for position, (kind, _) in enumerate(order) if kind != "W"]
        forward_at = {mb: position for position, (kind, mb) in enumerate(order) if kind == "F"}
        posts: dict[int, list[Action]] = defaultdict(list)
        for place, position in enumerate(receiving):
            kind, mb = order[position]
            earliest = 0 if kind == "F" else forward_at[mb] + 1
            posts[max(earliest, receiving[max(0, place - LOOK_AHEAD)])].append((kind, mb))
        return posts

    def _receives(self, action: Action) -> list[Instruction]:
        kind, mb = action
        if kind == "F":
            return [self._transfer("RECV", hop, ACTIVATION, mb, hop.source) for hop in self._in[mb]]
        return [
            self._transfer("RECV", hop, GRADIENT, mb, hop.target)
            for hop in self._out[mb]
            if self._values[hop.value].has_grad
        ]

    def _forward(self, mb: int) -> list[Instruction]:
        """Units ascending. Values passed on are sent before their first consumer here, own values after their
        producer."""
        passed_on, made_here = _by_unit(), _by_unit()
        for hop in self._out.get(mb, ()):
            sent = self._transfer("SEND", hop, ACTIVATION, mb, hop.target)
            if self._passes_on(hop):
                passed_on[self._first_consumer(hop.value)].append(sent)
            else:
                made_here[self._values[hop.value].producer].append(sent)
        instructions: list[Instruction] = []
        for unit in self._units:
            if unit in passed_on:
                instructions += passed_on[unit]
            instructions.append(("FORWARD", unit, mb))
            if unit in made_here:
                instructions += made_here[unit]
        return instructions

    def _backward(self, kind: str, mb: int, reduce: bool) -> list[Instruction]:
        """Units descending; a gradient is sent after the last unit that adds to it. A bucket is reduced likewise, but
        not before the last gradient is sent: the previous stage waits for it, and on the same link it would queue
        behind the whole exchange.

        Whole backward passes and first halves make the gradients of values.
        """
        after = _by_unit()
        for hop in self._in.get(mb, ()) if kind != "W" else ():
            if self._values[hop.value].has_grad:
                sent = self._transfer("SEND", hop, GRADIENT, mb, hop.source)
                after[self._first_consumer(hop.value)].append(sent)
        left = min(after, default=len(self._plan.workload.units))
        for unit, buckets in sorted(self._buckets_of.items(), reverse=True) if reduce else ():
            after[min(unit, left)] += [("REDUCE", bucket) for bucket in buckets]
        instructions: list[Instruction] = []
        name = _BACKWARD[kind]
        for unit in reversed(self._units):
            instructions.append((name, unit, mb))
            if unit in after:
                instructions += after[unit]
        return instructions

    def _passes_on(self, hop: Hop) -> bool:
        return self._values[hop.value].producer not in self._held

    def _first_consumer(self, value: int) -> int:
        """The first consumer of a value that this rank receives or passes on."""
        first = self._first_here(self._values[value].consumers)
        assert first is not None
        return first

    def _transfer(self, opcode: str, hop: Hop, kind: int, mb: int, peer: Rank) -> Instruction:
        length = 1 if self._values[hop.value].sample_axis is None else len(hop.samples)
        receiver = hop.target_micro_batch if kind == ACTIVATION else hop.source_micro_batch
        return (opcode, hop.value, mb, peer, tag(kind, hop.value, receiver), 0, length, int(kind == GRADIENT))


def _by_unit() -> defaultdict[int, list[Instruction]]:
    return defaultdict(list)
