"""The plan that a planned stop is for, read while the steps before it run, so that nobody waits for that.

foresight.expect(text)      the agent has heard of it; returns at once
foresight.plan(text)    ->  the Plan of the epoch that came; one that was expected is there, and so is its engine spec
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from elaswave_fx.plan.plan import Plan
from elaswave_fx.plan.topology import Rank
from elaswave_fx.worker.engine import RankEngine


class Foresight:
    """`expect` is the agent's, `plan` the main thread's.

    Args:
        engine: that of the rank, which may come later than this.
    """

    def __init__(self, rank: Rank, engine: Callable[[], RankEngine | None]) -> None:
        self._rank, self._engine = rank, engine
        self._thread = ThreadPoolExecutor(1, "foresight")  # It begins with the first plan, after all forks.
        self._expected: tuple[str, Future[Plan]] | None = None

    def expect(self, text: str) -> None:
        """A plan of that text is likely to follow."""
        if self._expected is None or self._expected[0] != text:
            self._expected = text, self._thread.submit(self._read, text)

    def plan(self, text: str) -> Plan:
        """The plan of that text."""
        expected, self._expected = self._expected, None
        return expected[1].result() if expected is not None and expected[0] == text else Plan.from_json(text)

    def _read(self, text: str) -> Plan:
        plan, engine = Plan.from_json(text), self._engine()
        if engine is not None and self._rank in plan.ranks:
            engine.foresee(plan)
        return plan
