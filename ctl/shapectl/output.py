# SPDX-License-Identifier: Apache-2.0
"""What a person or a program sees.

Tables and JSON go to stdout, all else to stderr. Colour is used only on a
terminal, rich (40 ms to load) only for a bar that moves.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Sequence
from types import TracebackType
from typing import IO, Any, Self

import click

from shapeagent.model.errors import ShapeError
from shapeagent.model.reports import to_jsonable

#: What takes longer than this is announced on stderr.
_PROGRESS_AFTER_S = 1.0


def printable(text: object) -> str:
    """Return `text` on one line, without control characters.

    Owners, reasons and file contents come from other people: an escape
    sequence in them must not reach the terminal.
    """
    return "".join(c if c.isprintable() else f"\\x{ord(c):02x}" for c in str(text))


def print_json(value: object) -> None:
    """Print one JSON document to stdout."""
    click.echo(json.dumps(to_jsonable(value), indent=2))


def print_json_line(value: object) -> None:
    """Print one JSON object on one line to stdout (for answers that are a stream)."""
    click.echo(json.dumps(to_jsonable(value)))


def print_line(text: str = "") -> None:
    """Print a line of the answer to stdout."""
    click.echo(printable(text) if text else "")


def print_marked(word: str, text: str, *, colour: str | None = None) -> None:
    """Print a line of the answer behind a word that has a colour on a terminal."""
    click.echo(f"  {_painted(word, fg=colour) if colour else word}  {printable(text)}")


def print_text(text: str) -> None:
    """Print a document to stdout byte for byte, with a final newline."""
    click.echo(text, nl=not text.endswith("\n"))


def _painted(text: str, **style: Any) -> str:
    # click takes colour out where the stream is no terminal; NO_COLOR it does not know.
    return text if os.environ.get("NO_COLOR") else click.style(text, **style)


def note(text: str) -> None:
    """Print a remark to stderr."""
    click.echo(printable(text), err=True)


def warn(text: str) -> None:
    """Print a warning to stderr, in yellow on a terminal."""
    click.echo(_painted("warning: ", fg="yellow") + printable(text), err=True)


def print_error(error: ShapeError, *, as_json: bool) -> None:
    """Print a failure: three-part text to stderr, or with `as_json` an object to stdout."""
    if as_json:
        print_json(error.as_dict())
        return
    click.echo(_painted("error: ", fg="red", bold=True) + printable(error.reference), err=True)
    for line in error.message.splitlines() or [""]:
        click.echo(printable(line), err=True)
    for detail in error.details:
        click.echo("  " + printable(detail), err=True)
    if error.hint:
        click.echo(_painted("hint: ", fg="cyan") + printable(error.hint), err=True)


def print_table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print a table to stdout.

    A table wider than the terminal is wrapped by the terminal: cells stay whole.

    Args:
        columns: headings; one that starts with `>` is right-aligned (numbers).
        rows: one cell per column; None prints as `-`.
    """
    right = [column.startswith(">") for column in columns]
    table = [[column.removeprefix(">") for column in columns]]
    table += [["-" if cell is None else printable(cell) for cell in row] for row in rows]
    widths = [max(map(_columns_of, cells)) for cells in zip(*table, strict=True)]
    lines = []
    for row in table:
        cells = [
            f"{' ' * (width - _columns_of(cell))}{cell}"
            if at_right
            else f"{cell}{' ' * (width - _columns_of(cell))}"
            for cell, width, at_right in zip(row, widths, right, strict=True)
        ]
        lines.append("  ".join(cells).rstrip())
    lines[0] = _painted(lines[0], bold=True)
    lines.insert(1, "─" * (sum(widths) + 2 * (len(widths) - 1)))
    click.echo("\n".join(lines))


def _columns_of(text: str) -> int:
    """Return how wide a text is on a terminal: East Asian characters take two columns."""
    if text.isascii():
        return len(text)
    from unicodedata import combining, east_asian_width

    return sum(0 if combining(c) else 1 + (east_asian_width(c) in "WF") for c in text)


