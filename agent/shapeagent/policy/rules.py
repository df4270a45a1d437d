# SPDX-License-Identifier: Apache-2.0
"""From ranked rules to the tables that the datapath looks up, and what it finds in them.

Where two rules match in one table the lower number wins, so each slot holds
one number and a packet costs at most two port lookups, whatever the policy.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shapeagent.model.codes import Code
from shapeagent.model.errors import InputError
from shapeagent.model.types import Direction, Policy, PortSide, Rule, RuleKind

MAX_MARK_RULES = 8  # SHP_MAX_MARKS
FIELD_DSCP = 256  # SHP_FIELD_DSCP: slots below are IP protocols
TCP = 6
UDP = 17

_COLUMNS = 4  # tcp_local, tcp_remote, udp_local, udp_remote: struct shp_port_rules
_PORTS = 65_536
_CODES = {
    RuleKind.MARK: Code.MARK,
    RuleKind.CGROUP: Code.CGROUP,
    RuleKind.DSCP: Code.DSCP,
    RuleKind.PORT: Code.PORT,
    RuleKind.PROTOCOL: Code.PROTO,
}


@dataclass(frozen=True, slots=True)
class RuleTables:
    """The policy's rules as the maps of `abi.h` hold them.

    ports: 2 × 65,536 × 4 u16 in host order, as `struct shp_port_rules[2 * 65536]`
        in slot direction * 65536 + port; 0 = no rule.
    fields: (direction number, slot) → rule number; slot 0..255 protocol, 256 + DSCP.
    marks: (value, mask, rule number, direction bits), by rank.
    cgroups: (path, rule number, direction bits), by rank.
    rules: (rule number, class number, code), by rank.
    cgroup_levels: bit n set where a rule names a cgroup n levels under the root.
    """

    ports: array[int]
    fields: Mapping[tuple[int, int], int]
    marks: tuple[tuple[int, int, int, int], ...]
    cgroups: tuple[tuple[str, int, int], ...]
    rules: tuple[tuple[int, int, Code], ...]
    cgroup_levels: int
    has_mark: bool
    has_cgroup: bool
    has_dscp: bool
    datagrams_look: bool  # mark or DSCP may differ within a flow: datagrams are not cached
    by_number: Mapping[int, Rule]
    default_class: str


def compile_rules(policy: Policy) -> RuleTables:
    """Return the lookup tables of a policy's rules.

    Raises: InputError too-many-mark-rules.
    """
    numbers = {c.name: c.number for c in policy.classes}
    ranked = sorted(policy.rules, key=lambda rule: rule.number)
    ports = array("H", bytes(2 * 2 * _PORTS * _COLUMNS))
    fields: dict[tuple[int, int], int] = {}
    for rule in reversed(ranked):  # the lowest number is written last and stays
        for direction in _directions(rule):
            if rule.kind is RuleKind.PORT:
                _fill_ports(ports, rule, direction)
            elif rule.kind is RuleKind.DSCP:
                fields.update({(direction, FIELD_DSCP + v): rule.number for v in rule.dscp})
            elif rule.kind is RuleKind.PROTOCOL:
                fields.update({(direction, v): rule.number for v in rule.protocols})
    marks = tuple(
        (rule.mark_value, rule.mark_mask, rule.number, _direction_bits(rule))
        for rule in ranked
        if rule.kind is RuleKind.MARK
    )
    if len(marks) > MAX_MARK_RULES:
        raise InputError(
            "too-many-mark-rules",
            f"the policy has {len(marks)} mark rules, at most {MAX_MARK_RULES} are possible",
            hint="join marks of one class with a mask, such as 0x10/0xf0",
        )
    cgroups = tuple(
        (rule.cgroup, rule.number, _direction_bits(rule))
        for rule in ranked
        if rule.kind is RuleKind.CGROUP
    )
    levels = 0
    for path, _, _ in cgroups:
        levels |= 1 << (path.count("/") + 1)
    has_dscp = any(rule.kind is RuleKind.DSCP for rule in ranked)
    return RuleTables(
        ports=ports,
        fields=fields,
        marks=marks,
        cgroups=cgroups,
        rules=tuple(
            (
                rule.number,
                numbers[rule.traffic_class],
                Code.CONTROL if rule.protected else _CODES[rule.kind],
            )
            for rule in ranked
        ),
        cgroup_levels=levels,
        has_mark=bool(marks),
        has_cgroup=bool(cgroups),
        has_dscp=has_dscp,
        datagrams_look=bool(marks) or has_dscp,
        by_number={rule.number: rule for rule in ranked},
        default_class=policy.default_class,
    )


def decide(
    tables: RuleTables,
    protocol: int,
    local_port: int | None,
    remote_port: int | None,
    direction: Direction,
    *,
    dscp: int = 0,
    mark: int = 0,
    cgroup: Sequence[str] = (),
) -> tuple[str, Rule | None]:
    """Return the class and rule that a packet gets from rules alone, as `rules_find` in C does.

    Protected ports first; then mark, cgroup, DSCP, ports, protocol. Without a rule the default
    class is returned (the whitelist, which comes after the rules, is not asked).

    Args: local_port, remote_port: None where the packet has no ports; cgroup: the socket's path
        and its ancestors, deepest first, relative to the cgroup v2 mount; egress only.
    """
    by_port = _port_rule(tables, protocol, local_port, remote_port, direction.number)
    rule = tables.by_number.get(by_port)
    if rule is not None and rule.protected:
        return rule.traffic_class, rule
    number = (
        _mark_rule(tables, mark, direction.number)
        or _cgroup_rule(tables, cgroup, direction)
        or tables.fields.get((direction.number, FIELD_DSCP + dscp), 0)
        or by_port
        or tables.fields.get((direction.number, protocol), 0)
    )
    rule = tables.by_number.get(number)
    return (rule.traffic_class, rule) if rule else (tables.default_class, None)


def classify_ports(
    tables: RuleTables,
    protocol: int,
    local_port: int | None,
    remote_port: int | None,
    direction: Direction = Direction.EGRESS,
) -> str:
    """Return the class of a packet that has only a protocol and ports to go by."""
    return decide(tables, protocol, local_port, remote_port, direction)[0]


def _directions(rule: Rule) -> tuple[int, ...]:
    return (0, 1) if rule.direction is None else (rule.direction.number,)


def _direction_bits(rule: Rule) -> int:
    return sum(1 << number for number in _directions(rule))


def _fill_ports(ports: array[int], rule: Rule, direction: int) -> None:
    columns = [
        2 * (protocol == UDP) + side
        for protocol in rule.protocols
        for side in (0, 1)
        if rule.side is PortSide.EITHER or (rule.side is PortSide.REMOTE) == bool(side)
    ]
    for first, last in rule.ports:
        numbers = array("H", [rule.number]) * (last - first + 1)
        start = (direction * _PORTS + first) * _COLUMNS
        stop = (direction * _PORTS + last + 1) * _COLUMNS
        for column in columns:
            ports[start + column : stop : _COLUMNS] = numbers


def _port_rule(
    tables: RuleTables,
    protocol: int,
    local_port: int | None,
    remote_port: int | None,
    direction: int,
) -> int:
    if protocol not in (TCP, UDP) or local_port is None or remote_port is None:
        return 0
    column = 2 * (protocol == UDP)
    local = tables.ports[(direction * _PORTS + local_port) * _COLUMNS + column]
    remote = tables.ports[(direction * _PORTS + remote_port) * _COLUMNS + column + 1]
    return min(local, remote) if local and remote else local or remote


def _mark_rule(tables: RuleTables, mark: int, direction: int) -> int:
    for value, mask, number, directions in tables.marks:
        if mark & mask == value and directions >> direction & 1:
            return number
    return 0


def _cgroup_rule(tables: RuleTables, cgroup: Sequence[str], direction: Direction) -> int:
    if direction is not Direction.EGRESS:
        return 0
    by_path = {path: number for path, number, bits in tables.cgroups if bits & 1}
    for path in cgroup:
        if path in by_path:
            return by_path[path]
    return 0
