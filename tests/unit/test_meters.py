# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shapeagent.model.types import Budget
from shapeagent.policy.meters import (
    COST_SHIFT,
    LARGEST_SEGMENT_WIRE_BYTES,
    PACE_HARD_SHIFT,
    budget_for,
    cost_of,
    least_paced_rate,
    meter_for,
    pace_for,
)

RATES = st.integers(min_value=64_000, max_value=400_000_000_000)
BPF = Path(__file__).parents[2] / "bpf"
ABI = BPF / "abi.h"


def test_cost_shift_is_the_one_of_the_kernel_program() -> None:
    found = re.search(r"#define SHP_COST_SHIFT (\d+)", ABI.read_text())
    assert found is not None
    assert int(found[1]) == COST_SHIFT, f"got {COST_SHIFT}, want {found[1]}"


@given(RATES)
def test_cost_is_the_time_of_one_byte(rate_bits_per_s: int) -> None:
    got_ns = cost_of(rate_bits_per_s) / (1 << COST_SHIFT)
    want_ns = 8e9 / rate_bits_per_s
    assert got_ns == pytest.approx(want_ns, rel=3e-5), f"got {got_ns} ns, want {want_ns} ns"


@given(RATES)
def test_cost_of_the_largest_packet_fits_64_bits(rate_bits_per_s: int) -> None:
    got = cost_of(rate_bits_per_s) * 2 * LARGEST_SEGMENT_WIRE_BYTES
    assert got < 1 << 64, f"got {got.bit_length()} bits, want at most 64"


@given(RATES)
def test_meter_always_lets_a_64_kilobyte_packet_pass(rate_bits_per_s: int) -> None:
    meter = meter_for(rate_bits_per_s, largest_segment_wire_bytes=3_076)
    packet_ns = LARGEST_SEGMENT_WIRE_BYTES * 8e9 / rate_bits_per_s
    assert meter.drop_ns >= packet_ns, f"got {meter.drop_ns} ns, want at least {packet_ns} ns"


@given(RATES)
def test_meter_marks_before_it_drops(rate_bits_per_s: int) -> None:
    meter = meter_for(rate_bits_per_s)
    assert 0 < meter.ce_ns <= meter.drop_ns // 2, f"got CE {meter.ce_ns}, drop {meter.drop_ns}"


def test_meter_outlasts_the_least_retransmission_timer_and_marks_after_milliseconds() -> None:
    meter = meter_for(100_000_000_000)
    assert meter.drop_ns == 250_000_000, f"got {meter.drop_ns} ns, want 250 ms (RTO 200 ms)"
    assert meter.ce_ns == 5_000_000, f"got {meter.ce_ns} ns, want 5 ms"


@given(RATES, st.integers(min_value=1_500, max_value=1_000_000))
def test_budget_holds_its_burst_and_two_ticks(rate_bits_per_s: int, burst_bytes: int) -> None:
    tick_ns = 4_000_000
    budget = Budget(rate_bits_per_s, burst_bytes, hold_s=1.0, overflow_class="normal")
    got = budget_for(budget, tick_ns).burst_ns
    want = 2 * tick_ns + burst_bytes * 8e9 / rate_bits_per_s
    assert got == pytest.approx(want, rel=1e-6, abs=1), f"got {got} ns, want {want} ns"


def test_steady_sender_at_its_budget_never_overflows_on_a_clock_of_ticks() -> None:
    tick_ns = 4_000_000
    budget = Budget(10_000_000, 3_000, hold_s=1.0, overflow_class="normal")
    plan = budget_for(budget, tick_ns)
    packet_bytes = 125
    interval_ns = packet_bytes * 8e9 / budget.rate_bits_per_s
    tat_ns = 0
    for number in range(100_000):
        now_ns = int(number * interval_ns) // tick_ns * tick_ns
        base_ns = max(tat_ns, now_ns)
        assert base_ns - now_ns <= plan.burst_ns, f"packet {number} overflowed, want none"
        tat_ns = base_ns + (packet_bytes * plan.cost >> COST_SHIFT)


def test_rate_zero_is_refused() -> None:
    with pytest.raises(ValueError, match="positive"):
        cost_of(0)


@given(RATES, st.integers(min_value=600, max_value=LARGEST_SEGMENT_WIRE_BYTES))
def test_departure_times_mark_beyond_two_segments_and_drop_beyond_eight(
    rate_bits_per_s: int, segment_bytes: int
) -> None:
    pace = pace_for(rate_bits_per_s, segment_bytes)
    segment_ns = segment_bytes * 8e9 / rate_bits_per_s
    assert pace.ce_ns == pytest.approx(max(50_000, 2 * segment_ns), abs=2), f"got {pace}"
    assert pace.drop_ns == pytest.approx(max(500_000, 8 * segment_ns), abs=8), f"got {pace}"
    short = pace.drop_ns <= 20_000_008
    assert short == (rate_bits_per_s >= least_paced_rate(segment_bytes)) or (
        abs(pace.drop_ns - 20_000_000) <= 8
    )


def test_spared_packets_end_at_the_limit_of_the_kernel_program() -> None:
    found = re.search(r"#define PACE_HARD_SHIFT (\d+)", (BPF / "lib" / "pace.h").read_text())
    assert found is not None
    assert int(found[1]) == PACE_HARD_SHIFT, f"got {PACE_HARD_SHIFT}, want {found[1]}"
