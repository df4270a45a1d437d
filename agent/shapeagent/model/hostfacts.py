# SPDX-License-Identifier: Apache-2.0
"""What `doctor` sees of a host and its devices. None means: it could not be seen."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum


class ModuleState(StrEnum):
    """Whether the kernel has a piece of itself at hand."""

    BUILTIN = "builtin"
    LOADED = "loaded"
    LOADABLE = "loadable"  # loaded on demand
    BLOCKED = "blocked"  # on disk, but loading it is forbidden
    ABSENT = "absent"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class BpfProbe:
    """What the bpf system call did when it was asked; `refusal` is "" where it did all."""

    refusal: str
    jited: bool = False
    full_trie_updates: bool = False  # in place in a full LPM trie (532d6b36b2bf, 6.13)
    missing_maps: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class BccFacts:
    """The Python package `bcc` and its library, found without loading them."""

    path: str | None
    version: str | None  # of the package
    is_compiler: bool  # False: another program of that name
    library: str | None
    library_version: str | None


@dataclass(frozen=True, slots=True)
class Managers:
    """Who else sets up devices. Devices by index."""

    networkd: frozenset[int] = frozenset()  # devices it manages
    networkd_files: tuple[str, ...] = ()  # with a qdisc or a segment limit in them
    network_manager: frozenset[int] = frozenset()
    network_manager_files: tuple[str, ...] = ()  # with a [tc] section
    tuned_profile: str | None = None  # None: not running
    tuned_files: tuple[str, ...] = ()  # of the profile, where they set devices or net.core


@dataclass(frozen=True, slots=True)
class ProxyFacts:
    """What configuration files of nginx say about token streams, as FILE:LINE."""

    seen: bool = False
    buffering: tuple[str, ...] = ()
    nagle: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class HostFacts:
    """Everything about the host that decides whether attach can work, and stay."""

    release: str
    euid: int
    missing_capabilities: tuple[str, ...]
    user_namespace: bool
    modules: Mapping[str, ModuleState]
    loads_modules: bool  # False: the kernel cannot, or may not any more
    header_trees: tuple[str, ...]  # () = none
    header_package: str  # to install where there are none
    bcc: BccFacts
    jit_sysctl: int | None
    bpffs: str  # "rw", "ro", "" = not mounted
    lockdown: str | None  # "none", "integrity", "confidentiality"
    memlock_bytes: int | None  # None: unlimited
    memory_limit_bytes: int | None  # of this process's cgroup
    tcp_mtu_probing: int | None
    managers: Managers
    proxies: ProxyFacts
    unseen: tuple[str, ...] = ()  # files that exist and may not be read


@dataclass(frozen=True, slots=True)
class KernelAnswers:
    """What the kernel answered when it was asked, as far as this process may ask."""

    bpf: BpfProbe | None = None
    qdiscs: frozenset[str] | None = None  # those it really added
    qdiscs_asked: frozenset[str] = frozenset()
    attaches: bool | None = None  # a program ran the way to clsact
    has_tcx: bool = False  # then attach needs no clsact
    image_cached: bool = False  # the classifier is compiled already


@dataclass(frozen=True, slots=True)
class InterfaceFacts:
    """One device as sysfs shows it."""

    name: str
    index: int
    kind: str  # "" = hardware or unknown; bond, bridge, vlan, tun, …
    hardware: bool
    driver: str
    up: bool
    carrier: bool | None
    speed_bits_per_s: int | None
    mtu: int
    tx_queues: int
    rx_queues: int
    hardware_classes: int
    byte_limits: bool | None  # BQL in use; None: nothing was sent, or it cannot be told
    tx_bytes: int
    rx_missed: int
    master: str
    lowers: tuple[str, ...]
    uppers: tuple[str, ...]
    placed: bool = True  # False: what is above and below could not be seen


@dataclass(frozen=True, slots=True)
class Offloads:
    tso: bool
    gso: bool
    gro: bool
    lro: bool


@dataclass(frozen=True, slots=True)
class Ring:
    rx: int
    rx_max: int
    tx: int
    tx_max: int


@dataclass(frozen=True, slots=True)
class DeviceAnswers:
    """What netlink, ethtool and bpf said of one device. None: this process may not ask."""

    kind: str
    root: str = ""  # "htb 1:"
    default_root: bool = True
    has_fq: bool = False
    hook: str = ""  # "clsact", "ingress" or none
    filters: tuple[str, ...] = ()  # of others
    slot_taken: bool = False  # by a filter that is not ours
    tcx: tuple[str, ...] | None = ()
    xdp: int = 0  # program id
    ingress_chains: tuple[str, ...] | None = ()
    offloads: Offloads | None = None
    ring: Ring | None = None
    gso_max_bytes: int = 65_536
    attached: bool = False  # by shapectl
    shaped_neighbours: tuple[str, ...] = ()  # devices above and below with a tree of their own


@dataclass(frozen=True, slots=True)
class RdmaPort:
    """One port of an RDMA device, at one moment."""

    device: str
    port: int
    netdev: str  # "" = none
    link_layer: str  # Ethernet, InfiniBand
    sent_bytes: int | None
    received_bytes: int | None


@dataclass(frozen=True, slots=True)
class TrafficSample:
    """Counters of RDMA ports and devices at one moment."""

    time_s: float
    ports: tuple[RdmaPort, ...] = ()
    sent_bytes: Mapping[str, int] = field(default_factory=dict)  # by device
