# SPDX-License-Identifier: Apache-2.0
"""Attach and detach on real devices: what was there comes back, what is foreign stays."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from enginekit import (
    BULK,
    MBIT,
    NORMAL,
    SIGNAL_TCP,
    SIGNAL_UDP,
    Bench,
    UdpSink,
    UdpSource,
    add_bpf_filter,
    engine_for,
    entry,
    environment,
    open_socket,
    send_datagrams,
    shapectl,
    wait_until,
)
from netlab import VethPair, ip, load_program, tc

from shapeagent.kernel import filters, link, maps, qdisc, routes, tcx
from shapeagent.kernel.netns import open_rtnl, run_in_netns
from shapeagent.model.errors import ConflictError, InputError, ShapeError
from shapeagent.model.reports import AttachRequest, ExplainRequest
from shapeagent.model.types import Direction
from shapeagent.service import attaching, filling
from shapeagent.service.engine import Engine

pytestmark = [
    pytest.mark.netns,
    pytest.mark.skipif(os.geteuid() != 0, reason="making network namespaces needs root"),
]

IFF_TUN, IFF_TAP, IFF_MULTI_QUEUE, IFF_NO_PI = 0x1, 0x2, 0x100, 0x1000


@pytest.mark.hooks("tcx", "clsact")
@pytest.mark.parametrize(
    ("profile", "ingress", "queues", "mtu"),
    [
        ("htb", "count", 1, 1500),
        ("htb", "police", 4, 1500),
        ("htb", "ifb", 1, 1500),
        ("htb", "ifb", 4, 9000),
        ("police", "count", 4, 1500),
        ("police", "police", 1, 9000),
        ("police", "ifb", 1, 1500),
    ],
)
def test_detach_puts_back_what_was_there(
    bench: Callable[..., Bench], profile: str, ingress: str, queues: int, mtu: int
) -> None:
    one = bench(queues=queues, mtu=mtu)
    before = one.host_state()
    one.attach(profile=profile, ingress=ingress)
    during = one.host_state()
    problems = one.status().problems
    assert not problems, f"got {problems} right after attach, want no problem"
    want = 3 if ingress == "ifb" else 2  # one per direction, and one that redirects
    assert len(during.ours) == want, f"got {during.ours}, want {want}"
    assert (during.tree.nodes != before.tree.nodes) == (profile == "htb"), (
        f"got {during.tree.root_kind} under {profile}"
    )
    assert (len(during.links) > len(before.links)) == (ingress == "ifb"), f"got {during.links}"
    one.engine.detach(one.device)
    after = one.host_state()
    assert after == before, f"got {after} after detach, want {before}"
    one.check_programs_gone()


def test_traffic_passes_through_every_shape(bench: Callable[..., Bench]) -> None:
    for profile, ingress in (("htb", "count"), ("htb", "ifb"), ("police", "police")):
        one = bench()
        one.attach(profile=profile, ingress=ingress)
        with contextlib.closing(open_socket(one.pair.peer_netns)) as peer:
            peer.bind(("0.0.0.0", SIGNAL_UDP))
            peer.settimeout(5)
            with contextlib.closing(open_socket(one.netns)) as here:
                here.settimeout(5)
                here.connect((one.pair.peer_address4, SIGNAL_UDP))
                for number in range(20):
                    here.send(bytes([number]))
                    data, place = peer.recvfrom(16)
                    peer.sendto(data, place)
                    got = here.recv(16)
                    assert got == bytes([number]), f"got {got!r}, want datagram {number} back"
        out, back = one.packets("egress"), one.packets("ingress")
        assert out.get("signal", 0) >= 20, f"got {out} out, want 20 of signal"
        assert back.get("signal", 0) >= 20, f"got {back} in, want 20 of signal"


@pytest.mark.hooks("tcx", "clsact")
def test_attaching_twice_leaves_one_filter_per_direction(bench: Callable[..., Bench]) -> None:
    """C31."""
    one = bench()
    first = one.attach()
    ids = one.status().programs
    second = one.attach()
    assert first.changed, "got unchanged at the first attach, want changed"
    assert not second.changed, "got changed at the second attach, want unchanged"
    found = one.host_state().ours
    assert len(found) == 2, f"got {found}, want one program per direction"
    assert one.status().programs == ids, f"got {one.status().programs}, want {ids}"


def test_a_detach_of_nothing_is_no_error(bench: Callable[..., Bench]) -> None:
    """C38, C30: never attached, and twice in a row; through the command line too."""
    one = bench()
    report = one.engine.detach(one.device)
    assert not report.changed, f"got {report}, want nothing changed"
    assert "not attached" in report.notes, f"got {report.notes}, want it said"
    one.attach()
    assert one.engine.detach(one.device).changed, "got unchanged, want detached"
    assert not one.engine.detach(one.device).changed, "got changed by a second detach"
    ran = shapectl("--netns", one.netns, "detach", one.device)
    assert ran.code == 0, f"got exit {ran.code}: {ran.err}, want 0"


@pytest.mark.hooks("tcx", "clsact")
def test_a_foreign_clsact_and_its_filter_stay(bench: Callable[..., Bench]) -> None:
    """C26."""
    one = bench()
    tc("qdisc", "add", "dev", one.device, "clsact", netns=one.netns)
    descriptor = load_program()
    add_bpf_filter(one.netns, one.device, Direction.EGRESS, descriptor, pref=1)
    os.close(descriptor)
    before = one.host_state()
    assert len(before.filters) == 1, f"got {before.filters}, want the foreign filter"
    one.attach()
    during = one.host_state()
    assert len(during.ours) == 2, f"got {during.ours}, want ours beside theirs"
    assert set(before.filters) <= set(during.filters), f"got {during.filters}, want theirs too"
    one.engine.detach(one.device)
    assert one.host_state() == before, f"got {one.host_state()}, want {before}"


@pytest.mark.hooks("clsact")
def test_a_clsact_of_ours_that_others_use_by_now_stays(bench: Callable[..., Bench]) -> None:
    """C26, C30: ours goes by preference and handle; what came later stays, and detach says so."""
    one = bench()
    one.attach()
    ours = filters.find_ours(
        [f for f in one.host_state().filters if f.direction is Direction.EGRESS]
    )
    assert ours is not None
    descriptor = load_program()
    try:
        for handle in (0x71, 0x72):  # the same preference as ours, other handles
            add_bpf_filter(
                *(one.netns, one.device, Direction.EGRESS, descriptor),
                pref=ours.pref,
                handle=handle,
            )
        report = one.engine.detach(one.device)
    finally:
        os.close(descriptor)
    left = one.host_state()
    assert sorted(f.handle for f in left.filters) == [0x71, 0x72], f"got {left.filters}"
    assert left.tree.hook is not None, "got no clsact, want the one that others use"
    assert any("clsact stays" in note for note in report.notes), f"got {report.notes}"


def test_a_foreign_ingress_qdisc_is_refused(bench: Callable[..., Bench]) -> None:
    """C28."""
    one = bench()
    tc("qdisc", "add", "dev", one.device, "ingress", netns=one.netns)
    before = one.host_state()
    words = ("--link-rate", "100mbit", "--hook", "clsact")
    ran = shapectl("--netns", one.netns, "attach", one.device, *words)
    assert ran.code == 5, f"got exit {ran.code}: {ran.err}, want 5"
    assert "ingress-qdisc-foreign" in ran.err, f"got {ran.err}"
    assert one.host_state() == before, "got a changed host, want nothing done"


@pytest.mark.hooks("tcx")
def test_a_tcx_link_stands_beside_an_ingress_qdisc(bench: Callable[..., Bench]) -> None:
    """C28: where clsact is not needed, the older qdisc is in nobody's way."""
    one = bench()
    tc("qdisc", "add", "dev", one.device, "ingress", netns=one.netns)
    before = one.host_state()
    one.attach()
    during = one.host_state()
    assert during.tree.hook == before.tree.hook, f"got {during.tree.hook}, want theirs untouched"
    assert len(during.ours) == 2, f"got {during.ours}, want our two links"
    one.engine.detach(one.device)
    assert one.host_state() == before, f"got {one.host_state()}, want {before}"


