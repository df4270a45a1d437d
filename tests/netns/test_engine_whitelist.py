# SPDX-License-Identifier: Apache-2.0
"""The whitelist under live traffic: atomic, expiring by itself, open to bpftool."""

from __future__ import annotations

import contextlib
import functools
import ipaddress
import json
import os
import socket
import struct
import subprocess
import time
from collections.abc import Callable

import pytest
from enginekit import (
    NORMAL,
    SIGNAL_UDP,
    Bench,
    UdpSource,
    entry,
    send_datagrams,
    set_sysctl,
    shapectl,
    wait_until,
)

from shapeagent.kernel import bpf, lists
from shapeagent.model.errors import ConflictError, FailedError, InputError
from shapeagent.model.reports import ExplainRequest
from shapeagent.model.types import Match, WhitelistEntry

pytestmark = [
    pytest.mark.netns,
    pytest.mark.skipif(os.geteuid() != 0, reason="making network namespaces needs root"),
]


def hosts(first: str, count: int, name: str = "stream") -> list[WhitelistEntry]:
    start = int(ipaddress.IPv4Address(first))
    return [
        WhitelistEntry(Match.EITHER, name, destination=((start + n).to_bytes(4, "big"), 32))
        for n in range(count)
    ]


def grown(one: Bench, send: Callable[[], None], direction: str = "egress") -> dict[str, int]:
    before = one.packets(direction)
    send()
    after = one.packets(direction)
    return {k: after[k] - before.get(k, 0) for k in after if after[k] > before.get(k, 0)}


def bulk_of(one: Bench, send: Callable[[], None]) -> int:
    return grown(one, send).get("bulk", 0)


def ready(one: Bench) -> None:
    """Let the neighbours answer, so that counts are exact afterwards."""
    send_datagrams(one.pair, SIGNAL_UDP, 1)
    send_datagrams(one.pair, SIGNAL_UDP, 1, v6=True)
    wait_until(lambda: one.reasons().get("rule-port", 0) >= 2, "the neighbours to answer")


@pytest.mark.parametrize("form", ["host", "prefix", "pair"])
@pytest.mark.parametrize("v6", [False, True])
def test_every_form_decides_live_flows_and_lets_go_of_them(
    bench: Callable[..., Bench], form: str, v6: bool
) -> None:
    """Also flows that the cache knows already; both directions of a conversation."""
    one = bench()
    one.attach()
    ready(one)
    pair = one.pair
    here = pair.address6 if v6 else pair.address4
    there = pair.peer_address6 if v6 else pair.peer_address4
    text = {
        "host": there,
        "prefix": "2001:db8::/96" if v6 else "192.0.2.0/28",
        "pair": f"{here}>{there}",
    }[form]
    with contextlib.closing(
        bound_socket(pair.netns, here, 40000)
    ) as near, contextlib.closing(bound_socket(pair.peer_netns, there, NORMAL)) as far:  # fmt: skip

        def talk() -> None:
            for _ in range(20):
                near.sendto(b"x" * 40, (there, NORMAL))
                far.recv(100)
                far.sendto(b"y" * 40, (here, 40000))
                near.recv(100)

        got = grown(one, talk)
        assert got.get("normal", 0) >= 20, f"got {got} before, want 20 normal"
        change = one.engine.whitelist_add(one.device, [entry(text, "bulk")])
        assert (change.added, change.total) == (1, 1), f"got {change}"
        got = grown(one, talk)
        assert got.get("bulk") == 20, f"got {got} out for {text}, want 20 bulk"
        got = grown(one, talk, "ingress")
        assert got.get("bulk") == 20, f"got {got} in for {text}, want 20 bulk"
        one.engine.whitelist_remove(one.device, [entry(text, "bulk")])
        got = grown(one, talk)
        assert got.get("normal", 0) >= 20, f"got {got} after, want 20 normal"
        assert not got.get("bulk"), f"got {got} after {text} was removed, want no bulk"


def bound_socket(netns: str, address: str, port: int) -> socket.socket:
    from enginekit import open_socket

    found = open_socket(netns, socket.AF_INET6 if ":" in address else socket.AF_INET)
    found.settimeout(5)
    found.bind((address, port))
    return found


