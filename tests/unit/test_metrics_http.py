# SPDX-License-Identifier: Apache-2.0
"""The metrics server: what it serves, to whom, and what slow or rude clients do to it."""

from __future__ import annotations

import base64
import contextlib
import gzip
import http.client
import re
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from shapeagent.model.errors import ConflictError, FailedError, InputError
from shapeagent.telemetry.http import HttpOptions, MetricsServer
from shapeagent.telemetry.listening import TlsFiles, split_address
from shapeagent.telemetry.metrics import MetricsPage
from shapeagent.telemetry.passwords import PasswordTable, hash_password
from tests.unit.statuskit import interface_status
from tests.unit.test_metrics import OPENMETRICS, Source, facts, new_metrics, samples

_ANY = "127.0.0.1:0"
_SLOW_S = 0.5
Serve = Callable[..., MetricsServer]


@pytest.fixture
def warned() -> list[str]:
    return []


@pytest.fixture
def serve(warned: list[str]) -> Iterator[Serve]:
    """Give a function that starts a server; its arguments are those of HttpOptions."""
    with contextlib.ExitStack() as stack:

        def start(
            *, page: Any = None, is_healthy: Callable[[], bool] = lambda: True, **options: Any
        ) -> MetricsServer:
            page = page or MetricsPage(Source(interface_status()), facts, new_metrics())
            options.setdefault("address", _ANY)
            server = MetricsServer(
                page, HttpOptions(**options), is_healthy=is_healthy, warn=warned.append
            )
            stack.callback(server.close)
            server.start()
            return server

        yield start


class Answer:
    """One answer, and its body as text."""

    def __init__(self, found: http.client.HTTPResponse) -> None:
        self.status = found.status
        self.headers = found.headers
        self.raw = found.read()
        packed = found.headers.get("Content-Encoding") == "gzip"
        self.text = (gzip.decompress(self.raw) if packed else self.raw).decode()


def ask(
    server: MetricsServer,
    path: str = "/metrics",
    *,
    method: str = "GET",
    context: ssl.SSLContext | None = None,
    **headers: str,
) -> Answer:
    place = urlsplit(server.url)
    host, port = place.hostname, place.port
    assert host is not None
    connection: http.client.HTTPConnection
    if context is not None:
        connection = http.client.HTTPSConnection(host, port, context=context, timeout=20)
    else:
        connection = http.client.HTTPConnection(host, port, timeout=20)
    with contextlib.closing(connection):
        named = {name.replace("_", "-"): text for name, text in headers.items()}
        connection.request(method, path, headers=named)
        return Answer(connection.getresponse())


def connect(server: MetricsServer) -> socket.socket:
    place = urlsplit(server.url)
    return socket.create_connection((place.hostname, place.port), timeout=20)


def read_all(sock: socket.socket) -> bytes:
    found = b""
    with contextlib.suppress(ConnectionResetError):
        while more := sock.recv(65536):
            found += more
    return found


def basic(user: str, password: str) -> str:
    return "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()


def test_metrics_are_served_in_the_format_that_was_asked_for(serve: Serve) -> None:
    server = serve()
    plain = ask(server)
    assert plain.status == 200
    assert plain.headers["Content-Type"].startswith("text/plain; version=0.0.4")
    assert samples(plain.text)
    text = ask(server, Accept=OPENMETRICS)
    assert text.headers["Content-Type"].startswith("application/openmetrics-text; version=1.0.0")
    assert text.text.endswith("# EOF\n")
    packed = ask(server, Accept_Encoding="gzip")
    assert packed.headers["Content-Encoding"] == "gzip"
    assert samples(packed.text)
    assert len(packed.raw) < len(packed.text) / 5
    assert int(packed.headers["Content-Length"]) == len(packed.raw)


def test_nothing_else_is_served(serve: Serve) -> None:
    server = serve()
    for path in ("/", "/metrics/", "/favicon.ico", "/../etc/passwd", "/metricsx", "/metrics;x"):
        found = ask(server, path)
        assert found.status == 404, f"got {found.status} for {path}, want 404"
        assert found.text == "404 Not Found\n"
        assert found.headers["Server"].strip() == "shapectl"
    for method in ("POST", "PUT", "DELETE", "OPTIONS"):
        found = ask(server, method=method)
        assert found.status == 405, f"got {found.status} for {method}, want 405"
        assert found.headers["Allow"] == "GET, HEAD"
    head = ask(server, method="HEAD")
    assert (head.status, head.raw) == (200, b"")


