# SPDX-License-Identifier: Apache-2.0
"""Cells of the benchmark on this kernel: real traffic, short."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from shapeagent.lab import topology
from shapeagent.lab.bench.catalog import Cell
from shapeagent.lab.bench.cell import run_cell
from shapectl.cli import main
from shapectl.labattach import LabAttach

pytestmark = [
    pytest.mark.host,
    pytest.mark.netns,
    pytest.mark.slow,
    pytest.mark.skipif(os.geteuid() != 0, reason="making network namespaces needs root"),
]

LINK = 50_000_000


def cell_of(scenario: str, queue: str, **more: Any) -> Cell:
    numbers = {"link_bits_per_s": LINK, "mtu": 1500, "repeat": 1} | more
    return Cell(scenario, queue, duration_s=1.5, warm_up_s=1.0, **numbers)


def run(cell: Cell, folder: Path) -> dict[str, Any]:
    attach = LabAttach(folder, lambda _: None)
    row = run_cell(cell, attach=attach, clock="real", samples_dir=folder)
    assert not topology.sweep_leftovers(), "got namespaces left behind, want none"
    return row


def test_shaping_shortens_what_a_fifo_delays(tmp_path: Path) -> None:
    idle = run(cell_of("signal-under-bulk", "idle"), tmp_path)
    fifo = run(cell_of("signal-under-bulk", "tbf+fifo"), tmp_path)
    ours = run(cell_of("signal-under-bulk", "shapectl-htb"), tmp_path)
    assert idle["bulk_bits_per_s"] == 0
    assert idle["shaper_bits_per_s"] is None
    for row in (idle, ours):
        assert row["sent"] == 750, f"got {row['sent']} probes, want one every 2 ms"
        assert row["lost"] == 0, f"got {row['lost']} lost, want 0"
    assert ours["link_full"], f"got {ours}, want a full link"
    assert ours["p50_us"] * 5 < fifo["p50_us"], f"got {ours['p50_us']}, {fifo['p50_us']} by FIFO"
    assert ours["segment_bytes"] < 65_536, f"got {ours['segment_bytes']}, want our segment limit"
    kept = sorted(path.name for path in tmp_path.glob("*.json.gz"))
    assert len(kept) == 3, f"got {kept}, want the samples of three cells"


@pytest.mark.parametrize("scenario", ["token-stream", "kv-sync", "signal-under-flood"])
def test_every_scenario_gives_a_whole_row(scenario: str, tmp_path: Path) -> None:
    row = run(cell_of(scenario, "shapectl-htb"), tmp_path)
    assert row["sent"] > 100, f"got {row}, want traffic"
    assert row["lost"] == 0, f"got {row}, want nothing lost"
    assert row["p50_us"] <= row["p99_us"] <= row["max_us"]
    assert row["link_full"], f"got {row}, want a full link"
    if scenario == "token-stream":
        assert 15_000 < row["gap_p50_us"] < 25_000, f"got {row}, want gaps of 20 ms"


@pytest.mark.parametrize("queue", ["none", "shapectl-ingress-police"])
def test_what_arrives_can_be_shaped(queue: str, tmp_path: Path) -> None:
    row = run(cell_of("ingress", queue), tmp_path)
    assert row["bulk_bits_per_s"] > 0.1 * LINK, f"got {row}, want bulk to pass"
    # Neither holds a queue of its own, and the wire's may overflow: no word about loss.
    assert row["lost"] < row["sent"] > 100, f"got {row}, want probes"


def test_jumbo_frames_pass(tmp_path: Path) -> None:
    row = run(cell_of("signal-under-bulk", "shapectl-htb", mtu=9000), tmp_path)
    assert row["link_full"], f"got {row}, want a full link"


def test_run_saves_rows_and_resumes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "bench.json"
    words = ["bench", "run", "--real", "--queue", "idle", "--link", "50mbit", "--mtu", "1500"]
    words += ["--duration", "1s"]
    words += ["--output", str(output), "--keep-samples", str(tmp_path), "--json"]
    assert main([*words, "--repeats", "1"]) == 0, capsys.readouterr()
    first = json.loads(output.read_text())["rows"]
    assert [row["key"] for row in first] == ["signal-under-bulk.idle.50m.1500.1"]
    capsys.readouterr()
    assert main([*words, "--repeats", "2", "--resume"]) == 0, capsys.readouterr()
    printed = json.loads(capsys.readouterr().out)["rows"]
    assert printed[0] == first[0], "got the first cell again, want it kept"
    assert len(printed) == 2
    capsys.readouterr()
    other = [*words, "--repeats", "1", "--resume"]
    other[other.index("idle")] = "tbf+fifo"
    assert main(other) == 0, capsys.readouterr()
    kept = [row["queue"] for row in json.loads(output.read_text())["rows"]]
    assert kept == ["idle", "idle", "tbf+fifo"], f"got {kept}, want what was there kept"


@pytest.mark.parametrize(
    ("words", "reference"),
    [
        (["--scenario", "nonsense"], "bench-scenario-unknown"),
        (["--queue", "nonsense"], "bench-queue-unknown"),
        (["--duration", "1ms"], "bench-duration"),
        (["--set", "headline", "--queue", "cake"], "bench-set"),
        (["--kernel", "4.4", "--queue", "idle"], "kernel-image-missing"),
        (["--kernel", "new", "--queue", "idle"], "unknown-kernel"),
    ],
)
def test_wrong_words_are_named(
    words: list[str], reference: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = main(["bench", "run", "--json", "--output", str(tmp_path / "b.json"), *words])
    assert code != 0
    assert json.loads(capsys.readouterr().out)["error"] == reference


def test_damaged_results_are_not_overwritten(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "bench.json"
    output.write_text("{")
    words = ["bench", "run", "--real", "--json", "--resume", "--output", str(output)]
    assert main(words) == 2
    assert json.loads(capsys.readouterr().out)["error"] == "bench-file-bad"
    assert output.read_text() == "{"
