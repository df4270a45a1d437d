# SPDX-License-Identifier: Apache-2.0
"""The mirror of bpf/abi.h. `make check` compares both by clang's record layouts."""

from __future__ import annotations

import ctypes
from typing import ClassVar

SHP_ABI_VERSION = 2
SHP_AGAIN_EGRESS = 0
SHP_AGAIN_INGRESS = 1
SHP_AGAIN_EXPLAIN_OUT = 2
SHP_AGAIN_EXPLAIN_IN = 3
SHP_AGAIN_SLOTS = 4
SHP_EGRESS = 0
SHP_INGRESS = 1
SHP_MAX_CLASSES = 16
SHP_MAX_RULES = 4096
SHP_MAX_MARKS = 8
SHP_FIELD_SLOTS = 512
SHP_FIELD_DSCP = 256
SHP_NET_LENGTHS = 4
SHP_NO_LENGTH = 255
SHP_NO_CLASS = 255
SHP_NO_DSCP = 255
SHP_DECISION_BITS = 20
SHP_RULES_SHIFT = 20
SHP_RULES_BITS = 10
SHP_LISTS_SHIFT = 30
SHP_LISTS_BITS = 14
SHP_EPOCH_SHIFT = 44
SHP_EPOCH_BITS = 20
SHP_F_ACTIVE = 1 << 0
SHP_F_SHADOW = 1 << 1
SHP_F_PAIR4 = 1 << 2
SHP_F_PAIR6 = 1 << 3
SHP_F_HOST4_LOCAL = 1 << 4
SHP_F_HOST4_REMOTE = 1 << 5
SHP_F_HOST6_LOCAL = 1 << 6
SHP_F_HOST6_REMOTE = 1 << 7
SHP_F_LPM4_LOCAL = 1 << 8
SHP_F_LPM4_REMOTE = 1 << 9
SHP_F_LPM6_LOCAL = 1 << 10
SHP_F_LPM6_REMOTE = 1 << 11
SHP_F_RULE_MARK = 1 << 12
SHP_F_RULE_CGROUP = 1 << 13
SHP_F_RULE_DSCP = 1 << 14
SHP_F_DGRAM_LOOK = 1 << 15
SHP_F_ACTIVE_RULES_SHIFT = 16
SHP_F_NET4 = 1 << 17
SHP_F_NET6 = 1 << 18
SHP_SOURCE_LINK = 1
SHP_SOURCE_ADDRESS = 2
SHP_SOURCE_CGROUP = 3
SHP_INGRESS_COUNT = 0
SHP_INGRESS_POLICE = 1
SHP_INGRESS_IFB = 2
SHP_TO_IFB = 0x53484946
SHP_C_METER_LIVE = 1 << 0
SHP_C_METER_SAFE = 1 << 1
SHP_C_TWIN_SAFE = 1 << 2
SHP_C_PACE = 1 << 3
SHP_C_LINK = 1 << 4
SHP_METER_LINK = 32
SHP_METER_SLOTS = 33
SHP_COST_SHIFT = 20
SHP_WIRE_OVERHEAD = 24


class _Struct(ctypes.Structure):
    _c_name_: ClassVar[str] = ""


class Flow4Key(_Struct):
    _c_name_ = "shp_flow4_key"
    _fields_ = (
        ("local_be", ctypes.c_uint32),
        ("remote_be", ctypes.c_uint32),
        ("local_port_be", ctypes.c_uint16),
        ("remote_port_be", ctypes.c_uint16),
        ("protocol", ctypes.c_uint8),
        ("direction", ctypes.c_uint8),
        ("pad", ctypes.c_uint16),
    )


class Flow6Key(_Struct):
    _c_name_ = "shp_flow6_key"
    _fields_ = (
        ("local_be", ctypes.c_uint32 * 4),
        ("remote_be", ctypes.c_uint32 * 4),
        ("local_port_be", ctypes.c_uint16),
        ("remote_port_be", ctypes.c_uint16),
        ("protocol", ctypes.c_uint8),
        ("direction", ctypes.c_uint8),
        ("pad", ctypes.c_uint16),
    )


