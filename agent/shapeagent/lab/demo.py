# SPDX-License-Identifier: Apache-2.0
"""The demo: the same traffic over the same wire, without and with the shaper."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

from shapeagent.kernel.signals import InterruptGuard
from shapeagent.lab.stats import improvement
from shapeagent.lab.topology import routed_path
from shapeagent.lab.traffic import TrafficResult, TrafficSpec, run_traffic
from shapeagent.lab.wire import make_wire

WIRE_BITS_PER_S = 100_000_000
QUEUE_MS = 100.0
# The shaper must be the bottleneck, so that the queue forms where classes are
# known: 1.5 % under the wire, both counting 24 bytes per frame.
SHAPER_SHARE = 0.985


class AttachShaper(Protocol):
    """Attaches the shaper to a device while the context lasts; gives bulk's ceiling."""

    def __call__(
        self, netns: str, device: str, link_rate_bits_per_s: int
    ) -> AbstractContextManager[int]:
        """Return a context whose value is the ceiling of bulk in wire bits per second."""
        ...


def run_demo(
    *,
    attach: AttachShaper,
    output_dir: Path,
    progress: Callable[[str], None],
    duration_s: float = 10.0,
) -> dict[str, object]:
    """Return what heartbeats, token streams and bulk met without and with the shaper.

    The wire (100 Mbit/s, a FIFO of at most 100 ms) and the traffic are the same
    in both runs. Delays are round trips for `signal`, one-way for `stream`.

    Args:
        attach: attaches the shaper; given by the caller, since this room knows no engine.
        output_dir: gets the raw samples, `signal_before.csv` and so on.
        progress: called with one line per step.
        duration_s: what counts of each run; 4 s of warm-up and draining come on top.

    Raises:
        PrivilegeError: not root (need-root).
        FailedError: a command or a worker failed.
        ShapeError: whatever `attach` raises.

    Effects: namespaces, devices and processes, all gone on return, also after
        SIGINT, SIGTERM and SIGHUP; files in `output_dir`.
    """
    spec = TrafficSpec(duration_s=duration_s)
    with InterruptGuard():
        progress("making namespaces and a 100 Mbit/s wire with a queue of at most 100 ms")
        with routed_path() as (lab, path):
            wire = make_wire(path.router_egress, rate_bits_per_s=WIRE_BITS_PER_S, queue_ms=QUEUE_MS)
            progress("without shapectl")
            before = run_traffic(lab, path, wire, spec, progress=progress)
            before.write_csv(output_dir, "before")
            link_rate = int(wire.rate_bits_per_s * SHAPER_SHARE)
            progress(f"with shapectl attached at {link_rate / 1e6:g} Mbit/s")
            port = path.sender_port
            with attach(port.namespace, port.device, link_rate) as ceiling_bits_per_s:
                after = run_traffic(lab, path, wire, spec, progress=progress)
            after.write_csv(output_dir, "after")
    return {
        "before": _row(before, None),
        "after": _row(after, ceiling_bits_per_s),
        "improvement_p99": improvement(before.signal.p99_us, after.signal.p99_us),
        "improvement_p99_stream": improvement(before.stream.p99_us, after.stream.p99_us),
        "link_rate_bits_per_s": link_rate,
        "wire_bits_per_s": wire.rate_bits_per_s,
        "queue_ms": wire.queue_ms,
        "queue_bytes": wire.limit_bytes,
        "duration_s": spec.duration_s,
        "load": (
            f"{spec.bulk_flows} bulk TCP flows, {spec.streams} token streams at "
            f"{spec.tokens_per_s} tokens/s, a heartbeat every "
            f"{spec.heartbeat_interval_us / 1000:g} ms by turns over TCP and UDP"
        ),
        "congestion_control": after.congestion_control,
        "probe_scheduling": after.scheduling,
        "kernel": os.uname().release,
        "clock": "real",
        "samples_dir": str(output_dir),
    }


def _row(result: TrafficResult, ceiling_bits_per_s: int | None) -> dict[str, object]:
    return {
        "signal": result.signal.as_dict(),
        "signal_tcp": result.signal_tcp.as_dict(),
        "signal_udp": result.signal_udp.as_dict(),
        "signal_one_way": result.signal_one_way.as_dict(),
        "stream": result.stream.as_dict(),
        "bulk": {
            "throughput_bits_per_s": round(result.bulk_wire_bits_per_s),
            "ceiling_bits_per_s": ceiling_bits_per_s,
        },
        "wire": {
            "throughput_bits_per_s": round(result.wire_bits_per_s),
            "dropped_frames": result.wire_dropped_frames,
            "queue_peak_ms": round(result.wire_queue_peak_ms, 2),
        },
        "cpu_idle_share": round(result.cpu_idle_share, 3),
    }
