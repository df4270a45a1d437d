# SPDX-License-Identifier: Apache-2.0
"""A kernel that was booted with lockdown=confidentiality."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from enginekit import SIGNAL_UDP, Bench, UdpSink, send_datagrams, shapectl, wait_until

from shapeagent.service import doctor

pytestmark = [pytest.mark.vm, pytest.mark.netns]

LOCKDOWN = Path("/sys/kernel/security/lockdown")


@pytest.fixture
def locked_down() -> None:
    """Fail unless this kernel is locked down."""
    got = LOCKDOWN.read_text().strip()
    assert "[confidentiality]" in got, f"got {got!r}, want a kernel that is locked down"


@pytest.mark.usefixtures("locked_down")
def test_under_lockdown_attach_works_and_doctor_says_what_does_not(
    bench: Callable[..., Bench],
) -> None:
    """C118: a classifier reads no kernel memory, so the lockdown does not concern it."""
    one = bench()
    before = one.host_state()
    one.attach()
    with UdpSink(one.pair.peer_netns, SIGNAL_UDP) as sink:
        send_datagrams(one.pair, SIGNAL_UDP, 20)
        wait_until(lambda: sink.received == 20, "20 heartbeats")
    got = one.packets()
    assert got.get("signal", 0) >= 20, f"got {got}, want 20 of signal, beside ARP"
    assert one.status().problems == (), f"got {one.status().problems}, want none"
    one.engine.detach(one.device)
    assert one.host_state() == before, f"got {one.host_state()}, want {before}"
    found = {one.id: one for one in doctor.examine(one.device, netns=one.netns).findings}
    assert "confidentiality" in found["lockdown"].what, f"got {found['lockdown']}"
    assert found["lockdown"].severity == "warning", f"got {found['lockdown']}"
    assert found["bpf"].severity == "ok", f"got {found['bpf']}, want programs to load"
    ran = shapectl("--netns", one.netns, "doctor", one.device)
    assert "locked down (confidentiality)" in ran.out, f"got {ran.out}"
