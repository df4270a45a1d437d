# SPDX-License-Identifier: Apache-2.0
"""What the loaded program says about a packet, in words."""

from __future__ import annotations

import errno
import ipaddress
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from shapeagent.kernel import bpf
from shapeagent.kernel.datapath import Answer
from shapeagent.model.codes import Code
from shapeagent.model.errors import FailedError, InputError
from shapeagent.model.reports import ExplainRequest, Explanation
from shapeagent.model.types import Direction, EntryKind, Match, RuleKind
from shapeagent.policy.entrytable import EntryTable
from shapeagent.policy.whitelist import format_prefix
from shapeagent.service.describing import ceiling_in_force, priority_text
from shapeagent.service.frames import build_frame, read_capture
from shapeagent.service.liststore import read_table

if TYPE_CHECKING:
    from shapeagent.service.engine import Attached

_PROGRAMS = {Direction.EGRESS: "shp_explain_out", Direction.INGRESS: "shp_explain_in"}
_BY_RULE = (Code.MARK, Code.CGROUP, Code.DSCP, Code.PORT, Code.PROTO)


def explain(
    attached: Attached,
    request: ExplainRequest | None,
    path: Path | None,
    direction_text: str,
) -> Iterator[Explanation]:
    """Yield an explanation of one 5-tuple, or of each packet of a capture."""
    text = request.direction if request is not None else direction_text
    try:
        direction = Direction(text)
    except ValueError as error:
        raise InputError(
            "bad-direction", f"{text!r} is no direction.", hint="egress or ingress"
        ) from error
    table, _ = read_table(attached.store)
    fd = bpf.get_pinned(str(attached.pins / _PROGRAMS[direction]))
    try:
        if request is not None:
            frame = build_frame(request)
            yield _one(attached, fd, frame, direction, table, request.mark)
        elif path is not None:
            for frame in read_capture(path):
                yield _one(attached, fd, frame, direction, table, 0)
    finally:
        os.close(fd)


def _one(
    attached: Attached,
    fd: int,
    frame: bytes,
    direction: Direction,
    table: EntryTable,
    mark: int,
) -> Explanation:
    try:
        answer = attached.datapath.explain(fd, frame, mark=mark)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        raise FailedError(
            "explain-refused",
            f"The kernel does not run a program on a frame of {len(frame)} bytes: "
            f"{error.strerror}.",
        ) from error
    return _in_words(attached, answer, frame, direction, table)


def _in_words(
    attached: Attached,
    answer: Answer,
    frame: bytes,
    direction: Direction,
    table: EntryTable,
) -> Explanation:
    code = Code(answer.code)
    name = attached.policy.classes[answer.class_number].name
    rules = {rule.number: rule for rule in attached.policy.rules}
    by_rule = code in _BY_RULE or (code is Code.CONTROL and answer.ref)
    rule = rules.get(answer.ref) if by_rule else None
    writes = attached.enforcement.tree(direction) is not None
    notes = [Code(answer.note).label] if answer.note else []
    if any(one.kind is RuleKind.CGROUP for one in attached.policy.rules):
        notes.append("cgroup rules are not asked: a test run has the socket of who asks")
    if attached.state.shadow:
        notes.append("shadow: no packet is changed")
    return Explanation(
        packet=describe_frame(frame),
        direction=direction.value,
        traffic_class=name,
        reason=code.label,
        rule=rule.name if rule is not None else None,
        prefix=_deciding_entry(code, answer.ref, frame, direction, table),
        priority=answer.priority if writes else 0,
        priority_text=priority_text(answer.priority) if writes else "none",
        mark=answer.mark,
        ceiling_bits_per_s=ceiling_in_force(attached, name, direction),
        notes=tuple(notes),
    )


def _ends(frame: bytes) -> tuple[bytes, bytes] | None:
    """Return (source, destination) of an IP frame, tags skipped."""
    offset = 12
    while frame[offset : offset + 2] in (b"\x81\x00", b"\x88\xa8"):
        offset += 4
    body = frame[offset + 2 :]
    if frame[offset : offset + 2] == b"\x08\x00" and len(body) >= 20:
        return body[12:16], body[16:20]
    if frame[offset : offset + 2] == b"\x86\xdd" and len(body) >= 40:
        return body[8:24], body[24:40]
    return None


def _deciding_entry(
    code: Code,
    ref: int,
    frame: bytes,
    direction: Direction,
    table: EntryTable,
) -> str | None:
    """Return the whitelist entry that the program's answer points to."""
    ends = _ends(frame)
    if code not in (Code.PAIR, Code.HOST, Code.PREFIX, Code.MANUAL) or ends is None:
        return None
    local, remote = ends if direction is Direction.EGRESS else (ends[1], ends[0])
    if code is Code.MANUAL:
        return format_prefix((remote, 8 * len(remote)))
    if code is Code.PAIR:
        return (
            f"{format_prefix((local, 8 * len(local)))}>{format_prefix((remote, 8 * len(remote)))}"
        )
    if code is Code.HOST:
        address = remote if ref else local
        return format_prefix((address, 8 * len(address)))
    for address, matches in (
        (remote, (Match.DESTINATION, Match.EITHER)),
        (local, (Match.SOURCE, Match.EITHER)),
    ):
        end = network_of(address, ref)
        kind = EntryKind.PREFIXES4 if len(address) == 4 else EntryKind.PREFIXES6
        key = bytes((ref,)) + end[0]
        if any(table.get((match, kind), key) is not None for match in matches):
            return format_prefix(end)
    return None


def network_of(address: bytes, bits: int) -> tuple[bytes, int]:
    """Return the prefix of so many bits that an address lies in."""
    shift = 8 * len(address) - bits
    network = int.from_bytes(address, "big") >> shift << shift
    return network.to_bytes(len(address), "big"), bits


def describe_frame(frame: bytes) -> str:
    """Return a frame as one line: addresses, protocol and ports."""
    ends = _ends(frame)
    if ends is None:
        return f"ethertype {frame[12:14].hex()}, {len(frame)} bytes"
    source, destination = (str(ipaddress.ip_address(end)) for end in ends)
    offset = frame.index(ends[0]) - (12 if len(ends[0]) == 4 else 8)
    body = frame[offset:]
    is_v4 = len(ends[0]) == 4
    protocol = body[9] if is_v4 else body[6]
    payload = body[(body[0] & 0xF) * 4 :] if is_v4 else body[40:]
    names = {6: "tcp", 17: "udp", 1: "icmp", 58: "icmpv6", 132: "sctp"}
    name = names.get(protocol, f"protocol {protocol}")
    if protocol in (6, 17) and len(payload) >= 4:
        ports = struct.unpack("!HH", payload[:4])
        if not is_v4:
            source, destination = f"[{source}]", f"[{destination}]"
        return f"{name} {source}:{ports[0]} > {destination}:{ports[1]}"
    return f"{name} {source} > {destination}"
