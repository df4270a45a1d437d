# SPDX-License-Identifier: Apache-2.0
"""One line of the audit log, whatever is put into it."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shapeagent.model.reports import WhitelistChange
from shapeagent.service.identity.auditline import (
    MOST_LINE_BYTES,
    AuditEntry,
    encode_line,
    id_marker,
)

ENTRY = AuditEntry(who="unix:operator", role="operator", peer="unix:", method="/a.B/C")
ID = "0123456789abcdef"

# Everything a str can hold: surrogates, control characters, bidirectional overrides.
SHORT_TEXT = st.text(alphabet=st.characters(), max_size=12)
ANY_TEXT = SHORT_TEXT | SHORT_TEXT.map(lambda text: text * 400)
TEXTS = ("who", "role", "peer", "method", "object", "why", "result", "request_id", "digest")
ANY_VALUE = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | ANY_TEXT | st.binary(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=9), inner),
    max_leaves=12,
)


def encode(**fields: Any) -> tuple[bytes, dict[str, Any]]:
    line = encode_line(dataclasses.replace(ENTRY, **fields), ID, 1_800_000_000.25)
    document: dict[str, Any] = json.loads(line)
    return line, document


@given(
    texts=st.fixed_dictionaries(dict.fromkeys(TEXTS, ANY_TEXT)),
    old=ANY_VALUE,
    new=ANY_VALUE,
    entries=st.none() | st.integers(),
)  # fmt: skip
def test_any_entry_is_one_bounded_line_of_printable_ascii(
    texts: dict[str, str], old: object, new: object, entries: int | None
) -> None:
    line, document = encode(**texts, old=old, new=new, entries=entries)
    assert line.endswith(b"\n")
    assert line.count(b"\n") == 1
    assert all(0x20 <= byte < 0x7F for byte in line[:-1]), f"got {line!r}"
    assert len(line) <= MOST_LINE_BYTES
    assert document["id"] == ID, "a field wrote over another"
    for name in TEXTS[:-1]:
        text = texts[name]
        if len(text) <= 5:
            assert document[name] == text, f"got {document[name]!r}, want {text!r}"
        else:
            assert document[name][:3] == text[:3]


@given(st.text(alphabet=st.characters(), max_size=6))
def test_what_fits_comes_back_as_it_was(text: str) -> None:
    _, document = encode(why=text, old={"a": text}, new=[text])
    assert (document["why"], document["old"], document["new"]) == (text, {"a": text}, [text])


def test_a_line_break_and_an_escape_write_no_second_line() -> None:
    forged = 'x"}\n{"time": "2026", "who": "root", "result": "ok"}\x1b[2K\x7f\u202e\u2028\x9b'
    line, document = encode(who=forged)
    assert line.count(b"\n") == 1
    assert line[:-1].isascii()
    assert line[:-1].decode().isprintable(), f"got {line!r}"
    assert document["who"] == forged
    assert document["result"] == "ok"
    assert document["role"] == "operator"


def test_the_time_is_utc_with_milliseconds() -> None:
    assert encode()[1]["time"] == "2027-01-15T08:00:00.250Z"


def test_what_is_empty_is_left_out_but_not_zero() -> None:
    _, document = encode()
    assert not {"old", "new", "entries", "sha256", "repeated"} & document.keys()
    _, document = encode(old=0, new=False, entries=0)
    assert (document["old"], document["new"], document["entries"]) == (0, False, 0)


def test_a_long_field_says_how_much_is_missing() -> None:
    _, document = encode(why="ü" * 5000)
    kept = document["why"].count("ü")
    assert document["why"].endswith(f"...[{5000 - kept} more characters]"), document["why"][-60:]
    assert 150 < kept < 200, f"got {kept} characters of 6 bytes in 1200"


def test_a_long_value_is_told_by_its_beginning_length_and_digest() -> None:
    _, document = encode(old={"entries": ["192.0.2.1"] * 10_000})
    assert document["old"]["cut_from_bytes"] > 100_000
    assert document["old"]["begins"].startswith('{"entries": ["192.0.2.1"')
    assert len(document["old"]["sha256"]) == 64
    _, other = encode(old={"entries": ["192.0.2.1"] * 9_999 + ["192.0.2.2"]})
    assert other["old"]["sha256"] != document["old"]["sha256"]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), object(), {1, 2}, b"\xff"])
def test_what_is_no_json_is_written_all_the_same(value: object) -> None:
    _, document = encode(new=value)
    assert "new" in document


def test_a_loop_is_written_all_the_same() -> None:
    loop: list[Any] = []
    loop.append(loop)
    assert "new" in encode(new=loop)[1]


def test_what_raises_when_it_is_shown_is_written_all_the_same() -> None:
    class Rude:
        def __repr__(self) -> str:
            raise RuntimeError("no")

    assert encode(new=Rude())[1]["new"] == "<Rude>"


def test_a_report_is_written_as_it_prints() -> None:
    names = [one.name for one in dataclasses.fields(WhitelistChange)]
    values: dict[str, Any] = dict.fromkeys(names, 7)
    change = WhitelistChange(**values)
    assert encode(new=change)[1]["new"] == values


def test_no_field_holds_the_marker_of_a_line() -> None:
    marker = id_marker("f" * 16)
    line, _ = encode(who=marker.decode(), why=marker.decode(), old=marker.decode())
    assert marker not in line
    assert id_marker(ID) in line
