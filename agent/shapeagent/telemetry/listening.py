# SPDX-License-Identifier: Apache-2.0
"""Where a server listens, and its certificate, which may be renewed while it does."""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
import ssl
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from shapeagent.model.errors import ConflictError, FailedError, InputError


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """Certificate and key of the server; with `client_ca` only clients it signed may scrape."""

    certificate: Path
    key: Path
    client_ca: Path | None = None

    @property
    def all(self) -> tuple[Path, ...]:
        """The files that are there."""
        return tuple(one for one in (self.certificate, self.key, self.client_ca) if one)


def split_address(text: str) -> tuple[str, int]:
    """Return (host, port). Raises: InputError metrics-address."""
    host, colon, port = text.rpartition(":")
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    bad = not colon or not bare or (":" in bare and bare == host) or not port.isdecimal()
    if bad or not port.isascii() or int(port) > 65535:
        raise InputError(
            "metrics-address",
            f"{text!r} is not HOST:PORT.",
            hint="127.0.0.1:9911, [::1]:9911, or 0.0.0.0:9911 for every address",
        )
    return bare, int(port)


def listen(host: str, port: int) -> socket.socket:
    """Return a listening TCP socket. Raises: ConflictError metrics-address-in-use; FailedError."""
    try:
        family, _, _, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    except OSError as error:
        raise _address_error(host, port, error) from error
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(16)
    except OSError as error:
        sock.close()
        if error.errno == errno.EADDRINUSE:
            raise ConflictError(
                "metrics-address-in-use",
                f"Another program listens on {host}:{port}.",
                hint=f"ss -ltnp 'sport = :{port}' shows which; or choose another metrics address",
            ) from error
        raise _address_error(host, port, error) from error
    return sock


def _address_error(host: str, port: int, error: OSError) -> FailedError:
    return FailedError(
        "metrics-address",
        f"Cannot listen on {host}:{port}: {error.strerror or error}.",
        hint="ip address shows the addresses of this host",
    )


def is_loopback(sock: socket.socket) -> bool:
    """Return whether only this host reaches a listening socket."""
    return ipaddress.ip_address(sock.getsockname()[0].partition("%")[0]).is_loopback


class ReloadingTls:
    """A TLS context that follows its files: a certificate is renewed without a restart (F28)."""

    def __init__(self, files: TlsFiles, warn: Callable[[str], None]) -> None:
        self._files = files
        self._warn = warn
        self._lock = threading.Lock()
        self._seen = self._stamps()
        self._context = self._load()

    def context(self) -> ssl.SSLContext:
        """Return the context of the files as they are; of the last good ones where they are not."""
        with self._lock:
            stamps = self._stamps()
            if stamps != self._seen:
                self._seen = stamps
                try:
                    self._context = self._load()
                except InputError as error:
                    self._warn(f"metrics: {error.message} The one before stays in use.")
            return self._context

    def _stamps(self) -> tuple[object, ...]:
        found = []
        for path in self._files.all:
            try:
                about = os.stat(path)
                found.append((about.st_ino, about.st_size, about.st_mtime_ns))
            except OSError as error:
                found.append((error.errno or 0, 0, 0))
        return tuple(found)

    def _load(self) -> ssl.SSLContext:
        files = self._files
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        try:
            # a key with a passphrase must not stop the agent at a prompt
            context.load_cert_chain(files.certificate, files.key, password=lambda: b"")
            if files.client_ca is not None:
                context.verify_mode = ssl.CERT_REQUIRED
                context.load_verify_locations(files.client_ca)
        except (OSError, ValueError) as error:
            raise InputError(
                "metrics-certificate",
                f"Certificate {files.certificate} and key {files.key} cannot be used: {error}.",
                hint="openssl x509 -noout -text -in CERTIFICATE shows the certificate",
            ) from error
        return context
