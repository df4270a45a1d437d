# SPDX-License-Identifier: Apache-2.0
"""Ceilings and priorities on real traffic, in wire bits: 24 bytes a frame are counted in."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable

import pytest
from enginekit import (
    BULK,
    MBIT,
    SIGNAL_UDP,
    Bench,
    TcpFlow,
    UdpSink,
    UdpSource,
    index_of,
    pause,
    percentile,
    set_sysctl,
    steady_rate,
    tcp_info,
    wait_until,
)
from netlab import tc

from shapeagent.kernel import qdisc
from shapeagent.kernel.netns import open_rtnl

pytestmark = [
    pytest.mark.netns,
    pytest.mark.rates,
    pytest.mark.skipif(os.geteuid() != 0, reason="making network namespaces needs root"),
]


def ends_of(one: Bench, direction: str) -> tuple[str, str, str]:
    """Return (sender, receiver, receiver's address)."""
    pair = one.pair
    if direction == "egress":
        return pair.netns, pair.peer_netns, pair.peer_address4
    return pair.peer_netns, pair.netns, pair.address4


def check_udp_ceiling(one: Bench, direction: str, ceiling_mbit: int) -> None:
    """Send 1.6 times the ceiling and compare what arrives."""
    sender, receiver, address = ends_of(one, direction)
    ceiling = ceiling_mbit * MBIT
    one.engine.class_set(one.device, "bulk", ceiling, direction=direction)
    with (
        UdpSink(receiver, BULK) as sink,
        UdpSource(sender, (address, BULK), bits_per_s=1.6 * ceiling) as source,
    ):
        pause(0.8)  # what a meter tolerates at first is over by then
        begin = source.sent
        got = steady_rate(sink.wire_bits, ceiling, 0.03)
        assert source.sent > begin, "got a sender that stands still"
    assert abs(got / ceiling - 1) <= 0.03, (
        f"got {got / MBIT:.2f} Mbit/s of UDP {direction}, want {ceiling_mbit} within 3 %"
    )


def check_tcp_ceiling(one: Bench, direction: str, ceiling_mbit: int, *, least: float) -> float:
    """Return the share of the ceiling that one TCP flow reaches."""
    sender, receiver, address = ends_of(one, direction)
    ceiling = ceiling_mbit * MBIT
    one.engine.class_set(one.device, "bulk", ceiling, direction=direction)
    with TcpFlow(sender, receiver, address, BULK) as flow:
        pause(0.7)
        share = steady_rate(flow.wire_bits, ceiling, 1 - least, window_s=1.5, tries=2) / ceiling
    print(f"TCP {direction} at {ceiling_mbit} Mbit/s: {100 * share:.1f} %")
    assert least <= share <= 1.04, (
        f"got {100 * share:.1f} % of {ceiling_mbit} Mbit/s by TCP {direction}, "
        f"want {100 * least:.0f} to 104 %"
    )
    return share


@pytest.mark.parametrize("ceiling_mbit", [20, 50])
def test_htb_holds_a_ceiling_within_three_percent(
    bench: Callable[..., Bench], ceiling_mbit: int
) -> None:
    one = bench()
    one.attach(profile="htb")
    check_udp_ceiling(one, "egress", ceiling_mbit)
    check_tcp_ceiling(one, "egress", ceiling_mbit, least=0.97)


@pytest.mark.parametrize("ceiling_mbit", [20, 50])
def test_the_police_profile_holds_a_ceiling(bench: Callable[..., Bench], ceiling_mbit: int) -> None:
    """A policer keeps no queue, so TCP lives from what it tolerates until the next timeout."""
    one = bench()
    one.attach(profile="police")
    check_udp_ceiling(one, "egress", ceiling_mbit)
    check_tcp_ceiling(one, "egress", ceiling_mbit, least=0.85)


def test_ingress_policing_holds_a_ceiling(bench: Callable[..., Bench]) -> None:
    one = bench()
    one.attach(ingress="police")
    check_udp_ceiling(one, "ingress", 20)
    check_udp_ceiling(one, "ingress", 50)
    check_tcp_ceiling(one, "ingress", 50, least=0.85)


def test_an_ifb_holds_a_ceiling_within_three_percent(bench: Callable[..., Bench]) -> None:
    one = bench()
    one.attach(ingress="ifb")
    check_udp_ceiling(one, "ingress", 20)
    check_udp_ceiling(one, "ingress", 50)
    check_tcp_ceiling(one, "ingress", 50, least=0.97)
    assert not one.reasons("ingress").get("ifb-lease-expired"), "got policing, want the IFB"


def test_the_link_is_held_with_four_queues_and_four_senders(bench: Callable[..., Bench]) -> None:
    one = bench(queues=4)
    one.attach()
    pair = one.pair
    with contextlib.ExitStack() as stack:
        flows = [
            stack.enter_context(TcpFlow(pair.netns, pair.peer_netns, pair.peer_address4, port))
            for port in (BULK, 20000, 20001, 20002)
        ]
        pause(0.7)
        got = steady_rate(lambda: sum(flow.wire_bits() for flow in flows), 100 * MBIT, 0.03)
    assert abs(got / (100 * MBIT) - 1) <= 0.03, f"got {got / MBIT:.1f} Mbit/s, want 100"


def test_signal_is_fast_beside_bulk_that_fills_the_link(bench: Callable[..., Bench]) -> None:
    """The same queue length without classes: its delay is what shaping takes away."""
    one = bench()
    pair = one.pair

    def probe() -> list[float]:
        with contextlib.ExitStack() as stack:
            for port in (BULK, 20000, 20001):
                stack.enter_context(TcpFlow(pair.netns, pair.peer_netns, pair.peer_address4, port))
            pause(0.7)
            sink = stack.enter_context(UdpSink(pair.peer_netns, SIGNAL_UDP, timing=True))
            source = stack.enter_context(
                UdpSource(
                    *(pair.netns, (pair.peer_address4, SIGNAL_UDP)),
                    packets_per_s=300,
                    size=64,
                    limit=450,
                )
            )
            wait_until(lambda: source.sent == 450, "all probes sent")
            with contextlib.suppress(AssertionError):
                wait_until(lambda: sink.received == 450, "all probes", timeout_s=1.0)
            return sink.delays_us

    tc(
        *("qdisc", "add", "dev", one.device, "root", "tbf", "rate", "100mbit"),
        *("burst", "3200", "limit", "1000000"),
        netns=one.netns,
    )
    without = probe()
    tc("qdisc", "del", "dev", one.device, "root", netns=one.netns)
    one.attach()
    shaped = probe()
    before_us, after_us = percentile(without, 0.5), percentile(shaped, 0.5)
    print(f"median without {before_us:.0f} us, with {after_us:.0f} us")
    assert len(shaped) == 450, f"got {len(shaped)} probes of 450, want all"
    assert after_us * 10 <= before_us, f"got {after_us:.0f} us, want a tenth of {before_us:.0f}"


@pytest.mark.parametrize("ecn", ["1", "0"])
def test_ecn_flows_are_marked_before_anything_is_dropped(
    bench: Callable[..., Bench], ecn: str
) -> None:
    """A flow somewhat above the ceiling meets marks first, and only where it understands them."""
    one = bench()
    for netns in (one.netns, one.pair.peer_netns):
        set_sysctl(netns, "net.ipv4.tcp_ecn", ecn)
    one.attach(profile="police")
    one.engine.class_set(one.device, "bulk", 20 * MBIT)
    pair = one.pair
    place = (pair.netns, pair.peer_netns, pair.peer_address4, BULK)
    with TcpFlow(*place, bits_per_s=22 * MBIT, chunk=2896) as flow:

        def limited() -> bool:
            bulk = one.classes()["bulk"]
            return bulk.ce_marks > 0 or bulk.drops > 0

        wait_until(limited, "the ceiling to be felt")
        first = one.classes()["bulk"]
        if ecn == "1":
            wait_until(lambda: tcp_info(flow.sender).delivered_ce > 0, "the mark's echo")
        else:
            assert tcp_info(flow.sender).delivered_ce == 0, "got marks on a flow without ECN"
    if ecn == "1":
        assert first.ce_marks > 0, f"got {first}, want marks"
        assert first.drops == 0, f"got {first.drops} drops at the first mark, want none"
    else:
        assert first.ce_marks == 0, f"got {first.ce_marks} marks, want none without ECN"
        assert first.drops > 0, f"got {first}, want drops"


def test_a_guarantee_holds_against_a_class_that_takes_all(bench: Callable[..., Bench]) -> None:
    """bulk keeps its 10 % beside stream, which may use the whole link."""
    one = bench()
    one.attach()
    pair = one.pair
    with contextlib.ExitStack() as stack:
        stream = [
            stack.enter_context(TcpFlow(pair.netns, pair.peer_netns, pair.peer_address4, port))
            for port in (8000, 8001)
        ]
        bulk = stack.enter_context(TcpFlow(pair.netns, pair.peer_netns, pair.peer_address4, BULK))
        pause(1.0)
        got = steady_rate(bulk.wire_bits, 10 * MBIT, 0.1)
        beside = steady_rate(lambda: sum(flow.wire_bits() for flow in stream), 90 * MBIT, 0.1)
    assert 9 * MBIT <= got <= 30 * MBIT, f"got {got / MBIT:.1f} Mbit/s of bulk, want 10 or more"
    assert beside >= 65 * MBIT, f"got {beside / MBIT:.1f} Mbit/s of stream, want most of the rest"


def test_nothing_goes_round_the_tree(bench: Callable[..., Bench]) -> None:
    """No packet is queued unshaped: HTB's direct counter stays 0, and the root holds the link."""
    one = bench()
    one.attach()
    pair = one.pair
    with TcpFlow(pair.netns, pair.peer_netns, pair.peer_address4, 7777) as flow:
        pause(0.5)
        got = steady_rate(flow.wire_bits, 100 * MBIT, 0.03)
    text = tc("-s", "-d", "qdisc", "show", "dev", one.device, "root", netns=one.netns)
    assert "direct_packets_stat 0" in text, f"got {text}, want no direct packet"
    assert abs(got / (100 * MBIT) - 1) <= 0.03, f"got {got / MBIT:.1f} Mbit/s, want 100"
    with open_rtnl(one.netns) as rtnl:
        stats = qdisc.class_stats(rtnl, index_of(one.netns, one.device))
    assert sum(row.sent_packets for row in stats.values()) > 0, f"got {stats}"
