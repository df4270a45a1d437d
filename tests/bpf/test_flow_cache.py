# SPDX-License-Identifier: Apache-2.0
"""What the flow cache remembers, and when it has to look again."""

from __future__ import annotations

import dataclasses
import struct

import pytest

from shapeagent.kernel import abi, bpf, datapath
from shapeagent.model.codes import Code
from shapeagent.model.types import Direction, WhitelistEntry
from tests.bpf import frames
from tests.bpf.frames import ACK, SYN, SYN_ACK, ether, ip4, ip6, packed, tcp4, tcp6, udp4, udp6
from tests.bpf.kit import (
    BULK,
    EGRESS,
    FIELD_RULES,
    INGRESS,
    NORMAL,
    POLICY,
    SIGNAL,
    STREAM,
    Rig,
    flow_word,
    make_entry,
    many_lengths,
)

PEER = (packed(frames.PEER4), 32)
PEER6 = (packed(frames.PEER6), 128)
HOST_ENTRY = make_entry("destination", "stream", destination=PEER)
OTHER_HOST = make_entry("destination", "bulk", destination=(packed("203.0.113.9"), 32))
DEFAULT = NORMAL, Code.DEFAULT


def with_room(rig: Rig, *entries: WhitelistEntry) -> None:
    """Put lists of every IPv4 and IPv6 kind in force, none of which names the usual peers.

    Prefixes are of one length: /24 and /48.
    """
    filler = [
        make_entry("either", "bulk", destination=(packed("203.0.113.1"), 32)),
        make_entry("either", "bulk", destination=(packed("203.0.112.0"), 24)),
        make_entry("either", "bulk", destination=(packed("2001:db8:dead::1"), 128)),
        make_entry("either", "bulk", destination=(packed("2001:db8:dead::"), 48)),
        make_entry(
            "pair",
            "bulk",
            source=(packed("203.0.113.1"), 32),
            destination=(packed("203.0.113.2"), 32),
        ),
    ]
    rig.set_list([*filler, *entries])


def cached(rig: Rig, local: int = 40000, remote: int = 40001, protocol: int = 6) -> abi.Flow:
    """Return the cached flow; it must be there."""
    flow = rig.flow4(local, remote, protocol)
    assert flow is not None, f"got no cached flow {local} -> {remote}, want one"
    return flow


# --- what enters


def test_a_syn_is_classified_but_not_cached_and_the_next_packet_is(rig: Rig) -> None:
    got = rig.classify(tcp4(40000, 7000, flags=SYN))
    assert got == (SIGNAL, Code.PORT), f"got {got}, want signal by port"
    assert rig.flow4(40000, 7000) is None, "got the SYN cached, want it not"
    rig.classify(tcp4(40000, 7000, flags=ACK))
    got_word = flow_word(cached(rig, 40000, 7000))
    rule = next(r.number for r in rig.policy.rules if r.name == "beat")
    assert got_word == (SIGNAL, Code.PORT, rule), f"got {got_word}, want signal by rule {rule}"


@pytest.mark.parametrize("flags", [SYN_ACK, 0x04, 0x14], ids=["syn-ack", "rst", "rst-ack"])
def test_what_has_no_socket_yet_or_ends_a_flow_is_not_cached(rig: Rig, flags: int) -> None:
    rig.classify(tcp4(40000, 7000, flags=flags))
    assert rig.entries("flows4") == 0, "got an entry, want none: a cookie SYN-ACK has no owner"


@pytest.mark.parametrize("text", [POLICY, POLICY + FIELD_RULES], ids=["plain", "mark rules"])
def test_datagrams_are_cached_unless_a_rule_looks_at_mark_or_dscp(rig: Rig, text: str) -> None:
    rig.apply(text)
    for frame in (udp4(40000, 7000), udp6(40000, 7000)):
        rig.classify(frame)
    found = rig.entries("flows4"), rig.entries("flows6")
    want = (1, 1) if text == POLICY else (0, 0)
    assert found == want, f"got {found} flows, want {want}"


