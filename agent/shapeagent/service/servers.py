# SPDX-License-Identifier: Apache-2.0
"""What the agent listens with: gRPC on Unix sockets and TCP, and the page of metrics."""

from __future__ import annotations

import importlib.metadata
import logging
import os
from collections.abc import Mapping
from pathlib import Path

from shapeagent.kernel.compile import read_source
from shapeagent.kernel.lists import MAX_ENTRIES
from shapeagent.model.agentschema import AgentConfig, MetricsTable, TcpTable
from shapeagent.model.errors import InputError
from shapeagent.model.reports import InterfaceStatus
from shapeagent.service.daemon import Parts, Server
from shapeagent.service.documents import read_document
from shapeagent.service.identity.audit import Audit
from shapeagent.service.identity.peers import PeerAuthenticator
from shapeagent.service.identity.spiffe import parse_role_table
from shapeagent.service.identity.tls import ServerTls, TlsFiles
from shapeagent.service.reconciler import ACTIONS, CONFLICTS
from shapeagent.service.rpc.server import RpcServers, method_names
from shapeagent.service.rpc.sockets import default_plans
from shapeagent.service.writer import Writer
from shapeagent.telemetry import listening
from shapeagent.telemetry.http import HttpOptions, MetricsServer
from shapeagent.telemetry.metrics import AgentFacts, AgentMetrics, MetricsPage

_log = logging.getLogger("shapectl.agent")
_HUNG_S = 10.0  # a replacement of a million entries takes 4 s
_SCRAPE_S = 5.0  # that a scrape waits for the writer; half of Prometheus' own default


def new_metrics() -> AgentMetrics:
    """Return the agent's counters, all of whose series exist from the start."""
    return AgentMetrics(
        grpc_methods=tuple(method_names()),
        reconcile_actions=ACTIONS,
        conflict_kinds=CONFLICTS,
    )


class RpcServer(Server):
    """The API, with its audit log and, on TCP, its certificates."""

    def __init__(self, parts: Parts, metrics: AgentMetrics) -> None:
        config = parts.config
        self._config = config
        self._events = parts.events
        self._writer = parts.writer
        self._metrics = metrics
        self._tls: ServerTls | None = None
        self._peers: PeerAuthenticator | None = None
        self._warned: tuple[str, ...] = ()
        self._reloads = 0
        self._audit = Audit(
            Path(config.audit.path), most_bytes=config.audit.max_size, kept=config.audit.keep
        )
        try:
            self._servers = RpcServers(
                parts.writer,
                self._audit,
                parts.events,
                state_dir=Path(config.agent.state_dir),
                observe=metrics.grpc_call,
                observe_update=metrics.whitelist_update,
            )
        except BaseException:
            self._audit.close()
            raise

    def start(self) -> None:
        """Listen. Raises: FailedError of a socket; InputError of certificates or roles."""
        sockets = self._config.sockets
        plans = default_plans(sockets.operator_group, sockets.observer_group)
        self._servers.listen_unix(Path(sockets.folder), plans)
        if self._config.tcp is not None:
            self._listen_tcp(self._config.tcp)

    def _listen_tcp(self, tcp: TcpTable) -> None:
        self._tls = ServerTls(TlsFiles(Path(tcp.certificate), Path(tcp.key), Path(tcp.client_ca)))
        self._peers = PeerAuthenticator(parse_role_table(tcp.trust_domain, tcp.roles), self._tls)
        host, port = tcp.address
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        bound = self._servers.listen_tcp(address, self._tls.credentials(), self._peers)
        self._events.add("listening", "", f"gRPC with mTLS on {host} port {bound}")

    def tick(self) -> None:
        """Say whether calls are answered; take up certificates; write what the audit log owes."""
        self._servers.set_serving(self._writer.busy_s < _HUNG_S)
        self._audit.tick()
        if self._tls is None:
            return
        self._tls.refresh()
        facts = self._tls.facts()
        if facts.reloads != self._reloads:
            self._reloads = facts.reloads
            self._metrics.config_reload(accepted=True)
            self._events.add("certificates-reloaded", "", "certificate, key or CA bundle renewed")
        warnings = self._tls.warnings()
        for text in warnings:
            if text not in self._warned:
                self._events.add("certificate-warning", "", text)
        self._warned = warnings

    def reload(self, config: AgentConfig) -> None:
        """Take up another table of roles. Addresses and files need a restart."""
        if config.tcp is not None and self._peers is not None:
            self._peers.replace_roles(parse_role_table(config.tcp.trust_domain, config.tcp.roles))
        self._config = config

    def expiry_unix_s(self) -> Mapping[str, float]:
        """Return when the certificates in use end, by what they are; none without TCP."""
        if self._tls is None:
            return {}
        facts = self._tls.facts()
        return {"server": facts.server_not_after_unix_s, "ca": facts.ca_not_after_unix_s}

    def stop(self) -> None:
        """Take no more calls, let those at work end, close the audit log."""
        self._servers.stop()
        self._audit.close()


