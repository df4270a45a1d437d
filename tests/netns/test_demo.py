# SPDX-License-Identifier: Apache-2.0
"""`shapectl demo`, whole: what it promises, on a real kernel, and that nothing of it stays."""

from __future__ import annotations

import contextlib
import csv
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from shapeagent.kernel.processes import process_start_ticks
from shapeagent.lab import topology
from shapeagent.model.errors import FailedError

pytestmark = [
    pytest.mark.host,
    pytest.mark.netns,
    pytest.mark.slow,
    pytest.mark.skipif(os.geteuid() != 0, reason="making network namespaces needs root"),
]

WATCHED = (
    topology.OWNER_DIR,
    Path("/run/shapectl"),
    topology.BPFFS_DIR,
)


def start_demo(output_dir: Path, duration: str) -> subprocess.Popen[str]:
    environment = dict(os.environ)
    environment["PYTHONPATH"] = os.pathsep.join(entry for entry in sys.path if entry)
    return subprocess.Popen(
        [
            *(sys.executable, "-m", "shapectl", "demo", "--json"),
            *("--duration", duration, "--keep-samples", str(output_dir)),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        start_new_session=True,
    )


@contextlib.contextmanager
def running_demo(output_dir: Path, duration: str) -> Iterator[subprocess.Popen[str]]:
    """Give a running demo; it is ended by pid, and what it left is swept afterwards."""
    child = start_demo(output_dir, duration)
    try:
        yield child
    finally:
        if child.poll() is None:
            child.kill()
        child.communicate()
        topology.sweep_leftovers()


def namespaces_of(pid: int) -> list[str]:
    """Return the lab namespaces that process `pid` owns."""
    names = []
    with contextlib.suppress(FileNotFoundError):
        for entry in topology.OWNER_DIR.iterdir():
            with contextlib.suppress(FileNotFoundError, ValueError, IsADirectoryError):
                if json.loads(entry.read_text())["pid"] == pid:
                    names.append(entry.name.removeprefix("."))
    return sorted(set(names))


def left_on_host(names: list[str]) -> list[str]:
    """Return every path of ours that exists and names one of these namespaces."""
    return [
        str(path)
        for name in names
        for folder in (topology.NETNS_DIR, *WATCHED)
        for path in (folder.rglob(f"*{name}*") if folder.exists() else ())
    ]


def pins_and_state() -> set[str]:
    """Return what stands under our state folder and bpffs, for a comparison."""
    return {
        str(path) for folder in WATCHED[1:] if folder.exists() for path in folder.glob("**/*")
    } - {str(topology.BPFFS_DIR / name) for name in ("maps.debug", "progs.debug")}


def wait_until(condition: Callable[[], bool], what: str, timeout_s: float = 60.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, f"got no end of waiting, want {what}"
        select.select([], [], [], 0.05)


def run_whole_demo(folder: Path) -> dict[str, Any]:
    """Return the JSON of one demo run, after looking that it left nothing behind."""
    before = pins_and_state()
    with running_demo(folder, "6s") as child:
        out, err = child.communicate(timeout=90)
        assert child.returncode == 0, f"got exit {child.returncode}, want 0: {err or out}"
    left = pins_and_state() - before
    assert not left, f"got {sorted(left)} left behind, want nothing"
    result: dict[str, Any] = json.loads(out)
    return result


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    """Give the JSON of one demo run and the folder of its samples."""
    folder = tmp_path_factory.mktemp("demo")
    return run_whole_demo(folder), folder


def test_signal_is_at_least_fifty_times_better(
    demo: tuple[dict[str, Any], Path], tmp_path: Path
) -> None:
    """p50 in the first run; p99 in one of three, since a shared host stops us now and then.

    Such a stop of a few ms adds to the delays of either run, so it can only lower the ratio.
    """
    result, _ = demo
    before_us, after_us = (result[run]["signal"]["p50_us"] for run in ("before", "after"))
    assert before_us >= 50 * after_us, f"got p50 {before_us} -> {after_us}, want 50 times less"
    got = [result["improvement_p99"]]
    while len(got) < 3 and (got[-1] is None or got[-1] < 50):
        got.append(run_whole_demo(tmp_path)["improvement_p99"])
    assert got[-1] is not None, f"got no improvement in {got}, want a ratio: {result}"
    assert got[-1] >= 50, f"got {got} times, want one of at least 50: {result}"


@pytest.mark.parametrize("traffic", ["signal", "stream"])
def test_nothing_urgent_is_lost_with_the_shaper(
    demo: tuple[dict[str, Any], Path], traffic: str
) -> None:
    row = demo[0]["after"][traffic]
    assert row["sent"] > 1000, f"got {row['sent']} sent, want a real load"
    assert row["lost"] == 0, f"got {row['lost']} of {row['sent']} lost, want 0"


@pytest.mark.rates
def test_bulk_fills_its_ceiling_and_keeps_what_it_had(
    demo: tuple[dict[str, Any], Path],
) -> None:
    before, after = demo[0]["before"]["bulk"], demo[0]["after"]["bulk"]
    throughput, ceiling = after["throughput_bits_per_s"], after["ceiling_bits_per_s"]
    assert before["ceiling_bits_per_s"] is None, f"got {before}, want no ceiling"
    assert throughput >= 0.95 * ceiling, f"got {throughput}, want 95 % of {ceiling}"
    had = before["throughput_bits_per_s"]
    assert abs(throughput - had) <= 0.05 * had, f"got {throughput}, want within 5 % of {had}"


def test_the_queue_stands_at_the_wire_before_and_at_the_shaper_after(
    demo: tuple[dict[str, Any], Path],
) -> None:
    result = demo[0]
    before = result["before"]["wire"]["queue_peak_ms"]
    after = result["after"]["wire"]["queue_peak_ms"]
    assert 30 <= before <= result["queue_ms"] <= 100, f"got {before} ms, want 30 to 100"
    assert after <= 5, f"got {after} ms at the wire with the shaper, want it nearly empty"


def test_the_shaper_is_one_to_two_percent_under_the_wire(
    demo: tuple[dict[str, Any], Path],
) -> None:
    result = demo[0]
    share = result["link_rate_bits_per_s"] / result["wire_bits_per_s"]
    assert 0.98 <= share <= 0.99, f"got {share:.4f} of the wire, want 0.98 to 0.99"


@pytest.mark.parametrize("run", ["before", "after"])
def test_raw_samples_are_kept_and_agree_with_the_table(
    demo: tuple[dict[str, Any], Path], run: str
) -> None:
    result, folder = demo
    for traffic in ("signal", "stream"):
        with (folder / f"{traffic}_{run}.csv").open(encoding="utf-8") as file:
            delays = [float(row["delay_us"]) for row in csv.DictReader(file) if row["delay_us"]]
        row = result[run][traffic]
        got, want = len(delays), row["sent"] - row["lost"]
        assert got == want, f"got {got} {traffic} samples, want {want}"
        assert round(max(delays), 1) == row["max_us"], f"got {max(delays)}, want {row['max_us']}"


@pytest.mark.parametrize("run", ["before", "after"])
def test_ctrl_c_leaves_nothing_behind(tmp_path: Path, run: str) -> None:
    state = pins_and_state()
    with running_demo(tmp_path, "2s" if run == "after" else "60s") as child:

        def under_load() -> bool:
            assert child.poll() is None, f"got the demo's end {child.communicate()}, want a run"
            names = namespaces_of(child.pid)
            pids = _pids_in(names)
            shaped = any("htb" in _root_qdisc(name) for name in names)
            return len(pids) == 6 and (run == "before" or shaped)

        wait_until(under_load, f"traffic of the run {run}")
        names = namespaces_of(child.pid)
        pids = _pids_in(names)
        child.send_signal(signal.SIGINT)
        out, err = child.communicate(timeout=20)
        assert child.returncode == 130, f"got exit {child.returncode}, want 130: {out}{err}"
        left = left_on_host(names) + sorted(pins_and_state() - state)
        assert not left, f"got {left} left behind, want nothing"
        alive = [pid for pid in pids if process_start_ticks(pid) is not None]
        assert not alive, f"got workers {alive}, want none"


def _pids_in(names: list[str]) -> list[int]:
    pids = []
    for name in names:
        with contextlib.suppress(FailedError):
            pids += [
                int(pid) for pid in topology.run_command(["ip", "netns", "pids", name]).split()
            ]
    return pids


def _root_qdisc(name: str) -> str:
    with contextlib.suppress(FailedError):
        return topology.run_command(["tc", "-n", name, "qdisc", "show", "dev", "a0"])
    return ""
