# SPDX-License-Identifier: Apache-2.0
"""The same calls over TCP with certificates on both sides.

Whose certificate has which role is tested with service/identity; here an
authenticator of ours takes everyone whom the handshake let through.
"""

from __future__ import annotations

import dataclasses
import shutil
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
from rpckit import DEVICE, FakeEngine, Service, serving

from shapeagent.client.address import AgentAddress, TlsFiles
from shapeagent.client.remote import RemoteEngine
from shapeagent.model.errors import FailedError, PrivilegeError, ShapeError
from shapeagent.policy.whitelist import LineDefaults, parse_entry
from shapeagent.service.rpc.contracts import Caller, Role

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="makes its certificates")

_SAN = "subjectAltName=DNS:localhost,IP:127.0.0.1,URI:spiffe://shapectl.test/one"


def make_certificates(folder: Path) -> None:
    """Write a CA, a server's and a client's certificate, with names as `agent certs` has them."""

    def openssl(*words: str) -> None:
        subprocess.run(["openssl", *words], cwd=folder, check=True, capture_output=True)

    new = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2")
    openssl("req", "-x509", *new, "-subj", "/CN=ca", "-keyout", "ca-key.pem", "-out", "ca.pem")
    for name in ("server", "client-operator"):
        openssl(
            *("req", "-x509", *new, "-subj", f"/CN={name}", "-addext", _SAN),
            *("-CA", "ca.pem", "-CAkey", "ca-key.pem"),
            *("-addext", "basicConstraints=critical,CA:FALSE"),
            *("-keyout", f"{name}-key.pem", "-out", f"{name}.pem"),
        )


class OnlyTls:
    """Takes whoever shows a certificate."""

    def authenticate(self, context: Any) -> Caller:
        names = context.auth_context().get("peer_spiffe_id")
        if not names:
            raise PrivilegeError("client-certificate-missing", "No certificate.")
        return Caller(names[0].decode(), Role.OPERATOR, context.peer())


@dataclass
class Tcp:
    service: Service
    engine: FakeEngine
    port: int
    tls: TlsFiles

    @property
    def address(self) -> AgentAddress:
        return AgentAddress(f"dns:///localhost:{self.port}")


@pytest.fixture
def tcp(tmp_path: Path) -> Iterator[Tcp]:
    make_certificates(tmp_path)
    credentials = grpc.ssl_server_credentials(
        [((tmp_path / "server-key.pem").read_bytes(), (tmp_path / "server.pem").read_bytes())],
        (tmp_path / "ca.pem").read_bytes(),
        require_client_auth=True,
    )
    engine = FakeEngine()
    with serving(tmp_path, engine) as service:
        port = service.servers.listen_tcp("127.0.0.1:0", credentials, OnlyTls())
        yield Tcp(service, engine, port, TlsFiles.beside(tmp_path / "client-operator.pem"))


def remote_of(tcp: Tcp, **options: Any) -> RemoteEngine:
    return RemoteEngine(tcp.address, tls=tcp.tls, **options)


def test_calls_over_tcp(tcp: Tcp) -> None:
    remote = remote_of(tcp)
    remote.hello()
    assert remote.status() == tcp.engine.status()
    assert remote.class_set(DEVICE, "bulk", 5_000_000).name == "bulk"
    with pytest.raises(PrivilegeError) as caught:
        remote.detach(DEVICE)
    assert caught.value.reference == "denied"
    assert "spiffe://shapectl.test/one" in caught.value.message
    remote.close()
    (line,) = tcp.service.audit.lines
    assert line.who == "spiffe://shapectl.test/one"
    assert line.peer.startswith("ipv4:127.0.0.1:"), f"got {line.peer}"


def test_without_a_certificate_no_handler_runs(tcp: Tcp) -> None:
    """C106: the switch that demands one is on."""
    ca = tcp.tls.ca.read_bytes()
    for channel in (
        grpc.secure_channel(tcp.address.target, grpc.ssl_channel_credentials(ca)),
        grpc.insecure_channel(tcp.address.target),
    ):
        with channel, pytest.raises(grpc.RpcError) as caught:
            channel.unary_unary("/shapectl.v1.ShaperService/GetStatus")(b"", timeout=3)
        assert caught.value.code().name in {"UNAVAILABLE", "DEADLINE_EXCEEDED"}
    assert not tcp.engine.calls


def test_a_server_of_another_ca_is_not_believed(tcp: Tcp, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    make_certificates(tmp_path / "other")
    other = TlsFiles.beside(tmp_path / "other" / "client-operator.pem")
    remote = RemoteEngine(tcp.address, tls=other)
    with pytest.raises(ShapeError) as caught:
        remote.hello()
    remote.close()
    assert caught.value.reference == "agent-unreachable"
    assert not tcp.engine.calls


def test_a_port_that_is_taken_is_named(tcp: Tcp) -> None:
    """C99's kind: a second agent does not share the first one's port."""
    key, certificate = tcp.tls.key.read_bytes(), tcp.tls.certificate.read_bytes()
    credentials = grpc.ssl_server_credentials([(key, certificate)])
    with pytest.raises(FailedError) as caught:
        tcp.service.servers.listen_tcp(f"127.0.0.1:{tcp.port}", credentials, OnlyTls())
    assert caught.value.reference == "tcp-bind"
    remote = remote_of(tcp)
    remote.hello()
    remote.close()


def test_a_restarted_server_is_found_again(tmp_path: Path) -> None:
    """C110: the client reconnects, and a call that met the gap is tried again."""
    engine = FakeEngine()
    remote = None
    for _ in range(3):
        with serving(tmp_path, engine) as service:
            remote = remote or RemoteEngine(service.address())
            assert remote.status() == engine.status()
    assert remote is not None
    remote.close()


@pytest.mark.host
def test_the_way_of_a_stream_takes_two_hundred_thousand_entries_a_second(tcp: Tcp) -> None:
    """The part of the API alone, packing included; the kernel's part is in `make perf`."""
    template = parse_entry("10.0.0.0", LineDefaults(traffic_class="bulk"))[0]
    many = [
        dataclasses.replace(template, destination=((0x0A000000 + n).to_bytes(4, "big"), 32))
        for n in range(200_000)
    ]
    remote = remote_of(tcp)
    remote.hello()
    tcp.engine.keeps = False
    best_s = 1e9
    for _ in range(3):
        began_s = time.monotonic()
        remote.whitelist_replace(DEVICE, many)
        best_s = min(best_s, time.monotonic() - began_s)
    remote.close()
    print(f"200,000 entries through mTLS in {best_s:.2f} s: {200_000 / best_s:,.0f} entries/s")
    assert best_s < 1.0, f"got {best_s:.2f} s for 200,000 entries"
