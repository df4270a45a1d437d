# SPDX-License-Identifier: Apache-2.0
"""kill -9 between any two steps of attach and detach: the next command finishes or undoes it."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from enginekit import BULK, MBIT, SIGNAL_UDP, Bench, UdpSink, UdpSource, wait_until
from killkit import Killer, each_step
from netlab import tc

from shapeagent.kernel import tcx

pytestmark = [
    pytest.mark.netns,
    pytest.mark.slow,
    pytest.mark.host,
    pytest.mark.skipif(os.geteuid() != 0, reason="making network namespaces needs root"),
]

RATE = 100 * MBIT
WAYS: dict[str, dict[str, Any]] = {
    "htb": {"profile": "htb"},
    "police": {"profile": "police"},
    "police, clsact": {"profile": "police", "hook": "clsact"},
    "ifb": {"profile": "htb", "ingress": "ifb"},
    "takeover": {"profile": "htb", "takeover": True},
}
FOREIGN = (
    ("qdisc", "add", "dev", "{}", "root", "handle", "5:", "htb", "default", "1"),
    ("class", "add", "dev", "{}", "parent", "5:", "classid", "5:1", "htb", "rate", "1gbit"),
    ("qdisc", "add", "dev", "{}", "parent", "5:1", "handle", "6:", "pfifo", "limit", "100"),
)


@pytest.fixture
def one(bench: Callable[..., Bench]) -> Bench:
    made = bench()
    made.attach()  # the image is compiled, and no kill costs seconds
    made.engine.detach(made.device)
    return made


@pytest.fixture
def killer(one: Bench) -> Iterator[Killer]:
    made = Killer(one)
    yield made
    made.close()


@contextlib.contextmanager
def traffic(one: Bench) -> Iterator[Callable[[], tuple[int, int]]]:
    """Send signal and bulk meanwhile; gives (signal, bulk) that were sent and did not arrive."""
    pair = one.pair
    with contextlib.ExitStack() as stack:
        flows = []
        for port, rate in ((SIGNAL_UDP, 200), (BULK, 200)):
            sink = stack.enter_context(UdpSink(pair.peer_netns, port))
            target = (pair.peer_address4, port)
            source = UdpSource(pair.netns, target, packets_per_s=rate, size=64)
            flows.append((stack.enter_context(source), sink))

        def lost() -> tuple[int, int]:
            for source, _ in flows:
                source.end()
            with contextlib.suppress(AssertionError):
                wait_until(
                    lambda: all(sink.received == source.sent for source, sink in flows),
                    "what is on its way",
                    timeout_s=1.0,
                )
            signal, bulk = (source.sent - sink.received for source, sink in flows)
            return signal, bulk

        yield lost


@pytest.mark.parametrize(
    ("way", "operation"),
    [
        *itertools.product(WAYS, ("attach", "detach")),
        # a swap touches programs and pins alone, whatever the tree is
        *itertools.product(("htb", "police, clsact", "ifb"), ("swap",)),
    ],
)
def test_a_kill_at_any_step_is_undone_or_finished_by_the_next_command(
    one: Bench, killer: Killer, way: str, operation: str
) -> None:
    """The next command is attach after every second kill, else detach."""
    options = {"link_rate_bits_per_s": RATE, **WAYS[way]}
    for line in FOREIGN if way == "takeover" else ():
        tc(*(word.format(one.device) for word in line), netns=one.netns)
    before = one.host_state()
    outcomes = {"as before": 0, "attached": 0}

    def kill(number: int) -> bool:
        if operation != "attach" and not (one.engine.run_dir / one.key / "state.json").exists():
            one.attach(**options)
        return killer.run(operation, number, **options)

    def recover(number: int) -> None:
        where = f"killed before step {number} of {operation}"
        if number % 2:
            one.attach(**options)
            status = one.status()
            assert status.problems == (), f"got {status.problems}, {where}"
            outcomes["attached"] += 1
        one.engine.detach(one.device)
        found = one.host_state()
        assert found == before, f"got {found}, want {before}, {where}"
        outcomes["as before"] += 1

    with traffic(one) as lost:
        steps = each_step(kill, recover)
        if operation != "detach":
            one.engine.detach(one.device)
        lost_signal, lost_bulk = lost()
    assert one.host_state() == before
    print(
        f"{way}, kill in {operation}: {steps} steps, {outcomes}, "
        f"lost {lost_signal} signal, {lost_bulk} bulk"
    )
    assert steps >= 10, f"got {steps} steps, want them found"
    if way == "police" and tcx.is_supported():
        assert (lost_signal, lost_bulk) == (0, 0), "want nothing lost where no qdisc is touched"
    # Where a root qdisc or clsact comes or goes, the kernel takes the device's queue away for up
    # to a few milliseconds (net/sched/sch_api.c, qdisc_graft: dev_deactivate), and what is sent
    # then is lost, of 200 datagrams a second. A kill and what follows it do that up to four times.
    most = 4 * steps
    assert lost_signal <= most, f"got {lost_signal} datagrams of signal lost, want at most {most}"
    assert lost_bulk <= most, f"got {lost_bulk} datagrams of bulk lost, want at most {most}"
