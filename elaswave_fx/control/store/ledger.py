"""The ledger: from the votes of a commit to the line that says what its step consumed, and whether lines cover a run.

In: a `Certificate`, whose votes carry what the engine cast. Out: a line of `ledger.jsonl`.

    {"step": 7, "tiles": {"0": [[0, 4, 0, 8]], "1": [[0, 4, 8, 16]]}, "weight_sum": 2048.0,
     "tile_hashes": {"0": "2f…", "1": "2c…"}, "content_hash": "5b…", "state_digest": "01…", "epoch": 2}
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from elaswave_fx.control.protocol.types import Certificate, WorkSpan
from elaswave_fx.control.store.exact_total import ZERO, ExactTotal
from elaswave_fx.errors import PlanError
from elaswave_fx.observe.metrics import coverage
from elaswave_fx.plan.box import Span

_HEAD = struct.Struct("<dQQQQQQ")
_SPAN = struct.Struct("<QQQQ")
_CONTENT_MODULUS = 1 << 128
_LOW = (1 << 64) - 1

STOP_WANTED = 1
"""Bit of `Payload.flags`: the rank was asked to end the run."""

MOST_SPANS = 8
"""Separate spans that a vote has room for; what a rank consumes is one tile as a rule."""

_TOTALS = _HEAD.size + MOST_SPANS * _SPAN.size
_BYTES = _TOTALS + 3 * ExactTotal.BYTES


@dataclass(frozen=True, slots=True)
class Payload:
    """What a rank's vote says besides yes. Sums over ranks are the step's.

    `content_hash`: of the samples that the rank fed to the step, a sum modulo 2^128. `state_digest`: of the boxes that
    it owns, as they stood when the step began; two sums modulo 2^64 (`sum_of_digests`). `consumed`: what it ran
    forward, with its holes and with what was run twice. `squares`: of the gradient of the boxes that it owns. The
    layout is that of `native/exec/vote.h`.
    """

    memory_bytes: float = 0.0
    flags: int = 0
    content_hash: int = 0
    state_digest: int = 0
    consumed: tuple[WorkSpan, ...] = ()
    loss: ExactTotal = ZERO
    count: ExactTotal = ZERO
    squares: ExactTotal = ZERO

    def pack(self) -> bytes:
        """Little-endian words of 8 bytes."""
        words = [word for value in (self.content_hash, self.state_digest) for word in (value & _LOW, value >> 64)]
        head = _HEAD.pack(self.memory_bytes, self.flags, *words, len(self.consumed))
        spans = b"".join(_SPAN.pack(*edges_of(span)) for span in self.consumed)
        totals = b"".join(total.pack() for total in (self.loss, self.count, self.squares))
        return (head + spans).ljust(_TOTALS, b"\0") + totals

    @staticmethod
    def unpack(data: bytes) -> Payload:
        """Nothing said gives zeros. Raises `ValueError` for one that is too short or long, or has too many or wrong
        spans."""
        if not data:
            return Payload()
        if len(data) != _BYTES:
            raise ValueError(f"ledger: a vote's payload has {len(data)} bytes; it has {_BYTES}")
        memory, flags, content, content_high, state, state_high, spans = _HEAD.unpack_from(data)
        if spans > MOST_SPANS:
            raise ValueError(f"ledger: a vote's payload says {spans} spans; there is room for {MOST_SPANS}")
        edges = [_SPAN.unpack_from(data, _HEAD.size + _SPAN.size * index) for index in range(spans)]
        try:
            consumed = tuple(WorkSpan(Span(*each[:2]), Span(*each[2:])) for each in edges)
        except PlanError as error:
            raise ValueError(f"ledger: a vote's payload says what no rank consumes ({error})") from error
        return Payload(
            memory,
            flags,
            content | content_high << 64,
            state | state_high << 64,
            consumed,
            *(ExactTotal.unpack(data[at : at + ExactTotal.BYTES]) for at in range(_TOTALS, _BYTES, ExactTotal.BYTES)),
        )


def sum_of_digests(digests: Iterable[int]) -> int:
    """The digest of a whole whose parts have these; the two halves of a digest do not carry into each other."""
    low = high = 0
    for digest in digests:
        low, high = low + digest & _LOW, high + (digest >> 64) & _LOW
    return low | high << 64


def line_of(certificate: Certificate) -> dict[str, Any]:
    """The ledger line of a committed step: step = version - 1. `state_digest` is of the state it started from."""
    votes = sorted(certificate.votes, key=lambda vote: vote.rank)
    payloads = [Payload.unpack(vote.payload) for vote in votes]
    return {
        "step": certificate.stamp.version - 1,
        "tiles": {str(vote.rank): [list(edges_of(span)) for span in vote.consumed] for vote in votes},
        "tile_hashes": {str(v.rank): f"{p.content_hash:032x}" for v, p in zip(votes, payloads, strict=True)},
        "weight_sum": sum((payload.count for payload in payloads), ZERO).value,
        "content_hash": f"{sum(payload.content_hash for payload in payloads) % _CONTENT_MODULUS:032x}",
        "state_digest": f"{sum_of_digests(payload.state_digest for payload in payloads):032x}",
        "epoch": certificate.stamp.epoch,
    }


def rollback_line(version: int, epoch: int) -> dict[str, Any]:
    """Lines before it of steps from `version` on are void: they are done again from the checkpoint, in `epoch`."""
    return {"rolled_back_to": version, "epoch": epoch}


def standing(lines: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The lines that were not made void by a rollback after them."""
    kept: list[Mapping[str, Any]] = []
    for line in lines:
        if "rolled_back_to" in line:
            kept = [old for old in kept if old["step"] < line["rolled_back_to"]]
        else:
            kept.append(line)
    return kept


def restored_alike(lines: Iterable[Mapping[str, Any]]) -> str | None:
    """What is wrong with the states that rollbacks went back to; None if each was that of before."""
    began: dict[int, str] = {}  # step -> the state that it started from
    restored: int | None = None
    for line in lines:
        if "rolled_back_to" in line:
            restored = line["rolled_back_to"]
            continue
        step, digest = line["step"], line["state_digest"]
        if step == restored and began.get(step, digest) != digest:
            return f"ledger: step {step} was done again from a state with digest {digest}; it was {began[step]} before"
        if step == restored:
            restored = None
        began[step] = digest
    return None


def covers_once(
    lines: Iterable[Mapping[str, Any]], units: int, samples: int, first_step: int, steps: int
) -> str | None:
    """What is wrong with the lines of steps `first_step` to `steps` of a work plane; None if each covers it once."""
    by_step: dict[int, list[Mapping[str, Any]]] = {}
    for line in standing(lines):
        by_step.setdefault(line["step"], []).append(line)
    for step in range(first_step, steps):
        found = by_step.get(step, [])
        if len(found) != 1:
            return f"ledger: step {step} has {len(found)} lines; every committed step has one"
        tiles = [tuple(tile) for tiles in found[0]["tiles"].values() for tile in tiles]
        covered = coverage(tiles, units, samples)  # type: ignore[arg-type]
        if covered.skipped or covered.duplicated:
            return (
                f"ledger: step {step} skipped {covered.skipped} and repeated {covered.duplicated} of {samples} "
                "samples; every sample of a step is consumed once"
            )
    beyond = [step for step in by_step if not step < steps]
    return f"ledger: has step {min(beyond)} of a run of {steps} steps" if beyond else None


def edges_of(span: WorkSpan) -> tuple[int, int, int, int]:
    """First unit, last + 1, first sample, last + 1."""
    return span.units.lo, span.units.hi, span.samples.lo, span.samples.hi
