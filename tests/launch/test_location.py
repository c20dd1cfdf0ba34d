"""Where ranks are lost, and with whom they may share memory."""

from __future__ import annotations

from dataclasses import replace

from elaswave_fx.control.protocol.member_info import member_of
from elaswave_fx.launch.joined import place_in_job
from elaswave_fx.launch.location import here
from elaswave_fx.plan.work.topology import Host, Rank
from tests.control.member_infos import info_of


def test_hosts_are_emulated_where_the_launcher_is_and_nowhere_else() -> None:
    launcher = here()
    assert launcher.machine == launcher.boot and launcher.host.startswith(f"{launcher.boot}/")
    assert place_in_job(launcher, 5, 2, here()) == replace(launcher, host="host-2")
    rack = here("rack 7")
    assert rack.machine == "rack 7" and rack.boot in rack.host and place_in_job(launcher, 5, 2, rack) == rack
    container = replace(launcher, host=f"{launcher.boot}/1")
    elsewhere = replace(launcher, machine="machine-x", host="machine-x/1", boot="machine-x")
    for place in (container, elsewhere):
        for number in (5, 6):
            assert place_in_job(launcher, number, 2, place) == place


def test_a_member_is_as_its_card_says() -> None:
    info = replace(info_of(3), failure_domain="rack 7", memory_domain="rack 7/machine-x/1", memory_bytes=1 << 34)
    member = member_of(info)
    assert (member.rank, member.machine, member.memory_bytes, member.speed) == (3, "rack 7", 1 << 34, 1.0)
    assert member.host == member_of(replace(info, number=Rank(9))).host != member_of(info_of(3)).host == Host(3)
