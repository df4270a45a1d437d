# SPDX-License-Identifier: Apache-2.0
"""Devices that read skb->priority themselves: hardware classes, and VLAN priorities."""

from __future__ import annotations

import contextlib
import socket
import struct
from collections.abc import Callable, Iterator

import pytest
from devicekit import add_vlan
from enginekit import BULK, SIGNAL_UDP, Bench, open_socket, wait_until
from netlab import ip, tc

from shapeagent.model.errors import ConflictError
from shapeagent.model.types import Profile
from shapeagent.policy.plan import MAJOR, live_minor, twin_minor

pytestmark = [pytest.mark.vm, pytest.mark.netns]
SO_PRIORITY = socket.SO_PRIORITY
CLASSES = 4
PACKET_AUXDATA, SOL_PACKET, TP_STATUS_VLAN_VALID = 8, 263, 1 << 4


@contextlib.contextmanager
def sender(netns: str, priority: int, target: tuple[str, int]) -> Iterator[socket.socket]:
    """Give a datagram socket that asks for a priority."""
    with contextlib.closing(open_socket(netns)) as one:
        one.setsockopt(socket.SOL_SOCKET, SO_PRIORITY, priority)
        one.connect(target)
        yield one


# --- mqprio


@pytest.fixture
def hardware(bench: Callable[..., Bench]) -> Bench:
    """Give a device with four traffic classes, one queue each; priorities 0 to 3 choose."""
    one = bench(queues=CLASSES)
    words = ("num_tc", str(CLASSES), "map", "0", "1", "2", "3", *["0"] * 12)
    queues = ("queues", *[f"1@{number}" for number in range(CLASSES)], "hw", "0")
    tc("qdisc", "add", "dev", one.device, "root", "mqprio", *words, *queues, netns=one.netns)
    return one


def sent_by_queue(one: Bench) -> list[int]:
    """Return the packets of each transmit queue's qdisc."""
    found = [0] * CLASSES
    shown = tc("-s", "class", "show", "dev", one.device, netns=one.netns)
    for part in shown.split("class mqprio ")[1:]:
        words = part.split()
        number = int(words[0].partition(":")[2], 16)  # 1 to 4; the traffic classes begin at ffe0
        if 1 <= number <= CLASSES:
            found[number - 1] = int(words[words.index("Sent") + 3])
    assert len(shown.split("class mqprio ")) > CLASSES, f"got {shown}, want a class for each queue"
    return found


def queue_of(one: Bench, priority: int, port: int = BULK) -> int:
    """Return the transmit queue that 20 datagrams of a priority leave by."""
    with (
        contextlib.closing(open_socket(one.pair.peer_netns)) as sink,
        sender(one.netns, priority, (one.pair.peer_address4, port)) as source,
    ):
        sink.bind(("0.0.0.0", port))
        source.send(b"neighbour")
        assert sink.recv(64) == b"neighbour"
        before = sent_by_queue(one)
        for _ in range(20):
            source.send(b"x")

        def grown() -> list[int]:
            return [now - then for now, then in zip(sent_by_queue(one), before, strict=True)]

        wait_until(lambda: max(grown()) >= 20, f"20 datagrams of priority {priority:#x}")
        counts = grown()
        return counts.index(max(counts))


def test_every_class_id_of_htb_is_best_effort_in_hardware(hardware: Bench) -> None:
    """Our minors end in 0; those of prio's bands would choose hardware classes."""
    for priority in range(CLASSES):
        got = queue_of(hardware, priority)
        assert got == priority, f"priority {priority}: got queue {got}, want {priority}"
    for number in range(16):
        for minor in (live_minor(number), twin_minor(number)):
            got = queue_of(hardware, MAJOR << 16 | minor)
            assert got == 0, f"{MAJOR:x}:{minor:x}: got queue {got}, want 0"
    got = queue_of(hardware, (MAJOR + 1) << 16 | 2)
    assert got == 2, f"band 1 of prio: got queue {got}, want 2: what we refuse to do"


