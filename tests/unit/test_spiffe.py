# SPDX-License-Identifier: Apache-2.0
"""SPIFFE ids: one spelling each, and a table of roles that says all its errors."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shapeagent.model.errors import InputError
from shapeagent.service.identity.spiffe import (
    SpiffeId,
    parse_id,
    parse_role_table,
    parse_trust_domain,
)

# The grammar of SPIFFE-ID §2, written down a second time.
GRAMMAR = re.compile(r"spiffe://[a-z0-9._-]{1,255}(/(?!\.{1,2}(/|\Z))[A-Za-z0-9._-]+)+", re.ASCII)
SEGMENT = st.from_regex(r"\A[A-Za-z0-9._-]{1,20}\Z").filter(lambda text: text not in {".", ".."})
TRUST_DOMAIN = st.from_regex(r"\A[a-z0-9._-]{1,60}\Z")


@given(TRUST_DOMAIN, st.lists(SEGMENT, min_size=1, max_size=6))
def test_an_id_is_read_as_it_is_written(trust_domain: str, segments: list[str]) -> None:
    text = f"spiffe://{trust_domain}/{'/'.join(segments)}"
    identity = parse_id(text)
    assert identity == SpiffeId(trust_domain, "/" + "/".join(segments))
    assert str(identity) == text, f"got {identity}, want the same spelling"


@given(st.text(alphabet=st.sampled_from("spife:/aB0.-_%@?#\\\n\0é /"), max_size=40))
def test_what_is_taken_is_what_the_grammar_has(tail: str) -> None:
    for text in (tail, f"spiffe://{tail}", f"spiffe://td/{tail}"):
        if GRAMMAR.fullmatch(text):
            assert str(parse_id(text)) == text
            continue
        with pytest.raises(InputError) as caught:
            parse_id(text)
        message = caught.value.message
        assert message.isascii(), f"got {message!r}, want it escaped"
        assert message.isprintable(), f"got {message!r}, want it escaped"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "does not begin"),
        ("https://example.org/a", "does not begin"),
        ("SPIFFE://example.org/a", "does not begin"),
        ("spiffe:/example.org/a", "does not begin"),
        (" spiffe://example.org/a", "does not begin"),
        ("spiffe://", "no trust domain"),
        ("spiffe:///a", "no trust domain"),
        ("spiffe://Example.org/a", "no trust domain"),
        ("spiffe://example.org:443/a", "no trust domain"),
        ("spiffe://user@example.org/a", "no trust domain"),
        ("spiffe://ex%61mple.org/a", "no trust domain"),
        ("spiffe://example.org?x/a", "no trust domain"),
        ("spiffe://exämple.org/a", "no trust domain"),
        (f"spiffe://{'a' * 256}/a", "no trust domain"),
        ("spiffe://example.org", "no workload"),
        ("spiffe://example.org/", "ends in a slash"),
        ("spiffe://example.org/a/", "ends in a slash"),
        ("spiffe://example.org//a", "empty segment"),
        ("spiffe://example.org/a//b", "empty segment"),
        ("spiffe://example.org/./a", "segment '.'"),
        ("spiffe://example.org/a/../b", "segment '..'"),
        ("spiffe://example.org/a%2fb", "character outside"),
        ("spiffe://example.org/a?b=c", "character outside"),
        ("spiffe://example.org/a#b", "character outside"),
        ("spiffe://example.org/a b", "character outside"),
        ("spiffe://example.org/a\n", "character outside"),
        ("spiffe://example.org/a\0b", "character outside"),
        ("spiffe://example.org/ä", "character outside"),
        ("spiffe://example.org/\u0430", "character outside"),  # a Cyrillic a
        ("spiffe://example.org/*", "character outside"),
        ("spiffe://example.org/" + "a" * 2048, "longer than 2048"),
    ],
)
def test_another_spelling_is_refused_with_its_reason(text: str, why: str) -> None:
    with pytest.raises(InputError, match=re.escape(why)) as caught:
        parse_id(text)
    assert caught.value.reference == "spiffe-id"


def test_an_id_of_2048_bytes_is_taken() -> None:
    text = "spiffe://example.org/" + "a" * (2048 - 21)
    assert len(str(parse_id(text))) == 2048


@pytest.mark.parametrize("text", ["", "Example.org", "a/b", "a:1", "spiffe://a", "a" * 256, "a\n"])
def test_a_wrong_trust_domain_is_refused(text: str) -> None:
    with pytest.raises(InputError) as caught:
        parse_trust_domain(text)
    assert caught.value.reference == "spiffe-trust-domain"


def test_the_table_gives_roles_to_exact_ids_only() -> None:
    table = parse_role_table("example.org", {"spiffe://example.org/ns/a": "operator"})
    for text, want in (
        ("spiffe://example.org/ns/a", "operator"),
        ("spiffe://example.org/ns/A", None),
        ("spiffe://example.org/ns/a/b", None),
        ("spiffe://example.org/ns", None),
        ("spiffe://other.org/ns/a", None),
    ):
        got = table.role_of(parse_id(text))
        assert got == want, f"got {got} for {text}, want {want}"


def test_every_error_of_the_table_is_named() -> None:
    with pytest.raises(InputError) as caught:
        parse_role_table(
            "example.org",
            {
                "spiffe://example.org/a": "operator",
                "spiffe://example.org/b": "root",
                "spiffe://example.org/*": "observer",
                "spiffe://other.org/c": "admin",
                "example.org/d": "admin",
            },
        )
    error = caught.value
    assert error.reference == "agent-roles"
    details = "\n".join(error.details)
    assert len(error.details) == 4, f"got {details}, want four errors"
    for part in (
        "'root' is no role",
        "/*'",
        "'spiffe://other.org/c' is outside",
        "'example.org/d'",
    ):
        assert part in details, f"got {details}, want {part}"