def test_a_foreign_root_qdisc_is_refused(bench: Callable[..., Bench]) -> None:
    one = bench()
    tc("qdisc", "add", "dev", one.device, "root", "handle", "5:", "htb", netns=one.netns)
    before = one.host_state()
    with pytest.raises(ConflictError) as caught:
        one.attach()
    assert caught.value.reference == "qdisc-busy", f"got {caught.value.reference}"
    assert one.host_state() == before, "got a changed host, want nothing done"
    one.attach(profile="police")  # touches no qdisc
    one.engine.detach(one.device)
    assert one.host_state() == before, f"got {one.host_state()}, want {before}"


@pytest.mark.hooks("clsact")
def test_a_foreign_filter_in_our_slot_is_refused(bench: Callable[..., Bench]) -> None:
    one = bench()
    one.attach()
    ours = next(f for f in one.host_state().filters if f.direction is Direction.EGRESS)
    one.engine.detach(one.device)
    wait_until(lambda: one.host_state().residue == (), "programs and maps to be freed")
    tc("qdisc", "add", "dev", one.device, "clsact", netns=one.netns)
    descriptor = load_program()
    try:
        with open_rtnl(one.netns) as rtnl:
            filters.add_filter(rtnl, one.index, Direction.EGRESS, descriptor, "foreign")
    finally:
        os.close(descriptor)
    before = one.host_state()
    with pytest.raises(ConflictError) as caught:
        one.attach()
    assert caught.value.reference == "filter-slot-foreign", f"got {caught.value} ({ours})"
    assert one.host_state() == before, "got a changed host, want nothing done"


