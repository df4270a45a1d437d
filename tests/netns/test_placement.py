# SPDX-License-Identifier: Apache-2.0
"""Which of the devices that carry the same packets may be shaped, and what attach says of it."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
from devicekit import without_routes
from enginekit import MBIT, SIGNAL_UDP, Bench, send_datagrams, shapectl, wait_until
from netlab import ip, tc

from shapeagent.kernel.netns import open_rtnl
from shapeagent.model.errors import ConflictError
from shapeagent.model.reports import AttachRequest
from shapeagent.service.placement import read_places

pytestmark = [
    pytest.mark.netns,
    pytest.mark.skipif(os.geteuid() != 0, reason="making network namespaces needs root"),
]


def request(device: str, **options: object) -> AttachRequest:
    return AttachRequest(device, link_rate_bits_per_s=100 * MBIT, **options)  # type: ignore[arg-type]


def add_bridge(one: Bench) -> str:
    """Return a bridge whose port is the device under test."""
    ip("link", "add", "br0", "type", "bridge", netns=one.netns)
    ip("link", "set", one.device, "master", "br0", netns=one.netns)
    ip("link", "set", "br0", "up", netns=one.netns)
    return "br0"


def add_macvlan(one: Bench) -> str:
    """Return a macvlan on the device under test."""
    words = ("link", "add", "link", one.device, "name", "mv.0", "type", "macvlan")
    ip(*words, "mode", "bridge", netns=one.netns)
    ip("link", "set", "mv.0", "up", netns=one.netns)
    return "mv.0"


ABOVE = {"bridge": add_bridge, "macvlan": add_macvlan}


@pytest.mark.parametrize("kind", ABOVE)
@pytest.mark.parametrize("first", ["above", "below"])
@pytest.mark.parametrize("profile", ["htb", "police"])
def test_a_second_layer_is_refused(
    bench: Callable[..., Bench], kind: str, first: str, profile: str
) -> None:
    """C43: in both orders, naming the other device; nothing is changed."""
    one = bench()
    above = ABOVE[kind](one)
    names = (above, one.device) if first == "above" else (one.device, above)
    before = without_routes(one.host_state())
    one.engine.attach(request(names[0], profile=profile))
    during = without_routes(one.host_state())
    with pytest.raises(ConflictError) as caught:
        one.engine.attach(request(names[1], profile=profile))
    assert caught.value.reference == "double-shaping", f"got {caught.value}"
    assert names[0] in caught.value.message, f"got {caught.value.message}, want {names[0]}"
    assert f"detach {names[0]}" in (caught.value.hint or ""), f"got {caught.value.hint}"
    assert without_routes(one.host_state()) == during, "got a changed host, want nothing done"
    one.engine.attach(request(names[1], profile=profile, shadow=True))  # changes no packet
    one.engine.detach(names[1])
    one.engine.detach(names[0])
    one.engine.attach(request(names[1], profile=profile))
    one.engine.detach(names[1])
    assert without_routes(one.host_state()) == before, f"got {one.host_state()}, want {before}"


def test_a_layer_two_steps_away_is_refused_too(bench: Callable[..., Bench]) -> None:
    """C43: a macvlan on a bridge over the shaped port."""
    one = bench()
    bridge = add_bridge(one)
    words = ("link", "add", "link", bridge, "name", "mv0", "type", "macvlan")
    ip(*words, netns=one.netns)
    one.attach()
    with pytest.raises(ConflictError) as caught:
        one.engine.attach(request("mv0"))
    assert caught.value.reference == "double-shaping", f"got {caught.value}"


def test_both_ends_of_a_veth_are_no_hierarchy(bench: Callable[..., Bench]) -> None:
    """C43: IFLA_LINK of a veth is its peer, also in one namespace; a tunnel's carrier likewise."""
    one = bench()
    ip("link", "add", "v0", "type", "veth", "peer", "name", "v1", netns=one.netns)
    for name in ("v0", "v1"):
        ip("link", "set", name, "up", netns=one.netns)
    with open_rtnl(one.netns) as socket:
        places = read_places(socket)
    near = {name: places[name].lowers + places[name].uppers for name in ("v0", "v1")}
    assert near == {"v0": (), "v1": ()}, f"got {near}, want no hierarchy"
    for name in ("v0", "v1"):
        one.engine.attach(request(name))
    for name in ("v0", "v1"):
        assert one.engine.status(name)[0].problems == (), f"got {one.engine.status(name)}"
        one.engine.detach(name)


