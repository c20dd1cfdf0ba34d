"""Cross-check of samples between ranks that opened the data separately, if the data's digest does not cover all of it.

    checked_ranks((0, 1, 2), started=2, step=7)   ->  {0: 2, 2: 1}   rank 0 reads rank 2's samples, rank 2 rank 1's
    find_difference(payloads, first=56)           ->  Difference(reader=0, fed_by=2, positions=[57])

All ranks that the launcher started are one origin, since they read the same files of one machine. Each joiner is
another. A rank reads again the samples of at most one rank, of another origin. Its vote contains the result. All ranks
have all votes before they commit a step, so no rank commits a step with different samples.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from elaswave_fx.config.keys import Config
from elaswave_fx.control.store.ledger import Payload
from elaswave_fx.data import Source
from elaswave_fx.data.sample_digest import SampleDigest
from elaswave_fx.plan.work.topology import Rank

_SHOWN = 4
"""Maximum number of samples in a message."""

_LOW = (1 << 64) - 1


@dataclass(frozen=True)
class Difference:
    """`reader` read other samples than `fed_by` fed. `positions`: the one that differs, or all of `fed_by`."""

    reader: Rank
    fed_by: Rank
    positions: Sequence[int]


def is_needed(config: Config, data_digest: str) -> bool:
    """Whether a job's data digest omits samples or a transform's output; False without a digest."""
    if not data_digest:
        return False
    digest = SampleDigest.read(data_digest)
    return digest.covered < digest.pieces or config.data.transform is not None


def has_origins(ranks: Sequence[Rank], started: int) -> bool:
    """Whether the ranks have several origins. Ranks below `started` were started by the launcher, all others joined."""
    return len(ranks) > 1 and max(ranks) >= started


def checked_ranks(ranks: Sequence[Rank], started: int, step: int) -> dict[Rank, Rank]:
    """Reader -> the rank whose samples it reads in a step, of `ranks` in ascending order. `started`: see `has_origins`.

    No rank is read twice. If no origin has more than half of the ranks, every rank is read. Otherwise every rank
    outside of the largest origin is read, and reads one of it. Pairs change with the step.
    """
    if not has_origins(ranks, started):
        return {}
    first = [rank for rank in ranks if rank < started]
    count, largest = len(ranks), max(len(first), 1)
    # Ranks in order of origins, at least the largest origin's size apart both ways round, have different origins.
    turn, shift = divmod(step, max(1, count - 2 * largest + 1))
    turn = turn % largest
    order = [*first[turn:], *first[:turn], *(rank for rank in ranks if rank >= started)]
    pairs = zip(order, (order[(at + largest + shift) % count] for at in range(count)), strict=True)
    return {reader: other for reader, other in pairs if max(reader, other) >= started}


def find_difference(payloads: Mapping[Rank, Payload], first: int) -> Difference | None:
    """Return the first difference in the votes on a step whose first sample has position `first`."""
    for reader, payload in sorted(payloads.items()):
        check = payload.cross_check
        fed = payloads.get(Rank(check.rank)) if check is not None else None
        if check is None or fed is None or (check.content_hash, check.places) == (fed.content_hash, fed.places):
            continue
        places_fed = sorted({at for span in fed.consumed for at in range(span.samples.lo, span.samples.hi)})
        low, places = check.content_hash - fed.content_hash, check.places - fed.places
        # If one sample differs, both sums differ by the difference of its hash, the second one times its position.
        alone = [first + place for place in places_fed if ((first + place) * low - places) & _LOW == 0]
        return Difference(
            reader, Rank(check.rank), (alone if len(alone) == 1 else [first + place for place in places_fed])
        )
    return None


def message(config: Config, source: Source, step: int, found: Difference, host: Callable[[Rank], str]) -> str:
    """Return why no rank takes the step, in one line. `host`: the address of a rank."""
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
