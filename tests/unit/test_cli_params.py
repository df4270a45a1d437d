# SPDX-License-Identifier: Apache-2.0
"""Words on the command line into values."""

from __future__ import annotations

import ipaddress
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shapeagent.model.errors import InputError
from shapeagent.policy.builtin import default_policy_text
from shapeagent.service.documents import load_policy_text
from shapectl import params
from shapectl.commands.explain import OPEN_PORT


@pytest.mark.parametrize(
    ("text", "address", "port"),
    [
        ("192.0.2.1", "192.0.2.1", None),
        ("192.0.2.1:2379", "192.0.2.1", 2379),
        ("192.0.2.1:0", "192.0.2.1", 0),
        ("[2001:db8::1]:443", "2001:db8::1", 443),
        ("[2001:db8::1]", "2001:db8::1", None),
        ("2001:db8::1", "2001:db8::1", None),
        ("2001:DB8:0::443", "2001:db8::443", None),
        ("[::ffff:192.0.2.5]:80", "192.0.2.5", 80),  # C63
        ("::ffff:192.0.2.5", "192.0.2.5", None),
    ],
)
def test_endpoint_is_read_in_canonical_form(text: str, address: str, port: int | None) -> None:
    end = params.endpoint(text)
    assert (end.address, end.port) == (address, port), f"got {end}"


@pytest.mark.parametrize(
    "text",
    [
        "", "host", "host:80", "192.0.2", "192.0.2.1:", "192.0.2.1:65536", "192.0.2.1:-1",
        "192.0.2.1:http", "192.0.2.1:80:81", "[192.0.2.1]:80", "[2001:db8::1]443",
        "[2001:db8::1", "fe80::1%eth0", "192.0.2.1/24", "192.0.2.1: 80", "192.0.2.1:\u0668\u0660",
    ],
)  # fmt: skip
def test_wrong_endpoint_is_refused(text: str) -> None:
    with pytest.raises(InputError) as caught:
        params.endpoint(text)
    assert caught.value.reference == "endpoint"


@given(st.ip_addresses(), st.none() | st.integers(0, 65535))
def test_every_address_and_port_is_read_back(
    address: ipaddress.IPv4Address | ipaddress.IPv6Address, port: int | None
) -> None:
    text = f"[{address}]" if address.version == 6 else str(address)
    end = params.endpoint(text if port is None else f"{text}:{port}")
    want = address
    if isinstance(address, ipaddress.IPv6Address):
        want = address.ipv4_mapped or address
    assert (end.address, end.port) == (str(want), port)


@given(st.text(max_size=30))
def test_any_text_gives_an_endpoint_or_a_named_error(text: str) -> None:
    references = []
    try:
        params.endpoint(text)
    except InputError as error:
        references.append(error.reference)
    assert references in ([], ["endpoint"])


@pytest.mark.parametrize(
    ("text", "want"),
    [("0", 0), ("63", 63), ("ef", 46), ("EF", 46), ("cs1", 8), ("af41", 34), ("0x2e", 46)],
)
def test_dscp_is_read_by_number_and_name(text: str, want: int) -> None:
    assert params.dscp(text) == want


@pytest.mark.parametrize("text", ["", "64", "-1", "af50", "1.0", "0xff", "\u0662"])
def test_wrong_dscp_is_refused(text: str) -> None:
    with pytest.raises(InputError):
        params.dscp(text)


@pytest.mark.parametrize(
    ("text", "want"),
    [("auto", "auto"), ("off", "off"), ("3028", "3028"), ("64KiB", "65536")],
)
def test_segment_limit_is_read_as_the_engine_takes_it(text: str, want: str) -> None:
    assert params.segment_limit(text) == want


@pytest.mark.parametrize(
    ("text", "want"), [("1", 1), ("0xff0000", 0xFF0000), ("4294967295", 0xFFFFFFFF)]
)
def test_mask_is_read_decimal_and_hexadecimal(text: str, want: int) -> None:
    assert params.mark_mask(text) == want


@pytest.mark.parametrize("text", ["0", "", "-1", "0x", "4294967296", "ff", "1e3"])
def test_wrong_mask_is_refused(text: str) -> None:
    with pytest.raises(InputError):
        params.mark_mask(text)


def test_moment_needs_a_zone_and_is_utc_seconds() -> None:
    assert params.parse_moment("2030-01-01T01:00:00+01:00") == 1893456000
    assert params.parse_moment("2030-01-01T00:00:00Z") == 1893456000
    assert params.parse_moment("@1893456000") == 1893456000
    for text in ("2030-01-01", "2030-01-01T00:00:00", "tomorrow", "", "@", "1893456000"):
        with pytest.raises(InputError):
            params.parse_moment(text)


def test_expiry_from_a_duration_counts_from_now() -> None:
    before = time.time()
    got = params.decide_expiry(None, 60.0)
    assert got is not None
    assert before + 60 <= got <= time.time() + 60
    assert params.decide_expiry(None, None) is None


def test_no_built_in_rule_names_the_port_that_explain_fills_in() -> None:
    policy = load_policy_text(default_policy_text(), "built-in", 10**9)
    named = [
        rule.name for rule in policy.rules for low, high in rule.ports if low <= OPEN_PORT <= high
    ]
    assert named == [], f"port {OPEN_PORT} is claimed by {named}"
