# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import pytest
from netlab import VethPair, ip, load_program, tc

from shapeagent.kernel import filters, link, netns
from shapeagent.kernel.rtnl import Rtnl
from shapeagent.model.errors import ConflictError, FailedError
from shapeagent.model.types import Direction

pytestmark = pytest.mark.netns
EGRESS, INGRESS = Direction.EGRESS, Direction.INGRESS
U32 = ("u32", "match", "u32", "0", "0")


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


@pytest.fixture
def program() -> Iterator[int]:
    descriptor = load_program()
    yield descriptor
    os.close(descriptor)


def add_foreign(pair: VethPair, direction: str, *words: str) -> None:
    tc("filter", "add", "dev", pair.device, direction, *words, netns=pair.netns)


def test_clsact_is_created_once_and_reused(pair: VethPair, rtnl: Rtnl, index: int) -> None:
    assert filters.ensure_clsact(rtnl, index) is True
    assert filters.ensure_clsact(rtnl, index) is False
    assert "clsact" in tc("qdisc", "show", "dev", pair.device, netns=pair.netns)


def test_foreign_ingress_qdisc_is_refused_and_kept(pair: VethPair, rtnl: Rtnl, index: int) -> None:
    # C28
    tc("qdisc", "add", "dev", pair.device, "ingress", netns=pair.netns)
    before = tc("qdisc", "show", "dev", pair.device, netns=pair.netns)
    with pytest.raises(ConflictError) as caught:
        filters.ensure_clsact(rtnl, index)
    assert caught.value.reference == "ingress-qdisc-foreign"
    assert tc("qdisc", "show", "dev", pair.device, netns=pair.netns) == before


def test_no_clsact_means_no_filters(rtnl: Rtnl, index: int) -> None:
    assert filters.list_filters(rtnl, index, EGRESS) == ()


@pytest.mark.parametrize("direction", [EGRESS, INGRESS])
def test_filter_is_added_read_back_replaced_and_deleted(
    rtnl: Rtnl, index: int, program: int, direction: Direction
) -> None:
    filters.ensure_clsact(rtnl, index)
    added = filters.add_filter(rtnl, index, direction, program, "shp_egress")
    assert (added.pref, added.handle, added.protocol) == (
        filters.PREF,
        filters.HANDLE,
        filters.PROTOCOL,
    )
    assert added.name == "shp_egress"
    assert added.direct_action
    assert added.program_id > 0
    other = load_program(3)
    try:
        replaced = filters.replace_filter(
            rtnl, index, direction, other, "shp_egress", our_program_ids=[added.program_id]
        )
        assert replaced.program_id != added.program_id
        assert filters.list_filters(rtnl, index, direction) == (replaced,)  # C31: exactly one
        ours = [replaced.program_id]
        assert filters.del_filter(rtnl, index, direction, our_program_ids=ours) is True
        assert filters.del_filter(rtnl, index, direction, our_program_ids=ours) is False  # C30
        assert filters.list_filters(rtnl, index, direction) == ()
    finally:
        os.close(other)


def test_redirect_stands_behind_the_classifier_and_goes_alone(
    pair: VethPair, rtnl: Rtnl, index: int, program: int
) -> None:
    """It matches nothing by itself: only what the classifier wrote into the packet."""
    filters.ensure_clsact(rtnl, index)
    ifb = link.create_ifb(rtnl, pair.device)
    descriptor = filters.load_redirect()
    try:
        redirect = filters.add_redirect(rtnl, index, ifb.index, descriptor)
        ours = filters.add_filter(rtnl, index, INGRESS, program, "shp_ingress")
        assert filters.list_filters(rtnl, index, INGRESS) == (ours, redirect)
        assert not redirect.direct_action, f"got {redirect}, want its action used"
        shown = tc("filter", "show", "dev", pair.device, "ingress", netns=pair.netns)
        assert f"mirred (Egress Redirect to device {ifb.name}) stolen" in shown, f"got {shown}"
        with pytest.raises(ConflictError) as caught:
            filters.add_redirect(rtnl, index, ifb.index, descriptor)
        assert caught.value.reference == "filter-slot-foreign"
        with pytest.raises(ConflictError):
            filters.del_redirect(rtnl, index, our_program_ids=[ours.program_id])
        ids = [ours.program_id, redirect.program_id]
        replaced = filters.replace_filter(
            rtnl, index, INGRESS, program, "shp_ingress", our_program_ids=ids
        )
        assert filters.list_filters(rtnl, index, INGRESS) == (replaced, redirect)
        assert filters.del_redirect(rtnl, index, our_program_ids=ids) is True
        assert filters.del_redirect(rtnl, index, our_program_ids=ids) is False
        assert filters.list_filters(rtnl, index, INGRESS) == (replaced,)
    finally:
        os.close(descriptor)