def test_datagrams_follow_their_mark_packet_by_packet_and_a_tcp_flow_does_not(rig: Rig) -> None:
    rig.apply(POLICY + FIELD_RULES)
    got = [rig.classify(udp4(1, 2), mark=mark) for mark in (0, 0x10, 0)]
    assert got == [DEFAULT, (STREAM, Code.MARK), DEFAULT], f"got {got}"
    got = [rig.classify(tcp4(1, 2), mark=mark) for mark in (0x10, 0, 0)]
    assert got == [(STREAM, Code.MARK)] * 3, f"got {got}, want the class of the first packet"


def test_both_directions_of_a_flow_have_entries_of_their_own(rig: Rig) -> None:
    rig.classify(tcp4(40000, 9001), EGRESS)
    back = tcp4(9001, 40000, source=frames.PEER4, destination=frames.HOST4)
    got = rig.classify(back, INGRESS)
    assert got == (BULK, Code.PORT), f"got {got}, want bulk by port: the ends turn round"
    assert rig.entries("flows4") == 2


def test_an_icmp_error_is_control_although_an_echo_between_the_ends_is_cached(rig: Rig) -> None:
    echo, error = (ether(0x0800, ip4(1, bytes((kind, 0)) + bytes(10))) for kind in (8, 3))
    got = [rig.classify(frame) for frame in (echo, error, echo)]
    assert got == [DEFAULT, (SIGNAL, Code.CONTROL), DEFAULT], f"v4: got {got}"
    echo6, error6 = (ether(0x86DD, ip6(58, bytes((kind, 0)) + bytes(10))) for kind in (128, 2))
    got = [rig.classify(frame) for frame in (echo6, error6, echo6)]
    assert got == [DEFAULT, (SIGNAL, Code.CONTROL), DEFAULT], f"v6: got {got}"


def test_an_echo_is_no_free_ride_behind_a_cached_icmp_error(rig: Rig) -> None:
    echo, error = (ether(0x0800, ip4(1, bytes((kind, 0)) + bytes(10))) for kind in (8, 3))
    got = [rig.classify(frame) for frame in (error, echo)]
    assert got == [(SIGNAL, Code.CONTROL), DEFAULT], f"got {got}, want the echo in the default"


# --- generation and epoch


def test_a_new_rule_set_is_asked_again_by_cached_flows(rig: Rig) -> None:
    assert rig.classify(tcp4(40000, 7000)) == (SIGNAL, Code.PORT)
    generation = rig.control().rules_generation
    rig.data.replace_rules(datapath.empty_rules())
    assert rig.control().rules_generation == generation + 1
    got = rig.classify(tcp4(40000, 7000))
    assert got == DEFAULT, f"got {got}, want the default class"
    assert rig.entries("flows4") == 1, "got another entry, want it refreshed in place"


@pytest.mark.parametrize("filler", [[], many_lengths()], ids=["hashes", "tries"])
@pytest.mark.parametrize("family", ["v4", "v6"])
def test_a_prefix_added_or_removed_is_seen_by_cached_flows(
    rig: Rig, family: str, filler: list[WhitelistEntry]
) -> None:
    frame = tcp4(1, 2) if family == "v4" else tcp6(1, 2)
    network = ("198.51.100.0", 24) if family == "v4" else ("2001:db8:ffff::", 48)
    entry = make_entry("destination", "bulk", destination=(packed(network[0]), network[1]))
    with_room(rig, *filler)
    assert rig.classify(frame) == DEFAULT
    generation = rig.control().lists_generation
    rig.add(entry)
    assert rig.control().lists_generation == generation + 1
    got = rig.classify(frame)
    assert got == (BULK, Code.PREFIX), f"got {got}, want bulk by prefix"
    rig.data.remove_entry(entry)
    got = rig.classify(frame)
    assert got == DEFAULT, f"got {got}, want the default class"


