# SPDX-License-Identifier: Apache-2.0
"""`shapectl agent certs`: what it makes works at once, and nothing is overwritten unasked."""

from __future__ import annotations

import errno
import json
import os
import stat
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
from cryptography import x509

from shapeagent.model.errors import ConflictError, FailedError, InputError
from shapeagent.service.identity import certs
from shapeagent.service.identity.certs import CertsRequest, make_certs
from shapeagent.service.identity.spiffe import parse_role_table
from shapectl.cli import main
from tests.unit.certkit import Client, Issued, Service, closing

REQUEST = CertsRequest(
    folder=Path("unset"),
    trust_domain="example.org",
    server_names=("localhost", "127.0.0.1", "::1"),
    clients=(
        ("operator", "spiffe://example.org/ns/prod/sa/scheduler"),
        ("observer", "spiffe://example.org/observer"),
    ),
)


def request(folder: Path, **more: object) -> CertsRequest:
    return replace(REQUEST, folder=folder / "certs", **more)  # type: ignore[arg-type]


def load(folder: Path, name: str) -> Issued:
    from cryptography.hazmat.primitives import serialization

    key = (folder / f"{name}-key.pem").read_bytes()
    return Issued(
        x509.load_pem_x509_certificate((folder / f"{name}.pem").read_bytes()),
        serialization.load_pem_private_key(key, None),
    )


