# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from shapeagent.kernel import link, netns, probe
from shapeagent.model.errors import InputError

pytestmark = pytest.mark.netns


def test_function_runs_in_the_namespace_and_the_caller_stays(
    netns_factory: Callable[[], str],
) -> None:
    name = netns_factory()
    here = os.readlink("/proc/self/ns/net")
    there = netns.run_in_netns(name, lambda: os.readlink("/proc/thread-self/ns/net"))
    assert there != here
    assert os.readlink("/proc/self/ns/net") == here
    assert f"net:[{(netns.NETNS_DIR / name).stat().st_ino}]" == there


def test_file_system_stays_visible_in_the_namespace(netns_factory: Callable[[], str]) -> None:
    name = netns_factory()
    here = Path("/proc/self/mountinfo").read_text()
    there = netns.run_in_netns(name, lambda: Path("/proc/thread-self/mountinfo").read_text())
    assert there == here, "bpffs would be hidden as under `ip netns exec`"


def test_socket_belongs_to_the_namespace_it_was_opened_in(
    netns_factory: Callable[[], str],
) -> None:
    with netns.open_rtnl(netns_factory()) as rtnl:
        names = [device.name for device in link.list_devices(rtnl)]
        assert "eth0" not in names, f"got {names}, want none of the host's devices"
        assert "lo" in names


def test_cookies_tell_namespaces_apart(netns_factory: Callable[[], str]) -> None:
    cookies = set()
    for name in (None, netns_factory(), netns_factory()):
        with netns.open_rtnl(name) as rtnl:
            cookie = netns.read_netns_cookie(rtnl)
            assert cookie > 0
        with netns.open_rtnl(name) as rtnl:
            assert netns.read_netns_cookie(rtnl) == cookie
        cookies.add(cookie)
    assert len(cookies) == 3, f"got {cookies}, want three"


def test_exception_comes_back_to_the_caller(netns_factory: Callable[[], str]) -> None:
    with pytest.raises(ZeroDivisionError):
        netns.run_in_netns(netns_factory(), lambda: 1 // 0)


@pytest.mark.parametrize("name", ["", "..", "a/b", "shp-not-there"])
def test_unknown_namespace_is_named(name: str) -> None:
    with pytest.raises(InputError) as caught:
        netns.open_rtnl(name)
    assert caught.value.reference == "no-such-netns"
    assert caught.value.hint


def test_misspelt_namespace_gets_the_near_names(netns_factory: Callable[[], str]) -> None:
    name = netns_factory()
    with pytest.raises(InputError) as caught:
        netns.open_rtnl(name[:-1])
    assert name in (caught.value.hint or ""), f"got {caught.value.hint}, want {name}"


def test_repeated_use_leaks_no_descriptor_and_no_thread(netns_factory: Callable[[], str]) -> None:
    # C48
    name = netns_factory()
    before = len(os.listdir("/proc/self/fd")), threading.active_count()
    for _ in range(500):
        with netns.open_rtnl(name) as rtnl:
            link.read_device(rtnl, "lo")
    after = len(os.listdir("/proc/self/fd")), threading.active_count()
    assert after == before, f"got {after} (descriptors, threads), want {before}"


def test_probe_finds_the_qdiscs_and_leaves_the_host_alone() -> None:
    with netns.open_rtnl(None) as rtnl:
        before = link.list_devices(rtnl)
        facts = probe.read_kernel_facts()
        assert link.list_devices(rtnl) == before
    assert {"htb", "tbf", "bfifo", "clsact"} <= facts.qdiscs, f"got {sorted(facts.qdiscs)}"
    assert facts.release == os.uname().release
    assert facts.jiffy_ns in (10_000_000, 4_000_000, 3_333_333, 1_000_000)


@pytest.mark.vm
def test_probe_finds_what_debian_has_as_modules() -> None:
    assert {"prio", "fq_codel", "fq", "netem"} <= probe.probe_qdiscs()
