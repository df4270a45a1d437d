# SPDX-License-Identifier: Apache-2.0
"""Bursts on kernels with fq_codel: never 0 at high rates, never long at low ones."""

from __future__ import annotations

import contextlib
import struct
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from enginekit import (
    BULK,
    MBIT,
    SIGNAL_UDP,
    UDP4_HEADERS_BYTES,
    WIRE_EXTRA_BYTES,
    Bench,
    TcpFlow,
    UdpSink,
    UdpSource,
    open_socket,
    pause,
    percentile,
    rate_of,
    steady_rate,
    wait_until,
    write_policy,
)

from shapeagent.kernel import qdisc
from shapeagent.kernel.netns import open_rtnl
from shapeagent.kernel.rtnl import parse_attributes
from shapeagent.model.reports import AttachReport
from shapeagent.policy.plan import live_minor

pytestmark = [pytest.mark.vm, pytest.mark.netns]

GBIT = 1_000 * MBIT
CEILINGS = (GBIT, 10 * GBIT, 35 * GBIT, 100 * GBIT)
SLACK_NS = 50_000  # of the kernel's timers
LARGEST_PACKET_BYTES = 65_536


def bulk_of(guarantee: str, ceiling: str) -> Callable[[str], str]:
    """Return an edit that gives bulk other rates."""
    begin, end = "[classes.bulk]", "# ---- signal"
    words = f'priority = 3\nguarantee = "{guarantee}"\nceiling = "{ceiling}"'

    def edit(text: str) -> str:
        before, rest = text.split(begin, 1)
        _, after = rest.split(end, 1)
        return f'{before}{begin}\n{words}\nsafe_ceiling = "{ceiling}"\n\n{end}{after}'

    return edit


def attach_fast_link(one: Bench, folder: Path) -> AttachReport:
    """Attach with a link of 100 Gbit/s, of which bulk is promised next to nothing."""
    policy = write_policy(folder, bulk_of("10mbit", "100%"))
    return one.attach(profile="htb", link_rate_bits_per_s=100 * GBIT, policy_path=policy)


def bursts(one: Bench) -> dict[int, tuple[int, int, int, int]]:
    """Return HTB minor → (rate, burst, ceil, cburst) in bytes, as the kernel gives them."""
    found = {}
    with open_rtnl(one.netns) as rtnl:
        nodes = qdisc.dump_tree(rtnl, one.index).nodes
    for node in nodes:
        if not (node.is_class and node.kind == "htb"):
            continue
        attributes = parse_attributes(node.options)
        parms = attributes[1]  # TCA_HTB_PARMS: two tc_ratespec of 12 bytes, then u32s
        rate, ceil = struct.unpack_from("=8xI8xI", parms)
        if 6 in attributes:  # TCA_HTB_RATE64
            rate = struct.unpack("=Q", attributes[6])[0]
        if 7 in attributes:
            ceil = struct.unpack("=Q", attributes[7])[0]
        buffer, cbuffer = struct.unpack_from("=II", parms, 24)
        found[node.handle & 0xFFFF] = (
            rate,
            qdisc.burst_bytes(buffer, rate),
            ceil,
            qdisc.burst_bytes(cbuffer, ceil),
        )
    return found


