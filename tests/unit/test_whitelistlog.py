# SPDX-License-Identifier: Apache-2.0
"""The log of a whitelist: what was written is read, and damage is never taken for a list."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shapeagent.model.errors import ConflictError, FailedError
from shapeagent.model.types import Match, PackedBatch, WhitelistEntry
from shapeagent.policy import packed
from shapeagent.policy.entrytable import EntryTable
from shapeagent.policy.whitelist import LineDefaults, parse_entry
from shapeagent.service import listfacts
from shapeagent.service.whitelistlog import (
    Marks,
    WhitelistLog,
    load,
    record_all,
    record_change,
    record_mark,
)

LATER = 4_000_000_000.0


def batches(*texts: str) -> list[PackedBatch]:
    return packed.pack_entries(
        parse_entry(text, LineDefaults("bulk", now_unix_s=1.0))[0] for text in texts
    )


class Writer:
    """A table and its log, changed as the service does it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.table = EntryTable()
        self.generation = 0
        record = record_all(self.table.columns, self.table.groups, 0, Marks(0, 0))
        self.log = WhitelistLog.create(path, record)
        self.states = [(len(path.read_bytes()), self.entries())]

    def entries(self) -> list[WhitelistEntry]:
        return list(self.table.entries())

    def change(self, add: list[PackedBatch], remove: list[PackedBatch]) -> None:
        delta = self.table.plan(add, remove)
        total = len(self.table) + delta.added - delta.removed
        self.generation += 1
        marks = Marks(self.generation - 1, self.generation, 0.5)
        self.log.append(record_change(delta, self.table.groups, total, self.generation, marks))
        self.table.apply(delta)
        self._note()

    def replace(self, wanted: list[PackedBatch]) -> None:
        delta = self.table.plan_replace(wanted)
        self.generation += 1
        marks = Marks(self.generation - 1, self.generation, 0.5)
        assert delta.columns is not None
        record = record_all(delta.columns, self.table.groups, self.generation, marks)
        self.log.append(record)
        self.log.note_whole(record)
        self.table.apply(delta)
        self._note()

    def _note(self) -> None:
        self.states.append((self.path.stat().st_size, self.entries()))


def filled(path: Path) -> Writer:
    one = Writer(path)
    one.change(batches("192.0.2.1 owner=ä", "192.0.2.2", "2001:db8::/32 match=source"), [])
    one.change(batches("192.0.2.1 owner=b expires=@4000000000", "10.0.0.1>10.0.0.2"), [])
    one.change(batches("198.51.100.0/24 match=either"), batches("192.0.2.2"))
    return one


def test_what_was_written_is_read(tmp_path: Path) -> None:
    one = filled(tmp_path / "log")
    found = load(one.path)
    assert (found.why, found.is_torn, found.generation) == ("", False, 3)
    assert found.marks == Marks(2, 3, 0.5)
    assert list(found.table.entries()) == one.entries()
    assert found.table.next_due() == LATER
    assert found.end == one.path.stat().st_size
    facts = listfacts.read_facts(one.path)
    assert facts == listfacts.ListFacts(len(one.table), 3, 3), f"got {facts}"
    mode = one.path.stat().st_mode & 0o777
    assert mode == 0o600, f"got mode {mode:o}, want 600"


HOSTS = st.lists(st.integers(0, 9), max_size=5)
CHANGES = st.lists(
    st.tuples(st.booleans(), HOSTS, HOSTS, st.sampled_from(["bulk", "signal"])), max_size=6
)


@given(CHANGES)
@settings(max_examples=40)
def test_any_changes_are_read_back(
    tmp_path_factory: pytest.TempPathFactory, changes: list[tuple[bool, list[int], list[int], str]]
) -> None:
    one = Writer(tmp_path_factory.mktemp("log") / "log")
    for is_whole, add, remove, name in changes:
        put = batches(*(f"192.0.2.{n} class={name} match=source" for n in add))
        if is_whole:
            one.replace(put)
        else:
            one.change(put, batches(*(f"192.0.2.{n} match=source" for n in remove)))
        found = load(one.path)
        assert not found.why
        assert list(found.table.entries()) == one.entries()
        assert len(found.table) == listfacts.read_facts(one.path).entries
    one.log.close()


