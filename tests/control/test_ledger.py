"""The payload of a vote is read as `exec/exact/vote.h` writes it: `native/tests/test_vote.cc` has the same golden."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from elaswave_fx.control.protocol.types import Certificate, Stamp, Version, Vote
from elaswave_fx.control.store.exact_total import ExactTotal
from elaswave_fx.control.store.ledger import (
    STOP_WANTED,
    CrossCheck,
    Payload,
    line_of,
    restored_alike,
    rollback_line,
    sum_of_digests,
)
from elaswave_fx.plan.work.spans import Span, WorkSpan
from elaswave_fx.plan.work.topology import Epoch, Rank

GOLDEN = bytes.fromhex((Path(__file__).parent.parent / "golden" / "vote.hex").read_text())
SPANS = (WorkSpan(Span(2, 5), Span(8, 16)), WorkSpan(Span(7, 8), Span(0, 4)))


def test_the_bytes_are_those_that_the_engine_writes() -> None:
    vote = Payload.unpack(GOLDEN)
    assert vote.pack() == GOLDEN
    squares = ExactTotal.of(2.0**-298) + ExactTotal.of(4.0) + ExactTotal.of(math.inf)
    totals = (ExactTotal.of(-1.5), ExactTotal.of(6.0), squares)
    buckets = ((0, 5 + (6 << 64)), (9, 8 + (9 << 64)))
    check = CrossCheck(1, 12 + (13 << 64), 14)
    assert vote == Payload(2**20, 0.25, STOP_WANTED, 3 + (4 << 64), 7, SPANS, *totals, buckets, 11, check)
    assert Payload.unpack(Payload().pack()).cross_check is None
    assert (vote.loss.value, vote.count.value) == (-1.5, 6.0) and math.isnan(vote.squares.value)


def test_totals_are_exact() -> None:
    values = [0.1, 1e30, 2.0**-149, -1e30, -0.1]
    total = sum(map(ExactTotal.of, values), ExactTotal())
    assert total.value == 2.0**-149 and ExactTotal.unpack(total.pack()) == total
    assert math.copysign(1.0, (ExactTotal.of(-0.0) + ExactTotal.of(-0.0)).value) == 1.0
    assert ExactTotal.of(-(2.0**340)).infinite == 1 and ExactTotal.of(2.0**-299) == ExactTotal()


def test_bytes_that_break_off_or_promise_too_much_are_refused() -> None:
    assert Payload.unpack(b"") == Payload()
    with pytest.raises(
        ValueError, match="a vote's payload has 479 bytes; it has 368, 32 for each span and 24 for each bucket"
    ):
        Payload.unpack(GOLDEN[:-1])
    for short in (GOLDEN[:-24], GOLDEN[:368], GOLDEN[:103]):
        with pytest.raises(ValueError, match=f"a vote's payload has {len(short)} bytes"):
            Payload.unpack(short)
    for number in (1, 3, 2**64 - 1):
        with pytest.raises(ValueError, match="has 480 bytes"):
            Payload.unpack(GOLDEN[:48] + number.to_bytes(8, "little") + GOLDEN[56:])
    many = Payload(consumed=tuple(WorkSpan(Span(0, 1), Span(i, i + 1)) for i in range(0, 600, 2)))
    assert Payload.unpack(many.pack()) == many


def test_a_line_lists_the_spans_of_every_rank() -> None:
    stamp = Stamp(Version(4), Epoch(1))
    votes = (
        Vote(stamp, Rank(2), SPANS, GOLDEN),
        Vote(stamp, Rank(0), SPANS[:1], Payload(count=ExactTotal.of(1.0)).pack()),
    )
    line = line_of(Certificate(stamp, votes), 0xAB, "f")
    assert line["tiles"] == {"0": [[2, 5, 8, 16]], "2": [[2, 5, 8, 16], [7, 8, 0, 4]]}
    assert (line["step"], line["epoch"], line["weight_sum"]) == (3, 1, 7.0)
    assert (line["plan"], line["fingerprint"]) == ("00000000000000ab", "f")
    assert (line["loss"], line["count"], line["squares"]) == ((-1.5).hex(), (7.0).hex(), "nan")
    assert line["keys"] == {"0": f"{0:016x}", "2": f"{7:016x}"}


def test_the_halves_of_a_digest_do_not_carry_into_each_other() -> None:
    high = 1 << 64
    assert sum_of_digests([high - 1, 1 + 5 * high]) == 5 * high
    assert sum_of_digests([(high - 1) * high, 3 * high + 7]) == 2 * high + 7
    stamp = Stamp(Version(1), Epoch(0))
    votes = tuple(Vote(stamp, Rank(rank), (), Payload(buckets=((3, high - 1), (rank, 1))).pack()) for rank in range(2))
    line = line_of(Certificate(stamp, votes))
    assert line["state_digest"] == f"{0:032x}"
    assert line["buckets"] == {"0": f"{1:032x}", "1": f"{1:032x}", "3": f"{high - 2:032x}"}


def test_a_rollback_to_another_state_is_told() -> None:
    lines = [{"step": step, "state_digest": f"d{step}"} for step in range(4)]
    alike = [*lines, rollback_line(2, 1), *lines[2:]]
    assert restored_alike(alike) is None
    other = [*lines, rollback_line(2, 1), {"step": 2, "state_digest": "x"}, lines[3]]
    assert restored_alike(other) == "ledger: step 2 was done again from a state with digest x; it was d2 before"
    assert restored_alike([*lines, rollback_line(4, 1), {"step": 4, "state_digest": "new"}]) is None
    of_another_program = {"step": 2, "state_digest": "x", "fingerprint": "another"}
    assert restored_alike([*lines, rollback_line(2, 0), of_another_program]) is None
