# SPDX-License-Identifier: Apache-2.0
"""Whitelist entries as text: one address, one line, a whole file, and back.

A line of a file is

    ADDRESS[/LENGTH] [class=NAME] [match=source|destination|either]
                     [owner=WHO] [reason="WHY"] [expires=2026-12-01T00:00:00Z | +2h]

or `SOURCE>DESTINATION` (also `SOURCE,DESTINATION`) for a pair of exact
addresses. `#` and `;` start a comment. Quoted values are JSON strings.
Everything is stored in canonical form, so that list and delete agree.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from socket import AF_INET, AF_INET6, inet_ntop, inet_pton

from shapeagent.model.errors import InputError
from shapeagent.model.types import Match, Policy, Rule, WhitelistEntry
from shapeagent.model.units import parse_duration

MAX_NAMED_BAD_LINES = 20
MAX_NOTICES = 100

_MAPPED = bytes(10) + b"\xff\xff"  # ::ffff:0:0/96, RFC 4291 section 2.5.5.2
_TOKEN = re.compile(r'[ \t]*(?:([a-z]+)=("(?:[^"\\]|\\.)*"|[^\s"#;]*)|([^\s"#;]+))', re.ASCII)
_ADDRESS = re.compile(r"[^\s\"#;]+")
_END = re.compile(r"[ \t]*(?:[#;].*)?", re.DOTALL)
_PLAIN_VALUE = re.compile(r"[^\s\"#;]+")
_KEYS = ("class", "match", "owner", "reason", "expires")

Prefix = tuple[bytes, int]  # packed address in network order, prefix length
# class, match, whether the line gave the match, owner, reason, expiry
_Options = tuple[str, Match, bool, str, str, float | None]
_MAX_KNOWN_OPTIONS = 1_000
_Key = tuple[Prefix | None, Prefix | None, bool]
_MATCHES = {match.value: match for match in Match}
_LENGTHS = {str(length): length for length in range(129)}
_MASKS = {
    bits: [((1 << length) - 1) << (bits - length) for length in range(bits + 1)]
    for bits in (32, 128)
}


@dataclass(frozen=True, slots=True)
class ParsedList:
    """What a whitelist file holds."""

    entries: tuple[WhitelistEntry, ...]
    notices: tuple[str, ...]  # "line 3: 192.0.2.67/24 has host bits: stored as 192.0.2.0/24"
    bad_lines: int  # left out; always 0 unless lenient
    duplicates: int  # lines that repeat an entry
    expired: int  # lines left out because their time is over


@dataclass(frozen=True, slots=True)
class LineDefaults:
    """What a line that does not say so means.

    classes: names that may be used, None = any; now_unix_s: for `+2h` and to leave out what has
    expired, None = unknown.
    """

    traffic_class: str | None = None
    match: Match = Match.DESTINATION
    owner: str = ""
    reason: str = ""
    expires_unix_s: float | None = None
    classes: Container[str] | None = None
    now_unix_s: float | None = None


class _BadLineError(Exception):
    """A line that cannot be used; becomes a named error."""

    def __init__(self, message: str, reference: str = "bad-entry", hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.reference = reference
        self.hint = hint


def canonical_prefix(text: str) -> tuple[Prefix, str | None]:
    """Return an address or prefix in canonical form, and a notice where that differs in meaning.

    Host bits are cleared; IPv4-mapped IPv6 becomes IPv4 (cases C61, C63). A bare address is a
    prefix of 32 or 128 bits.

    Raises: InputError bad-address.
    """
    try:
        return _canonical(text)
    except _BadLineError as error:
        raise InputError(error.reference, error.message, hint=error.hint) from None


def format_prefix(prefix: Prefix) -> str:
    """Return the text of a prefix; the length is left out where it is a single host."""
    packed, length = prefix
    address = inet_ntop(AF_INET if len(packed) == 4 else AF_INET6, packed)
    return address if length == 8 * len(packed) else f"{address}/{length}"


def parse_entry(
    text: str, defaults: LineDefaults | None = None
) -> tuple[WhitelistEntry, tuple[str, ...]]:
    """Return the entry of one line, and notices about how it was stored.

    Raises: InputError bad-address, pair-needs-hosts, bad-entry, entry-expired.
    """
    found = LineDefaults() if defaults is None else defaults
    notices: list[str] = []
    try:
        entry = _parse_line(text.strip(), found, notices)
    except _BadLineError as error:
        raise InputError(error.reference, error.message, hint=error.hint) from None
    if entry is None:
        raise InputError("bad-entry", "an empty line or comment is not an entry")
    if _is_over(entry, found):
        raise InputError("entry-expired", f"{text.strip()}: its time is over already")
    return entry, tuple(notices)


def parse_list(
    data: str | bytes, defaults: LineDefaults | None = None, *, lenient: bool = False
) -> ParsedList:
    """Return every entry of a whitelist file.

    Duplicates count once. Strict by default: one bad line refuses the whole file, and each of the
    first 20 is named. `lenient` leaves bad lines out and counts them. A file that is not empty but
    yields nothing is an error either way (case C71).

    Raises: InputError whitelist-invalid.
    """
    found = LineDefaults() if defaults is None else defaults
    text = _decode(data)
    reader = _Reader(found)
    reader.read(text)
    if reader.bad_count and not lenient:
        raise InputError(
            "whitelist-invalid",
            f"{_lines(reader.bad_count)} cannot be used, nothing was changed",
            hint="correct them, or --lenient leaves them out",
            details=_first(reader.bad, MAX_NAMED_BAD_LINES, reader.bad_count),
        )
    if not reader.entries and text.strip():
        raise InputError(
            "whitelist-invalid",
            f"the list is not empty but holds no entry in force ({_lines(reader.bad_count)} wrong,"
            f" {reader.expired} expired)",
            hint="write one address or prefix on each line; an empty file empties the list",
            details=_first(reader.bad, MAX_NAMED_BAD_LINES, reader.bad_count),
        )
    return ParsedList(
        entries=tuple(reader.entries.values()),
        notices=tuple(_first(reader.notices, MAX_NOTICES, len(reader.notices))),
        bad_lines=reader.bad_count,
        duplicates=reader.duplicates,
        expired=reader.expired,
    )


def format_entry(entry: WhitelistEntry) -> str:
    """Return the line of an entry; `parse_entry` gives an equal entry back."""
    if entry.match is Match.PAIR:
        assert entry.source is not None
        assert entry.destination is not None
        words = [f"{format_prefix(entry.source)}>{format_prefix(entry.destination)}"]
    else:
        prefix = entry.source if entry.match is Match.SOURCE else entry.destination
        assert prefix is not None
        words = [format_prefix(prefix)]
    words.append(f"class={entry.traffic_class}")
    if entry.match is not Match.PAIR:
        words.append(f"match={entry.match.value}")
    if entry.owner:
        words.append(f"owner={_quoted(entry.owner)}")
    if entry.reason:
        words.append(f"reason={_quoted(entry.reason)}")
    if entry.expires_unix_s is not None:
        words.append(f"expires={_format_time(entry.expires_unix_s)}")
    return " ".join(words)


def export_list(entries: Iterable[WhitelistEntry]) -> str:
    """Return a whitelist file that `parse_list` reads back as equal entries in the same order."""
    return "".join(f"{format_entry(entry)}\n" for entry in entries)


def is_everything(entry: WhitelistEntry) -> bool:
    """Return whether the entry takes in every address of a family (0.0.0.0/0 or ::/0)."""
    return any(
        prefix is not None and prefix[1] == 0 for prefix in (entry.source, entry.destination)
    )


def rules_deciding_first(policy: Policy, traffic_class: str) -> tuple[Rule, ...]:
    """Return the policy's rules that give another class and are asked before the whitelist."""
    return tuple(
        rule for rule in policy.rules if not rule.protected and rule.traffic_class != traffic_class
    )


