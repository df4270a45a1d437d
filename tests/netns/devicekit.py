# SPDX-License-Identifier: Apache-2.0
"""Devices above a veth pair, and what happens to devices."""

from __future__ import annotations

import array
import contextlib
import dataclasses
import fcntl
import struct

from enginekit import HostState, open_socket, wait_until
from netlab import VethPair, ip

VLAN_ID = 5
_SIOCETHTOOL = 0x8946
_GET_CHANNELS, _SET_CHANNELS = 0x3C, 0x3D  # struct ethtool_channels: max and count of rx, tx, …


def turned_round(pair: VethPair) -> VethPair:
    """Return the pair as its peer sees it."""
    return VethPair(
        netns=pair.peer_netns,
        peer_netns=pair.netns,
        device=pair.peer_device,
        peer_device=pair.device,
        address4=pair.peer_address4,
        peer_address4=pair.address4,
        address6=pair.peer_address6,
        peer_address6=pair.address6,
    )


def add_vlan(pair: VethPair, reorder: str) -> VethPair:
    """Return the VLAN devices above a pair, up and with addresses."""
    vlan = VethPair(
        netns=pair.netns,
        peer_netns=pair.peer_netns,
        device=f"{pair.device}.{VLAN_ID}",
        peer_device=f"{pair.peer_device}.{VLAN_ID}",
        address4="198.51.100.1",
        peer_address4="198.51.100.2",
        address6="2001:db8:5::1",
        peer_address6="2001:db8:5::2",
    )
    for below, above in ((pair, vlan), (turned_round(pair), turned_round(vlan))):
        kind = ("type", "vlan", "id", str(VLAN_ID), "reorder_hdr", reorder)
        ip("link", "add", "link", below.device, "name", above.device, *kind, netns=above.netns)
        ip("address", "add", f"{above.address4}/24", "dev", above.device, netns=above.netns)
        words = ("address", "add", f"{above.address6}/64", "dev", above.device, "nodad")
        ip(*words, netns=above.netns)
        ip("link", "set", above.device, "up", netns=above.netns)
    for above in (vlan, turned_round(vlan)):
        wait_until(
            lambda above=above: "state UP" in ip("link", "show", above.device, netns=above.netns),  # type: ignore[misc]
            f"{above.device} up",
        )
    return vlan


def rename(netns: str, device: str, name: str) -> None:
    """Rename a device as the kernels of all versions let one: while it is down."""
    ip("link", "set", device, "down", netns=netns)
    ip("link", "set", device, "name", name, netns=netns)
    ip("link", "set", name, "up", netns=netns)
    wait_until(lambda: "state UP" in ip("link", "show", name, netns=netns), f"{name} up")


def set_tx_channels(netns: str, device: str, count: int) -> None:
    """Do what `ethtool -L DEVICE tx COUNT` does."""
    with contextlib.closing(open_socket(netns)) as one:
        data = array.array("I", [_GET_CHANNELS, *[0] * 8])
        request = struct.pack("=16sQ16x", device.encode(), data.buffer_info()[0])
        fcntl.ioctl(one.fileno(), _SIOCETHTOOL, request)
        data[0], data[6] = _SET_CHANNELS, count
        fcntl.ioctl(one.fileno(), _SIOCETHTOOL, request)


def without_routes(state: HostState) -> HostState:
    """Return the state without IPv6 routes, which come and go as a device goes up and down."""
    return dataclasses.replace(state, routes6=())
