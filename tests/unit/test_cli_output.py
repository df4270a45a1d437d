# SPDX-License-Identifier: Apache-2.0
"""Tables to stdout, the rest to stderr, colour only on a terminal."""

from __future__ import annotations

import io
import json
import sys
import threading
import time

import pytest

from shapeagent.model.errors import InputError
from shapeagent.model.reports import ClassStatus
from shapectl import output
from shapectl.commands.status import lease_text, print_classes


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def _class_status(**changes: object) -> ClassStatus:
    values: dict[str, object] = {
        "name": "bulk", "number": 3, "direction": "egress", "guarantee_bits_per_s": 10_000_000,
        "ceiling_bits_per_s": 20_000_000, "safe_ceiling_bits_per_s": 5_000_000,
        "ceiling_in_force_bits_per_s": 20_000_000, "lease_s_left": None, "packets": 1234567,
        "wire_bytes": 1_500_000_000, "drops": 1, "drop_wire_bytes": 1500, "ce_marks": 7,
        "no_socket_packets": 0, "over_segment_packets": 0, "backlog_bytes": None,
        "queue_drops": 2,
    }  # fmt: skip
    return ClassStatus(**{**values, **changes})  # type: ignore[arg-type]


def test_table_in_a_pipe_is_plain_and_never_folded(capsys: pytest.CaptureFixture[str]) -> None:
    long = "x" * 500
    output.print_table(("name", ">number"), [(long, 1), (None, 20)])
    out, err = capsys.readouterr()
    assert err == ""
    assert "\x1b" not in out, "got colour in a pipe"
    lines = out.splitlines()
    assert len(lines) == 4, f"got {len(lines)} lines, want heading, rule and two rows"
    assert lines[2].split() == [long, "1"]
    assert lines[3].split() == ["-", "20"]


def test_table_on_a_terminal_is_coloured_and_loses_no_text(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    terminal = _Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.delenv("NO_COLOR", raising=False)
    output.print_table(("name", "text"), [("a", "y" * 120)])
    shown = terminal.getvalue()
    assert shown.count("y") == 120, f"got {shown.count('y')} of 120 characters"
    assert "\x1b[1m" in shown, f"got no bold heading in {shown!r}"


def test_columns_line_up_where_characters_are_wide(capsys: pytest.CaptureFixture[str]) -> None:
    output.print_table(("name", ">number", "end"), [("日本", 7, "x"), ("abc", 123, "")])
    assert capsys.readouterr().out.splitlines() == [
        "name  number  end",
        "─────────────────",
        "日本       7  x",
        "abc      123",
    ]


def test_markup_and_escapes_in_cells_are_shown_as_text(
    capsys: pytest.CaptureFixture[str],
) -> None:
    output.print_table(("reason",), [("[red]x[/red] :smile: \x1b[31m\n",)])
    out = capsys.readouterr().out
    assert "[red]x[/red] :smile: \\x1b[31m\\x0a" in out, f"got {out!r}"


def test_json_is_one_document(capsys: pytest.CaptureFixture[str]) -> None:
    output.print_json(_class_status())
    row = json.loads(capsys.readouterr().out)
    assert row["ceiling_bits_per_s"] == 20_000_000
    assert row["lease_s_left"] is None


def test_classes_show_rates_lease_and_all_drops(capsys: pytest.CaptureFixture[str]) -> None:
    print_classes(
        (
            _class_status(lease_s_left=1.26),
            _class_status(name="signal", lease_s_left=0.0, ceiling_in_force_bits_per_s=5_000_000),
        )
    )
    out = capsys.readouterr().out
    for text in ("1.3s left", "over: safe ceiling", "20mbit", "5mbit", "1,234,567", "1.50 GB"):
        assert text in out, f"got {out}, want {text}"
    assert " 3 " in out, "drops at the ceiling and in the queue are added up"


@pytest.mark.parametrize(
    ("left", "want"),
    [(None, None), (0.0, "over: safe ceiling"), (59.94, "59.9s left"), (125.0, "2m05s left")],
)
def test_lease_is_shown_as_time_left(left: float | None, want: str | None) -> None:
    assert lease_text(_class_status(lease_s_left=left)) == want


@pytest.mark.parametrize(
    ("count", "want"),
    [(0, "0 B"), (99_999, "99,999 B"), (100_000, "100.00 kB"), (10**18, "1,000.00 PB")],
)
def test_bytes_are_shown_with_a_unit(count: int, want: str) -> None:
    assert output.bytes_text(count) == want


def _wait_for(capsys: pytest.CaptureFixture[str], want: str, deadline_s: float) -> str:
    heard = ""
    until = time.monotonic() + deadline_s
    tick = threading.Event()
    while want not in heard and time.monotonic() < until:
        heard += capsys.readouterr().err
        tick.wait(0.02)
    return heard


def test_progress_speaks_after_a_second_and_not_before(
    capsys: pytest.CaptureFixture[str],
) -> None:
    began_s = time.monotonic()
    with output.Progress() as progress:
        progress.step("reading facts")
        progress.step("compiling")
        heard = _wait_for(capsys, "compiling", 10)
        took_s = time.monotonic() - began_s
    assert heard == "compiling …\n", f"got {heard!r}, want the slow step alone"
    assert took_s >= 1.0, f"got it after {took_s:.2f} s, want 1 s or more"


def test_progress_of_a_quick_command_is_silent_and_leaves_no_thread(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with output.Progress() as progress:
        progress.step("compiling")
    assert capsys.readouterr().err == ""
    assert "progress" not in [thread.name for thread in threading.enumerate()]


def test_every_step_is_shown_with_v(capsys: pytest.CaptureFixture[str]) -> None:
    with output.Progress(every_step=True) as progress:
        progress.step("one")
        progress.step("two")
    assert capsys.readouterr().err == "one …\ntwo …\n"


@pytest.mark.parametrize("no_color", ["", "1"])
def test_errors_are_coloured_on_a_terminal_unless_no_color_is_set(
    no_color: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = _Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("NO_COLOR", no_color)
    output.print_error(InputError("usage", "text", hint="type"), as_json=False)
    shown = terminal.getvalue()
    assert ("\x1b" in shown) is (no_color == ""), f"got {shown!r} with NO_COLOR={no_color!r}"
