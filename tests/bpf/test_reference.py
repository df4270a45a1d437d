# SPDX-License-Identifier: Apache-2.0
"""Random packets, rules and lists: the kernel's verdict against the reference classifier's."""

from __future__ import annotations

import dataclasses
import random
import struct
from collections.abc import Mapping

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shapeagent.kernel import abi, bpf
from shapeagent.model.codes import Code
from shapeagent.model.types import (
    Direction,
    Match,
    PortSide,
    Rule,
    RuleKind,
    WhitelistEntry,
)
from tests.bpf import reference
from tests.bpf.frames import ether, ip4, ip6, tcp_header, udp_header
from tests.bpf.kit import (
    CLASSES,
    EGRESS,
    FIELD_RULES,
    INGRESS,
    POLICY,
    Rig,
    make_entry,
    make_policy,
    many_lengths,
)

SEED = 20_260_101
_LEAST = {0x0800: 34, 0x86DD: 54}  # of a test run, by ethertype (bpf-facts row 11)
_PORTS = (7000, 8443, 9000, 9099, 9100, 8999, 67, 546, 179, 3784, 319, 40000, 53, 4789, 0, 65535)
_PROTOCOLS = (6, 6, 6, 17, 17, 1, 58, 2, 89, 132, 136, 47, 4, 41, 50, 255)
_V4 = tuple(bytes((10, a, b, c)) for a in (0, 1, 128) for b in (0, 64) for c in (1, 2, 200))
_V6 = tuple(
    bytes.fromhex("20010db8") + bytes((0, a, 0, b)) + bytes(7) + bytes((c,))
    for a in (0, 1, 128)
    for b in (0, 1)
    for c in (1, 2)
)
_V4 += tuple(bytes((172, 16, 0, c)) for c in range(6))  # in no prefix
_V6 += tuple(bytes.fromhex("fd00") + bytes(13) + bytes((c,)) for c in range(4))


def ask(rig: Rig, frame: bytes, direction: Direction, *, mark: int = 0) -> tuple[int, Code]:
    """Return the explaining program's (class, code), also of frames too short for a test run."""
    least = _LEAST.get(int.from_bytes(frame[12:14], "big"), 14)
    if len(frame) >= least:
        return rig.verdict(frame, direction, mark=mark)
    done = rig.cut(frame + bytes(least - len(frame)), len(frame), direction, explain=True)
    return done.cb[0], Code(done.cb[1] & 0xFF)


