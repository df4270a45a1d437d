# SPDX-License-Identifier: Apache-2.0
"""The one converter between what a person writes and the numbers we compute with.

Rates are decimal numbers with a unit in lower case: `bit`, `kbit`, `mbit`,
`gbit`, `tbit` (powers of 1,000, per second), or a percentage of a known link
rate. Everything that two tools read differently is refused with both readings:
tc takes `1Gbps` as bytes (8 Gbit/s), other tools take it as bits.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from decimal import ROUND_FLOOR, Decimal

from shapeagent.model.errors import InputError

# HTB cannot do rate 0, and below this one full frame takes 0.19 s (case C51).
MIN_RATE_BITS_PER_S = 64_000
# The fastest link the burst and quantum arithmetic is tested for (case C53).
MAX_RATE_BITS_PER_S = 400_000_000_000

_MAX_DURATION_S = 400 * 86_400
_MAX_SIZE_BYTES = 1 << 40

_PREFIX = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_BINARY_PREFIX = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
_NUMBER = r"([0-9]{1,15}(?:\.[0-9]{1,12})?)"
_RATE = re.compile(_NUMBER + r"([kmgt]?)bit", re.ASCII)
_PERCENT = re.compile(_NUMBER + r"%", re.ASCII)
_LOOSE_RATE = re.compile(
    r"([0-9]{1,15}(?:\.[0-9]{1,12})?)\s*([kmgt]?)(i?)(bits?|bytes?|b|)(/s|/sec|ps|)",
    re.ASCII | re.IGNORECASE,
)
_ZERO = re.compile(r"[+-]?0+(?:\.0*)?\s*[A-Za-z/%]*", re.ASCII)
_DURATION = re.compile(_NUMBER + r"(us|ms|s|m|h|d)", re.ASCII)
_DURATION_S = {
    "us": Decimal("0.000001"),
    "ms": Decimal("0.001"),
    "s": Decimal(1),
    "m": Decimal(60),
    "h": Decimal(3_600),
    "d": Decimal(86_400),
}
_SIZE = re.compile(_NUMBER + r"(b|B|KiB|MiB|GiB|)", re.ASCII)
_SIZE_BYTES = {"": 1, "b": 1, "B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
_LOOSE_SIZE = re.compile(_NUMBER + r"\s*([kmg])i?b?", re.ASCII | re.IGNORECASE)
_RATE_HINT = "write it as 800mbit, 1.5gbit, 64kbit or 20% (bits per second, lower case, no space)"


@dataclass(frozen=True, slots=True)
class Rate:
    """A rate as written: a percentage of the link, or bits per second. One is set."""

    text: str
    percent: Decimal | None = None
    bits_per_s: int | None = None

    def resolve(self, link_rate_bits_per_s: int | None) -> int:
        """Return bits per second.

        Args: link_rate_bits_per_s: what 100% means; None where no link is known.
        Raises: InputError percent-without-link, rate-too-low, rate-too-high.
        """
        if self.bits_per_s is not None:
            return self.bits_per_s
        if link_rate_bits_per_s is None:
            raise InputError(
                "percent-without-link",
                f"{self.text} is a share of the link, and no link rate is known here",
                hint="give the rate in bits per second (800mbit), or the link with --link-rate",
            )
        assert self.percent is not None
        return _in_range(self.text, self.percent * link_rate_bits_per_s / 100)


def parse_rate(text: str, *, link_rate_bits_per_s: int | None = None) -> int:
    """Return the rate in bits per second, between 64 kbit/s and 400 Gbit/s.

    Args: link_rate_bits_per_s: what `100%` means; without it a percentage is refused.
    Raises: InputError bad-rate, ambiguous-rate, rate-too-low, rate-too-high,
        percent-out-of-range, percent-without-link.
    Source: cases C49, C51, C53.
    """
    return parse_rate_text(text).resolve(link_rate_bits_per_s)


def parse_rate_text(text: str) -> Rate:
    """Return the rate as written, a percentage still unresolved.

    Raises: InputError as `parse_rate`, without percent-without-link.
    """
    found = _RATE.fullmatch(text)
    if found:
        bits = _in_range(text, Decimal(found[1]) * _PREFIX[found[2]])
        return Rate(text, bits_per_s=bits)
    found = _PERCENT.fullmatch(text)
    if found:
        percent = Decimal(found[1])
        if not 0 < percent <= 100:
            raise InputError(
                "percent-out-of-range",
                f"{text} is not above 0% and at most 100%",
                hint="a rate of 0 never means unlimited: leave the key out, or write 100%",
            )
        return Rate(text, percent=percent)
    raise _refused_rate(text)


def format_rate(bits_per_s: int) -> str:
    """Return the canonical text of a rate; `parse_rate` gives exactly the same number back."""
    for unit, factor in (("gbit", 10**9), ("mbit", 10**6), ("kbit", 10**3)):
        if bits_per_s >= factor:
            return f"{_plain(Decimal(bits_per_s) / factor)}{unit}"
    return f"{bits_per_s}bit"


def parse_duration(text: str) -> float:
    """Return seconds, above 0 and at most 400 days. Units: us, ms, s, m (minutes), h, d.

    Raises: InputError bad-duration.
    """
    found = _DURATION.fullmatch(text)
    if not found:
        raise InputError(
            "bad-duration",
            f"{_shown(text)} is not a duration with a unit",
            hint="write it as 60s, 200ms, 5m (minutes), 1h or 2d",
        )
    seconds = Decimal(found[1]) * _DURATION_S[found[2]]
    if not 0 < seconds <= _MAX_DURATION_S:
        raise InputError("bad-duration", f"{text} is not above 0 and at most 400 days")
    return float(seconds)


def format_duration(seconds: float) -> str:
    """Return a duration in the largest unit that shows it whole, else in s, ms or us."""
    exact = Decimal(repr(float(seconds)))
    for unit in ("d", "h", "m"):
        size = _DURATION_S[unit]
        if exact >= size and exact % size == 0:
            return f"{_plain(exact / size)}{unit}"
    for unit in ("s", "ms"):
        if exact >= _DURATION_S[unit]:
            return f"{_plain(exact / _DURATION_S[unit])}{unit}"
    return "0s" if exact == 0 else f"{_plain(exact / _DURATION_S['us'])}us"


def parse_size(text: str) -> int:
    """Return bytes. Units: none, b or B (bytes), KiB, MiB, GiB.

    Raises: InputError ambiguous-size (64k is 64,000 or 65,536), bad-size.
    """
    found = _SIZE.fullmatch(text)
    if found:
        size = Decimal(found[1]) * _SIZE_BYTES[found[2]]
        if size != size.to_integral_value() or size > _MAX_SIZE_BYTES:
            raise InputError("bad-size", f"{text} is not a whole number of bytes up to 1024GiB")
        return int(size)
    found = _LOOSE_SIZE.fullmatch(text)
    if found:
        number, prefix = Decimal(found[1]), found[2].lower()
        decimal = _plain(number * _PREFIX[prefix])
        binary = _plain(number * _BINARY_PREFIX[prefix])
        raise InputError(
            "ambiguous-size",
            f"{text} can mean {decimal} bytes or {binary} bytes",
            hint=f"write {decimal}, or {_plain(number)}{prefix.upper()}iB",
        )
    raise InputError(
        "bad-size",
        f"{_shown(text)} is not a size in bytes",
        hint="write it as 3028, 1500b or 64KiB",
    )


def format_size(size_bytes: int) -> str:
    """Return the canonical text of a size; `parse_size` gives the same number back."""
    for unit in ("GiB", "MiB", "KiB"):
        if size_bytes and size_bytes % _SIZE_BYTES[unit] == 0:
            return f"{size_bytes // _SIZE_BYTES[unit]}{unit}"
    return str(size_bytes)


def _in_range(text: str, exact_bits_per_s: Decimal) -> int:
    bits = int(exact_bits_per_s.to_integral_value(rounding=ROUND_FLOOR))
    if bits < MIN_RATE_BITS_PER_S:
        raise InputError(
            "rate-too-low",
            f"{text} is {_plain(exact_bits_per_s)} bit/s, below the lowest rate"
            f" {format_rate(MIN_RATE_BITS_PER_S)}",
            hint="0 never means unlimited: for no ceiling of its own write 100%",
        )
    if bits > MAX_RATE_BITS_PER_S:
        raise InputError(
            "rate-too-high",
            f"{text} is above the highest rate {format_rate(MAX_RATE_BITS_PER_S)}",
            hint=_RATE_HINT,
        )
    return bits


def _refused_rate(text: str) -> InputError:
    """Return the error for text outside the grammar, with its readings where it has some."""
    if _ZERO.fullmatch(text.strip()):
        return InputError(
            "rate-too-low",
            f"{_shown(text)} is zero, below the lowest rate {format_rate(MIN_RATE_BITS_PER_S)}",
            hint="0 never means unlimited: for no ceiling of its own write 100%",
        )
    found = _LOOSE_RATE.fullmatch(text.strip())
    if not found:
        return InputError("bad-rate", f"{_shown(text)} is not a rate", hint=_RATE_HINT)
    number, prefix, binary = found[1], found[2], found[3]
    bits = Decimal(number) * (_BINARY_PREFIX if binary else _PREFIX)[prefix.lower()]
    if _RATE.fullmatch(text.lower()):  # only the case is unusual: 1Gbit
        other, what = Decimal(number) * _BINARY_PREFIX[prefix.lower()], "with a binary prefix"
    else:
        other, what = bits * 8, "read as bytes"
    first, second = _reading(bits), _reading(other)
    return InputError(
        "ambiguous-rate",
        f"{_shown(text)} can mean {first} (read as bits) or {second} ({what})",
        hint=f"write {first} or {second}: lower case, no space",
    )


def _reading(bits: Decimal) -> str:
    return format_rate(int(bits.to_integral_value(rounding=ROUND_FLOOR)))


def _plain(number: Decimal) -> str:
    """Return a decimal without exponent and trailing zeros."""
    text = f"{number:f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def _shown(text: str) -> str:
    """Return text fit for one line of an error."""
    shown = text if len(text) <= 40 else text[:37] + "..."
    return f'"{shown}"' if shown.isprintable() else repr(shown)
