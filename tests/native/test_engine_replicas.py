"""Replicas of boxes: holders stay equal to owners, take their place, sync; a step that was left can be finished."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
from torch import Tensor

from elaswave_fx import _native
from elaswave_fx.errors import CommError, ExecError, PeerLost, ReplicaDiffers
from elaswave_fx.plan.predict.transition_memory import EXPECTED_RECORDS
from tests.native.ranks import Ranks
from tests.native.tiny import (
    ALONE,
    BUCKETS,
    BUFFERS,
    LR,
    TEST_TIMEOUT_S,
    TILINGS,
    Box,
    Model,
    Tile,
    Tiling,
    even_boxes,
    install,
    loaded,
    make_engine,
    make_spec,
    master_of,
    program,
    reference,
    running_statistics,
    schedule,
    statistics_after,
    take_step,
    tile_inputs,
    train,
    train_list,
    update,
)

PAIR = TILINGS["data parallel"]


def with_holders(tiling: Tiling) -> list[Box]:
    """Every box is held by the rank after its owner."""
    ranks = list(tiling)
    return [replace(box, holders=(ranks[(ranks.index(box.owner) + 1) % len(ranks)],)) for box in even_boxes(tiling)]


def kept(engine: _native.Engine) -> dict[int, tuple[int, list[Tensor]]]:
    """Digest and tensors of all boxes that are here."""
    found = {}
    for held in engine.holdings().boxes:
        state = engine.read(held.box)
        assert state is not None and state.digest[0] == held.digest
        found[held.box] = (held.digest, [state.master, *state.state])
    return found


def works(engine: _native.Engine) -> dict[str, Tensor | None]:
    return {name: engine.read(name) for name in BUCKETS}


def stale(engine: _native.Engine) -> list[str]:
    return [list(BUCKETS)[bucket] for bucket in engine.holdings().stale_buckets]


def kill() -> _native.Fault:
    """The end of a rank right before it votes."""
    return _native.Fault("VOTE", signal.SIGKILL)


def left_after_voting(started: Callable[..., Ranks], left: Callable[..., Any]) -> list[Any]:
    """What ranks 0 and 1 say after rank 2 died right before its vote, of a run in which both had cast theirs before. On
    a busy machine one may hear of the end sooner, and then says None."""
    for _ in range(10):
        found = started(3, left).results([0, 1])
        if None not in found:
            return found
    raise AssertionError("rank 2 ends before the others vote")


def test_holders_stay_equal_to_owners(model: Model, started: Callable[..., Ranks]) -> None:
    tiling = TILINGS["columns of other cuts"]
    boxes = with_holders(tiling)

    def body(rank: int, endpoint: Any, _: Connection) -> Any:
        engine = make_engine(model, tiling, rank, endpoint, boxes=boxes)
        taken = train(engine, tiling[rank], 3)
        return [r.loss for r in taken], kept(engine), all(engine.intact(n) for n in kept(engine))

    results = started(len(tiling), body).results()
    for losses, _, intact in results:
        assert losses == pytest.approx(reference(3).losses, rel=1e-5)
        assert intact
    for number, box in enumerate(boxes):
        digests = {results[rank][1][number][0] for rank in (box.owner, *box.holders)}
        replicas = [results[rank][1][number][1] for rank in (box.owner, *box.holders)]
        assert len(digests) == 1
        assert all(torch.equal(one, other) for one, other in zip(*replicas, strict=True))
        assert sum(number in result[1] for result in results) == 2


def test_an_update_with_other_operators_runs_one_by_one(model: Model, started: Callable[..., Ranks]) -> None:
    """To the same bits: the absolute value of what is positive changes nothing but how the program is run."""

    def other(master: Tensor, grad: Tensor, momentum: Tensor, scale: Tensor, lr: Tensor) -> tuple[Tensor, Tensor]:
        return update(master, grad, momentum, torch.abs(scale), lr)

    s, one = torch.ones(2), torch.ones(())
    changed = replace(model, programs={**model.programs, "update": program(other, s, s, s, one, one)})
    boxes = with_holders(PAIR)

    def body(rank: int, endpoint: Any, _: Connection) -> Any:
        engine = make_engine(changed if rank == 1 else model, PAIR, rank, endpoint, boxes=boxes)
        return [r.loss for r in train(engine, PAIR[rank], 3)]

    for losses in started(2, body).results():  # digests of owner and holder are compared in each step
        assert losses == pytest.approx(reference(3).losses, rel=1e-5)


def test_what_somebody_looks_at_is_not_updated_in_place(model: Model, started: Callable[..., Ranks]) -> None:
    def body(rank: int, endpoint: Any, _: Connection) -> Any:
        engine = make_engine(model, PAIR, rank, endpoint, boxes=with_holders(PAIR))
        first, view = engine.read(0), master_of(engine, 1)[1:3]
        assert first is not None
        master, momentum = first.master, first.state[0]
        before = [each.clone() for each in (master, momentum, view)]
        train(engine, PAIR[rank], 1)
        kept = all(torch.equal(*pair) for pair in zip((master, momentum, view), before, strict=True))
        return kept, torch.equal(master_of(engine, 0), master), torch.equal(master_of(engine, 1)[1:3], view)

    assert started(2, body).results() == [(True, False, False)] * 2


@pytest.mark.parametrize("work_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_holders_that_read_a_bucket_make_their_parameters(
    model: Model, dtype: str, work_dtype: torch.dtype, started: Callable[..., Ranks]
) -> None:
    """From their replicas, to the same bits; what is sent more than without any is less by what they are not sent."""
    steps, numel, itemsize = 3, sum(size for size, _ in BUCKETS.values()), 4 if dtype == "float32" else 2

    def body(rank: int, endpoint: Any, _: Connection) -> Any:
        sent = []
        for boxes in (even_boxes(PAIR), with_holders(PAIR)):
            engine = make_engine(model, PAIR, rank, endpoint, work_dtype=work_dtype, boxes=boxes, record_dtype=dtype)
            before = endpoint.bytes_sent
            for step in range(steps):
                inputs = {name: tensor.to(work_dtype) for name, tensor in tile_inputs(PAIR[rank], step).items()}
                engine.step(step, inputs, [[LR]], _native.StepOptions(TEST_TIMEOUT_S, 0.5))
            engine.sync(TEST_TIMEOUT_S)
            sent.append(endpoint.bytes_sent - before)
        return sent, engine.holdings().copied_bytes, works(engine)

    results = started(2, body).results()
    plain, sent_bytes = (sum(each) for each in zip(*(r[0] for r in results), strict=True))
    records = sum(r[1] for r in results)
    headers = 48 * len(even_boxes(PAIR))
    assert records == steps * (itemsize * numel + headers)
    assert sent_bytes - plain == records - steps * work_dtype.itemsize * numel
    for name in BUCKETS:
        assert torch.equal(results[0][2][name], results[1][2][name])


def test_a_holder_without_a_base_cannot_begin_a_step(model: Model, started: Callable[..., Ranks]) -> None:
    boxes = even_boxes(PAIR)

    def body(rank: int, endpoint: Any, _: Connection) -> Any:
        engine = make_engine(model, PAIR, rank, endpoint, boxes=boxes)
        if rank == 1:
            return None
        install(engine, make_spec(model, PAIR, rank, boxes=[boxes[0], replace(boxes[1], holders=(0,)), *boxes[2:]]))
        with pytest.raises(ExecError, match="box 1: rank 0 holds it, has no state of it, and none is on its way"):
            take_step(engine, PAIR[rank], 0)
        return engine.holdings().version

    assert started(2, body).results()[0] == 0


def test_holders_that_get_the_whole_state(model: Model, started: Callable[..., Ranks]) -> None:
    """With whole states instead of records a holder is at the version that its owner had when the step began."""
    boxes = with_holders(PAIR)

    def body(rank: int, endpoint: Any, _: Connection) -> Any:
        engine = make_engine(model, PAIR, rank, endpoint, boxes=boxes, copy_mode="state")
        before = endpoint.bytes_sent
        taken = train(engine, PAIR[rank], 3)
        held = [number for number, box in enumerate(boxes) if box.owner != rank]
        missing = engine.holdings().syncing
        taken.append(take_step(engine, PAIR[rank], 3))
        return [r.loss for r in taken], missing == held, endpoint.bytes_sent - before

    for losses, on_the_way, _ in started(2, body).results():
        assert losses == pytest.approx(reference(4).losses, rel=1e-5)
        assert on_the_way


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_holder_takes_over_what_a_dead_rank_owned(model: Model, dtype: str, started: Callable[..., Ranks]) -> None:
    """Rank 1 dies after two steps; rank 0 owns everything and finishes alone as if nothing had happened."""
    boxes = with_holders(PAIR)

    def body(rank: int, endpoint: Any, pipe: Connection) -> Any:
        engine = make_engine(model, PAIR, rank, endpoint, boxes=boxes, record_dtype=dtype)
        taken = train(engine, PAIR[rank], 2)
        engine.sync(TEST_TIMEOUT_S)
        if rank == 1:
            pipe.recv()
            os.kill(os.getpid(), signal.SIGKILL)
        pipe.send("synced")
        with pytest.raises(PeerLost):
            take_step(engine, PAIR[rank], 2)
        held = engine.holdings()
        assert (held.pending, held.version) == (False, 2)
        endpoint.advance(1)
        alone = [replace(box, owner=0, holders=()) for box in boxes]
        assert install(engine, make_spec(model, ALONE, 0, boxes=alone, record_dtype=dtype)) == held.stale_buckets
        taken += [take_step(engine, ALONE[0], step) for step in (2, 3)]
        return [r.loss for r in taken]

    ranks = started(2, body)
    assert ranks.pipes[0].recv() == "synced"
    ranks.pipes[1].send("die")
    tolerance = 1e-5 if dtype == "float32" else 1e-2
    assert ranks.results([0])[0] == pytest.approx(reference(4).losses, rel=tolerance)


def test_an_owner_may_stand_outside_of_the_group(model: Model, started: Callable[..., Ranks]) -> None:
    """In a pipeline each rank owns what the other computes with, and holds its own."""
    tiling = TILINGS["pipeline"]
    boxes = [Box(name, 0, numel, 1 - min(users), (min(users),)) for name, (numel, users) in BUCKETS.items()]
    steps = {rank: train_list(tiling, rank) for rank in tiling}
    for rank, listed in steps.items():
        for bucket, box in enumerate(boxes):
            if box.owner == rank and ("REDUCE", bucket) not in listed:
                listed.insert(0, ("REDUCE", bucket))
                listed[-1:-1] = [("UPDATE", bucket), ("GATHER", bucket)]

    def body(rank: int, endpoint: Any, _: Connection) -> Any:
        spec = make_spec(model, tiling, rank, boxes=boxes)
        engine = loaded(replace(spec, schedule=schedule(tiling, rank, steps[rank])), model, endpoint)
        return [r.loss for r in train(engine, tiling[rank], 4)]

    for losses in started(2, body).results():
        assert losses == pytest.approx(reference(4).losses, rel=1e-5)


def test_a_new_holder_syncs_beside_the_steps(model: Model, started: Callable[..., Ranks]) -> None:
    boxes = even_boxes(PAIR)

    def body(rank: int, endpoint: Any, _: Connection) -> Any:
        engine = make_engine(model, PAIR, rank, endpoint, boxes=boxes)
        taken = train(engine, PAIR[rank], 1)
        engine.sync(TEST_TIMEOUT_S)
        install(engine, make_spec(model, PAIR, rank, boxes=with_holders(PAIR)))
        before = engine.holdings().syncing
        engine.replicate([(number, box.owner, 1 - box.owner) for number, box in enumerate(boxes)])
        taken += [take_step(engine, PAIR[rank], step) for step in range(1, 11)]
        synced = engine.holdings().syncing
        peaks = engine.holdings().sync_peak, engine.holdings().sent_at_once
        sent = [sent_in(engine, endpoint, rank, 11, taken)]
        install(engine, make_spec(model, PAIR, rank, boxes=with_holders(PAIR)))
        sent.append(sent_in(engine, endpoint, rank, 12, taken))
        return [r.loss for r in taken], before, synced, sent, kept(engine), works(engine), peaks

    def sent_in(engine: Any, endpoint: Any, rank: int, step: int, taken: list[Any]) -> int:
        engine.sync(TEST_TIMEOUT_S)
        before = endpoint.bytes_sent
        taken.append(take_step(engine, PAIR[rank], step))
        engine.sync(TEST_TIMEOUT_S)
        return endpoint.bytes_sent - before

    results = started(2, body).results()
    state_bytes = 8  # of an element: master and momentum
    owned = [sum(box.hi - box.lo for box in boxes if box.owner == rank) for rank in (0, 1)]
    for rank, (losses, before, after, _, _, _, (peak, at_once)) in enumerate(results):
        assert losses == pytest.approx(reference(13).losses, rel=1e-4)
        assert len(before) == 3 and after == []
        comes = owned[1 - rank]
        assert state_bytes * comes <= peak <= (state_bytes + 4 * EXPECTED_RECORDS) * comes
        assert 0 < at_once <= state_bytes * owned[rank]
    first, second = results
    assert {n: d for n, (d, _) in first[4].items()} == {n: d for n, (d, _) in second[4].items()}
    assert all(torch.equal(first[5][name], second[5][name]) for name in BUCKETS)
    # Under new roles they make what they had been sent: all parameters, once.
    gathered, made = (sum(result[3][i] for result in results) for i in (0, 1))
    assert gathered - made == 4 * sum(numel for numel, _ in BUCKETS.values())


@pytest.mark.parametrize("exact", [False, True])
def test_buffers_sync_beside_the_steps_and_their_replica_takes_over(
    model: Model, exact: bool, started: Callable[..., Ranks]
) -> None:
    """As any box: rank 1 gets a replica, which syncs, is kept up to date by records, and becomes the truth."""
    changing = running_statistics()
    tilings: list[Tiling] = [
        {0: Tile((0, 3), granules(0, 3)), 1: Tile((0, 3), granules(3, 4))},
        {0: Tile((0, 3), granules(0, 1)), 1: Tile((0, 3), granules(1, 4))},
    ]

    def spec(rank: int, layout: int, box: Box) -> Any:
        tiling = tilings[layout]
        return make_spec(
            model, tiling, rank, boxes=[*even_boxes(tiling), box], changing=changing, granule=2, exact=exact
        )

    def body(rank: int, endpoint: Any, _: Connection) -> Any:
        engine = loaded(spec(rank, 0, changing.box(0)), model, endpoint, changing)
        number = len(even_boxes(tilings[0]))
        take_step(engine, tilings[0][rank], 0)
        engine.sync(TEST_TIMEOUT_S)
        install(engine, spec(rank, 0, changing.box(0, 1)))
        engine.replicate([(number, 0, 1)])
        for step in range(1, 12):
            take_step(engine, tilings[0][rank], step)
        assert engine.holdings().syncing == []
        assert (engine.rules_consulted["replica_in_sync"] > 0) == (rank == 1)
        engine.sync(TEST_TIMEOUT_S)
        install(engine, spec(rank, 1, changing.box(1, 0)))
        for step in range(12, 14):
            take_step(engine, tilings[1][rank], step)
        engine.sync(TEST_TIMEOUT_S)
        state = engine.read(number)
        assert state is not None and engine.intact(number)
        return changing.of(state.master), changing.of(engine.read(BUFFERS)), state.digest

    expected = statistics_after(14)
    first, second = started(2, body).results()
    for kept_here, work, _ in (first, second):
        assert all(torch.equal(kept_here[name], tensor) for name, tensor in expected.items())
        assert all(torch.equal(work[name], tensor) for name, tensor in expected.items())
    assert first[2] == second[2]


def granules(lo: int, hi: int) -> tuple[tuple[int, int], ...]:
    """Micro-batches of two samples each."""
    return tuple((2 * i, 2 * i + 2) for i in range(lo, hi))


def test_no_vote_waits_for_a_state_that_comes_late(model: Model, started: Callable[..., Ranks]) -> None:
    """Bulk that nobody receives is before it and its catch-up records, for as many steps as these may lag."""
    boxes, late, most = even_boxes(PAIR), 5, 500

    def all_agree(endpoint: Any, rank: int, mine: bool) -> bool:
        said, heard = torch.tensor([int(mine)]), torch.empty(1, dtype=torch.int64)
        endpoint.wait([endpoint.recv(1 - rank, 98, heard), endpoint.send(1 - rank, 98, said)], TEST_TIMEOUT_S)
        return mine and bool(heard.item())

    def body(rank: int, endpoint: Any, _: Connection) -> Any:
        engine = make_engine(model, PAIR, rank, endpoint, boxes=boxes)
        taken = train(engine, PAIR[rank], 1)
        engine.sync(TEST_TIMEOUT_S)
        install(engine, make_spec(model, PAIR, rank, boxes=with_holders(PAIR)))
        before = torch.full((1 << 20,), rank)
        blocking = endpoint.send(1 - rank, 99, before, bulk=True)
        engine.replicate([(number, box.owner, 1 - box.owner) for number, box in enumerate(boxes)])
        taken += [take_step(engine, PAIR[rank], step) for step in range(1, late)]
        waiting = len(engine.holdings().syncing)
        came = torch.empty_like(before)
        endpoint.wait([endpoint.recv(1 - rank, 99, came), blocking], TEST_TIMEOUT_S)
        while not all_agree(endpoint, rank, not engine.holdings().syncing) and len(taken) < most:
            taken.append(take_step(engine, PAIR[rank], len(taken)))
            time.sleep(0.005)
        return [r.loss for r in taken], waiting, engine.holdings().syncing, kept(engine)

    results = started(2, body).results()
    for losses, waiting, after, _ in results:
        assert waiting > 0 and after == []
        assert losses == pytest.approx(reference(len(losses)).losses, rel=1e-4)
    first, second = results
    assert {n: d for n, (d, _) in first[3].items()} == {n: d for n, (d, _) in second[3].items()}


@pytest.mark.parametrize("late", range(1, 4))
def test_records_of_replicas_that_begin_one_after_the_other_do_not_wait_for_each_others_votes(
    model: Model, late: int, started: Callable[..., Ranks], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first one's state is so large that the second's goes when it is out, and its records so large that none
    leaves without a place at the holder; the lane is held up at first, so that they pile up."""
    numel = 1_200_000
    for name in ("tied", "unit1"):
        monkeypatch.setitem(BUCKETS, name, (numel, BUCKETS[name][1]))
    boxes = even_boxes(PAIR)
    given = [n for n, box in enumerate(boxes) if box.owner == 0 and box.bucket != "bias0"]
    held = [replace(box, holders=(1,)) if number in given else box for number, box in enumerate(boxes)]

    def body(rank: int, endpoint: Any, _: Connection) -> Any:
        engine = make_engine(model, PAIR, rank, endpoint, boxes=boxes)
        install(engine, make_spec(model, PAIR, rank, boxes=held))
        foreign = torch.zeros(1 << 20)
        held_up = [endpoint.send(1, 99, foreign, bulk=True)] if rank == 0 else []
        engine.replicate([(number, 0, 1) for number in given])
        for step in range(24):
            if (rank, step) == (1, late):
                endpoint.wait([endpoint.recv(0, 99, torch.empty_like(foreign))], TEST_TIMEOUT_S)
            take_step(engine, PAIR[rank], step, deadline_s=10.0)
            time.sleep(0.01)
        endpoint.wait(held_up, TEST_TIMEOUT_S)
        return engine.holdings().syncing, {n: digest for n, (digest, _) in kept(engine).items() if n in given}

    first, second = started(2, body).results()
    assert first == second and first[0] == [] and len(first[1]) == len(given)


