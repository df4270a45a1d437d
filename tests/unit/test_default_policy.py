# SPDX-License-Identifier: Apache-2.0
"""The built-in policy classifies the flows of AI hosts, and harms no other."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest

from shapeagent.model.schema import load_policy
from shapeagent.model.types import Direction
from shapeagent.policy.builtin import default_policy_text
from shapeagent.policy.rules import classify_ports, compile_rules

HERE = Path(__file__).parent
FLOWS = tomllib.loads((HERE.parent / "data" / "flows.toml").read_text())["flow"]
DOCUMENT = (HERE.parents[1] / "docs" / "default-policy.md").read_text()
POLICY = load_policy(default_policy_text(), "built-in", link_rate_bits_per_s=10**10)
TABLES = compile_rules(POLICY)
NUMBERS = {"tcp": 6, "udp": 17}
OTHER_END = 61_001  # just above Linux's ephemeral ports, so that no rule names it
EPHEMERAL = range(32_768, 61_000)  # net.ipv4.ip_local_port_range
EPHEMERAL_LISTED = {50_051, 50_052}  # in docs/default-policy.md


def ports_of(flow: dict[str, Any]) -> list[int]:
    found: list[int] = []
    for item in flow.get("ports", []):
        first, _, last = str(item).partition("-")
        found += range(int(first), int(last or first) + 1)
    return found


def classes_of(flow: dict[str, Any], port: int) -> set[str]:
    """Return every class that a packet of the flow can get, by protocol, side and direction."""
    found = set()
    for name in flow.get("protocols", ["tcp"]):
        for direction in Direction:
            ends = [(OTHER_END, port)]
            if flow.get("side") != "remote":
                ends.append((port, OTHER_END))
            for local, remote in ends:
                found.add(classify_ports(TABLES, NUMBERS[name], local, remote, direction))
    return found


def test_flow_table_has_every_row() -> None:
    assert len(FLOWS) >= 39, f"got {len(FLOWS)} flows"
    assert all(set(flow["kind"]) <= {"S", "B"} for flow in FLOWS)
    assert all(flow.get("ports") or flow.get("ephemeral") for flow in FLOWS)


@pytest.mark.parametrize("flow", FLOWS, ids=lambda flow: flow["name"])
def test_flow_gets_a_fitting_class(flow: dict[str, Any]) -> None:
    ports = ports_of(flow)
    if flow.get("ephemeral"):
        ports += [port for port in EPHEMERAL if port not in EPHEMERAL_LISTED]
    wrong = set()
    if "S" in flow["kind"]:
        wrong.add("bulk")
    if "B" in flow["kind"]:
        wrong |= {"signal", "stream"}
    listed = flow.get("ambiguous", [])
    for port in ports:
        got = classes_of(flow, port)
        assert port in listed or not got & wrong, f"port {port}: got {got}, want none of {wrong}"


def test_ambiguous_ports_are_documented() -> None:
    section = DOCUMENT.split("## Ambiguous ports")[1].split("\n## ")[0]
    for port in {p for flow in FLOWS for p in flow.get("ambiguous", [])} | EPHEMERAL_LISTED:
        assert str(port) in section, f"{port} is not in docs/default-policy.md"


def test_every_rule_is_documented_with_its_ports() -> None:
    for rule in POLICY.rules:
        if rule.protected:
            continue
        rows = [line for line in DOCUMENT.splitlines() if line.startswith(f"| `{rule.name}` |")]
        assert rows, f"{rule.name} has no row in docs/default-policy.md"
        assert f"| {rule.traffic_class} |" in rows[0], rows[0]
        for first, last in rule.ports:
            text = f"{first}" if first == last else f"{first}-{last}"
            assert text in rows[0], f"{rule.name}: {text} is not in {rows[0]!r}"


@pytest.mark.parametrize(
    ("port", "protocol", "want"),
    [(22, 6, "normal"), (53, 17, "signal"), (123, 17, "signal"), (67, 17, "signal"),
     (319, 17, "signal"), (179, 6, "signal"), (6443, 6, "signal"), (10_250, 6, "normal"),
     (6818, 6, "signal"), (8000, 6, "stream"), (2379, 6, "signal"), (2049, 6, "bulk"),
     (5555, 6, "normal")],
)  # fmt: skip
def test_well_known_ports(port: int, protocol: int, want: str) -> None:
    for local, remote in ((port, OTHER_END), (OTHER_END, port)):
        got = classify_ports(TABLES, protocol, local, remote)
        assert got == want, f"port {port}: got {got}, want {want}"


def test_443_is_told_apart_by_side() -> None:
    assert classify_ports(TABLES, 6, OTHER_END, 443) == "normal"
    assert classify_ports(TABLES, 6, 443, OTHER_END) == "stream"


@pytest.mark.parametrize("protocol", [1, 58, 47, 50, 132])
def test_other_protocols_are_left_alone(protocol: int) -> None:
    assert classify_ports(TABLES, protocol, None, None) == "normal"
