# SPDX-License-Identifier: Apache-2.0
"""Make living flows ask for their route again.

A TCP socket takes the device's segment limit when it looks up its route, so
a new limit reaches living connections only after that (bpf-facts row 8).
IPv4 has a switch for it. IPv6 has none: there a more specific route that
comes and goes makes the sockets below it look again.
"""

from __future__ import annotations

import errno
import ipaddress
import socket
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from shapeagent.kernel.netns import run_in_netns
from shapeagent.kernel.rtnl import (
    NLM_F_CREATE,
    NLM_F_EXCL,
    RTM_DELROUTE,
    RTM_GETROUTE,
    RTM_NEWROUTE,
    NetlinkRefusal,
    Rtnl,
    attribute,
    attribute_u32,
    named_error,
    parse_attributes,
)
from shapeagent.model.errors import FailedError

# Marks the routes that we add; not in iproute2's rt_protos, RTPROT_* or FRR.
ROUTE_PROTOCOL = 0xB5

_FLUSH = Path("/proc/sys/net/ipv4/route/flush")
_RTMSG = struct.Struct("=8BI")  # family, dst bits, src bits, tos, table, proto, scope, type, flags
_RT_TABLE_MAIN = 254
_RT_SCOPE_UNIVERSE = 0
_RTN_UNICAST = 1
_RTA_DST = 1
_RTA_OIF = 4
_RTA_PRIORITY = 6
_RTM_F_CLONED = 0x200
_MAX_ROUTES = 64


@dataclass(frozen=True, slots=True)
class Ipv6Route:
    """A /128 of ours on a device: what to write down before, and to delete after."""

    index: int
    address: str


def reroute_ipv4(netns: str | None) -> None:
    """Return when every living IPv4 flow of the namespace will look up its route again.

    Raises: FailedError reroute-failed.
    Effects: one route look-up per flow; nothing to undo.
    """
    try:
        run_in_netns(netns, lambda: _FLUSH.write_text("1\n"))
    except OSError as error:
        raise FailedError(
            "reroute-failed",
            f"Cannot write {_FLUSH}: {error.strerror}; living flows keep their segment size.",
            hint="Mount /proc/sys writable, or restart the long connections.",
        ) from error


def plan_ipv6_routes(rtnl: Rtnl, index: int) -> tuple[Ipv6Route, ...]:
    """Return one /128 of ours under each IPv6 prefix routed to the device, not yet added.

    The addresses are random in their prefix; a prefix longer than 96 bits is
    skipped, since a random address could be somebody's there. At most 64.
    """
    networks = sorted(set(_device_prefixes(rtnl, index)))
    return tuple(
        Ipv6Route(index, _random_address(network))
        for network in networks[:_MAX_ROUTES]
        if network.prefixlen <= 96
    )


def reroute_ipv6(rtnl: Rtnl, routes: Sequence[Ipv6Route]) -> None:
    """Return when the IPv6 flows under the routes' prefixes will look up their route again.

    Write `routes` down before the call: a crash between add and delete leaves
    one of them, and `remove_ipv6_routes` takes it away.

    Raises: FailedError interface-gone and the like; what was added is removed.
    """
    try:
        for route in routes:
            _change_route(rtnl, RTM_NEWROUTE, NLM_F_CREATE | NLM_F_EXCL, route)
    except OSError as error:
        raise named_error(error, "add an IPv6 route", f"device {routes[0].index}") from error
    finally:
        remove_ipv6_routes(rtnl, routes)


def remove_ipv6_routes(rtnl: Rtnl, routes: Sequence[Ipv6Route]) -> int:
    """Return how many of the routes were still there and are now gone."""
    removed = 0
    for route in routes:
        try:
            _change_route(rtnl, RTM_DELROUTE, 0, route)
            removed += 1
        except NetlinkRefusal as error:
            if error.errno not in (errno.ESRCH, errno.ENOENT, errno.ENODEV):
                raise named_error(error, "delete our IPv6 route", route.address) from error
    return removed


def find_ipv6_routes(rtnl: Rtnl, index: int) -> tuple[Ipv6Route, ...]:
    """Return the routes of ours that a crash left on the device, known by their protocol."""
    return tuple(
        Ipv6Route(index, str(network.network_address))
        for network, protocol in _dump_routes(rtnl, index)
        if protocol == ROUTE_PROTOCOL and network.prefixlen == 128
    )


def _device_prefixes(rtnl: Rtnl, index: int) -> Iterator[ipaddress.IPv6Network]:
    for network, protocol in _dump_routes(rtnl, index):
        if protocol != ROUTE_PROTOCOL and not network.is_multicast:
            yield network


def _dump_routes(rtnl: Rtnl, index: int) -> Iterator[tuple[ipaddress.IPv6Network, int]]:
    """Yield (destination, protocol) of each unicast route of the main table on the device."""
    body = _RTMSG.pack(socket.AF_INET6, *[0] * 7, 0)
    try:
        answers = rtnl.dump(RTM_GETROUTE, body)
    except NetlinkRefusal as error:
        if error.errno in (errno.EAFNOSUPPORT, errno.EOPNOTSUPP):
            return  # no IPv6 here
        raise named_error(error, "list the IPv6 routes", f"device {index}") from error
    for answer in answers:
        family, bits, _, _, table, protocol, _, kind, flags = _RTMSG.unpack_from(answer)
        if (family, table, kind) != (socket.AF_INET6, _RT_TABLE_MAIN, _RTN_UNICAST):
            continue
        attributes = parse_attributes(answer[_RTMSG.size :])
        interface = attributes.get(_RTA_OIF)
        if flags & _RTM_F_CLONED or interface != struct.pack("=i", index):
            continue
        destination = attributes.get(_RTA_DST, bytes(16))
        yield ipaddress.IPv6Network((destination, bits)), protocol


def _random_address(network: ipaddress.IPv6Network) -> str:
    """Return a random address of the prefix; under ::/0 one of the documentation prefix."""
    if network.prefixlen < 16:
        network = ipaddress.IPv6Network("2001:db8::/32")  # RFC 3849
    host_bits = 128 - network.prefixlen
    import secrets

    number = int(network.network_address) | secrets.randbits(host_bits) | 1 << (host_bits - 1)
    return str(ipaddress.IPv6Address(number))


def _change_route(rtnl: Rtnl, kind: int, flags: int, route: Ipv6Route) -> None:
    body = _RTMSG.pack(
        socket.AF_INET6,
        128,
        0,
        0,
        _RT_TABLE_MAIN,
        ROUTE_PROTOCOL,
        _RT_SCOPE_UNIVERSE,
        _RTN_UNICAST,
        0,
    )
    rtnl.request(
        kind,
        flags,
        body
        + attribute(_RTA_DST, ipaddress.IPv6Address(route.address).packed)
        + attribute_u32(_RTA_OIF, route.index)
        + attribute_u32(_RTA_PRIORITY, 1),
    )