def warn_deciding_first(policy: Policy, entries: Iterable[WhitelistEntry]) -> tuple[str, ...]:
    """Return one warning for each class of the entries that some rule of another class precedes."""
    warnings = []
    for name in sorted({entry.traffic_class for entry in entries}):
        rules = rules_deciding_first(policy, name)
        if rules:
            shown = ", ".join(rule.name for rule in rules[:6])
            more = f" and {len(rules) - 6} more" if len(rules) > 6 else ""
            warnings.append(
                f"rules decide before the whitelist: packets that match {shown}{more}"
                f" do not become {name}"
            )
    return tuple(warnings)


@dataclass(slots=True)
class _Reader:
    """Collects the entries of a file and what is wrong with it."""

    defaults: LineDefaults
    # Under the default match the key is the prefix alone: that is most lines.
    entries: dict[Prefix | _Key, WhitelistEntry] = field(default_factory=dict)
    known_options: dict[str, _Options] = field(default_factory=dict)
    notices: list[str] = field(default_factory=list)
    bad: list[str] = field(default_factory=list)
    bad_count: int = 0
    duplicates: int = 0
    expired: int = 0

    def read(self, text: str) -> None:
        plain = self._plain_is_usable()
        match, name = self.defaults.match, self.defaults.traffic_class or ""
        owner, reason = self.defaults.owner, self.defaults.reason
        expires = self.defaults.expires_unix_s
        is_source = match is Match.SOURCE
        entries = self.entries
        for number, raw in enumerate(text.split("\n"), 1):
            line = raw.strip()
            prefix = _plain_prefix(line) if plain else None
            if prefix is None:
                if line:
                    self._read_line(line, number)
                continue
            entry = WhitelistEntry(
                match,
                name,
                prefix if is_source else None,
                None if is_source else prefix,
                owner,
                reason,
                expires,
            )
            if entries.setdefault(prefix, entry) is not entry:
                self._repeat(entries[prefix], entry, number)

    def _plain_is_usable(self) -> bool:
        """Return whether a line that is only an address needs no further look."""
        found = self.defaults
        return (
            found.match is not Match.PAIR
            and found.traffic_class is not None
            and (found.classes is None or found.traffic_class in found.classes)
            and not (
                found.expires_unix_s is not None
                and found.now_unix_s is not None
                and found.expires_unix_s <= found.now_unix_s
            )
        )

    def _read_line(self, line: str, number: int) -> None:
        notices: list[str] = []
        entry: WhitelistEntry | None
        try:
            entry = _parse_line(line, self.defaults, notices, self.known_options)
        except _BadLineError as error:
            self._note_bad(number, error.message)
            return
        if entry is None:
            return
        if notices:
            self.notices += [f"line {number}: {notice}" for notice in notices]
        if entry.expires_unix_s is not None and _is_over(entry, self.defaults):
            self.expired += 1
            self.notices.append(f"line {number}: expired, left out")
            return
        key = self._key(entry)
        if self.entries.setdefault(key, entry) is not entry:
            self._repeat(self.entries[key], entry, number)

    def _key(self, entry: WhitelistEntry) -> Prefix | _Key:
        if entry.match is self.defaults.match and entry.match is not Match.PAIR:
            prefix = entry.source or entry.destination
            if prefix is not None:
                return prefix
        return entry.source, entry.destination, entry.match is Match.EITHER

    def _repeat(self, first: WhitelistEntry, second: WhitelistEntry, number: int) -> None:
        if first.traffic_class != second.traffic_class:
            self._note_bad(
                number,
                f"{format_entry(second)}: an earlier line gives class={first.traffic_class}",
            )
        elif first.expires_unix_s != second.expires_unix_s:
            self._note_bad(number, f"{format_entry(second)}: an earlier line gives another expiry")
        else:
            self.duplicates += 1

    def _note_bad(self, number: int, message: str) -> None:
        self.bad_count += 1
        if len(self.bad) < MAX_NAMED_BAD_LINES:
            self.bad.append(f"line {number}: {message}")


