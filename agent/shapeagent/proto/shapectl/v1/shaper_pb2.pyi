# SPDX-License-Identifier: Apache-2.0
from shapeagent.proto.shapectl.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class AttachSpec(_message.Message):
    __slots__ = ("device", "policy_text", "policy_source", "profile", "link_rate_bits_per_s", "ingress", "ingress_lease_s", "shadow", "segment_limit", "reroute_ipv6", "egress_mark_mask", "ingress_mark_mask", "yes_management", "confirm_s", "hook", "takeover")
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    POLICY_TEXT_FIELD_NUMBER: _ClassVar[int]
    POLICY_SOURCE_FIELD_NUMBER: _ClassVar[int]
    PROFILE_FIELD_NUMBER: _ClassVar[int]
    LINK_RATE_BITS_PER_S_FIELD_NUMBER: _ClassVar[int]
    INGRESS_FIELD_NUMBER: _ClassVar[int]
    INGRESS_LEASE_S_FIELD_NUMBER: _ClassVar[int]
    SHADOW_FIELD_NUMBER: _ClassVar[int]
    SEGMENT_LIMIT_FIELD_NUMBER: _ClassVar[int]
    REROUTE_IPV6_FIELD_NUMBER: _ClassVar[int]
    EGRESS_MARK_MASK_FIELD_NUMBER: _ClassVar[int]
    INGRESS_MARK_MASK_FIELD_NUMBER: _ClassVar[int]
    YES_MANAGEMENT_FIELD_NUMBER: _ClassVar[int]
    CONFIRM_S_FIELD_NUMBER: _ClassVar[int]
    HOOK_FIELD_NUMBER: _ClassVar[int]
    TAKEOVER_FIELD_NUMBER: _ClassVar[int]
    device: str
    policy_text: str
    policy_source: str
    profile: _common_pb2.Profile
    link_rate_bits_per_s: int
    ingress: _common_pb2.IngressMode
    ingress_lease_s: float
    shadow: bool
    segment_limit: str
    reroute_ipv6: bool
    egress_mark_mask: int
    ingress_mark_mask: int
    yes_management: bool
    confirm_s: float
    hook: _common_pb2.Hook
    takeover: bool
    def __init__(self, device: _Optional[str] = ..., policy_text: _Optional[str] = ..., policy_source: _Optional[str] = ..., profile: _Optional[_Union[_common_pb2.Profile, str]] = ..., link_rate_bits_per_s: _Optional[int] = ..., ingress: _Optional[_Union[_common_pb2.IngressMode, str]] = ..., ingress_lease_s: _Optional[float] = ..., shadow: _Optional[bool] = ..., segment_limit: _Optional[str] = ..., reroute_ipv6: _Optional[bool] = ..., egress_mark_mask: _Optional[int] = ..., ingress_mark_mask: _Optional[int] = ..., yes_management: _Optional[bool] = ..., confirm_s: _Optional[float] = ..., hook: _Optional[_Union[_common_pb2.Hook, str]] = ..., takeover: _Optional[bool] = ...) -> None: ...

class ClassPlanRow(_message.Message):
    __slots__ = ("name", "number", "guarantee_bits_per_s", "ceiling_bits_per_s", "safe_ceiling_bits_per_s", "burst_bytes", "burst_us", "quantum_bytes", "queue", "enforced_by")
    NAME_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    GUARANTEE_BITS_PER_S_FIELD_NUMBER: _ClassVar[int]
    CEILING_BITS_PER_S_FIELD_NUMBER: _ClassVar[int]
    SAFE_CEILING_BITS_PER_S_FIELD_NUMBER: _ClassVar[int]
    BURST_BYTES_FIELD_NUMBER: _ClassVar[int]
    BURST_US_FIELD_NUMBER: _ClassVar[int]
    QUANTUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    QUEUE_FIELD_NUMBER: _ClassVar[int]
    ENFORCED_BY_FIELD_NUMBER: _ClassVar[int]
    name: str
    number: int
    guarantee_bits_per_s: int
    ceiling_bits_per_s: int
    safe_ceiling_bits_per_s: int
    burst_bytes: int
    burst_us: float
    quantum_bytes: int
    queue: str
    enforced_by: str
    def __init__(self, name: _Optional[str] = ..., number: _Optional[int] = ..., guarantee_bits_per_s: _Optional[int] = ..., ceiling_bits_per_s: _Optional[int] = ..., safe_ceiling_bits_per_s: _Optional[int] = ..., burst_bytes: _Optional[int] = ..., burst_us: _Optional[float] = ..., quantum_bytes: _Optional[int] = ..., queue: _Optional[str] = ..., enforced_by: _Optional[str] = ...) -> None: ...

