"""A loss that a rank runs through in its head, so that the first real one finds code and memory warm.

In: the state at the start of the first epoch. Out: nothing; the machines are pure, so nothing has happened. Without it
a rank's part of an agreement takes about twice as long: pages still shared with the launcher, bytecode never run.
"""

from __future__ import annotations

from dataclasses import replace

from elaswave_fx.control.protocol import step_commit
from elaswave_fx.control.protocol.messages import Activate, Prepared
from elaswave_fx.control.protocol.rank_state import Holdings, RankState, report
from elaswave_fx.control.protocol.types import Activation, Ballot, Copy, Term
from elaswave_fx.control.wire import decode, encode
from elaswave_fx.plan.topology import Epoch

ROUNDS = 16
"""After some calls the interpreter has specialized the code."""


def warm_up(state: RankState, first: Activation) -> None:
    """Leave a step, report, and take the next epoch, up to what the wire would carry."""
    kept = [plan.box for plan in state.view.kept] if state.view else []
    holdings = Holdings(state.committed, {box: Copy(state.committed, 1) for box in kept}, {}, complete=frozenset(kept))
    suspect = next((rank for rank in state.members if rank != state.rank), None)
    ballot = Ballot(Term(state.ballot.term + 1), 1)
    news = Activate(ballot, replace(first, epoch=Epoch(first.epoch + 1)))
    for _ in range(ROUNDS):
        stopped, _ = step_commit.left(state, holdings, suspect, state.tick_s)
        decode(encode(Prepared(ballot, report(stopped))))
        step_commit.control(stopped, decode(encode(news)), state.tick_s)  # type: ignore[arg-type]
