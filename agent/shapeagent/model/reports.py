# SPDX-License-Identifier: Apache-2.0
"""What the engine answers: one frozen dataclass per command, ready for `--json`."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from enum import Enum, StrEnum
from typing import Any


def to_jsonable(value: object) -> Any:
    """Return `value` as JSON types: dataclasses as objects, tuples as lists, bytes as hex."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: to_jsonable(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, dict):
        return {str(to_jsonable(key)): to_jsonable(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [to_jsonable(item) for item in value]
    if isinstance(value, bytes):
        return value.hex()
    return value


@dataclass(frozen=True, slots=True)
class AttachRequest:
    """What the operator asked for. None means: decide by probe or by policy."""

    device: str
    policy_path: str | None = None  # None: /etc/shapectl/policy.toml, else built in
    policy_text: str | None = None  # the policy itself; `policy_path` then only says its name
    profile: str | None = None
    link_rate_bits_per_s: int | None = None
    ingress: str = "count"
    ingress_lease_s: float = 3600.0  # how long an IFB redirect stands unrenewed
    shadow: bool = False
    segment_limit: str | None = None  # "auto", "off" or bytes; None: the policy's
    reroute_ipv6: bool = False  # opt-in: a more specific route for living IPv6 flows
    egress_mark_mask: int | None = None
    ingress_mark_mask: int | None = None
    yes_management: bool = False  # attach also to the management device
    confirm_s: float | None = None  # undone after so long unless confirmed
    hook: str | None = None  # "tcx" or "clsact"; None: tcx where the kernel has it
    takeover: bool = False  # replace a root qdisc of someone else's, and put it back on detach


@dataclass(frozen=True, slots=True)
class PolicyDocument:
    """A policy as text, and where it came from."""

    text: str
    source: str  # a path, "built-in", or "API"
    digest: str  # SHA-256 of the text


@dataclass(frozen=True, slots=True)
class ClassPlanRow:
    """One class as the plan prints it."""

    name: str
    number: int
    guarantee_bits_per_s: int
    ceiling_bits_per_s: int
    safe_ceiling_bits_per_s: int
    burst_bytes: int
    burst_us: float
    quantum_bytes: int
    queue: str  # "fq_codel target 250us" or "bfifo 30280 bytes"
    enforced_by: str  # "htb class 1:13", "token bucket", "none"


@dataclass(frozen=True, slots=True)
class AttachPlan:
    """What attach would do, in the order in which it would do it."""

    device: str
    netns: str | None
    profile: str
    profile_reason: str
    ingress: str
    hook: str  # "tcx" or "clsact"
    link_rate_bits_per_s: int
    link_rate_source: str
    segment_limit_bytes: int  # 0 = off
    segment_limit_note: str
    policy_source: str
    policy_digest: str
    classes: tuple[ClassPlanRow, ...]
    steps: tuple[str, ...]
    warnings: tuple[str, ...]
    takes_over: str | None = None  # the root qdisc of someone else's that is replaced: "htb 1:"


@dataclass(frozen=True, slots=True)
class AttachReport:
    """What attach did. `changed` is False when everything was already so."""

    plan: AttachPlan
    changed: bool
    compiled: bool  # False: the cached image was loaded
    compile_s: float
    total_s: float
    verified_instructions: dict[str, int]
    source_digest: str
    unconfirmed_s: float | None = None  # seconds until it is undone unless confirmed
    undone_by: str = ""  # what waits for that
    repaired: tuple[str, ...] = ()  # what was taken up in place, where it was attached already


@dataclass(frozen=True, slots=True)
class DetachReport:
    device: str
    netns: str | None
    changed: bool
    steps: tuple[str, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ClassStatus:
    """One class in one direction: wanted rates, what is in force now, counters."""

    name: str
    number: int
    direction: str
    guarantee_bits_per_s: int
    ceiling_bits_per_s: int | None
    safe_ceiling_bits_per_s: int | None
    ceiling_in_force_bits_per_s: int | None
    lease_s_left: float | None  # None: no lease; 0: expired, the safe ceiling holds
    packets: int
    wire_bytes: int
    drops: int
    drop_wire_bytes: int
    ce_marks: int
    no_socket_packets: int
    over_segment_packets: int
    backlog_bytes: int | None
    queue_drops: int | None
    queue_sent_bytes: int | None = None  # without preamble, FCS and gap
    queue_sent_packets: int | None = None


@dataclass(frozen=True, slots=True)
class InterfaceStatus:
    device: str
    index: int
    netns: str | None
    profile: str
    ingress: str
    hook: str
    shadow: bool
    link_rate_bits_per_s: int
    segment_limit_bytes: int
    policy_source: str
    policy_digest: str
    attached_unix_s: float
    programs: dict[str, int]  # name -> program id found on the device
    verified_instructions: dict[str, int]
    whitelist_entries: int
    whitelist_generation: int
    classes: tuple[ClassStatus, ...]
    reasons: dict[str, dict[str, int]]  # direction -> code name -> packets
    problems: tuple[str, ...]  # what is not as attach left it
    warnings: tuple[str, ...]
    unconfirmed_s: float | None = None  # seconds until it is undone unless confirmed


@dataclass(frozen=True, slots=True)
class ExplainRequest:
    """A packet to ask about. Addresses as text; ports None where the protocol has none."""

    source: str
    destination: str
    protocol: str = "tcp"
    source_port: int | None = None
    destination_port: int | None = None
    direction: str = "egress"
    dscp: int = 0
    mark: int = 0


@dataclass(frozen=True, slots=True)
class Explanation:
    """What the loaded program says about one packet."""

    packet: str
    direction: str
    traffic_class: str
    reason: str  # code name, e.g. "rule-port"
    rule: str | None
    prefix: str | None  # whitelist entry that decided
    priority: int
    priority_text: str  # "1:11" or "none"
    mark: int
    ceiling_bits_per_s: int | None
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class WhitelistChange:
    """What a whitelist command did. `generation` is the one now in force."""

    added: int
    removed: int
    unchanged: int
    total: int
    generation: int
    notices: tuple[str, ...]  # "192.0.2.67/24 has host bits: stored as 192.0.2.0/24"
    warnings: tuple[str, ...]  # "rule ssh decides first for ..."
    changed: int = 0  # there before, now with another class, owner, reason or expiry


@dataclass(frozen=True, slots=True)
class WhitelistRow:
    match: str
    source: str | None
    destination: str | None
    traffic_class: str
    owner: str
    reason: str
    expires_unix_s: float | None


@dataclass(frozen=True, slots=True)
class WhitelistPage:
    """Some entries in the order of the list. `after` asks for the next page, None: the last."""

    rows: tuple[WhitelistRow, ...]
    after: str | None
    total: int
    generation: int


@dataclass(frozen=True, slots=True)
class WhitelistExpiry:
    """What ran out of time and was removed; of many the first `rows` are named."""

    removed: int
    rows: tuple[WhitelistRow, ...]
    total: int
    next_unix_s: float | None  # when the next entry ends


@dataclass(frozen=True, slots=True)
class Happened:
    """One event of an agent. `lost`: so many before it are no longer remembered."""

    sequence: int  # 1, 2, … of one run of the agent
    unix_s: float
    kind: str  # kebab-case, stable: "attached", "put-back", "whitelist-changed"
    device: str  # "" where it concerns no interface
    text: str
    details: dict[str, str]
    lost: int


class Severity(StrEnum):
    """How bad a finding is; only an error makes `doctor` exit with 1."""

    OK = "ok"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that `doctor` looked at. `id` never changes its meaning."""

    id: str
    severity: Severity
    subject: str  # "host" or the name of a device
    what: str
    why: str  # why it matters, "" where all is well
    fix: str  # the command to type, "" where all is well


@dataclass(frozen=True, slots=True)
class ResidueItem:
    """One thing of ours that belongs to no attachment in force.

    `kind` is pin, program, map, filter, qdisc, ifb, segment-limit, route,
    state or undo.
    """

    kind: str
    what: str
    fix: str  # the command that removes it
    device: str | None = None
    netns: str | None = None
    id: int | None = None  # of a program or map, also a filter's program


@dataclass(frozen=True, slots=True)
class ResidueReport:
    """What is left of shapectl; `attached` counts the attachments that are in force."""

    attached: int
    items: tuple[ResidueItem, ...]


@dataclass(frozen=True, slots=True)
class DoctorReport:
    """What `doctor` found. `device` is null where it looked at the whole host."""

    device: str | None
    netns: str | None
    errors: int
    warnings: int
    unseen: tuple[str, ...]  # what this process may not look at
    findings: tuple[Finding, ...]
