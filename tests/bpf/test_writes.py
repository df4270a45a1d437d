# SPDX-License-Identifier: Apache-2.0
"""What the program writes into packets, and what it leaves alone."""

from __future__ import annotations

import struct
from collections.abc import Callable

import pytest

from shapeagent.kernel import bpf
from shapeagent.model.types import Direction, Profile
from tests.bpf import frames
from tests.bpf.frames import ether, ip4, ip6, tagged, tcp4, tcp6, tcp_header
from tests.bpf.kit import CLASS_TABLES, EGRESS, HEAD, INGRESS, POLICY, PORT_RULES, UNSPEC, Rig

EF = 46
PORT_OF = {"signal": 7000, "bulk": 9001, "normal": 2}
MARKS = """
[marks]
egress_mask = 0xf00
ingress_mask = 0
"""


def rewriting(dscp: str = "ef") -> str:
    """Return the test policy with a DSCP for class signal."""
    return POLICY.replace("[classes.signal]", f'[classes.signal]\ndscp = "{dscp}"')


# --- DSCP (C23)


@pytest.mark.parametrize("ecn", range(4))
@pytest.mark.parametrize("options", [b"", b"\x94\x04\x00\x00", b"\x01" * 40])
def test_c23_ipv4_dscp_is_rewritten_with_ecn_kept_and_the_checksum_right(
    rig: Rig, ecn: int, options: bytes
) -> None:
    rig.apply(rewriting())
    packet = ip4(6, tcp_header(40000, 7000), tos=ecn, options=options)
    done = rig.send(ether(0x0800, packet))
    want = EF << 2 | ecn
    assert done.frame[15] == want, f"got tos {done.frame[15]:#x}, want {want:#x}"
    head = done.frame[14 : 34 + len(options)]
    assert frames.checksum(head) == 0, f"got checksum {head[10:12].hex()}, want a valid one"
    changed = [n for n, (a, b) in enumerate(zip(packet, done.frame[14:], strict=True)) if a != b]
    assert set(changed) <= {1, 10, 11}, f"got bytes {changed} changed, want TOS and checksum"


def test_c23_tos_03_becomes_bb(rig: Rig) -> None:
    rig.apply(rewriting())
    got = rig.send(tcp4(40000, 7000, tos=0x03)).frame[15]
    assert got == 0xBB, f"got {got:#x}, want 0xbb"


@pytest.mark.parametrize("dscp", ["be", "cs1", "ef", "63"])
def test_c23_any_dscp_over_any_other_leaves_a_valid_checksum(rig: Rig, dscp: str) -> None:
    rig.apply(rewriting(dscp))
    number = {"be": 0, "cs1": 8, "ef": 46, "63": 63}[dscp]
    for tos in range(256):
        frame = rig.send(tcp4(40000, 7000, tos=tos)).frame
        want = number << 2 | tos & 3
        assert frame[15] == want, f"tos {tos:#x}: got {frame[15]:#x}, want {want:#x}"
        assert frames.checksum(frame[14:34]) == 0, f"tos {tos:#x}: got a wrong checksum"


@pytest.mark.parametrize("label", [0, 1, 0x54321, 0xFFFFF])
@pytest.mark.parametrize("tclass", [0x00, 0x01, 0xB8, 0xFF])
def test_c23_ipv6_traffic_class_is_rewritten_and_the_flow_label_kept(
    rig: Rig, label: int, tclass: int
) -> None:
    rig.apply(rewriting())
    packet = ip6(6, tcp_header(40000, 7000), traffic_class=tclass, label=label)
    done = rig.send(ether(0x86DD, packet))
    (word,) = struct.unpack_from("!I", done.frame, 14)
    want = 6 << 28 | (EF << 2 | tclass & 3) << 20 | label
    assert word == want, f"got {word:#010x}, want {want:#010x}"
    assert done.frame[18:] == packet[4:], "got more than the first word changed"


@pytest.mark.parametrize("tags", [(0x8100,), (0x88A8, 0x8100)])
def test_dscp_is_rewritten_behind_vlan_tags(rig: Rig, tags: tuple[int, ...]) -> None:
    rig.apply(rewriting())
    at = 14 + 4 * len(tags)
    done = rig.send(tagged(tcp4(40000, 7000, tos=1), *tags))
    assert done.frame[at + 1] == 0xB9, f"got {done.frame[at + 1]:#x}, want 0xb9"
    assert frames.checksum(done.frame[at : at + 20]) == 0
    done = rig.wrapper.run(
        rig.programs["shp_egress"], tcp4(40000, 7000, tos=1), push=(0x8100, 0x88A8)
    )
    inner = done.frame.index(b"\x45\xb9")
    assert frames.checksum(done.frame[inner : inner + 20]) == 0


def test_dscp_is_left_alone_when_off_on_ingress_and_in_other_classes(rig: Rig) -> None:
    signal, other = tcp4(40000, 7000, tos=0x21), tcp4(40000, 9001, tos=0x21)
    assert rig.send(signal).frame == signal, "off: got a changed packet"
    rig.apply(rewriting())
    assert rig.send(other).frame == other, "another class: got a changed packet"
    back = tcp4(7000, 40000, tos=0x21)
    assert rig.send(back, INGRESS).frame == back, "ingress: got a changed packet"


