# SPDX-License-Identifier: Apache-2.0
"""Certificates as the agent needs them: a server pair, a bundle of CAs, a client's identity.

What is half written, of another kind, or out of its time is refused here, with
its reason, before gRPC sees it: gRPC would take up a bad pair and refuse every
handshake without a word.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TypeVar

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.x509.oid import ExtendedKeyUsageOID
from cryptography.x509.verification import PolicyBuilder, Store, VerificationError

from shapeagent.model.errors import InputError, PrivilegeError
from shapeagent.service.identity.spiffe import SpiffeId, parse_id

_Extension = TypeVar("_Extension", bound=x509.ExtensionType)

_LEAST_RSA_BITS = 2048
_CURVES = ("secp256r1", "secp384r1", "secp521r1")
_MAKE_HINT = "shapectl agent certs makes a development CA and certificates that fit"
# What cryptography raises over a certificate that is damaged, or of a kind that it does not know;
# much of a certificate is read only when it is asked for. Found by 60,000 damaged ones.
_UNREADABLE = (
    ValueError,
    UnsupportedAlgorithm,
    x509.DuplicateExtension,
    x509.InvalidVersion,
    x509.UnsupportedGeneralNameType,
)
_MOST_CHAIN_BYTES = 64 << 10
#: What stands for an identity that could not be read.
UNKNOWN = "unknown"


class IdentityError(PrivilegeError):
    """A peer is refused. `who` is what it claims to be, for the audit line."""

    def __init__(self, reference: str, message: str, *, who: str = UNKNOWN, hint: str) -> None:
        super().__init__(reference, message, hint=hint)
        self.who = who


@dataclass(frozen=True, slots=True)
class ServerPair:
    """A certificate chain, leaf first, and its key, as gRPC takes them."""

    certificate_pem: bytes
    key_pem: bytes
    not_before_unix_s: float
    not_after_unix_s: float
    spiffe_id: str | None

    def check_time(self, now_unix_s: float) -> None:
        """Return where the certificate holds now.

        Raises: InputError certificate-expired, certificate-not-yet-valid.
        """
        span = (self.not_before_unix_s, self.not_after_unix_s)
        _check_time(span, "The server certificate", now_unix_s)


@dataclass(frozen=True, slots=True)
class Bundle:
    """The CAs that clients' certificates must lead to."""

    pem: bytes
    certificates: tuple[x509.Certificate, ...]
    store: Store

    def not_after_unix_s(self, now_unix_s: float) -> float:
        """Return when the first of the CAs that still hold ends; where none does, the last did."""
        ends = sorted(one.not_valid_after_utc.timestamp() for one in self.certificates)
        return next((end for end in ends if end > now_unix_s), ends[-1])

    def check_time(self, now_unix_s: float) -> None:
        """Return where at least one CA holds now.

        Raises: InputError certificate-expired, certificate-not-yet-valid.
        """
        spans = [_span(one) for one in self.certificates]
        if not any(begin <= now_unix_s < end for begin, end in spans):
            _check_time(spans[0], "Each of the client CAs", now_unix_s)


@dataclass(frozen=True, slots=True)
class ClientCertificate:
    """A client's certificate that leads to the bundle: whose it is, and for how long."""

    identity: SpiffeId
    not_before_unix_s: float
    not_after_unix_s: float  # of the first certificate of its chain that ends


