# SPDX-License-Identifier: Apache-2.0
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Event(_message.Message):
    __slots__ = ("sequence", "unix_s", "kind", "device", "text", "details")
    class DetailsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    UNIX_S_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    DETAILS_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    unix_s: float
    kind: str
    device: str
    text: str
    details: _containers.ScalarMap[str, str]
    def __init__(self, sequence: _Optional[int] = ..., unix_s: _Optional[float] = ..., kind: _Optional[str] = ..., device: _Optional[str] = ..., text: _Optional[str] = ..., details: _Optional[_Mapping[str, str]] = ...) -> None: ...

class WatchEventsRequest(_message.Message):
    __slots__ = ("device", "kinds", "after_sequence", "run_id", "only_remembered")
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    KINDS_FIELD_NUMBER: _ClassVar[int]
    AFTER_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    ONLY_REMEMBERED_FIELD_NUMBER: _ClassVar[int]
    device: str
    kinds: _containers.RepeatedScalarFieldContainer[str]
    after_sequence: int
    run_id: str
    only_remembered: bool
    def __init__(self, device: _Optional[str] = ..., kinds: _Optional[_Iterable[str]] = ..., after_sequence: _Optional[int] = ..., run_id: _Optional[str] = ..., only_remembered: _Optional[bool] = ...) -> None: ...

class WatchEventsResponse(_message.Message):
    __slots__ = ("event", "run_id", "lost")
    EVENT_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    LOST_FIELD_NUMBER: _ClassVar[int]
    event: Event
    run_id: str
    lost: int
    def __init__(self, event: _Optional[_Union[Event, _Mapping]] = ..., run_id: _Optional[str] = ..., lost: _Optional[int] = ...) -> None: ...
