# SPDX-License-Identifier: Apache-2.0
"""What the servers need from the rest of the agent, and what they tell it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol, TypeVar

from shapeagent.service.engine import Engine
from shapeagent.service.identity.auditline import AuditEntry
from shapeagent.telemetry.events import Event

_T = TypeVar("_T")


class Role(StrEnum):
    """What a caller may do; each may also do what stands above it."""

    OBSERVER = "observer"
    OPERATOR = "operator"
    ADMIN = "admin"

    def includes(self, least: Role) -> bool:
        """Return whether this role may do what `least` may."""
        order = tuple(Role)
        return order.index(self) >= order.index(least)


@dataclass(frozen=True, slots=True)
class Caller:
    """Who calls. `who` is "unix:operator", or the SPIFFE id of a certificate."""

    who: str
    role: Role
    peer: str  # as gRPC names it: "ipv4:192.0.2.7:50001"


class Ticket(Protocol):
    """A change that was let through."""

    def end(self, entry: AuditEntry) -> None:
        """Write the change's line; it outlasts a crash of the machine once this returns.

        Raises: FailedError audit-unwritable.
        """


class Audit(Protocol):
    """Where changes and denials are written down; see service/identity/audit.py."""

    def begin(self, entry: AuditEntry) -> Ticket:
        """Return a ticket for a change, whose line has its room from now on; end it.

        Raises: FailedError audit-unwritable: make no change.
        """

    def record_denied(self, entry: AuditEntry) -> None:
        """Write that a call was refused; many alike may become one count.

        Raises: FailedError audit-unwritable.
        """


class Identity(Protocol):
    """Who is behind a call."""

    @property
    def who(self) -> str:
        """The SPIFFE id, or the socket's role."""

    @property
    def role(self) -> str:
        """A word of `Role`."""

    @property
    def peer(self) -> str:
        """Where the call came from, as gRPC names it."""


class Authenticator(Protocol):
    """Says who calls, from nothing that the caller merely claims; see service/identity/peers.py."""

    def authenticate(self, context: Any) -> Identity:
        """Return who is behind a `grpc.ServicerContext`; asked again, whether it still is.

        Raises: PrivilegeError; its attribute `who`, where it has one, goes to the audit log.
        """


class Writer(Protocol):
    """Runs work on the engine in its own thread; see service/writer.py."""

    def run(self, work: Callable[[Engine], _T], *, timeout_s: float) -> _T:
        """Return what `work` returns.

        Raises: what `work` raises; ConflictError agent-busy, agent-stopping: nothing
            was done; FailedError still-running: it has begun and goes on.
        """


class Events(Protocol):
    """What happened; see telemetry/events.py."""

    @property
    def last(self) -> int:
        """The sequence number of the newest event."""

    def add(self, kind: str, device: str, text: str, **details: str) -> Event:
        """Return the event that was added."""

    def wake(self) -> None:
        """Let everyone who waits look whether they still want to."""

    def after(
        self,
        sequence: int,
        timeout_s: float = 0.0,
        *,
        wanted: Callable[[], bool] = lambda: True,
    ) -> tuple[tuple[Event, ...], int]:
        """Return (events after a sequence number, how many of them are no longer kept)."""


#: Told of each call's end: method, status code ("OK"), seconds.
CallObserver = Callable[[str, str, float], None]
#: Told of each whitelist change that was made: "single", "batch" or "replace", and the seconds
#: from when all of it was there to its effect in the kernel.
UpdateObserver = Callable[[str, float], None]


class FixedRole:
    """The identity of everyone who can open a Unix socket: its file mode has decided."""

    def __init__(self, role: Role) -> None:
        self._caller = Caller(f"unix:{role}", role, f"unix:{role}")

    def authenticate(self, context: Any) -> Caller:
        """Return the socket's role, whatever the call says."""
        return self._caller
