# SPDX-License-Identifier: Apache-2.0
"""The agent against what happens to a host: hostile owners, lost devices, kills, two agents."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from agentkit import MOST_START_S, config_text, running_agent
from enginekit import BULK, Bench, UdpSink, UdpSource, shapectl, wait_growth, wait_until
from netlab import ip, tc

from shapeagent.model.agentschema import load_agent_config
from shapeagent.model.errors import ShapeError
from shapeagent.service.daemon import Agent

pytestmark = [
    pytest.mark.netns,
    pytest.mark.skipif(os.geteuid() != 0, reason="making network namespaces needs root"),
]

ATTACHED = r"attached: d0"
PUT_BACK = r"put-back: d0: our tree"
UNIT_CAPABILITIES = "-all,+bpf,+net_admin,+net_raw,+perfmon"  # packaging/shapectl-agent.service


def interface(one: Bench, more: str = "") -> str:
    return f'device = "{one.device}"\nlink_rate = "100mbit"\n{more}'


def root_of(one: Bench) -> str:
    return tc("qdisc", "show", "dev", one.device, "root", netns=one.netns).split()[1]


def ids_of(one: Bench) -> dict[str, int]:
    found: dict[str, int] = one.state()["program_ids"]
    return found


@pytest.mark.host
def test_it_attaches_what_is_wanted_and_leaves_it_attached(
    bench: Callable[..., Bench], tmp_path: Path
) -> None:
    one = bench()
    with running_agent(one, tmp_path, config_text(one, interface(one))) as agent:
        agent.wait_for(ATTACHED, timeout_s=MOST_START_S)
        assert root_of(one) == "htb", f"got root {root_of(one)}, want htb"
        assert agent.end() == 0, f"got {agent.text()}, want exit 0"
    assert root_of(one) == "htb", f"got root {root_of(one)} after the end, want htb"
    assert one.status().problems == (), f"got {one.status().problems}, want none"


@pytest.mark.host
def test_rollback_puts_back_what_was_there(bench: Callable[..., Bench], tmp_path: Path) -> None:
    one = bench()
    before = one.glance()
    text = config_text(one, interface(one), agent='on_exit = "rollback"')
    with running_agent(one, tmp_path, text) as agent:
        agent.wait_for(ATTACHED, timeout_s=MOST_START_S)
        agent.end(signal.SIGINT)
    assert one.glance()[:-1] == before[:-1], f"got {one.glance()}, want {before}"


def test_a_killed_agent_is_followed_by_one_that_adopts(
    bench: Callable[..., Bench], tmp_path: Path
) -> None:
    """F1, F16: traffic is classified all the time, nothing is compiled or attached again."""
    one = bench()
    text = config_text(one, interface(one))
    with running_agent(one, tmp_path, text) as agent:
        agent.wait_for(ATTACHED, timeout_s=MOST_START_S)
        programs = ids_of(one)
        target = (one.pair.peer_address4, BULK)
        with (
            UdpSink(one.pair.peer_netns, BULK) as sink,
            UdpSource(one.netns, target, packets_per_s=1_000, size=100) as source,
        ):
            wait_until(lambda: sink.received > 50, "bulk to arrive")
            agent.end(signal.SIGKILL)
            with running_agent(one, tmp_path, text) as agent:
                agent.wait_for(ATTACHED, count=2, timeout_s=MOST_START_S)
                wait_growth(lambda: sink.received, 100, "bulk to go on")
            source.stop.set()
            source.thread.join(5)
            wait_until(lambda: sink.received == source.sent, "all of it to arrive")
        counted = one.packets()["bulk"]
        assert counted == source.sent, f"got {counted} counted as bulk, want {source.sent}"
        assert ids_of(one) == programs, f"got programs {ids_of(one)}, want {programs}"
        assert agent.text().count("compiling") <= 1, f"got {agent.text()}, want one compile"


@pytest.mark.host
def test_a_second_agent_is_told_who_has_the_lock(
    bench: Callable[..., Bench], tmp_path: Path
) -> None:
    one = bench()
    with running_agent(one, tmp_path, config_text(one)) as agent:
        wait_until(lambda: (one.engine.run_dir / "lock").exists(), "the lock")
        wait_until(lambda: str(agent.pid) in (one.engine.run_dir / "lock").read_text(), "its pid")
        began_s = time.monotonic()
        ran = shapectl("--netns", one.netns, "agent", "run", "--config", str(agent.config))
        took_s = time.monotonic() - began_s
    assert ran.code == 5, f"got exit {ran.code}: {ran.err}, want 5"
    assert str(agent.pid) in ran.err, f"got {ran.err}, want pid {agent.pid}"
    assert took_s > 1.9, f"got {took_s} s, want two of waiting"


def test_a_replaced_qdisc_comes_back_within_a_second(
    bench: Callable[..., Bench], tmp_path: Path
) -> None:
    """F9."""
    one = bench()
    with running_agent(one, tmp_path, config_text(one, interface(one))) as agent:
        agent.wait_for(ATTACHED, timeout_s=MOST_START_S)
        began_s = time.monotonic()
        tc("qdisc", "replace", "dev", one.device, "root", "pfifo", "limit", "100", netns=one.netns)
        wait_until(lambda: root_of(one) == "htb", "ours")
        took_s = time.monotonic() - began_s
        agent.wait_for(r"put-back: d0: our tree is gone: root qdisc \"pfifo")
    assert took_s < 1.0, f"got {took_s:.2f} s, want under 1"
    assert one.status().problems == (), f"got {one.status().problems}, want none"


@pytest.mark.host
def test_it_yields_to_an_owner_who_insists_and_returns_when_they_leave(
    bench: Callable[..., Bench], tmp_path: Path
) -> None:
    one = bench()
    with running_agent(one, tmp_path, config_text(one, interface(one))) as agent:
        agent.wait_for(ATTACHED, timeout_s=MOST_START_S)
        stop = threading.Event()
        words = ("qdisc", "replace", "dev", one.device, "root", "pfifo", "limit", "100")

        def insist() -> None:
            while not stop.wait(0.05):
                if root_of(one) != "pfifo":
                    tc(*words, netns=one.netns)

        hostile = threading.Thread(target=insist)
        hostile.start()
        try:
            agent.wait_for(r"yielded: d0: our tree.*pfifo", timeout_s=60.0)
            tries = agent.text().count("put-back: d0: our tree")
            assert tries == 5, f"got {tries} tries: {agent.text()}, want 5"
        finally:
            stop.set()
            hostile.join()
        assert root_of(one) == "pfifo", f"got root {root_of(one)}, want theirs"
        tc("qdisc", "del", "dev", one.device, "root", netns=one.netns)
        wait_until(lambda: root_of(one) == "htb", "ours again")
        agent.wait_for(r"attached: d0", count=2)


def test_a_lost_program_is_put_back_with_its_counters(
    bench: Callable[..., Bench], tmp_path: Path
) -> None:
    """A tcx link sends no message: the look every half second finds it."""
    one = bench()
    with running_agent(one, tmp_path, config_text(one, interface(one, 'hook = "clsact"'))) as agent:
        agent.wait_for(ATTACHED, timeout_s=MOST_START_S)
        programs = ids_of(one)
        tc("qdisc", "del", "dev", one.device, "clsact", netns=one.netns)
        agent.wait_for(r"put-back: d0: our ingress program")
        agent.wait_for(r"put-back: d0: our egress program")
        wait_until(lambda: one.status().problems == (), "no problem")
    assert ids_of(one) == programs, f"got {ids_of(one)}, want {programs}"


@pytest.mark.host
def test_a_device_that_comes_later_or_again_is_attached(
    bench: Callable[..., Bench], tmp_path: Path
) -> None:
    """F12, F34."""
    one = bench()
    new = 'device = "late0"\nlink_rate = "1gbit"'
    add = ("link", "add", "late0", "type", "veth", "peer", "name", "late1")
    with running_agent(one, tmp_path, config_text(one, interface(one), new)) as agent:
        agent.wait_for(ATTACHED, timeout_s=MOST_START_S)
        agent.wait_for(r"waiting: late0: the interface does not exist")
        for count in (1, 2):
            ip(*add, netns=one.netns)
            ip("link", "set", "late0", "up", netns=one.netns)
            agent.wait_for(r"attached: late0", count=count)
            wait_until(lambda: one.engine.status("late0")[0].problems == (), "no problem")
            ip("link", "del", "late0", netns=one.netns)
            agent.wait_for(r"waiting: late0", count=count + 1)
        agent.end()
    one.engine.detach("late0")


@pytest.mark.host
def test_a_link_that_changes_is_followed(bench: Callable[..., Bench], tmp_path: Path) -> None:
    """F11."""
    one = bench()
    with running_agent(one, tmp_path, config_text(one, interface(one))) as agent:
        agent.wait_for(ATTACHED, timeout_s=MOST_START_S)
        before = one.state()["facts"]["mtu"]
        ip("link", "set", one.device, "mtu", "4000", netns=one.netns)
        agent.wait_for(r"repaired: d0: d0 has MTU")
        wait_until(lambda: one.status().problems == (), "no problem")
        got = one.state()["facts"]["mtu"]
        ip("link", "set", one.device, "mtu", str(before), netns=one.netns)
        agent.wait_for(r"repaired: d0: d0 has MTU", count=2)
    assert got == 4000, f"got MTU {got}, want 4000"


@pytest.mark.host
def test_a_flood_of_link_messages_costs_little(bench: Callable[..., Bench], tmp_path: Path) -> None:
    """F15, peers 14: a burst of messages is one look, and lost ones lose nothing."""
    one = bench()
    with running_agent(one, tmp_path, config_text(one, interface(one))) as agent:
        agent.wait_for(ATTACHED, timeout_s=MOST_START_S)
        lines = []
        for number in range(500):
            lines += [f"link add f{number} type dummy", f"link del f{number}"]
        batch = tmp_path / "batch"
        batch.write_text("\n".join(lines).replace("dummy", "ifb"))
        ip("-batch", str(batch), netns=one.netns)
        tc("qdisc", "replace", "dev", one.device, "root", "pfifo", netns=one.netns)
        agent.wait_for(PUT_BACK)
        used = sum(
            map(int, Path(f"/proc/{agent.pid}/stat").read_text().rsplit(")")[1].split()[11:13])
        )
    assert used < 3 * os.sysconf("SC_CLK_TCK"), f"got {used} ticks, want under 3 s of CPU"


@pytest.mark.host
def test_a_wrong_configuration_starts_nothing_and_changes_nothing_later(
    bench: Callable[..., Bench], tmp_path: Path
) -> None:
    """F39."""
    one = bench()
    wrong = tmp_path / "wrong.toml"
    wrong.write_text("[agent]\nreconsile = 3\n")
    ran = shapectl("--netns", one.netns, "agent", "run", "--config", str(wrong))
    assert ran.code == 2, f"got exit {ran.code}, want 2"
    assert 'line 2: agent.reconsile: is not a known key; did you mean "reconcile"?' in ran.err
    ran = shapectl("agent", "run", "--config", str(tmp_path / "none.toml"))
    assert (ran.code, "file-missing" in ran.err) == (2, True), f"got {ran}"
    with running_agent(one, tmp_path, config_text(one, interface(one))) as agent:
        agent.wait_for(ATTACHED, timeout_s=MOST_START_S)
        good = agent.config.read_text()
        agent.config.write_text(good + "\n[nonsense]\n")
        agent.child.send_signal(signal.SIGHUP)
        agent.wait_for(r"config-refused: .*nonsense: is not a known key")
        agent.config.unlink()
        agent.child.send_signal(signal.SIGHUP)
        agent.wait_for(r"config-refused", count=2)
        assert root_of(one) == "htb", f"got root {root_of(one)}, want htb"
        agent.config.write_text(good)
        agent.child.send_signal(signal.SIGHUP)
        agent.wait_for(r"config-reloaded")


@pytest.mark.host
def test_systemd_hears_of_it(bench: Callable[..., Bench], tmp_path: Path) -> None:
    one = bench()
    path = tmp_path / "notify"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(str(path))
        listener.settimeout(MOST_START_S)
        env = {"NOTIFY_SOCKET": str(path), "WATCHDOG_USEC": "900000"}
        with running_agent(one, tmp_path, config_text(one, interface(one)), env=env) as agent:
            got = [listener.recv(200) for _ in range(3)]
            assert got[0] == b"READY=1", f"got {got}, want READY=1 first"
            assert b"attached: d0" in agent.log.read_bytes(), "got ready before the attach"
            assert got[1:] == [b"WATCHDOG=1"] * 2, f"got {got}, want the watchdog fed"
            agent.end()
        left = []
        listener.settimeout(1.0)
        try:
            while True:
                left.append(listener.recv(200))
        except TimeoutError:
            pass
    assert b"STOPPING=1" in left, f"got {left}, want STOPPING=1"


@pytest.mark.host
def test_a_stopped_agent_is_no_danger_and_goes_on(
    bench: Callable[..., Bench], tmp_path: Path
) -> None:
    """F2, F36: others get exit 5 and its pid, and a lease ends by the kernel."""
    one = bench()
    with running_agent(one, tmp_path, config_text(one, interface(one))) as agent:
        agent.wait_for(ATTACHED, timeout_s=MOST_START_S)
        agent.child.send_signal(signal.SIGSTOP)
        try:
            with pytest.raises(ShapeError) as caught:
                one.engine.detach(one.device)
            assert caught.value.reference == "locked", f"got {caught.value.reference}"
            assert str(agent.pid) in caught.value.message, f"got {caught.value.message}"
        finally:
            agent.child.send_signal(signal.SIGCONT)
        tc("qdisc", "del", "dev", one.device, "root", netns=one.netns)
        wait_until(lambda: root_of(one) == "htb", "it to go on")


def test_cap_sys_admin_is_not_needed(bench: Callable[..., Bench], tmp_path: Path) -> None:
    """As under its systemd unit: what needs that one is found out before, by `agent prepare`."""
    one = bench()
    text = config_text(one, interface(one))
    prefix = ("setpriv", f"--bounding-set={UNIT_CAPABILITIES}")
    with running_agent(one, tmp_path, text, prefix=prefix) as agent:
        agent.wait_for(r"failed: d0: needs-root-cli: .*CAP_SYS_ADMIN", timeout_s=MOST_START_S)
        ran = shapectl("agent", "prepare", "--config", str(agent.config))
        assert ran.code == 0, f"got {ran}"
        agent.wait_for(ATTACHED, timeout_s=MOST_START_S)
        tc("qdisc", "replace", "dev", one.device, "root", "pfifo", netns=one.netns)
        agent.wait_for(PUT_BACK)
        status = Path(f"/proc/{agent.pid}/status").read_text()
        words = ("--agent", f"unix:{one.engine.run_dir}/admin.sock", "whitelist")
        for address in ("203.0.113.1", "203.0.113.2", "198.51.100.0/24"):
            ran = shapectl(*words, "add", address, "--class", "stream", "--device", one.device)
            assert ran.code == 0, f"got {ran}"
        agent.end(signal.SIGKILL)
    with running_agent(one, tmp_path, text, prefix=prefix) as agent:
        # the lists of the other process: the first change replaces them, the next are in place
        for verb, address in (("remove", "203.0.113.1"), ("add", "203.0.113.3")):
            more = ("--class", "stream") if verb == "add" else ()
            agent.wait_for(r"listening: metrics on", count=2, timeout_s=MOST_START_S)
            ran = shapectl(*words, verb, address, *more, "--device", one.device)
            assert ran.code == 0, f"got {ran}"
    listed = {row.destination or row.source for row in one.engine.whitelist_list(one.device)}
    assert listed == {"203.0.113.2", "203.0.113.3", "198.51.100.0/24"}, f"got {listed}"
    assert one.status().problems == (), f"got {one.status().problems}, want none"
    effective = int(status.split("CapEff:")[1].split()[0], 16)
    assert not effective >> 21 & 1, f"got CapEff {effective:#x}, want no CAP_SYS_ADMIN"


@pytest.mark.host
def test_nothing_in_the_agent_forks(bench: Callable[..., Bench]) -> None:
    """Its threads and gRPC's would be lost; the compiler is started by exec."""
    one = bench()
    agent = Agent(load_agent_config(config_text(one, interface(one)), "test"), netns=one.netns)
    thread = threading.Thread(target=agent.run)
    fork = os.fork
    thread.start()
    try:
        wait_until(lambda: os.fork is not fork, "the guard")
        with pytest.raises(RuntimeError, match="must not fork"):
            os.fork()
        wait_until(
            lambda: any(event.kind == "attached" for event in agent.events.after(0)[0]),
            "the attach, with its compile",
            timeout_s=MOST_START_S,
        )
    finally:
        agent.stop()
        thread.join(30)
    assert os.fork is fork, "got the guard left, want os.fork back"
