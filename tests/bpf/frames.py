# SPDX-License-Identifier: Apache-2.0
"""Frames for the loaded program, built with Scapy or, where speed or bad fields matter, by hand."""

from __future__ import annotations

import ipaddress
import struct

from scapy.layers.inet import ICMP, IP, TCP, UDP, IPOption_Router_Alert
from scapy.layers.inet6 import (
    ICMPv6DestUnreach,
    ICMPv6EchoRequest,
    ICMPv6ND_NS,
    IPv6,
    IPv6ExtHdrDestOpt,
    IPv6ExtHdrFragment,
    IPv6ExtHdrHopByHop,
    IPv6ExtHdrRouting,
)
from scapy.layers.l2 import ARP, Dot1AD, Dot1Q, Ether
from scapy.packet import Packet, Raw

HOST4, PEER4 = "192.0.2.1", "198.51.100.7"
HOST6, PEER6 = "2001:db8::1", "2001:db8:ffff::7"
_MACS = bytes.fromhex("020000000001020000000002")
SYN, ACK, SYN_ACK = 0x02, 0x10, 0x12


def packed(address: str) -> bytes:
    """Return an address in network order."""
    return ipaddress.ip_address(address).packed


def tcp_header(source: int, destination: int, flags: int = ACK, doff: int = 5) -> bytes:
    """Return a TCP header; its checksum is 0, which nothing here looks at."""
    head = struct.pack("!HHIIBBHHH", source, destination, 1, 1, doff << 4, flags, 512, 0, 0)
    return head + b"\x01" * (4 * doff - 20)


def udp_header(source: int, destination: int, length: int = 8) -> bytes:
    """Return a UDP header without checksum."""
    return struct.pack("!HHHH", source, destination, length, 0)


def checksum(header: bytes) -> int:
    """Return the internet checksum of a header (0 over one whose checksum is right)."""
    total: int = sum(struct.unpack(f"!{len(header) // 2}H", header))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return ~total & 0xFFFF


def ether(ethertype: int, payload: bytes, tags: tuple[int, ...] = ()) -> bytes:
    """Return an Ethernet frame with VLAN tags (their TPIDs, outer first) in the bytes."""
    head = _MACS
    for number, tpid in enumerate(tags):
        head += struct.pack("!HH", tpid, 208 - number)
    return head + struct.pack("!H", ethertype) + payload


def ip4(
    protocol: int,
    payload: bytes,
    *,
    source: str | bytes = HOST4,
    destination: str | bytes = PEER4,
    tos: int = 0,
    options: bytes = b"",
    identification: int = 7,
    fragment: int = 0,
    total: int | None = None,
    ihl: int | None = None,
) -> bytes:
    """Return an IPv4 packet with a right header checksum. `fragment`: flags and offset word."""
    words = 5 + len(options) // 4
    head = bytearray(
        struct.pack(
            "!BBHHHBBH4s4s",
            0x40 | (words if ihl is None else ihl),
            tos,
            4 * words + len(payload) if total is None else total,
            identification,
            fragment,
            64,
            protocol,
            0,
            source if isinstance(source, bytes) else packed(source),
            destination if isinstance(destination, bytes) else packed(destination),
        )
        + options
    )
    struct.pack_into("!H", head, 10, checksum(bytes(head)))
    return bytes(head) + payload


def ip6(
    next_header: int,
    payload: bytes,
    *,
    source: str | bytes = HOST6,
    destination: str | bytes = PEER6,
    traffic_class: int = 0,
    label: int = 0,
    length: int | None = None,
) -> bytes:
    """Return an IPv6 packet."""
    return (
        struct.pack(
            "!IHBB",
            6 << 28 | traffic_class << 20 | label,
            len(payload) if length is None else length,
            next_header,
            64,
        )
        + (source if isinstance(source, bytes) else packed(source))
        + (destination if isinstance(destination, bytes) else packed(destination))
        + payload
    )


def tcp4(local: int = 40000, remote: int = 40001, /, **fields: object) -> bytes:
    """Return a frame with an IPv4 TCP segment; `flags`, `doff`, `size` and ip4()'s fields."""
    flags, doff, size = (int(str(fields.pop(k, v))) for k, v in _TCP_DEFAULTS)
    body = tcp_header(local, remote, flags, doff) + bytes(size)
    return ether(0x0800, ip4(6, body, **fields))  # type: ignore[arg-type]


