# SPDX-License-Identifier: Apache-2.0
"""Who stands behind a connection, from what gRPC says of it: one identity, or a refusal."""

from __future__ import annotations

import base64
import contextlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric import ed25519, rsa
from hypothesis import given
from hypothesis import strategies as st

from shapeagent.model.errors import ShapeError
from shapeagent.service.identity import certificates, peers
from shapeagent.service.identity.certificates import (
    Bundle,
    IdentityError,
    load_bundle,
    load_server_pair,
)
from shapeagent.service.identity.peers import PeerAuthenticator
from shapeagent.service.identity.spiffe import parse_role_table
from tests.unit.certkit import (
    CLIENT,
    OBSERVER,
    OPERATOR,
    ROLES,
    TRUST_DOMAIN,
    Issued,
    issue,
    issue_server,
    key_usage,
    make_ca,
)

CA = make_ca()
GOOD = issue(CA, OPERATOR)


@dataclass
class Trusted:
    """A bundle that a test changes."""

    bundle: Bundle
    bundle_generation: int = 1

    def change(self, *cas: Issued) -> None:
        self.bundle = load_bundle([b"".join(one.pem for one in cas)])
        self.bundle_generation += 1


def trusting(*cas: Issued) -> Trusted:
    return Trusted(load_bundle([b"".join(one.pem for one in cas)]))


def facts(client: Issued, **more: Sequence[bytes]) -> dict[str, Sequence[bytes]]:
    """Return what `grpc.ServicerContext.auth_context` gives for a client."""
    leaf, *between = client.pem.split(b"-----END CERTIFICATE-----\n")[:-1]
    end = b"-----END CERTIFICATE-----\n"
    found: dict[str, Sequence[bytes]] = {
        "transport_security_type": [b"ssl"],
        "x509_pem_cert": [leaf + end],
    }
    if between:
        found["x509_pem_cert_chain"] = [b"".join(one + end for one in between)]
    return found | more


def refusal_of(
    client: Issued | Mapping[str, Sequence[bytes]], trust: Trusted | None = None
) -> IdentityError:
    asked = facts(client) if isinstance(client, Issued) else client
    with pytest.raises(IdentityError) as caught:
        PeerAuthenticator(ROLES, trust or trusting(CA)).identify(asked, "ipv4:192.0.2.7:1")
    assert caught.value.exit_code == 3
    assert caught.value.hint
    return caught.value


def test_a_peer_is_named_with_role_address_and_end() -> None:
    peer = PeerAuthenticator(ROLES, trusting(CA)).identify(facts(GOOD), "ipv4:192.0.2.7:1")
    assert (peer.who, peer.role, peer.peer) == (OPERATOR, "operator", "ipv4:192.0.2.7:1")
    assert peer.not_after_unix_s == GOOD.certificate.not_valid_after_utc.timestamp()


@pytest.mark.parametrize(
    ("asked", "reference"),
    [
        ({}, "client-not-authenticated"),
        ({"transport_security_type": [b"insecure"]}, "client-not-authenticated"),
        ({"transport_security_type": [b"local"]}, "client-not-authenticated"),
        (facts(GOOD, transport_security_type=[b"ssl", b"ssl"]), "client-not-authenticated"),
        ({"transport_security_type": [b"ssl"]}, "client-certificate-missing"),
        (facts(GOOD, x509_pem_cert=[]), "client-certificate-missing"),
        (facts(GOOD, x509_pem_cert=[GOOD.pem, GOOD.pem]), "client-certificate-missing"),
        (facts(GOOD, x509_pem_cert=[b"rubbish"]), "client-certificate-unreadable"),
        (facts(GOOD, x509_pem_cert_chain=[b"rubbish"]), "client-certificate-unreadable"),
        (facts(GOOD, x509_pem_cert_chain=[GOOD.pem * 100]), "client-certificate-unreadable"),
    ],
)
def test_without_a_certificate_of_its_own_nobody_is_named(
    asked: Mapping[str, Sequence[bytes]], reference: str
) -> None:
    error = refusal_of(asked)
    assert (error.reference, error.who) == (reference, "unknown")


def test_what_grpc_says_of_names_is_not_believed() -> None:
    """Only the certificate counts; gRPC's own reading of it is another parser's."""
    asked = facts(
        issue(CA, OBSERVER),
        peer_spiffe_id=[OPERATOR.encode()],
        peer_uri=[OPERATOR.encode()],
        x509_subject_alternative_name=[OPERATOR.encode()],
    )
    assert PeerAuthenticator(ROLES, trusting(CA)).identify(asked, "").who == OBSERVER


@pytest.mark.parametrize(
    "client",
    [
        issue(CA, OPERATOR, is_ca=True),
        issue(CA, OPERATOR, usage=key_usage(key_cert_sign=True)),
        issue(CA, OPERATOR, usage=key_usage(digital_signature=False)),
    ],
)
def test_a_certificate_that_may_sign_others_is_no_workloads(client: Issued) -> None:
    error = refusal_of(client)
    assert (error.reference, error.who) == ("client-certificate-purpose", OPERATOR)


