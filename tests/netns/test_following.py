# SPDX-License-Identifier: Apache-2.0
"""What happens to a device under an attachment: seen at once, taken up by attaching again."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import os
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from devicekit import rename, set_tx_channels, without_routes
from enginekit import (
    MBIT,
    NORMAL,
    SIGNAL_UDP,
    Bench,
    UdpSink,
    UdpSource,
    add_bpf_filter,
    entry,
    send_datagrams,
    wait_growth,
    wait_until,
)
from killkit import Killer, each_step
from netlab import VethPair, ip, load_program, tc

from shapeagent.kernel import link, qdisc, rtnl
from shapeagent.kernel.netns import open_rtnl, read_netns_cookie
from shapeagent.kernel.pieces import require_pieces
from shapeagent.model.errors import ConflictError, FailedError, InputError, ShapeError
from shapeagent.model.reports import AttachRequest
from shapeagent.model.types import Direction
from shapeagent.service.engine import Engine

pytestmark = [
    pytest.mark.netns,
    pytest.mark.skipif(os.geteuid() != 0, reason="making network namespaces needs root"),
]


@pytest.fixture
def elsewhere(netns_factory: Callable[[], str]) -> Callable[[Bench], Engine]:
    """Give a function that makes an engine for a new namespace, with the folders of another."""

    def make(one: Bench) -> Engine:
        return Engine(
            netns=netns_factory(), run_dir=one.engine.run_dir, bpffs_dir=one.engine.bpffs_dir
        )

    return make


def numbers(one: Bench) -> tuple[Any, ...]:
    """Return every leaf class of the root's tree with its numbers, and the segment limits."""
    with open_rtnl(one.netns) as socket:
        tree = qdisc.dump_tree(socket, one.index)
        gso = link.read_gso(socket, one.index)
    return (*(node for node in tree.nodes if node.is_class and is_leaf(node.handle)), gso)


def is_leaf(handle: int) -> bool:
    """Return whether it is the live or the twin leaf of a class (policy/plan.py)."""
    return handle & 0xFFFF >= 0x100 and handle & 0xEF == 0


def problem(one: Bench, name: str | None = None) -> str:
    """Return the one problem of an attachment."""
    (status,) = one.engine.status(name or one.device)
    assert len(status.problems) == 1, f"got {status.problems}, want one"
    return status.problems[0]


# --- flap, MTU, speed (F11)


@pytest.mark.parametrize("ingress", ["count", "ifb"])
def test_a_flap_changes_nothing(bench: Callable[..., Bench], ingress: str) -> None:
    """F11: qdiscs and filters stay; meanwhile status says that it is down."""
    one = bench()
    one.attach(ingress=ingress)
    ip("link", "set", one.device, "down", netns=one.netns)
    during = one.status()
    assert during.problems == (), f"got {during.problems}, want none: all of it stands"
    assert any("is down" in text for text in during.warnings), f"got {during.warnings}"
    assert one.attach(ingress=ingress).repaired == (), "got a repair, want nothing to do"
    ip("link", "set", one.device, "up", netns=one.netns)
    wait_until(lambda: one.status().warnings == (), "the carrier")
    send_datagrams(one.pair, SIGNAL_UDP, 5)
    wait_until(lambda: one.packets().get("signal", 0) >= 5, "packets of signal")
    ip("link", "set", one.pair.peer_device, "down", netns=one.pair.peer_netns)
    wait_until(
        lambda: any("has no carrier" in text for text in one.status().warnings), "no carrier"
    )


