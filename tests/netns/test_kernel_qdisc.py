# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import dataclasses
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from netlab import VethPair, ip, tc

from shapeagent.kernel import link, netns, probe, qdisc
from shapeagent.kernel.rtnl import Rtnl
from shapeagent.model.errors import ConflictError, FailedError, UnsupportedError
from shapeagent.model.types import (
    HtbClassPlan,
    KernelFacts,
    LeafPlan,
    Policy,
    Profile,
    TrafficClass,
    TreePlan,
)
from shapeagent.policy import plan

pytestmark = pytest.mark.netns
MBIT = 1_000_000
GBIT = 1_000_000_000
SO_SNDBUFFORCE, SO_RCVBUFFORCE = 32, 33  # asm-generic/socket.h


@pytest.fixture
def pair(veth_pair: Callable[..., VethPair]) -> VethPair:
    return veth_pair()


@pytest.fixture
def rtnl(pair: VethPair) -> Iterator[Rtnl]:
    with netns.open_rtnl(pair.netns) as handle:
        yield handle


@pytest.fixture
def index(pair: VethPair, rtnl: Rtnl) -> int:
    return link.read_device(rtnl, pair.device).index


@pytest.fixture(scope="module")
def kernel() -> KernelFacts:
    return probe.read_kernel_facts()


