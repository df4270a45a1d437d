# SPDX-License-Identifier: Apache-2.0
"""`explain` asks the loaded program and leaves everything as it was."""

from __future__ import annotations

import contextlib
import ctypes
import struct

import pytest

from shapeagent.kernel import bpf, lists
from shapeagent.kernel.maps import LIST_KINDS, SHAPES
from shapeagent.model.codes import Code
from tests.bpf import frames
from tests.bpf.frames import SYN, ether, ip4, packed, tcp4, tcp6, udp4, udp6, udp_header
from tests.bpf.kit import (
    BULK,
    EGRESS,
    INGRESS,
    NORMAL,
    SIGNAL,
    Rig,
    make_entry,
)
from tests.bpf.test_budget import BIG, budget_policy

_LOOKUP_BATCH = 24


def _whole_array(fd: int, value_bytes: int, entries: int) -> bytes:
    """Return all values of an array map by one batch look-up."""
    keys = ctypes.create_string_buffer(4 * entries)
    values = ctypes.create_string_buffer(value_bytes * entries)
    state = ctypes.create_string_buffer(8)
    attr = bytearray(56)
    struct.pack_into(
        "=QQQQIIQQ",
        attr,
        0,
        0,
        ctypes.addressof(state),
        ctypes.addressof(keys),
        ctypes.addressof(values),
        entries,
        fd,
        0,
        0,
    )
    with contextlib.suppress(FileNotFoundError):  # ENOENT says that the end was reached
        bpf.bpf_call(_LOOKUP_BATCH, attr)
    (count,) = struct.unpack_from("=I", attr, 32)
    assert count == entries, f"got {count} of {entries} elements"
    return values.raw


def everything(rig: Rig) -> dict[str, object]:
    """Return what every map holds, but for the explaining program's own scratch slot."""
    found: dict[str, object] = {}
    per_cpu = {bpf.MapType.PERCPU_ARRAY: rig.kernel.possible_cpus}
    for name, shape in SHAPES.items():
        fd = rig.maps[name]
        if name == "ports":
            found[name] = _whole_array(fd, shape.value_bytes, shape.max_entries)
            continue
        if name == "again":  # programs, which do not change
            continue
        count = per_cpu.get(bpf.MapType(shape.type), 1)
        value_bytes = (shape.value_bytes + 7) // 8 * 8 * count if count > 1 else shape.value_bytes
        rows = sorted(bpf.iterate(fd, shape.key_bytes, value_bytes))
        if name == "scratch":
            rows = rows[:1]
        found[name] = rows
        if name in LIST_KINDS:
            for slot in range(shape.max_entries):
                inner = lists.inner_fd(rig.maps, name, slot)
                if inner is None:
                    continue
                kind = LIST_KINDS[name]
                found[f"{name}[{slot}]"] = sorted(
                    bpf.iterate(inner, kind.key_bytes, kind.value_bytes)
                )
                bpf.close_all([inner])
    return found


def test_1000_explanations_leave_every_map_equal(rig: Rig) -> None:
    rig.apply(budget_policy())
    rig.set_list(
        [
            make_entry("destination", "stream", destination=(packed("10.0.0.1"), 32)),
            make_entry("destination", "bulk", destination=(packed("10.1.0.0"), 16)),
        ]
    )
    manual = bytes(10) + b"\xff\xff" + packed("10.2.0.1")
    bpf.update(rig.maps["manual"], manual, struct.pack("=IIQ", BULK, 0, 0))
    first = ether(0x0800, ip4(17, udp_header(1, 7000, 3000) + bytes(100), fragment=0x2000))
    later = ether(0x0800, ip4(17, bytes(100), fragment=185))
    asked = [
        tcp4(1, 2),
        tcp6(1, 2),
        udp4(1, 7000),
        udp6(1, 7000),
        tcp4(1, 7000, flags=SYN),
        tcp4(2, 7000),
        tcp4(1, 2, destination="10.0.0.1"),
        tcp4(1, 2, destination="10.1.2.3"),
        tcp4(1, 2, destination="10.2.0.1"),
        first,
        later,
        ether(0x0806, bytes(46)),
        ether(0x0800, ip4(6, bytes(20), ihl=4)),
    ]
    for frame in asked:  # some known flows, one moved flow, one budget overspent
        rig.send(frame)
    for _ in range(4):
        rig.send(tcp4(2, 7000), wire_len=BIG)
    rig.add(make_entry("destination", "stream", destination=(packed("10.0.0.1"), 32)))  # stale
    rig.next_jiffy()
    before = everything(rig)
    for number in range(1000):
        direction = INGRESS if number % 2 else EGRESS
        if number % 3:
            frame = asked[number % len(asked)]
        else:  # new flows and new fragments too
            frame = tcp4(number, 7000) if number % 2 else udp6(number, 9001)
        rig.explain(frame, direction, mark=number)
    after = everything(rig)
    changed = [name for name in before if before[name] != after[name]]
    assert not changed, f"got {changed} changed by explain, want every map equal"


@pytest.mark.parametrize("family", ["v4", "v6"])
def test_explain_names_class_reason_rule_or_prefix_priority_and_mark(rig: Rig, family: str) -> None:
    build = tcp4 if family == "v4" else tcp6
    peer, bits = (frames.PEER4, 24) if family == "v4" else (frames.PEER6, 48)
    whole = int.from_bytes(packed(peer), "big")
    width = 8 * len(packed(peer))
    network = (whole >> width - bits << width - bits).to_bytes(width // 8, "big"), bits
    rig.set_list([make_entry("destination", "bulk", destination=network)])
    answer = rig.explain(build(1, 7000), mark=0x77)
    rule = rig.tables.by_number[answer.ref]
    got = answer.class_number, Code(answer.code), rule.name, answer.priority, answer.mark
    assert got == (SIGNAL, Code.PORT, "beat", 0x10010, 0x77), f"got {got}"
    answer = rig.explain(build(1, 2))
    got_prefix = answer.class_number, Code(answer.code), answer.ref, answer.priority
    assert got_prefix == (BULK, Code.PREFIX, bits, 0x10013), f"got {got_prefix}"


def test_explain_says_what_the_next_packet_of_a_cached_flow_gets(rig: Rig) -> None:
    assert rig.classify(tcp4(1, 2)) == (NORMAL, Code.DEFAULT)
    rig.set_list([make_entry("destination", "bulk", destination=(packed(frames.PEER4), 32))])
    got = rig.verdict(tcp4(1, 2)), rig.classify(tcp4(1, 2))
    assert got == ((BULK, Code.HOST),) * 2, f"got {got}, want both by the new list"
