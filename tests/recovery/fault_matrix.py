"""Which failures are tried: the full product of layouts, ranks and phases, and a small set that covers every pair.

product()    138 losses, one per job
pairwise()   the same pairs (layout, phase), (layout, rank), (kind of rank, phase) in few jobs, several losses in each

    Loss(layout=(3, 2), rank=4, phase="reduce")     Job = a layout and losses at rising steps
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

Layout = tuple[int, int]
"""dp x pp."""

LAYOUTS: tuple[Layout, ...] = ((2, 2), (3, 2), (2, 3), (4, 1), (1, 3))
PHASES = ("forward", "backward", "reduce", "update", "gather", "snapshot")
RANKS_PER_HOST = 2

FIRST_STEP, STEPS_BETWEEN, STEPS = 6, 9, 42
"""Of the first loss in a job, and from one to the next: long enough for a replica to be made again; of all jobs."""


@dataclass(frozen=True)
class Loss:
    """One rank of a layout, killed in a phase."""

    layout: Layout
    rank: int
    phase: str

    @property
    def name(self) -> str:
        dp, pp = self.layout
        return f"{dp}x{pp}-rank{self.rank}-{self.phase}"

    @property
    def kind(self) -> str:
        return kind_of(self.layout, self.rank)

    @property
    def pairs(self) -> frozenset[tuple[object, ...]]:
        """What it covers."""
        return frozenset(
            {
                ("layout, phase", self.layout, self.phase),
                ("layout, rank", self.layout, self.rank),
                ("kind, phase", self.kind, self.phase),
            }
        )


def kind_of(layout: Layout, rank: int) -> str:
    """What is special about a rank: it speaks for all (0), it is the whole of its stage, it has the last stage."""
    dp, pp = layout
    if rank == 0:
        return "speaker"
    if dp == 1:
        return "alone in its stage"
    return "last stage" if rank % pp == pp - 1 else "inner stage"


def name_of(layout: Layout) -> str:
    return f"{layout[0]}x{layout[1]}"


def ranks_of(layout: Layout) -> range:
    return range(layout[0] * layout[1])


def host_of(rank: int) -> int:
    return rank // RANKS_PER_HOST


def hosts_of(layout: Layout) -> list[list[int]]:
    """Ranks by host."""
    return [list(ranks) for _, ranks in itertools.groupby(ranks_of(layout), host_of)]


def product() -> list[Loss]:
    """Every rank of every layout in every phase."""
    return [Loss(layout, rank, phase) for layout in LAYOUTS for rank in ranks_of(layout) for phase in PHASES]


def pairwise() -> list[Loss]:
    """Greedily few losses whose pairs are those of the product; ties go to the first."""
    candidates = product()
    wanted = set[object]().union(*(loss.pairs for loss in candidates))
    chosen = []
    while wanted:
        best = max(candidates, key=lambda loss: len(loss.pairs & wanted))
        chosen.append(best)
        wanted -= best.pairs
    return chosen


def in_jobs(losses: Iterable[Loss]) -> list[tuple[Loss, ...]]:
    """Losses one after another in few jobs: each leaves ranks on two hosts, or is the last one of its job."""
    jobs: list[list[Loss]] = []
    for loss in losses:
        job = next((job for job in jobs if _fits(job, loss)), None)
        if job is None:
            jobs.append([loss])
        else:
            job.append(loss)
    return [tuple(job) for job in jobs]


def _fits(job: Sequence[Loss], loss: Loss) -> bool:
    """After the losses before it every box has replicas on two hosts again."""
    if job[0].layout != loss.layout or any(other.rank == loss.rank for other in job):
        return False
    left = set(ranks_of(loss.layout)) - {other.rank for other in job}
    return len({host_of(rank) for rank in left}) > 1 and len(left) > 2


def has_answer(policy: str, losses: Sequence[Loss]) -> bool:
    """Whether a policy can go on after these losses: recycle as long as every stage has a rank, drop_replica
    and smaller_batch as long as a lane is whole, the others always."""
    dp, pp = losses[0].layout
    lost = {loss.rank for loss in losses}
    if policy == "recycle":
        return all(any(lane * pp + stage not in lost for lane in range(dp)) for stage in range(pp))
    if policy in ("drop_replica", "smaller_batch"):
        return any(lost.isdisjoint(range(lane * pp, (lane + 1) * pp)) for lane in range(dp))
    return True


def faults_of(losses: Sequence[Loss], kind: str = "kill") -> str:
    """The override that makes the losses happen, one after another."""
    return faults_at([(FIRST_STEP + STEPS_BETWEEN * n, loss.rank, loss.phase) for n, loss in enumerate(losses)], kind)


def faults_at(places: Iterable[tuple[int, int, str]], kind: str = "kill") -> str:
    """The override for faults at (step, rank, phase)."""
    entries = (f"{{step: {step}, rank: {rank}, kind: {kind}, phase: {phase}}}" for step, rank, phase in places)
    return f"faults=[{', '.join(entries)}]"
