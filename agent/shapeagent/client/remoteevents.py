# SPDX-License-Identifier: Apache-2.0
"""The events of an agent, over connections that break and agents that restart."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import grpc

from shapeagent.client.connection import Connection
from shapeagent.client.errors import error_of
from shapeagent.model.reports import Happened
from shapeagent.proto.shapectl.v1 import event_pb2 as pb
from shapeagent.proto.shapectl.v1 import event_pb2_grpc

_FIRST_PAUSE_S = 0.2
_LONGEST_PAUSE_S = 5.0
#: After these the stream is opened again: the agent has gone for now, or was faster than we are.
_OPENED_AGAIN = frozenset(
    {
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.CANCELLED,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
    }
)


class RemoteEvents:
    """Reads the events of one agent."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._stub = event_pb2_grpc.EventServiceStub(connection.channel)

    def watch(self, device: str, kinds: Sequence[str], *, follow: bool) -> Iterator[Happened]:
        """Yield what the agent remembers; where `follow`, go on with each new event.

        A stream that breaks is then opened again behind the last event, with growing pauses:
        nothing is told twice, and what was missed is counted.

        Raises: ShapeError, without `follow` also where the stream breaks.
        """
        request = pb.WatchEventsRequest(
            device=device, kinds=kinds, after_sequence=0, only_remembered=not follow
        )
        pause_s = _FIRST_PAUSE_S
        while True:
            try:
                for one in self._read(request, follow=follow):
                    yield one
                    pause_s = _FIRST_PAUSE_S
                if not follow:
                    return
            except grpc.RpcError as error:
                # one that has never answered is no agent that went away for a while
                if not (follow and request.run_id and error.code() in _OPENED_AGAIN):
                    raise error_of(error, str(self._connection.address)) from error
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _read(self, request: pb.WatchEventsRequest, *, follow: bool) -> Iterator[Happened]:
        """Yield the events of one stream, and note in the request how far it came."""
        limit_s = None if follow else self._connection.time_s()
        stream = self._stub.WatchEvents(request, timeout=limit_s)
        try:
            first = next(stream)
            if request.run_id != first.run_id:
                request.run_id, request.after_sequence = first.run_id, 0
            lost = first.lost
            for answer in stream:
                event = answer.event
                request.after_sequence = event.sequence
                yield Happened(
                    sequence=event.sequence,
                    unix_s=event.unix_s,
                    kind=event.kind,
                    device=event.device,
                    text=event.text,
                    details=dict(event.details),
                    lost=lost,
                )
                lost = 0
        finally:
            stream.cancel()