class AttachPlan(_message.Message):
    __slots__ = ("device", "netns", "profile", "profile_reason", "ingress", "hook", "link_rate_bits_per_s", "link_rate_source", "segment_limit_bytes", "segment_limit_note", "policy_source", "policy_digest", "classes", "steps", "warnings", "takes_over")
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    NETNS_FIELD_NUMBER: _ClassVar[int]
    PROFILE_FIELD_NUMBER: _ClassVar[int]
    PROFILE_REASON_FIELD_NUMBER: _ClassVar[int]
    INGRESS_FIELD_NUMBER: _ClassVar[int]
    HOOK_FIELD_NUMBER: _ClassVar[int]
    LINK_RATE_BITS_PER_S_FIELD_NUMBER: _ClassVar[int]
    LINK_RATE_SOURCE_FIELD_NUMBER: _ClassVar[int]
    SEGMENT_LIMIT_BYTES_FIELD_NUMBER: _ClassVar[int]
    SEGMENT_LIMIT_NOTE_FIELD_NUMBER: _ClassVar[int]
    POLICY_SOURCE_FIELD_NUMBER: _ClassVar[int]
    POLICY_DIGEST_FIELD_NUMBER: _ClassVar[int]
    CLASSES_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    WARNINGS_FIELD_NUMBER: _ClassVar[int]
    TAKES_OVER_FIELD_NUMBER: _ClassVar[int]
    device: str
    netns: str
    profile: _common_pb2.Profile
    profile_reason: str
    ingress: _common_pb2.IngressMode
    hook: _common_pb2.Hook
    link_rate_bits_per_s: int
    link_rate_source: str
    segment_limit_bytes: int
    segment_limit_note: str
    policy_source: str
    policy_digest: str
    classes: _containers.RepeatedCompositeFieldContainer[ClassPlanRow]
    steps: _containers.RepeatedScalarFieldContainer[str]
    warnings: _containers.RepeatedScalarFieldContainer[str]
    takes_over: str
    def __init__(self, device: _Optional[str] = ..., netns: _Optional[str] = ..., profile: _Optional[_Union[_common_pb2.Profile, str]] = ..., profile_reason: _Optional[str] = ..., ingress: _Optional[_Union[_common_pb2.IngressMode, str]] = ..., hook: _Optional[_Union[_common_pb2.Hook, str]] = ..., link_rate_bits_per_s: _Optional[int] = ..., link_rate_source: _Optional[str] = ..., segment_limit_bytes: _Optional[int] = ..., segment_limit_note: _Optional[str] = ..., policy_source: _Optional[str] = ..., policy_digest: _Optional[str] = ..., classes: _Optional[_Iterable[_Union[ClassPlanRow, _Mapping]]] = ..., steps: _Optional[_Iterable[str]] = ..., warnings: _Optional[_Iterable[str]] = ..., takes_over: _Optional[str] = ...) -> None: ...

