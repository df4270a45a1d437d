# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import contextlib
import ipaddress
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from netlab import VethPair, ip, tc

from shapeagent.kernel import link, netns, routes
from shapeagent.kernel.rtnl import Rtnl
from shapeagent.model.errors import InputError
from shapeagent.model.types import GsoLimits
from shapeagent.policy import plan

pytestmark = pytest.mark.netns
LIMIT = 3_028
MIRROR = "v0"


@pytest.fixture
def pair(veth_pair: Callable[..., VethPair]) -> VethPair:
    """A pair whose device mirrors each packet to v0 before it is segmented.

    A tap on the device itself would see only what the kernel has cut to the
    new limit on the way to the driver, whether or not the flow follows it.
    """
    made = veth_pair()
    ip("link", "add", MIRROR, "type", "veth", "peer", "name", "v1", netns=made.netns)
    for device in (MIRROR, "v1"):
        ip("link", "set", device, "up", netns=made.netns)
    tc("qdisc", "add", "dev", made.device, "clsact", netns=made.netns)
    words = ("protocol", "all", "u32", "match", "u32", "0", "0")
    action = ("action", "mirred", "egress", "mirror", "dev", MIRROR)
    tc("filter", "add", "dev", made.device, "egress", *words, *action, netns=made.netns)
    return made


@pytest.fixture
def rtnl(pair: VethPair) -> Iterator[Rtnl]:
    with netns.open_rtnl(pair.netns) as handle:
        yield handle


@contextlib.contextmanager
def tcp_flow(pair: VethPair, family: int) -> Iterator[None]:
    """Keep one TCP flow busy from the device's end while the block runs."""
    address = pair.peer_address4 if family == socket.AF_INET else pair.peer_address6
    server = netns.run_in_netns(pair.peer_netns, lambda: socket.create_server(
        (address, 0), family=family))  # fmt: skip
    client = netns.run_in_netns(
        pair.netns, lambda: socket.create_connection(server.getsockname()[:2], timeout=5)
    )
    receiver, _ = server.accept()

    def send() -> None:
        with contextlib.suppress(OSError):
            while True:
                client.sendall(bytes(1 << 18))

    def receive() -> None:
        with contextlib.suppress(OSError):
            while receiver.recv(1 << 20):
                pass

    threads = [threading.Thread(target=send), threading.Thread(target=receive)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        for one in (client, receiver):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        for thread in threads:
            thread.join()
        for one in (client, receiver, server):
            one.close()


def largest_packet(pair: VethPair, seconds: float = 0.2) -> int:
    """Return the length of the largest packet that TCP hands to the device in that time."""
    tap = netns.run_in_netns(
        pair.netns, lambda: socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3))
    )
    with tap:
        tap.bind((MIRROR, 0))
        tap.settimeout(1.0)
        largest = 0
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            data, address = tap.recvfrom(1 << 17)
            if address[2] == socket.PACKET_OUTGOING:
                largest = max(largest, len(data))
    return largest


def limits(pair: VethPair, rtnl: Rtnl) -> tuple[int, GsoLimits, GsoLimits]:
    index = link.read_device(rtnl, pair.device).index
    before = link.read_gso(rtnl, index)
    return index, before, plan.capped_gso(before, LIMIT, 1500)


def test_living_ipv4_flow_takes_up_the_segment_limit_and_gives_it_back(
    pair: VethPair, rtnl: Rtnl
) -> None:
    index, before, lowered = limits(pair, rtnl)
    with tcp_flow(pair, socket.AF_INET):
        assert largest_packet(pair) > 10_000
        link.set_gso(rtnl, index, lowered)
        got = largest_packet(pair)
        assert got > LIMIT, f"got {got} B: the flow followed by itself, this test shows nothing"
        routes.reroute_ipv4(pair.netns)
        largest_packet(pair, 0.05)  # what was queued before
        got = largest_packet(pair)
        assert got <= LIMIT, f"got a packet of {got} B, want at most {LIMIT}"
        link.set_gso(rtnl, index, before)
        routes.reroute_ipv4(pair.netns)
        largest_packet(pair, 0.05)
        got = largest_packet(pair)
        assert got > 10_000, f"got at most {got} B, want large packets again"


def test_living_ipv6_flow_takes_up_the_segment_limit(pair: VethPair, rtnl: Rtnl) -> None:
    index, before, lowered = limits(pair, rtnl)
    with tcp_flow(pair, socket.AF_INET6):
        assert largest_packet(pair) > 10_000
        steps: tuple[tuple[GsoLimits, Callable[[int], bool]], ...] = (
            (lowered, lambda size: size <= LIMIT),
            (before, lambda size: size > 10_000),
        )
        for wanted, ok in steps:
            link.set_gso(rtnl, index, wanted)
            got = largest_packet(pair)
            if ok(got):
                pytest.skip(f"{got} B under {wanted}: the kernel looked the route up just now")
            planned = routes.plan_ipv6_routes(rtnl, index)
            assert planned, "want a route under 2001:db8::/64"
            routes.reroute_ipv6(rtnl, planned)
            largest_packet(pair, 0.05)
            got = largest_packet(pair)
            assert ok(got), f"got at most {got} B under {wanted}"
            table = ip("-6", "route", "show", "table", "all", netns=pair.netns)
            left = [route for route in planned if route.address in table]
            assert not left, f"got {left} left in the table, want none"


def test_ipv6_routes_lie_under_the_devices_prefixes(pair: VethPair, rtnl: Rtnl) -> None:
    index = link.read_device(rtnl, pair.device).index
    ip("-6", "route", "add", "default", "via", pair.peer_address6, netns=pair.netns)
    ip("-6", "route", "add", "2001:db8:ffff::/127", "dev", pair.device, netns=pair.netns)
    planned = routes.plan_ipv6_routes(rtnl, index)
    assert {route.index for route in planned} == {index}
    addresses = [ipaddress.IPv6Address(route.address) for route in planned]
    on_link = ipaddress.IPv6Network("2001:db8::/64")
    assert any(address in on_link for address in addresses), f"got {addresses}"
    narrow = ipaddress.IPv6Network("2001:db8:ffff::/127")
    assert not any(address in narrow for address in addresses), "it could be somebody's"
    again = routes.plan_ipv6_routes(rtnl, index)
    assert len(again) == len(planned)
    assert again != planned, "want fresh random addresses"


def test_crash_between_add_and_delete_is_undone(pair: VethPair, rtnl: Rtnl) -> None:
    index = link.read_device(rtnl, pair.device).index
    planned = routes.plan_ipv6_routes(rtnl, index)
    for route in planned:
        words = ("dev", pair.device, "metric", "1", "proto", str(routes.ROUTE_PROTOCOL))
        ip("-6", "route", "add", f"{route.address}/128", *words, netns=pair.netns)
    foreign = ("2001:db8::77/128", "dev", pair.device)
    ip("-6", "route", "add", *foreign, netns=pair.netns)
    found = routes.find_ipv6_routes(rtnl, index)
    assert set(found) == set(planned)
    assert routes.remove_ipv6_routes(rtnl, found) == len(planned)
    assert routes.remove_ipv6_routes(rtnl, found) == 0
    assert routes.find_ipv6_routes(rtnl, index) == ()
    assert "2001:db8::77" in ip("-6", "route", "show", netns=pair.netns)


def test_unknown_namespace_is_named() -> None:
    with pytest.raises(InputError):
        routes.reroute_ipv4("shp-not-there")
    assert Path("/proc/sys/net/ipv4/route/flush").exists()