def test_no_burst_is_too_small_up_to_100_gbit(bench: Callable[..., Bench], tmp_path: Path) -> None:
    """C55: max(2 largest packets, 50 us of the rate), read back from the kernel."""
    one = bench()
    report = attach_fast_link(one, tmp_path)
    bulk = next(row for row in report.plan.classes if row.name == "bulk")
    for ceiling in CEILINGS:
        one.engine.class_set(one.device, "bulk", ceiling)
        assert one.status().problems == (), f"got {one.status().problems}, want all as planned"
        found = bursts(one)
        for minor, (rate, burst, ceil, cburst) in found.items():
            for got, speed in ((burst, rate), (cburst, ceil)):
                want = max(2 * LARGEST_PACKET_BYTES, speed * SLACK_NS // 1_000_000_000)
                assert got >= want, f"1:{minor:x}: got a burst of {got} B, want {want}"
        rate, burst, ceil, cburst = found[live_minor(bulk.number)]
        assert abs(burst - bulk.burst_bytes) <= 1 + rate * qdisc.TICK_NS // 1_000_000_000
        assert 0.9 * ceiling < 8 * ceil <= ceiling, f"got a ceil of {8 * ceil}, want {ceiling}"
        assert cburst * 8e6 / ceiling <= 1_100, f"got {cburst} B, want a millisecond at most"


def test_a_ceiling_is_reached_on_a_link_of_100_gbit(
    bench: Callable[..., Bench], tmp_path: Path
) -> None:
    """C55: those of 1, 10, 35 and 100 Gbit/s that this CPU can carry, and one that it can."""
    one = bench()
    pair = one.pair
    place = (pair.netns, pair.peer_netns, pair.peer_address4, BULK)
    with TcpFlow(*place) as flow:
        pause(0.5)
        able = rate_of(flow.wire_bits, 1.0)
    easy = min(200 * MBIT, int(able / 2) // MBIT * MBIT)
    attach_fast_link(one, tmp_path)
    for ceiling in (easy, *(rate for rate in CEILINGS if 1.3 * rate <= able)):
        one.engine.class_set(one.device, "bulk", ceiling)
        with TcpFlow(*place) as flow:
            pause(0.7)
            share = steady_rate(flow.wire_bits, ceiling, 0.05, window_s=1.5) / ceiling
        print(f"able {able / MBIT:.0f} Mbit/s; {ceiling // MBIT} Mbit/s: {100 * share:.1f} %")
        assert 0.95 <= share <= 1.03, (
            f"got {100 * share:.1f} % of {ceiling // MBIT} Mbit/s, want 95 to 103 %"
        )


def test_a_slow_class_sends_no_second_at_once_after_idle(
    bench: Callable[..., Bench], tmp_path: Path
) -> None:
    """C56: of 30 KB, only the burst that the plan prints leaves at the link's speed."""
    size, count = 1400, 21
    one = bench()
    one.attach(profile="htb", policy_path=write_policy(tmp_path, bulk_of("100kbit", "500kbit")))
    number = one.classes()["bulk"].number
    _, _, ceil, cburst = bursts(one)[live_minor(number)]
    # Two full frames is the least that a 1500-byte MTU allows; the auto limit makes packets of 2.
    assert cburst <= 4 * (1514 + 24) + 64, f"got a burst of {cburst} B, want two packets"
    pair = one.pair
    wire_bytes = count * (size + UDP4_HEADERS_BYTES + WIRE_EXTRA_BYTES)
    want_s = (wire_bytes - cburst) / ceil
    for _ in range(2):
        pause(0.3)  # idle: longer than the burst takes to fill
        with contextlib.ExitStack() as stack:
            probes = stack.enter_context(UdpSink(pair.peer_netns, SIGNAL_UDP, timing=True))
            sink = stack.enter_context(UdpSink(pair.peer_netns, BULK))
            target = (pair.peer_address4, SIGNAL_UDP)
            stack.enter_context(UdpSource(pair.netns, target, packets_per_s=60, size=64))
            wait_until(lambda: probes.received > 3, "signal to flow")  # noqa: B023
            bulk = stack.enter_context(contextlib.closing(open_socket(pair.netns)))
            bulk.connect((pair.peer_address4, BULK))
            before = one.classes()["bulk"].packets
            probes.delays_us.clear()
            begin_s = time.monotonic()
            for number in range(count):
                bulk.send(struct.pack("=qd", number, begin_s).ljust(size, b"\0"))
            pause(0.05)
            early = sink.bytes
            early_s = time.monotonic() - begin_s
            wait_until(lambda: sink.received == count, f"all {count} datagrams")  # noqa: B023
            took_s = time.monotonic() - begin_s
            delays_us = list(probes.delays_us)
        assert one.classes()["bulk"].packets - before == count, "got another class, want bulk"
        allowed = cburst + ceil * early_s + size
        assert early <= allowed, f"got {early} B after {early_s:.3f} s, want {allowed:.0f} at most"
        assert took_s >= 0.9 * want_s, f"got 30 KB in {took_s:.3f} s, want {want_s:.3f}"
        assert took_s <= 1.5 * want_s + 0.2, f"got 30 KB in {took_s:.3f} s, want {want_s:.3f}"
        assert len(delays_us) >= 10, f"got {len(delays_us)} probes, want more"
        median_us = percentile(delays_us, 0.5)
        print(f"{took_s * 1e3:.0f} ms for 30 KB, signal median {median_us:.0f} us")
        assert median_us <= 10_000, f"got {median_us:.0f} us, want no wait behind bulk"