class AttachReport(_message.Message):
    __slots__ = ("plan", "changed", "compiled", "compile_s", "total_s", "verified_instructions", "source_digest", "unconfirmed_s", "undone_by", "repaired")
    class VerifiedInstructionsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    PLAN_FIELD_NUMBER: _ClassVar[int]
    CHANGED_FIELD_NUMBER: _ClassVar[int]
    COMPILED_FIELD_NUMBER: _ClassVar[int]
    COMPILE_S_FIELD_NUMBER: _ClassVar[int]
    TOTAL_S_FIELD_NUMBER: _ClassVar[int]
    VERIFIED_INSTRUCTIONS_FIELD_NUMBER: _ClassVar[int]
    SOURCE_DIGEST_FIELD_NUMBER: _ClassVar[int]
    UNCONFIRMED_S_FIELD_NUMBER: _ClassVar[int]
    UNDONE_BY_FIELD_NUMBER: _ClassVar[int]
    REPAIRED_FIELD_NUMBER: _ClassVar[int]
    plan: AttachPlan
    changed: bool
    compiled: bool
    compile_s: float
    total_s: float
    verified_instructions: _containers.ScalarMap[str, int]
    source_digest: str
    unconfirmed_s: float
    undone_by: str
    repaired: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, plan: _Optional[_Union[AttachPlan, _Mapping]] = ..., changed: _Optional[bool] = ..., compiled: _Optional[bool] = ..., compile_s: _Optional[float] = ..., total_s: _Optional[float] = ..., verified_instructions: _Optional[_Mapping[str, int]] = ..., source_digest: _Optional[str] = ..., unconfirmed_s: _Optional[float] = ..., undone_by: _Optional[str] = ..., repaired: _Optional[_Iterable[str]] = ...) -> None: ...

class DetachReport(_message.Message):
    __slots__ = ("device", "netns", "changed", "steps", "notes")
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    NETNS_FIELD_NUMBER: _ClassVar[int]
    CHANGED_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    NOTES_FIELD_NUMBER: _ClassVar[int]
    device: str
    netns: str
    changed: bool
    steps: _containers.RepeatedScalarFieldContainer[str]
    notes: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, device: _Optional[str] = ..., netns: _Optional[str] = ..., changed: _Optional[bool] = ..., steps: _Optional[_Iterable[str]] = ..., notes: _Optional[_Iterable[str]] = ...) -> None: ...

class ClassStatus(_message.Message):
    __slots__ = ("name", "number", "direction", "guarantee_bits_per_s", "ceiling_bits_per_s", "safe_ceiling_bits_per_s", "ceiling_in_force_bits_per_s", "lease_s_left", "packets", "wire_bytes", "drops", "drop_wire_bytes", "ce_marks", "no_socket_packets", "over_segment_packets", "backlog_bytes", "queue_drops", "queue_sent_packets", "queue_sent_bytes")
    NAME_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    DIRECTION_FIELD_NUMBER: _ClassVar[int]
    GUARANTEE_BITS_PER_S_FIELD_NUMBER: _ClassVar[int]
    CEILING_BITS_PER_S_FIELD_NUMBER: _ClassVar[int]
    SAFE_CEILING_BITS_PER_S_FIELD_NUMBER: _ClassVar[int]
    CEILING_IN_FORCE_BITS_PER_S_FIELD_NUMBER: _ClassVar[int]
    LEASE_S_LEFT_FIELD_NUMBER: _ClassVar[int]
    PACKETS_FIELD_NUMBER: _ClassVar[int]
    WIRE_BYTES_FIELD_NUMBER: _ClassVar[int]
    DROPS_FIELD_NUMBER: _ClassVar[int]
    DROP_WIRE_BYTES_FIELD_NUMBER: _ClassVar[int]
    CE_MARKS_FIELD_NUMBER: _ClassVar[int]
    NO_SOCKET_PACKETS_FIELD_NUMBER: _ClassVar[int]
    OVER_SEGMENT_PACKETS_FIELD_NUMBER: _ClassVar[int]
    BACKLOG_BYTES_FIELD_NUMBER: _ClassVar[int]
    QUEUE_DROPS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_SENT_PACKETS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_SENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    name: str
    number: int
    direction: _common_pb2.Direction
    guarantee_bits_per_s: int
    ceiling_bits_per_s: int
    safe_ceiling_bits_per_s: int
    ceiling_in_force_bits_per_s: int
    lease_s_left: float
    packets: int
    wire_bytes: int
    drops: int
    drop_wire_bytes: int
    ce_marks: int
    no_socket_packets: int
    over_segment_packets: int
    backlog_bytes: int
    queue_drops: int
    queue_sent_packets: int
    queue_sent_bytes: int
    def __init__(self, name: _Optional[str] = ..., number: _Optional[int] = ..., direction: _Optional[_Union[_common_pb2.Direction, str]] = ..., guarantee_bits_per_s: _Optional[int] = ..., ceiling_bits_per_s: _Optional[int] = ..., safe_ceiling_bits_per_s: _Optional[int] = ..., ceiling_in_force_bits_per_s: _Optional[int] = ..., lease_s_left: _Optional[float] = ..., packets: _Optional[int] = ..., wire_bytes: _Optional[int] = ..., drops: _Optional[int] = ..., drop_wire_bytes: _Optional[int] = ..., ce_marks: _Optional[int] = ..., no_socket_packets: _Optional[int] = ..., over_segment_packets: _Optional[int] = ..., backlog_bytes: _Optional[int] = ..., queue_drops: _Optional[int] = ..., queue_sent_packets: _Optional[int] = ..., queue_sent_bytes: _Optional[int] = ...) -> None: ...

