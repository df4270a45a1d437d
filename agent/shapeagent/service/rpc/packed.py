# SPDX-License-Identifier: Apache-2.0
"""Packed whitelist batches as entries, checked as a whole.

Layouts are in proto/shapectl/v1/whitelist.proto. `PackedChange.apply` is the
one place that knows how the engine takes them.
"""

from __future__ import annotations

import hashlib
import math
import time
from dataclasses import dataclass, field

from shapeagent.client.messages import number_word
from shapeagent.model.errors import ConflictError, InputError
from shapeagent.model.reports import WhitelistChange, WhitelistRow
from shapeagent.model.types import Match, WhitelistEntry
from shapeagent.policy.whitelist import (
    LineDefaults,
    canonical_prefix,
    format_prefix,
    parse_entry,
)
from shapeagent.proto.shapectl.v1 import common_pb2
from shapeagent.proto.shapectl.v1.whitelist_pb2 import (
    WhitelistBatch,
    WhitelistGroup,
    WhitelistTexts,
)
from shapeagent.service.engine import Engine

MOST_ENTRIES = 2_000_000  # of one change
MAX_NAMED_BAD_ITEMS = 20
_MOST_TEXT_CHARACTERS = 500  # of an owner or a reason
_MAPPED = bytes(10) + b"\xff\xff"  # ::ffff:0:0/96, RFC 4291 section 2.5.5.2
_ENUM = common_pb2.DESCRIPTOR.enum_types_by_name["Match"]

_End = tuple[bytes, int]


@dataclass(frozen=True, slots=True)
class Group:
    """What all entries of a batch have in common."""

    match: Match
    traffic_class: str
    owner: str
    reason: str
    expires_unix_s: float | None