class _Source:
    """Reads the interfaces by the writer, as calls do."""

    def __init__(self, writer: Writer) -> None:
        self._writer = writer

    def status(self) -> tuple[InterfaceStatus, ...]:
        """Return every attached interface."""
        return self._writer.run(lambda engine: engine.status(), timeout_s=_SCRAPE_S)


class MetricsHttp(Server):
    """The page that Prometheus scrapes, and /healthz."""

    def __init__(
        self, parts: Parts, table: MetricsTable, metrics: AgentMetrics, rpc: RpcServer
    ) -> None:
        _, digest = read_source()
        version = importlib.metadata.version("shapectl")
        self._page = MetricsPage(
            _Source(parts.writer),
            lambda: AgentFacts(
                version=version,
                source_digest=digest,
                kernel_release=os.uname().release,
                whitelist_capacity_entries=MAX_ENTRIES,
                certificate_expiry_unix_s=rpc.expiry_unix_s(),
            ),
            metrics,
            warn=_log.warning,
        )
        try:
            self._server = MetricsServer(
                self._page,
                _http_options(table),
                is_healthy=lambda: self._page.is_readable,
                warn=_log.warning,
            )
        except BaseException:
            self._page.close()
            raise
        self._events = parts.events

    def start(self) -> None:
        """Begin to answer."""
        self._server.start()
        self._events.add("listening", "", f"metrics on {self._server.url}")

    def tick(self) -> None:
        """Nothing: it looks at its files when it is asked."""

    def reload(self, config: AgentConfig) -> None:
        """Nothing: address and files need a restart."""

    def stop(self) -> None:
        """Stop listening."""
        self._server.close()
        self._page.close()


def _http_options(table: MetricsTable) -> HttpOptions:
    host, port = table.address
    tls = None
    if table.certificate is not None and table.key is not None:
        tls = listening.TlsFiles(Path(table.certificate), Path(table.key))
    users: dict[str, str] = {}
    if table.users is not None:
        for number, line in enumerate(read_document(table.users).splitlines(), 1):
            if not line.strip() or line.startswith("#"):
                continue
            name, colon, hashed = line.partition(":")
            if not colon or not name:
                raise InputError(
                    "metrics-users", f"{table.users} line {number}: not NAME:HASH.",
                    hint="docs/metrics.md says how to make one",
                )  # fmt: skip
            users[name] = hashed.strip()
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    return HttpOptions(address=address, tls=tls, users=users)


def make_servers(parts: Parts) -> list[Server]:
    """Return the servers that the configuration wants. Raises: ShapeError of one of them."""
    metrics = new_metrics()
    parts.counters.use(metrics)
    rpc = RpcServer(parts, metrics)
    servers: list[Server] = [rpc]
    if parts.config.metrics is not None:
        try:
            servers.append(MetricsHttp(parts, parts.config.metrics, metrics, rpc))
        except BaseException:
            rpc.stop()
            raise
    return servers