class Progress:
    """Says on stderr what is being done once it has taken over a second.

    Use as a context manager and pass `self.step` to whoever knows the steps. A
    thread only prints; it lives from the first step to the end of the block.
    """

    def __init__(self, *, every_step: bool = False, silent: bool = False) -> None:
        self._every_step = every_step
        self._silent = silent
        self._changed = threading.Condition()
        self._message: str | None = None
        self._since_s = 0.0
        self._done = False
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with self._changed:
            self._done = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join()

    def step(self, message: str) -> None:
        """Begin the step that `message` names."""
        if self._every_step:
            note(f"{message} …")
            return
        if self._silent:
            return
        with self._changed:
            self._message = message
            self._since_s = time.monotonic()
            self._changed.notify()
        if self._thread is None:
            self._thread = threading.Thread(target=self._watch, name="progress", daemon=True)
            self._thread.start()

    def _watch(self) -> None:
        with self._changed:
            while not self._done:
                if self._message is None:
                    self._changed.wait()
                    continue
                left_s = self._since_s + _PROGRESS_AFTER_S - time.monotonic()
                if left_s > 0:
                    self._changed.wait(left_s)
                    continue
                message, self._message = self._message, None
                note(f"{message} …")


def stderr_is_terminal() -> bool:
    """Return True where a person watches stderr."""
    stream: IO[Any] = sys.stderr
    return bool(stream.isatty())


def rate_text(bits_per_s: int | None, *, none: str = "-") -> str:
    """Return a rate for people, in the grammar that `--ceiling` reads."""
    if bits_per_s is None:
        return none
    from shapeagent.model.units import format_rate

    return format_rate(bits_per_s)


def bytes_text(count: int | None) -> str:
    """Return a byte count for people: `1,234 B`, `1.23 MB`."""
    if count is None:
        return "-"
    if count < 100_000:
        return f"{count:,} B"
    value = float(count)
    for unit in ("kB", "MB", "GB", "TB", "PB"):
        value /= 1000
        if value < 1000 or unit == "PB":
            break
    return f"{value:,.2f} {unit}"


def seconds_text(seconds: float) -> str:
    """Return a duration for people: `3.2s`, `4m05s`, `2h03m`."""
    if seconds < 60:
        return f"{seconds:.1f}s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    if whole < 86400:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{whole // 86400}d{whole % 86400 // 3600:02d}h"


def time_text(unix_s: float | None) -> str | None:
    """Return a moment as RFC 3339 in UTC, to the second."""
    if unix_s is None:
        return None
    from datetime import UTC, datetime

    return datetime.fromtimestamp(unix_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


class Bar:
    """Progress of a known number of steps on stderr, with the time left.

    A bar on a terminal, else one line a step. The estimate counts until steps
    tell better.
    """

    def __init__(self, total: int, estimate_s: float) -> None:
        self._total = total
        self._estimate_s = estimate_s
        self._done = 0
        self._started_s = time.monotonic()
        self._rich: Any = None
        self._task: Any = None

    def __enter__(self) -> Self:
        if stderr_is_terminal():
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TextColumn

            self._rich = Progress(
                TextColumn("{task.completed:.0f} of {task.total:.0f}"),
                BarColumn(),
                TextColumn("{task.description}"),
                console=Console(stderr=True),
                transient=True,
            )
            self._rich.start()
            self._task = self._rich.add_task(self._left(), total=self._total)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._rich is not None:
            self._rich.stop()

    def say(self, text: str) -> None:
        """Tell what is being done before the first step."""
        if self._rich is not None:
            self._rich.update(self._task, description=f"{text}, {self._left()}")
        else:
            note(text)

    def advance(self, what: str) -> None:
        """Count one step that is done."""
        self._done += 1
        if self._rich is not None:
            self._rich.update(self._task, advance=1, description=f"{self._left()}: {what}")
        else:
            note(f"{self._done} of {self._total}: {what}, {self._left()}")

    def _left(self) -> str:
        spent_s = time.monotonic() - self._started_s
        if self._done:
            left_s = spent_s / self._done * (self._total - self._done)
        else:
            left_s = self._estimate_s - spent_s
        return f"about {max(1, round(left_s / 60))} min left" if left_s > 0 else "nearly done"