@pytest.mark.parametrize("ingress", ["count", "ifb"])
def test_a_changed_mtu_is_taken_up_without_loss(bench: Callable[..., Bench], ingress: str) -> None:
    """F11, F10: the numbers are then those of a fresh attach, and no packet was lost."""
    one = bench()
    before = one.host_state()
    one.attach(ingress=ingress)
    one.engine.class_set(one.device, "bulk", 33 * MBIT)
    small = numbers(one)
    target = (one.pair.peer_address4, NORMAL)
    ip("link", "set", one.pair.peer_device, "mtu", "9000", netns=one.pair.peer_netns)
    with UdpSink(one.pair.peer_netns, NORMAL) as sink:
        with UdpSource(one.netns, target, packets_per_s=1000, size=64) as source:
            for mtu in (9000, 1500, 4000, 9000):
                wait_growth(lambda: sink.received, 20, "probes")
                ip("link", "set", one.device, "mtu", str(mtu), netns=one.netns)
                text = problem(one)
                assert f"MTU {mtu}" in text, f"got {text}"
                assert f"attach {one.device} --link-rate 100mbit" in text, f"got {text}"
                report = one.attach(ingress=ingress)
                assert report.changed, f"got {report}, want it changed"
                assert len(report.repaired) == 1, f"got {report.repaired}, want the MTU"
                status = one.status()
                assert status.problems == (), f"got {status.problems}, want none"
            source.end()
        wait_until(lambda: sink.received == source.sent, f"{source.sent}, got {sink.received}")
    assert sink.inversions == 0, f"got {sink.inversions} out of order, want none"
    assert one.attach(ingress=ingress).changed is False, "got a change, want nothing to do"
    kept = one.classes()["bulk"].ceiling_bits_per_s
    assert kept == 33 * MBIT, f"got {kept}, want the ceiling that was set"
    one.engine.class_set(one.device, "bulk", one.engine.plan_attach(
        AttachRequest(one.device, link_rate_bits_per_s=100 * MBIT, ingress=ingress)
    ).classes[3].ceiling_bits_per_s)  # fmt: skip
    repaired = numbers(one)
    one.engine.detach(one.device)
    ip("link", "set", one.device, "mtu", "1500", netns=one.netns)
    assert one.host_state() == before, f"got {one.host_state()}, want {before}"
    ip("link", "set", one.device, "mtu", "9000", netns=one.netns)
    one.attach(ingress=ingress)
    assert numbers(one) == repaired, f"got {repaired}, want {numbers(one)}"
    assert repaired != small, "got the numbers of MTU 1500"


def pretend(monkeypatch: pytest.MonkeyPatch, device: str, **facts: Any) -> None:
    """Let the kernel's answer about a device be another one: a veth has no speed of its own."""
    real = link._parse_facts

    def answer(socket: rtnl.Rtnl, body: bytes) -> Any:
        found = real(socket, body)
        return dataclasses.replace(found, **facts) if found.name == device else found

    monkeypatch.setattr(link, "_parse_facts", answer)


