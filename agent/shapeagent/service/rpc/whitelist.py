# SPDX-License-Identifier: Apache-2.0
"""The methods of WhitelistService: changes of a few and of a million, pages, generations."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

from shapeagent.client.messages import number_word, to_message
from shapeagent.model.errors import ConflictError, InputError
from shapeagent.model.reports import WhitelistChange
from shapeagent.proto.shapectl.v1 import whitelist_pb2 as pb
from shapeagent.service.engine import Engine
from shapeagent.service.rpc.batches import Batches
from shapeagent.service.rpc.changes import Asked, Done, Runner, Told
from shapeagent.service.rpc.contracts import UpdateObserver
from shapeagent.service.rpc.events import follow
from shapeagent.service.rpc.guard import Call
from shapeagent.service.rpc.requestids import check_request_id, digest_of
from shapeagent.service.rpc.requests import device_of

MOST_STREAM_BYTES = 64 << 20
MOST_UPLOADS = 4  # streams that are held in memory at once, of all servers; others wait
DEFAULT_PAGE = 1_000
MOST_PAGE = 10_000
_MODE = pb.DESCRIPTOR.enum_types_by_name["WhitelistMode"]
_MOST_TOKEN_CHARACTERS = 200


@dataclass(frozen=True, slots=True)
class _Head:
    """What a change says beside its entries."""

    request_id: str
    device: str
    replace: bool
    expected_generation: int | None
    yes_everything: bool
    netns: str
    why: str


class WhitelistServicer:
    """Its methods are named and called as gRPC's generated code wants it."""

    def __init__(self, runner: Runner, observe: UpdateObserver) -> None:
        self._runner = runner
        self._observe = observe
        self._uploads = threading.BoundedSemaphore(MOST_UPLOADS)

    # --- changes

    def UpdateWhitelist(
        self, request: pb.UpdateWhitelistRequest, call: Call
    ) -> pb.UpdateWhitelistResponse:
        """Make one change of what fits one message."""
        head = _head(request)
        change = Batches()
        _take(change, request)
        for texts in request.remove_texts:
            change.take_texts(texts, removes=True)
        for texts in request.add_texts:
            change.take_texts(texts, removes=False)
        done = self._apply(call, head, change, pb.UpdateWhitelistResponse)
        assert isinstance(done, pb.UpdateWhitelistResponse)
        return done

    def StreamWhitelist(
        self, requests: Iterator[pb.StreamWhitelistRequest], call: Call
    ) -> pb.StreamWhitelistResponse:
        """Make one change of many batches, once its commit is there."""
        if not self._uploads.acquire(timeout=call.left_s):
            raise ConflictError(
                "agent-busy",
                f"{MOST_UPLOADS} whitelist streams are under way, and none has ended in time.",
                hint="try again",
            )
        try:
            return self._receive(requests, call)
        finally:
            self._uploads.release()

    def _receive(
        self, requests: Iterator[pb.StreamWhitelistRequest], call: Call
    ) -> pb.StreamWhitelistResponse:
        head: _Head | None = None
        change = Batches()
        size_bytes = 0
        for number, request in enumerate(requests):
            part = request.WhichOneof("part")
            if head is None:
                if part != "begin":
                    raise InputError("begin-missing", "The stream does not start with `begin`.")
                head = _head(request.begin)
                continue
            size_bytes += request.ByteSize()
            if size_bytes > MOST_STREAM_BYTES:
                raise InputError(
                    "stream-too-large",
                    f"The batches have over {MOST_STREAM_BYTES >> 20} MiB.",
                    hint="packed batches say each group once; or make several changes",
                )
            match part:
                case "batches":
                    _take(change, request.batches)
                case "commit":
                    return self._commit(call, head, change, request.commit.entries, requests)
                case _:
                    raise InputError(
                        "bad-request", f"Message {number} of the stream is {part or 'empty'}."
                    )
        raise InputError(
            "commit-missing",
            "The stream has ended without `commit`: nothing was changed.",
            hint="send it all again",
        )

    def _commit(
        self,
        call: Call,
        head: _Head,
        change: Batches,
        entries: int,
        rest: Iterator[pb.StreamWhitelistRequest],
    ) -> pb.StreamWhitelistResponse:
        if entries != change.count:
            raise InputError(
                "entries-differ",
                f"The commit names {entries} entries, and {change.count} came in: "
                "nothing was changed.",
                hint="send it all again",
            )
        if next(rest, None) is not None:
            raise InputError("bad-request", "Something follows `commit`: nothing was changed.")
        done = self._apply(call, head, change, pb.StreamWhitelistResponse)
        assert isinstance(done, pb.StreamWhitelistResponse)
        return done

    def _apply(
        self,
        call: Call,
        head: _Head,
        change: Batches,
        answer_type: type[pb.UpdateWhitelistResponse] | type[pb.StreamWhitelistResponse],
    ) -> pb.UpdateWhitelistResponse | pb.StreamWhitelistResponse:
        began_s = time.monotonic()
        change.check()
        if head.replace and change.remove:
            raise InputError("bad-request", "A replacement removes what it does not name.")

        def work(engine: Engine) -> Done[pb.UpdateWhitelistResponse | pb.StreamWhitelistResponse]:
            found = engine.whitelist_apply(
                head.device,
                change.add,
                change.remove,
                replace=head.replace,
                expected_generation=head.expected_generation,
                yes_everything=head.yes_everything,
            )
            kind = "replace" if head.replace else "single" if change.count == 1 else "batch"
            self._observe(kind, time.monotonic() - began_s)
            answer = answer_type(change=to_message(found, pb.WhitelistChange))
            answer.change.notices.extend(change.notices)
            return Done(answer, new=_in_words(found), told=_told(found))

        asked = Asked(
            request_id=head.request_id,
            digest=digest_of(call.method, repr(head).encode(), change.digest.encode()),
            device=head.device,
            object=f"{head.device} whitelist",
            why=head.why,
            entries=change.count,
            entries_digest=change.digest,
        )
        return self._runner.change(call, asked, head.netns, work, answer_type)

    # --- looking

    def ListWhitelist(
        self, request: pb.ListWhitelistRequest, call: Call
    ) -> pb.ListWhitelistResponse:
        """Return one page of the entries in force."""
        device = device_of(request.device)
        size = request.page_size or DEFAULT_PAGE
        if size > MOST_PAGE:
            raise InputError("bad-page", f"A page has at most {MOST_PAGE:,} entries.")
        after = request.page_token[:_MOST_TOKEN_CHARACTERS] or None
        found = self._runner.look(
            call, request.netns, lambda engine: engine.whitelist_page(device, after, size)
        )
        return pb.ListWhitelistResponse(
            rows=[to_message(one, pb.WhitelistRow) for one in found.rows],
            next_page_token=found.after or "",
            generation=found.generation,
            total=found.total,
        )

    def WatchWhitelist(
        self, request: pb.WatchWhitelistRequest, call: Call
    ) -> Iterator[pb.WatchWhitelistResponse]:
        """Yield the generation in force, then each new one."""
        device = device_of(request.device)
        events = self._runner.events
        after = events.last  # before the look: a change between the two is told twice, not never
        status = self._runner.look(call, request.netns, lambda engine: engine.status(device)[0])
        sent = status.whitelist_generation
        yield pb.WatchWhitelistResponse(
            generation=sent, total=status.whitelist_entries, unix_s=time.time()
        )
        for event in follow(events, call, after):
            if event.kind != "whitelist-changed" or event.device != device:
                continue
            generation = int(event.details.get("generation", 0))
            if generation == sent:
                continue
            sent = generation
            yield pb.WatchWhitelistResponse(
                generation=generation,
                total=int(event.details.get("total", 0)),
                unix_s=event.unix_s,
            )


