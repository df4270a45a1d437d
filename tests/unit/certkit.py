# SPDX-License-Identifier: Apache-2.0
"""Certificates of every kind for tests, wrong ones too, and a gRPC server that asks for them."""

from __future__ import annotations

import contextlib
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import grpc
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from shapeagent.service.identity.certificates import IdentityError
from shapeagent.service.identity.peers import PeerAuthenticator
from shapeagent.service.identity.spiffe import parse_role_table
from shapeagent.service.identity.tls import ServerTls, TlsFiles

TRUST_DOMAIN = "example.org"
OPERATOR = f"spiffe://{TRUST_DOMAIN}/ns/prod/sa/scheduler"
OBSERVER = f"spiffe://{TRUST_DOMAIN}/observer"
ROLES = parse_role_table(TRUST_DOMAIN, {OPERATOR: "operator", OBSERVER: "observer"})

CLIENT = ExtendedKeyUsageOID.CLIENT_AUTH
SERVER = ExtendedKeyUsageOID.SERVER_AUTH


@dataclass(frozen=True)
class Issued:
    """A certificate, its key, and the certificates between it and its CA."""

    certificate: x509.Certificate
    key: Any
    between: tuple[x509.Certificate, ...] = ()

    @property
    def pem(self) -> bytes:
        return b"".join(map(pem_of, (self.certificate, *self.between)))

    @property
    def key_pem(self) -> bytes:
        return bytes(
            self.key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            )
        )


def pem_of(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def key_usage(*, digital_signature: bool = True, key_cert_sign: bool = False) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature, False, False, False, False, key_cert_sign, False, False, False
    )