@pytest.mark.parametrize("v6", [False, True])
def test_single_prefixes_of_ever_more_lengths_each_take_effect(
    bench: Callable[..., Bench], v6: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel keeps up to four lengths in hashes and more in tries; nobody sees which."""
    monkeypatch.setattr(lists, "NETS_MIN_PREFIXES_PER_LENGTH", 1)
    one = bench()
    one.attach()
    others = ("fd77::/100", "fd78::/100") if v6 else ("10.77.0.0/16", "10.78.0.0/16")
    one.engine.whitelist_import(one.device, [entry(text, "bulk") for text in others])
    pair = one.pair
    here, there = (pair.address6, pair.peer_address6) if v6 else (pair.address4, pair.peer_address4)
    request = ExplainRequest(here, there, destination_port=9)
    first = 100 if v6 else 16
    texts = [
        str(ipaddress.ip_network(f"{there}/{first + n}", strict=False)) for n in (2, 0, 4, 1, 3, 5)
    ]
    longest: list[int] = []
    for number, text in enumerate(texts):
        one.engine.whitelist_add(one.device, [entry(text, "bulk" if number % 2 else "stream")])
        longest.append(int(text.rpartition("/")[2]))
        got = one.engine.explain(one.device, request)
        winner = longest.index(max(longest))
        want = "bulk" if winner % 2 else "stream"
        assert got.traffic_class == want, f"{texts[: number + 1]}: got {got}, want {want}"
    while texts:
        one.engine.whitelist_remove(one.device, [entry(texts.pop(), "bulk")])
        longest.pop()
        got = one.engine.explain(one.device, request)
        want = "normal"
        if longest:
            want = "bulk" if longest.index(max(longest)) % 2 else "stream"
        assert got.traffic_class == want, f"{texts}: got {got}, want {want}"


def test_a_hundred_thousand_entries_come_into_effect_at_once(bench: Callable[..., Bench]) -> None:
    one = bench()
    one.attach()
    ready(one)
    entries = [*hosts("10.0.0.0", 99_999), entry(one.pair.peer_address4)]
    begin_s = time.monotonic()
    change = one.engine.whitelist_import(one.device, entries)
    took_s = time.monotonic() - begin_s
    got = grown(one, lambda: send_datagrams(one.pair, NORMAL, 20))
    print(f"100,000 entries in {took_s:.2f} s")
    assert change.total == 100_000, f"got {change}, want 100,000 entries"
    assert got.get("stream") == 20, f"got {got}, want 20 of stream"
    asked = one.engine.explain(
        one.device, ExplainRequest(one.pair.address4, "10.1.134.158", destination_port=9)
    )
    assert asked.reason == "whitelist-host", f"got {asked}, want the 99,999th entry"
    assert len(one.engine.whitelist_list(one.device)) == 100_000
    assert took_s < 5, f"got {took_s:.2f} s, want well under 5"


def test_replacing_the_list_loses_no_packet_its_class(bench: Callable[..., Bench]) -> None:
    """C69: an address that is in the old and in the new list never falls out of its class."""
    one = bench()
    set_sysctl(one.netns, "net.ipv6.conf.all.disable_ipv6", "1")
    set_sysctl(one.pair.peer_netns, "net.ipv6.conf.all.disable_ipv6", "1")
    one.attach(profile="police")
    ours = entry(one.pair.peer_address4)
    lists = [[*hosts(f"10.{n}.0.0", 10_000), ours] for n in range(2)]
    prefixes = [[entry("192.0.2.0/24"), *hosts(f"10.{n}.0.0", 1_000)] for n in range(2)]
    one.engine.whitelist_replace(one.device, lists[0])
    target = (one.pair.peer_address4, NORMAL)
    # ICMP errors about the closed port would be in signal, out of the peer: not counted here
    with UdpSource(one.netns, target, packets_per_s=10_000, size=32) as source:
        wait_until(lambda: source.sent > 500, "probes")
        least = source.sent
        before = one.packets()
        most = source.sent
        replaced = 0
        begin_s = time.monotonic()
        # a slow machine takes longer for the least that says something
        while replaced < 20 or (replaced < 100 and time.monotonic() < begin_s + 4):
            # a small list most of the time: more switches per second
            wanted = lists[replaced % 2] if replaced % 10 == 0 else prefixes[replaced % 2]
            one.engine.whitelist_replace(one.device, wanted)
            replaced += 1
        source.end()
        sent = range(source.sent - most, source.sent - least + 1)
    after = one.packets()
    probes = after["stream"] - before["stream"]
    strays = after.get("normal", 0) - before.get("normal", 0)
    print(f"{replaced} replacements under {probes} probes")
    assert strays == 0, f"got {strays} probes that lost their class over {replaced}, want none"
    assert probes in sent, f"got {probes} in stream, want all, one of {sent}"


def test_bpftool_can_fill_the_manual_map(bench: Callable[..., Bench]) -> None:
    """The articles' way: key = remote address, value = u32 class, u64 expiry in boot seconds."""
    one = bench()
    one.attach()
    ready(one)
    number = next(c.number for c in one.status().classes if c.name == "bulk")
    pin = str(one.pins / "manual")

    def key_of(address: str) -> list[str]:
        packed = ipaddress.ip_address(address).packed
        packed = packed if len(packed) == 16 else bytes(10) + b"\xff\xff" + packed
        return [f"{byte:#x}" for byte in packed]

    def put(address: str, expires_s: int) -> None:
        value = [f"{byte:#x}" for byte in struct.pack("=IIQ", number, 0, expires_s)]
        command = ["bpftool", "map", "update", "pinned", pin, "key", *key_of(address), "value"]
        subprocess.run([*command, *value], check=True, timeout=20)

    for v6 in (False, True):
        address = one.pair.peer_address6 if v6 else one.pair.peer_address4

        send = functools.partial(send_datagrams, one.pair, NORMAL, 20, v6=v6)
        bulk = functools.partial(bulk_of, one, send)

        got = grown(one, send)
        assert got.get("normal", 0) >= 20, f"got {got} before, want normal"
        put(address, 0)
        got = grown(one, send)
        assert got.get("bulk") == 20, f"got {got} with {address} in the map, want bulk"
        put(address, int(time.clock_gettime(time.CLOCK_BOOTTIME)) + 2)
        got = grown(one, send)
        assert got.get("bulk") == 20, f"got {got} before the expiry, want bulk"
        deadline_s = time.monotonic() + 5
        while bulk():
            assert time.monotonic() < deadline_s, "got bulk long after the expiry, want none"
        put(address, 0)
        command = ["bpftool", "map", "delete", "pinned", pin, "key", *key_of(address)]
        subprocess.run(command, check=True, timeout=20)
        got = grown(one, send)
        assert not got.get("bulk"), f"got {got} after the delete, want normal"
    asked = one.engine.explain(one.device, ExplainRequest(one.pair.address4, "192.0.2.2"))
    assert asked.reason == "default", f"got {asked}"


@pytest.mark.parametrize("text", ["192.0.2.2", "192.0.2.0/24", "192.0.2.1>192.0.2.2"])
def test_an_expiry_is_kept_by_the_kernel(bench: Callable[..., Bench], text: str) -> None:
    """No process of ours runs; the flow is one that the cache knows."""
    one = bench()
    one.attach()
    ready(one)
    one.engine.whitelist_add(one.device, [entry(text, "bulk", expires_unix_s=time.time() + 1.0)])
    begin_s = time.monotonic()
    with contextlib.closing(bound_socket(one.netns, one.pair.address4, 40001)) as sender:
        target = (one.pair.peer_address4, 40002)

        def send() -> None:
            for _ in range(10):
                sender.sendto(bytes(30), target)

        got = grown(one, send)
        assert got.get("bulk") == 10, f"got {got} before its expiry, want bulk"
        wait_until(lambda: not grown(one, send).get("bulk"), "the expiry")
    took_s = time.monotonic() - begin_s
    assert 0.7 <= took_s <= 2.0, f"got an expiry after {took_s:.2f} s, want 1"
    assert one.engine.whitelist_list(one.device) == (), "got an expired entry listed"
    change = one.engine.whitelist_add(one.device, [entry("203.0.113.1")])
    assert (change.added, change.total) == (1, 1), f"got {change} after all had expired"


def test_a_full_map_keeps_the_old_list(bench: Callable[..., Bench]) -> None:
    """The manual map is of fixed size: one entry too many is refused, the rest stays."""
    one = bench()
    one.attach()
    descriptor = bpf.get_pinned(str(one.pins / "manual"))
    try:
        shape = bpf.map_shape(descriptor)
        value = struct.pack("=IIQ", 3, 0, 0)
        keys = [struct.pack(">QII", 0, 0xFFFF, 0x0A000000 + n) for n in range(shape.max_entries)]
        for key in keys:
            bpf.update(descriptor, key, value)
        with pytest.raises(FailedError) as caught:
            bpf.update(descriptor, struct.pack(">QII", 0, 0xFFFF, 0x0B000000), value)
    finally:
        os.close(descriptor)
    assert caught.value.reference == "map-full", f"got {caught.value.reference}"
    asked = one.engine.explain(
        one.device, ExplainRequest(one.pair.address4, "10.0.0.1", destination_port=9)
    )
    assert asked.reason == "whitelist-manual", f"got {asked}, want the entries that fitted"


def test_a_list_that_does_not_fit_leaves_the_old_one_in_use(
    bench: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    """C66: all or nothing."""

    one = bench()
    one.attach()
    ready(one)
    one.engine.whitelist_add(one.device, [entry(one.pair.peer_address4, "bulk")])
    before = one.engine.whitelist_list(one.device)
    monkeypatch.setattr(lists, "capacity_for", lambda count: 100)
    with pytest.raises(FailedError) as caught:
        one.engine.whitelist_import(one.device, hosts("10.0.0.0", 5_000))
    assert caught.value.reference == "map-full", f"got {caught.value.reference}"
    monkeypatch.undo()
    got = grown(one, lambda: send_datagrams(one.pair, NORMAL, 20))
    assert got.get("bulk") == 20, f"got {got}, want the old list in use"
    assert one.engine.whitelist_list(one.device) == before, "got another list remembered"
    assert one.status().whitelist_entries == 1, f"got {one.status().whitelist_entries}, want 1"
    change = one.engine.whitelist_import(one.device, hosts("10.0.0.0", 5_000))
    assert change.total == 5_001, f"got {change} at the next try, want 5,001"


def test_a_writer_with_an_old_generation_is_refused(bench: Callable[..., Bench]) -> None:
    one = bench()
    one.attach()
    first = one.engine.whitelist_add(one.device, [entry("203.0.113.1")])
    one.engine.whitelist_add(one.device, [entry("203.0.113.2")])
    with pytest.raises(ConflictError) as caught:
        one.engine.whitelist_replace(
            one.device, [entry("203.0.113.3")], expected_generation=first.generation
        )
    assert caught.value.reference == "generation-differs", f"got {caught.value.reference}"
    assert len(one.engine.whitelist_list(one.device)) == 2


def test_bad_entries_change_nothing(bench: Callable[..., Bench]) -> None:
    one = bench()
    one.attach()
    for bad, want in (
        (entry("0.0.0.0/0"), "whitelist-everything"),
        (entry("::/0"), "whitelist-everything"),
        (entry("203.0.113.1", "nobody"), "no-such-class"),
    ):
        with pytest.raises(InputError) as caught:
            one.engine.whitelist_add(one.device, [entry("203.0.113.9"), bad])
        assert caught.value.reference == want, f"got {caught.value.reference}, want {want}"
    assert one.engine.whitelist_list(one.device) == (), "got entries of a refused list"
    one.engine.whitelist_add(one.device, [entry("0.0.0.0/0", "bulk")], yes_everything=True)
    got = grown(one, lambda: send_datagrams(one.pair, NORMAL, 20))
    assert got.get("bulk") == 20, f"got {got} with everything listed, want bulk"


def test_adding_warns_where_a_rule_decides_first(bench: Callable[..., Bench]) -> None:
    one = bench()
    one.attach()
    change = one.engine.whitelist_add(one.device, [entry("203.0.113.1", "bulk")])
    assert any("dns" in text for text in change.warnings), f"got {change.warnings}"


def test_the_command_line_canonicalises_and_says_so(bench: Callable[..., Bench]) -> None:
    """C61, C63, C66 through the command: notices, exit codes, nothing changed on refusal."""
    one = bench()
    base = ("--netns", one.netns)
    ran = shapectl(*base, "attach", one.device, "--link-rate", "100mbit")
    assert ran.code == 0, f"got exit {ran.code}: {ran.err}"
    try:
        ran = shapectl(*base, "whitelist", "add", "192.0.2.67/24", "--class", "bulk", "--json")
        assert ran.code == 0, f"got exit {ran.code}: {ran.err}"
        notices = json.loads(ran.out)["notices"]
        assert any("192.0.2.0/24" in text for text in notices), f"got {notices}"
        ran = shapectl(*base, "whitelist", "add", "::ffff:203.0.113.5", "--class", "bulk")
        assert ran.code == 0, f"got exit {ran.code}: {ran.err}"
        ran = shapectl(*base, "whitelist", "add", "0.0.0.0/0", "--class", "bulk")
        assert ran.code == 2, f"got exit {ran.code}: {ran.err}, want 2"
        assert "--yes-everything" in ran.err, f"got {ran.err}"
        ran = shapectl(*base, "whitelist", "list", "--json")
        rows = json.loads(ran.out)
        text = json.dumps(rows)
        assert "203.0.113.5" in text, f"got {rows}, want the mapped address as IPv4"
        assert "::ffff" not in text, f"got {rows}, want no mapped form"
        assert "0.0.0.0/0" not in text, f"got {rows}, want the refused entry left out"
    finally:
        ran = shapectl(*base, "detach", one.device)
    assert ran.code == 0, f"got exit {ran.code}: {ran.err}"


def test_an_entry_too_many_for_a_small_change_swaps_the_list(bench: Callable[..., Bench]) -> None:
    """Single additions go in place until the map is full; then a larger one takes over."""
    one = bench()
    one.attach()
    for number in range(150):
        one.engine.whitelist_add(one.device, [entry(f"203.0.113.{number}", "bulk")])
    assert one.status().whitelist_entries == 150
    asked = one.engine.explain(
        one.device, ExplainRequest(one.pair.address4, "203.0.113.149", destination_port=9)
    )
    assert asked.traffic_class == "bulk", f"got {asked}, want the last entry in force"
