# SPDX-License-Identifier: Apache-2.0
"""Whitelists in the kernel: longest prefix, precedence, full maps, replacement under load."""

from __future__ import annotations

import dataclasses
import ipaddress
import random
import struct
import threading
from collections.abc import Callable

import pytest

from shapeagent.kernel import abi, bpf, listbuild, lists
from shapeagent.kernel.maps import LIST_KINDS
from shapeagent.model.codes import Code
from shapeagent.model.errors import FailedError
from shapeagent.model.types import WhitelistEntry
from tests.bpf import frames
from tests.bpf.frames import packed, tcp4, tcp6
from tests.bpf.kit import (
    BULK,
    EGRESS,
    INGRESS,
    NORMAL,
    STREAM,
    Rig,
    make_entry,
    many_lengths,
)

V4_BITS = (0, 1, 7, 8, 9, 24, 25, 31, 32)
V6_BITS = (0, 1, 63, 64, 65, 127, 128)
DEFAULT = NORMAL, Code.DEFAULT
WHERE = pytest.mark.parametrize("filler", [[], many_lengths()], ids=["hashes", "tries"])


def is_hashed(rig: Rig) -> tuple[bool, bool]:
    """Return whether IPv4 and IPv6 prefixes in force lie in hashes."""
    flags = rig.control().list_flags
    return bool(flags & abi.SHP_F_NET4), bool(flags & abi.SHP_F_NET6)


def network_of(address: str, bits: int) -> tuple[bytes, int]:
    """Return the canonical network of an address."""
    network = ipaddress.ip_network(f"{address}/{bits}", strict=False)
    return network.network_address.packed, bits


