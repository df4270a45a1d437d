# SPDX-License-Identifier: Apache-2.0
"""The whitelist of an agent: one message for few entries, a stream for many, pages to read."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import grpc

from shapeagent.client.connection import Connection, fresh_id
from shapeagent.client.errors import error_of
from shapeagent.client.messages import from_message
from shapeagent.client.packing import MOST_IN_BATCH, batches_of
from shapeagent.model.reports import WhitelistChange, WhitelistRow
from shapeagent.model.types import PackedBatch
from shapeagent.proto.shapectl.v1 import whitelist_pb2 as pb
from shapeagent.proto.shapectl.v1 import whitelist_pb2_grpc

PAGE = 10_000
#: Entries with a reason each are groups of one: a stream takes what a message does not.
MOST_MESSAGE_BYTES = 3 << 20
_BUNDLE_BYTES = 1 << 20
_STREAM_TRIES = 3
_FIRST_PAUSE_S = 0.1

_Batches = pb.StreamWhitelistRequest.Batches
_Parts = Callable[[], Iterator[pb.StreamWhitelistRequest]]


class RemoteWhitelist:
    """Changes and lists the whitelists of an agent's interfaces."""

    def __init__(self, connection: Connection, netns: str, why: str) -> None:
        self._connection = connection
        self._netns = netns
        self._why = why
        self._stub = whitelist_pb2_grpc.WhitelistServiceStub(connection.channel)

    def change(
        self,
        device: str,
        *,
        add: Sequence[PackedBatch] = (),
        remove: Sequence[PackedBatch] = (),
        replace: bool = False,
        yes_everything: bool = False,
        expected_generation: int | None = None,
    ) -> WhitelistChange:
        """Return what a change came to; all of it is made, or nothing."""
        mode = pb.WhitelistMode
        head: dict[str, Any] = {
            "request_id": fresh_id(),
            "device": device,
            "mode": mode.WHITELIST_MODE_REPLACE if replace else mode.WHITELIST_MODE_MERGE,
            "expected_generation": expected_generation,
            "yes_everything": yes_everything,
            "netns": self._netns,
            "why": self._why,
        }
        count = sum(one.count for one in (*add, *remove))
        if count <= MOST_IN_BATCH:
            request = pb.UpdateWhitelistRequest(
                **head, add=batches_of(add), remove=batches_of(remove)
            )
            if request.ByteSize() < MOST_MESSAGE_BYTES:
                answer = self._connection.call(self._stub.UpdateWhitelist, request)
                return from_message(answer.change, WhitelistChange)
        begin = pb.StreamWhitelistRequest.Begin(**head)

        def parts() -> Iterator[pb.StreamWhitelistRequest]:
            message = pb.StreamWhitelistRequest
            yield message(begin=begin)
            for batches in _bundled(batches_of(remove), batches_of(add)):
                yield message(batches=batches)
            yield message(commit=message.Commit(entries=count))

        return self._stream(parts)

    def _stream(self, parts: _Parts) -> WhitelistChange:
        """Return what a stream of batches came to; one that was cut off is sent again."""
        for number in range(_STREAM_TRIES):
            try:
                limit_s = self._connection.time_s(long=True)
                answer = self._stub.StreamWhitelist(parts(), timeout=limit_s)
                return from_message(answer.change, WhitelistChange)
            except grpc.RpcError as error:
                is_last = number == _STREAM_TRIES - 1
                if error.code() is not grpc.StatusCode.UNAVAILABLE or is_last:
                    raise error_of(error, str(self._connection.address)) from error
            time.sleep(_FIRST_PAUSE_S * 2**number)
        raise AssertionError("the last try has returned or raised")

    def rows(self, device: str) -> tuple[WhitelistRow, ...]:
        """Return all entries."""
        return tuple(self._pages(device))

    def _pages(self, device: str) -> Iterator[WhitelistRow]:
        token = ""
        while True:
            wanted = pb.ListWhitelistRequest(
                device=device, page_size=PAGE, page_token=token, netns=self._netns
            )
            answer = self._connection.call(self._stub.ListWhitelist, wanted)
            for one in answer.rows:
                yield from_message(one, WhitelistRow)
            token = answer.next_page_token
            if not token:
                return


def _bundled(
    remove: Iterator[pb.WhitelistBatch], add: Iterator[pb.WhitelistBatch]
) -> Iterator[_Batches]:
    """Yield batches together, up to about 1 MiB: a message for each of a small group is slow."""
    bundle, size_bytes = _Batches(), 0
    for name, batches in (("remove", remove), ("add", add)):
        for batch in batches:
            getattr(bundle, name).append(batch)
            size_bytes += batch.ByteSize()
            if size_bytes > _BUNDLE_BYTES:
                yield bundle
                bundle, size_bytes = _Batches(), 0
    if size_bytes:
        yield bundle
