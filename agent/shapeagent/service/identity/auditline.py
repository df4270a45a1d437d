# SPDX-License-Identifier: Apache-2.0
"""One line of the audit log: what it says, how long it may be, and what it can never hold.

A line is one JSON object of printable ASCII: names and reasons come from other
people, and a line break in one must not write a second line, nor an escape
sequence reach the terminal of who reads it.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from shapeagent.model.reports import to_jsonable

OK = "ok"
#: The agent ended between a change and its line: it may have been made.
INTERRUPTED = "interrupted"

#: What each field may take in the line (encoded bytes, with quotes).
_MOST_BYTES = {
    "who": 2100,  # a SPIFFE id has up to 2,048
    "role": 100,
    "method": 300,
    "object": 600,
    "why": 1200,
    "result": 140,
    "request_id": 300,
    "peer": 300,
    "sha256": 80,
}
_MOST_VALUE_BYTES = 3000  # of `old` and of `new`
_MOST_COUNT = (1 << 63) - 1
_TEXTS = ("who", "role", "peer", "method", "object", "request_id", "why")
#: No line is longer, its line feed included.
MOST_LINE_BYTES = 16 << 10


@dataclass(frozen=True, slots=True)
class AuditEntry:
    """One call, or one batch, as the audit log tells it."""

    who: str  # the SPIFFE id, or the socket's role for a local caller
    role: str  # what the caller may do; "none" where it was not known
    peer: str  # as gRPC names it
    method: str  # as gRPC names it: /shapectl.v1.ShaperService/Attach
    object: str = ""  # "eth0", "eth0 egress bulk"; "" for a denial, which reads no request
    old: Any = ""  # what was there: text, or anything `to_jsonable` takes; "" and None: nothing
    new: Any = ""  # what is there now
    why: str = ""  # the caller's reason
    result: str = OK  # or the reference of the error
    request_id: str = ""  # the caller's name for this change
    entries: int | None = None  # of a batch, how many
    digest: str = ""  # of a batch, the SHA-256 of its entries in hex: the line has no room for them


def encode_line(
    entry: AuditEntry,
    identifier: str,
    unix_s: float,
    *,
    result: str | None = None,
    repeated: int = 0,
) -> bytes:
    """Return the line of an entry, with its line feed: at most MOST_LINE_BYTES of ASCII.

    Args:
        identifier: unlike that of any other line, of [0-9a-f].
        result: in place of the entry's.
        repeated: how many more of the same were not written, where any.
    """
    stamp = datetime.fromtimestamp(unix_s, UTC).isoformat(timespec="milliseconds")
    members = [
        ("time", _encode(stamp.replace("+00:00", "Z"))),
        ("id", _encode(identifier)),
        *((name, _text(getattr(entry, name), name)) for name in _TEXTS),
        ("result", _text(entry.result if result is None else result, "result")),
    ]
    for name, value in (("old", entry.old), ("new", entry.new)):
        if value is not None and value != "":
            members.append((name, _value(value)))
    if entry.entries is not None:
        members.append(("entries", str(max(-_MOST_COUNT, min(_MOST_COUNT, int(entry.entries))))))
    if entry.digest:
        members.append(("sha256", _text(entry.digest, "sha256")))
    if repeated:
        members.append(("repeated", str(repeated)))
    line = "{" + ", ".join(f'"{name}": {text}' for name, text in members) + "}\n"
    assert len(line) <= MOST_LINE_BYTES, f"got {len(line)} bytes in an audit line"
    return line.encode("ascii")


def id_marker(identifier: str) -> bytes:
    """Return what stands in the line with this id and in no other.

    Texts cannot hold it (a quote in them is escaped), and an `id` within `old` or `new` is
    never one of ours, which are random.
    """
    return b'"id": "' + identifier.encode("ascii") + b'"'


def _encode(value: Any) -> str:
    # By default json escapes whatever is not printable ASCII, DEL too.
    return json.dumps(value, allow_nan=False)


def _text(value: object, name: str) -> str:
    return _cut(value if isinstance(value, str) else str(value), _MOST_BYTES[name])


def _cut(text: str, most_bytes: int) -> str:
    """Return `text` encoded in at most `most_bytes`; what is left out is counted in it."""
    if len(text) <= most_bytes and len(encoded := _encode(text)) <= most_bytes:
        return encoded
    room = most_bytes - 2 - 40  # the quotes, and the words below
    kept: list[str] = []
    for character in text[:room]:
        room -= len(_encode(character)) - 2
        if room < 0:
            break
        kept.append(character)
    return _encode("".join(kept) + f"...[{len(text) - len(kept)} more characters]")


def _value(value: object) -> str:
    """Return a value as JSON; of one that is too long its beginning, length and digest."""
    try:
        encoded = _encode(to_jsonable(value))
    except (TypeError, ValueError, RecursionError):
        # Not JSON: NaN, a loop, an object. The line must be written all the same.
        encoded = _encode(_safe_repr(value))
    if len(encoded) <= _MOST_VALUE_BYTES:
        return encoded
    digest = hashlib.sha256(encoded.encode("ascii")).hexdigest()
    head = _cut(encoded[:_MOST_VALUE_BYTES], _MOST_VALUE_BYTES - 200)
    return f'{{"cut_from_bytes": {len(encoded)}, "sha256": "{digest}", "begins": {head}}}'


def _safe_repr(value: object) -> str:
    try:
        return repr(value)
    except Exception:
        return f"<{type(value).__name__}>"
