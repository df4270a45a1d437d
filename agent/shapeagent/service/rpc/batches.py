# SPDX-License-Identifier: Apache-2.0
"""Whitelist batches of the API as the engine takes them, bounded; the engine checks addresses."""

from __future__ import annotations

import hashlib
import math
import time
from dataclasses import dataclass, field

from shapeagent.client.messages import number_word
from shapeagent.model.errors import InputError
from shapeagent.model.types import EntryKind, Match, PackedBatch, WhitelistEntry
from shapeagent.policy.packed import MAX_NAMED_BAD_ITEMS, invalid, pack_entries
from shapeagent.policy.whitelist import LineDefaults, parse_entry
from shapeagent.proto.shapectl.v1 import common_pb2
from shapeagent.proto.shapectl.v1.whitelist_pb2 import (
    WhitelistBatch,
    WhitelistGroup,
    WhitelistTexts,
)

MOST_ENTRIES = 2_000_000  # of one change
_MOST_NOTICES = 100
_MOST_TEXT_CHARACTERS = 500  # of an owner or a reason
_MOST_UNIX_S = 2.5e11
_MATCH = common_pb2.DESCRIPTOR.enum_types_by_name["Match"]
_ANY_CLASS = "any"  # of a text that is removed: its class does not matter


@dataclass
class Batches:
    """A whitelist change as it comes in."""

    add: list[PackedBatch] = field(default_factory=list)
    remove: list[PackedBatch] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)
    count: int = 0  # entries that came in
    _bad: list[str] = field(default_factory=list)
    _bad_count: int = 0

    def __post_init__(self) -> None:
        self._digest = hashlib.sha256()
        self._texts = 0

    @property
    def digest(self) -> str:
        """SHA-256 of all batches as they came in."""
        return self._digest.hexdigest()

    def take(self, batch: WhitelistBatch, *, removes: bool) -> None:
        """Take a packed batch.

        Raises: InputError bad-group, stream-too-large; whitelist-invalid where bytes are no
            whole number of items.
        """
        self._note(batch, removes)
        target = self.remove if removes else self.add
        for kind in EntryKind:
            keys: bytes = getattr(batch, kind.value)
            if not keys:
                continue
            packed = packed_batch(batch.group, kind, keys, needs_class=not removes)
            if len(keys) % kind.key_bytes:
                text = f"{kind.value} has {len(keys)} bytes, not a multiple of {kind.key_bytes}"
                raise invalid([f"batch {len(target) + 1} {text}"], 1)
            self._count(packed.count)
            target.append(packed)

    def take_texts(self, texts: WhitelistTexts, *, removes: bool) -> None:
        """Take entries in words. Raises: InputError bad-group, stream-too-large."""
        self._note(texts, removes)
        self._texts += 1
        self._count(len(texts.entries))
        like = packed_batch(texts.group, EntryKind.HOSTS4, b"", needs_class=not removes)
        defaults = LineDefaults(
            traffic_class=like.traffic_class or _ANY_CLASS,
            match=like.match,
            owner=like.owner,
            reason=like.reason,
            expires_unix_s=like.expires_unix_s,
            now_unix_s=time.time(),
        )
        found: list[WhitelistEntry] = []
        for index, text in enumerate(texts.entries):
            try:
                entry, notices = parse_entry(text, defaults)
            except InputError as error:
                self._bad_count += 1
                if len(self._bad) < MAX_NAMED_BAD_ITEMS:
                    self._bad.append(f"texts {self._texts} item {index}: {error.message}")
                continue
            found.append(entry)
            self.notices += notices[: max(0, _MOST_NOTICES - len(self.notices))]
        (self.remove if removes else self.add).extend(pack_entries(found))

    def check(self) -> None:
        """Raise InputError whitelist-invalid where any text was bad, with the first of them."""
        if self._bad_count:
            raise invalid(self._bad, self._bad_count)

    def _note(self, message: WhitelistBatch | WhitelistTexts, removes: bool) -> None:
        data = message.SerializeToString(deterministic=True)
        self._digest.update((b"-" if removes else b"+") + hashlib.sha256(data).digest())

    def _count(self, more: int) -> None:
        self.count += more
        if self.count > MOST_ENTRIES:
            raise InputError(
                "stream-too-large",
                f"A change has at most {MOST_ENTRIES:,} entries.",
                hint="a prefix says more than its hosts; or make several changes",
            )


def packed_batch(
    group: WhitelistGroup, kind: EntryKind, keys: bytes, *, needs_class: bool
) -> PackedBatch:
    """Return a batch of one kind. Raises: InputError bad-group."""
    if group.match not in _MATCH.values_by_number:
        raise InputError("bad-group", f"{group.match} is no match.")
    if needs_class and not group.traffic_class:
        raise InputError("bad-group", "A group has no class.")
    for name in ("traffic_class", "owner", "reason"):
        if len(getattr(group, name)) > _MOST_TEXT_CHARACTERS:
            raise InputError(
                "bad-group", f"{name} has over {_MOST_TEXT_CHARACTERS} characters in a group."
            )
    expires = group.expires_unix_s if group.HasField("expires_unix_s") else None
    if expires is not None and (not math.isfinite(expires) or abs(expires) > _MOST_UNIX_S):
        raise InputError("bad-group", f"{expires} is no time that a group could end at.")
    return PackedBatch(
        match=Match(number_word(_MATCH, group.match) or Match.DESTINATION),
        kind=kind,
        keys=keys,
        traffic_class=group.traffic_class,
        owner=group.owner,
        reason=group.reason,
        expires_unix_s=expires,
    )