def test_syncing_replicas_are_forgotten_when_everybody_stops(model: Model, started: Callable[..., Ranks]) -> None:
    """What of them was under way fails with the stop, and no later step does because of it."""
    boxes = even_boxes(PAIR)
    tasks = [(number, box.owner, 1 - box.owner) for number, box in enumerate(boxes)]

    def body(rank: int, endpoint: Any, _: Connection) -> Any:
        engine = make_engine(model, PAIR, rank, endpoint, boxes=boxes)
        blocking = endpoint.send(1 - rank, 99, torch.zeros(1 << 20), bulk=True)  # which nobody receives
        for epoch in (1, 2):
            endpoint.advance(epoch)
            install(engine, make_spec(model, PAIR, rank, boxes=with_holders(PAIR)))
            engine.replicate(tasks)
            if epoch == 1:
                train(engine, PAIR[rank], 3)
                engine.sync(TEST_TIMEOUT_S)
                endpoint.abort("everybody stops")
                engine.sync(TEST_TIMEOUT_S)
        del blocking
        for step in range(3, 15):
            take_step(engine, PAIR[rank], step)
        return engine.holdings().syncing, {n: digest for n, (digest, _) in kept(engine).items()}

    first, second = started(2, body).results()
    assert first == second and first[0] == [] and len(first[1]) == len(boxes)