class ReasonCounts(_message.Message):
    __slots__ = ("packets",)
    class PacketsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    PACKETS_FIELD_NUMBER: _ClassVar[int]
    packets: _containers.ScalarMap[str, int]
    def __init__(self, packets: _Optional[_Mapping[str, int]] = ...) -> None: ...

class InterfaceStatus(_message.Message):
    __slots__ = ("device", "index", "netns", "profile", "ingress", "hook", "shadow", "link_rate_bits_per_s", "segment_limit_bytes", "policy_source", "policy_digest", "attached_unix_s", "programs", "verified_instructions", "whitelist_entries", "whitelist_generation", "classes", "reasons", "problems", "warnings", "unconfirmed_s")
    class ProgramsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class VerifiedInstructionsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class ReasonsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: ReasonCounts
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[ReasonCounts, _Mapping]] = ...) -> None: ...
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    NETNS_FIELD_NUMBER: _ClassVar[int]
    PROFILE_FIELD_NUMBER: _ClassVar[int]
    INGRESS_FIELD_NUMBER: _ClassVar[int]
    HOOK_FIELD_NUMBER: _ClassVar[int]
    SHADOW_FIELD_NUMBER: _ClassVar[int]
    LINK_RATE_BITS_PER_S_FIELD_NUMBER: _ClassVar[int]
    SEGMENT_LIMIT_BYTES_FIELD_NUMBER: _ClassVar[int]
    POLICY_SOURCE_FIELD_NUMBER: _ClassVar[int]
    POLICY_DIGEST_FIELD_NUMBER: _ClassVar[int]
    ATTACHED_UNIX_S_FIELD_NUMBER: _ClassVar[int]
    PROGRAMS_FIELD_NUMBER: _ClassVar[int]
    VERIFIED_INSTRUCTIONS_FIELD_NUMBER: _ClassVar[int]
    WHITELIST_ENTRIES_FIELD_NUMBER: _ClassVar[int]
    WHITELIST_GENERATION_FIELD_NUMBER: _ClassVar[int]
    CLASSES_FIELD_NUMBER: _ClassVar[int]
    REASONS_FIELD_NUMBER: _ClassVar[int]
    PROBLEMS_FIELD_NUMBER: _ClassVar[int]
    WARNINGS_FIELD_NUMBER: _ClassVar[int]
    UNCONFIRMED_S_FIELD_NUMBER: _ClassVar[int]
    device: str
    index: int
    netns: str
    profile: _common_pb2.Profile
    ingress: _common_pb2.IngressMode
    hook: _common_pb2.Hook
    shadow: bool
    link_rate_bits_per_s: int
    segment_limit_bytes: int
    policy_source: str
    policy_digest: str
    attached_unix_s: float
    programs: _containers.ScalarMap[str, int]
    verified_instructions: _containers.ScalarMap[str, int]
    whitelist_entries: int
    whitelist_generation: int
    classes: _containers.RepeatedCompositeFieldContainer[ClassStatus]
    reasons: _containers.MessageMap[str, ReasonCounts]
    problems: _containers.RepeatedScalarFieldContainer[str]
    warnings: _containers.RepeatedScalarFieldContainer[str]
    unconfirmed_s: float
    def __init__(self, device: _Optional[str] = ..., index: _Optional[int] = ..., netns: _Optional[str] = ..., profile: _Optional[_Union[_common_pb2.Profile, str]] = ..., ingress: _Optional[_Union[_common_pb2.IngressMode, str]] = ..., hook: _Optional[_Union[_common_pb2.Hook, str]] = ..., shadow: _Optional[bool] = ..., link_rate_bits_per_s: _Optional[int] = ..., segment_limit_bytes: _Optional[int] = ..., policy_source: _Optional[str] = ..., policy_digest: _Optional[str] = ..., attached_unix_s: _Optional[float] = ..., programs: _Optional[_Mapping[str, int]] = ..., verified_instructions: _Optional[_Mapping[str, int]] = ..., whitelist_entries: _Optional[int] = ..., whitelist_generation: _Optional[int] = ..., classes: _Optional[_Iterable[_Union[ClassStatus, _Mapping]]] = ..., reasons: _Optional[_Mapping[str, ReasonCounts]] = ..., problems: _Optional[_Iterable[str]] = ..., warnings: _Optional[_Iterable[str]] = ..., unconfirmed_s: _Optional[float] = ...) -> None: ...

