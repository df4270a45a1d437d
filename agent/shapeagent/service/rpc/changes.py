# SPDX-License-Identifier: Apache-2.0
"""How a change is made: once for each request id, by the writer, audited before the reply.

What was acknowledged is in the audit log and remembered. A change whose caller
did not wait for its end is audited and remembered by the writer when it ends.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from google.protobuf.message import Message

from shapeagent.model.errors import ConflictError, InputError, PrivilegeError, ShapeError
from shapeagent.service.engine import Engine
from shapeagent.service.identity.auditline import AuditEntry
from shapeagent.service.rpc.contracts import Audit, Events, Ticket, Writer
from shapeagent.service.rpc.guard import Call
from shapeagent.service.rpc.requestids import Answer, RequestIds, check_request_id

_log = logging.getLogger("shapectl.agent.rpc")

_T = TypeVar("_T")
_M = TypeVar("_M", bound=Message)

_MARGIN_S = 0.1  # for the way back to the caller
_MOST_WHY_CHARACTERS = 500


@dataclass(frozen=True, slots=True)
class Told:
    """What becomes an event once a change is made."""

    kind: str
    text: str
    details: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Done(Generic[_M]):
    """What a change came to. `told` None: nothing has changed."""

    answer: _M
    old: str = ""
    new: str = ""
    told: Told | None = None


@dataclass(frozen=True, slots=True)
class Asked:
    """What a request for a change says of itself."""

    request_id: str
    digest: bytes
    device: str
    object: str
    why: str
    entries: int | None = None  # of a whitelist change
    entries_digest: str = ""


class Runner:
    """Runs work on the engine for calls: looks and changes."""

    def __init__(
        self, writer: Writer, audit: Audit, request_ids: RequestIds, events: Events
    ) -> None:
        self._writer = writer
        self._audit = audit
        self._request_ids = request_ids
        self.events = events
        self._lock = threading.Lock()
        self._running: dict[tuple[str, str], _Running] = {}

    def look(self, call: Call, netns: str, work: Callable[[Engine], _T]) -> _T:
        """Return what the work says. Raises: as the work; as Writer.run."""
        return self._writer.run(_checked(netns, work), timeout_s=_time_for(call))

    def change(
        self,
        call: Call,
        asked: Asked,
        netns: str,
        work: Callable[[Engine], Done[_M]],
        answer_type: type[_M],
    ) -> _M:
        """Make a change once, and return its answer.

        Raises: as the work; as Writer.run; InputError request-id-missing, bad-request-id,
            request-id-reused; ConflictError request-in-progress; FailedError
            audit-unwritable, state-unwritable.
        """
        check_request_id(asked.request_id)
        if len(asked.why) > _MOST_WHY_CHARACTERS:
            raise InputError("why-too-long", f"`why` has over {_MOST_WHY_CHARACTERS} characters.")
        with self._claim(call, asked) as running:
            known = self._request_ids.find(call.caller.who, asked.request_id)
            if known is not None:
                _same(known.digest, asked)
                return answer_type.FromString(known.message)
            ticket = self._audit.begin(_entry(call, asked, "ok"))
            return self._make(call, asked, running, ticket, _begun_in_time(call, netns, work))

    def _make(
        self,
        call: Call,
        asked: Asked,
        running: _Running,
        ticket: Ticket,
        work: Callable[[Engine], Done[_M]],
    ) -> _M:
        def end_late(done: Done[_M] | None, error: BaseException | None) -> None:
            try:
                if done is not None:
                    self._acknowledge(call, asked, ticket, done)
                else:
                    _end_failed(call, asked, ticket, error)
            except ShapeError as lost:
                _log.error("%s ended late and is not acknowledged: %s", asked.request_id, lost)
            finally:
                self._release(call, asked, running)

        job = _Job(work, end_late, running)
        try:
            done = self._writer.run(job.run, timeout_s=_time_for(call))
        except BaseException as error:
            is_late = isinstance(error, ShapeError) and error.reference == "still-running"
            if is_late and job.leave():
                raise  # the writer ends it
            if not is_late or job.done is None:
                _end_failed(call, asked, ticket, error)
                raise
            done = job.done  # it has ended while we looked
        self._acknowledge(call, asked, ticket, done)
        return done.answer

    def _acknowledge(self, call: Call, asked: Asked, ticket: Ticket, done: Done[_M]) -> None:
        told = done.told
        if told is not None:
            self.events.add(told.kind, asked.device, told.text, who=call.caller.who, **told.details)
        ticket.end(_entry(call, asked, "ok", done.old, done.new))
        self._request_ids.remember(
            call.caller.who,
            asked.request_id,
            Answer(asked.digest, done.answer.SerializeToString()),
        )

    @contextlib.contextmanager
    def _claim(self, call: Call, asked: Asked) -> Iterator[_Running]:
        """Be the only one who works on a request id; whoever comes second waits."""
        running = _Running(asked.digest)
        key = (call.caller.who, asked.request_id)
        while True:
            with self._lock:
                other = self._running.setdefault(key, running)
            if other is running:
                break
            _same(other.digest, asked)
            if not other.ended.wait(call.left_s):
                raise ConflictError(
                    "request-in-progress",
                    f"The change {asked.request_id} has begun and has not ended yet.",
                    hint="ask again with the same request_id",
                )
        try:
            yield running
        finally:
            if not running.left:
                self._release(call, asked, running)

    def _release(self, call: Call, asked: Asked, running: _Running) -> None:
        with self._lock:
            del self._running[(call.caller.who, asked.request_id)]
        running.ended.set()


class _Running:
    """A change that is being made."""

    def __init__(self, digest: bytes) -> None:
        self.digest = digest
        self.left = False  # its caller has gone: the writer ends it
        self.ended = threading.Event()


class _Job(Generic[_M]):
    """The work in the writer's thread; exactly one of the two threads ends it."""

    def __init__(
        self,
        work: Callable[[Engine], Done[_M]],
        end_late: Callable[[Done[_M] | None, BaseException | None], None],
        running: _Running,
    ) -> None:
        self._work = work
        self._end_late = end_late
        self._running = running
        self._lock = threading.Lock()
        self._over = False
        self.done: Done[_M] | None = None

    def run(self, engine: Engine) -> Done[_M]:
        """Return what the work came to."""
        error: BaseException | None = None
        try:
            self.done = self._work(engine)
        except BaseException as failed:
            error = failed
            raise
        finally:
            with self._lock:
                self._over = True
                left = self._running.left
            if left:
                self._end_late(self.done, error)
        return self.done

    def leave(self) -> bool:
        """Return whether the writer ends it from now on; not where the work is over already."""
        with self._lock:
            self._running.left = not self._over
            return self._running.left


