"""The ledger: from the votes of a commit to a line with what its step consumed; and checks that lines cover a run.

In: a `Certificate`, whose votes contain the engine's payloads. Out: a line of `ledger.jsonl`.

    {"step": 7, "tiles": {"0": [[0, 4, 0, 8]], "1": [[0, 4, 8, 16]]}, "weight_sum": 2048.0,
     "tile_hashes": {"0": "2f…", "1": "2c…"}, "content_hash": "5b…", "keys": {"0": "7a…", "1": "3e…"},
     "loss": "0x1.5cp+13", "count": "0x1p+11", "squares": "0x1.9p+4", "state_digest": "01…", "buckets": {"0": "6d…"},
     "epoch": 2, "plan": "9c…", "fingerprint": "b1…", "previous": "e3…"}

Lines are a chain: `previous` is the SHA-256 of the text of the line before. So an edited, removed or moved line shows
in later lines; for the last lines, in the summary.
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elaswave_fx.control.protocol.types import Certificate
from elaswave_fx.control.store.exact_total import ZERO, ExactTotal
from elaswave_fx.plan.work.spans import Span, WorkSpan, coverage

_HEAD = struct.Struct("<ddQQQQQQQQQQQ")
_SPAN = struct.Struct("<QQQQ")
_BUCKET = struct.Struct("<QQQ")
_CONTENT_MODULUS = 1 << 128
_LOW = (1 << 64) - 1

STOP_WANTED = 1
"""Bit of `Payload.flags`: the rank was asked to end the run."""

_TOTALS = 3 * ExactTotal.BYTES

CHAIN_START = 64 * "0"
"""The first line's `previous`."""


@dataclass(frozen=True, slots=True)
class CrossCheck:
    """The samples that `rank` feeds to a step, as read by the voting rank; sums as in `Payload`."""

    rank: int
    content_hash: int
    places: int


@dataclass(frozen=True, slots=True)
class Payload:
    """The content of a rank's vote besides yes. Sums over ranks are the step's.

    `busy_s`: seconds in which its units computed, without waits for other ranks or a processor; 0: unknown.
    `content_hash`: of the samples that the rank fed to the step, a sum modulo 2^128. `keys`: the sum of its random
    keys, modulo 2^64. `consumed`: the forward spans that it ran, with gaps and repetitions. `squares`: of the gradient
    of its owned boxes. `buckets`: number of a bucket and digest of its owned boxes, from the start of the step; two
    sums modulo 2^64 (`sum_of_digests`). `places`: the sum of the low halves of the samples' hashes times their
    positions, modulo 2^64. Layout: `native/exec/exact/vote.h`.
    """

    memory_bytes: float = 0.0
    busy_s: float = 0.0
    flags: int = 0
    content_hash: int = 0
    keys: int = 0
    consumed: tuple[WorkSpan, ...] = ()
    loss: ExactTotal = ZERO
    count: ExactTotal = ZERO
    squares: ExactTotal = ZERO
    buckets: tuple[tuple[int, int], ...] = ()
    places: int = 0
    cross_check: CrossCheck | None = None

    def pack(self) -> bytes:
        """The payload as little-endian words of 8 bytes."""
        content = self.content_hash & _LOW, self.content_hash >> 64
        sizes = len(self.consumed), len(self.buckets)
        check = self.cross_check or CrossCheck(-1, 0, 0)
        checked = check.rank + 1, check.content_hash & _LOW, check.content_hash >> 64, check.places
        head = _HEAD.pack(
            self.memory_bytes, self.busy_s, self.flags, *content, self.keys, *sizes, self.places, *checked
        )
        spans = b"".join(_SPAN.pack(*span.edges) for span in self.consumed)
        totals = b"".join(total.pack() for total in (self.loss, self.count, self.squares))
        buckets = b"".join(_BUCKET.pack(number, digest & _LOW, digest >> 64) for number, digest in self.buckets)
        return head + spans + totals + buckets

    @staticmethod
    def unpack(data: bytes) -> Payload:
        """Decode a payload; empty data gives zeros. Raises `ValueError` for a wrong length or wrong spans."""
        if not data:
            return Payload()
        wrong = fault_of_payload(data)
        if wrong is not None:
            raise ValueError(f"ledger: a vote's payload {wrong}")
        memory, busy_s, flags, content, content_high, keys, spans, _, places, *check = _HEAD.unpack_from(data)
        totals = _HEAD.size + spans * _SPAN.size
        consumed = tuple(WorkSpan(Span(*each[:2]), Span(*each[2:])) for each in _edges(data, spans))
        loss, count, squares = (
            ExactTotal.unpack(data[at : at + ExactTotal.BYTES])
            for at in range(totals, totals + _TOTALS, ExactTotal.BYTES)
        )
        digests = tuple(
            (number, low | high << 64) for number, low, high in _BUCKET.iter_unpack(data[totals + _TOTALS :])
        )
        content |= content_high << 64
        checked, low, high, check_places = check
        cross_check = CrossCheck(checked - 1, low | high << 64, check_places) if checked else None
        return Payload(
            memory, busy_s, flags, content, keys, consumed, loss, count, squares, digests, places, cross_check
        )


