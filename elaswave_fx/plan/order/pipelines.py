"""Pipelines: lanes one rank wide in which every stage passes values to the next and gets their gradients back.

Most lanes are pipelines. Their order is known without a run of `schedule.py`: it is 1F1B, and one topological sequence
of all tasks serves all pipelines of the same depth. In: depth, number of micro-batches, seconds of each. Out: orders,
and the seconds of a step.

    one_f_one_b(ahead=2, count=3)  ->  F0 F1 B0 F2 B1 B2
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

from elaswave_fx.plan.order.hops import Traffic
from elaswave_fx.plan.order.schedule import Action, LaneKind

Seconds = Sequence[Sequence[float]]
"""Seconds by stage and micro-batch."""


def is_pipeline(kind: LaneKind, traffic: Mapping[tuple[int, int], Traffic]) -> bool:
    """Whether lanes of the kind are pipelines; `traffic` between its stages."""
    neighbours = ((stage, stage + 1) for stage in range(len(kind.stages) - 1))
    return all(len(stage.deal) == 1 for stage in kind.stages) and all(
        pair in traffic and traffic[pair].back is not None for pair in neighbours
    )


def pipeline_orders(depth: int, count: int) -> tuple[tuple[Action, ...], ...]:
    """Orders by stage; stages as far from the end share theirs."""
    return tuple(one_f_one_b(min(depth - stage, count), count) for stage in range(depth))


@lru_cache(maxsize=1024)
def one_f_one_b(ahead: int, count: int) -> tuple[Action, ...]:
    """`ahead` forward passes, then backward and forward alternate, then the last backward passes (PipeDream, SOSP 2019,
    section 3.2; with a flush as in Megatron-LM, SC 2021)."""
    order: list[Action] = [("F", number) for number in range(ahead)]
    for number in range(count):
        order.append(("B", number))
        if ahead + number < count:
            order.append(("F", ahead + number))
    return tuple(order)


def pipeline_s(
    kind: LaneKind, traffic: Mapping[tuple[int, int], Traffic], forward_s: Seconds, backward_s: Seconds
) -> float:
    """Seconds from the first forward pass to the last backward pass, as `schedule.makespan_s` counts them."""
    depth, count = len(kind.stages), len(kind.sizes)
    onward, back = _ways(kind, traffic)
    there = [[0.0] * count for _ in range(depth)]  # when all inputs of a forward pass have arrived
    there_again = [[0.0] * count for _ in range(depth)]  # and of a backward pass
    clock = [0.0] * depth
    free = [0.0] * (2 * len(traffic))  # by link and direction, when the last message has passed
    for stage, is_forward, number in _sequence(depth, count):
        taken, arrived, ways = (forward_s, there, onward) if is_forward else (backward_s, there_again, back)
        begin, now = arrived[stage][number], clock[stage]
        now = (begin if begin > now else now) + taken[stage][number]
        clock[stage] = now
        for target, slot, passing_s, latency_s in ways[stage]:
            passed = (now if now > free[slot] else free[slot]) + passing_s[number]
            free[slot] = passed
            if passed + latency_s > arrived[target][number]:
                arrived[target][number] = passed + latency_s
    return max(clock)


class StageSeconds(NamedTuple):
    """Seconds of a stage: a forward and a backward pass of the smallest micro-batch, a forward pass of the largest, and
    all passes."""

    forward: float
    backward: float
    largest_forward: float
    all: float


def least_pipeline_s(stages: Sequence[StageSeconds], count: int) -> float:
    """Lower bound of `pipeline_s`, without links. A stage waits for the first forward pass of earlier stages, then for
    the first micro-batch to return, as its forward passes in flight are bounded; earlier stages run a backward pass
    after its last."""
    through_s = sum(stage.forward + stage.backward for stage in stages)
    before_s, least_s = 0.0, 0.0
    for place, stage in enumerate(stages):
        ahead = min(len(stages) - place, count)
        come_back_s = through_s - before_s - stage.backward
        least_s = max(least_s, before_s + stage.all + max(0.0, come_back_s - ahead * stage.largest_forward))
        before_s += stage.forward + stage.backward
    return least_s


_Way = tuple[int, int, Sequence[float], float]
"""(target stage, index of the link, seconds of each micro-batch on it, latency)."""


def _ways(kind: LaneKind, traffic: Mapping[tuple[int, int], Traffic]) -> tuple[list[list[_Way]], list[list[_Way]]]:
    """Ways of values and ways of gradients, by source stage."""
    onward: list[list[_Way]] = [[] for _ in kind.stages]
    back: list[list[_Way]] = [[] for _ in kind.stages]
    for slot, ((source, target), sent) in enumerate(traffic.items()):
        link = kind.link(source, target)
        onward[source].append((target, 2 * slot, _passing_s(kind, sent, link.bytes_per_s), link.latency_s))
        if sent.back is not None:
            back[target].append((source, 2 * slot + 1, _passing_s(kind, sent.back, link.bytes_per_s), link.latency_s))
    return onward, back


def _passing_s(kind: LaneKind, sent: Traffic, bytes_per_s: float) -> list[float]:
    of_size = {size: sent.bytes(size) / bytes_per_s for size in set(kind.sizes)}
    return [of_size[size] for size in kind.sizes]


@lru_cache(maxsize=64)
def _sequence(depth: int, count: int) -> tuple[tuple[int, bool, int], ...]:
    """All tasks (stage, is_forward, micro-batch) in topological order: after earlier tasks of the stage, and after the
    same micro-batch in the previous stage or, backward, in the next one."""
    orders = pipeline_orders(depth, count)
    position, done = [0] * depth, {"F": [0] * depth, "B": [0] * depth}
    found: list[tuple[int, bool, int]] = []
    waiting = [0]
    while waiting:
        stage = waiting.pop()
        order, first = orders[stage], position[stage]
        for kind, number in order[first:]:
            before = stage - 1 if kind == "F" else stage + 1
            if 0 <= before < depth and done[kind][before] <= number:
                break
            done[kind][stage] += 1
            position[stage] += 1
            found.append((stage, kind == "F", number))
        if position[stage] > first:
            waiting += [other for other in (stage - 1, stage + 1) if 0 <= other < depth]
    assert len(found) == 2 * depth * count, "1F1B runs to its end"
    return tuple(found)
