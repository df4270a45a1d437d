# SPDX-License-Identifier: Apache-2.0
"""Whitelist entries as packed batches of the API: each group once, addresses end to end."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from shapeagent.client.messages import word_number
from shapeagent.model.types import PackedBatch
from shapeagent.proto.shapectl.v1 import common_pb2
from shapeagent.proto.shapectl.v1.whitelist_pb2 import WhitelistBatch, WhitelistGroup

#: In one batch: 32 B each at most, far below the 4 MiB of a message.
MOST_IN_BATCH = 65_536
_MATCH = common_pb2.DESCRIPTOR.enum_types_by_name["Match"]


def batches_of(batches: Iterable[PackedBatch]) -> Iterator[WhitelistBatch]:
    """Yield packed batches as messages of at most 65,536 entries."""
    for one in batches:
        group = WhitelistGroup(
            traffic_class=one.traffic_class,
            match=word_number(_MATCH, one.match.value),  # type: ignore[arg-type]
            owner=one.owner,
            reason=one.reason,
            expires_unix_s=one.expires_unix_s,
        )
        step = MOST_IN_BATCH * one.kind.key_bytes
        for start in range(0, len(one.keys), step):
            batch = WhitelistBatch(group=group)
            setattr(batch, one.kind.value, one.keys[start : start + step])
            yield batch
