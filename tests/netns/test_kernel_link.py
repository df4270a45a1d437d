# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

import pytest
from netlab import VethPair, ip

from shapeagent.kernel import link, netns
from shapeagent.kernel.rtnl import Rtnl
from shapeagent.model.errors import ConflictError, FailedError, InputError
from shapeagent.model.types import GsoLimits

pytestmark = pytest.mark.netns


@pytest.fixture
def pair(veth_pair: Callable[..., VethPair]) -> VethPair:
    return veth_pair(queues=4)


@pytest.fixture
def rtnl(pair: VethPair) -> Iterator[Rtnl]:
    with netns.open_rtnl(pair.netns) as handle:
        yield handle


def test_facts_of_a_veth(pair: VethPair, rtnl: Rtnl) -> None:
    facts = link.read_device(rtnl, pair.device)
    assert facts == link.read_device_by_index(rtnl, facts.index)
    assert (facts.kind, facts.mtu, facts.tx_queues, facts.up) == ("veth", 1500, 4, True)
    assert not facts.l3_only
    assert facts.speed_bits_per_s is None, f"got {facts.speed_bits_per_s}: veth invents 10 Gbit/s"
    assert facts.gso_max_size == 65_536


def test_tun_has_no_link_layer_header_and_tap_has(pair: VethPair, rtnl: Rtnl) -> None:
    for mode, l3_only in (("tun", True), ("tap", False)):
        ip("tuntap", "add", "name", f"t-{mode}", "mode", mode, netns=pair.netns)
        facts = link.read_device(rtnl, f"t-{mode}")
        assert facts.kind == "tun"
        assert facts.l3_only is l3_only, f"{mode}: got {facts.l3_only}, want {l3_only}"
        assert facts.speed_bits_per_s is None
        ip("link", "delete", f"t-{mode}", netns=pair.netns)


def test_altname_leads_to_the_device(pair: VethPair, rtnl: Rtnl) -> None:
    # C46
    for altname in ("short", "an-alternative-name-of-thirty-six-by"):
        ip("link", "property", "add", "dev", pair.device, "altname", altname, netns=pair.netns)
        got = link.read_device(rtnl, altname)
        assert got.name == pair.device, f"got {got.name}, want {pair.device}"


def test_name_of_15_bytes_is_found(pair: VethPair, rtnl: Rtnl) -> None:
    # C46
    ip("link", "add", "enx78e7d1ea46da", "type", "bridge", netns=pair.netns)
    assert link.read_device(rtnl, "enx78e7d1ea46da").kind == "bridge"


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "a b", "a:b", "../x", "é0", "x" * 128])
def test_bad_name_is_refused_before_the_kernel_is_asked(name: str) -> None:
    # C46. We refuse non-ASCII too, although the kernel takes it: it cannot be typed safely.
    with pytest.raises(InputError) as caught:
        link.check_device_name(name)
    assert caught.value.reference == "bad-device-name"


def test_name_of_16_bytes_that_is_no_altname_is_refused(rtnl: Rtnl) -> None:
    with pytest.raises(InputError) as caught:
        link.read_device(rtnl, "x" * 16)
    assert caught.value.reference == "bad-device-name"


def test_unknown_device_names_the_near_ones(pair: VethPair, rtnl: Rtnl) -> None:
    with pytest.raises(InputError) as caught:
        link.read_device(rtnl, "d1")
    assert caught.value.reference == "no-such-device"
    assert caught.value.exit_code == 2
    assert pair.device in (caught.value.hint or "")


def test_segment_limits_are_set_and_restored(pair: VethPair, rtnl: Rtnl) -> None:
    index = link.read_device(rtnl, pair.device).index
    before = link.read_gso(rtnl, index)
    lowered = GsoLimits(3_028, 2, None if before.ipv4_max_size_bytes is None else 3_028)
    link.set_gso(rtnl, index, lowered)
    assert link.read_gso(rtnl, index) == lowered
    shown = ip("-d", "link", "show", pair.device, netns=pair.netns)
    assert "gso_max_size 3028 gso_max_segs 2 " in shown, f"got {shown}"
    link.set_gso(rtnl, index, before)
    assert link.read_gso(rtnl, index) == before


