# SPDX-License-Identifier: Apache-2.0
"""`/metrics` and `/healthz` over HTTP or HTTPS, and nothing else.

prometheus_client's own server answers every path, has no password, no limit
of connections and no deadline, and shakes hands in the thread that accepts:
one silent client stops every scrape. So the server is the standard library's
with these limits, and the library makes the page (`MetricsPage`).
"""

from __future__ import annotations

import contextlib
import gzip
import io
import socket
import socketserver
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from typing import Any

from prometheus_client.exposition import gzip_accepted

from shapeagent.model.errors import InputError
from shapeagent.telemetry.listening import (
    ReloadingTls,
    TlsFiles,
    is_loopback,
    listen,
    split_address,
)
from shapeagent.telemetry.metrics import MetricsPage
from shapeagent.telemetry.passwords import PasswordTable

DEFAULT_ADDRESS = "127.0.0.1:9911"

_MAX_CONNECTIONS = 8
_HEAD_BYTES = 16 * 1024
_DEADLINE_S = 10.0  # from the accept to the last byte of the answer; as Prometheus' own default
_GZIP_LEVEL = 1  # level 9 takes three times as long for a tenth less
_BUSY = b"HTTP/1.0 503 Service Unavailable\r\nContent-Length: 0\r\nRetry-After: 1\r\n\r\n"
_PLAIN = "text/plain; charset=utf-8"


@dataclass(frozen=True, slots=True)
class HttpOptions:
    """Where to listen, and who may scrape.

    `address` is HOST:PORT, or [IPv6]:PORT; port 0 takes a free one. `users` is
    name → hash (`hash_password`).
    """

    address: str = DEFAULT_ADDRESS
    tls: TlsFiles | None = None
    users: Mapping[str, str] = field(default_factory=dict)
    deadline_s: float = _DEADLINE_S
    max_connections: int = _MAX_CONNECTIONS


class MetricsServer:
    """Serves a page from `start` to `close`.

    Args:
        is_healthy: what /healthz answers: 200 or 503.
        listener: a listening socket to use instead of the address, of another
            network namespace for instance; it is closed with the server.
    Raises: InputError metrics-address, metrics-password-in-clear,
        bad-password-hash, metrics-certificate; ConflictError
        metrics-address-in-use; FailedError metrics-address.
    """

    def __init__(
        self,
        page: MetricsPage,
        options: HttpOptions,
        *,
        is_healthy: Callable[[], bool] = lambda: True,
        warn: Callable[[str], None] = lambda _: None,
        listener: socket.socket | None = None,
    ) -> None:
        self._limits = options
        host, port = split_address(options.address)
        passwords = PasswordTable(options.users) if options.users else None
        tls = ReloadingTls(options.tls, warn) if options.tls else None
        sock = listener or listen(host, port)
        try:
            if passwords and not tls and not is_loopback(sock):
                raise InputError(
                    "metrics-password-in-clear",
                    f"Passwords would cross the network in clear at {options.address}.",
                    hint="give a certificate and key, or listen on 127.0.0.1",
                )
            self._server = _Server(sock, page, options, passwords, tls, is_healthy, warn)
        except BaseException:
            sock.close()
            raise
        self._thread = threading.Thread(
            target=self._server.serve_forever,
            kwargs={"poll_interval": 0.2},  # how long a close takes at most
            name="metrics-http",
            daemon=True,
        )

    @property
    def url(self) -> str:
        """Where the page is."""
        host, port = self._server.socket.getsockname()[:2]
        shown = f"[{host}]" if ":" in host else host
        return f"http{'s' if self._limits.tls else ''}://{shown}:{port}/metrics"

    def start(self) -> None:
        """Begin to answer, in threads of its own."""
        self._thread.start()

    def close(self) -> None:
        """Stop listening, and return when no request is being answered any more.

        A second call does nothing.
        """
        if self._thread.is_alive():
            self._server.shutdown()
            self._thread.join()
        self._server.server_close()
        self._server.wait_idle(self._limits.deadline_s)


