# SPDX-License-Identifier: Apache-2.0
"""The profiles that need prio and fq_codel, end to end through the engine."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import socket
import struct
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

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
    add_bpf_filter,
    index_of,
    open_socket,
    pause,
    rate_of,
    send_datagrams,
    steady_rate,
    wait_growth,
    wait_until,
)
from netlab import ip, load_program, tc

from shapeagent.kernel import qdisc
from shapeagent.kernel.netns import open_rtnl
from shapeagent.kernel.probe import read_kernel_facts
from shapeagent.lab.bench.roles import SO_TIMESTAMPNS
from shapeagent.lab.topology import routed_path
from shapeagent.model.errors import ConflictError, InputError
from shapeagent.model.reports import AttachRequest, ExplainRequest
from shapeagent.model.types import Direction
from shapeagent.policy.plan import MAJOR, live_minor
from shapectl.labattach import LabAttach

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


def heartbeat_delays_us(one: Bench) -> list[float]:
    """Send 150 heartbeats, 100 a second, and return their delays, sorted; all must arrive."""
    pair = one.pair
    with UdpSink(pair.peer_netns, SIGNAL_UDP, timing=True) as sink:
        target = (pair.peer_address4, SIGNAL_UDP)
        with UdpSource(pair.netns, target, packets_per_s=100, size=64, limit=150):
            wait_until(lambda: sink.received == 150, "all 150 heartbeats")
        return sorted(sink.delays_us)


@pytest.mark.smoke
def test_signal_overtakes_bulk_under_prio(bench: Callable[..., Bench]) -> None:
    """Strict bands: heartbeats beside two flows that fill the link are not lost and not late."""
    one = bench()
    one.attach(profile="prio", link_rate_bits_per_s=20 * MBIT)
    pair = one.pair
    place = (pair.netns, pair.peer_netns, pair.peer_address4)
    with TcpFlow(*place, BULK), TcpFlow(*place, 20000):
        pause(0.7)
        delays_us = heartbeat_delays_us(one)
    median_us = delays_us[len(delays_us) // 2]
    print(f"median {median_us:.0f} us")
    assert median_us <= 20_000, f"got {median_us:.0f} us, want no wait behind bulk"


EDT_LINK = 20 * MBIT  # 8 frames take less than 20 ms at its half, the safe ceiling
FQ_NAMES = {"signal": 7, "stream": 6, "normal": 0, "bulk": 2}


def sent_by(flows: list[TcpFlow]) -> Callable[[], int]:
    return lambda: sum(flow.wire_bits() for flow in flows)


def test_edt_end_to_end(bench: Callable[..., Bench]) -> None:
    """fq at the root; bulk by departure time at its ceiling, changed by map writes only."""
    one = bench()
    before = one.host_state()
    report = one.attach(profile="edt", link_rate_bits_per_s=EDT_LINK)
    rows = {row.name: row for row in report.plan.classes}
    bands = read_kernel_facts().fq_bands
    version = tuple(int(part) for part in os.uname().release.split(".")[:2])
    assert bands == (version >= (6, 7)), f"got bands {bands} on {version}"
    first = "fq band 0" if bands else "fq, always first"
    assert rows["signal"].queue == first, f"got {rows['signal']}, want {first}"
    assert rows["signal"].enforced_by == "none", f"got {rows['signal']}, want no pacing"
    assert rows["bulk"].enforced_by.startswith("departure times"), f"got {rows['bulk']}"
    shown = tc("-d", "qdisc", "show", "dev", one.device, netns=one.netns)
    assert "qdisc fq 5348: root" in shown, f"got {shown}, want our fq"
    assert "nopacing" in shown, f"got {shown}, want no pacing by sockets"
    assert one.status().problems == (), f"got {one.status().problems}, want none"
    ports = {"signal": SIGNAL_TCP, "stream": 8000, "normal": NORMAL, "bulk": 20000}
    for name, port in ports.items():
        ask = ExplainRequest("192.0.2.1", "192.0.2.2", "tcp", 50000, port)
        got = one.engine.explain(one.device, ask)
        assert (got.traffic_class, got.priority) == (name, FQ_NAMES[name]), f"got {got}"

    check_rate(one, BULK, EDT_LINK)
    assert one.classes()["bulk"].drops > 0, f"got {one.classes()['bulk']}, want drops by us"
    shown = tc("-s", "qdisc", "show", "dev", one.device, netns=one.netns)
    assert "dropped 0," in shown, f"got {shown}, want no drop by fq"
    with open_rtnl(one.netns) as rtnl:
        tree = qdisc.dump_tree(rtnl, one.index)
    one.engine.class_set(one.device, "bulk", 10 * MBIT)
    check_rate(one, BULK, 10 * MBIT)
    one.engine.class_set(one.device, "bulk", 15 * MBIT, lease_s=0.5)
    pause(0.5)
    check_rate(one, BULK, 10 * MBIT)  # the safe ceiling, half of the link
    assert one.reasons()["lease-expired"] > 0, f"got {one.reasons()}, want a lease that ended"
    with open_rtnl(one.netns) as rtnl:
        assert qdisc.dump_tree(rtnl, one.index) == tree, "got another tree, want it untouched"
    again = one.attach(profile="edt", link_rate_bits_per_s=EDT_LINK)
    assert not again.changed, "got a change by the same request, want none"
    with pytest.raises(InputError) as caught:
        one.engine.class_set(one.device, "bulk", 3 * MBIT)
    assert caught.value.reference == "ceiling-out-of-range", f"got {caught.value}"
    assert "20 ms" in caught.value.message, f"got {caught.value}, want why"

    one.engine.detach(one.device)
    assert one.host_state() == before, f"got {one.host_state()}, want {before}"
    one.check_programs_gone()


@pytest.mark.smoke
def test_edt_holds_tcp_and_keeps_signal_in_front(bench: Callable[..., Bench]) -> None:
    """Eight flows fill the ceiling, in order, with no loss on the wire and no wait for signal."""
    one = bench()
    one.attach(profile="edt", link_rate_bits_per_s=EDT_LINK)
    pair = one.pair
    place = (pair.netns, pair.peer_netns, pair.peer_address4)
    with contextlib.ExitStack() as stack:
        flows = [stack.enter_context(TcpFlow(*place, 20000 + number)) for number in range(8)]
        pause(0.7)
        share = steady_rate(sent_by(flows), EDT_LINK, 0.05, window_s=1.5) / EDT_LINK
        delays_us = heartbeat_delays_us(one)
        shares = [flow.wire_bits() for flow in flows]
        reordered = sum(flow.info().out_of_order for flow in flows)
    print(f"{100 * share:.1f} %, median {delays_us[75]:.0f} us, p99 {delays_us[148]:.0f} us")
    print(f"{one.classes()['bulk']}, fairness {min(shares) / max(shares):.2f}")
    assert 0.95 <= share <= 1.03, f"got {100 * share:.1f} % of the link, want 95 to 103 %"
    assert delays_us[75] <= 2_000, f"got {delays_us[75]:.0f} us, want no wait behind bulk"
    assert reordered == 0, f"got {reordered} segments out of order, want none"


def test_edt_keeps_order_while_ceilings_come_and_go(bench: Callable[..., Bench]) -> None:
    """A class without a ceiling queues behind what its last ceiling still holds back."""
    one = bench()
    one.attach(profile="edt", link_rate_bits_per_s=EDT_LINK)
    pair = one.pair
    with (
        UdpSink(pair.peer_netns, NORMAL) as sink,
        UdpSource(pair.netns, (pair.peer_address4, NORMAL), bits_per_s=15 * MBIT),
    ):
        for _ in range(10):
            for rate in (8 * MBIT, EDT_LINK):
                one.engine.class_set(one.device, "normal", rate)
                wait_growth(lambda: sink.received, 50, "normal to flow")
        inversions = sink.inversions
    assert one.classes()["normal"].drops > 0, "got no drop, want a ceiling that held"
    assert inversions == 0, f"got {inversions} datagrams after a later one, want none"


def test_edt_yields_what_the_others_send(bench: Callable[..., Bench]) -> None:
    """The device is faster than the link: bulk leaves room, so the sum is the link rate."""
    one = bench()
    one.attach(profile="edt", link_rate_bits_per_s=EDT_LINK)
    pair = one.pair
    with contextlib.ExitStack() as stack:
        sinks = [stack.enter_context(UdpSink(pair.peer_netns, port)) for port in (BULK, NORMAL)]
        for port, rate in ((BULK, 30 * MBIT), (NORMAL, 8 * MBIT)):
            target = (pair.peer_address4, port)
            stack.enter_context(UdpSource(pair.netns, target, bits_per_s=rate))
        pause(0.7)
        bulk, normal = sinks

        def both() -> int:
            return bulk.wire_bits() + normal.wire_bits()

        total = steady_rate(both, EDT_LINK, 0.05, window_s=1.5) / EDT_LINK
        other = rate_of(normal.wire_bits, 1.0)
    print(f"total {100 * total:.1f} %, normal {other / MBIT:.1f} Mbit/s")
    assert 0.95 <= total <= 1.03, f"got {100 * total:.1f} % of the link, want 95 to 103 %"
    assert other >= 7.2 * MBIT, f"got {other / MBIT:.1f} Mbit/s of normal, want its 8"


def test_edt_leaves_bulk_its_guarantee(bench: Callable[..., Bench]) -> None:
    """Unpaced classes that send more than the link alone do not starve bulk."""
    one = bench()
    one.attach(profile="edt", link_rate_bits_per_s=EDT_LINK)
    pair = one.pair
    with contextlib.ExitStack() as stack:
        sink = stack.enter_context(UdpSink(pair.peer_netns, BULK))
        for port, rate in ((BULK, 10 * MBIT), (NORMAL, 25 * MBIT)):
            target = (pair.peer_address4, port)
            stack.enter_context(UdpSource(pair.netns, target, bits_per_s=rate))
        pause(0.7)
        got = rate_of(sink.wire_bits, 2.0)
    print(f"bulk {got / MBIT:.2f} Mbit/s")
    assert 0.8 <= got / (0.1 * EDT_LINK) <= 1.5, f"got {got / MBIT:.2f} Mbit/s, want about 2"


@pytest.mark.parametrize("way", ["routed", "redirected"])
def test_c24_forwarded_packets_with_a_time_of_arrival_are_not_held_back(
    tmp_path: Path, way: str
) -> None:
    """While someone asks for times of arrival, each packet of the host carries one."""
    attach = LabAttach(tmp_path, lambda _: None)
    with contextlib.ExitStack() as stack:
        _, path = stack.enter_context(routed_path())
        out = path.router_egress
        if way == "redirected":
            tc("qdisc", "add", "dev", "ra0", "clsact", netns=path.router)
            action = f"protocol ip matchall action mirred egress redirect dev {out.device}".split()
            tc("filter", "add", "dev", "ra0", "ingress", *action, netns=path.router)
        sniffers = []
        for netns in (path.router, path.receiver):
            sniffer = open_socket(netns, socket.AF_PACKET, socket.SOCK_RAW, socket.htons(0x0800))
            sniffers.append(stack.enter_context(contextlib.closing(sniffer)))
            sniffer.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPNS, 1)
        arrived = sniffers[1]
        arrived.settimeout(2.0)
        stack.enter_context(attach(path.router, out.device, EDT_LINK, profile="edt"))
        sender = stack.enter_context(contextlib.closing(open_socket(path.sender)))
        for number in range(40):
            port = (SIGNAL_UDP, NORMAL, BULK, BULK)[number % 4]
            sender.sendto(bytes(1000), (path.receiver_port.ipv4, port))
            pause(0.004)  # 2 Mbit/s: bulk stays under its ceiling
        seen = 0
        while seen < 40:
            frame = arrived.recv(2048)  # TimeoutError: what is missing stands in fq
            seen += frame[23] == socket.IPPROTO_UDP and len(frame) == 1042
        shown = tc("-s", "-j", "qdisc", "show", "dev", out.device, netns=path.router)
    fq = next(row for row in json.loads(shown) if row["kind"] == "fq")
    late = {name: fq.get(name, 0) for name in ("horizon_drops", "horizon_caps", "dropped", "drops")}
    assert not any(late.values()), f"got {late} of fq, want none held back or dropped"


def test_edt_on_a_device_with_queues_builds_mq(bench: Callable[..., Bench]) -> None:
    """One clock for all queues: the sum of eight flows is the ceiling."""
    one = bench(queues=4)
    before = one.host_state()
    report = one.attach(profile="edt", link_rate_bits_per_s=EDT_LINK)
    shown = tc("qdisc", "show", "dev", one.device, netns=one.netns)
    assert "qdisc mq 5348: root" in shown, f"got {shown}, want mq"
    assert shown.count("qdisc fq ") == 4, f"got {shown}, want an fq per queue"
    assert any("with an fq per transmit queue" in step for step in report.plan.steps)
    assert one.status().problems == (), f"got {one.status().problems}, want none"
    pair = one.pair
    place = (pair.netns, pair.peer_netns, pair.peer_address4)
    with contextlib.ExitStack() as stack:
        flows = [stack.enter_context(TcpFlow(*place, 20000 + number)) for number in range(8)]
        pause(0.7)
        share = steady_rate(sent_by(flows), EDT_LINK, 0.05, window_s=1.5) / EDT_LINK
    assert 0.95 <= share <= 1.03, f"got {100 * share:.1f} % of the link, want 95 to 103 %"
    tc("qdisc", "replace", "dev", one.device, "parent", "5348:2", "pfifo", netns=one.netns)
    problems = one.status().problems
    assert any("queue 1" in text for text in problems), f"got {problems}, want the foreign leaf"
    tc("qdisc", "replace", "dev", one.device, "parent", "5348:2", "fq", netns=one.netns)
    one.engine.detach(one.device)
    assert one.host_state() == before, f"got {one.host_state()}, want {before}"


def test_edt_never_takes_the_place_of_a_foreign_fq(bench: Callable[..., Bench]) -> None:
    """One that somebody added, and a default one under a program that may stamp packets."""
    one = bench()
    tc("qdisc", "add", "dev", one.device, "root", "handle", "1:", "fq", netns=one.netns)
    before = one.host_state()
    with pytest.raises(ConflictError) as caught:
        one.attach(profile="edt")
    assert caught.value.reference == "qdisc-busy", f"got {caught.value}"
    assert one.host_state() == before, f"got {one.host_state()}, want {before}"
    tc("qdisc", "del", "dev", one.device, "root", netns=one.netns)

    default = Path("/proc/sys/net/core/default_qdisc")  # of this machine, which is a test's own
    old = default.read_text()
    program = load_program()
    try:
        default.write_text("fq")
        subprocess.run(["modprobe", "tun"], check=True, timeout=10)
        ip("tuntap", "add", "dev", "t0", "mode", "tap", netns=one.netns)
        ip("link", "set", "t0", "up", netns=one.netns)
        shown = tc("qdisc", "show", "dev", "t0", netns=one.netns)
        assert "qdisc fq 0: root" in shown, f"got {shown}, want the kernel's own fq"
        request = AttachRequest(device="t0", profile="edt", link_rate_bits_per_s=100 * MBIT)
        plan = one.engine.plan_attach(request)
        assert plan.profile == "edt", f"got {plan}, want a plan where nobody writes stamps"
        tc("qdisc", "add", "dev", "t0", "clsact", netns=one.netns)
        add_bpf_filter(one.netns, "t0", Direction.EGRESS, program, pref=1)
        for profile in ("edt", "htb", "prio"):
            with pytest.raises(ConflictError) as caught:
                one.engine.plan_attach(dataclasses.replace(request, profile=profile))
            assert caught.value.reference == "edt-writer", f"{profile}: got {caught.value}"
        police = one.engine.plan_attach(dataclasses.replace(request, profile="police"))
        assert police.profile == "police", f"got {police}, want the fq left alone"
    finally:
        default.write_text(old)
        os.close(program)


def test_edt_refuses_ceilings_at_which_its_queue_is_long(bench: Callable[..., Bench]) -> None:
    one = bench()
    before = one.host_state()
    with pytest.raises(InputError) as caught:
        one.attach(profile="edt", link_rate_bits_per_s=5 * MBIT)  # safe ceiling 2.5
    assert caught.value.reference == "edt-ceiling-too-low", f"got {caught.value}"
    assert one.host_state() == before, f"got {one.host_state()}, want {before}"


@pytest.mark.parametrize("ingress", [pytest.param("count", marks=pytest.mark.smoke), "ifb"])
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


def root_wire_bits(one: Bench) -> int:
    """Return what the root qdisc has sent, as bits on the wire."""
    shown = json.loads(tc("-s", "-j", "qdisc", "show", "dev", one.device, netns=one.netns))
    (root,) = [row for row in shown if row.get("root")]
    return 8 * int(root["bytes"] + WIRE_EXTRA_BYTES * root["packets"])


@pytest.mark.parametrize("flows", [1, 8])
def test_tcp_fills_the_link_under_prio(bench: Callable[..., Bench], flows: int) -> None:
    """A TBF's burst of under two frames and a queue of a millisecond do not slow TCP down.

    Counted at the TBF: the receiver counts what is in order, which comes in jumps after a loss.
    """
    one, rate = bench(), 50 * MBIT
    one.attach(profile="prio", link_rate_bits_per_s=rate)
    place = (one.pair.netns, one.pair.peer_netns, one.pair.peer_address4)
    with contextlib.ExitStack() as stack:
        found = [stack.enter_context(TcpFlow(*place, 20000 + number)) for number in range(flows)]
        assert len(found) == flows
        pause(1.0)
        got = steady_rate(lambda: root_wire_bits(one), rate, 0.03) / rate
    print(f"{flows} flows: {100 * got:.1f} % of {rate / MBIT:.0f} Mbit/s")
    assert 0.97 <= got <= 1.01, f"got {100 * got:.1f} % of the link, want all of it"


def codel_target_us(one: Bench, minor: int) -> int:
    """Return the target of the fq_codel under a class of ours."""
    shown = json.loads(tc("-j", "qdisc", "show", "dev", one.device, netns=one.netns))
    (found,) = [row for row in shown if row.get("parent") == f"{MAJOR:x}:{minor:x}"]
    assert found["kind"] == "fq_codel", f"got {found}, want fq_codel"
    return int(found["options"]["target"])


def test_the_target_of_a_queue_follows_its_ceiling(bench: Callable[..., Bench]) -> None:
    """Changed in place while the queue holds packets: none of them is lost."""
    one, count = bench(), 60
    one.attach(profile="htb")
    minor = live_minor(one.classes()["bulk"].number)
    fast = codel_target_us(one, minor)
    one.engine.class_set(one.device, "bulk", 10 * MBIT)
    slow = codel_target_us(one, minor)
    assert 8 * fast < slow < 12 * fast, f"got {fast} and {slow} us at 100 and 10 Mbit/s, want 10 x"
    index = one.index
    with (
        UdpSink(one.pair.peer_netns, BULK) as sink,
        contextlib.closing(open_socket(one.netns)) as source,
        open_rtnl(one.netns) as rtnl,
        one.engine.session(one.device) as session,
    ):
        source.connect((one.pair.peer_address4, BULK))
        source.send(struct.pack("=qd", 0, 0.0).ljust(1400, b"\0"))
        wait_until(lambda: sink.received == 1, "the neighbour to answer")
        for sequence in range(1, count):
            source.send(struct.pack("=qd", sequence, 0.0).ljust(1400, b"\0"))
        held = qdisc.class_stats(rtnl, index)[minor].backlog_packets
        session.set_ceiling("bulk", 100 * MBIT)
        wait_until(lambda: sink.received == count, f"all {count} datagrams, {held} held")
    print(f"{held} packets were in the queue")
    assert held >= count // 4, f"got {held} packets held at the change, want a queue"
    assert sink.inversions == 0, f"got {sink.inversions} out of order, want none"
    assert codel_target_us(one, minor) == fast, "got another target, want the first again"
    assert one.status().problems == (), f"got {one.status().problems}, want none"


@pytest.mark.smoke
def test_police_holds_bulk_under_its_ceiling(bench: Callable[..., Bench]) -> None:
    """No queue of ours: the program drops what is over, and the device keeps its own qdisc."""
    one = bench()
    before = one.host_state()
    one.attach(profile="police", link_rate_bits_per_s=20 * MBIT)
    found = one.host_state().tree.nodes
    assert found == before.tree.nodes, f"got {found}, want {before.tree.nodes}"
    one.engine.class_set(one.device, "bulk", 5 * MBIT)
    # the bucket holds 250 ms at the old ceiling: half as much as that is sent over the new one
    check_rate(one, BULK, 5 * MBIT, settle_s=2.5)
    assert one.classes()["bulk"].drops > 0, f"got {one.classes()['bulk']}, want it metered"
    assert one.status().problems == (), f"got {one.status().problems}, want none"
    one.engine.detach(one.device)
    assert one.host_state() == before, f"got {one.host_state()}, want {before}"
    one.check_programs_gone()


@pytest.mark.smoke
def test_verified_instructions_stay_under_20000_on_this_kernel(bench: Callable[..., Bench]) -> None:
    one = bench()
    report = one.attach(profile="police", ingress="police")
    print(report.verified_instructions)
    assert report.verified_instructions, "got no program, want a number for each"
    for name, count in report.verified_instructions.items():
        assert 0 < count <= 20_000, (
            f"{name}: got {count} verified instructions, want 20,000 at most"
        )