def test_healthz_tells_the_truth(serve: Serve) -> None:
    healthy = [True]
    server = serve(is_healthy=lambda: healthy[0])
    assert (ask(server, "/healthz").status, ask(server, "/healthz").text) == (200, "ok\n")
    healthy[0] = False
    assert ask(server, "/healthz").status == 503


def test_a_page_that_fails_is_told_without_a_traceback(serve: Serve, warned: list[str]) -> None:
    class Broken:
        def render(self, accept: str) -> tuple[str, bytes]:
            raise ValueError("secret detail")

    found = ask(serve(page=Broken()))
    assert (found.status, found.text) == (500, "500 Internal Server Error\n")
    assert warned == ["metrics: the page cannot be made: ValueError: secret detail"]


def test_port_that_is_taken_is_named(serve: Serve) -> None:
    """Case C99."""
    address = urlsplit(serve().url).netloc
    with pytest.raises(ConflictError) as caught:
        serve(address=address)
    assert caught.value.reference == "metrics-address-in-use"
    assert address in caught.value.message


@pytest.mark.parametrize(
    "text", ["", "9911", ":9911", "127.0.0.1", "127.0.0.1:", "::1:80", "h:65536", "h:-1", "h:²"]
)
def test_address_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(InputError) as caught:
        split_address(text)
    assert caught.value.reference == "metrics-address"


def test_addresses_are_split() -> None:
    assert split_address("127.0.0.1:0") == ("127.0.0.1", 0)
    assert split_address("[::1]:9911") == ("::1", 9911)
    assert split_address("localhost:1") == ("localhost", 1)


def test_address_of_another_host_is_named(serve: Serve) -> None:
    with pytest.raises(FailedError) as caught:
        serve(address="192.0.2.1:0")
    assert caught.value.reference == "metrics-address"


def test_it_listens_on_ipv6(serve: Serve) -> None:
    assert ask(serve(address="[::1]:0")).status == 200


# --- passwords


def test_only_the_right_password_scrapes(serve: Serve) -> None:
    server = serve(users={"prometheus": hash_password("correct horse")})
    refused = ask(server)
    assert refused.status == 401
    assert refused.headers["WWW-Authenticate"].startswith('Basic realm="shapectl metrics"')
    assert "shapectl_" not in refused.text.replace("shapectl metrics", "")
    for header in (
        basic("prometheus", "wrong"),
        basic("nobody", "correct horse"),
        "Basic !!!",
        "Bearer x",
        "Basic",
        "Basic " + base64.b64encode(b"no colon").decode(),
        "Basic " + base64.b64encode(b"\xff:\xff").decode(),
        basic("prometheus", "x" * 5000),
    ):
        assert ask(server, Authorization=header).status == 401, f"got in by {header}"
    for _ in range(3):
        assert ask(server, Authorization=basic("prometheus", "correct horse")).status == 200
    assert ask(server, "/healthz").status == 200, "got a probe refused that tells no secret"


def test_a_password_that_fitted_costs_its_hash_once() -> None:
    table = PasswordTable({"p": hash_password("right")})
    header = basic("p", "right")
    assert table.accepts(header)
    begin_s = time.perf_counter()
    for _ in range(200):
        assert table.accepts(header)
    took_s = (time.perf_counter() - begin_s) / 200
    assert took_s < 0.005, f"got {1e3 * took_s:.2f} ms for a password that is known, want under 5"


def test_hashes_differ_and_say_how_they_were_made() -> None:
    one, two = hash_password("x"), hash_password("x")
    assert one != two
    assert one.startswith("scrypt$16384$8$5$")
    assert "x" not in one.split("$")[3:]
    with pytest.raises(InputError):
        hash_password("")