def _plain_prefix(line: str) -> Prefix | None:
    """Return a line's prefix where it is only that and canonical already, else None."""
    address, slash, length_text = line.partition("/")
    try:
        packed = inet_pton(AF_INET6 if ":" in address else AF_INET, address)
    except (OSError, ValueError):
        return None
    bits = 8 * len(packed)
    if packed.startswith(_MAPPED):
        return None
    if not slash:
        return packed, bits
    length = _LENGTHS.get(length_text, 999)
    if length > bits or int.from_bytes(packed) & ~_MASKS[bits][length]:
        return None
    return packed, length


def _decode(data: str | bytes) -> str:
    """Return text with "\\n" line ends and no BOM; bytes that are not UTF-8 stay recognisable."""
    if isinstance(data, bytes):
        if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
            raise InputError(
                "whitelist-invalid",
                "the list is UTF-16 text",
                hint="save it as UTF-8, or: iconv -f UTF-16 -t UTF-8 FILE",
            )
        data = data.decode("utf-8", "surrogateescape")
    return data.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n")


def _parse_line(
    line: str,
    defaults: LineDefaults,
    notices: list[str],
    known: dict[str, _Options] | None = None,
) -> WhitelistEntry | None:
    """Return the entry of a stripped line, None for a comment.

    Args: known: options of lines before this one by their text, since most lines have the same.
    """
    if not line or line[0] in "#;":
        return None
    found = _ADDRESS.match(line)
    if found is None:
        raise _BadLineError(f"{_shown(line)} does not begin with an address")
    address, tail = found[0], line[found.end() :]
    options = known.get(tail) if known is not None else None
    if options is None:
        options = _parse_options(tail, defaults)
        if known is not None:
            if len(known) >= _MAX_KNOWN_OPTIONS:
                known.clear()
            known[tail] = options
    traffic_class, match, is_given, owner, reason, expires = options
    source, destination, match = _ends(address, match, is_given, notices)
    if not traffic_class:
        raise _BadLineError(
            f"{_shown(address)} has no class", hint="add class=NAME, or give --class NAME"
        )
    return WhitelistEntry(match, traffic_class, source, destination, owner, reason, expires)


