# SPDX-License-Identifier: Apache-2.0
"""Tables of the benchmark: repeats are grouped, and what does not count is never called better."""

from __future__ import annotations

from typing import Any

import pytest

from shapeagent.lab.bench import report

LINK = 100_000_000


def row(queue: str, repeat: int = 1, **changes: Any) -> dict[str, Any]:
    """Return a row as run_cell makes them; 6,000 probes, all figures plausible."""
    link = changes.get("link_bits_per_s", LINK)
    shaped = queue not in ("idle", "pfifo_fast", "none")
    one: dict[str, Any] = {
        "scenario": "signal-under-bulk", "queue": queue, "mtu": 1500, "link_bits_per_s": link,
        "kernel": "6.12.107+deb12-amd64", "clock": "virtual", "repeat": repeat,
        "duration_s": 12.0, "sent": 6_000, "lost": 0, "p50_us": 30.0, "p90_us": 90.0,
        "p99_us": 200.0, "p999_us": 400.0, "max_us": 500.0, "jitter_mean_us": 40.0,
        "jitter_p99_us": 150.0, "bulk_bits_per_s": 96_000_000,
        "shaper_bits_per_s": int(link * 0.985) if shaped else None, "cpu_idle": 0.7,
        "cpu_ns_per_packet": 20_000, "link_full": True, "counts": True, "wire_dropped": 0,
        "segment_bytes": 3_028, **changes,
    }  # fmt: skip
    return {"key": f"{one['scenario']}.{queue}.{link // 1_000_000}m.{one['mtu']}.{repeat}", **one}


def test_repeats_are_one_group_with_median_and_range() -> None:
    rows = [row("cake", n, p99_us=p99) for n, p99 in ((1, 210.0), (2, 190.0), (3, 300.0))]
    (group,) = report.aggregate(rows)
    assert group.repeats == 3
    spread = group.figures["p99_us"]
    got = (spread.median, spread.low, spread.high)
    assert got == (210.0, 190.0, 300.0), f"got {got}"
    assert group.totals["sent"] == 18_000


def test_a_cell_run_again_replaces_the_earlier_row() -> None:
    (group,) = report.aggregate([row("cake", 1, p99_us=900.0), row("cake", 1, p99_us=100.0)])
    assert (group.repeats, group.median("p99_us")) == (1, 100.0)


@pytest.mark.parametrize(
    "other",
    [
        {"mtu": 9000},
        {"link_bits_per_s": 300_000_000},
        {"scenario": "kv-sync"},
        {"kernel": "6.1.0-57-amd64"},
        {"clock": "real"},
    ],
)
def test_what_must_not_be_compared_is_in_another_topic(other: dict[str, Any]) -> None:
    groups = report.aggregate([row("cake"), row("shapectl-htb", **other)])
    assert len(report.by_topic(groups)) == 2


def test_one_repeat_that_does_not_count_marks_the_group() -> None:
    rows = [row("cake", 1), row("cake", 2, counts=False, cpu_idle=0.05)]
    (group,) = report.aggregate(rows)
    assert not group.counts
    (topic,) = report.by_topic([group])
    text = "\n".join(report.topic_markdown(topic, [group]))
    assert "~~cake~~" in text
    assert "**cake**" not in text


def test_a_cell_that_does_not_count_is_never_the_best() -> None:
    rows = [
        row("cake", p99_us=50.0, counts=False, link_full=False),
        row("htb+u32", p99_us=400.0),
        row("shapectl-prio", p99_us=200.0),
    ]
    groups = report.aggregate(rows)
    winner = report.best(groups)
    assert winner is not None
    assert winner.queue == "shapectl-prio"
    text = "\n".join(report.comparison_lines(groups))
    assert "2.00 times less than the best set-up by hand at equal bulk (htb+u32" in text
    assert "Not compared, since they do not count: cake." in text


def test_ours_that_does_not_count_claims_nothing() -> None:
    groups = report.aggregate([row("htb+u32"), row("shapectl-prio", p99_us=1.0, counts=False)])
    assert report.comparison_lines(groups) == ["No row of ours counts here: nothing is claimed."]
    assert report.target_rows(groups) == []


def test_a_worse_row_of_ours_is_called_worse() -> None:
    groups = report.aggregate([row("cake", p99_us=100.0), row("shapectl-htb", p99_us=250.0)])
    assert "2.50 times more than the best set-up by hand" in report.comparison_lines(groups)[0]


def test_a_baseline_with_less_bulk_is_named_and_not_compared_at_equal_bulk() -> None:
    rows = [
        row("cake", p99_us=100.0, bulk_bits_per_s=90_000_000),
        row("htb+u32", p99_us=500.0),
        row("shapectl-htb", p99_us=250.0),
    ]
    lines = report.comparison_lines(report.aggregate(rows))
    assert "(htb+u32: 500 µs" in lines[0]
    assert lines[1] == "- cake reached 100 µs with less bulk (90.0 Mbit/s)."


def test_the_idle_link_is_never_the_best() -> None:
    groups = report.aggregate([row("idle", p99_us=1.0, bulk_bits_per_s=0), row("cake")])
    winner = report.best(groups)
    assert winner is not None
    assert winner.queue == "cake"


def test_every_table_shows_what_decides_whether_a_cell_counts() -> None:
    for table in report.terminal_table([row("idle", bulk_bits_per_s=0), row("shapectl-htb")]):
        for heading in (">bulk Mbit/s", ">shaper Mbit/s", ">CPU idle %", ">CPU µs/packet",
                        ">link full", ">counts"):  # fmt: skip
            assert heading in table.columns, f"got {table.columns}, want {heading}"
        assert all(len(one) == len(table.columns) for one in table.rows)


