# SPDX-License-Identifier: Apache-2.0
"""mTLS over real TCP: who gets in, and certificates that change while calls go on (C104, C106)."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest
from cryptography import x509
from grpc.experimental import session_cache

from shapeagent.model.errors import InputError
from shapeagent.service.identity.tls import ServerTls
from tests.unit.certkit import (
    CLIENT,
    OBSERVER,
    OPERATOR,
    SERVER,
    Client,
    Issued,
    Service,
    closing,
    issue,
    issue_server,
    make_ca,
    pem_of,
    refused,
    replace,
    wait_until,
)

_UNAVAILABLE = grpc.StatusCode.UNAVAILABLE
_UNAUTHENTICATED = grpc.StatusCode.UNAUTHENTICATED


@pytest.fixture(scope="module")
def ca() -> Issued:
    return make_ca()


@pytest.fixture
def service(ca: Issued, tmp_path: Path) -> Iterator[Service]:
    made = Service(tmp_path, issue_server(ca), ca)
    with closing(made):
        yield made


def call(service: Service, root: Issued, client: Issued | None) -> list[str]:
    one = Client(service.port, root, client)
    with closing(one):
        return one.who()


def test_a_client_of_the_ca_has_its_role(service: Service, ca: Issued) -> None:
    for identity, role in ((OPERATOR, "operator"), (OBSERVER, "observer")):
        who, got, address = call(service, ca, issue(ca, identity))
        assert (who, got) == (identity, role)
        assert address.startswith("ipv4:127.0.0.1:"), f"got {address}"


def test_dns_names_beside_the_one_id_count_for_nothing(service: Service, ca: Issued) -> None:
    names = [x509.DNSName("admin.example.org"), x509.RFC822Name("root@example.org")]
    who, role, _ = call(service, ca, issue(ca, OBSERVER, names=names))
    assert (who, role) == (OBSERVER, "observer")


def test_a_client_below_an_intermediate_ca_gets_in(service: Service, ca: Issued) -> None:
    below = make_ca("below", above=ca)
    assert call(service, ca, issue(below, OPERATOR))[0] == OPERATOR


def test_a_bundle_may_hold_the_intermediate_alone(
    service: Service, ca: Issued, tmp_path: Path
) -> None:
    below = make_ca("below", above=ca)
    replace(service.files.client_ca, pem_of(below.certificate))
    client = issue(below, OPERATOR)
    assert call(service, ca, Issued(client.certificate, client.key))[0] == OPERATOR


@pytest.mark.parametrize(
    ("client", "why"),
    [
        (lambda ca: None, "no certificate"),
        (lambda ca: issue(make_ca("other"), OPERATOR), "another CA"),
        (lambda ca: issue(make_ca("one"), OPERATOR), "another CA of the same name"),
        (lambda ca: issue(None, OPERATOR), "signed by itself"),
        (lambda ca: issue(ca, OPERATOR, begin_s=-600, end_s=-5), "expired"),
        (lambda ca: issue(ca, OPERATOR, begin_s=600), "not yet valid"),
        (lambda ca: issue(ca, OPERATOR, purposes=(SERVER,)), "for servers only"),
    ],
    ids=lambda value: value.replace(" ", "-") if isinstance(value, str) else "",
)
def test_the_handshake_refuses_and_no_handler_runs(
    client: Callable[[Issued], Issued | None], why: str, service: Service, ca: Issued
) -> None:
    code, _ = refused(lambda: call(service, ca, client(ca)))
    assert code is _UNAVAILABLE, f"got {code} for a client with {why}, want {_UNAVAILABLE}"
    assert service.handled == 0, f"got {service.handled} handlers run for a client with {why}"
    assert call(service, ca, issue(ca, OPERATOR))[0] == OPERATOR, "the server goes on"


@pytest.mark.parametrize(
    ("client", "reference"),
    [
        (lambda ca: issue(ca, OPERATOR, OBSERVER), "client-identity-ambiguous"),
        (lambda ca: issue(ca, OPERATOR, OPERATOR), "client-identity-ambiguous"),
        (lambda ca: issue(ca, OPERATOR, "https://example.org/"), "client-identity-ambiguous"),
        (
            lambda ca: issue(ca, names=[x509.DNSName("scheduler.prod.example.org")]),
            "client-identity-missing",
        ),
        (lambda ca: issue(ca, names=[x509.DNSName(OPERATOR)]), "client-identity-missing"),
        (lambda ca: issue(ca), "client-identity-missing"),
        (lambda ca: issue(ca, OPERATOR + "/"), "client-identity-invalid"),
        (lambda ca: issue(ca, OPERATOR.replace("example", "Example")), "client-identity-invalid"),
        (lambda ca: issue(ca, OPERATOR.replace("scheduler", "%73cheduler")),
         "client-identity-invalid"),
        (lambda ca: issue(ca, "spiffe://other.org/ns/prod/sa/scheduler"), "client-trust-domain"),
        (lambda ca: issue(ca, OPERATOR + "2"), "client-unknown"),
        (lambda ca: issue(ca, "spiffe://example.org/ns/prod/sa"), "client-unknown"),
    ],
)  # fmt: skip
def test_without_exactly_one_known_id_nobody_gets_in(
    client: Callable[[Issued], Issued], reference: str, service: Service, ca: Issued
) -> None:
    got = refused(lambda: call(service, ca, client(ca)))
    assert got == (_UNAUTHENTICATED, reference)


def test_metadata_never_grants(service: Service, ca: Issued) -> None:
    client = Client(service.port, ca, issue(ca, OBSERVER))
    with closing(client):
        answer: bytes = client._channel.unary_unary("/test/Who")(
            b"", timeout=20, metadata=[("x-role", "admin"), ("x-forwarded-client-cert", OPERATOR)]
        )
    assert answer.decode().split()[:2] == [OBSERVER, "observer"]


def test_no_call_fails_while_certificate_and_bundle_are_replaced(
    service: Service, ca: Issued, tmp_path: Path
) -> None:
    """C104: server certificate, then the CA old → old + new → new, with clients at work."""
    new_ca = make_ca("two")
    old_client, new_client = issue(ca, OPERATOR), issue(new_ca, OPERATOR)
    identity = {"client": old_client}  # what a client that starts now shows
    failures: list[str] = []
    calls = [0, 0]
    stop = threading.Event()

    def work(number: int, calls_per_connection: int) -> None:
        while not stop.is_set():
            client = Client(service.port, ca, identity["client"])
            with closing(client):
                for _ in range(calls_per_connection):
                    try:
                        client.who()
                    except grpc.RpcError as error:
                        failures.append(str(error))
                        return
                    calls[number] += 1

    def more_calls(times: int) -> None:
        """Return when both kinds of clients have made so many more calls."""
        want = [calls[0] + times, calls[1] + times]
        wait_until(
            lambda: failures != [] or (calls[0] >= want[0] and calls[1] >= want[1]),
            "calls to go on",
        )

    # One that connects anew for each call, one that keeps its connection for 20.
    threads = [threading.Thread(target=work, args=pair) for pair in ((0, 1), (1, 20))]
    for thread in threads:
        thread.start()
    try:
        for _ in range(5):
            server = issue_server(ca)
            service.write_pair(server)
            seen = service.certificate_seen(old_client, tmp_path, ca)
            assert seen == server.certificate, "want the new certificate for a new connection"
            more_calls(5)
        service.write_bundle(ca, new_ca)
        more_calls(5)
        identity["client"] = new_client
        more_calls(45)  # each connection of the old certificate has ended
        service.write_bundle(new_ca)
        more_calls(45)
    finally:
        stop.set()
        for thread in threads:
            thread.join(30)
    assert not failures, f"got {failures}, want no call that fails"
    facts = service.tls.facts()
    assert (facts.reloads, facts.error) == (7, None), f"got {facts}, want 5 pairs and 2 bundles"
    assert refused(lambda: call(service, ca, old_client))[0] is _UNAVAILABLE


def test_a_pair_between_its_two_files_is_never_used(
    service: Service, ca: Issued, tmp_path: Path
) -> None:
    old = service.certificate_seen(issue(ca, OPERATOR), tmp_path, ca)
    new = issue_server(ca)
    replace(service.files.certificate, new.pem)  # and the key is still the old one
    assert service.certificate_seen(issue(ca, OPERATOR), tmp_path, ca) == old
    error = service.tls.facts().error
    assert error is not None
    assert error.reference == "key-mismatch"
    replace(service.files.key, new.key_pem)
    assert service.certificate_seen(issue(ca, OPERATOR), tmp_path, ca) == new.certificate
    facts = service.tls.facts()
    assert (facts.error, facts.reloads, facts.refusals) == (None, 1, 1)


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-30])


@pytest.mark.parametrize(
    ("damage", "reference"),
    [
        (lambda files, ca: _cut(files.certificate), "certificate-malformed"),
        (lambda files, ca: _cut(files.key), "key-malformed"),
        (lambda files, ca: _cut(files.client_ca), "certificate-malformed"),
        (lambda files, ca: files.certificate.write_bytes(b""), "certificate-malformed"),
        (lambda files, ca: files.key.write_bytes(b"\xff" * 100), "key-malformed"),
        (lambda files, ca: files.client_ca.write_bytes(b""), "certificate-malformed"),
        (lambda files, ca: files.client_ca.unlink(), "file-unreadable"),
        (lambda files, ca: files.key.unlink(), "file-unreadable"),
        (
            lambda files, ca: (files.key.unlink(), files.key.mkdir()),
            "file-unreadable",
        ),
        (
            lambda files, ca: files.client_ca.write_bytes(issue(ca, OPERATOR).pem),
            "certificate-purpose",
        ),
        (
            lambda files, ca: files.client_ca.write_bytes(ca.pem + issue(ca).key_pem),
            "certificate-malformed",
        ),
        (
            lambda files, ca: files.client_ca.write_bytes(ca.pem + b"x" * (1 << 20)),
            "file-unreadable",
        ),
        (
            lambda files, ca: _write_pair(files, issue_server(ca, begin_s=-600, end_s=-5)),
            "certificate-expired",
        ),
        (
            lambda files, ca: _write_pair(files, issue_server(ca, begin_s=600)),
            "certificate-not-yet-valid",
        ),
        (
            lambda files, ca: _write_pair(files, issue(ca, OPERATOR, purposes=(CLIENT,))),
            "certificate-purpose",
        ),
        (
            lambda files, ca: files.client_ca.write_bytes(make_ca("old", end_s=-5).pem),
            "certificate-expired",
        ),
    ],
)  # fmt: skip
def test_a_bad_file_leaves_the_last_good_one_in_use(
    damage: Callable[[object, Issued], object], reference: str, service: Service, ca: Issued,
    caplog: pytest.LogCaptureFixture, tmp_path: Path,
) -> None:  # fmt: skip
    client = issue(ca, OPERATOR)
    standing = Client(service.port, ca, client)
    with closing(standing), caplog.at_level(logging.WARNING):
        standing.who()
        damage(service.files, ca)
        assert call(service, ca, client)[0] == OPERATOR, "a new connection"
        assert standing.who()[0] == OPERATOR, "one that stands"
        error = service.tls.facts().error
        assert error is not None
        assert error.reference == reference
        for _ in range(3):
            service.tls.refresh()
        facts = service.tls.facts()
        assert (facts.refusals, facts.reloads) == (1, 0), f"got {facts}, want it counted once"
        assert [reference in text for text in service.tls.warnings()].count(True) == 1
        assert caplog.text.count(reference) == 1, f"got {caplog.text}, want one line"
        if service.files.key.is_dir():
            service.files.key.rmdir()
        new = issue_server(ca)
        service.write_pair(new)
        service.write_bundle(ca)
        assert service.certificate_seen(client, tmp_path, ca) == new.certificate
    assert service.tls.facts().error is None


def _write_pair(files: object, pair: Issued) -> None:
    replace(files.certificate, pair.pem)  # type: ignore[attr-defined]
    replace(files.key, pair.key_pem)  # type: ignore[attr-defined]


def test_a_certificate_that_is_refused_for_its_time_is_used_when_its_time_comes(
    service: Service, ca: Issued, tmp_path: Path
) -> None:
    early = issue_server(ca, begin_s=3)
    service.write_pair(early)
    service.tls.refresh()
    error = service.tls.facts().error
    assert error is not None
    assert error.reference == "certificate-not-yet-valid"
    wait_until(service.tls.refresh, "the certificate in use once it holds")
    assert service.certificate_seen(issue(ca, OPERATOR), tmp_path, ca) == early.certificate


def test_a_server_certificate_that_ended_is_replaced_without_a_restart(
    ca: Issued, tmp_path: Path
) -> None:
    service = Service(tmp_path, issue_server(ca, begin_s=-600, end_s=-5), ca)
    with closing(service):
        assert [text.split(":")[0] for text in service.tls.warnings()] == ["certificate-expired"]
        client = Client(service.port, ca, issue(ca, OPERATOR))
        assert refused(client.who)[0] is _UNAVAILABLE
        client.close()
        service.write_pair(issue_server(ca))
        assert call(service, ca, issue(ca, OPERATOR))[0] == OPERATOR
        assert service.tls.warnings() == ()


def test_a_client_certificate_that_ends_while_its_connection_stands_is_refused(
    service: Service, ca: Issued
) -> None:
    client = Client(service.port, ca, issue(ca, OPERATOR, end_s=3))
    with closing(client):
        address = client.who()[2]
        end_s = time.monotonic() + 20
        got = None
        while got is None and time.monotonic() < end_s:
            try:
                assert client.who()[2] == address, "want the same connection"
            except grpc.RpcError as error:
                got = error.code(), error.details()
    assert got is not None, "got every call answered, want the certificate's end to be seen"
    assert got[0] is _UNAUTHENTICATED
    assert got[1].startswith(f"client-certificate-expired {OPERATOR}")


def test_a_resumed_session_is_held_to_the_same(service: Service, ca: Issued) -> None:
    """Resuming skips what the handshake verifies, so a ticket could outlive its certificate."""
    sessions = session_cache.ssl_session_cache_lru(4)
    below = make_ca("below", above=ca)
    staying = issue(below, OBSERVER)
    for _ in range(2):
        client = Client(service.port, ca, staying, sessions=sessions)
        with closing(client):
            assert client.who()[0] == OBSERVER
    assert service.resumed == 1, "want the second connection to resume the first"
    sessions = session_cache.ssl_session_cache_lru(4)
    ending = issue(ca, OPERATOR, end_s=3)
    client = Client(service.port, ca, ending, sessions=sessions)
    with closing(client):
        assert client.who()[0] == OPERATOR
    end_unix_s = ending.certificate.not_valid_after_utc.timestamp()
    wait_until(lambda: time.time() > end_unix_s, "the certificate to end")
    client = Client(service.port, ca, ending, sessions=sessions)
    with closing(client):
        code, reference = refused(client.who)
    assert (code, reference) == (_UNAUTHENTICATED, "client-certificate-expired")
    assert service.resumed == 2, "want gRPC's handshake to have let it in"


def test_a_ca_that_left_the_bundle_ends_calls_and_streams_of_standing_connections(
    service: Service, ca: Issued
) -> None:
    other = make_ca("two")
    service.write_bundle(ca, other)
    staying, leaving = (Client(service.port, ca, issue(one, OPERATOR)) for one in (other, ca))
    with closing(staying, leaving):
        staying.who()
        stream = leaving.watch()
        service.go_on.release()
        assert next(stream).decode().split()[0] == OPERATOR
        service.write_bundle(other)
        service.tls.refresh()  # as the daemon's tick does; no client connects meanwhile
        service.go_on.release()
        want = (_UNAUTHENTICATED, "client-certificate-untrusted")
        assert refused(lambda: next(stream)) == want, "the stream"
        assert refused(leaving.who) == want, "the connection"
        assert staying.who()[0] == OPERATOR, "the CA that stays"


def test_warnings_come_in_time(ca: Issued, tmp_path: Path) -> None:
    now = time.time()
    clock = [now]
    day_s = 86_400
    service = Service(tmp_path, issue_server(ca, begin_s=-60, end_s=100 * day_s),
                      make_ca("long", end_s=1000 * day_s))  # fmt: skip
    service.stop()
    tls = ServerTls(service.files, clock=lambda: clock[0])
    for days, want in (
        (80, []),
        (85, []),
        (87, ["certificate-expires-soon"]),
        (101, ["certificate-expired"]),
        (-1, ["certificate-not-yet-valid", "certificate-not-yet-valid"]),
    ):
        clock[0] = now + days * day_s
        got = [text.split(":")[0] for text in tls.warnings()]
        assert got == want, f"got {got} after {days} days, want {want}"
    service.files.key.chmod(0o644)
    clock[0] = now
    assert [text.split(":")[0] for text in tls.warnings()] == ["key-exposed"]


def test_a_short_lived_certificate_warns_with_a_fifth_of_its_life_left(
    ca: Issued, tmp_path: Path
) -> None:
    now = time.time()
    clock = [now]
    service = Service(tmp_path, issue_server(ca, begin_s=0, end_s=3600),
                      make_ca("long", end_s=1e8))  # fmt: skip
    service.stop()
    tls = ServerTls(service.files, clock=lambda: clock[0])
    for minutes, want in ((0, 0), (45, 0), (50, 1)):
        clock[0] = now + minutes * 60
        got = tls.warnings()
        assert len(got) == want, f"got {got} after {minutes} minutes, want {want}"


@pytest.mark.parametrize(
    ("break_it", "reference"),
    [
        (lambda files: files.key.unlink(), "file-unreadable"),
        (lambda files: files.client_ca.write_bytes(b"nothing"), "certificate-malformed"),
    ],
)
def test_nothing_good_to_begin_with_is_an_error(
    break_it: Callable[[object], object], reference: str, ca: Issued, tmp_path: Path
) -> None:
    service = Service(tmp_path, issue_server(ca), ca)
    service.stop()
    break_it(service.files)
    with pytest.raises(InputError) as caught:
        ServerTls(service.files)
    assert caught.value.reference == reference
    assert caught.value.hint
