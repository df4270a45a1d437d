# SPDX-License-Identifier: Apache-2.0
"""The whitelist on disk: a log of changes, each with a checksum, now and then written anew.

Not SQLite: a million rows take it 1.7 s to write and 0.6 s to read, the log 0.1
and 0.25 s, and it does not notice a byte that changed in a row.

A record is on disk before the kernel is changed. It names the mark of the lists before and after
it, so that whoever opens the log after a kill sees from the kernel whether the
change came into force (`whitelisting` then finishes it).
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import struct
import zlib
from array import array
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shapeagent.model.errors import ConflictError
from shapeagent.model.types import EntryKind, Match
from shapeagent.policy.entrychange import Delta, Group
from shapeagent.policy.entrytable import EntryTable
from shapeagent.policy.packed import Place, split_keys
from shapeagent.service.listfacts import (
    CRC,
    HEAD,
    LAYOUT,
    LAYOUT_PREFIX,
    MAGIC,
    TAIL_BYTES,
    ListFacts,
    pack_tail,
    unpack_tail,
)
from shapeagent.service.state import sync_path, unwritable, write_down

_GARBAGE_BYTES = 1 << 20  # that a log may hold beside as much as what is in force
_PLACES: Mapping[tuple[str, str], Place] = {
    (match.value, kind.value): (match, kind) for match in Match for kind in EntryKind
}


@dataclass(frozen=True, slots=True)
class Marks:
    """Of the kernel's lists before and after a change, and the clock that expiries went by.

    clock_offset_s: Unix time less the kernel's, when the deadlines in force were computed.
    """

    before: int
    after: int
    clock_offset_s: float = 0.0


@dataclass(slots=True)
class Loaded:
    """What a log says. `why` is empty where it is whole; then `end` is the end of the file.

    is_torn: only its end is missing, as a kill in the middle of a write leaves it.
    """

    table: EntryTable = field(default_factory=EntryTable)
    generation: int = 0
    marks: Marks = Marks(0, 0)
    end: int = 0
    live_bytes: int = 0
    why: str = ""
    is_torn: bool = False

    def agrees_with(self, mark: int) -> bool:
        """Return whether the kernel has what the log says, or what was before the last change."""
        return mark in (self.marks.before, self.marks.after)


# --- records


def _body(
    what: str,
    generation: int,
    marks: Marks,
    groups: Mapping[int, Group],
    sections: Iterable[tuple[str, Place, Collection[bytes], array[int] | None]],
) -> bytes:
    heads: list[list[object]] = []
    blobs: list[bytes] = []
    for verb, (match, kind), keys, numbers in sections:
        if not keys:
            continue
        one = None if numbers is None or len(set(numbers)) > 1 else numbers[0]
        heads.append([verb, match.value, kind.value, len(keys), one])
        blobs.append(b"".join(keys))
        if numbers is not None and one is None:
            blobs.append(numbers.tobytes())
    head = {
        "what": what,
        "generation": generation,
        "before": marks.before,
        "after": marks.after,
        "clock_offset_s": marks.clock_offset_s,
        "groups": [[number, *group] for number, group in groups.items()],
        "sections": heads,
    }
    text = json.dumps(head, separators=(",", ":")).encode()
    return b"".join((CRC.pack(len(text)), text, *blobs))


def record_all(
    columns: Mapping[Place, Mapping[bytes, int]],
    groups: Mapping[int, Group],
    generation: int,
    marks: Marks,
) -> bytes:
    """Return the record of a whole table. `groups`: at least those in use."""
    used: set[int] = set()
    sections: list[tuple[str, Place, Collection[bytes], array[int] | None]] = []
    for place, column in columns.items():
        numbers = array("I", column.values())
        used.update(numbers)
        sections.append(("put", place, column.keys(), numbers))
    known = {number: groups[number] for number in used}
    body = _body("all", generation, marks, known, sections)
    return _record(body, ListFacts(sum(map(len, columns.values())), generation, marks.after))


def record_change(
    delta: Delta, groups: Mapping[int, Group], entries: int, generation: int, marks: Marks
) -> bytes:
    """Return the record of a change. `entries`: how many there are after it."""
    sections: list[tuple[str, Place, Collection[bytes], array[int] | None]] = [
        ("delete", place, keys, None) for place, keys in delta.deletes.items()
    ]
    used: set[int] = set()
    for place, fresh in delta.puts.items():
        numbers = array("I", fresh.values())
        used.update(numbers)
        sections.append(("put", place, fresh.keys(), numbers))
    known = {number: groups[number] for number in used}
    body = _body("change", generation, marks, known, sections)
    return _record(body, ListFacts(entries, generation, marks.after))


def record_mark(entries: int, generation: int, marks: Marks) -> bytes:
    """Return the record that says only which lists are in force."""
    body = _body("mark", generation, marks, {}, ())
    return _record(body, ListFacts(entries, generation, marks.after))


def _record(body: bytes, facts: ListFacts) -> bytes:
    head = HEAD.pack(MAGIC, len(body), zlib.crc32(body))
    return b"".join((head, body, pack_tail(facts, len(body))))


# --- reading


def load(path: Path) -> Loaded:
    """Return what a log says; of a damaged one what its whole records say.

    Raises:
        FileNotFoundError; OSError.
        ConflictError: "state-other-version": it is left alone.
    """
    data = memoryview(path.read_bytes())
    found = Loaded()
    if data[: len(LAYOUT)] != LAYOUT:
        if bytes(data[: len(LAYOUT_PREFIX)]) == LAYOUT_PREFIX and b"\n" in bytes(data[:40]):
            raise _other_layout(path)
        found.why = "it is no whitelist of this layout"
        return found
    at, bad_at = len(LAYOUT), None
    while at < len(data):
        record = _cut(data, at)
        if record is None:
            if bad_at is None:
                bad_at, found.why, found.is_torn = at, "it is cut or changed", True
            at = _next_record(data, at + 1)
            continue
        found.is_torn = False  # a record behind the damage: no kill leaves that
        body, size, is_whole = record
        try:
            holds_all = _take(found, body, size)
        except (ValueError, KeyError, TypeError, IndexError, struct.error) as error:
            bad_at, found.why = at, f"a record cannot be read: {error}"
            holds_all = False
        if not is_whole:  # most of what it says is right, and all of it is compared with the kernel
            bad_at, found.why = at, "a checksum does not agree"
        elif holds_all:
            bad_at, found.why = None, ""  # what was wrong before it is of no use any more
        at += size
        if bad_at is None:
            found.end = at
    if not found.end:
        found.why = found.why or "it holds no record"
    return found


def _other_layout(path: Path) -> ConflictError:
    return ConflictError(
        "state-other-version",
        f"{path} was written by another version of shapectl.",
        hint="use the shapectl that wrote it; shapectl detach removes it",
    )


def _cut(data: memoryview, at: int) -> tuple[memoryview, int, bool] | None:
    """Return the body of the record at a place, the record's size and whether its sum agrees.

    None where there is none, or only the begin of one.
    """
    if at + HEAD.size > len(data):
        return None
    magic, body_bytes, checksum = HEAD.unpack_from(data, at)
    begin, end = at + HEAD.size, at + HEAD.size + body_bytes
    if magic != MAGIC or end + TAIL_BYTES > len(data):
        return None
    tail = unpack_tail(bytes(data[end : end + TAIL_BYTES]))
    if tail is None or tail[1] != body_bytes:
        return None
    body = data[begin:end]
    return body, end + TAIL_BYTES - at, zlib.crc32(body) == checksum


def _next_record(data: memoryview, at: int) -> int:
    """Return where the next record may begin, or the end."""
    found = bytes(data[at:]).find(MAGIC)
    return len(data) if found < 0 else at + found


def _take(found: Loaded, body: memoryview, size: int) -> bool:
    """Do to the table what a record says. Returns whether the record holds all of it."""
    (head_bytes,) = CRC.unpack_from(body)
    head: dict[str, Any] = json.loads(bytes(body[4 : 4 + head_bytes]))
    if head["what"] == "all":
        found.table, found.live_bytes = EntryTable(), size
    elif head["what"] not in ("change", "mark"):
        raise ValueError(f"what is {head['what']!r}?")
    table = found.table
    for number, name, owner, reason, expires in head["groups"]:
        table.define(number, Group(name, owner, reason, expires))
    at = 4 + head_bytes
    for verb, match, kind, count, one in head["sections"]:
        place = _PLACES[match, kind]
        end = at + count * place[1].key_bytes
        keys = split_keys(body[at:end], place[1].key_bytes)
        at = end
        if verb == "delete":
            table.unload(place, keys)
            continue
        numbers: Iterable[int] = itertools.repeat(one)
        if one is None:
            numbers = array("I", bytes(body[at : at + 4 * count]))
            at += 4 * count
        table.load(place, keys, numbers)
    found.generation = head["generation"]
    found.marks = Marks(head["before"], head["after"], head["clock_offset_s"])
    return bool(head["what"] == "all")


# --- writing


class WhitelistLog:
    """A log that is open for writing. One process does so at a time: hold the lock."""

    def __init__(self, path: Path, end: int, live_bytes: int) -> None:
        self.path = path
        self._end = end
        self._last = end
        self._live_bytes = live_bytes
        self._descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        if os.fstat(self._descriptor).st_size > end:
            self._truncate(end)  # what a kill in the middle of a write left

    @classmethod
    def create(
        cls, path: Path, record: bytes, aside: Callable[[], object] | None = None
    ) -> WhitelistLog:
        """Return a new log with one record, in the place of what stood there.

        Args:
            aside: called once the new log is on disk, to move the old one away.

        Raises: FailedError state-unwritable.
        """
        _write_whole(path, record, aside)
        return cls(path, len(LAYOUT) + len(record), len(record))

    def append(self, record: bytes) -> None:
        """Write a record; it lasts from then on. Raises: FailedError state-unwritable."""
        left, at = memoryview(record), self._end
        try:
            while left:
                done = os.pwrite(self._descriptor, left, at)
                left, at = left[done:], at + done
            os.fdatasync(self._descriptor)
        except OSError as error:
            with contextlib.suppress(OSError):
                self._truncate(self._end)
            raise unwritable(self.path, error) from error
        self._last, self._end = self._end, at

    def undo(self) -> None:
        """Take the last record back. Raises: FailedError state-unwritable."""
        try:
            self._truncate(self._last)
            os.fdatasync(self._descriptor)
        except OSError as error:
            raise unwritable(self.path, error) from error
        self._end = self._last

    def note_whole(self, record: bytes) -> None:
        """Note that the last record holds all, so that what is before it is garbage."""
        self._live_bytes = len(record)

    @property
    def is_overgrown(self) -> bool:
        """Whether more is garbage than is worth keeping."""
        return self._end > 2 * self._live_bytes + _GARBAGE_BYTES

    def rewrite(self, record: bytes) -> None:
        """Keep one record that holds all. Raises: FailedError state-unwritable."""
        _write_whole(self.path, record)
        os.close(self._descriptor)
        self._descriptor = os.open(self.path, os.O_RDWR | os.O_CLOEXEC)
        self._live_bytes = len(record)
        self._end = self._last = len(LAYOUT) + len(record)

    def is_current(self) -> bool:
        """Return whether nobody else has written to the log, or put another in its place."""
        try:
            there = os.stat(self.path)
        except OSError:
            return False
        ours = os.fstat(self._descriptor)
        same = (there.st_dev, there.st_ino) == (ours.st_dev, ours.st_ino)
        return same and there.st_size == self._end

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)

    def _truncate(self, end: int) -> None:
        os.ftruncate(self._descriptor, end)


def _write_whole(path: Path, record: bytes, aside: Callable[[], object] | None = None) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_down(temporary, LAYOUT + record, lasting=True)
        if aside is not None:
            aside()
        temporary.rename(path)
        sync_path(path.parent)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise unwritable(path, error) from error