def test_a_cut_at_any_byte_leaves_the_changes_before_it(tmp_path: Path) -> None:
    one = filled(tmp_path / "log")
    data, cut = one.path.read_bytes(), tmp_path / "cut"
    for size in range(len(data)):
        cut.write_bytes(data[:size])
        found = load(cut)
        whole = [(end, entries) for end, entries in one.states if end <= size]
        if not whole:
            assert found.why, f"got nothing wrong with {size} bytes"
            continue
        end, entries = whole[-1]
        assert list(found.table.entries()) == entries, f"cut at {size}"
        assert found.end == end, f"got an end of {found.end} at {size}, want {end}"
        assert found.is_torn == (size != end), f"cut at {size}: got torn {found.is_torn}"
        if found.is_torn:
            with pytest.raises(ValueError, match="cut or changed"):
                listfacts.read_facts(cut)
            if size % 16:
                continue
            again = WhitelistLog(cut, found.end, found.live_bytes)
            again.append(record_mark(len(entries), 9, Marks(7, 8)))
            again.close()
            mended = load(cut)
            assert (mended.why, mended.generation) == ("", 9), f"got {mended.why} at {size}"
            assert list(mended.table.entries()) == entries


def test_any_changed_byte_is_noticed(tmp_path: Path) -> None:
    one = filled(tmp_path / "log")
    data, path = one.path.read_bytes(), tmp_path / "changed"
    for place in range(len(data)):
        path.write_bytes(data[:place] + bytes((data[place] ^ 1,)) + data[place + 1 :])
        try:
            found = load(path)
        except ConflictError:
            assert place < len(listfacts.LAYOUT), f"got another version at {place}"
            continue
        assert found.why, f"got nothing wrong with byte {place} changed"


def test_damage_before_a_record_of_all_does_not_matter(tmp_path: Path) -> None:
    one = filled(tmp_path / "log")
    end = one.path.stat().st_size
    one.replace(batches("203.0.113.1"))
    data = bytearray(one.path.read_bytes())
    data[end - 100] ^= 1
    one.path.write_bytes(data)
    found = load(one.path)
    assert not found.why, f"got {found.why}"
    assert list(found.table.entries()) == one.entries()
    assert found.end == len(data)


def test_of_damage_in_the_middle_the_rest_is_still_read(tmp_path: Path) -> None:
    """For owners and reasons; what is in force is the kernel's to say."""
    one = filled(tmp_path / "log")
    data = bytearray(one.path.read_bytes())
    data[one.states[1][0] + 60] ^= 0xFF
    one.path.write_bytes(data)
    found = load(one.path)
    assert found.why
    assert not found.is_torn
    assert {one.owner for one in found.table.entries()} == {"", "ä"}, f"got {found}"


def test_another_layout_is_refused_and_left(tmp_path: Path) -> None:
    """F4."""
    path = tmp_path / "log"
    path.write_bytes(b"shapectl-whitelist 2\nsomething")
    with pytest.raises(ConflictError) as caught:
        load(path)
    assert caught.value.reference == "state-other-version", f"got {caught.value.reference}"
    assert path.read_bytes() == b"shapectl-whitelist 2\nsomething"


