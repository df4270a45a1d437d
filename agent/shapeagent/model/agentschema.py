# SPDX-License-Identifier: Apache-2.0
"""The agent's configuration file, /etc/shapectl/agent.toml: its keys, checked as a whole.

Every error is found in one pass and named with its path and line.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Callable
from pathlib import PurePosixPath
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, PlainValidator, ValidationError
from pydantic_core import ErrorDetails, PydanticCustomError

from shapeagent.model.errors import InputError
from shapeagent.model.places import Path, find_places, say_at, say_not_toml
from shapeagent.model.units import parse_duration, parse_rate, parse_size

DEFAULT_CONFIG_PATH = "/etc/shapectl/agent.toml"
ROLES = ("observer", "operator", "admin")

_Value = TypeVar("_Value")
_TRUST_DOMAIN = re.compile(r"[a-z0-9._-]{1,255}")  # SPIFFE-ID, section 2.1
_DEVICE = re.compile(r"[^\s/]{1,15}")  # dev_valid_name(), net/core/dev.c
_GROUP = re.compile(r"[A-Za-z_][A-Za-z0-9_-]{0,31}")


def _refuse(reason: str) -> PydanticCustomError:
    return PydanticCustomError("value", "{reason}", {"reason": reason})


def _said(parse: Callable[[str], _Value], example: str) -> PlainValidator:
    """Return the validator of a text with a unit."""

    def validate(value: Any) -> _Value:
        if not isinstance(value, str):
            raise _refuse(f'{value!r} is not a text such as "{example}"')
        try:
            return parse(value)
        except InputError as error:
            raise _refuse(error.message) from None

    return PlainValidator(validate)


def _between(least: float, most: float, unit: str) -> AfterValidator:
    def validate(value: float) -> float:
        if not least <= value <= most:
            raise _refuse(f"{value:g} {unit} is not between {least:g} and {most:g} {unit}")
        return value

    return AfterValidator(validate)


def _one_of(*words: str) -> PlainValidator:
    def validate(value: Any) -> str:
        if value in words and isinstance(value, str):
            return value
        raise _refuse(f"{value!r} is not one of {', '.join(words)}")

    return PlainValidator(validate)


def _matching(pattern: re.Pattern[str], what: str) -> PlainValidator:
    def validate(value: Any) -> str:
        if isinstance(value, str) and pattern.fullmatch(value):
            return value
        raise _refuse(f"{value!r} is not {what}")

    return PlainValidator(validate)


def _path(value: Any) -> str:
    if not isinstance(value, str) or not PurePosixPath(value).is_absolute() or "\0" in value:
        raise _refuse(f"{value!r} is not an absolute path")
    return value


def _address(value: Any) -> tuple[str, int]:
    """Return (host, port) of `host:port` or `[v6]:port`."""
    found = re.fullmatch(r"(?:\[([0-9A-Fa-f:.%\w]+)\]|([^\s:\[\]]+)):(\d{1,5})", str(value))
    if not isinstance(value, str) or found is None or int(found[3]) > 65_535:
        raise _refuse(f'{value!r} is not an address such as "127.0.0.1:9911" or "[::1]:9911"')
    return found[1] or found[2], int(found[3])


_PathKey = Annotated[str, PlainValidator(_path)]
_AddressKey = Annotated[tuple[str, int], PlainValidator(_address)]
_GroupKey = Annotated[str, _matching(_GROUP, "the name of a group")]
_RoleKey = Annotated[str, _one_of(*ROLES)]


class _Table(BaseModel):
    """A table of the file: a key that we do not know is an error, a text is no number."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class AgentTable(_Table):
    """`[agent]`."""

    reconcile: Annotated[float, _said(parse_duration, "2s"), _between(0.2, 60, "s")] = 2.0
    on_exit: Annotated[str, _one_of("keep", "rollback")] = "keep"
    state_dir: _PathKey = "/var/lib/shapectl"
    run_dir: _PathKey = "/run/shapectl"
    bpffs_dir: _PathKey = "/sys/fs/bpf/shapectl"


class InterfaceTable(_Table):
    """One `[[interface]]`: what `shapectl attach` would be told."""

    device: Annotated[str, _matching(_DEVICE, "the name of an interface")]
    policy: _PathKey | None = None
    link_rate: Annotated[int, _said(parse_rate, "10gbit")] | None = None
    profile: Annotated[str, _one_of("htb", "prio", "edt", "police")] | None = None
    ingress: Annotated[str, _one_of("count", "police", "ifb")] = "count"
    hook: Annotated[str, _one_of("tcx", "clsact")] | None = None
    shadow: bool = False
    takeover: bool = False
    yes_management: bool = False


