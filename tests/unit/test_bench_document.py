# SPDX-License-Identifier: Apache-2.0
"""docs/performance.md and the README's headline say what the committed rows say."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from shapeagent.lab.bench import document
from shapeagent.lab.bench.catalog import IDLE
from shapeagent.lab.bench.queues import EGRESS, INGRESS
from shapeagent.model.errors import FailedError, InputError

README = "# t\n<!-- bench:begin -->\nold\n<!-- bench:end -->\nrest\n"
FACTS = {"kernel": "6.12.107+deb12-amd64", "clock": "virtual", "cpu": "QEMU", "cpus": 1}


def make_row(queue: str, p99_us: float) -> dict[str, Any]:
    """Return a row of signal-under-bulk."""
    return {
        "key": f"signal-under-bulk.{queue}.100m.1500.1", "scenario": "signal-under-bulk",
        "queue": queue, "mtu": 1500, "link_bits_per_s": 100_000_000,
        "kernel": "6.12.107+deb12-amd64", "clock": "virtual", "repeat": 1, "sent": 6_000,
        "lost": 0, "p50_us": 30.0, "p90_us": 90.0, "p99_us": p99_us, "p999_us": 400.0,
        "max_us": 500.0, "jitter_mean_us": 40.0, "jitter_p99_us": 150.0,
        "bulk_bits_per_s": 0 if queue == IDLE else 96_000_000,
        "shaper_bits_per_s": None if queue in (IDLE, "pfifo_fast") else 98_500_000,
        "cpu_idle": 0.7, "cpu_ns_per_packet": 20_000, "link_full": True, "counts": True,
    }  # fmt: skip


ROWS = [
    make_row("idle", 38.0),
    make_row("pfifo_fast", 273_000.0),
    make_row("htb+netem", 220.0),
    make_row("shapectl-prio", 190.0),
]


def make_root(folder: Path) -> Path:
    """Return a checkout with a README and the samples of ROWS."""
    (folder / "docs").mkdir()
    (folder / "README.md").write_text(README)
    (folder / "samples").mkdir()
    for row in ROWS:
        with gzip.open(folder / "samples" / f"{row['key']}.json.gz", "wt") as file:
            json.dump([[n * 2000.0, row["p50_us"] + n % 7] for n in range(500)], file)
    return folder


@pytest.mark.parametrize("queue", EGRESS.values(), ids=lambda queue: queue.name)
def test_every_set_up_is_shown_by_its_own_commands(queue: Any) -> None:
    lines = document.set_up_lines(queue, 98_500_000)
    assert lines
    for line in lines:
        assert line.startswith(("tc ", "shapectl attach eth0 --link-rate 98.5mbit")), line
        assert " eth0" in line
        assert "DEV" not in line


@pytest.mark.parametrize("queue", INGRESS.values(), ids=lambda queue: queue.name)
def test_set_ups_of_what_arrives_are_shown_by_their_own_commands(queue: Any) -> None:
    lines = document.set_up_lines(queue, 90_000_000)
    if queue.name.startswith("ifb"):
        assert "ip link add ifb-hand type ifb" in lines
        assert any(line.startswith("tc qdisc replace dev ifb-hand root") for line in lines)
    assert bool(lines) is (queue.name != "none")


def test_rates_in_the_commands_are_the_ones_asked_for() -> None:
    text = "\n".join(document.set_up_lines(EGRESS["htb+u32"], 295_500_000))
    assert "rate 295500000bit" in text
    assert "98500000" not in text


def test_document_has_every_part() -> None:
    text = document.performance_document(ROWS, None, FACTS)
    for part in (
        "1 CPU (QEMU), clock: virtual",
        "| articles: HTB + netem | not named | 120–450 µs",
        "| shapectl-prio | 100 Mbit/s | 40–150 µs | 190 µs | 0 of 6,000 |",
        "## HTB + netem",
        "one nanosecond per instruction",
        "performance/cdf-signal-under-bulk-100m.png",
        "netem limit 1000",
        "## Limits",
        "no interrupt moderation",
    ):
        assert part in text, f"got no {part!r}"
    assert "Scale curves" not in text
    assert "htb+netem-delay" not in text, "a set-up that was not measured is not shown"


def test_document_without_rows_is_refused() -> None:
    with pytest.raises(InputError) as caught:
        document.performance_document([], None, FACTS)
    assert caught.value.reference == "bench-no-rows"


def test_readme_block_shows_ours_beside_none_and_the_articles() -> None:
    block = document.readme_block(ROWS)
    assert "| 100 Mbit/s | no shaping: pfifo_fast | 30 µs | 273,000 µs |" in block
    assert "| 100 Mbit/s | **shapectl-prio** | 30 µs | 190 µs |" in block
    assert "32–68 µs" in block
    assert "0 of 6,000" in block


def test_readme_keeps_all_but_the_block() -> None:
    text = document.replace_readme_block(README, ROWS)
    assert text.startswith("# t\n<!-- bench:begin -->\nSignalling")
    assert text.endswith("<!-- bench:end -->\nrest\n")
    assert "old" not in text
    assert document.replace_readme_block(text, ROWS) == text


def test_readme_without_markers_is_refused() -> None:
    with pytest.raises(FailedError) as caught:
        document.replace_readme_block("# t\n", ROWS)
    assert caught.value.reference == "readme-no-markers"


def test_written_pages_are_fresh_and_an_edit_makes_them_stale(tmp_path: Path) -> None:
    root = make_root(tmp_path)
    written = document.write_performance(ROWS, None, FACTS, root, root / "samples")
    page = root / "docs" / "performance.md"
    assert {page, root / "README.md"} <= set(written)
    assert document.stale_pages(root) == []
    for path in root.glob("docs/performance/*.png"):
        assert path.stat().st_size < 120 * 1024, f"{path.name} has {path.stat().st_size} bytes"
        assert f"performance/{path.name}" in page.read_text()
    page.write_text(page.read_text().replace("190", "90"))
    assert document.stale_pages(root) == [page]
    readme = root / "README.md"
    readme.write_text(readme.read_text().replace("190", "90"))
    assert document.stale_pages(root) == [page, readme]
    document.write_pages(root)
    assert document.stale_pages(root) == []


def test_changed_rows_make_the_pages_stale(tmp_path: Path) -> None:
    root = make_root(tmp_path)
    document.write_performance(ROWS, None, FACTS, root, root / "samples")
    rows = root / "docs" / "performance" / "bench.json"
    rows.write_text(rows.read_text().replace('"p99_us":190.0', '"p99_us":191.0'))
    assert len(document.stale_pages(root)) == 2


def test_a_page_without_rows_is_stale(tmp_path: Path) -> None:
    assert document.stale_pages(tmp_path) == []
    (tmp_path / "docs").mkdir()
    page = tmp_path / "docs" / "performance.md"
    page.write_text("made up\n")
    assert document.stale_pages(tmp_path) == [page]


def test_broken_rows_are_named(tmp_path: Path) -> None:
    root = make_root(tmp_path)
    (root / "docs" / "performance").mkdir()
    (root / "docs" / "performance" / "bench.json").write_text("[]")
    with pytest.raises(InputError) as caught:
        document.stale_pages(root)
    assert caught.value.reference == "bench-rows-invalid"


def test_chart_that_is_no_longer_made_is_removed(tmp_path: Path) -> None:
    root = make_root(tmp_path)
    (root / "docs" / "performance").mkdir()
    old = root / "docs" / "performance" / "cdf-gone.png"
    old.write_bytes(b"x")
    document.write_performance(ROWS, None, FACTS, root, root / "samples")
    assert not old.exists()