def test_the_link_rate_follows_the_speed_of_the_device(
    bench: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    """F11, F34: shares of the policy follow, what was set stays; no speed changes nothing."""
    one = bench()

    def speed(mbit: int | None) -> None:
        monkeypatch.undo()
        bits = None if mbit is None else mbit * MBIT
        pretend(monkeypatch, one.device, kind="", speed_bits_per_s=bits, carrier=bits is not None)

    def attach() -> tuple[str, ...]:
        return one.engine.attach(AttachRequest(one.device)).repaired

    speed(None)
    with pytest.raises(InputError) as caught:
        attach()
    assert caught.value.reference == "link-rate-unknown", f"got {caught.value.reference}"
    assert "has no carrier" in caught.value.message, f"got {caught.value.message}"
    speed(100)
    attach()
    one.engine.class_set(one.device, "stream", 40 * MBIT, lease_s=600)
    speed(200)
    assert "carries 200mbit" in problem(one), f"got {problem(one)}"
    assert len(attach()) == 1, "got no repair of the link rate"
    status = one.status()
    assert (status.problems, status.link_rate_bits_per_s) == ((), 200 * MBIT), f"got {status}"
    classes = one.classes()
    got = classes["stream"].ceiling_bits_per_s, classes["signal"].ceiling_bits_per_s
    assert got == (40 * MBIT, 200 * MBIT), f"got {got}, want the set one and the link"
    assert classes["stream"].lease_s_left, "got no lease, want the one that was given"
    speed(None)
    assert one.status().problems == (), f"got {one.status().problems}, want none"
    assert attach() == (), "got a repair for an unknown speed, want none"
    speed(30)
    assert len(attach()) == 1, "got no repair of the link rate"
    got = one.classes()["stream"].ceiling_bits_per_s, one.classes()["bulk"].ceiling_bits_per_s
    assert got[0] == 30 * MBIT, f"got {got}, want at most the link"
    one.engine.detach(one.device)


def test_priorities_stop_where_they_would_choose_hardware(
    bench: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    """F37: reported; attached again none is written, and the tree passes all to its default."""
    one = bench()
    one.attach()
    with monkeypatch.context() as patch:
        pretend(patch, one.device, egress_qos_map=True)
        assert "skb->priority" in problem(one), f"got {problem(one)}"
        assert len(one.attach().repaired) == 1
        status = one.status()
        assert status.problems == (), f"got {status.problems}"
        assert any("no priorities are written" in text for text in status.warnings), f"got {status}"
        assert signal_in_leaf(one) == 0, "got packets in the leaf of signal, want them in default's"
    assert "no longer" in problem(one), f"got {problem(one)}"
    one.attach()
    assert signal_in_leaf(one) >= 10, "got no packets in the leaf of signal, want all ten"


def signal_in_leaf(one: Bench) -> int:
    """Return how many of ten datagrams of signal passed the HTB leaf of that class."""
    with open_rtnl(one.netns) as socket:
        before = qdisc.class_stats(socket, one.index)[0x100].sent_packets
        count = one.packets().get("signal", 0)
        send_datagrams(one.pair, SIGNAL_UDP, 10)
        wait_until(lambda: one.packets()["signal"] >= count + 10, "ten packets of signal")
        return qdisc.class_stats(socket, one.index)[0x100].sent_packets - before


def test_another_number_of_queues_changes_nothing_under_htb(bench: Callable[..., Bench]) -> None:
    """F35: as `ethtool -L`; HTB has one queue for all."""
    one = bench(queues=4)
    before = one.host_state()
    one.attach()
    for count in (2, 1, 4):
        set_tx_channels(one.netns, one.device, count)
        assert one.status().problems == (), f"got {one.status().problems} with {count} queues"
        begin = one.packets().get("normal", 0)
        send_datagrams(one.pair, NORMAL, 20)
        wait_until(lambda begin=begin: one.packets()["normal"] >= begin + 20, "packets")  # type: ignore[misc]
        assert one.attach().repaired == ()
    one.engine.detach(one.device)
    assert one.host_state() == before, f"got {one.host_state()}, want {before}"


# --- rename (F13)

NAMES = ["wan.0", "enx78e7d1ea46da", "a.b-c_d$e'f\"g;h", "-"]


@pytest.mark.parametrize("name", NAMES)
def test_a_renamed_device_keeps_its_attachment(bench: Callable[..., Bench], name: str) -> None:
    """F13, C46: found by its index under either name, and attaching again takes up the new one."""
    one = bench()
    before = one.host_state()
    old = one.device
    one.attach(ingress="ifb")
    rename(one.netns, old, name)
    for known in (old, name):
        (status,) = one.engine.status(known)
        assert status.device == name, f"got {status.device}, want the present name"
        assert f"{name} was named {old} at attach" in problem(one, known)
    one.engine.class_set(name, "bulk", 20 * MBIT)
    one.engine.whitelist_add(old, [entry("203.0.113.7")])
    one.device = name
    assert len(one.attach(ingress="ifb").repaired) == 1
    assert one.status().problems == (), f"got {one.status().problems}, want none"
    assert one.state()["device"] == name, f"got {one.state()['device']}, want {name}"
    undo = (one.engine.run_dir / one.key / "undo").read_text()
    assert f" {old} " not in undo, f"got the old name in {undo}"
    assert one.status().whitelist_entries == 1, "got a lost whitelist"
    one.engine.detach(name)
    rename(one.netns, name, old)
    one.device = old
    assert without_routes(one.host_state()) == without_routes(before)


@pytest.mark.parametrize("by", ["old name", "new name"])
def test_a_renamed_device_is_detached_by_either_name(bench: Callable[..., Bench], by: str) -> None:
    one = bench()
    before = one.host_state()
    old, new = one.device, "lan.7"
    one.attach(ingress="ifb")
    rename(one.netns, old, new)
    assert one.engine.detach(old if by == "old name" else new).changed, "got nothing detached"
    rename(one.netns, new, old)
    assert without_routes(one.host_state()) == without_routes(before)


def test_an_old_name_that_another_device_has_now_is_that_device(
    bench: Callable[..., Bench],
) -> None:
    """F13: nobody is detached by the name that it once had, and each keeps its own IFB."""
    one = bench()
    old, new = one.device, "moved0"
    one.attach(ingress="ifb")
    first_ifb = one.state()["ifb"]
    rename(one.netns, old, new)
    ip("link", "add", old, "type", "veth", "peer", "name", "p9", netns=one.netns)
    report = one.engine.detach(old)
    assert not report.changed, f"got {report}, want nothing done"
    assert any(f"detach {new}" in text for text in report.notes), f"got {report.notes}"
    one.attach(ingress="ifb")  # the new device of the old name
    one.engine.detach(new)
    links = ip("link", netns=one.netns)
    assert first_ifb not in links, f"got {links}, want the IFB of {new} gone"
    assert one.state()["ifb"] in links, f"got {links}, want the IFB of {old} there"
    ip("link", "set", old, "up", netns=one.netns)
    assert one.status().problems == (), f"got {one.status().problems}, want none"


# --- deleted and made again, an index given again (F12)


def make_again(pair: VethPair, *, index: int | None = None, device: str | None = None) -> None:
    """Make the deleted pair again, with the same index or another one."""
    place = () if index is None else ("index", str(index))
    words = ("type", "veth", "peer", "name", pair.peer_device, "netns", pair.peer_netns)
    ip("link", "add", device or pair.device, *place, *words, netns=pair.netns)
    ip("link", "set", device or pair.device, "up", netns=pair.netns)


@pytest.mark.parametrize("same_index", [False, True])
@pytest.mark.parametrize("same_name", [True, False])
def test_a_new_device_is_not_touched_for_the_old_one(
    bench: Callable[..., Bench], same_index: bool, same_name: bool
) -> None:
    """F12, C33: nothing is written to what has the old index, were it built like ours."""
    one = bench()
    one.attach(ingress="ifb")
    index, old = one.index, one.device
    ip("link", "delete", old, netns=one.netns)
    assert "is gone" in problem(one), f"got {problem(one)}"
    new = old if same_name else "d1"
    make_again(one.pair, index=index if same_index else None, device=new)
    for words in (
        ("qdisc", "add", "dev", new, "root", "handle", "5348:", "htb", "default", "300"),
        ("class", "add", "dev", new, "classid", "5348:400", "htb", "rate", "1mbit"),
        ("qdisc", "add", "dev", new, "clsact"),
    ):  # fmt: skip
        tc(*words, netns=one.netns)
    descriptor = load_program()
    add_bpf_filter(one.netns, new, Direction.EGRESS, descriptor, pref=0x5348, handle=0x5348)
    os.close(descriptor)
    with open_rtnl(one.netns) as socket:
        limits = link.read_gso(socket, link.read_device(socket, new).index)
    foreign = tc("filter", "show", "dev", new, "egress", netns=one.netns)
    foreign += tc("class", "show", "dev", new, netns=one.netns)
    (status,) = one.engine.status()
    assert any("is gone" in text for text in status.problems), f"got {status.problems}"
    if same_index:
        assert f"is {new} now, another device" in status.problems[0], f"got {status.problems}"
        for change in (
            lambda: one.engine.class_set(new, "bulk", 50 * MBIT),
            lambda: one.engine.whitelist_add(new, [entry("203.0.113.7")]),
            lambda: one.engine.confirm(new),
        ):
            with pytest.raises(FailedError) as caught:
                change()
            assert caught.value.reference == "interface-gone", f"got {caught.value}"
    report = one.engine.detach(old)
    assert report.changed, f"got {report}, want the old state dropped"
    assert any("is gone" in note for note in report.notes), f"got {report.notes}"
    assert one.engine.status() == (), f"got {one.engine.status()}, want nothing attached"
    now = tc("filter", "show", "dev", new, "egress", netns=one.netns)
    now += tc("class", "show", "dev", new, netns=one.netns)
    assert now == foreign, f"got {now}, want {foreign}"
    with open_rtnl(one.netns) as socket:
        got = link.read_gso(socket, link.read_device(socket, new).index)
        assert got == limits, f"got {got}, want {limits}"
        left = [one.name for one in link.list_devices(socket) if "shpifb" in one.name]
    assert not left, f"got {left}, want no IFB left"


@pytest.mark.parametrize("same_index", [False, True])
def test_attach_drops_what_is_left_of_a_device_that_is_gone(
    bench: Callable[..., Bench], same_index: bool
) -> None:
    """F12, C42: a fresh attachment, one only, and nothing of the old one beside it."""
    one = bench()
    one.attach(ingress="ifb")
    one.engine.whitelist_add(one.device, [entry("203.0.113.7")])
    index = one.index
    ip("link", "delete", one.device, netns=one.netns)
    make_again(one.pair, index=index if same_index else None)
    before = one.engine.residue(wait_s=0).items
    assert any(item.kind == "state" for item in before), f"got {before}, want the old state"
    report = one.attach(ingress="ifb")
    assert report.changed
    (status,) = one.engine.status()
    assert (status.problems, status.whitelist_entries) == ((), 0), f"got {status}"
    ours = [line for line in ip("-o", "link", netns=one.netns).splitlines() if "shpifb" in line]
    assert len(ours) == 1, f"got {ours}, want one IFB"
    one.engine.detach(one.device)
    assert one.host_state().residue == (), f"got {one.host_state().residue}"


# --- moved to another namespace (F14)


@pytest.mark.parametrize("how", ["detach here", "detach there", "attach there"])
def test_a_moved_device_is_put_right(
    bench: Callable[..., Bench], elsewhere: Callable[[Bench], Engine], how: str
) -> None:
    """F14: reported as gone, with the place; the segment limits that it took along come back."""
    one = bench()
    with open_rtnl(one.netns) as socket:
        limits = link.read_gso(socket, one.index)
    one.attach(ingress="ifb")
    there = elsewhere(one)
    assert there.netns is not None
    ip("link", "set", one.device, "netns", there.netns, netns=one.netns)
    text = problem(one)
    assert "is gone" in text, f"got {text}"
    assert f"it is {one.device} in namespace {there.netns} now" in text, f"got {text}"
    items = one.engine.residue(wait_s=0).items
    assert any(i.kind == "segment-limit" and i.netns == there.netns for i in items), f"got {items}"
    if how == "attach there":
        request = AttachRequest(one.device, link_rate_bits_per_s=100 * MBIT)
        there.attach(request)
        there.detach(one.device)
    else:
        report = (one.engine if how == "detach here" else there).detach(one.device)
        assert report.changed, f"got {report}, want what is left undone"
    with open_rtnl(there.netns) as socket:
        moved = link.read_device(socket, one.device)
        got = link.read_gso(socket, moved.index)
        tree = qdisc.dump_tree(socket, moved.index)
    assert got == limits, f"got {got}, want {limits}"
    assert tree.hook is None, f"got {tree.hook}, want no clsact"
    assert qdisc.is_default_root(tree), f"got {tree}, want the kernel's root"
    assert "shpifb" not in ip("link", netns=one.netns), "got our IFB left"
    for engine in (one.engine, there):
        assert engine.status() == (), f"got {engine.status()}, want nothing"
        left = [i for i in engine.residue().items if i.kind not in ("program", "map")]
        assert not left, f"got {left}, want no residue"


@pytest.mark.hooks("tcx", "clsact")
def test_a_device_that_comes_back_says_what_it_lost(
    bench: Callable[..., Bench], elsewhere: Callable[[Bench], Engine]
) -> None:
    """F14: the kernel takes qdiscs and filters away on the way, not links; detach does the rest."""
    one = bench()
    with open_rtnl(one.netns) as socket:
        limits = link.read_gso(socket, one.index)
    one.attach()
    there = elsewhere(one)
    assert there.netns is not None
    ip("link", "set", one.device, "netns", there.netns, netns=one.netns)
    ip("link", "set", one.device, "netns", one.netns, netns=there.netns)
    problems = one.engine.status()[0].problems
    assert any("root kind" in text for text in problems), f"got {problems}"
    gone = sum("filter is gone" in text for text in problems)
    assert gone == (2 if one.status().hook == "clsact" else 0), f"got {problems}"
    with pytest.raises(ConflictError) as caught:
        one.attach()
    assert caught.value.reference == "attachment-damaged", f"got {caught.value}"
    one.engine.detach(one.device)
    with open_rtnl(one.netns) as socket:
        got = link.read_gso(socket, one.index)
    assert got == limits, f"got {got}, want {limits}"
    one.attach()
    assert one.engine.status()[0].problems == ()


# --- the IFB (F40)


def test_a_lost_ifb_is_policed_where_none_may_be(bench: Callable[..., Bench]) -> None:
    """F40: someone came to the hook meanwhile; once they are gone, attaching again makes an IFB."""
    one = bench()
    before = one.host_state()
    one.attach(ingress="ifb")
    ip("link", "delete", one.state()["ifb"], netns=one.netns)
    descriptor = load_program()
    add_bpf_filter(one.netns, one.device, Direction.INGRESS, descriptor, pref=9)
    os.close(descriptor)
    assert any("is gone" in text for text in one.status().problems), f"got {one.status()}"
    with UdpSink(one.netns, SIGNAL_UDP) as sink:
        target = (one.pair.address4, SIGNAL_UDP)
        with UdpSource(one.pair.peer_netns, target, packets_per_s=500, size=64):
            (text,) = one.attach(ingress="ifb").repaired
            assert "policed instead" in text, f"got {text}"
            wait_growth(lambda: sink.received, 50, "traffic that is policed")
            status = one.status()
            assert (status.ingress, status.problems) == ("police", ()), f"got {status}"
            assert any("policed" in text for text in status.warnings), f"got {status.warnings}"
            one.engine.class_set(one.device, "bulk", 20 * MBIT, direction="ingress")
            assert one.attach(ingress="ifb").repaired == (), "got a change, want it policed still"
            words = ("filter", "del", "dev", one.device, "ingress", "pref", "9")
            tc(*words, netns=one.netns)
            (text,) = one.attach(ingress="ifb").repaired
            assert "was made anew" in text, f"got {text}"
            stale = one.reasons("ingress").get("ifb-lease-expired", 0)
            wait_growth(lambda: sink.received, 50, "traffic by way of the IFB")
    assert (one.status().ingress, one.status().problems) == ("ifb", ()), f"got {one.status()}"
    assert one.reasons("ingress").get("ifb-lease-expired", 0) == stale, "got policing under a lease"
    got = one.classes("ingress")["bulk"].ceiling_bits_per_s
    assert got == 20 * MBIT, f"got {got}, want the ceiling that was set"
    one.engine.detach(one.device)
    assert one.host_state() == before, f"got {one.host_state()}, want {before}"


# --- while the kernel says no, and after a kill (C42)


@contextlib.contextmanager
def failing(netns: str, at: int) -> Iterator[list[int]]:
    """Let the `at`-th change in a namespace fail, once; gives the kinds of those asked for."""
    with open_rtnl(netns) as socket:
        cookie = read_netns_cookie(socket)
    asked: list[int] = []
    real = rtnl.Rtnl.request

    def request(self: rtnl.Rtnl, kind: int, flags: int, body: bytes) -> None:
        is_probe = read_netns_cookie(self) != cookie  # in a private namespace
        asked.extend([] if is_probe else [kind])
        if len(asked) == at and not is_probe:
            raise rtnl.NetlinkRefusal(errno.ENOBUFS, "No buffer space available")
        real(self, kind, flags, body)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rtnl.Rtnl, "request", request)
        yield asked


def test_a_repair_that_fails_is_not_taken_for_done(bench: Callable[..., Bench]) -> None:
    """C42: a changed MTU after down and up, every change refused once; then tried again."""
    one = bench()
    one.attach()
    at, mtus = 0, (1500, 1400)
    while True:
        at += 1
        mtu = mtus[at % 2]
        for words in (("down",), ("mtu", str(mtu)), ("up",)):
            ip("link", "set", one.device, *words, netns=one.netns)
        failed = False
        with failing(one.netns, at) as asked:
            try:
                one.attach()
            except ShapeError:
                failed = True
        if len(asked) < at:
            break
        problems = one.status().problems
        assert failed, f"got success though change {at} was refused"
        assert any(f"MTU {mtu}" in text for text in problems), f"got {problems} at change {at}"
        one.attach()
        assert one.status().problems == (), f"got {one.status().problems} after change {at}"
    assert at > 10, f"got {at} changes, want each class"


def test_an_attach_to_a_new_device_that_fails_is_not_taken_for_done(
    bench: Callable[..., Bench],
) -> None:
    """C42: deleted and made again, every second change refused once."""
    one = bench()
    one.attach()
    for at in (1, 2, 3, 9, 20):
        ip("link", "delete", one.device, netns=one.netns)
        make_again(one.pair)
        with failing(one.netns, at) as asked, pytest.raises(ShapeError):
            one.attach()
        assert len(asked) >= at, f"got {len(asked)} changes, want {at}"
        for status in one.engine.status():  # not yet cleared away where the first was refused
            assert "is gone" in status.problems[0], f"got {status}, want nothing attached"
        one.attach()
        assert one.status().problems == (), f"got {one.status().problems}"


@pytest.mark.slow
@pytest.mark.host
def test_a_killed_repair_is_finished_by_the_next(bench: Callable[..., Bench]) -> None:
    """F3: killed before each step of taking up a name, an MTU and a lost IFB."""
    one = bench()
    before = one.host_state()
    options = {"link_rate_bits_per_s": 100 * MBIT, "ingress": "ifb"}
    one.attach(ingress="ifb")
    names = (one.device, "e0.100")

    def run(number: int) -> bool:
        name = names[(number + 1) % 2]
        ip("link", "delete", one.state()["ifb"], netns=one.netns)
        rename(one.netns, one.device, name)
        one.device = name
        ip("link", "set", name, "mtu", str((1400, 1500)[number % 2]), netns=one.netns)
        return killer.run("attach", number, **options)

    def recover(number: int) -> None:
        one.attach(ingress="ifb")
        assert one.status().problems == (), f"got {one.status().problems} at step {number}"
        ours = [item for item in one.host_state().links if item.startswith("shpifb")]
        assert ours == [one.state()["ifb"]], f"got {ours} at step {number}, want one IFB"

    killer = Killer(one)
    try:
        steps = each_step(run, recover)
    finally:
        killer.close()
    assert steps > 40, f"got {steps} steps, want every class"
    one.engine.detach(one.device)
    if one.device != names[0]:
        rename(one.netns, one.device, names[0])
    one.device = names[0]
    ip("link", "set", one.device, "mtu", "1500", netns=one.netns)
    assert without_routes(one.host_state()) == without_routes(before)


# --- pieces of the kernel (F38)


@pytest.mark.parametrize(
    ("needle", "reference", "module"),
    [
        (b"clsact", "clsact-missing", "sch_ingress"),
        (b"bpf\0", "cls-bpf-missing", "cls_bpf"),
        (b"\x08\0\x01\0ifb\0", "ifb-missing", "ifb"),
        (b"mirred", "mirred-missing", "act_mirred"),
    ],
)
def test_a_missing_module_is_named_before_anything_is_planned(
    bench: Callable[..., Bench],
    monkeypatch: pytest.MonkeyPatch,
    needle: bytes,
    reference: str,
    module: str,
) -> None:
    """F38: this kernel has them all, so one is refused as a kernel without it does."""
    require_pieces(ifb=True)
    one = bench()
    before = one.host_state()
    real = rtnl.Rtnl.request

    def request(self: rtnl.Rtnl, kind: int, flags: int, body: bytes) -> None:
        if needle in body:
            code = errno.EOPNOTSUPP if b"ifb" in needle else errno.ENOENT
            raise rtnl.NetlinkRefusal(code, "Specified qdisc kind is unknown")
        real(self, kind, flags, body)

    monkeypatch.setattr(rtnl.Rtnl, "request", request)
    with pytest.raises(ShapeError) as caught:
        one.engine.plan_attach(
            AttachRequest(one.device, link_rate_bits_per_s=100 * MBIT, ingress="ifb")
        )
    monkeypatch.undo()
    assert caught.value.exit_code == 4, f"got exit {caught.value.exit_code}, want 4"
    assert caught.value.reference == reference, f"got {caught.value.reference}"
    assert f"modprobe {module}" in (caught.value.hint or ""), f"got {caught.value.hint}"
    assert one.host_state() == before, "got a changed host, want nothing done"


def test_a_state_of_before_identities_is_still_known(
    bench: Callable[..., Bench], tmp_path: Path
) -> None:
    """An attachment made by a version that noted no identity is known by its filters."""
    one = bench()
    one.attach()
    path = one.engine.run_dir / one.key / "state.json"
    state = one.state()
    del state["device_identity"], state["checksum"]
    path.write_text(json.dumps(state))
    rename(one.netns, one.device, f"n{secrets.token_hex(3)}")
    assert "was named" in one.engine.status()[0].problems[0], f"got {one.engine.status()}"
    assert one.engine.detach(one.device).changed
