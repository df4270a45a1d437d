# SPDX-License-Identifier: Apache-2.0
"""A million whitelist entries: hosts and prefixes, IPv4 and IPv6."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import pytest
from enginekit import NORMAL, SIGNAL_UDP, Bench, UdpSource, entry, send_datagrams, wait_until

from shapeagent.model.errors import InputError
from shapeagent.model.reports import ExplainRequest
from shapeagent.model.types import EntryKind, Match, PackedBatch
from shapeagent.policy.entrychange import Group
from shapeagent.policy.entrytable import EntryTable
from shapeagent.policy.packed import Place, pack_entries
from shapeagent.policy.whitelist import LineDefaults, export_list, parse_list

pytestmark = [
    pytest.mark.netns,
    pytest.mark.slow,
    pytest.mark.host,
    pytest.mark.skipif(os.geteuid() != 0, reason="making network namespaces needs root"),
]

PART = 250_000
V6 = 0x20010DB9 << 96


def million(first: int = 0x0A000000, *, name: str = "stream") -> list[PackedBatch]:
    """Return a quarter each of hosts and /24 or /64 prefixes, of both families."""
    keys = {
        EntryKind.HOSTS4: b"".join((first + n).to_bytes(4) for n in range(PART)),
        EntryKind.HOSTS6: b"".join((V6 | n).to_bytes(16) for n in range(PART)),
        EntryKind.PREFIXES4: b"".join(
            b"\x18" + (first + (n << 8)).to_bytes(4) for n in range(PART)
        ),
        EntryKind.PREFIXES6: b"".join(b"\x40" + (V6 | n << 64).to_bytes(16) for n in range(PART)),
    }
    return [
        PackedBatch(Match.DESTINATION, kind, found, name, "ops", f"part {number}")
        for number, (kind, found) in enumerate(keys.items())
    ]


@pytest.fixture
def one(bench: Callable[..., Bench]) -> Bench:
    made = bench()
    made.attach(profile="police")
    send_datagrams(made.pair, SIGNAL_UDP, 1)
    wait_until(lambda: made.reasons().get("rule-port", 0) >= 1, "the neighbours to answer")
    return made


def answer(one: Bench, address: str) -> tuple[str, str | None]:
    source = one.pair.address6 if ":" in address else one.pair.address4
    found = one.engine.explain(one.device, ExplainRequest(source, address, destination_port=9))
    return found.reason, found.prefix


def contents(table: EntryTable) -> dict[tuple[Place, Group], int]:
    """Return a sum over all keys of each place and group, which tells two tables apart."""
    found: dict[tuple[Place, Group], int] = {}
    for place, column in table.columns.items():
        for key, number in column.items():
            at = (place, table.groups[number])
            found[at] = found.get(at, 0) ^ hash(key)
    return found


def test_a_million_entries_are_replaced_under_traffic(one: Bench) -> None:
    """The other end is in each list, so that no packet may count in another class."""
    peer = pack_entries([entry(one.pair.peer_address4)])
    one.engine.whitelist_apply(one.device, peer)
    before = one.packets()
    target = (one.pair.peer_address4, NORMAL)
    with UdpSource(one.pair.netns, target, packets_per_s=2_000, size=64) as source:
        wait_until(lambda: source.sent > 100, "traffic")
        with one.engine.session(one.device) as session:
            for number in range(3):
                begun = time.monotonic()
                sent = source.sent
                wanted = [*million(0x0A000000 + (number << 24)), *peer]
                made_s = time.monotonic() - begun
                done = session.whitelist_apply(wanted, replace=True)
                took_s = time.monotonic() - begun - made_s
                assert done.total == 4 * PART + 1, f"got {done}"
                assert source.sent > sent, "got no traffic meanwhile"
                print(f"replace of a million: {took_s:.2f} s")
                assert took_s < 10, f"got {took_s:.2f} s, want a few"
        source.end()
        sent = source.sent
    grown = {k: n - before.get(k, 0) for k, n in one.packets().items() if n > before.get(k, 0)}
    assert grown.get("stream") == sent, f"got {grown} of {sent} packets, want all in stream"
    assert set(grown) <= {"stream", "signal"}, f"got {grown}, want none in another class"


def test_a_million_entries_survive_a_restart_and_export_as_they_came(one: Bench) -> None:
    with one.engine.session(one.device) as session:
        done = session.whitelist_apply(million())
        assert done.added == 4 * PART, f"got {done}"
        before = contents(session.whitelist_table()[0])
    begun = time.monotonic()
    with one.engine.session(one.device) as session:
        page = session.whitelist_page(None, 10)
        took_s = time.monotonic() - begun
        print(f"a million entries read again in {took_s:.2f} s")
        assert (page.total, page.generation) == (4 * PART, 1), f"got {page}"
        assert took_s < 5, f"got {took_s:.2f} s"
        table = session.whitelist_table()[0]
        assert contents(table) == before, "got another list after a restart"
        text = export_list(table.entries())
        done = session.whitelist_apply([], million()[:1])
        assert (done.removed, done.total) == (PART, 3 * PART), f"got {done}"
    assert one.status().whitelist_entries == 3 * PART
    assert answer(one, "2001:db9::3:d08f")[0] == "whitelist-host"  # the last one
    assert answer(one, "2001:db9:3:d08f::1") == ("whitelist-prefix", "2001:db9:3:d08f::/64")
    assert answer(one, "2001:db9:3:d090::1") == ("default", None)
    assert answer(one, "10.0.0.9")[0] == "whitelist-prefix", "got a host that was removed"
    parsed = parse_list(text, LineDefaults()).entries
    again = EntryTable()
    again.apply(again.plan(pack_entries(parsed)))
    assert contents(again) == before, "got another list by export and import"


def test_one_bad_item_in_a_million_changes_nothing(one: Bench) -> None:
    one.engine.whitelist_apply(one.device, pack_entries([entry("192.0.2.77")]))
    wanted = million()
    keys = bytearray(wanted[2].keys)
    keys[5 * 123_456 + 4] = 1
    wanted[2] = PackedBatch(Match.DESTINATION, EntryKind.PREFIXES4, bytes(keys), "stream")
    with pytest.raises(InputError) as caught:
        one.engine.whitelist_apply(one.device, wanted, replace=True)
    (detail,) = caught.value.details
    assert detail.startswith("batch 3 item 123456: 11.226.64.1/24 has host bits"), f"got {detail}"
    assert answer(one, "192.0.2.77") == ("whitelist-host", "192.0.2.77")
    assert one.status().whitelist_generation == 1
