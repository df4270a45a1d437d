# SPDX-License-Identifier: Apache-2.0
"""What makes a status quick does not change what it says."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

import pytest
from enginekit import BULK, SIGNAL_UDP, Bench, send_datagrams
from netlab import ip, tc

from shapeagent.kernel import bpf, sysfs
from shapeagent.kernel.datapath import Datapath
from shapeagent.kernel.maps import PinnedMaps
from shapeagent.kernel.netns import open_rtnl, run_in_netns
from shapeagent.kernel.probe import read_possible_cpus
from shapeagent.kernel.qdisc import dump_tree
from shapeagent.kernel.rtnl import RTM_GETQDISC, Rtnl
from shapeagent.model.reports import AttachRequest

pytestmark = [
    pytest.mark.netns,
    pytest.mark.skipif(os.geteuid() != 0, reason="making network namespaces needs root"),
]


@pytest.fixture
def one(bench: Callable[..., Bench]) -> Bench:
    made = bench()
    made.attach()
    return made


def test_a_tree_that_was_found_right_is_still_looked_at(one: Bench) -> None:
    for _ in range(3):
        assert one.status().problems == ()
    lines = tc("class", "show", "dev", one.device, netns=one.netns).splitlines()
    shown = next(line for line in lines if " leaf " in line)
    class_id = shown.split()[2]
    parent = shown.split("parent ")[1].split()[0]
    one.before = None
    tc(
        *("class", "change", "dev", one.device, "parent", parent, "classid", class_id),
        *("htb", "rate", "3mbit", "ceil", "7mbit"),
        netns=one.netns,
    )
    for _ in range(2):
        (problem,) = one.status().problems
        assert f"class {class_id}" in problem, f"got {problem}, want the class named"
    tc("qdisc", "delete", "dev", one.device, "root", netns=one.netns)
    (problem,) = one.status().problems
    assert "root" in problem, f"got {problem}, want the root named"


def test_a_change_of_ours_is_right_at_once(one: Bench) -> None:
    assert one.status().problems == ()
    for rate in (20_000_000, 50_000_000):
        one.engine.class_set(one.device, "bulk", rate, lease_s=60)
        assert one.status().problems == ()
        assert one.classes()["bulk"].ceiling_in_force_bits_per_s == rate


def test_counters_read_at_once_are_those_read_one_by_one(
    one: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    send_datagrams(one.pair, SIGNAL_UDP, 30)
    send_datagrams(one.pair, BULK, 20)
    maps = PinnedMaps(one.pins)
    try:
        datapath = Datapath(maps, read_possible_cpus())
        egress, ingress = datapath.counts()
        reasons = datapath.all_reasons()
        assert sum(row.packets for row in egress) >= 50
        for direction, rows in ((0, egress), (1, ingress)):
            for number, row in enumerate(rows):
                single = datapath.count(direction, number)
                # a packet may come in between
                assert row.packets <= single.packets <= row.packets + 5, f"got {row}, {single}"
        monkeypatch.setattr(bpf, "lookup_batch", lambda *_: None)  # a kernel without batches
        slow_egress, _ = datapath.counts()
        for row, slow in zip(egress, slow_egress, strict=True):
            assert row.packets <= slow.packets <= row.packets + 5
        assert datapath.all_reasons()[0].keys() >= reasons[0].keys()
    finally:
        maps.close()


def test_within_a_look_the_kernel_is_asked_once(
    one: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    send = Rtnl._send

    def counted(self: Rtnl, kind: int, flags: int, body: bytes) -> int:
        asked.append(kind)
        return send(self, kind, flags, body)

    monkeypatch.setattr(Rtnl, "_send", counted)
    index = one.index
    asked.clear()
    with open_rtnl(one.netns) as rtnl:
        with rtnl.looking():
            first = dump_tree(rtnl, index)
            begin = len(asked)
            assert dump_tree(rtnl, index) == first
            assert len(asked) == begin, f"got {asked[begin:]} asked again"
            with rtnl.looking():
                dump_tree(rtnl, index)
            assert len(asked) == begin, "got an inner look that forgot"
        dump_tree(rtnl, index)
        assert asked.count(RTM_GETQDISC) == 2, "got a memory that outlived the look"


def test_a_thread_in_its_namespace_is_not_left_for_another(one: Bench) -> None:
    def inside() -> tuple[int, int, list[str]]:
        outer = threading.get_ident()
        inner = run_in_netns(one.netns, threading.get_ident)
        with sysfs.holding_sysfs(), sysfs.sysfs_of_this_namespace() as root:
            with sysfs.sysfs_of_this_namespace() as again:
                assert again == root
            names = os.listdir(root / "class/net")
        return outer, inner, names

    outer, inner, names = run_in_netns(one.netns, inside)
    assert inner == outer, "got another thread, want the one that is there"
    assert one.device in names
    assert outer != threading.get_ident()
    # another namespace is entered all the same
    peer = run_in_netns(one.netns, lambda: run_in_netns(one.pair.peer_netns, _links))
    assert one.pair.peer_device in peer, f"got {peer}"

    def home() -> int:
        return os.stat("/proc/thread-self/ns/net").st_ino

    own = home()
    assert run_in_netns(one.netns, home) != own
    back = run_in_netns(one.netns, lambda: run_in_netns(None, home))
    assert back == own, "got None for the namespace that was entered, want the process's own"
    deep = run_in_netns(
        one.netns, lambda: run_in_netns(None, lambda: run_in_netns(one.netns, _links))
    )
    assert one.device in deep, f"got {deep}"


def _links() -> list[str]:
    with sysfs.sysfs_of_this_namespace() as root:
        return os.listdir(root / "class/net")


def test_two_devices_are_told_apart_in_one_look(one: Bench) -> None:
    ip("link", "add", "x0", "type", "veth", "peer", "name", "x1", netns=one.netns)
    ip("link", "set", "x0", "up", netns=one.netns)
    ip("link", "set", "x1", "up", netns=one.netns)
    one.before = None
    one.engine.attach(AttachRequest(device="x0", link_rate_bits_per_s=50_000_000))
    found = {row.device: row for row in one.engine.status()}
    assert set(found) == {one.device, "x0"}
    assert all(not row.problems for row in found.values()), f"got {found}"
    ceilings = {
        name: max(cls.ceiling_in_force_bits_per_s or 0 for cls in row.classes)
        for name, row in found.items()
    }
    assert ceilings == {one.device: 100_000_000, "x0": 50_000_000}
    one.engine.detach("x0")
