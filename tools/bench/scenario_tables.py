"""The benchmarks that are tables of scenarios; `catalogue.py` says what each of them asks."""

from __future__ import annotations

from collections.abc import Mapping

from tools.bench.lost_ranks import GOAL_TABLE, POLICY_TABLE
from tools.bench.reconfigurations import JOIN_TABLE, MIGRATION_TABLE, SWITCH_TABLE
from tools.bench.scenarios import Table
from tools.bench.speeds import CLOCK_TABLE, SLOW_TABLE

TABLES: Mapping[str, Table] = {
    "policies": POLICY_TABLE,
    "frequency": CLOCK_TABLE,
    "goals": GOAL_TABLE,
    "slow": SLOW_TABLE,
    "join": JOIN_TABLE,
    "switch": SWITCH_TABLE,
    "migration": MIGRATION_TABLE,
}
