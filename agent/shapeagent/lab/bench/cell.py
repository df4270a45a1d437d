# SPDX-License-Identifier: Apache-2.0
"""One cell of the benchmark: build the path, set the queue, run the traffic, return a row."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shapeagent.kernel.signals import InterruptGuard
from shapeagent.lab.bench.catalog import IDLE, Cell, scenario_named
from shapeagent.lab.bench.queues import AttachShaper, Place, queue_named, require_qdiscs
from shapeagent.lab.children import READY_TIMEOUT_S, cpu_ticks, sleep_until, start_workers
from shapeagent.lab.stats import DelayStats, jitter_us, quantile_nearest_rank, summarize_delays
from shapeagent.lab.topology import Lab, Port, RoutedPath, ip_batch, routed_path, run_command
from shapeagent.lab.traffic import TCP_HEADERS_BYTES
from shapeagent.lab.wire import (
    ETHERNET_HEADER_BYTES,
    WIRE_OVERHEAD_BYTES,
    Wire,
    make_wire,
    read_wire,
)
from shapeagent.lab.worker import TOKEN_BYTES
from shapeagent.model.errors import FailedError, ShapeError

ROLES_MODULE = "shapeagent.lab.bench.roles"
PROBE_INTERVAL_US = 2_000
PROBE_PORT = 123
RR_PORT = 2379
RR_INTERVAL_US = 20_000
KV_PORT = 5600  # the NIXL side channel: `signal` in the built-in policy
BULK_PORT = 2049
STREAM_PORT = 8000
DRAIN_S = 1.0
PROBE_FRAME_BYTES = 92
FULL_SHARE = 0.90  # of the shaper's rate: below it the link was not full
IDLE_SHARE = 0.10  # below it the CPU was the bottleneck


@dataclass(frozen=True, slots=True)
class Plan:
    """One worker to start: where, as what, with which settings."""

    namespace: str
    role: str
    config: dict[str, object]


@dataclass(slots=True)
class Traffic:
    """The workers of a scenario, servers first."""

    servers: list[Plan] = field(default_factory=list)
    clients: list[Plan] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Observed:
    """What the wire and the CPUs did in the window."""

    elapsed_s: float
    wire_bytes: int  # with 24 bytes per packet
    wire_packets: int
    dropped: int
    cpu_idle: float


def run_cell(
    cell: Cell, *, attach: AttachShaper, clock: str, samples_dir: Path | None = None
) -> dict[str, Any]:
    """Return the row of a cell, with the fields that docs/performance.md names.

    Args:
        clock: `virtual` or `real`, as the caller knows; it goes into the row.
        samples_dir: gets `<key>.json.gz`, the (send time, delay) pairs in microseconds.

    Raises:
        UnsupportedError: the kernel lacks a qdisc (bench-qdisc-missing).
        FailedError: a command or a worker failed.

    Effects: namespaces and processes; all gone on return.
    """
    scenario = scenario_named(cell.scenario)
    with routed_path() as (lab, path):
        _set_mtu(path, cell.mtu)
        wire = make_bench_wire(path.router_egress, cell)
        shaped = path.receiver_port if scenario.ingress else path.sender_port
        place = Place(shaped, cell.shaper_bits_per_s or cell.link_bits_per_s, cell.mtu, attach)
        with contextlib.ExitStack() as stack:
            if cell.queue != IDLE:
                queue = queue_named(cell.queue, ingress=scenario.ingress)
                require_qdiscs(queue)
                stack.enter_context(queue.enter(place))
            if cell.scenario == "lease-storm":
                from shapeagent.lab.bench.etcd import running_etcd

                stack.enter_context(running_etcd(path.receiver, path.receiver_port.ipv4))
            results, observed = _run(lab, path, wire, traffic_of(cell, path), cell)
            segment_bytes = _gso_max_size(shaped)
        delays, row = _figures(cell, results, observed)
        if samples_dir is not None:
            _write_samples(samples_dir / f"{cell.key}.json.gz", delays)
    shaper = cell.shaper_bits_per_s
    carried = row["bulk_bits_per_s"] + _tokens_bits_per_s(cell, row)
    full = cell.queue == IDLE or carried >= FULL_SHARE * (shaper or cell.link_bits_per_s)
    return {
        "key": cell.key,
        "scenario": cell.scenario,
        "queue": cell.queue,
        "mtu": cell.mtu,
        "link_bits_per_s": cell.link_bits_per_s,
        "kernel": os.uname().release,
        "clock": clock,
        "repeat": cell.repeat,
        "duration_s": cell.duration_s,
        **row,
        "shaper_bits_per_s": shaper,
        "cpu_idle": round(observed.cpu_idle, 4),
        "cpu_ns_per_packet": _cpu_ns_per_packet(observed),
        "link_full": bool(full),
        "counts": bool(full and observed.cpu_idle >= IDLE_SHARE),
        "wire_dropped": observed.dropped,
        "wire_model": wire.kind,
        "segment_bytes": segment_bytes,
    }


def make_bench_wire(port: Port, cell: Cell) -> Wire:
    """Return a wire at the egress of `port`: netem's `rate` where the kernel has it, else TBF.

    netem holds each packet for as long as its bytes take on the wire and sends
    them in order, at most 1,000 of them: an Ethernet port with its queue.
    """
    try:
        run_command(
            [
                *("tc", "-n", port.namespace, "qdisc", "replace", "dev", port.device, "root"),
                *("handle", "1:", "netem", "limit", "1000"),
                *("rate", f"{cell.link_bits_per_s}bit", str(WIRE_OVERHEAD_BYTES)),
            ]
        )
    except FailedError:
        return make_wire(port, rate_bits_per_s=cell.link_bits_per_s, queue_ms=100.0, mtu=cell.mtu)
    return Wire(
        namespace=port.namespace,
        device=port.device,
        rate_bits_per_s=cell.link_bits_per_s,
        queue_ms=1000 * (cell.mtu + ETHERNET_HEADER_BYTES) * 8e3 / cell.link_bits_per_s,
        limit_bytes=0,
        burst_bytes=0,
        kind="netem",
    )


def traffic_of(cell: Cell, path: RoutedPath) -> Traffic:
    """Return the workers of a cell's scenario; without bulk where the queue is `idle`."""
    here, there = path.sender_port.ipv4, path.receiver_port.ipv4
    traffic = Traffic()

    def serve(namespace: str, role: str, **config: object) -> None:
        traffic.servers.append(Plan(namespace, role, config))

    def ask(namespace: str, role: str, **config: object) -> None:
        traffic.clients.append(Plan(namespace, role, config))

    def request_response(port: int, request: int, response: int, interval_us: int) -> None:
        sizes = {"request_bytes": request, "response_bytes": response}
        serve(path.receiver, "rr-server", address=there, port=port, **sizes)
        ask(
            path.sender, "rr-client",
            address=there, port=port, interval_us=interval_us, seed=cell.repeat, **sizes,
        )  # fmt: skip

    if cell.scenario in ("signal-under-bulk", "signal-under-flood", "ingress"):
        serve(path.receiver, "probe-sink", address=there, port=PROBE_PORT)
        ask(
            path.sender, "probe-source",
            address=there, port=PROBE_PORT, interval_us=PROBE_INTERVAL_US, seed=cell.repeat,
        )  # fmt: skip
        request_response(RR_PORT, 64, 64, RR_INTERVAL_US)
    elif cell.scenario == "token-stream":
        stream = {"address": here, "port": STREAM_PORT, "streams": 64}
        serve(path.sender, "stream-server", tokens_per_s=50, **stream)
        ask(path.receiver, "stream-client", **stream)
    elif cell.scenario == "kv-sync":
        request_response(KV_PORT, 256, 4096, 5_000)
    elif cell.scenario == "lease-storm":
        ask(path.sender, "lease-client", address=there, port=RR_PORT, leases=20, interval_us=5_000)
    if cell.queue != IDLE:
        flows = 4 if cell.scenario == "kv-sync" else 8
        serve(path.receiver, "bulk-sink", address=there, port=BULK_PORT, flows=flows)
        ask(
            path.sender, "bulk-source",
            address=there, port=BULK_PORT, flows=flows, zero_copy=True,
        )  # fmt: skip
        if cell.scenario == "signal-under-flood":
            serve(path.receiver, "flood-sink", address=there, port=BULK_PORT)
            payload = cell.mtu - 28
            ask(
                path.sender, "flood-source",
                address=there, port=BULK_PORT, payload_bytes=payload,
                frame_bits=8 * (cell.mtu + ETHERNET_HEADER_BYTES + WIRE_OVERHEAD_BYTES),
                bits_per_s=1.5 * cell.link_bits_per_s,
            )  # fmt: skip
    return traffic


