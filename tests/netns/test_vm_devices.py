# SPDX-License-Identifier: Apache-2.0
"""Device types that need modules: VLANs with their offloads, and IPIP tunnels."""

from __future__ import annotations

import array
import contextlib
import fcntl
import os
import socket
import struct
import subprocess
from collections.abc import Callable

import pytest
from devicekit import add_vlan, turned_round
from enginekit import (
    BULK,
    NORMAL,
    SIGNAL_TCP,
    SIGNAL_UDP,
    Bench,
    TcpFlow,
    UdpSink,
    UdpSource,
    open_socket,
    send_datagrams,
    wait_until,
)
from netlab import VethPair, ip

from shapeagent.model.reports import ExplainRequest

pytestmark = [pytest.mark.vm, pytest.mark.netns]

SIOCETHTOOL = 0x8946
ETHTOOL_GFLAGS, ETHTOOL_SFLAGS = 0x25, 0x26
TXVLAN, RXVLAN = 1 << 7, 1 << 8  # ETH_FLAG_*: NETIF_F_HW_VLAN_CTAG_TX and _RX


@pytest.fixture(scope="module", autouse=True)
def modules() -> None:
    for name in ("8021q", "ipip"):
        subprocess.run(["modprobe", name], check=True, timeout=60)


# --- VLAN


def ethtool_flags(netns: str, device: str, flags: int | None = None) -> int:
    """Return the offload flags of a device, after setting them where some are given.

    What `ethtool -K DEVICE txvlan on|off rxvlan on|off` does.
    """

    def ask(one: socket.socket, command: int, data: int) -> int:
        value = array.array("I", [command, data])
        request = struct.pack("=16sQ16x", device.encode(), value.buffer_info()[0])
        fcntl.ioctl(one.fileno(), SIOCETHTOOL, request)
        return value[1]

    with contextlib.closing(open_socket(netns)) as one:
        if flags is not None:
            ask(one, ETHTOOL_SFLAGS, flags)
        return ask(one, ETHTOOL_GFLAGS, 0)


def send_one_of_each(one: Bench, vlan: VethPair, direction: str, count: int) -> dict[str, int]:
    """Return class → packets that one burst per port and family added."""
    source = vlan if direction == "egress" else turned_round(vlan)
    ports = (SIGNAL_UDP, BULK, NORMAL)
    with contextlib.ExitStack() as stack:
        for port in ports:
            stack.enter_context(UdpSink(source.peer_netns, port, v6=True))  # v4 as well
        for v6 in (False, True):  # neighbours are known before anything is counted
            before = one.packets(direction).get("signal", 0)
            send_datagrams(source, SIGNAL_UDP, 1, v6=v6)
            wait_until(
                lambda before=before: one.packets(direction).get("signal", 0) > before,  # type: ignore[misc]
                "the neighbours to answer",
            )
        before_all = one.packets(direction)
        for v6 in (False, True):
            for port in ports:
                send_datagrams(source, port, count, v6=v6)

        def grown() -> dict[str, int]:
            after = one.packets(direction)
            return {name: after[name] - before_all.get(name, 0) for name in after}

        wait_until(lambda: sum(grown().values()) >= 6 * count, f"{6 * count} packets {direction}")
        return grown()


@pytest.mark.parametrize("place", ["parent", "vlan"])
@pytest.mark.parametrize("reorder", ["on", "off"])
def test_vlan_offload_changes_no_class(
    bench: Callable[..., Bench], place: str, reorder: str
) -> None:
    """C03: a real VLAN; without header reordering the tag lies in the bytes on egress."""
    one = bench()
    vlan = add_vlan(one.pair, reorder)
    if place == "vlan":
        one.device = vlan.device
    before = one.host_state()
    one.attach(profile="htb")
    start = reasons_of(one)
    ends = (one.pair, turned_round(one.pair))
    for tx, rx in ((True, True), (False, False), (True, False), (False, True)):
        wanted = (TXVLAN if tx else 0) | (RXVLAN if rx else 0)
        for end in ends:
            others = ethtool_flags(end.netns, end.device) & ~(TXVLAN | RXVLAN)
            got = ethtool_flags(end.netns, end.device, others | wanted)
            assert got == others | wanted, f"got flags {got:#x}, want {others | wanted:#x}"
        for direction in ("egress", "ingress"):
            grown = send_one_of_each(one, vlan, direction, 20)
            what = f"{direction} with txvlan {tx}, rxvlan {rx}"
            assert grown["bulk"] == 40, f"got {grown} {what}, want 40 bulk"
            assert grown["normal"] == 40, f"got {grown} {what}, want 40 normal"
            assert grown["signal"] >= 40, f"got {grown} {what}, want 40 signal"
            odd = odd_reasons(one, direction, start)
            assert not odd, f"got {odd} {what}, want nothing malformed"
    assert one.status().problems == (), f"got {one.status().problems}, want none"
    one.engine.detach(one.device)
    assert one.host_state() == before, f"got {one.host_state()}, want {before}"


