# SPDX-License-Identifier: Apache-2.0
"""Rates from two samples: also where a counter began anew, and where there is nothing to tell."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shapeagent.model.rates import ClassRate, Sample, class_rate, interface_rates
from tests.unit.statuskit import MBIT, class_status, interface_status


def bulk(**changes: Any) -> ClassRate:
    """Return the rates over 2 s from a class without traffic to one with `changes`."""
    return class_rate(class_status(), class_status(**changes), 2.0)


def test_rates_are_differences_over_time() -> None:
    found = bulk(
        packets=1_000, wire_bytes=2_500_000, drops=10, queue_drops=30, ce_marks=4,
        queue_sent_bytes=2_000_000, queue_sent_packets=1_000, backlog_bytes=50_600,
    )  # fmt: skip
    sent = 8 * (2_000_000 + 24 * 1_000) / 2
    assert found == ClassRate(
        name="bulk",
        direction="egress",
        bits_per_s=10 * MBIT,
        packets_per_s=500,
        drops_per_s=20,
        ce_marks_per_s=2,
        sent_bits_per_s=sent,
        ceiling_bits_per_s=80 * MBIT,
        ceiling_use=sent / (80 * MBIT),
        backlog_bytes=50_600,
        queue_delay_s=50_600 * 8 / sent,
    )


def test_class_without_a_queue_sends_what_comes() -> None:
    before = class_status("bulk", "ingress")
    after = class_status("bulk", "ingress", wire_bytes=1_000_000, drops=6)
    found = class_rate(before, after, 2.0)
    assert (found.bits_per_s, found.sent_bits_per_s) == (4 * MBIT, 4 * MBIT)
    assert found.drops_per_s == 3
    assert (found.ceiling_use, found.queue_delay_s, found.backlog_bytes) == (None, None, None)


def test_counter_that_began_anew_counts_from_zero() -> None:
    before = class_status(packets=1_000_000, wire_bytes=9_000_000, queue_drops=50)
    after = class_status(packets=100, wire_bytes=250_000, queue_drops=4)
    found = class_rate(before, after, 1.0)
    assert (found.packets_per_s, found.bits_per_s, found.drops_per_s) == (100, 2 * MBIT, 4)


@pytest.mark.parametrize("interval_s", [0.0, -1.0, 0.0001])
def test_no_time_has_no_rate(interval_s: float) -> None:
    found = class_rate(class_status(), class_status(packets=5, backlog_bytes=10), interval_s)
    assert (found.packets_per_s, found.bits_per_s, found.queue_delay_s) == (None, None, None)
    assert found.backlog_bytes == 10


def test_class_that_was_not_there_has_no_rate() -> None:
    found = class_rate(None, class_status(packets=5), 1.0)
    assert found.packets_per_s is None
    assert found.ceiling_bits_per_s == 80 * MBIT


def test_queue_that_holds_something_and_sends_nothing_has_no_delay() -> None:
    assert bulk(backlog_bytes=1_000).queue_delay_s is None
    assert bulk(backlog_bytes=0).queue_delay_s == 0


def test_interfaces_are_compared_by_what_they_are() -> None:
    """Not by their names: renamed goes on, attached again or another device begins anew."""
    busy = tuple(dataclasses.replace(row, packets=10) for row in interface_status().classes)
    before = Sample(10.0, (interface_status("eth0"),))
    for changes, want in (
        ({"device": "wan"}, 5.0),
        ({"index": 9}, None),
        ({"attached_unix_s": 1_893_456_009.0}, None),
        ({"netns": "other"}, None),
    ):
        wanted: dict[str, Any] = {"classes": busy, **changes}
        (found,) = interface_rates(before, Sample(12.0, (interface_status(**wanted),)))
        got = {row.packets_per_s for row in found.classes}
        assert got == {want}, f"got {got} for {changes}, want {want}"


def test_first_sample_shows_everything_but_rates() -> None:
    (found,) = interface_rates(None, Sample(1.0, (interface_status(problems=("gone",)),)))
    assert (found.device, found.profile, found.problems) == ("eth0", "htb", ("gone",))
    assert len(found.classes) == 8
    assert {row.bits_per_s for row in found.classes} == {None}


_counts = st.integers(0, 2**63)


@given(_counts, _counts, st.floats(0.001, 1e6))
def test_a_rate_is_never_negative(old: int, new: int, interval_s: float) -> None:
    found = class_rate(
        class_status(packets=old, wire_bytes=old, drops=old),
        class_status(packets=new, wire_bytes=new, drops=new),
        interval_s,
    )
    for rate in (found.packets_per_s, found.bits_per_s, found.drops_per_s):
        assert rate is not None
        assert rate >= 0
