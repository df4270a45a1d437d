# SPDX-License-Identifier: Apache-2.0
"""Real TCP and UDP traffic of an inference host, over a routed path, measured.

Three kinds, each in processes of its own (`worker.py`): heartbeats (a request
and its answer, by turns over TCP and UDP), token streams (small TCP segments, all
streams back to back once per decode step) and bulk TCP flows.
"""

from __future__ import annotations

import csv
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shapeagent.lab.children import READY_TIMEOUT_S, cpu_ticks, sleep_until, start_workers
from shapeagent.lab.stats import DelayStats, summarize_delays
from shapeagent.lab.topology import Lab, RoutedPath
from shapeagent.lab.wire import WIRE_OVERHEAD_BYTES, Wire, read_wire

# Ethernet 14, IPv4 20, TCP 20, time stamps 12.
TCP_HEADERS_BYTES = 66
_QUEUE_SAMPLE_NS = 500_000_000


@dataclass(frozen=True, slots=True)
class TrafficSpec:
    """What runs, and for how long. The ports are ones the default policy knows."""

    duration_s: float = 10.0  # the part that counts
    warm_up_s: float = 2.5
    drain_s: float = 1.0  # probes of the window may still be answered, under full load
    heartbeat_interval_us: int = 2000
    heartbeat_tcp_port: int = 2379  # etcd
    heartbeat_udp_port: int = 123
    streams: int = 8
    tokens_per_s: int = 50
    stream_port: int = 8000  # an OpenAI-compatible server
    bulk_flows: int = 8
    bulk_port: int = 2049  # NFS


@dataclass(frozen=True, slots=True)
class HeartbeatSample:
    """One heartbeat; delays are None where no answer came."""

    sequence: int
    probe: str  # "tcp" | "udp"
    send_us: float
    round_trip_us: float | None
    one_way_us: float | None


@dataclass(frozen=True, slots=True)
class TokenSample:
    """One token that arrived."""

    sequence: int
    stream: int
    send_us: float
    one_way_us: float


@dataclass(frozen=True, slots=True)
class TrafficResult:
    """What one run measured. Wire rates count every frame with its 24 bytes."""

    signal: DelayStats  # round trips, TCP and UDP together
    signal_tcp: DelayStats
    signal_udp: DelayStats
    signal_one_way: DelayStats
    stream: DelayStats
    bulk_wire_bits_per_s: float
    wire_bits_per_s: float  # everything on the wire, from its own counters
    wire_dropped_frames: int
    wire_queue_peak_ms: float  # largest of the samples, two a second
    cpu_idle_share: float
    scheduling: str
    congestion_control: str
    heartbeats: tuple[HeartbeatSample, ...]
    tokens: tuple[TokenSample, ...]

    def write_csv(self, folder: Path, suffix: str) -> tuple[Path, Path]:
        """Return the two files of raw samples, `signal_<suffix>.csv` and `stream_<suffix>.csv`.

        Effects: makes `folder` and replaces the files.
        """
        folder.mkdir(parents=True, exist_ok=True)
        signal_path = folder / f"signal_{suffix}.csv"
        stream_path = folder / f"stream_{suffix}.csv"
        with signal_path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(["seq", "send_us", "delay_us", "one_way_us", "protocol"])
            for beat in self.heartbeats:
                writer.writerow(
                    [
                        beat.sequence,
                        beat.send_us,
                        _blank(beat.round_trip_us),
                        _blank(beat.one_way_us),
                        beat.probe,
                    ]
                )
        with stream_path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(["seq", "send_us", "delay_us", "stream"])
            for token in self.tokens:
                writer.writerow([token.sequence, token.send_us, token.one_way_us, token.stream])
        return signal_path, stream_path


