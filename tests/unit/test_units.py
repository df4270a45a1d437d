# SPDX-License-Identifier: Apache-2.0
"""Rates, durations and sizes as people write them (cases C49, C51, C53, C60)."""

from __future__ import annotations

from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shapeagent.model.errors import InputError
from shapeagent.model.units import (
    MAX_RATE_BITS_PER_S,
    MIN_RATE_BITS_PER_S,
    format_duration,
    format_rate,
    format_size,
    parse_duration,
    parse_rate,
    parse_rate_text,
    parse_size,
)

RATES = st.integers(MIN_RATE_BITS_PER_S, MAX_RATE_BITS_PER_S)


def refused_rate(text: str) -> InputError:
    with pytest.raises(InputError) as caught:
        parse_rate(text)
    return caught.value


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("10gbit", 10_000_000_000),
        ("1.5gbit", 1_500_000_000),
        ("800mbit", 800_000_000),
        ("64kbit", 64_000),
        ("64000bit", 64_000),
        ("0.1tbit", 100_000_000_000),
        ("400gbit", MAX_RATE_BITS_PER_S),
    ],
)
def test_rate_in_the_grammar_is_exact(text: str, want: int) -> None:
    assert parse_rate(text) == want, f"{text}: got {parse_rate(text)}, want {want}"


@pytest.mark.parametrize(
    ("text", "first", "second"),
    [
        ("1Gbps", "1gbit", "8gbit"),
        ("100M", "100mbit", "800mbit"),
        ("100Mb", "100mbit", "800mbit"),
        ("600Kbps", "600kbit", "4.8mbit"),
        ("125MBps", "125mbit", "1gbit"),
        ("100mbit/s", "100mbit", "800mbit"),
        ("100 mbit", "100mbit", "800mbit"),
        ("1Gbit", "1gbit", "1.073741824gbit"),
        ("1GBIT", "1gbit", "1.073741824gbit"),
        ("1000000", "1mbit", "8mbit"),
        ("1gibit", "1.073741824gbit", "8.589934592gbit"),
        ("125mbyte", "125mbit", "1gbit"),
    ],
)
def test_ambiguous_rate_names_both_readings(text: str, first: str, second: str) -> None:
    """C49."""
    error = refused_rate(text)
    assert error.reference == "ambiguous-rate", f"{text}: got {error.reference}"
    words = error.message.split()
    assert first in words, f"{text}: {first} is not in {error.message!r}"
    assert second in words, f"{text}: {second} is not in {error.message!r}"


@pytest.mark.parametrize("text", ["1gbit", "1500kbit"])
def test_lower_case_bit_units_are_accepted(text: str) -> None:
    """C49."""
    assert parse_rate(text) > 0


@pytest.mark.parametrize(
    "text", ["0", "0mbit", "0%", "1bit", "7bit", "8bit", "1kbit", "8000bit", "-0"]
)
def test_zero_and_tiny_rates_are_refused(text: str) -> None:
    """C51: 0 never means unlimited."""
    error = refused_rate(text)
    assert error.reference in {"rate-too-low", "percent-out-of-range"}, error.reference
    assert "never means unlimited" in str(error.hint)


@pytest.mark.parametrize(
    "text",
    ["999999999gbit", "1e30", "inf", "nan", "1tbit", "9" * 40, "9" * 40 + "bit", "401gbit",
     "400.000000001gbit", "-5mbit", "", " ", "mbit", "1..5mbit", "1.mbit", ".5gbit", "1,5gbit",
     "٣mbit", "1e3mbit", "0x10mbit", "1gbit\n", "10gbit 5", "1_000mbit", "+1gbit"],
)  # fmt: skip
def test_rate_outside_the_range_or_grammar_is_refused(text: str) -> None:
    """C53."""
    assert refused_rate(text).reference in {"rate-too-high", "bad-rate", "ambiguous-rate"}


