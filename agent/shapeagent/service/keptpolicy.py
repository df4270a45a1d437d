# SPDX-License-Identifier: Apache-2.0
"""The policy in force as it was resolved, beside its text: it is not validated a second time.

Reading the TOML text again needs pydantic, which takes 70 ms to load. The
first line is a digest over everything that decides the result: text, source,
link rate, the code that reads policies, and the lines below it. Where it does
not agree, the file counts for nothing, and the text is read.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
import os
import sys
from pathlib import Path
from typing import Any

from shapeagent.model import types
from shapeagent.model.types import (
    Budget,
    Direction,
    Policy,
    PortSide,
    Rule,
    RuleKind,
    TrafficClass,
)
from shapeagent.service.documents import load_policy_text

FILE_NAME = "policy.resolved"
_MODEL_DIR = Path(types.__file__).parent
#: From a policy's text to a `Policy`: with any of them the result may be another.
_CODE = (
    *(_MODEL_DIR / f"{name}.py" for name in ("schema", "places", "types", "units")),
    Path(__file__),
)


def policy_of(folder: Path, text: str, source: str, link_rate_bits_per_s: int) -> Policy:
    """Return the policy of a text, from what is kept in the folder where that fits.

    Raises: as `load_policy_text`.
    """
    kept = _read_kept(folder, text, source, link_rate_bits_per_s)
    return kept or load_policy_text(text, source, link_rate_bits_per_s)


def renew(folder: Path, text: str, source: str, link_rate_bits_per_s: int) -> None:
    """Keep the policy of a text where it is not kept yet; hold the lock.

    Where that is not possible it costs the next command its time, and no more.

    Raises: as `load_policy_text`.
    Effects: `policy.resolved` in the folder, 0600.
    """
    if _read_kept(folder, text, source, link_rate_bits_per_s) is not None:
        return
    body = encode(load_policy_text(text, source, link_rate_bits_per_s))
    if _CODE_DIGEST is None or _digest_of_code() != _CODE_DIGEST:
        return  # the files were replaced meanwhile: who knows which of them are loaded
    temporary = folder / f".{FILE_NAME}.{os.getpid()}"
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with open(descriptor, "w", encoding="ascii") as stream:
            stream.write(f"{_digest(text, source, link_rate_bits_per_s, body)}\n{body}")
        temporary.rename(folder / FILE_NAME)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink()


def _read_kept(folder: Path, text: str, source: str, link_rate_bits_per_s: int) -> Policy | None:
    """Return the policy that is kept for exactly this, None where the text must be read again."""
    try:
        found = (folder / FILE_NAME).read_text(encoding="ascii")
    except (OSError, ValueError):
        return None
    digest, _, body = found.partition("\n")
    if _CODE_DIGEST is None or digest != _digest(text, source, link_rate_bits_per_s, body):
        return None
    return decode(body, text)


def _digest_of_code() -> bytes | None:
    digest = hashlib.sha256(sys.version.encode())
    try:
        for path in _CODE:
            digest.update(hashlib.sha256(path.read_bytes()).digest())
    except OSError:
        return None  # installed without its sources
    return digest.digest()


_CODE_DIGEST = _digest_of_code()  # before any of it is loaded later than this


def _digest(text: str, source: str, link_rate_bits_per_s: int, body: str) -> str:
    digest = hashlib.sha256(_CODE_DIGEST or b"")
    for part in (text, source, str(link_rate_bits_per_s), body):
        digest.update(hashlib.sha256(part.encode("utf-8", "surrogatepass")).digest())
    return digest.hexdigest()


def encode(policy: Policy) -> str:
    """Return a policy as JSON, without its text."""
    plain = dataclasses.asdict(policy)
    del plain["text"]
    return json.dumps(plain)


@functools.lru_cache(maxsize=8)
def decode(body: str, text: str) -> Policy:
    """Return the policy that `encode` wrote. Raises: KeyError, TypeError, ValueError."""
    raw: dict[str, Any] = json.loads(body)
    classes, rules = raw.pop("classes"), raw.pop("rules")
    return Policy(
        classes=tuple(map(_class, classes)), rules=tuple(map(_rule, rules)), text=text, **raw
    )


def _class(raw: dict[str, Any]) -> TrafficClass:
    budget = raw.pop("budget")
    return TrafficClass(budget=None if budget is None else Budget(**budget), **raw)


def _rule(raw: dict[str, Any]) -> Rule:
    direction = raw.pop("direction")
    return Rule(
        kind=RuleKind(raw.pop("kind")),
        direction=None if direction is None else Direction(direction),
        protocols=tuple(raw.pop("protocols")),
        side=PortSide(raw.pop("side")),
        ports=tuple((first, last) for first, last in raw.pop("ports")),
        dscp=tuple(raw.pop("dscp")),
        **raw,
    )
