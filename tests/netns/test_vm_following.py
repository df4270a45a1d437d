# SPDX-License-Identifier: Apache-2.0
"""What happens to a device under profiles and device types that the development kernel lacks."""

from __future__ import annotations

import subprocess
from collections.abc import Callable

import pytest
from devicekit import add_vlan, rename, set_tx_channels, without_routes
from enginekit import MBIT, NORMAL, Bench, UdpSink, UdpSource, send_datagrams, wait_until
from netlab import ip, tc

from shapeagent.model.errors import ConflictError, InputError
from shapeagent.model.reports import AttachRequest

pytestmark = [pytest.mark.vm, pytest.mark.netns]

LINK = 100 * MBIT
EDT_LINK = 1000 * MBIT


@pytest.fixture(scope="module", autouse=True)
def modules() -> None:
    for words in (("8021q",), ("bonding", "max_bonds=0"), ("ipvlan",), ("sch_mqprio",)):
        subprocess.run(["modprobe", *words], check=True, timeout=60)


def set_mtu(one: Bench, mtu: int) -> None:
    for netns, device in (
        (one.pair.peer_netns, one.pair.peer_device),
        (one.netns, one.device),
    ):
        ip("link", "set", device, "mtu", str(mtu), netns=netns)


# --- MTU (F11)


@pytest.mark.parametrize(
    ("profile", "link_rate"), [("prio", LINK), ("edt", EDT_LINK), ("htb", LINK)]
)
def test_a_changed_mtu_is_taken_up(
    bench: Callable[..., Bench], profile: str, link_rate: int
) -> None:
    """F11: under prio the TBF drops frames that its burst cannot hold, until it is taken up."""
    one = bench()
    before = one.host_state()
    options = {"profile": profile, "link_rate_bits_per_s": link_rate}
    one.attach(**options)
    for mtu in (9000, 1500, 9000):
        set_mtu(one, mtu)
        problems = one.status().problems
        assert any(f"MTU {mtu}" in text for text in problems), f"got {problems}"
        assert len(one.attach(**options).repaired) == 1
        assert one.status().problems == (), f"got {one.status().problems}, want none"
        count, size = 50, mtu - 100
        target = (one.pair.peer_address4, NORMAL)
        with (
            UdpSink(one.pair.peer_netns, NORMAL) as sink,
            UdpSource(one.netns, target, packets_per_s=200, size=size, limit=count),
        ):
            wait_until(
                lambda sink=sink, count=count: sink.received == count,  # type: ignore[misc]
                f"{count} datagrams of {size} bytes",
            )
    one.engine.detach(one.device)
    set_mtu(one, 1500)
    assert one.host_state() == before, f"got {one.host_state()}, want {before}"


def test_an_mtu_that_edt_cannot_carry_is_refused(bench: Callable[..., Bench]) -> None:
    """F11: 8 frames of 9,000 bytes take 23 ms at bulk's safe ceiling of half the link."""
    one = bench()
    options = {"profile": "edt", "link_rate_bits_per_s": 50 * MBIT}
    one.attach(**options)
    set_mtu(one, 9000)
    with pytest.raises(InputError) as caught:
        one.attach(**options)
    assert caught.value.reference == "edt-ceiling-too-low", f"got {caught.value}"
    assert any("MTU 9000" in text for text in one.status().problems), f"got {one.status()}"
    set_mtu(one, 1500)
    assert one.status().problems == (), f"got {one.status().problems}, want none"


# --- queues (F35), hardware classes (F37)


def test_leaves_of_mq_are_built_again(bench: Callable[..., Bench]) -> None:
    """F35: where a queue has no fq its packets are lost; what someone else put there stays."""
    one = bench(queues=4)
    before = one.host_state()
    options = {"profile": "edt", "link_rate_bits_per_s": EDT_LINK}
    one.attach(**options)
    for count in (2, 4, 1, 4):
        set_tx_channels(one.netns, one.device, count)
        one.attach(**options)
        assert one.status().problems == (), f"got {one.status().problems} with {count} queues"
        begin = one.packets().get("normal", 0)
        send_datagrams(one.pair, NORMAL, 20)
        wait_until(lambda begin=begin: one.packets()["normal"] >= begin + 20, "packets")  # type: ignore[misc]
    tc("qdisc", "del", "dev", one.device, "parent", "5348:2", netns=one.netns)
    assert any("fq of queue 1" in text for text in one.status().problems), f"got {one.status()}"
    (text,) = one.attach(**options).repaired
    assert "queues 1 " in text, f"got {text}, want queue 1"
    assert one.status().problems == (), f"got {one.status().problems}, want none"
    words = ("qdisc", "replace", "dev", one.device, "parent", "5348:3", "handle", "77:", "pfifo")
    tc(*words, netns=one.netns)
    with pytest.raises(ConflictError) as caught:
        one.attach(**options)
    assert caught.value.reference == "attachment-damaged", f"got {caught.value}"
    assert "pfifo 77:" in tc("qdisc", "show", "dev", one.device, netns=one.netns)
    tc("qdisc", "del", "dev", one.device, "parent", "5348:3", netns=one.netns)
    one.attach(**options)
    one.engine.detach(one.device)
    assert one.host_state() == before, f"got {one.host_state()}, want {before}"


