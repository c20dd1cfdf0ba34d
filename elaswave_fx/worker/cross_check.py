"""Ranks that opened the data apart read samples of each other again, where the digest of the data does not cover all.

    checked_ranks((0, 1, 2), started=2, step=7)   ->  {0: 2, 2: 1}   rank 0 reads what rank 2 feeds, and 2 what 1 feeds
    find_difference(payloads, first=56)           ->  Difference(reader=0, fed_by=2, positions=[57])

The ranks that a launcher has started are one origin, for they read the same files of one machine. Each rank that joined
is another. A rank reads the samples of at most one other rank, and that is one of another origin. Its vote says what it
has found. All ranks have all votes before they commit a step, so that a step with other samples is committed by none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from elaswave_fx.config.types import Config
from elaswave_fx.control.store.ledger import Payload
from elaswave_fx.data import Source
from elaswave_fx.data.sample_digest import SampleDigest
from elaswave_fx.plan.work.topology import Rank

_SHOWN = 4
"""Samples that a message lists."""

_LOW = (1 << 64) - 1


@dataclass(frozen=True)
class Difference:
    """`reader` has read other samples than `fed_by` fed. `positions`: of the sample that differs, in the run; if more
    than one does, of all that `fed_by` fed."""

    reader: Rank
    fed_by: Rank
    positions: Sequence[int]


def is_needed(config: Config, data_digest: str) -> bool:
    """Whether the digest of a job's data leaves samples out, or what a transform makes of them. A job without a digest
    has nothing to compare."""
    if not data_digest:
        return False
    digest = SampleDigest.read(data_digest)
    return digest.covered < digest.pieces or config.data.transform is not None


def has_origins(ranks: Sequence[Rank], started: int) -> bool:
    """Whether some of the ranks opened the data apart from the others. `started`: ranks below were started by the
    launcher, all others joined."""
    return len(ranks) > 1 and max(ranks) >= started


def checked_ranks(ranks: Sequence[Rank], started: int, step: int) -> dict[Rank, Rank]:
    """Reader -> the rank whose samples it reads in a step, of `ranks` in ascending order. `started`: as above.

    Nobody is read by two. Where no origin has more than half of the ranks, each is read by somebody; otherwise each
    rank of the others is, and reads one of the larger origin. Pairs change with the step.
    """
    if not has_origins(ranks, started):
        return {}
    first = [rank for rank in ranks if rank < started]
    count, largest = len(ranks), max(len(first), 1)
    # In an order by origins, ranks that are at least the largest origin apart, both ways round, have different ones.
    turn, shift = divmod(step, max(1, count - 2 * largest + 1))
    turn = turn % largest
    order = [*first[turn:], *first[:turn], *(rank for rank in ranks if rank >= started)]
    pairs = zip(order, (order[(at + largest + shift) % count] for at in range(count)), strict=True)
    return {reader: other for reader, other in pairs if max(reader, other) >= started}


def find_difference(payloads: Mapping[Rank, Payload], first: int) -> Difference | None:
    """The first rank that has read other samples than the rank that fed them, by what both said in their votes on a
    step whose first sample has the position `first`."""
    for reader, payload in sorted(payloads.items()):
        check = payload.cross_check
        fed = payloads.get(Rank(check.rank)) if check is not None else None
        if check is None or fed is None or (check.content_hash, check.places) == (fed.content_hash, fed.places):
            continue
        places_fed = sorted({at for span in fed.consumed for at in range(span.samples.lo, span.samples.hi)})
        low, places = check.content_hash - fed.content_hash, check.places - fed.places
        # A sample that differs alone adds as much to both sums as its own hash differs, but for the factor.
        alone = [first + place for place in places_fed if ((first + place) * low - places) & _LOW == 0]
        return Difference(
            reader, Rank(check.rank), (alone if len(alone) == 1 else [first + place for place in places_fed])
        )
    return None


def message(config: Config, source: Source, step: int, found: Difference, host: Callable[[Rank], str]) -> str:
    """Why nobody takes the step, in a line. `host`: of a rank, as others reach it."""
    samples = [int(source.train.indices(position, 1)[0]) for position in found.positions[:_SHOWN]]
    more = " …" if len(found.positions) > _SHOWN else ""
    which = f"sample {samples[0]}" if len(found.positions) == 1 else f"samples {', '.join(map(str, samples))}{more}"
    some = "" if len(found.positions) == 1 else "some of "
    data = f"data._target_={config.data.name}" if config.data.kind == "target" else f"data={config.data.kind}"
    if config.data.transform is not None:
        data += f", data.transform._target_={config.data.transform['_target_']}"
    return (
        f"step {step}: rank {found.fed_by} ({host(found.fed_by)}) fed other data than rank {found.reader} "
        f"({host(found.reader)}) reads for {some}{which}, so the step was not taken; every rank has to read the same "
        f"({data}): give all of them the same files, and let a sample depend on nothing but its index and its key"
    )
