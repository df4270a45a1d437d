# SPDX-License-Identifier: Apache-2.0
"""What `shapectl top` draws, key by key; the pictures are in golden/top-*.txt."""

from __future__ import annotations

import dataclasses
import io
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from shapeagent.model.rates import Sample
from shapeagent.model.reports import InterfaceStatus
from shapectl.topview import (
    ORDERS,
    Screen,
    View,
    delay_text,
    number_text,
    sparkline,
    use_text,
)
from tests.unit.statuskit import interface_status

_GOLDEN = Path(__file__).with_name("golden")

#: bytes and packets each second, by class and direction; queue: sent bytes, drops, backlog
_TRAFFIC: dict[tuple[str, str], dict[str, int]] = {
    ("signal", "egress"): {"wire_bytes": 90_000, "packets": 400, "queue_sent_bytes": 80_400,
                           "queue_sent_packets": 400},
    ("stream", "egress"): {"wire_bytes": 1_250_000, "packets": 9_000,
                           "queue_sent_bytes": 1_034_000, "queue_sent_packets": 9_000},
    ("bulk", "egress"): {"wire_bytes": 11_000_000, "packets": 7_300, "queue_drops": 130,
                         "queue_sent_bytes": 9_700_000, "queue_sent_packets": 6_500},
    ("bulk", "ingress"): {"wire_bytes": 4_321, "packets": 65},
}  # fmt: skip
_BACKLOG = {"bulk": 61_000}


def status_after(seconds: int, device: str = "eth0", **changes: Any) -> InterfaceStatus:
    """Return an interface after so many seconds of the same traffic, the stream growing."""
    classes = []
    for row in interface_status(device).classes:
        grown = _TRAFFIC.get((row.name, row.direction), {})
        factor = seconds * (seconds + 1) // 2 if row.name == "stream" else seconds
        counts = {name: factor * each for name, each in grown.items()}
        if row.direction == "egress":
            counts["backlog_bytes"] = _BACKLOG.get(row.name, 0) if seconds else 0
        classes.append(dataclasses.replace(row, **counts))  # type: ignore[arg-type]
    return dataclasses.replace(interface_status(device, **changes), classes=tuple(classes))


def view_of(*devices: str, seconds: int = 8, **changes: Any) -> View:
    view = View()
    for second in range(seconds + 1):
        found = tuple(status_after(second, device, **changes) for device in devices)
        view.take(Sample(100.0 + second, found))
    return view


def draw(
    view: View, width: int = 80, height: int = 24, *, colour: bool = False, encoding: str = "utf-8"
) -> str:
    out = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    console = Console(
        file=out,
        width=width,
        height=height,
        force_terminal=True,
        color_system="standard" if colour else None,
        highlight=False,
        _environ={},
    )
    console.print(Screen(view, height, clock_text="12:34:56"), end="")
    out.flush()
    assert isinstance(out.buffer, io.BytesIO)
    return out.buffer.getvalue().decode(encoding)


def plain(view: View, width: int = 80, height: int = 24) -> list[str]:
    """Return the lines without bold and the like, which stay without colour too."""
    console = Console(file=io.StringIO(), width=width, height=height, highlight=False, _environ={})
    console.print(Screen(view, height, clock_text="12:34:56"), end="")
    assert isinstance(console.file, io.StringIO)
    return [line.rstrip() for line in console.file.getvalue().splitlines()]


@pytest.mark.parametrize(
    ("name", "width", "height", "devices"),
    [
        ("top-80", 80, 24, ("eth0",)),
        ("top-60", 60, 20, ("eth0",)),
        ("top-40", 40, 16, ("eth0",)),
        ("top-120-two", 120, 30, ("eth0", "ens1f0np0")),
        ("top-80-short", 80, 10, ("eth0", "ens1f0np0")),
    ],
)
def test_screen_is_as_in_the_picture(
    name: str, width: int, height: int, devices: tuple[str, ...]
) -> None:
    got = plain(view_of(*devices), width, height)
    path = _GOLDEN / f"{name}.txt"
    if os.environ.get("SHAPECTL_WRITE_GOLDEN"):
        path.write_text("\n".join(got) + "\n", encoding="utf-8")
    want = path.read_text(encoding="utf-8").splitlines()
    assert got == want, "got\n" + "\n".join(got)
    assert len(got) == height
    assert max(map(len, got)) <= width


def test_numbers_take_at_most_six_columns() -> None:
    for number, text in (
        (None, "-"), (0, "0"), (3, "3"), (3.4, "3.4"), (99.97, "100"), (870, "870"),
        (999.4, "999"), (999.6, "1.00k"), (12_345, "12.3k"), (1.25e9, "1.25G"), (4e14, "400T"),
    ):  # fmt: skip
        assert number_text(number) == text, f"got {number_text(number)} for {number}, want {text}"
    for seconds, text in (
        (None, "-"), (0, "0"), (85e-6, "85us"), (0.0012, "1.2ms"), (0.3404, "340ms"),
        (2.52, "2.5s"), (120, "120s"),
    ):  # fmt: skip
        assert delay_text(seconds) == text, f"got {delay_text(seconds)}, want {text}"
    assert [use_text(share) for share in (None, 0, 0.874, 1.0, 55)] == [
        "-", "0%", "87%", "100%", "999%",
    ]  # fmt: skip


