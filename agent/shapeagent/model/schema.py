# SPDX-License-Identifier: Apache-2.0
"""The policy file: its keys, and from its text to a validated `Policy`.

A policy is taken whole or not at all. Every error is found in one pass and
named with its path and line, so that one edit can repair all of them.
"""

from __future__ import annotations

import difflib
import hashlib
import re
import tomllib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from decimal import Decimal
from typing import Annotated, Any, NoReturn, TypeVar

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, ValidationError
from pydantic_core import ErrorDetails, PydanticCustomError

from shapeagent.model.errors import InputError
from shapeagent.model.places import Path, find_places, say_at, say_not_toml
from shapeagent.model.types import (
    Budget,
    Direction,
    Policy,
    PortSide,
    Rule,
    RuleKind,
    TrafficClass,
)
from shapeagent.model.units import (
    Rate,
    format_rate,
    format_size,
    parse_duration,
    parse_rate_text,
    parse_size,
)

MAX_CLASSES = 16  # SHP_MAX_CLASSES
MAX_RULE_NUMBER = 4095  # SHP_MAX_RULES - 1: 12 bits of a flow word
MAX_MARK_RULES = 8  # SHP_MAX_MARKS: walked one by one
MAX_CGROUP_LEVEL = 15  # bpf/lib/rules.h looks at levels 1..15
MAX_URGENT_PORTS = 32  # design 4: no wider rule is `signal`
MIN_BURST_BYTES = 65_536  # a bucket below one GSO packet never conforms
MIN_HOLD_S = 1.0
MAX_HOLD_S = 3_600.0
MIN_SEGMENT_BYTES = 1_500
MAX_SEGMENT_BYTES = 524_280  # GSO_MAX_SIZE, include/linux/netdevice.h

TCP = 6
UDP = 17
PROTOCOL_NUMBERS: Mapping[str, int] = {
    "icmp": 1, "igmp": 2, "ipip": 4, "tcp": TCP, "udp": UDP, "dccp": 33, "ipv6": 41, "gre": 47,
    "esp": 50, "ah": 51, "icmpv6": 58, "ipv6-icmp": 58, "ospf": 89, "pim": 103, "vrrp": 112,
    "l2tp": 115, "sctp": 132, "udplite": 136, "mpls": 137,
}  # fmt: skip
# The datapath calls these network control before it looks at a rule (bpf/lib/rules.h).
CONTROL_PROTOCOLS = frozenset({2, 89, 103, 112})
_EXTENSION_HEADERS = frozenset({0, 43, 44, 60})  # IPv6: never the protocol of a packet
DSCP_NUMBERS: Mapping[str, int] = {
    "df": 0, "be": 0, "le": 1, "va": 44, "ef": 46,
    **{f"cs{n}": 8 * n for n in range(8)},
    **{f"af{c}{d}": 8 * c + 2 * d for c in range(1, 5) for d in range(1, 4)},
}  # fmt: skip

# Network and host control that ports show: always there, always first, in the control class.
PROTECTED: tuple[tuple[str, int, tuple[tuple[int, int], ...]], ...] = (
    ("dhcp", UDP, ((67, 68),)),
    ("dhcpv6", UDP, ((546, 547),)),
    ("bgp", TCP, ((179, 179),)),
    ("bfd", UDP, ((3784, 3785), (4784, 4784), (6784, 6784))),
    ("ptp", UDP, ((319, 320),)),
)


@dataclass(frozen=True, slots=True)
class PolicySummary:
    """What `policy check` tells about a policy without errors."""

    source: str
    digest: str
    classes: tuple[str, ...]
    default_class: str
    control_class: str
    rules: int  # of the policy, without the protected ones
    link_rate_bits_per_s: int | None  # None: percentages were checked as percentages


def load_policy(text: str, source: str, *, link_rate_bits_per_s: int | None) -> Policy:
    """Return the policy with every rate resolved and every rule ranked.

    Args: source: path or "built-in", for messages; link_rate_bits_per_s: what `100%` means.
    Raises: InputError policy-invalid (`details`: every error with path and line),
        link-rate-unknown.
    """
    if link_rate_bits_per_s is None:
        raise InputError(
            "link-rate-unknown",
            f"{source} gives rates as shares of the link, and the link rate is not known",
            hint="say what the bottleneck carries: --link-rate 10gbit",
        )
    draft = _read(text, source, link_rate_bits_per_s)
    draft.refuse_if_wrong()
    head = draft.head
    assert head is not None
    return Policy(
        classes=tuple(
            _traffic_class(name, number, model, link_rate_bits_per_s)
            for number, (name, model) in enumerate(draft.classes.items())
        ),
        rules=_ranked(draft, head.control_class),
        default_class=head.default_class,
        control_class=head.control_class,
        link_rate_bits_per_s=link_rate_bits_per_s,
        segment_limit_bytes=head.segment_limit,
        egress_mark_mask=head.marks.egress_mask,
        ingress_mark_mask=head.marks.ingress_mask,
        shadow=head.shadow,
        source=source,
        text=text,
        digest=hashlib.sha256(text.encode()).hexdigest(),
    )