def test_packets_that_are_not_sound_ip_are_never_written(rig: Rig) -> None:
    everywhere = HEAD + "\n".join(
        line + ('\ndscp = "ef"' if line.startswith("[classes.") else "")
        for line in CLASS_TABLES.splitlines()
    )
    rig.apply(everywhere + PORT_RULES)
    for frame in (
        ether(0x0806, bytes(28)),
        ether(0x8847, ip4(6, tcp_header(1, 2))),
        ether(0x0800, ip4(6, tcp_header(1, 7000), ihl=4)),
        ether(0x0800, ip4(6, tcp_header(1, 7000)[:4])),
        tagged(tcp4(1, 7000), 0x88A8, 0x8100, 0x8100),
    ):
        done = rig.send(frame)
        assert (done.returned, done.frame) == (UNSPEC, frame), f"{frame.hex()}: got it changed"


# --- priority and mark


@pytest.mark.parametrize("build", [tcp4, tcp6])
def test_priority_is_the_leaf_of_the_class_and_never_the_root(
    rig: Rig, build: Callable[..., bytes]
) -> None:
    for ports, want in (((1, 7000), 0), ((8443, 1), 1), ((1, 2), 2), ((1, 9001), 3)):
        for given in (0, 6, 0x10000):
            done = rig.send(build(*ports), priority=given)
            assert done.priority == 0x10010 + want, f"{ports}: got {done.priority:#x}"
    for frame in (ether(0x1234, bytes(46)), ether(0x0806, bytes(46))):
        got = rig.send(frame, priority=0x10000).priority
        assert got in (0x10010, 0x10012), f"got {got:#x}, want a leaf"


def test_priority_is_left_alone_where_no_qdisc_of_ours_reads_it(rig: Rig) -> None:
    done = rig.send(tcp4(1, 7000), INGRESS, priority=6)
    assert done.priority == 6, f"ingress: got {done.priority:#x}, want 6"
    rig.apply(POLICY, profile=Profile.POLICE)
    assert rig.data.read_config().write_priority == 0
    for ports in ((1, 7000), (1, 9001), (1, 2)):
        got = rig.send(tcp4(*ports), priority=6).priority
        assert got == 6, f"police: got {got:#x}, want 6"


def test_the_mark_is_left_alone_unless_the_policy_asks(rig: Rig) -> None:
    for direction in (EGRESS, INGRESS):
        got = rig.send(tcp4(7000, 7000), direction, mark=0xDEADBEEF).mark
        assert got == 0xDEADBEEF, f"{direction}: got {got:#x}, want it as it was"


def test_only_the_masked_bits_of_the_mark_are_written_and_only_on_egress(rig: Rig) -> None:
    text = HEAD + CLASS_TABLES.replace("[classes.bulk]", "[classes.bulk]\nmark = 0x500")
    rig.apply(text + PORT_RULES + MARKS)
    cases = (
        (tcp4(1, 9001), EGRESS, 0xDEADBEEF, 0xDEADB5EF),
        (tcp4(1, 9001), EGRESS, 0, 0x500),
        (tcp4(1, 7000), EGRESS, 0xDEADBEEF, 0xDEADB0EF),  # a class without a mark clears ours
        (tcp4(9001, 1), INGRESS, 0xDEADBEEF, 0xDEADBEEF),
    )
    for frame, direction, given, want in cases:
        got = rig.send(frame, direction, mark=given).mark
        assert got == want, f"{direction} {given:#x}: got {got:#x}, want {want:#x}"
        answer = rig.explain(frame, direction, mark=given)
        assert answer.mark == want, f"explain: got {answer.mark:#x}, want {want:#x}"


def test_the_mark_is_written_on_ingress_where_the_policy_asks(rig: Rig) -> None:
    text = HEAD + CLASS_TABLES.replace("[classes.bulk]", "[classes.bulk]\nmark = 0x500")
    rig.apply(text + PORT_RULES + MARKS.replace("ingress_mask = 0", "ingress_mask = 0x700"))
    frame = tcp4(9001, 1, source=frames.PEER4, destination=frames.HOST4)
    got = rig.send(frame, INGRESS, mark=0xFFFF).mark
    assert got == 0xFDFF, f"got {got:#x}, want 0xfdff"


def test_a_manual_entry_of_a_class_that_the_policy_lacks_changes_nothing(rig: Rig) -> None:
    key = bytes(10) + b"\xff\xff" + frames.packed(frames.PEER4)
    bpf.update(rig.maps["manual"], key, struct.pack("=IIQ", 9, 0, 0))
    frame = tcp4(1, 2, tos=0x21)
    done = rig.send(frame)
    assert done.frame == frame, f"got tos {done.frame[15]:#x}, want it as it was"
    assert done.priority == 0x10012, f"got priority {done.priority:#x}, want the default leaf"


# --- counters


def test_wire_bytes_are_those_of_every_frame_with_gap_and_preamble(rig: Rig) -> None:
    normal = 2
    frame = tcp4(1, 2)

    def counted(way: Direction, **fields: int) -> int:
        before = rig.data.count(way.number, normal).wire_bytes
        rig.send(frame, way, **fields)
        return rig.data.count(way.number, normal).wire_bytes - before

    got = counted(EGRESS), counted(EGRESS, wire_len=59_648, gso_segs=40, gso_size=1448)
    assert got == (len(frame) + 24, 59_648 + 40 * 24), f"egress: got {got}"
    headers = 14 + 20 + 20
    got = counted(INGRESS), counted(INGRESS, gso_segs=5, gso_size=2)
    assert got == (len(frame) + 24, len(frame) + 4 * headers + 5 * 24), f"ingress: got {got}"


def test_packets_above_the_segment_limit_are_counted_on_egress(rig: Rig) -> None:
    rig.apply(POLICY, segment_limit_bytes=1500)
    before = rig.data.count(0, 2).over_segment
    for size, more in ((1460, 0), (1461, 1), (3000, 2)):
        rig.send(tcp4(1, 2, size=size))
        got = rig.data.count(0, 2).over_segment - before
        assert got == more, f"payload {size}: got {got}, want {more}"