def test_a_wrong_direction_is_refused_before_the_kernel_is_asked(
    bench: Callable[..., Bench],
) -> None:
    """C29: no direction ends up as parent 0, the root."""
    one = bench()
    one.attach()
    before = one.host_state()
    for direction in ("", "both", "root", "none"):
        with pytest.raises(InputError) as caught:
            one.engine.class_set(one.device, "bulk", 50 * MBIT, direction=direction)
        assert caught.value.reference == "bad-direction", f"got {caught.value.reference}"
    for mode in ("", "both", "root"):
        with pytest.raises(InputError):
            one.engine.attach(
                AttachRequest(device=one.device, ingress=mode, link_rate_bits_per_s=100 * MBIT)
            )
    assert one.host_state() == before, "got a changed host, want nothing done"


def test_an_mq_root_of_the_kernel_comes_back(
    netns_factory: Callable[[], str], tmp_path: Path
) -> None:
    """C39: veth never has one, a tap device with several queues does: mq 0: and its leaves."""
    netns = netns_factory()
    with contextlib.ExitStack() as stack:
        for _ in range(4):
            stack.enter_context(tun_device(netns, "q0", flags=IFF_TAP | IFF_MULTI_QUEUE))
        engine = stack.enter_context(engine_for(netns, tmp_path))
        one = Bench(engine, netns, "q0", VethPair(netns, netns, device="q0"))
        # The first of the four queues came alone, and the kernel gave those that were to come
        # pfifo_fast (mq_init): let it make its default for all four.
        tc("qdisc", "add", "dev", "q0", "root", "pfifo", netns=netns)
        tc("qdisc", "del", "dev", "q0", "root", netns=netns)
        before = one.host_state()
        leaves = sum(node.kind == "fq_codel" or "fifo" in node.kind for node in before.tree.nodes)
        assert before.tree.root_kind == "mq", f"got root {before.tree.root_kind!r}, want mq"
        assert leaves >= 4, f"got {before.tree}, want a leaf per queue"
        one.attach()
        assert one.host_state().tree.root_kind == "htb", f"got {one.host_state().tree.root_kind}"
        engine.detach("q0")
        assert one.host_state() == before, f"got {one.host_state().tree}, want {before.tree}"


def test_an_mq_root_that_someone_made_is_refused(bench: Callable[..., Bench]) -> None:
    """C39: it has a handle, so it is theirs, and its leaves may be too."""
    one = bench(queues=4)
    tc("qdisc", "add", "dev", one.device, "root", "handle", "9:", "mq", netns=one.netns)
    before = one.host_state()
    with pytest.raises(ConflictError) as caught:
        one.attach()
    assert caught.value.reference == "qdisc-busy", f"got {caught.value.reference}"
    assert one.host_state() == before, "got a changed host, want nothing done"


# --- others change things meanwhile


@pytest.mark.hooks("clsact")
def test_a_clsact_that_someone_deletes_is_noticed(bench: Callable[..., Bench]) -> None:
    one = bench()
    before = one.host_state()
    one.attach()
    tc("qdisc", "del", "dev", one.device, "clsact", netns=one.netns)
    problems = one.status().problems
    assert sum("filter is gone" in text for text in problems) == 2, f"got {problems}"
    with pytest.raises(ConflictError) as caught:
        one.attach()
    assert caught.value.reference == "attachment-damaged", f"got {caught.value}"
    assert caught.value.details, "got no detail of what is damaged"
    one.engine.detach(one.device)
    assert one.host_state() == before, f"got {one.host_state()}, want {before}"


@pytest.mark.hooks("tcx", "clsact")
def test_a_root_qdisc_that_someone_replaced_stays(bench: Callable[..., Bench]) -> None:
    one = bench()
    one.attach()
    tc("qdisc", "replace", "dev", one.device, "root", "handle", "7:", "pfifo", netns=one.netns)
    assert one.status().problems, "got no problem with the tree gone, want it named"
    report = one.engine.detach(one.device)
    left = one.host_state()
    assert left.tree.root_kind == "pfifo", f"got root {left.tree.root_kind!r}, want theirs"
    assert any("pfifo" in note for note in report.notes), f"got {report.notes}, want it said"
    assert left.ours == (), f"got {left.ours}, want ours gone"