def policy_of(rate: int) -> Policy:
    return Policy(
        classes=(
            TrafficClass("signal", 0, 0, rate // 20, rate, rate),
            TrafficClass("normal", 1, 2, rate // 5, rate, rate),
            TrafficClass("bulk", 2, 3, rate // 2, rate * 4 // 5, rate // 4),
        ),
        rules=(),
        default_class="normal",
        control_class="signal",
        link_rate_bits_per_s=rate,
        segment_limit_bytes=None,
        egress_mark_mask=0,
        ingress_mark_mask=0,
        shadow=False,
        source="test",
        text="",
        digest="",
    )


def tree_of(
    rtnl: Rtnl, pair: VethPair, kernel: KernelFacts, rate: int, profile: Profile = Profile.HTB
) -> TreePlan:
    device = link.read_device(rtnl, pair.device)
    return plan.plan_tree(
        policy_of(rate),
        device,
        kernel,
        link_rate_bits_per_s=rate,
        profile=profile,
        segment_limit_bytes=plan.auto_segment_limit(rate, device.mtu),
    )


def leaf(tree: TreePlan, name: str) -> HtbClassPlan:
    return next(n for n in tree.classes if n.traffic_class == name and n.leaf and not n.twin)


def changed(node: HtbClassPlan, ceil_bits_per_s: int) -> HtbClassPlan:
    ceil = ceil_bits_per_s // 8
    return dataclasses.replace(
        node, ceil_bytes_per_s=ceil, rate_bytes_per_s=min(node.rate_bytes_per_s, ceil)
    )


@dataclasses.dataclass
class Flow:
    """A UDP flow over the pair, all of it in one priority."""

    sender: socket.socket
    receiver: socket.socket

    def close(self) -> None:
        self.sender.close()
        self.receiver.close()


@pytest.fixture
def flow(pair: VethPair) -> Iterator[Callable[[int], Flow]]:
    flows: list[Flow] = []

    def create(priority: int) -> Flow:
        sender = netns.run_in_netns(pair.netns, _udp_socket)
        receiver = netns.run_in_netns(pair.peer_netns, _udp_socket)
        flows.append(Flow(sender, receiver))
        receiver.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, 64 << 20)
        receiver.bind((pair.peer_address4, 0))
        receiver.settimeout(1.0)
        sender.setsockopt(socket.SOL_SOCKET, socket.SO_PRIORITY, priority)
        sender.setsockopt(socket.SOL_SOCKET, SO_SNDBUFFORCE, 8 << 20)
        sender.connect(receiver.getsockname())
        return flows[-1]

    yield create
    for one in flows:
        one.close()


def _udp_socket() -> socket.socket:
    return socket.socket(socket.AF_INET, socket.SOCK_DGRAM)


def drain(receiver: socket.socket, want: int, deadline_s: float = 5.0) -> int:
    """Return how many datagrams came, at most `want`, before the deadline."""
    got = 0
    end = time.monotonic() + deadline_s
    receiver.settimeout(0.5)
    while got < want and time.monotonic() < end:
        try:
            receiver.recv(65_536)
        except TimeoutError:
            continue
        got += 1
    return got


# Build, read back, remove


@pytest.mark.parametrize(
    "rate",
    [MBIT, 100 * MBIT, GBIT, 10 * GBIT, 32 * GBIT, 35 * GBIT, 100 * GBIT, 400 * GBIT],
    ids=lambda rate: f"{rate // MBIT}mbit",
)
def test_every_rate_is_read_back_and_warns_nobody(
    pair: VethPair, rtnl: Rtnl, index: int, kernel: KernelFacts, rate: int
) -> None:
    # C52, C55, C58, C60
    before = qdisc.dump_tree(rtnl, index)
    log = _kernel_log_lines()
    tree = tree_of(rtnl, pair, kernel, rate)
    qdisc.apply_tree(rtnl, index, tree)
    qdisc.read_back(rtnl, index, tree)
    warnings = [line for line in _kernel_log_lines()[len(log) :] if "quantum" in line]
    assert not warnings, f"C58: got {warnings}, want none"
    assert qdisc.delete_root(rtnl, index, tree) is True
    assert qdisc.dump_tree(rtnl, index) == before
    assert qdisc.delete_root(rtnl, index, tree) is False


def _kernel_log_lines() -> list[str]:
    done = subprocess.run(["dmesg"], capture_output=True, text=True, check=True, timeout=10)
    return done.stdout.splitlines()


def test_tc_shows_the_planned_rates_and_bursts(
    pair: VethPair, rtnl: Rtnl, index: int, kernel: KernelFacts
) -> None:
    tree = tree_of(rtnl, pair, kernel, 100 * GBIT)
    qdisc.apply_tree(rtnl, index, tree)
    shown = tc("-d", "class", "show", "dev", pair.device, netns=pair.netns)
    root = next(line for line in shown.splitlines() if line.startswith("class htb 5348:10 "))
    want_gbit = tree.classes[0].rate_bytes_per_s * 8 / 1e9
    rate = root.split("rate ")[1].split()[0]
    assert rate.endswith(("Mbit", "Gbit")), f"got {root}"
    got_gbit = float(rate[:-4]) / (1000 if rate.endswith("Mbit") else 1)
    assert got_gbit == pytest.approx(want_gbit, rel=0.01), f"C52: got {root}"
    assert " burst 0b" not in root, f"C55: got {root}"
    assert "overhead 24" in root


def test_burst_survives_the_way_to_the_kernel_and_back() -> None:
    for rate in (1_000, 125_000, 125_000_000, 12_500_000_000, 50_000_000_000):
        for burst in (3_076, 6_152, 136_000, 2_500_000):
            ticks = qdisc.burst_ticks(burst, rate)
            back = qdisc.burst_bytes(ticks, rate)
            granule = rate * qdisc.TICK_NS // 1_000_000_000 + 1
            if ticks < 0xFFFFFFFF:
                assert burst <= back <= burst + granule, f"got {back} B, want {burst} B at {rate}"


def test_steps_are_told_before_they_are_done(
    pair: VethPair, rtnl: Rtnl, index: int, kernel: KernelFacts
) -> None:
    steps: list[str] = []
    tree = tree_of(rtnl, pair, kernel, GBIT)
    qdisc.apply_tree(rtnl, index, tree, steps.append)
    leaves = sum(node.leaf is not None for node in tree.classes)
    assert len(steps) == 1 + len(tree.classes) + leaves, f"got {steps}"
    assert steps[0] == "add root qdisc htb 5348:"


def test_default_roots_are_recognised(
    pair: VethPair, rtnl: Rtnl, index: int, veth_pair: Callable[..., VethPair]
) -> None:
    assert qdisc.is_default_root(qdisc.dump_tree(rtnl, index))
    tc("qdisc", "add", "dev", pair.device, "root", "pfifo", netns=pair.netns)
    snapshot = qdisc.dump_tree(rtnl, index)
    assert snapshot.root_kind == "pfifo"
    assert not qdisc.is_default_root(snapshot)
    many = veth_pair(queues=4)
    tc("qdisc", "add", "dev", many.device, "root", "handle", "7:", "mq", netns=many.netns)
    with netns.open_rtnl(many.netns) as other:
        snapshot = qdisc.dump_tree(other, link.read_device(other, many.device).index)
    assert snapshot.root_kind == "mq"
    assert not qdisc.is_default_root(snapshot), "a person made it"


def test_clsact_is_no_part_of_the_tree(pair: VethPair, rtnl: Rtnl, index: int) -> None:
    before = qdisc.dump_tree(rtnl, index)
    tc("qdisc", "add", "dev", pair.device, "clsact", netns=pair.netns)
    after = qdisc.dump_tree(rtnl, index)
    assert after.nodes == before.nodes
    assert after.hook is not None
    assert after.hook.kind == "clsact"


def test_foreign_root_is_refused_and_kept(
    pair: VethPair, rtnl: Rtnl, index: int, kernel: KernelFacts
) -> None:
    tc("qdisc", "add", "dev", pair.device, "root", "handle", "9:", "pfifo", netns=pair.netns)
    before = qdisc.dump_tree(rtnl, index)
    tree = tree_of(rtnl, pair, kernel, GBIT)
    with pytest.raises(ConflictError) as caught:
        qdisc.apply_tree(rtnl, index, tree)
    assert caught.value.reference == "qdisc-busy"
    with pytest.raises(ConflictError) as caught:
        qdisc.delete_root(rtnl, index, tree)
    assert caught.value.reference == "root-not-ours"
    assert "pfifo 9:" in caught.value.message
    assert qdisc.dump_tree(rtnl, index) == before


def test_foreign_root_of_our_handle_is_kept(
    pair: VethPair, rtnl: Rtnl, index: int, kernel: KernelFacts
) -> None:
    tc("qdisc", "add", "dev", pair.device, "root", "handle", "1:", "pfifo", netns=pair.netns)
    with pytest.raises(ConflictError):
        qdisc.delete_root(rtnl, index, tree_of(rtnl, pair, kernel, GBIT))
    assert qdisc.dump_tree(rtnl, index).root_kind == "pfifo"


def test_unknown_qdisc_is_named(pair: VethPair, rtnl: Rtnl, index: int) -> None:
    if "sfb" in tc("qdisc", "show", netns=pair.netns):
        pytest.skip("sfb in use")
    tree = TreePlan(
        profile=Profile.HTB,
        handle=1,
        default_minor=0x100,
        classes=(
            HtbClassPlan(
                0x100, 0, 125_000, 125_000, 6_000, 6_000, 1_514, 0, 24, LeafPlan("nosuch", 1)
            ),
        ),
    )
    with pytest.raises(UnsupportedError) as caught:
        qdisc.apply_tree(rtnl, index, tree)
    assert caught.value.reference == "qdisc-missing"


def test_changed_number_is_found_and_named(
    pair: VethPair, rtnl: Rtnl, index: int, kernel: KernelFacts
) -> None:
    tree = tree_of(rtnl, pair, kernel, GBIT)
    qdisc.apply_tree(rtnl, index, tree)
    bulk = leaf(tree, "bulk")
    words = ("parent", f"5348:{bulk.parent_minor:x}", "classid", f"5348:{bulk.minor:x}", "htb")
    tc("class", "change", "dev", pair.device, *words, "rate", "5mbit", netns=pair.netns)
    with pytest.raises(FailedError) as caught:
        qdisc.read_back(rtnl, index, tree)
    assert caught.value.reference == "readback-differs"
    want = f"class 5348:{bulk.minor:x} rate: got 625000, want {bulk.rate_bytes_per_s}"
    assert want in caught.value.message, f"got {caught.value.message}, want {want}"


def test_replaced_root_is_found(
    pair: VethPair, rtnl: Rtnl, index: int, kernel: KernelFacts
) -> None:
    tree = tree_of(rtnl, pair, kernel, GBIT)
    qdisc.apply_tree(rtnl, index, tree)
    tc("qdisc", "replace", "dev", pair.device, "root", "pfifo", netns=pair.netns)
    with pytest.raises(FailedError, match="root kind: got pfifo, want htb"):
        qdisc.read_back(rtnl, index, tree)
    with pytest.raises(FailedError) as caught:
        qdisc.change_class(rtnl, index, tree.handle, tree.classes[0])
    assert caught.value.reference == "class-gone"


def test_vanished_device_is_named_at_every_step(
    pair: VethPair, rtnl: Rtnl, index: int, kernel: KernelFacts
) -> None:
    # C34
    tree = tree_of(rtnl, pair, kernel, GBIT)
    steps = 0

    def pull(_: str) -> None:
        nonlocal steps
        steps += 1
        if steps == 6:
            ip("link", "delete", pair.device, netns=pair.netns)

    with pytest.raises(FailedError) as caught:
        qdisc.apply_tree(rtnl, index, tree, pull)
    assert caught.value.reference == "interface-gone"
    with pytest.raises(FailedError) as caught:
        qdisc.change_class(rtnl, index, tree.handle, tree.classes[0])
    assert caught.value.reference == "interface-gone"
    with pytest.raises(FailedError) as caught:
        qdisc.delete_root(rtnl, index, tree)
    assert caught.value.reference == "interface-gone"


def test_four_queue_veth_takes_the_tree_and_gets_its_root_back(
    veth_pair: Callable[..., VethPair], kernel: KernelFacts
) -> None:
    # C39
    pair = veth_pair(queues=4)
    with netns.open_rtnl(pair.netns) as rtnl:
        index = link.read_device(rtnl, pair.device).index
        before = qdisc.dump_tree(rtnl, index)
        tree = tree_of(rtnl, pair, kernel, GBIT)
        qdisc.apply_tree(rtnl, index, tree)
        qdisc.read_back(rtnl, index, tree)
        qdisc.delete_root(rtnl, index, tree)
        assert qdisc.dump_tree(rtnl, index) == before


# Traffic


def test_priority_chooses_the_class(
    pair: VethPair,
    rtnl: Rtnl,
    index: int,
    kernel: KernelFacts,
    flow: Callable[[int], Flow],
) -> None:
    tree = tree_of(rtnl, pair, kernel, GBIT)
    qdisc.apply_tree(rtnl, index, tree)
    for name, priority in tree.priorities.items():
        one = flow(priority)
        before = qdisc.class_stats(rtnl, index)[leaf(tree, name).minor]
        for _ in range(50):
            one.sender.send(b"x" * 1000)
        assert drain(one.receiver, 50) == 50
        after = qdisc.class_stats(rtnl, index)[leaf(tree, name).minor]
        got = after.sent_packets - before.sent_packets
        assert got >= 50, f"{name}: got {got} packets, want 50"
        sent = after.sent_bytes - before.sent_bytes
        assert sent >= 50 * 1042, f"{name}: got {sent} bytes, want {50 * 1042}"


def test_twin_leaf_holds_its_own_ceiling(
    pair: VethPair,
    rtnl: Rtnl,
    index: int,
    kernel: KernelFacts,
    flow: Callable[[int], Flow],
) -> None:
    tree = tree_of(rtnl, pair, kernel, 100 * MBIT)
    qdisc.apply_tree(rtnl, index, tree)
    got = _offered_rate(flow(tree.safe_priorities["bulk"]))
    want = 25 * MBIT * 0.992  # single frames; policy.plan.WireScale says why
    assert got == pytest.approx(want, rel=0.03), f"got {got / MBIT:.2f} Mbit/s, want {want / MBIT}"


@pytest.mark.parametrize("ceiling", [20 * MBIT, 80 * MBIT])
def test_changed_ceiling_holds_within_three_per_cent(
    pair: VethPair,
    rtnl: Rtnl,
    index: int,
    kernel: KernelFacts,
    flow: Callable[[int], Flow],
    ceiling: int,
) -> None:
    tree = tree_of(rtnl, pair, kernel, 100 * MBIT)
    qdisc.apply_tree(rtnl, index, tree)
    qdisc.change_class(rtnl, index, tree.handle, changed(leaf(tree, "bulk"), ceiling))
    got = _offered_rate(flow(tree.priorities["bulk"]))
    assert got == pytest.approx(ceiling, rel=0.03), f"got {got / MBIT:.2f} Mbit/s, want {ceiling}"


def _offered_rate(one: Flow, seconds: float = 1.0) -> float:
    """Return the wire rate in bits/s of full frames that come through while more is offered."""
    stop = threading.Event()

    def send() -> None:
        one.sender.setblocking(False)
        while not stop.is_set():
            try:
                one.sender.send(b"x" * 1472)
            except (BlockingIOError, OSError):
                stop.wait(0.0005)

    thread = threading.Thread(target=send)
    thread.start()
    try:
        drain(one.receiver, 100)  # past the burst and into the queue
        start = time.monotonic()
        frames = 0
        while time.monotonic() - start < seconds:
            one.receiver.recv(65_536)
            frames += 1
        elapsed = time.monotonic() - start
    finally:
        stop.set()
        thread.join()
    return frames * 1538 * 8 / elapsed


def test_thousand_changes_under_load_lose_nothing_and_are_quick(
    pair: VethPair,
    rtnl: Rtnl,
    index: int,
    kernel: KernelFacts,
    flow: Callable[[int], Flow],
) -> None:
    # C40
    tree = tree_of(rtnl, pair, kernel, GBIT)
    qdisc.apply_tree(rtnl, index, tree)
    bulk = leaf(tree, "bulk")
    one = flow(tree.priorities["bulk"])
    sent, received = 0, 0
    done = threading.Event()

    def receive() -> None:
        nonlocal received
        while True:
            try:
                one.receiver.recv(65_536)
                received += 1
            except TimeoutError:
                if done.is_set():
                    return

    one.receiver.settimeout(0.5)
    thread = threading.Thread(target=receive)
    thread.start()
    times = []
    try:
        for number in range(1000):
            for _ in range(5):
                one.sender.send(b"x" * 200)
                sent += 1
            start = time.perf_counter()
            qdisc.change_class(
                rtnl, index, tree.handle, changed(bulk, (400 + number % 2 * 200) * MBIT)
            )
            times.append(time.perf_counter() - start)
    finally:
        done.set()
        thread.join()
    assert received == sent, f"got {received} of {sent}"
    assert qdisc.class_stats(rtnl, index)[bulk.minor].drops == 0
    p99 = sorted(times)[989]
    assert p99 <= 0.002, f"got p99 {p99 * 1e3:.3f} ms, want at most 2 ms"


def test_full_queue_counts_its_drops(
    pair: VethPair,
    rtnl: Rtnl,
    index: int,
    kernel: KernelFacts,
    flow: Callable[[int], Flow],
) -> None:
    tree = tree_of(rtnl, pair, kernel, MBIT)
    qdisc.apply_tree(rtnl, index, tree)
    one = flow(tree.priorities["bulk"])
    for _ in range(20):  # a leaf of fq_codel holds more
        for _ in range(200):
            one.sender.send(b"x" * 1400)
        counters = qdisc.class_stats(rtnl, index)[leaf(tree, "bulk").minor]
        if counters.drops > 100:
            break
    assert counters.drops > 100, f"got {counters}"
    assert counters.backlog_bytes > 0
    assert counters.backlog_packets > 0


# prio


def test_failed_build_of_prio_leaves_a_tbf_that_delete_root_removes(
    pair: VethPair, rtnl: Rtnl, index: int, kernel: KernelFacts
) -> None:
    if "prio" in kernel.qdiscs:
        pytest.skip("this kernel has prio: the tests marked vm build the whole tree")
    before = qdisc.dump_tree(rtnl, index)
    tree = tree_of(rtnl, pair, kernel, 100 * MBIT, Profile.PRIO)
    with pytest.raises(UnsupportedError) as caught:
        qdisc.apply_tree(rtnl, index, tree)
    assert caught.value.reference == "qdisc-missing"
    shown = tc("-d", "qdisc", "show", "dev", pair.device, netns=pair.netns)
    assert "qdisc tbf 5348: root" in shown, f"got {shown}"
    assert "rate 100Mbit burst 2175b" in shown, f"got {shown}, want a frame, 50 us, the overhead"
    assert "overhead 24" in shown, f"got {shown}"
    # prio takes the place of tbf's own queue in this way: here another qdisc does.
    words = ("parent", "5348:1", "handle", "5349:", "pfifo", "limit", "10")
    tc("qdisc", "add", "dev", pair.device, *words, netns=pair.netns)
    with pytest.raises(FailedError, match="prio kind: got pfifo, want prio"):
        qdisc.read_back(rtnl, index, tree)
    assert qdisc.delete_root(rtnl, index, tree) is True
    assert qdisc.dump_tree(rtnl, index) == before


@pytest.mark.vm
@pytest.mark.parametrize("rate", [100 * MBIT, GBIT, 30 * GBIT])
def test_prio_under_tbf_is_read_back_and_removed(
    pair: VethPair, rtnl: Rtnl, index: int, kernel: KernelFacts, rate: int
) -> None:
    before = qdisc.dump_tree(rtnl, index)
    tree = tree_of(rtnl, pair, kernel, rate, Profile.PRIO)
    qdisc.apply_tree(rtnl, index, tree)
    qdisc.read_back(rtnl, index, tree)
    assert qdisc.dump_tree(rtnl, index).root_kind == "tbf"
    assert qdisc.delete_root(rtnl, index, tree) is True
    assert qdisc.dump_tree(rtnl, index) == before


@pytest.mark.vm
def test_prio_band_follows_the_priority_under_a_rate(
    pair: VethPair,
    rtnl: Rtnl,
    index: int,
    kernel: KernelFacts,
    flow: Callable[[int], Flow],
) -> None:
    tree = tree_of(rtnl, pair, kernel, 100 * MBIT, Profile.PRIO)
    qdisc.apply_tree(rtnl, index, tree)
    for priority in tree.priorities.values():
        one = flow(priority)
        before = qdisc.class_stats(rtnl, index)[priority & 0xFFFF].sent_packets
        for _ in range(20):
            one.sender.send(b"x" * 100)
        assert drain(one.receiver, 20) == 20
        got = qdisc.class_stats(rtnl, index)[priority & 0xFFFF].sent_packets - before
        assert got >= 20, f"band {priority:x}: got {got} packets, want 20"


@pytest.mark.vm
def test_fq_codel_leaves_are_read_back(
    pair: VethPair, rtnl: Rtnl, index: int, kernel: KernelFacts
) -> None:
    tree = tree_of(rtnl, pair, kernel, GBIT)
    assert {node.leaf.kind for node in tree.classes if node.leaf} == {"fq_codel"}
    qdisc.apply_tree(rtnl, index, tree)
    qdisc.read_back(rtnl, index, tree)
