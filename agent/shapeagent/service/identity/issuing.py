# SPDX-License-Identifier: Apache-2.0
"""X.509 for a development CA: its own certificate, and those that it signs."""

from __future__ import annotations

import contextlib
import ipaddress
import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from shapeagent.model.errors import InputError
from shapeagent.service.identity.spiffe import SpiffeId

_DNS_LABEL = re.compile(r"[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?", re.ASCII | re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Issued:
    """A certificate and its key."""

    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey


def make_ca(trust_domain: str, begin: datetime, end: datetime) -> Issued:
    """Return a new CA, unlike every other by its name."""
    key = ec.generate_private_key(ec.SECP256R1())
    # A random part: two CAs of one name would hide each other in a bundle (CA old → old + new).
    name = x509.Name(
        [
            x509.NameAttribute(NameOID.ORGANIZATION_NAME, "shapectl development CA"),
            x509.NameAttribute(NameOID.COMMON_NAME, f"{trust_domain[:40]} {secrets.token_hex(4)}"),
        ]
    )
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(begin)
        .not_valid_after(end)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_key_usage(signs_certificates=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(
            x509.SubjectAlternativeName(
                [x509.UniformResourceIdentifier(f"spiffe://{trust_domain}")]
            ),
            critical=False,
        )
        .sign(key, hashes.SHA256())
    )
    return Issued(certificate, key)


def issue(
    ca: Issued, identity: SpiffeId, server_names: Sequence[str], begin: datetime, end: datetime
) -> Issued:
    """Return a workload's certificate, for servers too where there are `server_names`."""
    key = ec.generate_private_key(ec.SECP256R1())
    names: list[x509.GeneralName] = [x509.UniformResourceIdentifier(str(identity))]
    names += [general_name(name) for name in server_names]
    # Both ways for a server: it may be a client of another agent; a client is never a server.
    usages = [ExtendedKeyUsageOID.CLIENT_AUTH]
    if server_names:
        usages.insert(0, ExtendedKeyUsageOID.SERVER_AUTH)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.ORGANIZATION_NAME, "shapectl")]))
        .issuer_name(ca.certificate.subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(max(begin, ca.certificate.not_valid_before_utc))
        .not_valid_after(end)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_key_usage(signs_certificates=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage(usages), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(ca.key.public_key()), critical=False
        )
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .sign(ca.key, hashes.SHA256())
    )
    return Issued(certificate, key)


def _key_usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def general_name(text: str) -> x509.GeneralName:
    """Return a DNS name, or an address, as certificates have it. Raises: InputError server-name."""
    with contextlib.suppress(ValueError):
        return x509.IPAddress(ipaddress.ip_address(text))
    labels = text.split(".")
    # All digits at the end: a mistyped address, which nobody could ever connect to.
    if len(text) <= 253 and all(map(_DNS_LABEL.fullmatch, labels)) and not labels[-1].isdigit():
        return x509.DNSName(text)
    raise InputError(
        "server-name",
        f"{text!a} is neither a DNS name nor an IP address.",
        hint="--server-name node1.example.org --server-name 192.0.2.7",
    )