@pytest.mark.hooks("clsact")
def test_a_foreign_program_in_our_slot_stays(bench: Callable[..., Bench]) -> None:
    one = bench()
    one.attach()
    tc("qdisc", "del", "dev", one.device, "clsact", netns=one.netns)
    tc("qdisc", "add", "dev", one.device, "clsact", netns=one.netns)
    descriptor = load_program()
    with open_rtnl(one.netns) as rtnl:
        filters.add_filter(rtnl, one.index, Direction.EGRESS, descriptor, "foreign")
    os.close(descriptor)
    problems = one.status().problems
    assert any("not ours" in text for text in problems), f"got {problems}"
    report = one.engine.detach(one.device)
    left = one.host_state()
    assert [f.name for f in left.filters] == ["foreign"], f"got {left.filters}, want theirs"
    assert any("slot" in note for note in report.notes), f"got {report.notes}, want it said"


@pytest.mark.hooks("tcx", "clsact")
def test_detach_after_changes_and_expired_leases_puts_everything_back(
    bench: Callable[..., Bench],
) -> None:
    one = bench()
    before = one.host_state()
    one.attach(ingress="ifb")
    one.engine.class_set(one.device, "bulk", 30 * MBIT)
    one.engine.class_set(one.device, "stream", 40 * MBIT, lease_s=0.05)
    one.engine.class_set(one.device, "bulk", 20 * MBIT, lease_s=0.05, direction="ingress")
    wait_until(lambda: one.classes()["stream"].lease_s_left == 0, "the lease to end")
    one.engine.whitelist_add(one.device, [entry("203.0.113.0/24"), entry("2001:db8:9::1")])
    assert one.status().problems == (), f"got {one.status().problems}, want none"
    one.engine.detach(one.device)
    assert one.host_state() == before, f"got {one.host_state()}, want {before}"
    one.check_programs_gone()


@pytest.mark.parametrize(
    ("profile", "has_clsact", "allowed"),
    [("police", True, 0), ("police", False, 20), ("htb", True, 30), ("htb", False, 40)],
)
@pytest.mark.hooks("tcx", "clsact")
def test_cycles_of_attach_and_detach_lose_little(
    bench: Callable[..., Bench], profile: str, has_clsact: bool, allowed: int, hook_kind: str
) -> None:
    """C40: the kernel stops a device's queues for a moment (about 0.2 ms measured) whenever a
    root qdisc or clsact comes or goes; where neither does, nothing is lost.
    """
    if (profile, hook_kind) == ("police", "tcx"):
        allowed = 0
    one = bench()
    if has_clsact:
        tc("qdisc", "add", "dev", one.device, "clsact", netns=one.netns)
    target = (one.pair.peer_address4, NORMAL)
    with UdpSink(one.pair.peer_netns, NORMAL) as sink:
        with UdpSource(one.netns, target, packets_per_s=1000, size=64) as source:
            wait_until(lambda: sink.received > 50, "probes")
            for _ in range(5):
                one.attach(profile=profile)
                one.engine.detach(one.device)
            source.end()
        with contextlib.suppress(AssertionError):
            wait_until(lambda: sink.received == source.sent, "every probe", timeout_s=0.5)
        lost = source.sent - sink.received
    print(f"{profile}, clsact there {has_clsact}: {lost} of {source.sent} lost in ten changes")
    assert lost <= allowed, f"got {lost} probes lost, want at most {allowed}"
    assert sink.inversions == 0, f"got {sink.inversions} out of order, want none"


def test_jumbo_frames_pass_and_are_counted(bench: Callable[..., Bench]) -> None:
    one = bench(mtu=9000)
    one.attach()
    target = (one.pair.peer_address4, BULK)
    with UdpSink(one.pair.peer_netns, BULK) as sink:
        with UdpSource(one.netns, target, bits_per_s=60 * MBIT, size=8900, limit=300) as source:
            wait_until(lambda: source.sent == 300, "all sent")
        wait_until(lambda: sink.received == 300, f"all of them, got {sink.received}")
    bulk = one.classes()["bulk"]
    want = 300 * (8900 + 42 + 24)
    assert bulk.wire_bytes == want, f"got {bulk.wire_bytes} wire bytes, want {want}"


# --- the interface goes away


STEPS = (
    ("ensure_bpffs", attaching),
    ("create_pinned", maps),
    ("load_image", attaching),
    ("set_gso", link),
    ("apply_tree", qdisc),
    ("create_ifb", link),
    ("set_up", link),
    ("write_classes", filling),
    ("ensure_clsact", filters),
    ("add_redirect", filters),
    ("add_link", tcx),
    ("reroute_ipv4", routes),
    ("plan_ipv6_routes", routes),
    ("read_back", qdisc),
    ("list_filters", filters),
)