class SocketsTable(_Table):
    """`[sockets]`: the Unix sockets, one for each role."""

    folder: _PathKey = "/run/shapectl"
    operator_group: _GroupKey = "shapectl-operator"
    observer_group: _GroupKey = "shapectl"


class TcpTable(_Table):
    """`[tcp]`: gRPC over TCP, only with certificates on both sides."""

    address: _AddressKey
    certificate: _PathKey
    key: _PathKey
    client_ca: _PathKey
    trust_domain: Annotated[str, _matching(_TRUST_DOMAIN, "a SPIFFE trust domain")]
    roles: dict[str, _RoleKey] = Field(default_factory=dict)  # SPIFFE id → role


class MetricsTable(_Table):
    """`[metrics]`: where Prometheus scrapes."""

    address: _AddressKey = ("127.0.0.1", 9911)
    certificate: _PathKey | None = None
    key: _PathKey | None = None
    users: _PathKey | None = None  # NAME:HASH lines


class AuditTable(_Table):
    """`[audit]`."""

    path: _PathKey = "/var/log/shapectl/audit.jsonl"
    max_size: Annotated[int, _said(parse_size, "64MiB"), _between(1 << 16, 1 << 32, "B")] = 64 << 20
    keep: Annotated[int, _between(1, 1_000, "files")] = 8


class AgentConfig(_Table):
    """The whole file."""

    agent: AgentTable = AgentTable()
    interface: tuple[InterfaceTable, ...] = ()
    sockets: SocketsTable = SocketsTable()
    tcp: TcpTable | None = None
    metrics: MetricsTable | None = MetricsTable()
    audit: AuditTable = AuditTable()


def load_agent_config(text: str, source: str) -> AgentConfig:
    """Return the configuration that a text says.

    Args: source: its path, for messages.
    Raises: InputError agent-config-invalid; `details`: every error with path and line.
    """
    text = text.removeprefix("\ufeff")
    try:
        data = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise _invalid(source, [say_not_toml(error)]) from None
    if isinstance(data.get("interface"), list):
        data["interface"] = tuple(data["interface"])
    places = find_places(text)
    try:
        config = AgentConfig.model_validate(data)
    except ValidationError as error:
        details = error.errors(include_url=False)
        problems = [(_clean(one["loc"]), _in_words(one)) for one in details]
        raise _invalid(source, _sorted(problems, places)) from None
    problems = list(_cross_checks(config))
    if problems:
        raise _invalid(source, _sorted(problems, places))
    return config


def _cross_checks(config: AgentConfig) -> list[tuple[Path, str]]:
    problems: list[tuple[Path, str]] = []
    seen: dict[str, int] = {}
    for number, one in enumerate(config.interface):
        if one.device in seen:
            text = f"{one.device} has an [[interface]] already, number {seen[one.device] + 1}"
            problems.append((("interface", number, "device"), text))
        seen.setdefault(one.device, number)
    metrics = config.metrics
    if metrics is not None and (metrics.certificate is None) != (metrics.key is None):
        problems.append((("metrics",), "certificate and key go together"))
    if config.tcp is not None:
        domain = f"spiffe://{config.tcp.trust_domain}/"
        problems += [
            (("tcp", "roles", identity), f"is not an identity of {domain}…")
            for identity in config.tcp.roles
            if not identity.startswith(domain)
        ]
    return problems


def _clean(location: tuple[int | str, ...]) -> Path:
    return tuple(one for one in location if not str(one).startswith("function-"))


def _sorted(problems: list[tuple[Path, str]], places: dict[Path, int]) -> list[str]:
    return [text for _, text in sorted({say_at(*one, places) for one in problems})]


def _in_words(detail: ErrorDetails) -> str:
    kind = detail["type"]
    if kind == "missing":
        return "is missing"
    if kind == "extra_forbidden":
        near = difflib.get_close_matches(str(detail["loc"][-1]), _known_keys(detail["loc"][:-1]), 1)
        return "is not a known key" + (f'; did you mean "{near[0]}"?' if near else "")
    if kind in ("model_type", "model_attributes_type", "dict_type", "tuple_type"):
        return f"{detail['input']!r} is not a table"
    return detail["msg"]


def _known_keys(location: tuple[int | str, ...]) -> list[str]:
    tables: dict[str, type[_Table]] = {
        "agent": AgentTable,
        "interface": InterfaceTable,
        "sockets": SocketsTable,
        "tcp": TcpTable,
        "metrics": MetricsTable,
        "audit": AuditTable,
    }
    table = tables.get(str(location[0]), AgentConfig) if location else AgentConfig
    return list(table.model_fields)


def _invalid(source: str, details: list[str]) -> InputError:
    return InputError(
        "agent-config-invalid",
        f"{source} has {len(details)} error{'s' * (len(details) > 1)} and was not used.",
        hint="shapectl agent check FILE lists every error; docs/agent.md has an example",
        details=details,
    )