def make_ca(
    name: str = "one", *, begin_s: float = -3600, end_s: float = 86_400, above: Issued | None = None
) -> Issued:
    """Return a CA; one below `above` where that is given."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"CA {name}")])
    builder = (
        _builder(key, subject, above.certificate.subject if above else subject, begin_s, end_s)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .add_extension(key_usage(digital_signature=False, key_cert_sign=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )
    if above is None:
        return Issued(builder.sign(key, hashes.SHA256()), key)
    signed = _with_authority(builder, above).sign(above.key, hashes.SHA256())
    return Issued(signed, key, (signed, *above.between))


def issue(
    ca: Issued | None,
    *uris: str,
    names: Sequence[x509.GeneralName] = (),
    begin_s: float = -60,
    end_s: float = 3600,
    purposes: Sequence[x509.ObjectIdentifier] = (CLIENT,),
    usage: x509.KeyUsage | None = None,
    is_ca: bool = False,
    key: Any = None,
) -> Issued:
    """Return a certificate of `ca` with these URI names; with None one that signed itself."""
    key = key or ec.generate_private_key(ec.SECP256R1())
    every_name: list[x509.GeneralName] = [x509.UniformResourceIdentifier(uri) for uri in uris]
    every_name += names
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "somebody")])
    builder = (
        _builder(key, subject, ca.certificate.subject if ca else subject, begin_s, end_s)
        .add_extension(x509.BasicConstraints(ca=is_ca, path_length=None), critical=True)
        .add_extension(usage or key_usage(), critical=True)
    )
    if every_name:
        builder = builder.add_extension(x509.SubjectAlternativeName(every_name), critical=False)
    if purposes:
        builder = builder.add_extension(x509.ExtendedKeyUsage(purposes), critical=False)
    if ca is None:
        return Issued(builder.sign(key, hashes.SHA256()), key)
    between = ca.between if ca.between else ()
    return Issued(_with_authority(builder, ca).sign(ca.key, hashes.SHA256()), key, between)


def issue_server(ca: Issued, **more: Any) -> Issued:
    """Return a certificate for the server on `localhost`."""
    return issue(ca, names=[x509.DNSName("localhost")], purposes=(SERVER,), **more)


def _builder(
    key: Any, subject: x509.Name, issuer: x509.Name, begin_s: float, end_s: float
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now + timedelta(seconds=begin_s))
        .not_valid_after(now + timedelta(seconds=end_s))
    )


def _with_authority(builder: x509.CertificateBuilder, ca: Issued) -> x509.CertificateBuilder:
    identifier = x509.AuthorityKeyIdentifier.from_issuer_public_key(ca.key.public_key())
    return builder.add_extension(identifier, critical=False)


class Service:
    """A gRPC server on 127.0.0.1 behind mTLS that says who called; its files lie in `folder`."""

    def __init__(self, folder: Path, server: Issued, *cas: Issued) -> None:
        self.files = TlsFiles(folder / "server.pem", folder / "server-key.pem", folder / "ca.pem")
        self.write_pair(server)
        self.write_bundle(*cas)
        self.tls = ServerTls(self.files)
        self.authenticator = PeerAuthenticator(ROLES, self.tls)
        self.handled = 0
        self.resumed = 0  # of those, on sessions without a handshake of their own
        self.go_on = threading.Semaphore(0)  # one more answer of a watch
        self._server = grpc.server(
            futures.ThreadPoolExecutor(8), handlers=[_Handlers(self)], options=[_NO_REUSE]
        )
        self.port = self._server.add_secure_port("127.0.0.1:0", self.tls.credentials())
        self._server.start()

    def write_pair(self, server: Issued) -> None:
        replace(self.files.certificate, server.pem)
        replace(self.files.key, server.key_pem)

    def write_bundle(self, *cas: Issued) -> None:
        replace(self.files.client_ca, b"".join(one.pem for one in cas))

    def who(self, context: Any) -> bytes:
        """Return who calls; a refusal ends the call with its reference."""
        self.handled += 1
        self.resumed += context.auth_context().get("ssl_session_reused") == [b"true"]
        try:
            peer = self.authenticator.authenticate(context)
        except IdentityError as error:
            context.abort(
                grpc.StatusCode.UNAUTHENTICATED, f"{error.reference} {error.who} {error.message}"
            )
        return f"{peer.who} {peer.role} {peer.peer}".encode()

    def stop(self) -> None:
        self._server.stop(None).wait(10)

    def certificate_seen(self, client: Issued, folder: Path, root: Issued) -> x509.Certificate:
        """Return the certificate that the server shows to a new connection of OpenSSL."""
        import socket

        (folder / "seen.pem").write_bytes(client.pem + client.key_pem)
        context = ssl.create_default_context(cadata=root.pem.decode())
        context.load_cert_chain(folder / "seen.pem")
        context.set_alpn_protocols(["h2"])
        with (
            socket.create_connection(("127.0.0.1", self.port), timeout=10) as plain,
            context.wrap_socket(plain, server_hostname="localhost") as wrapped,
        ):
            shown = wrapped.getpeercert(binary_form=True)
        assert shown is not None
        return x509.load_der_x509_certificate(shown)


_NO_REUSE = ("grpc.so_reuseport", 0)


class _Handlers(grpc.GenericRpcHandler):  # type: ignore[misc]
    def __init__(self, service: Service) -> None:
        self._service = service

    def service(self, details: Any) -> Any:
        if details.method == "/test/Who":
            return grpc.unary_unary_rpc_method_handler(
                lambda request, context: self._service.who(context)
            )
        return grpc.unary_stream_rpc_method_handler(self._watch)

    def _watch(self, request: bytes, context: Any) -> Iterator[bytes]:
        while self._service.go_on.acquire(timeout=20):
            yield self._service.who(context)


def replace(path: Path, content: bytes) -> None:
    """Put a whole file in the place of another, as every careful writer does."""
    beside = path.with_name(f".{path.name}.new")
    beside.write_bytes(content)
    beside.chmod(0o600)
    beside.replace(path)


class Client:
    """One connection to a service."""

    def __init__(
        self, port: int, root: Issued, client: Issued | None, *, sessions: Any = None
    ) -> None:
        pair = (client.key_pem, client.pem) if client is not None else (None, None)
        credentials = grpc.ssl_channel_credentials(root.pem, *pair)
        # A pool of its own: gRPC shares a connection among channels that look the same.
        options = [("grpc.use_local_subchannel_pool", 1), ("grpc.enable_retries", 0)]
        if sessions is not None:  # of grpc.experimental.session_cache
            options.append(("grpc.ssl_session_cache", sessions))
        self._channel = grpc.secure_channel(f"localhost:{port}", credentials, options)

    def who(self) -> list[str]:
        """Return [SPIFFE id, role, address]."""
        answer: bytes = self._channel.unary_unary("/test/Who")(b"", timeout=20)
        return answer.decode().split()

    def watch(self) -> Any:
        """Return the stream."""
        return self._channel.unary_stream("/test/Watch")(b"", timeout=60)

    def close(self) -> None:
        self._channel.close()


def refused(act: Callable[[], object]) -> tuple[grpc.StatusCode, str]:
    """Return the status code and the first word of the details with which `act` ends."""
    try:
        result = act()
    except grpc.RpcError as error:
        call: Any = error
        return call.code(), (call.details() or " ").split()[0]
    raise AssertionError(f"got {result!r}, want a refusal")


def wait_until(condition: Callable[[], bool], what: str, deadline_s: float = 20) -> None:
    """Return once the condition holds."""
    end_s = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end_s, f"got nothing in {deadline_s} s, want {what}"
        time.sleep(0.02)


@contextlib.contextmanager
def closing(*things: Any) -> Iterator[None]:
    """Close clients and stop services at the end."""
    try:
        yield
    finally:
        for thing in things:
            (thing.stop if isinstance(thing, Service) else thing.close)()
