# SPDX-License-Identifier: Apache-2.0
"""The columnar whitelist against a plain dict, and its packed input."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from shapeagent.model.errors import InputError
from shapeagent.model.types import EntryKind, Match, PackedBatch, WhitelistEntry
from shapeagent.policy import packed
from shapeagent.policy.entrytable import PLACES, EntryTable
from shapeagent.policy.packed import Place
from shapeagent.policy.whitelist import LineDefaults, export_list, parse_entry, parse_list

NOW = 1_795_000_000.0


def entry(text: str) -> WhitelistEntry:
    return parse_entry(text, LineDefaults("bulk"))[0]


def batch(text: str, **fields: object) -> PackedBatch:
    """Return the batch of the addresses in `text`, which are of one kind."""
    (found,) = packed.pack_entries([entry(word) for word in text.split()])
    values = {name: getattr(found, name) for name in found.__slots__}
    return PackedBatch(**{**values, **fields})


def table_of(*batches: PackedBatch) -> EntryTable:
    table = EntryTable()
    table.apply(table.plan(batches))
    return table


# --- against a model

# few keys, so that they meet
ADDRESSES = st.integers(0, 5)
HOSTS = st.lists(ADDRESSES, max_size=6)
CLASSES = st.sampled_from(["bulk", "signal"])
EXPIRIES = st.sampled_from([None, None, NOW + 1, NOW + 2, NOW + 3])
MATCHES = st.sampled_from([Match.SOURCE, Match.DESTINATION, Match.EITHER])


def key_at(kind: EntryKind, number: int) -> bytes:
    size = kind.address_bytes
    if kind.is_pair:
        return number.to_bytes(size) + (number + 1).to_bytes(size)
    address = (number << 8).to_bytes(size)
    return bytes((8 * size - 8,)) + address if kind.is_prefix else address


@st.composite
def batches(draw: st.DrawFn) -> PackedBatch:
    match, kind = draw(st.sampled_from(PLACES))
    keys = b"".join(key_at(kind, number) for number in draw(HOSTS))
    owner = draw(st.sampled_from(["", "ops"]))
    return PackedBatch(match, kind, keys, draw(CLASSES), owner, "", draw(EXPIRIES))


Model = dict[tuple[Place, bytes], tuple[str, str, float | None]]


def model_of(wanted: list[PackedBatch]) -> Model | None:
    """Return what the batches say, None where they contradict each other."""
    found: Model = {}
    for one in wanted:
        for key in packed.split_keys(one.keys, one.kind.key_bytes):
            said = (one.traffic_class, one.owner, one.expires_unix_s)
            first = found.setdefault(((one.match, one.kind), key), said)
            if (first[0], first[2]) != (said[0], said[2]):
                return None
    return found


class TableAgainstDict(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.table = EntryTable()
        self.model: Model = {}
        self.now = NOW

    def plan_and_apply(self, wanted: Model | None, add: list[PackedBatch], **how: object) -> None:
        """Apply a change, and check its counts, and that its inverse takes it back."""
        plan = self.table.plan_replace if how.get("replace") else self.table.plan
        remove = how.get("remove", ())
        if wanted is None:
            with pytest.raises(InputError) as caught:
                plan(add, *([] if how.get("replace") else [remove]))  # type: ignore[arg-type]
            assert caught.value.reference == "whitelist-invalid"
            return
        target = dict(wanted) if how.get("replace") else {**self.model}
        for one in remove:  # type: ignore[attr-defined]
            for key in packed.split_keys(one.keys, one.kind.key_bytes):
                target.pop(((one.match, one.kind), key), None)
        target.update(wanted)
        delta = plan(add, *([] if how.get("replace") else [remove]))  # type: ignore[arg-type]
        before = self.contents()
        added = len(target.keys() - self.model.keys())
        gone = len(self.model.keys() - target.keys())
        both = target.keys() & self.model.keys()
        changed = sum(target[key] != self.model[key] for key in both)
        counts = (delta.added, delta.removed, delta.changed)
        assert counts == (added, gone, changed), f"got {counts}, want {(added, gone, changed)}"
        self.table.apply(delta)
        after = self.contents()
        self.table.apply(delta.inverse())
        assert self.contents() == before, "got another table by the inverse"
        self.table.apply(plan(add, *([] if how.get("replace") else [remove])))  # type: ignore[arg-type]
        assert self.contents() == after
        self.model = target
        self.table.tidy()

    def contents(self) -> Model:
        found: Model = {}
        for place, column in self.table.columns.items():
            for key in column:
                group = self.table.get(place, key)
                assert group is not None
                found[place, key] = (group.traffic_class, group.owner, group.expires_unix_s)
        return found

    @rule(add=st.lists(batches(), max_size=3), remove=st.lists(batches(), max_size=2))
    def change(self, add: list[PackedBatch], remove: list[PackedBatch]) -> None:
        self.plan_and_apply(model_of(add), add, remove=remove)

    @rule(wanted=st.lists(batches(), max_size=3))
    def replace(self, wanted: list[PackedBatch]) -> None:
        self.plan_and_apply(model_of(wanted), wanted, replace=True)

    @rule()
    def list_all(self) -> None:
        """From here on the order is kept up with each change."""
        assert list(self.table.items()) == self.in_order()

    @rule(later=st.sampled_from([0.5, 1.0]))
    def expire(self, later: float) -> None:
        self.now += later
        delta = self.table.plan_expiry(self.now)
        over = {k for k, v in self.model.items() if v[2] is not None and v[2] <= self.now}
        assert delta.removed == len(over), f"got {delta.removed} over, want {len(over)}"
        self.table.apply(delta)
        for key in over:
            del self.model[key]

    def in_order(self) -> list[tuple[Place, bytes]]:
        return sorted(self.model, key=lambda one: (PLACES.index(one[0]), one[1]))

    @invariant()
    def same_as_the_model(self) -> None:
        assert self.contents() == self.model
        assert len(self.table) == len(self.model)
        due = min((v[2] for v in self.model.values() if v[2] is not None), default=None)
        assert self.table.next_due() == due, f"got {self.table.next_due()} next, want {due}"
        live = {value[0] for value in self.model.values()}
        assert {group.traffic_class for group in self.table.live_groups().values()} == live

    @invariant()
    def pages_cover_it_once(self) -> None:
        seen: list[tuple[Place, bytes]] = []
        after = None
        while True:
            entries, after = self.table.page(after, 2, NOW - 1)
            seen += [packed.key_of(one) for one in entries]
            if after is None:
                break
        assert seen == self.in_order()

    @invariant()
    def export_is_import(self) -> None:
        text = export_list(self.table.entries())
        again = EntryTable()
        if text:
            parsed = parse_list(text, LineDefaults()).entries
            again.apply(again.plan(packed.pack_entries(parsed)))
        assert list(again.entries()) == list(self.table.entries())


TableAgainstDict.TestCase.settings = settings(max_examples=60, stateful_step_count=12)
TestAnyChangesLeaveWhatAPlainDictWould = TableAgainstDict.TestCase


@given(st.lists(st.binary(min_size=5, max_size=5), max_size=9_000).map(b"".join))
@settings(max_examples=20)
def test_keys_are_taken_apart_whatever_their_number(data: bytes) -> None:
    want = [data[at : at + 5] for at in range(0, len(data), 5)]
    assert packed.split_keys(data, 5) == want
    assert packed.split_keys(memoryview(data), 5) == want


@pytest.mark.parametrize("count", [4095, 4096, 4097, 8192, 8193])
def test_keys_are_taken_apart_at_the_edges_of_a_step(count: int) -> None:
    data = b"".join(number.to_bytes(4) for number in range(count))
    assert packed.split_keys(data, 4) == [number.to_bytes(4) for number in range(count)]


def test_pages_go_on_though_entries_come_and_go() -> None:
    table = table_of(batch(" ".join(f"192.0.2.{n}" for n in range(0, 100, 2))))
    first, after = table.page(None, 10, NOW)
    gone = batch("192.0.2.18 192.0.2.20")  # the last one seen, and the next
    table.apply(table.plan([batch("192.0.2.1 192.0.2.99")], [gone]))
    rest: list[WhitelistEntry] = []
    while after is not None:
        more, after = table.page(after, 7, NOW)
        rest += more
    seen = [one.destination[0][3] for one in [*first, *rest] if one.destination]
    assert seen == [*range(0, 20, 2), *range(22, 100, 2), 99], f"got {seen}"


def test_a_page_leaves_out_what_is_over() -> None:
    table = table_of(batch("192.0.2.1 192.0.2.2", expires_unix_s=NOW + 1), batch("192.0.2.3"))
    assert len(table.page(None, 10, NOW)[0]) == 3
    entries, after = table.page(None, 1, NOW + 1)
    assert ([one.destination for one in entries], after) == ([(bytes((192, 0, 2, 3)), 32)], None)


def test_groups_without_entries_are_forgotten() -> None:
    table = EntryTable()
    for number in range(5_000):
        table.apply(table.plan([batch("192.0.2.1", reason=str(number))]))
        table.tidy()
    assert len(table.groups) < 2_100, f"got {len(table.groups)} groups of one entry"
    assert [one.reason for one in table.entries()] == ["4999"]


def test_entries_that_agree_count_once_and_the_first_stays() -> None:
    table = EntryTable()
    delta = table.plan([batch("192.0.2.1 192.0.2.1", owner="a"), batch("192.0.2.1", owner="b")])
    assert (delta.added, delta.unchanged) == (1, 2), f"got {delta}"
    table.apply(delta)
    assert [one.owner for one in table.entries()] == ["a"]


def test_contradictions_are_named() -> None:
    keys = " ".join(f"192.0.2.{n}" for n in range(30))
    with pytest.raises(InputError) as caught:
        EntryTable().plan([batch(keys), batch(keys, traffic_class="signal")])
    assert len(caught.value.details) == 21, f"got {caught.value.details}"
    assert caught.value.details[0].startswith("batch 2 192.0.2."), f"got {caught.value.details[0]}"
    assert caught.value.details[-1] == "... and 10 more"


# --- packed input


def test_a_prefix_of_full_length_is_a_host() -> None:
    keys = b"\x20\xc0\0\2\1" + b"\x18\xc0\0\2\0"
    table = table_of(PackedBatch(Match.EITHER, EntryKind.PREFIXES4, keys, "bulk"))
    want = {entry("192.0.2.1 match=either"), entry("192.0.2.0/24 match=either")}
    assert set(table.entries()) == want


def refused(*given: PackedBatch) -> InputError:
    with pytest.raises(InputError) as caught:
        packed.check_batches(given, NOW)
    assert caught.value.reference == "whitelist-invalid"
    return caught.value


V6 = bytes.fromhex("20010db8000000000000000000000001")
MAPPED = bytes(10) + b"\xff\xff\xc0\0\2\1"


@pytest.mark.parametrize(
    ("kind", "good", "bad", "want"),
    [
        ("prefixes4", b"\x18\xc0\0\2\0", b"\x18\xc0\0\2\x43", "192.0.2.67/24 has host bits"),
        ("prefixes4", b"\0\0\0\0\0", b"\x21\xc0\0\2\0", "192.0.2.0/33: the prefix length"),
        ("prefixes4", b"\x20\xc0\0\2\1", b"\xff\0\0\0\0", "0.0.0.0/255: the prefix length"),
        ("prefixes6", b"\x7f" + bytes(16), b"\x40" + V6, "2001:db8::1/64 has host bits"),
        ("prefixes6", b"\x80" + V6, b"\x7f" + V6, "write 2001:db8::/127"),
        ("prefixes6", b"\x20" + V6[:4] + bytes(12), b"\x81" + V6, "/129: the prefix length"),
        ("prefixes6", b"\0" + bytes(16), b"\x80" + MAPPED, "is IPv4 in IPv6"),
        ("hosts6", V6, MAPPED, "item 1: ::ffff:192.0.2.1 is IPv4 in IPv6"),
        ("pairs6", V6 + V6, V6 + MAPPED, "2001:db8::1>::ffff:192.0.2.1 is IPv4 in IPv6"),
        ("pairs6", V6 + V6, MAPPED + MAPPED, "is IPv4 in IPv6"),
    ],
)
def test_a_key_that_is_not_canonical_is_named(
    kind: str, good: bytes, bad: bytes, want: str
) -> None:
    which = EntryKind(kind)
    match = Match.PAIR if which.is_pair else Match.SOURCE
    packed.check_batches([PackedBatch(match, which, good * 3, "bulk")], NOW)
    fine = batch("192.0.2.1")
    error = refused(fine, PackedBatch(match, which, good + bad + good, "bulk"))
    assert len(error.details) == 1, f"got {error.details}"
    assert error.details[0].startswith("batch 2 item 1: "), f"got {error.details}"
    assert want in error.details[0], f"got {error.details[0]!r}, want {want!r}"


def test_mapped_bytes_across_two_keys_are_no_mapped_address() -> None:
    keys = bytes(16) + bytes.fromhex("0000ffff") + bytes(12)  # the pattern lies between the two
    packed.check_batches([PackedBatch(Match.SOURCE, EntryKind.HOSTS6, keys, "bulk")], NOW)


@pytest.mark.parametrize(
    ("fields", "want"),
    [
        ({"keys": b"\xc0\0\2"}, "has 3 bytes, not a multiple of 4"),
        ({"match": Match.PAIR}, "has match=pair"),
        ({"kind": EntryKind.PAIRS4, "keys": bytes(8)}, "has match=destination"),
        ({"expires_unix_s": NOW}, "has expired already"),
        ({"expires_unix_s": float("nan")}, "no time"),
        ({"expires_unix_s": float("inf")}, "no time"),
    ],
)
def test_a_batch_that_makes_no_sense_is_named(fields: dict[str, object], want: str) -> None:
    error = refused(batch("192.0.2.1", **fields))
    assert want in error.details[0], f"got {error.details}, want {want!r}"


def test_only_the_first_twenty_bad_items_are_named() -> None:
    keys = b"\x18\xc0\0\2\x43" * 100
    error = refused(PackedBatch(Match.SOURCE, EntryKind.PREFIXES4, keys, "bulk"))
    assert len(error.details) == 21, f"got {len(error.details)} lines"
    assert error.details[-1] == "... and 80 more"
    assert "100 items" in error.message


@given(st.lists(batches(), max_size=4))
def test_entries_packed_are_the_entries(given_batches: list[PackedBatch]) -> None:
    entries = list(_entries(given_batches))
    assert sorted(map(str, _entries(packed.pack_entries(entries)))) == sorted(map(str, entries))


def _entries(found: list[PackedBatch]) -> Iterator[WhitelistEntry]:
    for one in found:
        for key in packed.split_keys(one.keys, one.kind.key_bytes):
            yield packed.entry_of((one.match, one.kind), key, one)


def test_a_million_hosts_are_packed_in_time() -> None:
    keys = b"".join((0x0A000000 + number).to_bytes(4) for number in range(1_000_000))
    wanted = [PackedBatch(Match.DESTINATION, EntryKind.HOSTS4, keys, "bulk")]
    best = 9.0
    for _ in range(3):
        table = EntryTable()
        begun = time.process_time()
        packed.check_batches(wanted, NOW)
        table.apply(table.plan(wanted))
        best = min(best, time.process_time() - begun)
    assert len(table) == 1_000_000
    assert best < 1.0, f"got {best:.2f} s of CPU, want under 1 s"