def _parse_options(tail: str, defaults: LineDefaults) -> _Options:
    """Return what stands after the address, completed by the defaults."""
    values = _split(tail)
    traffic_class = values.get("class", defaults.traffic_class) or ""
    if traffic_class and defaults.classes is not None and traffic_class not in defaults.classes:
        raise _BadLineError(f"{_shown(traffic_class)} is not a class of this policy")
    expires = defaults.expires_unix_s
    if "expires" in values:
        expires = _parse_time(values["expires"], defaults.now_unix_s)
    return (
        traffic_class,
        _match(values.get("match"), defaults.match),
        "match" in values,
        values.get("owner", defaults.owner),
        values.get("reason", defaults.reason),
        expires,
    )


def _split(tail: str) -> dict[str, str]:
    """Return the `key=value` words up to a comment; quoted values may hold blanks, # and ;."""
    values: dict[str, str] = {}
    at = 0
    while _END.fullmatch(tail, at) is None:
        token = _TOKEN.match(tail, at)
        after = tail[token.end() : token.end() + 1] if token else ""
        if token is None or (after and after not in " \t#;"):
            raise _BadLineError(f"{_shown(tail[at:].strip())} cannot be read: is a quote missing?")
        key, value, stray = token.groups()
        _put(values, key or "", _unquoted(value or ""), stray)
        at = token.end()
    return values


def _unquoted(value: str) -> str:
    if not value.startswith('"'):
        return value
    try:
        text = json.loads(value)
    except ValueError:
        raise _BadLineError(f"{_shown(value)} is not a quoted text") from None
    return str(text)


def _put(values: dict[str, str], key: str, value: str, stray: str | None) -> None:
    if stray is not None:
        raise _BadLineError(f"{_shown(stray)} is not expected after the address")
    if key not in _KEYS:
        raise _BadLineError(f"{_shown(key)} is not one of {', '.join(_KEYS)}")
    if key in values:
        raise _BadLineError(f"{key}= is given twice")
    if not value.isascii() and any("\udc80" <= character <= "\udcff" for character in value):
        raise _BadLineError(f"{key}= is not UTF-8 text")
    values[key] = value


def _match(text: str | None, default: Match) -> Match:
    if text is None:
        return default
    match = _MATCHES.get(text)
    if match is None:
        raise _BadLineError(f"{_shown(text)} is not one of {', '.join(_MATCHES)}")
    return match


def _ends(
    address: str, match: Match, is_given: bool, notices: list[str]
) -> tuple[Prefix | None, Prefix | None, Match]:
    """Return source, destination and match of an entry's address part."""
    first, separator, second = address.partition(">")
    if not separator:
        first, separator, second = address.partition(",")
    if not separator:
        if match is Match.PAIR:
            raise _BadLineError(
                f"{_shown(address)} is one address, a pair is SOURCE>DESTINATION",
                reference="pair-needs-hosts",
            )
        prefix = _noted(address, notices)
        return (prefix, None, match) if match is Match.SOURCE else (None, prefix, match)
    if is_given and match is not Match.PAIR:
        raise _BadLineError(f"{_shown(address)} is a pair, and match={match.value} is not")
    source, destination = _noted(first, notices), _noted(second, notices)
    if len(source[0]) != len(destination[0]):
        raise _BadLineError(f"{_shown(address)} joins an IPv4 and an IPv6 address")
    for packed, length in (source, destination):
        if length != 8 * len(packed):
            raise _BadLineError(
                f"{_shown(address)}: a pair joins two exact addresses, not prefixes",
                reference="pair-needs-hosts",
                hint="write one entry a host pair, or use match=source or match=destination",
            )
    return source, destination, Match.PAIR