@given(st.floats(0, 1e17), st.floats(0, 1e8))
def test_any_number_has_room(number: float, seconds: float) -> None:
    assert len(number_text(number)) <= 7
    if number < 1e15:
        assert len(number_text(number)) <= 5
    assert len(delay_text(seconds)) <= 6


def test_sparkline_shows_the_newest_against_the_highest() -> None:
    assert sparkline([0, 1, 2, 4, 8], 5) == "▁▂▃▅█"
    assert sparkline([1, 2, None, 2], 4) == "▅█ █"
    assert sparkline([0, 0], 4) == "  ▁▁"
    assert sparkline([], 3) == "   "
    assert sparkline(list(range(100)), 4) == "████"


@given(st.lists(st.one_of(st.none(), st.floats(0, 1e12)), max_size=40), st.integers(1, 30))
def test_sparkline_is_as_wide_as_asked(values: list[float | None], width: int) -> None:
    assert len(sparkline(values, width)) == width


def names_shown(view: View) -> list[str]:
    return [
        line.split()[0] + " " + line.split()[1]
        for line in plain(view, 80, 30)
        if line.split()[1:2] in (["out"], ["in"])
    ]


def test_keys_sort_filter_and_hide() -> None:
    view = view_of("eth0")
    classes = ("signal", "stream", "normal", "bulk")
    as_policy = [f"{name} {word}" for word in ("out", "in") for name in classes]
    assert names_shown(view) == as_policy
    assert view.press("r")
    assert names_shown(view)[:3] == ["bulk out", "stream out", "signal out"]
    assert view.press("k")
    assert names_shown(view)[:2] == ["stream out", "bulk out"]
    for key, first in (("d", "bulk out"), ("u", "stream out"), ("y", "bulk out")):
        assert view.press(key)
        assert names_shown(view)[0] == first, f"got {names_shown(view)} after {key}"
    assert view.press("s")
    assert (view.order, names_shown(view)) == (0, as_policy), "got no round trip by s"
    assert view.press("e")
    assert {line.split()[1] for line in names_shown(view)} == {"out"}
    assert view.press("e")
    assert {line.split()[1] for line in names_shown(view)} == {"in"}
    assert view.press("e")
    assert view.press("z")
    assert names_shown(view) == ["signal out", "stream out", "bulk out", "bulk in"]
    assert len({one.key for one in ORDERS} | set("qpsez ")) == len(ORDERS) + 6
    for key in ("", "x", "é", "\n"):
        assert view.press(key)
    for key in ("q", "\x03", "\x04"):
        assert not view.press(key)


def test_pause_holds_the_numbers_and_not_the_history() -> None:
    view = view_of("eth0")
    before = plain(view)
    assert view.press(" ")
    view.take(Sample(109.0, (status_after(9),)))
    lines = plain(view)
    assert "paused" in lines[0]
    got, want = ([line[:66] for line in found[1:-1]] for found in (lines, before))
    assert got == want, "got numbers that changed while paused"
    assert lines[1:-1] != before[1:-1], "got a history that stood still"
    assert view.press(" ")
    view.take(Sample(110.0, (status_after(10),)))
    assert plain(view)[1:-1] != before[1:-1]


def test_problems_and_trouble_are_said() -> None:
    view = view_of("eth0", problems=("our egress link is gone", "another"))
    assert "! our egress link is gone (+1)" in plain(view)
    view.problem = "shapectl is not attached to eth0."
    assert "not attached to eth0" in plain(view)[0]
    view.take(Sample(200.0, ()))
    assert "attached to no interface" in "\n".join(plain(view))
    assert "not attached to eth0" not in plain(view)[0]


def test_text_of_others_cannot_move_the_cursor() -> None:
    view = view_of("eth0", problems=("\x1b[2J\x1b]0;owned\x07",))
    view.problem = "\x1b[31mred"
    assert "\x1b" not in "\n".join(plain(view)), "got an escape sequence of somebody else's"


def test_without_colour_there_is_none() -> None:
    coloured = draw(view_of("eth0"), colour=True)
    assert "\x1b[31m" in coloured, "got no red for drops"
    bare = draw(view_of("eth0"))
    assert "\x1b[31m" not in bare
    assert "\x1b[33m" not in bare


def test_terminal_without_unicode_gets_plain_bars() -> None:
    found = draw(view_of("eth0"), encoding="ascii")
    assert "#" in found
    assert found.isascii()


@pytest.mark.parametrize("width", [1, 5, 20, 33, 47, 59, 79, 200])
@pytest.mark.parametrize("height", [1, 2, 5, 60])
def test_any_size_is_filled_and_not_exceeded(width: int, height: int) -> None:
    view = view_of("eth0", "a-very-long-device-name")
    view.problem = "something that is longer than the line has room for, certainly"
    lines = plain(view, width, height)
    assert len(lines) == height, f"got {len(lines)} lines, want {height}"
    assert max(map(len, lines)) <= width
