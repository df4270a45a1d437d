# SPDX-License-Identifier: Apache-2.0
"""A development CA, and certificates that the agent and its clients can use at once.

For a laptop, a lab, a first try. In production certificates come from SPIRE,
cert-manager or the site's own CA, and the CA's key is nowhere near the agent.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from shapeagent.model.errors import ConflictError, FailedError, InputError
from shapeagent.service.identity.issuing import Issued, general_name, issue, make_ca
from shapeagent.service.identity.spiffe import (
    SpiffeId,
    parse_id,
    parse_role_table,
    parse_trust_domain,
)

CA = "ca"
SERVER = "server"
MOST_DAYS = 3650
_MOST_NAME = 120
# A clock that is behind must not refuse what was made a moment ago.
_BACKDATED = timedelta(minutes=5)


@dataclass(frozen=True, slots=True)
class CertsRequest:
    """What to make."""

    folder: Path
    trust_domain: str
    server_names: tuple[str, ...]  # DNS names and addresses that clients connect to
    clients: tuple[tuple[str, str], ...]  # (role, SPIFFE id)
    days: int = 30
    ca_days: int = 365
    force: bool = False  # overwrite
    keep_ca: bool = False  # sign with the CA that is in the folder


@dataclass(frozen=True, slots=True)
class MadeCertificate:
    """One certificate that was written, and its key."""

    name: str
    certificate: str  # path
    key: str
    identity: str | None  # SPIFFE id
    role: str | None
    names: tuple[str, ...]
    not_after: str  # RFC 3339


@dataclass(frozen=True, slots=True)
class CertsReport:
    """What was made, and the lines of agent.toml that use it."""

    folder: str
    trust_domain: str
    ca_kept: bool
    certificates: tuple[MadeCertificate, ...]
    config: str


def make_certs(request: CertsRequest) -> CertsReport:
    """Return what was made: a CA, a server's certificate, one for each client. ECDSA P-256.

    Raises: InputError days-range, server-name, spiffe-trust-domain, agent-roles,
        client-name, ca-unusable, ca-ends-before; ConflictError file-exists;
        FailedError certs-unwritable.
    Effects: writes PEM files into the folder, keys with mode 0600; each is in its place
        whole or not at all.
    """
    _check(request)
    now = datetime.now(UTC).replace(microsecond=0)
    begin, end = now - _BACKDATED, now + timedelta(days=request.days)
    identities: list[tuple[str, str | None, SpiffeId]] = [
        (SERVER, None, SpiffeId(request.trust_domain, "/shapectl-agent"))
    ]
    identities += [
        (f"client-{name}", role, identity)
        for name, (role, identity) in _name_clients(request.clients).items()
    ]
    names = [name for name, _, _ in identities]
    _refuse_overwriting(request, names if request.keep_ca else [CA, *names])
    if request.keep_ca:
        ca = _load_ca(request.folder)
        if ca.certificate.not_valid_after_utc < end:
            raise InputError(
                "ca-ends-before",
                f"The CA ends {_time(ca.certificate)}, before {request.days} days are over.",
                hint="fewer --days, or a new CA: without --keep-ca",
            )
    else:
        ca = make_ca(request.trust_domain, begin, now + timedelta(days=request.ca_days))
    made: dict[str, Issued] = {} if request.keep_ca else {CA: ca}
    rows = [] if request.keep_ca else [_row(request.folder, CA, ca, None, None, ())]
    for name, role, identity in identities:
        server_names = request.server_names if name == SERVER else ()
        issued = issue(ca, identity, server_names, begin, end)
        made[name] = issued
        rows.append(_row(request.folder, name, issued, str(identity), role, server_names))
    _write_all(request.folder, made)
    return CertsReport(
        folder=str(request.folder),
        trust_domain=request.trust_domain,
        ca_kept=request.keep_ca,
        certificates=tuple(rows),
        config=config_text(request),
    )


def config_text(request: CertsRequest) -> str:
    """Return the lines of agent.toml that use what `make_certs` writes."""
    folder = request.folder.absolute()
    lines = [
        "[tcp]",
        'address = "[::]:7443"',
        f"certificate = {_toml(folder / 'server.pem')}",
        f"key = {_toml(folder / 'server-key.pem')}",
        f"client_ca = {_toml(folder / 'ca.pem')}",
        f"trust_domain = {_toml(request.trust_domain)}",
        "",
        "[tcp.roles]",
        *(f"{_toml(identity)} = {_toml(role)}" for role, identity in request.clients),
    ]
    return "\n".join(lines) + "\n"


def _toml(value: object) -> str:
    # TOML's basic strings know the escapes that ascii() does not write for printable text.
    text = str(value)
    if any(not character.isprintable() for character in text):
        raise InputError("folder-name", f"{text!a} has a character that no configuration should.")
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _check(request: CertsRequest) -> None:
    parse_trust_domain(request.trust_domain)
    for days in (request.days, request.ca_days):
        if not 1 <= days <= MOST_DAYS:
            raise InputError(
                "days-range", f"{days} is not from 1 to {MOST_DAYS} days.", hint="--days 30"
            )
    if not request.keep_ca and request.ca_days < request.days:
        raise InputError(
            "ca-ends-before",
            f"A CA of {request.ca_days} days would end before what it signs for {request.days}.",
            hint="more --ca-days",
        )
    if not request.server_names:
        raise InputError(
            "server-name", "The server needs at least one name.", hint="--server-name localhost"
        )
    for name in request.server_names:
        general_name(name)
    if len({identity for _, identity in request.clients}) < len(request.clients):
        raise InputError(
            "client-name",
            "An id is named for two clients.",
            hint="each client gets an id of its own, and one role",
        )
    parse_role_table(request.trust_domain, {identity: role for role, identity in request.clients})
    config_text(request)  # a folder that cannot be written down is refused before all work


def _name_clients(clients: Sequence[tuple[str, str]]) -> Mapping[str, tuple[str, SpiffeId]]:
    """Return file names for clients: the last segments of their paths, as many as tell them apart.

    Raises: InputError client-name.
    """
    named: dict[str, tuple[str, SpiffeId]] = {}
    for role, text in clients:
        identity = parse_id(text)
        segments = identity.path.split("/")[1:]
        for count in range(1, len(segments) + 1):
            name = "-".join(segments[-count:])
            if name not in named and len(name) <= _MOST_NAME:
                named[name] = (role, identity)
                break
        else:
            raise InputError(
                "client-name",
                f"No file name is left for {text!a}: client-{name[:_MOST_NAME]} is taken, or it "
                "is too long.",
                hint="make its certificate in a folder of its own: --out",
            )
    return named


def _load_ca(folder: Path) -> Issued:
    try:
        certificate = x509.load_pem_x509_certificate((folder / "ca.pem").read_bytes())
        key = serialization.load_pem_private_key((folder / "ca-key.pem").read_bytes(), None)
    except (OSError, ValueError, TypeError) as error:
        raise _ca_unusable(folder, str(error)) from error
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise _ca_unusable(folder, "its key is not ECDSA")
    if key.public_key() != certificate.public_key():
        raise _ca_unusable(folder, "ca-key.pem does not belong to ca.pem")
    return Issued(certificate, key)


def _ca_unusable(folder: Path, why: str) -> InputError:
    return InputError(
        "ca-unusable",
        f"Cannot sign with the CA in {folder}: {why}.",
        hint="without --keep-ca a new CA is made",
    )


def _refuse_overwriting(request: CertsRequest, names: Sequence[str]) -> None:
    if request.force:
        return
    found = [
        str(path)
        for name in names
        for path in _paths(request.folder, name)
        if path.exists() or path.is_symlink()
    ]
    if found:
        raise ConflictError(
            "file-exists",
            f"{len(found)} of the files are there already.",
            hint="--force overwrites them; --keep-ca --force leaves the CA; or another --out",
            details=found,
        )


def _paths(folder: Path, name: str) -> tuple[Path, Path]:
    return folder / f"{name}-key.pem", folder / f"{name}.pem"


def _row(
    folder: Path,
    name: str,
    issued: Issued,
    identity: str | None,
    role: str | None,
    names: Sequence[str],
) -> MadeCertificate:
    key, certificate = _paths(folder, name)
    return MadeCertificate(
        name, str(certificate), str(key), identity, role, tuple(names), _time(issued.certificate)
    )


def _time(certificate: x509.Certificate) -> str:
    return certificate.not_valid_after_utc.strftime("%Y-%m-%dT%H:%M:%SZ")


def _write_all(folder: Path, made: Mapping[str, Issued]) -> None:
    """Write everything beside its place, then move it there: a full disk changes nothing."""
    staged: list[tuple[Path, Path]] = []
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for name, issued in made.items():
            key_path, certificate_path = _paths(folder, name)
            key_pem = issued.key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            )
            certificate_pem = issued.certificate.public_bytes(serialization.Encoding.PEM)
            for path, content, mode in (
                (key_path, key_pem, 0o600),
                (certificate_path, certificate_pem, 0o644),
            ):
                beside = folder / f".{path.name}.{secrets.token_hex(4)}"
                staged.append((beside, path))
                _write(beside, content, mode)
        for beside, path in staged:
            beside.replace(path)
    except OSError as error:
        raise FailedError(
            "certs-unwritable",
            f"Cannot write into {folder}: {error.strerror or error}.",
            hint=f"ls -ld {folder}; df -h {folder}",
        ) from error
    finally:
        for beside, _ in staged:
            with contextlib.suppress(OSError):
                beside.unlink()


def _write(path: Path, content: bytes, mode: int) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    with open(descriptor, "wb") as file:
        os.fchmod(descriptor, mode)
        file.write(content)
        file.flush()
        os.fsync(descriptor)
