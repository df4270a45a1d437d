# SPDX-License-Identifier: Apache-2.0
"""What stands before every method: who calls, may they, how long, and what an error becomes.

Every handler is given to gRPC as one of a stream of requests, since gRPC reads
the request of a unary method before it calls its handler: so a call is denied
before its first byte is read (case C107), streams and unknown methods too.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from shapeagent.model.errors import (
    ConflictError,
    FailedError,
    InputError,
    PrivilegeError,
    ShapeError,
    UnsupportedError,
)
from shapeagent.service.identity.auditline import AuditEntry
from shapeagent.service.rpc.contracts import (
    Audit,
    Authenticator,
    Caller,
    CallObserver,
    Role,
)
from shapeagent.service.rpc.roles import LEAST_ROLE
from shapeagent.service.rpc.statuses import code_of, status_of
from shapeagent.service.rpc.watchdog import Watchdog

_log = logging.getLogger("shapectl.agent.rpc")

OURS = "/shapectl.v1."
MAX_STREAMS = 32  # of one server; each holds a thread while it lasts
DEFAULT_TIMEOUT_S = 30.0
#: What takes longer; an attach compiles, on an emulated CPU for half a minute.
TIMEOUTS_S: Mapping[str, float] = {
    f"{OURS}ShaperService/Attach": 120.0,
    f"{OURS}ShaperService/PlanAttach": 120.0,
    f"{OURS}ShaperService/Detach": 120.0,
    f"{OURS}PolicyService/SetPolicy": 120.0,
    f"{OURS}WhitelistService/StreamWhitelist": 120.0,
}
_ENDLESS = frozenset(
    {
        f"{OURS}WhitelistService/WatchWhitelist",
        f"{OURS}EventService/WatchEvents",
        "/grpc.health.v1.Health/Watch",
        "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
    }
)
#: How long one answer of an endless stream may wait for its reader.
STALL_S = 20.0


@dataclass(frozen=True, slots=True)
class Call:
    """What a handler knows of its call."""

    method: str
    caller: Caller
    context: Any  # grpc.ServicerContext
    until_s: float  # CLOCK_MONOTONIC
    admit: Callable[[], object] = lambda: None  # again, for a call that lasts

    @property
    def left_s(self) -> float:
        """How long the caller still waits; 0 where it does not."""
        return max(0.0, self.until_s - time.monotonic())


class Guard(grpc.ServerInterceptor):  # type: ignore[misc]
    """The interceptor of one server."""

    def __init__(
        self,
        authenticator: Authenticator,
        audit: Audit,
        watchdog: Watchdog,
        *,
        observe: CallObserver = lambda method, code, seconds: None,
        least_role: Mapping[str, Role] = LEAST_ROLE,
        max_streams: int = MAX_STREAMS,
        stall_s: float = STALL_S,
    ) -> None:
        self._authenticator = authenticator
        self._audit = audit
        self._watchdog = watchdog
        self._observe = observe
        self._least_role = least_role
        self._streams = threading.BoundedSemaphore(max_streams)
        self._stall_s = stall_s

    def intercept_service(self, continuation: Callable[[Any], Any], details: Any) -> Any:
        """Return the handler of a method with all that stands before it."""
        handler = continuation(details)
        method = details.method if isinstance(details.method, str) else details.method.decode()
        if handler is None:
            return grpc.stream_unary_rpc_method_handler(self._unknown(method))
        guarded = _Guarded(method, handler, self)
        if handler.response_streaming:
            return grpc.stream_stream_rpc_method_handler(
                guarded.answer_many, None, handler.response_serializer
            )
        return grpc.stream_unary_rpc_method_handler(
            guarded.answer_one, None, handler.response_serializer
        )

    def _unknown(self, method: str) -> Callable[[Any, Any], Any]:
        def refuse(_requests: Any, context: Any) -> None:
            with self.running(method, context, label="unknown"):
                self._admit(method, context, known=False)

        return refuse

    def admit(self, method: str, context: Any) -> Caller:
        """Return who calls, where they may; else there is a line in the audit log.

        Raises: PrivilegeError.
        """
        return self._admit(method, context, known=True)

    def _admit(self, method: str, context: Any, *, known: bool) -> Caller:
        caller = self._identify(method, context)
        least = self._least_role.get(method)
        if least is not None and known and caller.role.includes(least):
            return caller
        if not known:
            denial: ShapeError = UnsupportedError(
                "no-such-method", f"This agent has no method {_shown(method)}."
            )
        else:
            denial = PrivilegeError(
                "denied",
                f"{caller.who} has the role {caller.role}, and {method} needs "
                f"{least if least is not None else 'one that nobody has'}.",
                hint=f"use the {least} socket, or ask for the role" if least else None,
            )
        self._record_denial(method, (caller.who, caller.role, caller.peer), denial)
        raise denial

    def _identify(self, method: str, context: Any) -> Caller:
        try:
            found = self._authenticator.authenticate(context)
        except PrivilegeError as error:
            who = str(getattr(error, "who", "unknown"))
            self._record_denial(method, (who, "none", context.peer()), error)
            raise
        return Caller(found.who, Role(found.role), found.peer)

    def _record_denial(self, method: str, by: tuple[str, str, str], error: ShapeError) -> None:
        who, role, peer = by
        entry = AuditEntry(
            who=who,
            role=role,
            peer=peer,
            method=_shown(method),
            object="",
            old="",
            new="",
            why="",
            result=error.reference,
        )
        try:
            self._audit.record_denied(entry)
        except ShapeError as lost:  # denied it stays
            _log.error("a denial of %s is not in the audit log: %s", who, lost)

    @contextmanager
    def stream_slot(self) -> Iterator[None]:
        """Hold one of the places for calls that last."""
        if not self._streams.acquire(blocking=False):
            raise ConflictError(
                "too-many-streams",
                "This socket has as many open streams as it may have.",
                hint="close one; watchers can share a stream",
            )
        try:
            yield
        finally:
            self._streams.release()

    def limit(self, seconds: float, context: Any) -> Any:
        """Return a context manager in which the call is cancelled after so long."""
        return self._watchdog.limit(seconds, context.cancel)

    @contextmanager
    def running(self, method: str, context: Any, *, label: str | None = None) -> Iterator[None]:
        """Make a status of every error in the body, and tell the observer how it ended."""
        began_s = time.monotonic()
        code = "OK"
        failure: ShapeError | None = None
        try:
            yield
            found = context.code()  # set by a service that is not ours
            if found is not None:
                code = found.name
        except ShapeError as error:
            failure = error
        except GeneratorExit:  # the client has gone away
            code = "CANCELLED"
            raise
        except grpc.RpcError:  # the same, while a request was read
            code = "CANCELLED"
            raise
        except Exception:
            _log.exception("a fault in %s", method)
            failure = FailedError(
                "internal",
                "A fault in the agent; its log has more.",
                hint="journalctl -u shapectl-agent",
            )
        finally:
            if failure is not None:
                code = code_of(failure).name
            self._observe(label or method, code, time.monotonic() - began_s)
        if failure is not None:
            context.abort_with_status(status_of(failure))

    @property
    def stall_s(self) -> float:
        """How long one answer may wait for its reader."""
        return self._stall_s


class _Guarded:
    """One method behind the guard."""

    def __init__(self, method: str, handler: Any, guard: Guard) -> None:
        self._method = method
        self._handler = handler
        self._guard = guard
        self._own = method.startswith(OURS)

    def answer_one(self, requests: Any, context: Any) -> Any:
        """Return the one answer."""
        with self._guard.running(self._method, context), ExitStack() as stack:
            argument, call = self._begin(requests, context, stack)
            handler = self._handler
            behaviour = handler.stream_unary if handler.request_streaming else handler.unary_unary
            return behaviour(argument, call)
        raise AssertionError("running() has aborted the call")

    def answer_many(self, requests: Any, context: Any) -> Iterator[Any]:
        """Yield the answers."""
        with self._guard.running(self._method, context), ExitStack() as stack:
            argument, call = self._begin(requests, context, stack)
            handler = self._handler
            behaviour = handler.stream_stream if handler.request_streaming else handler.unary_stream
            answers = behaviour(argument, call)
            endless = self._method in _ENDLESS
            for answer in answers:
                if endless:
                    with self._guard.limit(self._guard.stall_s, context):
                        yield answer
                else:
                    yield answer

    def _begin(self, requests: Any, context: Any, stack: ExitStack) -> tuple[Any, Any]:
        """Return what the handler is called with."""
        caller = self._guard.admit(self._method, context)
        handler = self._handler
        if handler.request_streaming or handler.response_streaming:
            stack.enter_context(self._guard.stream_slot())
        most_s = TIMEOUTS_S.get(self._method, DEFAULT_TIMEOUT_S)
        left_s = most_s
        if self._method not in _ENDLESS:
            with suppress(TypeError):  # None in other implementations: no deadline
                left_s = min(most_s, context.time_remaining())
            # past the client's own deadline gRPC has cancelled; this is for who set none
            stack.enter_context(self._guard.limit(most_s, context))
        parsed = self._parsed(requests)
        argument = parsed if handler.request_streaming else next(parsed, None)
        if argument is None:
            raise InputError("request-missing", f"{self._method} came without a request.")
        if not self._own:
            return argument, context
        until_s = time.monotonic() + left_s
        admit = partial(self._guard.admit, self._method, context)
        return argument, Call(self._method, caller, context, until_s, admit)

    def _parsed(self, requests: Any) -> Iterator[Any]:
        for raw in requests:
            try:
                yield self._handler.request_deserializer(raw)
            except DecodeError as error:
                raise InputError(
                    "malformed-request",
                    f"The request of {self._method} is no message of its type: {error}.",
                    hint="the agent's .proto files say what it reads",
                ) from None


def _shown(method: str) -> str:
    """Return a method's name as the caller gave it, fit for a log."""
    return ascii(method[:120])[1:-1]