def check_policy(
    text: str, source: str, *, link_rate_bits_per_s: int | None = None
) -> PolicySummary:
    """Return what the policy holds, after the same validation as `load_policy`.

    Args: link_rate_bits_per_s: None checks percentages as percentages (guarantees at most 100%,
        ceiling at least the guarantee) and leaves what needs the link to `attach`.
    Raises: InputError policy-invalid, as `load_policy`.
    """
    draft = _read(text, source, link_rate_bits_per_s)
    draft.refuse_if_wrong()
    assert draft.head is not None
    return PolicySummary(
        source=source,
        digest=hashlib.sha256(text.encode()).hexdigest(),
        classes=tuple(draft.classes),
        default_class=draft.head.default_class,
        control_class=draft.head.control_class,
        rules=len(draft.rules),
        link_rate_bits_per_s=link_rate_bits_per_s,
    )


# Values of single keys. Each validator takes whatever TOML gave and refuses in our words.


def _refuse(reason: str) -> NoReturn:
    raise PydanticCustomError("policy", "{reason}", {"reason": reason})


def _from_input_error(error: InputError) -> NoReturn:
    _refuse(f"{error.message}; {error.hint}" if error.hint else error.message)


def _rate(value: Any) -> Rate:
    if not isinstance(value, str):
        _refuse(f'{value!r} has no unit: write text such as "800mbit" or "20%"')
    try:
        return parse_rate_text(value)
    except InputError as error:
        _from_input_error(error)


def _size(value: Any) -> int:
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    if not isinstance(value, str):
        _refuse(f'{value!r} is not a size: write bytes, or text such as "64KiB"')
    try:
        return parse_size(value)
    except InputError as error:
        _from_input_error(error)


def _burst(value: Any) -> int:
    size = _size(value)
    if size < MIN_BURST_BYTES:
        _refuse(
            f"a burst of {size} bytes is below {format_size(MIN_BURST_BYTES)}:"
            " one large segment would never conform"
        )
    return size


def _hold(value: Any) -> float:
    if not isinstance(value, str):
        _refuse(f'{value!r} has no unit: write text such as "1s"')
    try:
        seconds = parse_duration(value)
    except InputError as error:
        _from_input_error(error)
    if not MIN_HOLD_S <= seconds <= MAX_HOLD_S:
        _refuse(f"{value} is not between 1s and 1h: a flow that moves more often is reordered")
    return seconds


def _segment_limit(value: Any) -> int | None:
    if value == "auto":
        return None
    if value == "off":
        return 0
    size = _size(value)
    if not MIN_SEGMENT_BYTES <= size <= MAX_SEGMENT_BYTES:
        _refuse(
            f"{size} bytes is not between {MIN_SEGMENT_BYTES} and {MAX_SEGMENT_BYTES}: "
            'write "auto", "off" or bytes'
        )
    return size


def _number(value: Any, highest: int, what: str) -> int:
    if isinstance(value, str) and re.fullmatch(r"0x[0-9A-Fa-f]{1,8}|[0-9]{1,10}", value, re.ASCII):
        value = int(value, 0) if value.startswith("0x") else int(value)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= highest:
        shown = hex(highest) if highest > 0xFFFF else highest
        _refuse(f"{value!r} is not {what} from 0 to {shown}")
    return value


def _mask(value: Any) -> int:
    return _number(value, 0xFFFF_FFFF, "a mark mask")


def _mark(value: Any) -> int:
    return _number(value, 0xFFFF_FFFF, "a mark")


def _rule_mark(value: Any) -> tuple[int, int]:
    if isinstance(value, str) and "/" in value:
        mark_text, _, mask_text = value.partition("/")
        mark, mask = _mark(mark_text), _mask(mask_text)
    else:
        mark, mask = _mark(value), 0xFFFF_FFFF
    if mask == 0:
        _refuse(f"{value!r} has an empty mask and would match every packet")
    if mark & ~mask:
        _refuse(f"{value!r} has mark bits outside its mask and would match no packet")
    return mark, mask


def _dscp(value: Any) -> int:
    if isinstance(value, str) and value.lower() in DSCP_NUMBERS:
        return DSCP_NUMBERS[value.lower()]
    return _number(value, 63, 'a DSCP name ("ef", "cs6", "af41") or a number')


def _each(value: Any, one: Callable[[Any], int]) -> tuple[int, ...]:
    values = value if isinstance(value, list) else [value]
    if not values:
        _refuse("an empty list matches nothing")
    return tuple(dict.fromkeys(one(item) for item in values))


def _dscps(value: Any) -> tuple[int, ...]:
    return _each(value, _dscp)


def _protocol(value: Any) -> int:
    if isinstance(value, str) and value in PROTOCOL_NUMBERS:
        return PROTOCOL_NUMBERS[value]
    number = _number(value, 255, 'a protocol name ("tcp", "sctp") or a number')
    if number in _EXTENSION_HEADERS:
        _refuse(f"{number} is an IPv6 extension header, never the protocol of a packet")
    return number


def _protocols(value: Any) -> tuple[int, ...]:
    return _each(value, _protocol)


