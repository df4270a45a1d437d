# SPDX-License-Identifier: Apache-2.0
from shapeagent.proto.shapectl.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class WhitelistMode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    WHITELIST_MODE_UNSPECIFIED: _ClassVar[WhitelistMode]
    WHITELIST_MODE_MERGE: _ClassVar[WhitelistMode]
    WHITELIST_MODE_REPLACE: _ClassVar[WhitelistMode]
WHITELIST_MODE_UNSPECIFIED: WhitelistMode
WHITELIST_MODE_MERGE: WhitelistMode
WHITELIST_MODE_REPLACE: WhitelistMode

class WhitelistGroup(_message.Message):
    __slots__ = ("traffic_class", "match", "owner", "reason", "expires_unix_s")
    TRAFFIC_CLASS_FIELD_NUMBER: _ClassVar[int]
    MATCH_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_UNIX_S_FIELD_NUMBER: _ClassVar[int]
    traffic_class: str
    match: _common_pb2.Match
    owner: str
    reason: str
    expires_unix_s: float
    def __init__(self, traffic_class: _Optional[str] = ..., match: _Optional[_Union[_common_pb2.Match, str]] = ..., owner: _Optional[str] = ..., reason: _Optional[str] = ..., expires_unix_s: _Optional[float] = ...) -> None: ...

class WhitelistBatch(_message.Message):
    __slots__ = ("group", "hosts4", "hosts6", "prefixes4", "prefixes6", "pairs4", "pairs6")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    HOSTS4_FIELD_NUMBER: _ClassVar[int]
    HOSTS6_FIELD_NUMBER: _ClassVar[int]
    PREFIXES4_FIELD_NUMBER: _ClassVar[int]
    PREFIXES6_FIELD_NUMBER: _ClassVar[int]
    PAIRS4_FIELD_NUMBER: _ClassVar[int]
    PAIRS6_FIELD_NUMBER: _ClassVar[int]
    group: WhitelistGroup
    hosts4: bytes
    hosts6: bytes
    prefixes4: bytes
    prefixes6: bytes
    pairs4: bytes
    pairs6: bytes
    def __init__(self, group: _Optional[_Union[WhitelistGroup, _Mapping]] = ..., hosts4: _Optional[bytes] = ..., hosts6: _Optional[bytes] = ..., prefixes4: _Optional[bytes] = ..., prefixes6: _Optional[bytes] = ..., pairs4: _Optional[bytes] = ..., pairs6: _Optional[bytes] = ...) -> None: ...

class WhitelistTexts(_message.Message):
    __slots__ = ("group", "entries")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    ENTRIES_FIELD_NUMBER: _ClassVar[int]
    group: WhitelistGroup
    entries: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, group: _Optional[_Union[WhitelistGroup, _Mapping]] = ..., entries: _Optional[_Iterable[str]] = ...) -> None: ...

class WhitelistChange(_message.Message):
    __slots__ = ("added", "removed", "unchanged", "total", "generation", "notices", "warnings", "changed")
    ADDED_FIELD_NUMBER: _ClassVar[int]
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    UNCHANGED_FIELD_NUMBER: _ClassVar[int]
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    NOTICES_FIELD_NUMBER: _ClassVar[int]
    WARNINGS_FIELD_NUMBER: _ClassVar[int]
    CHANGED_FIELD_NUMBER: _ClassVar[int]
    added: int
    removed: int
    unchanged: int
    total: int
    generation: int
    notices: _containers.RepeatedScalarFieldContainer[str]
    warnings: _containers.RepeatedScalarFieldContainer[str]
    changed: int
    def __init__(self, added: _Optional[int] = ..., removed: _Optional[int] = ..., unchanged: _Optional[int] = ..., total: _Optional[int] = ..., generation: _Optional[int] = ..., notices: _Optional[_Iterable[str]] = ..., warnings: _Optional[_Iterable[str]] = ..., changed: _Optional[int] = ...) -> None: ...

class UpdateWhitelistRequest(_message.Message):
    __slots__ = ("request_id", "device", "mode", "expected_generation", "yes_everything", "add", "remove", "add_texts", "remove_texts", "netns", "why")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_GENERATION_FIELD_NUMBER: _ClassVar[int]
    YES_EVERYTHING_FIELD_NUMBER: _ClassVar[int]
    ADD_FIELD_NUMBER: _ClassVar[int]
    REMOVE_FIELD_NUMBER: _ClassVar[int]
    ADD_TEXTS_FIELD_NUMBER: _ClassVar[int]
    REMOVE_TEXTS_FIELD_NUMBER: _ClassVar[int]
    NETNS_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    device: str
    mode: WhitelistMode
    expected_generation: int
    yes_everything: bool
    add: _containers.RepeatedCompositeFieldContainer[WhitelistBatch]
    remove: _containers.RepeatedCompositeFieldContainer[WhitelistBatch]
    add_texts: _containers.RepeatedCompositeFieldContainer[WhitelistTexts]
    remove_texts: _containers.RepeatedCompositeFieldContainer[WhitelistTexts]
    netns: str
    why: str
    def __init__(self, request_id: _Optional[str] = ..., device: _Optional[str] = ..., mode: _Optional[_Union[WhitelistMode, str]] = ..., expected_generation: _Optional[int] = ..., yes_everything: _Optional[bool] = ..., add: _Optional[_Iterable[_Union[WhitelistBatch, _Mapping]]] = ..., remove: _Optional[_Iterable[_Union[WhitelistBatch, _Mapping]]] = ..., add_texts: _Optional[_Iterable[_Union[WhitelistTexts, _Mapping]]] = ..., remove_texts: _Optional[_Iterable[_Union[WhitelistTexts, _Mapping]]] = ..., netns: _Optional[str] = ..., why: _Optional[str] = ...) -> None: ...

