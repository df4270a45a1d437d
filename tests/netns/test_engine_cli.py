# SPDX-License-Identifier: Apache-2.0
"""The main job by the command line alone, each step a process of its own."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from enginekit import (
    BULK,
    MBIT,
    Bench,
    Ran,
    UdpSink,
    UdpSource,
    pause,
    rate_of,
    shapectl,
    steady_rate,
    wait_until,
)
from netlab import VethPair

from shapeagent.service.engine import Engine

pytestmark = [
    pytest.mark.netns,
    pytest.mark.skipif(os.geteuid() != 0, reason="making network namespaces needs root"),
]


@pytest.fixture
def typed(veth_pair: Callable[..., VethPair]) -> Iterator[tuple[Bench, Callable[..., Ran]]]:
    """Give a device and what types commands for its namespace; it is detached afterwards."""
    pair = veth_pair()
    one = Bench(Engine(netns=pair.netns), pair.netns, pair.device, pair)

    def run(*arguments: str, code: int = 0) -> Ran:
        ran = shapectl("--netns", pair.netns, *arguments)
        assert ran.code == code, f"got exit {ran.code} of {arguments}: {ran.err}, want {code}"
        assert "Traceback" not in ran.err, f"got {ran.err}"
        return ran

    before = one.host_state().tree
    try:
        yield one, run
    finally:
        run("detach", pair.device)
    after = one.host_state()
    assert after.tree == before, f"got {after.tree} after detach, want {before}"
    assert after.filters == (), f"got {after.filters} after detach, want none"


def json_of(ran: Ran) -> Any:
    return json.loads(ran.out)


@pytest.mark.host
def test_from_dry_run_to_status(typed: tuple[Bench, Callable[..., Ran]], tmp_path: Path) -> None:
    """Attach, explain four packets, import 100,000 entries, and look."""
    one, run = typed
    rate = ("--link-rate", "100mbit")
    plan = run("attach", one.device, *rate, "--dry-run")
    assert "nothing was changed" in plan.out, f"got {plan.out}"
    run("status", one.device, code=5)
    run("attach", one.device, *rate)
    path = tmp_path / "list"
    lines = [f"10.{n >> 16 & 255}.{n >> 8 & 255}.{n & 255}" for n in range(99_999)]
    path.write_text("\n".join([*lines, "203.0.113.0/24", ""]))
    done = json_of(run("whitelist", "import", str(path), "--class", "stream", "--json"))
    assert done["total"] == 100_000, f"got {done}, want 100,000 entries"
    for words, name, reason in (
        (("192.0.2.1:40000", "203.0.113.9:9000"), "stream", "whitelist-prefix"),
        (("192.0.2.1:40000", "192.0.2.2:2379"), "signal", "rule-port"),
        (("192.0.2.1:40000", "192.0.2.2:9000"), "normal", "default"),
        (("[2001:db8::1]:40000", "[2001:db8::2]:2049"), "bulk", "rule-port"),
    ):
        got = json_of(run("explain", *words, "--json"))
        assert (got["traffic_class"], got["reason"]) == (name, reason), f"got {got} for {words}"
    text = run("status").out
    assert "100,000 entries" in text, f"got {text}, want the whitelist counted"


@pytest.mark.rates
def test_a_lease_ends_while_nothing_of_ours_runs(
    typed: tuple[Bench, Callable[..., Ran]],
) -> None:
    """`class set bulk --ceiling 20mbit --for 2s`, below the built-in safe ceiling of 50 %."""
    one, run = typed
    run("attach", one.device, "--link-rate", "100mbit")
    target = (one.pair.peer_address4, BULK)
    with (
        UdpSink(one.pair.peer_netns, BULK) as sink,
        UdpSource(one.netns, target, bits_per_s=60 * MBIT) as source,
    ):
        run("class", "set", "bulk", "--ceiling", "20mbit", "--for", "2s")
        pause(0.4)
        live = rate_of(sink.wire_bits, 0.8)
        wait_until(lambda: one.classes()["bulk"].lease_s_left == 0, "the lease to end")
        pause(0.4)
        safe = steady_rate(sink.wire_bits, 50 * MBIT, 0.03)
        assert source.sent > 1000, f"got {source.sent} datagrams, want a running sender"
    rows = json_of(run("class", "show", "--json"))
    assert abs(live / (20 * MBIT) - 1) <= 0.05, f"got {live / MBIT:.1f} Mbit/s live, want 20"
    assert abs(safe / (50 * MBIT) - 1) <= 0.03, f"got {safe / MBIT:.1f} Mbit/s after, want 50"
    assert '"lease_s_left": 0' in json.dumps(rows), f"got {rows}, want the lease over"


def test_an_attach_is_confirmed_by_another_command(
    typed: tuple[Bench, Callable[..., Ran]],
) -> None:
    one, run = typed
    words = ("--link-rate", "100mbit", "--profile", "police")
    text = run("attach", one.device, *words, "--confirm", "60s").out
    assert "unless: shapectl --netns" in text, f"got {text}, want the command that keeps it"
    assert "not confirmed: undone in" in run("status").out
    refused = run("attach", one.device, *words, "--confirm", "60s", code=5)
    assert "confirm-attached" in refused.err, f"got {refused.err}"
    done = json_of(run("confirm", "--json"))
    assert done["device"] == one.device, f"got {done}"
    assert 0 < done["left_s"] <= 60, f"got {done}"
    assert "not confirmed" not in run("status").out
    again = run("confirm", one.device, code=5)
    assert "nothing-to-confirm" in again.err, f"got {again.err}"
    odd = run("attach", one.device, *words, "--confirm", "1s", code=2)
    assert "bad-confirm" in odd.err, f"got {odd.err}"
