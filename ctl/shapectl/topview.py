# SPDX-License-Identifier: Apache-2.0
"""What `shapectl top` shows: from samples to lines that fit a terminal. No I/O, no clock."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from shapeagent.model.rates import ClassRate, InterfaceRates, Sample, interface_rates
from shapeagent.model.units import format_rate
from shapectl.output import printable

_HISTORY = 120  # samples that are kept; more than any terminal shows
_BARS = "▁▂▃▄▅▆▇█"
_PLAIN_BARS = "_.-=+*%#"
_LEAST_HISTORY = 6
_GAP = "  "
_BUSY = 0.95  # of a ceiling: from here on it is what holds the class back

DIRECTIONS = ("both", "egress", "ingress")
_DIRECTION_WORDS = {"egress": "out", "ingress": "in"}


@dataclass(frozen=True, slots=True)
class _Order:
    key: str  # that chooses it
    name: str
    value: Callable[[ClassRate], float | None]


ORDERS = (
    _Order("c", "class", lambda _: None),  # as the policy has them
    _Order("r", "rate", lambda row: row.bits_per_s),
    _Order("k", "packets", lambda row: row.packets_per_s),
    _Order("d", "drops", lambda row: row.drops_per_s),
    _Order("u", "use", lambda row: row.ceiling_use),
    _Order("y", "delay", lambda row: row.queue_delay_s),
)


@dataclass
class View:
    """What is shown now, and how: changed by `take` and `press`."""

    order: int = 0
    directions: str = "both"
    hides_idle: bool = False
    is_paused: bool = False
    problem: str = ""  # why there is no newer sample
    interval_s: float | None = None
    interfaces: tuple[InterfaceRates, ...] = ()
    _last: Sample | None = None
    _history: dict[tuple[str, str, str], deque[float | None]] = field(default_factory=dict)

    def take(self, sample: Sample) -> None:
        """Show a newer sample. While it is paused only the history goes on."""
        self.problem = ""
        last, self._last = self._last, sample
        found = interface_rates(last, sample)
        kept = {}
        for one in found:
            for row in one.classes:
                place = (one.device, row.direction, row.name)
                kept[place] = self._history.get(place) or deque(maxlen=_HISTORY)
                kept[place].append(row.bits_per_s)
        self._history = kept
        if not self.is_paused:
            self.interfaces = found
            self.interval_s = sample.at_s - last.at_s if last else None

    def press(self, key: str) -> bool:
        """Do what a key is for; returns False where it is for leaving."""
        if key in ("q", "\x03", "\x04"):
            return False
        if key in (" ", "p"):
            self.is_paused = not self.is_paused
        elif key == "s":
            self.order = (self.order + 1) % len(ORDERS)
        elif key == "e":
            place = DIRECTIONS.index(self.directions) + 1
            self.directions = DIRECTIONS[place % len(DIRECTIONS)]
        elif key == "z":
            self.hides_idle = not self.hides_idle
        for number, order in enumerate(ORDERS):
            if key == order.key:
                self.order = number
        return True

    def history(self, device: str, row: ClassRate) -> Sequence[float | None]:
        """Return the rates of a class so far, the newest last."""
        return tuple(self._history.get((device, row.direction, row.name), ()))

    def rows(self, one: InterfaceRates) -> list[ClassRate]:
        """Return the rows of an interface that are shown, in their order."""
        rows = [
            row
            for row in one.classes
            if self.directions in ("both", row.direction)
            and not (self.hides_idle and not row.packets_per_s and not row.backlog_bytes)
        ]
        value = ORDERS[self.order].value
        return sorted(rows, key=lambda row: -(value(row) or 0.0))  # stable: equal ones stay


@dataclass(frozen=True, slots=True)
class _Column:
    heading: str
    width: int
    cell: Callable[[ClassRate], str]
    rank: int  # on a narrow terminal the highest goes first
    at_right: bool = True


def _columns(class_width: int) -> list[_Column]:
    return [
        _Column("class", class_width, lambda row: printable(row.name), 0, at_right=False),
        _Column("dir", 3, lambda row: _DIRECTION_WORDS[row.direction], 2, at_right=False),
        _Column("bit/s", 6, lambda row: number_text(row.bits_per_s), 0),
        _Column("pkt/s", 6, lambda row: number_text(row.packets_per_s), 5),
        _Column("drop/s", 6, lambda row: number_text(row.drops_per_s), 1),
        _Column("ceiling", 7, lambda row: number_text(row.ceiling_bits_per_s), 4),
        _Column("use", 4, lambda row: use_text(row.ceiling_use), 1),
        _Column("delay", 6, lambda row: delay_text(row.queue_delay_s), 3),
    ]


def number_text(number: float | None) -> str:
    """Return at most five characters: `0`, `3.4`, `870`, `12.3k`, `1.25G`; `-` for None."""
    if number is None:
        return "-"
    for unit in ("", "k", "M", "G", "T"):
        if number < 999.5 or unit == "T":
            break
        number /= 1000
    if number >= 99.95 or (unit == "" and number == int(number)):
        return f"{number:.0f}{unit}"
    return f"{number:.1f}{unit}" if number >= 9.995 or unit == "" else f"{number:.2f}{unit}"


def use_text(share: float | None) -> str:
    """Return a share as `87%`; `-` for None."""
    return "-" if share is None else f"{min(100 * share, 999):.0f}%"


def delay_text(seconds: float | None) -> str:
    """Return a delay as `0`, `85us`, `1.2ms`, `340ms`, `2.5s`; `-` for None."""
    if seconds is None:
        return "-"
    if seconds == 0:
        return "0"
    if seconds < 0.0009995:
        return f"{1e6 * seconds:.0f}us"
    if seconds < 0.9995:
        return f"{1e3 * seconds:.1f}ms" if seconds < 0.09995 else f"{1e3 * seconds:.0f}ms"
    return f"{seconds:.1f}s" if seconds < 99.95 else f"{min(seconds, 9999):.0f}s"


def sparkline(values: Sequence[float | None], width: int, bars: str = _BARS) -> str:
    """Return the last values as bars against the highest of them; a gap where none is known."""
    shown = list(values)[-width:]
    highest = max((one for one in shown if one is not None), default=0.0)
    text = ""
    for one in shown:
        if one is None:
            text += " "
        elif not highest:
            text += bars[0]
        else:
            text += bars[min(len(bars) - 1, int(one / highest * len(bars)))]
    return text.rjust(width)


class Screen:
    """The view as rich draws it: as wide as there is room, and exactly so many lines high.

    rich tells what it draws inside of something else only the width.
    """

    def __init__(self, view: View, height: int, *, clock_text: str = "") -> None:
        self._view = view
        self._height = height
        self._clock_text = clock_text

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = options.max_width
        bars = _PLAIN_BARS if options.ascii_only else _BARS
        lines = [self._header(width), *self._body(width, bars)]
        room = max(1, self._height - 1)
        if len(lines) > room:
            more = len(lines) - room + 1
            lines = [*lines[: room - 1], Text(f"… {more} more lines", style="dim")]
        lines += [Text("")] * (room - len(lines))
        for line in [*lines, self._footer(width)][: self._height]:
            line.truncate(width)
            line.no_wrap = True
            yield line

    def _header(self, width: int) -> Text:
        view = self._view
        line = Text("shapectl top", style="bold")
        if view.is_paused:
            line.append("  paused", style="bold yellow")
        if view.problem:
            line.append(f"  {printable(view.problem)}", style="red")
        every = f"{view.interval_s:.1f}s" if view.interval_s else ""
        right = f"{every}  {self._clock_text}".strip()
        line.truncate(max(0, width - len(right) - 1))
        line.append(right.rjust(width - line.cell_len), style="not bold")
        return line

    def _footer(self, width: int) -> Text:
        view = self._view
        shown = {"both": "out+in", "egress": "out", "ingress": "in"}[view.directions]
        words = (
            ("q", "quit"),
            ("space", "go on" if view.is_paused else "pause"),
            ("s", f"sort: {ORDERS[view.order].name}"),
            ("e", shown),
            ("z", "all" if view.hides_idle else "hide idle"),
        )
        line = Text()
        for key, meaning in words:
            piece = f"{key} {meaning}"
            if line.cell_len + len(piece) > width:
                break
            line.append(key, style="bold")
            line.append(f" {meaning}{_GAP}")
        line.rstrip()
        return line

    def _body(self, width: int, bars: str) -> list[Text]:
        view = self._view
        if not view.interfaces:
            return [Text(""), Text("shapectl is attached to no interface here.")]
        names = [printable(row.name) for one in view.interfaces for row in one.classes]
        columns, history = _fit(_columns(max(map(len, (*names, "class")))), width)
        lines: list[Text] = []
        for one in view.interfaces:
            lines += [Text(""), _interface_line(one)]
            if one.problems:
                more = f" (+{len(one.problems) - 1})" if len(one.problems) > 1 else ""
                lines.append(Text(f"! {printable(one.problems[0])}{more}", style="red"))
            headings = [_placed(column, column.heading) for column in columns]
            if history:
                headings.append("history")
            lines.append(Text(_GAP.join(headings), style="bold"))
            lines += [self._row(one.device, row, columns, history, bars) for row in view.rows(one)]
        return lines

    def _row(
        self, device: str, row: ClassRate, columns: list[_Column], history: int, bars: str
    ) -> Text:
        line = Text()
        for column in columns:
            line.append(_placed(column, column.cell(row)), style=_style(column.heading, row))
            line.append(_GAP)
        if history:
            line.append(sparkline(self._view.history(device, row), history, bars), style="cyan")
        line.rstrip()
        return line


def _style(heading: str, row: ClassRate) -> str:
    if heading == "drop/s" and row.drops_per_s:
        return "red"
    if heading == "use" and row.ceiling_use is not None and row.ceiling_use >= _BUSY:
        return "yellow"
    return ""


def _placed(column: _Column, text: str) -> str:
    text = text if len(text) <= column.width else text[: column.width - 1] + "…"
    return text.rjust(column.width) if column.at_right else text.ljust(column.width)


def _fit(columns: list[_Column], width: int) -> tuple[list[_Column], int]:
    """Return the columns that have room, and the width that is left for the history."""

    def taken() -> int:
        return sum(column.width + len(_GAP) for column in columns)

    while taken() - len(_GAP) > width:
        droppable = max(columns, key=lambda column: column.rank)
        if droppable.rank == 0:  # the name gives way last
            name = columns[0]
            short = max(4, name.width - (taken() - len(_GAP) - width))
            columns[0] = dataclasses.replace(name, width=short)
            break
        columns.remove(droppable)
    left = width - taken()
    return columns, left if left >= _LEAST_HISTORY else 0


def _interface_line(one: InterfaceRates) -> Text:
    line = Text(printable(one.device), style="bold")
    place = f" in {printable(one.netns)}" if one.netns else ""
    link = format_rate(one.link_rate_bits_per_s) if one.link_rate_bits_per_s else "unknown"
    line.append(f"{place}  {one.profile}  link {link}", style="not bold")
    return line
