# SPDX-License-Identifier: Apache-2.0
"""The agent on a full disk, and when somebody sets the clock.

The disk is a tmpfs of 4 MB in a mount namespace of the agent's own. The clock of Unix time
cannot be had in a namespace (time namespaces have only CLOCK_MONOTONIC and CLOCK_BOOTTIME), so
there `time.time` is replaced in the agent's process; the other two are really another's.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import signal
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
from agentkit import MOST_START_S, AgentProcess, config_text, running_agent
from enginekit import (
    BULK,
    MBIT,
    Bench,
    UdpSink,
    UdpSource,
    entry,
    environment,
    wait_growth,
    wait_until,
)
from netlab import tc
from test_agent_api import dial, root_of

from shapeagent.client.remote import RemoteEngine
from shapeagent.model.errors import ShapeError

pytestmark = [
    pytest.mark.netns,
    pytest.mark.host,
    pytest.mark.skipif(os.geteuid() != 0, reason="making network namespaces needs root"),
]

LISTENS = "listening: metrics on"


def table_of(one: Bench) -> str:
    return f'device = "{one.device}"\nlink_rate = "100mbit"\n'


# --- a full disk


def folders_of(one: Bench) -> dict[str, Path]:
    return {name: Path(f"{one.engine.run_dir}-{name}") for name in ("lib", "log")}


@contextlib.contextmanager
def on_small_disks(one: Bench, folder: Path, *small: str) -> Iterator[AgentProcess]:
    """Give an agent whose folders of these names are file systems of 4 MB each."""
    paths = [str(path) for name, path in folders_of(one).items() if name in small]
    for path in folders_of(one).values():
        path.mkdir()
    mount = 'for one in $0; do mount -t tmpfs -o size=4m none "$one" || exit; done; exec "$@"'
    prefix = ("unshare", "--mount", "--propagation", "private", "sh", "-c", mount, " ".join(paths))
    with running_agent(one, folder, config_text(one, table_of(one)), prefix=prefix) as agent:
        agent.wait_for(r"attached: d0", timeout_s=MOST_START_S)
        agent.wait_for(LISTENS, timeout_s=MOST_START_S)
        yield agent


def ballast_of(agent: AgentProcess, folder: Path) -> Path:
    """Return a file of the agent's own view of a folder: nobody else sees its disk."""
    return Path(f"/proc/{agent.pid}/root{folder}") / "ballast"


def fill(agent: AgentProcess, folder: Path) -> None:
    with (
        ballast_of(agent, folder).open("wb", buffering=0) as file,
        pytest.raises(OSError, match=os.strerror(errno.ENOSPC)),
    ):
        file.writelines(itertools.repeat(bytes(4096)))


def refusal(change: Callable[[], object]) -> str | None:
    """Return the reference of an error; None: it was done."""
    try:
        change()
    except ShapeError as error:
        return error.reference
    return None


@pytest.mark.parametrize("full", [("lib",), ("log",), ("lib", "log")])
def test_a_full_disk_refuses_changes_by_name_and_shaping_goes_on(
    bench: Callable[..., Bench], tmp_path: Path, full: tuple[str, ...]
) -> None:
    """F30: what is refused has changed nothing, what is answered is kept; reads go on."""
    one = bench()
    peer = (one.pair.peer_address4, BULK)
    with (
        on_small_disks(one, tmp_path, *full) as agent,
        dial(one) as remote,
        UdpSink(one.pair.peer_netns, BULK) as sink,
        UdpSource(one.netns, peer, packets_per_s=500, size=200) as source,
    ):
        remote.whitelist_add(one.device, [entry("203.0.113.1")])
        before = remote.status()[0]
        for name in full:
            fill(agent, folders_of(one)[name])
        want = {"lib": "state-unwritable", "log": "audit-unwritable"}
        tries = 0
        # what was set aside beforehand is used first, and is kept
        while (found := refusal(add_host(remote, one, tries))) is None and tries < 3_000:
            tries += 1
        assert found in [want[name] for name in full], f"got {found} after {tries} more"
        assert refusal(lambda: remote.whitelist_list(one.device)) is None
        (status,) = remote.status()
        assert status.problems == (), f"got {status.problems}, want none"
        assert status.whitelist_entries == before.whitelist_entries + tries
        wait_growth(lambda: sink.received, 100, "traffic to go on")
        # and the reconciler still puts right what others change
        tc("qdisc", "replace", "dev", one.device, "root", "pfifo", netns=one.netns)
        agent.wait_for(r"put-back: d0: our tree")
        for name in full:
            ballast_of(agent, folders_of(one)[name]).unlink()
        wait_until(lambda: refusal(add_host(remote, one, tries)) is None, "a change")
        assert remote.status()[0].whitelist_entries == before.whitelist_entries + tries + 1
        source.stop.set()
        source.thread.join(5)
        remote.detach(one.device)
        assert agent.child.poll() is None, f"the agent ended: {agent.text()[-2000:]}"
    assert "Traceback" not in agent.text(), f"got {agent.text()[-3000:]}"


def add_host(remote: RemoteEngine, one: Bench, number: int) -> Callable[[], object]:
    hosts = [entry(f"198.51.{number >> 8}.{number & 255}", "bulk")]
    return partial(remote.whitelist_add, one.device, hosts)


