# SPDX-License-Identifier: Apache-2.0
"""Where in a TOML text each key stands. `tomllib` gives values but no places."""

from __future__ import annotations

import re

Path = tuple[str | int, ...]

_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+", re.ASCII)
_BLANK = re.compile(r"(?:[ \t\r\n]+|#[^\n]*)+")
_SPACE = re.compile(r"[ \t]*")
# One token of a value; longest string forms first.
_VALUE_TOKEN = re.compile(
    r'"""(?:[^\\]|\\.)*?"{3,5}|\'\'\'.*?\'{3,5}|"(?:[^"\\\n]|\\.)*"|\'[^\'\n]*\'|#[^\n]*|[\[\]{}]|\n|[^"\'#\[\]{}\n]+',
    re.DOTALL,
)


def find_places(text: str) -> dict[Path, int]:
    """Return the line (from 1) of each table header and key of a TOML text that `tomllib` accepts.

    Elements of an array of tables count from 0, as in `("rules", 2, "port")`.
    Keys inside inline tables have no place of their own: see `place_of`.
    """
    places: dict[Path, int] = {}
    counts: dict[Path, int] = {}
    table: Path = ()
    at, line = 0, 1
    while True:
        blank = _BLANK.match(text, at)
        start = blank.end() if blank else at
        if start >= len(text):
            return places
        line += text.count("\n", at, start)
        at = start
        if text[at] == "[":
            is_array = text.startswith("[[", at)
            keys, at = _read_key(text, at + (2 if is_array else 1))
            at += 2 if is_array else 1
            table = _enter(keys, counts, is_array)
            _note(places, table, line)
        else:
            keys, at = _read_key(text, at)
            _note(places, table + keys, line)
            at = _skip_value(text, at + 1)
            line += text.count("\n", start, at)


def place_of(path: Path, places: dict[Path, int]) -> int | None:
    """Return the line of a key, or of the nearest thing around it that has one."""
    for length in range(len(path), 0, -1):
        if path[:length] in places:
            return places[path[:length]]
    return None


def say_at(path: Path, message: str, places: dict[Path, int]) -> tuple[int, str]:
    """Return (line, message with its line and path); line 0 where nothing around has a place."""
    line = place_of(path, places)
    where = "".join(f"[{p + 1}]" if isinstance(p, int) else f".{p}" for p in path).lstrip(".")
    at = f"line {line}: " if line else ""
    return line or 0, f"{at}{where}: {message}" if where else f"{at}{message}"


def say_not_toml(error: Exception) -> str:
    """Return what is wrong with a text that `tomllib` refuses, with its line."""
    found = re.search(r"\(at line (\d+), column (\d+)\)", str(error))
    at = f"line {found[1]}: " if found else ""
    return f"{at}not TOML: {error}"


def _note(places: dict[Path, int], path: Path, line: int) -> None:
    for length in range(1, len(path) + 1):
        places.setdefault(path[:length], line)


def _enter(keys: tuple[str, ...], counts: dict[Path, int], is_array: bool) -> Path:
    """Return the path of a header, with the index of each array of tables on the way."""
    path: Path = ()
    for position, key in enumerate(keys):
        path = (*path, key)
        if is_array and position == len(keys) - 1:
            counts[path] = counts.get(path, -1) + 1
        if path in counts:
            path = (*path, counts[path])
    return path


def _read_key(text: str, at: int) -> tuple[tuple[str, ...], int]:
    """Return a dotted key and the index of the character after it."""
    keys: list[str] = []
    while True:
        at = _past_space(text, at)
        if text[at] in "\"'":
            token = _VALUE_TOKEN.match(text, at)
            assert token is not None
            keys.append(token[0][1:-1])
        else:
            token = _BARE_KEY.match(text, at)
            assert token is not None
            keys.append(token[0])
        at = _past_space(text, token.end())
        if text[at] != ".":
            return tuple(keys), at
        at += 1


def _past_space(text: str, at: int) -> int:
    space = _SPACE.match(text, at)
    return space.end() if space else at


def _skip_value(text: str, at: int) -> int:
    """Return the index after the value that starts at `at`: its line end outside brackets."""
    depth = 0
    while at < len(text):
        token = _VALUE_TOKEN.match(text, at)
        assert token is not None
        at = token.end()
        if token[0] in ("[", "{"):
            depth += 1
        elif token[0] in ("]", "}"):
            depth -= 1
        elif token[0] == "\n" and depth == 0:
            return at
    return at