class Explanation(_message.Message):
    __slots__ = ("packet", "direction", "traffic_class", "reason", "rule", "prefix", "priority", "priority_text", "mark", "ceiling_bits_per_s", "notes")
    PACKET_FIELD_NUMBER: _ClassVar[int]
    DIRECTION_FIELD_NUMBER: _ClassVar[int]
    TRAFFIC_CLASS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    RULE_FIELD_NUMBER: _ClassVar[int]
    PREFIX_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_TEXT_FIELD_NUMBER: _ClassVar[int]
    MARK_FIELD_NUMBER: _ClassVar[int]
    CEILING_BITS_PER_S_FIELD_NUMBER: _ClassVar[int]
    NOTES_FIELD_NUMBER: _ClassVar[int]
    packet: str
    direction: _common_pb2.Direction
    traffic_class: str
    reason: str
    rule: str
    prefix: str
    priority: int
    priority_text: str
    mark: int
    ceiling_bits_per_s: int
    notes: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, packet: _Optional[str] = ..., direction: _Optional[_Union[_common_pb2.Direction, str]] = ..., traffic_class: _Optional[str] = ..., reason: _Optional[str] = ..., rule: _Optional[str] = ..., prefix: _Optional[str] = ..., priority: _Optional[int] = ..., priority_text: _Optional[str] = ..., mark: _Optional[int] = ..., ceiling_bits_per_s: _Optional[int] = ..., notes: _Optional[_Iterable[str]] = ...) -> None: ...

class ResidueItem(_message.Message):
    __slots__ = ("kind", "what", "fix", "device", "netns", "id")
    KIND_FIELD_NUMBER: _ClassVar[int]
    WHAT_FIELD_NUMBER: _ClassVar[int]
    FIX_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    NETNS_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    kind: str
    what: str
    fix: str
    device: str
    netns: str
    id: int
    def __init__(self, kind: _Optional[str] = ..., what: _Optional[str] = ..., fix: _Optional[str] = ..., device: _Optional[str] = ..., netns: _Optional[str] = ..., id: _Optional[int] = ...) -> None: ...

class ResidueReport(_message.Message):
    __slots__ = ("attached", "items")
    ATTACHED_FIELD_NUMBER: _ClassVar[int]
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    attached: int
    items: _containers.RepeatedCompositeFieldContainer[ResidueItem]
    def __init__(self, attached: _Optional[int] = ..., items: _Optional[_Iterable[_Union[ResidueItem, _Mapping]]] = ...) -> None: ...