def run_traffic(
    lab: Lab,
    path: RoutedPath,
    wire: Wire,
    spec: TrafficSpec,
    *,
    progress: Callable[[str], None],
) -> TrafficResult:
    """Return what `spec`'s traffic met on `path`, whose bottleneck is `wire`.

    Raises:
        FailedError: a worker failed (lab-worker-failed).

    Effects: child processes in the lab's namespaces; they have ended on return.
    """
    here, there = path.sender_port.ipv4, path.receiver_port.ipv4
    beat_config: dict[str, object] = {
        "address": there,
        "tcp_port": spec.heartbeat_tcp_port,
        "udp_port": spec.heartbeat_udp_port,
        "interval_us": spec.heartbeat_interval_us,
    }
    stream_config: dict[str, object] = {
        "address": here,
        "port": spec.stream_port,
        "streams": spec.streams,
        "tokens_per_s": spec.tokens_per_s,
    }
    bulk_config: dict[str, object] = {
        "address": there,
        "port": spec.bulk_port,
        "flows": spec.bulk_flows,
        "zero_copy": False,
    }
    try:
        servers = start_workers(
            lab,
            (path.receiver, "heartbeat-server", beat_config),
            (path.sender, "stream-server", stream_config),
            (path.receiver, "bulk-sink", bulk_config),
        )
        clients = start_workers(
            lab,
            (path.sender, "heartbeat-client", beat_config),
            (path.receiver, "stream-client", stream_config),
            (path.sender, "bulk-source", bulk_config),
        )
        workers = {worker.role: worker for worker, _ in servers + clients}
        facts = {key: value for _, ready in servers + clients for key, value in ready.items()}
        start_ns = time.monotonic_ns() + 50_000_000
        from_ns = start_ns + int(spec.warm_up_s * 1e9)
        to_ns = from_ns + int(spec.duration_s * 1e9)
        stop_ns = to_ns + int(spec.drain_s * 1e9)
        for worker in workers.values():
            worker.send(
                {"start_ns": start_ns, "from_ns": from_ns, "to_ns": to_ns, "stop_ns": stop_ns}
            )
        progress(f"warming up for {spec.warm_up_s:g} s, then measuring {spec.duration_s:g} s")
        observed = _observe_wire(wire, from_ns, to_ns)
        deadline_ns = stop_ns + int(READY_TIMEOUT_S * 1e9)
        results = {role: worker.read_message(deadline_ns) for role, worker in workers.items()}
    finally:
        lab.end_children()
    return _result(results, observed, facts)


@dataclass(frozen=True, slots=True)
class _Observed:
    wire_bits_per_s: float
    dropped_frames: int
    queue_peak_ms: float
    cpu_idle_share: float


def _observe_wire(wire: Wire, from_ns: int, to_ns: int) -> _Observed:
    """Return what the wire and the CPUs did between two times, after waiting for them."""
    sleep_until(from_ns)
    begin, begin_ns, begin_cpu = read_wire(wire), time.monotonic_ns(), cpu_ticks()
    peak_bytes = begin.backlog_bytes
    while (now_ns := time.monotonic_ns()) < to_ns:
        sleep_until(min(to_ns, now_ns + _QUEUE_SAMPLE_NS))
        end, end_ns, end_cpu = read_wire(wire), time.monotonic_ns(), cpu_ticks()
        peak_bytes = max(peak_bytes, end.backlog_bytes)
    idle, total = (b - a for a, b in zip(begin_cpu, end_cpu, strict=True))
    return _Observed(
        wire_bits_per_s=(end.wire_bytes - begin.wire_bytes) * 8e9 / (end_ns - begin_ns),
        dropped_frames=end.dropped_frames - begin.dropped_frames,
        queue_peak_ms=wire.queue_ms * peak_bytes / wire.limit_bytes,
        cpu_idle_share=idle / total if total else 0.0,
    )


def _result(
    results: dict[str, dict[str, Any]], observed: _Observed, facts: dict[str, Any]
) -> TrafficResult:
    beats = tuple(
        HeartbeatSample(
            sequence=number,
            probe=probe,
            send_us=sent_ns / 1000,
            round_trip_us=None if back_ns is None else back_ns / 1000,
            one_way_us=None if there_ns is None else there_ns / 1000,
        )
        for number, probe, sent_ns, back_ns, there_ns in results["heartbeat-client"]["samples"]
    )
    tokens = tuple(
        TokenSample(sequence, stream, sent_ns / 1000, delay_ns / 1000)
        for sequence, stream, sent_ns, delay_ns in results["stream-client"]["samples"]
    )
    sink = results["bulk-sink"]
    bulk_bytes = sum(
        payload + segments * (TCP_HEADERS_BYTES + WIRE_OVERHEAD_BYTES)
        for payload, segments in sink["flows"]
    )
    return TrafficResult(
        signal=_round_trips(beats),
        signal_tcp=_round_trips([beat for beat in beats if beat.probe == "tcp"]),
        signal_udp=_round_trips([beat for beat in beats if beat.probe == "udp"]),
        signal_one_way=summarize_delays(
            len(beats), [beat.one_way_us for beat in beats if beat.one_way_us is not None]
        ),
        stream=summarize_delays(
            results["stream-server"]["sent"], [token.one_way_us for token in tokens]
        ),
        bulk_wire_bits_per_s=bulk_bytes * 8e9 / sink["elapsed_ns"],
        wire_bits_per_s=observed.wire_bits_per_s,
        wire_dropped_frames=observed.dropped_frames,
        wire_queue_peak_ms=observed.queue_peak_ms,
        cpu_idle_share=observed.cpu_idle_share,
        scheduling=facts["scheduling"],
        congestion_control=facts["congestion_control"],
        heartbeats=beats,
        tokens=tokens,
    )


def _round_trips(beats: Sequence[HeartbeatSample]) -> DelayStats:
    delays = [beat.round_trip_us for beat in beats if beat.round_trip_us is not None]
    return summarize_delays(len(beats), delays)


def _blank(value: float | None) -> float | str:
    return "" if value is None else value