def deleting(
    pair: VethPair, real: Callable[..., object], call: int, seen: list[int]
) -> Callable[..., object]:
    """Return a step that deletes the interface before its `call`-th call."""

    def step(*args: object, **kwargs: object) -> object:
        seen.append(len(seen) + 1)
        if len(seen) == call:
            ip("link", "delete", pair.device, netns=pair.netns)
        return real(*args, **kwargs)

    return step


@pytest.mark.parametrize(("name", "module"), STEPS, ids=[name for name, _ in STEPS])
def test_an_interface_that_goes_away_during_attach_leaves_nothing(
    veth_pair: Callable[..., VethPair],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    module: object,
) -> None:
    """C34: before each step, and before each call of a step that is done several times."""
    if name == "add_link" and not tcx.is_supported():
        pytest.skip(f"kernel {os.uname().release} has no tcx")
    real = getattr(module, name)
    for call in (1, 2, 3):
        pair = veth_pair()
        links = ip("-o", "link", netns=pair.netns).count("\n")
        with engine_for(pair.netns, tmp_path) as engine:
            seen: list[int] = []
            monkeypatch.setattr(module, name, deleting(pair, real, call, seen))
            error: BaseException | None = None
            try:
                engine.attach(
                    AttachRequest(
                        device=pair.device,
                        ingress="ifb",
                        link_rate_bits_per_s=100 * MBIT,
                        reroute_ipv6=True,
                        hook="clsact" if name == "add_filter" else None,
                    )
                )
            except BaseException as caught:
                error = caught
            monkeypatch.undo()
            if len(seen) < call:
                assert error is None, f"got {error!r} though the device stayed, want none"
                assert seen, f"got no call of {name}, want at least one"
                return
            assert isinstance(error, ShapeError), f"got {error!r} at call {call}, want a named one"
            assert error.exit_code in (1, 2), f"got exit {error.exit_code}: {error}"
            assert error.reference == "interface-gone", f"got {error.reference}: {error.message}"
            pins = list(engine.bpffs_dir.glob("*"))
            states = list(engine.run_dir.glob("*/*"))
            left = ip("-o", "link", netns=pair.netns).count("\n")
            assert not pins, f"got {pins}, want no pin left"
            assert not states, f"got {states}, want no state left"
            assert left == links - 1, (
                f"got {left} links, want {links - 1}: {ip('link', netns=pair.netns)}"
            )


def test_a_device_that_was_deleted_can_be_detached(bench: Callable[..., Bench]) -> None:
    """C33: the state and the pins go, by the name that it had; a new one of that name is new."""
    one = bench()
    one.attach(ingress="ifb")
    ifb = one.state()["ifb"]
    ip("link", "delete", one.device, netns=one.netns)
    status = one.engine.status()
    assert any("gone" in text for text in status[0].problems), f"got {status[0].problems}"
    report = one.engine.detach(one.device)
    assert any("gone" in note for note in report.notes), f"got {report.notes}"
    assert ifb not in ip("link", netns=one.netns), "got the IFB left behind"
    assert not list(one.engine.bpffs_dir.glob("*")), "got pins left behind"
    assert one.engine.status() == (), f"got {one.engine.status()}, want nothing attached"