class _Server(socketserver.ThreadingMixIn, socketserver.TCPServer):
    """A thread for each connection, at most so many at once, each with one deadline."""

    daemon_threads = True
    block_on_close = False

    def __init__(
        self,
        sock: socket.socket,
        page: MetricsPage,
        options: HttpOptions,
        passwords: PasswordTable | None,
        tls: ReloadingTls | None,
        is_healthy: Callable[[], bool],
        warn: Callable[[str], None],
    ) -> None:
        # finish_request makes the handler
        super().__init__(
            sock.getsockname(), socketserver.BaseRequestHandler, bind_and_activate=False
        )
        self.socket.close()
        self.socket = sock
        self.page = page
        self.passwords = passwords
        self.is_healthy = is_healthy
        self.deadline_s = options.deadline_s
        self._tls = tls
        self.warn = warn
        self._most = options.max_connections
        self._free = threading.Semaphore(options.max_connections)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer in a thread of its own, or say at once that too many ask."""
        if not self._free.acquire(blocking=False):
            with contextlib.suppress(OSError):
                request.setblocking(False)
                if self._tls is None:
                    request.send(_BUSY)
            self.close_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:  # no thread could be started
            self._free.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answer one connection, and free its place."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def finish_request(self, request: Any, client_address: Any) -> None:
        """Shake hands where there is TLS, then answer."""
        end_s = time.monotonic() + self.deadline_s
        if self._tls is None:
            _Handler(request, client_address, self, end_s)
            return
        request.settimeout(self.deadline_s)
        with self._tls.context().wrap_socket(
            request, server_side=True, do_handshake_on_connect=False
        ) as wrapped:
            wrapped.do_handshake()
            _Handler(wrapped, client_address, self, end_s)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say in one line what was no client's fault; a client's fault is not worth a line."""
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):  # which ssl.SSLError and TimeoutError are
            self.warn(f"metrics: {type(error).__name__}: {error}")

    def wait_idle(self, most_s: float) -> None:
        """Return when no connection is open, at the latest after `most_s`."""
        end_s = time.monotonic() + most_s
        got = [
            self._free.acquire(timeout=max(0.0, end_s - time.monotonic()))
            for _ in range(self._most)
        ]
        if any(got):
            self._free.release(sum(got))


class _Handler(BaseHTTPRequestHandler):
    """One request. Its head is read and its answer written before a deadline."""

    server_version, sys_version = "shapectl", ""
    error_message_format = "%(code)d %(message)s\n"
    error_content_type = _PLAIN
    server: _Server

    def __init__(
        self, request: socket.socket, client_address: Any, server: _Server, end_s: float
    ) -> None:
        self._end_s = end_s
        super().__init__(request, client_address, server)

    def setup(self) -> None:
        """Read the head, at most 16 KiB of it; the answer is collected in memory."""
        self.connection = self.request
        head = self._read_head()
        self._is_oversized = len(head) > _HEAD_BYTES
        self.rfile, self.wfile = io.BytesIO(head), io.BytesIO()

    def finish(self) -> None:
        """Send the answer."""
        assert isinstance(self.wfile, io.BytesIO)
        left = memoryview(self.wfile.getvalue())
        while left:
            self._limit_time()
            left = left[self.request.send(left) :]

    def _limit_time(self) -> None:
        left_s = self._end_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("the client is too slow")
        self.request.settimeout(left_s)

    def _read_head(self) -> bytes:
        head = b""
        while b"\r\n\r\n" not in head and b"\n\n" not in head:
            self._limit_time()
            more = self.request.recv(_HEAD_BYTES + 1 - len(head))
            head += more
            if not more or len(head) > _HEAD_BYTES:
                break
        return head

    def handle(self) -> None:
        """Answer the one request of this connection."""
        if self._is_oversized:
            self.requestline, self.request_version, self.command = "", "HTTP/1.0", ""
            self.send_error(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)
            return
        self.handle_one_request()

    def do_GET(self) -> None:
        """Answer with the page, or with how the agent is."""
        path = self.path.partition("?")[0]
        if path == "/healthz":
            healthy = self.server.is_healthy()
            status = HTTPStatus.OK if healthy else HTTPStatus.SERVICE_UNAVAILABLE
            self._answer(status, b"ok\n" if healthy else b"not healthy\n", _PLAIN)
        elif path != "/metrics":
            self.send_error(HTTPStatus.NOT_FOUND)
        elif not self._may_scrape():
            body = b"401 Unauthorized\n"
            challenge = {"WWW-Authenticate": 'Basic realm="shapectl metrics", charset="UTF-8"'}
            self._answer(HTTPStatus.UNAUTHORIZED, body, _PLAIN, challenge)
        else:
            self._send_page()

    def _may_scrape(self) -> bool:
        passwords = self.server.passwords
        return passwords is None or passwords.accepts(self.headers.get("Authorization"))

    def _send_page(self) -> None:
        try:
            content_type, body = self.server.page.render(self.headers.get("Accept", ""))
        except Exception as error:  # the client hears that, the administrator hears what
            self.server.warn(f"metrics: the page cannot be made: {type(error).__name__}: {error}")
            self.send_error(HTTPStatus.INTERNAL_SERVER_ERROR)
            return
        more = {"Vary": "Accept, Accept-Encoding"}
        if gzip_accepted(self.headers.get("Accept-Encoding", "")):
            body = gzip.compress(body, _GZIP_LEVEL)
            more["Content-Encoding"] = "gzip"
        self._answer(HTTPStatus.OK, body, content_type, more)

    def _answer(
        self,
        status: HTTPStatus,
        body: bytes,
        content_type: str,
        more: Mapping[str, str] | None = None,
    ) -> None:
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        for name, value in (more or {}).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    do_HEAD = do_GET

    def _refuse_method(self) -> None:
        self._answer(HTTPStatus.METHOD_NOT_ALLOWED, b"405\n", _PLAIN, {"Allow": "GET, HEAD"})

    do_POST = do_PUT = do_DELETE = do_PATCH = do_OPTIONS = _refuse_method

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        """Log no request."""
