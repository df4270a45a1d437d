# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from typing import Any

import pytest

from shapeagent.model.reports import Severity
from shapeagent.policy.placement import (
    Place,
    carriers,
    double_shaping,
    judge_placement,
    on_the_way,
)


def place(name: str, kind: str = "", **more: Any) -> Place:
    values = {"hardware": not kind, "master": "", "lowers": (), "uppers": (), **more}
    return Place(name=name, kind=kind, **values)


# eth0 and eth1 under bond0, bond0.5 on it, br0 over that; a veth beside them
HOST = {
    one.name: one
    for one in (
        place("eth0", master="bond0", uppers=("bond0",)),
        place("eth1", master="bond0", uppers=("bond0",)),
        place("bond0", "bond", lowers=("eth0", "eth1"), uppers=("bond0.5",)),
        place("bond0.5", "vlan", master="br0", lowers=("bond0",), uppers=("br0",)),
        place("br0", "bridge", lowers=("bond0.5", "veth1")),
        place("veth1", "veth", master="br0", uppers=("br0",)),
        place("veth2", "veth"),
    )
}


@pytest.mark.parametrize(
    ("name", "want"),
    [
        ("eth0", {"bond0", "bond0.5", "br0"}),  # not eth1: other packets
        ("bond0", {"eth0", "eth1", "bond0.5", "br0"}),
        ("br0", {"bond0.5", "veth1", "bond0", "eth0", "eth1"}),
        ("veth1", {"br0"}),
        ("veth2", set()),
    ],
)
def test_packets_pass_what_is_above_and_below_and_nothing_beside(name: str, want: set[str]) -> None:
    """C43."""
    got = on_the_way(name, HOST)
    assert set(got) == want, f"got {got}, want {want}"
    assert len(got) == len(set(got)), f"got {got}, want each once"


def test_the_devices_at_the_bottom_carry_the_packets() -> None:
    got = carriers(HOST["br0"], HOST)
    assert set(got) == {"eth0", "eth1"}, f"got {got}, want the hardware, without the veth"


def test_a_circle_ends() -> None:
    places = {
        "a": place("a", "vlan", lowers=("b",), uppers=("b",)),
        "b": place("b", "vlan", lowers=("a",), uppers=("a",)),
    }
    assert on_the_way("a", places) == ("b",), f"got {on_the_way('a', places)}"


@pytest.mark.parametrize(
    ("name", "identity", "better"),
    [
        ("bond0", "placement-bond", "shapectl attach eth0; shapectl attach eth1"),
        ("br0", "placement-bridge", "shapectl attach eth0; shapectl attach eth1"),
        ("bond0.5", "placement-vlan", "shapectl attach eth0; shapectl attach eth1"),
    ],
)
def test_a_wrong_place_is_named_with_the_right_one(name: str, identity: str, better: str) -> None:
    """C43, C45."""
    got = judge_placement(HOST[name], HOST)
    assert (got.id, got.severity) == (identity, Severity.WARNING), f"got {got}"
    assert got.fix == better, f"got {got.fix}, want {better}"


@pytest.mark.parametrize(
    ("name", "identity"),
    [("eth0", "placement-member"), ("veth1", "placement-port"), ("veth2", "placement")],
)
def test_a_right_place_is_no_warning(name: str, identity: str) -> None:
    got = judge_placement(HOST[name], HOST)
    assert got.id == identity, f"got {got}, want {identity}"
    assert got.severity is not Severity.WARNING, f"got {got}"


def test_a_tree_at_any_distance_is_seen() -> None:
    got = [one.what for one in double_shaping("eth0", HOST, ["br0", "eth1", "veth2"])]
    assert len(got) == 1, f"got {got}, want one"
    assert got[0].startswith("br0"), f"got {got}, want br0"