class Flow(_Struct):
    _c_name_ = "shp_flow"
    _fields_ = (
        ("word", ctypes.c_uint64),
        ("expires_jiffies", ctypes.c_uint64),
    )


class Moved(_Struct):
    _c_name_ = "shp_moved"
    _fields_ = (
        ("until_jiffies", ctypes.c_uint64),
        ("tat_ns", ctypes.c_uint64),
        ("class_id", ctypes.c_uint32),
        ("pad", ctypes.c_uint32),
    )


class FragKey(_Struct):
    _c_name_ = "shp_frag_key"
    _fields_ = (
        ("local_be", ctypes.c_uint32 * 4),
        ("remote_be", ctypes.c_uint32 * 4),
        ("id_be", ctypes.c_uint32),
        ("protocol", ctypes.c_uint8),
        ("direction", ctypes.c_uint8),
        ("pad", ctypes.c_uint16),
    )


class Source(_Struct):
    _c_name_ = "shp_source"
    _fields_ = (
        ("id", ctypes.c_uint32 * 4),
        ("kind", ctypes.c_uint32),
        ("class_id", ctypes.c_uint32),
    )


class Budget(_Struct):
    _c_name_ = "shp_budget"
    _fields_ = (("tat_ns", ctypes.c_uint64),)


class PortRules(_Struct):
    _c_name_ = "shp_port_rules"
    _fields_ = (
        ("tcp_local", ctypes.c_uint16),
        ("tcp_remote", ctypes.c_uint16),
        ("udp_local", ctypes.c_uint16),
        ("udp_remote", ctypes.c_uint16),
    )


class Rule(_Struct):
    _c_name_ = "shp_rule"
    _fields_ = (
        ("class_id", ctypes.c_uint8),
        ("code", ctypes.c_uint8),
        ("pad", ctypes.c_uint16),
        ("pad2", ctypes.c_uint32),
    )


class MarkRule(_Struct):
    _c_name_ = "shp_mark_rule"
    _fields_ = (
        ("value", ctypes.c_uint32),
        ("mask", ctypes.c_uint32),
        ("rule", ctypes.c_uint32),
        ("directions", ctypes.c_uint32),
    )


class CgroupKey(_Struct):
    _c_name_ = "shp_cgroup_key"
    _fields_ = (
        ("id", ctypes.c_uint64),
        ("active", ctypes.c_uint32),
        ("pad", ctypes.c_uint32),
    )


class CgroupRule(_Struct):
    _c_name_ = "shp_cgroup_rule"
    _fields_ = (
        ("rule", ctypes.c_uint32),
        ("directions", ctypes.c_uint32),
    )


class Host4(_Struct):
    _c_name_ = "shp_host4"
    _fields_ = (("addr_be", ctypes.c_uint32),)


class Host6(_Struct):
    _c_name_ = "shp_host6"
    _fields_ = (("addr_be", ctypes.c_uint32 * 4),)


class Pair4(_Struct):
    _c_name_ = "shp_pair4"
    _fields_ = (
        ("local_be", ctypes.c_uint32),
        ("remote_be", ctypes.c_uint32),
    )


class Pair6(_Struct):
    _c_name_ = "shp_pair6"
    _fields_ = (
        ("local_be", ctypes.c_uint32 * 4),
        ("remote_be", ctypes.c_uint32 * 4),
    )


class Lpm4(_Struct):
    _c_name_ = "shp_lpm4"
    _fields_ = (
        ("prefix_bits", ctypes.c_uint32),
        ("addr_be", ctypes.c_uint32),
    )


class Lpm6(_Struct):
    _c_name_ = "shp_lpm6"
    _fields_ = (
        ("prefix_bits", ctypes.c_uint32),
        ("addr_be", ctypes.c_uint32 * 4),
    )


class NetLength(_Struct):
    _c_name_ = "shp_net_length"
    _fields_ = (
        ("prefix_bits", ctypes.c_uint32),
        ("mask_be", ctypes.c_uint32 * 4),
    )