@pytest.mark.parametrize(
    "text",
    [
        "plain",
        "scrypt$16384$8$5$AAAAAAAAAAAA$short===",
        "scrypt$16383$8$5$" + "A" * 24 + "$" + base64.b64encode(bytes(32)).decode(),
        "scrypt$1048576$16$5$" + "A" * 24 + "$" + base64.b64encode(bytes(32)).decode(),
    ],
    ids=["no hash", "short", "N no power of two", "too large"],
)
def test_hash_that_cannot_be_used_is_refused(text: str) -> None:
    with pytest.raises(InputError) as caught:
        PasswordTable({"p": text})
    assert caught.value.reference == "bad-password-hash"
    assert "'p'" in caught.value.message


def test_password_in_clear_beyond_this_host_is_refused(serve: Serve) -> None:
    with pytest.raises(InputError) as caught:
        serve(address="0.0.0.0:0", users={"p": hash_password("x")})
    assert caught.value.reference == "metrics-password-in-clear"


# --- slow and rude clients


def test_slow_head_ends_at_the_deadline(serve: Serve) -> None:
    server = serve(deadline_s=_SLOW_S)
    with contextlib.closing(connect(server)) as sock:
        begin_s = time.monotonic()
        sock.settimeout(0.1)
        ended = False
        while not ended and time.monotonic() < begin_s + 10:  # a byte now and then
            with contextlib.suppress(TimeoutError):
                try:
                    sock.send(b"G")
                    ended = sock.recv(1) == b""
                except ConnectionError:
                    ended = True
        took_s = time.monotonic() - begin_s
    assert ended
    assert took_s < _SLOW_S + 3, f"got {took_s:.1f} s, want about {_SLOW_S}"


def test_reader_that_never_reads_ends_at_the_deadline(serve: Serve) -> None:
    class Large:
        def render(self, accept: str) -> tuple[str, bytes]:
            return "text/plain", bytes(64 << 20)

    server = serve(page=Large(), deadline_s=_SLOW_S, max_connections=1)
    with contextlib.closing(connect(server)) as sock:
        sock.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
        deadline_s = time.monotonic() + 10
        while (status := ask(server, "/healthz").status) == 503:  # its place is not free yet
            assert time.monotonic() < deadline_s, "got no place freed"
        assert status == 200


def test_too_many_are_told_so_at_once_and_places_are_freed(serve: Serve) -> None:
    server = serve(max_connections=2, deadline_s=_SLOW_S)
    with contextlib.ExitStack() as stack:
        for _ in range(2):
            stack.enter_context(contextlib.closing(connect(server)))
        statuses = [ask(server, "/healthz").status for _ in range(3)]
        assert statuses[0] == 503, f"got {statuses}, want the first refused: both places are held"
    deadline_s = time.monotonic() + 10
    while ask(server, "/healthz").status != 200:
        assert time.monotonic() < deadline_s, "got no place freed"


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (b"GET /metrics HTTP/1.1\r\nX: " + b"a" * 20_000 + b"\r\n\r\n", 431),
        (b"GET /" + b"a" * 20_000 + b" HTTP/1.1\r\n\r\n", 431),
        (b"GET /metrics HTTP/1.1\r\n" + b"X: 1\r\n" * 200 + b"\r\n", 431),
        (b"GET /metrics HTTP/9.9\r\n\r\n", 505),
        (b"\x16\x03\x01\x02\x00\r\n\r\n", 400),
        (b"BREW /metrics HTTP/1.1\r\n\r\n", 501),
    ],
    ids=["large header", "long line", "many headers", "version", "tls", "method"],
)
def test_bad_requests_are_refused(serve: Serve, request_bytes: bytes, status: int) -> None:
    with contextlib.closing(connect(serve())) as sock:
        with contextlib.suppress(OSError):
            sock.sendall(request_bytes)
        answer = read_all(sock)
    if not answer:  # what it did not read makes the kernel reset the connection
        assert len(request_bytes) > 16_384
        return
    # before its version is known the answer has no status line (HTTP/0.9)
    begin = re.match(rb"(?:HTTP/1\.0 )?(\d+) ", answer)
    assert begin, f"got {answer[:200]!r}, want a status"
    assert int(begin[1]) == status, f"got {answer[:200]!r}, want {status}"
    assert b"Traceback" not in answer


def test_clients_that_go_away_are_no_news(serve: Serve, warned: list[str]) -> None:
    server = serve()
    for _ in range(20):
        connect(server).close()
    with contextlib.closing(connect(server)) as sock:
        sock.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    assert ask(server).status == 200
    server.close()
    assert warned == [], f"got {warned}, want nothing: that is no fault of ours"


