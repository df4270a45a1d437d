# SPDX-License-Identifier: Apache-2.0
"""Servers of the API for tests: real sockets and real gRPC, the engine real or a fake of ours."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar, cast

import grpc

from shapeagent.client.address import AgentAddress
from shapeagent.client.channel import open_channel
from shapeagent.client.errors import error_of
from shapeagent.client.remote import RemoteEngine
from shapeagent.model.errors import ConflictError, FailedError, InputError, ShapeError
from shapeagent.model.reports import (
    AttachPlan,
    AttachReport,
    AttachRequest,
    ClassStatus,
    DetachReport,
    ExplainRequest,
    Explanation,
    InterfaceStatus,
    PolicyDocument,
    ResidueItem,
    ResidueReport,
    WhitelistChange,
    WhitelistPage,
    WhitelistRow,
)
from shapeagent.model.types import PackedBatch
from shapeagent.policy.packed import check_batches, entry_of, row_of, split_keys
from shapeagent.service.engine import Engine
from shapeagent.service.identity.auditline import AuditEntry
from shapeagent.service.rpc.contracts import CallObserver, Role
from shapeagent.service.rpc.server import RpcServers
from shapeagent.service.rpc.sockets import SocketPlan
from shapeagent.telemetry.events import EventLog

_T = TypeVar("_T")

DEVICE = "eth7"
NO_GROUPS = tuple(SocketPlan(role, None) for role in Role)


class ThreadWriter:
    """The writer's contract with one thread: see service/rpc/contracts.py."""

    def __init__(self, engine: Any) -> None:
        self.engine = cast(Engine, engine)
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="writer")

    def run(self, work: Callable[[Engine], _T], *, timeout_s: float) -> _T:
        future: Future[_T] = self._pool.submit(work, self.engine)
        try:
            return future.result(timeout_s)
        except FutureTimeout:
            if future.cancel():
                raise ConflictError("agent-busy", "The agent is busy.") from None
            if future.done():
                return future.result(0)
            raise FailedError("still-running", "It has begun and goes on.") from None

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)