def test_a_killed_attach_is_cleaned_up_by_detach(bench: Callable[..., Bench]) -> None:
    """kill -9 at each stage that attach reports, then detach."""
    program = """
import json, os, signal, sys
from pathlib import Path
from shapeagent.service.engine import Engine
from shapeagent.model.reports import AttachRequest, ExplainRequest
import shapeagent.service.attaching as attaching
where = sys.argv[5]
def progress(text):
    if where in text:
        os.kill(os.getpid(), signal.SIGKILL)
if where == "read back":
    attaching._read_back = lambda *a: os.kill(os.getpid(), signal.SIGKILL)
engine = Engine(netns=sys.argv[1], run_dir=Path(sys.argv[3]), bpffs_dir=Path(sys.argv[4]),
                progress=progress)
engine.attach(AttachRequest(device=sys.argv[2], link_rate_bits_per_s=100_000_000, ingress="ifb"))
"""
    one = bench()
    before = one.host_state()
    for where in ("making the maps", "building the", "attaching the programs", "read back"):
        done = subprocess.run(
            [
                *(sys.executable, "-c", program, one.netns, one.device),
                *(str(one.engine.run_dir), str(one.engine.bpffs_dir), where),
            ],
            env=environment(),
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == -signal.SIGKILL, f"got {done.returncode}: {done.stderr}"
        with pytest.raises(ConflictError) as caught:
            one.engine.class_set(one.device, "bulk", 50 * MBIT)
        assert caught.value.reference == "attach-unfinished", f"got {caught.value}"
        one.engine.detach(one.device)
        after = one.host_state()
        assert after == before, f"got {after} after a kill at {where!r}, want {before}"


# --- names and kinds of devices


def test_a_bridge_port_is_shaped_in_both_directions(bench: Callable[..., Bench]) -> None:
    """C45: what a port sends and receives is counted, and an ingress limit really limits."""
    one = bench()
    ip("link", "add", "b0", "type", "bridge", netns=one.netns)
    ip("address", "flush", "dev", one.device, netns=one.netns)
    ip("link", "set", one.device, "master", "b0", netns=one.netns)
    ip("address", "add", f"{one.pair.address4}/24", "dev", "b0", netns=one.netns)
    ip("link", "set", "b0", "up", netns=one.netns)
    one.attach(ingress="police")

    def both_counted() -> bool:
        send_datagrams(one.pair, SIGNAL_UDP, 5)
        return one.packets("egress").get("signal", 0) > 0 and bool(one.packets("ingress"))

    wait_until(both_counted, "packets counted in both directions of a bridge port")


def test_odd_device_names(bench: Callable[..., Bench], tmp_path: Path) -> None:
    """C46: a 15-character name with an IFB, altnames, and names that are none."""
    one = bench()
    long = "enx78e7d1ea46da"
    ip("link", "set", one.device, "down", netns=one.netns)
    ip("link", "set", one.device, "name", long, netns=one.netns)
    ip(
        "link",
        "property",
        "add",
        "dev",
        long,
        "altname",
        "a-much-longer-name-of-it",
        netns=one.netns,
    )
    ip("link", "set", long, "up", netns=one.netns)
    one.device = long
    before = one.host_state()
    one.attach(ingress="ifb")
    ifb = one.state()["ifb"]
    assert len(ifb) <= 15, f"got {ifb!r}, want at most 15 characters"
    assert ifb != long, "got the name of the device itself for its IFB"
    by_altname = one.engine.status("a-much-longer-name-of-it")
    assert by_altname[0].device == long, f"got {by_altname[0].device}, want {long}"
    one.engine.detach("a-much-longer-name-of-it")
    assert one.host_state() == before, f"got {one.host_state()}, want {before}"
    for name in ("a/b", "a b", "a:b", "../x", "d" * 16, "", "näme"):
        ran = shapectl("--netns", one.netns, "attach", name, "--link-rate", "1gbit")
        assert ran.code == 2, f"got exit {ran.code} for {name!r}: {ran.err}, want 2"
        assert "Traceback" not in ran.err, f"got {ran.err}"


@contextlib.contextmanager
def tun_device(netns: str, name: str = "t0", *, flags: int = IFF_TUN) -> Iterator[int]:
    """Give the descriptor of a tun device (no link-layer header) that is up, with addresses."""

    def make() -> int:
        descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        request = struct.pack("16sH22x", name.encode(), flags | IFF_NO_PI)
        fcntl.ioctl(descriptor, 0x400454CA, request)  # TUNSETIFF
        return descriptor

    descriptor = run_in_netns(netns, make)
    try:
        if flags & IFF_TUN:
            ip("address", "add", "198.51.100.1/24", "dev", name, netns=netns)
            ip("-6", "address", "add", "2001:db8:7::1/64", "dev", name, "nodad", netns=netns)
        ip("link", "set", name, "up", netns=netns)
        yield descriptor
    finally:
        os.close(descriptor)


def read_frames(descriptor: int, count: int) -> list[bytes]:
    frames: list[bytes] = []

    def more() -> bool:
        with contextlib.suppress(BlockingIOError):
            while True:
                frame = os.read(descriptor, 65536)
                if frame[9:10] == b"\x11" or frame[6:7] == b"\x11":  # UDP over IPv4 or IPv6
                    frames.append(frame)
        return len(frames) >= count

    wait_until(more, f"{count} packets out of the tun device")
    return frames


def test_a_tun_device_has_right_classes_and_no_loss(
    netns_factory: Callable[[], str], tmp_path: Path
) -> None:
    """C16: packets begin with the IP header; both directions, both families."""
    netns = netns_factory()
    with tun_device(netns) as descriptor, engine_for(netns, tmp_path) as engine:
        pair = VethPair(netns, netns, device="t0")
        one = Bench(engine, netns, "t0", pair)
        before = one.host_state()
        one.attach()
        ports = {SIGNAL_UDP: "signal", BULK: "bulk", NORMAL: "normal"}
        for v6 in (False, True):
            family = socket.AF_INET6 if v6 else socket.AF_INET
            target = "2001:db8:7::2" if v6 else "198.51.100.2"
            with contextlib.closing(open_socket(netns, family)) as sender:
                for port in ports:
                    for _ in range(30):
                        sender.sendto(bytes(64), (target, port))
                frames = read_frames(descriptor, 90)
                # and back: the same packets with their ends turned round
                for frame in frames:
                    os.write(descriptor, turned_round(frame))
        for direction in ("egress", "ingress"):
            got = one.packets(direction)
            for port, name in ports.items():
                assert got.get(name, 0) >= 60, f"got {got} {direction}, want 60 {name} ({port})"
            odd = {k: v for k, v in one.reasons(direction).items() if "malf" in k or "trunc" in k}
            assert not odd, f"got {odd}, want nothing malformed"
        asked = engine.explain(
            "t0", ExplainRequest("198.51.100.1", "198.51.100.2", "tcp", 50000, SIGNAL_TCP)
        )
        assert asked.traffic_class == "signal", f"got {asked}, want signal"
        engine.detach("t0")
        assert one.host_state() == before, f"got {one.host_state()}, want {before}"


def turned_round(frame: bytes) -> bytes:
    """Return a UDP packet with addresses and ports swapped; the checksums stay right."""
    if frame[0] >> 4 == 4:
        return frame[:12] + frame[16:20] + frame[12:16] + frame[22:24] + frame[20:22] + frame[24:]
    return frame[:8] + frame[24:40] + frame[8:24] + frame[42:44] + frame[40:42] + frame[44:]


def test_an_ifb_is_refused_on_a_device_without_link_header(
    netns_factory: Callable[[], str], tmp_path: Path
) -> None:
    netns = netns_factory()
    with tun_device(netns), engine_for(netns, tmp_path) as engine:
        with pytest.raises(InputError) as caught:
            engine.attach(AttachRequest("t0", ingress="ifb", link_rate_bits_per_s=MBIT * 100))
        assert caught.value.reference == "ifb-needs-link-header", f"got {caught.value.reference}"


# --- several


def test_two_devices_are_apart(veth_pair: Callable[..., VethPair], tmp_path: Path) -> None:
    """Each has its own rules, lists and counters, also under one run folder."""
    first, second = veth_pair(), veth_pair()
    with (
        engine_for(first.netns, tmp_path) as one_engine,
        engine_for(second.netns, tmp_path) as two_engine,
    ):
        shared = Engine(
            netns=second.netns, run_dir=one_engine.run_dir, bpffs_dir=one_engine.bpffs_dir
        )
        one = Bench(one_engine, first.netns, first.device, first)
        two = Bench(shared, second.netns, second.device, second)
        one.attach()
        two.attach(profile="police")
        one.engine.whitelist_add(one.device, [entry(first.peer_address4, "bulk")])
        send_datagrams(first, NORMAL, 50)
        send_datagrams(second, NORMAL, 50)
        assert one.packets().get("bulk", 0) == 50, f"got {one.packets()}, want 50 bulk"
        assert two.packets().get("bulk", 0) == 0, f"got {two.packets()}, want no bulk"
        assert two.packets().get("normal", 0) >= 50, f"got {two.packets()}, want 50 normal"
        assert [s.device for s in one.engine.status()] == [one.device]
        assert one.engine.status()[0].netns == first.netns
        one.engine.detach(one.device)
        assert not two.status().problems, f"got {two.status().problems}, want the other whole"
        two.engine.detach(two.device)
        assert two_engine.status() == ()


@pytest.mark.hooks("tcx", "clsact")
def test_fifty_restarts_leave_one_filter_per_direction(bench: Callable[..., Bench]) -> None:
    """F17, C31: processes that attach and are killed, then one with another policy."""
    one = bench()
    one.attach()
    ids = set(one.status().programs.values())
    for number in range(50):
        pid = os.fork()
        if pid == 0:
            with contextlib.suppress(BaseException):
                request = AttachRequest(device=one.device, link_rate_bits_per_s=100 * MBIT)
                again = Engine(
                    netns=one.netns, run_dir=one.engine.run_dir, bpffs_dir=one.engine.bpffs_dir
                )
                if not again.attach(request).changed:
                    os.kill(os.getpid(), signal.SIGKILL)
            os._exit(1)
        status = os.waitpid(pid, 0)[1]
        assert os.WIFSIGNALED(status), f"got exit {status} at restart {number}, want it attached"
    found = one.host_state().ours
    assert len(found) == 2, f"got {found}, want one per direction"
    assert set(one.status().programs.values()) == ids, f"got {one.status()}, want programs {ids}"
    assert one.status().problems == (), f"got {one.status().problems}"


def flat(what: str, have: int, before: int, most: int) -> None:
    assert have - before <= most, f"got {what} grown from {before} to {have}, want at most {most}"


def resident_kib() -> int:
    """Return the memory of this process."""
    text = Path("/proc/self/status").read_text()
    return int(text.split("VmRSS:")[1].split()[0])


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.hooks("tcx", "clsact")
def test_status_from_many_threads_leaves_no_descriptor(bench: Callable[..., Bench]) -> None:
    """C48: 1,000 from 8 threads, and no socket of one thread is closed by another."""
    one = bench()
    one.attach()
    one.status()
    # the socket of the self-test is closed behind the attach's back
    wait_until(lambda: all(each.name != "shapectl-close" for each in threading.enumerate()), "it")
    before, threads = open_descriptors(), threading.active_count()
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda _: one.engine.status(one.device)[0].problems, range(1_000)))
    assert set(found) == {()}, f"got {set(found)}, want no problem"
    flat("descriptors", open_descriptors(), before, 2)
    assert threading.active_count() == threads, "got threads left behind"