def test_a_vote_waits_for_records_that_would_lag_too_many_steps(model: Model, started: Callable[..., Ranks]) -> None:
    def body(rank: int, endpoint: Any, _: Connection) -> Any:
        engine = make_engine(model, PAIR, rank, endpoint, boxes=even_boxes(PAIR))
        install(engine, make_spec(model, PAIR, rank, boxes=with_holders(PAIR)))
        blocking = endpoint.send(1 - rank, 99, torch.full((1 << 20,), rank), bulk=True)  # which nobody receives
        engine.replicate([(number, box.owner, 1 - box.owner) for number, box in enumerate(even_boxes(PAIR))])
        with pytest.raises(CommError) as caught:
            for step in range(20):
                take_step(engine, PAIR[rank], step, deadline_s=5.0)
        del blocking  # it was under way until now
        return engine.holdings().version, str(caught.value)

    results = started(2, body).results()
    assert [version for version, _ in results] == [4, 4]
    assert any("a wait passed its deadline; still awaited: send to rank" in words for _, words in results), results


def test_a_replica_that_differs_is_dropped_before_the_vote(model: Model, started: Callable[..., Ranks]) -> None:
    boxes = with_holders(PAIR)

    def body(rank: int, endpoint: Any, _: Connection) -> Any:
        engine = make_engine(model, PAIR, rank, endpoint, boxes=boxes)
        train(engine, PAIR[rank], 1)
        if rank == 0:
            held = next(n for n, box in enumerate(boxes) if box.owner == 1)
            replica = engine.read(held)
            assert replica is not None
            engine.load(held, replica.master + 1e-6, replica.state)
        with pytest.raises((ReplicaDiffers, CommError)) as caught:
            take_step(engine, PAIR[rank], 1)
        kind = type(caught.value).__name__
        return kind, engine.holdings().version, len(kept(engine)), stale(engine), str(caught.value)

    (first, second) = started(2, body).results()
    assert first[:4] == ("ReplicaDiffers", 1, len(boxes) - 1, ["tied"])
    assert "rank 0: replicas of box 1 (bucket tied [18, 36)) differ from their owners'" in first[4]
    assert second[:4] == ("Aborted", 1, len(boxes), [])


