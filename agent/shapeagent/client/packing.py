# SPDX-License-Identifier: Apache-2.0
"""Whitelist entries as packed batches: each group once, addresses one behind the other."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator

from shapeagent.client.messages import word_number
from shapeagent.model.types import Match, WhitelistEntry
from shapeagent.proto.shapectl.v1 import common_pb2
from shapeagent.proto.shapectl.v1.whitelist_pb2 import WhitelistBatch, WhitelistGroup

#: Of one kind in one batch: 17 B each at most, far below the 4 MiB of a message.
MOST_IN_BATCH = 65_536
_MATCH = common_pb2.DESCRIPTOR.enum_types_by_name["Match"]
_Group = tuple[Match, str, str, str, float | None]


def pack(entries: Iterable[WhitelistEntry]) -> Iterator[WhitelistBatch]:
    """Yield the entries as batches of at most 65,536 of a kind."""
    groups: dict[_Group, dict[str, list[bytes]]] = defaultdict(lambda: defaultdict(list))
    for one in entries:
        group = (one.match, one.traffic_class, one.owner, one.reason, one.expires_unix_s)
        kind, data = _packed(one)
        groups[group][kind].append(data)
    for group, kinds in groups.items():
        for kind, items in kinds.items():
            for start in range(0, len(items), MOST_IN_BATCH):
                batch = WhitelistBatch(group=_group(group))
                setattr(batch, kind, b"".join(items[start : start + MOST_IN_BATCH]))
                yield batch


def _group(group: _Group) -> WhitelistGroup:
    match, traffic_class, owner, reason, expires_unix_s = group
    return WhitelistGroup(
        traffic_class=traffic_class,
        match=word_number(_MATCH, match.value),  # type: ignore[arg-type]
        owner=owner,
        reason=reason,
        expires_unix_s=expires_unix_s,
    )


def _packed(entry: WhitelistEntry) -> tuple[str, bytes]:
    """Return (field of the batch, bytes) of an entry."""
    if entry.match is Match.PAIR:
        assert entry.source is not None
        assert entry.destination is not None
        source, destination = entry.source[0], entry.destination[0]
        return ("pairs4" if len(source) == 4 else "pairs6"), source + destination
    end = entry.source or entry.destination
    assert end is not None
    packed, length = end
    version = "4" if len(packed) == 4 else "6"
    if length == 8 * len(packed):
        return f"hosts{version}", packed
    return f"prefixes{version}", bytes((length,)) + packed