@pytest.mark.slow
@pytest.mark.host
@pytest.mark.hooks("tcx", "clsact")
def test_two_hundred_cycles_leave_nothing_behind(bench: Callable[..., Bench]) -> None:
    """C48: descriptors, memory, maps and programs stay flat."""
    one = bench()
    before = one.host_state()
    for _ in range(20):  # caches and the allocator fill
        one.attach()
        one.engine.detach(one.device)
    descriptors, threads, memory_kib = open_descriptors(), threading.active_count(), resident_kib()
    for _ in range(200):
        one.attach()
        one.engine.detach(one.device)
    flat("descriptors", open_descriptors(), descriptors, 2)
    flat("memory in KiB", resident_kib(), memory_kib, 4_096)
    assert threading.active_count() <= threads, "got threads left behind"
    found = one.host_state()  # of the maps and programs of every cycle none is left
    assert found == before, f"got {found}, want {before}"
    assert len(one.program_ids) >= 200 * 2, f"got {len(one.program_ids)} programs seen"


def test_a_second_writer_is_told_who_holds_the_lock(bench: Callable[..., Bench]) -> None:
    one = bench()
    one.attach()
    program = (
        "import sys; from pathlib import Path; from shapeagent.service.state import locked\n"
        "with locked(Path(sys.argv[1])):\n    print('held', flush=True); sys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, str(one.engine.run_dir)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment(),
        text=True,
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        started = time.monotonic()
        with pytest.raises(ConflictError) as caught:
            one.engine.class_set(one.device, "bulk", 50 * MBIT)
        took_s = time.monotonic() - started
        one.status()  # looking needs no lock
        holder.communicate("")
    assert caught.value.reference == "locked", f"got {caught.value.reference}"
    assert caught.value.exit_code == 5, f"got exit {caught.value.exit_code}, want 5"
    assert str(holder.pid) in caught.value.message, f"got {caught.value.message}"
    assert 1.5 <= took_s <= 3.5, f"got {took_s:.1f} s, want about 2"
    one.engine.class_set(one.device, "bulk", 50 * MBIT)


def test_a_dry_run_changes_nothing_and_says_what_attach_does(bench: Callable[..., Bench]) -> None:
    one = bench()
    before = one.host_state()
    plan = one.engine.plan_attach(
        AttachRequest(one.device, link_rate_bits_per_s=100 * MBIT, ingress="ifb")
    )
    assert one.host_state() == before, "got a changed host, want nothing done"
    report = one.attach(ingress="ifb")
    assert report.plan == plan, f"got {report.plan}, want {plan}"
    dry = one.engine.detach(one.device, dry_run=True)
    assert not dry.changed
    assert one.status().problems == (), "got damage by a dry detach"
    assert one.engine.detach(one.device).steps == dry.steps, "got other steps than in the dry run"


def test_attach_survives_its_process(bench: Callable[..., Bench]) -> None:
    """In-process attach leaves no process behind, and the command line finds it again."""
    one = bench()
    arguments = ("--netns", one.netns)
    try:
        ran = shapectl(*arguments, "attach", one.device, "--link-rate", "100mbit", "--json")
        assert ran.code == 0, f"got exit {ran.code}: {ran.err}"
        pids = ip("netns", "pids", one.netns).split()
        assert not pids, f"got processes {pids} in the namespace, want none"
        send_datagrams(one.pair, SIGNAL_UDP, 10)
        shown = shapectl(*arguments, "status", "--json")
        classes = json.loads(shown.out)["interfaces"][0]["classes"]
        got = {c["name"]: c["packets"] for c in classes if c["direction"] == "egress"}
        assert got["signal"] >= 10, f"got {got}, want 10 packets of signal"
    finally:
        ran = shapectl(*arguments, "detach", one.device)
    assert ran.code == 0, f"got exit {ran.code}: {ran.err}"
