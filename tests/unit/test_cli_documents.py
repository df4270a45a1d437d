# SPDX-License-Identifier: Apache-2.0
"""Policies and lists as files: `policy` commands, reading and writing."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import pytest

from shapeagent.model.errors import FailedError, InputError
from shapeagent.service import documents
from shapectl.cli import main


@pytest.fixture(autouse=True)
def _no_system_policy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(documents, "DEFAULT_POLICY_PATH", tmp_path / "etc-policy.toml")


def test_policy_comes_from_the_file_named_else_etc_else_built_in(tmp_path: Path) -> None:
    assert documents.read_policy(None)[1] == "built-in"
    (tmp_path / "etc-policy.toml").write_text("etc", encoding="utf-8")
    assert documents.read_policy(None) == ("etc", str(tmp_path / "etc-policy.toml"))
    named = tmp_path / "named.toml"
    named.write_text("\ufeffnamed", encoding="utf-8")
    assert documents.read_policy(str(named)) == ("named", str(named))


def test_example_is_a_policy_that_check_accepts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["policy", "example"]) == 0
    path = tmp_path / "p.toml"
    path.write_text(capsys.readouterr().out, encoding="utf-8")
    assert main(["policy", "check", str(path)]) == 0
    out, err = capsys.readouterr()
    assert out.startswith(f"ok: {path}: 4 classes (signal, stream, normal, bulk)"), f"got {out}"
    assert err == ""


def test_check_prints_every_error_with_its_place(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "p.toml"
    path.write_text(
        documents.example_policy_text()
        .replace('guarantee = "30%"', 'guarantee = "1Gbps"')
        .replace("port = 53", "port = 70000"),
        encoding="utf-8",
    )
    assert main(["policy", "check", str(path)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    lines = err.splitlines()
    assert lines[0] == "error: policy-invalid"
    places = [line for line in lines if line.startswith("  line ")]
    assert len(places) == 2, f"got {err}, want both errors"
    assert main(["policy", "check", str(path), "--json"]) == 2
    assert len(json.loads(capsys.readouterr().out)["details"]) == 2


def test_show_resolves_shares_of_the_link(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["policy", "show", "--link-rate", "10gbit", "--json"]) == 0
    policy = json.loads(capsys.readouterr().out)
    assert policy["link_rate_bits_per_s"] == 10_000_000_000
    assert policy["classes"][1]["guarantee_bits_per_s"] == 3_000_000_000


def test_show_says_that_its_link_is_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["policy", "show"]) == 0
    out, err = capsys.readouterr()
    assert "100mbit" in out
    assert "dhcp" in out
    assert "etcd" in out
    assert "1gbit link, as an example" in err


@pytest.mark.parametrize(
    ("content", "reference"),
    [(None, "file-missing"), (b"\xff\xfe", "not-utf8"), (b"\x80", "not-utf8")],
)
def test_file_that_cannot_be_read_is_a_named_error(
    content: bytes | None, reference: str, tmp_path: Path
) -> None:
    path = tmp_path / "f"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(InputError) as caught:
        documents.read_document(str(path))
    assert caught.value.reference == reference


def test_folder_and_odd_names_are_named_errors(tmp_path: Path) -> None:
    for name in (str(tmp_path), "a\0b"):
        with pytest.raises(InputError):
            documents.read_document(name)


def test_written_file_is_replaced_whole_and_keeps_its_mode(tmp_path: Path) -> None:
    path = tmp_path / "new" / "list.txt"
    documents.write_document(path, "one\n")
    assert path.read_text(encoding="utf-8") == "one\n"
    path.chmod(0o600)
    link = tmp_path / "link"
    link.symlink_to(path)
    documents.write_document(link, "two\n")
    assert link.is_symlink(), "the link is kept"
    assert path.read_text(encoding="utf-8") == "two\n"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert os.listdir(path.parent) == ["list.txt"], "nothing temporary is left"


def test_file_that_cannot_be_written_is_a_named_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(FailedError) as caught:
        documents.write_document(tmp_path / "file" / "below", "x")
    assert caught.value.reference == "file-unwritable"