def fault_of_payload(data: bytes) -> str | None:
    """Why bytes are no payload of a vote, as text; None if they are. Cheap, for processes that only forward it."""
    if not data:
        return None
    least = _HEAD.size + _TOTALS
    if len(data) < least:
        return f"has {len(data)} bytes; it has at least {least}"
    memory, busy_s, *_, spans, buckets = _HEAD.unpack_from(data)[:8]
    if len(data) != least + _SPAN.size * spans + _BUCKET.size * buckets:
        return f"has {len(data)} bytes; it has {least}, {_SPAN.size} for each span and {_BUCKET.size} for each bucket"
    for units_lo, units_hi, samples_lo, samples_hi in _edges(data, spans):
        if units_lo > units_hi or samples_lo > samples_hi:
            return f"says what no rank consumes (units {units_lo} to {units_hi}, samples {samples_lo} to {samples_hi})"
    if not (0 <= memory < math.inf and 0 <= busy_s < math.inf):
        return f"says {memory} bytes of memory and {busy_s} s of work"
    return None


def _edges(data: bytes, spans: int) -> Iterator[tuple[int, ...]]:
    return _SPAN.iter_unpack(data[_HEAD.size : _HEAD.size + _SPAN.size * spans])


def busy_seconds(payload: bytes) -> float:
    """The `busy_s` of a vote's payload, read alone for every step; 0 if unknown."""
    return _HEAD.unpack_from(payload)[1] if len(payload) >= _HEAD.size else 0.0


def sum_of_digests(digests: Iterable[int]) -> int:
    """The digest of a whole from the digests of its parts; the two halves do not carry into each other."""
    low = high = 0
    for digest in digests:
        low, high = low + digest & _LOW, high + (digest >> 64) & _LOW
    return low | high << 64


def line_of(certificate: Certificate, plan_hash: int = 0, fingerprint: str = "") -> dict[str, Any]:
    """The ledger line of a committed step: step = version - 1.

    `state_digest` and `buckets` are of the state that the step started from. `loss`, `count` and `squares` are sums
    over the step in `float.hex` format; `weight_sum` is the count. `plan_hash`: its plan's; `fingerprint`: what else
    decides its bits.
    """
    votes = sorted(certificate.votes, key=lambda vote: vote.rank)
    payloads = {str(vote.rank): Payload.unpack(vote.payload) for vote in votes}
    loss, count, squares = (
        sum((getattr(payload, name) for payload in payloads.values()), ZERO).value
        for name in ("loss", "count", "squares")
    )
    buckets = digests_of_buckets(pair for payload in payloads.values() for pair in payload.buckets)
    return {
        "step": certificate.stamp.version - 1,
        "tiles": {str(vote.rank): [list(span.edges) for span in vote.consumed] for vote in votes},
        "tile_hashes": {rank: f"{payload.content_hash:032x}" for rank, payload in payloads.items()},
        "weight_sum": count,
        "content_hash": f"{sum(payload.content_hash for payload in payloads.values()) % _CONTENT_MODULUS:032x}",
        "keys": {rank: f"{payload.keys:016x}" for rank, payload in payloads.items()},
        "loss": loss.hex(),
        "count": count.hex(),
        "squares": squares.hex(),
        "state_digest": f"{sum_of_digests(buckets.values()):032x}",
        "buckets": {str(number): f"{digest:032x}" for number, digest in buckets.items()},
        "epoch": certificate.stamp.epoch,
        "plan": f"{plan_hash:016x}",
        "fingerprint": fingerprint,
    }


