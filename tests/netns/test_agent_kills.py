# SPDX-License-Identifier: Apache-2.0
"""kill -9 of the agent, a hundred times at random under traffic and changes; two agents at once."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from agentkillkit import SECOND, Updater
from agentkit import MOST_START_S, config_text, running_agent
from enginekit import (
    BULK,
    MBIT,
    NORMAL,
    Bench,
    UdpSink,
    UdpSource,
    entry,
    pinned_map_ids,
    residue_of,
    wait_until,
)
from killkit import Killer
from netlab import ip
from test_agent_api import dial

pytestmark = [
    pytest.mark.netns,
    pytest.mark.host,
    pytest.mark.skipif(os.geteuid() != 0, reason="making network namespaces needs root"),
]

KILLS = 100
MOST_LIFE_S = 0.8  # of an agent: every other one's begins when it answers
PACKETS_PER_S = 500
LISTENS = "listening: metrics on"


def table_of(one: Bench) -> str:
    return f'device = "{one.device}"\nlink_rate = "100mbit"\n'


@pytest.mark.slow
def test_a_hundred_kills_lose_nothing_acknowledged(
    bench: Callable[..., Bench], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """F1, F3: no change that was answered is lost, every packet is classified, nothing is left."""
    one = bench()
    peer = one.pair.peer_address4
    ip("link", "add", SECOND, "type", "veth", "peer", "name", "second1", netns=one.netns)
    ip("link", "set", SECOND, "up", netns=one.netns)
    before = one.glance()
    dice = random.Random(seed := random.SystemRandom().randrange(1 << 32))
    text = config_text(one, table_of(one))
    with running_agent(one, tmp_path, text) as agent:
        agent.wait_for(LISTENS, timeout_s=MOST_START_S)
        agent.wait_for(r"attached: d0", timeout_s=MOST_START_S)
        with dial(one) as remote:
            remote.whitelist_add(one.device, [entry(peer, "stream")])
        programs = set(one.state()["program_ids"].values())
        maps = pinned_map_ids(one.pins)
        agent.end(signal.SIGKILL)
    counted, began_s = one.packets(), time.monotonic()
    with contextlib.ExitStack() as stack:
        sinks = {port: stack.enter_context(UdpSink(one.pair.peer_netns, port))
                 for port in (BULK, NORMAL)}  # fmt: skip
        sources = {
            port: stack.enter_context(
                UdpSource(one.netns, (peer, port), packets_per_s=PACKETS_PER_S, size=200)
            )
            for port in sinks
        }
        updater = stack.enter_context(Updater(one, seed))
        for number in range(KILLS):
            with running_agent(one, tmp_path, text) as agent:
                if number % 2:
                    agent.wait_for(LISTENS, count=agent.text().count(LISTENS) + 1)
                time.sleep(dice.uniform(0.05, MOST_LIFE_S))  # the moment of the kill is the test
                assert agent.child.poll() is None, f"the agent ended: {agent.text()[-3000:]}"
                agent.end(signal.SIGKILL)
        took_s = time.monotonic() - began_s
        with running_agent(one, tmp_path, text) as agent:
            updater.end()
            for source in sources.values():
                source.stop.set()
                source.thread.join(5)
            sent = {port: source.sent for port, source in sources.items()}
            wait_until(
                lambda: {port: sink.received for port, sink in sinks.items()} == sent,
                "all packets to arrive",
            )
            after = one.packets()
            with dial(one) as remote:
                remote.detach(SECOND)
                remote.detach(one.device)
            agent.end()
    classified = {name: after[name] - counted.get(name, 0) for name in ("bulk", "stream")}
    with capsys.disabled():
        print(
            f"\n{KILLS} kills in {took_s:.0f} s (seed {seed}): "
            f"{updater.acknowledged.total():,} changes acknowledged "
            f"({', '.join(f'{n} {what}' for what, n in sorted(updater.acknowledged.items()))}), "
            f"{updater.cut} calls cut off, {updater.compared} comparisons, "
            f"{len(updater.lost)} changes lost; {sum(sent.values()):,} packets sent, "
            f"{sum(sent.values()) - sum(classified.values())} misclassified or lost"
        )
    assert updater.lost == [], f"got lost {updater.lost} (seed {seed})"
    assert updater.compared > KILLS / 4, f"got {updater.compared} comparisons, want more"
    assert updater.acknowledged.total() > KILLS, f"got {updater.acknowledged}, want more"
    want = {"bulk": sent[BULK], "stream": sent[NORMAL]}
    assert classified == want, f"got {classified}, want {want} (seed {seed})"
    left = residue_of(one.engine, programs, maps)
    assert left == (), f"got residue {left}, want none (seed {seed})"
    ip("link", "del", SECOND, netns=one.netns)
    assert one.glance()[:-1] == before[:-1], f"got {one.glance()}, want {before} (seed {seed})"


@pytest.mark.parametrize("steps", [28, 40, 60, 90])
def test_what_a_killed_command_left_is_undone_by_the_next_agent(
    bench: Callable[..., Bench], tmp_path: Path, steps: int
) -> None:
    """F3: nobody wants the interface attached, so nobody would come to finish it."""
    one = bench()
    before = one.glance()
    with contextlib.closing(Killer(one)) as killer:
        options = {"link_rate_bits_per_s": 100 * MBIT, "profile": "htb"}
        assert killer.run("attach", steps, **options), f"got an attach of under {steps} steps"
    with running_agent(one, tmp_path, config_text(one)) as agent:
        agent.wait_for(LISTENS, timeout_s=MOST_START_S)
        agent.wait_for(r"undone: d0")
        with dial(one) as remote:
            assert remote.status() == (), f"got {remote.status()}, want nothing attached"
    assert one.glance()[:-1] == before[:-1], f"got {one.glance()}, want {before}"
    assert residue_of(one.engine) == (), f"got residue {residue_of(one.engine)}"


def test_of_two_agents_that_start_at_once_one_serves(
    bench: Callable[..., Bench], tmp_path: Path
) -> None:
    """F16."""
    one = bench()
    text = config_text(one, table_of(one))
    folders = [tmp_path / name for name in ("a", "b")]
    for folder in folders:
        folder.mkdir()
    with contextlib.ExitStack() as stack:
        agents = [stack.enter_context(running_agent(one, folder, text)) for folder in folders]
        wait_until(
            lambda: any(agent.child.poll() is not None for agent in agents),
            "one of them to give up",
            timeout_s=MOST_START_S,
        )
        (loser,) = [agent for agent in agents if agent.child.poll() is not None]
        (winner,) = [agent for agent in agents if agent is not loser]
        assert loser.child.returncode == 5, f"got exit {loser.child.returncode}: {loser.text()}"
        assert f"(pid {winner.pid}" in loser.text(), f"got {loser.text()}, want the other's pid"
        winner.wait_for(r"attached: d0", timeout_s=MOST_START_S)
        winner.wait_for(LISTENS, timeout_s=MOST_START_S)
        with dial(one) as remote:
            assert [row.device for row in remote.status()] == [one.device]
            remote.detach(one.device)