def _port_range(value: Any) -> tuple[int, int]:
    if isinstance(value, int) and not isinstance(value, bool):
        first = last = value
    else:
        found = (
            re.fullmatch(r"([0-9]{1,5})(?:-([0-9]{1,5}))?", value, re.ASCII)
            if isinstance(value, str)
            else None
        )
        if not found:
            _refuse(f'{value!r} is not a port (2379) or a range ("2379-2380")')
        first, last = int(found[1]), int(found[2] or found[1])
    if not 1 <= first <= 65_535 or not 1 <= last <= 65_535:
        _refuse(f"{value!r} is not within 1 to 65535")
    if first > last:
        _refuse(f"{value!r} runs backwards")
    return first, last


def _ports(value: Any) -> tuple[tuple[int, int], ...]:
    """Return the ranges sorted, without overlap or gaplessly adjoining ones."""
    values = value if isinstance(value, list) else [value]
    if not values:
        _refuse("an empty list matches nothing")
    merged: list[tuple[int, int]] = []
    for first, last in sorted(_port_range(item) for item in values):
        if merged and first <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(last, merged[-1][1]))
        else:
            merged.append((first, last))
    return tuple(merged)


def _cgroup(value: Any) -> str:
    """Return a cgroup path relative to the cgroup v2 mount, without doubled or outer slashes."""
    if not isinstance(value, str):
        _refuse(f"{value!r} is not a cgroup path")
    if not value.isprintable():
        _refuse(f"{value!r} is not a cgroup path: it has characters that do not print")
    path = re.sub(r"^/+sys/+fs/+cgroup(?=/|$)", "", value)
    parts = [part for part in path.split("/") if part]
    if not parts:
        _refuse(f"{value!r} is the root, which holds every process")
    if "." in parts or ".." in parts:
        _refuse(f"{value!r} is not a plain path: . and .. are not followed")
    if len(parts) > MAX_CGROUP_LEVEL:
        _refuse(f"{value!r} is {len(parts)} levels deep, at most {MAX_CGROUP_LEVEL} are looked at")
    return "/".join(parts)


def _named(pattern: str, what: str) -> Callable[[Any], str]:
    compiled = re.compile(pattern, re.ASCII)

    def validate(value: Any) -> str:
        if not isinstance(value, str) or not compiled.fullmatch(value):
            _refuse(f"{value!r} is not {what}")
        return value

    return validate


_class_name = _named(
    r"[a-z][a-z0-9-]{0,14}", "a class name: a letter, then up to 14 of a-z, 0-9 and -"
)
_rule_name = _named(r"[a-z0-9][a-z0-9._-]{0,62}", "a rule name: up to 63 of a-z, 0-9, dot, - and _")


def _direction(value: Any) -> Direction:
    if value not in ("egress", "ingress"):
        _refuse(f'{value!r} is not "egress" or "ingress"; leave it out for both')
    return Direction(value)


def _names(value: Any) -> tuple[str, ...]:
    values = value if isinstance(value, list) else [value]
    if not values or not all(isinstance(item, str) for item in values):
        _refuse(f"{value!r} is not a list of rule names")
    return tuple(dict.fromkeys(values))


def _version(value: Any) -> int:
    if isinstance(value, bool) or value != 1:
        _refuse(f"{value!r} is not a policy version that this shapectl knows: 1")
    return 1


def _priority(value: Any) -> int:
    if isinstance(value, str):
        _refuse(f"{value!r} is not a number from 0 (served first) to 7")
    return _number(value, 7, "a priority")


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        _refuse(f"{value!r} is not true or false")
    return value


_RateKey = Annotated[Rate, PlainValidator(_rate)]
_ClassKey = Annotated[str, PlainValidator(_class_name)]
_MaskKey = Annotated[int, PlainValidator(_mask)]
_PortsKey = Annotated[tuple[tuple[int, int], ...], PlainValidator(_ports)]


