# SPDX-License-Identifier: Apache-2.0
"""Compiled rule tables and the reference of the kernel's rule step."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shapeagent.model.codes import Code
from shapeagent.model.errors import InputError
from shapeagent.model.schema import load_policy
from shapeagent.model.types import Direction, Policy, PortSide, Rule, RuleKind, TrafficClass
from shapeagent.policy.builtin import default_policy_text
from shapeagent.policy.rules import RuleTables, compile_rules, decide

EGRESS, INGRESS = Direction.EGRESS, Direction.INGRESS
TCP, UDP = 6, 17
ABI = Path(__file__).parents[2] / "bpf" / "abi.h"


def policy_of(*rules: Rule) -> Policy:
    classes = tuple(TrafficClass(name, n, n, 1, 1, 1) for n, name in enumerate("sgnb"))
    return Policy(classes, rules, "n", "s", 1, None, 0, 0, False, "test", "", "")


def port(number: int, name: str, first: int, last: int, **more: object) -> Rule:
    rule = {"kind": RuleKind.PORT, "protocols": (TCP,), "ports": ((first, last),), **more}
    return Rule(number, f"r{number}", name, **rule)  # type: ignore[arg-type]


def slot(tables: RuleTables, direction: int, number: int) -> tuple[int, ...]:
    start = (direction * 65_536 + number) * 4
    return tuple(tables.ports[start : start + 4])


def test_port_table_has_the_layout_of_abi_h() -> None:
    text = ABI.read_text()
    fields = re.search(r"struct shp_port_rules \{[^\n]*\n(.*?)\};", text, re.DOTALL)
    assert fields is not None
    names = re.findall(r"__u16 (\w+);", fields[1])
    assert names == ["tcp_local", "tcp_remote", "udp_local", "udp_remote"], f"got {names}"
    assert "#define SHP_MAX_MARKS 8" in text
    assert "#define SHP_FIELD_DSCP 256" in text
    tables = compile_rules(
        policy_of(
            port(1, "s", 10, 11, side=PortSide.LOCAL),
            port(2, "g", 65_535, 65_535, protocols=(UDP,), side=PortSide.REMOTE),
            port(3, "b", 1, 1, protocols=(TCP, UDP), direction=INGRESS),
        )
    )
    assert len(tables.ports.tobytes()) == 2 * 65_536 * 8
    assert slot(tables, 0, 10) == slot(tables, 1, 11) == (1, 0, 0, 0)
    assert slot(tables, 0, 65_535) == (0, 0, 0, 2)
    assert slot(tables, 0, 1) == (0, 0, 0, 0)
    assert slot(tables, 1, 1) == (3, 3, 3, 3)
    assert slot(tables, 0, 12) == slot(tables, 0, 9) == (0, 0, 0, 0)


def test_lower_number_keeps_the_slot_whatever_the_order() -> None:
    wide, narrow = port(2, "b", 1, 65_535), port(1, "s", 500, 501)
    for rules in ((wide, narrow), (narrow, wide)):
        tables = compile_rules(policy_of(*rules))
        assert slot(tables, 0, 500) == (1, 1, 0, 0)
        assert slot(tables, 0, 502) == (2, 2, 0, 0)


def test_local_and_remote_rules_meet_by_rank() -> None:
    tables = compile_rules(
        policy_of(
            port(1, "g", 8000, 8000, side=PortSide.LOCAL),
            port(2, "b", 443, 443, side=PortSide.REMOTE),
        )
    )
    assert decide(tables, TCP, 8000, 443, EGRESS)[0] == "g"
    assert decide(tables, TCP, 9, 443, EGRESS)[0] == "b"
    assert decide(tables, TCP, 443, 8000, EGRESS) == ("n", None)
    assert decide(tables, UDP, 8000, 443, EGRESS) == ("n", None)
    assert decide(tables, TCP, None, None, EGRESS) == ("n", None)


def test_kinds_are_asked_in_order() -> None:
    mark = Rule(5, "m", "s", RuleKind.MARK, mark_value=0x10, mark_mask=0xF0)
    cgroup = Rule(4, "c", "g", RuleKind.CGROUP, cgroup="a/b", direction=EGRESS)
    dscp = Rule(3, "d", "b", RuleKind.DSCP, dscp=(46,))
    ports = port(2, "g", 80, 80)
    proto = Rule(1, "p", "s", RuleKind.PROTOCOL, protocols=(TCP,))
    tables = compile_rules(policy_of(proto, ports, dscp, cgroup, mark))

    def got(direction: Direction = EGRESS, **more: object) -> str:
        _, rule = decide(tables, TCP, 80, 9, direction, **more)  # type: ignore[arg-type]
        return rule.name if rule else "-"

    chain = ("a/b/c", "a/b", "a")
    assert got(mark=0x1F, cgroup=chain, dscp=46) == "m"
    assert got(mark=0x2F, cgroup=chain, dscp=46) == "c"
    assert got(INGRESS, cgroup=chain, dscp=46) == "d"
    assert got(cgroup=("a",)) == "r2"
    assert decide(tables, TCP, 81, 9, EGRESS)[0] == "s"
    assert (tables.has_mark, tables.has_cgroup, tables.has_dscp) == (True, True, True)
    assert tables.datagrams_look
    assert tables.cgroup_levels == 0b100
    assert tables.rules == (
        (1, 0, Code.PROTO), (2, 1, Code.PORT), (3, 3, Code.DSCP), (4, 1, Code.CGROUP),
        (5, 0, Code.MARK),
    )  # fmt: skip
    assert tables.fields == {(0, 6): 1, (1, 6): 1, (0, 302): 3, (1, 302): 3}
    assert tables.marks == ((0x10, 0xF0, 5, 3),)
    assert tables.cgroups == (("a/b", 4, 1),)


def test_deepest_cgroup_wins() -> None:
    deep = Rule(2, "deep", "b", RuleKind.CGROUP, cgroup="a/b")
    high = Rule(1, "high", "s", RuleKind.CGROUP, cgroup="a")
    tables = compile_rules(policy_of(high, deep))
    assert decide(tables, TCP, 1, 2, EGRESS, cgroup=("a/b/x", "a/b", "a"))[0] == "b"
    assert decide(tables, TCP, 1, 2, EGRESS, cgroup=("a/c", "a"))[0] == "s"
    assert not tables.datagrams_look


def test_protected_ports_come_before_every_other_kind() -> None:
    guard = port(1, "s", 179, 179, protected=True)
    tables = compile_rules(policy_of(guard, Rule(2, "d", "b", RuleKind.DSCP, dscp=(48,))))
    assert decide(tables, TCP, 179, 50_000, EGRESS, dscp=48)[0] == "s"
    assert tables.rules[0] == (1, 0, Code.CONTROL)


def test_ninth_mark_rule_is_refused() -> None:
    rules = [
        Rule(n, f"m{n}", "b", RuleKind.MARK, mark_value=n, mark_mask=0xFF) for n in range(1, 10)
    ]
    compile_rules(policy_of(*rules[:8]))
    with pytest.raises(InputError) as caught:
        compile_rules(policy_of(*rules))
    assert caught.value.reference == "too-many-mark-rules"


RULES = st.lists(
    st.tuples(
        st.sampled_from("sgb"),
        st.sampled_from([(TCP,), (UDP,), (TCP, UDP)]),
        st.sampled_from(list(PortSide)),
        st.sampled_from([None, EGRESS, INGRESS]),
        st.integers(1, 40),
        st.integers(0, 15),
    ),
    max_size=8,
)


@given(RULES, st.sampled_from([TCP, UDP]), st.integers(1, 60), st.integers(1, 60),
       st.sampled_from([EGRESS, INGRESS]))  # fmt: skip
def test_tables_agree_with_walking_the_rules(
    drawn: list[tuple[str, tuple[int, ...], PortSide, Direction | None, int, int]],
    protocol: int,
    local: int,
    remote: int,
    direction: Direction,
) -> None:
    rules = [
        port(n, name, first, first + more, protocols=protocols, side=side, direction=where)
        for n, (name, protocols, side, where, first, more) in enumerate(drawn, 1)
    ]
    want = "n"
    for rule in rules:
        first, last = rule.ports[0]
        at_local = rule.side is not PortSide.REMOTE and first <= local <= last
        at_remote = rule.side is not PortSide.LOCAL and first <= remote <= last
        if (
            protocol in rule.protocols
            and rule.direction in (None, direction)
            and (at_local or at_remote)
        ):
            want = rule.traffic_class
            break
    got = decide(compile_rules(policy_of(*rules)), protocol, local, remote, direction)[0]
    assert got == want, f"got {got}, want {want}"


def test_compiling_takes_under_50_ms() -> None:
    policy = load_policy(default_policy_text(), "built-in", link_rate_bits_per_s=10**9)
    best = 1.0
    for _ in range(5):
        start = time.perf_counter()
        compile_rules(policy)
        best = min(best, time.perf_counter() - start)
    assert best < 0.05, f"got {best * 1e3:.1f} ms, want under 50"
