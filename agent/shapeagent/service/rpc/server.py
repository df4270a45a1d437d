# SPDX-License-Identifier: Apache-2.0
"""The agent's gRPC servers: one for each Unix socket, and one on TCP where it is wanted.

Each has threads of its own, so that a flood of observers cannot keep an
administrator out. All have the same services; the guard before them decides.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2

from shapeagent.model.errors import FailedError
from shapeagent.proto.shapectl.v1 import (
    event_pb2,
    event_pb2_grpc,
    policy_pb2,
    policy_pb2_grpc,
    shaper_pb2,
    shaper_pb2_grpc,
    whitelist_pb2,
    whitelist_pb2_grpc,
)
from shapeagent.service.rpc.changes import Runner
from shapeagent.service.rpc.contracts import (
    Audit,
    Authenticator,
    CallObserver,
    Events,
    FixedRole,
    UpdateObserver,
    Writer,
)
from shapeagent.service.rpc.events import EventServicer
from shapeagent.service.rpc.guard import MAX_STREAMS, Guard
from shapeagent.service.rpc.policy import PolicyServicer
from shapeagent.service.rpc.requestids import RequestIds
from shapeagent.service.rpc.roles import check_complete
from shapeagent.service.rpc.shaper import ShaperServicer
from shapeagent.service.rpc.sockets import BoundSocket, SocketPlan, default_plans, prepare_folder
from shapeagent.service.rpc.watchdog import Watchdog
from shapeagent.service.rpc.whitelist import WhitelistServicer

MAX_RECEIVE_BYTES = 4 << 20
MAX_SEND_BYTES = 16 << 20
_WORKERS = MAX_STREAMS + 16  # streams hold one each
_MAX_RPCS = 256  # of one server, at work and waiting; more are refused at once
SERVICES = tuple(
    service
    for file in (shaper_pb2, policy_pb2, whitelist_pb2, event_pb2)
    for service in file.DESCRIPTOR.services_by_name.values()
)
FOREIGN_SERVICES = (
    health_pb2.DESCRIPTOR.services_by_name["Health"],
    reflection_pb2.DESCRIPTOR.services_by_name["ServerReflection"],
)
SERVICE_NAMES = tuple(one.full_name for one in (*SERVICES, *FOREIGN_SERVICES))

OPTIONS: Sequence[tuple[str, int]] = (
    ("grpc.max_receive_message_length", MAX_RECEIVE_BYTES),
    ("grpc.max_send_message_length", MAX_SEND_BYTES),
    ("grpc.max_metadata_size", 8 << 10),
    ("grpc.max_concurrent_streams", 128),  # of one connection
    ("grpc.max_allowed_incoming_connections", 512),  # of one server: descriptors are everyone's
    ("grpc.so_reuseport", 0),  # a second agent on the port must fail, not share it
    ("grpc.server_handshake_timeout_ms", 20_000),
    # a client may ping every 10 s, with no call open too (case C110: the default is 5 min)
    ("grpc.http2.min_ping_interval_without_data_ms", 9_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_ping_strikes", 2),
    # and a watcher that is gone without a word is noticed
    ("grpc.keepalive_time_ms", 60_000),
    ("grpc.keepalive_timeout_ms", 20_000),
)


def method_names() -> Iterator[str]:
    """Yield every method that an agent serves, as gRPC names it."""
    for service in (*SERVICES, *FOREIGN_SERVICES):
        for method in service.methods:
            yield f"/{service.full_name}/{method.name}"


class RpcServers:
    """All servers of one agent."""

    def __init__(
        self,
        writer: Writer,
        audit: Audit,
        events: Events,
        *,
        state_dir: Path,
        observe: CallObserver = lambda method, code, seconds: None,
        observe_update: UpdateObserver = lambda kind, seconds: None,
    ) -> None:
        """Make them; nothing listens yet.

        Args:
            state_dir: where request ids are kept.
            observe: told of each call's end.
            observe_update: told of each whitelist change.

        Raises: FailedError state-unwritable; RuntimeError: a method has no role.
        """
        check_complete(method_names())
        self._audit = audit
        self._observe = observe
        self._request_ids = RequestIds(state_dir)
        self._watchdog = Watchdog()
        self._health = health.HealthServicer(experimental_non_blocking=False)
        runner = Runner(writer, audit, self._request_ids, events)
        self._shaper = ShaperServicer(runner)
        self._policy = PolicyServicer(runner)
        self._whitelist = WhitelistServicer(runner, observe_update)
        self._events = EventServicer(events)
        self._servers: list[Any] = []  # grpc.Server
        self._sockets: list[BoundSocket] = []
        self.set_serving(True)

    # --- listening

    def listen_unix(self, folder: Path, plans: Sequence[SocketPlan] | None = None) -> None:
        """Listen on a socket for each role.

        Raises: FailedError socket-folder, socket-bind; InputError socket-path.
        Effects: the folder, 0711, and the sockets; `stop` removes them.
        """
        prepare_folder(folder)
        for plan in default_plans() if plans is None else plans:
            server = self._server(FixedRole(plan.role))
            self._sockets.append(BoundSocket(server, folder, plan))
            server.start()

    def listen_tcp(self, address: str, credentials: Any, authenticator: Authenticator) -> int:
        """Listen on TCP and return the port.

        Args:
            address: "192.0.2.7:7443", "[::1]:0".
            credentials: `grpc.ServerCredentials` that demand a client's certificate.

        Raises: FailedError tcp-bind.
        """
        server = self._server(authenticator)
        try:
            port = int(server.add_secure_port(address, credentials))
        except RuntimeError as error:
            self._servers.remove(server)
            raise FailedError(
                "tcp-bind",
                f"Cannot listen on {address}: {error}.",
                hint="is another agent there? ss -ltnp",
            ) from error
        server.start()
        return port

    def _server(self, authenticator: Authenticator) -> Any:
        guard = Guard(authenticator, self._audit, self._watchdog, observe=self._observe)
        server = grpc.server(
            ThreadPoolExecutor(_WORKERS, thread_name_prefix="rpc"),
            interceptors=(guard,),
            options=OPTIONS,
            maximum_concurrent_rpcs=_MAX_RPCS,
        )
        shaper_pb2_grpc.add_ShaperServiceServicer_to_server(self._shaper, server)
        policy_pb2_grpc.add_PolicyServiceServicer_to_server(self._policy, server)
        whitelist_pb2_grpc.add_WhitelistServiceServicer_to_server(self._whitelist, server)
        event_pb2_grpc.add_EventServiceServicer_to_server(self._events, server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        reflection.enable_server_reflection(SERVICE_NAMES, server)
        self._servers.append(server)
        return server

    # --- health and end

    def set_serving(self, serving: bool) -> None:
        """Say by the health service whether calls are answered now."""
        words = health_pb2.HealthCheckResponse
        status = words.SERVING if serving else words.NOT_SERVING
        for name in ("", *(one.full_name for one in SERVICES)):
            self._health.set(name, status)

    def stop(self, grace_s: float = 5.0) -> None:
        """Take no more calls, let those at work end, and remove the sockets."""
        self._health.enter_graceful_shutdown()
        for socket in self._sockets:
            socket.remove()
        ended: list[threading.Event] = [one.stop(grace_s) for one in self._servers]
        for one in ended:
            one.wait(grace_s + 5.0)
        self._watchdog.close()
        self._request_ids.close()