def reasons_of(one: Bench) -> dict[str, dict[str, int]]:
    """Return the reasons of both directions; after an attach there is the frame of its test."""
    return {direction: one.reasons(direction) for direction in ("egress", "ingress")}


def odd_reasons(one: Bench, direction: str, start: dict[str, dict[str, int]]) -> dict[str, int]:
    """Return how many packets since then were no sound IP."""
    grown = {
        name: count - start[direction].get(name, 0)
        for name, count in one.reasons(direction).items()
        if _is_odd(name)
    }
    return {name: count for name, count in grown.items() if count}


def _is_odd(reason: str) -> bool:
    return reason in ("malformed", "truncated", "not-ip", "vlan-too-deep")


# --- IPIP


@pytest.fixture
def tunnel(bench: Callable[..., Bench]) -> Bench:
    """Give an engine for one end of an IPIP tunnel over a veth pair."""
    one = bench()
    pair = one.pair
    ends = ((pair, "198.51.100.1"), (turned_round(pair), "198.51.100.2"))
    for end, address in ends:
        words = ("type", "ipip", "local", end.address4, "remote", end.peer_address4)
        ip("link", "add", "t0", *words, netns=end.netns)
        ip("address", "add", f"{address}/24", "dev", "t0", netns=end.netns)
        ip("link", "set", "t0", "up", netns=end.netns)
    one.device = "t0"
    one.pair = VethPair(
        *(pair.netns, pair.peer_netns, "t0", "t0"),
        address4=ends[0][1],
        peer_address4=ends[1][1],
    )
    return one


@pytest.mark.parametrize("profile", ["htb", "police"])
def test_an_ipip_device_has_right_classes_and_no_loss(tunnel: Bench, profile: str) -> None:
    """C16: packets begin with the IP header of what the tunnel carries."""
    one, count = tunnel, 60
    before = one.host_state()
    one.attach(profile=profile)
    start = reasons_of(one)
    ports = {SIGNAL_UDP: "signal", BULK: "bulk", NORMAL: "normal"}
    for direction, pair in (("egress", one.pair), ("ingress", turned_round(one.pair))):
        for port, name in ports.items():
            begin = one.packets(direction).get(name, 0)
            with (
                UdpSink(pair.peer_netns, port) as sink,
                UdpSource(
                    pair.netns, (pair.peer_address4, port), packets_per_s=400, size=256, limit=count
                ),
            ):
                wait_until(
                    lambda sink=sink: sink.received == count,  # type: ignore[misc]
                    f"all {count} datagrams to port {port} {direction}",
                )
            got = one.packets(direction)[name] - begin
            assert got == count, f"got {got} of {name} {direction}, want {count}"
        odd = odd_reasons(one, direction, start)
        assert not odd, f"got {odd} {direction}, want nothing malformed"
    pair = one.pair
    with TcpFlow(
        pair.netns, pair.peer_netns, pair.peer_address4, BULK, bits_per_s=8e6, chunk=8192
    ) as flow:
        wait_until(lambda: flow.info().bytes_received > 200_000, "bytes of a TCP flow")
    assert one.classes()["bulk"].drops == 0, f"got {one.classes()['bulk']}, want no drop"
    asked = one.engine.explain(
        "t0", ExplainRequest("198.51.100.1", "198.51.100.2", "tcp", 50000, SIGNAL_TCP)
    )
    assert asked.traffic_class == "signal", f"got {asked}, want signal"
    assert one.status().problems == (), f"got {one.status().problems}, want none"
    one.engine.detach("t0")
    assert one.host_state() == before, f"got {one.host_state()}, want {before}"
    assert os.listdir(one.engine.run_dir) in ([], ["lock"]), "got files left behind"