class Host(_Struct):
    _c_name_ = "shp_host"
    _fields_ = (
        ("local_class", ctypes.c_uint8),
        ("remote_class", ctypes.c_uint8),
        ("pad", ctypes.c_uint16),
        ("pad2", ctypes.c_uint32),
        ("local_expires_jiffies", ctypes.c_uint64),
        ("remote_expires_jiffies", ctypes.c_uint64),
    )


class Listed(_Struct):
    _c_name_ = "shp_listed"
    _fields_ = (
        ("expires_jiffies", ctypes.c_uint64),
        ("class_id", ctypes.c_uint32),
        ("prefix_bits", ctypes.c_uint32),
    )


class ManualKey(_Struct):
    _c_name_ = "shp_manual_key"
    _fields_ = (("remote", ctypes.c_uint8 * 16),)


class Manual(_Struct):
    _c_name_ = "shp_manual"
    _fields_ = (
        ("class_id", ctypes.c_uint32),
        ("pad", ctypes.c_uint32),
        ("expires_boot_s", ctypes.c_uint64),
    )


class Config(_Struct):
    _c_name_ = "shp_config"
    _fields_ = (
        ("tick_ns", ctypes.c_uint64),
        ("hold_jiffies", ctypes.c_uint64),
        ("insert_window_jiffies", ctypes.c_uint64),
        ("ifb_lease_jiffies", ctypes.c_uint64),
        ("link_cost", ctypes.c_uint64),
        ("link_rest_cost", ctypes.c_uint64),
        ("link_burst_ns", ctypes.c_uint64),
        ("insert_limit", ctypes.c_uint32),
        ("segment_limit_bytes", ctypes.c_uint32),
        ("egress_mark_mask", ctypes.c_uint32),
        ("ingress_mark_mask", ctypes.c_uint32),
        ("cgroup_levels", ctypes.c_uint32),
        ("l3_device", ctypes.c_uint8),
        ("default_class", ctypes.c_uint8),
        ("control_class", ctypes.c_uint8),
        ("ingress_mode", ctypes.c_uint8),
        ("write_priority", ctypes.c_uint8),
        ("class_count", ctypes.c_uint8),
        ("pad", ctypes.c_uint8 * 6),
    )


class Class(_Struct):
    _c_name_ = "shp_class"
    _fields_ = (
        ("live_cost", ctypes.c_uint64),
        ("live_ce_ns", ctypes.c_uint64),
        ("live_drop_ns", ctypes.c_uint64),
        ("safe_cost", ctypes.c_uint64),
        ("safe_ce_ns", ctypes.c_uint64),
        ("safe_drop_ns", ctypes.c_uint64),
        ("deadline_jiffies", ctypes.c_uint64),
        ("budget_cost", ctypes.c_uint64),
        ("budget_burst_ns", ctypes.c_uint64),
        ("live_priority", ctypes.c_uint32),
        ("safe_priority", ctypes.c_uint32),
        ("mark", ctypes.c_uint32),
        ("flags", ctypes.c_uint8),
        ("dscp", ctypes.c_uint8),
        ("overflow_class", ctypes.c_uint8),
        ("pad", ctypes.c_uint8),
    )


class Meter(_Struct):
    _c_name_ = "shp_meter"
    _fields_ = (
        ("tat_ns", ctypes.c_uint64),
        ("rest_tat_ns", ctypes.c_uint64),
        ("pad", ctypes.c_uint64 * 6),
    )


class Count(_Struct):
    _c_name_ = "shp_count"
    _fields_ = (
        ("packets", ctypes.c_uint64),
        ("wire_bytes", ctypes.c_uint64),
        ("drops", ctypes.c_uint64),
        ("drop_wire_bytes", ctypes.c_uint64),
        ("ce_marks", ctypes.c_uint64),
        ("no_socket", ctypes.c_uint64),
        ("over_segment", ctypes.c_uint64),
        ("pad", ctypes.c_uint64),
    )


class Inserts(_Struct):
    _c_name_ = "shp_inserts"
    _fields_ = (
        ("window_jiffies", ctypes.c_uint64),
        ("inserted", ctypes.c_uint64),
    )


class Scratch(_Struct):
    _c_name_ = "shp_scratch"
    _fields_ = (("words", ctypes.c_uint64 * 32),)
