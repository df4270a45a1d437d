# SPDX-License-Identifier: Apache-2.0
"""What the program makes of headers: tags, options, extension headers, fragments, odd lengths."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator

import pytest

from shapeagent.model.codes import Code
from shapeagent.model.types import Direction
from tests.bpf import frames, reference
from tests.bpf.frames import ether, ip4, ip6, tagged, tcp4, tcp6, tcp_header, udp4, udp6, udp_header
from tests.bpf.kit import (
    BULK,
    EGRESS,
    INGRESS,
    NORMAL,
    POLICY,
    SIGNAL,
    STREAM,
    UNSPEC,
    Rig,
    verdict_between,
)

BEAT = 7000  # class signal
_CORPUS = frames.corpus(40000, BEAT)


@pytest.fixture(scope="module")
def module_rig(shared_rig: Rig) -> Rig:
    """Give the rig of this module, policy applied once: these tests only ask."""
    shared_rig.apply(POLICY)
    return shared_rig


# --- truncation


@pytest.mark.parametrize("name", _CORPUS)
@pytest.mark.parametrize("way", [EGRESS, INGRESS])
def test_a_frame_cut_at_any_byte_passes_counted_in_the_class_of_what_is_left(
    module_rig: Rig, name: str, way: Direction
) -> None:
    rig, frame = module_rig, _CORPUS[name]
    rig.clear()
    for length in range(14, len(frame) + 1):
        want = reference.classify(frame[:length], way, rig.policy, rig.tables)
        done = rig.cut(frame, length, way, explain=True)
        got = done.cb[0], Code(done.cb[1] & 0xFF)
        assert got == want, f"{name} cut to {length}: got {got}, want {want}"
        before = rig.totals(way) if length % 5 == 0 or length == len(frame) else None
        done = rig.cut(frame, length, way)
        assert done.returned == UNSPEC, f"{name} cut to {length}: got {done.returned}, want passed"
        if before is None:
            continue
        got = verdict_between(before, rig.totals(way))
        if want[1] is Code.FRAG_UNSEEN:
            want = got  # its first fragment may have passed in another length
        assert got[0] == want[0], f"{name} cut to {length}: counted in {got[0]}, want {want[0]}"


def test_whole_corpus_gets_its_class(module_rig: Rig) -> None:
    for name, frame in _CORPUS.items():
        got = module_rig.verdict(frame)
        if "fragment" in name and "later" in name:
            want = NORMAL, Code.FRAG_UNSEEN
        elif name.endswith(("tcp", "udp", "tcp-options", "first-fragment")):
            want = SIGNAL, Code.PORT
        elif name in ("v4-icmp-echo", "v6-echo"):
            want = NORMAL, Code.DEFAULT
        else:
            want = SIGNAL, Code.CONTROL
        module_rig.clear()
        assert got == want, f"{name}: got {got}, want {want}"


# --- VLAN tags in bytes and metadata, both families, one rule table


@pytest.mark.parametrize("family", ["v4", "v6"])
@pytest.mark.parametrize("protocol", ["tcp", "udp"])
@pytest.mark.parametrize(
    ("local", "remote"), [(40000, BEAT), (BEAT, 40000), (8443, 40000), (40000, 9050), (1, 2)]
)
def test_c01_c03_tagged_and_untagged_copies_of_a_packet_get_one_class(
    module_rig: Rig, family: str, protocol: str, local: int, remote: int
) -> None:
    build = {("v4", "tcp"): tcp4, ("v6", "tcp"): tcp6, ("v4", "udp"): udp4, ("v6", "udp"): udp6}
    plain = build[family, protocol](local, remote)
    want = reference.classify(plain, EGRESS, module_rig.policy, module_rig.tables)
    got = {
        "untagged": module_rig.verdict(plain),
        "8100": module_rig.verdict(tagged(plain, 0x8100)),
        "88a8": module_rig.verdict(tagged(plain, 0x88A8)),
        "88a8+8100": module_rig.verdict(tagged(plain, 0x88A8, 0x8100)),
        "8100+8100": module_rig.verdict(tagged(plain, 0x8100, 0x8100)),
        "9100+8100": module_rig.verdict(tagged(plain, 0x9100, 0x8100)),
        "metadata": module_rig.pushed(plain, 0x8100),
        "metadata over bytes": module_rig.pushed(plain, 0x8100, 0x88A8),
        "metadata over a tagged frame": module_rig.pushed(tagged(plain, 0x8100), 0x88A8),
    }
    assert got == dict.fromkeys(got, want)


@pytest.mark.parametrize("build", [tcp4, tcp6])
def test_c01_a_third_tag_passes_in_the_default_class_with_its_reason(
    module_rig: Rig, build: Callable[..., bytes]
) -> None:
    plain = build(40000, BEAT)
    want = NORMAL, Code.VLAN_DEPTH
    got = {
        "in bytes": module_rig.verdict(tagged(plain, 0x88A8, 0x8100, 0x8100)),
        "two in bytes, one in metadata": module_rig.pushed(tagged(plain, 0x8100, 0x8100), 0x88A8),
        "one in bytes, two pushed": module_rig.pushed(tagged(plain, 0x8100), 0x8100, 0x88A8),
    }
    assert got == dict.fromkeys(got, want)
    before = module_rig.reason(Code.VLAN_DEPTH)
    done = module_rig.send(tagged(plain, 0x88A8, 0x8100, 0x8100))
    assert done.returned == UNSPEC, f"got {done.returned}, want passed"
    assert module_rig.reason(Code.VLAN_DEPTH) == before + 1


# --- IPv4


@pytest.mark.parametrize("words", range(1, 11))
def test_c04_ports_are_read_behind_ipv4_options_of_any_length(module_rig: Rig, words: int) -> None:
    # the options hold what would be port 7000 at a fixed offset
    options = b"\x94\x04\x00\x00" + struct.pack("!HH", BEAT, BEAT) * ((words - 1) or 0)
    frame = ether(0x0800, ip4(6, tcp_header(40000, 9001), options=options[: 4 * words]))
    got = module_rig.verdict(frame)
    assert got == (BULK, Code.PORT), f"{words} words: got {got}, want bulk by port"


@pytest.mark.parametrize("ihl", range(5))
def test_c04_a_header_length_below_five_is_malformed_and_passes(module_rig: Rig, ihl: int) -> None:
    frame = ether(0x0800, ip4(6, tcp_header(40000, BEAT), ihl=ihl))
    got = module_rig.verdict(frame)
    assert got == (NORMAL, Code.MALFORMED), f"IHL {ihl}: got {got}, want malformed"
    before = module_rig.reason(Code.MALFORMED)
    assert module_rig.send(frame).returned == UNSPEC
    assert module_rig.reason(Code.MALFORMED) == before + 1


def test_c04_options_that_the_frame_does_not_hold_are_truncated(module_rig: Rig) -> None:
    frame = ether(0x0800, ip4(6, tcp_header(40000, BEAT), ihl=15))[:54]
    got = module_rig.verdict(frame)
    assert got == (NORMAL, Code.TRUNCATED), f"got {got}, want truncated"


def test_a_total_length_below_the_header_is_malformed(module_rig: Rig) -> None:
    got = module_rig.verdict(ether(0x0800, ip4(6, tcp_header(40000, BEAT), total=19)))
    assert got == (NORMAL, Code.MALFORMED), f"got {got}, want malformed"


@pytest.mark.parametrize("version", [0, 5, 6, 15])
def test_a_version_that_contradicts_the_ethertype_is_malformed(
    module_rig: Rig, version: int
) -> None:
    packet = bytearray(ip4(6, tcp_header(40000, BEAT)))
    packet[0] = version << 4 | 5
    got = module_rig.verdict(ether(0x0800, bytes(packet)))
    assert got == (NORMAL, Code.MALFORMED), f"got {got}, want malformed"


def test_c19_ethernet_padding_is_not_taken_for_a_header(module_rig: Rig) -> None:
    # IPv4 without payload; the padding looks like UDP to port 7000
    padding = udp_header(40000, BEAT) + bytes(18)
    got = module_rig.verdict(ether(0x0800, ip4(17, padding, total=20)))
    assert got == (NORMAL, Code.TRUNCATED), f"got {got}, want truncated"
    # a bare ACK of 40 bytes in a frame of 60
    ack = ether(0x0800, ip4(6, tcp_header(40000, 9001), total=40) + b"AIRC\x00\x01")
    got = module_rig.verdict(ack)
    assert len(ack) == 60
    assert got == (BULK, Code.PORT), f"got {got}, want bulk by port"


@pytest.mark.parametrize(
    "frame",
    [
        tcp4(40000, BEAT, total=0, size=1400),
        tcp6(40000, BEAT, length=0, size=1400),
        ether(
            0x86DD,
            ip6(0, bytes.fromhex("0600c20400 0186a0") + tcp_header(40000, BEAT), length=0),
        ),
    ],
    ids=["tot_len 0", "payload length 0", "jumbo option"],
)
def test_c18_a_length_of_zero_means_offload_and_not_an_empty_packet(
    module_rig: Rig, frame: bytes
) -> None:
    got = module_rig.verdict(frame)
    assert got == (SIGNAL, Code.PORT), f"got {got}, want signal by port"


# --- IPv6


@pytest.mark.parametrize("next_header", [132, 135, 139, 140, 253, 254, 59, 50])
def test_c07_an_unknown_next_header_ends_the_walk(module_rig: Rig, next_header: int) -> None:
    payload = b"\x06\x00" + bytes(6) + tcp_header(40000, BEAT)
    got = module_rig.verdict(ether(0x86DD, ip6(next_header, payload)))
    want = (BULK, Code.PROTO) if next_header == 132 else (NORMAL, Code.DEFAULT)
    assert got == want, f"next header {next_header}: got {got}, want {want}"


@pytest.mark.parametrize("icv_bytes", [0, 4, 12, 16, 32])
def test_c09_tcp_behind_an_authentication_header_is_found(module_rig: Rig, icv_bytes: int) -> None:
    words = (12 + icv_bytes) // 4 - 2  # RFC 4302 2.2
    header = struct.pack("!BBHII", 6, words, 0, 1, 1) + b"\x58" * icv_bytes
    frame = ether(0x86DD, ip6(51, header + tcp_header(40000, BEAT, frames.SYN)))
    got = module_rig.verdict(frame)
    assert got == (SIGNAL, Code.PORT), f"ICV {icv_bytes}: got {got}, want signal by port"


@pytest.mark.parametrize("count", range(1, 8))
def test_up_to_six_extension_headers_are_walked(module_rig: Rig, count: int) -> None:
    kinds = [0, 43, 60, 51, 60, 43, 60][:count]
    packet = tcp_header(40000, BEAT)
    for kind, following in reversed(list(zip(kinds, [*kinds[1:], 6], strict=True))):
        body = struct.pack("!BB", following, 2 if kind == 51 else 1)
        packet = body + bytes(14) + packet
    got = module_rig.verdict(ether(0x86DD, ip6(kinds[0], packet)))
    want = (SIGNAL, Code.PORT) if count <= 6 else (NORMAL, Code.EXT_DEPTH)
    assert got == want, f"{count} headers: got {got}, want {want}"


def test_extension_headers_longer_than_the_packet_are_malformed(module_rig: Rig) -> None:
    extension = struct.pack("!BB", 6, 3) + bytes(30)
    frame = ether(0x86DD, ip6(60, extension + tcp_header(40000, BEAT), length=24))
    got = module_rig.verdict(frame)
    assert got == (NORMAL, Code.MALFORMED), f"got {got}, want malformed"


def test_an_atomic_fragment_is_classified_by_its_ports(module_rig: Rig) -> None:
    header = struct.pack("!BBHI", 17, 0, 0, 77)  # RFC 6946
    got = module_rig.verdict(ether(0x86DD, ip6(44, header + udp_header(40000, BEAT))))
    assert got == (SIGNAL, Code.PORT), f"got {got}, want signal by port"


# --- fragments


def _fragments(family: str, port: int, identification: int) -> list[bytes]:
    """Return the three fragments of one datagram to `port`."""
    pieces = [udp_header(40000, port, 3000) + bytes(1472), bytes(1480), bytes(48)]
    out = []
    for number, piece in enumerate(pieces):
        more, offset = number < 2, number * 185
        if family == "v4":
            word = more << 13 | offset
            out.append(ether(0x800, ip4(17, piece, fragment=word, identification=identification)))
        else:
            head = struct.pack("!BBHI", 17, 0, offset << 3 | more, identification)
            out.append(ether(0x86DD, ip6(44, head + piece)))
    return out


@pytest.mark.parametrize("family", ["v4", "v6"])
@pytest.mark.parametrize("way", [EGRESS, INGRESS])
def test_c06_later_fragments_follow_the_first(rig: Rig, family: str, way: Direction) -> None:
    got = [rig.classify(frame, way) for frame in _fragments(family, BEAT, 11)]
    want = [(SIGNAL, Code.PORT), (SIGNAL, Code.FRAGMENT), (SIGNAL, Code.FRAGMENT)]
    assert got == want, f"got {got}, want {want}"


@pytest.mark.parametrize("family", ["v4", "v6"])
def test_c06_a_fragment_before_its_first_gets_the_default_class(rig: Rig, family: str) -> None:
    first, second, third = _fragments(family, BEAT, 12)
    got = [rig.classify(frame) for frame in (third, first, second)]
    want = [(NORMAL, Code.FRAG_UNSEEN), (SIGNAL, Code.PORT), (SIGNAL, Code.FRAGMENT)]
    assert got == want, f"got {got}, want {want}"


def test_c06_fragments_of_another_datagram_or_direction_do_not_follow(rig: Rig) -> None:
    rig.classify(_fragments("v4", BEAT, 13)[0])
    got = [
        rig.classify(_fragments("v4", BEAT, 14)[1]),
        rig.classify(_fragments("v4", BEAT, 13)[1], INGRESS),
        rig.classify(_fragments("v4", BEAT, 13)[1]),
    ]
    want = [(NORMAL, Code.FRAG_UNSEEN)] * 2 + [(SIGNAL, Code.FRAGMENT)]
    assert got == want, f"got {got}, want {want}"


def test_a_first_fragment_with_only_the_ports_of_tcp_is_classified(module_rig: Rig) -> None:
    packet = ip4(6, tcp_header(40000, BEAT)[:8], fragment=0x2000)
    got = module_rig.verdict(ether(0x0800, packet))
    assert got == (SIGNAL, Code.PORT), f"got {got}, want signal by port"


# --- control and what is inside of tunnels


@pytest.mark.parametrize(
    ("frame", "want"),
    [
        (ether(0x0806, bytes(28)), (SIGNAL, Code.CONTROL)),
        (ether(0x88CC, bytes(28)), (SIGNAL, Code.CONTROL)),
        (ether(0x8809, bytes(28)), (SIGNAL, Code.CONTROL)),
        (ether(0x0026, b"\x42\x42\x03" + bytes(35)), (SIGNAL, Code.CONTROL)),
        (ether(0x05DC, bytes(28)), (SIGNAL, Code.CONTROL)),
        (ether(0x0600, bytes(28)), (NORMAL, Code.NOT_IP)),
        (ether(0x1234, bytes(28)), (NORMAL, Code.NOT_IP)),
        (ether(0x0800, ip4(2, bytes(8))), (SIGNAL, Code.CONTROL)),
        (ether(0x0800, ip4(89, bytes(8))), (SIGNAL, Code.CONTROL)),
        (ether(0x86DD, ip6(89, bytes(8))), (SIGNAL, Code.CONTROL)),
        (ether(0x0800, ip4(1, b"\x03\x04" + bytes(6))), (SIGNAL, Code.CONTROL)),
        (ether(0x0800, ip4(1, b"\x08\x00" + bytes(6))), (NORMAL, Code.DEFAULT)),
        (ether(0x86DD, ip6(58, b"\x02\x00" + bytes(6))), (SIGNAL, Code.CONTROL)),
        (ether(0x86DD, ip6(58, b"\x80\x00" + bytes(6))), (NORMAL, Code.DEFAULT)),
        # each ICMP belongs to its own IP: the other one is an unknown protocol
        (ether(0x86DD, ip6(1, b"\x03\x04" + bytes(6))), (NORMAL, Code.DEFAULT)),
        (ether(0x0800, ip4(58, b"\x02\x00" + bytes(6))), (NORMAL, Code.DEFAULT)),
        (udp4(68, 67), (SIGNAL, Code.CONTROL)),
        (udp6(546, 547), (SIGNAL, Code.CONTROL)),
        (tcp4(40000, 179), (SIGNAL, Code.CONTROL)),
        (udp4(40000, 3784), (SIGNAL, Code.CONTROL)),
    ],
    ids=[
        "arp",
        "lldp",
        "lacp",
        "stp",
        "llc-1500",
        "0600",
        "1234",
        "igmp",
        "ospf",
        "ospfv3",
        "unreachable",
        "echo",
        "v6-too-big",
        "v6-echo",
        "icmp-in-v6",
        "icmpv6-in-v4",
        "dhcp",
        "dhcpv6",
        "bgp",
        "bfd",
    ],
)
def test_network_and_host_control_is_in_the_control_class(
    module_rig: Rig, frame: bytes, want: tuple[int, Code]
) -> None:
    module_rig.clear()
    for direction in (EGRESS, INGRESS):
        got = module_rig.verdict(frame, direction)
        assert got == want, f"{direction}: got {got}, want {want}"


@pytest.mark.parametrize(
    ("frame", "want", "note"),
    [
        (udp4(40000, 4789), (NORMAL, Code.DEFAULT), Code.ENCAP_VXLAN),
        (udp6(40000, 6081), (NORMAL, Code.DEFAULT), Code.ENCAP_GENEVE),
        (
            ether(0x8864, b"\x11\x00\x00\x01\x00\x2a\x00\x21" + ip4(6, tcp_header(40000, BEAT))),
            (NORMAL, Code.NOT_IP),
            Code.ENCAP_PPPOE,
        ),
        (
            ether(0x8847, b"\x00\x01\x00\x40\x00\x01\x11\x40" + ip4(6, tcp_header(1, BEAT))),
            (NORMAL, Code.NOT_IP),
            Code.ENCAP_MPLS,
        ),
        (ether(0x0800, ip4(4, ip4(6, tcp_header(1, BEAT)))), (NORMAL, Code.DEFAULT), Code.ENCAP_IP),
        (
            ether(0x0800, ip4(41, ip6(6, tcp_header(1, BEAT)))),
            (NORMAL, Code.DEFAULT),
            Code.ENCAP_IP,
        ),
        (ether(0x86DD, ip6(47, bytes(4) + bytes(40))), (NORMAL, Code.DEFAULT), Code.ENCAP_IP),
    ],
    ids=["vxlan", "geneve", "pppoe", "mpls", "ipip", "6in4", "gre"],
)
def test_c20_tunnels_get_the_class_of_their_outer_header_and_are_counted(
    rig: Rig, frame: bytes, want: tuple[int, Code], note: Code
) -> None:
    assert Code(rig.explain(frame).note) is note
    before = rig.reason(note)
    for sent in (1, 2):  # the second one from the cache
        got = rig.classify(frame)
        assert got == want, f"packet {sent}: got {got}, want {want}"
        assert rig.reason(note) == before + sent, f"got {rig.reason(note)}, want {before + sent}"


# --- devices without a link layer


@pytest.fixture
def l3_rig(shared_rig: Rig) -> Iterator[Rig]:
    """Give the rig as on a tun device (C16: a real one runs in tests/netns).

    A test run takes skb->protocol from bytes 12 and 13 of what it is given. In a bare IP packet
    those are the source address: the first half of IPv4's, bytes 4 and 5 of IPv6's. Source
    addresses of 8.0.0.0/16 and ….….86dd:: therefore give the right protocol.
    """
    shared_rig.apply(POLICY, l3_only=True)
    yield shared_rig
    shared_rig.apply(POLICY)


def test_c16_bare_ip_packets_are_classified_on_a_device_without_link_layer(l3_rig: Rig) -> None:
    v4, v6 = "8.0.2.1", "2001:db8:86dd::1"
    got = [
        l3_rig.classify(ip4(6, tcp_header(40000, BEAT), source=v4)),
        l3_rig.classify(ip6(6, tcp_header(40000, 9001), source=v6)),
        l3_rig.classify(ip4(17, udp_header(8443, 1, 14) + bytes(6), source=v4)),
        l3_rig.classify(ip6(6, tcp_header(40000, 8443), source=v6), INGRESS),
    ]
    want = [(SIGNAL, Code.PORT), (BULK, Code.PORT), (NORMAL, Code.DEFAULT), (STREAM, Code.PORT)]
    assert got == want, f"got {got}, want {want}"