def _head(request: pb.UpdateWhitelistRequest | pb.StreamWhitelistRequest.Begin) -> _Head:
    """Return what a change says beside its entries, refused before they are read."""
    check_request_id(request.request_id)
    mode = number_word(_MODE, request.mode)
    if mode is None:
        raise InputError(
            "mode-missing",
            "The request does not say whether it merges or replaces.",
            hint="WHITELIST_MODE_MERGE adds and removes, WHITELIST_MODE_REPLACE sets all of it",
        )
    has_generation = request.HasField("expected_generation")
    return _Head(
        request_id=request.request_id,
        device=device_of(request.device),
        replace=mode == "replace",
        expected_generation=request.expected_generation if has_generation else None,
        yes_everything=request.yes_everything,
        netns=request.netns,
        why=request.why,
    )


def _take(
    change: Batches, batches: pb.UpdateWhitelistRequest | pb.StreamWhitelistRequest.Batches
) -> None:
    for batch in batches.remove:
        change.take(batch, removes=True)
    for batch in batches.add:
        change.take(batch, removes=False)


def _in_words(change: WhitelistChange) -> str:
    return (
        f"{change.added} added, {change.changed} changed, {change.removed} removed, "
        f"{change.unchanged} unchanged; {change.total} in force, generation {change.generation}"
    )


def _told(change: WhitelistChange) -> Told:
    """Return the event of a change; one of the same generation is told to nobody who watches."""
    details = {
        name: str(getattr(change, name))
        for name in ("generation", "total", "added", "changed", "removed")
    }
    return Told("whitelist-changed", _in_words(change), details)
