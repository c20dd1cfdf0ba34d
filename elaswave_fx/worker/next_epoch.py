"""Preparation of the next epoch during the steps before a planned reconfiguration.

next_epoch.prepare(text, 41)    the agent received the plan, which begins with step 41; does not block
next_epoch.plan(text)       ->  the Plan of the epoch; a prepared one is ready, with its engine spec
next_epoch.feed(plan, 41)   ->  the feed of its tile; a prepared plan's first batches are loaded
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from elaswave_fx.plan.plan import Plan
from elaswave_fx.plan.work.topology import Rank
from elaswave_fx.worker.engine import RankEngine
from elaswave_fx.worker.feed import InputFeed


class NextEpoch:
    """The preparation of one rank. The agent calls `prepare`, the main thread everything else.

    Args:
        engine: returns the rank's engine, None while there is none.
        make_feed: makes the feed of a plan, from a step on.
        reads_alike: whether the feed of one plan serves another.
    """

    def __init__(
        self,
        rank: Rank,
        engine: Callable[[], RankEngine | None],
        make_feed: Callable[[Plan, int], InputFeed],
        reads_alike: Callable[[Plan, Plan], bool],
    ) -> None:
        self.reads_alike = reads_alike
        self._rank, self._engine, self._make_feed = rank, engine, make_feed
        self._thread = ThreadPoolExecutor(1, "next-epoch")  # started with the first plan, after all forks
        self._prepared: tuple[str, Future[Plan]] | None = None
        self._lock = threading.Lock()  # guards `_ahead`
        self._ahead: tuple[Plan, InputFeed] | None = None

    def prepare(self, text: str, first_step: int) -> None:
        """Begin to prepare the plan `text`, which is likely to begin with step `first_step`."""
        if self._prepared is None or self._prepared[0] != text:
            self._prepared = text, self._thread.submit(self._read, text, first_step)

    def plan(self, text: str) -> Plan:
        prepared, self._prepared = self._prepared, None
        return prepared[1].result() if prepared is not None and prepared[0] == text else Plan.from_json(text)

    def feed(self, plan: Plan, first_step: int) -> InputFeed:
        """Return the feed of the rank's tile in a plan from `plan`; the caller closes it."""
        with self._lock:
            ahead, self._ahead = self._ahead, None
        if ahead is not None and ahead[0] is plan:
            return ahead[1]
        if ahead is not None:
            ahead[1].close()
        return self._make_feed(plan, first_step)

    def close(self) -> None:
        """End the preparation for good."""
        self._thread.shutdown()
        self._keep(None)

    def _read(self, text: str, first_step: int) -> Plan:
        plan, engine = Plan.from_json(text), self._engine()
        if engine is not None and self._rank in plan.ranks:
            engine.precompute(plan)
            if not self.reads_alike(engine.plan, plan):
                self._keep((plan, self._make_feed(plan, first_step)))
        return plan

    def _keep(self, ahead: tuple[Plan, InputFeed] | None) -> None:
        """Keep at most one feed: a prepared plan need not come into force."""
        with self._lock:
            before, self._ahead = self._ahead, ahead
        if before is not None:
            before[1].close()