class Packets:
    """Random frames: mostly sound, some with headers that lie, are cut or are noise."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def frame(self) -> bytes:
        """Return a frame of at least 14 bytes."""
        pick = self.random
        is_v6 = pick.random() < 0.5
        packet = self._v6() if is_v6 else self._v4()
        ethertype = 0x86DD if is_v6 else 0x0800
        if pick.random() < 0.04:
            ethertype = pick.choice((0x0800, 0x86DD, 0x0806, 0x8847, 0x8864, 0x88CC, 0x22, 0x600))
        tags = tuple(
            pick.choices((0x8100, 0x88A8, 0x9100), k=pick.choice((0, 0, 0, 0, 1, 1, 2, 3)))
        )
        frame = ether(ethertype, packet, tags)
        kind = pick.random()
        if kind < 0.15:
            frame = frame[: pick.randint(14, len(frame))]
        elif kind < 0.25:
            mutant = bytearray(frame)
            for _ in range(pick.randint(1, 4)):
                mutant[pick.randrange(12, min(len(mutant), 90))] = pick.randrange(256)
            frame = bytes(mutant)
        elif kind < 0.27:
            frame = frame[:14] + pick.randbytes(pick.randint(0, 80))
        elif kind < 0.35:
            frame += bytes(pick.randint(1, 20))
        return frame

    def _transport(self, protocol: int) -> bytes:
        pick = self.random
        ports = pick.choice(_PORTS), pick.choice(_PORTS)
        if protocol == 6:
            return tcp_header(*ports, pick.choice((2, 16, 18, 17, 4))) + bytes(pick.randint(0, 9))
        if protocol in (17, 136):
            return udp_header(*ports) + bytes(pick.randint(0, 9))
        return bytes((pick.choice((0, 1, 3, 8, 11, 12, 128, 133, 135, 143)), 0)) + bytes(10)

    def _v4(self) -> bytes:
        pick = self.random
        protocol = pick.choice(_PROTOCOLS)
        fragment = pick.choice((0, 0, 0, 0, 0x4000, 0x2000, 0x2001, 0x0010, 0x1FFF, 0x8000))
        return ip4(
            protocol,
            self._transport(protocol),
            source=pick.choice(_V4),
            destination=pick.choice(_V4),
            tos=pick.choice((0, 0, 0x20, 0x21, 0xB8, 0xFF)),
            options=b"\x01" * (4 * pick.choice((0, 0, 0, 1, 2, 10))),
            identification=pick.randrange(65536),
            fragment=fragment,
            total=pick.choice((None,) * 12 + (0, 19, 20, 24, 65535)),
            ihl=pick.choice((None,) * 12 + (0, 4, 6, 15)),
        )

    def _v6(self) -> bytes:
        pick = self.random
        protocol = pick.choice(_PROTOCOLS)
        packet = self._transport(protocol)
        following = protocol
        for _ in range(pick.choice((0, 0, 0, 1, 1, 2, 3, 6, 7))):
            kind = pick.choice((0, 43, 60, 51, 44))
            if kind == 44:
                word = pick.choice((0, 6, 1, 8, 9, 0xFFF8))
                body = struct.pack("!BBHI", following, pick.randrange(4), word, pick.randrange(99))
            else:
                units = pick.choice((0, 0, 1, 2))
                size = (units + 2) * 4 if kind == 51 else (units + 1) * 8
                size = max(8, size)
                body = struct.pack("!BB", following, units) + bytes(size - 2)
            packet, following = body + packet, kind
        return ip6(
            following,
            packet,
            source=pick.choice(_V6),
            destination=pick.choice(_V6),
            traffic_class=pick.choice((0, 0, 0x20, 0x21, 0xB8)),
            length=pick.choice((None,) * 12 + (0, 4, 8, 40, 65535)),
        )


class Whitelists:
    """A random whitelist over the addresses above, with entries that are over already."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def entries(
        self, count: int, *, shortest: int, few_lengths: bool = False
    ) -> list[tuple[WhitelistEntry, bool]]:
        """Return distinct entries and whether each is expired; every third is.

        No prefix is shorter than `shortest`; few_lengths: of each family at most four lengths,
        that the kernel keeps in hashes.
        """
        found: dict[object, tuple[WhitelistEntry, bool]] = {}
        pick = self.random
        for _ in range(count):
            family = pick.choice((_V4, _V6))
            width = 8 * len(family[0])
            match = Match(pick.choice(("source", "destination", "either", "pair", "pair")))
            expired = pick.random() < 0.33
            when = 1.0 if expired else pick.choice((None, 4e9))
            name = pick.choice(CLASSES)
            address = pick.choice(family[:12])
            if match is Match.PAIR:
                other = pick.choice(family)
                entry = make_entry(
                    "pair",
                    name,
                    source=(address, width),
                    destination=(other, width),
                    expires_unix_s=when,
                )
            else:
                lengths: tuple[int, ...] = (shortest, 1, 8, 9, 16, 24, 31, width - 1)
                if few_lengths:
                    lengths = (shortest, 8, 9 if width == 32 else 48, width - 1)
                bits = pick.choice((*lengths, width, width, width))
                whole = int.from_bytes(address, "big") >> (width - bits) << (width - bits)
                end = whole.to_bytes(width // 8, "big"), bits
                if match is Match.SOURCE:
                    entry = make_entry("source", name, source=end, expires_unix_s=when)
                else:
                    entry = make_entry(match, name, destination=end, expires_unix_s=when)
            for role in _roles(entry):
                if role in found:
                    break
            else:
                for role in _roles(entry):
                    found[role] = entry, expired
        unique = {id(entry): (entry, expired) for entry, expired in found.values()}
        return list(unique.values())


def _roles(entry: WhitelistEntry) -> list[object]:
    """Return the keys that an entry takes: one role of one address has one owner."""
    if entry.match is Match.PAIR:
        return [("pair", entry.source, entry.destination)]
    end = entry.destination or entry.source
    sides = {Match.SOURCE: "s", Match.DESTINATION: "d", Match.EITHER: "sd"}[entry.match]
    return [(side, end) for side in sides]


def _manual(rig: Rig, seed: int) -> Mapping[bytes, int]:
    """Fill the manual map at random; return it."""
    pick = random.Random(seed)
    found = {}
    for address in pick.sample(_V4, 6) + pick.sample(_V6, 4) + [_V4[-1], _V6[-1]]:
        key = address if len(address) == 16 else bytes(10) + b"\xff\xff" + address
        found[key] = pick.randrange(4)
        bpf.update(rig.maps["manual"], key, struct.pack("=IIQ", found[key], 0, 0))
    return found


@pytest.mark.parametrize("few_lengths", [False, True], ids=["tries", "hashes"])
@pytest.mark.parametrize("part", range(4))
def test_random_packets_get_the_class_and_reason_of_the_reference_classifier(
    rig: Rig, part: int, few_lengths: bool
) -> None:
    rig.apply(POLICY + (FIELD_RULES if part % 2 else ""))
    entries = Whitelists(SEED + part).entries(
        70, shortest=0 if part == 3 else 1, few_lengths=few_lengths
    )
    if not few_lengths:
        entries += [(entry, False) for entry in many_lengths()]
    now = rig.clock.read()
    # one jiffy ago, or far ahead; None never gets here
    rig.set_list(
        [entry for entry, _ in entries], lambda when: now - 1 if when == 1 else now + 10**9
    )
    lists = reference.Lists(entries, _manual(rig, SEED + part))
    for address_bytes, flag in ((4, abi.SHP_F_NET4), (16, abi.SHP_F_NET6)):
        hashed = len(lists.lengths(address_bytes)) <= reference.HASHED_LENGTHS
        assert hashed == few_lengths, f"got {lists.lengths(address_bytes)}"
        assert bool(rig.control().list_flags & flag) == hashed
    packets = Packets(SEED + part)
    codes = set()
    for number in range(1500):
        frame = packets.frame()
        mark = packets.random.choice((0, 0, 0x15, 0x20)) if part % 2 else 0
        if len(frame) < 54:
            mark = 0  # the wrapper does not carry one
        direction = EGRESS if number % 2 else INGRESS
        want = reference.classify(frame, direction, rig.policy, rig.tables, lists, mark=mark)
        got = ask(rig, frame, direction, mark=mark)
        codes.add(got[1])
        assert got == want, f"packet {number} {frame.hex()}: got {got}, want {want}"
    # the packets reached nearly every branch
    wanted = set(Code) - {c for c in Code if c.is_note} - {Code.CGROUP, Code.MOVED, Code.OVERFLOW}
    wanted -= {Code.FRAGMENT} | (set() if part % 2 else {Code.MARK, Code.DSCP})
    wanted -= {Code.DEFAULT, Code.MANUAL} if part == 3 else set()  # a /0 may take all that
    assert wanted <= codes, f"got no packet with {wanted - codes}"


def test_the_shaping_program_counts_what_the_reference_classifier_says(rig: Rig) -> None:
    packets = Packets(SEED + 9)
    seen: dict[tuple[object, ...], int] = {}
    for number in range(400):
        frame = packets.frame()
        if len(frame) < 54:
            continue
        direction = EGRESS if number % 2 else INGRESS
        want = reference.classify(frame, direction, rig.policy, rig.tables)
        if want[1] is Code.FRAG_UNSEEN:
            key = _fragment_key(frame, direction)
            want = (seen[key], Code.FRAGMENT) if key in seen else want
        got = rig.classify(frame, direction)
        assert got == want, f"packet {number} {frame.hex()}: got {got}, want {want}"
        try:
            parsed = reference.parse(frame)
        except reference.Ends:
            continue
        if parsed.fragment == "first":
            seen[_fragment_key(frame, direction)] = got[0]


def _fragment_key(frame: bytes, direction: Direction) -> tuple[object, ...]:
    found = reference.parse(frame)
    protocol = found.protocol if found.version == 4 else 0
    return direction, found.source, found.destination, found.identification, protocol


# --- rule tables


@st.composite
def rules(draw: st.DrawFn) -> Rule:
    """Draw one rule over few values, so that rules meet."""
    kind = draw(st.sampled_from((RuleKind.PORT,) * 3 + (RuleKind.DSCP, RuleKind.MARK)))
    kind = draw(st.sampled_from((kind, kind, RuleKind.PROTOCOL)))
    rule = Rule(
        0,
        "r",
        draw(st.sampled_from(CLASSES)),
        kind,
        direction=draw(st.sampled_from((None, None, EGRESS, INGRESS))),
    )
    if kind is RuleKind.PORT:
        first = draw(st.sampled_from((0, 1, 7000, 8443, 65535)))
        last = min(65535, first + draw(st.integers(0, 3)))
        return dataclasses.replace(
            rule,
            protocols=draw(st.sampled_from(((6,), (17,), (6, 17)))),
            side=draw(st.sampled_from(PortSide)),
            ports=((first, last),),
            protected=draw(st.booleans()) and draw(st.booleans()),
        )
    if kind is RuleKind.DSCP:
        return dataclasses.replace(rule, dscp=(draw(st.sampled_from((0, 8, 46, 63))),))
    if kind is RuleKind.MARK:
        mask = draw(st.sampled_from((0x0F, 0xF0, 0xFFFFFFFF)))
        value = draw(st.sampled_from((0, 1, 0x10, 0x11))) & mask
        return dataclasses.replace(rule, mark_value=value, mark_mask=mask)
    return dataclasses.replace(rule, protocols=(draw(st.sampled_from((1, 6, 17, 132))),))


@settings(
    max_examples=15,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(drawn=st.lists(rules(), min_size=1, max_size=12), seed=st.integers(0, 1 << 16))
def test_any_rule_table_decides_as_policy_rules_decide(
    rig: Rig, drawn: list[Rule], seed: int
) -> None:
    marks = 0
    ranked: list[Rule] = []
    for rule in sorted(drawn, key=lambda r: not r.protected):  # protected rules rank first
        marks += rule.kind is RuleKind.MARK
        if rule.kind is not RuleKind.MARK or marks <= 8:
            ranked.append(dataclasses.replace(rule, number=len(ranked) + 1))
    rig.apply(dataclasses.replace(make_policy(), rules=tuple(ranked)))
    pick = random.Random(seed)
    for _ in range(60):
        protocol = pick.choice((6, 17, 132, 1))
        ports = pick.choices((0, 1, 2, 7000, 7003, 7004, 8443, 65535), k=2)
        body = tcp_header(*ports) if protocol == 6 else udp_header(*ports)
        if protocol == 1:
            body = b"\x08" + bytes(19)
        tos = pick.choice((0, 0, 32, 33, 184, 252))
        mark = pick.choice((0, 1, 0x10, 0x11, 0x1F))
        if pick.random() < 0.5:
            frame = ether(0x0800, ip4(protocol, body, tos=tos))
        else:
            frame = ether(0x86DD, ip6(protocol, body, traffic_class=tos))
        direction = pick.choice((EGRESS, INGRESS))
        want = reference.classify(frame, direction, rig.policy, rig.tables, mark=mark)
        got = rig.verdict(frame, direction, mark=mark)
        assert got == want, f"{frame.hex()} mark {mark:#x} {direction}: got {got}, want {want}"