def load_server_pair(contents: Sequence[bytes]) -> ServerPair:
    """Return the pair of a certificate file and a key file.

    Args:
        contents: the certificate file (leaf first, then intermediates), the key file; PEM.

    Raises: InputError certificate-malformed, certificate-purpose, certificate-key-type,
        key-malformed, key-mismatch.
    """
    certificate_pem, key_pem = contents
    key = _load_key(key_pem)
    form = (serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
    with _reading("the server certificate"):
        leaf = _load_certificates(certificate_pem, "the server certificate")[0]
        public_key = leaf.public_key().public_bytes(*form)
        usage = _extension(leaf, x509.ExtendedKeyUsage)
        names = _uri_names(leaf)
        span = _span(leaf)
    if key.public_key().public_bytes(*form) != public_key:
        raise _bad(
            "key-mismatch",
            "The server's key does not belong to the first certificate of its file.",
        )
    if usage is not None and ExtendedKeyUsageOID.SERVER_AUTH not in usage:
        raise _bad("certificate-purpose", "The server certificate is not meant for servers.")
    return ServerPair(certificate_pem, key_pem, *span, names[0] if len(names) == 1 else None)


def load_bundle(contents: Sequence[bytes]) -> Bundle:
    """Return the CAs of a bundle file; ended ones may stay in it.

    Raises: InputError certificate-malformed, certificate-purpose.
    """
    (pem,) = contents
    with _reading("the bundle of client CAs"):
        certificates = _load_certificates(pem, "the bundle of client CAs")
        for one in certificates:
            _span(one)
            constraints = _extension(one, x509.BasicConstraints)
            if constraints is None or not constraints.ca:
                raise _bad(
                    "certificate-purpose",
                    "The bundle of client CAs has a certificate that is no CA: "
                    f"{one.subject.rfc4514_string()!a}.",
                )
        store = Store(list(certificates))
    return Bundle(pem, certificates, store)


def _read_identity(leaf: x509.Certificate) -> SpiffeId:
    """Return the identity that a client's certificate states; says nothing of who signed it."""
    names = _uri_names(leaf)
    constraints = _extension(leaf, x509.BasicConstraints)
    usage = _extension(leaf, x509.KeyUsage)
    if not names:
        raise refusal(
            "client-identity-missing",
            "The client certificate has no URI name. DNS names and subjects count for nothing.",
        )
    if len(names) > 1:
        raise refusal(
            "client-identity-ambiguous",
            f"The client certificate has {len(names)} URI names, want exactly one.",
        )
    try:
        identity = parse_id(names[0])
    except InputError as error:
        raise refusal("client-identity-invalid", error.message, who=names[0]) from error
    is_ca = constraints is not None and constraints.ca
    if is_ca or (
        usage is not None and (usage.key_cert_sign or usage.crl_sign or not usage.digital_signature)
    ):
        raise refusal(
            "client-certificate-purpose",
            "The client certificate may sign certificates, or not sign a handshake: it is no "
            "workload's (X509-SVID §4.3).",
            who=str(identity),
        )
    return identity


def verify_client(
    leaf_pem: bytes, chain_pem: bytes, bundle: Bundle, now_unix_s: float
) -> ClientCertificate:
    """Return whose certificate it is, where it leads to the bundle and holds now.

    The handshake has asked the same of the bundle of its time; this asks again, of the
    bundle and the clock of now. It is stricter than the handshake: what the Web PKI's
    profile forbids (RFC 5280, CA/B) is refused.

    Args: chain_pem: the certificates that the client sent along, in any order.
    Raises: IdentityError client-certificate-unreadable, client-identity-missing,
        client-identity-ambiguous, client-identity-invalid, client-certificate-purpose,
        client-certificate-expired, client-certificate-not-yet-valid,
        client-certificate-untrusted.
    """
    if len(leaf_pem) + len(chain_pem) > _MOST_CHAIN_BYTES:
        raise refusal(
            "client-certificate-unreadable",
            f"The client's certificates take more than {_MOST_CHAIN_BYTES} bytes.",
        )
    try:
        leaf = x509.load_pem_x509_certificate(leaf_pem)
        others = x509.load_pem_x509_certificates(chain_pem) if chain_pem else []
        identity = _read_identity(leaf)
        _check_client_time(*_span(leaf), now_unix_s, str(identity))
        return _verify(leaf, others, identity, bundle, now_unix_s)
    except _UNREADABLE as error:
        raise refusal(
            "client-certificate-unreadable", f"The client certificate cannot be read: {error}."
        ) from error


def _verify(
    leaf: x509.Certificate,
    others: Sequence[x509.Certificate],
    identity: SpiffeId,
    bundle: Bundle,
    now_unix_s: float,
) -> ClientCertificate:
    moment = datetime.fromtimestamp(now_unix_s, UTC)
    verifier = PolicyBuilder().store(bundle.store).time(moment).build_client_verifier()
    try:
        chain = verifier.verify(leaf, [one for one in others if one != leaf]).chain
    except VerificationError as error:
        raise refusal(
            "client-certificate-untrusted",
            f"The client certificate does not lead to a CA of the bundle: {error}.",
            who=str(identity),
        ) from error
    begins, ends = zip(*map(_span, chain), strict=True)
    return ClientCertificate(identity, max(begins), min(ends))


def _check_client_time(
    not_before_unix_s: float, not_after_unix_s: float, now_unix_s: float, who: str
) -> None:
    """Return where a client's chain holds now.

    Raises: IdentityError client-certificate-expired, client-certificate-not-yet-valid.
    """
    if now_unix_s >= not_after_unix_s:
        raise refusal(
            "client-certificate-expired",
            f"The client certificate, or a CA above it, ended {time_text(not_after_unix_s)}.",
            who=who,
        )
    if now_unix_s < not_before_unix_s:
        raise refusal(
            "client-certificate-not-yet-valid",
            f"The client certificate holds only from {time_text(not_before_unix_s)} on.",
            who=who,
        )


def refusal(reference: str, message: str, *, who: str = UNKNOWN) -> IdentityError:
    """Return the refusal of a peer, with what its operator can do."""
    return IdentityError(
        reference,
        message,
        who=who,
        hint="reconnect with a certificate of the agent's CA that has one SPIFFE URI name, and "
        "see that the agent's configuration lists it under a role",
    )


def time_text(unix_s: float) -> str:
    """Return a moment as RFC 3339 in UTC, to the second."""
    return datetime.fromtimestamp(unix_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


@contextmanager
def _reading(what: str) -> Iterator[None]:
    """Make certificate-malformed of what cryptography says of a damaged certificate."""
    try:
        yield
    except _UNREADABLE as error:
        raise _bad("certificate-malformed", f"Cannot read {what}: {error}.") from error


def _load_certificates(pem: bytes, what: str) -> tuple[x509.Certificate, ...]:
    # A file cut in its last certificate still has the others: count what begins.
    begun = pem.count(b"-----BEGIN CERTIFICATE-----")
    found = tuple(x509.load_pem_x509_certificates(pem)) if begun else ()
    if not found or len(found) != begun or pem.count(b"-----BEGIN ") != begun:
        raise _bad(
            "certificate-malformed",
            f"The file of {what} has {len(found)} whole certificate"
            f"{'' if len(found) == 1 else 's'} and {pem.count(b'-----BEGIN ')} that begin: it is "
            "cut, or holds something else too.",
        )
    return found


def _load_key(pem: bytes) -> ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey:
    try:
        key = serialization.load_pem_private_key(pem, password=None)
    except TypeError as error:
        raise _bad(
            "key-malformed",
            "The server's key is encrypted: nobody is there to type its passphrase.",
        ) from error
    except (ValueError, UnsupportedAlgorithm) as error:
        raise _bad("key-malformed", f"The server's key cannot be read: {error}.") from error
    if isinstance(key, ec.EllipticCurvePrivateKey) and key.curve.name in _CURVES:
        return key
    if isinstance(key, rsa.RSAPrivateKey) and key.key_size >= _LEAST_RSA_BITS:
        return key
    raise _bad(
        "certificate-key-type",
        "The server's key is neither ECDSA on P-256, P-384 or P-521 nor RSA of at least "
        f"{_LEAST_RSA_BITS} bits: TLS would find no signature that both sides know.",
    )


def _span(one: x509.Certificate) -> tuple[float, float]:
    """Return from when on and until when a certificate holds (unix seconds)."""
    return one.not_valid_before_utc.timestamp(), one.not_valid_after_utc.timestamp()


def _check_time(span: tuple[float, float], what: str, now_unix_s: float) -> None:
    begin, end = span
    if now_unix_s >= end:
        raise _bad("certificate-expired", f"{what} ended {time_text(end)}.")
    if now_unix_s < begin:
        raise _bad("certificate-not-yet-valid", f"{what} holds only from {time_text(begin)} on.")


def _uri_names(one: x509.Certificate) -> list[str]:
    names = _extension(one, x509.SubjectAlternativeName)
    return [] if names is None else names.get_values_for_type(x509.UniformResourceIdentifier)


def _extension(one: x509.Certificate, kind: type[_Extension]) -> _Extension | None:
    try:
        return one.extensions.get_extension_for_class(kind).value
    except x509.ExtensionNotFound:
        return None


def _bad(reference: str, message: str) -> InputError:
    return InputError(reference, message, hint=_MAKE_HINT)
