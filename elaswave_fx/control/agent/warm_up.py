"""A rehearsed loss, so that the first real one finds code and memory warm.

In: the state at the start of the first epoch. Out: nothing; the machine is pure. Without it a rank's part of an
agreement takes about twice as long: pages are still shared with the launcher, and bytecode has never run.
"""

from __future__ import annotations

from dataclasses import replace

from elaswave_fx.control.protocol.messages import Activate, Prepared
from elaswave_fx.control.protocol.rank import report, step
from elaswave_fx.control.protocol.rank_state import Holdings, RankState, StepLeft
from elaswave_fx.control.protocol.types import Activation, Ballot, Replica, Term
from elaswave_fx.control.wire import decode, encode
from elaswave_fx.plan.work.topology import Epoch

ROUNDS = 16
"""Number of calls after which the interpreter has specialized the code."""


def warm_up(state: RankState, first: Activation) -> None:
    """Leave a step, report, and enter the next epoch, including encoding and decoding."""
    replicas = {box: Replica(state.committed, 1) for box in sorted(state.kept)}
    suspect = next((rank for rank in state.members if rank != state.rank), None)
    left = StepLeft(Holdings(state.committed, replicas, {}, complete=state.kept), suspect)
    ballot = Ballot(Term(state.ballot.term + 1), 1)
    news = Activate(ballot, replace(first, epoch=Epoch(first.epoch + 1)))
    for _ in range(ROUNDS):
        waiting, _ = step(state, left, state.tick_s)
        decode(encode(Prepared(ballot, report(waiting))))
        step(waiting, decode(encode(news)), state.tick_s)  # type: ignore[arg-type]