class PlanAttachRequest(_message.Message):
    __slots__ = ("spec", "netns")
    SPEC_FIELD_NUMBER: _ClassVar[int]
    NETNS_FIELD_NUMBER: _ClassVar[int]
    spec: AttachSpec
    netns: str
    def __init__(self, spec: _Optional[_Union[AttachSpec, _Mapping]] = ..., netns: _Optional[str] = ...) -> None: ...

class PlanAttachResponse(_message.Message):
    __slots__ = ("plan",)
    PLAN_FIELD_NUMBER: _ClassVar[int]
    plan: AttachPlan
    def __init__(self, plan: _Optional[_Union[AttachPlan, _Mapping]] = ...) -> None: ...

class AttachRequest(_message.Message):
    __slots__ = ("request_id", "spec", "netns", "why")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    SPEC_FIELD_NUMBER: _ClassVar[int]
    NETNS_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    spec: AttachSpec
    netns: str
    why: str
    def __init__(self, request_id: _Optional[str] = ..., spec: _Optional[_Union[AttachSpec, _Mapping]] = ..., netns: _Optional[str] = ..., why: _Optional[str] = ...) -> None: ...

class AttachResponse(_message.Message):
    __slots__ = ("report",)
    REPORT_FIELD_NUMBER: _ClassVar[int]
    report: AttachReport
    def __init__(self, report: _Optional[_Union[AttachReport, _Mapping]] = ...) -> None: ...

class DetachRequest(_message.Message):
    __slots__ = ("request_id", "device", "dry_run", "netns", "why")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    DRY_RUN_FIELD_NUMBER: _ClassVar[int]
    NETNS_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    device: str
    dry_run: bool
    netns: str
    why: str
    def __init__(self, request_id: _Optional[str] = ..., device: _Optional[str] = ..., dry_run: _Optional[bool] = ..., netns: _Optional[str] = ..., why: _Optional[str] = ...) -> None: ...

class DetachResponse(_message.Message):
    __slots__ = ("report",)
    REPORT_FIELD_NUMBER: _ClassVar[int]
    report: DetachReport
    def __init__(self, report: _Optional[_Union[DetachReport, _Mapping]] = ...) -> None: ...

class ConfirmRequest(_message.Message):
    __slots__ = ("request_id", "device", "netns", "why")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    NETNS_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    device: str
    netns: str
    why: str
    def __init__(self, request_id: _Optional[str] = ..., device: _Optional[str] = ..., netns: _Optional[str] = ..., why: _Optional[str] = ...) -> None: ...

class ConfirmResponse(_message.Message):
    __slots__ = ("left_s",)
    LEFT_S_FIELD_NUMBER: _ClassVar[int]
    left_s: float
    def __init__(self, left_s: _Optional[float] = ...) -> None: ...

class GetStatusRequest(_message.Message):
    __slots__ = ("device", "netns")
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    NETNS_FIELD_NUMBER: _ClassVar[int]
    device: str
    netns: str
    def __init__(self, device: _Optional[str] = ..., netns: _Optional[str] = ...) -> None: ...

class GetStatusResponse(_message.Message):
    __slots__ = ("interfaces",)
    INTERFACES_FIELD_NUMBER: _ClassVar[int]
    interfaces: _containers.RepeatedCompositeFieldContainer[InterfaceStatus]
    def __init__(self, interfaces: _Optional[_Iterable[_Union[InterfaceStatus, _Mapping]]] = ...) -> None: ...

