# SPDX-License-Identifier: Apache-2.0
"""Statistics of the lab, and the token frame that carries its own time stamp."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shapeagent.lab.stats import (
    improvement,
    jitter_us,
    quantile_nearest_rank,
    summarize_delays,
)
from shapeagent.lab.worker import TOKEN_BYTES, parse_token, token_payload

DELAYS = st.lists(st.floats(0, 1e9, allow_nan=False), min_size=1, max_size=300)


@pytest.mark.parametrize(
    ("share", "want"),
    [(0.05, 15), (0.30, 20), (0.40, 20), (0.50, 35), (0.61, 40), (1.0, 50)],
)
def test_nearest_rank_matches_the_textbook_example(share: float, want: float) -> None:
    got = quantile_nearest_rank([50, 15, 40, 20, 35], share)
    assert got == want, f"got {got}, want {want} at {share}"


def test_nearest_rank_does_not_step_up_for_a_rounding_error() -> None:
    # 0.07 * 100 is 7.000000000000001 in floats; the 7th of 100 values is meant.
    got = quantile_nearest_rank(range(1, 101), 0.07)
    assert got == 7, f"got {got}, want 7"


@given(DELAYS, st.floats(0.001, 1.0))
def test_a_quantile_is_the_smallest_value_that_covers_its_share(
    values: list[float], share: float
) -> None:
    got = quantile_nearest_rank(values, share)
    covered = sum(value <= got for value in values)
    below = sum(value < got for value in values)
    need = math.ceil(round(share * len(values), 9))
    assert got in values
    assert covered >= need, f"got {covered} covered, want at least {need}"
    assert below < need, f"got {below} below, want fewer than {need}"


@pytest.mark.parametrize("share", [0, -0.1, 1.01])
def test_a_share_outside_the_range_is_refused(share: float) -> None:
    with pytest.raises(ValueError, match="share"):
        quantile_nearest_rank([1.0], share)


def test_no_values_have_no_quantile() -> None:
    with pytest.raises(ValueError, match="no values"):
        quantile_nearest_rank([], 0.5)


def test_lost_probes_are_counted_and_do_not_enter_the_delays() -> None:
    got = summarize_delays(5, [10.0, 30.0, 20.0])
    assert (got.sent, got.lost) == (5, 2), f"got {got}, want 5 sent and 2 lost"
    assert (got.p50_us, got.p99_us, got.max_us) == (20.0, 30.0, 30.0), f"got {got}"
    assert got.mean_jitter_us == 15.0, f"got {got.mean_jitter_us}, want 15"
    assert got.p99_jitter_us == 20.0, f"got {got.p99_jitter_us}, want 20"


def test_nothing_received_has_no_delays_rather_than_zero() -> None:
    got = summarize_delays(7, []).as_dict()
    assert (got["sent"], got["lost"]) == (7, 7), f"got {got}, want all 7 lost"
    assert got["p50_us"] is None, f"got {got['p50_us']}, want None"
    assert got["p99_us"] is None, f"got {got['p99_us']}, want None"
    assert got["max_us"] is None, f"got {got['max_us']}, want None"


def test_more_answers_than_probes_is_an_error() -> None:
    with pytest.raises(ValueError, match="2 delays for 1 probes"):
        summarize_delays(1, [1.0, 2.0])


def test_jitter_is_between_neighbours_in_order_of_sending() -> None:
    got = jitter_us([1.0, 4.0, 2.0])
    assert got == [3.0, 2.0], f"got {got}, want [3.0, 2.0]"


@pytest.mark.parametrize(
    ("before", "after", "want"),
    [(100_000.0, 500.0, 200.0), (None, 1.0, None), (1.0, None, None), (1.0, 0.0, None)],
)
def test_improvement_is_before_over_after_or_unknown(
    before: float | None, after: float | None, want: float | None
) -> None:
    got = improvement(before, after)
    assert got == want, f"got {got}, want {want}"


@given(st.integers(0, 999), st.integers(0, 10**10 - 1), st.integers(0, 2**63 - 1))
def test_a_token_has_the_measured_size_and_carries_its_time(
    stream: int, sequence: int, sent_ns: int
) -> None:
    token = token_payload(stream, sequence, sent_ns)
    assert len(token) == TOKEN_BYTES, f"got {len(token)} bytes, want {TOKEN_BYTES}"
    assert token.endswith(b"}\n\n"), f"got {token[-4:]!r}, want the end of an SSE event"
    got = parse_token(token)
    assert got == (stream, sequence, sent_ns), f"got {got}, want {(stream, sequence, sent_ns)}"