def test_only_our_filter_goes(pair: VethPair, rtnl: Rtnl, index: int, program: int) -> None:
    # C26, C30
    filters.ensure_clsact(rtnl, index)
    for pref in ("10", "10", str(filters.PREF + 1)):
        add_foreign(pair, "egress", "pref", pref, "protocol", "all", *U32)
    foreign = filters.list_filters(rtnl, index, EGRESS)
    ours = filters.add_filter(rtnl, index, EGRESS, program, "shp_egress")
    assert len(filters.list_filters(rtnl, index, EGRESS)) == len(foreign) + 1
    filters.del_filter(rtnl, index, EGRESS, our_program_ids=[ours.program_id])
    assert filters.list_filters(rtnl, index, EGRESS) == foreign


def test_filters_without_a_preference_run_after_ours(
    pair: VethPair, rtnl: Rtnl, index: int, program: int
) -> None:
    filters.ensure_clsact(rtnl, index)
    add_foreign(pair, "egress", "protocol", "all", *U32)
    filters.add_filter(rtnl, index, EGRESS, program, "shp_egress")
    got = [info.kind for info in filters.list_filters(rtnl, index, EGRESS)]
    assert got[0] == "bpf", f"got {got}, want ours first"


@pytest.mark.parametrize("protocol", ["all", "ip"])
def test_foreign_filter_in_our_slot_is_refused_and_named(
    pair: VethPair, rtnl: Rtnl, index: int, program: int, protocol: str
) -> None:
    filters.ensure_clsact(rtnl, index)
    add_foreign(pair, "egress", "pref", str(filters.PREF), "protocol", protocol, *U32)
    before = filters.list_filters(rtnl, index, EGRESS)
    with pytest.raises(ConflictError) as caught:
        filters.add_filter(rtnl, index, EGRESS, program, "shp_egress")
    assert caught.value.reference == "filter-slot-foreign"
    assert "u32" in caught.value.message
    with pytest.raises(ConflictError):
        filters.replace_filter(rtnl, index, EGRESS, program, "shp_egress", our_program_ids=[1])
    assert filters.list_filters(rtnl, index, EGRESS) == before


def test_another_program_in_our_slot_is_not_ours_to_remove(
    rtnl: Rtnl, index: int, program: int
) -> None:
    filters.ensure_clsact(rtnl, index)
    there = filters.add_filter(rtnl, index, EGRESS, program, "shp_egress")
    for act in (
        lambda: filters.add_filter(rtnl, index, EGRESS, program, "shp_egress"),
        lambda: filters.replace_filter(rtnl, index, EGRESS, program, "x", our_program_ids=[]),
        lambda: filters.del_filter(rtnl, index, EGRESS, our_program_ids=[there.program_id + 1]),
    ):
        with pytest.raises(ConflictError) as caught:
            act()
        assert caught.value.reference == "filter-slot-foreign"
    assert filters.list_filters(rtnl, index, EGRESS) == (there,)


def test_clsact_goes_only_when_ours_and_unused(pair: VethPair, rtnl: Rtnl, index: int) -> None:
    # C26
    def remove(*, created_by_us: bool = True, has_other_programs: bool = False) -> bool:
        return filters.remove_clsact_if_empty(
            rtnl, index, created_by_us=created_by_us, has_other_programs=has_other_programs
        )

    assert remove() is False, "there is none yet"
    filters.ensure_clsact(rtnl, index)
    assert remove(created_by_us=False) is False
    assert remove(has_other_programs=True) is False
    add_foreign(pair, "ingress", "protocol", "all", *U32)
    assert remove() is False
    tc("filter", "delete", "dev", pair.device, "ingress", netns=pair.netns)
    assert remove() is True
    assert "clsact" not in tc("qdisc", "show", "dev", pair.device, netns=pair.netns)


def test_vanished_device_is_named(pair: VethPair, rtnl: Rtnl, index: int, program: int) -> None:
    # C34
    filters.ensure_clsact(rtnl, index)
    ip("link", "delete", pair.device, netns=pair.netns)
    acts: tuple[Callable[[], object], ...] = (
        lambda: filters.ensure_clsact(rtnl, index),
        lambda: filters.add_filter(rtnl, index, EGRESS, program, "shp_egress"),
    )
    for act in acts:
        with pytest.raises(FailedError) as caught:
            act()
        assert caught.value.reference == "interface-gone"
