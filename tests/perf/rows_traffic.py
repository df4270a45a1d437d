# SPDX-License-Identifier: Apache-2.0
"""What bulk TCP over a veth loses, and what the segment limit costs in CPU time."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import resource
import socket
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path

from netlab_perf import Pair, attached, pair
from perflib import Options, Result, median, row

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
