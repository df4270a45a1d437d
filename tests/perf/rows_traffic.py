# SPDX-License-Identifier: Apache-2.0
"""What bulk TCP over a veth loses, what the segment limit costs, what a flood does to signal."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import resource
import socket
import time
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path

from netlab_perf import LOAD_PORT, Pair, attached, pair
from perflib import Options, Result, median, row

from shapeagent.lab.children import READY_TIMEOUT_S, start_workers
from shapeagent.lab.stats import quantile_nearest_rank
from shapeagent.policy.plan import auto_segment_limit

LINK_RATE_BITS_PER_S = 100_000_000_000  # far above what a veth carries here
PAIRS = 5
WRITE_BYTES = 1 << 20
WARM_UP_S = 0.2
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _pin(number: int) -> None:
    """Keep this end on a CPU of its own, so that no run depends on where it was put."""
    cpus = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cpus[number % len(cpus)]})


def _receive(listener: socket.socket, seconds: float, answer: Connection) -> None:
    """Read for so long after a warm-up; answer (bytes, seconds, CPU seconds)."""
    _pin(1)
    connection, _ = listener.accept()
    buffer = bytearray(WRITE_BYTES)
    warm = time.perf_counter() + WARM_UP_S
    while time.perf_counter() < warm:
        connection.recv_into(buffer)
    answer.send("warm")
    got, cpu, started = 0, _cpu_s(), time.perf_counter()
    while time.perf_counter() - started < seconds:
        got += connection.recv_into(buffer)
    answer.send((got, time.perf_counter() - started, _cpu_s() - cpu))
    connection.close()


def _sends(out: socket.socket, to: tuple[str, int], answer: Connection) -> None:
    """Write until the peer closes; say the CPU time when asked, and at the end."""
    _pin(0)
    out.connect(to)
    data = bytes(WRITE_BYTES)
    with contextlib.suppress(OSError):
        while True:
            out.sendall(data)
            if answer.poll():
                answer.recv()
                answer.send(_cpu_s())
    answer.send(_cpu_s())


def _softirq_threads_s() -> float:
    """Return the CPU time of ksoftirqd, which works for both ends."""
    total = 0
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                text = (entry / "stat").read_text()
                if "(ksoftirqd" in text:
                    fields = text.rpartition(")")[2].split()
                    total += int(fields[11]) + int(fields[12])
    return total / _TICKS_PER_S


def _bulk(ends: Pair, seconds: float) -> tuple[float, float]:
    """Return (bits per second, CPU seconds per GB) of one TCP flow."""
    listener = ends.socket_at(ends.far, socket.SOCK_STREAM)
    listener.bind((ends.far.ipv4, 0))
    listener.listen(1)
    sender = ends.socket_at(ends.near, socket.SOCK_STREAM)
    context = multiprocessing.get_context("fork")
    from_receiver, receiver_end = context.Pipe()
    from_sender, sender_end = context.Pipe()
    children = [
        context.Process(target=_receive, args=(listener, seconds, receiver_end), daemon=True),
        context.Process(
            target=_sends, args=(sender, listener.getsockname(), sender_end), daemon=True
        ),
    ]
    for child in children:
        child.start()
    sender.close()
    listener.close()
    try:
        assert from_receiver.poll(10), "no bulk within 10 s"
        from_receiver.recv()
        softirq = _softirq_threads_s()
        from_sender.send(None)
        assert from_sender.poll(10), "the sender did not answer"
        sender_before = from_sender.recv()
        assert from_receiver.poll(seconds + 10), "the receiver did not answer"
        got, took, cpu = from_receiver.recv()
        assert from_sender.poll(10), "the sender did not end"
        sender_cpu = from_sender.recv() - sender_before
        softirq = _softirq_threads_s() - softirq
    finally:
        for child in children:
            child.join(10)
            if child.is_alive():
                child.kill()
    return got * 8 / took, (cpu + sender_cpu + softirq) / (got / 1e9)


@row("throughput")
def throughput(options: Options) -> Sequence[Result]:
    """One TCP flow, without and with, in turn; the segment limit is off in both.

    The median of the pairs' ratios: a pair shares its minute of a noisy
    machine, the best of each side does not.
    """
    seconds = 1.0 if not options.quick else 0.4
    results = []
    with pair() as ends:
        for profile in ("htb", "police"):
            without, with_ours = [], []
            for _ in range(options.pick(PAIRS, 2)):
                without.append(_bulk(ends, seconds)[0])
                with attached(
                    ends,
                    profile=profile,
                    link_rate_bits_per_s=LINK_RATE_BITS_PER_S,
                    segment_limit="off",
                ):
                    with_ours.append(_bulk(ends, seconds)[0])
            ratio = median([b / a for a, b in zip(without, with_ours, strict=True)])
            results.append(
                Result(
                    f"TCP throughput over veth, with / without, {profile}",
                    ratio,
                    "ratio",
                    target=0.97,
                    at_least=True,
                    note=f"median of {len(without)} pairs; best "
                    f"{max(with_ours) / 1e9:.1f} / {max(without) / 1e9:.1f} Gbit/s",
                )
            )
    return results


@row("segments")
def segment_limit_cost(options: Options) -> Sequence[Result]:
    """CPU seconds per GB under the segment limit of a link, and without one. Reported only."""
    seconds = 1.0 if not options.quick else 0.4
    results = []
    with pair() as ends:
        for link in (1_000_000_000, 10_000_000_000, None):
            limit = "off" if link is None else str(auto_segment_limit(link, 1_500))
            with attached(
                ends,
                profile="htb",
                link_rate_bits_per_s=LINK_RATE_BITS_PER_S,
                segment_limit=limit,
            ):
                runs = [_bulk(ends, seconds) for _ in range(options.pick(3, 1))]
            rate, cost = min(runs, key=lambda run: run[1])
            what = (
                "no segment limit"
                if link is None
                else (f"the segment limit of {link // 1_000_000_000} Gbit/s ({limit} B)")
            )
            results.append(
                Result(
                    f"CPU seconds per GB of bulk, {what}",
                    cost,
                    "s/GB",
                    note=f"{rate / 1e9:.1f} Gbit/s",
                )
            )
    return results


# --- a flood of new flows (F41)

FLOOD_PER_S = 10_000
FLOOD_FLOWS = 60_000  # one for each port of the far end: more than a run of this rate reaches
PROBE_EVERY_US = 2_000


def _flood(out: socket.socket, address: str, flows: int, stop: Connection) -> None:
    """Send small datagrams at a steady rate, the next one to the next of `flows` ports."""
    _pin(0)
    sent, started = 0, time.perf_counter()
    while not stop.poll():
        due = int((time.perf_counter() - started) * FLOOD_PER_S)
        while sent < due:
            with contextlib.suppress(ConnectionRefusedError):
                out.sendto(b"scan", (address, LOAD_PORT + sent % flows))
            sent += 1
        time.sleep(0.001)
    stop.send(sent)


@contextlib.contextmanager
def _flooded(ends: Pair, flows: int) -> Iterator[None]:
    """Flood from near to far while the block lasts; no flood where `flows` is 0."""
    if not flows:
        yield
        return
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    out = ends.socket_at(ends.near, socket.SOCK_DGRAM)
    child = context.Process(target=_flood, args=(out, ends.far.ipv4, flows, theirs), daemon=True)
    child.start()
    try:
        yield
        ours.send(None)
        assert ours.poll(10), "the flood did not stop"
        assert ours.recv() > FLOOD_PER_S / 2, "got less than half of the flood, want all of it"
    finally:
        child.kill()
        child.join(10)
        out.close()


def signal_p99_us(ends: Pair, seconds: float) -> float:
    """Return the 99th percentile of the one-way delay of signalling over UDP, in microseconds."""
    config: dict[str, object] = {
        "address": ends.far.ipv4,
        "tcp_port": 2379,
        "udp_port": 123,
        "interval_us": PROBE_EVERY_US,
    }
    try:
        workers = start_workers(ends.lab, (ends.far.namespace, "heartbeat-server", config))
        workers += start_workers(ends.lab, (ends.near.namespace, "heartbeat-client", config))
        start_ns = time.monotonic_ns() + 50_000_000
        from_ns = start_ns + 200_000_000
        to_ns = from_ns + int(seconds * 1e9)
        times = {"start_ns": start_ns, "from_ns": from_ns, "to_ns": to_ns}
        stop_ns = to_ns + 100_000_000
        for worker, _ in workers:
            worker.send({**times, "stop_ns": stop_ns})
        deadline_ns = stop_ns + int(READY_TIMEOUT_S * 1e9)
        client = workers[1][0].read_message(deadline_ns)
    finally:
        ends.lab.end_children()
    beats = [beat for beat in client["samples"] if beat[1] == "udp"]
    delays = [beat[4] / 1e3 for beat in beats if beat[4] is not None]
    assert len(delays) == len(beats), f"got {len(delays)} of {len(beats)} signals, want all"
    return quantile_nearest_rank(delays, 0.99)


@row("new-flows")
def flood_of_new_flows(options: Options) -> Sequence[Result]:
    """Signal beside a scan: each packet a new flow; and beside as many packets of one flow."""
    seconds = 3.0 if not options.quick else 1.0
    found: dict[int, list[float]] = {0: [], 1: [], FLOOD_FLOWS: []}
    with pair() as ends, attached(ends, profile="htb", link_rate_bits_per_s=1_000_000_000):
        for _ in range(options.pick(PAIRS, 2)):
            for flows, p99s in found.items():
                with _flooded(ends, flows):
                    p99s.append(signal_p99_us(ends, seconds))
    quiet, one_flow, scan = found.values()
    return [
        Result(
            f"signal p99 in a flood of {FLOOD_PER_S:,} new flows/s, against {what}",
            median([b / a for a, b in zip(base, scan, strict=True)]),
            "ratio",
            target=1.2,
            note=f"median of {len(scan)} interleaved pairs; "
            f"{median(scan):.0f} against {median(base):.0f} µs, one-way",
        )
        for what, base in (("quiet", quiet), ("as many packets of one flow", one_flow))
    ]