def _set_mtu(path: RoutedPath, mtu: int) -> None:
    for namespace, devices in (
        (path.sender, [path.sender_port.device]),
        (path.router, ["ra0", path.router_egress.device]),
        (path.receiver, [path.receiver_port.device]),
    ):
        ip_batch(namespace, [f"link set {device} mtu {mtu}" for device in devices])


def _gso_max_size(port: Port) -> int:
    text = run_command(["ip", "-n", port.namespace, "-d", "-j", "link", "show", "dev", port.device])
    return int(json.loads(text)[0].get("gso_max_size", 0))


def _run(
    lab: Lab, path: RoutedPath, wire: Wire, traffic: Traffic, cell: Cell
) -> tuple[dict[str, dict[str, Any]], Observed]:
    """Return what each role saw, and what the wire and the CPUs did."""
    try:
        started = []
        for plans in (traffic.servers, traffic.clients):
            started += start_workers(
                lab, *((one.namespace, one.role, one.config) for one in plans), module=ROLES_MODULE
            )
        workers = {worker.role: worker for worker, _ in started}
        start_ns = time.monotonic_ns() + 50_000_000
        from_ns = start_ns + int(cell.warm_up_s * 1e9)
        to_ns = from_ns + int(cell.duration_s * 1e9)
        stop_ns = to_ns + int(DRAIN_S * 1e9)
        times = {"start_ns": start_ns, "from_ns": from_ns, "to_ns": to_ns, "stop_ns": stop_ns}
        for worker in workers.values():
            worker.send(dict[str, object](times))
        observed = _observe(wire, from_ns, to_ns)
        # What the workers say at the end is long, and a slow machine writes it slowly.
        deadline_ns = stop_ns + int(4 * READY_TIMEOUT_S * 1e9)
        return {role: one.read_message(deadline_ns) for role, one in workers.items()}, observed
    finally:
        lab.end_children()