def test_close_waits_for_the_answer_that_is_being_made(serve: Serve) -> None:
    entered, go_on = threading.Event(), threading.Event()

    class Slow:
        def render(self, accept: str) -> tuple[str, bytes]:
            entered.set()
            go_on.wait(10)
            return "text/plain", b"whole\n"

    server = serve(page=Slow())
    answers: list[Answer] = []
    client = threading.Thread(target=lambda: answers.append(ask(server)))
    client.start()
    assert entered.wait(10)
    closing = threading.Thread(target=server.close)
    closing.start()
    go_on.set()
    closing.join(10)
    client.join(10)
    assert [one.text for one in answers] == ["whole\n"]


def test_scrapes_at_the_same_time_all_get_a_whole_page(serve: Serve) -> None:
    server = serve(max_connections=8)
    answers: list[Answer] = []
    threads = [
        threading.Thread(target=lambda: answers.extend(ask(server) for _ in range(10)))
        for _ in range(6)
    ]
    for one in threads:
        one.start()
    for one in threads:
        one.join(60)
    assert [one.status for one in answers] == [200] * 60
    for answer in answers:
        samples(answer.text)


# --- TLS


def _openssl(*words: str) -> None:
    subprocess.run(["openssl", *words], check=True, capture_output=True, timeout=60)


def make_certificate(folder: Path, name: str) -> TlsFiles:
    """Return a self-signed certificate for 127.0.0.1, written in place."""
    files = TlsFiles(folder / "tls.crt", folder / "tls.key")
    _openssl(
        *("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"),
        *("-keyout", str(files.key), "-out", str(files.certificate), "-days", "2"),
        *("-subj", f"/CN={name}", "-addext", "subjectAltName=IP:127.0.0.1"),
    )
    return files


def trusting(files: TlsFiles) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=str(files.certificate))


def test_tls_serves_and_follows_a_renewed_certificate(
    serve: Serve, tmp_path: Path, warned: list[str]
) -> None:
    files = make_certificate(tmp_path, "one")
    server = serve(tls=files, users={"p": hash_password("x")}, address="127.0.0.1:0")
    first = trusting(files)
    header = basic("p", "x")
    assert ask(server, context=first, Authorization=header).status == 200
    make_certificate(tmp_path, "two")
    assert ask(server, context=trusting(files), Authorization=header).status == 200
    with pytest.raises(ssl.SSLCertVerificationError):
        ask(server, context=first)
    good = trusting(files)
    files.certificate.write_text("broken")
    for _ in range(2):
        assert ask(server, context=good, Authorization=header).status == 200, "got the last lost"
    assert len(warned) == 1, f"got {warned}, want one line"
    assert "The one before stays in use." in warned[0]


def test_client_without_its_certificate_is_refused(serve: Serve, tmp_path: Path) -> None:
    files = make_certificate(tmp_path, "one")
    strict = TlsFiles(files.certificate, files.key, client_ca=files.certificate)
    server = serve(tls=strict)
    context = trusting(files)
    with pytest.raises((ssl.SSLError, ConnectionError)):
        ask(server, context=context)
    context.load_cert_chain(files.certificate, files.key)
    assert ask(server, context=context).status == 200


def test_silent_client_does_not_stop_the_handshakes_of_others(serve: Serve, tmp_path: Path) -> None:
    files = make_certificate(tmp_path, "one")
    server = serve(tls=files, deadline_s=5)
    with contextlib.closing(connect(server)), contextlib.closing(connect(server)) as rude:
        rude.sendall(b"GET / HTTP/1.0\r\n\r\n")
        assert ask(server, context=trusting(files)).status == 200


def test_certificate_that_cannot_be_used_is_refused_at_start(serve: Serve, tmp_path: Path) -> None:
    files = make_certificate(tmp_path, "one")
    for broken in (
        TlsFiles(tmp_path / "none", files.key),
        TlsFiles(files.key, files.certificate),
        TlsFiles(files.certificate, files.key, client_ca=tmp_path / "none"),
    ):
        with pytest.raises(InputError) as caught:
            serve(tls=broken)
        assert caught.value.reference == "metrics-certificate"
