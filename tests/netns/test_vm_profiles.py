# SPDX-License-Identifier: Apache-2.0
"""The profiles that need prio and fq_codel, end to end through the engine."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
from enginekit import (
    BULK,
    MBIT,
    NORMAL,
    SIGNAL_TCP,
    SIGNAL_UDP,
    UDP4_HEADERS_BYTES,
    WIRE_EXTRA_BYTES,
    Bench,
    TcpFlow,
    UdpSink,
    UdpSource,
    index_of,
    pause,
    send_datagrams,
    steady_rate,
    wait_until,
)
from netlab import tc

from shapeagent.kernel import qdisc
from shapeagent.kernel.netns import open_rtnl
from shapeagent.model.reports import ExplainRequest
from shapeagent.model.types import Direction
from shapeagent.policy.plan import MAJOR

pytestmark = [pytest.mark.vm, pytest.mark.netns]

LINK = 5 * MBIT  # two frames of burst outlast what an emulated CPU is late by
WIRE_BYTES = 1400 + UDP4_HEADERS_BYTES + WIRE_EXTRA_BYTES
BANDS = {"signal": 1, "stream": 2, "normal": 3, "bulk": 4}


def check_rate(
    one: Bench, port: int, rate: int, *, least: float = 0.95, settle_s: float = 0.8
) -> None:
    """Send datagrams at 1.5 times a rate and compare what arrives once it has settled."""
    pair = one.pair
    with (
        UdpSink(pair.peer_netns, port) as sink,
        UdpSource(pair.netns, (pair.peer_address4, port), bits_per_s=1.5 * rate) as source,
    ):
        pause(settle_s)
        begin, begin_s = source.sent, time.monotonic()
        share = steady_rate(sink.wire_bits, rate, 1 - least) / rate
        sent = 8 * WIRE_BYTES * (source.sent - begin) / (time.monotonic() - begin_s)
    print(f"port {port}: {100 * share:.1f} % of {rate / MBIT:.0f} Mbit/s, sent {sent / MBIT:.1f}")
    assert sent > 1.1 * rate, f"got a sender of {sent / MBIT:.1f} Mbit/s, want more than the rate"
    assert least <= share <= 1.03, (
        f"got {100 * share:.1f} % of {rate / MBIT:.0f} Mbit/s; {one.classes()['bulk']}, "
        f"{one.status().reasons}"
    )


def test_prio_end_to_end(bench: Callable[..., Bench]) -> None:
    """Bands by class under a TBF of the link rate; ceilings metered by the program."""
    one = bench()
    before = one.host_state()
    report = one.attach(profile="prio", link_rate_bits_per_s=LINK)
    assert report.plan.profile == "prio", f"got {report.plan.profile}, want prio"
    for row in report.plan.classes:
        want = f"band {BANDS[row.name] - 1}: fq_codel"
        assert row.queue.startswith(want), f"got {row.queue} for {row.name}, want {want}"
    shown = tc("-d", "qdisc", "show", "dev", one.device, netns=one.netns)
    assert "qdisc tbf 5348: root" in shown, f"got {shown}, want our tbf"
    assert f"rate {LINK // MBIT}Mbit" in shown, f"got {shown}, want the link rate"
    assert "qdisc prio 5349: parent 5348:1 bands 4" in shown, f"got {shown}, want prio below"
    assert shown.count("qdisc fq_codel") == 4, f"got {shown}, want four leaves"
    assert one.status().problems == (), f"got {one.status().problems}, want none"

    ports = {"signal": SIGNAL_TCP, "stream": 8000, "normal": NORMAL, "bulk": 20000}
    for name, port in ports.items():
        ask = ExplainRequest("192.0.2.1", "192.0.2.2", "tcp", 50000, port)
        got = one.engine.explain(one.device, ask)
        assert (got.traffic_class, got.priority) == (name, (MAJOR + 1) << 16 | BANDS[name]), got

    with open_rtnl(one.netns) as rtnl:
        index = index_of(one.netns, one.device)
        for port, name in ((SIGNAL_UDP, "signal"), (NORMAL, "normal"), (BULK, "bulk")):

            def sent(name: str = name) -> int:
                return qdisc.class_stats(rtnl, index)[BANDS[name]].sent_packets

            start = sent()
            with UdpSink(one.pair.peer_netns, port) as sink:
                target = (one.pair.peer_address4, port)
                with UdpSource(one.netns, target, packets_per_s=400, size=64, limit=40):
                    wait_until(lambda: sink.received == 40, f"40 of {name}")
            assert sent() - start >= 40, f"got {sent() - start} in the band of {name}, want 40"

    check_rate(one, BULK, LINK)
    assert one.classes()["bulk"].drops == 0, f"got {one.classes()['bulk']}, want no meter at 100 %"

    # what is queued by now was measured against the old ceiling: begin with an empty queue
    one.engine.detach(one.device)
    one.attach(profile="prio", link_rate_bits_per_s=LINK)
    found = one.engine.class_set(one.device, "bulk", 2 * MBIT)
    assert found.ceiling_in_force_bits_per_s == 2 * MBIT, f"got {found}, want 2 Mbit/s"
    # the bucket holds two 64 KB packets, 0.55 s of the rate: half as much is sent over it
    check_rate(one, BULK, 2 * MBIT, settle_s=2.0)
    assert one.classes()["bulk"].drops > 0, f"got {one.classes()['bulk']}, want it metered"
    assert one.status().problems == (), f"got {one.status().problems}, want none"
    again = one.attach(profile="prio", link_rate_bits_per_s=LINK)
    assert not again.changed, "got a change by the same request, want none"

    one.engine.detach(one.device)
    assert one.host_state() == before, f"got {one.host_state()}, want {before}"
    one.check_programs_gone()


def test_signal_overtakes_bulk_under_prio(bench: Callable[..., Bench]) -> None:
    """Strict bands: heartbeats beside two flows that fill the link are not lost and not late."""
    one = bench()
    one.attach(profile="prio", link_rate_bits_per_s=20 * MBIT)
    pair = one.pair
    place = (pair.netns, pair.peer_netns, pair.peer_address4)
    with TcpFlow(*place, BULK), TcpFlow(*place, 20000):
        pause(0.7)
        with UdpSink(pair.peer_netns, SIGNAL_UDP, timing=True) as sink:
            target = (pair.peer_address4, SIGNAL_UDP)
            with UdpSource(pair.netns, target, packets_per_s=100, size=64, limit=150):
                wait_until(lambda: sink.received == 150, "all 150 heartbeats")
            delays_us = sorted(sink.delays_us)
    median_us = delays_us[len(delays_us) // 2]
    print(f"median {median_us:.0f} us")
    assert median_us <= 20_000, f"got {median_us:.0f} us, want no wait behind bulk"


@pytest.mark.parametrize("ingress", ["count", "ifb"])
def test_htb_with_fq_codel_leaves_end_to_end(bench: Callable[..., Bench], ingress: str) -> None:
    """A ceiling set after attach leaves the queues' numbers; status must not call that damage."""
    one = bench()
    before = one.host_state()
    report = one.attach(profile="htb", ingress=ingress)
    for row in report.plan.classes:
        assert row.queue.startswith("fq_codel target"), f"got {row.queue}, want fq_codel"
    shown = tc("-d", "qdisc", "show", "dev", one.device, netns=one.netns)
    assert shown.count("qdisc fq_codel") == 8, f"got {shown}, want a live and a twin leaf each"
    directions = [Direction.EGRESS] + ([Direction.INGRESS] if ingress == "ifb" else [])
    for direction in directions:
        for bulk, stream in ((20, 40), (10, 30), (100, 100)):
            for name, mbit, lease_s in (("bulk", bulk, None), ("stream", stream, 60)):
                one.engine.class_set(
                    one.device, name, mbit * MBIT, lease_s=lease_s, direction=direction.value
                )
            problems = one.status().problems
            assert problems == (), f"{direction} at {bulk} Mbit/s: got {problems}, want none"
    again = one.attach(profile="htb", ingress=ingress)
    assert not again.changed, "got a change by the same request, want none"
    one.engine.class_set(one.device, "bulk", 10 * MBIT)
    with UdpSink(one.pair.peer_netns, SIGNAL_UDP) as sink:  # its neighbour answers by ingress
        send_datagrams(one.pair, SIGNAL_UDP, 5)
        wait_until(lambda: sink.received == 5, f"5 heartbeats; {one.status().reasons}")
    check_rate(one, BULK, 10 * MBIT)
    one.engine.detach(one.device)
    assert one.host_state() == before, f"got {one.host_state()}, want {before}"
    one.check_programs_gone()


def test_verified_instructions_stay_under_20000_on_this_kernel(bench: Callable[..., Bench]) -> None:
    one = bench()
    report = one.attach(profile="police", ingress="police")
    print(report.verified_instructions)
    assert report.verified_instructions, "got no program, want a number for each"
    for name, count in report.verified_instructions.items():
        assert 0 < count <= 20_000, (
            f"{name}: got {count} verified instructions, want 20,000 at most"
        )
