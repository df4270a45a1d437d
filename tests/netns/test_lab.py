# SPDX-License-Identifier: Apache-2.0
"""The lab: its wire is a wire, its counts agree with each other, and it always goes away."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from shapeagent.kernel.probe import ensure_bpffs
from shapeagent.kernel.processes import process_start_ticks
from shapeagent.lab import topology
from shapeagent.lab.topology import Lab, RoutedPath, private_dirs, routed_path, sweep_leftovers
from shapeagent.lab.traffic import TCP_HEADERS_BYTES, TrafficResult, TrafficSpec, run_traffic
from shapeagent.lab.wire import WIRE_OVERHEAD_BYTES, Wire, make_wire, read_wire
from shapeagent.lab.worker import HEARTBEAT_BYTES, TOKEN_BYTES
from shapeagent.model.errors import FailedError

pytestmark = [
    pytest.mark.host,
    pytest.mark.netns,
    pytest.mark.skipif(os.geteuid() != 0, reason="making network namespaces needs root"),
]

SHORT = TrafficSpec(duration_s=3.0, warm_up_s=1.5, drain_s=0.5)

# A lab with traffic, as a program of its own: says what it made, then runs until a signal.
BUSY_LAB = """
import sys
from shapeagent.kernel.signals import InterruptGuard
from shapeagent.lab.topology import routed_path
from shapeagent.lab.traffic import TrafficSpec, run_traffic
from shapeagent.lab.wire import make_wire
with InterruptGuard(), routed_path() as (lab, path):
    wire = make_wire(path.router_egress, rate_bits_per_s=100_000_000, queue_ms=100)
    print(path.sender, path.router, path.receiver, flush=True)
    spec = TrafficSpec(duration_s=60)
    run_traffic(lab, path, wire, spec, progress=lambda line: print(line, flush=True))
