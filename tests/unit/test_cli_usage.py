# SPDX-License-Identifier: Apache-2.0
"""What shapectl answers before any engine is asked: usage, errors, exit codes."""

from __future__ import annotations

import json

import click
import pytest

from shapeagent.model.errors import (
    ConflictError,
    FailedError,
    InputError,
    PartialError,
    PrivilegeError,
    ShapeError,
    UnsupportedError,
)
from shapectl.cli import cli, main
from shapectl.docs import commands
from shapectl.session import Session


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SHAPECTL_NETNS", raising=False)


def _raise_in_engine(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    def engine(self: Session) -> None:
        raise error

    monkeypatch.setattr(Session, "engine", engine)


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["--json"],
        ["atach", "eth0"],
        ["attach"],
        ["attach", "eth0", "--profile", "fq"],
        ["attach", "eth0", "--bogus"],
        ["detach"],
        ["whitelist"],
        ["whitelist", "ad"],
        ["whitelist", "replace", "f", "--expect-generation", "-1"],
        ["class", "set", "bulk"],
        ["explain"],
        ["explain", "10.0.0.1:1"],
        ["completion", "tcsh"],
    ],
)
def test_wrong_usage_is_refused_with_exit_2_in_three_parts(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    code = main(words)
    out, err = capsys.readouterr()
    if "--json" in words:
        assert json.loads(out)["error"] == "usage", f"got {out!r}, want an object"
        return
    lines = err.splitlines()
    assert code == 2, f"got exit {code}, want 2"
    assert out == "", f"got {out!r} on stdout, want nothing"
    assert lines[0] == "error: usage", f"got {lines[0]!r}, want 'error: usage'"
    assert lines[-1].startswith("hint: shapectl"), f"got {lines[-1]!r}, want a command to type"
    assert "Usage:" not in err, f"got click's own form: {err!r}"


@pytest.mark.parametrize("place", [0, 1, 2])
def test_json_is_accepted_before_and_after_the_command(
    place: int, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["policy", "check"]
    words.insert(place, "--json")
    code = main(words)
    out, err = capsys.readouterr()
    assert (code, err) == (0, ""), f"got {(code, err)}, want (0, '')"
    assert json.loads(out)["default_class"] == "normal"


@pytest.mark.parametrize(
    ("kind", "exit_code"),
    [
        (FailedError, 1),
        (InputError, 2),
        (PrivilegeError, 3),
        (UnsupportedError, 4),
        (ConflictError, 5),
        (PartialError, 6),
    ],
)
def test_each_kind_of_error_has_its_exit_code_and_form(
    kind: type[ShapeError],
    exit_code: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    error = kind("qdisc-busy", "Cannot attach.", hint="type this", details=("one", "two"))
    _raise_in_engine(monkeypatch, error)
    assert main(["attach", "eth0"]) == exit_code
    out, err = capsys.readouterr()
    assert out == ""
    assert err == "error: qdisc-busy\nCannot attach.\n  one\n  two\nhint: type this\n"

    assert main(["attach", "eth0", "--json"]) == exit_code
    out, err = capsys.readouterr()
    assert err == "", f"got {err!r} on stderr, want the error on stdout only"
    assert json.loads(out) == {
        "error": "qdisc-busy",
        "message": "Cannot attach.",
        "hint": "type this",
        "details": ["one", "two"],
        "exit_code": exit_code,
    }


def test_unexpected_exception_is_internal_and_shows_its_traceback_only_with_v(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _raise_in_engine(monkeypatch, RuntimeError("boom"))
    assert main(["status"]) == 1
    err = capsys.readouterr().err
    assert err.startswith("error: internal\nRuntimeError: boom\nhint: ")
    assert "Traceback" not in err
    assert main(["status", "-v"]) == 1
    assert "Traceback" in capsys.readouterr().err


def test_ctrl_c_exits_130(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _raise_in_engine(monkeypatch, KeyboardInterrupt())
    assert main(["status"]) == 130
    err = capsys.readouterr().err
    assert err.split() == ["error:", "interrupted", "Stopped", "by", "Ctrl-C."]


def test_eof_inside_a_command_is_not_taken_for_ctrl_c(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _raise_in_engine(monkeypatch, EOFError("pipe closed"))
    assert main(["status"]) == 1
    assert "error: internal\nEOFError: pipe closed" in capsys.readouterr().err


def test_escape_sequences_in_an_error_do_not_reach_the_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _raise_in_engine(monkeypatch, InputError("x", "a\x1b[2Jb", details=("\x07c",)))
    main(["status"])
    err = capsys.readouterr().err
    assert "\x1b" not in err, f"got {err!r}, want no escape"
    assert "\x07" not in err, f"got {err!r}, want no bell"
    assert "a\\x1b[2Jb" in err


@pytest.mark.parametrize(
    ("text", "reference"),
    [
        ("1Gbps", "ambiguous-rate"),  # C49
        ("125MBps", "ambiguous-rate"),
        ("0", "rate-too-low"),  # C51
        ("999999999gbit", "rate-too-high"),  # C53
        ("20%", "percent-without-link"),
    ],
)
def test_wrong_link_rate_is_refused_by_its_own_name(
    text: str, reference: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--json", "attach", "eth0", "--link-rate", text]) == 2
    got = json.loads(capsys.readouterr().out)["error"]
    assert got == reference, f"got {got}, want {reference}"


@pytest.mark.parametrize(
    ("words", "reference"),
    [
        (["attach", "eth0", "--ingress-lease", "60"], "bad-duration"),
        (["attach", "eth0", "--segment-limit", "64k"], "ambiguous-size"),
        (["attach", "eth0", "--segment-limit", "100"], "segment-limit"),
        (["attach", "eth0", "--mark", "0"], "mark-range"),
        (["attach", "eth0", "--mark-ingress", "0x1ffffffff"], "mark-range"),
        (["class", "set", "bulk", "--ceiling", "20Mb"], "ambiguous-rate"),
        (["explain", "10.0.0.1:1", "10.0.0.2:2", "--dscp", "64"], "dscp-range"),
        (["explain", "10.0.0.1:1", "10.0.0.2:2", "--protocol", "tpc"], "protocol"),
        (["explain", "10.0.0.1", "10.0.0.2"], "endpoint"),
        (["explain", "10.0.0.1:1", "[::1]:2"], "address-family"),
        (["explain", "10.0.0.1:1", "10.0.0.2:2", "--protocol", "icmp"], "endpoint"),
        (["explain", "10.0.0.1:1", "10.0.0.2:2", "--pcap", "x"], "usage"),
        (["status", "--netns", "a/b"], "netns-name"),
        (["demo", "--duration", "1h"], "demo-duration"),
        (["whitelist", "add", "10.0.0.1", "--for", "1h", "--expires", "@9"], "usage"),
        (["whitelist", "add", "10.0.0.1", "--expires", "2020-01-01T00:00:00Z"], "expiry"),
        (["whitelist", "add", "10.0.0.1", "--expires", "2099-01-01T00:00:00"], "expiry"),
    ],
)
def test_wrong_value_is_refused_before_anything_is_asked(
    words: list[str],
    reference: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    _raise_in_engine(monkeypatch, AssertionError("the engine was asked"))
    code = main([*words, "--json"])
    answer = json.loads(capsys.readouterr().out)
    assert (code, answer["error"]) == (2, reference), f"got {answer}, want {reference}"
    assert answer["hint"], f"got no hint for {reference}"


def test_version_names_the_program(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("shapectl 0.")


def test_every_command_has_help_with_a_short_first_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    names = [words for words, _ in commands()]
    assert len(names) >= 19, f"got {len(names)} commands"
    for words, command in commands():
        assert main([*words[1:], "--help"]) == 0
        assert "Usage: " + " ".join(words) in capsys.readouterr().out
        first = (command.help or "").splitlines()[0]
        assert len(first) <= 62, f"{words}: --help would cut {first!r}"


def test_every_command_takes_the_global_options() -> None:
    for words, command in [(("shapectl",), cli), *commands()]:
        flags = {o for p in command.params if isinstance(p, click.Option) for o in p.opts}
        missing = {"--json", "--netns", "--verbose"} - flags
        assert not missing, f"{words} lacks {missing}"
