# SPDX-License-Identifier: Apache-2.0
"""Streams that last: events as they happen, and the whitelist's generations.

Readers share one bounded log and each remembers only how far it is, so a slow
one costs no memory; one that the log has overtaken is cut off.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable, Iterator

from shapeagent.client.messages import to_message
from shapeagent.model.errors import ConflictError
from shapeagent.proto.shapectl.v1 import event_pb2 as pb
from shapeagent.service.rpc.contracts import Events
from shapeagent.service.rpc.guard import Call
from shapeagent.telemetry.events import Event

ASK_EVERY_S = 10.0  # whether the caller still may


class EventServicer:
    """Its methods are named and called as gRPC's generated code wants it."""

    def __init__(self, events: Events) -> None:
        self._events = events
        self.run_id = secrets.token_hex(8)

    def WatchEvents(
        self, request: pb.WatchEventsRequest, call: Call
    ) -> Iterator[pb.WatchEventsResponse]:
        """Yield one message at once, then one for each event."""
        after = self._events.last
        lost = 0
        if request.HasField("after_sequence"):
            same_run = request.run_id == self.run_id and request.after_sequence <= after
            after = request.after_sequence if same_run else 0
            if same_run:
                _, lost = self._events.after(after)
            after += lost
        yield pb.WatchEventsResponse(run_id=self.run_id, lost=lost)
        kinds = frozenset(request.kinds)
        source: Iterable[Event] = follow(self._events, call, after)
        if request.only_remembered:
            source = self._events.after(after)[0]
        for event in source:
            if request.device and event.device != request.device:
                continue
            if kinds and event.kind not in kinds:
                continue
            yield pb.WatchEventsResponse(run_id=self.run_id, event=to_message(event, pb.Event))


def follow(events: Events, call: Call, after: int) -> Iterator[Event]:
    """Yield events after a sequence number until the client goes.

    Raises: ConflictError slow-client: the log has overtaken it. PrivilegeError: its certificate
        has ended, or its role was taken away.
    """
    context = call.context
    context.add_callback(events.wake)  # its client goes, or the server stops
    ask_at_s = time.monotonic() + ASK_EVERY_S
    while context.is_active():
        found, lost = events.after(
            after, max(0.0, ask_at_s - time.monotonic()), wanted=context.is_active
        )
        if time.monotonic() >= ask_at_s:
            call.admit()
            ask_at_s = time.monotonic() + ASK_EVERY_S
        elif not found:
            return  # the client has gone, or the log is closed
        if lost:
            raise ConflictError(
                "slow-client",
                f"{lost} events came faster than you read; the last that you have is {after}.",
                hint="watch again with after_sequence, or fewer kinds",
            )
        for event in found:
            yield event
            after = event.sequence
