"""What the next epoch needs, prepared while the steps before a planned reconfiguration run.

next_epoch.prepare(text, 41)    the agent has received the plan, which begins with step 41; returns at once
next_epoch.plan(text)       ->  the Plan of the epoch; one that was prepared is there, with its engine spec
next_epoch.feed(plan, 41)   ->  the feed of its tile; of a plan that was prepared the first batches are there, too
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
    """`prepare` is called by the agent, all else by the main thread.

    Args:
        engine: that of the rank, which may come later than this.
        make_feed: of a plan, from a step on.
        reads_alike: whether the feed by a plan serves another one.
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
        self._thread = ThreadPoolExecutor(1, "next-epoch")  # It begins with the first plan, after all forks.
        self._prepared: tuple[str, Future[Plan]] | None = None
        self._lock = threading.Lock()  # of what follows
        self._ahead: tuple[Plan, InputFeed] | None = None

    def prepare(self, text: str, first_step: int) -> None:
        """A plan of that text is likely to follow, and to begin with that step."""
        if self._prepared is None or self._prepared[0] != text:
            self._prepared = text, self._thread.submit(self._read, text, first_step)

    def plan(self, text: str) -> Plan:
        """The plan of that text."""
        prepared, self._prepared = self._prepared, None
        return prepared[1].result() if prepared is not None and prepared[0] == text else Plan.from_json(text)

    def feed(self, plan: Plan, first_step: int) -> InputFeed:
        """Of the tile that the rank has by a plan that `plan` gave; the caller closes it."""
        with self._lock:
            ahead, self._ahead = self._ahead, None
        if ahead is not None and ahead[0] is plan:
            return ahead[1]
        if ahead is not None:
            ahead[1].close()
        return self._make_feed(plan, first_step)

    def close(self) -> None:
        """The rank's work is over."""
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
        """At most one is kept: a plan that was prepared need not come."""
        with self._lock:
            before, self._ahead = self._ahead, ahead
        if before is not None:
            before[1].close()