@pytest.mark.parametrize("data", [b"", b"\0" * 4096, b"192.0.2.1 class=bulk\n", b"shapectl-wh"])
def test_what_is_no_log_is_damage(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "log"
    path.write_bytes(data)
    found = load(path)
    assert found.why
    assert not len(found.table)
    with pytest.raises(ValueError, match="no whitelist"):
        listfacts.read_facts(path)


def test_a_change_that_is_taken_back_is_gone(tmp_path: Path) -> None:
    one = filled(tmp_path / "log")
    before = one.path.read_bytes()
    one.log.append(record_mark(1, 9, Marks(3, 4)))
    assert load(one.path).generation == 9
    one.log.undo()
    assert one.path.read_bytes() == before


def test_a_log_written_anew_says_the_same(tmp_path: Path) -> None:
    one = filled(tmp_path / "log")
    assert one.log.is_current()
    one.log.rewrite(record_all(one.table.columns, one.table.groups, 3, Marks(3, 3, 0.5)))
    assert one.log.is_current()
    assert not one.log.is_overgrown
    assert list(load(one.path).table.entries()) == one.entries()
    one.change(batches("192.0.2.99"), [])
    found = load(one.path)
    assert (found.why, list(found.table.entries())) == ("", one.entries())
    assert [path.name for path in tmp_path.iterdir()] == ["log"], "got files left over"


def test_a_log_says_when_it_is_overgrown(tmp_path: Path) -> None:
    one = Writer(tmp_path / "log")
    many = [batches(*(f"10.{part}.{n >> 8}.{n & 255}" for n in range(9_000))) for part in (0, 1)]
    number = 0
    while not one.log.is_overgrown:
        one.change(many[number % 2], many[1 - number % 2])
        number += 1
    size = one.path.stat().st_size
    assert 1 << 20 < size < 2 << 20, f"got {size} bytes after {number} changes"


def test_another_writer_is_noticed(tmp_path: Path) -> None:
    one = filled(tmp_path / "log")
    other = WhitelistLog(one.path, one.path.stat().st_size, 0)
    assert one.log.is_current()
    other.append(record_mark(1, 9, Marks(3, 4)))
    assert not one.log.is_current()
    other.undo()
    assert one.log.is_current()
    other.rewrite(record_mark(1, 9, Marks(3, 4)))
    assert not one.log.is_current()
    one.path.unlink()
    assert not one.log.is_current()
    other.close()


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
@pytest.mark.parametrize("call", ["pwrite", "fdatasync"])
def test_a_write_that_fails_leaves_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, code: int
) -> None:
    one = filled(tmp_path / "log")
    before = one.path.read_bytes()
    real = os.pwrite

    def fail(descriptor: int, data: bytes = b"", at: int = 0) -> int:
        if call == "pwrite" and at == len(before):
            return real(descriptor, data[:10], at)  # a disk that fills in the middle
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, call, fail)
    with pytest.raises(FailedError) as caught:
        one.log.append(record_mark(1, 9, Marks(3, 4)))
    monkeypatch.undo()
    assert caught.value.reference == "state-unwritable", f"got {caught.value.reference}"
    assert os.strerror(code) in caught.value.message
    assert one.path.read_bytes() == before
    one.change(batches("192.0.2.99"), [])
    assert list(load(one.path).table.entries()) == one.entries()


def test_a_record_is_on_disk_before_append_returns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = filled(tmp_path / "log")
    done: list[str] = []
    real_write, real_sync = os.pwrite, os.fdatasync

    def write(descriptor: int, data: bytes, at: int) -> int:
        done.append("write")
        return real_write(descriptor, data, at)

    def sync(descriptor: int) -> None:
        done.append("sync")
        real_sync(descriptor)

    monkeypatch.setattr(os, "pwrite", write)
    monkeypatch.setattr(os, "fdatasync", sync)
    one.log.append(record_mark(1, 9, Marks(3, 4)))
    assert done == ["write", "sync"], f"got {done}"


def test_one_entry_is_a_few_hundred_bytes(tmp_path: Path) -> None:
    """Whatever the size of the list."""
    one = Writer(tmp_path / "log")
    keys = b"".join((0x0A000000 + number).to_bytes(4) for number in range(50_000))
    kind = packed.kind_of(4, is_pair=False, is_host=True)
    one.change([PackedBatch(Match.SOURCE, kind, keys, "bulk")], [])
    before = one.path.stat().st_size
    assert before < 200_000 + 1_000, f"got {before} bytes for 50,000 hosts"
    one.change(batches("192.0.2.1 match=source"), [])
    assert one.path.stat().st_size - before < 400
