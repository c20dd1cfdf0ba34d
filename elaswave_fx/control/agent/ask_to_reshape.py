"""Ask the coordinator for another layout, and wait until it is planned.

In: the job's address and token, a reshape request. Out: the reason of the plan that leads there, or a `ConfigError`
with the reason why there is none.

    ask_to_reshape(address, ReshapeRequest(dp=2, pp=2), timeout_s=60.0)  ->  "the same ranks; ..."
"""

from __future__ import annotations

from elaswave_fx.control.agent.ask_to_join import asking
from elaswave_fx.control.protocol.messages import Granted, Reshape
from elaswave_fx.control.wire import ControlAddress
from elaswave_fx.errors import ConfigError
from elaswave_fx.plan.next.replan_request import ReshapeRequest


def ask_to_reshape(address: ControlAddress, reshape: ReshapeRequest, timeout_s: float) -> str:
    """Return the reason of the plan that leads to the requested layout. Raises `ConfigError` if there is none in time.
    If the coordinator dies before its answer, the next one is asked."""
    with asking(address) as line:
        answer = line.ask(Reshape(reshape.dp, reshape.pp), timeout_s)
    if not isinstance(answer, Granted):
        raise ConfigError(f"tcp://{line.where}: a reshape request is answered by {type(answer).__name__}")
    return answer.reason
