# SPDX-License-Identifier: Apache-2.0
"""Frames to ask about: built from a 5-tuple, or read from a capture file."""

from __future__ import annotations

import ipaddress
import struct
from collections.abc import Iterator
from pathlib import Path

from shapeagent.model.errors import InputError
from shapeagent.model.reports import ExplainRequest

PROTOCOLS = {"tcp": 6, "udp": 17, "icmp": 1, "icmpv6": 58, "sctp": 132}
_ETH = b"\x02\x00\x00\x00\x00\x02\x02\x00\x00\x00\x00\x01"
_MAX_RUN_BYTES = 3_700  # what BPF_PROG_TEST_RUN takes (bpf-facts row 11)
_MIN_RUN_BYTES = {b"\x08\x00": 34, b"\x86\xdd": 54}
_MAGICS = {
    b"\xd4\xc3\xb2\xa1": "<",
    b"\x4d\x3c\xb2\xa1": "<",
    b"\xa1\xb2\xc3\xd4": ">",
    b"\xa1\xb2\x3c\x4d": ">",
}
_ETHERNET, _RAW, _LINUX_SLL = 1, 101, 113
_RAW_OLD = (12, 14)


def protocol_number(text: str) -> int:
    """Return an IP protocol number from its name or digits.

    Raises:
        InputError: "unknown-protocol".
    """
    if text in PROTOCOLS:
        return PROTOCOLS[text]
    if text.isascii() and text.isdigit() and int(text) < 256:
        return int(text)
    raise InputError(
        "unknown-protocol",
        f"{text!r} is no protocol.",
        hint=f"one of {', '.join(PROTOCOLS)}, or a number from 0 to 255",
    )


def build_frame(request: ExplainRequest) -> bytes:
    """Return an Ethernet frame for a 5-tuple.

    Raises:
        InputError: "bad-address", "address-families-differ", "unknown-protocol".
    """
    source, destination = _address(request.source), _address(request.destination)
    if source.version != destination.version:
        raise InputError(
            "address-families-differ",
            f"{request.source} and {request.destination} are of different families.",
        )
    protocol = protocol_number(request.protocol)
    payload = _l4(protocol, request.source_port or 0, request.destination_port or 0)
    tclass = request.dscp << 2
    if source.version == 4:
        header = struct.pack(
            "!BBHHHBBH4s4s",
            0x45,
            tclass,
            20 + len(payload),
            0,
            0x4000,
            64,
            protocol,
            0,
            source.packed,
            destination.packed,
        )
        return _ETH + b"\x08\x00" + header + payload
    header = struct.pack(
        "!IHBB16s16s",
        6 << 28 | tclass << 20,
        len(payload),
        protocol,
        64,
        source.packed,
        destination.packed,
    )
    return _ETH + b"\x86\xdd" + header + payload


def _address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    try:
        found = ipaddress.ip_address(text)
    except ValueError as error:
        raise InputError("bad-address", f"{text!r} is no IP address.") from error
    mapped = getattr(found, "ipv4_mapped", None)
    return mapped or found


def _l4(protocol: int, source_port: int, destination_port: int) -> bytes:
    if protocol == 6:
        # ACK, not SYN: what a living connection sends
        return struct.pack(
            "!HHIIBBHHH", source_port, destination_port, 1, 1, 5 << 4, 0x10, 512, 0, 0
        )
    if protocol == 17:
        return struct.pack("!HHHH", source_port, destination_port, 16, 0) + bytes(8)
    if protocol == 1:
        return struct.pack("!BBHHH", 8, 0, 0, 1, 1) + bytes(8)
    if protocol == 58:
        return struct.pack("!BBHHH", 128, 0, 0, 1, 1) + bytes(8)
    return struct.pack("!HH", source_port, destination_port) + bytes(16)


def read_capture(path: Path) -> Iterator[bytes]:
    """Yield the frames of a pcap file as Ethernet frames that a test run takes.

    Raises:
        InputError: "bad-capture" (not a pcap file, cut, or another link type).
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise InputError("bad-capture", f"Cannot read {path}: {error.strerror}.") from error
    order = _MAGICS.get(data[:4])
    if order is None or len(data) < 24:
        kind = "pcapng" if data[:4] == b"\x0a\x0d\x0d\x0a" else "no pcap file"
        raise InputError(
            "bad-capture",
            f"{path} is {kind}.",
            hint=f"editcap -F pcap {path} out.pcap, or capture with tcpdump -w",
        )
    link_type = struct.unpack_from(order + "I", data, 20)[0] & 0xFFFF
    if link_type not in (_ETHERNET, _RAW, _LINUX_SLL, *_RAW_OLD):
        raise InputError("bad-capture", f"{path} has link type {link_type}, not Ethernet or IP.")
    offset = 24
    number = 0
    while offset < len(data):
        number += 1
        if offset + 16 > len(data):
            raise InputError("bad-capture", f"{path}: packet {number} is cut.")
        length = struct.unpack_from(order + "I", data, offset + 8)[0]
        offset += 16
        if offset + length > len(data):
            raise InputError("bad-capture", f"{path}: packet {number} is cut.")
        yield runnable(_as_ethernet(data[offset : offset + length], link_type))
        offset += length


def _as_ethernet(packet: bytes, link_type: int) -> bytes:
    if link_type == _ETHERNET:
        return packet
    if link_type == _LINUX_SLL:
        return _ETH + packet[14:16] + packet[16:]
    return _ETH + (b"\x86\xdd" if packet[:1] and packet[0] >> 4 == 6 else b"\x08\x00") + packet


def runnable(frame: bytes) -> bytes:
    """Return the frame within what BPF_PROG_TEST_RUN takes: cut, or padded with zeroes.

    Only headers decide a class, so a cut payload changes nothing. A frame
    shorter than its IP header is padded: its explanation may then differ from
    the live packet's, which the kernel never sees whole either.
    """
    frame = frame[:_MAX_RUN_BYTES]
    least = _MIN_RUN_BYTES.get(frame[12:14], 14)
    return frame.ljust(least, b"\0")
