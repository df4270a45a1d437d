# SPDX-License-Identifier: Apache-2.0
"""Names of the verdict and note codes of `bpf/codes.h`; a test compares both."""

from __future__ import annotations

from enum import IntEnum

CODE_FIRST = 16
CODE_SLOTS = 64


class Code(IntEnum):
    """Why a packet got its class, or what else was noticed. Numbers as in `bpf/codes.h`."""

    DEFAULT = 16
    CONTROL = 17
    MARK = 18
    CGROUP = 19
    DSCP = 20
    PORT = 21
    PROTO = 22
    PAIR = 23
    HOST = 24
    PREFIX = 25
    MANUAL = 26
    MOVED = 27

    FRAGMENT = 32
    FRAG_UNSEEN = 33
    NOT_IP = 34
    MALFORMED = 35
    TRUNCATED = 36
    VLAN_DEPTH = 37
    EXT_DEPTH = 38
    OVERFLOW = 39

    MOVE = 48
    CE = 49
    CEILING = 50
    LEASE = 51
    INSERT_LIMIT = 52
    INSERT_FAIL = 53
    IFB_STALE = 54
    ENCAP_VXLAN = 55
    ENCAP_GENEVE = 56
    ENCAP_PPPOE = 57
    ENCAP_MPLS = 58
    ENCAP_IP = 59

    @property
    def label(self) -> str:
        """The metric label and `--json` name of the code; stable between versions."""
        return _LABELS[self]

    @property
    def is_note(self) -> bool:
        """True for what is counted beside the decision, False for the decision itself."""
        return self >= Code.MOVE


_LABELS: dict[Code, str] = {
    Code.DEFAULT: "default",
    Code.CONTROL: "control",
    Code.MARK: "rule-mark",
    Code.CGROUP: "rule-cgroup",
    Code.DSCP: "rule-dscp",
    Code.PORT: "rule-port",
    Code.PROTO: "rule-protocol",
    Code.PAIR: "whitelist-pair",
    Code.HOST: "whitelist-host",
    Code.PREFIX: "whitelist-prefix",
    Code.MANUAL: "whitelist-manual",
    Code.MOVED: "over-budget-flow",
    Code.FRAGMENT: "fragment",
    Code.FRAG_UNSEEN: "fragment-first-unseen",
    Code.NOT_IP: "not-ip",
    Code.MALFORMED: "malformed",
    Code.TRUNCATED: "truncated",
    Code.VLAN_DEPTH: "vlan-too-deep",
    Code.EXT_DEPTH: "ipv6-extensions-too-deep",
    Code.OVERFLOW: "over-budget-datagram",
    Code.MOVE: "flow-moved",
    Code.CE: "ce-mark",
    Code.CEILING: "ceiling-drop",
    Code.LEASE: "lease-expired",
    Code.INSERT_LIMIT: "flow-insert-limited",
    Code.INSERT_FAIL: "flow-insert-failed",
    Code.IFB_STALE: "ifb-lease-expired",
    Code.ENCAP_VXLAN: "encapsulated-vxlan",
    Code.ENCAP_GENEVE: "encapsulated-geneve",
    Code.ENCAP_PPPOE: "encapsulated-pppoe",
    Code.ENCAP_MPLS: "encapsulated-mpls",
    Code.ENCAP_IP: "encapsulated-ip",
}