def test_a_ceiling_that_is_set_on_a_full_disk_is_set_once_and_answered(
    bench: Callable[..., Bench], tmp_path: Path
) -> None:
    """The state of ceilings lies elsewhere: that its answer cannot be kept is no reason."""
    one = bench()
    with on_small_disks(one, tmp_path, "lib") as agent, dial(one) as remote:
        fill(agent, folders_of(one)["lib"])
        for number in range(50, 90):
            row = remote.class_set(one.device, "bulk", number * MBIT)
            assert row.ceiling_bits_per_s == number * MBIT, f"got {row}"
        remote.detach(one.device)
    assert "Traceback" not in agent.text(), f"got {agent.text()[-3000:]}"


# --- clocks

DAY_S = 86_400
#: Not for gRPC: it subtracts time.time from deadlines that its C part has from the real clock.
_CLOCK = """
import os, sys, time
_real = time.time
def _stepped():
    if sys._getframe(1).f_globals.get("__name__", "").startswith("grpc."):
        return _real()
    with open(os.environ["TEST_CLOCK"]) as file:
        return _real() + float(file.read())
time.time = _stepped
"""


def test_a_clock_that_is_set_ends_no_lease_and_stops_nothing(
    bench: Callable[..., Bench], tmp_path: Path
) -> None:
    """F30: leases run by the kernel's jiffies, whitelists by the time of day, looks by neither."""
    one = bench()
    (tmp_path / "sitecustomize.py").write_text(_CLOCK)
    clock = tmp_path / "clock"

    def step(offset_s: float) -> None:
        (tmp_path / "clock.new").write_text(str(offset_s))
        (tmp_path / "clock.new").replace(clock)

    step(0)
    path = f"{tmp_path}{os.pathsep}{environment()['PYTHONPATH']}"
    env = {"PYTHONPATH": path, "TEST_CLOCK": str(clock)}
    now = time.time()
    hosts = [
        entry("203.0.113.1", "bulk"),
        entry("203.0.113.2", "bulk", expires_unix_s=now + DAY_S / 2),
        entry("203.0.113.3", "bulk", expires_unix_s=now + 3 * DAY_S),
    ]
    with running_agent(one, tmp_path, config_text(one, table_of(one)), env=env) as agent:
        agent.wait_for(r"attached: d0", timeout_s=MOST_START_S)
        agent.wait_for(LISTENS, timeout_s=MOST_START_S)
        with dial(one) as remote:
            remote.whitelist_add(one.device, hosts)
            remote.class_set(one.device, "bulk", 50 * MBIT, lease_s=30.0)
            step(DAY_S)
            wait_until(lambda: remote.status()[0].whitelist_entries == 2, "the end of one entry")
            agent.wait_for(r"whitelist-expired: d0: 1 whitelist entries have ended; 2 are left")
            row = one.classes()["bulk"]
            assert row.ceiling_in_force_bits_per_s == 50 * MBIT, f"got {row}, want its lease on"
            assert 0 < (row.lease_s_left or 0) <= 30, f"got {row}, want at most 30 s left"
            step(-2 * DAY_S)
            remote.class_set(one.device, "bulk", 60 * MBIT, lease_s=1.0)
            began_s = time.monotonic()
            tc("qdisc", "replace", "dev", one.device, "root", "pfifo", netns=one.netns)
            wait_until(lambda: root_of(one) == "htb", "ours")
            took_s = time.monotonic() - began_s
            assert took_s < 1.0, f"got {took_s:.2f} s until it was put back, want under 1"
            wait_until(lambda: one.classes()["bulk"].lease_s_left == 0, "the end of the lease", 5.0)
            assert remote.status()[0].whitelist_entries == 2, "got an entry lost by a step back"
            step(4 * DAY_S)
            wait_until(lambda: remote.status()[0].whitelist_entries == 1, "the end of the other")
            remote.detach(one.device)
    assert "Traceback" not in agent.text(), f"got {agent.text()[-3000:]}"


def test_an_agent_after_another_with_other_monotonic_clocks_adopts(
    bench: Callable[..., Bench], tmp_path: Path
) -> None:
    """Nothing that is kept is in the time of a clock that begins anew."""
    one = bench()
    text = config_text(one, table_of(one))
    with running_agent(one, tmp_path, text) as agent:
        agent.wait_for(LISTENS, timeout_s=MOST_START_S)
        agent.wait_for(r"attached: d0", timeout_s=MOST_START_S)
        with dial(one) as remote:
            remote.class_set(one.device, "bulk", 50 * MBIT, lease_s=600.0)
            remote.whitelist_add(
                one.device, [entry("203.0.113.1", "bulk", expires_unix_s=time.time() + 600)]
            )
        programs = one.state()["program_ids"]
        agent.end(signal.SIGKILL)
    offset = ("--monotonic", str(400 * DAY_S), "--boottime", str(400 * DAY_S))
    prefix = ("unshare", "--time", *offset, "--fork", "--kill-child")
    with running_agent(one, tmp_path, text, prefix=prefix) as agent:
        agent.wait_for(LISTENS, count=2)
        agent.wait_for(r"attached: d0", count=2)
        with dial(one) as remote:
            row = one.classes()["bulk"]
            assert row.ceiling_in_force_bits_per_s == 50 * MBIT, f"got {row}, want its lease on"
            assert 500 < (row.lease_s_left or 0) <= 600, f"got {row}, want 600 s left or so"
            assert remote.status()[0].whitelist_entries == 1
            remote.class_set(one.device, "bulk", 60 * MBIT, lease_s=1.0)
            wait_until(lambda: one.classes()["bulk"].lease_s_left == 0, "the end of the lease", 5.0)
            assert one.state()["program_ids"] == programs, "got other programs, want an adoption"
            remote.detach(one.device)
        agent.end(signal.SIGKILL)  # unshare itself; its child goes with it
