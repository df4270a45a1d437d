# SPDX-License-Identifier: Apache-2.0
"""By which device the person who types is logged in."""

from __future__ import annotations

import ipaddress
import os
import socket
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from shapeagent.kernel.rtnl import (
    RTM_GETADDR,
    RTM_GETLINK,
    Rtnl,
    named_error,
    parse_attributes,
    parse_text,
)

_IFINFOMSG = struct.Struct("=BxHiII")  # family, hardware type, index, flags, change
_IFADDRMSG = struct.Struct("=4BI")  # family, prefix length, flags, scope, index
_IFA_ADDRESS, _IFA_LOCAL = 1, 2
_IFLA_IFNAME, _IFLA_LINK, _IFLA_MASTER, _IFLA_LINKINFO, _IFLA_INFO_KIND = 3, 5, 10, 18, 1
_IFLA_LINK_NETNSID = 37
_ARPHRD_LOOPBACK = 772
_IFF_UP, _IFF_LOWER_UP = 0x1, 0x10000
_ON_A_PARENT = ("vlan", "macvlan", "ipvlan")  # of these IFLA_LINK is the device below
_MAX_ANCESTORS = 64

Address = ipaddress.IPv4Address | ipaddress.IPv6Address


@dataclass(frozen=True, slots=True)
class LinkPlace:
    """A device among the others: what is above and below it."""

    index: int
    kind: str  # "" = hardware, or emulated hardware
    master: int  # bond, bridge or VRF that it is a port of; 0 = none
    parent: int  # the device that a VLAN stands on; 0 = none
    running: bool  # up, with carrier
    loopback: bool
    name: str = ""


def read_session_address(
    *, pid: int | None = None, proc_dir: Path = Path("/proc")
) -> Address | None:
    """Return the address of this host that the caller's SSH session uses; None without one.

    `sudo` drops SSH_CONNECTION, so the environments of the ancestors are read
    too; the nearest one counts.

    Args:
        pid: whose session; None is this process.
    """
    current = os.getpid() if pid is None else pid
    for _ in range(_MAX_ANCESTORS):
        if current <= 0:
            return None
        folder = proc_dir / str(current)
        try:
            environment = (folder / "environ").read_bytes()
        except OSError:
            environment = b""  # another user's: look further up
        for entry in environment.split(b"\0"):
            if entry.startswith(b"SSH_CONNECTION="):
                return _server_address(entry.partition(b"=")[2].decode(errors="replace"))
        try:
            status = (folder / "status").read_text(errors="replace")
        except OSError:
            return None
        current = next(
            (int(line.split()[1]) for line in status.splitlines() if line.startswith("PPid:")), 0
        )
    return None


def _server_address(connection: str) -> Address | None:
    """Return the third word of "client port server port", an IPv4 one from its mapped form."""
    words = connection.split()
    try:
        address = ipaddress.ip_address(words[2].partition("%")[0])
    except (IndexError, ValueError):
        return None
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return mapped or address


def list_places(rtnl: Rtnl) -> tuple[LinkPlace, ...]:
    """Return every device of the namespace with what is above and below it."""
    return rtnl.once("places", lambda: _list_places(rtnl))


def _list_places(rtnl: Rtnl) -> tuple[LinkPlace, ...]:
    try:
        bodies = rtnl.dump(RTM_GETLINK, _IFINFOMSG.pack(0, 0, 0, 0, 0))
    except OSError as error:
        raise named_error(error, "list the network devices") from error
    return tuple(map(_parse_place, bodies))


def _parse_place(body: bytes) -> LinkPlace:
    _, hardware_type, index, flags, _ = _IFINFOMSG.unpack_from(body)
    attributes = parse_attributes(body[_IFINFOMSG.size :])
    info = parse_attributes(attributes.get(_IFLA_LINKINFO, b""))
    kind = parse_text(info.get(_IFLA_INFO_KIND, b""))
    running = _IFF_UP | _IFF_LOWER_UP
    # in another namespace its number is nobody's here
    has_parent = kind in _ON_A_PARENT and _IFLA_LINK_NETNSID not in attributes
    return LinkPlace(
        index=index,
        kind=kind,
        master=_number(attributes, _IFLA_MASTER),
        parent=_number(attributes, _IFLA_LINK) if has_parent else 0,
        running=flags & running == running,
        loopback=hardware_type == _ARPHRD_LOOPBACK,
        name=parse_text(attributes.get(_IFLA_IFNAME, b"")),
    )


def _number(attributes: dict[int, bytes], kind: int) -> int:
    payload = attributes.get(kind)
    return 0 if payload is None else int(struct.unpack_from("=I", payload)[0])


def find_device_of_address(rtnl: Rtnl, address: Address) -> int | None:
    """Return the index of the device that has this address; None where none has it."""
    family = socket.AF_INET if address.version == 4 else socket.AF_INET6
    try:
        bodies = rtnl.dump(RTM_GETADDR, _IFADDRMSG.pack(family, 0, 0, 0, 0))
    except OSError as error:
        raise named_error(error, "list the addresses") from error
    for body in bodies:
        attributes = parse_attributes(body[_IFADDRMSG.size :])
        own = attributes.get(_IFA_LOCAL, attributes.get(_IFA_ADDRESS))
        if body[0] == family and own == address.packed:
            return int(_IFADDRMSG.unpack_from(body)[4])
    return None


def carriers_of(index: int, places: Iterable[LinkPlace]) -> frozenset[int]:
    """Return the device, and all devices below it that carry its packets.

    Below a bond or bridge are its ports, below a VLAN is its parent.
    """
    places = tuple(places)
    found: set[int] = set()
    wanted = [index]
    while wanted:
        current = wanted.pop()
        if current in found:
            continue
        found.add(current)
        wanted += [place.index for place in places if place.master == current]
        wanted += [place.parent for place in places if place.index == current and place.parent]
    return frozenset(found)


def has_other_nic(carriers: frozenset[int], places: Iterable[LinkPlace]) -> bool:
    """Return whether a NIC that is none of these is up and has a carrier."""
    return any(
        place.running and not place.kind and not place.loopback and place.index not in carriers
        for place in places
    )