class _Table(BaseModel):
    """A table of the file: a key that we do not know is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True, arbitrary_types_allowed=True)


class MarksTable(_Table):
    """`[marks]`: which bits of skb->mark are ours; 0 = none."""

    egress_mask: _MaskKey = 0
    ingress_mask: _MaskKey = 0


class HeadTable(_Table):
    """The keys at the top of the file."""

    version: Annotated[int, PlainValidator(_version)]
    default_class: _ClassKey
    control_class: _ClassKey
    segment_limit: Annotated[int | None, PlainValidator(_segment_limit)] = None
    shadow: Annotated[bool, PlainValidator(_flag)] = False
    marks: MarksTable = MarksTable()


class BudgetTable(_Table):
    """`[classes.NAME.budget]`: what one source may send before it overflows."""

    rate: _RateKey
    burst: Annotated[int, PlainValidator(_burst)] = MIN_BURST_BYTES
    hold: Annotated[float, PlainValidator(_hold)] = MIN_HOLD_S
    overflow: _ClassKey


class ClassTable(_Table):
    """`[classes.NAME]`."""

    priority: Annotated[int, PlainValidator(_priority)]
    guarantee: _RateKey
    ceiling: _RateKey = Rate("100%", percent=Decimal(100))
    safe_ceiling: _RateKey | None = None
    ingress_ceiling: _RateKey | None = None
    dscp: Annotated[int, PlainValidator(_dscp)] | None = None
    mark: Annotated[int, PlainValidator(_mark)] | None = None
    budget: BudgetTable | None = None


class RuleTable(_Table):
    """One `[[rules]]` table."""

    name: Annotated[str, PlainValidator(_rule_name)]
    traffic_class: _ClassKey = Field(alias="class")
    protocol: Annotated[tuple[int, ...], PlainValidator(_protocols)] | None = None
    port: _PortsKey | None = None
    local_port: _PortsKey | None = None
    remote_port: _PortsKey | None = None
    dscp: Annotated[tuple[int, ...], PlainValidator(_dscps)] | None = None
    mark: Annotated[tuple[int, int], PlainValidator(_rule_mark)] | None = None
    cgroup: Annotated[str, PlainValidator(_cgroup)] | None = None
    direction: Annotated[Direction, PlainValidator(_direction)] | None = None
    overrides: Annotated[tuple[str, ...], PlainValidator(_names)] = ()


@dataclass(slots=True)
class _Draft:
    """What could be read of a policy so far, and every problem found."""

    source: str
    places: dict[Path, int]
    head: HeadTable | None = None
    classes: dict[str, ClassTable] = field(default_factory=dict)
    class_names: set[str] = field(default_factory=set)  # also of classes with errors
    rules: list[tuple[int, Rule, tuple[str, ...]]] = field(default_factory=list)  # index, overrides
    rule_names: set[str] = field(default_factory=set)
    problems: list[tuple[int, str]] = field(default_factory=list)

    def add(self, path: Path, message: str) -> None:
        problem = say_at(path, message, self.places)
        if problem not in self.problems:
            self.problems.append(problem)

    def refuse_if_wrong(self) -> None:
        if self.problems:
            raise _invalid(self.source, [text for _, text in sorted(self.problems)])


def _invalid(source: str, details: Sequence[str]) -> InputError:
    return InputError(
        "policy-invalid",
        f"{source} has {len(details)} error{'s' * (len(details) > 1)} and was not used",
        hint="shapectl policy check FILE lists every error; shapectl policy example shows"
        " a policy that works",
        details=details,
    )


def _read(text: str, source: str, link_rate_bits_per_s: int | None) -> _Draft:
    try:
        data = tomllib.loads(text.removeprefix("\ufeff"))
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise _invalid(source, [say_not_toml(error)]) from None
    draft = _Draft(source, find_places(text.removeprefix("\ufeff")))
    classes, rules = data.pop("classes", None), data.pop("rules", [])
    draft.head = _validated(HeadTable, data, (), draft, _UNKNOWN_HEAD)
    _read_classes(classes, draft)
    _read_rules(rules, draft)
    _check_names(data, draft)
    _check_rates(draft, link_rate_bits_per_s)
    _check_marks(draft)
    _check_rules(draft)
    return draft


_T = TypeVar("_T", bound="_Table")


# Stand-ins for values with errors, (as TOML would have it, as we then use it): with them the
# checks across keys still run on the rest.
_UNKNOWN_PRIORITY = -1
_UNKNOWN_RATE = Rate("0%", percent=Decimal(0))
_ALL_MARKS = MarksTable(egress_mask=0xFFFF_FFFF, ingress_mask=0xFFFF_FFFF)
_StandIns = Mapping[str, tuple[object, object]]
_UNKNOWN_HEAD: _StandIns = {
    "version": (1, 1),
    "default_class": ("x", ""),
    "control_class": ("x", ""),
    "marks": ({}, _ALL_MARKS),
}
_UNKNOWN_CLASS: _StandIns = {"priority": (7, _UNKNOWN_PRIORITY), "guarantee": ("1%", _UNKNOWN_RATE)}


def _validated(
    model: type[_T], data: Any, path: Path, draft: _Draft, stand_ins: _StandIns
) -> _T | None:
    """Return the table and note each error; a wrong table keeps what is right, with stand-ins."""
    if not isinstance(data, dict):
        draft.add(path, f"{data!r} is not a table")
        return None
    try:
        return model.model_validate(data)
    except ValidationError as error:
        details = error.errors(include_url=False)
    for detail in details:
        where = tuple(p for p in detail["loc"] if not str(p).startswith("function-"))
        draft.add(path + where, _in_words(detail, model))
    if not stand_ins:
        return None
    wrong = {str(detail["loc"][0]) for detail in details if detail["loc"]}
    right = {key: value for key, value in data.items() if key not in wrong}
    needed = {key: pair for key, pair in stand_ins.items() if key in wrong}
    return model.model_validate(right | {key: raw for key, (raw, _) in needed.items()}).model_copy(
        update={key: used for key, (_, used) in needed.items()}
    )


def _in_words(detail: ErrorDetails, model: type[_Table]) -> str:
    if detail["type"] == "missing":
        return "is missing"
    if detail["type"] == "extra_forbidden":
        nested: dict[str, type[_Table]] = {"budget": BudgetTable, "marks": MarksTable}
        table = nested.get(str(detail["loc"][0]), model) if len(detail["loc"]) > 1 else model
        known = [info.alias or name for name, info in table.model_fields.items()]
        if table is HeadTable:
            known += ["classes", "rules"]
        near = difflib.get_close_matches(str(detail["loc"][-1]), known, 1)
        return "is not a known key" + (f'; did you mean "{near[0]}"?' if near else "")
    if detail["type"] in ("model_type", "model_attributes_type", "dict_type"):
        return f"{detail['input']!r} is not a table"
    return detail["msg"]


def _read_classes(classes: Any, draft: _Draft) -> None:
    if not isinstance(classes, dict) or not classes:
        draft.add(("classes",), "is missing: a policy has at least one [classes.NAME] table")
        return
    if len(classes) > MAX_CLASSES:
        draft.add(("classes",), f"holds {len(classes)} classes, at most {MAX_CLASSES} are possible")
    for name, data in classes.items():
        draft.class_names.add(name)
        try:
            _class_name(name)
        except PydanticCustomError as error:
            draft.add(("classes", name), error.message())
        model = _validated(ClassTable, data, ("classes", name), draft, _UNKNOWN_CLASS)
        if model:
            draft.classes[name] = model


def _read_rules(rules: Any, draft: _Draft) -> None:
    if not isinstance(rules, list):
        draft.add(("rules",), "is not a list of [[rules]] tables")
        return
    if len(rules) > MAX_RULE_NUMBER - len(PROTECTED):
        draft.add(
            ("rules",),
            f"holds {len(rules)} rules, at most {MAX_RULE_NUMBER - len(PROTECTED)} are possible",
        )
    reserved = {name for name, _, _ in PROTECTED}
    for index, data in enumerate(rules):
        path: Path = ("rules", index)
        name = data.get("name") if isinstance(data, dict) else None
        if isinstance(name, str):
            if name in draft.rule_names:
                draft.add((*path, "name"), f'"{name}" is the name of two rules')
            if name in reserved:
                draft.add((*path, "name"), f'"{name}" is the name of a protected rule')
            draft.rule_names.add(name)
        model = _validated(RuleTable, data, path, draft, {})
        if model:
            rule = _rule(model, path, draft)
            if rule:
                draft.rules.append((index, rule, model.overrides))


def _rule(model: RuleTable, path: Path, draft: _Draft) -> Rule | None:
    """Return the rule, number still 0, or None after noting what is wrong with it."""
    port_keys = [k for k in ("port", "local_port", "remote_port") if getattr(model, k) is not None]
    selectors = [k for k in ("dscp", "mark", "cgroup") if getattr(model, k) is not None]
    if port_keys or model.protocol is not None:
        selectors.append(" and ".join(port_keys) or "protocol")
    if len(selectors) != 1 or len(port_keys) > 1:
        found = f"has {', '.join(selectors)}" if selectors else "selects nothing"
        draft.add(
            path,
            f'"{model.name}" {found}: a rule has exactly one of port, local_port or remote_port'
            " (with protocol), protocol alone, dscp, mark, cgroup",
        )
        return None
    base = Rule(0, model.name, model.traffic_class, RuleKind.PROTOCOL, direction=model.direction)
    if model.dscp is not None:
        return replace(base, kind=RuleKind.DSCP, dscp=model.dscp)
    if model.mark is not None:
        value, mask = model.mark
        return replace(base, kind=RuleKind.MARK, mark_value=value, mark_mask=mask)
    if model.cgroup is not None:
        if model.direction is Direction.INGRESS:
            draft.add(
                (*path, "direction"),
                "an arriving packet has no socket yet: a cgroup rule works on egress only",
            )
            return None
        return replace(base, kind=RuleKind.CGROUP, cgroup=model.cgroup, direction=Direction.EGRESS)
    if not port_keys:
        assert model.protocol is not None
        return replace(base, protocols=model.protocol)
    if model.protocol is None:
        draft.add(path, f'"{model.name}" needs protocol = "tcp", "udp" or both beside its ports')
        return None
    if not set(model.protocol) <= {TCP, UDP}:
        draft.add((*path, "protocol"), "ports are looked at in tcp and udp only")
        return None
    sides = {
        "port": PortSide.EITHER,
        "local_port": PortSide.LOCAL,
        "remote_port": PortSide.REMOTE,
    }
    return replace(
        base,
        kind=RuleKind.PORT,
        protocols=tuple(sorted(model.protocol)),
        side=sides[port_keys[0]],
        ports=getattr(model, port_keys[0]),
    )


def _check_names(data: Mapping[str, Any], draft: _Draft) -> None:
    """Every class that is named exists."""
    known = draft.class_names
    if not known:
        return

    def check(path: Path, name: object) -> None:
        if isinstance(name, str) and name not in known:
            draft.add(path, f'"{name}" is not a class of this policy ({", ".join(sorted(known))})')

    for key in ("default_class", "control_class"):
        check((key,), data.get(key))
    default, control = data.get("default_class"), data.get("control_class")
    if isinstance(default, str) and default == control and default in known:
        draft.add(
            ("default_class",),
            f'"{default}" is also the control class: what nothing else claims would be urgent',
        )
    for name, model in draft.classes.items():
        if model.budget:
            path: Path = ("classes", name, "budget", "overflow")
            check(path, model.budget.overflow)
            target = draft.classes.get(model.budget.overflow)
            if model.budget.overflow == name:
                draft.add(path, "a class cannot overflow into itself")
            elif target and _UNKNOWN_PRIORITY < target.priority < model.priority:
                draft.add(path, f'"{model.budget.overflow}" is served before "{name}"')
            elif target and target.budget:
                draft.add(path, f'"{model.budget.overflow}" has a budget itself')
    for index, rule, _ in draft.rules:
        check(("rules", index, "class"), rule.traffic_class)


def _check_rates(draft: _Draft, link_rate_bits_per_s: int | None) -> None:
    total_percent, total_bits = Decimal(0), 0
    for name, model in draft.classes.items():
        path: Path = ("classes", name)
        rates = {
            "guarantee": model.guarantee,
            "ceiling": model.ceiling,
            "safe_ceiling": model.safe_ceiling,
            "ingress_ceiling": model.ingress_ceiling,
        }
        for key, rate in rates.items():
            if rate:
                _check_rate(rate, (*path, key), draft, link_rate_bits_per_s)
        total_percent += model.guarantee.percent or 0
        total_bits += model.guarantee.bits_per_s or 0
        for key in ("ceiling", "safe_ceiling"):
            high = rates[key]
            if high and _is_below(high, model.guarantee, link_rate_bits_per_s):
                draft.add(
                    (*path, key), f"{high.text} is below the guarantee {model.guarantee.text}"
                )
        if model.budget:
            budget = model.budget.rate
            _check_rate(budget, (*path, "budget", "rate"), draft, link_rate_bits_per_s)
            if _is_below(model.ceiling, budget, link_rate_bits_per_s):
                draft.add(
                    (*path, "budget", "rate"),
                    f"{budget.text} is above the ceiling {model.ceiling.text} of the class",
                )
    if link_rate_bits_per_s is not None:
        total = total_bits + total_percent * link_rate_bits_per_s / 100
        if total > link_rate_bits_per_s:
            draft.add(
                ("classes",),
                f"the guarantees add up to {format_rate(int(total))}, more than the link rate"
                f" {format_rate(link_rate_bits_per_s)}",
            )
    elif total_percent > 100:
        draft.add(("classes",), f"the guarantees add up to {total_percent}% of the link")


def _check_rate(rate: Rate, path: Path, draft: _Draft, link_rate_bits_per_s: int | None) -> None:
    if link_rate_bits_per_s is None or rate is _UNKNOWN_RATE:
        return
    try:
        bits = rate.resolve(link_rate_bits_per_s)
    except InputError as error:
        draft.add(path, f"{error.message} (link rate {format_rate(link_rate_bits_per_s)})")
        return
    if bits > link_rate_bits_per_s:
        draft.add(path, f"{rate.text} is above the link rate {format_rate(link_rate_bits_per_s)}")


def _is_below(low: Rate, high: Rate, link_rate_bits_per_s: int | None) -> bool:
    """True where `low` is surely below `high`; False where that needs a link that is unknown."""
    if low.percent is not None and high.percent is not None:
        return low.percent < high.percent
    if low.bits_per_s is not None and high.bits_per_s is not None:
        return low.bits_per_s < high.bits_per_s
    if link_rate_bits_per_s is None:
        return False
    return _exact(low, link_rate_bits_per_s) < _exact(high, link_rate_bits_per_s)


def _exact(rate: Rate, link_rate_bits_per_s: int) -> Decimal:
    if rate.percent is not None:
        return rate.percent * link_rate_bits_per_s / 100
    return Decimal(rate.bits_per_s or 0)


def _check_marks(draft: _Draft) -> None:
    if draft.head is None:
        return
    masks = draft.head.marks
    for name, model in draft.classes.items():
        if model.mark is None:
            continue
        path: Path = ("classes", name, "mark")
        given = {"egress_mask": masks.egress_mask, "ingress_mask": masks.ingress_mask}
        if not any(given.values()):
            draft.add(path, "no mark is written while both masks of [marks] are 0")
        for key, mask in given.items():
            if mask and model.mark & ~mask:
                draft.add(path, f"{model.mark:#x} has bits outside marks.{key} {mask:#x}")


def _check_rules(draft: _Draft) -> None:
    marks = [index for index, rule, _ in draft.rules if rule.kind is RuleKind.MARK]
    if len(marks) > MAX_MARK_RULES:
        draft.add(
            ("rules", marks[MAX_MARK_RULES], "mark"),
            f"is mark rule number {MAX_MARK_RULES + 1} of {len(marks)},"
            f" at most {MAX_MARK_RULES} are possible",
        )
    _check_urgent(draft)
    _check_protected(draft)
    _check_overlaps(draft)


def _check_urgent(draft: _Draft) -> None:
    """A rule that takes in much of the port space must not be urgent."""
    if draft.head is None or draft.head.control_class not in draft.classes:
        return
    control = draft.classes[draft.head.control_class]
    urgent = {
        name
        for name, model in draft.classes.items()
        if _UNKNOWN_PRIORITY < model.priority <= control.priority
        and name != draft.head.default_class
    }
    for index, rule, _ in draft.rules:
        if rule.traffic_class not in urgent:
            continue
        path: Path = ("rules", index)
        width = sum(last - first + 1 for first, last in rule.ports)
        if width > MAX_URGENT_PORTS:
            draft.add(
                path,
                f'"{rule.name}" takes {width} ports into "{rule.traffic_class}",'
                f" at most {MAX_URGENT_PORTS} may be urgent",
            )
        if rule.kind is RuleKind.PROTOCOL and {TCP, UDP} & set(rule.protocols):
            draft.add(path, f'"{rule.name}" takes all of tcp or udp into "{rule.traffic_class}"')
        if rule.kind is RuleKind.DSCP and 0 in rule.dscp:
            draft.add(
                path, f'"{rule.name}" takes every unmarked packet into "{rule.traffic_class}"'
            )


def _check_protected(draft: _Draft) -> None:
    control = draft.head.control_class if draft.head else ""
    if control not in draft.class_names:
        return  # which is an error of its own
    protected = _protected_rules(control)
    for index, rule, _ in draft.rules:
        path: Path = ("rules", index)
        if rule.kind is RuleKind.PROTOCOL and CONTROL_PROTOCOLS & set(rule.protocols):
            draft.add(
                (*path, "protocol"),
                "IGMP, OSPF, PIM and VRRP are network control and always in the control class",
            )
        if rule.kind is not RuleKind.PORT or rule.traffic_class == control:
            continue
        for guard in protected:
            if _may_overlap(rule, guard):
                draft.add(
                    path,
                    f'"{rule.name}" overlaps the protected rule "{guard.name}"'
                    f" ({_port_text(guard)}), which cannot be overridden",
                )


def _protected_rules(control_class: str) -> list[Rule]:
    return [
        Rule(
            number,
            name,
            control_class,
            RuleKind.PORT,
            protocols=(protocol,),
            ports=ports,
            protected=True,
        )
        for number, (name, protocol, ports) in enumerate(PROTECTED, 1)
    ]


def _port_text(rule: Rule) -> str:
    names = "/".join("tcp" if protocol == TCP else "udp" for protocol in rule.protocols)
    ranges = ", ".join(f"{a}" if a == b else f"{a}-{b}" for a, b in rule.ports)
    return f"{names} {ranges}"


def _directions(rule: Rule) -> tuple[int, ...]:
    return (0, 1) if rule.direction is None else (rule.direction.number,)


def _sides(rule: Rule) -> tuple[int, ...]:
    return {PortSide.LOCAL: (0,), PortSide.REMOTE: (1,), PortSide.EITHER: (0, 1)}[rule.side]


def _may_overlap(a: Rule, b: Rule) -> bool:
    return (
        bool(set(a.protocols) & set(b.protocols))
        and bool(set(_sides(a)) & set(_sides(b)))
        and bool(set(_directions(a)) & set(_directions(b)))
        and any(x[0] <= y[1] and y[0] <= x[1] for x in a.ports for y in b.ports)
    )


def _intervals(rule: Rule) -> Iterator[tuple[tuple[object, ...], int, int]]:
    """Yield what a rule claims: (space, first, last). Rules overlap where one space's ranges do."""
    for direction in _directions(rule):
        if rule.kind is RuleKind.PORT:
            for protocol in rule.protocols:
                for side in _sides(rule):
                    for first, last in rule.ports:
                        yield ("port", direction, protocol, side), first, last
        elif rule.kind is RuleKind.DSCP:
            for value in rule.dscp:
                yield ("dscp", direction), value, value
        elif rule.kind is RuleKind.PROTOCOL:
            for value in rule.protocols:
                yield ("protocol", direction), value, value
        elif rule.kind is RuleKind.CGROUP:
            yield ("cgroup", rule.cgroup), 0, 0


