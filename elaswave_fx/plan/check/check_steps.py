"""Abstract execution of the instruction lists of all ranks together; reports the first rule that breaks.

Part of the independent checker. Each rank advances strictly in order. RECV and SEND do not block; FORWARD, BACKWARD,
its first half and SEND wait for the pieces they read. Messages between two ranks with one tag arrive in order. Tiles
and hops are those of `check_lanes.py`.

    run_instructions(plan, {0: [("FORWARD", 0, 0), ...], 1: [...]}, train=True)  ->  None, or one line
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from elaswave_fx.plan.check.check_lanes import due_hops, lane_tiles, ways
from elaswave_fx.plan.lower.step import Instruction
from elaswave_fx.plan.plan import Plan
from elaswave_fx.plan.work.tiling import Tile
from elaswave_fx.plan.work.topology import Rank

Key = tuple[int, int, int]
"""(value, micro-batch, 1 for its gradient)."""

Wire = tuple[Rank, Rank, int]
"""(source, target, tag)."""

_OPERANDS = {
    "RECV": 7,
    "SEND": 7,
    "FORWARD": 2,
    "BACKWARD": 2,
    "BACKWARD_INPUTS": 2,
    "BACKWARD_WEIGHTS": 2,
    "REDUCE": 1,
    "UPDATE": 1,
    "GATHER": 1,
    "VOTE": 0,
    "SNAPSHOT": 0,
}


class _Broken(Exception):
    """A rule was broken; the text says which."""


@dataclass
class _Piece:
    """Samples [lo, hi) of a value or its gradient, named by the micro-batch of either rank."""

    wire: Wire
    value: int
    mb: int
    grad: int
    lo: int
    hi: int
    size: int
    arrived: bool = False

    def name(self, names: Sequence[str]) -> str:
        what = "the gradient of " if self.grad else ""
        return f"samples [{self.lo}, {self.hi}) of {what}{names[self.value]}"


@dataclass
class _Worker:
    """Progress of one rank: `backward` for gradients of values, `summed` for gradients of parameters."""

    tile: Tile
    instructions: Sequence[Instruction]
    position: int = 0
    posts: dict[Key, list[_Piece]] = field(default_factory=lambda: defaultdict(list))
    begun: set[int] = field(default_factory=set)
    forward: set[tuple[int, int]] = field(default_factory=set)
    backward: set[tuple[int, int]] = field(default_factory=set)
    summed: set[tuple[int, int]] = field(default_factory=set)
    done: Counter[Instruction] = field(default_factory=Counter)

    def live(self) -> int:
        """Micro-batches that hold or await data: posted or begun, and not yet through their last unit."""
        return sum((self.units[0], mb) not in self.backward for mb in self.begun)

    @cached_property
    def units(self) -> tuple[int, ...]:
        """Units of the tile, ascending."""
        return tuple(self.tile.units)

    @cached_property
    def held(self) -> frozenset[int]:
        """The same, to ask for one."""
        return frozenset(self.units)

    def before(self, unit: int) -> tuple[int, ...]:
        """The units of the tile that run before `unit`, which is one of them, in a forward pass."""
        return self.units[: bisect_left(self.units, unit)]

    def after(self, unit: int) -> tuple[int, ...]:
        """The units of the tile that run after `unit`, which is one of them, in a forward pass."""
        return self.units[bisect_right(self.units, unit) :]


def run_instructions(plan: Plan, lists: Mapping[Rank, Sequence[Instruction]], train: bool) -> str | None:
    """The first violation in words, None if all lists run to their end and leave nothing behind."""
    return _Run(plan, lists, train).to_end()


class _Run:
    def __init__(self, plan: Plan, lists: Mapping[Rank, Sequence[Instruction]], train: bool) -> None:
        self._plan = plan
        self._train = train
        self._work = plan.workload
        tiles = lane_tiles(plan)
        self._workers = {t.rank: _Worker(t, lists.get(t.rank, ())) for t in tiles}
        self._sent: dict[Wire, list[_Piece]] = defaultdict(list)
        self._awaited: dict[Wire, list[_Piece]] = defaultdict(list)
        self._owned = {(box.owner, box.bucket) for box in plan.boxes}
        self._concerns = {tile.rank: self._buckets_of(tile) for tile in tiles}
        self._sources, self._targets = ways(list(due_hops(plan.workload, tiles)))
        self._read: dict[int, list[int]] = defaultdict(list)
        self._made: dict[int, list[int]] = defaultdict(list)
        for index, value in enumerate(self._work.values):
            self._made[value.producer].append(index)
            for unit in value.consumers:
                self._read[unit].append(index)

    def _buckets_of(self, tile: Tile) -> list[int]:
        """Buckets that the rank of this tile reads or owns a box of."""
        return [
            index
            for index, bucket in enumerate(self._work.buckets)
            if (tile.rank, index) in self._owned or any(u in tile.units for u in bucket.users)
        ]

    def to_end(self) -> str | None:
        moved = True
        while moved:
            moved = False
            for rank, worker in self._workers.items():
                while worker.position < len(worker.instructions):
                    instruction = worker.instructions[worker.position]
                    try:
                        if not self._execute(rank, worker, instruction):
                            break
                    except _Broken as broken:
                        return f"rank {rank}, instruction {worker.position} {_text(instruction)}: {broken}"
                    worker.done[instruction] += 1
                    worker.position += 1
                    moved = True
        return self._left_over()

    def _execute(self, rank: Rank, worker: _Worker, instruction: Instruction) -> bool:
        """Execute if possible; False if the rank has to wait. Raises _Broken for an instruction out of place."""
        opcode, *numbers = instruction
        operands = [int(n) for n in numbers]
        if _OPERANDS.get(str(opcode)) != len(operands):
            raise _Broken("there is no such instruction with that number of operands")
        if opcode in ("RECV", "SEND"):
            return self._transfer(rank, worker, str(opcode), operands)
        if opcode == "FORWARD":
            return self._forward(worker, *operands)
        if not self._train:
            raise _Broken("evaluation only receives, sends and runs forward")
        if opcode in ("BACKWARD", "BACKWARD_INPUTS"):
            return self._backward(worker, *operands, whole=opcode == "BACKWARD")
        if opcode == "BACKWARD_WEIGHTS":
            self._weights(worker, *operands)
            return True
        self._collective(rank, worker, str(opcode), operands)
        return True

    def _transfer(self, rank: Rank, worker: _Worker, opcode: str, operands: Sequence[int]) -> bool:
        value, mb, peer, tag, lo, hi, grad = operands
        if not (0 <= value < len(self._work.values) and 0 <= mb < len(worker.tile.micro_batches)):
            raise _Broken("no such value or micro-batch")
        spec = self._work.values[value]
        length = len(worker.tile.micro_batches[mb]) if spec.sample_axis is not None else 1
        if not 0 <= lo < hi <= length:
            raise _Broken(f"[{lo}, {hi}) is not within the {length} samples of the micro-batch")
        if peer not in self._workers or peer == rank:
            raise _Broken(f"rank {peer} is no peer")
        if grad not in (0, 1) or (grad and not (spec.has_grad and self._train)):
            raise _Broken("the value has no gradient here")
        there = self._other_end(rank, value, mb, sending=opcode == "SEND", grad=bool(grad))
        if there is None or there[0] != peer:
            raise _Broken(
                f"the {_what(grad)} {spec.name} of micro-batch {mb} {'comes from' if opcode == 'RECV' else 'goes to'} "
                f"{'nobody' if there is None else f'rank {there[0]}'}; values go from user to user"
            )
        wire = (Rank(peer), rank, tag) if opcode == "RECV" else (rank, Rank(peer), tag)
        piece = _Piece(wire, value, mb, grad, lo, hi, (hi - lo) * spec.bytes_per_sample)
        if opcode == "RECV":
            self._receive(rank, worker, piece)
            return True
        ready = self._gradient_ready(worker, value, mb) if grad else self._value_ready(worker, value, mb)
        if ready:
            self._sent[wire].append(piece)
            self._match(wire)
        return ready

    def _other_end(self, rank: Rank, value: int, mb: int, sending: bool, grad: bool) -> tuple[Rank, int] | None:
        """The peer that exchanges the value or its gradient with this rank, and the peer's micro-batch."""
        return (self._targets if sending != grad else self._sources).get((value, rank, mb))

    def _receive(self, rank: Rank, worker: _Worker, post: _Piece) -> None:
        spec = self._work.values[post.value]
        if not post.grad and any(u in worker.held and (u, post.mb) in worker.forward for u in spec.consumers):
            raise _Broken("the value was read already")
        worker.posts[post.value, post.mb, post.grad].append(post)
        if not post.grad:
            worker.begun.add(post.mb)
        self._awaited[post.wire].append(post)
        self._match(post.wire)
        bound = self._plan.predicted.ranks[rank].in_flight + 1
        if self._train and worker.live() > bound:
            raise _Broken(f"{worker.live()} micro-batches are posted or in flight; the bound is {bound}")

    def _match(self, wire: Wire) -> None:
        """Deliver, in order, sent pieces that are awaited."""
        while self._sent[wire] and self._awaited[wire]:
            sent, post = self._sent[wire].pop(0), self._awaited[wire].pop(0)
            place = f"rank {wire[0]} sends {{}} to rank {wire[1]} under tag {wire[2]}, which expects {{}}; both sides "
            if sent.size != post.size:
                raise _Broken(place.format(f"{sent.size} bytes", post.size) + "agree on sizes")
            there = self._other_end(wire[0], sent.value, sent.mb, sending=True, grad=bool(sent.grad))
            names = [value.name for value in self._work.values]
            if (sent.value, sent.grad, sent.lo, sent.hi) != (post.value, post.grad, post.lo, post.hi):
                raise _Broken(place.format(sent.name(names), post.name(names)) + "agree on what travels")
            if there != (wire[1], post.mb):
                text = f"{sent.name(names)} of its micro-batch {sent.mb}", f"that of its micro-batch {post.mb}"
                raise _Broken(place.format(*text) + "mean the same samples")
            post.arrived = True

    def _pieces(self, worker: _Worker, key: Key, length: int) -> bool:
        """Whether the posted pieces cover the value exactly once and have all arrived."""
        posts = sorted(worker.posts[key], key=lambda p: p.lo)
        position = 0
        for post in posts:
            if post.lo != position:
                break
            position = post.hi
        if position != length or sum(p.hi - p.lo for p in posts) != length:
            raise _Broken(
                f"the {_what(key[2])} {self._work.values[key[0]].name} of micro-batch {key[1]} is not posted exactly "
                "once; every sample is received before it is read"
            )
        return all(p.arrived for p in posts)

    def _value_ready(self, worker: _Worker, value: int, mb: int) -> bool:
        """Whether a value can be read; raises _Broken if no rank will ever send it."""
        spec = self._work.values[value]
        if spec.producer in worker.held:
            if (spec.producer, mb) not in worker.forward:
                raise _Broken(f"value {spec.name} of micro-batch {mb} is read before unit {spec.producer} ran")
            return True
        length = 1 if spec.sample_axis is None else len(worker.tile.micro_batches[mb])
        return self._pieces(worker, (value, mb, 0), length)

    def _later_ready(self, worker: _Worker, value: int, mb: int) -> bool:
        """Whether the gradient of a value has arrived from a later stage, if one returns it."""
        if (value, worker.tile.rank, mb) not in self._targets:
            return True
        length = 1 if self._work.values[value].sample_axis is None else len(worker.tile.micro_batches[mb])
        return self._pieces(worker, (value, mb, 1), length)

    def _gradient_ready(self, worker: _Worker, value: int, mb: int) -> bool:
        spec = self._work.values[value]
        late = [u for u in spec.consumers if u in worker.held and (u, mb) not in worker.backward]
        if late:
            raise _Broken(
                f"the gradient of value {spec.name} of micro-batch {mb} leaves before unit {late[0]} has added to it"
            )
        return self._later_ready(worker, value, mb)

    def _forward(self, worker: _Worker, unit: int, mb: int) -> bool:
        tile = worker.tile
        if unit not in worker.held or not 0 <= mb < len(tile.micro_batches) or (unit, mb) in worker.forward:
            raise _Broken("each unit of the tile runs once for each micro-batch")
        if any((u, mb) not in worker.forward for u in worker.before(unit)[-1:]):
            raise _Broken("units run forward in ascending order")
        if not all(self._value_ready(worker, value, mb) for value in self._read[unit]):
            return False
        worker.forward.add((unit, mb))
        worker.begun.add(mb)
        return True

    def _backward(self, worker: _Worker, unit: int, mb: int, whole: bool) -> bool:
        later = worker.after(unit)
        if (unit, mb) not in worker.forward or (unit, mb) in worker.backward:
            raise _Broken("each unit of the tile runs backward once, after its forward")
        if any((worker.units[-1], mb) not in worker.forward or (u, mb) not in worker.backward for u in later):
            raise _Broken("units run backward in descending order")
        touched = [i for i in self._made[unit] + self._read[unit] if self._work.values[i].has_grad]
        if not all(self._later_ready(worker, value, mb) for value in touched):
            return False
        worker.backward.add((unit, mb))
        if whole:
            worker.summed.add((unit, mb))
        return True

    def _weights(self, worker: _Worker, unit: int, mb: int) -> None:
        if (unit, mb) not in worker.backward or (unit, mb) in worker.summed:
            raise _Broken("the weight half of a unit runs once, after its input half")
        if any((u, mb) not in worker.summed for u in worker.after(unit)):
            raise _Broken("weight halves run in descending order of units")
        worker.summed.add((unit, mb))

    def _collective(self, rank: Rank, worker: _Worker, opcode: str, operands: Sequence[int]) -> None:
        """The rules of REDUCE, VOTE, UPDATE, GATHER, SNAPSHOT: each once, in that order per bucket."""
        if worker.done[(opcode, *operands)]:
            raise _Broken("it is done once a step")
        everything = len(worker.tile.units) * len(worker.tile.micro_batches)
        if opcode in ("VOTE", "UPDATE", "GATHER", "SNAPSHOT") and len(worker.summed) != everything:
            raise _Broken("it follows the last backward of the rank")
        if operands:
            self._bucket_rules(rank, worker, opcode, operands[0])
        if opcode == "VOTE":
            missing = [b for b in self._concerns[worker.tile.rank] if not worker.done["REDUCE", b]]
            if missing:
                raise _Broken(f"the vote follows the reduction of every bucket (missing: {missing})")
        if opcode == "SNAPSHOT":
            missing = [b for b in self._concerns[worker.tile.rank] if not worker.done["GATHER", b]]
            if missing or not worker.done[("VOTE",)]:
                raise _Broken(f"the snapshot follows the vote and the gather of every bucket (missing: {missing})")

    def _bucket_rules(self, rank: Rank, worker: _Worker, opcode: str, bucket: int) -> None:
        if bucket not in self._concerns[worker.tile.rank]:
            raise _Broken("the rank neither reads nor owns anything of that bucket")
        spec = self._work.buckets[bucket]
        if opcode == "REDUCE":
            for unit in spec.users:
                for mb in range(len(worker.tile.micro_batches)):
                    if unit in worker.held and (unit, mb) not in worker.summed:
                        raise _Broken(f"unit {unit} has yet to add micro-batch {mb} to that bucket")
            return
        owns = (rank, bucket) in self._owned
        if not worker.done[("VOTE",)]:
            raise _Broken("parameters change only after the vote")
        if opcode == "UPDATE" and not owns:
            raise _Broken("the rank owns nothing of that bucket")
        if opcode == "GATHER" and owns and not worker.done["UPDATE", bucket]:
            raise _Broken("an owner updates before it gathers")

    def _left_over(self) -> str | None:
        """Instructions that did not end and data left behind, in words."""
        for rank, worker in self._workers.items():
            if worker.position < len(worker.instructions):
                waiting = [
                    f"rank {r} at {_text(w.instructions[w.position])}"
                    for r, w in self._workers.items()
                    if w.position < len(w.instructions)
                ]
                return f"deadlock: {', '.join(waiting[:4])} wait for each other; every list runs to its end"
            want = len(worker.tile.units) * len(worker.tile.micro_batches)
            if len(worker.forward) != want or (self._train and len(worker.summed) != want):
                return f"rank {rank} ends with units that have not run; each unit runs for each micro-batch"
            if self._train and not worker.done[("SNAPSHOT",)]:
                return f"rank {rank} ends without SNAPSHOT; a step ends with it"
        for wire, sizes in self._sent.items():
            if sizes:
                return f"rank {wire[0]} sends under tag {wire[2]} what rank {wire[1]} never receives; pieces match"
        for wire, posts in self._awaited.items():
            if posts:
                return f"rank {wire[1]} awaits under tag {wire[2]} what rank {wire[0]} never sends; pieces match"
        return None


def _what(grad: int) -> str:
    return "gradient of value" if grad else "value"


def _text(instruction: Instruction) -> str:
    return " ".join(str(part) for part in instruction)