class MemoryAudit:
    """An audit log that can be read, and that can be made to refuse."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.lines: list[AuditEntry] = []
        self.denials: list[AuditEntry] = []
        self.open = 0
        self.full = False

    def begin(self, entry: AuditEntry) -> MemoryTicket:
        self.refuse_full()
        with self.lock:
            self.open += 1
        return MemoryTicket(self)

    def record_denied(self, entry: AuditEntry) -> None:
        self.refuse_full()
        with self.lock:
            self.denials.append(entry)

    def refuse_full(self) -> None:
        if self.full:
            raise FailedError("audit-unwritable", "No space left on device.")


class MemoryTicket:
    def __init__(self, audit: MemoryAudit) -> None:
        self._audit = audit
        self._ended = False

    def end(self, entry: AuditEntry) -> None:
        assert not self._ended, "got a second end of a ticket, want one"
        self._ended = True
        with self._audit.lock:
            self._audit.open -= 1
            self._audit.lines.append(entry)


PLAN = AttachPlan(
    device=DEVICE, netns=None, profile="htb", profile_reason="asked", ingress="count", hook="tcx",
    link_rate_bits_per_s=100_000_000, link_rate_source="given", segment_limit_bytes=3028,
    segment_limit_note="auto", policy_source="built-in", policy_digest="ab" * 32, classes=(),
    steps=("add the filter",), warnings=(), takes_over=None,
)  # fmt: skip
CLASS = ClassStatus(
    name="bulk", number=3, direction="egress", guarantee_bits_per_s=0,
    ceiling_bits_per_s=20_000_000, safe_ceiling_bits_per_s=None,
    ceiling_in_force_bits_per_s=20_000_000, lease_s_left=0.0, packets=10, wire_bytes=15_000,
    drops=0, drop_wire_bytes=0, ce_marks=0, no_socket_packets=9, over_segment_packets=0,
    backlog_bytes=None, queue_drops=0,
)  # fmt: skip
EXPLANATION = Explanation(
    packet="tcp 10.0.0.5:54321 > 10.0.0.9:2379", direction="egress", traffic_class="signal",
    reason="rule-port", rule="etcd", prefix=None, priority=0x10011, priority_text="1:11",
    mark=0, ceiling_bits_per_s=None, notes=("one", "two"),
)  # fmt: skip


@dataclass
class FakeEngine:
    """Answers as an engine with one attached device does; the whitelist is a dict.

    `hold` makes every call wait until it is set, `raises` makes the next ones fail.
    """

    netns: str | None = None
    generation: int = 0
    calls: list[tuple[str, Any]] = field(default_factory=list)
    entries: dict[Any, PackedBatch] = field(default_factory=dict)
    hold: threading.Event = field(default_factory=threading.Event)
    raises: BaseException | None = None
    ceiling_bits_per_s: int = 20_000_000
    keeps: bool = True  # False: entries are counted and not kept

    def __post_init__(self) -> None:
        self.hold.set()

    def _note(self, name: str, device: str | None, what: Any = None) -> None:
        self.calls.append((name, what))
        assert self.hold.wait(30), "got no end of waiting, want the engine to be let go"
        if self.raises is not None:
            raise self.raises
        if device not in (None, DEVICE):
            raise ConflictError("not-attached", f"shapectl is not attached to {device}.")

    def names(self) -> list[str]:
        return [name for name, _ in self.calls]

    def plan_attach(self, request: AttachRequest) -> AttachPlan:
        self._note("plan_attach", request.device, request)
        return PLAN

    def attach(self, request: AttachRequest) -> AttachReport:
        self._note("attach", request.device, request)
        return AttachReport(PLAN, True, False, 0.0, 0.1, {"shp_egress": 900}, "cd" * 32)

    def detach(self, device: str, *, dry_run: bool = False) -> DetachReport:
        self._note("detach", device, dry_run)
        return DetachReport(device, None, not dry_run, ("remove the filter",), ())

    def confirm(self, device: str) -> float:
        self._note("confirm", device)
        return 12.5

    def policy(self, device: str | None = None) -> PolicyDocument:
        self._note("policy", device)
        return PolicyDocument("text", "built-in", "ab" * 32)

    def set_policy(
        self, device: str, text: str, source: str, *, expected_digest: str | None = None
    ) -> AttachReport:
        self._note("set_policy", device, text)
        return AttachReport(PLAN, True, False, 0.0, 0.1, {}, "cd" * 32)

    def residue(self, *, wait_s: float = 2.0) -> ResidueReport:
        self._note("residue", None, wait_s)
        return ResidueReport(1, (ResidueItem("pin", "/sys/fs/bpf/x", "rm"),))

    def status(self, device: str | None = None) -> tuple[InterfaceStatus, ...]:
        self._note("status", device)
        return (
            InterfaceStatus(
                device=DEVICE, index=7, netns=None, profile="htb", ingress="count", hook="tcx",
                shadow=False, link_rate_bits_per_s=100_000_000, segment_limit_bytes=0,
                policy_source="built-in", policy_digest="ab" * 32, attached_unix_s=1.5,
                programs={"shp_egress": 51}, verified_instructions={},
                whitelist_entries=len(self.entries), whitelist_generation=self.generation,
                classes=(CLASS,), reasons={"egress": {"rule-port": 3}, "ingress": {}},
                problems=(), warnings=("one",),
            ),
        )  # fmt: skip

    def explain(self, device: str, request: ExplainRequest) -> Explanation:
        self._note("explain", device, request)
        return EXPLANATION

    def explain_pcap(self, device: str, path: Path, direction: str) -> Iterator[Explanation]:
        self._note("explain_pcap", device, path.read_bytes())
        yield from [EXPLANATION] * 250

    @contextlib.contextmanager
    def session(self, device: str) -> Iterator[FakeEngine]:
        self._note("session", device)
        yield self

    def set_ceiling(
        self, class_name: str, bits_per_s: int, *, lease_s: float | None, direction: str
    ) -> None:
        if class_name != "bulk":
            raise InputError("no-such-class", f"The policy has no class {class_name!r}.")
        self.calls.append(("set_ceiling", (bits_per_s, lease_s, direction)))
        self.ceiling_bits_per_s = bits_per_s

    def class_status(self, class_name: str, direction: str) -> ClassStatus:
        if class_name != "bulk":
            raise IndexError(class_name)
        return CLASS

    # --- whitelist

    def whitelist_apply(
        self,
        device: str,
        add: Sequence[PackedBatch] = (),
        remove: Sequence[PackedBatch] = (),
        *,
        replace: bool = False,
        expected_generation: int | None = None,
        yes_everything: bool = False,
    ) -> WhitelistChange:
        self._note("whitelist_apply", device, sum(one.count for one in (*add, *remove)))
        if expected_generation not in (None, self.generation):
            raise ConflictError("generation-differs", f"It is at {self.generation}.")
        check_batches(remove, float("-inf"))
        check_batches(add, time.time())
        if not self.keeps:
            return WhitelistChange(sum(one.count for one in add), 0, 0, 0, 1, (), ())
        before = {} if replace else dict(self.entries)
        for batch, key in _keys(remove):
            before.pop((batch.match, batch.kind, key), None)
        gone = len(self.entries) - len(before)
        before.update(((one.match, one.kind, key), one) for one, key in _keys(add))
        added = len(before) - len(self.entries) + gone
        self.entries = before
        self.generation += 1
        return WhitelistChange(added, gone, 0, len(before), self.generation, (), ())

    def whitelist_page(
        self, device: str, after: str | None = None, limit: int = 1000
    ) -> WhitelistPage:
        self._note("whitelist_page", device, after)
        if after is not None and not (after.isascii() and after.isdigit()):
            raise InputError("bad-page", f"{after!r} begins no page.")
        start = int(after or 0)
        keys = list(self.entries)[start : start + limit]
        rows = tuple(self.row(one) for one in keys)
        more = str(start + limit) if start + limit < len(self.entries) else None
        return WhitelistPage(rows, more, len(self.entries), self.generation)

    def row(self, at: Any) -> WhitelistRow:
        match, kind, key = at
        return row_of(entry_of((match, kind), key, self.entries[at]))

    def rows(self) -> list[WhitelistRow]:
        return [self.row(one) for one in self.entries]


def _keys(batches: Sequence[PackedBatch]) -> Iterator[tuple[PackedBatch, bytes]]:
    for batch in batches:
        for key in split_keys(batch.keys, batch.kind.key_bytes):
            yield batch, key


@dataclass
class Service:
    """Running servers, and what stands behind them."""

    servers: RpcServers
    folder: Path
    audit: MemoryAudit
    events: EventLog
    writer: ThreadWriter

    def address(self, role: Role = Role.ADMIN) -> AgentAddress:
        return AgentAddress(f"unix:{self.folder / role}.sock")

    @contextlib.contextmanager
    def remote(self, role: Role = Role.ADMIN, **options: Any) -> Iterator[RemoteEngine]:
        """Give an engine behind the socket of a role."""
        engine = RemoteEngine(self.address(role), **options)
        try:
            yield engine
        finally:
            engine.close()

    @contextlib.contextmanager
    def channel(self, role: Role = Role.ADMIN) -> Iterator[Any]:
        """Give a gRPC channel to the socket of a role."""
        channel = open_channel(self.address(role))
        try:
            yield channel
        finally:
            channel.close()


@contextlib.contextmanager
def serving(
    folder: Path,
    engine: Any,
    *,
    events: EventLog | None = None,
    observe: CallObserver = lambda method, code, seconds: None,
    plans: Sequence[SocketPlan] = NO_GROUPS,
) -> Iterator[Service]:
    """Give servers on the sockets of all roles, in `folder`/s."""
    audit, log = MemoryAudit(), events or EventLog()
    writer = ThreadWriter(engine)
    servers = RpcServers(writer, audit, log, state_dir=folder / "state", observe=observe)
    try:
        servers.listen_unix(folder / "s", plans)
        yield Service(servers, folder / "s", audit, log, writer)
    finally:
        servers.stop(grace_s=0.2)
        log.close()
        writer.close()


def refusal(error: Any) -> ShapeError:
    """Return the named error behind a `grpc.RpcError`."""
    return error_of(error, "the agent")


def code_of(error: Any) -> str:
    """Return the status code of a `grpc.RpcError` as text."""
    assert isinstance(error, grpc.RpcError), f"got {error!r}, want an error of gRPC"
    return str(error.code().name)


def wait_for(condition: Callable[[], bool], what: str, timeout_s: float = 10.0) -> None:
    """Return once `condition` holds. Fails at the deadline."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, f"got no end of waiting, want {what}"
        time.sleep(0.005)