def test_the_claimed_id_is_told_for_the_audit() -> None:
    for client, reference, who in (
        (issue(CA, "spiffe://other.org/a"), "client-trust-domain", "spiffe://other.org/a"),
        (issue(CA, OPERATOR + "/x"), "client-unknown", OPERATOR + "/x"),
        (issue(CA, "spiffe://Example.org/a"), "client-identity-invalid", "spiffe://Example.org/a"),
        (issue(make_ca("x"), OPERATOR), "client-certificate-untrusted", OPERATOR),
        (issue(CA, OPERATOR, begin_s=-9, end_s=-5), "client-certificate-expired", OPERATOR),
        (issue(CA, OPERATOR, begin_s=60), "client-certificate-not-yet-valid", OPERATOR),
        (issue(CA), "client-identity-missing", "unknown"),
    ):
        error = refusal_of(client)
        assert (error.reference, error.who) == (reference, who)


def test_a_chain_ends_with_the_first_of_its_certificates() -> None:
    root = make_ca("root", end_s=50_000)
    below = make_ca("below", above=root, end_s=500)
    peer = PeerAuthenticator(ROLES, trusting(root)).identify(facts(issue(below, OPERATOR)), "")
    assert peer.not_after_unix_s == below.certificate.not_valid_after_utc.timestamp()


def test_a_missing_intermediate_is_not_guessed() -> None:
    below = make_ca("below", above=CA)
    client = issue(below, OPERATOR)
    assert refusal_of(Issued(client.certificate, client.key)).reference == (
        "client-certificate-untrusted"
    )


def test_time_goes_on_for_who_is_known() -> None:
    clock = [time.time()]
    root = make_ca("root", end_s=1800)
    authenticator = PeerAuthenticator(ROLES, trusting(root), clock=lambda: clock[0])
    client = facts(issue(root, OPERATOR, end_s=3600))
    authenticator.identify(client, "")
    clock[0] += 1700
    authenticator.identify(client, "")
    clock[0] += 200  # the CA has ended, and the leaf has not
    with pytest.raises(IdentityError) as caught:
        authenticator.identify(client, "")
    assert caught.value.reference == "client-certificate-untrusted"
    clock[0] += 3600
    with pytest.raises(IdentityError) as caught:
        authenticator.identify(client, "")
    assert caught.value.reference == "client-certificate-expired"
    clock[0] -= 7200  # a clock that steps back
    with pytest.raises(IdentityError) as caught:
        authenticator.identify(client, "")
    assert caught.value.reference == "client-certificate-not-yet-valid"
    clock[0] += 1800
    authenticator.identify(client, "")


def test_a_bundle_that_changes_holds_for_who_is_known() -> None:
    other = make_ca("two")
    trust = trusting(CA)
    authenticator = PeerAuthenticator(ROLES, trust)
    authenticator.identify(facts(GOOD), "")
    trust.change(CA, other)
    authenticator.identify(facts(GOOD), "")
    authenticator.identify(facts(issue(other, OBSERVER)), "")
    trust.change(other)
    with pytest.raises(IdentityError) as caught:
        authenticator.identify(facts(GOOD), "")
    assert caught.value.reference == "client-certificate-untrusted"
    trust.change(CA)
    authenticator.identify(facts(GOOD), "")


def test_a_role_that_is_taken_away_is_gone_at_the_next_call() -> None:
    authenticator = PeerAuthenticator(ROLES, trusting(CA))
    assert authenticator.identify(facts(GOOD), "").role == "operator"
    authenticator.replace_roles(parse_role_table(TRUST_DOMAIN, {OPERATOR: "observer"}))
    assert authenticator.identify(facts(GOOD), "").role == "observer"
    authenticator.replace_roles(parse_role_table(TRUST_DOMAIN, {}))
    with pytest.raises(IdentityError) as caught:
        authenticator.identify(facts(GOOD), "")
    assert caught.value.reference == "client-unknown"


def test_who_is_known_is_not_verified_again(monkeypatch: pytest.MonkeyPatch) -> None:
    verified: list[bytes] = []

    def verify(leaf: bytes, *rest: Any) -> Any:
        verified.append(leaf)
        return certificates.verify_client(leaf, *rest)

    monkeypatch.setattr(peers, "verify_client", verify)
    monkeypatch.setattr(peers, "_MOST_KNOWN", 2)
    authenticator = PeerAuthenticator(ROLES, trusting(CA))
    others = [issue(CA, OBSERVER) for _ in range(2)]
    for client, want in ((GOOD, 1), (GOOD, 1), (others[0], 2), (others[1], 3), (GOOD, 4)):
        authenticator.identify(facts(client), "")
        assert len(verified) == want, f"got {len(verified)} verified, want {want}"
    assert len(authenticator._known) == 2


