# SPDX-License-Identifier: Apache-2.0
"""Live packets get the class that the policy says, whatever shape they come in."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import secrets
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from enginekit import (
    BULK,
    MBIT,
    NORMAL,
    SIGNAL_TCP,
    SIGNAL_UDP,
    Bench,
    TcpFlow,
    TxRing,
    UdpSink,
    UdpSource,
    add_bpf_filter,
    add_rules,
    dump_maps,
    engine_for,
    entry,
    load_counter,
    load_vlan_push,
    open_socket,
    read_counter,
    send_datagrams,
    set_sysctl,
    wait_until,
    write_policy,
)
from netlab import VethPair, ip, tc

from shapeagent.kernel import filters
from shapeagent.kernel.cgroup import find_cgroup_mount
from shapeagent.kernel.compile import Image, compile_image, read_source
from shapeagent.kernel.probe import read_possible_cpus
from shapeagent.model.reports import ExplainRequest
from shapeagent.model.types import Direction
from shapeagent.service import attaching

pytestmark = [
    pytest.mark.hooks("tcx", "clsact"),
    pytest.mark.netns,
    pytest.mark.skipif(os.geteuid() != 0, reason="making network namespaces needs root"),
]

SO_MARK = 36


def mac_of(netns: str, device: str) -> bytes:
    words = ip("-o", "link", "show", device, netns=netns)
    found = re.search(r"link/ether ([0-9a-f:]{17})", words)
    assert found, f"got {words!r}, want a link-layer address"
    return bytes.fromhex(found[1].replace(":", ""))


def keep_neighbours(pair: VethPair) -> None:
    """Tell both ends where the other is for good: no ARP is sent from now on."""
    here, there = (pair.netns, pair.device), (pair.peer_netns, pair.peer_device)
    for (netns, device), other, address in (
        (here, there, pair.peer_address4),
        (there, here, pair.address4),
    ):
        lladdr = mac_of(*other).hex(":")
        words = ("neigh", "replace", address, "dev", device, "lladdr", lladdr, "nud", "permanent")
        ip(*words, netns=netns)


# --- other people's programs


@pytest.mark.parametrize("theirs_first", [True, False])
@pytest.mark.parametrize("direction", list(Direction))
def test_a_foreign_filter_sees_every_packet_in_both_orders(
    bench: Callable[..., Bench], theirs_first: bool, direction: Direction
) -> None:
    """C21."""
    one = bench()
    set_sysctl(one.netns, "net.ipv6.conf.all.disable_ipv6", "1")
    set_sysctl(one.pair.peer_netns, "net.ipv6.conf.all.disable_ipv6", "1")
    one.attach()
    program, counter = load_counter()
    try:
        pref = filters.PREF - 10 if theirs_first else filters.PREF + 10
        add_bpf_filter(one.netns, one.device, direction, program, pref=pref)
        keep_neighbours(one.pair)
        target = one.pair
        if direction is Direction.INGRESS:
            pair = one.pair
            target = VethPair(
                pair.peer_netns, pair.netns, pair.peer_device, pair.device,
                address4=pair.peer_address4, peer_address4=pair.address4,
            )  # fmt: skip
        before_theirs, before = read_counter(counter), one.packets(direction).get("bulk", 0)
        with contextlib.closing(open_socket(target.peer_netns)) as sink:
            sink.bind(("0.0.0.0", BULK))
            send_datagrams(target, BULK, 1000)
        got = read_counter(counter) - before_theirs
        ours = one.packets(direction)["bulk"] - before
    finally:
        os.close(program)
        os.close(counter)
    assert got == 1000, f"got {got} at the other program, want 1000"
    assert ours == 1000, f"got {ours} at ours, want 1000"


@pytest.mark.hooks("clsact")
def test_vlan_tags_in_the_metadata_change_no_class(bench: Callable[..., Bench]) -> None:
    """C03: one tag in the metadata; two, of which the inner lies in the bytes."""
    one = bench()
    one.attach()
    untagged: dict[str, int] = {}
    start = one.reasons()  # with the frame of the self-test
    for tags in ((), ((0x8100, 0xC064),), ((0x8100, 4), (0x88A8, 208))):
        descriptor = load_vlan_push(*tags)
        with contextlib.ExitStack() as stack:
            stack.callback(os.close, descriptor)
            pref = 100 + len(tags)
            send_datagrams(one.pair, SIGNAL_UDP, 1)  # neighbours are known before tags go on
            send_datagrams(one.pair, SIGNAL_UDP, 1, v6=True)
            wait_until(lambda: one.reasons().get("rule-port", 0) >= 2, "the neighbours to answer")
            add_bpf_filter(one.netns, one.device, Direction.EGRESS, descriptor, pref=pref)
            before = one.packets()
            for v6 in (False, True):
                send_datagrams(one.pair, BULK, 100, v6=v6)
                send_datagrams(one.pair, NORMAL, 100, v6=v6)
            after = one.packets()
            grown = {name: after[name] - before.get(name, 0) for name in ("bulk", "normal")}
            tc("filter", "del", "dev", one.device, "egress", "pref", str(pref), netns=one.netns)
        untagged = untagged or grown
        assert grown["bulk"] == 200, f"got {grown} with tags {tags}, want 200 bulk"
        assert grown["normal"] == untagged["normal"], f"got {grown} with tags {tags}"
    now = one.reasons()
    odd = {k: now[k] - start.get(k, 0) for k in ("malformed", "truncated", "not-ip") if k in now}
    odd = {name: count for name, count in odd.items() if count}
    assert not odd, f"got {odd}, want every packet parsed"


# --- fragments


@pytest.mark.parametrize("v6", [False, True])
def test_fragments_follow_their_first(bench: Callable[..., Bench], v6: bool) -> None:
    """C06: made by the kernel, in order."""
    one = bench()
    one.attach()
    send_datagrams(one.pair, BULK, 1, v6=v6)
    wait_until(lambda: one.packets().get("bulk", 0) >= 1, "the neighbour to answer")
    before, reasons = one.packets(), one.reasons()
    option = (socket.IPPROTO_IPV6, 23, 0) if v6 else (socket.IPPROTO_IP, 10, 0)
    send_datagrams(one.pair, BULK, 10, size=4000, v6=v6, options=[option])
    got = one.packets()["bulk"] - before["bulk"]
    followed = one.reasons().get("fragment", 0) - reasons.get("fragment", 0)
    assert got == 30, f"got {got} packets of bulk, want 10 datagrams of three fragments"
    assert followed == 20, f"got {followed} fragments that followed, want 20"


def test_fragments_out_of_order_get_the_default_until_the_first_came(
    bench: Callable[..., Bench],
) -> None:
    """C06: 3-1-2."""
    from scapy.all import IP, UDP, Ether, fragment

    one = bench()
    one.attach()
    packet = Ether(dst="ff:ff:ff:ff:ff:ff") / IP(
        src=one.pair.address4, dst=one.pair.peer_address4, id=4711
    ) / UDP(sport=40000, dport=BULK) / bytes(4000)  # fmt: skip
    first, second, third = fragment(packet, fragsize=1480)
    before, reasons = one.packets(), one.reasons()
    with contextlib.closing(open_socket(one.netns, socket.AF_PACKET, socket.SOCK_RAW)) as raw:
        raw.bind((one.device, 3))
        for part in (third, first, second):
            raw.send(bytes(part))
    got = one.packets()["bulk"] - before.get("bulk", 0)
    after = one.reasons()
    grown = {name: after.get(name, 0) - reasons.get(name, 0) for name in after}
    assert got == 2, f"got {got} packets of bulk, want the first and the second"
    assert grown.get("fragment-first-unseen") == 1, f"got {grown}, want the third unseen"
    assert grown.get("fragment") == 1, f"got {grown}, want the second to follow"


# --- headers outside the linear area


def ring_frames(pair: VethPair) -> list[tuple[str, bytes]]:
    """Return (class, frame): headers of every length, payload up to 1,200 bytes."""
    from scapy.all import IP, TCP, UDP, Ether, IPv6

    link = Ether(src="02:00:00:00:00:01", dst="02:00:00:00:00:02")
    v4 = IP(src=pair.address4, dst=pair.peer_address4)
    v6 = IPv6(src=pair.address6, dst=pair.peer_address6)
    options = [("NOP", None)] * 40  # data offset 15
    made = [
        ("signal", link / v4 / TCP(sport=40001, dport=SIGNAL_TCP, flags="A") / bytes(1146)),
        ("signal", link / v6 / TCP(sport=40002, dport=SIGNAL_TCP, flags="A") / bytes(1126)),
        (
            "signal",
            link / v4 / TCP(sport=40003, dport=SIGNAL_TCP, flags="A", options=options) / bytes(900),
        ),
        ("bulk", link / v4 / UDP(sport=40004, dport=BULK) / bytes(1000)),
        ("bulk", link / v6 / UDP(sport=40005, dport=BULK) / bytes(1000)),
        ("bulk", link / v4 / UDP(sport=40006, dport=BULK) / bytes(2)),
    ]
    return [(name, bytes(frame)) for name, frame in made]


def classes_of_ring_packets(one: Bench) -> list[tuple[str, str]]:
    """Return (want, got) of each frame that a ring sends."""
    ring = TxRing(one.netns, one.device)
    found = []
    try:
        for want, frame in ring_frames(one.pair):
            before = one.packets()
            ring.send(frame)
            after = one.packets()
            grown = [name for name in after if after[name] > before.get(name, 0)]
            found.append((want, "+".join(grown)))
    finally:
        ring.close()
    return found


@pytest.fixture
def quiet(bench: Callable[..., Bench]) -> Callable[..., Bench]:
    """Give `bench` without IPv6's own packets, so that counters can be compared exactly."""

    def create(**options: Any) -> Bench:
        one = bench(**options)
        for netns in (one.netns, one.pair.peer_netns):
            set_sysctl(netns, "net.ipv6.conf.all.disable_ipv6", "1")
        return one

    return create