def _entry(call: Call, asked: Asked, result: str, old: str = "", new: str = "") -> AuditEntry:
    return AuditEntry(
        who=call.caller.who,
        role=call.caller.role,
        peer=call.caller.peer,
        method=call.method,
        object=asked.object,
        old=old,
        new=new,
        why=asked.why,
        result=result,
        request_id=asked.request_id,
        entries=asked.entries,
        digest=asked.entries_digest,
    )


def _end_failed(call: Call, asked: Asked, ticket: Ticket, error: BaseException | None) -> None:
    reference = error.reference if isinstance(error, ShapeError) else "internal"
    with contextlib.suppress(ShapeError):  # what went wrong first is the answer
        ticket.end(_entry(call, asked, reference))


def _checked(netns: str, work: Callable[[Engine], _T]) -> Callable[[Engine], _T]:
    """Return the work, refused where it needs what an agent does not have."""

    def run(engine: Engine) -> _T:
        if netns and netns != engine.netns:
            raise PrivilegeError(
                "needs-root-cli",
                f"This agent serves {engine.netns or 'its own network namespace'}, not {netns}.",
                hint=f"on its host: sudo shapectl --netns {netns} …",
            )
        try:
            return work(engine)
        except PrivilegeError as error:
            raise PrivilegeError(
                "needs-root-cli",
                f"The agent may not do this: {error.message}",
                hint="on its host, the same command with sudo",
                details=error.details,
            ) from error

    return run


def _begun_in_time(call: Call, netns: str, work: Callable[[Engine], _T]) -> Callable[[Engine], _T]:
    """Return the work, refused where nobody waits for it any more when its turn comes."""
    checked = _checked(netns, work)

    def run(engine: Engine) -> _T:
        if not (call.left_s and call.context.is_active()):
            raise ConflictError(
                "agent-busy",
                "The caller has gone, or its time was over before the change began: "
                "nothing was done.",
                hint="try again",
            )
        return checked(engine)

    return run


def _time_for(call: Call) -> float:
    """Return how long to wait: the caller hears of a busy writer before its deadline passes."""
    left_s = call.left_s
    return left_s - min(_MARGIN_S, left_s / 10)


def _same(digest: bytes, asked: Asked) -> None:
    if digest != asked.digest:
        raise _reused(asked.request_id)


def _reused(request_id: str) -> InputError:
    return InputError(
        "request-id-reused",
        f"The request_id {request_id} was used for another request.",
        hint="each change gets a fresh one; only its repetition has the same",
    )
