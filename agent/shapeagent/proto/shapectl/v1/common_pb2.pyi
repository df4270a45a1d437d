# SPDX-License-Identifier: Apache-2.0
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class Direction(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DIRECTION_UNSPECIFIED: _ClassVar[Direction]
    DIRECTION_EGRESS: _ClassVar[Direction]
    DIRECTION_INGRESS: _ClassVar[Direction]

class Profile(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PROFILE_UNSPECIFIED: _ClassVar[Profile]
    PROFILE_HTB: _ClassVar[Profile]
    PROFILE_PRIO: _ClassVar[Profile]
    PROFILE_EDT: _ClassVar[Profile]
    PROFILE_POLICE: _ClassVar[Profile]

class IngressMode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    INGRESS_MODE_UNSPECIFIED: _ClassVar[IngressMode]
    INGRESS_MODE_COUNT: _ClassVar[IngressMode]
    INGRESS_MODE_POLICE: _ClassVar[IngressMode]
    INGRESS_MODE_IFB: _ClassVar[IngressMode]

class Hook(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    HOOK_UNSPECIFIED: _ClassVar[Hook]
    HOOK_TCX: _ClassVar[Hook]
    HOOK_CLSACT: _ClassVar[Hook]

class Match(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    MATCH_UNSPECIFIED: _ClassVar[Match]
    MATCH_SOURCE: _ClassVar[Match]
    MATCH_DESTINATION: _ClassVar[Match]
    MATCH_EITHER: _ClassVar[Match]
    MATCH_PAIR: _ClassVar[Match]
DIRECTION_UNSPECIFIED: Direction
DIRECTION_EGRESS: Direction
DIRECTION_INGRESS: Direction
PROFILE_UNSPECIFIED: Profile
PROFILE_HTB: Profile
PROFILE_PRIO: Profile
PROFILE_EDT: Profile
PROFILE_POLICE: Profile
INGRESS_MODE_UNSPECIFIED: IngressMode
INGRESS_MODE_COUNT: IngressMode
INGRESS_MODE_POLICE: IngressMode
INGRESS_MODE_IFB: IngressMode
HOOK_UNSPECIFIED: Hook
HOOK_TCX: Hook
HOOK_CLSACT: Hook
MATCH_UNSPECIFIED: Match
MATCH_SOURCE: Match
MATCH_DESTINATION: Match
MATCH_EITHER: Match
MATCH_PAIR: Match

class ErrorDetail(_message.Message):
    __slots__ = ("reference", "message", "hint", "details", "exit_code")
    REFERENCE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    HINT_FIELD_NUMBER: _ClassVar[int]
    DETAILS_FIELD_NUMBER: _ClassVar[int]
    EXIT_CODE_FIELD_NUMBER: _ClassVar[int]
    reference: str
    message: str
    hint: str
    details: _containers.RepeatedScalarFieldContainer[str]
    exit_code: int
    def __init__(self, reference: _Optional[str] = ..., message: _Optional[str] = ..., hint: _Optional[str] = ..., details: _Optional[_Iterable[str]] = ..., exit_code: _Optional[int] = ...) -> None: ...
