# SPDX-License-Identifier: Apache-2.0
from shapeagent.proto.shapectl.v1 import shaper_pb2 as _shaper_pb2
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class GetPolicyRequest(_message.Message):
    __slots__ = ("device", "netns")
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    NETNS_FIELD_NUMBER: _ClassVar[int]
    device: str
    netns: str
    def __init__(self, device: _Optional[str] = ..., netns: _Optional[str] = ...) -> None: ...

class GetPolicyResponse(_message.Message):
    __slots__ = ("text", "source", "digest")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    text: str
    source: str
    digest: str
    def __init__(self, text: _Optional[str] = ..., source: _Optional[str] = ..., digest: _Optional[str] = ...) -> None: ...

class SetPolicyRequest(_message.Message):
    __slots__ = ("request_id", "device", "text", "source", "expected_digest", "netns", "why")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_DIGEST_FIELD_NUMBER: _ClassVar[int]
    NETNS_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    device: str
    text: str
    source: str
    expected_digest: str
    netns: str
    why: str
    def __init__(self, request_id: _Optional[str] = ..., device: _Optional[str] = ..., text: _Optional[str] = ..., source: _Optional[str] = ..., expected_digest: _Optional[str] = ..., netns: _Optional[str] = ..., why: _Optional[str] = ...) -> None: ...

class SetPolicyResponse(_message.Message):
    __slots__ = ("report",)
    REPORT_FIELD_NUMBER: _ClassVar[int]
    report: _shaper_pb2.AttachReport
    def __init__(self, report: _Optional[_Union[_shaper_pb2.AttachReport, _Mapping]] = ...) -> None: ...
