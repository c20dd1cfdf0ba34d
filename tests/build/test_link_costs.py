"""Links of the first plan: measured once, emulated, or given."""

from __future__ import annotations

from pathlib import Path

import pytest

from elaswave_fx.build import link_costs
from elaswave_fx.build.initial_plan import topology_of
from elaswave_fx.build.link_costs import links_of
from elaswave_fx.config.compose import load_config
from elaswave_fx.plan.work.topology import Link, Rank


def test_links_are_measured_once_by_pair_of_hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = [f"cache.dir={tmp_path}", "parallel.dp=4"]
    within, between = links_of(load_config(words))
    for link in (within, between):
        assert 1e-7 < link.latency_s < 1e-2 and 1e7 < link.bytes_per_s < 1e12
    topology = topology_of(load_config(words))
    assert (topology.link(Rank(0), Rank(1)), topology.link(Rank(0), Rank(2))) == (within, between) and within != between
    monkeypatch.setattr(link_costs, "measure_link", lambda one_host: pytest.fail("measured again"))
    assert topology_of(load_config([*words, "parallel.ranks_per_host=8"])).link(Rank(0), Rank(3)) == within
    alone = topology_of(load_config([*words, "parallel.ranks_per_host=1"]))
    assert alone.is_uniform and alone.link(Rank(0), Rank(1)) == between
    for kept in tmp_path.glob("programs/link*.json"):
        kept.write_text(kept.read_text()[:-1])  # a file that was cut off
    with pytest.raises(pytest.fail.Exception, match="measured again"):
        links_of(load_config(words))


def test_what_is_emulated_of_links_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_costs, "measure_link", lambda one_host: Link(1e-5, 5e9))
    emulated = ["parallel.dp=4", "device=emulated", "cache.enabled=false"]
    assert topology_of(load_config(emulated)).is_uniform
    slow = topology_of(load_config([*emulated, "emulated.link.bytes_per_s=1e8"]))
    assert (slow.within_host, slow.between_hosts) == (Link(1e-5, 5e9), Link(1e-5, 1e8))


def test_a_single_rank_has_no_links(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_costs, "measure_link", lambda one_host: pytest.fail("measured"))
    assert links_of(load_config(["parallel.dp=1", "parallel.pp=1", "cache.enabled=false"])) == (Link(), Link())


def test_what_is_known_of_a_pair_of_hosts_is_not_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_costs, "measure_link", lambda one_host: Link(1e-5, 5e9))
    words = ["parallel.dp=3", "parallel.ranks_per_host=1", "cache.enabled=false"]
    topology = topology_of(load_config([*words, "topology.links=[{hosts: [0, 2], latency_ms: 2}]"]))
    assert topology.link(Rank(0), Rank(2)) == Link(2e-3, 5e9)
    assert topology.link(Rank(0), Rank(1)) == Link(1e-5, 5e9)