@pytest.mark.parametrize("family", ["v4", "v6"])
def test_a_single_host_changes_the_epoch_and_is_seen_by_default_flows(
    rig: Rig, family: str
) -> None:
    frame = tcp4(1, 2) if family == "v4" else tcp6(1, 2)
    end = PEER if family == "v4" else PEER6
    with_room(rig)
    assert rig.classify(frame) == DEFAULT
    before = rig.control()
    rig.add(make_entry("destination", "stream", destination=end))
    after = rig.control()
    assert after.lists_generation == before.lists_generation
    assert after.epoch == before.epoch + 1
    got = [rig.classify(frame), rig.classify(frame)]
    assert got == [(STREAM, Code.HOST)] * 2, f"got {got}, want stream by host"
    rig.add(make_entry("destination", "bulk", destination=end))
    got = [rig.classify(frame), rig.classify(frame)]
    assert got == [(BULK, Code.HOST)] * 2, f"changed: got {got}, want bulk by host"
    rig.data.remove_entry(make_entry("destination", "bulk", destination=end))
    got = [rig.classify(frame), rig.classify(frame)]
    assert got == [DEFAULT] * 2, f"removed: got {got}, want the default class"


def test_a_pair_changes_the_epoch_and_wins_over_the_host_that_was_cached(rig: Rig) -> None:
    with_room(rig, HOST_ENTRY)
    assert rig.classify(tcp4(1, 2)) == (STREAM, Code.HOST)
    pair = make_entry("pair", "bulk", source=(packed(frames.HOST4), 32), destination=PEER)
    rig.add(pair)
    assert rig.classify(tcp4(1, 2)) == (BULK, Code.PAIR)
    rig.data.remove_entry(pair)
    got = rig.classify(tcp4(1, 2))
    assert got == (STREAM, Code.HOST), f"got {got}, want the host again"


def test_a_new_host_wins_over_the_prefix_that_was_cached_and_gives_it_back(rig: Rig) -> None:
    prefix = make_entry("destination", "bulk", destination=(packed("198.51.100.0"), 24))
    with_room(rig, prefix)
    assert rig.classify(tcp4(1, 2)) == (BULK, Code.PREFIX)
    rig.add(OTHER_HOST)
    got = [rig.classify(tcp4(1, 2)), rig.classify(tcp4(1, 2))]
    assert got == [(BULK, Code.PREFIX)] * 2, f"another host: got {got}, want the prefix kept"
    rig.add(HOST_ENTRY)
    assert rig.classify(tcp4(1, 2)) == (STREAM, Code.HOST)
    rig.data.remove_entry(HOST_ENTRY)
    back = rig.classify(tcp4(1, 2)), flow_word(cached(rig, 1, 2))
    assert back == ((BULK, Code.PREFIX), (BULK, Code.PREFIX, 24)), f"got {back}, want the prefix"


def test_a_flow_decided_by_a_rule_does_not_age_with_the_epoch(rig: Rig) -> None:
    with_room(rig)
    assert rig.classify(tcp4(40000, 7000)) == (SIGNAL, Code.PORT)
    word = cached(rig, 40000, 7000).word
    rig.add(HOST_ENTRY)  # names the same peer: rules come before the whitelist
    got = rig.classify(tcp4(40000, 7000))
    assert got == (SIGNAL, Code.PORT), f"got {got}, want the rule"
    assert cached(rig, 40000, 7000).word == word, "got the entry rewritten, want it untouched"


def test_a_replaced_whitelist_asks_no_rule_about_a_running_flow_again(rig: Rig) -> None:
    """A TCP flow keeps the class that its first packet's DSCP gave it (no reordering)."""
    rig.apply(POLICY + FIELD_RULES)
    marked = rig.classify(tcp4(1, 2), mark=0x10)
    assert marked == (STREAM, Code.MARK)
    rig.set_list([OTHER_HOST])
    got = rig.classify(tcp4(1, 2), mark=0)
    assert got == (STREAM, Code.MARK), f"got {got}, want the class of the first packet"


def test_generation_and_epoch_wrap_around(rig: Rig) -> None:
    with_room(rig)
    last = dataclasses.replace(
        rig.control(),
        lists_generation=(1 << abi.SHP_LISTS_BITS) - 1,
        epoch=(1 << abi.SHP_EPOCH_BITS) - 1,
    )
    rig.data.write_control(last)
    assert rig.classify(tcp4(1, 2)) == DEFAULT
    rig.add(HOST_ENTRY)
    assert rig.control().epoch == 0, f"got {rig.control().epoch}, want 0"
    assert rig.classify(tcp4(1, 2)) == (STREAM, Code.HOST)
    prefix = make_entry("destination", "bulk", destination=(packed("198.51.100.0"), 24))
    rig.data.remove_entry(HOST_ENTRY)
    rig.add(prefix)
    assert rig.control().lists_generation == 0, f"got {rig.control()}, want generation 0"
    assert rig.classify(tcp4(1, 2)) == (BULK, Code.PREFIX)


