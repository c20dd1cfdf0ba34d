"""Writes of a run that fail, spread evenly over all of them; `make disk` tries every one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.marks import slow

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(("every", "least"), [(150, 2), slow(75, 5)])
def test_a_write_that_fails_costs_nothing_that_was_committed(every: int, least: int) -> None:
    command = [sys.executable, "-m", "tests.disk.campaign", "--every", str(every), "--offset", "17"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    counted, *runs = [json.loads(line) for line in ended.stdout.splitlines()]
    assert counted["writes"] > 300 and len(runs) >= least, ended.stderr
    assert [run for run in runs if not run["well"]] == [] and ended.returncode == 0
    assert sum(run["struck"] for run in runs) >= len(runs) - 1, "the disk has failed"