"""


def wait_until(condition: Callable[[], bool], what: str, timeout_s: float = 10.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, f"got no end of waiting, want {what}"
        select.select([], [], [], 0.02)


def pids_in(namespaces: list[str]) -> list[int]:
    return [
        int(pid)
        for name in namespaces
        if (topology.NETNS_DIR / name).exists()
        for pid in topology.run_command(["ip", "netns", "pids", name]).split()
    ]


def alive(pids: list[int]) -> list[int]:
    return [pid for pid in pids if process_start_ticks(pid) is not None]


def leftovers(namespaces: list[str]) -> list[str]:
    """Return what still exists of these namespaces: mounts, owner files, private folders."""
    return [
        str(path)
        for name in namespaces
        for path in (
            topology.NETNS_DIR / name,
            topology.OWNER_DIR / name,
            private_dirs(name).run_dir,
            private_dirs(name).bpffs_dir,
        )
        if path.exists()
    ]


@contextlib.contextmanager
def program(text: str) -> Iterator[subprocess.Popen[str]]:
    """Give a running Python program; it is ended by pid and its lab swept afterwards."""
    environment = dict(os.environ)
    environment["PYTHONPATH"] = os.pathsep.join(entry for entry in sys.path if entry)
    child = subprocess.Popen(
        [sys.executable, "-c", text],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        start_new_session=True,
    )
    try:
        yield child
    finally:
        if child.poll() is None:
            child.kill()
        child.communicate()
        sweep_leftovers()


def read_line(child: subprocess.Popen[str]) -> str:
    assert child.stdout is not None
    assert select.select([child.stdout], [], [], 20)[0], "got no line in 20 s, want one"
    line = child.stdout.readline()
    if not line:
        assert child.stderr is not None
        pytest.fail(f"got the end of the program, want a line: {child.stderr.read()}")
    return line.strip()


@pytest.fixture(scope="module")
def wire_run() -> Iterator[tuple[RoutedPath, Wire, TrafficResult]]:
    """Give one short run over a 100 Mbit/s wire, with the lab still up."""
    with routed_path() as (lab, path):
        wire = make_wire(path.router_egress, rate_bits_per_s=100_000_000, queue_ms=100)
        result = run_traffic(lab, path, wire, SHORT, progress=lambda line: None)
        yield path, wire, result


def skb_count(namespace: str, device: str) -> int:
    """Return how many buffers the device has received; a large segment counts once."""
    text = topology.run_command(["ip", "-n", namespace, "-s", "-j", "link", "show", "dev", device])
    packets: int = json.loads(text)[0]["stats64"]["rx"]["packets"]
    return packets


def test_the_wire_sends_one_frame_at_a_time(
    wire_run: tuple[RoutedPath, Wire, TrafficResult],
) -> None:
    path, wire, _ = wire_run
    frames = read_wire(wire).frames
    wait_until(
        lambda: skb_count(path.receiver, path.receiver_port.device) >= frames,
        "every frame of the wire at the receiver",
    )
    arrived = skb_count(path.receiver, path.receiver_port.device)
    large = skb_count(path.router, "ra0")
    # What enters the router is fewer, larger buffers; none of them survives the wire whole.
    assert large < 0.8 * frames, f"got {large} buffers at the router, want far under {frames}"
    assert frames <= arrived <= 1.01 * frames, f"got {arrived} buffers, want {frames} frames"


def test_a_full_wire_carries_its_rate(wire_run: tuple[RoutedPath, Wire, TrafficResult]) -> None:
    _, wire, result = wire_run
    share = result.wire_bits_per_s / wire.rate_bits_per_s
    assert 0.97 <= share <= 1.005, f"got {share:.4f} of the wire's rate, want 0.97 to 1.005"


def test_the_queue_is_full_and_never_over_its_limit(
    wire_run: tuple[RoutedPath, Wire, TrafficResult],
) -> None:
    _, _, result = wire_run
    assert 30 <= result.wire_queue_peak_ms <= 100, (
        f"got a peak of {result.wire_queue_peak_ms:.1f} ms, want 30 to 100"
    )
    p50_us = result.signal.p50_us
    assert p50_us is not None
    assert 30_000 <= p50_us <= 110_000, f"got a median of {p50_us:.0f} us, want the queue's"


def test_bulk_signal_and_stream_add_up_to_the_wire(
    wire_run: tuple[RoutedPath, Wire, TrafficResult],
) -> None:
    _, _, result = wire_run
    frame_extra = TCP_HEADERS_BYTES + WIRE_OVERHEAD_BYTES
    udp_frame_bytes = 14 + 20 + 8 + HEARTBEAT_BYTES + WIRE_OVERHEAD_BYTES
    small_bits = 8 * (
        result.stream.sent * (TOKEN_BYTES + frame_extra)
        + result.signal_tcp.sent * (HEARTBEAT_BYTES + frame_extra)
        + result.signal_udp.sent * udp_frame_bytes
    )
    got = result.bulk_wire_bits_per_s + small_bits / SHORT.duration_s
    share = got / result.wire_bits_per_s
    # The queue of up to 100 ms may grow or shrink between the two ends of the window.
    slack = 0.1 / SHORT.duration_s + 0.005
    assert abs(share - 1) <= slack, f"got {share:.4f} of the wire's own count, want 1 ± {slack:.3f}"


def test_every_probe_is_accounted_for(wire_run: tuple[RoutedPath, Wire, TrafficResult]) -> None:
    _, _, result = wire_run
    want_beats = SHORT.duration_s * 1e6 / SHORT.heartbeat_interval_us
    want_tokens = SHORT.duration_s * SHORT.tokens_per_s * SHORT.streams
    assert abs(result.signal.sent - want_beats) <= 0.05 * want_beats, (
        f"got {result.signal.sent} heartbeats, want about {want_beats:.0f}"
    )
    assert abs(result.stream.sent - want_tokens) <= 0.05 * want_tokens, (
        f"got {result.stream.sent} tokens, want about {want_tokens:.0f}"
    )
    assert result.signal_tcp.sent + result.signal_udp.sent == result.signal.sent
    assert len(result.tokens) == result.stream.sent - result.stream.lost


def test_raw_samples_hold_every_probe(
    wire_run: tuple[RoutedPath, Wire, TrafficResult], tmp_path: Path
) -> None:
    _, _, result = wire_run
    signal_csv, stream_csv = result.write_csv(tmp_path / "made", "before")
    signal_lines = signal_csv.read_text().splitlines()
    stream_lines = stream_csv.read_text().splitlines()
    assert signal_lines[0].startswith("seq,send_us,delay_us"), f"got {signal_lines[0]}"
    assert stream_lines[0].startswith("seq,send_us,delay_us"), f"got {stream_lines[0]}"
    assert len(signal_lines) - 1 == result.signal.sent, f"got {len(signal_lines) - 1} rows"
    assert len(stream_lines) - 1 == len(result.tokens), f"got {len(stream_lines) - 1} rows"


@pytest.mark.parametrize("family", ["ipv4", "ipv6"])
def test_both_address_families_are_routed(
    wire_run: tuple[RoutedPath, Wire, TrafficResult], family: str
) -> None:
    path, _, _ = wire_run
    kind = "socket.AF_INET6" if family == "ipv6" else "socket.AF_INET"
    target = getattr(path.receiver_port, family)
    # Nobody listens there: a refusal is an answer from the far end.
    text = (
        f"import socket; s = socket.socket({kind}); s.settimeout(5); "
        f"print(s.connect_ex(('{target}', 9)))"
    )
    got = topology.run_in(path.sender, sys.executable, "-c", text).strip()
    assert got == "111", f"got error {got}, want 111 (refused by {target})"


def test_a_worker_that_cannot_start_is_named_with_its_words() -> None:
    clash = TrafficSpec(heartbeat_tcp_port=2379, bulk_port=2379)
    with routed_path() as (lab, path):
        wire = make_wire(path.router_egress, rate_bits_per_s=100_000_000, queue_ms=100)
        with pytest.raises(FailedError) as caught:
            run_traffic(lab, path, wire, clash, progress=lambda line: None)
        left = pids_in([path.sender, path.receiver])
    assert caught.value.reference == "lab-worker-failed", f"got {caught.value.reference}"
    assert "in use" in " ".join(caught.value.details), f"got {caught.value.details}"
    assert not left, f"got workers {left} still running, want none"


def test_an_error_inside_leaves_nothing_behind() -> None:
    made: list[str] = []

    def fail_inside() -> None:
        with Lab() as lab:
            made.append(lab.add_namespace())
            dirs = private_dirs(made[0])
            dirs.run_dir.mkdir()
            (dirs.run_dir / "state").write_text("x")
            ensure_bpffs()
            dirs.bpffs_dir.mkdir()
            raise RuntimeError("on purpose")

    with pytest.raises(RuntimeError, match="on purpose"):
        fail_inside()
    assert not leftovers(made), f"got {leftovers(made)}, want nothing"


def test_a_living_owner_is_not_swept() -> None:
    with Lab() as lab:
        name = lab.add_namespace()
        swept = sweep_leftovers()
        assert name not in swept, f"got {swept}, want {name} kept"
        assert (topology.NETNS_DIR / name).exists(), f"got {name} gone, want it kept"


def test_a_reused_pid_does_not_protect_a_leftover() -> None:
    with Lab() as lab:
        name = lab.add_namespace()
        owner = {"pid": os.getpid(), "start_ticks": 1}
        (topology.OWNER_DIR / name).write_text(json.dumps(owner))
        swept = sweep_leftovers()
    assert name in swept, f"got {swept}, want {name} swept"
    assert not leftovers([name]), f"got {leftovers([name])}, want nothing"


@pytest.mark.parametrize(
    ("number", "want_code"),
    [(signal.SIGINT, -signal.SIGINT), (signal.SIGTERM, 143), (signal.SIGHUP, 129)],
)
def test_a_signal_under_load_leaves_nothing_behind(number: signal.Signals, want_code: int) -> None:
    with program(BUSY_LAB) as child:
        names = read_line(child).split()
        read_line(child)  # the traffic runs
        pids = pids_in(names)
        assert len(pids) == 6, f"got {len(pids)} workers, want 6"
        child.send_signal(number)
        child.send_signal(number)  # an impatient second one must not cut the clean-up short
        code = child.wait(15)
        assert code == want_code, f"got exit {code}, want {want_code}"
        assert not leftovers(names), f"got {leftovers(names)}, want nothing"
        assert not alive(pids), f"got workers {alive(pids)}, want none"


def test_a_killed_lab_loses_its_workers_at_once_and_is_swept_by_the_next() -> None:
    with program(BUSY_LAB) as child:
        names = read_line(child).split()
        read_line(child)
        pids = pids_in(names)
        ensure_bpffs()
        private_dirs(names[0]).bpffs_dir.mkdir()
        child.kill()
        child.wait(10)
        wait_until(lambda: not alive(pids), "no worker alive without its parent")
        assert len(leftovers(names)) >= 6, f"got {leftovers(names)}, want the namespaces"
        with Lab():
            assert not leftovers(names), f"got {leftovers(names)}, want nothing"
