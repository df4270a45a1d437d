# SPDX-License-Identifier: Apache-2.0
"""One planned change of a whitelist's table, and what entries have in common."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from shapeagent.model.types import PackedBatch
from shapeagent.policy import packed
from shapeagent.policy.packed import Place

EMPTY: Mapping[bytes, int] = {}


class Group(NamedTuple):
    """What entries have in common beside their place."""

    traffic_class: str
    owner: str
    reason: str
    expires_unix_s: float | None


def group_of(batch: PackedBatch) -> Group:
    """Return the group of a batch's entries."""
    return Group(batch.traffic_class, batch.owner, batch.reason, batch.expires_unix_s)


@dataclass(slots=True)
class Delta:
    """One change of a table, by place: what is written, what is deleted, and what stood there.

    columns: instead of these the columns of a whole replacement; then `old` has those before.
    """

    puts: dict[Place, dict[bytes, int]] = field(default_factory=dict)
    deletes: dict[Place, Collection[bytes]] = field(default_factory=dict)
    old: dict[Place, dict[bytes, int]] = field(default_factory=dict)
    columns: dict[Place, dict[bytes, int]] | None = None
    added: int = 0
    changed: int = 0
    removed: int = 0
    unchanged: int = 0

    @property
    def is_empty(self) -> bool:
        """Whether nothing would change."""
        return not (self.added or self.changed or self.removed)

    @property
    def size(self) -> int:
        """How many entries are written or deleted."""
        return self.added + self.changed + self.removed

    def single(self) -> tuple[Place, bytes, int | None] | None:
        """Return the one key that changes, with its new group (None: deleted), or None of many."""
        if self.size != 1 or self.columns is not None:
            return None
        for place, fresh in self.puts.items():
            for key, number in fresh.items():
                return place, key, number
        for place, gone in self.deletes.items():
            for key in gone:
                return place, key, None
        return None

    def inverse(self) -> Delta:
        """Return the change that takes this one back. Its group numbers stay those of the table."""
        if self.columns is not None:
            found = Delta(columns=self.old, old=self.columns)
        else:
            puts = {place: dict(old) for place, old in self.old.items()}
            gone: dict[Place, Collection[bytes]] = {
                place: [key for key in fresh if key not in puts.get(place, EMPTY)]
                for place, fresh in self.puts.items()
            }
            found = Delta(puts=puts, deletes=gone, old=dict(self.puts))
        found.added, found.changed, found.removed = self.removed, self.changed, self.added
        return found


def placed(batch: PackedBatch) -> Iterator[tuple[Place, list[bytes]]]:
    """Yield the keys of a batch by place: a prefix of full length is a host."""
    kind = batch.kind
    keys = packed.split_keys(batch.keys, kind.key_bytes)
    full = 8 * kind.address_bytes
    if kind.is_prefix and full in batch.keys[:: kind.key_bytes]:
        host = packed.kind_of(kind.address_bytes, is_pair=False, is_host=True)
        yield (batch.match, host), [key[1:] for key in keys if key[0] == full]
        keys = [key for key in keys if key[0] != full]
    yield (batch.match, kind), keys