def _size_of(rule: Rule) -> int:
    """Return how much a rule claims, to tell the narrower of two of one kind."""
    if rule.kind is RuleKind.MARK:
        return len(_directions(rule)) << (32 - rule.mark_mask.bit_count())
    return sum(last - first + 1 for _, first, last in _intervals(rule))


def _overlapping_pairs(rules: Sequence[Rule]) -> Iterator[tuple[int, int]]:
    """Yield positions (a, b), a < b, of rules that can both match one packet in one way."""
    spaces: dict[tuple[object, ...], list[tuple[int, int, int]]] = {}
    for position, rule in enumerate(rules):
        for space, first, last in _intervals(rule):
            spaces.setdefault(space, []).append((first, last, position))
    seen: set[tuple[int, int]] = set()
    for claims in spaces.values():
        open_claims: list[tuple[int, int]] = []  # (last, position)
        for first, last, position in sorted(claims):
            open_claims = [claim for claim in open_claims if claim[0] >= first]
            for _, other in open_claims:
                pair = (min(other, position), max(other, position))
                if pair[0] != pair[1] and pair not in seen:
                    seen.add(pair)
                    yield pair
            open_claims.append((last, position))
    marks = [(at, rule) for at, rule in enumerate(rules) if rule.kind is RuleKind.MARK]
    for at, a in marks[: 4 * MAX_MARK_RULES]:
        for other, b in marks[: 4 * MAX_MARK_RULES]:
            same = not (a.mark_value ^ b.mark_value) & a.mark_mask & b.mark_mask
            if at < other and same and set(_directions(a)) & set(_directions(b)):
                yield at, other


