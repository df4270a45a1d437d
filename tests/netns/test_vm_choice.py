# SPDX-License-Identifier: Apache-2.0
"""The profile that attach chooses by probing what this kernel really has."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from enginekit import SIGNAL_UDP, Bench, UdpSink, send_datagrams, wait_until

from shapeagent.model.errors import UnsupportedError

pytestmark = [pytest.mark.vm, pytest.mark.netns]

HELPER = Path("/proc/sys/kernel/modprobe")
QDISCS = ("sch_htb", "sch_prio", "sch_tbf")  # fq_codel is built in


@pytest.fixture
def without(tmp_path: Path) -> Iterator[Callable[..., None]]:
    """Give a function that takes modules away: unloaded, and never loaded again by itself."""
    before = HELPER.read_text().strip()

    def take(*names: str) -> None:
        script = tmp_path / "modprobe"
        patterns = "|".join(f"*{name}" for name in names)
        refuse = f'case "$*" in {patterns}) exit 1;; esac'
        script.write_text(f'#!/bin/sh\n{refuse}\nexec {before} "$@"\n')
        script.chmod(0o755)
        HELPER.write_text(str(script))
        for name in names:
            subprocess.run(["modprobe", "-r", name], check=True, timeout=60)
            assert f"{name} " not in Path("/proc/modules").read_text(), f"got {name} loaded"

    try:
        yield take
    finally:
        HELPER.write_text(before)


def attached_by_choice(one: Bench) -> tuple[str, str]:
    """Return the profile and the reason of an attach that names none; traffic must pass."""
    before = one.host_state()
    plan = one.attach().plan
    with UdpSink(one.pair.peer_netns, SIGNAL_UDP) as sink:
        send_datagrams(one.pair, SIGNAL_UDP, 20)
        wait_until(lambda: sink.received == 20, "20 heartbeats")
    assert one.status().problems == (), f"got {one.status().problems}, want none"
    one.engine.detach(one.device)
    assert one.host_state() == before, f"got {one.host_state()}, want {before}"
    return plan.profile, plan.profile_reason


def test_a_full_kernel_gets_htb(bench: Callable[..., Bench]) -> None:
    profile, reason = attached_by_choice(bench())
    assert profile == "htb", f"got {profile} ({reason}), want htb"
    assert "the kernel has htb" in reason, f"got {reason}"


def test_without_htb_it_is_prio(bench: Callable[..., Bench], without: Callable[..., None]) -> None:
    without("sch_htb")
    one = bench()
    profile, reason = attached_by_choice(one)
    assert profile == "prio", f"got {profile} ({reason}), want prio"
    assert "no qdisc htb" in reason, f"got {reason}, want why not htb"
    with pytest.raises(UnsupportedError) as caught:
        one.attach(profile="htb")
    assert caught.value.reference == "profile-unsupported", f"got {caught.value.reference}"
    assert "modprobe sch_htb" in (caught.value.hint or ""), f"got {caught.value.hint}"


def test_without_htb_and_tbf_a_slower_link_gets_police(
    bench: Callable[..., Bench], without: Callable[..., None]
) -> None:
    """prio alone holds no link rate."""
    without("sch_htb", "sch_tbf")
    profile, reason = attached_by_choice(bench())
    assert profile == "police", f"got {profile} ({reason}), want police"


def test_where_there_is_nothing_it_is_police(
    bench: Callable[..., Bench], without: Callable[..., None]
) -> None:
    without(*QDISCS)
    profile, reason = attached_by_choice(bench())
    assert profile == "police", f"got {profile} ({reason}), want police"
    assert "no qdisc htb" in reason, f"got {reason}, want why not htb"


def test_asking_for_chains_loads_no_module(
    bench: Callable[..., Bench], without: Callable[..., None]
) -> None:
    """An IFB asks whether nftables stands on its hook; where it is not loaded, nobody does."""
    for name in ("nf_tables", "nfnetlink"):
        subprocess.run(["modprobe", "-r", name], check=False, capture_output=True, timeout=60)
    assert "nf_tables " not in Path("/proc/modules").read_text(), "got nf_tables loaded, want not"
    one = bench()
    one.attach(ingress="ifb")
    assert one.status().problems == (), f"got {one.status().problems}, want none"
    found = Path("/proc/modules").read_text()
    for name in ("nf_tables ", "nfnetlink "):
        assert name not in found, f"got {name}loaded by looking, want not"