def _observe(wire: Wire, from_ns: int, to_ns: int) -> Observed:
    sleep_until(from_ns)
    begin, begin_ns, begin_cpu = read_wire(wire), time.monotonic_ns(), cpu_ticks()
    sleep_until(to_ns)
    end, end_ns, end_cpu = read_wire(wire), time.monotonic_ns(), cpu_ticks()
    elapsed_s = (end_ns - begin_ns) / 1e9
    # Against the clock, not the sum of ticks: a tickless CPU counts only its idle time exactly.
    idle_s = (end_cpu[0] - begin_cpu[0]) / os.sysconf("SC_CLK_TCK") / (os.cpu_count() or 1)
    return Observed(
        elapsed_s=elapsed_s,
        wire_bytes=end.wire_bytes - begin.wire_bytes,
        wire_packets=end.frames - begin.frames,
        dropped=end.dropped_frames - begin.dropped_frames,
        cpu_idle=min(1.0, idle_s / elapsed_s),
    )


def _tokens_bits_per_s(cell: Cell, row: dict[str, Any]) -> float:
    """Return what 64 token streams take of the link, which bulk then cannot have."""
    if cell.scenario != "token-stream":
        return 0.0
    frame_bytes = TOKEN_BYTES + TCP_HEADERS_BYTES
    return float(row["sent"]) * frame_bytes * 8 / cell.duration_s


def _cpu_ns_per_packet(observed: Observed) -> int | None:
    if not observed.wire_packets:
        return None
    busy_s = (1 - observed.cpu_idle) * observed.elapsed_s * (os.cpu_count() or 1)
    return round(busy_s * 1e9 / observed.wire_packets)


