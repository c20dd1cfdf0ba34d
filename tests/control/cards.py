"""Cards of ranks that listen nowhere."""

from __future__ import annotations

from elaswave_fx.control.protocol.card import Card
from elaswave_fx.plan.work.topology import Rank


def card_of(rank: int) -> Card:
    """Each on a host of its own."""
    return Card(Rank(rank), f"host-{rank}", f"host-{rank}", "127.0.0.1", 9000 + rank)