def _check_overlaps(draft: _Draft) -> None:
    rules = [rule for _, rule, _ in draft.rules]
    by_name = {rule.name: at for at, rule in enumerate(rules)}
    pairs = set(_overlapping_pairs(rules))
    for a, b in sorted(pairs):
        if rules[a].kind is RuleKind.CGROUP:
            draft.add(
                ("rules", draft.rules[b][0], "cgroup"),
                f'"{rules[a].name}" and "{rules[b].name}" both name {rules[a].cgroup}',
            )
        elif rules[a].traffic_class != rules[b].traffic_class:
            _check_overlap(draft, a, b)
    for at, (index, rule, overrides) in enumerate(draft.rules):
        for name in overrides:
            path: Path = ("rules", index, "overrides")
            other = by_name.get(name)
            if other is None:
                if name not in draft.rule_names:
                    draft.add(path, f'"{name}" is not a rule of this policy')
            elif other == at or (min(at, other), max(at, other)) not in pairs:
                draft.add(path, f'"{rule.name}" does not overlap "{name}"')
    for index in _cycle(draft):
        draft.add(("rules", index, "overrides"), "rules override each other in a circle")


def _check_overlap(draft: _Draft, a: int, b: int) -> None:
    """Two overlapping rules of different class: one of them is narrower and says so."""
    index, rule, overrides = draft.rules[b]
    other_index, other, other_overrides = draft.rules[a]
    if other.name in overrides:
        winner, loser, at = rule, other, index
    elif rule.name in other_overrides:
        winner, loser, at = other, rule, other_index
    else:
        narrow, wide = (rule, other) if _size_of(rule) <= _size_of(other) else (other, rule)
        draft.add(
            ("rules", index),
            f'"{rule.name}" ({rule.traffic_class}) overlaps "{other.name}"'
            f' ({other.traffic_class}, rule {other_index + 1}): give "{narrow.name}"'
            f' overrides = ["{wide.name}"], or separate them',
        )
        return
    if _size_of(winner) > _size_of(loser) or (
        rule.kind is not RuleKind.MARK and set(_intervals(winner)) == set(_intervals(loser))
    ):
        draft.add(
            ("rules", at, "overrides"),
            f'"{winner.name}" is not narrower than "{loser.name}"',
        )