class ExplainRequest(_message.Message):
    __slots__ = ("device", "source", "destination", "protocol", "source_port", "destination_port", "direction", "dscp", "mark", "netns")
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    DESTINATION_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    SOURCE_PORT_FIELD_NUMBER: _ClassVar[int]
    DESTINATION_PORT_FIELD_NUMBER: _ClassVar[int]
    DIRECTION_FIELD_NUMBER: _ClassVar[int]
    DSCP_FIELD_NUMBER: _ClassVar[int]
    MARK_FIELD_NUMBER: _ClassVar[int]
    NETNS_FIELD_NUMBER: _ClassVar[int]
    device: str
    source: str
    destination: str
    protocol: str
    source_port: int
    destination_port: int
    direction: _common_pb2.Direction
    dscp: int
    mark: int
    netns: str
    def __init__(self, device: _Optional[str] = ..., source: _Optional[str] = ..., destination: _Optional[str] = ..., protocol: _Optional[str] = ..., source_port: _Optional[int] = ..., destination_port: _Optional[int] = ..., direction: _Optional[_Union[_common_pb2.Direction, str]] = ..., dscp: _Optional[int] = ..., mark: _Optional[int] = ..., netns: _Optional[str] = ...) -> None: ...

class ExplainResponse(_message.Message):
    __slots__ = ("explanation",)
    EXPLANATION_FIELD_NUMBER: _ClassVar[int]
    explanation: Explanation
    def __init__(self, explanation: _Optional[_Union[Explanation, _Mapping]] = ...) -> None: ...

class ExplainCaptureRequest(_message.Message):
    __slots__ = ("device", "capture", "direction", "netns")
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    CAPTURE_FIELD_NUMBER: _ClassVar[int]
    DIRECTION_FIELD_NUMBER: _ClassVar[int]
    NETNS_FIELD_NUMBER: _ClassVar[int]
    device: str
    capture: bytes
    direction: _common_pb2.Direction
    netns: str
    def __init__(self, device: _Optional[str] = ..., capture: _Optional[bytes] = ..., direction: _Optional[_Union[_common_pb2.Direction, str]] = ..., netns: _Optional[str] = ...) -> None: ...

class ExplainCaptureResponse(_message.Message):
    __slots__ = ("explanations",)
    EXPLANATIONS_FIELD_NUMBER: _ClassVar[int]
    explanations: _containers.RepeatedCompositeFieldContainer[Explanation]
    def __init__(self, explanations: _Optional[_Iterable[_Union[Explanation, _Mapping]]] = ...) -> None: ...

class SetClassRequest(_message.Message):
    __slots__ = ("request_id", "device", "class_name", "ceiling_bits_per_s", "lease_s", "direction", "netns", "why")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    CLASS_NAME_FIELD_NUMBER: _ClassVar[int]
    CEILING_BITS_PER_S_FIELD_NUMBER: _ClassVar[int]
    LEASE_S_FIELD_NUMBER: _ClassVar[int]
    DIRECTION_FIELD_NUMBER: _ClassVar[int]
    NETNS_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    device: str
    class_name: str
    ceiling_bits_per_s: int
    lease_s: float
    direction: _common_pb2.Direction
    netns: str
    why: str
    def __init__(self, request_id: _Optional[str] = ..., device: _Optional[str] = ..., class_name: _Optional[str] = ..., ceiling_bits_per_s: _Optional[int] = ..., lease_s: _Optional[float] = ..., direction: _Optional[_Union[_common_pb2.Direction, str]] = ..., netns: _Optional[str] = ..., why: _Optional[str] = ...) -> None: ...

class SetClassResponse(_message.Message):
    __slots__ = ("status",)
    STATUS_FIELD_NUMBER: _ClassVar[int]
    status: ClassStatus
    def __init__(self, status: _Optional[_Union[ClassStatus, _Mapping]] = ...) -> None: ...

class GetResidueRequest(_message.Message):
    __slots__ = ("netns", "wait_s")
    NETNS_FIELD_NUMBER: _ClassVar[int]
    WAIT_S_FIELD_NUMBER: _ClassVar[int]
    netns: str
    wait_s: float
    def __init__(self, netns: _Optional[str] = ..., wait_s: _Optional[float] = ...) -> None: ...

class GetResidueResponse(_message.Message):
    __slots__ = ("report",)
    REPORT_FIELD_NUMBER: _ClassVar[int]
    report: ResidueReport
    def __init__(self, report: _Optional[_Union[ResidueReport, _Mapping]] = ...) -> None: ...
