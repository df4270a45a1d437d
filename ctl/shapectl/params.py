# SPDX-License-Identifier: Apache-2.0
"""Words on the command line into values, each with its own clear refusal.

Each function is the `type` of options and arguments.
"""

from __future__ import annotations

import ipaddress
import re
import time
from dataclasses import dataclass

from shapeagent.model.errors import InputError

_DSCP_NAMES = {
    "be": 0,
    "le": 1,
    "va": 44,
    "ef": 46,
    **{f"cs{n}": 8 * n for n in range(8)},
    **{f"af{c}{d}": 8 * c + 2 * d for c in range(1, 5) for d in range(1, 4)},
}

_PROTOCOLS = ("tcp", "udp", "icmp", "icmpv6", "sctp")


def rate(text: str) -> int:
    """Return bits per second, by the strict grammar of model/units.py."""
    from shapeagent.model.units import parse_rate

    return parse_rate(text)


def duration(text: str) -> float:
    """Return seconds; the text carries a unit (`60s`, `5m`)."""
    from shapeagent.model.units import parse_duration

    return parse_duration(text)


def mark(text: str) -> int:
    """Return a 32-bit number, decimal or 0x… . Raises: InputError mark-range."""
    return _mark_number(text, lowest=0)


def mark_mask(text: str) -> int:
    """Return a mask with at least one bit, decimal or 0x… . Raises: InputError mark-range."""
    return _mark_number(text, lowest=1)


def _mark_number(text: str, *, lowest: int) -> int:
    number = _whole_number(text)
    if number is None or not lowest <= number <= 0xFFFFFFFF:
        raise InputError(
            "mark-range",
            f"{text!r} is not a number from {lowest} to 0xffffffff.",
            hint="write it as in 0x00ff0000",
        )
    return number


def dscp(text: str) -> int:
    """Return a DSCP, from 0..63 or a name (ef, cs1, af41). Raises: InputError dscp-range."""
    named = _DSCP_NAMES.get(text.lower())
    number = _whole_number(text) if named is None else named
    if number is None or not 0 <= number <= 63:
        raise InputError(
            "dscp-range",
            f"{text!r} is no DSCP: a number from 0 to 63, or a name such as ef, cs1, af41.",
            hint="the DSCP is the upper six bits of the TOS byte: TOS 0xb8 is DSCP 46 (ef).",
        )
    return number


def segment_limit(text: str) -> str:
    """Return `auto`, `off` or a number of bytes as text. Raises: InputError segment-limit."""
    if text in {"auto", "off"}:
        return text
    from shapeagent.model.schema import MAX_SEGMENT_BYTES, MIN_SEGMENT_BYTES
    from shapeagent.model.units import parse_size

    size_bytes = parse_size(text)
    if not MIN_SEGMENT_BYTES <= size_bytes <= MAX_SEGMENT_BYTES:
        raise InputError(
            "segment-limit",
            f"{text} is not between {MIN_SEGMENT_BYTES} and {MAX_SEGMENT_BYTES} bytes.",
            hint="--segment-limit off leaves the device as it is.",
        )
    return str(size_bytes)


def protocol(text: str) -> str:
    """Return an IP protocol, by name or number. Raises: InputError protocol."""
    word = text.lower()
    number = int(word) if re.fullmatch(r"[0-9]{1,3}", word) else 256
    if word not in _PROTOCOLS and number > 255:
        raise InputError(
            "protocol",
            f"{text!r} is no IP protocol: {', '.join(_PROTOCOLS)}, or a number to 255.",
            hint="--protocol udp",
        )
    return word


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One end of a flow: an address in canonical text, and its port if given."""

    address: str
    port: int | None
    version: int


def _whole_number(text: str) -> int | None:
    if re.fullmatch(r"[0-9]{1,10}|0[xX][0-9a-fA-F]{1,8}", text) is None:
        return None
    return int(text, 16) if text[:2].lower() == "0x" else int(text)


def endpoint(text: str) -> Endpoint:
    """Return the address and port that `text` names.

    An IPv6 address with a port stands in brackets; without them every colon
    belongs to the address.

    Raises:
        InputError: endpoint.
    """
    address_text, port_text = text, None
    bracketed = re.fullmatch(r"\[([^\[\]]*)\](?::(.*))?", text)
    if bracketed is not None:
        address_text, port_text = bracketed.groups()
    elif text.count(":") == 1:
        address_text, port_text = text.split(":")
    try:
        address = ipaddress.ip_address(address_text)
    except ValueError:
        raise _endpoint_error(text, f"{address_text!r} is no IP address") from None
    if bracketed is not None and address.version == 4:
        raise _endpoint_error(text, "brackets are for IPv6")
    if isinstance(address, ipaddress.IPv6Address):
        if address.scope_id is not None:
            raise _endpoint_error(text, "leave the zone out: the packet does not carry it")
        address = address.ipv4_mapped or address
    port = None
    if port_text is not None:
        port = int(port_text) if re.fullmatch(r"[0-9]{1,5}", port_text) else -1
        if not 0 <= port <= 65535:
            raise _endpoint_error(text, f"{port_text!r} is no port (0 to 65535)")
    return Endpoint(str(address), port, address.version)


def _endpoint_error(text: str, why: str) -> InputError:
    return InputError(
        "endpoint",
        f"{text!r} is not an address with an optional port: {why}.",
        hint="192.0.2.1:2379, [2001:db8::1]:2379 or just the address; names are not resolved.",
    )


def parse_moment(text: str) -> float:
    """Return the time that `text` names, in seconds since 1970 (UTC).

    `text` is RFC 3339 with a zone (`2026-12-01T00:00:00Z`) or `@SECONDS`.

    Raises:
        InputError: expiry.
    """
    from datetime import datetime

    if re.fullmatch(r"@[0-9]{1,12}", text):
        return float(text[1:])
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        moment = None
    if moment is None or moment.tzinfo is None:
        why = "names no time zone" if moment is not None else "is no date and time"
        raise InputError(
            "expiry",
            f"{text!r} {why}.",
            hint="--expires 2026-12-01T00:00:00Z, or --for 12h",
        )
    return moment.timestamp()


def decide_expiry(expires: str | None, for_s: float | None) -> float | None:
    """Return when an entry ends, in seconds since 1970, from `--expires` or `--for`.

    Raises:
        InputError: usage (both given), expiry (not in the future).
    """
    if expires is not None and for_s is not None:
        raise InputError(
            "usage", "--expires and --for exclude each other.", hint="give one of them"
        )
    now_unix_s = time.time()
    if for_s is not None:
        return now_unix_s + for_s
    if expires is None:
        return None
    moment_unix_s = parse_moment(expires)
    if moment_unix_s <= now_unix_s:
        raise InputError(
            "expiry",
            f"--expires {expires} is in the past.",
            hint="leave it out for an entry that stays",
        )
    return moment_unix_s
