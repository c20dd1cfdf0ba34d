"""What is tried where: everything (`make chaos`), and one of each kind (`make test`, beside the pairwise set).

everything(seed=0)   ->  some 1,500 scenarios; the random ones are drawn from the seed
specials()           ->  one of each group, always the same
"""

from __future__ import annotations

import itertools
import random
import signal
from collections.abc import Iterable, Sequence

from elaswave_fx.plan.next.policies import POLICIES
from tests.recovery import fault_matrix as cases
from tests.recovery.churn import coming_and_going
from tests.recovery.endurance import enduring
from tests.recovery.fault_matrix import LAYOUTS, PHASES, Loss, hosts_of, ranks_of
from tests.recovery.joins import POINTS, VICTIMS, joining
from tests.recovery.kinds import ALIKE_LAYOUTS, KINDS
from tests.recovery.leaves import leaving, leaving_in
from tests.recovery.lifecycle_faults import (
    all_replicas,
    checkpointing,
    evaluating,
    exporting,
    launcher,
    launcher_and_more,
    no_replicas,
    overloaded,
    starting,
    two_replicas,
)
from tests.recovery.scenarios import (
    Scenario,
    alike,
    answered,
    coordinator,
    cut_off,
    host,
    inside,
    one_after_another,
    outside,
    slowed,
    stopped,
    stops_itself,
    unlinked,
    while_recovering,
)
from tests.recovery.storms import storm

DRAWS = 20
"""Random cases of each kind of blow from outside."""

SOAK_STEPS, SOAK_S = 5000, 1800.0
ENDURANCE_STEPS = 10_000
STORMS = 200
COME_AND_GO = 50


def everything(seed: int = 0) -> list[Scenario]:
    """All of it. Another seed draws other moments and ranks."""
    return [
        *(inside([loss]) for loss in cases.product()),
        *(inside(losses) for losses in cases.in_jobs(cases.pairwise()) if len(losses) > 1),
        *policies([loss] for loss in cases.product()),
        *settings(),
        *_hosts(),
        *_drawn(seed),
        *_moments(seed),
        *(stops_itself(layout, ranks_of(layout)[-1], phase) for layout in LAYOUTS for phase in PHASES),
        *(cut_off(loss) for loss in cases.product()),
        *(slowed(layout, rank) for layout in LAYOUTS for rank in ranks_of(layout)),
        *_leaves(seed),
        *(leaving_in(loss) for loss in cases.product()),
        *_joins(seed),
        *(alike(kind, layout) for kind in KINDS for layout in ALIKE_LAYOUTS),
        *(storm(number) for number in range(STORMS)),
        overloaded((2, 2), SOAK_STEPS, hogs=4, timeout_s=SOAK_S),
        enduring((2, 2), ENDURANCE_STEPS),
        coming_and_going((2, 1), COME_AND_GO),
    ]


def policies(jobs: Iterable[Sequence[Loss]]) -> list[Scenario]:
    """Each of the other policies, wherever it has an answer."""
    others = [name for name in POLICIES if name != "elaswave"]
    return [answered(name, losses) for losses in jobs for name in others if cases.has_answer(name, losses)]


def settings() -> list[Scenario]:
    """Losses in runs other than the plain one: batch-coupled operators, low precision, other numbers of replicas."""
    resnet = ("parallel.granule=8",)
    return [
        inside([Loss((2, 2), 3, "backward")], *resnet, recipe="resnet_digits", label="batch-norm"),
        inside([Loss((2, 2), 2, "reduce")], "precision=bf16", label="bf16"),
        inside([Loss((2, 2), 3, "forward"), Loss((2, 2), 0, "update")], "exact=false", label="default"),
        inside([Loss((3, 2), 4, "backward")], "exact=false", label="default"),
        inside([Loss((2, 2), 0, "gather")], *resnet, "exact=false", recipe="resnet_digits", label="default-batch-norm"),
        inside([Loss((2, 2), 0, "gather")], *resnet, recipe="resnet_digits", label="batch-norm"),
        inside([Loss((2, 2), 1, "update"), Loss((2, 2), 2, "reduce")], "copies.record=bf16", label="bf16-records"),
        inside(  # other micro-batches round otherwise in bf16
            [Loss((2, 2), 2, "snapshot")],
            "precision=bf16",
            "exact=false",
            label="default-bf16",
            loss_rtol=1e-4,
            parameter_rtol=2e-3,
        ),
        no_replicas((2, 2), 3, checkpoints=True),
        no_replicas((2, 2), 0, checkpoints=False),
        no_replicas((1, 3), 1, checkpoints=True),
        all_replicas((2, 2), (1, 3)),
        two_replicas((3, 2), (0, 2)),
        two_replicas((2, 3), (1, 4)),
    ]