def test_a_step_that_was_left_after_the_vote(model: Model, started: Callable[..., Ranks]) -> None:
    """The last stage, which keeps nothing, dies before it votes: the others have voted, keep sums and records, and can
    finish the step with all votes (here those of the same step where nobody died), or give it up."""
    tiling = TILINGS["deep pipeline"]
    boxes = [Box("tied", 0, 36, 0, (1,)), Box("bias0", 0, 6, 0, (1,)), Box("unit1", 0, 42, 1, (0,))]

    def whole(rank: int, endpoint: Any, _: Connection) -> Any:
        engine = make_engine(model, tiling, rank, endpoint, boxes=boxes)
        result = train(engine, tiling[rank], 1)[0]
        return result.loss, result.votes, digests(engine)

    def digests(engine: Any) -> dict[int, int]:
        return {number: digest for number, (digest, _) in kept(engine).items()}

    def left(rank: int, endpoint: Any, _: Connection) -> Any:
        engine = make_engine(model, tiling, rank, endpoint, boxes=boxes)
        before = digests(engine)
        fault = kill() if rank == 2 else None
        with pytest.raises(CommError):
            take_step(engine, tiling[rank], 0, fault=fault)
        held = engine.holdings()
        if not held.pending:
            return None
        assert held.version == 0 and digests(engine) == before
        came = held.votes
        with pytest.raises(ExecError, match="install while its step is pending; it comes when it is between steps"):
            install(engine, make_spec(model, tiling, rank, boxes=boxes))
        with pytest.raises(ExecError, match="the vote of rank [12] is missing"):
            engine.finish(came)
        if rank == 1:
            engine.drop()
            assert not engine.holdings().pending and digests(engine) == before
            return came, None, None
        return came, engine.finish(votes).loss, digests(engine)

    expected = started(3, whole).results()
    votes = expected[0][1]
    assert set(votes) == {0, 1, 2} and all(set(each[1]) == set(votes) for each in expected)
    first, second = left_after_voting(started, left)
    assert set(first[0]) <= {0, 1} and 0 in first[0] and 1 in second[0]
    assert first[1:] == (expected[0][0], expected[0][2])