def test_leases_and_gaps_have_columns_only_where_there_are_any() -> None:
    (plain,) = report.terminal_table([row("cake")])
    assert ">leases lost" not in plain.columns
    (leases,) = report.terminal_table(
        [row("cake", scenario="lease-storm", leases=20, leases_lost=3)]
    )
    at = leases.columns.index(">leases lost")
    assert leases.rows[0][at] == "3 of 20"


def test_no_loss_is_claimed_only_over_100_000_probes() -> None:
    assert not report.Loss(sent=99_999, lost=0).claims_none
    assert report.Loss(sent=100_000, lost=0).claims_none
    assert not report.Loss(sent=1_000_000, lost=1).claims_none
    assert report.Loss(sent=100_000, lost=12).text() == "12 of 100,000 (0.012 %)"


def test_loss_keeps_what_does_not_count() -> None:
    groups = report.aggregate([row("shapectl-htb"), row("shapectl-edt", lost=2, counts=False)])
    assert report.loss_of(groups) == report.Loss(12_000, 2)


def test_bulk_share_is_whole_when_full_frames_use_the_shapers_rate() -> None:
    bulk = int(LINK * 0.985 * 1514 / 1538)
    (group,) = report.aggregate([row("cake", bulk_bits_per_s=bulk)])
    assert report.bulk_share(group) == pytest.approx(1.0, abs=1e-6)


def test_headline_has_the_articles_rows_beside_ours() -> None:
    rows = [
        row("htb+netem", jitter_mean_us=20.0, jitter_p99_us=90.0),
        row("htb+netem-jitter", jitter_mean_us=100.0, jitter_p99_us=480.0, lost=6),
        row("shapectl-htb", p99_us=300.0),
        row("shapectl-prio", p99_us=190.0, jitter_mean_us=33.0, jitter_p99_us=141.0),
        row("shapectl-htb", kernel="6.1.0-57-amd64", p99_us=1.0),
    ]
    got = report.headline_rows(report.aggregate(rows))
    assert got == [
        ("articles: HTB + netem", "not named", "120–450 µs", "not given", "0.8 %"),
        ("HTB + netem here, 2 set-ups", "100 Mbit/s", "20–480 µs", "200 µs",
         "6 of 12,000 (0.05 %)"),
        ("articles: eBPF + FQ_CODEL + prio", "not named", "32–68 µs", "not given", "0.012 %"),
        ("shapectl-prio", "100 Mbit/s", "33–141 µs", "190 µs", "0 of 6,000"),
    ]  # fmt: skip


def test_headline_is_of_the_newest_kernel() -> None:
    assert report.kernel_order("6.12.107+deb12-amd64") > report.kernel_order("6.1.0-57-amd64")


def test_targets_say_which_are_missed() -> None:
    rows = [
        row("pfifo_fast", p99_us=270_000.0),
        row("cake", p99_us=180.0),
        row("shapectl-prio", p99_us=190.0, jitter_p99_us=161.0),
    ]
    met = {
        (what, wanted): flag
        for _, _, what, wanted, _, flag in report.target_rows(report.aggregate(rows))
    }
    assert met["p99 delay", "≤ 200 µs"] == "yes"
    assert met["jitter, p99", "≤ 160 µs"] == "**no**"
    assert met["p99 no worse than the best by hand", "≤ 180 µs (cake: 180)"] == "**no**"
    assert met["p99 against no shaping", "≥ 100 times less"] == "yes"
    assert met["lost, htb, prio and edt", "0 of ≥ 100,000"] == "**no**"


def test_what_the_repeats_differ_by_is_no_difference() -> None:
    rows = [row("cake", repeat=n, p99_us=p99) for n, p99 in enumerate((156.0, 159.0, 161.0))]
    rows += [row("shapectl-prio", repeat=n, p99_us=160.0) for n in range(3)]
    found = {what: line for _, _, what, *line in report.target_rows(report.aggregate(rows))}
    got = found["p99 no worse than the best by hand"]
    assert got == ["≤ 161 µs (cake: 159 (156–161))", "160 µs", "yes"], f"got {got}"


def test_wires_from_1_gbit_per_s_stand_beside_the_articles_with_their_mtu() -> None:
    fast = {"link_bits_per_s": 1_000_000_000, "mtu": 9000}
    rows = [row("shapectl-htb"), row("shapectl-prio", **fast), row("shapectl-prio", mtu=9000)]
    got = [line[1] for line in report.headline_rows(report.aggregate(rows))]
    assert got[2:] == ["100 Mbit/s", "1 Gbit/s, MTU 9000"], f"got {got}"
    assert {line[0] for line in report.target_rows(report.aggregate(rows))} == {"100 Mbit/s"}


def test_police_has_no_queue_and_counts_in_no_claim_of_no_loss() -> None:
    rows = [row("shapectl-htb", sent=100_000, lost=0), row("shapectl-police", sent=9, lost=1)]
    text = report.markdown(rows, {})
    assert "(htb, prio, edt): 0 of 100,000" in text, f"got {text}"


def test_the_same_tree_by_u32_gets_no_latency_claim() -> None:
    rows = [row("htb+u32-ours", cpu_ns_per_packet=21_000), row("shapectl-htb")]
    text = "\n".join(report.comparison_lines(report.aggregate(rows)))
    assert "CPU 21.0 and 20.0 µs per packet. That delay is the tree's" in text


def test_markdown_holds_headline_tables_and_facts() -> None:
    text = report.markdown([row("shapectl-htb")], {"kernel": "6.12", "cpu": "x", "cpus": 1})
    for part in ("kernel 6.12, 1 CPU (x)", "## Headline", "### signal-under-bulk, 100 Mbit/s"):
        assert part in text, f"got no {part!r}"