# --- expiry

_KINDS = {
    "host": make_entry("destination", "stream", destination=PEER),
    "source host": make_entry("source", "stream", source=(packed(frames.HOST4), 32)),
    "prefix": make_entry("destination", "stream", destination=(packed("198.51.100.0"), 24)),
    "pair": make_entry("pair", "stream", source=(packed(frames.HOST4), 32), destination=PEER),
}


@pytest.mark.parametrize("kind", _KINDS)
@pytest.mark.parametrize("in_place", [True, False], ids=["added", "in the list"])
def test_an_entry_ends_for_cached_and_new_flows_when_its_time_is_over(
    rig: Rig, kind: str, in_place: bool
) -> None:
    entry = _KINDS[kind]
    ahead = max(3, rig.jiffies_per_s // 25)
    if in_place:
        with_room(rig)
        end = rig.clock.read() + ahead
        rig.add(entry, expires_jiffies=end)
    else:
        end = rig.clock.read() + 5 * ahead  # a replacement waits for grace periods
        timed = dataclasses.replace(entry, expires_unix_s=1.0)
        rig.set_list([timed], lambda _when: end)
    got = rig.classify(tcp4(1, 2))
    assert got[0] == STREAM, f"got {got}, want stream"
    assert cached(rig, 1, 2).expires_jiffies == end
    got = rig.classify(tcp4(1, 2))
    assert got[0] == STREAM or rig.clock.read() >= end, f"cached: got {got}, want stream"
    rig.wait(lambda: rig.clock.read() >= end, "expiry")
    got_both = rig.classify(tcp4(1, 2)), rig.classify(tcp4(3, 4))
    assert got_both == (DEFAULT, DEFAULT), f"got {got_both}, want the default class for both"


@pytest.mark.parametrize(
    ("bits", "filler"),
    [((30, 29, 28), []), ((30, 29), many_lengths())],  # a trie is asked three times
    ids=["hashes", "tries"],
)
def test_an_expired_prefix_does_not_hide_shorter_ones(
    rig: Rig, bits: tuple[int, ...], filler: list[WhitelistEntry]
) -> None:
    for family, base in (("v4", "198.51.100.4"), ("v6", "2001:db8:ffff::4")):
        width = 8 * len(packed(base))
        wide = width - 16
        entries = [
            make_entry(
                "destination", "bulk", destination=(packed(base), width - 32 + b), expires_unix_s=1
            )
            for b in bits
        ]
        whole = int.from_bytes(packed(base), "big") >> 16 << 16
        outer = make_entry(
            "destination", "stream", destination=(whole.to_bytes(width // 8, "big"), wide)
        )
        past = rig.clock.read() - 1
        rig.set_list([*entries, outer, *filler], lambda _when, past=past: past)  # type: ignore[misc]
        frame = tcp4(1, 2) if family == "v4" else tcp6(1, 2)
        got = rig.verdict(frame)
        assert got == (STREAM, Code.PREFIX), f"{family}: got {got}, want the /{wide}"
        assert rig.explain(frame).ref == wide, f"got /{rig.explain(frame).ref}, want /{wide}"


def test_an_expired_remote_host_leaves_the_local_one_in_force(rig: Rig) -> None:
    past = rig.clock.read() - 1
    remote = make_entry("destination", "bulk", destination=PEER, expires_unix_s=1)
    local = make_entry("source", "stream", source=(packed(frames.HOST4), 32))
    rig.set_list([remote, local], lambda _when: past)
    got = rig.classify(tcp4(1, 2))
    assert got == (STREAM, Code.HOST), f"got {got}, want stream by the local host"


# --- the insert limit


def test_f41_a_flood_of_new_flows_is_not_cached_and_live_flows_stay(rig: Rig) -> None:
    limit = 50
    rig.apply(POLICY, insert_limit=limit, insert_window_jiffies=10 * rig.jiffies_per_s)
    live = [tcp4(40000 + n, 7000) for n in range(10)]
    for frame in live:
        rig.classify(frame)
    words = [cached(rig, 40000 + n, 7000).word for n in range(10)]
    before = rig.reason(Code.INSERT_LIMIT)
    flood = 400
    for number in range(flood):
        rig.send(udp4(number, 40001))
    cpus = rig.kernel.possible_cpus
    refused = rig.reason(Code.INSERT_LIMIT) - before
    assert refused >= flood - limit * cpus, f"got {refused} refused of {flood}"
    assert rig.entries("flows4") <= limit * cpus, f"got {rig.entries('flows4')} flows"
    assert [cached(rig, 40000 + n, 7000).word for n in range(10)] == words
    got = rig.classify(udp4(399, 7000)), rig.classify(live[3])
    assert got == ((SIGNAL, Code.PORT),) * 2, f"got {got}, want both classified all the same"


def test_the_insert_limit_starts_again_with_the_next_window(rig: Rig) -> None:
    rig.apply(POLICY, insert_limit=1, insert_window_jiffies=2)
    sent = 0

    def has_more_flows_than_one_window() -> bool:
        nonlocal sent
        sent += 1
        rig.send(udp4(sent, 40001))
        return rig.entries("flows4") > 2 * rig.kernel.possible_cpus

    rig.wait(has_more_flows_than_one_window, "flows cached in later windows")


# --- the manual map


def _manual_key(address: str) -> bytes:
    raw = packed(address)
    return raw if len(raw) == 16 else bytes(10) + b"\xff\xff" + raw


@pytest.mark.parametrize("family", ["v4", "v6"])
def test_a_default_flow_sees_the_manual_map_within_a_jiffy(rig: Rig, family: str) -> None:
    frame = tcp4(1, 2) if family == "v4" else tcp6(1, 2)
    key = _manual_key(frames.PEER4 if family == "v4" else frames.PEER6)
    for _ in range(3):
        assert rig.classify(frame) == DEFAULT
    bpf.update(rig.maps["manual"], key, struct.pack("=IIQ", STREAM, 0, 0))
    rig.next_jiffy()
    got = [rig.classify(frame), rig.classify(frame)]
    assert got == [(STREAM, Code.MANUAL)] * 2, f"got {got}, want stream by the manual map"
    bpf.delete(rig.maps["manual"], key)
    rig.next_jiffy()
    got = [rig.classify(frame), rig.classify(frame)]
    assert got == [DEFAULT] * 2, f"got {got}, want the default class again"


def test_manual_entries_of_no_class_are_ignored_and_rules_and_lists_come_first(rig: Rig) -> None:
    key = _manual_key(frames.PEER4)
    for number in (16, 255, 1 << 31):
        bpf.update(rig.maps["manual"], key, struct.pack("=IIQ", number, 0, 0))
        got = rig.verdict(tcp4(1, 2))
        assert got == DEFAULT, f"class {number}: got {got}, want it ignored"
    bpf.update(rig.maps["manual"], key, struct.pack("=IIQ", BULK, 0, 0))
    with_room(rig, HOST_ENTRY)
    found = [rig.verdict(tcp4(1, 2)), rig.verdict(tcp4(1, 7000)), rig.verdict(udp4(1, 2), INGRESS)]
    want = [(STREAM, Code.HOST), (SIGNAL, Code.PORT), DEFAULT]
    assert found == want, f"got {found}, want {want}"


def test_a_manual_entry_names_the_remote_end_in_both_directions(rig: Rig) -> None:
    bpf.update(rig.maps["manual"], _manual_key(frames.PEER4), struct.pack("=IIQ", BULK, 0, 0))
    back = tcp4(2, 1, source=frames.PEER4, destination=frames.HOST4)
    got: list[tuple[int, Code]] = []
    directions: tuple[tuple[bytes, Direction], ...] = ((tcp4(1, 2), EGRESS), (back, INGRESS))
    for frame, direction in directions:
        got.append(rig.classify(frame, direction))
    assert got == [(BULK, Code.MANUAL)] * 2, f"got {got}, want bulk both ways"