def tcp6(local: int = 40000, remote: int = 40001, /, **fields: object) -> bytes:
    """Return a frame with an IPv6 TCP segment, as tcp4()."""
    flags, doff, size = (int(str(fields.pop(k, v))) for k, v in _TCP_DEFAULTS)
    body = tcp_header(local, remote, flags, doff) + bytes(size)
    return ether(0x86DD, ip6(6, body, **fields))  # type: ignore[arg-type]


_TCP_DEFAULTS = (("flags", ACK), ("doff", 5), ("size", 10))


def udp4(local: int = 40000, remote: int = 40001, /, **fields: object) -> bytes:
    """Return a frame with an IPv4 datagram; `size` and ip4()'s fields."""
    size = int(str(fields.pop("size", 10)))
    body = udp_header(local, remote, 8 + size) + bytes(size)
    return ether(0x0800, ip4(17, body, **fields))  # type: ignore[arg-type]


def udp6(local: int = 40000, remote: int = 40001, /, **fields: object) -> bytes:
    """Return a frame with an IPv6 datagram; `size` and ip6()'s fields."""
    size = int(str(fields.pop("size", 10)))
    body = udp_header(local, remote, 8 + size) + bytes(size)
    return ether(0x86DD, ip6(17, body, **fields))  # type: ignore[arg-type]


def tagged(frame: bytes, *tpids: int) -> bytes:
    """Return the frame with VLAN tags in its bytes, outer first."""
    return ether(struct.unpack_from("!H", frame, 12)[0], frame[14:], tpids)


def corpus(local_port: int, remote_port: int) -> dict[str, bytes]:
    """Return name → frame, built with Scapy; the transport goes from local to remote port."""
    eth = Ether(src="02:00:00:00:00:02", dst="02:00:00:00:00:01")
    v4 = IP(src=HOST4, dst=PEER4)
    v6 = IPv6(src=HOST6, dst=PEER6)
    tcp = TCP(sport=local_port, dport=remote_port, flags="A")
    udp = UDP(sport=local_port, dport=remote_port)
    data = Raw(b"payload!")
    built: dict[str, Packet] = {
        "v4-tcp": eth / v4 / tcp / data,
        "v4-udp": eth / v4 / udp / data,
        "v4-options-tcp": eth
        / IP(src=HOST4, dst=PEER4, options=[IPOption_Router_Alert()])
        / tcp
        / data,
        "v4-tcp-options": eth
        / v4
        / TCP(sport=local_port, dport=remote_port, flags="A", options=[("MSS", 1400)])
        / data,
        "v4-icmp-echo": eth / v4 / ICMP() / data,
        "v4-icmp-unreachable": eth / v4 / ICMP(type=3, code=4) / data,
        "v4-first-fragment": eth / IP(src=HOST4, dst=PEER4, flags="MF") / udp / data,
        "v4-later-fragment": eth / IP(src=HOST4, dst=PEER4, frag=185, proto=17) / data,
        "v6-tcp": eth / v6 / tcp / data,
        "v6-udp": eth / v6 / udp / data,
        "v6-extensions-tcp": eth
        / v6
        / IPv6ExtHdrHopByHop()
        / IPv6ExtHdrRouting()
        / IPv6ExtHdrDestOpt()
        / tcp
        / data,
        "v6-first-fragment": eth / v6 / IPv6ExtHdrFragment(m=1, id=99, nh=17) / udp / data,
        "v6-later-fragment": eth / v6 / IPv6ExtHdrFragment(offset=185, id=99, nh=17) / data,
        "v6-echo": eth / v6 / ICMPv6EchoRequest(data=b"hello"),
        "v6-unreachable": eth / v6 / ICMPv6DestUnreach() / data,
        "v6-neighbour": eth / v6 / ICMPv6ND_NS(tgt=PEER6),
        "vlan-v4-tcp": eth / Dot1Q(vlan=4) / v4 / tcp / data,
        "vlan-v6-udp": eth / Dot1Q(vlan=4) / v6 / udp / data,
        "qinq-v4-tcp": eth / Dot1AD(vlan=208) / Dot1Q(vlan=4) / v4 / tcp / data,
        "qinq-v6-tcp": eth / Dot1AD(vlan=208) / Dot1Q(vlan=4) / v6 / tcp / data,
        "vlan-arp": eth / Dot1Q(vlan=4) / ARP(),
        "arp": eth / ARP(),
    }
    return {name: bytes(packet) for name, packet in built.items()}