@pytest.mark.parametrize("profile", ["htb", "edt"])
def test_an_mqprio_in_the_place_of_ours_is_named_and_stays(
    bench: Callable[..., Bench], profile: str
) -> None:
    """F37, F9: whoever sets hardware classes by tc takes our root away with it."""
    one = bench(queues=4)
    options = {"profile": profile, "link_rate_bits_per_s": EDT_LINK}
    one.attach(**options)
    tc("qdisc", "del", "dev", one.device, "root", netns=one.netns)
    words = ("num_tc", "4", "map", "0", "1", "2", "3", *["0"] * 12)
    queues = ("queues", *[f"1@{number}" for number in range(4)], "hw", "0")
    tc("qdisc", "add", "dev", one.device, "root", "mqprio", *words, *queues, netns=one.netns)
    problems = one.status().problems
    assert any("mqprio" in text for text in problems), f"got {problems}"
    chosen = any("skb->priority" in text for text in problems)
    assert chosen is (profile == "edt"), f"got {problems}; HTB's ids are best effort"
    with pytest.raises(ConflictError) as caught:
        one.attach(**options)
    assert caught.value.reference == "attachment-damaged", f"got {caught.value}"
    one.engine.detach(one.device)
    assert "mqprio" in tc("qdisc", "show", "dev", one.device, netns=one.netns)


# --- VLAN, bond, ipvlan (C43, C45, C46)


def request(device: str) -> AttachRequest:
    return AttachRequest(device, link_rate_bits_per_s=LINK)


def refused_beside(one: Bench, attached: str, others: tuple[str, ...]) -> None:
    """Attach one device; each of the others is then refused, and it alone is named."""
    one.engine.attach(request(attached))
    for other in others:
        with pytest.raises(ConflictError) as caught:
            one.engine.attach(request(other))
        assert caught.value.reference == "double-shaping", f"got {caught.value}"
        assert attached in caught.value.message, f"got {caught.value.message}"
    assert one.engine.status(attached)[0].problems == ()
    one.engine.detach(attached)


def test_a_vlan_on_a_shaped_device_is_refused(bench: Callable[..., Bench]) -> None:
    """C43, C46: in both orders; a VLAN has a dot in its name, and is renamed like any device."""
    one = bench()
    vlan = add_vlan(one.pair, "on").device
    before = without_routes(one.host_state())
    refused_beside(one, one.device, (vlan,))
    refused_beside(one, vlan, (one.device,))
    (text,) = [text for text in one.engine.plan_attach(request(vlan)).warnings if "Better" in text]
    assert f"shapectl attach {one.device}" in text, f"got {text}"
    one.engine.attach(request(vlan))
    rename(one.netns, vlan, "tenant.4094.lan")
    assert len(one.engine.attach(request("tenant.4094.lan")).repaired) == 1
    one.engine.detach("tenant.4094.lan")
    rename(one.netns, "tenant.4094.lan", vlan)
    assert without_routes(one.host_state()) == before


def test_an_ipvlan_on_a_shaped_device_is_refused(bench: Callable[..., Bench]) -> None:
    """C43."""
    one = bench()
    words = ("link", "add", "link", one.device, "name", "iv0", "type", "ipvlan")
    ip(*words, netns=one.netns)
    refused_beside(one, one.device, ("iv0",))
    refused_beside(one, "iv0", (one.device,))


def test_a_bond_and_its_members_are_not_both_shaped(bench: Callable[..., Bench]) -> None:
    """C43: every member may be, and is the right place; the bond may be, alone."""
    one = bench()
    words = ("link", "add", "m1", "type", "veth", "peer", "name", "far1")
    ip(*words, netns=one.netns)
    ip("link", "add", "bond0", "type", "bond", "mode", "active-backup", netns=one.netns)
    for member in (one.device, "m1"):
        ip("link", "set", member, "down", netns=one.netns)
        ip("link", "set", member, "master", "bond0", netns=one.netns)
    for device in ("far1", "bond0"):
        ip("link", "set", device, "up", netns=one.netns)
    refused_beside(one, "bond0", (one.device, "m1"))
    for member in (one.device, "m1"):
        refused_beside(one, member, ("bond0",))
    one.engine.attach(request(one.device))
    one.engine.attach(request("m1"))
    for member in (one.device, "m1"):
        (status,) = one.engine.status(member)
        assert not [text for text in status.warnings if "both trees" in text], f"got {status}"
        one.engine.detach(member)
    (text,) = [text for text in one.engine.plan_attach(request("bond0")).warnings if "Bett" in text]
    for member in (one.device, "m1"):
        assert f"shapectl attach {member}" in text, f"got {text}"