@pytest.mark.parametrize("held", [42, 20])
def test_a_step_that_is_finished_alone_leaves_stale_what_is_not_made_here(
    model: Model, held: int, started: Callable[..., Ranks]
) -> None:
    """Rank 1 alone reads unit 1 and holds all or some of it; rank 0 owns it."""
    tiling = TILINGS["deep pipeline"]
    parts = [Box("unit1", 0, held, 0, (1,))] + ([Box("unit1", held, 42, 0)] if held < 42 else [])
    boxes = [Box("tied", 0, 36, 0), Box("bias0", 0, 6, 0), *parts]
    bucket = list(BUCKETS).index("unit1")
    owner = train_list(tiling, 0)
    owner.insert(0, ("REDUCE", bucket))
    owner[-1:-1] = [("UPDATE", bucket), ("GATHER", bucket)]

    def make(rank: int, endpoint: Any) -> Any:
        spec = make_spec(model, tiling, rank, boxes=boxes)
        if rank == 0:
            spec = replace(spec, schedule=schedule(tiling, 0, owner))
        return loaded(spec, model, endpoint)

    def whole(rank: int, endpoint: Any, _: Connection) -> Any:
        engine = make(rank, endpoint)
        votes = train(engine, tiling[rank], 1)[0].votes
        engine.sync(TEST_TIMEOUT_S)
        return votes, engine.read("unit1") if rank == 1 else None

    def left(rank: int, endpoint: Any, _: Connection) -> Any:
        engine = make(rank, endpoint)
        fault = kill() if rank == 2 else None
        with pytest.raises(CommError):
            take_step(engine, tiling[rank], 0, fault=fault)
        if not engine.holdings().pending:
            return None
        engine.finish(votes)
        return stale(engine), engine.read("unit1") if rank == 1 else None

    (votes, _), (_, expected), _ = started(3, whole).results()
    _, (not_whole, found) = left_after_voting(started, left)
    assert not_whole == ([] if held == 42 else ["unit1"])
    assert torch.equal(found[:held], expected[:held])
    assert torch.equal(found, expected) is (held == 42)


