"""Ranks that opened the data apart: who reads whose samples, and what comes of one that differs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch  # noqa: F401 - the native module finds its libraries loaded
from hypothesis import given
from hypothesis import strategies as st

from elaswave_fx import _native
from elaswave_fx.control.store.ledger import CrossCheck, Payload
from elaswave_fx.data import Source
from elaswave_fx.data.dataset import Dataset, Sample, WrappedDataset
from elaswave_fx.data.sample_digest import SampleDigest
from elaswave_fx.errors import InputsDiffer
from elaswave_fx.plan.make.planner import plan_lanes
from elaswave_fx.plan.plan import Plan
from elaswave_fx.plan.work.spans import Span, WorkSpan
from elaswave_fx.plan.work.topology import Rank, local_topology
from elaswave_fx.worker.cross_check import Difference, checked_ranks, find_difference, is_needed, message
from elaswave_fx.worker.feed import InputFeed, reads_alike
from tests.plan.real_steps import STEPS, TinyJob, by_rank


@st.composite
def members(draw: st.DrawFn) -> tuple[list[Rank], int]:
    """Ranks, ascending, and how many the launcher started."""
    numbers = draw(st.sets(st.integers(0, 11), min_size=1, max_size=8))
    return [Rank(number) for number in sorted(numbers)], draw(st.integers(0, 12))


@given(members(), st.integers(0, 10**6))
def test_a_rank_reads_samples_of_another_origin_and_all_that_may_be_read_are(
    given: tuple[list[Rank], int], step: int
) -> None:
    ranks, started = given
    pairs = checked_ranks(ranks, started, step)
    first = [rank for rank in ranks if rank < started]
    assert all(reader != other and max(reader, other) >= started for reader, other in pairs.items())
    assert len(set(pairs.values())) == len(pairs) and {*pairs, *pairs.values()} <= set(ranks)
    if len(ranks) == 1:
        assert not pairs
    elif 2 * max(len(first), 1) <= len(ranks):
        assert set(pairs) == set(pairs.values()) == set(ranks)
    else:
        joined = set(ranks) - set(first)
        assert joined <= set(pairs.values()), "what a rank that joined feeds is read by another in every step"
        assert joined <= set(pairs)


@given(members())
def test_all_pairs_with_a_rank_that_joined_come_up(given: tuple[list[Rank], int]) -> None:
    ranks, started = given
    first = {rank for rank in ranks if rank < started}
    found = {pair for step in range(200) for pair in checked_ranks(ranks, started, step).items()}
    joined = set(ranks) - first
    assert found >= {(a, b) for a in first for b in joined} | {(b, a) for a in first for b in joined}
    assert first or found == {(a, b) for a in joined for b in joined if a != b}


def test_ranks_of_one_launcher_read_nothing_twice() -> None:
    ranks = [Rank(rank) for rank in range(4)]
    assert checked_ranks(ranks, 4, 7) == checked_ranks([Rank(9)], 4, 7) == {}
    assert checked_ranks(ranks, 3, 0) == {0: 3, 3: 2}


def votes(fed: Sequence[int], read: Sequence[int], rank: int = 2) -> dict[Rank, Payload]:
    """Of rank 2, which feeds samples 8 to 11 of a step, and of rank 0, which has read them. Numbers: their hashes."""

    def sums(hashes: Sequence[int]) -> tuple[int, int]:
        return sum(hashes), sum((1008 + at) * each for at, each in enumerate(hashes)) % (1 << 64)

    spans = (WorkSpan(Span(0, 2), Span(8, 12)), WorkSpan(Span(2, 3), Span(8, 12)))
    told, places = sums(fed)
    return {
        Rank(2): Payload(content_hash=told, places=places, consumed=spans),
        Rank(0): Payload(cross_check=CrossCheck(rank, *sums(read))),
    }


def test_the_sample_that_differs_alone_is_found() -> None:
    alike = [17, 18, 19, 20]
    assert find_difference(votes(alike, alike), 1000) is None
    for at in range(4):
        other = [each + 5 * (place == at) for place, each in enumerate(alike)]
        for fed, read in ((alike, other), (other, alike)):
            assert find_difference(votes(fed, read), 1000) == Difference(Rank(0), Rank(2), [1008 + at])
    assert find_difference(votes(alike, [18, 18, 24, 20]), 1000) == Difference(
        Rank(0), Rank(2), [1008, 1009, 1010, 1011]
    )
    assert find_difference(votes(alike, [1, 2, 3, 4], rank=9), 1000) is None, "nobody has fed that"


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> TinyJob:
    return TinyJob(tmp_path_factory.mktemp("job"))


def test_what_a_digest_covers_is_not_read_again(job: TinyJob) -> None:
    transformed = replace(job.config, data=replace(job.config.data, transform={"_target_": "mine.Blur"}))
    whole, part = SampleDigest("ab", 7, 7).text(), SampleDigest("ab", 6, 7).text()
    assert [is_needed(job.config, each) for each in (whole, part, "")] == [False, True, False]
    assert is_needed(transformed, whole) and not is_needed(transformed, "")


class OneDiffers(WrappedDataset):
    """One field of one sample is another one."""

    def __init__(self, wrapped: Dataset, bad: int, field: str) -> None:
        super().__init__(wrapped)
        self._bad, self._field = bad, field

    def sample(self, index: int, key: int | None = None) -> Sample:
        found = self._wrapped.sample(index, key)
        return {**found, self._field: found[self._field].flip(0)} if index == self._bad else found


class Unsteady(WrappedDataset):
    """Samples are others whenever they are read."""

    def sample(self, index: int, key: int | None = None) -> Sample:
        self.reads = getattr(self, "reads", id(self)) + 1
        found = self._wrapped.sample(index, key)
        return {**found, "labels": found["labels"].roll(self.reads % 7)}


def train(job: TinyJob, plan: Plan, sources: dict[int, Source], started: int) -> dict[Rank, tuple[int, str]]:
    """Steps of a job that `started` ranks began, as far as they go: how many are committed, and why no more."""
    parallel = replace(job.config.parallel, dp=started, pp=1)
    config = replace(job.config, parallel=parallel)

    def steps(rank: Rank, endpoint: _native.Endpoint | None) -> tuple[int, str]:
        engine, source = job.engine(plan, rank, endpoint), sources.get(rank, job.source)
        feed, step = InputFeed(config, job.artifact, plan, rank, source, 0, cross_check=True), 0
        try:
            for step in range(STEPS):
                job.step(engine, step, feed.next_batch(step))
        except InputsDiffer:
            payloads = {Rank(each): Payload.unpack(vote) for each, vote in engine.native.holdings().votes.items()}
            found = find_difference(payloads, step * config.global_batch)
            assert found is not None
            return step, message(config, job.source, step, found, lambda rank: f"host-{rank}")
        finally:
            feed.close()
        return STEPS, ""

    return by_rank(plan, steps)


COLUMNS, PIPELINE = [(1,), (1,)], [(1, 1)]


@pytest.mark.parametrize("lanes", [COLUMNS, PIPELINE], ids=["columns", "pipeline"])
@pytest.mark.parametrize("started", [0, 1], ids=["both joined", "one joined"])
def test_the_same_samples_train(job: TinyJob, lanes: list[tuple[int, ...]], started: int) -> None:
    plan = plan_lanes(job.workload, local_topology(2), lanes, replicas=0)
    assert train(job, plan, {}, started) == {0: (STEPS, ""), 1: (STEPS, "")}


@pytest.mark.parametrize("lanes", [COLUMNS, PIPELINE], ids=["columns", "pipeline"])
@pytest.mark.parametrize("field", ["input_ids", "labels"])
@pytest.mark.parametrize("differs", [0, 1])
@pytest.mark.parametrize("place", [1, 10])
def test_a_sample_that_differs_is_in_no_step(
    job: TinyJob, lanes: list[tuple[int, ...]], field: str, differs: int, place: int
) -> None:
    """With the rank that joined as the first stage and as the last, fed by it or by the other, in one input alone."""
    plan = plan_lanes(job.workload, local_topology(2), lanes, replicas=0)
    bad = int(job.source.train.indices(job.config.global_batch + place, 1)[0])
    other = replace(job.source, dataset=OneDiffers(job.source.dataset, bad, field))
    ends = train(job, plan, {differs: other}, started=1)
    assert ends[Rank(0)] == ends[Rank(1)], "all ranks say the same"
    step, why = ends[Rank(0)]
    assert step == 1 and f"reads for sample {bad}, so the step was not taken" in why
    assert "rank 0 (host-0)" in why and "rank 1 (host-1)" in why and "data=stdlib" in why and "\n" not in why


def test_samples_that_are_drawn_anew_are_named(job: TinyJob) -> None:
    plan = plan_lanes(job.workload, local_topology(3), [(1,), (1,), (1,)], replicas=0)
    sources = {rank: replace(job.source, dataset=Unsteady(job.source.dataset)) for rank in range(3)}
    ends = train(job, plan, sources, started=1)
    assert len(set(ends.values())) == 1
    step, why = ends[Rank(0)]
    assert step == 0 and "reads for some of samples " in why and why.endswith("nothing but its index and its key")
    assert train(job, plan, sources, started=3)[Rank(0)] == (STEPS, ""), "one origin: nothing is read twice"


def test_a_feed_stays_while_nobody_else_reads_something_else(job: TinyJob) -> None:
    one, two, other = (
        plan_lanes(job.workload, local_topology(ranks), lanes, replicas=0)
        for ranks, lanes in ((2, COLUMNS), (3, COLUMNS), (2, PIPELINE))
    )
    assert reads_alike(one, one, Rank(0), 1, True) and not reads_alike(one, other, Rank(0), 2, False)
    assert one.tile(Rank(0)) == two.tile(Rank(0)) and reads_alike(one, two, Rank(0), 2, False)
    assert not reads_alike(one, two, Rank(0), 2, True), "another rank is there to be read"
    assert reads_alike(one, two, Rank(0), 3, True), "which the launcher has started"