def test_a_device_with_hardware_classes_keeps_them(hardware: Bench) -> None:
    """htb and prio are refused; police leaves skb->priority to the device."""
    one = hardware
    before = one.host_state()
    refused = {"prio": "hardware-classes", "htb": "qdisc-busy", None: "qdisc-busy"}
    for profile, reference in refused.items():
        with pytest.raises(ConflictError) as caught:
            one.attach(profile=profile)
        assert caught.value.reference == reference, f"{profile}: got {caught.value.reference}"
        assert "police" in (caught.value.hint or ""), f"got {caught.value.hint}, want police named"
        assert one.host_state() == before, f"{profile}: got a changed host, want nothing done"
    one.attach(profile="police")
    for priority in range(CLASSES):
        for port in (SIGNAL_UDP, BULK):
            got = queue_of(one, priority, port)
            assert got == priority, f"priority {priority}: got queue {got}, want {priority}"
    assert one.packets()["bulk"] >= 20 * CLASSES, f"got {one.packets()}, want all classified"
    one.engine.detach(one.device)
    assert one.host_state() == before, f"got {one.host_state()}, want {before}"


# --- VLAN


class VlanTap:
    """Reads the VLAN priority of each datagram to a port that arrives on a device."""

    def __init__(self, netns: str, device: str, port: int) -> None:
        self.socket = open_socket(netns, socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3))
        self.socket.setsockopt(SOL_PACKET, PACKET_AUXDATA, 1)
        self.socket.bind((device, 3))
        self.socket.settimeout(5.0)
        self.port = port

    def __enter__(self) -> VlanTap:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def priority(self) -> int:
        """Return the PCP of the next datagram to our port."""
        while True:
            frame, control, _, _ = self.socket.recvmsg(2048, 256)
            tci = None
            if frame[12:14] == b"\x81\x00":
                (tci,) = struct.unpack_from(">H", frame, 14)
                frame = frame[:12] + frame[16:]
            for level, kind, data in control:
                if (level, kind) == (SOL_PACKET, PACKET_AUXDATA):
                    status = struct.unpack_from("=I", data)[0]
                    if status & TP_STATUS_VLAN_VALID:
                        (tci,) = struct.unpack_from("=H", data, 16)
            if frame[12:14] != b"\x08\x00" or frame[23] != socket.IPPROTO_UDP:
                continue
            if struct.unpack_from(">H", frame, 36)[0] == self.port:
                assert tci is not None, f"got {frame.hex()} without a tag, want one"
                return int(tci) >> 13


@pytest.mark.parametrize("place", ["vlan", "parent"])
def test_vlan_priorities_on_the_wire_stay_what_the_sender_asked_for(
    bench: Callable[..., Bench], place: str
) -> None:
    """On the VLAN itself only police will do; below it the tag is written before our program."""
    one = bench()
    vlan = add_vlan(one.pair, "on")
    words = ("egress-qos-map", "0:1", "2:5", "3:7")
    ip("link", "set", vlan.device, "type", "vlan", *words, netns=one.netns)
    if place == "vlan":
        one.device = vlan.device
    before = one.host_state()

    def check(what: str) -> None:
        with VlanTap(vlan.peer_netns, one.pair.peer_device, BULK) as tap:
            for priority, want in ((0, 1), (2, 5), (3, 7), (5, 0)):
                with sender(vlan.netns, priority, (vlan.peer_address4, BULK)) as source:
                    source.send(b"x")
                    got = tap.priority()
                assert got == want, f"{what}: priority {priority} has PCP {got}, want {want}"

    check("before")
    if place == "vlan":
        for profile in ("htb", "prio"):
            with pytest.raises(ConflictError) as caught:
                one.attach(profile=profile)
            assert caught.value.reference == "egress-qos-map", f"got {caught.value.reference}"
        assert one.host_state() == before, "got a changed host, want nothing done"
    report = one.attach()
    want_profile = Profile.POLICE if place == "vlan" else Profile.HTB
    assert report.plan.profile == want_profile.value, f"got {report.plan}, want {want_profile}"
    begin = one.packets().get("bulk", 0)
    check("attached")
    assert one.packets()["bulk"] - begin >= 4, f"got {one.packets()}, want all classified"
    one.engine.detach(one.device)
    assert one.host_state() == before, f"got {one.host_state()}, want {before}"
    check("after")