def test_two_ports_of_one_bridge_are_shaped_each(bench: Callable[..., Bench]) -> None:
    """C45: they carry other packets."""
    one = bench()
    add_bridge(one)
    words = ("link", "add", "port2", "type", "veth", "peer", "name", "far2")
    ip(*words, netns=one.netns)
    ip("link", "set", "port2", "master", "br0", netns=one.netns)
    one.attach()
    one.engine.attach(request("port2"))
    for name in (one.device, "port2"):
        assert one.engine.status(name)[0].warnings in ((), _down(name)), (
            f"got {one.engine.status(name)[0].warnings}"
        )


def _down(name: str) -> tuple[str, ...]:
    return (f"{name} is down: nothing is sent; what stands on it stays",)


@pytest.mark.parametrize("kind", ABOVE)
def test_a_wrong_place_is_named_with_the_right_one(bench: Callable[..., Bench], kind: str) -> None:
    """C43, C45: attach does as told, and says in doctor's words where it belongs."""
    one = bench()
    above = ABOVE[kind](one)
    plan = one.engine.plan_attach(request(above))
    better = [text for text in plan.warnings if f"shapectl attach {one.device}" in text]
    assert len(better) == 1, f"got {plan.warnings}, want one that names {one.device}"
    own = one.engine.plan_attach(request(one.device))
    assert not [text for text in own.warnings if "Better" in text], f"got {own.warnings}"
    tc("qdisc", "add", "dev", above, "root", "handle", "7:", "htb", netns=one.netns)
    own = one.engine.plan_attach(request(one.device))
    assert any(f"{above}, on the same way" in text for text in own.warnings), f"got {own.warnings}"


def test_devices_that_are_put_together_later_are_named(bench: Callable[..., Bench]) -> None:
    """C43: nobody asks shapectl before enslaving a device; status says so."""
    one = bench()
    ip("link", "add", "br0", "type", "bridge", netns=one.netns)
    ip("link", "set", "br0", "up", netns=one.netns)
    one.attach()
    one.engine.attach(request("br0"))
    assert one.status().warnings == (), f"got {one.status().warnings}"
    ip("link", "set", one.device, "master", "br0", netns=one.netns)
    for name, other in ((one.device, "br0"), ("br0", one.device)):
        status = one.engine.status(name)[0]
        assert any(f"detach {other}" in text for text in status.warnings), f"got {status.warnings}"
        assert status.problems == (), f"got {status.problems}"
    one.engine.detach("br0")
    assert one.status().warnings == (), f"got {one.status().warnings}"


def test_an_ifb_of_ours_is_no_device_to_attach_to(bench: Callable[..., Bench]) -> None:
    one = bench()
    one.attach(ingress="ifb")
    before = one.host_state()
    with pytest.raises(ConflictError) as caught:
        one.engine.attach(request(one.state()["ifb"]))
    assert caught.value.reference == "own-ifb", f"got {caught.value}"
    assert one.host_state() == before, "got a changed host, want nothing done"


def test_a_macvlan_in_another_namespace_sees_no_parent(
    bench: Callable[..., Bench], netns_factory: Callable[[], str]
) -> None:
    """The index of its parent belongs to the namespace it came from, and is nobody's here."""
    one, there = bench(), netns_factory()
    for number in range(4):  # so that the parent's index is that of a device there, too
        ip("link", "add", f"x{number}", "type", "bridge", netns=there)
    name = add_macvlan(one)
    ip("link", "set", name, "netns", there, netns=one.netns)
    with open_rtnl(there) as socket:
        place = read_places(socket)[name]
    assert place.lowers == (), f"got {place.lowers}, want none"


def test_the_command_line_says_double_shaping(bench: Callable[..., Bench]) -> None:
    """C43, by the folders of the command line."""
    one = bench()
    above = add_macvlan(one)
    options = ("--netns", one.netns)
    try:
        ran = shapectl(*options, "attach", one.device, "--link-rate", "100mbit")
        assert ran.code == 0, f"got exit {ran.code}: {ran.err}"
        ran = shapectl(*options, "attach", above, "--link-rate", "100mbit")
        assert ran.code == 5, f"got exit {ran.code}: {ran.err}, want 5"
        assert "double-shaping" in ran.err, f"got {ran.err}"
        found = shapectl(*options, "doctor", above)
        assert "double-shaping" in found.out, f"got {found.out}"
        send_datagrams(one.pair, SIGNAL_UDP, 3)
        wait_until(
            lambda: '"signal"' in shapectl(*options, "status", "--json").out, "status of the CLI"
        )
    finally:
        ran = shapectl(*options, "detach", one.device)
    assert ran.code == 0, f"got exit {ran.code}: {ran.err}"