def test_percent_needs_a_link() -> None:
    assert refused_rate("20%").reference == "percent-without-link"
    got = parse_rate("20%", link_rate_bits_per_s=10_000_000_000)
    assert got == 2_000_000_000, f"got {got}, want 2 Gbit/s"
    assert parse_rate("0.5%", link_rate_bits_per_s=10_000_000_000) == 50_000_000
    with pytest.raises(InputError) as caught:
        parse_rate("101%", link_rate_bits_per_s=10_000_000_000)
    assert caught.value.reference == "percent-out-of-range"
    with pytest.raises(InputError) as caught:
        parse_rate("1%", link_rate_bits_per_s=1_000_000)
    assert caught.value.reference == "rate-too-low"


@given(RATES)
def test_rate_round_trips(bits_per_s: int) -> None:
    """C60: what is shown is what was set."""
    text = format_rate(bits_per_s)
    assert parse_rate(text) == bits_per_s, f"{text}: got {parse_rate(text)}, want {bits_per_s}"


@given(RATES, RATES)
def test_rate_is_monotone(low: int, high: int) -> None:
    low, high = sorted((low, high))
    assert parse_rate(f"{low}bit") <= parse_rate(f"{high}bit")
    assert parse_rate(f"{low / 1e3:.3f}kbit") <= parse_rate(f"{high / 1e3:.3f}kbit")


@given(st.decimals("0.01", "100", places=2), RATES)
def test_percent_is_never_above_the_exact_share(percent: Decimal, link: int) -> None:
    rate = parse_rate_text(f"{percent}%")
    exact = Decimal(link) * percent / 100
    if exact < MIN_RATE_BITS_PER_S:
        with pytest.raises(InputError, match="below the lowest rate"):
            rate.resolve(link)
    else:
        got = rate.resolve(link)
        assert exact - 1 < got <= exact, f"{percent}% of {link}: got {got}, want {exact}"


@given(st.text(max_size=12))
def test_any_text_is_a_rate_or_a_named_error(text: str) -> None:
    got, message = MIN_RATE_BITS_PER_S, ""
    try:
        got = parse_rate(text, link_rate_bits_per_s=10**9)
    except InputError as error:
        message = error.message
    assert message.isprintable(), f"got {message!r}"
    assert MIN_RATE_BITS_PER_S <= got <= MAX_RATE_BITS_PER_S


@pytest.mark.parametrize(
    ("text", "want"),
    [("60s", 60.0), ("200ms", 0.2), ("5m", 300.0), ("1h", 3600.0), ("2d", 172_800.0),
     ("1.5h", 5400.0), ("250us", 0.00025)],
)  # fmt: skip
def test_duration_has_a_unit(text: str, want: float) -> None:
    assert parse_duration(text) == want
    assert parse_duration(format_duration(want)) == want


@pytest.mark.parametrize("text", ["60", "", "0s", "-1s", "1w", "1 s", "1e9s", "inf", "401d", "1M"])
def test_duration_without_unit_or_out_of_range_is_refused(text: str) -> None:
    with pytest.raises(InputError, match=r".") as caught:
        parse_duration(text)
    assert caught.value.reference == "bad-duration"


@given(st.integers(1, 10_000_000))
def test_duration_round_trips(milliseconds: int) -> None:
    seconds = milliseconds / 1000
    assert parse_duration(format_duration(seconds)) == seconds


@pytest.mark.parametrize(
    ("text", "want"), [("3028", 3028), ("64KiB", 65_536), ("1500b", 1500), ("2MiB", 2 << 20)]
)
def test_size_is_bytes(text: str, want: int) -> None:
    assert parse_size(text) == want


@pytest.mark.parametrize(
    ("text", "reference"),
    [("64k", "ambiguous-size"), ("64KB", "ambiguous-size"), ("1Mb", "ambiguous-size"),
     ("64kib", "ambiguous-size"), ("1.5", "bad-size"), ("-1", "bad-size"), ("", "bad-size"),
     ("1e5", "bad-size"), ("9999GiB", "bad-size")],
)  # fmt: skip
def test_size_in_other_units_is_refused(text: str, reference: str) -> None:
    with pytest.raises(InputError) as caught:
        parse_size(text)
    assert caught.value.reference == reference, f"{text}: got {caught.value.reference}"


@given(st.integers(0, 1 << 40))
def test_size_round_trips(size_bytes: int) -> None:
    assert parse_size(format_size(size_bytes)) == size_bytes