def digests_of_buckets(parts: Iterable[tuple[int, int]]) -> dict[int, int]:
    """Bucket -> digest of the whole bucket, from (bucket, digest) of parts."""
    found: dict[int, list[int]] = {}
    for number, digest in parts:
        found.setdefault(number, []).append(digest)
    return {number: sum_of_digests(found[number]) for number in sorted(found)}


def linked(line: Mapping[str, Any], head: str) -> tuple[str, str]:
    """The text of a line after the one with the hash `head`, and its own hash."""
    text = json.dumps({**line, "previous": head})
    return text, hash_of(text)


def hash_of(text: str) -> str:
    """The hash of a line's text without its newline: the next line's `previous`."""
    return hashlib.sha256(text.encode()).hexdigest()


def first_break(texts: Iterable[str], head: str = CHAIN_START) -> int | None:
    """The number, from 1, of the first line that does not follow the one before it; None if all do."""
    for number, text in enumerate(texts, 1):
        if json.loads(text).get("previous") != head:
            return number
        head = hash_of(text)
    return None


def head_of(path: Path) -> str | None:
    """The hash of the last whole line of a ledger, None if there is none."""
    lines = path.read_text(encoding="utf-8").split("\n")[:-1] if path.exists() else []
    return hash_of(lines[-1]) if lines else None


def rollback_line(version: int, epoch: int) -> dict[str, Any]:
    """A line that voids earlier lines of steps from `version` on, which are replayed in `epoch`."""
    return {"rolled_back_to": version, "epoch": epoch}


def standing(lines: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The lines that no later rollback made void."""
    kept: list[Mapping[str, Any]] = []
    for line in lines:
        if "rolled_back_to" in line:
            kept = [old for old in kept if old["step"] < line["rolled_back_to"]]
        else:
            kept.append(line)
    return kept


def restored_alike(lines: Iterable[Mapping[str, Any]]) -> str | None:
    """The fault in states that rollbacks restored; None if each equals the earlier one."""
    began: dict[int, tuple[str, str | None]] = {}  # step -> (initial state, fingerprint)
    restored: int | None = None
    for line in lines:
        if "rolled_back_to" in line:
            restored = line["rolled_back_to"]
            continue
        step, digest, bits = line["step"], line["state_digest"], line.get("fingerprint")
        before, bits_before = began.get(step, (digest, bits))
        if step == restored and before != digest and bits == bits_before:  # Another program may cut other buckets.
            return f"ledger: step {step} was done again from a state with digest {digest}; it was {before} before"
        if step == restored:
            restored = None
        began[step] = digest, bits
    return None


def covers_once(
    lines: Iterable[Mapping[str, Any]],
    units: int,
    samples: int,
    first_step: int,
    steps: int,
    skipped: Mapping[str, int] | None = None,
) -> str | None:
    """The fault in the lines of steps `first_step` to `steps` of a work plane; None if each covers it once.

    `skipped`: plan name in ledger lines -> number of last samples that the plan skips; 0 for other plans.
    """
    by_step: dict[int, list[Mapping[str, Any]]] = {}
    for line in standing(lines):
        by_step.setdefault(line["step"], []).append(line)
    for step in range(first_step, steps):
        found = by_step.get(step, [])
        if len(found) != 1:
            return f"ledger: step {step} has {len(found)} lines; every committed step has one"
        planned = samples - (skipped or {}).get(found[0].get("plan", ""), 0)
        tiles = [tuple(tile) for tiles in found[0]["tiles"].values() for tile in tiles]
        covered = coverage(tiles, units, planned)  # type: ignore[arg-type]
        if covered.skipped or covered.duplicated:
            return (
                f"ledger: step {step} skipped {covered.skipped} and repeated {covered.duplicated} of {planned} "
                "samples; every sample of a step is consumed once"
            )
        beyond = max(last for *_, last in tiles)
        if beyond > planned:
            return f"ledger: step {step} consumed samples up to {beyond - 1}; its plan has 0 to {planned - 1}"
    later = [step for step in by_step if not step < steps]
    return f"ledger: has step {min(later)} of a run of {steps} steps" if later else None