def _armoured(der: bytes) -> bytes:
    body = base64.encodebytes(der)
    return b"-----BEGIN CERTIFICATE-----\n" + body + b"-----END CERTIFICATE-----\n"


GOOD_DER = base64.b64decode(b"".join(GOOD.pem.splitlines()[1:-1]))


CA_DER = base64.b64decode(b"".join(CA.pem.splitlines()[1:-1]))
SERVER = issue_server(CA)
SERVER_DER = base64.b64decode(b"".join(SERVER.pem.splitlines()[1:-1]))

# A byte that is another, more bytes, fewer: where, what, how many go.
DAMAGE = st.tuples(st.integers(0, 360), st.binary(max_size=4), st.integers(0, 4))
# Python's own reading of versions, curves and algorithms that nobody has: what else it raises.
RARE = (
    GOOD_DER.replace(bytes([0xA0, 3, 2, 1, 2]), bytes([0xA0, 3, 2, 1, 7])),  # X.509 version 8
    GOOD_DER.replace(bytes.fromhex("2a8648ce3d0301"), bytes.fromhex("2a8648ce3d0309")),  # curve
    GOOD_DER.replace(bytes.fromhex("2a8648ce3d0201"), bytes.fromhex("2a8648ce3d0209")),  # key
    GOOD_DER.replace(bytes.fromhex("0603551d13"), bytes.fromhex("0603551d0f")),  # twice key usage
    GOOD_DER.replace(b"\x17\r2", b"\x17\rx"),  # a time that is none
)


def _damaged(der: bytes, damage: tuple[int, bytes, int]) -> bytes:
    at, put, left_out = damage
    return der[:at] + put + der[at + left_out :]


@pytest.mark.filterwarnings("ignore:Parsed a serial number")
@given(DAMAGE)
def test_no_damage_of_a_certificate_names_anybody(damage: tuple[int, bytes, int]) -> None:
    der = _damaged(GOOD_DER, damage)
    authenticator = PeerAuthenticator(ROLES, trusting(CA))
    asked = facts(GOOD, x509_pem_cert=[_armoured(der)])
    if der == GOOD_DER:
        authenticator.identify(asked, "")
        return
    with pytest.raises(IdentityError):
        authenticator.identify(asked, "")


@pytest.mark.filterwarnings("ignore:Parsed a serial number")
@given(DAMAGE)
def test_damaged_files_are_refused_by_name(damage: tuple[int, bytes, int]) -> None:
    """No signature is looked at here: what still reads as a certificate may pass."""
    bundle, pair = _armoured(_damaged(CA_DER, damage)), _armoured(_damaged(SERVER_DER, damage))
    with contextlib.suppress(ShapeError):
        load_bundle([bundle])
    with contextlib.suppress(ShapeError):
        load_server_pair([pair, SERVER.key_pem])


@pytest.mark.parametrize("der", RARE)
def test_what_no_parser_knows_is_refused_by_name(der: bytes) -> None:
    assert der != GOOD_DER, "the damage found nothing to damage"
    asked = facts(GOOD, x509_pem_cert=[_armoured(der)])
    assert refusal_of(asked).reference.startswith("client-")
    with pytest.raises(ShapeError):
        load_server_pair([_armoured(der), GOOD.key_pem])
    with pytest.raises(ShapeError):
        load_bundle([_armoured(der)])


@pytest.mark.parametrize(
    ("key", "fits"),
    [
        (rsa.generate_private_key(65537, 2048), True),
        (rsa.generate_private_key(65537, 1024), False),
        (ed25519.Ed25519PrivateKey.generate(), False),
    ],
    ids=["rsa-2048", "rsa-1024", "ed25519"],
)
def test_only_keys_that_both_sides_of_tls_know_are_taken(key: Any, fits: bool) -> None:
    pair = issue_server(CA, key=key)
    if fits:
        assert load_server_pair([pair.pem, pair.key_pem]).key_pem == pair.key_pem
        return
    with pytest.raises(ShapeError) as caught:
        load_server_pair([pair.pem, pair.key_pem])
    assert caught.value.reference == "certificate-key-type"


def test_a_key_with_a_passphrase_is_refused() -> None:
    from cryptography.hazmat.primitives import serialization as form

    pair = issue_server(CA)
    locked = pair.key.private_bytes(
        form.Encoding.PEM, form.PrivateFormat.PKCS8, form.BestAvailableEncryption(b"secret")
    )
    with pytest.raises(ShapeError, match="encrypted") as caught:
        load_server_pair([pair.pem, locked])
    assert caught.value.reference == "key-malformed"


def test_a_client_certificate_without_purposes_is_taken() -> None:
    """SPIRE writes both purposes, older tools none; without any it may be used for all."""
    client = issue(CA, OPERATOR, purposes=())
    assert PeerAuthenticator(ROLES, trusting(CA)).identify(facts(client), "").who == OPERATOR
    assert CLIENT not in (client.certificate.extensions)