def specials() -> list[Scenario]:
    """What `make test` runs beside the pairwise set."""
    return [
        *settings(),
        host((2, 2), (2, 3), "forward"),
        host((1, 3), (0, 1), "update"),
        outside((3, 2), 4, 1),
        outside((4, 1), 0, 2),
        one_after_another((3, 2), 0, 3, 3),
        while_recovering((2, 2), 2, 3, 4),
        while_recovering((3, 2), 0, 5, 5),
        coordinator((2, 2), None, 6),
        coordinator((2, 2), 0, 7),
        coordinator((2, 3), 4, 8),
        stopped((2, 2), 1, 9, wakes=True),
        stopped((4, 1), 0, 10, wakes=False),
        stops_itself((2, 2), 3, "reduce"),
        cut_off(Loss((2, 2), 1, "gather")),
        cut_off(Loss((1, 3), 0, "update")),
        slowed((2, 2), 1),
        unlinked((2, 2), 1, 11),
        evaluating((2, 2), 0, 11),
        checkpointing((2, 2), 0, 12),
        checkpointing((2, 2), 1, 13),
        checkpointing((3, 2), 2, 14, every=1),
        exporting((2, 2), 3, 14),
        starting((2, 2), 2, 15),
        launcher((2, 2), 16, checkpoints=True),
        launcher((1, 3), 17, checkpoints=False),
        launcher_and_more((2, 2), 0, signal.SIGKILL, coordinator=True),
        launcher_and_more((1, 3), 1, signal.SIGSTOP, coordinator=False),
        overloaded((2, 2), 200, hogs=4, timeout_s=90.0),
        enduring((2, 2), 800),
        coming_and_going((2, 1), 3),
        joining((4, 1), "preparing", "member", 31),
        joining((3, 2), "member", "coordinator", 32),
        joining((2, 3), "settled", "member", 33),
        storm(1),
        storm(2),
    ]


def _joins(seed: int) -> list[Scenario]:
    """In each layout, at each point, with each victim."""
    product = itertools.product(LAYOUTS, POINTS, VICTIMS)
    return [
        joining(layout, point, victim, seed + number)
        for number, (layout, point, victim) in enumerate(product)
        if victim != "nobody" or point == POINTS[-1]
    ]


def _leaves(seed: int) -> list[Scenario]:
    """Every rank of every layout leaves; alone, while another one dies, and while the coordinator does, in turn."""
    found: list[Scenario] = []
    for layout in LAYOUTS:
        for rank in ranks_of(layout):
            moment = seed * 1000 + len(found)
            other = (rank + 1) % len(ranks_of(layout))
            kill, coordinator = ((None, False), (other, False), (None, True))[len(found) % 3]
            found.append(leaving(layout, (rank,), moment, kill, coordinator))
    return found


def _hosts() -> list[Scenario]:
    """Every host of two ranks, in phases that alternate."""
    pairs = [(layout, ranks) for layout in LAYOUTS for ranks in hosts_of(layout) if len(ranks) > 1]
    return [host(layout, ranks, PHASES[n % len(PHASES)]) for n, (layout, ranks) in enumerate(pairs)]


def _drawn(seed: int) -> list[Scenario]:
    """Kills from outside, of ranks and at moments that the seed draws."""
    draw = random.Random(seed)
    found: list[Scenario] = []
    for number in range(DRAWS):
        layout = LAYOUTS[number % len(LAYOUTS)]
        moment = seed * 1000 + number
        first, second = draw.sample(ranks_of(layout), 2)
        found += [
            outside(layout, draw.choice(ranks_of(layout)), moment),
            one_after_another(layout, first, second, moment),
            while_recovering(layout, first, second, moment),
        ]
        found.append(coordinator(layout, None if number % 4 == 0 else first, moment))
        if number < 2 * len(LAYOUTS):
            found.append(unlinked(layout, first, moment))
            found.append(stopped(layout, second, moment, wakes=number % 2 == 0))
    return found


def _moments(seed: int) -> list[Scenario]:
    """Start-up, evaluation, checkpoints, hand-back, the launcher's end: each rank of the plain layout, twice."""
    found: list[Scenario] = []
    for number in range(8):
        moment = seed * 1000 + number
        rank = number % 4
        found += [make((2, 2), rank, moment) for make in (starting, evaluating, checkpointing, exporting)]
        found.append(checkpointing((3, 2), rank, moment, every=1))
    for number, layout in enumerate(LAYOUTS):
        found += [launcher(layout, seed * 1000 + number, checkpoints) for checkpoints in (True, False)]
        found.append(launcher_and_more(layout, number % len(ranks_of(layout)), signal.SIGKILL, coordinator=True))
    return found
