# SPDX-License-Identifier: Apache-2.0
"""The segment limit: applied, taken up by living flows, and given back."""

from __future__ import annotations

import json
import os
from collections.abc import Callable

import pytest
from enginekit import BULK, MBIT, Bench, TcpFlow, pause, wait_until
from netlab import ip

from shapeagent.kernel.link import read_gso
from shapeagent.kernel.netns import open_rtnl

pytestmark = [
    pytest.mark.netns,
    pytest.mark.skipif(os.geteuid() != 0, reason="making network namespaces needs root"),
]


def gso_of(one: Bench) -> tuple[int, int]:
    with open_rtnl(one.netns) as rtnl:
        found = read_gso(rtnl, one.index)
    return found.max_size_bytes, found.max_segments


def segment_bytes(one: Bench) -> float:
    """Return the mean size of what the peer receives in the next moment, before segmentation."""

    def counters() -> tuple[int, int]:
        text = ip("-s", "-j", "link", "show", one.pair.peer_device, netns=one.pair.peer_netns)
        row = json.loads(text)[0]["stats64"]["rx"]
        return row["bytes"], row["packets"]

    before = counters()
    wait_until(lambda: counters()[1] > before[1] + 200, "traffic")
    after = counters()
    return (after[0] - before[0]) / (after[1] - before[1])


def test_limits_are_set_while_attached_and_restored(bench: Callable[..., Bench]) -> None:
    one = bench()
    before = gso_of(one)
    for link_mbit, option, want in (
        (100, None, 3028),
        (1000, None, 3125),
        (100, "off", before[0]),
        (100, "9000", 9000),
    ):
        report = one.attach(link_rate_bits_per_s=link_mbit * MBIT, segment_limit=option)
        got = gso_of(one)
        planned = report.plan.segment_limit_bytes or before[0]
        assert got[0] == planned, f"got gso_max_size {got[0]}, want {planned} as planned"
        if option is not None or link_mbit == 100:
            assert got[0] == want, f"got {got[0]} at {link_mbit} Mbit/s {option}, want {want}"
        one.engine.detach(one.device)
        assert gso_of(one) == before, f"got {gso_of(one)} after detach, want {before}"


def test_limits_that_someone_changes_meanwhile_are_left_alone(bench: Callable[..., Bench]) -> None:
    one = bench()
    one.attach()
    ip("link", "set", one.device, "gso_max_size", "20000", netns=one.netns)
    assert any("segment limits" in text for text in one.status().problems), (
        f"got {one.status().problems}, want it named"
    )
    report = one.engine.detach(one.device)
    assert gso_of(one)[0] == 20000, f"got {gso_of(one)}, want the administrator's 20000"
    assert any("left as they are" in note for note in report.notes), f"got {report.notes}"


def test_a_living_flow_takes_the_limit_up_and_gives_it_back(bench: Callable[..., Bench]) -> None:
    """bpf-facts 2.10, IPv4: by a route look-up, both ways."""
    one = bench()
    pair = one.pair
    with TcpFlow(pair.netns, pair.peer_netns, pair.peer_address4, BULK):
        pause(0.3)
        before = segment_bytes(one)
        one.attach(profile="police")
        pause(0.2)
        limited = segment_bytes(one)
        one.engine.detach(one.device)
        pause(0.3)
        after = segment_bytes(one)
    assert before > 6000, f"got segments of {before:.0f} bytes before, want large ones"
    assert limited <= 3100, f"got segments of {limited:.0f} bytes while attached, want 3028"
    assert after > 6000, f"got segments of {after:.0f} bytes after detach, want large ones"


@pytest.mark.parametrize("asked", [True, False])
def test_a_living_ipv6_flow_follows_only_where_that_was_asked_for(
    bench: Callable[..., Bench], asked: bool
) -> None:
    """The way to it is a more specific route, added and removed: none is left."""
    one = bench()
    pair = one.pair
    before_state = one.host_state()
    with TcpFlow(pair.netns, pair.peer_netns, pair.peer_address6, BULK):
        pause(0.3)
        before = segment_bytes(one)
        one.attach(profile="police", reroute_ipv6=asked)
        during = one.host_state()
        pause(0.2)
        limited = segment_bytes(one)
        one.engine.detach(one.device)
    assert during.routes6 == before_state.routes6, f"got routes {during.routes6}, want no new one"
    assert one.host_state() == before_state, f"got {one.host_state()}, want {before_state}"
    assert before > 6000, f"got segments of {before:.0f} bytes before, want large ones"
    if asked:
        assert limited <= 3100, f"got segments of {limited:.0f} bytes, want 3028"


def test_own_segments_stay_under_the_limit(bench: Callable[..., Bench]) -> None:
    one = bench()
    one.attach()
    pair = one.pair
    with TcpFlow(pair.netns, pair.peer_netns, pair.peer_address4, BULK):
        wait_until(lambda: one.packets().get("bulk", 0) > 1500, "traffic")
    bulk = one.classes()["bulk"]
    assert bulk.over_segment_packets == 0, f"got {bulk.over_segment_packets} above it, want none"
    assert not one.status().warnings, f"got {one.status().warnings}, want none"