def test_headers_outside_the_linear_area_are_read(quiet: Callable[..., Bench]) -> None:
    """C10."""
    one = quiet()
    one.attach()
    found = classes_of_ring_packets(one)
    wrong = [pair for pair in found if pair[0] != pair[1]]
    assert not wrong, f"got {wrong}, want the class of the linear copy"
    odd = {k: v for k, v in one.reasons().items() if k in ("truncated", "malformed")}
    assert not odd, f"got {odd}, want nothing truncated"


@pytest.mark.host
def test_a_build_that_pulls_nothing_fails_the_same_check(
    quiet: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    """C11: the mutant with bpf_skb_pull_data(skb, 0) sees short packets."""
    text, _ = read_source()
    mutant_text = "#define bpf_skb_pull_data(skb, length) bpf_skb_pull_data(skb, 0)\n" + text
    mutant, _raw = compile_image(mutant_text, "mutant")

    def find_mutant(**_: object) -> tuple[Image, bool]:
        return mutant, True

    monkeypatch.setattr(attaching, "find_image", find_mutant)
    one = quiet()
    one.attach()
    found = classes_of_ring_packets(one)
    assert all(got == "normal" for _, got in found), f"got {found}, want the check to fail"
    assert one.reasons().get("truncated", 0) == len(found), f"got {one.reasons()}"


# --- what is written


def test_dscp_is_rewritten_on_the_wire_and_ecn_stays(
    bench: Callable[..., Bench], tmp_path: Path
) -> None:
    """C23, live: the receiver's kernel has checked the header checksum."""
    policy = write_policy(
        tmp_path,
        lambda text: text.replace(
            "[classes.stream] ", '[classes.stream]\ndscp = "af41"', 1
        ).replace("[classes.bulk] ", '[classes.bulk]\ndscp = "cs1"', 1),
    )
    one = bench()
    one.attach(policy_path=policy)
    wanted = ((BULK, 8), (NORMAL, 0))
    for v6 in (False, True):
        family = socket.AF_INET6 if v6 else socket.AF_INET
        level = socket.IPPROTO_IPV6 if v6 else socket.IPPROTO_IP
        receive, send = (66, 67) if v6 else (13, 1)  # IPV6_RECVTCLASS, IPV6_TCLASS; IP_RECVTOS
        for port, dscp in wanted:
            for ecn in (0, 1, 2, 3):
                with contextlib.closing(open_socket(one.pair.peer_netns, family)) as sink:
                    sink.setsockopt(level, receive, 1)
                    sink.bind(("::" if v6 else "0.0.0.0", port))
                    sink.settimeout(5)
                    # the socket keeps ECN bits of UDP as they are set
                    send_datagrams(one.pair, port, 1, v6=v6, options=[(level, send, ecn)])
                    _, ancillary, _, _ = sink.recvmsg(128, 128)
                    value = ancillary[0][2]
                    got = value[0] if len(value) == 1 else struct.unpack("=i", value[:4])[0]
                    want = dscp << 2 | ecn
                    assert got == want, f"got traffic class {got:#x} on {port}, want {want:#x}"


def test_marks_are_written_under_our_mask_only(bench: Callable[..., Bench], tmp_path: Path) -> None:
    policy = write_policy(
        tmp_path, lambda text: text.replace("[classes.bulk] ", "[classes.bulk]\nmark = 0x50\n#", 1)
        .replace("control_class", "marks = { egress_mask = 0xF0 }\ncontrol_class", 1),
    )  # fmt: skip
    one = bench()
    one.attach(policy_path=policy)
    program, counter = load_counter(mark=0x10057)  # theirs 0x10007, ours 0x50
    try:
        add_bpf_filter(one.netns, one.device, Direction.EGRESS, program, pref=filters.PREF + 1)
        send_datagrams(one.pair, BULK, 1)
        wait_until(lambda: one.packets().get("bulk", 0) >= 1, "the neighbour to answer")
        send_datagrams(one.pair, BULK, 20, options=[(socket.SOL_SOCKET, SO_MARK, 0x100A7)])
        got = read_counter(counter)
    finally:
        os.close(program)
        os.close(counter)
    assert got == 20, f"got {got} packets with the merged mark, want 20"


# --- rules that look at the sender


def test_a_socket_mark_decides(bench: Callable[..., Bench], tmp_path: Path) -> None:
    policy = write_policy(
        tmp_path, add_rules('name = "marked"\nclass = "bulk"\nmark = "0x30/0xf0"')
    )
    one = bench()
    one.attach(policy_path=policy)
    send_datagrams(one.pair, NORMAL, 1)
    wait_until(lambda: one.packets().get("normal", 0) >= 1, "the neighbour to answer")
    for v6 in (False, True):
        before = one.packets()
        send_datagrams(one.pair, NORMAL, 50, v6=v6)
        send_datagrams(
            *(one.pair, NORMAL, 50), v6=v6, options=[(socket.SOL_SOCKET, SO_MARK, 0x1035)]
        )
        after = one.packets()
        grown = {name: after.get(name, 0) - before.get(name, 0) for name in ("normal", "bulk")}
        assert grown["bulk"] == 50, f"got {grown}, want 50 marked packets in bulk"
        assert grown["normal"] >= 50, f"got {grown}, want the others in normal"


@pytest.fixture
def cgroup() -> Iterator[Path]:
    """Give a new cgroup v2 folder; it is empty and gone afterwards."""
    folder = find_cgroup_mount().folder / f"shp-{secrets.token_hex(4)}"
    folder.mkdir()
    try:
        yield folder
    finally:
        for path in sorted([folder, *folder.rglob("*")], reverse=True):
            if path.is_dir():
                path.rmdir()


def is_empty(folder: Path) -> bool:
    return "populated 0" in (folder / "cgroup.events").read_text()


SEND_FROM_CGROUP = """
import os, socket, sys
folder, address, port, count = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
with open(folder + "/cgroup.procs", "w") as file:
    file.write(str(os.getpid()))
sender = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_DGRAM)
for _ in range(count):
    sender.sendto(bytes(64), (address, port))
"""


def send_from_cgroup(one: Bench, folder: Path, address: str, port: int, count: int) -> None:
    command = ["nsenter", f"--net=/run/netns/{one.netns}", sys.executable, "-c", SEND_FROM_CGROUP]
    subprocess.run([*command, str(folder), address, str(port), str(count)], check=True, timeout=20)


def test_a_cgroup_decides_and_so_do_those_below_it(
    bench: Callable[..., Bench], tmp_path: Path, cgroup: Path
) -> None:
    """Path, descendant, and the path deleted and made again."""
    policy = write_policy(
        tmp_path, add_rules(f'name = "job"\nclass = "bulk"\ncgroup = "{cgroup.name}"')
    )
    one = bench()
    one.attach(policy_path=policy)
    inner = cgroup / "inner" / "most"
    inner.mkdir(parents=True)

    def bulk_of(folder: Path, address: str) -> int:
        before = one.packets().get("bulk", 0)
        send_from_cgroup(one, folder, address, NORMAL, 40)
        return one.packets().get("bulk", 0) - before

    send_datagrams(one.pair, NORMAL, 1)
    send_datagrams(one.pair, NORMAL, 1, v6=True)
    wait_until(lambda: one.packets().get("normal", 0) >= 2, "the neighbours to answer")
    for address in (one.pair.peer_address4, one.pair.peer_address6):
        for folder in (cgroup, inner):
            got = bulk_of(folder, address)
            assert got == 40, f"got {got} of {folder} to {address} in bulk, want 40"
    for folder in (inner, inner.parent, cgroup):
        wait_until(functools.partial(is_empty, folder), "an empty cgroup")
        folder.rmdir()
    cgroup.mkdir()
    one.attach(policy_path=policy)  # looks the path up again
    got = bulk_of(cgroup, one.pair.peer_address4)
    assert got == 40, f"got {got} in bulk after the cgroup was made again, want 40"


def test_a_cgroup_that_is_not_there_is_named(bench: Callable[..., Bench], tmp_path: Path) -> None:
    policy = write_policy(
        tmp_path, add_rules('name = "job"\nclass = "bulk"\ncgroup = "shp-not-there"')
    )
    one = bench()
    one.attach(policy_path=policy)
    got = one.status().warnings
    assert any("shp-not-there" in text for text in got), f"got warnings {got}, want it named"


# --- forwarded packets


@pytest.fixture
def routed(
    netns_factory: Callable[[], str], tmp_path: Path
) -> Iterator[tuple[Bench, Bench, str, str]]:
    """Give a router attached on its way out and on the pod's side, the pod and the far end."""
    pod, router, far = netns_factory(), netns_factory(), netns_factory()
    for left, right, out, back, net in (
        (router, pod, "pod0", "e0", 1),
        (router, far, "up0", "e0", 2),
    ):
        ip("link", "add", out, "type", "veth", "peer", "name", back, "netns", right, netns=left)
        for netns, device, host in ((left, out, 1), (right, back, 2)):
            ip("address", "add", f"10.77.{net}.{host}/24", "dev", device, netns=netns)
            ip("link", "set", device, "up", netns=netns)
        ip("route", "add", "default", "via", f"10.77.{net}.1", netns=right)
    set_sysctl(router, "net.ipv4.ip_forward", "1")
    with engine_for(router, tmp_path) as engine:
        yield (
            Bench(engine, router, "up0", VethPair(router, far, "up0", "e0")),
            Bench(engine, router, "pod0", VethPair(router, pod, "pod0", "e0")),
            pod,
            far,
        )


def test_forwarded_packets_are_classified_and_counted_as_without_a_socket(
    routed: tuple[Bench, Bench, str, str],
) -> None:
    out, pod_side, pod, far = routed
    out.attach(link_rate_bits_per_s=1000 * MBIT)
    pod_side.attach(link_rate_bits_per_s=1000 * MBIT, profile="police")
    with (
        UdpSink(far, BULK) as sink,
        UdpSource(pod, ("10.77.2.2", BULK), packets_per_s=5000, size=200, limit=1500) as source,
    ):
        wait_until(lambda: source.sent == 1500, "all datagrams sent")
        wait_until(lambda: sink.received >= 1490, f"all arrived, got {sink.received}")
    bulk = out.classes()["bulk"]
    assert bulk.packets >= 1490, f"got {bulk.packets} forwarded packets in bulk, want 1500"
    assert bulk.no_socket_packets >= 1490, f"got {bulk.no_socket_packets} without socket"
    assert any("without a socket" in text for text in out.status().warnings), (
        f"got {out.status().warnings}, want the share named"
    )
    came = pod_side.classes("ingress")["bulk"]
    assert came.packets >= 1490, f"got {came.packets} on the pod's side, want 1500"
    # the pod's address is still there: a list by source works where a cgroup cannot
    pod_side.engine.whitelist_add("pod0", [entry("10.77.1.2", "bulk")])
    before = pod_side.packets("ingress")["bulk"]
    send_datagrams(VethPair(pod, far, peer_address4="10.77.2.2"), NORMAL, 20)
    got = pod_side.packets("ingress")["bulk"] - before
    assert got == 20, f"got {got} of the pod's packets in bulk, want 20"


def test_forwarded_segments_above_the_limit_are_counted(
    routed: tuple[Bench, Bench, str, str],
) -> None:
    out, _, pod, far = routed
    out.attach()
    with TcpFlow(pod, far, "10.77.2.2", BULK):
        wait_until(
            lambda: out.classes()["bulk"].over_segment_packets > 20, "large forwarded segments"
        )
        wait_until(lambda: out.classes()["bulk"].packets >= 1100, "enough packets for a share")
        got = out.status().warnings
    assert any("above the segment limit" in text for text in got), f"got {got}"


# --- several queues


def test_four_senders_on_four_queues_are_counted_exactly(quiet: Callable[..., Bench]) -> None:
    one = quiet(queues=4)
    one.attach(link_rate_bits_per_s=1000 * MBIT)
    send_datagrams(one.pair, NORMAL, 1)
    wait_until(lambda: one.packets().get("normal", 0) >= 1, "the neighbour to answer")
    before = one.packets()
    ports = {BULK: "bulk", NORMAL: "normal", SIGNAL_UDP: "signal", 20001: "normal"}
    with contextlib.ExitStack() as stack:
        sinks = [stack.enter_context(UdpSink(one.pair.peer_netns, port)) for port in ports]
        sources = [
            stack.enter_context(
                UdpSource(
                    one.netns,
                    (one.pair.peer_address4, port),
                    packets_per_s=1500,
                    size=100,
                    limit=1500,
                )
            )
            for port in ports
        ]
        wait_until(lambda: all(s.sent == 1500 for s in sources), "all datagrams sent")
        wait_until(
            lambda: all(s.received == 1500 for s in sinks),
            f"all arrived, got {[s.received for s in sinks]}",
        )
        inversions = [s.inversions for s in sinks]
    after = one.packets()
    grown = {name: after[name] - before.get(name, 0) for name in after}
    # 20001 is a TCP port of the policy's: as UDP it is nobody's
    want = {"bulk": 1500, "normal": 3000, "signal": 1500}
    assert {k: grown.get(k) for k in want} == want, f"got {grown}, want {want}"
    assert inversions == [0, 0, 0, 0], f"got {inversions} datagrams out of order, want none"


# --- shadow


def test_shadow_counts_and_changes_no_packet(bench: Callable[..., Bench], tmp_path: Path) -> None:
    policy = write_policy(
        tmp_path,
        lambda text: text.replace(
            '[classes.bulk] ', '[classes.bulk]\ndscp = "cs1"\nmark = 0x50\n#', 1
        ).replace('ceiling = "100%"\nsafe_ceiling = "50%"', 'ceiling = "10%"')
        .replace("control_class", "marks = { egress_mask = 0xF0 }\ncontrol_class", 1),
    )  # fmt: skip
    one = bench()
    before = one.host_state()
    one.attach(policy_path=policy, shadow=True, ingress="police")
    during = one.host_state()
    assert during.tree.nodes == before.tree.nodes, f"got {during.tree}, want no qdisc of ours"
    assert during.gso == before.gso, f"got {during.gso}, want {before.gso}"
    program, counter = load_counter(mark=0)
    try:
        add_bpf_filter(one.netns, one.device, Direction.EGRESS, program, pref=filters.PREF + 1)
        with UdpSink(one.pair.peer_netns, BULK) as sink:
            sink.socket.setsockopt(socket.IPPROTO_IP, 13, 1)  # IP_RECVTOS
            with UdpSource(
                one.netns, (one.pair.peer_address4, BULK), bits_per_s=40 * MBIT, limit=3000
            ) as source:
                wait_until(lambda: source.sent == 3000, "all datagrams sent")
                wait_until(
                    lambda: sink.received == 3000, f"no datagram dropped, got {sink.received}"
                )
        marked = one.classes()["bulk"].packets
        unmarked = read_counter(counter)
    finally:
        os.close(program)
        os.close(counter)
    bulk = one.classes()["bulk"]
    assert bulk.packets + bulk.drops >= 3000, f"got {bulk}, want every datagram counted"
    assert bulk.drops > 500, f"got {bulk.drops} that would have been dropped, want most above 10 %"
    assert unmarked >= 3000, f"got {unmarked} packets without a mark of ours ({marked}), want all"
    with contextlib.closing(open_socket(one.pair.peer_netns)) as sink_socket:
        sink_socket.setsockopt(socket.IPPROTO_IP, 13, 1)
        sink_socket.bind(("0.0.0.0", BULK))
        sink_socket.settimeout(5)
        send_datagrams(one.pair, BULK, 1)
        _, ancillary, _, _ = sink_socket.recvmsg(128, 128)
    assert ancillary[0][2] == b"\0", f"got traffic class {ancillary[0][2]!r}, want it untouched"


# --- explain


def test_a_thousand_explanations_change_no_map(quiet: Callable[..., Bench]) -> None:
    one = quiet()
    one.attach()
    one.engine.whitelist_add(one.device, [entry("203.0.113.0/24", "stream"), entry("192.0.2.2")])
    for port in (BULK, NORMAL, SIGNAL_UDP):
        send_datagrams(one.pair, port, 5)  # the caches hold something
    with TcpFlow(one.netns, one.pair.peer_netns, one.pair.peer_address4, SIGNAL_TCP):
        wait_until(lambda: one.packets().get("normal", 0) > 100, "the flow over its budget")
    cpus = read_possible_cpus()

    def dump() -> dict[str, object]:
        return dump_maps(one.pins, cpus, without=("scratch",))

    def quiet_now() -> bool:
        counted = one.packets(), one.packets("ingress")
        time.sleep(1.0)  # longer than TCP's first retransmissions at the end of the flow
        return counted == (one.packets(), one.packets("ingress"))

    keep_neighbours(one.pair)  # else ARP asks again seconds later, on a slow CPU amid the calls
    wait_until(quiet_now, "traffic to end", timeout_s=30.0)
    before = dump()
    asked = 0
    for number in range(250):
        for destination, port, protocol, direction in (
            ("192.0.2.2", SIGNAL_TCP, "tcp", "egress"),
            ("203.0.113.9", 40000 + number, "tcp", "egress"),
            ("192.0.2.2", BULK, "udp", "ingress"),
            ("2001:db8::2", NORMAL, "udp", "egress"),
        ):
            source = one.pair.address6 if ":" in destination else one.pair.address4
            one.engine.explain(
                one.device,
                ExplainRequest(
                    source=source,
                    destination=destination,
                    protocol=protocol,
                    source_port=30000 + number,
                    destination_port=port,
                    direction=direction,
                ),
            )
            asked += 1
    after = dump()
    differing = [name for name in before if before[name] != after[name]]
    assert asked == 1000, f"got {asked} explanations, want 1000"
    assert not differing, f"got maps {differing} changed, want none"


def test_a_capture_is_explained_packet_by_packet(
    bench: Callable[..., Bench], tmp_path: Path
) -> None:
    from scapy.all import wrpcap

    one = bench()
    one.attach()
    wanted = [name for name, _ in ring_frames(one.pair)]
    path = tmp_path / "some.pcap"
    wrpcap(str(path), [frame for _, frame in ring_frames(one.pair)], linktype=1)
    got = [e.traffic_class for e in one.engine.explain_pcap(one.device, path, "egress")]
    assert got == wanted, f"got {got}, want {wanted}"