@dataclass
class PackedChange:
    """A whitelist change as it comes in, batch by batch; what is wrong is kept until `check`."""

    added: list[WhitelistEntry] = field(default_factory=list)
    removed: list[WhitelistEntry] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)
    bad: list[str] = field(default_factory=list)
    bad_count: int = 0
    count: int = 0  # entries that came in
    batches: int = 0

    def __post_init__(self) -> None:
        self._digest = hashlib.sha256()

    @property
    def digest(self) -> str:
        """SHA-256 of all batches as they came in."""
        return self._digest.hexdigest()

    def add(self, batch: WhitelistBatch) -> None:
        """Take a batch of entries to add. Raises: InputError stream-too-large, bad-group."""
        self._take(batch, self.added, b"+")

    def remove(self, batch: WhitelistBatch) -> None:
        """Take a batch of entries to remove. Raises: as `add`."""
        self._take(batch, self.removed, b"-")

    def add_texts(self, texts: WhitelistTexts) -> None:
        """Take entries in words to add. Raises: as `add`."""
        self._take_texts(texts, self.added, b"+")

    def remove_texts(self, texts: WhitelistTexts) -> None:
        """Take entries in words to remove. Raises: as `add`."""
        self._take_texts(texts, self.removed, b"-")

    def check(self) -> None:
        """Raise InputError whitelist-invalid where any entry was bad, with the first of them."""
        if not self.bad_count:
            return
        more = self.bad_count - len(self.bad)
        raise InputError(
            "whitelist-invalid",
            f"{self.bad_count} of {self.count} entries cannot be used; nothing was changed.",
            hint="addresses are packed in network order and canonical: see whitelist.proto",
            details=[*self.bad, *([f"... and {more} more"] if more else [])],
        )

    def apply(
        self,
        engine: Engine,
        device: str,
        *,
        replace: bool,
        expected_generation: int | None,
        yes_everything: bool,
    ) -> WhitelistChange:
        """Put the change in force by one switch. Raises: as Engine.whitelist_replace."""
        if replace:
            return engine.whitelist_replace(
                device,
                self.added,
                yes_everything=yes_everything,
                expected_generation=expected_generation,
            )
        if expected_generation is not None:
            found = engine.status(device)[0].whitelist_generation
            if found != expected_generation:
                raise ConflictError(
                    "generation-differs",
                    f"The whitelist is at generation {found}, not {expected_generation}.",
                    hint="list it, and try again with the new generation",
                )
        if not self.removed:
            return engine.whitelist_add(device, self.added, yes_everything=yes_everything)
        if not self.added:
            return engine.whitelist_remove(device, self.removed)
        return self._merge(engine, device, yes_everything)

    def _merge(self, engine: Engine, device: str, yes_everything: bool) -> WhitelistChange:
        """Add and remove by one switch: the list as it then is replaces the one before."""
        wanted = {_key(one): one for one in map(_entry_of, engine.whitelist_list(device))}
        for one in self.removed:
            wanted.pop(_key(one), None)
        wanted.update((_key(one), one) for one in self.added)
        return engine.whitelist_replace(
            device, list(wanted.values()), yes_everything=yes_everything
        )

    # --- reading

    def _take(self, batch: WhitelistBatch, target: list[WhitelistEntry], sign: bytes) -> None:
        number = self.batches
        self.batches += 1
        self._digest.update(
            sign + hashlib.sha256(batch.SerializeToString(deterministic=True)).digest()
        )
        group = group_of(batch.group, number, needs_class=sign == b"+")
        wrong: tuple[bytes, ...]
        parts: tuple[tuple[bytes, int, str], ...]
        if group.match is Match.PAIR:
            wrong = (batch.hosts4, batch.hosts6, batch.prefixes4, batch.prefixes6)
            parts = ((batch.pairs4, 8, "pairs4"), (batch.pairs6, 32, "pairs6"))
        else:
            wrong = (batch.pairs4, batch.pairs6)
            parts = (
                (batch.hosts4, 4, "hosts4"),
                (batch.hosts6, 16, "hosts6"),
                (batch.prefixes4, 5, "prefixes4"),
                (batch.prefixes6, 17, "prefixes6"),
            )
        if any(wrong):
            raise InputError(
                "bad-group",
                f"Batch {number}: pairs stand in a group of MATCH_PAIR, and nothing else does.",
            )
        for data, width, name in parts:
            if len(data) % width:
                raise InputError(
                    "bad-batch",
                    f"Batch {number}: {name} has {len(data)} bytes, no multiple of {width}.",
                )
            self._count(len(data) // width)
            if data:
                self._unpack(data, width, group, target, f"batch {number} {name}")

    def _count(self, more: int) -> None:
        self.count += more
        if self.count > MOST_ENTRIES:
            raise InputError(
                "stream-too-large",
                f"A change has at most {MOST_ENTRIES:,} entries.",
                hint="a prefix says more than its hosts; or make several changes",
            )

    def _unpack(
        self, data: bytes, width: int, group: Group, target: list[WhitelistEntry], place: str
    ) -> None:
        for index, start in enumerate(range(0, len(data), width)):
            source, destination = _ends(data[start : start + width], group.match)
            for end in (source, destination):
                why = _not_canonical(end) if end is not None else ""
                if why:
                    self._note_bad(f"{place}[{index}]: {why}")
            target.append(
                WhitelistEntry(
                    group.match,
                    group.traffic_class,
                    source,
                    destination,
                    group.owner,
                    group.reason,
                    group.expires_unix_s,
                )
            )

    def _take_texts(self, texts: WhitelistTexts, target: list[WhitelistEntry], sign: bytes) -> None:
        number = self.batches
        self.batches += 1
        self._digest.update(
            sign + hashlib.sha256(texts.SerializeToString(deterministic=True)).digest()
        )
        group = group_of(texts.group, number, needs_class=sign == b"+")
        defaults = LineDefaults(
            traffic_class=group.traffic_class or "any",
            match=group.match,
            owner=group.owner,
            reason=group.reason,
            expires_unix_s=group.expires_unix_s,
            now_unix_s=time.time(),
        )
        self._count(len(texts.entries))
        for index, text in enumerate(texts.entries):
            try:
                entry, notices = parse_entry(text, defaults)
            except InputError as error:
                self._note_bad(f"batch {number} entries[{index}]: {error.message}")
                continue
            target.append(entry)
            self.notices += notices[: max(0, 100 - len(self.notices))]

    def _note_bad(self, text: str) -> None:
        self.bad_count += 1
        if len(self.bad) < MAX_NAMED_BAD_ITEMS:
            self.bad.append(text)


def group_of(group: WhitelistGroup, number: int, *, needs_class: bool) -> Group:
    """Return the group of a batch. Raises: InputError bad-group, entry-expired."""
    expires = group.expires_unix_s if group.HasField("expires_unix_s") else None
    if group.match not in _ENUM.values_by_number:
        raise InputError("bad-group", f"Batch {number}: {group.match} is no match.")
    if needs_class and not group.traffic_class:
        raise InputError("bad-group", f"Batch {number}: its group has no class.")
    for name in ("traffic_class", "owner", "reason"):
        if len(getattr(group, name)) > _MOST_TEXT_CHARACTERS:
            raise InputError(
                "bad-group", f"Batch {number}: {name} has over {_MOST_TEXT_CHARACTERS} characters."
            )
    if expires is not None and (not math.isfinite(expires) or expires > 2.5e11):
        raise InputError("bad-group", f"Batch {number}: {expires} is no time.")
    if expires is not None and expires <= time.time():
        raise InputError(
            "entry-expired", f"Batch {number}: its time was over {time.time() - expires:.0f} s ago."
        )
    return Group(
        Match(number_word(_ENUM, group.match) or Match.DESTINATION),
        group.traffic_class,
        group.owner,
        group.reason,
        expires,
    )


def _not_canonical(end: _End) -> str:
    """Return what is wrong with an address and length, "" where nothing is."""
    packed, length = end
    bits = 8 * len(packed)
    if length > bits:
        return f"the prefix length is {length}, and at most {bits}"
    if length < bits and int.from_bytes(packed, "big") & ((1 << (bits - length)) - 1):
        return f"{format_prefix((packed, bits))}/{length} has host bits"
    if bits == 128 and packed.startswith(_MAPPED):
        return f"{format_prefix(end)} is IPv4 and stands with the IPv6"
    return ""


def _ends(item: bytes, match: Match) -> tuple[_End | None, _End | None]:
    """Return (source, destination) of one packed item."""
    if match is Match.PAIR:
        half = len(item) // 2
        return (item[:half], 8 * half), (item[half:], 8 * half)
    end = (item[1:], item[0]) if len(item) in (5, 17) else (item, 8 * len(item))
    return (end, None) if match is Match.SOURCE else (None, end)


def _entry_of(row: WhitelistRow) -> WhitelistEntry:
    return WhitelistEntry(
        Match(row.match),
        row.traffic_class,
        canonical_prefix(row.source)[0] if row.source else None,
        canonical_prefix(row.destination)[0] if row.destination else None,
        row.owner,
        row.reason,
        row.expires_unix_s,
    )


def _key(entry: WhitelistEntry) -> tuple[Match, _End | None, _End | None]:
    return (entry.match, entry.source, entry.destination)