class UpdateWhitelistResponse(_message.Message):
    __slots__ = ("change",)
    CHANGE_FIELD_NUMBER: _ClassVar[int]
    change: WhitelistChange
    def __init__(self, change: _Optional[_Union[WhitelistChange, _Mapping]] = ...) -> None: ...

class StreamWhitelistRequest(_message.Message):
    __slots__ = ("begin", "batches", "commit")
    class Begin(_message.Message):
        __slots__ = ("request_id", "device", "mode", "expected_generation", "yes_everything", "netns", "why")
        REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
        DEVICE_FIELD_NUMBER: _ClassVar[int]
        MODE_FIELD_NUMBER: _ClassVar[int]
        EXPECTED_GENERATION_FIELD_NUMBER: _ClassVar[int]
        YES_EVERYTHING_FIELD_NUMBER: _ClassVar[int]
        NETNS_FIELD_NUMBER: _ClassVar[int]
        WHY_FIELD_NUMBER: _ClassVar[int]
        request_id: str
        device: str
        mode: WhitelistMode
        expected_generation: int
        yes_everything: bool
        netns: str
        why: str
        def __init__(self, request_id: _Optional[str] = ..., device: _Optional[str] = ..., mode: _Optional[_Union[WhitelistMode, str]] = ..., expected_generation: _Optional[int] = ..., yes_everything: _Optional[bool] = ..., netns: _Optional[str] = ..., why: _Optional[str] = ...) -> None: ...
    class Batches(_message.Message):
        __slots__ = ("add", "remove")
        ADD_FIELD_NUMBER: _ClassVar[int]
        REMOVE_FIELD_NUMBER: _ClassVar[int]
        add: _containers.RepeatedCompositeFieldContainer[WhitelistBatch]
        remove: _containers.RepeatedCompositeFieldContainer[WhitelistBatch]
        def __init__(self, add: _Optional[_Iterable[_Union[WhitelistBatch, _Mapping]]] = ..., remove: _Optional[_Iterable[_Union[WhitelistBatch, _Mapping]]] = ...) -> None: ...
    class Commit(_message.Message):
        __slots__ = ("entries",)
        ENTRIES_FIELD_NUMBER: _ClassVar[int]
        entries: int
        def __init__(self, entries: _Optional[int] = ...) -> None: ...
    BEGIN_FIELD_NUMBER: _ClassVar[int]
    BATCHES_FIELD_NUMBER: _ClassVar[int]
    COMMIT_FIELD_NUMBER: _ClassVar[int]
    begin: StreamWhitelistRequest.Begin
    batches: StreamWhitelistRequest.Batches
    commit: StreamWhitelistRequest.Commit
    def __init__(self, begin: _Optional[_Union[StreamWhitelistRequest.Begin, _Mapping]] = ..., batches: _Optional[_Union[StreamWhitelistRequest.Batches, _Mapping]] = ..., commit: _Optional[_Union[StreamWhitelistRequest.Commit, _Mapping]] = ...) -> None: ...

class StreamWhitelistResponse(_message.Message):
    __slots__ = ("change",)
    CHANGE_FIELD_NUMBER: _ClassVar[int]
    change: WhitelistChange
    def __init__(self, change: _Optional[_Union[WhitelistChange, _Mapping]] = ...) -> None: ...

class WhitelistRow(_message.Message):
    __slots__ = ("match", "source", "destination", "traffic_class", "owner", "reason", "expires_unix_s")
    MATCH_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    DESTINATION_FIELD_NUMBER: _ClassVar[int]
    TRAFFIC_CLASS_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_UNIX_S_FIELD_NUMBER: _ClassVar[int]
    match: _common_pb2.Match
    source: str
    destination: str
    traffic_class: str
    owner: str
    reason: str
    expires_unix_s: float
    def __init__(self, match: _Optional[_Union[_common_pb2.Match, str]] = ..., source: _Optional[str] = ..., destination: _Optional[str] = ..., traffic_class: _Optional[str] = ..., owner: _Optional[str] = ..., reason: _Optional[str] = ..., expires_unix_s: _Optional[float] = ...) -> None: ...

class ListWhitelistRequest(_message.Message):
    __slots__ = ("device", "page_size", "page_token", "netns")
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    NETNS_FIELD_NUMBER: _ClassVar[int]
    device: str
    page_size: int
    page_token: str
    netns: str
    def __init__(self, device: _Optional[str] = ..., page_size: _Optional[int] = ..., page_token: _Optional[str] = ..., netns: _Optional[str] = ...) -> None: ...

class ListWhitelistResponse(_message.Message):
    __slots__ = ("rows", "next_page_token", "generation", "total")
    ROWS_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    rows: _containers.RepeatedCompositeFieldContainer[WhitelistRow]
    next_page_token: str
    generation: int
    total: int
    def __init__(self, rows: _Optional[_Iterable[_Union[WhitelistRow, _Mapping]]] = ..., next_page_token: _Optional[str] = ..., generation: _Optional[int] = ..., total: _Optional[int] = ...) -> None: ...

class WatchWhitelistRequest(_message.Message):
    __slots__ = ("device", "netns")
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    NETNS_FIELD_NUMBER: _ClassVar[int]
    device: str
    netns: str
    def __init__(self, device: _Optional[str] = ..., netns: _Optional[str] = ...) -> None: ...

class WatchWhitelistResponse(_message.Message):
    __slots__ = ("generation", "total", "unix_s")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    UNIX_S_FIELD_NUMBER: _ClassVar[int]
    generation: int
    total: int
    unix_s: float
    def __init__(self, generation: _Optional[int] = ..., total: _Optional[int] = ..., unix_s: _Optional[float] = ...) -> None: ...