def _noted(text: str, notices: list[str]) -> Prefix:
    prefix, notice = _canonical(text)
    if notice:
        notices.append(notice)
    return prefix


def _canonical(text: str) -> tuple[Prefix, str | None]:
    address, slash, length_text = text.partition("/")
    is_v6 = ":" in address
    try:
        packed = inet_pton(AF_INET6 if is_v6 else AF_INET, address)
    except (OSError, ValueError):
        raise _bad_address(text, address) from None
    bits = 8 * len(packed)
    length = bits
    if slash:
        length = _LENGTHS.get(length_text, 999)
        if length > bits:
            raise _BadLineError(
                f"{_shown(text)}: the prefix length is not a number from 0 to {bits}",
                reference="bad-address",
            )
    was_mapped = is_v6 and packed.startswith(_MAPPED)
    if was_mapped:
        if length < 96:
            raise _BadLineError(
                f"{_shown(text)} holds IPv4-mapped addresses and others beside them",
                reference="bad-address",
                hint="write the IPv4 prefix itself, such as 192.0.2.0/24",
            )
        packed, length, bits = packed[12:], length - 96, 32
    network = packed
    if length < bits:
        network = (int.from_bytes(packed) & _MASKS[bits][length]).to_bytes(bits // 8)
    prefix = (network, length)
    notice = None
    if network != packed:
        notice = f"{text} has host bits: stored as {format_prefix(prefix)}"
    elif was_mapped:
        notice = f"{text} is IPv4: stored as {format_prefix(prefix)}"
    return prefix, notice


def _bad_address(text: str, address: str) -> _BadLineError:
    hint = None
    if "%" in address:
        hint = "leave out the zone (%eth0): entries belong to the interface they are added to"
    elif re.fullmatch(r"[0-9.]+", address) and re.search(r"(?:^|\.)0[0-9]", address):
        hint = "leave out leading zeros: some tools read them as octal"
    return _BadLineError(
        f"{_shown(text)} is not an IPv4 or IPv6 address or prefix", "bad-address", hint
    )


def _parse_time(text: str, now_unix_s: float | None) -> float | None:
    if text == "never":
        return None
    if text.startswith("+"):
        if now_unix_s is None:
            raise _BadLineError(f"expires={_shown(text)} needs the present time: give a date")
        try:
            return now_unix_s + parse_duration(text[1:])
        except InputError as error:
            raise _BadLineError(f"expires={_shown(text)}: {error.message}") from None
    if re.fullmatch(r"@[0-9]{1,11}(?:\.[0-9]{1,9})?", text, re.ASCII):
        return float(text[1:])
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        moment = None
    if moment is None or moment.tzinfo is None:
        raise _BadLineError(
            f"expires={_shown(text)} is not a time such as 2026-12-01T00:00:00Z or +2h"
        )
    return moment.timestamp()


def _format_time(unix_s: float) -> str:
    """Return a time that `_parse_time` reads back as exactly the same number."""
    if unix_s.is_integer() and 0 <= unix_s < 2.5e11:
        return datetime.fromtimestamp(unix_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return f"@{unix_s!r}"


def _is_over(entry: WhitelistEntry, defaults: LineDefaults) -> bool:
    return (
        entry.expires_unix_s is not None
        and defaults.now_unix_s is not None
        and entry.expires_unix_s <= defaults.now_unix_s
    )


def _quoted(text: str) -> str:
    return text if text.isascii() and _PLAIN_VALUE.fullmatch(text) else json.dumps(text)


def _shown(text: str) -> str:
    """Return text fit for one line of an error."""
    shown = text if len(text) <= 60 else text[:57] + "..."
    return shown if shown.isprintable() else ascii(shown)


def _lines(count: int) -> str:
    return f"{count} line" if count == 1 else f"{count} lines"


def _first(texts: Sequence[str], shown: int, total: int) -> list[str]:
    """Return the first texts, and a last line that tells how many more there are."""
    rest = total - min(shown, len(texts))
    return [*texts[:shown], *([f"... and {rest} more"] if rest else [])]
