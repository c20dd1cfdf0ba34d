"""What the control plane needs of a plan: members, tiles, and who keeps which box.

In: a `Plan`. Out: an `Assignment`, which carries the hash of the plan's text, so that nobody acts on another plan.

    assignment_of(plan).boxes[3]  ->  BoxPlan(box=3, unit=1, owner=0, holders=(2,), catching=(), group=(0, 2))
"""

from __future__ import annotations

import hashlib

from elaswave_fx.control.protocol.types import Assignment, BoxId, BoxPlan
from elaswave_fx.plan.plan import Plan


def assignment_of(plan: Plan) -> Assignment:
    """The assignment of a plan; a box's unit is the first user of its bucket."""
    return Assignment(plan.ranks, plan.tiles, tuple(_box_plans(plan)), plan_hash(plan))


def plan_hash(plan: Plan) -> int:
    """63 bits of the plan's text: the same on every machine and in every process."""
    return int.from_bytes(hashlib.blake2b(plan.to_json().encode(), digest_size=8).digest(), "little") >> 1


def _box_plans(plan: Plan) -> list[BoxPlan]:
    found = []
    for number, box in enumerate(plan.boxes):
        bucket = plan.workload.buckets[box.bucket]
        group = plan.groups[bucket.name]
        found.append(BoxPlan(BoxId(number), bucket.users[0], box.owner, box.holders, box.catching, group))
    return found