def digests(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_what_it_makes_lets_its_clients_in(tmp_path: Path) -> None:
    report = make_certs(request(tmp_path))
    folder = tmp_path / "certs"
    ca, server = load(folder, "ca"), load(folder, "server")
    (tmp_path / "service").mkdir()
    service = Service(tmp_path / "service", server, ca)
    with closing(service):
        for name, role in (("client-scheduler", "operator"), ("client-observer", "observer")):
            client = Client(service.port, ca, load(folder, name))
            with closing(client):
                assert client.who()[1] == role
    assert [row.name for row in report.certificates] == [
        "ca", "server", "client-scheduler", "client-observer",
    ]  # fmt: skip
    assert service.tls.facts().server_spiffe_id == "spiffe://example.org/shapectl-agent"
    assert service.tls.warnings() == ()


def test_only_the_owner_may_read_the_keys(tmp_path: Path) -> None:
    umask = os.umask(0)
    try:
        make_certs(request(tmp_path))
    finally:
        os.umask(umask)
    folder = tmp_path / "certs"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    for path in folder.iterdir():
        want = 0o600 if path.name.endswith("-key.pem") else 0o644
        got = stat.S_IMODE(path.stat().st_mode)
        assert got == want, f"got {got:o} of {path.name}, want {want:o}"
    assert len(list(folder.iterdir())) == 8, "want a certificate and a key each, and no rest"


def test_the_lines_for_the_configuration_are_right(tmp_path: Path) -> None:
    folder = tmp_path / 'a "b" \\ c'
    report = make_certs(request(folder))
    table = tomllib.loads(report.config)["tcp"]
    for key, name in (("certificate", "server"), ("key", "server-key"), ("client_ca", "ca")):
        assert Path(table[key]) == folder / "certs" / f"{name}.pem"
        assert Path(table[key]).is_file()
    roles = parse_role_table(table["trust_domain"], table["roles"])
    assert roles.roles == {identity: role for role, identity in REQUEST.clients}


def test_nothing_is_overwritten_without_force(tmp_path: Path) -> None:
    make_certs(request(tmp_path))
    folder = tmp_path / "certs"
    for path in folder.iterdir():
        if path.name != "client-observer-key.pem":
            path.unlink()
    before = digests(folder)
    with pytest.raises(ConflictError) as caught:
        make_certs(request(tmp_path))
    assert caught.value.reference == "file-exists"
    assert caught.value.details == (str(folder / "client-observer-key.pem"),)
    assert digests(folder) == before, "got something written"
    make_certs(request(tmp_path, force=True))
    assert digests(folder)["client-observer-key.pem"] != before["client-observer-key.pem"]


def test_more_can_be_made_with_the_ca_that_is_there(tmp_path: Path) -> None:
    make_certs(request(tmp_path))
    folder = tmp_path / "certs"
    before = digests(folder)
    report = make_certs(
        request(tmp_path, keep_ca=True, force=True, clients=(("admin", "spiffe://example.org/a"),))
    )
    after = digests(folder)
    assert report.ca_kept
    assert [row.name for row in report.certificates] == ["server", "client-a"]
    changed = {name for name in after if after[name] != before.get(name)}
    assert changed == {"server.pem", "server-key.pem", "client-a.pem", "client-a-key.pem"}
    ca = load(folder, "ca").certificate
    load(folder, "client-a").certificate.verify_directly_issued_by(ca)


def test_two_cas_of_one_trust_domain_do_not_hide_each_other(tmp_path: Path) -> None:
    make_certs(request(tmp_path / "1"))
    make_certs(request(tmp_path / "2"))
    first, second = (load(tmp_path / n / "certs", "ca").certificate for n in "12")
    assert first.subject != second.subject


def test_clients_of_one_last_name_get_files_of_their_own(tmp_path: Path) -> None:
    clients = tuple(
        ("observer", f"spiffe://example.org/{path}") for path in ("a/x", "b/x", "c/b/x", "x")
    )
    with pytest.raises(InputError) as caught:
        make_certs(request(tmp_path, clients=clients))
    assert caught.value.reference == "client-name"
    report = make_certs(request(tmp_path, clients=clients[:3]))
    assert [row.name for row in report.certificates[2:]] == [
        "client-x", "client-b-x", "client-c-b-x",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("wrong", "reference"),
    [
        ({"days": 0}, "days-range"),
        ({"days": 4000}, "days-range"),
        ({"ca_days": 10}, "ca-ends-before"),
        ({"trust_domain": "Example.org"}, "spiffe-trust-domain"),
        ({"server_names": ()}, "server-name"),
        ({"server_names": ("a b",)}, "server-name"),
        ({"server_names": ("192.0.2.256",)}, "server-name"),
        ({"server_names": ("*.example.org",)}, "server-name"),
        ({"server_names": ("-a.example.org",)}, "server-name"),
        ({"server_names": ("a" * 64,)}, "server-name"),
        ({"server_names": ("",)}, "server-name"),
        ({"clients": (("root", "spiffe://example.org/a"),)}, "agent-roles"),
        ({"clients": (("admin", "spiffe://other.org/a"),)}, "agent-roles"),
        ({"clients": (("admin", "spiffe://example.org/a/"),)}, "agent-roles"),
        ({"clients": (("admin", f"spiffe://example.org/{'a' * 200}"),)}, "client-name"),
        ({"clients": (REQUEST.clients[0], ("admin", REQUEST.clients[0][1]))}, "client-name"),
        ({"keep_ca": True}, "ca-unusable"),
    ],
)
def test_wrong_input_is_refused_and_nothing_is_written(
    wrong: dict[str, object], reference: str, tmp_path: Path
) -> None:
    with pytest.raises(InputError) as caught:
        make_certs(request(tmp_path, **wrong))
    assert caught.value.reference == reference
    assert caught.value.hint
    assert not list(tmp_path.iterdir()), "got something written"


def test_a_damaged_ca_is_not_used(tmp_path: Path) -> None:
    make_certs(request(tmp_path))
    make_certs(request(tmp_path / "other"))
    key = tmp_path / "certs" / "ca-key.pem"
    for content in (b"", (tmp_path / "other" / "certs" / "ca-key.pem").read_bytes()):
        key.write_bytes(content)
        with pytest.raises(InputError) as caught:
            make_certs(request(tmp_path, keep_ca=True, force=True))
        assert caught.value.reference == "ca-unusable"


def test_a_ca_that_ends_too_early_signs_nothing(tmp_path: Path) -> None:
    make_certs(request(tmp_path, ca_days=31))
    with pytest.raises(InputError) as caught:
        make_certs(request(tmp_path, keep_ca=True, force=True, days=60))
    assert caught.value.reference == "ca-ends-before"


def test_a_disk_that_fills_in_the_middle_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_certs(request(tmp_path))
    before = digests(tmp_path / "certs")
    real = certs._write
    calls: list[Path] = []

    def write(path: Path, content: bytes, mode: int) -> None:
        calls.append(path)
        if len(calls) == 5:
            real(path, content[:10], mode)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(path, content, mode)

    monkeypatch.setattr(certs, "_write", write)
    with pytest.raises(FailedError, match="No space left") as caught:
        make_certs(request(tmp_path, force=True))
    assert caught.value.reference == "certs-unwritable"
    assert digests(tmp_path / "certs") == before


def test_the_command_makes_one_client_of_each_role(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["agent", "certs", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    rows = [(row["role"], row["identity"]) for row in report["certificates"] if row["role"]]
    assert rows == [
        (role, f"spiffe://shapectl.test/{role}") for role in ("observer", "operator", "admin")
    ]
    assert (tmp_path / "shapectl-certs" / "client-admin.pem").is_file()


def test_the_command_prints_what_it_made_and_how_to_use_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["agent", "certs", "--out", str(tmp_path / "c"), "--server-name", "node1.example.org"]
    assert main([*words, "--client", "operator=/ns/prod/sa/scheduler"]) == 0
    out, err = capsys.readouterr()
    assert "node1.example.org" in out
    config = out.partition("agent.toml:\n")[2]
    assert tomllib.loads(config)["tcp"]["roles"] == {
        "spiffe://shapectl.test/ns/prod/sa/scheduler": "operator"
    }
    assert "mode 0600" in err
    assert main([*words, "--client", "observer"]) == 5
    assert "error: file-exists" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["root", "root=/a", "operator=", "/a", ""])
def test_a_client_without_a_role_is_refused(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = main(["agent", "certs", "--out", str(tmp_path / "c"), "--client", text])
    assert code == 2
    assert "error: client-role" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