def _cycle(draft: _Draft) -> Iterable[int]:
    """Return the file positions of rules that can never be ranked."""
    return [draft.rules[at][0] for at in _order(draft)[1]]


def _order(draft: _Draft) -> tuple[list[int], list[int]]:
    """Return positions by rank, and those left over in a circle of overrides.

    A rule that overrides comes before rules that do not, and before what it
    overrides; otherwise the order of the file holds.
    """
    by_name = {rule.name: at for at, (_, rule, _) in enumerate(draft.rules)}
    targets = [[by_name[n] for n in names if n in by_name] for _, _, names in draft.rules]
    waiting = Counter(target for row in targets for target in row)
    overriding = [at for at, row in enumerate(targets) if row]
    ranked: list[int] = []
    while overriding:
        ready = [at for at in overriding if not waiting[at]]
        if not ready:
            break
        for at in ready:
            ranked.append(at)
            waiting.subtract(targets[at])
        overriding = [at for at in overriding if at not in set(ready)]
    ranked += [at for at, row in enumerate(targets) if not row]
    return ranked, overriding


def _ranked(draft: _Draft, control_class: str) -> tuple[Rule, ...]:
    rules = _protected_rules(control_class)
    for at in _order(draft)[0]:
        rules.append(replace(draft.rules[at][1], number=len(rules) + 1))
    return tuple(rules)


def _traffic_class(
    name: str, number: int, model: ClassTable, link_rate_bits_per_s: int
) -> TrafficClass:
    ceiling = model.ceiling.resolve(link_rate_bits_per_s)
    safe, ingress, budget = model.safe_ceiling, model.ingress_ceiling, model.budget
    return TrafficClass(
        name=name,
        number=number,
        priority=model.priority,
        guarantee_bits_per_s=model.guarantee.resolve(link_rate_bits_per_s),
        ceiling_bits_per_s=ceiling,
        safe_ceiling_bits_per_s=safe.resolve(link_rate_bits_per_s) if safe else ceiling,
        ingress_ceiling_bits_per_s=ingress.resolve(link_rate_bits_per_s) if ingress else None,
        budget=Budget(
            rate_bits_per_s=budget.rate.resolve(link_rate_bits_per_s),
            burst_bytes=budget.burst,
            hold_s=budget.hold,
            overflow_class=budget.overflow,
        )
        if budget
        else None,
        dscp=model.dscp,
        mark=model.mark,
    )
