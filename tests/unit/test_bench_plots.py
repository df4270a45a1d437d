# SPDX-License-Identifier: Apache-2.0
"""Charts of the benchmark, drawn for real."""

from __future__ import annotations

import gzip
import itertools
import json
import random
import sys
from pathlib import Path
from typing import Any

import pytest

from shapeagent.lab.bench import plots
from shapeagent.lab.bench.catalog import Cell, queues_of, scenario_named
from shapeagent.model.errors import UnsupportedError


def make_rows(folder: Path, queues: tuple[str, ...]) -> list[dict[str, Any]]:
    """Return rows of one wire, with 2,000 samples each in `folder`."""
    rows = []
    for number, queue in enumerate(queues):
        cell = Cell("signal-under-bulk", queue, 100_000_000, 1500, 1, 8.0)
        spread = random.Random(number)
        samples = [[n * 2000.0, 30.0 * (1 + number) * spread.expovariate(1)] for n in range(2000)]
        with gzip.open(folder / f"{cell.key}.json.gz", "wt") as file:
            json.dump(samples, file)
        rows.append(
            {
                "key": cell.key, "scenario": cell.scenario, "queue": queue, "mtu": 1500,
                "link_bits_per_s": cell.link_bits_per_s, "kernel": "6.12", "clock": "virtual",
                "repeat": 1, "p99_us": 100.0 * (1 + number),
                "bulk_bits_per_s": 90e6 + 1e5 * number,
                "shaper_bits_per_s": cell.shaper_bits_per_s, "counts": queue != "cake",
                "link_full": True,
            }
        )  # fmt: skip
    return rows


def test_all_queues_of_a_wire_make_three_small_charts(tmp_path: Path) -> None:
    rows = make_rows(tmp_path, queues_of(scenario_named("signal-under-bulk")))
    paths = plots.plot_rows(rows, tmp_path, tmp_path / "png")
    names = [path.name for path in paths]
    assert names == [f"{kind}-signal-under-bulk-100m.png" for kind in ("cdf", "time", "front")]
    for path in paths:
        data = path.read_bytes()
        assert data.startswith(b"\x89PNG")
        assert len(data) < 120 * 1024, f"{path.name} has {len(data)} bytes"


def test_the_same_rows_give_the_same_files(tmp_path: Path) -> None:
    rows = make_rows(tmp_path, ("idle", "cake", "shapectl-htb"))
    first = plots.plot_rows(rows, tmp_path, tmp_path / "a")
    second = plots.plot_rows(rows, tmp_path, tmp_path / "b")
    assert [a.read_bytes() for a in first] == [b.read_bytes() for b in second]


def test_without_samples_only_the_front_is_drawn(tmp_path: Path) -> None:
    rows = make_rows(tmp_path, ("idle", "cake"))
    paths = plots.plot_rows(rows, tmp_path / "nothing", tmp_path / "png")
    assert [path.name for path in paths] == ["front-signal-under-bulk-100m.png"]


def test_missing_matplotlib_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UnsupportedError) as caught:
        plots.plot_rows([], tmp_path, tmp_path)
    assert caught.value.reference == "plot-missing"
    assert caught.value.exit_code == 4


def test_distribution_falls_from_all_to_one_probe() -> None:
    points = plots.distribution([float(n) for n in range(1, 10_001)])
    assert points[0] == (1.0, 1.0)
    assert points[-1] == (10_000.0, 1 / 10_000)
    assert all(a[0] < b[0] and a[1] > b[1] for a, b in itertools.pairwise(points))
    assert len(points) <= plots.CURVE_POINTS + 1
    at_p99 = min(share for delay, share in points if delay <= 9_900)
    assert at_p99 == pytest.approx(0.0101, rel=0.05)


def test_delay_over_time_keeps_the_extremes() -> None:
    samples = [(n * 1000.0, 50.0) for n in range(10_000)]
    samples[5_000] = (samples[5_000][0], 9_000.0)
    bins = plots.over_time(samples)
    assert len(bins) == plots.TIME_BINS
    assert max(greatest for _, _, _, greatest in bins) == 9_000.0
    assert {middle for _, _, middle, _ in bins} == {50.0}