def test_ipv4_limit_is_set_on_its_own(pair: VethPair, rtnl: Rtnl) -> None:
    index = link.read_device(rtnl, pair.device).index
    before = link.read_gso(rtnl, index)
    if before.ipv4_max_size_bytes is None:
        pytest.skip("kernel before 6.3 has no gso_ipv4_max_size")
    wanted = dataclasses.replace(before, ipv4_max_size_bytes=20_000)
    link.set_gso(rtnl, index, wanted)
    assert link.read_gso(rtnl, index) == wanted


def test_segment_limit_that_the_kernel_refuses_is_named(pair: VethPair, rtnl: Rtnl) -> None:
    index = link.read_device(rtnl, pair.device).index
    before = link.read_gso(rtnl, index)
    for size in (1, 1 << 24):
        with pytest.raises(FailedError) as caught:
            link.set_gso(rtnl, index, dataclasses.replace(before, max_size_bytes=size))
        assert caught.value.reference == "gso-refused"
    assert link.read_gso(rtnl, index) == before


def test_vanished_device_is_named(pair: VethPair, rtnl: Rtnl) -> None:
    # C34
    index = link.read_device(rtnl, pair.device).index
    limits = link.read_gso(rtnl, index)
    ip("link", "delete", pair.device, netns=pair.netns)
    acts: tuple[Callable[[], object], ...] = (
        lambda: link.read_gso(rtnl, index),
        lambda: link.set_gso(rtnl, index, limits),
        lambda: link.read_device_by_index(rtnl, index),
        lambda: link.set_up(rtnl, index),
    )
    for act in acts:
        with pytest.raises(FailedError) as caught:
            act()
        assert caught.value.reference == "interface-gone"


def test_ifb_comes_up_and_goes(pair: VethPair, rtnl: Rtnl) -> None:
    facts = link.create_ifb(rtnl, pair.device, queues=4)
    assert (facts.kind, facts.up, facts.tx_queues) == ("ifb", True, 4)
    assert len(facts.name) <= 15
    assert [found.index for found in link.find_ifbs(rtnl, pair.device)] == [facts.index]
    assert link.find_ifbs(rtnl, "other") == ()
    assert link.delete_ifb(rtnl, facts.index) is True
    assert link.delete_ifb(rtnl, facts.index) is False


def test_taken_ifb_name_is_not_used(pair: VethPair, rtnl: Rtnl) -> None:
    # C46
    taken = link.derive_ifb_name(pair.device, ())
    ip("link", "add", taken, "type", "bridge", netns=pair.netns)
    facts = link.create_ifb(rtnl, pair.device)
    assert facts.name != taken
    assert link.read_device(rtnl, taken).kind == "bridge"


def test_foreign_ifb_is_left_alone(pair: VethPair, rtnl: Rtnl) -> None:
    ip("link", "add", "ifb7", "type", "ifb", netns=pair.netns)
    index = link.read_device(rtnl, "ifb7").index
    with pytest.raises(ConflictError) as caught:
        link.delete_ifb(rtnl, index)
    assert caught.value.reference == "ifb-not-ours"
    assert link.read_device(rtnl, "ifb7").index == index


def test_derived_names_differ_between_devices_that_share_15_bytes() -> None:
    names = {link.derive_ifb_name(f"enx78e7d1ea46d{end}", ()) for end in "abcdef"}
    assert len(names) == 6
    assert all(len(name) <= 15 for name in names)


@pytest.mark.vm
def test_vlan_with_an_egress_map_says_so(pair: VethPair, rtnl: Rtnl) -> None:
    vlan = ("type", "vlan", "id", "5", "egress-qos-map", "6:6")
    ip("link", "add", "link", pair.device, "name", "v5", *vlan, netns=pair.netns)
    assert link.read_device(rtnl, "v5").egress_qos_map is True