def _figures(
    cell: Cell, results: dict[str, dict[str, Any]], observed: Observed
) -> tuple[list[tuple[float, float]], dict[str, Any]]:
    """Return (send time, delay) in microseconds and the fields of the row."""
    row: dict[str, Any] = {}
    if "probe-sink" in results:
        sent = dict(results["probe-source"]["sent"])
        pairs = [
            (sent[number] / 1e3, delay / 1e3)
            for number, delay in results["probe-sink"]["samples"]
            if number in sent
        ]
        pairs.sort()
        row |= _stats_fields(summarize_delays(len(sent), [delay for _, delay in pairs]))
        row |= {
            f"rr_{name}": value
            for name, value in _stats_fields(_round_trips(results["rr-client"]["samples"])).items()
        }
    elif "stream-client" in results:
        tokens = results["stream-client"]["samples"]
        pairs = [(sent / 1e3, delay / 1e3) for _, _, sent, delay in tokens]
        row |= _stats_fields(
            summarize_delays(results["stream-server"]["sent"], [delay for _, delay in pairs])
        )
        row |= _gap_fields(tokens)
    else:
        client = results.get("rr-client") or results["lease-client"]
        samples = client["samples"]
        pairs = [(sent / 1e3, delay / 1e3) for sent, delay in samples if delay is not None]
        row |= _stats_fields(_round_trips(samples))
        if "leases_lost" in client:
            row |= {"leases": client["leases"], "leases_lost": client["leases_lost"]}
    row["bulk_bits_per_s"] = _bulk_bits_per_s(cell, results, observed)
    return pairs, row


def _bulk_bits_per_s(cell: Cell, results: dict[str, dict[str, Any]], observed: Observed) -> int:
    if cell.scenario == "signal-under-flood" and cell.queue != IDLE:
        # The flood's sink reads nothing: take what crossed the wire, less the probes.
        probes = len(results["probe-source"]["sent"]) * PROBE_FRAME_BYTES
        plain = observed.wire_bytes - WIRE_OVERHEAD_BYTES * observed.wire_packets - probes
        return round(plain * 8 / observed.elapsed_s)
    if "bulk-sink" not in results:
        return 0
    sink = results["bulk-sink"]
    total = sum(payload + segments * TCP_HEADERS_BYTES for payload, segments in sink["flows"])
    return round(float(total) * 8e9 / float(sink["elapsed_ns"]))


def _round_trips(samples: Sequence[tuple[int, int | None]]) -> DelayStats:
    delays = [delay / 1e3 for _, delay in samples if delay is not None]
    return summarize_delays(len(samples), delays)


def _stats_fields(stats: DelayStats) -> dict[str, Any]:
    fields = stats.as_dict()
    return {
        **{name: fields[name] for name in ("sent", "lost", "p50_us", "p90_us", "p99_us")},
        **{name: fields[name] for name in ("p999_us", "max_us")},
        "jitter_mean_us": fields["mean_jitter_us"],
        "jitter_p99_us": fields["p99_jitter_us"],
    }


def _gap_fields(tokens: Sequence[tuple[int, int, int, int]]) -> dict[str, Any]:
    """Return the gaps between neighbouring tokens of each stream at the receiver."""
    arrivals: dict[int, list[float]] = {}
    for _, stream, sent_ns, delay_ns in tokens:
        arrivals.setdefault(stream, []).append((sent_ns + delay_ns) / 1e3)
    gaps = [gap for times in arrivals.values() for gap in jitter_us(sorted(times))]
    if not gaps:
        return {"gap_p50_us": None, "gap_p99_us": None}
    return {
        "gap_p50_us": round(quantile_nearest_rank(gaps, 0.50), 1),
        "gap_p99_us": round(quantile_nearest_rank(gaps, 0.99), 1),
    }


def _write_samples(path: Path, pairs: Sequence[tuple[float, float]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with gzip.open(path, "wt", encoding="utf-8", compresslevel=1) as file:
        json.dump([[round(at, 1), round(delay, 2)] for at, delay in pairs], file)


def run_cells(
    cells: Sequence[Cell],
    *,
    attach: AttachShaper,
    clock: str,
    samples_dir: Path,
    on_row: Callable[[dict[str, Any]], None],
    on_error: Callable[[Cell, ShapeError], None] | None = None,
) -> None:
    """Run cells on this kernel, one by one; `on_row` gets each row.

    With `on_error` a cell that fails goes there and the next one runs; without, it
    raises as `run_cell` does.
    """
    with InterruptGuard():
        for cell in cells:
            try:
                row = run_cell(cell, attach=attach, clock=clock, samples_dir=samples_dir)
            except ShapeError as error:
                if on_error is None:
                    raise
                on_error(cell, error)
            else:
                on_row(row)