def edges(end: tuple[bytes, int]) -> list[bytes]:
    """Return the first and last address of a network and the ones beside it."""
    network = ipaddress.ip_network(end)
    width = 8 * len(end[0])
    first, last = int(network.network_address), int(network.broadcast_address)
    near = (first - 1, first, (first + last) // 2, last, last + 1)
    return [n.to_bytes(width // 8, "big") for n in near if 0 <= n < 1 << width]


# --- C65


@pytest.mark.parametrize(
    ("base", "bits"),
    [("203.0.113.77", b) for b in V4_BITS] + [("2001:db8:5:6:89ab::77", b) for b in V6_BITS],
)
@pytest.mark.parametrize("end", ["source", "destination"])
@WHERE
def test_c65_a_prefix_covers_exactly_its_addresses(
    rig: Rig, base: str, bits: int, end: str, filler: list[WhitelistEntry]
) -> None:
    network = network_of(base, bits)
    entry = (
        make_entry("source", "stream", source=network)
        if end == "source"
        else make_entry("destination", "stream", destination=network)
    )
    rig.set_list([entry, *filler])
    exact = bits == 8 * len(network[0])
    if not exact:
        assert is_hashed(rig)[len(network[0]) == 16] == (not filler)
    build: Callable[..., bytes] = tcp4 if len(network[0]) == 4 else tcp6
    for address in edges(network):
        inside = ipaddress.ip_address(address) in ipaddress.ip_network(network)
        hit = STREAM, Code.HOST if exact else Code.PREFIX
        want = hit if inside else DEFAULT
        other = "destination" if end == "source" else "source"
        name = f"/{bits} {ipaddress.ip_address(address)}"
        got = rig.verdict(build(1, 2, **{end: address}))
        assert got == want, f"{name} egress: got {got}, want {want}"
        # the roles turn round for what arrives
        got = rig.verdict(build(2, 1, **{other: address}), INGRESS)
        assert got == want, f"{name} ingress: got {got}, want {want}"
        if inside and not exact:
            ref = rig.explain(build(1, 2, **{end: address})).ref
            assert ref == bits, f"{name}: got prefix /{ref}, want /{bits}"


@pytest.mark.parametrize(
    ("kind", "base", "lengths"),
    [("lpm4", "203.0.113.77", V4_BITS), ("lpm6", "2001:db8:5:6:89ab::77", V6_BITS)],
)
def test_c65_the_trie_itself_answers_as_a_python_model_does(
    rig: Rig, kind: str, base: str, lengths: tuple[int, ...]
) -> None:
    shape = LIST_KINDS[kind]
    fd = bpf.create_map("t_trie", shape.inner_shape(64))
    try:
        ends = [network_of(base, bits) for bits in lengths]
        for address, bits in ends:
            value = struct.pack("=QII", 0, bits % 16, bits)
            bpf.update(fd, lists.prefix_key(address, bits), value)
        width = 8 * len(packed(base))
        for address in {a for end in ends for a in edges(end)}:
            covering = [
                bits
                for network, bits in ends
                if ipaddress.ip_address(address) in ipaddress.ip_network((network, bits))
            ]
            raw = bpf.lookup(fd, lists.prefix_key(address, width), 16)
            assert raw is not None, "got a miss beside a /0"
            got = struct.unpack("=QII", raw)[2]
            want = max(covering)
            assert got == want, f"{ipaddress.ip_address(address)}: got /{got}, want /{want}"
    finally:
        bpf.close_all([fd])


@pytest.mark.parametrize(
    ("v4_bits", "v6_bits"),
    [(V4_BITS, V6_BITS), (V4_BITS[:4], V6_BITS[:4]), (V4_BITS[-5:], V6_BITS[-5:])],
    ids=["tries", "hashes-short", "hashes-long"],
)
def test_c65_the_longest_of_nested_prefixes_wins(
    rig: Rig, v4_bits: tuple[int, ...], v6_bits: tuple[int, ...]
) -> None:
    names = ("signal", "stream", "normal", "bulk")
    for base, lengths, build in (
        ("203.0.113.77", v4_bits, tcp4),
        ("2001:db8:5:6:89ab::77", v6_bits, tcp6),
    ):
        ends = [network_of(base, bits) for bits in lengths]
        entries = [
            make_entry("destination", names[n % 4], destination=end) for n, end in enumerate(ends)
        ]
        rig.set_list(entries)
        assert is_hashed(rig)[build is tcp6] == (lengths not in (V4_BITS, V6_BITS))
        for address in {a for end in ends for a in edges(end)}:
            covering = [
                n
                for n, end in enumerate(ends)
                if ipaddress.ip_address(address) in ipaddress.ip_network(end)
            ]
            got = rig.verdict(build(1, 2, destination=address))[0]
            want = max(covering) % 4 if covering else NORMAL
            assert got == want, f"{ipaddress.ip_address(address)}: got {got}, want {want}"


# --- precedence


def test_pair_then_remote_host_then_local_host_then_prefix(rig: Rig) -> None:
    host, peer = (packed(frames.HOST4), 32), (packed(frames.PEER4), 32)
    ranked = [
        (make_entry("pair", "stream", source=host, destination=peer), Code.PAIR),
        (make_entry("destination", "bulk", destination=peer), Code.HOST),
        (make_entry("source", "stream", source=host), Code.HOST),
        (make_entry("destination", "bulk", destination=(packed("198.51.100.0"), 24)), Code.PREFIX),
    ]
    for first in range(len(ranked)):
        rig.set_list([entry for entry, _ in ranked[first:]])
        got = rig.verdict(tcp4(1, 2))
        want = (STREAM if first in (0, 2) else BULK), ranked[first][1]
        assert got == want, f"from {first} on: got {got}, want {want}"


@WHERE
def test_of_two_prefixes_the_longer_wins_and_the_remote_one_on_a_tie(
    rig: Rig, filler: list[WhitelistEntry]
) -> None:
    for local_bits, remote_bits, want in ((24, 16, STREAM), (16, 24, BULK), (24, 24, BULK)):
        for build, host, peer, more in (
            (tcp4, frames.HOST4, frames.PEER4, 0),
            (tcp6, frames.HOST6, frames.PEER6, 24),
        ):
            rig.set_list(
                [
                    make_entry("source", "stream", source=network_of(host, local_bits + more)),
                    make_entry(
                        "destination", "bulk", destination=network_of(peer, remote_bits + more)
                    ),
                    *filler,
                ]
            )
            got = rig.verdict(build(1, 2))
            assert got == (want, Code.PREFIX), f"/{local_bits} /{remote_bits}: got {got}"


def test_a_pair_is_one_way_round_on_the_wire_and_both_ways_of_a_connection(rig: Rig) -> None:
    host, peer = (packed(frames.HOST4), 32), (packed(frames.PEER4), 32)
    rig.set_list([make_entry("pair", "bulk", source=host, destination=peer)])
    turned = tcp4(2, 1, source=frames.PEER4, destination=frames.HOST4)
    got = [
        rig.verdict(tcp4(1, 2), EGRESS),
        rig.verdict(turned, INGRESS),
        rig.verdict(turned, EGRESS),
        rig.verdict(tcp4(1, 2), INGRESS),
    ]
    want = [(BULK, Code.PAIR)] * 2 + [DEFAULT] * 2
    assert got == want, f"got {got}, want {want}"


def test_removing_one_role_of_a_host_leaves_the_other(rig: Rig) -> None:
    end = (packed(frames.PEER4), 32)
    rig.set_list([make_entry("either", "stream", destination=end)])
    rig.data.remove_entry(make_entry("destination", "stream", destination=end))
    got = [
        rig.verdict(tcp4(1, 2)),
        rig.verdict(tcp4(1, 2, source=frames.PEER4, destination=frames.HOST4)),
    ]
    assert got == [DEFAULT, (STREAM, Code.HOST)], f"got {got}, want only the local role left"


@WHERE
@pytest.mark.parametrize(("base", "bits"), [(frames.PEER4, 24), (frames.PEER6, 64)])
def test_removing_one_role_of_a_prefix_leaves_the_other(
    rig: Rig, base: str, bits: int, filler: list[WhitelistEntry]
) -> None:
    end = network_of(base, bits)
    build, host = (tcp4, frames.HOST4) if bits == 24 else (tcp6, frames.HOST6)
    rig.set_list([make_entry("either", "stream", destination=end), *filler])
    rig.data.remove_entry(make_entry("destination", "stream", destination=end))
    got = [rig.verdict(build(1, 2)), rig.verdict(build(1, 2, source=base, destination=host))]
    assert got == [DEFAULT, (STREAM, Code.PREFIX)], f"got {got}, want only the local role left"
    rig.data.remove_entry(make_entry("source", "stream", source=end))
    got = [rig.verdict(build(1, 2)), rig.verdict(build(1, 2, source=base, destination=host))]
    assert got == [DEFAULT, DEFAULT], f"got {got}, want neither role left"


# --- few prefix lengths: hashes


@pytest.mark.parametrize("seed", range(3))
def test_hashes_and_tries_answer_alike(rig: Rig, seed: int) -> None:
    pick = random.Random(seed)
    bases = {4: "10.1.0.0", 16: "2001:db8::"}
    lengths = {4: (23, 26, 30), 16: (119, 122, 126)}

    def address(size: int) -> bytes:
        return packed(bases[size])[:-2] + pick.randrange(1 << 12).to_bytes(2, "big")

    entries = []
    for _ in range(300):
        size = pick.choice((4, 16))
        end = network_of(str(ipaddress.ip_address(address(size))), pick.choice(lengths[size]))
        role = pick.choice(("source", "destination"))
        name, over = pick.choice(("signal", "stream", "bulk")), pick.choice((None, None, 1.0))
        entries.append(
            make_entry("source", name, source=end, expires_unix_s=over)
            if role == "source"
            else make_entry("destination", name, destination=end, expires_unix_s=over)
        )
    asked = []
    for _ in range(300):
        asked.append(tcp4(1, 2, source=address(4), destination=address(4)))
        asked.append(tcp6(1, 2, source=address(16), destination=address(16)))
    past = rig.clock.read() - 1
    answers = []
    for filler in ([], many_lengths()):
        rig.set_list([*entries, *filler], lambda _when: past)
        assert is_hashed(rig) == ((not filler,) * 2)
        answers.append([rig.explain(frame) for frame in asked])
    assert answers[0] == answers[1]
    refs = {answer.ref for answer in answers[0] if answer.code == Code.PREFIX}
    assert refs == {*lengths[4], *lengths[16]}, f"got answers by {refs} only"


def test_each_family_has_hashes_or_tries_of_its_own(rig: Rig) -> None:
    nets = [
        make_entry("destination", "stream", destination=network_of(frames.PEER4, 24)),
        make_entry("destination", "stream", destination=network_of(frames.PEER6, 64)),
    ]
    many4 = [e for e in many_lengths() if e.destination and len(e.destination[0]) == 4]
    many6 = [e for e in many_lengths() if e not in many4]
    for filler, want in (
        ([], (True, True)),
        (many4, (False, True)),
        (many6, (True, False)),
        ([*many4, *many6], (False, False)),
        (many4[1:], (False, True)),  # with the /24 again five lengths
        (many4[2:], (True, True)),
    ):
        rig.set_list([*nets, *filler])
        assert is_hashed(rig) == want, f"got {is_hashed(rig)}, want {want}"
        got = rig.verdict(tcp4(1, 2)), rig.verdict(tcp6(1, 2))
        assert got == ((STREAM, Code.PREFIX),) * 2, f"{want}: got {got}"


@pytest.mark.parametrize("v6", [False, True])
def test_prefixes_added_in_place_lie_where_the_others_are(rig: Rig, v6: bool) -> None:
    base, other, bits = (frames.PEER6, "fd00::", 64) if v6 else (frames.PEER4, "10.9.9.0", 24)
    build: Callable[..., bytes] = tcp6 if v6 else tcp4
    away = "fd01::1" if v6 else "10.8.8.8"
    third = network_of("fd02::" if v6 else "10.7.7.0", bits)
    for before in ([], [make_entry("destination", "bulk", destination=third)]):
        rig.set_list(before)
        generation = rig.control().lists_generation
        rig.add(make_entry("destination", "stream", destination=network_of(base, bits)))
        rig.add(make_entry("source", "bulk", source=network_of(other, bits)))
        assert is_hashed(rig)[v6] == bool(before)
        assert rig.control().lists_generation == generation + 2
        got = rig.explain(build(1, 2))
        assert (got.class_number, got.code, got.ref) == (STREAM, Code.PREFIX, bits), f"got {got}"
        got_local = rig.verdict(build(1, 2, source=other, destination=away))
        assert got_local == (BULK, Code.PREFIX), f"got {got_local}, want bulk by the local end"


def test_only_many_prefixes_of_few_lengths_lie_in_hashes(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lists, "NETS_MIN_PREFIXES_PER_LENGTH", 100)
    peer = make_entry("destination", "stream", destination=network_of(frames.PEER4, 24))
    more = [
        make_entry("destination", "bulk", destination=(bytes((11, n >> 8, n & 255, 0)), 24 + n % 4))
        for n in range(400)
    ]
    for entries, want in (
        ([peer, *more[0:396:4]], True),  # 100 of one length
        ([peer, *more[0:392:4]], False),
        ([peer, *more[:399]], True),  # 400 of four
        ([peer, *more[:398]], False),
    ):
        rig.set_list(entries)
        got = is_hashed(rig)[0], rig.verdict(tcp4(1, 2)), rig.verdict(tcp6(1, 2))
        assert got == (want, (STREAM, Code.PREFIX), DEFAULT), f"{len(entries)}: got {got}"


@pytest.mark.parametrize("v6", [False, True])
@pytest.mark.parametrize("known", [1, 4])
def test_a_length_that_hashes_do_not_have_is_refused_in_place_and_taken_as_a_list(
    rig: Rig, v6: bool, known: int
) -> None:
    base, lengths = (frames.PEER6, (48, 56, 64, 72)) if v6 else (frames.PEER4, (8, 9, 16, 17))
    build: Callable[..., bytes] = tcp6 if v6 else tcp4
    entries = [
        make_entry("destination", "stream", destination=network_of(base, bits))
        for bits in lengths[:known]
    ]
    rig.set_list(entries)
    control, before = rig.control(), rig.explain(build(1, 2))
    longer = make_entry("destination", "bulk", destination=network_of(base, 100 if v6 else 28))
    with pytest.raises(FailedError) as caught:
        rig.add(longer)
    assert caught.value.reference == "map-full", f"got {caught.value.reference}, want map-full"
    assert rig.control() == control, "got the control word changed"
    assert rig.explain(build(1, 2)) == before, "got another answer"
    rig.data.remove_entry(longer)  # not there: nothing happens
    assert rig.explain(build(1, 2)) == before, "got another answer"
    rig.set_list([*entries, longer])
    assert is_hashed(rig)[v6] == (known < 4), f"got {is_hashed(rig)}"
    got = rig.verdict(build(1, 2))
    assert got == (BULK, Code.PREFIX), f"got {got}, want bulk by the longer prefix"
    rig.data.remove_entry(longer)
    assert rig.explain(build(1, 2)) == before, "got another answer than before"
    other = make_entry("destination", "bulk", destination=network_of(base, 90 if v6 else 20))
    if known == 4:  # a trie takes any length
        rig.add(other)
        got = rig.verdict(build(1, 2))
        assert got == (BULK, Code.PREFIX), f"got {got}, want bulk by the longer prefix"


# --- full maps (C66)


@pytest.mark.parametrize(
    ("kind", "key_of"),
    [
        ("hosts4", lambda n: n.to_bytes(4, "big")),
        ("lpm4", lambda n: lists.prefix_key(n.to_bytes(4, "big"), 32)),
        ("lpm6", lambda n: lists.prefix_key(bytes(12) + n.to_bytes(4, "big"), 128)),
        ("pairs6", lambda n: bytes(28) + n.to_bytes(4, "big")),
    ],
)
def test_c66_a_full_map_is_called_full_whatever_its_errno(
    rig: Rig, kind: str, key_of: Callable[[int], bytes]
) -> None:
    shape = LIST_KINDS[kind]
    fd = bpf.create_map("t_full", shape.inner_shape(100))
    try:
        keys = b"".join(key_of(n) for n in range(150))
        with pytest.raises(FailedError) as batch:
            bpf.update_batch(
                fd,
                keys,
                bytes(150 * shape.value_bytes),
                150,
                key_bytes=shape.key_bytes,
                value_bytes=shape.value_bytes,
            )
        with pytest.raises(FailedError) as single:
            bpf.update(fd, key_of(500), bytes(shape.value_bytes))
    finally:
        bpf.close_all([fd])
    got = batch.value.reference, single.value.reference
    assert got == ("map-full", "map-full"), f"got {got}, want map-full"
    assert "full" in batch.value.message


def test_c66_100000_entries_into_a_trie_of_65536_are_refused_as_full(rig: Rig) -> None:
    shape = LIST_KINDS["lpm4"]
    fd = bpf.create_map("t_full", shape.inner_shape(65_536))
    try:
        keys = b"".join(struct.pack("<I", 32) + n.to_bytes(4, "big") for n in range(100_000))
        with pytest.raises(FailedError, match="full"):
            bpf.update_batch(fd, keys, bytes(1_600_000), 100_000, key_bytes=8, value_bytes=16)
    finally:
        bpf.close_all([fd])


@pytest.mark.parametrize("match", ["destination", "source", "either"])
@pytest.mark.parametrize(
    ("bits", "filler"),
    [
        (24, []),
        (24, [make_entry("either", "signal", destination=(packed("10.77.0.0"), 24))]),
        (32, []),
    ],
    ids=["trie", "nets", "hosts"],
)
def test_c66_an_entry_too_many_in_place_changes_nothing(
    rig: Rig,
    monkeypatch: pytest.MonkeyPatch,
    match: str,
    bits: int,
    filler: list[WhitelistEntry],
) -> None:
    # a list made from here on has room for one entry in place
    monkeypatch.setattr(lists, "capacity_for", lambda count: count + (count != 0) or 1)
    rig.set_list(filler)
    first = make_entry("destination", "bulk", destination=network_of("203.0.113.5", bits))
    rig.add(first)
    control = rig.control()
    end = network_of(frames.PEER4, bits)
    second = (
        make_entry("source", "stream", source=end)
        if match == "source"
        else make_entry(match, "stream", destination=end)
    )
    if match == "source" and bits == 24:
        rig.add(make_entry("source", "bulk", source=network_of("203.0.113.5", bits)))
        control = rig.control()
    with pytest.raises(FailedError) as caught:
        rig.add(second)
    assert caught.value.reference == "map-full", f"got {caught.value.reference}, want map-full"
    assert rig.control() == control, "got the control word changed"
    nets = abi.SHP_F_NET4 | abi.SHP_F_NET6
    every = lists.ALL_FLAGS & ~nets | control.list_flags & nets
    rig.data.write_control(dataclasses.replace(control, list_flags=every))
    got = [
        rig.verdict(tcp4(1, 2)),
        rig.verdict(tcp4(1, 2, source=frames.PEER4, destination=frames.HOST4)),
        rig.verdict(tcp4(1, 2, destination="203.0.113.5"))[0],
    ]
    assert got == [DEFAULT, DEFAULT, BULK], f"got {got}, want the list as before"


@pytest.mark.parametrize("way", ["one entry too many", "batch fails half way"])
def test_c66_a_list_that_does_not_fit_leaves_the_old_one_in_force(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    peer = (packed(frames.PEER4), 32)
    rig.set_list([make_entry("destination", "stream", destination=peer)])
    control = rig.control()
    many = [
        make_entry("destination", "bulk", destination=(packed(frames.PEER4), 32)),
        *(
            make_entry("destination", "bulk", destination=(bytes((10, 0, n, 0)), 24))
            for n in range(20)
        ),
    ]
    if way == "one entry too many":
        monkeypatch.setattr(lists, "MAX_ENTRIES", 19)
    else:
        monkeypatch.setattr(lists, "capacity_for", lambda count: max(1, count // 2))
    with pytest.raises(FailedError) as caught:
        rig.set_list(many)
    assert caught.value.reference == "map-full"
    monkeypatch.undo()
    assert rig.control() == control, "got the control word changed"
    got = rig.verdict(tcp4(1, 2)), rig.verdict(tcp4(1, 2, destination="10.0.3.1"))
    assert got == ((STREAM, Code.HOST), DEFAULT), f"got {got}, want the old list"
    rig.set_list(many)
    got = rig.verdict(tcp4(1, 2)), rig.verdict(tcp4(1, 2, destination="10.0.3.1"))
    assert got == ((BULK, Code.HOST), (BULK, Code.PREFIX)), f"got {got}, want the new list"


# --- replacement under load (C69)


def test_c69_no_packet_loses_its_class_while_lists_are_replaced(rig: Rig) -> None:
    others = [
        make_entry("destination", "bulk", destination=(struct.pack("!I", 0x0B000000 + n), 32))
        for n in range(10_000)
    ]
    peer, peer6 = (packed(frames.PEER4), 32), (packed(frames.PEER6), 128)
    # in each list, by another kind: host, prefix in a hash, in a trie, pair
    variants: list[list[WhitelistEntry]] = [
        [
            make_entry("destination", "stream", destination=peer),
            make_entry("destination", "stream", destination=peer6),
            *others,
        ],
        [
            make_entry("destination", "stream", destination=network_of(frames.PEER4, 24)),
            make_entry("destination", "stream", destination=network_of(frames.PEER6, 64)),
            *others[:5000],
        ],
        [
            make_entry("destination", "stream", destination=network_of(frames.PEER4, 24)),
            make_entry("destination", "stream", destination=network_of(frames.PEER6, 64)),
            *many_lengths(),
        ],
        [
            make_entry("pair", "stream", source=(packed(frames.HOST4), 32), destination=peer),
            make_entry("either", "stream", destination=peer6),
        ],
    ]
    numbers = {c.name: c.number for c in rig.policy.classes}
    tables = [listbuild.build_tables(entries, numbers, rig.expiry) for entries in variants]
    rig.data.replace_lists(tables[0])
    cached4, cached6 = tcp4(1, 2), tcp6(1, 2)
    before = rig.totals()
    sent, wrong = 0, []
    stop = threading.Event()

    def probe() -> None:
        nonlocal sent
        while not stop.is_set():
            rig.send(cached4)
            rig.send(cached6)
            for frame in (tcp4(sent & 0x7FF, 5), tcp6(sent & 0x7FF, 5)):
                got = rig.verdict(frame)
                if got[0] != STREAM:
                    wrong.append(got)
            sent += 2

    prober = threading.Thread(target=probe)
    prober.start()
    try:
        for number in range(1, 31):
            rig.data.replace_lists(tables[number % len(tables)])
    finally:
        stop.set()
        prober.join(timeout=10)
    grown = {key: n - before[key] for key, n in rig.totals().items() if n != before[key]}
    assert sent > 500, f"got only {sent} probes"
    assert not wrong, f"got {len(wrong)} of {sent} explained as {set(wrong)}, want stream"
    assert grown.get(STREAM) == sent, f"got {grown}, want {sent} in stream"
    assert NORMAL not in grown, f"got {grown}, want none in the default class"


def test_c69_old_lists_are_given_back_to_the_kernel(rig: Rig) -> None:
    rig.set_list([make_entry("destination", "stream", destination=(packed(frames.PEER4), 32))])
    raw = bpf.lookup(rig.maps["hosts4"], rig.control().active_lists.to_bytes(4, "little"), 4)
    assert raw is not None
    old = int.from_bytes(raw, "little")
    rig.set_list([])

    def is_freed() -> bool:
        try:
            fd = bpf.map_by_id(old)
        except FileNotFoundError:
            return True
        bpf.close_all([fd])
        return False

    rig.wait(is_freed, f"inner map {old} freed")
