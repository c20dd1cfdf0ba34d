"""Somebody who holds the job's token asks the coordinator for other lanes, and waits until they are planned.

In: the job's address and token, a wish. Out: the reason of the plan that leads there, or a `ConfigError` that says why
there is none.

    ask_to_reshape(address, Wish(dp=2, pp=2), timeout_s=60.0)  ->  "the same ranks; lanes as before; the goal is ..."
"""

from __future__ import annotations

from elaswave_fx.control.agent.ask_to_join import asking
from elaswave_fx.control.protocol.messages import Granted, Reshape
from elaswave_fx.control.wire import ControlAddress
from elaswave_fx.errors import ConfigError
from elaswave_fx.plan.next.rank_news import Wish


def ask_to_reshape(address: ControlAddress, wish: Wish, timeout_s: float) -> str:
    """Why the plan is as it is that leads to what was wished for. Raises `ConfigError` when there is none, in time. A
    coordinator that dies before there is one is asked again, when there is another."""
    with asking(address) as line:
        answer = line.ask(Reshape(wish.dp, wish.pp), timeout_s)
    if not isinstance(answer, Granted):
        raise ConfigError(f"tcp://{line.where}: a wish is answered by {type(answer).__name__}")
    return answer.reason
