# SPDX-License-Identifier: Apache-2.0
"""Per-CPU counters while a CPU goes and comes back."""

from __future__ import annotations

import contextlib
import os
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from enginekit import BULK, Bench, open_socket, send_datagrams

from shapeagent.kernel import bpf
from shapeagent.kernel.probe import read_possible_cpus

pytestmark = [pytest.mark.vm, pytest.mark.netns]

CPUS = Path("/sys/devices/system/cpu")


@pytest.fixture
def other_cpu() -> Iterator[int]:
    """Give a CPU that can be taken offline; afterwards it is online again."""
    found = sorted(path.parent for path in CPUS.glob("cpu[0-9]*/online"))
    assert found, "got one CPU, want a machine with two that can be taken offline"
    cpu = int(found[-1].name.removeprefix("cpu"))
    allowed = os.sched_getaffinity(0)
    try:
        yield cpu
    finally:
        set_online(cpu, True)
        os.sched_setaffinity(0, allowed)


def set_online(cpu: int, online: bool) -> None:
    path = CPUS / f"cpu{cpu}" / "online"
    path.write_text("1" if online else "0")
    got = path.read_text().strip()
    assert got == str(int(online)), f"got {got} in {path}, want {int(online)}"


def send_from(one: Bench, cpu: int, count: int) -> None:
    """Send bulk datagrams from one CPU: the program counts on the CPU that sends."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {cpu})
    try:
        send_datagrams(one.pair, BULK, count)
    finally:
        os.sched_setaffinity(0, before)


def per_cpu(one: Bench, cpus: int) -> list[int]:
    """Return the packets of bulk on egress, one number for each possible CPU."""
    number = one.classes()["bulk"].number
    descriptor = bpf.get_pinned(str(one.pins / "counts"))
    try:
        shape = bpf.map_shape(descriptor)
        raw = bpf.lookup(descriptor, struct.pack("=I", number), shape.value_bytes * cpus)
    finally:
        os.close(descriptor)
    assert raw is not None
    return [struct.unpack_from("=Q", raw, cpu * shape.value_bytes)[0] for cpu in range(cpus)]


def test_totals_are_monotonic_while_a_cpu_goes_and_comes_back(
    bench: Callable[..., Bench], other_cpu: int
) -> None:
    """C102: the sum is over all possible CPUs, offline ones too."""
    one = bench()
    one.attach(profile="htb")
    cpus = read_possible_cpus()
    assert cpus > other_cpu, f"got {cpus} possible CPUs, want more than {other_cpu}"
    with contextlib.closing(open_socket(one.pair.peer_netns)) as sink:
        sink.bind(("0.0.0.0", BULK))
        send_datagrams(one.pair, BULK, 1)
        total = one.packets()["bulk"]

        def step(what: str, sent: int) -> None:
            nonlocal total
            status = one.classes()["bulk"]
            shares = per_cpu(one, cpus)
            assert status.packets == total + sent, f"{what}: got {status.packets}, want +{sent}"
            assert sum(shares) == status.packets, f"{what}: got {shares}, want {status.packets}"
            assert status.wire_bytes > 0
            total = status.packets

        send_from(one, other_cpu, 70)
        step("sent there", 70)
        assert per_cpu(one, cpus)[other_cpu] >= 70, f"got {per_cpu(one, cpus)}, want 70 there"
        set_online(other_cpu, False)
        step("offline", 0)
        send_from(one, 0, 30)
        step("sent while offline", 30)
        set_online(other_cpu, True)
        step("online again", 0)
        send_from(one, other_cpu, 20)
        step("sent there again", 20)
        for online in (False, True) * 3:
            set_online(other_cpu, online)
            send_from(one, 0, 5)
            step("flapping", 5)
    assert one.status().problems == (), f"got {one.status().problems}, want none"
