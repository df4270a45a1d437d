# SPDX-License-Identifier: Apache-2.0
"""The engine's dataclasses as messages of the API, and back: both sides use the same rules.

A field of a message has the name of the dataclass's. Where a text is one of a
few words, the message has an enum, whose names are those words.
"""

from __future__ import annotations

import dataclasses
import functools
import types
import typing
from collections.abc import Mapping
from enum import Enum
from typing import Any, TypeVar

from google.protobuf.descriptor import EnumDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

_M = TypeVar("_M", bound=Message)
_T = TypeVar("_T")

#: What a dataclass says where an enum is unspecified: an attachment that cannot be read.
UNKNOWN = "unknown"


def to_message(value: Any, message_type: type[_M]) -> _M:
    """Return a dataclass as a message; None leaves a field unset."""
    message = message_type()
    fields = message.DESCRIPTOR.fields_by_name
    for one in dataclasses.fields(value):
        found = getattr(value, one.name)
        if found is not None:
            _put(message, fields[one.name], found)
    return message


def _put(message: Message, field: Any, value: Any) -> None:
    target = getattr(message, field.name)
    if isinstance(value, Mapping):
        _put_map(target, field, value)
    elif isinstance(value, tuple | list):
        if field.message_type is None:
            target.extend(value)
        else:
            for one in value:
                target.add().CopyFrom(_inner(field, one))
    elif field.message_type is not None:
        target.CopyFrom(_inner(field, value))
    elif field.enum_type is not None:
        setattr(message, field.name, word_number(field.enum_type, str(value)))
    else:
        setattr(message, field.name, value)


def _inner(field: Any, value: Any) -> Message:
    message_type: type[Message] = GetMessageClass(field.message_type)
    return to_message(value, message_type)


def _put_map(target: Any, field: Any, value: Mapping[str, Any]) -> None:
    inner = field.message_type.fields_by_name["value"].message_type
    for key, item in value.items():
        if inner is None:
            target[key] = item
        else:  # a map of maps: the inner message has one field
            getattr(target[key], inner.fields[0].name).update(item)


def from_message(message: Message, wanted: type[_T]) -> _T:
    """Return the dataclass of a message; what it does not know of takes its default."""
    values: dict[str, Any] = {}
    known = message.DESCRIPTOR.fields_by_name
    for name, hint in _hints(typing.cast(Any, wanted)).items():
        field = known.get(name)
        if field is None:
            continue
        if field.has_presence and field.message_type is None and not message.HasField(name):
            values[name] = None
            continue
        values[name] = _value(field, getattr(message, name), hint)
    return wanted(**values)


@functools.lru_cache(maxsize=64)
def _hints(wanted: Any) -> dict[str, Any]:
    return typing.get_type_hints(wanted)


def _value(field: Any, value: Any, hint: Any) -> Any:
    hint = _without_none(hint)
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        inner = field.message_type.fields_by_name["value"].message_type
        if inner is None:
            return dict(value)
        return {key: dict(getattr(item, inner.fields[0].name)) for key, item in value.items()}
    if field.is_repeated:
        inner_hint = typing.get_args(hint)[0]
        if field.message_type is None:
            return tuple(value)
        return tuple(from_message(one, inner_hint) for one in value)
    if field.message_type is not None:
        return from_message(value, hint)
    if field.enum_type is not None:
        word = number_word(field.enum_type, value) or UNKNOWN
        return hint(word) if isinstance(hint, type) and issubclass(hint, Enum) else word
    return value


def _without_none(hint: Any) -> Any:
    if isinstance(hint, types.UnionType):
        return next(one for one in typing.get_args(hint) if one is not types.NoneType)
    return hint


def word_number(enum: EnumDescriptor, word: str) -> int:
    """Return the number of a word in an enum, 0 (unspecified) where it is none of its."""
    found = enum.values_by_name.get(_prefix(enum) + word.upper().replace("-", "_"))
    return 0 if found is None else found.number


def number_word(enum: EnumDescriptor, number: int) -> str | None:
    """Return the word of a number in an enum, None where it is unspecified or not known."""
    found = enum.values_by_number.get(number)
    if found is None or number == 0:
        return None
    return found.name.removeprefix(_prefix(enum)).lower()


@functools.lru_cache(maxsize=64)
def _prefix(enum: EnumDescriptor) -> str:
    return enum.values_by_number[0].name.removesuffix("UNSPECIFIED")
