# SPDX-License-Identifier: Apache-2.0
"""A second classifier, in Python and from the documents, to compare the kernel's verdicts with.

It shares no parsing with the C program: RFC 791, 8200, 4302, IEEE 802.1Q, and design §4 for the
order of decisions. Rules are asked through policy.rules.decide.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shapeagent.model.codes import Code
from shapeagent.model.types import Direction, Match, Policy, RuleKind, WhitelistEntry
from shapeagent.policy.rules import RuleTables, decide

_TAGS = {b"\x81\x00", b"\x88\xa8", b"\x91\x00"}
_L2_CONTROL = {0x0806, 0x8035, 0x8809, 0x888E, 0x88CC, 0x88F7, 0x8902, 0x88E5}
_L3_CONTROL = {2, 89, 103, 112}
_V4_ICMP_ERRORS = {3, 11, 12}
_V6_ICMP_CONTROL = {1, 2, 3, 4, *range(130, 138), 143}
_EXTENSIONS = {0, 43, 44, 51, 60}
# Expired prefixes that are looked behind in a trie: WHITELIST_RETRIES in bpf/lib/whitelist.h. One
# more hides a shorter prefix until the list is written anew. Hashes, which hold the prefixes of a
# family with few lengths, have no such limit.
EXPIRED_SKIPPED = 2
HASHED_LENGTHS = 4
_WITH_PORTS = {6, 17, 136}
_KINDS = {
    RuleKind.MARK: Code.MARK,
    RuleKind.CGROUP: Code.CGROUP,
    RuleKind.DSCP: Code.DSCP,
    RuleKind.PORT: Code.PORT,
    RuleKind.PROTOCOL: Code.PROTO,
}


class Ends(Exception):
    """Parsing ends here, with a code."""

    def __init__(self, code: Code, *, control: bool = False) -> None:
        super().__init__(code.label)
        self.code = code
        self.control = control


class _Short(Exception):
    """The frame has no such byte."""


@dataclass(slots=True)
class Parsed:
    """What the headers say."""

    version: int = 4
    protocol: int = 0
    source: bytes = b""
    destination: bytes = b""
    dscp: int = 0
    ports: tuple[int, int] | None = None
    icmp_type: int | None = None
    fragment: str = ""  # "", "first", "later"
    identification: bytes = b""
    syn: bool = False


class _Reader:
    def __init__(self, raw: bytes) -> None:
        self.raw = raw
        self.at = 0

    def take(self, count: int) -> bytes:
        found = self.raw[self.at : self.at + count]
        if len(found) < count:
            raise _Short
        self.at += count
        return found

    def peek(self, count: int) -> bytes:
        found = self.take(count)
        self.at -= count
        return found


def parse(frame: bytes, *, metadata_tags: int = 0, raw_ethertype: int | None = None) -> Parsed:
    """Return what a frame's headers say. raw_ethertype: the frame starts with IP itself.

    Raises: Ends.
    """
    reader = _Reader(frame)
    try:
        ethertype = raw_ethertype
        if ethertype is None:
            ethertype = _link(reader, metadata_tags)
        if ethertype == 0x0800:
            return _v4(reader)
        if ethertype == 0x86DD:
            return _v6(reader)
    except _Short:
        raise Ends(Code.TRUNCATED) from None
    raise Ends(Code.NOT_IP, control=ethertype in _L2_CONTROL or ethertype < 0x600)


def _link(reader: _Reader, tags: int) -> int:
    reader.take(12)
    while reader.peek(2) in _TAGS:
        tags += 1
        if tags > 2:
            raise Ends(Code.VLAN_DEPTH)
        reader.take(4)
    return int.from_bytes(reader.take(2), "big")


def _v4(reader: _Reader) -> Parsed:
    head = reader.take(20)
    words = head[0] & 15
    if head[0] >> 4 != 4 or words < 5:
        raise Ends(Code.MALFORMED)
    reader.take(4 * words - 20)
    total = int.from_bytes(head[2:4], "big")
    if total and total < 4 * words:
        raise Ends(Code.MALFORMED)
    found = Parsed(4, head[9], head[12:16], head[16:20], head[1] >> 2)
    offset = int.from_bytes(head[6:8], "big")
    if offset & 0x1FFF:
        found.fragment = "later"
    elif offset & 0x2000:
        found.fragment = "first"
    found.identification = head[4:6]
    if found.fragment != "later":
        _transport(reader, found, (total or 65_535) - 4 * words)
    return found


def _v6(reader: _Reader) -> Parsed:
    head = reader.take(40)
    if head[0] >> 4 != 6:
        raise Ends(Code.MALFORMED)
    room = int.from_bytes(head[4:6], "big") or 65_535
    found = Parsed(6, head[6], head[8:24], head[24:40], (head[0] & 15) << 2 | head[1] >> 6)
    walked = 0
    while found.protocol in _EXTENSIONS:
        walked += 1
        if walked > 6:
            raise Ends(Code.EXT_DEPTH)
        kind, start = found.protocol, reader.at
        extension = reader.peek(8)
        found.protocol = extension[0]
        length = (extension[1] + 1) * 8
        if kind == 51:
            length = (extension[1] + 2) * 4
        if kind == 44:
            length = 8
            word = int.from_bytes(extension[2:4], "big")
            if word & ~6:
                found.fragment = "later" if word >> 3 else "first"
                found.identification = extension[4:8]
        reader.at = start + length
        room -= length
        if found.fragment == "later":
            return found
    if room < 0:
        raise Ends(Code.MALFORMED)
    _transport(reader, found, room)
    return found


def _transport(reader: _Reader, found: Parsed, room: int) -> None:
    least = {6: 20, 17: 8, 136: 8, 1: 1, 58: 1}.get(found.protocol, 0)
    inside = _Reader(reader.raw[reader.at : reader.at + room])
    if found.protocol in _WITH_PORTS:
        body = inside.take(4 if found.protocol == 6 else 8)
        found.ports = (int.from_bytes(body[:2], "big"), int.from_bytes(body[2:4], "big"))
    inside.at = 0
    try:
        body = inside.take(least)
    except _Short:
        if found.fragment == "first" and found.protocol == 6:
            return
        raise
    if found.protocol == 6:
        found.syn = body[13] & 0x12 == 0x02
    if found.protocol in (1, 58):
        found.icmp_type = body[0]


@dataclass(frozen=True, slots=True)
class Lists:
    """Whitelist entries with whether each is expired, and the manual map."""

    entries: Sequence[tuple[WhitelistEntry, bool]] = ()
    manual: Mapping[bytes, int] | None = None  # remote address as 16 bytes → class number

    def find(
        self, numbers: Mapping[str, int], local: bytes, remote: bytes
    ) -> tuple[int, Code] | None:
        """Return what the lists say: pairs, hosts, the longest prefix, manual; remote first."""
        for entry, expired in self.entries:
            pair = (local, 8 * len(local)), (remote, 8 * len(remote))
            if expired or entry.match is not Match.PAIR:
                continue
            if (entry.source, entry.destination) == pair:
                return numbers[entry.traffic_class], Code.PAIR
        covering = [
            self._covering(remote, Match.SOURCE),
            self._covering(local, Match.DESTINATION),
        ]
        for end in covering:
            if end and end[0][0] == 8 * len(remote) and not end[0][2]:
                return numbers[end[0][1].traffic_class], Code.HOST
        best: tuple[int, WhitelistEntry] | None = None
        for end in covering:
            prefixes = [row for row in end if row[0] < 8 * len(remote)]
            for bits, entry, expired in prefixes[: self._looked_at(len(remote))]:
                if not expired:
                    if best is None or bits > best[0]:
                        best = bits, entry
                    break
        if best is not None:
            return numbers[best[1].traffic_class], Code.PREFIX
        key = remote if len(remote) == 16 else bytes(10) + b"\xff\xff" + remote
        if self.manual and key in self.manual:
            return self.manual[key], Code.MANUAL
        return None

    def lengths(self, address_bytes: int) -> set[int]:
        """Return the prefix lengths of a family, expired entries included."""
        ends = [e.destination or e.source for e, _ in self.entries if e.match is not Match.PAIR]
        return {
            end[1]
            for end in ends
            if end and len(end[0]) == address_bytes and end[1] < 8 * address_bytes
        }

    def _looked_at(self, address_bytes: int) -> int:
        if len(self.lengths(address_bytes)) <= HASHED_LENGTHS:
            return HASHED_LENGTHS
        return EXPIRED_SKIPPED + 1

    def _covering(self, address: bytes, other_end: Match) -> list[tuple[int, WhitelistEntry, bool]]:
        """Return (bits, entry, expired) of what covers one end, the longest first."""
        found = []
        for entry, expired in self.entries:
            if entry.match in (Match.PAIR, other_end):
                continue
            network, bits = entry.destination or entry.source or (b"", 0)
            if _covers(network, bits, address):
                found.append((bits, entry, expired))
        return sorted(found, key=lambda row: -row[0])


def _covers(address: bytes, bits: int, end: bytes) -> bool:
    if len(address) != len(end):
        return False
    network = ipaddress.ip_network((address, bits), strict=False)
    return ipaddress.ip_address(end) in network


def classify(
    frame: bytes,
    direction: Direction,
    policy: Policy,
    tables: RuleTables,
    lists: Lists | None = None,
    *,
    mark: int = 0,
    metadata_tags: int = 0,
    raw_ethertype: int | None = None,
    first_seen: Mapping[bytes, int] | None = None,
) -> tuple[int, Code]:
    """Return (class number, code) of a frame that no cache knows.

    Args:
        first_seen: identification of a fragmented packet → class of its first fragment.
    """
    numbers = {c.name: c.number for c in policy.classes}
    default = numbers[policy.default_class]
    control = numbers[policy.control_class], Code.CONTROL
    try:
        found = parse(frame, metadata_tags=metadata_tags, raw_ethertype=raw_ethertype)
    except Ends as end:
        return control if end.control else (default, end.code)
    if found.fragment == "later":
        seen = (first_seen or {}).get(found.identification)
        return (default, Code.FRAG_UNSEEN) if seen is None else (seen, Code.FRAGMENT)
    if _is_control(found):
        return control
    local, remote = found.source, found.destination
    ports: tuple[int | None, int | None] = found.ports or (None, None)
    if direction is Direction.INGRESS:
        local, remote = remote, local
        ports = (ports[1], ports[0])
    name, rule = decide(
        tables, found.protocol, ports[0], ports[1], direction, dscp=found.dscp, mark=mark
    )
    if rule is not None:
        return numbers[name], Code.CONTROL if rule.protected else _KINDS[rule.kind]
    return (lists or Lists()).find(numbers, local, remote) or (default, Code.DEFAULT)


def _is_control(found: Parsed) -> bool:
    if found.protocol in _L3_CONTROL:
        return True
    if found.protocol == 1 and found.version == 4:
        return found.icmp_type in _V4_ICMP_ERRORS
    return found.protocol == 58 and found.version == 6 and found.icmp_type in _V6_ICMP_CONTROL
