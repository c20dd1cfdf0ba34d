"""Hosts of their own: what is left behind, and what goes."""

from __future__ import annotations

import subprocess

import pytest

from tools.bench.namespaces import hosts, missing

pytestmark = pytest.mark.skipif(missing() is not None, reason=f"no hosts are made: {missing()}")


def names() -> str:
    return subprocess.run(["ip", "netns", "list"], check=True, capture_output=True, text=True).stdout


def test_what_a_killed_process_has_left_behind_goes_with_the_next_hosts() -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    left, kept = f"elaswave-{gone.pid}-0-switch", "elaswave-1-0-switch"  # process 1 always lives
    for name in (left, kept):
        subprocess.run(["ip", "netns", "add", name], check=True)
    try:
        with hosts(1) as (host,):
            assert left not in names() and kept in names() and host.name in names()
        assert host.name not in names()
    finally:
        subprocess.run(["ip", "netns", "delete", kept], check=True)