@pytest.mark.parametrize("supplied", [False, True])
def test_after_a_death_a_working_copy_is_stale_unless_it_was_made_here(
    model: Model, supplied: bool, started: Callable[..., Ranks]
) -> None:
    """Rank 1 dies when it has committed a step, before it sends parameters; rank 0 made them from its replicas, but for
    a bucket whose base it was sent under these roles."""
    boxes, steps = with_holders(PAIR), 8
    number = next(n for n, box in enumerate(boxes) if box.owner == 1 and box.bucket == "tied")

    def body(rank: int, endpoint: Any, _: Connection) -> Any:
        engine = make_engine(model, PAIR, rank, endpoint, boxes=boxes)
        if supplied:
            engine.replicate([(number, 1, 0)])
        train(engine, PAIR[rank], steps)
        fault = _native.Fault("GATHER", signal.SIGKILL) if rank == 1 else None
        with pytest.raises(PeerLost):  # in this step or in the next one
            take_step(engine, PAIR[rank], steps, fault=fault)
            take_step(engine, PAIR[rank], steps + 1)
        found = kept(engine)
        masters = {
            name: torch.cat([found[n][1][0] for n, b in enumerate(boxes) if b.bucket == name]) for name in BUCKETS
        }
        equal = [torch.equal(works(engine)[n], masters[n]) for n in BUCKETS]
        return stale(engine), engine.holdings().version, equal

    not_whole = ["tied"] if supplied else []
    assert started(2, body).results([0]) == [(not_whole, steps + 1, [name not in not_whole for name in BUCKETS])]


def test_everybody_stops_after_the_step_in_which_one_wants_to(model: Model, started: Callable[..., Ranks]) -> None:
    def body(rank: int, endpoint: Any, _: Connection) -> Any:
        engine = make_engine(model, PAIR, rank, endpoint)
        return [take_step(engine, PAIR[rank], step, stop_wanted=rank == step == 1).stop for step in range(3)]

    assert started(2, body).results() == [[False, True, False]] * 2
