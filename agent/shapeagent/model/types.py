# SPDX-License-Identifier: Apache-2.0
"""Plain data that the rooms hand to each other. Frozen, no behaviour beyond views.

Rates are bits per second where a person sees them and bytes per second where
the kernel does; every name says which.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum


class Direction(StrEnum):
    EGRESS = "egress"
    INGRESS = "ingress"

    @property
    def number(self) -> int:
        """The number that `abi.h` uses (SHP_EGRESS, SHP_INGRESS)."""
        return 0 if self is Direction.EGRESS else 1


class Profile(StrEnum):
    """The qdisc tree that carries out the policy."""

    HTB = "htb"
    PRIO = "prio"
    EDT = "edt"
    POLICE = "police"


class Hook(StrEnum):
    """How our programs stand on a device: as tcx links (Linux 6.6), or as clsact filters."""

    TCX = "tcx"
    CLSACT = "clsact"


class IngressMode(StrEnum):
    """What happens to packets that arrive: nothing but counting, policing, or an IFB tree."""

    COUNT = "count"
    POLICE = "police"
    IFB = "ifb"


class RuleKind(StrEnum):
    MARK = "mark"
    CGROUP = "cgroup"
    DSCP = "dscp"
    PORT = "port"
    PROTOCOL = "protocol"


class PortSide(StrEnum):
    """Which end's port a rule looks at: ours, the other's, or either."""

    LOCAL = "local"
    REMOTE = "remote"
    EITHER = "either"


class Match(StrEnum):
    """Which address of a packet a whitelist entry looks at.

    The roles are those of an outgoing packet (source = this host's side) and
    are turned round for arriving packets, so both directions of a connection
    get the same class. DESTINATION is the default: under EITHER a prefix that
    holds this host's own address would claim all of its traffic.
    """

    SOURCE = "source"
    DESTINATION = "destination"
    EITHER = "either"
    PAIR = "pair"


@dataclass(frozen=True, slots=True)
class Budget:
    """What one source may send in a class before it overflows."""

    rate_bits_per_s: int
    burst_bytes: int
    hold_s: float
    overflow_class: str


@dataclass(frozen=True, slots=True)
class TrafficClass:
    """One class with every rate resolved. `number` is 0..15, in order of the policy file."""

    name: str
    number: int
    priority: int  # 0 is served first, 7 last
    guarantee_bits_per_s: int
    ceiling_bits_per_s: int
    safe_ceiling_bits_per_s: int
    ingress_ceiling_bits_per_s: int | None = None
    budget: Budget | None = None
    dscp: int | None = None  # 0..63, rewritten on egress
    mark: int | None = None  # inside the policy's mark mask


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule. `number` is its rank, 1 first; where two match, the lower wins."""

    number: int
    name: str
    traffic_class: str
    kind: RuleKind
    direction: Direction | None = None  # None = both
    protocols: tuple[int, ...] = ()  # IP protocol numbers; PORT: 6 and/or 17
    side: PortSide = PortSide.EITHER
    ports: tuple[tuple[int, int], ...] = ()  # inclusive ranges
    dscp: tuple[int, ...] = ()
    mark_value: int = 0
    mark_mask: int = 0
    cgroup: str = ""  # relative to the cgroup v2 mount
    protected: bool = False  # network and host control, ours, not the policy's


@dataclass(frozen=True, slots=True)
class Policy:
    """The whole wanted state, validated, rates resolved against a link rate."""

    classes: tuple[TrafficClass, ...]
    rules: tuple[Rule, ...]
    default_class: str
    control_class: str
    link_rate_bits_per_s: int
    segment_limit_bytes: int | None  # None = auto, 0 = off
    egress_mark_mask: int
    ingress_mark_mask: int
    shadow: bool
    source: str  # path or "built-in"
    text: str  # the TOML text it came from
    digest: str  # SHA-256 of the text

    def class_named(self, name: str) -> TrafficClass:
        """Return the class of that name. Raises KeyError."""
        for traffic_class in self.classes:
            if traffic_class.name == name:
                return traffic_class
        raise KeyError(name)


@dataclass(frozen=True, slots=True)
class WhitelistEntry:
    """One whitelist entry in canonical form.

    `source` and `destination` are (packed address in network order, prefix
    length); IPv4-mapped IPv6 is stored as IPv4. Exactly one is set unless the
    match is a pair; for EITHER the address stands in `destination`.
    """

    match: Match
    traffic_class: str
    source: tuple[bytes, int] | None = None
    destination: tuple[bytes, int] | None = None
    owner: str = ""
    reason: str = ""
    expires_unix_s: float | None = None


class EntryKind(StrEnum):
    """What the packed keys of a batch are.

    Hosts are addresses, prefixes a length byte and the address, pairs source and destination;
    addresses in network order, 4 or 16 bytes.
    """

    HOSTS4 = "hosts4"
    HOSTS6 = "hosts6"
    PREFIXES4 = "prefixes4"
    PREFIXES6 = "prefixes6"
    PAIRS4 = "pairs4"
    PAIRS6 = "pairs6"

    @property
    def address_bytes(self) -> int:
        """How long one address is."""
        return 4 if self.value[-1] == "4" else 16

    @property
    def key_bytes(self) -> int:
        """How long one key is."""
        if self.is_prefix:
            return 1 + self.address_bytes
        return 2 * self.address_bytes if self.is_pair else self.address_bytes

    @property
    def is_prefix(self) -> bool:
        """Whether the keys are prefixes."""
        return self in (EntryKind.PREFIXES4, EntryKind.PREFIXES6)

    @property
    def is_pair(self) -> bool:
        """Whether the keys are pairs."""
        return self in (EntryKind.PAIRS4, EntryKind.PAIRS6)


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """Many whitelist entries that have all but their addresses in common.

    keys: N × `kind.key_bytes`, laid end to end. Where entries are removed, only match, kind and
    keys matter.
    """

    match: Match
    kind: EntryKind
    keys: bytes
    traffic_class: str = ""
    owner: str = ""
    reason: str = ""
    expires_unix_s: float | None = None

    @property
    def count(self) -> int:
        """How many keys there are."""
        return len(self.keys) // self.kind.key_bytes


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """What the kernel says about a network device."""

    name: str
    index: int
    kind: str  # "" for hardware, else "veth", "tun", "ifb", ...
    l3_only: bool  # no link-layer header (ARPHRD_NONE and the like)
    mtu: int
    tx_queues: int
    up: bool
    speed_bits_per_s: int | None  # None where the device has no real speed
    gso_max_size: int
    gso_max_segs: int
    gso_ipv4_max_size: int | None  # None before 6.3
    hardware_classes: int = 0  # num_tc of an mqprio map
    egress_qos_map: bool = False  # a VLAN that maps skb->priority
    carrier: bool = True  # False while it is down, too


@dataclass(frozen=True, slots=True)
class GsoLimits:
    """How large a segmentation-offload packet of a device may be."""

    max_size_bytes: int
    max_segments: int
    ipv4_max_size_bytes: int | None  # None before 6.3


@dataclass(frozen=True, slots=True)
class KernelFacts:
    """What the running kernel can do, found by probing."""

    release: str
    qdiscs: frozenset[str]
    jiffy_ns: int
    possible_cpus: int
    fq_bands: bool = False  # fq sorts by skb->priority (6.7)


@dataclass(frozen=True, slots=True)
class LeafPlan:
    """The queue of one class: fq_codel where the kernel has it, else bfifo."""

    kind: str  # "fq_codel" | "bfifo"
    limit_bytes: int
    target_us: int = 0
    interval_us: int = 0
    ecn: bool = False


@dataclass(frozen=True, slots=True)
class HtbClassPlan:
    """One HTB class; rates in bytes per second, as the kernel takes them."""

    minor: int
    parent_minor: int
    rate_bytes_per_s: int
    ceil_bytes_per_s: int
    burst_bytes: int
    cburst_bytes: int
    quantum_bytes: int
    priority: int
    overhead_bytes: int
    leaf: LeafPlan | None = None
    traffic_class: str = ""
    twin: bool = False  # the safe-ceiling leaf of its class


@dataclass(frozen=True, slots=True)
class FqPlan:
    """One fq of the profile edt; every transmit queue has one."""

    limit_packets: int
    flow_limit_packets: int
    orphan_mask: int  # flows without a socket share so many queues, less one
    horizon_us: int
    bands: bool  # its three bands are set


@dataclass(frozen=True, slots=True)
class LinkClock:
    """How edt holds the link rate where the device is faster than the link."""

    rate_bits_per_s: int
    rest_bits_per_s: int  # what unpaced classes may take of it before bulk stops to yield


@dataclass(frozen=True, slots=True)
class TreePlan:
    """The qdisc tree of one direction."""

    profile: Profile
    handle: int  # major number of the root
    default_minor: int
    classes: tuple[HtbClassPlan, ...] = ()  # htb, parents before children
    bands: tuple[LeafPlan, ...] = ()  # prio, band 0 first
    tbf_rate_bytes_per_s: int = 0  # prio under a TBF; 0 = none
    tbf_burst_bytes: int = 0
    tbf_limit_bytes: int = 0
    tbf_overhead_bytes: int = 0
    priorities: dict[str, int] = field(default_factory=dict)  # class -> skb->priority
    safe_priorities: dict[str, int] = field(default_factory=dict)  # class -> twin leaf
    fq: FqPlan | None = None  # edt
    queues: int = 0  # edt: above 1 an mq stands at the root, with one fq each
    paced: tuple[str, ...] = ()  # edt: classes that leave by time where they have a ceiling
    paced_always: tuple[str, ...] = ()  # edt: those that do so at the link rate too
    segment_wire_bytes: int = 0  # edt: the largest packet of this host on the wire
    link_clock: LinkClock | None = None  # edt
